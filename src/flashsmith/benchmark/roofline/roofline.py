"""Roofline: the measured ceilings of a GPU as data, the files that store them, and the bounds that
follow from them.

All bounds are in TFLOP/s of the two GEMMs, as in all tables: 4 b h s_q s_k d FLOP, half of that if
causal.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import platformdirs

from flashsmith.benchmark.records import LARGEST, read_record
from flashsmith.builder.safe_files import written_beside
from flashsmith.errors import ArgumentError
from flashsmith.families import Problem, Semantics
from flashsmith.operations import DEFAULT
from flashsmith.printable import quoted
from flashsmith.runtime.driver import gpu_count, query_gpu
from flashsmith.safe_json import UnusableTextError, read_json

Unit = Literal["TFLOP/s", "Gop/s", "TB/s"]
KIND = "flashsmith roofline"
SCHEMA = 1
# The number of operations or bytes per second that each unit means.
SCALE: dict[Unit, float] = {"TFLOP/s": 1e12, "Gop/s": 1e9, "TB/s": 1e12}


@dataclass(frozen=True)
class Ceiling:
    """One ceiling of a GPU, measured.

    rate: in `unit`; None if it was not measured, in which case `note` gives the reason.
    ms: the median time of a launch.
    spread: the interquartile range divided by the median.
    sm_clock_mhz, power_w: readings during the launches; None without NVML.
    per_sm_clock: operations or bytes per SM and clock cycle; None if the clock is unknown.
    error: the largest error of the kernel when its output was checked, relative to the results.
    wrong: whether the kernel or its check failed.
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

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate <= LARGEST:
            raise ValueError(f"rate is {self.rate}, not finite and above 0")


