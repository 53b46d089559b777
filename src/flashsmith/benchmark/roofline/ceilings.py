"""Ceiling and Roofline: what was measured of a GPU, as data."""

from __future__ import annotations

import math
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal

from flashsmith.benchmark.records import checked_fields
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
        if not isinstance(value, dict):
            raise _foreign(f"{quoted(value, 80)} is no object")
        if value.get("schema") != SCHEMA:
            raise ArgumentError(
                f"roofline: schema {quoted(value.get('schema'), 80)} is not this version's "
                f"({SCHEMA}); measure again with 'flashsmith roofline'"
            )
        listed = value.get("ceilings")
        if not isinstance(listed, list):
            raise _foreign("ceilings must be a list")
        ceilings = tuple(_ceiling(number, one) for number, one in enumerate(listed, 1))
        try:
            return cls(**checked_fields(cls, value, _FACTS), ceilings=ceilings)
        except ValueError as error:
            raise _foreign(str(error)) from error


_FACTS = tuple(field.name for field in fields(Roofline) if field.name != "ceilings")
_REQUIRED = {field.name for field in fields(Ceiling) if field.default is MISSING}


def _foreign(reason: str) -> ArgumentError:
    return ArgumentError(f"roofline: not what 'flashsmith roofline' wrote: {reason}")


def _ceiling(number: int, found: Any) -> Ceiling:
    given = set(found) if isinstance(found, dict) else set()
    known = tuple(field.name for field in fields(Ceiling) if field.name in _REQUIRED | given)
    try:
        ceiling = Ceiling(**checked_fields(Ceiling, found, known))
        if ceiling.rate is not None and not 0 < ceiling.rate < math.inf:
            raise ValueError(f"rate is {ceiling.rate}, not finite and above 0")
    except ValueError as error:
        raise _foreign(f"ceiling {number}: {error}") from error
    return ceiling
