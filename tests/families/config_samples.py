"""Configs to test with: hypothesis strategies over all that can be written down, and a subclass."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import strategies as st

from flashsmith.families import KNOB_VALUES, DType, FlashForwardKernelConfig, Semantics
from flashsmith.families.knob import knob
from flashsmith.semantics import MASKS

LADDER_TOP = FlashForwardKernelConfig(
    DType.FP16, 128, 64, 64, 4, True, True, True, 0, 2, 2, False, True
)

_INT_MAX = 2**31 - 1
_sizes = st.one_of(st.sampled_from([16, 32, 64, 96, 128, 192, 256]), st.integers(1, _INT_MAX))
_counts = st.one_of(st.sampled_from([0, 2, 4, 8, 16, 32]), st.integers(0, _INT_MAX))

# Every config that the class accepts, legal or not.
any_config = st.builds(
    FlashForwardKernelConfig,
    dtype=st.sampled_from(DType),
    d_head=_sizes,
    B_r=_sizes,
    B_c=_sizes,
    n_warps=st.one_of(st.sampled_from([4, 8]), st.integers(1, _INT_MAX)),
    async_copy=st.booleans(),
    eager_load_blocks=st.booleans(),
    swizzled=st.booleans(),
    Q_mma_load_K_tiles=_counts,
    K_mma_load_K_tiles=_counts,
    V_mma_load_K_tiles=_counts,
    mma_double_buffer_loads=st.booleans(),
    optimized_softmax=st.booleans(),
    kv_stages=st.one_of(st.sampled_from([0, 2, 3, 4]), st.integers(0, _INT_MAX)),
    lazy_rescale=st.booleans(),
    ping_pong=st.booleans(),
    min_ctas_per_sm=st.one_of(st.sampled_from([0, 2, 3, 4]), st.integers(0, _INT_MAX)),
    trim_masks=st.booleans(),
    l2_group_mib=st.one_of(st.sampled_from([0, 16, 32]), st.integers(0, _INT_MAX)),
    split_keys=st.one_of(st.sampled_from([0, 2, 4, 8, 16, 32]), st.integers(0, _INT_MAX)),
    pack_gqa=st.booleans(),
)

any_semantics = st.builds(
    lambda mask, softcap, lengths: Semantics(mask, softcap, *lengths),
    st.sampled_from(MASKS),
    st.booleans(),
    st.sampled_from(
        [(False, False), (False, True), (True, True), (False, True, True), (True, True, True)]
    ),
)

# Values from the family's own domains, in any combination.
family_config = st.builds(
    FlashForwardKernelConfig,
    **{knob: st.sampled_from(values) for knob, values in KNOB_VALUES.items()},
)


def random_configs(count: int, seed: int) -> list[FlashForwardKernelConfig]:
    """Configs near and far from legal: family values, values beside them, and any int."""
    rng = random.Random(seed)
    near = {
        "d_head": (16, 40, 72, 80, 112, 160, 320, 512),
        "B_r": (16, 32, 64, 96, 128, 256),
        "B_c": (8, 16, 24, 32, 64, 96, 128, 256),
        "n_warps": (1, 2, 3, 4, 5, 8, 16, 32, 33),
        "kv_stages": (1, 2, 5, 7),
        "min_ctas_per_sm": (1, 2, 5, 16),
        "l2_group_mib": (1, 8, 64),
        "split_keys": (1, 3, 64),
    }
    loads = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)

    def value(knob: str) -> object:
        values = KNOB_VALUES[knob]
        if isinstance(values[0], (bool, DType)) or rng.random() < 0.7:
            return rng.choice(values)
        if rng.random() < 0.9:
            return rng.choice(near.get(knob, loads))
        return rng.randint(1, _INT_MAX)

    return [
        FlashForwardKernelConfig(**{knob: value(knob) for knob in KNOB_VALUES})
        for _ in range(count)
    ]


@dataclass(frozen=True, order=True)
class LaterConfig(FlashForwardKernelConfig):
    """The class as it may look after two more knobs were appended."""

    tiles_ahead: int = knob("loads in flight", values=(0, 1), word="tiles", default=0, lowest=0)
    fast: bool = knob("in less time", word="fast", default=False)
