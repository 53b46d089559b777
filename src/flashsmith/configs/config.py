"""FlashForwardKernelConfig: the knobs that name one kernel of the mma.sync family.

The C++ struct of the same name (csrc/flash_attention.cuh) has the same fields in the same order.
"""

from __future__ import annotations

import operator
import re
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar

from flashsmith.configs.dtype import DType
from flashsmith.errors import ArgumentError

THREADS_PER_WARP = 32
K_TILE_COLUMNS = 8

# One SM (CUDA occupancy rules). Some GPUs allow fewer threads or CTAs; there shared memory or the
# registers are the tighter limit for every config, but for one tile shape of d_head 32 that would
# have to do with 32 registers a thread.
RESERVED_SMEM_PER_CTA = 1024
REGISTERS_PER_SM = 65536
REGISTERS_PER_THREAD_UNIT = 8
MAX_THREADS_PER_SM = 2048
MAX_CTAS_PER_SM = 32

# The widest value a C++ int field holds.
_INT_MAX = 2**31 - 1


def _feature(meaning: str, word: str | None) -> dict[str, str | None]:
    """Metadata of a knob whose zero is 'as before'. `word` is its name in the short form."""
    return {"meaning": meaning, "word": word}


@dataclass(frozen=True, order=True)
class FlashForwardKernelConfig:
    """One forward kernel of the mma.sync family (sm_80 and later), ordered field by field.

    Any positive tile sizes and non-negative load counts can be written down; whether a kernel can
    be built for them is for flashsmith.configs.rules to say. A later knob goes at the end with a
    zero default that means today's behaviour.

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

    def __post_init__(self) -> None:
        for knob in fields(self):
            value = getattr(self, knob.name)
            checked = _checked(knob, value)
            if checked is not value:
                object.__setattr__(self, knob.name, checked)

    # --- names -----------------------------------------------------------------------------------

    def short_form(self, include_d_head: bool = True, include_tup: bool = True) -> str:
        """For example '(FP16, 128, 64, 64, 4): async+swizzled+load_0_2_2_tiles+opt_softmax'.

        Args:
            include_d_head: whether the tuple names the head dimension.
            include_tup: whether the tuple stands there at all.
        """
        features = "+".join(self._feature_words())
        if not include_tup:
            return features
        d_head = f"{self.d_head}, " if include_d_head else ""
        shape = f"{self.dtype.name}, {d_head}{self.B_r}, {self.B_c}, {self.n_warps}"
        return f"({shape}): {features}"

    def __str__(self) -> str:
        return self.short_form()

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

    def kernel_name(self) -> str:
        """The short form as a C identifier, for files and functions; unique per config."""
        return re.sub(r"[^a-z0-9]+", "_", self.short_form().lower()).strip("_")

    def to_cpp_struct(self) -> str:
        """A C++20 expression for this config, with designated initialisers."""
        values = ", ".join(
            f".{knob.name} = {_cpp_literal(getattr(self, knob.name))}" for knob in fields(self)
        )
        return f"{type(self).__name__}{{{values}}}"

    def to_ints(self) -> tuple[int, ...]:
        """The fields in order as ints; the class called with them gives the config back."""
        return tuple(int(getattr(self, knob.name)) for knob in fields(self))

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

    def cta_limits(
        self,
        max_smem_bytes: int,
        registers: int | None = None,
        *,
        max_threads: int = MAX_THREADS_PER_SM,
        max_ctas: int = MAX_CTAS_PER_SM,
    ) -> dict[str, int]:
        """How many CTAs each resource of one SM has room for, by the resource's name.

        Args:
            max_smem_bytes: shared memory of one SM, bytes.
            registers: the compiler's count per thread; None (or 0) leaves registers out.
            max_threads, max_ctas: what one SM runs at once.
        """
        limits = {
            "shared memory": max_smem_bytes // (self.smem_bytes() + RESERVED_SMEM_PER_CTA),
            "threads": max_threads // self.n_threads,
            "CTAs": max_ctas,
        }
        if registers:
            # A warp's registers are handed out 8 per thread at a time: 256 per warp.
            per_thread = -(-registers // REGISTERS_PER_THREAD_UNIT) * REGISTERS_PER_THREAD_UNIT
            warps = REGISTERS_PER_SM // (per_thread * THREADS_PER_WARP)
            limits["registers"] = warps // self.n_warps
        return limits

    def num_ctas_per_sm(self, max_smem_bytes: int, registers: int | None = None) -> int:
        """CTAs resident on one SM; the arguments are cta_limits' first. 0: it does not fit."""
        return min(self.cta_limits(max_smem_bytes, registers).values())

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


def is_flag(knob: Field[Any]) -> bool:
    """Whether the knob is on or off rather than a number."""
    return knob.type in ("bool", bool)


def _checked(knob: Field[Any], value: object) -> object:
    """`value` as the field's own type, or ArgumentError."""
    if knob.name == "dtype":
        return value if isinstance(value, DType) else DType.parse(value)
    if is_flag(knob):
        return value if isinstance(value, bool) else _checked_flag(knob.name, value)
    lowest = 0 if "word" in knob.metadata else 1
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentError(f"{knob.name}={value!r}: give a whole number")
    number = value if type(value) is int else operator.index(value)
    if not lowest <= number <= _INT_MAX:
        raise ArgumentError(f"{knob.name}={number}: allowed is {lowest} to {_INT_MAX}")
    return number


def _checked_flag(name: str, value: object) -> bool:
    if hasattr(value, "__index__") and operator.index(value) in (0, 1):
        return bool(operator.index(value))
    raise ArgumentError(f"{name}={value!r}: allowed are True and False")


def _cpp_literal(value: object) -> str:
    if isinstance(value, DType):
        return f"DType::{value.name}"
    return str(value).lower()
