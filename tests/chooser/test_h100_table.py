"""The table of winners of the H100: what it chooses there, and that it was measured to be worth
it."""

from __future__ import annotations

import csv
import gzip
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from plain_run import full_except

from flashsmith.chooser import choose
from flashsmith.chooser.batch_invariant import without_batch
from flashsmith.chooser.evidence import gather
from flashsmith.chooser.winners import Entry, WinnersTable
from flashsmith.families import Problem, device_spec

ROWS = Path(__file__).parents[2] / "benchmarks" / "h100" / "tables-in-turns.csv.gz"
H100 = device_spec("H100")
ENTRIES = list(WinnersTable.shipped().select("H100"))


FREE = [one for one in ENTRIES if without_batch(one.problem) != one.problem]


@pytest.mark.parametrize(
    "entry", full_except(ENTRIES, *ENTRIES[::4]), ids=lambda entry: str(entry.problem)
)
def test_an_h100_goes_by_its_own_table(entry: Entry) -> None:
    if entry in FREE:  # of a cache: split='free' asks for its own problem
        evidence = gather(entry.problem, H100, WinnersTable.shipped())
        assert (evidence.kind, str(evidence.expected[0].config)) == ("table", entry.best.config)
        assert "measured on H100" in evidence.why
        return
    choice = choose(entry.problem, H100)
    assert choice.evidence == "table"
    assert "measured on H100" in choice.why
    # A kernel that repeats its bits is taken where it costs next to nothing.
    assert choice.ms <= entry.best.ms * 1.03
    # An H200 has its own.
    assert "H100" not in choose(entry.problem, "H200").why


def test_what_it_has_no_entry_for_is_the_h200s() -> None:
    for problem in (
        "b16 s4096 h8 d192 fp16",
        "b16 s4096 h64 d32 bf16 causal",
        "b16 s4096 h16 d96 bf16 backward",
        "b16 s4096 h8 d256 fp16 backward causal",
    ):
        assert str(choose(problem, H100).config) == str(choose(problem, "H200").config)


def ratios() -> dict[tuple[str, ...], float]:
    """The time of the H200's choice over the H100's, the median of the rounds, by problem, whether
    it has to repeat its bits, how it splits keys, and both configs."""
    rounds: dict[tuple[str, ...], dict[str, dict[str, str]]] = defaultdict(dict)
    with gzip.open(ROWS, "rt") as file:
        for row in csv.DictReader(file):
            place = row["problem"], row["deterministic"], row["split"], row["round"]
            rounds[place][row["kernel"]] = row
    found: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for (*cell, _), of in rounds.items():
        before, after = of["without the table"], of["with the table"]
        pair = before["config"], after["config"]
        found[(*cell, *pair)].append(float(before["ms"]) / float(after["ms"]))
    return {cell: statistics.median(each) for cell, each in found.items()}


def test_no_choice_is_slower_than_the_h200s_in_turns() -> None:
    """Of each pair that took turns the table has the faster one, by the median of the rounds."""
    found = {cell: of for cell, of in ratios().items() if cell[2] != "invariant"}
    assert len(found) > 25
    for (problem, deterministic, split, before, after), ratio in found.items():
        if split:
            evidence = gather(Problem.parse(problem), H100, WinnersTable.shipped())
            choice = str(evidence.expected[0].config)
        else:
            choice = str(choose(problem, H100, deterministic=deterministic == "True").config)
        assert choice != (before if ratio > 1 else after), problem


def test_over_a_cache_it_has_its_own_kernel_where_that_is_slower_in_no_batch() -> None:
    kinds: dict[Problem, list[tuple[Any, ...]]] = defaultdict(list)
    for (problem, _, split, *configs), ratio in ratios().items():
        if split == "invariant":
            kinds[without_batch(Problem.parse(problem))].append((ratio, *configs))
    h200 = WinnersTable.shipped().select("H200")
    for entry in ENTRIES:
        if entry.problem.operation != "decode" or entry in FREE:
            continue
        cells = kinds.get(entry.problem, [])
        if len(cells) == 5 and all(ratio >= 1 for ratio, *_ in cells):
            ((_, config),) = {tuple(configs) for _, *configs in cells}
        else:  # also where the H200's has changed since: such an entry has to go
            config = str(choose(entry.problem, H100, table=h200).config)
        assert entry.best.config == config, entry.problem
    assert sum(len(cells) == 5 for cells in kinds.values()) > 20
