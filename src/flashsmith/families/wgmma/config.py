"""HopperForwardKernelConfig: the knobs that name one kernel of the wgmma family.

The C++ struct of the same name (csrc/wgmma/config.cuh) has the same fields in the same order.
"""

from __future__ import annotations

import operator
from dataclasses import Field, dataclass, field, fields
from enum import IntEnum
from typing import Any, ClassVar

from flashsmith.errors import ArgumentError
from flashsmith.families.config import INT_MAX, THREADS_PER_WARP, FamilyConfig, is_flag
from flashsmith.families.mma_sync.config import attn_flop, total_flop
from flashsmith.operations.dtype import DType
from flashsmith.printable import quoted

WARPGROUP_THREADS = 128
WARPGROUP_ROWS = 64
# What barriers and the producer's notices take beside the tiles, bytes.
BARRIER_PAGE = 1024


class PingPong(IntEnum):
    """Whose turn it is among the warpgroups: nobody's, to issue products, or to exponentiate."""

    NONE = 0
    GEMM = 1
    EXP = 2


class Schedule(IntEnum):
    """Which tiles a CTA computes: one, every n-th, or the next that nobody has begun."""

    ONE_TILE = 0
    STATIC_PERSISTENT = 1
    DYNAMIC = 2


class TileOrder(IntEnum):
    """In which order tiles begin: head by head, or longest first in sections that fit L2."""

    BY_HEAD = 0
    LONGEST_FIRST = 1


def _knob(meaning: str, word: str | None = None) -> dict[str, str | None]:
    """Metadata of a field: what it means, and its word in the short form if it has one.

    An enumeration's word is a prefix of its value's name.
    """
    return {"meaning": meaning, "word": word}


