"""Which values the knobs of the wgmma family have in legal configs."""

from __future__ import annotations

from dataclasses import Field, fields
from typing import Any

from flashsmith.families.config import is_flag
from flashsmith.families.wgmma.config import (
    ENUMERATIONS,
    WARPGROUP_ROWS,
    HopperForwardKernelConfig,
)
from flashsmith.families.wgmma.rules import (
    B_C_STEP,
    CLUSTER_SIZES,
    HOPPER_D_HEADS,
    MAX_B_C,
    MAX_CTAS,
    MAX_EXP2_FMA_SHARE,
    MAX_KV_STAGES,
    MAX_REGISTERS,
    MAX_RESCALE_THRESHOLD,
    MAX_WARPGROUPS,
    MIN_B_C,
    MIN_REGISTERS,
    Q_BUFFERS,
    REGISTER_UNIT,
    REGISTERS_BESIDE_TILES,
    SECTIONS_MIB,
)
from flashsmith.operations.dtype import DType

_WARPGROUPS = tuple(range(1, MAX_WARPGROUPS + 1))
_REGISTERS = range(MIN_REGISTERS, MAX_REGISTERS + 1, REGISTER_UNIT)
# What the smallest tiles need: O's columns and S's, and what is beside them.
_LEAST_TO_COMPUTE = HOPPER_D_HEADS[0] // 2 + MIN_B_C // 2 + REGISTERS_BESIDE_TILES
_NUMBERS: dict[str, tuple[int, ...]] = {
    "d_head": HOPPER_D_HEADS,
    "B_r": tuple(WARPGROUP_ROWS * count for count in _WARPGROUPS),
    "B_c": tuple(range(MIN_B_C, MAX_B_C + 1, B_C_STEP)),
    "n_warpgroups": _WARPGROUPS,
    "kv_stages": tuple(range(1, MAX_KV_STAGES + 1)),
    "q_buffers": Q_BUFFERS,
    "producer_registers": tuple(_REGISTERS),
    "consumer_registers": tuple(count for count in _REGISTERS if count >= _LEAST_TO_COMPUTE),
    "cluster_size": CLUSTER_SIZES,
    "rescale_threshold": tuple(range(MAX_RESCALE_THRESHOLD + 1)),
    "section_mib": SECTIONS_MIB,
    "ctas_per_sm": tuple(range(1, MAX_CTAS + 1)),
    "exp2_fma_share": tuple(range(MAX_EXP2_FMA_SHARE + 1)),
}


def _values(knob: Field[Any]) -> tuple[object, ...]:
    if knob.name == "dtype":
        return tuple(DType)
    if knob.name in ENUMERATIONS:
        return tuple(ENUMERATIONS[knob.name])
    return (False, True) if is_flag(knob) else _NUMBERS[knob.name]


# Every value that a knob has in some legal config, in the order of the fields.
HOPPER_KNOB_VALUES: dict[str, tuple[object, ...]] = {
    knob.name: _values(knob) for knob in fields(HopperForwardKernelConfig)
}
