"""`flashsmith explain`: facts about one config, some of which are known before its kernel is built,
and others from the build and from a small run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from enum import IntEnum
from typing import Any

from flashsmith.benchmark.kernel_facts import KernelFacts, Occupancy, occupancy, static_mix
from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.tasks import whole_tiles
from flashsmith.builder import KernelEntry, KernelLibrary, library_for
from flashsmith.families import (
    DeviceSpec,
    KernelConfig,
    Problem,
    is_legal,
    nearest_legal,
    rules_of,
)
from flashsmith.families.family import Intensity, SmemRegion
from flashsmith.families.order import Order
from flashsmith.runtime.emulation import BankConflicts
from flashsmith.runtime.target import Target
from flashsmith.verify import Verdict, prove


@dataclass(frozen=True)
class RuleResult:
    """Whether a config satisfies one legality rule; `values` are the values on which the rule
    depends."""

    name: str
    holds: bool
    reason: str
    values: str


@dataclass(frozen=True)
class KnobEffect:
    """One field of a config: its value, what the value does, and the file in csrc/ that implements
    it."""

    knob: str
    value: str
    effect: str
    where: str


@dataclass(frozen=True)
class Explanation:
    """The result of `flashsmith explain`. The fields after `order` are set only for legal
    configs."""

    config: KernelConfig
    target: Target
    rules: tuple[RuleResult, ...]
    nearest: tuple[KernelConfig, ...]
    knobs: tuple[KnobEffect, ...]
    smem: tuple[SmemRegion, ...]
    intensity: Intensity | None
    order: Order | None
    kernel: KernelEntry | None = None
    occupancy: Occupancy | None = None
    static_mix: dict[str, int] | None = None
    facts: KernelFacts | None = None
    verdict: Verdict | None = None

    @property
    def legal(self) -> bool:
        """Whether a kernel can be built for the config."""
        return all(rule.holds for rule in self.rules)

    @property
    def ok(self) -> bool:
        """Whether the config is legal and its kernel's output correct."""
        return self.verdict is not None and self.verdict.ok

    def to_json(self) -> dict[str, Any]:
        """The explanation as JSON. Fields that an illegal config does not have are null."""
        verdict = self.verdict
        return {
            "config": str(self.config),
            "kernel_name": self.config.kernel_name(),
            "arch": self.target.arch,
            "device": self.target.device.name,
            "legal": self.legal,
            "rules": [asdict(rule) for rule in self.rules],
            "nearest_legal": [str(cfg) for cfg in self.nearest],
            "knobs": [asdict(knob) for knob in self.knobs],
            "smem": [asdict(region) for region in self.smem],
            "intensity": asdict(self.intensity) if self.intensity else None,
            "order": asdict(self.order) if self.order else None,
            "kernel": self.kernel.to_json() if self.kernel else None,
            "occupancy": asdict(self.occupancy) if self.occupancy else None,
            "static_instructions": self.static_mix,
            "dynamic_instructions": self.facts.instructions if self.facts else None,
            "bank_conflicts": self.facts.conflicts if self.facts else None,
            "emulated": str(verdict.problem) if verdict else None,
            "verdict": ("pass" if verdict.ok else "FAIL") if verdict else None,
        }


def explain(cfg: KernelConfig, target: Target, reporter: ProgressReporter) -> Explanation:
    """Explains `cfg`: builds its kernel for `target` if necessary, and emulates it on a small
    problem.

    For an illegal config, the explanation contains only facts that are known before a build. Raises
    any error of building.
    """
    known = _before_building(cfg, target)
    if not known.legal:
        return known
    library = library_for([cfg], arch=target.device.arch, progress=reporter.build)
    reporter.say("counting in the emulator")
    return _after_building(known, library)


def _before_building(cfg: KernelConfig, target: Target) -> Explanation:
    device = target.device
    return Explanation(
        config=cfg,
        target=target,
        rules=tuple(
            RuleResult(
                rule.name, rule.predicate(cfg, device), rule.reason, rule.values(cfg, device)
            )
            for rule in rules_of(cfg)
        ),
        nearest=_nearest(cfg, device),
        knobs=knob_effects(cfg),
        smem=tuple(cfg.family.smem_map(cfg)),
        intensity=cfg.family.intensity(cfg),
        order=cfg.family.order(cfg, device.arch),
    )


def _after_building(known: Explanation, library: KernelLibrary) -> Explanation:
    cfg, device = known.config, known.target.device
    kernel = library.entry(cfg)
    conflicts = BankConflicts()
    # Two steps over K and V are enough to run the loop body and, if the kernel has one, the peeled
    # first step. The sizes fill whole tiles. An uneven problem would run another kernel, whose
    # register count differs from the one shown.
    rows, step = cfg.family.loop_tiles(cfg) or (0, 0)
    seq_q, seq_k = (rows, 2 * step) if rows else (whole_tiles(_ROWS, cfg),) * 2
    family = cfg.family
    sizes = 1, min(seq_q, family.most_rows(cfg) or seq_q), seq_k, 1, 1, cfg.d_head
    problem = Problem(*sizes, cfg.dtype, operation=family.operation, d_v=cfg.d_head_v)
    problem = replace(problem, gradients=family.gradients_of(cfg), cache=family.cache_of(cfg))
    verdict = prove(cfg, problem, arch=device.arch, observers=[conflicts])
    return Explanation(
        **{name: getattr(known, name) for name in _BEFORE},
        kernel=kernel,
        occupancy=occupancy(cfg, device, kernel.registers),
        static_mix=static_mix(library.ptx(cfg), kernel.ptx_entry),
        facts=KernelFacts.of(kernel, device, verdict.emulation, conflicts),
        verdict=verdict,
    )


def _nearest(cfg: KernelConfig, device: DeviceSpec) -> tuple[KernelConfig, ...]:
    return () if is_legal(cfg, device) else tuple(nearest_legal(cfg, device))


# The minimum number of rows of the small problem, for a kernel that has no loop over keys.
_ROWS = 128
_BEFORE = ("config", "target", "rules", "nearest", "knobs", "smem", "intensity", "order")


def knob_effects(cfg: KernelConfig) -> tuple[KnobEffect, ...]:
    """Returns the effect of each field of `cfg`, in the order of the fields."""
    effects = []
    for knob in fields(cfg):
        declared, value = knob.metadata, getattr(cfg, knob.name)
        text = value.name if isinstance(value, IntEnum) else _plain(value)
        words = declared["effect"](cfg) if declared["effect"] else declared["meaning"]
        effects.append(KnobEffect(knob.name, text, words, declared["where"]))
    return tuple(effects)


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
