"""Choice: what choose() answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashsmith.chooser.evidence import EvidenceKind
from flashsmith.families import DeviceSpec, Problem
from flashsmith.printable import printable

_SHOWN = 4


@dataclass(frozen=True)
class RunnerUp:
    """A config that was weighed and not taken, with its expected time."""

    config: Any
    family: str
    ms: float


@dataclass(frozen=True)
class Choice:
    """The kernel for a problem on a device, and what speaks for it.

    evidence: 'table' (measured in this bucket), 'nearest' (another bucket), 'related' (another
    mask, layout, dtype or GPU), 'cost model' (nothing was measured) or 'offered' (nor is there a
    cost model). why: the same as a sentence. ms: the expected time, 0 where nothing says it;
    tflops: the problem's attn_flop() over it, 0 where there is none.
    runners_up: fastest first. passed_over: the families that were not chosen, each with why. notes:
    what these kernels do badly here, and what was ignored.
    """

    problem: Problem
    device: DeviceSpec
    config: Any
    evidence: EvidenceKind
    why: str
    ms: float
    runners_up: tuple[RunnerUp, ...]
    passed_over: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def family(self) -> str:
        """Which kernels the config belongs to."""
        return str(self.config.FAMILY)

    @property
    def tflops(self) -> float:
        """Expected TFLOP/s: 4 b h s_q s_k d, halved if causal, over the expected time."""
        return self.problem.attn_flop() / self.ms / 1e9 if self.ms else 0.0

    def __str__(self) -> str:
        lines = [
            f"{self.problem} on {self.device.name} (sm_{self.device.arch})",
            f"  kernel      {self.config}",
            f"  family      {self.family}",
            f"  evidence    {self.evidence}: {self.why}",
        ]
        if self.evidence != "offered":
            lines.append(f"  expected    {_milliseconds(self.ms)}, {self.tflops:.0f} TFLOP/s")
        for one in self.runners_up[:_SHOWN]:
            behind = f"{one.ms / self.ms - 1:+.1%}" if self.ms else ""
            time = f"  {_milliseconds(one.ms)} ({behind})" * (self.evidence != "offered")
            lines.append(f"  runner-up   {one.config}{time}")
        lines += [f"  other       {family}: {why}" for family, why in self.passed_over.items()]
        lines += [f"  note        {note}" for note in self.notes]
        return "\n".join(map(printable, lines))

    def to_json(self) -> dict[str, Any]:
        return {
            "problem": str(self.problem),
            "device": self.device.name,
            "arch": f"sm_{self.device.arch}",
            "config": str(self.config),
            "family": self.family,
            "evidence": self.evidence,
            "why": self.why,
            "ms": self.ms,
            "tflops": self.tflops,
            "runners_up": [
                {"config": str(one.config), "family": one.family, "ms": one.ms}
                for one in self.runners_up
            ],
            "passed_over": dict(self.passed_over),
            "notes": list(self.notes),
        }


def _milliseconds(ms: float) -> str:
    return f"{ms:.3g} ms" if ms < 1000 else f"{ms:.0f} ms"
