"""Ladder: kernels in the order of their steps, with what each costs and does, and its JSON."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from flashsmith.errors import ArgumentError

KIND = "flashsmith progression"
SCHEMA = 1


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
                f"kind={data.get('kind')!r}, schema={data.get('schema')!r}: this version reads "
                f"{KIND!r}, schema {SCHEMA}; run 'flashsmith progression' again"
            )
        try:
            steps = tuple(_step(number, step) for number, step in enumerate(data["steps"], 1))
            return cls(**_fields_of(cls, data), steps=steps)
        except (KeyError, TypeError) as error:
            raise ArgumentError(f"the ladder: {_why(error)}") from error


def _step(number: int, data: dict[str, Any]) -> Step:
    try:
        time = data["time"]
        return Step(
            **_fields_of(Step, data),
            problems=tuple(data["problems"]),
            time=None if time is None else StepTime(**_fields_of(StepTime, time)),
        )
    except (KeyError, TypeError) as error:
        raise ArgumentError(f"step {number} of the ladder: {_why(error)}") from error


def _why(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


# Fields that are built from their JSON, not taken as they are.
_BUILT = ("steps", "problems", "time")


def _fields_of(cls: Any, data: dict[str, Any]) -> dict[str, Any]:
    wanted = [f for f in fields(cls) if f.name not in _BUILT]
    return {f.name: data[f.name] for f in wanted if f.name in data or f.default is MISSING}
