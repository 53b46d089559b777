"""The metrics of the profiler and its output.

COUNTERS maps flashsmith's columns to the names that the metrics have in different versions of ncu.
The output is ncu's raw page as CSV: one launch per line, one metric per column, and the units in
the second line.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Counter:
    """A column, and the metrics that can fill it, in order of preference.

    `scale` converts the base unit of the profiler to the unit of the column.
    """

    column: str
    metrics: tuple[str, ...]
    scale: float = 1.0


_DURATION = "gpu__time_duration.sum"
_SUSTAINED = "avg.pct_of_peak_sustained_active"

COUNTERS = (
    Counter("duration_us", (_DURATION,), 1e-3),
    Counter("sm_clock_mhz", ("sm__cycles_elapsed.avg.per_second",), 1e-6),
    Counter(
        "tensor_pct",
        (
            f"sm__pipe_tensor_cycles_active.{_SUSTAINED}",
            f"sm__pipe_tensor_op_hmma_cycles_active.{_SUSTAINED}",
            f"sm__inst_executed_pipe_tensor.{_SUSTAINED}",
        ),
    ),
    Counter("mufu_pct", (f"sm__inst_executed_pipe_xu.{_SUSTAINED}",)),
    Counter("issue_pct", (f"sm__inst_issued.{_SUSTAINED}", f"smsp__issue_active.{_SUSTAINED}")),
    Counter("occupancy_pct", (f"sm__warps_active.{_SUSTAINED}",)),
    Counter("max_occupancy_pct", ("sm__maximum_warps_per_active_cycle_pct",)),
    Counter("registers", ("launch__registers_per_thread",)),
    Counter(
        "wavefronts",
        ("memory_l1_wavefronts_shared", "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"),
    ),
    Counter("wavefronts_ideal", ("memory_l1_wavefronts_shared_ideal",)),
    Counter("l2_bytes", ("lts__t_bytes.sum",)),
    Counter("l2_hit_pct", ("lts__t_sector_hit_rate.pct",)),
    Counter("dram_read_bytes", ("dram__bytes_read.sum", "dram__bytes_op_read.sum")),
    Counter("dram_write_bytes", ("dram__bytes_write.sum", "dram__bytes_op_write.sum")),
)

# Metrics that the profiler has although its list of metrics does not contain them: properties of
# launches, and sums over instructions.
_UNLISTED = re.compile(r"launch__|memory_l1_|sm__maximum_warps_")
# The metrics that give the stalled cycles per issued instruction; the group is the stall reason.
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active")
_NO_STALLS = ("selected", "not_issued")
_STALL_SUFFIX = ".ratio"
TOP_STALLS = 3


@dataclass
class Selection:
    """The metrics that are collected on this GPU.

    `missing` are metrics that the profiler listed but then rejected as unknown.
    """

    listed: Collection[str]
    missing: set[str] = field(default_factory=set)

    @property
    def metrics(self) -> list[str]:
        """The full names of the metrics, as passed to the profiler."""
        chosen = [name for counter in COUNTERS if (name := self.metric(counter))]
        stalls = [name for name in sorted(self.listed) if self._stall(name)]
        return chosen + [f"{name}{_STALL_SUFFIX}" for name in stalls]

    def metric(self, counter: Counter) -> str | None:
        """The metric that fills a column on this GPU; None if there is none."""
        return next((name for name in counter.metrics if self._has(name)), None)

    def absent_columns(self) -> list[str]:
        """The columns that stay empty on this GPU."""
        return [counter.column for counter in COUNTERS if self.metric(counter) is None]

    def values(self, measured: Mapping[str, float]) -> dict[str, float]:
        """The values of flashsmith's columns, from the metrics of a launch.

        Columns without a value are left out.
        """
        found = {}
        for counter in COUNTERS:
            name = self.metric(counter)
            if name is not None and name in measured:
                found[counter.column] = measured[name] * counter.scale
        return found

    def stalls(self, measured: Mapping[str, float]) -> list[tuple[str, float]]:
        """The main reasons for stalls with their cycles per issued instruction, the longest
        first."""
        reasons = {
            reason: measured[f"{name}{_STALL_SUFFIX}"]
            for name in self.listed
            if (reason := self._stall(name)) and f"{name}{_STALL_SUFFIX}" in measured
        }
        ranked = sorted(reasons.items(), key=lambda item: -item[1])
        return [(reason, cycles) for reason, cycles in ranked if cycles > 0][:TOP_STALLS]

    def _has(self, name: str) -> bool:
        base = name.partition(".")[0]
        if base in self.missing:
            return False
        return bool(_UNLISTED.match(name)) or base in self.listed

    def _stall(self, name: str) -> str | None:
        match = _STALL.fullmatch(name)
        if match is None or name in self.missing or match[1].endswith(_NO_STALLS):
            return None
        return match[1]


def parse_listing(text: str) -> set[str]:
    """The base names of the metrics in the output of `ncu --query-metrics`; each line begins with
    one."""
    return set(re.findall(r"^(\w+__\w+)\s", text, flags=re.MULTILINE))


def unknown_metrics(text: str) -> set[str]:
    """The base names that the profiler reports as unknown metrics."""
    return set(re.findall(r"Failed to find metric (?:regex:\^?)?(\w+)", text))


# --- the raw page ---------------------------------------------------------------------------------

_PREFIXES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
# Base units, as `--print-units base` prints them. Some versions of ncu print the whole name of a
# unit, and some add a prefix to the unit even then.
_BASE = {"byte": 1.0, "hz": 1.0, "second": 1e9, "s": 1e9}
_NAME = "Kernel Name"
_IDENTITY = "ID"


@dataclass(frozen=True)
class ProfiledLaunch:
    """The counters of one launch, or of all launches of a call merged.

    kernel: the name of the (main) kernel as the profiler prints it.
    metrics: in base units (nanoseconds, bytes, hertz, percent).
    parts: for a call of several launches, the duration of each, as text.
    """

    kernel: str
    metrics: dict[str, float]
    parts: str = ""


def merged(launches: Mapping[str, ProfiledLaunch]) -> ProfiledLaunch:
    """Merges the launches of one call; the keys are the launches' roles.

    Counts are added, the maximum of the registers is taken, and shares, rates and stalls are
    averaged, weighted by duration.
    """
    first, *others = launches.values()
    if not others:
        return first
    parts = list(launches.values())
    weights = [launch.metrics.get(_DURATION, 1.0) for launch in parts]
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for launch in parts for name in launch.metrics):
        pairs = zip(parts, weights, strict=True)
        known = [(one.metrics[name], weight) for one, weight in pairs if name in one.metrics]
        if name.endswith(".sum") or name.startswith("memory_l1_"):
            metrics[name] = sum(value for value, _ in known)
        elif name.startswith("launch__"):
            metrics[name] = max(value for value, _ in known)
        else:
            total = sum(weight for _, weight in known)
            metrics[name] = sum(value * weight for value, weight in known) / total
    durations = (
        f"{role} {launch.metrics[_DURATION] / 1e3:.0f} us"
        for role, launch in launches.items()
        if _DURATION in launch.metrics
    )
    main = launches.get("main", first)
    return ProfiledLaunch(main.kernel, metrics, ", ".join(durations))


class TruncatedPage(ValueError):
    """The profiler's page ends in the middle of a line. `launches` are the launches before this
    line."""

    def __init__(self, launches: list[ProfiledLaunch]) -> None:
        super().__init__(f"the profiler's page ends within the line of launch {len(launches)}")
        self.launches = launches


def parse_raw_page(text: str) -> list[ProfiledLaunch]:
    """Reads the launches from a page in the order in which they ran.

    Lines outside the page are ignored.

    Cells that are not numbers are left out. Raises ValueError if the output has no page,
    TruncatedPage if the page ends in the middle of a line.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if not lines:
        raise ValueError("the profiler printed no page of metrics")
    header, *rows = csv.reader(lines)
    if _NAME not in header or _IDENTITY not in header:
        raise ValueError(f"the profiler's page has no column {_NAME!r}")
    # Every cell is quoted, and a quote inside a cell is doubled.
    closed = lines[-1].count('"') % 2 == 0 and lines[-1].endswith('"')
    if len((rows or [header])[-1]) < len(header) or not closed:
        raise TruncatedPage(_launches(header, rows[:-1]))
    return _launches(header, rows)


def _launches(header: list[str], rows: list[list[str]]) -> list[ProfiledLaunch]:
    if not rows:
        return []
    units = dict(zip(header, rows[0], strict=True))
    # The line with the units has no ID of a launch.
    launches = rows[1:] if not units[_IDENTITY] else rows
    units = units if not units[_IDENTITY] else {}
    found = []
    for row in launches:
        cells = dict(zip(header, row, strict=True))
        numbers = {
            name: number * _factor(units.get(name, ""))
            for name, cell in cells.items()
            if (number := _number(cell)) is not None
        }
        found.append(ProfiledLaunch(cells[_NAME], numbers))
    return found


def _number(cell: str) -> float | None:
    try:
        number = float(cell.replace(",", ""))
    except ValueError:
        return None
    return number if number == number else None


def _factor(unit: str) -> float:
    """The factor from a unit to the base unit: ns, bytes or hertz."""
    for base, to_base in _BASE.items():
        if unit == base:
            return to_base
        if unit[1:] == base and unit[0] in _PREFIXES:
            return _PREFIXES[unit[0]] * to_base
    return 1.0
