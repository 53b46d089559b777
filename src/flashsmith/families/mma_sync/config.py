"""FlashForwardKernelConfig: the knobs that name one kernel of the mma.sync family.

The C++ struct of the same name (csrc/mma_sync/flash_attention.cuh) has the same fields in the same
order.
"""

from __future__ import annotations

import operator
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar

from flashsmith.errors import ArgumentError
from flashsmith.families.config import INT_MAX, THREADS_PER_WARP, FamilyConfig, is_flag
from flashsmith.operations.dtype import DType
from flashsmith.printable import quoted

K_TILE_COLUMNS = 8


def _feature(meaning: str, word: str | None) -> dict[str, str | None]:
    """Metadata of a knob whose zero is 'as before'. `word` is its name in the short form."""
    return {"meaning": meaning, "word": word}


@dataclass(frozen=True, order=True)
class FlashForwardKernelConfig(FamilyConfig):
    """One forward kernel of the mma.sync family (sm_80 and later), ordered field by field.

    Any positive tile sizes and non-negative load counts can be written down; whether a kernel can
    be built for them is for flashsmith.families.legality to say. A later knob goes at the end with
    a zero default that means today's behaviour.

    Raises:
        ArgumentError: a field has the wrong type or is out of an int's range.
    """

    FAMILY: ClassVar[str] = "mma_sync"
    OLDEST_ARCH: ClassVar[int] = 80

    dtype: DType = field(metadata={"meaning": "element type of q, k, v and o"})
    d_head: int = field(metadata={"meaning": "head dimension, elements"})
    B_r: int = field(metadata={"meaning": "rows of Q and O per CTA"})
    B_c: int = field(metadata={"meaning": "rows of K and V per tile"})
    n_warps: int = field(metadata={"meaning": "warps per CTA"})
    async_copy: bool = field(
        default=False,
        metadata=_feature("tiles arrive by cp.async instead of 16-byte loads", "async"),
    )
    eager_load_blocks: bool = field(
        default=False,
        metadata=_feature("the next K (V) tile is fetched once its buffer is free", "eager"),
    )
    swizzled: bool = field(
        default=False,
        metadata=_feature("16-byte chunks of shared memory are XOR-swizzled", "swizzled"),
    )
    Q_mma_load_K_tiles: int = field(
        default=0, metadata=_feature("K-tiles of Q fetched per step; 0: all before", None)
    )
    K_mma_load_K_tiles: int = field(
        default=0, metadata=_feature("K-tiles of K fetched per step; 0: all before", None)
    )
    V_mma_load_K_tiles: int = field(
        default=0, metadata=_feature("K-tiles of V fetched per step; 0: all before", None)
    )
    mma_double_buffer_loads: bool = field(
        default=False,
        metadata=_feature("the next fragments are fetched before the current mma", "buffer"),
    )
    optimized_softmax: bool = field(
        default=False,
        metadata=_feature(
            "scale folded into one FMA before exp2, first tile peeled", "opt_softmax"
        ),
    )
    kv_stages: int = field(
        default=0,
        metadata=_feature(
            "K/V tile pairs in a ring, filled ahead; 0: one pair, K and V each filled once free",
            "stages",
        ),
    )
    lazy_rescale: bool = field(
        default=False,
        metadata=_feature("O is rescaled only for a new maximum of some weight", "lazy_rescale"),
    )
    ping_pong: bool = field(
        default=False,
        metadata=_feature("two halves of the warps run half a K/V block apart", "ping_pong"),
    )
    min_ctas_per_sm: int = field(
        default=0,
        metadata=_feature("CTAs per SM for which registers must suffice; 0: any", "ctas"),
    )
    trim_masks: bool = field(
        default=False,
        metadata=_feature("masks have code of their own, which skips what a warp misses", "trim"),
    )
    l2_group_mib: int = field(
        default=0,
        metadata=_feature("MiB of K and V whose heads run side by side; 0: a head's", "l2"),
    )

    @staticmethod
    def _checked(knob: Field[Any], value: object) -> object:
        return _checked(knob, value)

    # --- names -----------------------------------------------------------------------------------

    def _shape(self, include_d_head: bool) -> str:
        d_head = f"{self.d_head}, " if include_d_head else ""
        return f"{self.dtype.name}, {d_head}{self.B_r}, {self.B_c}, {self.n_warps}"

    def _feature_words(self) -> list[str]:
        words = []
        for knob in feature_fields(type(self)):
            value = getattr(self, knob.name)
            word = knob.metadata["word"]
            if knob.name == LOAD_FIELDS[0]:
                words.append("load_{}_{}_{}_tiles".format(*self.load_counts))
            elif word is not None and value:
                words.append(word if is_flag(knob) else f"{word}_{value}")
        return words

    # --- shapes and resources --------------------------------------------------------------------

    @property
    def load_counts(self) -> tuple[int, int, int]:
        """K-tiles fetched per step of Q, K and V."""
        return (self.Q_mma_load_K_tiles, self.K_mma_load_K_tiles, self.V_mma_load_K_tiles)

    @property
    def n_threads(self) -> int:
        """Threads of one CTA."""
        return self.n_warps * THREADS_PER_WARP

    @property
    def rows_per_warp(self) -> int:
        """Rows of Q that one warp owns."""
        return self.B_r // self.n_warps

    @property
    def kv_tiles(self) -> int:
        """Tiles of K, and as many of V, in shared memory."""
        return self.kv_stages or 1

    def smem_bytes(self, elem_size: int = 2) -> int:
        """Dynamic shared memory of one CTA, bytes: a Q tile, the K and V tiles. O reuses Q's."""
        return (self.B_r + 2 * self.B_c * self.kv_tiles) * self.d_head * elem_size

    def fills_tiles(self, seq_q: int, seq_k: int, d: int) -> bool:
        """Whether a kernel for whole tiles serves these sizes."""
        whole = seq_q % self.B_r == 0 and seq_k % self.B_c == 0
        return whole and d == self.d_head and seq_k > 0

    # --- work ------------------------------------------------------------------------------------

    def attn_flop(
        self, batch: int, seq_q: int, seq_k: int, heads: int, causal: bool = False
    ) -> int:
        """FLOP of the two matrix products, 4 b h s_q s_k d; half of it when causal."""
        return attn_flop(self.d_head, batch, seq_q, seq_k, heads, causal)

    def total_flop(
        self, batch: int, seq_q: int, seq_k: int, heads: int, causal: bool = False
    ) -> int:
        """attn_flop plus the softmax's own, for K/V tiles of B_c rows."""
        return total_flop(self.d_head, self.B_c, batch, seq_q, seq_k, heads, causal)


