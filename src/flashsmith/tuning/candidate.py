"""Candidate: one config's way through the race for one problem."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from flashsmith.benchmark.timing import Samples
from flashsmith.tuning.runner import Build, Compiled, Proof

# In the race; dropped before it was run; what its kernel did; slower than others; out of time.
Status = Literal["racing", "culled", "crash", "hang", "error", "wrong", "slower", "not reached"]


@dataclass
class Candidate:
    """What is known of a config on one problem.

    `reason` says why it is no longer racing. checked: its output passed the thorough proof; times:
    what was measured, by rung; origins: where and when, by rung.
    """

    build: Build
    status: Status = "racing"
    reason: str = ""
    compiled: Compiled | None = None
    proof: Proof | None = None
    checked: bool = False
    times: dict[int, Samples] = field(default_factory=dict)
    origins: dict[int, dict[str, Any]] = field(default_factory=dict)

    @cached_property
    def name(self) -> str:
        """The config's short form."""
        return str(self.build.config)

    @property
    def racing(self) -> bool:
        """Whether it may still win."""
        return self.status == "racing"

    @property
    def survived(self) -> bool:
        """Whether it did nothing wrong: it may win, or was slower."""
        return self.status in ("racing", "slower")

    def drop(self, status: Status, reason: str) -> None:
        """Takes it out of the race; what it did wrong first stays."""
        if self.survived:
            self.status, self.reason = status, reason

    def take(self, record: dict[str, Any]) -> None:
        """Takes over what a journal's record says about it."""
        if record["kind"] == "times":
            self.times[record["rung"]] = samples_from_json(record["times"])
            self.origins[record["rung"]] = record.get("origin", {})
        else:
            self.proof = Proof(**record["proof"])
            self.checked |= record["thorough"] and self.proof.ok


def samples_to_json(samples: Samples) -> dict[str, Any]:
    """What samples_from_json reads."""
    return asdict(samples)


def samples_from_json(record: dict[str, Any]) -> Samples:
    """The samples that samples_to_json wrote."""
    return Samples(**{**record, "times_ms": tuple(record["times_ms"])})
