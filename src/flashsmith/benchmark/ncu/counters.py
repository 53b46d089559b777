"""What is asked of the profiler: our columns, and the names that its versions have for them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Counter:
    """A column and the metrics that may fill it, the best first; `scale` leads to our unit from the
    profiler's base unit."""

    column: str
    metrics: tuple[str, ...]
    scale: float = 1.0


_SUSTAINED = "avg.pct_of_peak_sustained_active"

COUNTERS = (
    Counter("duration_us", ("gpu__time_duration.sum",), 1e-3),
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

# Facts of a launch and sums over a kernel's instructions: the list of hardware metrics, which we
# ask for, leaves them out.
_UNLISTED = re.compile(r"launch__|memory_l1_|sm__maximum_warps_")
# Warps that stand still for a reason, per instruction issued: the cycles it adds to each.
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active")
_NO_STALLS = ("selected", "not_issued")
_STALL_SUFFIX = ".ratio"
TOP_STALLS = 3


@dataclass
class Selection:
    """The metrics to collect on this GPU; `missing` are those found to be unknown there."""

    listed: Collection[str]
    missing: set[str] = field(default_factory=set)

    @property
    def metrics(self) -> list[str]:
        """Full names, as the profiler takes them."""
        chosen = [name for counter in COUNTERS if (name := self.metric(counter))]
        stalls = [name for name in sorted(self.listed) if self._stall(name)]
        return chosen + [f"{name}{_STALL_SUFFIX}" for name in stalls]

    def metric(self, counter: Counter) -> str | None:
        """The metric that fills a column, None where this GPU has none."""
        return next((name for name in counter.metrics if self._has(name)), None)

    def absent_columns(self) -> list[str]:
        """The columns that stay empty."""
        return [counter.column for counter in COUNTERS if self.metric(counter) is None]

    def values(self, measured: Mapping[str, float]) -> dict[str, float]:
        """Our columns from a launch's metrics; a column without a value is left out."""
        found = {}
        for counter in COUNTERS:
            name = self.metric(counter)
            if name is not None and name in measured:
                found[counter.column] = measured[name] * counter.scale
        return found

    def stalls(self, measured: Mapping[str, float]) -> list[tuple[str, float]]:
        """The reasons why warps waited longest, and the cycles per issue, worst first."""
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
    """The base names that `ncu --query-metrics` lists, one at the start of a line."""
    return set(re.findall(r"^(\w+__\w+)\s", text, flags=re.MULTILINE))


def unknown_metrics(text: str) -> set[str]:
    """The base names that the profiler says it does not know."""
    return set(re.findall(r"Failed to find metric (?:regex:\^?)?(\w+)", text))
