"""SlotWriteKernelConfig: the knobs of the slot_write family; a config names one kernel.

The C++ struct with this name (csrc/slot_write/config.cuh) has the same fields in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashsmith.families.config import THREADS_PER_WARP, KernelConfig
from flashsmith.families.head_dims import d_v_knob
from flashsmith.families.knob import knob
from flashsmith.semantics.cache_format import CacheFormat
from flashsmith.semantics.dtype import DType

# The number of columns of a row that a thread copies: 16 bytes.
COLUMNS = 8


@dataclass(frozen=True, order=True)
class SlotWriteKernelConfig(KernelConfig):
    """A kernel that writes rows of k and v to slots of a cache.

    Raises:
        ArgumentError: a field has the wrong type, or is not in the range of an int.
    """

    FAMILY: ClassVar[str] = "slot_write"
    OLDEST_ARCH: ClassVar[int] = 80
    # For example '(FP16, 128, 4): write_slots'
    SHAPE: ClassVar[tuple[str, ...]] = ("dtype", "d_head", "n_warps")
    LEADING_WORD: ClassVar[str] = "write_slots"

    dtype: DType = knob(
        "element type of k, v and the caches",
        values=tuple(DType),
        effect=lambda cfg: (
            "k and v are read in it" if cfg.cache else "none: 16 bits are copied unread"
        ),
        where="slot_write_kernel",
    )
    d_head: int = knob(
        "head dimension, elements",
        values=(32, 64, 96, 128, 192, 256, 512),
        effect=lambda cfg: (
            f"{max(cfg.d_head, cfg.d_head_v) // COLUMNS} threads per row, {COLUMNS} columns each"
        ),
        where="slot_write_kernel",
    )
    n_warps: int = knob(
        "warps per CTA",
        values=(1, 2, 4, 8),
        effect=lambda cfg: f"{cfg.n_threads} threads per CTA, independent of each other",
        where="slot_write_kernel",
    )
    cache: CacheFormat = knob(
        "elements of the cache: those of k and v (plain), their quotients by a scale, or such "
        "quotients as 8-bit floats",
        values=tuple(CacheFormat),
        word="cache_",
        default=CacheFormat.PLAIN,
        effect=lambda cfg: (
            f"a thread divides, rounds and writes {COLUMNS} elements"
            if cfg.cache
            else "a thread copies 16 bytes"
        ),
        where="write_scaled",
    )
    d_v: int = d_v_knob()

    @property
    def n_threads(self) -> int:
        """The number of threads of a CTA."""
        return THREADS_PER_WARP * self.n_warps

    def smem_bytes(self, elem_size: int = 2) -> int:
        return 0

    def fills_tiles(self, seq_q: int, seq_k: int, d: int) -> bool:
        """Returns True: there are no tiles, so one kernel serves all sizes."""
        return True
