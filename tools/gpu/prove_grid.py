#!/usr/bin/env python3
"""Proves the grid of cases for the operation of a family, on a GPU; a CSV row per case.

The grids are in tests/grids: proof_grid.py, backward_grid.py for the backward pass, and
decode_grid.py for kernels that read a cache.

    python tools/gpu/prove_grid.py rows.csv

With other options:

    rows.csv --seconds 500    # repeat until complete
    rows.csv --family wgmma   # Hopper kernels
    rows.csv --seconds 0      # builds kernels, proves nothing
    part3.csv --part 3/8 --workers 1    # one of eight
    rows.csv --family mma_sync_decode --processes 16    # small rows
    rows.csv --handful --workers 1    # under compute-sanitizer

Cases that already have a row are not proven again, so a run can be stopped at any time and
continued later. If PyTorch is installed, references are computed on the GPU. With --processes,
NumPy computes
them: small problems mostly take time on the host, and the threads of a process share one
interpreter. The exit status is 0 if all cases have a row and all rows are right, 1 if a row is
wrong, and 2 if rows are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import (
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
)
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

# The grids are among the tests.
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from grids.backward_grid import backward_grid, covering_backward_cases
from grids.decode_grid import (
    covering_decode_cases,
    decode_grid,
    watched_decode_cases,
)
from grids.proof_grid import FIRST_FAMILY, REFUSED_D, covering_cases, proof_grid

from flashsmith.builder import library_for
from flashsmith.errors import ArgumentError, FlashsmithError, LaunchError
from flashsmith.families import FAMILIES, DType, family_named
from flashsmith.operations import BACKWARD, DECODE, FORWARD
from flashsmith.runtime import forward, query_gpu
from flashsmith.runtime.libraries import loaded_kernels
from flashsmith.verify import prove
from flashsmith.verify.proof_inputs import numpy_dtype

FIGURES = ("max_error", "bound", "rel_l2", "lse_error", "row_max_error")
COLUMNS = ("case", "config", "semantics", "ok", *FIGURES, "said")
Row = dict[str, Any]
BUILDS_AT_ONCE = 4
# If a process has a CUDA context, a process that is forked from it cannot use the GPU.
START_METHOD = "spawn"
# The longest sequence under a sanitizer, which makes everything a hundred times slower.
SMALL = 512


def say(text: str) -> None:
    print(text, flush=True)


def finished_rows(path: Path) -> dict[str, Row]:
    """The rows in a file, by case; if the last line is incomplete, it is ignored."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        return {row["case"]: row for row in rows if row.get("said") is not None}


def build(cases: Iterable[Any], arch: int) -> None:
    """Compiles and loads all kernels that the cases need, several libraries at a time."""
    wanted: dict[Any, set[Any]] = {}
    for case in cases:
        wanted.setdefault(case.semantics, set()).add(case.config)
    jobs = max(1, len(os.sched_getaffinity(0)) // BUILDS_AT_ONCE)
    start = time.monotonic()
    with ThreadPoolExecutor(BUILDS_AT_ONCE) as pool:
        pending = {
            pool.submit(library_for, configs, arch=arch, semantics=semantics, jobs=jobs): semantics
            for semantics, configs in wanted.items()
        }
        for done in as_completed(pending):
            loaded_kernels.add(done.result())
            seconds = time.monotonic() - start
            say(f"{seconds:4.0f} s: built {len(done.result())} kernels, {pending[done]}")


def refused_rows(family: str) -> Iterator[Row]:
    """Rows for head dimensions that are not a multiple of 8, for which ArgumentError must be
    raised."""
    for dtype in DType:
        for d in REFUSED_D:
            q = np.zeros((1, 64, 1, d), numpy_dtype(dtype))
            config = family_named(family).proof_configs(dtype, 64 if d < 64 else 128)[0]
            try:
                forward(config, q, q, q)
                said = "was not refused"
            except ArgumentError as error:
                said = str(error)
            row = dict.fromkeys(COLUMNS, "")
            right = said.startswith("q: ") and str(d) in said and "multiple of 8" in said
            yield row | {"case": f"{dtype.name.lower()}, d{d}", "ok": right, "said": said}


# By operation: the grid, a small part that covers it, and the fields of which a sanitizer should
# see all values.
GRIDS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    FORWARD.name: (
        proof_grid, covering_cases,
        ("dtype", "d", "heads", "batch", "sinks", "semantics", "causal", "window", "schedule"),
    ),
    BACKWARD.name: (
        backward_grid, covering_backward_cases,
        ("dtype", "d", "heads", "batch", "sinks", "semantics", "mask", "dlse", "deterministic",
         "unneeded"),
    ),
    DECODE.name: (
        decode_grid, covering_decode_cases,
        ("dtype", "d", "group", "queries", "page", "sinks", "semantics", "append", "lengths_of",
         "split"),
    ),
}  # fmt: skip