@dataclass(frozen=True)
class Roofline:
    """All ceilings of a GPU. `environment` and `time` (ISO format) say where and when they were
    measured."""

    gpu: str
    arch: int
    sm_count: int
    time: str
    environment: dict[str, Any]
    ceilings: tuple[Ceiling, ...]

    def ceiling(self, key: str) -> Ceiling | None:
        """The ceiling with this key, measured or not; None if there is none."""
        return next((ceiling for ceiling in self.ceilings if ceiling.key == key), None)

    def rate(self, key: str) -> float | None:
        """The rate of a ceiling in its unit; None if it was not measured."""
        ceiling = self.ceiling(key)
        return ceiling.rate if ceiling else None

    def per_second(self, key: str) -> float | None:
        """The rate of a ceiling in FLOP, operations or bytes per second."""
        ceiling = self.ceiling(key)
        if ceiling is None or ceiling.rate is None:
            return None
        return ceiling.rate * SCALE[ceiling.unit]

    @property
    def ok(self) -> bool:
        """Whether no ceiling is marked wrong."""
        return not any(ceiling.wrong for ceiling in self.ceilings)

    def to_json(self) -> dict[str, Any]:
        return {"kind": KIND, "schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, value: Any) -> Roofline:
        """Reads a roofline from the JSON that to_json() writes; fields of later versions are
        ignored.

        Raises ArgumentError for any other value.
        """
        if not isinstance(value, dict):
            raise _foreign(f"{quoted(value, 80)} is not an object")
        if value.get("schema") != SCHEMA:
            raise ArgumentError(
                f"roofline: schema {quoted(value.get('schema'), 80)} is not this version's "
                f"({SCHEMA}); measure again with 'flashsmith roofline'"
            )
        try:
            return read_record(cls, value)
        except ValueError as error:
            raise _foreign(str(error)) from error


def _foreign(reason: str) -> ArgumentError:
    return ArgumentError(f"roofline: not what 'flashsmith roofline' wrote: {reason}")


# --- files: one for each GPU, in the user's data folder -------------------------------------------


def roofline_path(gpu: str) -> Path:
    """The path of the file that stores the roofline of the GPU named `gpu`.

    Raises ArgumentError if there is no home folder.
    """
    return _folder() / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


def load_roofline(gpu: str | None = None) -> Roofline | None:
    """The stored roofline of the GPU named `gpu`, or of this machine's first GPU if `gpu` is None;
    returns None if no roofline is stored for that GPU.

    Raises ArgumentError if the file is damaged.
    """
    if gpu is None:
        if gpu_count() == 0:
            return None
        gpu = query_gpu(0).name
    path = roofline_path(gpu)
    return read_roofline(path) if path.exists() else None


def read_roofline(path: str | Path) -> Roofline:
    """Reads the roofline in a file. Raises ArgumentError if the file does not contain one."""
    try:
        value = read_json(path)
    except UnusableTextError as error:
        raise ArgumentError(f"roofline: {path}{error.place} cannot be read: {error}") from error
    try:
        return Roofline.from_json(value)
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from error


def stored_rooflines() -> list[Roofline]:
    """All stored rooflines, sorted by the GPU's name. Raises ArgumentError if a file is damaged."""
    return [read_roofline(path) for path in sorted(_folder().glob("*.json"))]


def save_roofline(roofline: Roofline, path: Path | None = None) -> Path:
    """Writes the roofline atomically to `path`, or to its default path, and returns this path.

    Raises ArgumentError if the file cannot be written.
    """
    path = path or roofline_path(roofline.gpu)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_beside(path) as unfinished:
            unfinished.write_text(json.dumps(roofline.to_json(), indent=2) + "\n")
    except OSError as error:
        raise ArgumentError(f"roofline: {path} cannot be written: {error}") from error
    return path


def _folder() -> Path:
    try:
        folder = platformdirs.user_data_path("flashsmith", appauthor=False)
    except RuntimeError:  # Newer platformdirs raises this; older ones return a relative path
        folder = Path("~")
    if not folder.is_absolute():
        raise ArgumentError(
            "roofline: there is no home folder to store it in (HOME is unset); set HOME or "
            "XDG_DATA_HOME"
        )
    return folder / "roofline"


# --- what a kernel may reach ----------------------------------------------------------------------


@dataclass(frozen=True)
class ProblemIntensity:
    """FLOP of the two GEMMs per byte of DRAM traffic, per byte of L2 traffic, and per exponential.

    dram: q, k, v and o are each counted once, which is the minimum.
    l2: what CTAs read and write; each CTA reads its Q block and all keys that the block sees.

    For operations other than attention, dram and l2 both count each tensor once, and exp2 is
    infinite.
    """

    dram: float
    l2: float
    exp2: float


@dataclass(frozen=True)
class Bound:
    """The rate that one ceiling allows a kernel.

    `ceiling` is the key of the ceiling in the roofline.
    """

    ceiling: str
    tflops: float


def intensity(problem: Problem, cfg: Any) -> ProblemIntensity:
    """The intensities of `cfg`'s kernel on `problem`, which must not be empty."""
    flop = problem.attn_flop()
    if problem.operation != DEFAULT:
        once = flop / problem.computed.bytes(problem)
        return ProblemIntensity(dram=once, l2=once, exp2=math.inf)
    q_bytes, k_bytes = _bytes_once(problem)
    all_scores = replace(problem, semantics=Semantics(), window_keys=0).attn_flop()
    rows, _ = cfg.family.loop_tiles(cfg) or (problem.seq_q, 0)
    blocks = math.ceil(problem.seq_q / rows)
    group = problem.heads_q // problem.heads_k
    l2 = flop / (q_bytes + group * k_bytes * max(1.0, blocks * flop / all_scores))
    return ProblemIntensity(
        dram=flop / (q_bytes + k_bytes), l2=l2, exp2=2.0 * (problem.d + problem.d_v)
    )


def _bytes_once(problem: Problem) -> tuple[int, int]:
    """The number of bytes of q and o together, and of k and v together."""
    row = problem.batch * (problem.d + problem.d_v) * problem.dtype.element_size
    return row * problem.heads_q * problem.seq_q, row * problem.heads_k * problem.seq_k


def bounds(roofline: Roofline, problem: Problem, cfg: Any) -> tuple[Bound, ...]:
    """The rates that the measured ceilings allow the config on the problem, the lowest first.
    Ceilings that do not apply to the kernel or the problem are left out."""
    dtype = problem.dtype.name.lower()
    found = [
        Bound(f"{name}_{dtype}", rate)
        for name in _products_of(cfg)
        if (rate := roofline.rate(f"{name}_{dtype}")) is not None
    ]
    own = intensity(problem, cfg)
    for key, work in (("exp2", own.exp2), ("l2_read", own.l2), ("dram_read", own.dram)):
        rate = roofline.per_second(key)
        if rate is not None and math.isfinite(work):
            found.append(Bound(key, work * rate / 1e12))
    return tuple(sorted(found, key=lambda bound: bound.tflops))


def _products_of(cfg: Any) -> tuple[str, ...]:
    """The keys of the ceilings for the MMA instruction that the config's family uses."""
    names: tuple[str, ...] = cfg.family.multiplies_with(cfg)
    return names
