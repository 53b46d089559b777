"""WgmmaDqKernelConfig: the knobs of the wgmma_dq family; a config names the kernels of a backward
pass.

The C++ struct with this name (csrc/wgmma_dq/config.cuh) has the same fields in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flashsmith.families.earlier_names import getter
from flashsmith.families.head_dims import d_v_knob, step_columns, tile_columns
from flashsmith.families.knob import KnobGroup, knob
from flashsmith.families.warpgroups import (
    REGISTERS_WORD,
    WARPGROUP_ROWS,
    WarpgroupBackwardConfig,
    pingpong_knob,
    registers_knob,
    ring_knob,
)
from flashsmith.semantics.dtype import DType

# The bytes of shared memory for barriers, in addition to the tiles.
BARRIER_PAGE = 256
D_HEADS = (64, 72, 80, 96, 128, 192, 256)
_WARPGROUPS = (1, 2, 3)


@dataclass(frozen=True, order=True)
class WgmmaDqKernelConfig(WarpgroupBackwardConfig):
    """A backward pass for dq alone, by the wgmma_dq family (sm_90a).

    Raises:
        ArgumentError: a field has the wrong type or is out of range.
    """

    FAMILY: ClassVar[str] = "wgmma_dq"
    OLDEST_ARCH: ClassVar[int] = 90
    # For example '(BF16, 128, 128, 64, 2):
    # tma_dq+k_stages_3+v_stages_2+regs_24_240+late_dq+pingpong'
    SHAPE: ClassVar[tuple[str, ...]] = ("dtype", "d_head", "B_r", "B_c", "n_warpgroups")
    LEADING_WORD: ClassVar[str] = "tma_dq"
    GROUPS: ClassVar[tuple[KnobGroup, ...]] = (REGISTERS_WORD,)

    dtype: DType = knob(
        "element type of the tensors",
        values=tuple(DType),
        effect=lambda cfg: "element type of q, k, v, o and dq; sums are fp32",
        where="Wgmma",
    )
    d_head: int = knob(
        "head dimension, elements",
        values=D_HEADS,
        effect=lambda cfg: (
            f"S takes {step_columns(cfg.d_head) // 16} k16-steps and dP "
            f"{step_columns(cfg.d_head_v) // 16}; dq has {cfg.d_head // 2} registers a thread"
        ),
        where="StaticHopperDqKernelConfig",
    )
    B_r: int = knob(
        "query rows that a CTA keeps",
        values=tuple(WARPGROUP_ROWS * count for count in _WARPGROUPS),
        effect=lambda cfg: f"a CTA owns {cfg.B_r} queries",
        where="QueryBlock",
    )
    B_c: int = knob(
        "keys of a loop step",
        values=(64, 96, 128),
        effect=lambda cfg: f"a loop step takes {cfg.B_c} keys: S has {cfg.B_c // 2} registers",
        where="DqConsumer::steps",
    )
    n_warpgroups: int = knob(
        "consumer warpgroups, 64 queries each; one more is the producer",
        values=_WARPGROUPS,
        effect=lambda cfg: (
            f"{cfg.n_warpgroups} consumer warpgroups, 64 queries each; with the producer "
            f"{cfg.n_threads} threads per CTA"
        ),
        where="DqConsumer",
    )
    k_stages: int = ring_knob("K", "k_stages", "DqProducer::load_keys")
    v_stages: int = ring_knob("V", "v_stages", "DqProducer::load_keys")
    producer_registers: int = registers_knob("producer", default=24, kernel="hopper_dq_kernel")
    consumer_registers: int = registers_knob("consumer", default=240, kernel="hopper_dq_kernel")
    late_dq: bool = knob(
        "a step's dq is computed together with the next step's scores",
        word="late_dq",
        default=False,
        effect=lambda cfg: (
            "a step's dq is computed between the next step's S and dP and overlaps exponentials"
            if cfg.late_dq
            else "a step waits for its dq before the next step's S"
        ),
        where="DqConsumer::steps_with_late_dq",
    )
    pingpong: bool = pingpong_knob()
    d_v: int = d_v_knob()

    # --- shapes and resources --------------------------------------------------------------------

    @property
    def accumulators(self) -> int:
        """The number of registers that a thread needs for dq, S and dP and, with late_dq, for
        dS."""
        return self.d_head // 2 + self.B_c + self.late_dq * self.B_c // 4

    def tile_bytes(self, elem_size: int = 2) -> int:
        """The bytes of Q and do, and of the stages of K and V."""
        of_qk = (self.B_r + self.k_stages * self.B_c) * tile_columns(self.d_head)
        of_v = (self.B_r + self.v_stages * self.B_c) * tile_columns(self.d_head_v)
        return (of_qk + of_v) * elem_size

    def smem_bytes(self, elem_size: int = 2) -> int:
        """The bytes of a CTA's dynamic shared memory: for the tiles and barriers."""
        return self.tile_bytes(elem_size) + BARRIER_PAGE


if not TYPE_CHECKING:  # A type checker would otherwise accept any attribute
    __getattr__ = getter(__name__)
