"""Configs of the wgmma family to test with: strategies and draws with its fields by name."""

from __future__ import annotations

import random
from dataclasses import fields

from hypothesis import strategies as st

from flashsmith.errors import ArgumentError
from flashsmith.families import (
    HOPPER_KNOB_VALUES,
    DType,
    PingPong,
    Schedule,
    WgmmaForwardKernelConfig,
)

SHIPPED = WgmmaForwardKernelConfig(
    DType.FP16,
    d_head=128,
    B_r=192,
    B_c=128,
    n_warpgroups=3,
    q_buffers=2,
    producer_registers=32,
    consumer_registers=160,
    pingpong=PingPong.GEMM,
    schedule=Schedule.DYNAMIC,
    rescale_threshold=8,
)

_INT_MAX = 2**31 - 1


def is_number(knob: str) -> bool:
    """Whether a knob's values have no names."""
    return type(HOPPER_KNOB_VALUES[knob][0]) is int


def lowest(knob: str) -> int:
    """The least number that the class accepts for a knob."""
    values = {field.name: getattr(SHIPPED, field.name) for field in fields(SHIPPED)}
    try:
        WgmmaForwardKernelConfig(**values | {knob: 0})
    except ArgumentError:
        return 1
    return 0


def _any_value(knob: str) -> st.SearchStrategy[object]:
    known = st.sampled_from(HOPPER_KNOB_VALUES[knob])
    return st.one_of(known, st.integers(lowest(knob), _INT_MAX)) if is_number(knob) else known


# Every config that the class accepts, legal or not.
any_config = st.builds(
    WgmmaForwardKernelConfig, **{knob: _any_value(knob) for knob in HOPPER_KNOB_VALUES}
)

# Values from the family's own domains, in any combination.
family_config = st.builds(
    WgmmaForwardKernelConfig,
    **{knob: st.sampled_from(values) for knob, values in HOPPER_KNOB_VALUES.items()},
)


def random_configs(count: int, seed: int) -> list[WgmmaForwardKernelConfig]:
    """Configs near and far from legal: family values, values beside them, and any int."""
    rng = random.Random(seed)
    lowest_of = {knob: lowest(knob) for knob in HOPPER_KNOB_VALUES if is_number(knob)}

    def value(knob: str) -> object:
        known = rng.choice(HOPPER_KNOB_VALUES[knob])
        if knob not in lowest_of or rng.random() < 0.8:
            return known
        if rng.random() < 0.9:
            assert isinstance(known, int)
            return max(lowest_of[knob], known + rng.choice((-8, -4, -1, 1, 4, 8, 64)))
        return rng.randint(lowest_of[knob], _INT_MAX)

    def config() -> WgmmaForwardKernelConfig:
        values = {knob: value(knob) for knob in HOPPER_KNOB_VALUES}
        if rng.random() < 0.7:  # else only few would be legal
            values["B_r"] = 64 * int(values["n_warpgroups"])  # type: ignore[call-overload]
            values["kv_stages"], values["producer_registers"] = rng.choice((1, 2)), 24
        values["B_r"] = min(int(values["B_r"]), _INT_MAX)  # type: ignore[call-overload]
        return WgmmaForwardKernelConfig(**values)  # type: ignore[arg-type]

    return [config() for _ in range(count)]
