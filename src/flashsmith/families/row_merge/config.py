"""RowMergeKernelConfig: the knobs of the row_merge family; a config names one kernel.

The C++ struct with this name (csrc/row_merge/config.cuh) has the same fields in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashsmith.families.config import THREADS_PER_WARP, KernelConfig
from flashsmith.families.knob import knob
from flashsmith.semantics.dtype import DType

# The number of columns of a row that a thread computes: 16 bytes of fp32.
COLUMNS = 4


@dataclass(frozen=True, order=True)
class RowMergeKernelConfig(KernelConfig):
    """A kernel that merges the outputs for parts of the keys, row by row.

    Raises:
        ArgumentError: a field has the wrong type, or is not in the range of an int.
    """

    FAMILY: ClassVar[str] = "row_merge"
    OLDEST_ARCH: ClassVar[int] = 80
    # For example '(FP16, 128, 4): merge'
    SHAPE: ClassVar[tuple[str, ...]] = ("dtype", "d_head", "n_warps")
    LEADING_WORD: ClassVar[str] = "merge"

    dtype: DType = knob(
        "element type of the tensors that are not fp32",
        values=tuple(DType),
        effect=lambda cfg: "element type of parts and output unless these are fp32",
        where="row_merge_kernel",
    )
    d_head: int = knob(
        "head dimension, elements",
        values=(32, 64, 96, 128, 192, 256),
        effect=lambda cfg: f"{cfg.d_head // COLUMNS} threads per row, {COLUMNS} columns each",
        where="row_merge_kernel",
    )
    n_warps: int = knob(
        "warps per CTA",
        values=(1, 2, 4, 8),
        effect=lambda cfg: f"{cfg.n_threads} threads per CTA, independent of each other",
        where="row_merge_kernel",
    )

    @property
    def n_threads(self) -> int:
        """The number of threads of a CTA."""
        return THREADS_PER_WARP * self.n_warps

    def smem_bytes(self, elem_size: int = 2) -> int:
        return 0

    def fills_tiles(self, seq_q: int, seq_k: int, d: int) -> bool:
        """Returns True: there are no tiles, so one kernel serves all sizes."""
        return True
