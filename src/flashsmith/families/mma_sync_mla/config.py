"""MmaSyncMlaKernelConfig: the knobs of the mma_sync_mla family; a config names the kernels of a
call.

The C++ struct with this name (csrc/mma_sync_mla/config.cuh) has the same fields in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashsmith.families.config import THREADS_PER_WARP
from flashsmith.families.knob import knob
from flashsmith.families.latent import (
    LatentConfig,
    d_head_knob,
    d_v_knob,
    dtype_knob,
    min_keys_knob,
    most_parts_knob,
)
from flashsmith.semantics.cache_format import CacheFormat
from flashsmith.semantics.dtype import DType

ROWS, WARPS = 16, 4
_FLOAT_BYTES = 4


@dataclass(frozen=True, order=True)
class MmaSyncMlaKernelConfig(LatentConfig):
    """Attention over a latent cache, by the mma_sync_mla family (sm_80 and later).

    Raises:
        ArgumentError: a field has the wrong type, or is not in the range of an int.
    """

    FAMILY: ClassVar[str] = "mma_sync_mla"
    OLDEST_ARCH: ClassVar[int] = 80
    # For example '(BF16, 576:512, 32): latent_mma+stages_3+least_512+parts_16'
    SHAPE: ClassVar[tuple[str, ...]] = ("dtype", "d_head", "B_c")
    LEADING_WORD: ClassVar[str] = "latent_mma"

    dtype: DType = dtype_knob("StaticMmaSyncMlaConfig")
    d_head: int = d_head_knob(
        "StaticMmaSyncMlaConfig",
        lambda cfg: (
            f"a warp multiplies {cfg.d_head // 2} columns of q with those of {cfg.B_c // 2} keys"
        ),
    )
    B_c: int = knob(
        "keys of a block",
        values=(32, 64),
        effect=lambda cfg: f"a CTA computes the scores of {cfg.B_c} keys at a time",
        where="MlaPart::run",
    )
    stages: int = knob(
        "blocks of keys in shared memory",
        values=(2, 3, 4, 5, 6),
        word="stages",
        default=3,
        always=True,
        effect=lambda cfg: f"{cfg.stages - 1} blocks are copied while one is multiplied",
        where="MlaBlockCopies",
    )
    min_keys: int = min_keys_knob((64, 128, 256, 512, 1024, 2048))
    most_parts: int = most_parts_knob()
    lazy_rescale: bool = knob(
        "O is rescaled only if the new maximum has enough weight",
        word="lazy",
        default=False,
        effect=lambda cfg: (
            "O is rescaled only once a row's new maximum has a large share of its weight, or is "
            "2^8 times the old one"
            if cfg.lazy_rescale
            else "O is rescaled for every block of keys"
        ),
        where="OnlineSoftmax",
    )
    d_v: int = d_v_knob(
        "StaticMmaSyncMlaConfig",
        lambda cfg: f"each of {WARPS} warps sums {cfg.d_v // WARPS} columns of o",
    )
    cache: CacheFormat = knob(
        "elements of the cache: q's dtype without (plain) or with a scale, or 8-bit floats with a "
        "scale",
        values=tuple(CacheFormat),
        word="cache_",
        default=CacheFormat.PLAIN,
        effect=lambda cfg: (
            f"rows are {cfg.cache.name.lower()} codes, which warps widen as they multiply them"
            if cfg.cache.is_8bit
            else "rows are used as they are stored"
        ),
        where="MlaPart::own_keys",
    )

    @property
    def B_r(self) -> int:
        """The number of query rows of a CTA's tile."""
        return ROWS

    @property
    def n_warps(self) -> int:
        """The number of warps of a CTA."""
        return WARPS

    @property
    def n_threads(self) -> int:
        return WARPS * THREADS_PER_WARP

    @property
    def share_bytes(self) -> int:
        """The bytes of shared memory for the warps' shares of the scores in fp32; each score is the
        sum of two shares."""
        return 2 * ROWS * self.B_c * _FLOAT_BYTES

    @property
    def cache_element_bytes(self) -> int:
        """The number of bytes of an element of the cache."""
        return 1 if self.cache.is_8bit else self.dtype.element_size

    def smem_bytes(self, elem_size: int = 2) -> int:
        row = self.d_head * (1 if self.cache.is_8bit else elem_size)
        return self.stages * self.B_c * row + self.share_bytes
