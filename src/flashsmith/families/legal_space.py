"""The spaces of legal configs, one a family: the values of each knob, and how to complete a partial
choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, TypeVar

from flashsmith.families.device import DeviceSpec
from flashsmith.families.family import KernelConfig
from flashsmith.families.legality import (
    HOPPER_RULES,
    RULES,
    SUPPORTED_B_C,
    SUPPORTED_B_R,
    SUPPORTED_D_HEADS,
    SUPPORTED_KV_STAGES,
    SUPPORTED_L2_GROUP_MIB,
    SUPPORTED_MIN_CTAS,
    SUPPORTED_N_WARPS,
    Rule,
)
from flashsmith.families.wgmma.config import HopperForwardKernelConfig
from flashsmith.families.wgmma.knob_values import HOPPER_KNOB_VALUES
from flashsmith.families.wgmma.rules import DEFAULT_SECTION_MIB
from flashsmith.operations.dtype import DType

_LOAD_COUNTS = (0, 2, 4, 8, 16)
_FLAG = (False, True)

# Every value that a knob has in some legal config, in the order of the fields.
KNOB_VALUES: dict[str, tuple[object, ...]] = {
    "dtype": tuple(DType),
    "d_head": SUPPORTED_D_HEADS,
    "B_r": SUPPORTED_B_R,
    "B_c": SUPPORTED_B_C,
    "n_warps": SUPPORTED_N_WARPS,
    "async_copy": _FLAG,
    "eager_load_blocks": _FLAG,
    "swizzled": _FLAG,
    "Q_mma_load_K_tiles": _LOAD_COUNTS,
    "K_mma_load_K_tiles": _LOAD_COUNTS,
    "V_mma_load_K_tiles": _LOAD_COUNTS,
    "mma_double_buffer_loads": _FLAG,
    "optimized_softmax": _FLAG,
    "kv_stages": SUPPORTED_KV_STAGES,
    "lazy_rescale": _FLAG,
    "ping_pong": _FLAG,
    "min_ctas_per_sm": SUPPORTED_MIN_CTAS,
    "trim_masks": _FLAG,
    "l2_group_mib": SUPPORTED_L2_GROUP_MIB,
}

# Of the producer's registers only fewer can help, and it cannot do with less than the first.
_HOPPER_REPAIRS: dict[str, tuple[object, ...]] = {
    "producer_registers": HOPPER_KNOB_VALUES["producer_registers"][:3],
    # What can be wrong with them, these values mend; others only make the search long.
    "section_mib": (DEFAULT_SECTION_MIB,),
    "ctas_per_sm": (1,),
}
# How many values are tried of a knob that no other knob has to do with.
_LONE_REPAIRS = 3

# The order in which a partial choice is completed: what many rules read comes first, so that dead
# ends are met early.
_SETTLING_ORDER = (
    "dtype", "d_head", "n_warps", "B_r", "min_ctas_per_sm", "ping_pong", "kv_stages", "B_c",
)  # fmt: skip
# Shared memory before registers: a device that is too small for any tile is then left at once.
_HOPPER_SETTLING_ORDER = (
    "dtype", "d_head", "n_warpgroups", "B_r", "B_c", "kv_stages", "q_buffers", "separate_O",
    "ctas_per_sm", "overlap", "consumer_registers", "producer_registers",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class LegalSpace:
    """A family's rules, the values its knobs have in legal configs, which of them are worth a try
    where a config is to be mended, and what is settled first."""

    rules: tuple[Rule, ...]
    values: dict[str, tuple[object, ...]]
    first: tuple[str, ...]
    repairs: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The knobs in the order in which they are settled."""
        return (*self.first, *(knob for knob in self.values if knob not in self.first))

    @cached_property
    def lone(self) -> frozenset[str]:
        """The knobs whose rules read no other knob."""
        bound = {knob for rule in self.rules if len(rule.knobs) > 1 for knob in rule.knobs}
        return frozenset(self.values) - bound

    def replacements(self, knob: str, old: object) -> Sequence[object]:
        """What to try instead of a knob's `old` value."""
        others = [new for new in self.repairs.get(knob, self.values[knob]) if new != old]
        if knob not in self.lone:
            return others
        return sorted(others, key=lambda new: abs(int(new) - int(old)))[:_LONE_REPAIRS]  # type: ignore[call-overload]


_MMA_SYNC_SPACE = LegalSpace(RULES, KNOB_VALUES, _SETTLING_ORDER)
_HOPPER_SPACE = LegalSpace(
    HOPPER_RULES, HOPPER_KNOB_VALUES, _HOPPER_SETTLING_ORDER, _HOPPER_REPAIRS
)


def space_of(cfg: KernelConfig) -> LegalSpace:
    """The space of the config's family."""
    return _HOPPER_SPACE if isinstance(cfg, HopperForwardKernelConfig) else _MMA_SYNC_SPACE


# A config of either family, and the same one again.
AnyConfig = TypeVar("AnyConfig", bound=KernelConfig)
ValueOrder = Callable[[str, Any, Sequence[str]], Sequence[object]]


def with_knob(cfg: AnyConfig, knob: str, value: object) -> AnyConfig:
    """`cfg` with another of its knob's values: dataclasses.replace without its checks, at 1% of its
    cost.

    A search makes a million of these.
    """
    changed = object.__new__(type(cfg))
    changed.__dict__.update(cfg.__dict__)
    changed.__dict__[knob] = value
    return changed


def legal_completions(
    base: AnyConfig,
    settled: Sequence[str],
    device: DeviceSpec,
    value_order: ValueOrder | None = None,
) -> Iterator[AnyConfig]:
    """Legal configs that agree with `base` on the `settled` knobs, depth first.

    value_order(knob, config so far, settled knobs) says in which order a knob's values are tried;
    by default as they are listed. A rule is asked as soon as its last knob is settled, so dead
    ends are left early.
    """
    space, known = space_of(base), set(settled)
    if all(rule.predicate(base, device) for rule in space.rules if set(rule.knobs) <= known):
        yield from _complete(space, base, tuple(settled), device, value_order)


@cache
def rules_due(space: LegalSpace, settled: frozenset[str], knob: str) -> tuple[Rule, ...]:
    """The rules that can be asked once `knob` is settled too, and not before."""
    now = settled | {knob}
    return tuple(rule for rule in space.rules if knob in rule.knobs and set(rule.knobs) <= now)


def _complete(
    space: LegalSpace,
    base: AnyConfig,
    settled: tuple[str, ...],
    device: DeviceSpec,
    value_order: ValueOrder | None,
) -> Iterator[AnyConfig]:
    knob = next((name for name in space.order if name not in settled), None)
    if knob is None:
        yield base
        return
    due = rules_due(space, frozenset(settled), knob)
    for value in value_order(knob, base, settled) if value_order else space.values[knob]:
        cfg = with_knob(base, knob, value)
        if all(rule.predicate(cfg, device) for rule in due):
            yield from _complete(space, cfg, (*settled, knob), device, value_order)
