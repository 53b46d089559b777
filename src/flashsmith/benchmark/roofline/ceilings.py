"""Ceiling and Roofline: what was measured of a GPU, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from flashsmith.benchmark.json_numbers import from_json
from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted

Unit = Literal["TFLOP/s", "Gop/s", "TB/s"]
KIND = "flashsmith roofline"
SCHEMA = 1
# Of one unit in plain operations or bytes per second.
SCALE: dict[Unit, float] = {"TFLOP/s": 1e12, "Gop/s": 1e9, "TB/s": 1e12}


@dataclass(frozen=True)
class Ceiling:
    """One thing a GPU was measured at.

    rate: in `unit`, None where it was not measured, and `note` says why. ms: median time of a
    launch; spread: interquartile range over it. sm_clock_mhz and power_w: while it ran, None
    without NVML. per_sm_clock: operations or bytes per SM and clock cycle, None without a clock.
    error: the largest error of the same kernel's checked run, relative to the results' size.
    wrong: whether that check failed, or the kernel did.
    """

    key: str
    unit: Unit
    rate: float | None = None
    ms: float | None = None
    spread: float | None = None
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    per_sm_clock: float | None = None
    error: float | None = None
    wrong: bool = False
    note: str = ""


@dataclass(frozen=True)
class Roofline:
    """All ceilings of one GPU. `environment` is that of the measurement, `time` its date (ISO)."""

    gpu: str
    arch: int
    sm_count: int
    time: str
    environment: dict[str, Any]
    ceilings: tuple[Ceiling, ...]

    def ceiling(self, key: str) -> Ceiling | None:
        """The ceiling of that key, measured or not; None when there is none of that name."""
        return next((ceiling for ceiling in self.ceilings if ceiling.key == key), None)

    def rate(self, key: str) -> float | None:
        """The rate in the ceiling's unit, None where it was not measured."""
        ceiling = self.ceiling(key)
        return ceiling.rate if ceiling else None

    def per_second(self, key: str) -> float | None:
        """The rate in plain FLOP, operations or bytes per second."""
        ceiling = self.ceiling(key)
        if ceiling is None or ceiling.rate is None:
            return None
        return ceiling.rate * SCALE[ceiling.unit]

    @property
    def ok(self) -> bool:
        """Whether nothing that was measured was wrong."""
        return not any(ceiling.wrong for ceiling in self.ceilings)

    def to_json(self) -> dict[str, Any]:
        return {"kind": KIND, "schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, value: Any) -> Roofline:
        """What to_json() wrote; fields of later versions are passed over.

        Raises ArgumentError when it is something else.
        """
        try:
            if value["schema"] != SCHEMA:
                raise ArgumentError(
                    f"roofline: schema {quoted(value['schema'])} is not this version's ({SCHEMA}); "
                    "measure again with 'flashsmith roofline'"
                )
            ceilings = tuple(_ceiling(found) for found in value["ceilings"])
            if unknown := [c.unit for c in ceilings if c.unit not in get_args(Unit)]:
                raise ArgumentError(
                    f"roofline: unit {quoted(unknown[0])} is none of {', '.join(get_args(Unit))}"
                )
            return cls(
                **{name: value[name] for name in ("gpu", "arch", "sm_count", "time")},
                environment=dict(value["environment"]),
                ceilings=ceilings,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"roofline: not what 'flashsmith roofline' wrote: {quoted(error)}"
            ) from error


_WORDS = ("key", "unit", "wrong", "note")


def _ceiling(found: dict[str, Any]) -> Ceiling:
    known = {field.name for field in fields(Ceiling)} & set(found)
    values: dict[str, Any] = {
        name: found[name] if name in _WORDS else from_json(found[name]) for name in known
    }
    return Ceiling(**values)
