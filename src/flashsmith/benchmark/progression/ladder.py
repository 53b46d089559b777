"""Ladder: kernels in the order of their steps, with what each costs and does, and its JSON."""

from __future__ import annotations

import math
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from flashsmith.benchmark.records import checked_fields
from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted

KIND = "flashsmith progression"
SCHEMA = 1
# Of a picture that can be looked at.
MOST_STEPS = 200
# No launch is shorter, in milliseconds; what is divided by a time stays finite.
SHORTEST = 1e-12


@dataclass(frozen=True)
class StepTime:
    """What the timed launches took, milliseconds; `peer_ms` is the peer's in the same run.

    FLOP are 4 b h s_q s_k d. `spread` is the interquartile range over the median.
    """

    ms: float
    best_ms: float
    spread: float
    tflops: float
    peer_ms: float | None

    @property
    def share(self) -> float | None:
        """Throughput over the peer's; None without a peer."""
        return None if self.peer_ms is None else self.peer_ms / self.ms


@dataclass(frozen=True)
class Step:
    """One kernel of the ladder.

    `problems` says what is wrong, empty for a right kernel. Registers and spilled bytes are per
    thread. `instructions` are executed warp instructions by class; `conflicts` wavefronts over
    their ideal number by use of shared memory, None where there was no such use; both are of the
    length `counted_seq` (0 in ladders of before there were several).
    """

    config: str
    family: str
    problems: tuple[str, ...]
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    smem_bytes: int
    ctas_per_sm: int
    instructions: dict[str, int] | None
    conflicts: dict[str, float | None]
    time: StepTime | None
    counted_seq: int = 0

    @property
    def ok(self) -> bool:
        """Whether the kernel is right."""
        return not self.problems

    @property
    def total_instructions(self) -> int | None:
        """Warp instructions of all classes; None for a kernel that did not end."""
        return None if self.instructions is None else sum(self.instructions.values())


@dataclass(frozen=True)
class Ladder:
    """All steps. `counted` is the problem that instructions and conflicts are of.

    `timed` is the problem of the times, None without a GPU. `peer` names the contender that
    shares are of, and `peer_note` says why there is none. `environment` is what a row of a
    benchmark carries: GPU, driver, versions, revision.
    """

    arch: str
    device: str
    counted: str
    timed: str | None
    peer: str
    peer_note: str
    protocol: str
    environment: dict[str, Any]
    steps: tuple[Step, ...]

    @property
    def ok(self) -> bool:
        """Whether every kernel is right."""
        return all(step.ok for step in self.steps)

    @property
    def has_times(self) -> bool:
        """Whether any step was timed."""
        return any(step.time for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        return {"kind": KIND, "schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Ladder:
        """The ladder that to_json() wrote.

        Raises ArgumentError for another schema, and for a field that is missing or of no use.
        """
        if data.get("kind") != KIND or data.get("schema") != SCHEMA:
            raise ArgumentError(
                f"kind={quoted(data.get('kind'))}, schema={quoted(data.get('schema'))}: this "
                "version reads "
                f"{KIND!r}, schema {SCHEMA}; run 'flashsmith progression' again"
            )
        listed = data.get("steps")
        if not isinstance(listed, list) or not 0 < len(listed) <= MOST_STEPS:
            raise ArgumentError(f"the ladder: steps must be a list of 1 to {MOST_STEPS}")
        steps = tuple(_step(number, step) for number, step in enumerate(listed, 1))
        try:
            return cls(**checked_fields(cls, data, _PLAIN_FIELDS), steps=steps)
        except ValueError as error:
            raise ArgumentError(f"the ladder: {error}") from error


def _step(number: int, data: Any) -> Step:
    try:
        if isinstance(data, dict):
            data = _DEFAULTS_OF_A_STEP | data
        found = checked_fields(Step, data, _PLAIN_FIELDS_OF_A_STEP)
        negative = [name for name, value in found.items() if type(value) is int and value < 0]
        if negative:
            raise ValueError(f"{negative[0]} is {found[negative[0]]}, below 0")
        return Step(**found, time=_time(data.get("time")))
    except ValueError as error:
        raise ArgumentError(f"step {number} of the ladder: {error}") from error


def _time(data: Any) -> StepTime | None:
    if data is None:
        return None
    found = checked_fields(StepTime, data)
    for name, value in found.items():
        least = 0.0 if name == "spread" else SHORTEST
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"{name} is {value:g}, not finite and above 0")
    return StepTime(**found)


_PLAIN_FIELDS = tuple(field.name for field in fields(Ladder) if field.name != "steps")
_PLAIN_FIELDS_OF_A_STEP = tuple(field.name for field in fields(Step) if field.name != "time")
# What ladders of before did not have.
_DEFAULTS_OF_A_STEP = {f.name: f.default for f in fields(Step) if f.default is not MISSING}
