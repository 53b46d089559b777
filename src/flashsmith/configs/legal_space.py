"""The space of legal configs: the values of each knob, and how to complete a partial choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from flashsmith.configs.config import FlashForwardKernelConfig
from flashsmith.configs.device_spec import DeviceSpec
from flashsmith.configs.dtype import DType
from flashsmith.configs.rules import (
    RULES,
    SUPPORTED_B_C,
    SUPPORTED_B_R,
    SUPPORTED_D_HEADS,
    SUPPORTED_N_WARPS,
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
}

ValueOrder = Callable[[str, FlashForwardKernelConfig, Sequence[str]], Sequence[object]]


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


def _complete(
    base: FlashForwardKernelConfig,
    settled: tuple[str, ...],
    device: DeviceSpec,
    value_order: ValueOrder | None,
) -> Iterator[FlashForwardKernelConfig]:
    knob = next((name for name in KNOB_VALUES if name not in settled), None)
    if knob is None:
        yield base
        return
    now_settled = (*settled, knob)
    due = [rule for rule in RULES if knob in rule.knobs and set(rule.knobs) <= set(now_settled)]
    for value in value_order(knob, base, settled) if value_order else KNOB_VALUES[knob]:
        cfg = replace(base, **{knob: value})  # type: ignore[arg-type]
        if all(rule.predicate(cfg, device) for rule in due):
            yield from _complete(cfg, now_settled, device, value_order)
