"""Prints a table of winners."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from flashsmith.benchmark.table import make_columns, print_table
from flashsmith.chooser.winners.entry import time_of
from flashsmith.chooser.winners.table import WinnersTable

_COLUMNS = make_columns(
    "GPU | arch | class | problem~ | rank> | config | family | ms> | TFLOP/s> | measured | table"
)


def winner_facts(table: WinnersTable, own: WinnersTable, ranks: int) -> list[dict[str, Any]]:
    """Facts about the first ``ranks`` configs of every entry in ``table``. The facts include
    whether an entry is the user's own, which means that it is in ``own``."""
    places = {entry.place for entry in own}
    return [
        {
            **entry.key.to_json(),
            "problem": str(entry.problem),
            "rank": rank,
            "config": one.config,
            "family": one.family,
            "ms": one.ms,
            "tflops": one.tflops,
            "environment": dict(one.environment),
            "table": "yours" if entry.place in places else "shipped",
        }
        for entry in table
        for rank, one in enumerate(entry.ranked[:ranks], start=1)
    ]


def print_winners(console: Console, facts: list[dict[str, Any]]) -> None:
    """Prints the facts that winner_facts() returns, one config per row."""
    rows = [
        (
            fact["gpu"],
            f"sm_{fact['arch']}",
            fact["semantics"],
            fact["problem"],
            str(fact["rank"]),
            fact["config"],
            fact["family"],
            f"{fact['ms']:.4g}",
            f"{fact['tflops']:.0f}",
            time_of(fact["environment"]).partition("T")[0],
            fact["table"],
        )
        for fact in facts
    ]
    print_table(console, _COLUMNS, rows)
