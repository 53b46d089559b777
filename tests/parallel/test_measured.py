"""docs/parallel.md's table of speeds is what the recorded rows say."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "benchmarks" / "h200" / "parallel.jsonl.gz"
# The run of the table, in which 'auto' is allgather.
RUN = 7
# It was measured again at these lengths.
LATER = {("auto", 8192): 11, ("auto", 32768): 10}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(ROWS.read_bytes()).splitlines()]


def efficiency(rows: list[dict[str, Any]], **columns: Any) -> str:
    """attention() on one GPU over twice the time on two: of the medians, and of the rounds."""

    seq, direction = columns["seq"], columns["direction"]
    run = LATER.get((columns["schedule"], seq), RUN)

    def found(what: str, **columns: Any) -> dict[str, Any]:
        columns |= {"what": what, "run": run, "batch": 1}
        (row,) = [row for row in rows if all(row.get(name) == it for name, it in columns.items())]
        return row

    alone = found("alone", seq=seq, direction=direction)
    call = found("call", ranks=2, **columns)
    by_round = [a / (2 * b) for a, b in zip(alone["rounds"], call["rounds"], strict=True)]
    middle = alone["ms"] / (2 * call["ms"])
    return f"{middle:.2f} ({min(by_round):.2f} to {max(by_round):.2f})"


@pytest.mark.parametrize("seq", [8192, 32768, 131072])
@pytest.mark.parametrize("direction", ["forward", "both"])
def test_the_table_is_of_the_recorded_rounds(
    rows: list[dict[str, Any]], seq: int, direction: str
) -> None:
    cells = [
        efficiency(rows, seq=seq, direction=direction, schedule=name)
        for name in ("zigzag", "ulysses", "auto")
    ]
    words = {"forward": "forward", "both": "with gradients"}[direction]
    line = f"| {seq} | {words} | {' | '.join(cells)} |"
    assert line in (ROOT / "docs" / "parallel.md").read_text()
