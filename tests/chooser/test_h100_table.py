"""The table of winners of the H100: what it chooses there, and that it was measured to be worth
it."""

from __future__ import annotations

import csv
import gzip
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from flashsmith.chooser import choose
from flashsmith.chooser.winners import Entry, WinnersTable
from flashsmith.families import device_spec

ROWS = Path(__file__).parents[2] / "benchmarks" / "h100" / "tables-in-turns.csv.gz"
H100 = device_spec("H100")
ENTRIES = list(WinnersTable.shipped().select("H100"))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: str(entry.problem))
def test_an_h100_goes_by_its_own_table(entry: Entry) -> None:
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
        "b16 s4096 h16 d96 bf16 causal",
        "b16 s4096 h8 d256 fp16",
        "b16 s4096 h8 d256 bf16",
        "b1 s1:4096 h32:8 d128 bf16 decode",
    ):
        assert str(choose(problem, H100).config) == str(choose(problem, "H200").config)


def test_no_choice_is_slower_than_the_h200s_in_turns() -> None:
    """Of each pair that took turns the table has the faster one, by the median of the rounds."""
    times: dict[tuple[str, str], dict[tuple[str, str], float]] = defaultdict(dict)
    with gzip.open(ROWS, "rt") as file:
        for row in csv.DictReader(file):
            cell = row["problem"], row["deterministic"]
            times[cell][row["round"], row["config"]] = float(row["ms"])
    assert len(times) > 10
    for (problem, deterministic), found in times.items():
        first, second = sorted({config for _, config in found})
        rounds = {number for number, _ in found}
        ratio = statistics.median(found[n, first] / found[n, second] for n in rounds)
        slower = first if ratio > 1 else second
        choice = choose(problem, H100, deterministic=deterministic == "True")
        assert str(choice.config) != slower, problem