@dataclass(frozen=True, order=True)
class HopperForwardKernelConfig(FamilyConfig):
    """One forward kernel of the wgmma family (sm_90a), ordered field by field.

    Any positive sizes can be written down; whether a kernel can be built for them is for
    flashsmith.families.legality to say.

    Raises:
        ArgumentError: a field has the wrong type or is out of range.
    """

    FAMILY: ClassVar[str] = "wgmma"
    OLDEST_ARCH: ClassVar[int] = 90

    dtype: DType = field(metadata=_knob("element type of q, k, v and o"))
    d_head: int = field(metadata=_knob("head dimension, elements"))
    B_r: int = field(metadata=_knob("rows of Q and O per CTA"))
    B_c: int = field(metadata=_knob("rows of K and V per tile"))
    n_warpgroups: int = field(
        metadata=_knob("warpgroups that compute, 64 rows each; one more copies")
    )
    kv_stages: int = field(
        default=2, metadata=_knob("K tiles, and V tiles, held at once", "stages")
    )
    q_buffers: int = field(default=1, metadata=_knob("Q tiles held at once", "q_buffers"))
    producer_registers: int = field(
        default=24, metadata=_knob("registers a thread of the warpgroup that copies keeps")
    )
    consumer_registers: int = field(
        default=240, metadata=_knob("registers a thread of the others gets")
    )
    overlap: bool = field(
        default=False,
        metadata=_knob("a warpgroup's next Q K^T runs under its softmax", "overlap"),
    )
    pingpong: PingPong = field(
        default=PingPong.NONE,
        metadata=_knob("warpgroups take turns: at products, or at exponentials", "pingpong_"),
    )
    cluster_size: int = field(
        default=1, metadata=_knob("CTAs that share the copies of K and V", "cluster")
    )
    schedule: Schedule = field(
        default=Schedule.ONE_TILE,
        metadata=_knob("how many tiles a CTA computes, and who says which", ""),
    )
    tile_order: TileOrder = field(
        default=TileOrder.BY_HEAD, metadata=_knob("which tiles begin first", "")
    )
    separate_O: bool = field(
        default=False,
        metadata=_knob("O leaves through shared memory of its own, not Q's", "separate_O"),
    )
    rescale_threshold: int = field(
        default=0,
        metadata=_knob("O is rescaled for a new maximum of some weight or above 2^this", "rescale"),
    )
    section_mib: int = field(
        default=32,
        metadata=_knob(
            "longest first: MiB of K and V of the heads that run side by side", "section"
        ),
    )
    ctas_per_sm: int = field(default=1, metadata=_knob("CTAs that share an SM", "ctas"))
    exp2_fma_share: int = field(
        default=0,
        metadata=_knob("percent of the exponentials that the FMA pipe computes", "exp2_fma"),
    )
    early_exp: bool = field(
        default=False,
        metadata=_knob("with overlap: no exponential waits for the product beside it", "early_exp"),
    )
    stale_max: bool = field(
        default=False,
        metadata=_knob(
            "later blocks look for no maximum: their sums tell when it is out of date", "stale_max"
        ),
    )
    direct_O: bool = field(
        default=False,
        metadata=_knob(
            "O leaves from registers, so that Q's place is free before O is done", "direct_O"
        ),
    )

    @staticmethod
    def _checked(knob: Field[Any], value: object) -> object:
        return _checked(knob, value)

    # --- names -----------------------------------------------------------------------------------

    def _shape(self, include_d_head: bool) -> str:
        d_head = f"{self.d_head}, " if include_d_head else ""
        return f"{self.dtype.name}, {d_head}{self.B_r}, {self.B_c}, {self.n_warpgroups}wg"

    def _feature_words(self) -> list[str]:
        words = ["tma"]
        for knob in fields(self):
            value, word = getattr(self, knob.name), knob.metadata["word"]
            if knob.name == "producer_registers":
                words.append(f"regs_{value}_{self.consumer_registers}")
            elif word is None or (value == knob.default and knob.name not in _ALWAYS_SAID):
                continue
            elif isinstance(value, IntEnum):
                words.append(word + value.name.lower())
            else:
                words.append(word if value is True else f"{word}_{value}")
        return words

    # --- shapes and resources --------------------------------------------------------------------

    @property
    def n_threads(self) -> int:
        """Threads of one CTA."""
        return WARPGROUP_THREADS * (self.n_warpgroups + 1)

    @property
    def n_warps(self) -> int:
        """Warps of one CTA, those that copy included."""
        return self.n_threads // THREADS_PER_WARP

    @property
    def rows_per_warp(self) -> int:
        """Rows of Q that one warp owns."""
        return WARPGROUP_ROWS * THREADS_PER_WARP // WARPGROUP_THREADS

    def tile_bytes(self, elem_size: int = 2) -> int:
        """Bytes of the Q, K and V tiles a CTA holds at once, and of O's where it has its own."""
        rows = self.B_r * (self.q_buffers + self.separate_O) + 2 * self.kv_stages * self.B_c
        return rows * self.d_head * elem_size

    def smem_bytes(self, elem_size: int = 2) -> int:
        """Dynamic shared memory of one CTA, bytes: the tiles, and a page for barriers."""
        return self.tile_bytes(elem_size) + BARRIER_PAGE

    def fills_tiles(self, seq_q: int, seq_k: int, d: int) -> bool:
        """Whether a kernel for whole tiles serves these sizes.

        Rows of Q and O may be fewer than a tile has: TMA leaves out what is not there.
        """
        return d == self.d_head and seq_k % self.B_c == 0 and seq_k > 0

    # --- work ------------------------------------------------------------------------------------

    def attn_flop(
        self, batch: int, seq_q: int, seq_k: int, heads: int, causal: bool = False
    ) -> int:
        """FLOP of the two matrix products, 4 b h s_q s_k d; half of it when causal."""
        return attn_flop(self.d_head, batch, seq_q, seq_k, heads, causal)

    def total_flop(
        self, batch: int, seq_q: int, seq_k: int, heads: int, causal: bool = False
    ) -> int:
        """attn_flop plus the softmax's own, as if O were rescaled for every K/V tile."""
        return total_flop(self.d_head, self.B_c, batch, seq_q, seq_k, heads, causal)


# What the short form says even where it is as usual.
_ALWAYS_SAID = ("kv_stages", "q_buffers")
_MAY_BE_ZERO = ("rescale_threshold", "exp2_fma_share")


def _checked(knob: Field[Any], value: object) -> object:
    """`value` as the field's own type, or ArgumentError."""
    if knob.name == "dtype":
        return value if isinstance(value, DType) else DType.parse(value)
    if knob.name in ENUMERATIONS:
        return _checked_member(knob.name, value)
    if is_flag(knob):
        if hasattr(value, "__index__") and operator.index(value) in (0, 1):
            return bool(value)
        raise ArgumentError(f"{knob.name}={quoted(value)}: allowed are True and False")
    lowest = 0 if knob.name in _MAY_BE_ZERO else 1
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentError(f"{knob.name}={quoted(value)}: give a whole number")
    number = operator.index(value)
    if not lowest <= number <= INT_MAX:
        raise ArgumentError(f"{knob.name}={number}: allowed is {lowest} to {INT_MAX}")
    return number


def _checked_member(name: str, value: object) -> IntEnum:
    enumeration = ENUMERATIONS[name]
    for member in enumeration:
        if value == member and not isinstance(value, bool):
            return member
    allowed = ", ".join(f"{member.name} ({int(member)})" for member in enumeration)
    raise ArgumentError(f"{name}={quoted(value)}: allowed are {allowed}")


# The fields whose values have names.
ENUMERATIONS: dict[str, type[IntEnum]] = {
    "pingpong": PingPong,
    "schedule": Schedule,
    "tile_order": TileOrder,
}
