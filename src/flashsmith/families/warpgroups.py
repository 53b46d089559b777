"""The common parts of the families whose kernels consist of warpgroups.

Their kernels multiply with wgmma. One warpgroup, the producer, copies by TMA. The others are
consumers, which receive some of the producer's registers (setmaxnreg).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flashsmith.families.config import KernelConfig
from flashsmith.families.device import DeviceSpec
from flashsmith.families.family import Family
from flashsmith.families.head_dims import HeadDims, HeadPair
from flashsmith.families.knob import KnobGroup, knob
from flashsmith.families.legality import d_head_for
from flashsmith.families.rule import Rule
from flashsmith.operations.problem import Problem
from flashsmith.semantics.dtype import DType

HOPPER_ARCH = 90
WARPGROUP_THREADS = 128
WARPGROUP_ROWS = 64
REGISTER_UNIT, MIN_REGISTERS, MAX_REGISTERS = 8, 24, 240
REGISTER_COUNTS = tuple(range(MIN_REGISTERS, MAX_REGISTERS + 1, REGISTER_UNIT))
# The number of registers that a thread needs for addresses, row statistics and the state of the
# loop, in addition to the accumulators.
REGISTERS_BESIDE_TILES = 24
# The 65,536 registers of the register file, divided by the 128 threads of a warpgroup.
REGISTERS_TO_SHARE = 512

# --- knobs ---------------------------------------------------------------------------------------

REGISTERS_WORD = KnobGroup(
    "regs_{}_{}",
    ("producer_registers", "consumer_registers"),
    ("N", "N"),
    "registers",
    (MIN_REGISTERS, MAX_REGISTERS),
)


def registers_knob(
    role: str, default: int, kernel: str, values: Sequence[int] = REGISTER_COUNTS
) -> Any:
    """Declares the field for the number of registers per thread in one role, producer or
    consumer."""
    return knob(
        f"registers per {role} thread",
        values=tuple(values),
        default=default,
        effect=lambda cfg: (
            f"setmaxnreg leaves the producer {cfg.producer_registers} registers a thread, and "
            f"gives consumers {cfg.consumer_registers}"
        ),
        where=kernel,
    )


def ring_knob(tile: str, word: str, where: str) -> Any:
    """Declares the field for the number of tiles in a ring that the producer fills by TMA."""

    def effect(cfg: Any) -> str:
        stages = getattr(cfg, word)
        if stages == 1:
            return f"one {tile} tile, copied once the last GEMM on it has finished"
        return f"a ring of {stages} {tile} tiles, copied ahead by TMA"

    return knob(
        f"{tile} tiles held at once",
        values=(1, 2, 3, 4),
        word=word,
        default=2,
        always=True,
        effect=effect,
        where=where,
    )


def pingpong_knob() -> Any:
    """Declares the flag with which the consumer warpgroups issue their GEMMs alternately."""
    return knob(
        "warpgroups issue their GEMMs alternately",
        word="pingpong",
        default=False,
        effect=lambda cfg: (
            "warpgroups issue GEMMs alternately: one multiplies while others exponentiate"
            if cfg.pingpong
            else "warpgroups issue GEMMs as soon as they reach them"
        ),
        where="WarpgroupOrder",
    )


@dataclass(frozen=True, order=True)
class WarpgroupBackwardConfig(KernelConfig):
    """The base class of the configs of backward passes with warpgroups."""

    if TYPE_CHECKING:
        B_r: int
        B_c: int
        n_warpgroups: int

    @property
    def n_threads(self) -> int:
        """The number of threads of a CTA, including the threads of the producer."""
        return WARPGROUP_THREADS * (self.n_warpgroups + 1)

    def fills_tiles(self, seq_q: int, seq_k: int, d: int) -> bool:
        """Whether these sizes consist of whole tiles, so that kernels without bounds checks can
        compute the problem."""
        whole = seq_q % self.B_r == 0 and seq_k % self.B_c == 0
        return whole and d == self.d_head and seq_k > 0


def registers_each(n_warpgroups: int, ctas_per_sm: int = 1) -> int:
    """The number of registers that each thread has at launch, in a CTA of n_warpgroups consumer
    warpgroups and a producer."""
    threads = ctas_per_sm * (n_warpgroups + 1)
    return REGISTERS_TO_SHARE // threads // REGISTER_UNIT * REGISTER_UNIT


# --- rules ---------------------------------------------------------------------------------------


def arch_rule(family: str) -> Rule:
    """Returns the rule that the device must have wgmma."""
    return Rule(
        "arch_is_hopper",
        f"the {family} family needs a GPU of compute capability 9.0: only sm_90a has wgmma",
        lambda cfg, device: device.arch == HOPPER_ARCH,
        (),
        lambda cfg, device: f"{device.name} is sm_{device.arch}",
    )


def register_rules() -> tuple[Rule, ...]:
    """Returns the rules that setmaxnreg must accept the number of registers of each role."""

    def rule(knob: str) -> Rule:
        return Rule(
            f"{knob}_supported",
            f"{knob} must be a multiple of {REGISTER_UNIT} from {MIN_REGISTERS} to "
            f"{MAX_REGISTERS}: setmaxnreg accepts no other",
            lambda cfg, device: getattr(cfg, knob) in REGISTER_COUNTS,
            (knob,),
        )

    return tuple(map(rule, REGISTERS_WORD.knobs))


# A rule for the backward families, whose kernels run one CTA per SM.
REGISTERS_WITHIN_FILE = Rule(
    "registers_within_file",
    "producer_registers + n_warpgroups consumer_registers must not exceed what the warpgroups "
    "start with, 512 / (n_warpgroups + 1) each, rounded down to a multiple of 8",
    lambda cfg, device: (
        cfg.producer_registers + cfg.n_warpgroups * cfg.consumer_registers
        <= registers_each(cfg.n_warpgroups) * (cfg.n_warpgroups + 1)
    ),
    ("n_warpgroups", "producer_registers", "consumer_registers"),
)
PINGPONG_NEEDS_TWO = Rule(
    "pingpong_needs_two_warpgroups",
    "pingpong needs 2 or 3 consumer warpgroups, which alternate",
    lambda cfg, device: cfg.n_warpgroups > 1 or not cfg.pingpong,
    ("n_warpgroups", "pingpong"),
)


# --- the families --------------------------------------------------------------------------------


class WarpgroupFamily(Family):
    """A family whose kernels consist of warpgroups."""

    # wgmma and TMA multicast exist only in targets with this suffix.
    target_suffix = "a"
    needs_tma = True
    # A kernel that spills gives correct results, but runs at a fraction of the speed.
    must_not_spill = True

    def unsupported_reason(self, problem: Problem, device: DeviceSpec) -> str | None:
        if device.arch != HOPPER_ARCH:
            return (
                f"its instructions are of sm_{HOPPER_ARCH}, and {device.name} is sm_{device.arch}"
            )
        return None

    def conflict_kinds(self) -> Mapping[str, tuple[str, ...]]:
        # Copies by TMA do not appear here, because only accesses by warps are counted.
        return {"ldmatrix": (), "copy st": (), "O st": ("stmatrix",), "O ld": ()}

    def registers_in_words(self, cfg: Any, registers: int) -> str:
        return (
            f"{registers} at launch, then {cfg.producer_registers} per producer and "
            f"{cfg.consumer_registers} per consumer thread"
        )


class WarpgroupBackwardFamily(WarpgroupFamily):
    """A family whose kernels compute the backward pass with warpgroups, for a few head
    dimensions."""

    operation = "backward"
    has_cost_model = True
    d_heads: ClassVar[tuple[int, ...]]
    repairs: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        # Only fewer producer registers can make a config legal, and the producer needs at least 24.
        "producer_registers": (24, 32, 40),
    }

    def unsupported_reason(self, problem: Problem, device: DeviceSpec) -> str | None:
        arch = super().unsupported_reason(problem, device)
        if arch is None and problem.d != problem.d_v:
            if d_head_for(problem) in self.pairs:
                return None
            return f"it has no kernels for d = {problem.d} with another d of v, {problem.d_v}"
        d_head = d_head_for(problem)
        if arch is None and d_head not in self.d_heads:
            served = ", ".join(map(str, self.d_heads))
            return f"it has kernels of d_head {served}, and d = {problem.d} runs on {d_head}"
        return arch

    def proof_configs(self, dtype: DType, d: HeadDims) -> Sequence[Any]:
        if isinstance(d, HeadPair):
            known = d in self.pairs
            return self.proven_configs(dtype, d, self.roomiest_device) if known else ()
        served = [d_head for d_head in self.d_heads if d <= d_head]
        return self.proven_configs(dtype, served[0], self.roomiest_device) if served else ()

    def proven_configs(self, dtype: DType, d_head: Any, device: DeviceSpec) -> Sequence[Any]:
        """The configs with which proofs check one of the family's values of d_head."""
        return self.candidates(dtype, d_head, device, False)

    def dividing_tiles(self, cfg: Any) -> dict[str, int]:
        return {"B_r": cfg.B_r, "B_c": cfg.B_c}
