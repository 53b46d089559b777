#!/usr/bin/env python3
"""Compares the choices by a new table of winners for this GPU with those without it, launched
alternately.

    python tools/gpu/tables_in_turns.py rows.csv --table mine.json
    python tools/gpu/tables_in_turns.py rows.csv --table mine.json --settled settled.json
    python tools/gpu/tables_in_turns.py rows.csv --replays 'b16 s512 h16 d128 bf16 causal'

The table is for this GPU, and is not shipped yet. For each entry, the kernel chosen with it is
compared with the kernel chosen by the shipped tables of other GPUs; for the backward pass, also
with deterministic=True. If these differ, both are proven, and launched alternately in independent
rounds with the L2 flushed. There is a row for each kernel and round. The summary has the ratio of
each cell: the time without the table divided by the time with it. If it is above 1, the entry is
useful. It is given as the median over the rounds, with the interval that contains the true median
with a confidence of at least 95%.

--settled writes a corrected table. If an entry's winner is slower according to the rounds, it is
ranked after the other kernel, with the ratio from the rounds. No kernel that was not measured here
is ranked before these two.

Over a cache, one kernel serves all batches and lengths. So both kernels are compared on five sizes,
and the entry keeps its winner only if none of the five ratios is below 1. Other entries over a
cache are used only with split='free', and are compared on their own problem.

--replays is given problems instead of a table. It compares the kernels that rank first in the
tables, and the configs in --more (with the dtype of the problem), with cuDNN. A launch is then the
replay of a CUDA graph of one call, and a ratio is the time of cuDNN divided by that of the kernel.

The exit status is 1 if an output is wrong or, without --settled, if the interval of a cell is below
1.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flashsmith.benchmark.environment import Environment
from flashsmith.benchmark.implementations import captured, kernel_implementation
from flashsmith.benchmark.measurement import now
from flashsmith.benchmark.peers import PEERS
from flashsmith.benchmark.rounds import AlternatingRounds, Contender, PooledFigure, rounds_within
from flashsmith.benchmark.timing import CudaEvents, Protocol
from flashsmith.benchmark.workload import workload_of
from flashsmith.chooser import choose
from flashsmith.chooser.batch_invariant import adapt_to_queries, without_batch
from flashsmith.chooser.evidence import gather
from flashsmith.chooser.winners import Entry, RankedConfig, WinnersTable
from flashsmith.chooser.winners.staleness import sources_here
from flashsmith.families import (
    DeviceSpec,
    Problem,
    is_legal,
    parse_kernel_name_into_config,
    serves_gradients,
)
from flashsmith.families.gpu_names import same_gpu
from flashsmith.operations import DECODE
from flashsmith.pluralize import pluralize
from flashsmith.runtime import query_gpu
from flashsmith.tuning.sweep_problems import read_problems

WITHOUT, WITH, CUDNN = "without the table", "with the table", "cudnn"
# How many scores a proof computes; tune has already proven all rows.
SCORES = 1 << 20
WARM_UP_MS = 100.0
# Kernels whose expected or recorded time is above this multiple of the best are not replayed.
NEAR = 1.10
# Over a cache: numbers of sequences and of keys.
PLACES = ((1, 1024), (1, 8192), (8, 8192), (64, 1024), (64, 4096))
INVARIANT, FREE = "invariant", "free"


@dataclass(frozen=True)
class Cell:
    """A problem, and the kernels that are compared on it, by the names that they have in rows.

    `entry` is the entry by which one of the kernels is chosen; over a cache, for this `split`.
    """

    problem: Problem
    kernels: dict[str, Any]
    entry: Entry | None = None
    deterministic: bool = False
    split: str = ""

    def __str__(self) -> str:
        words = "deterministic" if self.deterministic else self.split and f"split={self.split!r}"
        return f"{self.problem}{f' ({words})' if words else ''}"


def cells_of(table: WinnersTable, shipped: WinnersTable, device: DeviceSpec) -> list[Cell]:
    """A cell for each choice that the entries of the table change on this device."""
    others = WinnersTable([one for one in shipped if not same_gpu(one.key.gpu, device.name)])
    # The new entries will be used together with those of other GPUs.
    updated = WinnersTable([*others, *table])
    found = []
    for entry in table:
        if not same_gpu(entry.key.gpu, device.name):
            continue
        if entry.problem.operation == DECODE.name:
            found += _over_a_cache(entry, others, updated, device)
            continue
        pairs = []
        for deterministic in (False, True):
            without, with_it = (
                choose(entry.problem, device, table=one, deterministic=deterministic).config
                for one in (others, updated)
            )
            if with_it != without and (without, with_it) not in pairs:
                pairs.append((without, with_it))
                kernels = {WITHOUT: without, WITH: with_it}
                found.append(Cell(entry.problem, kernels, entry, deterministic))
    return found


def _over_a_cache(
    entry: Entry, others: WinnersTable, updated: WinnersTable, device: DeviceSpec
) -> list[Cell]:
    """The cells for an entry over a cache; none if it changes no choice."""
    split = INVARIANT if entry.problem == without_batch(entry.problem) else FREE
    places = PLACES if split == INVARIANT else ((entry.problem.batch, entry.problem.seq_k),)
    before, after = (
        gather(entry.problem, device, table).expected[0].config for table in (others, updated)
    )
    if before == after:
        return []
    cells = []
    for batch, keys in places:
        problem = replace(entry.problem, batch=batch, seq_k=keys)
        kernels = {
            name: adapt_to_queries(config, problem, device)
            for name, config in ((WITHOUT, before), (WITH, after))
        }
        cells.append(Cell(problem, kernels, entry, split=split))
    return cells


def replayed(problem: Problem, device: DeviceSpec, more: Sequence[str]) -> Cell:
    """The configs that are near the best according to the tables, and those in ``more``."""
    expected = gather(problem, device, WinnersTable.merged()).expected
    least = min(one.ms for one in expected)
    configs = [one.config for one in expected if one.ms <= NEAR * least]
    for text in more:
        config = parse_kernel_name_into_config(text).with_knobs(dtype=problem.dtype)
        if is_legal(config, device) and serves_gradients(config, problem):
            configs.append(config)
    return Cell(problem, {str(config): config for config in configs})


def prepared(cell: Cell, *, replays: bool) -> tuple[list[Contender], dict[str, float], CudaEvents]:
    """The contenders, by their names in rows, the largest error of each, and a clock."""
    workload = workload_of(cell.problem)
    calls: dict[str, Any] = {
        name: kernel_implementation(config, workload) for name, config in cell.kernels.items()
    }
    if replays:
        calls[CUDNN] = PEERS[CUDNN].prepare(workload)
    errors: dict[str, float] = {}
    clock, ours = CudaEvents(), None

    def contender(name: str, launch: Callable[[], Any], output: Any) -> Contender:
        # Checked now, because the calls of the next contender may write to the same tensor.
        nonlocal ours
        proof = workload.check(output, SCORES, ours=ours if name == CUDNN else None)
        if name != CUDNN and not proof.reasons:
            ours = ours or proof
        errors[name] = proof.max_error
        return Contender(name, launch, lambda: "; ".join(proof.reasons))

    if not replays:
        made = [contender(name, call.launch, call.output()) for name, call in calls.items()]
        return made, errors, clock
    made = []
    for name, call in calls.items():
        graph, output = captured(name, [call], clock, workload.memory, least=1)
        made.append(contender(name, graph.launch, output))
    return made, errors, clock


def rounds_of(
    cell: Cell, rounds: int, *, replays: bool, until: float = math.inf
) -> Iterator[list[dict[str, Any]]]:
    """The rows of each round. The first round begins when the clock of the GPU has settled.

    Raises ValueError if an output is wrong, because there is nothing to compare then.
    """
    contenders, errors, clock = prepared(cell, replays=replays)
    turns = AlternatingRounds(contenders, clock)
    for name, why in turns.wrong.items():
        raise ValueError(f"{cell}: {name} is wrong: {why}")
    for number in rounds_within(until - time.monotonic(), rounds):
        samples = turns.round(
            Protocol(
                num_warmups=1,
                runs=3,
                warmup_ms=0.0 if number else WARM_UP_MS,
                measure_ms=20.0,
                num_estimates=1,
            )
        )
        yield [
            {
                "problem": str(cell.problem),
                "deterministic": cell.deterministic,
                "split": cell.split,
                "way": "replay" if replays else "launch",
                "round": number,
                "kernel": name,
                "config": str(cell.kernels.get(name, "")),
                "ms": f"{one.median_ms:.6f}",
                "launches": len(one.times_ms),
                "sm_clock_mhz": one.sm_clock_mhz,
                "max_error": errors[name],
                "csrc": sources_here(cell.kernels[name].FAMILY) if name in cell.kernels else "",
                "time": now(),
            }
            for name, one in samples.items()
        ]


def ratios(rows: Sequence[dict[str, Any]], over: str, under: str) -> list[float]:
    """For each round, the time of one kernel divided by that of another."""
    times: dict[tuple[int, str], float] = {
        (row["round"], row["kernel"]): float(row["ms"]) for row in rows
    }
    return [ms / times[n, under] for (n, kernel), ms in times.items() if kernel == over]


def settled(cell: Cell, rows: Sequence[dict[str, Any]]) -> Entry:
    """The entry of a cell, corrected by the ratio that these rounds give for its choice and the
    choice of the other tables.

    Kernels that were not measured here and would rank before the two are removed.
    """
    assert cell.entry is not None
    entry = cell.entry
    known = {one.config: one for one in entry.ranked}
    before, after = (str(cell.kernels[name]) for name in (WITHOUT, WITH))
    # The median of the ratios in the rounds decides, not the ratio of two medians. The times in the
    # entry were measured at another clock, so the choice of the other tables keeps its time.
    ratio = _median(rows, WITHOUT, WITH)
    if before in known:
        ms = {before: known[before].ms, after: known[before].ms / ratio}
    else:
        ms = {after: known.get(after, entry.best).ms}
        ms[before] = ms[after] * ratio
    flop = entry.problem.attn_flop()
    both = [
        RankedConfig(
            family=config.FAMILY,
            config=str(config),
            ms=ms[str(config)],
            tflops=flop / ms[str(config)] / 1e9,
            environment=known.get(str(config), entry.best).environment,
        )
        for config in cell.kernels.values()
    ]
    rest = [
        one
        for one in entry.ranked
        if one.config not in ms
        and (one.ms > min(ms.values()) or (cell.deterministic and not _repeats_its_bits(one)))
    ]
    return replace(entry, ranked=tuple(sorted([*both, *rest], key=lambda one: one.ms)))


def given_up(cell: Cell, standing: Entry) -> Entry | None:
    """The entry with the choice of the other tables in the first place.

    Its own choice, and kernels that were faster on its problem, are removed. None if the choice of
    the other tables is not in the entry.
    """
    before = str(cell.kernels[WITHOUT])
    ms = {one.config: one.ms for one in standing.ranked}
    if before not in ms:
        return None
    after = str(cell.kernels[WITH])
    rest = [one for one in standing.ranked if one.config != after and one.ms >= ms[before]]
    return replace(standing, ranked=tuple(sorted(rest, key=lambda one: one.config != before)))


def _repeats_its_bits(one: RankedConfig) -> bool:
    config = parse_kernel_name_into_config(one.config)
    return config.family.is_deterministic(config)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", type=Path, help="the CSV file to write; overwritten")
    parser.add_argument("--table", type=Path, help="a table of this GPU")
    parser.add_argument("--settled", type=Path, help="write the corrected table to this file")
    parser.add_argument("--replays", help="problems, instead of --table")
    parser.add_argument("--more", default="", help="configs for --replays, separated by ';'")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=math.inf, help="time limit for all cells")
    options = parser.parse_args(arguments)
    if (options.table is None) == (options.replays is None):
        parser.error("give --table or --replays")
    if options.settled is not None and options.table is None:
        parser.error("--settled needs --table")
    return options


def _table_and_cells(options: argparse.Namespace) -> tuple[WinnersTable, list[Cell]]:
    """The table to correct, which is empty with --replays, and the cells to measure."""
    device = query_gpu(0)
    if options.table is None:
        more = [text for text in options.more.split(";") if text.strip()]
        cells = [replayed(one, device, more) for one in read_problems(options.replays)]
        return WinnersTable(), cells
    table = WinnersTable.load(options.table)
    cells = cells_of(table, WinnersTable.shipped(), device)
    same = len({entry.place for entry in table} - {c.entry.place for c in cells if c.entry})
    print(
        f"{pluralize(len(cells), 'choice')} changed; {same} of {len(table)} entries change none",
        flush=True,
    )
    return table, cells


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    end = time.monotonic() + options.seconds
    table, cells = _table_and_cells(options)
    replays, wrong, below = options.table is None, 0, 0
    # Cells of batch-invariant entries that have not confirmed the winner yet, or that do not
    # confirm it.
    unproven = [cell for cell in cells if cell.split == INVARIANT]
    environment = {
        name: value
        for name, value in asdict(Environment.collect(0)).items()
        if name in ("gpu", "driver", "cuda", "torch")
    }
    try:
        with options.csv.open("w", newline="") as file:
            writer = None
            for place, cell in enumerate(cells):
                began = time.monotonic()
                if began >= end:
                    print(f"no time for {len(cells) - place} more", flush=True)
                    break
                until = began + (end - began) / (len(cells) - place)
                rows: list[dict[str, Any]] = []
                try:
                    for found in rounds_of(cell, options.rounds, replays=replays, until=until):
                        rows += found
                        for row in found:
                            writer = writer or csv.DictWriter(file, [*row, *environment])
                            if file.tell() == 0:
                                writer.writeheader()
                            writer.writerow(row | environment)
                except ValueError as error:
                    wrong += 1
                    print(f"WRONG {error}", flush=True)
                    continue
                file.flush()
                below += _report(cell, rows, replays=replays)
                if cell.entry is None or _median(rows, WITHOUT, WITH) >= 1:
                    if cell in unproven:
                        unproven.remove(cell)
                elif cell.split != INVARIANT:
                    # If an entry has two cells, the second one begins with the result of the first.
                    standing = next(one for one in table if one.place == cell.entry.place)
                    table.put(settled(replace(cell, entry=standing), rows))
    finally:  # Also done after Ctrl-C, with the cells that are finished
        if options.settled is not None:
            for cell in unproven:
                _give_up(cell, table)
            table.save(options.settled)
    return 1 if wrong or (below and options.settled is None) else 0


def _give_up(cell: Cell, table: WinnersTable) -> None:
    standing = next((one for one in table if cell.entry and one.place == cell.entry.place), None)
    if standing is None:
        return
    entry = given_up(cell, standing)
    if entry is None:
        table.remove(standing)
    else:
        table.put(entry)


def _median(rows: Sequence[dict[str, Any]], over: str, under: str) -> float:
    return statistics.median(ratios(rows, over, under))


def _report(cell: Cell, rows: Sequence[dict[str, Any]], *, replays: bool) -> bool:
    """Prints the ratios of a cell. Returns whether the interval of a table is below 1."""
    print(f"{cell}", flush=True)
    over, names = (CUDNN, list(cell.kernels)) if replays else (WITHOUT, [WITH])
    high = 1.0
    for name in sorted(names, key=lambda name: -_median(rows, over, name)):
        found = ratios(rows, over, name)
        pooled = PooledFigure.of(found)
        high = pooled.high
        print(f"  {pooled:.4f}, {len(found)} rounds: {cell.kernels[name]}", flush=True)
    return not replays and high < 1


if __name__ == "__main__":
    sys.exit(main())