def grid_of(family: str) -> Iterator[Any]:
    """The cases for the operation of a family."""
    cases: Iterator[Any] = GRIDS[family_named(family).operation][0](family)
    return cases


def handful(family: str = FIRST_FAMILY) -> list[Any]:
    """A few small cases for a sanitizer; the smallest are first, because its time may run out.

    Together they have all semantics, and all values of each field and knob. If the grid has few
    kernels, they have all of these, in one dtype. Over a cache, some longer cases are added.
    """
    operation = family_named(family).operation
    whole, covering, names = GRIDS[operation]

    def knobs(case: Any) -> set[tuple[str, Any]]:
        found = set(vars(case.config).items())
        if operation != FORWARD.name:
            found.add(("kernel", str(replace(case.config, dtype=DType.FP16))))
        return found

    def single_values(case: Any) -> set[tuple[str, Any]]:
        return {(name, getattr(case, name)) for name in names} | knobs(case)

    small = [case for case in covering(family) if max(case.lengths) <= SMALL]
    shown = set().union(*map(knobs, small))
    for case in whole(family):
        if max(case.lengths) <= SMALL and not knobs(case) <= shown:
            small.append(case)
            shown |= knobs(case)
    missing = set().union(*map(single_values, small))
    chosen: list[Any] = []
    while missing:
        best = max(small, key=lambda case: len(single_values(case) & missing))
        chosen.append(best)
        missing -= single_values(best)
    if operation == DECODE.name:
        chosen += watched_decode_cases(family)
    return sorted(chosen, key=lambda case: case.lengths[0] * case.lengths[1])


def part_of(text: str) -> slice:
    """The cases of one of several parts: '3/8' is every eighth case, beginning with the third.

    Raises argparse.ArgumentTypeError for other texts.
    """
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r}: give a part and the number of parts, as 3/8")
    return slice(int(number) - 1, None, int(count))


def prove_case(case: Any) -> Row:
    """Proves a case and returns its row.

    LaunchError is not caught, because the results of the GPU mean nothing after it.
    """
    row: Row = dict.fromkeys(COLUMNS, "")
    row |= {"case": str(case), "config": str(case.config), "semantics": str(case.semantics)}
    try:
        verdict = prove(case.config, **case.keywords(), backend="gpu")
    except LaunchError:
        # With several workers, another case that ran at the same time may be the cause.
        print(f"FAILED: {case}", file=sys.stderr)
        raise
    except FlashsmithError as error:
        return row | {"ok": False, "said": str(error)}
    values = {name: getattr(verdict, name) for name in FIGURES}
    figures = {name: "" if value is None else f"{value:.4g}" for name, value in values.items()}
    return row | figures | {"ok": verdict.ok, "said": "right" if verdict.ok else str(verdict)}


def same_inputs(case: Any) -> tuple[Any, ...]:
    # Each partial case has its own seed.
    own = str(case) if getattr(case, "partial", False) else ""
    return case.dtype, case.d, case.batch, case.heads, case.lengths, case.inputs, own


def prove_group(cases: list[Any], deadline: float) -> list[Row]:
    """Proves cases until the deadline. Returns their rows."""
    rows = []
    for case in cases:
        if time.monotonic() > deadline:
            break
        rows.append(prove_case(case))
    return rows


