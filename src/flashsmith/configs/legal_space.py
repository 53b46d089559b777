"""The space of legal configs: the values of each knob, and how to complete a partial choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

from flashsmith.configs.config import FlashForwardKernelConfig
from flashsmith.configs.device_spec import DeviceSpec
from flashsmith.configs.dtype import DType
from flashsmith.configs.rules import (
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

# The order in which a partial choice is completed: what many rules read comes first, so that dead
# ends are met early.
_SETTLING_ORDER = (
    "dtype", "d_head", "n_warps", "B_r", "min_ctas_per_sm", "ping_pong", "kv_stages", "B_c",
)  # fmt: skip
SETTLING_ORDER = (*_SETTLING_ORDER, *(knob for knob in KNOB_VALUES if knob not in _SETTLING_ORDER))

ValueOrder = Callable[[str, FlashForwardKernelConfig, Sequence[str]], Sequence[object]]


def with_knob(cfg: FlashForwardKernelConfig, knob: str, value: object) -> FlashForwardKernelConfig:
    """`cfg` with another of KNOB_VALUES: dataclasses.replace without its checks, at 1% of its cost.

    A search makes a million of these.
    """
    changed = object.__new__(type(cfg))
    changed.__dict__.update(cfg.__dict__)
    changed.__dict__[knob] = value
    return changed


def legal_completions(
    base: FlashForwardKernelConfig,
    settled: Sequence[str],
    device: DeviceSpec,
    value_order: ValueOrder | None = None,
) -> Iterator[FlashForwardKernelConfig]:
    """Legal configs that agree with `base` on the `settled` knobs, depth first.

    value_order(knob, config so far, settled knobs) says in which order a knob's values are tried;
    by default that of KNOB_VALUES. A rule is asked as soon as its last knob is settled, so dead
    ends are left early.
    """
    if all(rule.predicate(base, device) for rule in RULES if set(rule.knobs) <= set(settled)):
        yield from _complete(base, tuple(settled), device, value_order)


@cache
def rules_due(settled: frozenset[str], knob: str) -> tuple[Rule, ...]:
    """The rules that can be asked once `knob` is settled too, and not before."""
    now = settled | {knob}
    return tuple(rule for rule in RULES if knob in rule.knobs and set(rule.knobs) <= now)


def _complete(
    base: FlashForwardKernelConfig,
    settled: tuple[str, ...],
    device: DeviceSpec,
    value_order: ValueOrder | None,
) -> Iterator[FlashForwardKernelConfig]:
    knob = next((name for name in SETTLING_ORDER if name not in settled), None)
    if knob is None:
        yield base
        return
    due = rules_due(frozenset(settled), knob)
    for value in value_order(knob, base, settled) if value_order else KNOB_VALUES[knob]:
        cfg = with_knob(base, knob, value)
        if all(rule.predicate(cfg, device) for rule in due):
            yield from _complete(cfg, (*settled, knob), device, value_order)
