"""WgmmaMlaKernelConfig: the knobs of the wgmma_mla family; a config names the kernels of a call.

The C++ struct with this name (csrc/wgmma_mla/config.cuh) has the same fields in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashsmith.families.knob import knob
from flashsmith.families.latent import (
    LatentConfig,
    d_head_knob,
    d_v_knob,
    dtype_knob,
    min_keys_knob,
    most_parts_knob,
)
from flashsmith.families.warpgroups import (
    REGISTERS_WORD,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    registers_knob,
)
from flashsmith.semantics.dtype import DType

# The number of blocks of keys in flight: one per consumer warpgroup.
STAGES = 2
# The bytes of shared memory for barriers and for the maxima and sums that warpgroups exchange.
PAGE_BYTES = 3072


@dataclass(frozen=True, order=True)
class WgmmaMlaKernelConfig(LatentConfig):
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

    dtype: DType = dtype_knob("StaticMlaConfig")
    d_head: int = d_head_knob(
        "StaticMlaConfig",
        lambda cfg: (
            f"scores take {cfg.d_head // 16} k16-steps, of which {(cfg.d_head - cfg.d_v) // 16} "
            "are of columns that are no values"
        ),
    )
    min_keys: int = min_keys_knob((128, 256, 512, 1024, 2048))
    most_parts: int = most_parts_knob()
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
    d_v: int = d_v_knob(
        "StaticMlaConfig",
        lambda cfg: f"each of two warpgroups sums {cfg.d_v // 2} columns of o",
    )
    run_keys: int = knob(
        "keys of the parts that a CTA computes one after another; 0: one part",
        values=(0, 2048, 4096, 8192),
        word="run",
        default=0,
        lowest=0,
        effect=lambda cfg: (
            f"a CTA computes parts of up to {cfg.run_keys} keys one after another, unless SMs "
            "would have none"
            if cfg.run_keys
            else "a CTA computes one part"
        ),
        where="parts_of_run",
    )
    panel_waits: bool = knob(
        "whether scores wait for each 64 columns of a block, and not for a half of v's columns",
        word="by_panel",
        default=False,
        effect=lambda cfg: (
            f"each of {cfg.d_head // 64} panels of a block has a barrier, so that scores of one "
            "overlap the copies of the next"
            if cfg.panel_waits
            else "a block arrives in three sections: two halves of v and the columns behind them"
        ),
        where="barrier_index",
    )
    panels_ahead: int = knob(
        "panels of 64 columns whose scores a warpgroup computes before it multiplies the other's "
        "probabilities; 0: the second warpgroup computes all, the first none",
        values=(0, 1, 3),
        word="ahead",
        default=0,
        lowest=0,
        effect=lambda cfg: (
            f"scores of {64 * cfg.panels_ahead} columns of a warpgroup's next block come before "
            "its product with the other's block, and those of the others after it"
            if cfg.panels_ahead
            else "the second warpgroup computes the scores of its block before its product with "
            "the first's block"
        ),
        where="in_turn",
    )
    evict_keys: bool = knob(
        "whether the L2 evicts keys first, so that the rows of parts stay in it until the merge",
        word="evict_first",
        default=False,
        effect=lambda cfg: (
            "copies of keys tell the L2 to evict them first"
            if cfg.evict_keys
            else "the L2 evicts keys as it evicts everything else"
        ),
        where="MlaProducer",
    )

    @property
    def B_r(self) -> int:
        """The number of query rows of a CTA's tile."""
        return WARPGROUP_ROWS

    @property
    def B_c(self) -> int:
        """The number of keys of a block."""
        return WARPGROUP_ROWS

    @property
    def n_warpgroups(self) -> int:
        """The number of consumer warpgroups."""
        return STAGES

    @property
    def n_threads(self) -> int:
        """The number of threads of a CTA, including the threads of the producer."""
        return WARPGROUP_THREADS * (self.n_warpgroups + 1)

    @property
    def accumulators(self) -> int:
        """The number of registers that a consumer thread needs for O, S and P."""
        return self.d_v // 4 + self.B_c // 2 + self.B_c // 4

    def smem_bytes(self, elem_size: int = 2) -> int:
        rows = self.B_r + STAGES * self.B_c
        return (rows * self.d_head + self.B_r * self.B_c) * elem_size + PAGE_BYTES