# The same for every family.


def attn_flop(d_head: int, batch: int, seq_q: int, seq_k: int, heads: int, causal: bool) -> int:
    """FLOP of the two matrix products, 4 b h s_q s_k d; half of it when causal."""
    return 4 * d_head * _scores(batch, seq_q, seq_k, heads, causal)


def total_flop(
    d_head: int, B_c: int, batch: int, seq_q: int, seq_k: int, heads: int, causal: bool
) -> int:
    """attn_flop plus the softmax's own.

    Each score costs 5 (scale, subtract the maximum, exp2, running maximum, running sum). Each K/V
    tile multiplies the O rows once, d per B_c scores, and the end divides them once more.
    """
    scores = _scores(batch, seq_q, seq_k, heads, causal)
    rescale = scores * d_head // B_c
    normalise = batch * heads * seq_q * d_head
    return 4 * d_head * scores + 5 * scores + rescale + normalise


def _scores(batch: int, seq_q: int, seq_k: int, heads: int, causal: bool) -> int:
    scores = batch * heads * seq_q * seq_k
    return scores // 2 if causal else scores


LOAD_FIELDS = ("Q_mma_load_K_tiles", "K_mma_load_K_tiles", "V_mma_load_K_tiles")


def feature_fields(config_class: type[FlashForwardKernelConfig]) -> tuple[Field[Any], ...]:
    """The knobs that the short form writes after the tuple, in order."""
    return tuple(knob for knob in fields(config_class) if "word" in knob.metadata)


def _checked(knob: Field[Any], value: object) -> object:
    """`value` as the field's own type, or ArgumentError."""
    if knob.name == "dtype":
        return value if isinstance(value, DType) else DType.parse(value)
    if is_flag(knob):
        return value if isinstance(value, bool) else _checked_flag(knob.name, value)
    lowest = 0 if "word" in knob.metadata else 1
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentError(f"{knob.name}={quoted(value)}: give a whole number")
    number = value if type(value) is int else operator.index(value)
    if not lowest <= number <= INT_MAX:
        raise ArgumentError(f"{knob.name}={number}: allowed is {lowest} to {INT_MAX}")
    return number


def _checked_flag(name: str, value: object) -> bool:
    if hasattr(value, "__index__") and operator.index(value) in (0, 1):
        return bool(operator.index(value))
    raise ArgumentError(f"{name}={quoted(value)}: allowed are True and False")
