"""FlashBackwardKernelConfig: the knobs of the mma_sync_backward family; a config names the kernels
of a backward pass.

The C++ struct with this name (csrc/mma_sync_backward/config.cuh) has the same fields in the same
order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import lcm
from typing import ClassVar

from flashsmith.families.config import THREADS_PER_WARP, KernelConfig
from flashsmith.families.head_dims import d_v_knob, step_columns, tile_columns
from flashsmith.families.knob import knob
from flashsmith.semantics.dtype import DType

MMA_ROWS = 16  # Rows of one MMA m16n8k16, and also its depth k
_FLOAT_BYTES = 4


class DqMode(IntEnum):
    """How the contributions of several CTAs to dq are summed."""

    TWO_KERNELS = 0
    ATOMICS = 1


_DQ_MODES = {
    DqMode.TWO_KERNELS: "a second kernel recomputes the scores for dq: the same bits in every run",
    DqMode.ATOMICS: "each block of keys adds its part to fp32 sums, in no fixed order",
}


@dataclass(frozen=True, order=True)
class FlashBackwardKernelConfig(KernelConfig):
    """A backward pass by the mma_sync_backward family (sm_80 and later).

    Raises:
        ArgumentError: a field has the wrong type, or is not in the range of an int.
    """

    FAMILY: ClassVar[str] = "mma_sync_backward"
    OLDEST_ARCH: ClassVar[int] = 80
    # For example '(FP16, 64, 64, 128, 8): backward+columns_2+stages_2+dq_atomics'
    SHAPE: ClassVar[tuple[str, ...]] = ("dtype", "d_head", "B_r", "B_c", "n_warps")
    LEADING_WORD: ClassVar[str] = "backward"

    dtype: DType = knob(
        "element type of the tensors",
        values=tuple(DType),
        effect=lambda cfg: "element type of q, k, v, o and the gradients; sums are fp32",
        where="mma_m16n8k16",
    )
    d_head: int = knob(
        "head dimension, elements",
        values=(32, 64, 72, 80, 96, 128, 192, 256, 512),
        effect=lambda cfg: (
            f"S takes {step_columns(cfg.d_head) // MMA_ROWS} k16-steps and dP "
            f"{step_columns(cfg.d_head_v) // MMA_ROWS}; a lane sums {cfg.accumulators} elements of "
            "dk and dv"
        ),
        where="StaticBackwardKernelConfig",
    )
    B_r: int = knob(
        "query rows of a loop step",
        values=(32, 64, 128),
        effect=lambda cfg: f"a loop step takes {cfg.B_r} queries",
        where="KeysBlock::step",
    )
    B_c: int = knob(
        "rows of K and V that a CTA keeps",
        values=(32, 64, 128),
        effect=lambda cfg: f"a CTA owns {cfg.B_c} keys, a warp {cfg.keys_per_warp}",
        where="StaticBackwardKernelConfig",
    )
    n_warps: int = knob(
        "warps per CTA",
        values=(4, 8),
        effect=lambda cfg: f"{cfg.n_threads} threads per CTA",
        where="StaticBackwardKernelConfig",
    )
    column_warps: int = knob(
        "warps that share the same keys, each with its part of queries and columns",
        values=(1, 2, 4),
        word="columns",
        default=1,
        effect=lambda cfg: (
            "P and dS stay in registers as operands of dv and dk"
            if cfg.column_warps == 1
            else f"{cfg.column_warps} warps share keys: P and dS go through shared memory"
        ),
        where="KeysBlock::store_scores",
    )
    stages: int = knob(
        "stages of the streamed tiles in shared memory",
        values=(1, 2),
        word="stages",
        default=1,
        effect=lambda cfg: (
            "a step's tiles are copied once all warps have finished the previous step"
            if cfg.stages == 1
            else "the copy of the next step's tiles overlaps this step's GEMMs"
        ),
        where="KeysBlock::run",
    )
    dq: DqMode = knob(
        "how dq is summed",
        values=tuple(DqMode),
        word="dq_",
        default=DqMode.TWO_KERNELS,
        effect=lambda cfg: _DQ_MODES[cfg.dq],
        where="KeysBlock::add_dq",
    )
    d_v: int = d_v_knob()

    # --- shapes and resources --------------------------------------------------------------------

    @property
    def n_threads(self) -> int:
        """The number of threads of a CTA."""
        return self.n_warps * THREADS_PER_WARP

    @property
    def keys_per_warp(self) -> int:
        """The number of keys for which one warp computes scores."""
        return self.B_c * self.column_warps // self.n_warps

    @property
    def accumulators(self) -> int:
        """The number of fp32 elements of dk and dv that a lane accumulates, in tiles of 8
        columns."""
        tiles = sum(-(-d // (8 * self.column_warps)) for d in (self.d_head, self.d_head_v))
        return self.keys_per_warp * tiles * 8 // THREADS_PER_WARP

    @property
    def scores(self) -> int:
        """The number of fp32 elements of S that a lane computes per step, which is also the number
        of elements of dP."""
        return self.B_r * self.B_c // self.n_threads

    @property
    def dq_rows(self) -> int:
        """The number of query rows of a CTA in the kernel that computes only dq."""
        return MMA_ROWS * self.n_warps

    def keys_smem_bytes(self, elem_size: int = 2) -> int:
        """The bytes of shared memory of a CTA that keeps keys: for K and V, for the stages of Q and
        do with their row statistics, and for the parts of dS and P that warps exchange. With
        atomics, the CTA keeps the dS of two steps, because it computes dq one step later."""
        columns = tile_columns(self.d_head) + tile_columns(self.d_head_v)
        streamed = self.stages * self.B_r * (columns * elem_size + 2 * _FLOAT_BYTES)
        shared = self.column_warps > 1
        exchanged = shared + (2 if self.dq == DqMode.ATOMICS else shared)
        return (columns + exchanged * self.B_r) * self.B_c * elem_size + streamed

    def queries_smem_bytes(self, elem_size: int = 2) -> int:
        """The bytes of shared memory of a CTA that keeps queries: for Q, do, and the stages of K
        and V."""
        columns = tile_columns(self.d_head) + tile_columns(self.d_head_v)
        return (self.dq_rows + self.stages * self.B_r) * columns * elem_size

    def smem_bytes(self, elem_size: int = 2) -> int:
        """The bytes of a CTA's dynamic shared memory, in the kernel that needs more of it."""
        keys = self.keys_smem_bytes(elem_size)
        if self.dq == DqMode.ATOMICS:
            return keys
        return max(keys, self.queries_smem_bytes(elem_size))

    @property
    def divisors(self) -> tuple[int, int]:
        """The two numbers of which the numbers of queries and of keys must be multiples so that all
        tiles are whole."""
        return lcm(self.B_r, self.dq_rows), lcm(self.B_r, self.B_c)

    def fills_tiles(self, seq_q: int, seq_k: int, d: int) -> bool:
        """Whether these sizes consist of whole tiles, so that kernels without bounds checks can
        compute the problem."""
        rows, keys = self.divisors
        return seq_q % rows == 0 and seq_k % keys == 0 and d == self.d_head and seq_k > 0
