"""ScoreSumsKernelConfig: the knobs of the score_sums family; a config names one kernel.

The C++ struct with this name (csrc/score_sums/config.cuh) has the same fields in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashsmith.families.config import THREADS_PER_WARP, KernelConfig
from flashsmith.families.knob import knob
from flashsmith.semantics.dtype import DType

# The number of queries and the number of keys of a tile. Each of the four warps has 16 queries.
TILE = 64
_FLOAT_BYTES = 4


@dataclass(frozen=True, order=True)
class ScoreSumsKernelConfig(KernelConfig):
    """A kernel that sums the gradients of scores.

    Raises:
        ArgumentError: a field has the wrong type, or is not in the range of an int.
    """

    FAMILY: ClassVar[str] = "score_sums"
    OLDEST_ARCH: ClassVar[int] = 80
    # For example '(FP16, 128): score_sums'
    SHAPE: ClassVar[tuple[str, ...]] = ("dtype", "d_head")
    LEADING_WORD: ClassVar[str] = "score_sums"

    dtype: DType = knob(
        "element type of q, k, v, o and do",
        values=tuple(DType),
        effect=lambda cfg: f"{cfg.dtype.name} operands of mma.sync; sums are fp32",
        where="score_sums_kernel",
    )
    d_head: int = knob(
        "head dimension, elements",
        values=(32, 64, 96, 128, 192, 256),
        effect=lambda cfg: f"{cfg.smem_bytes()} bytes of shared memory for the tiles of a CTA",
        where="score_sums_kernel",
    )

    @property
    def n_threads(self) -> int:
        """The number of threads of a CTA."""
        return TILE // 16 * THREADS_PER_WARP

    def smem_bytes(self, elem_size: int = 2) -> int:
        """The bytes of a CTA's dynamic shared memory, which holds tiles of q, do, k and v, and
        later a tile of fp32 sums in their place."""
        return max(4 * TILE * self.d_head * elem_size, TILE * (TILE + 1) * _FLOAT_BYTES)

    def fills_tiles(self, seq_q: int, seq_k: int, d: int) -> bool:
        return seq_q % TILE == 0 and seq_k % TILE == 0 and d == self.d_head
