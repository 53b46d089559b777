"""Writes contributions: files that contain the results of a sweep and a list of the results that
are still missing."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from flashsmith.benchmark.problems import PROBLEM_SETS
from flashsmith.chooser.winners import WinnersTable
from flashsmith.chooser.winners.storage import json_lines
from flashsmith.errors import ArgumentError
from flashsmith.families import DType, Problem
from flashsmith.printable import quoted
from flashsmith.tuning.race import RaceState
from flashsmith.tuning.sweep_problems import default_problems
from flashsmith.tuning.tune import SweepResult

# The head dimensions that a complete table has, each in both dtypes, full and causal.
REQUIRED_HEADS = (64, 128)
BUDGET = "2h"


def contributed_problems() -> list[Problem]:
    """Returns the problems of a contribution: the problems of the benchmarks, and the same problems
    with packed sequences."""
    other = (problem for name in ("heads", "packed") for problem in PROBLEM_SETS[name]())
    return list(dict.fromkeys((*default_problems(), *other)))


def check_contribution(path: Path) -> None:
    """Raises ArgumentError unless the file to send is a .zip that does not exist yet or that this
    command wrote."""
    if path.suffix != ".zip":
        raise ArgumentError(f"contribute={quoted(str(path))}: name a .zip file, such as a100.zip")
    if path.exists() and not _is_contribution(path):
        raise ArgumentError(
            f"contribute={quoted(str(path))}: exists, and is no contribution; name another file"
        )


def write_contribution(path: Path, out: Path, tuned: SweepResult) -> list[str]:
    """Writes the file to send from a sweep's folder ``out``: the table of the sweep's GPU, the
    ranking of every kernel, and a list of what is missing. Returns this list, one sentence each.

    Raises ArgumentError unless the sweep ran on one kind of GPU.
    """
    gpus = sorted(set(tuned.gpus))
    if len(gpus) != 1:
        raise ArgumentError(
            f"contribute={quoted(str(path))}: the sweep ran on {', '.join(gpus) or 'no GPU'}; a "
            "contribution is the table of one kind of GPU"
        )
    table = WinnersTable.load(out / "winners.json").select(gpus[0])
    missing = [*_missing(gpus[0], tuned.races, table)]
    staged = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(staged, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr(_MISSING, "".join(f"{line}\n" for line in missing))
            file.writestr("winners.json", json_lines(table.to_json()))
            file.writestr("ranking.csv", (out / "ranking.csv").read_bytes())
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)
    return missing


_MISSING = "missing.txt"


def _is_contribution(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as file:
            return _MISSING in file.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def _missing(gpu: str, races: list[RaceState], table: WinnersTable) -> Iterator[str]:
    if "mig" in gpu.lower().split():
        yield f"{gpu} is a MIG slice: measure a whole GPU"
    yield from table.validate()
    final = {_kind(state.problem) for state in races if state.ranked and state.decided}
    for d_head, dtype, causal in product(REQUIRED_HEADS, DType, (False, True)):
        if (d_head, dtype, causal) not in final:
            mask = "causal" if causal else "full"
            yield (
                f"d {d_head}, {dtype.name.lower()}, {mask}: no problem had a final; run again to "
                "continue"
            )


def _kind(problem: Problem) -> tuple[int, DType, bool]:
    return problem.d, problem.dtype, problem.semantics.causal
