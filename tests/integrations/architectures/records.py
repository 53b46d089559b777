"""What the sweep has found, kept in recorded.json and listed in docs/log/architectures.md."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("recorded.json")


class Records(NamedTuple):
    """``outcomes``: by architecture, and by scenario, 'kind' or 'kind: why'."""

    transformers: str
    outcomes: dict[str, dict[str, str]]


def read() -> Records:
    """A line of the file has an architecture's scenarios by outcome."""
    found = json.loads(FILE.read_text())
    outcomes = {
        name: {
            scenario: outcome
            for outcome, scenarios in by_outcome.items()
            for scenario in scenarios.split(" ")
        }
        for name, by_outcome in found["architectures"].items()
    }
    return Records(found["transformers"], outcomes)


def write(records: Records) -> None:
    lines = []
    for name, outcomes in sorted(records.outcomes.items()):
        by_outcome = defaultdict(list)
        for scenario, outcome in outcomes.items():
            by_outcome[outcome].append(scenario)
        joined = {outcome: " ".join(scenarios) for outcome, scenarios in by_outcome.items()}
        lines.append(f"{json.dumps(name)}: {json.dumps(joined)}")
    head = f'{{"transformers": {json.dumps(records.transformers)}, "architectures": {{\n'
    FILE.write_text(head + ",\n".join(lines) + "\n}}\n")


def kind(outcome: str) -> str:
    return outcome.partition(": ")[0]


def reason(outcome: str) -> str:
    """Why; of what is not run, which has a reason each, nothing."""
    return outcome.partition(": ")[2] if kind(outcome) != "not run" else ""


def by_kind(outcomes: Mapping[str, str]) -> dict[str, str]:
    return {scenario: kind(outcome) for scenario, outcome in outcomes.items()}
