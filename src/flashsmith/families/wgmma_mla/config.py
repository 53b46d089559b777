"""WgmmaMlaKernelConfig: the knobs of the wgmma_mla family; a config names the kernels of a call.

The C++ struct with this name (csrc/wgmma_mla/config.cuh) has the same fields in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashsmith.families.config import KernelConfig
from flashsmith.families.knob import knob
from flashsmith.families.warpgroups import (
    REGISTERS_WORD,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    registers_knob,
)
from flashsmith.semantics.dtype import DType

# Blocks of keys in flight, one for each of the consumer warpgroups.
STAGES = 2
# For barriers, and for the maxima and sums that warpgroups exchange.
PAGE_BYTES = 3072


@dataclass(frozen=True, order=True)
class WgmmaMlaKernelConfig(KernelConfig):
    """Attention over a latent cache, by the wgmma_mla family (sm_90a).

    Raises:
        ArgumentError: a field has the wrong type, or is not in the range of an int.
    """

    FAMILY: ClassVar[str] = "wgmma_mla"
    OLDEST_ARCH: ClassVar[int] = 90
    # For example '(BF16, 576:512): latent+least_512+parts_16+regs_24_240+lazy_8'
    SHAPE: ClassVar[tuple[str, ...]] = ("dtype", "d_head")
    LEADING_WORD: ClassVar[str] = "latent"
    GROUPS: ClassVar = (REGISTERS_WORD,)

    dtype: DType = knob(
        "element type of q, the cache and o",
        values=tuple(DType),
        effect=lambda cfg: "element type of q, the cache and o; sums are fp32",
        where="StaticMlaConfig",
    )
    d_head: int = knob(
        "columns of q and of the cache",
        values=(320, 576),
        effect=lambda cfg: (
            f"scores take {cfg.d_head // 16} k16-steps, of which {(cfg.d_head - cfg.d_v) // 16} "
            "are of columns that are no values"
        ),
        where="StaticMlaConfig",
    )
    min_keys: int = knob(
        "minimum keys in a part of a sequence",
        values=(128, 256, 512, 1024, 2048),
        word="least",
        default=512,
        always=True,
        effect=lambda cfg: f"sequences of {2 * cfg.min_keys} or more keys are split",
        where="MlaTile",
    )
    most_parts: int = knob(
        "maximum parts of a sequence; each needs workspace for its rows of o",
        values=(1, 2, 4, 8, 16, 32, 64),
        word="parts",
        default=16,
        always=True,
        effect=lambda cfg: f"up to {cfg.most_parts} CTAs share the keys of 64 rows",
        where="MlaTile",
    )
    producer_registers: int = registers_knob("producer", 24, "mla_kernel")
    consumer_registers: int = registers_knob("consumer", 240, "mla_kernel")
    rescale_threshold: int = knob(
        "log2 of how far a row's maximum may grow before its sums are rescaled; 0: at once",
        values=(0, 8),
        word="rescale",
        default=0,
        lowest=0,
        effect=lambda cfg: (
            f"O is rescaled only once a row's maximum has grown by a factor of "
            f"2^{cfg.rescale_threshold}"
            if cfg.rescale_threshold
            else "O is rescaled whenever a maximum grows"
        ),
        where="MlaConsumer",
    )
    d_v: int = knob(
        "columns of v and o, the first ones of a row of the cache",
        values=(256, 512),
        default=0,
        lowest=0,
        effect=lambda cfg: f"each of two warpgroups sums {cfg.d_v // 2} columns of o",
        where="StaticMlaConfig",
    )

    @property
    def B_r(self) -> int:
        """Query rows of a CTA's tile."""
        return WARPGROUP_ROWS

    @property
    def B_c(self) -> int:
        """Keys of a block."""
        return WARPGROUP_ROWS

    @property
    def n_warpgroups(self) -> int:
        """Consumer warpgroups."""
        return STAGES

    @property
    def n_threads(self) -> int:
        """Threads of a CTA, including the producer's."""
        return WARPGROUP_THREADS * (self.n_warpgroups + 1)

    @property
    def accumulators(self) -> int:
        """Registers of a consumer thread for O, S and P."""
        return self.d_v // 4 + self.B_c // 2 + self.B_c // 4

    def smem_bytes(self, elem_size: int = 2) -> int:
        rows = self.B_r + STAGES * self.B_c
        return (rows * self.d_head + self.B_r * self.B_c) * elem_size + PAGE_BYTES

    def fills_tiles(self, seq_q: int, seq_k: int, d: int) -> bool:
        """Any lengths may occur, so one kernel serves all sizes."""
        return True