def begin_process(cases: list[Any], arch: int) -> None:
    """Initialises one of several processes that use the same GPU, and builds its libraries.

    NumPy computes the references, because small launches of many processes would wait for each
    other.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]
    with contextlib.redirect_stdout(io.StringIO()):
        build(cases, arch)


def processes(count: int, cases: list[Any], arch: int) -> Executor:
    """A pool of ``count`` processes which can prove the cases."""
    for library in ("OPENBLAS", "OMP", "MKL"):
        os.environ[f"{library}_NUM_THREADS"] = "1"
    context = multiprocessing.get_context(START_METHOD)
    return ProcessPoolExecutor(count, context, begin_process, (cases, arch))


class Run:
    """Proves cases in groups with equal inputs, and writes their rows."""

    def __init__(self, path: Path, known: Iterable[Row], deadline: float) -> None:
        self.deadline = deadline
        # The file is written again, because the last run may have left an incomplete line.
        whole = path.with_suffix(".tmp")
        self.file = whole.open("w", newline="")
        self.writer = csv.DictWriter(self.file, COLUMNS)
        self.writer.writeheader()
        self.writer.writerows(known)
        self.file.flush()
        whole.replace(path)
        self.start = self.told = time.monotonic()
        self.proven = self.wrong = 0

    def write(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.writer.writerow(row)
            self.proven += 1
            if not row["ok"]:
                self.wrong += 1
                print(f"WRONG: {row['case']}: {row['said']}", file=sys.stderr)
        self.file.flush()

    def tell(self, total: int) -> None:
        now = time.monotonic()
        if now - self.told > 10 or self.proven == total:
            self.told = now
            say(f"{now - self.start:4.0f} s: {self.proven} of {total}, {self.wrong} wrong")

    def run(self, cases: list[Any], pool: Executor, at_once: int) -> None:
        groups = [list(group) for _, group in groupby(cases, same_inputs)]
        if at_once > 1:
            # The longest groups come first, so that none of them begins last.
            groups.sort(key=lambda group: -group[0].lengths[0] * group[0].lengths[1])
        with pool:
            pending: list[Future[list[Row]]] = [
                pool.submit(prove_group, group, self.deadline) for group in groups
            ]
            try:
                for done in as_completed(pending):
                    self.write(done.result())
                    self.tell(len(cases))
            except LaunchError:
                pool.shutdown(cancel_futures=True)
                raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the CSV file to write or continue")
    parser.add_argument(
        "--workers", type=int, default=min(8, len(os.sched_getaffinity(0))), help="threads"
    )
    parser.add_argument(
        "--processes", type=int, default=0, help="processes to use instead of threads"
    )
    parser.add_argument("--seconds", type=float, default=900.0, help="stop cleanly after this time")
    parser.add_argument("--match", default="", help="only cases whose text contains this")
    parser.add_argument("--part", type=part_of, default="1/1", help="part of the cases, as 3/8")
    parser.add_argument("--handful", action="store_true", help="few small cases, for a sanitizer")
    parser.add_argument("--family", choices=FAMILIES, default=FIRST_FAMILY, help="kernel family")
    options = parser.parse_args()

    deadline = time.monotonic() + options.seconds
    known = finished_rows(options.out)
    grid = handful(options.family) if options.handful else grid_of(options.family)
    cases = [case for case in grid if options.match in str(case)][options.part]
    open_cases = [case for case in cases if str(case) not in known]
    say(f"{len(cases)} problems, {len(cases) - len(open_cases)} proven before")
    run = Run(options.out, known.values(), deadline)
    is_forward = family_named(options.family).operation == FORWARD.name
    refused = refused_rows(options.family) if is_forward else []
    run.write(row for row in refused if row["case"] not in known)
    if open_cases:
        arch = query_gpu(0).arch
        build(open_cases, arch)
        if options.processes:
            pool = processes(options.processes, open_cases, arch)
            run.run(open_cases, pool, options.processes)
        else:
            run.run(open_cases, ThreadPoolExecutor(options.workers), options.workers)

    run.file.close()
    rows = finished_rows(options.out)
    wrong = [row for row in rows.values() if row["ok"] != "True"]
    missing = sum(str(case) not in rows for case in cases)
    state = f"{missing} missing" if missing else "complete"
    say(f"{len(rows)} rows, {len(wrong)} wrong; {state}")
    return 1 if wrong else 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
