"""KernelConfig: the common base of all families' configs, and the resource limits of an SM."""

from __future__ import annotations

import operator
import re
from abc import abstractmethod
from dataclasses import Field, dataclass, fields, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from flashsmith.errors import ArgumentError
from flashsmith.families.family import Family
from flashsmith.families.knob import KnobGroup, enumeration, is_flag
from flashsmith.printable import quoted
from flashsmith.semantics.dtype import DType

THREADS_PER_WARP = 32

# The limits of one SM, from the CUDA occupancy rules. Some GPUs allow fewer threads or CTAs, but
# there shared memory or registers are the tighter limit for every config. The one exception is a
# tile shape of d_head 32, which would have to run with 32 registers per thread.
RESERVED_SMEM_PER_CTA = 1024
REGISTERS_PER_SM = 65536
REGISTERS_PER_THREAD_UNIT = 8
MAX_THREADS_PER_SM = 2048
MAX_CTAS_PER_SM = 32

# The largest value of a C++ int field.
INT_MAX = 2**31 - 1


@dataclass(frozen=True, order=True)
class KernelConfig:
    """A frozen, ordered dataclass of knobs that identifies one kernel. A family's class adds the
    knobs.

    Every config has a dtype (a DType) and a d_head, the widest head dimension that its kernel
    supports. Any other field is a flag, a member of an enumeration or a number. Each is declared
    with `knob`. A family's class defines n_threads and smem_bytes, which is checked when the family
    is registered.

    Raises:
        ArgumentError: a field has the wrong type or is out of range.
    """

    # The family's name, and the first compute capability its kernels run on (80 for 8.0).
    FAMILY: ClassVar[str]
    OLDEST_ARCH: ClassVar[int]
    # The parts of the short form: the knobs in the tuple, the text after the last of them, the
    # first feature, and the features that combine several knobs.
    SHAPE: ClassVar[tuple[str, ...]] = ()
    SHAPE_SUFFIX: ClassVar[str] = ""
    LEADING_WORD: ClassVar[str] = ""
    GROUPS: ClassVar[tuple[KnobGroup, ...]] = ()
    # Set when the family is registered: the family, and the names of all knobs in order.
    family: ClassVar[Family]
    KNOBS: ClassVar[tuple[str, ...]]

    if TYPE_CHECKING:
        dtype: DType
        d_head: int

    def __post_init__(self) -> None:
        for declared in fields(self):
            value = getattr(self, declared.name)
            checked = checked_value(declared, value)
            if checked is not value:
                object.__setattr__(self, declared.name, checked)

    # --- names -----------------------------------------------------------------------------------

    def _shape(self, include_d_head: bool) -> str:
        """The tuple of the short form."""
        shown = [name for name in self.SHAPE if include_d_head or name != "d_head"]
        values = [
            value.name if isinstance(value, DType) else str(value)
            for value in (getattr(self, name) for name in shown)
        ]
        return ", ".join(values) + self.SHAPE_SUFFIX

    def _feature_words(self) -> list[str]:
        """The features after the tuple."""
        words = [self.LEADING_WORD] * bool(self.LEADING_WORD)
        groups = {group.knobs[0]: group for group in self.GROUPS}
        for declared in fields(self):
            if group := groups.get(declared.name):
                words.append(group.write(tuple(getattr(self, name) for name in group.knobs)))
                continue
            value, word = getattr(self, declared.name), declared.metadata["word"]
            neutral = value == declared.default and not declared.metadata["always"]
            if word is None or neutral:
                continue
            if isinstance(value, IntEnum):
                words.append(word + value.name.lower())
            else:
                words.append(word if value is True else f"{word}_{value}")
        return words

    def short_form(self, include_d_head: bool = True, include_tup: bool = True) -> str:
        """For example '(FP16, 128, 64, 64, 4): async+swizzled+load_0_2_2_tiles+opt_softmax'.

        Args:
            include_d_head: whether the tuple names the head dimension.
            include_tup: whether the tuple is part of the text.
        """
        features = "+".join(self._feature_words())
        if not include_tup:
            return features
        return f"({self._shape(include_d_head)}): {features}"

    def __str__(self) -> str:
        return self.short_form()

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
        """The fields in order as ints; calling the class with them recreates the config."""
        return tuple(int(getattr(self, knob.name)) for knob in fields(self))

    def with_knobs(self, **values: Any) -> Any:
        """A copy of the config with these knobs replaced and checked."""
        return replace(self, **values)

    # --- resources -------------------------------------------------------------------------------

    @property
    @abstractmethod
    def n_threads(self) -> int:
        """Threads of one CTA."""

    @abstractmethod
    def smem_bytes(self, elem_size: int = 2) -> int:
        """Dynamic shared memory of one CTA, bytes."""

    @property
    def rows_per_warp(self) -> int:
        """Rows of Q that one warp owns; the default is all rows of the CTA's tile."""
        rows, _ = self.family.loop_tiles(self) or (1, 1)
        return rows

    def fills_tiles(self, seq_q: int, seq_k: int, d: int) -> bool:
        """Whether a kernel without bounds checks can compute these sizes."""
        return d == self.d_head

    def cta_limits(
        self,
        max_smem_bytes: int,
        registers: int | None = None,
        *,
        max_threads: int = MAX_THREADS_PER_SM,
        max_ctas: int = MAX_CTAS_PER_SM,
    ) -> dict[str, int]:
        """How many CTAs fit into each resource of one SM, by the resource's name.

        Args:
            max_smem_bytes: shared memory of one SM, bytes.
            registers: the compiler's count per thread; None or 0 leaves registers out.
            max_threads, max_ctas: the limits of one SM.
        """
        limits = {
            "shared memory": max_smem_bytes // (self.smem_bytes() + RESERVED_SMEM_PER_CTA),
            "threads": max_threads // self.n_threads,
            "CTAs": max_ctas,
        }
        if registers:
            # Registers are allocated to a warp in units of 8 per thread, 256 per warp.
            per_thread = -(-registers // REGISTERS_PER_THREAD_UNIT) * REGISTERS_PER_THREAD_UNIT
            limits["registers"] = REGISTERS_PER_SM // (per_thread * self.n_threads)
        return limits

    def num_ctas_per_sm(self, max_smem_bytes: int, registers: int | None = None) -> int:
        """CTAs resident on one SM; for the arguments see cta_limits. 0: a CTA does not fit."""
        return min(self.cta_limits(max_smem_bytes, registers).values())


@dataclass(frozen=True, order=True)
class ForwardConfig(KernelConfig):
    """The base of forward families' configs, which have d_head and B_c, the keys per loop step."""

    def attn_flop(
        self, batch: int, seq_q: int, seq_k: int, heads: int, causal: bool = False
    ) -> int:
        """FLOP of the two GEMMs: 4 b h s_q s_k d, or half of this when causal."""
        return 4 * self.d_head * _scores(batch, seq_q, seq_k, heads, causal)

    def total_flop(
        self, batch: int, seq_q: int, seq_k: int, heads: int, causal: bool = False
    ) -> int:
        """attn_flop plus the FLOP of the softmax, counted as if each K/V tile rescaled O.

        Each score costs 5 FLOP: scale, subtract the maximum, exp2, running maximum, running sum.
        Each K/V tile rescales the O rows once: d FLOP per B_c scores. At the end, the O rows are
        divided once.
        """
        scores = _scores(batch, seq_q, seq_k, heads, causal)
        tile: Any = self  # B_c is a field of the family's class
        rescale = scores * self.d_head // tile.B_c
        normalise = batch * heads * seq_q * self.d_head
        return 4 * self.d_head * scores + 5 * scores + rescale + normalise


def _scores(batch: int, seq_q: int, seq_k: int, heads: int, causal: bool) -> int:
    scores = batch * heads * seq_q * seq_k
    return scores // 2 if causal else scores


def checked_value(declared: Field[Any], value: object) -> object:
    """`value` converted to the knob's type.

    Raises:
        ArgumentError: the knob does not accept the value.
    """
    if declared.name == "dtype":
        return value if isinstance(value, DType) else DType.parse(value)
    if members := enumeration(declared):
        return _checked_member(declared.name, members, value)
    if is_flag(declared):
        if isinstance(value, bool):
            return value
        if hasattr(value, "__index__") and operator.index(value) in (0, 1):
            return bool(operator.index(value))
        raise ArgumentError(f"{declared.name}={quoted(value)}: allowed are True and False")
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentError(f"{declared.name}={quoted(value)}: give a whole number")
    number = value if type(value) is int else operator.index(value)
    lowest = declared.metadata["lowest"]
    if not lowest <= number <= INT_MAX:
        raise ArgumentError(f"{declared.name}={number}: allowed is {lowest} to {INT_MAX}")
    return number


def _checked_member(name: str, members: type[IntEnum], value: object) -> IntEnum:
    for member in members:
        if value == member and not isinstance(value, bool):
            return member
    allowed = ", ".join(f"{member.name} ({int(member)})" for member in members)
    raise ArgumentError(f"{name}={quoted(value)}: allowed are {allowed}")


def _cpp_literal(value: object) -> str:
    if isinstance(value, DType):
        return f"DType::{value.name}"
    if isinstance(value, IntEnum):
        return f"{type(value).__name__}::{value.name.lower()}"
    return str(value).lower()
