"""KernelConfig: the base class of all configs, and the resource limits of an SM."""

from __future__ import annotations

import operator
import re
from abc import abstractmethod
from dataclasses import Field, dataclass, fields, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from flashsmith.errors import ArgumentError
from flashsmith.families.family import Family
from flashsmith.families.head_dims import HeadDims, HeadPair, step_columns
from flashsmith.families.knob import KnobGroup, enumeration, is_flag
from flashsmith.printable import quoted
from flashsmith.semantics.dtype import DType

THREADS_PER_WARP = 32

# The limits of one SM, from the CUDA occupancy rules. Some GPUs allow fewer threads or CTAs per SM.
# These lower limits are ignored, because on such GPUs shared memory or registers limit the CTAs of
# every config more tightly. The only exception would be a tile shape for d_head 32, if its kernel
# used only 32 registers per thread.
RESERVED_SMEM_PER_CTA = 1024
REGISTERS_PER_SM = 65536
REGISTERS_PER_THREAD_UNIT = 8
MAX_THREADS_PER_SM = 2048
MAX_CTAS_PER_SM = 32

# The largest value of a C++ int.
INT_MAX = 2**31 - 1


@dataclass(frozen=True, order=True)
class KernelConfig:
    """The base class of configs: frozen, ordered dataclasses of knobs, each of which identifies one
    kernel.

    Each family has a subclass that declares its knobs.

    Every config has a dtype (a DType) and a d_head, the largest head dimension that its kernel can
    compute. In some families, a config also has d_v, the head dimension of v and o. Every other
    field is a flag, a number or a member of an enumeration. All fields are declared with `knob`.
    Each subclass must define n_threads and smem_bytes, which register_family() checks.

    Raises:
        ArgumentError: a field has the wrong type or is out of range.
    """

    # The family's name, and the oldest compute capability on which the family's kernels run (80 for
    # 8.0).
    FAMILY: ClassVar[str]
    OLDEST_ARCH: ClassVar[int]
    # The parts of a short form: the names of the knobs in the tuple, the text that follows the last
    # of them, the first feature, and the features that combine several knobs.
    SHAPE: ClassVar[tuple[str, ...]] = ()
    SHAPE_SUFFIX: ClassVar[str] = ""
    LEADING_WORD: ClassVar[str] = ""
    GROUPS: ClassVar[tuple[KnobGroup, ...]] = ()
    # register_family() sets these: the family, and the names of all knobs in the order of the
    # fields.
    family: ClassVar[Family]
    KNOBS: ClassVar[tuple[str, ...]]

    if TYPE_CHECKING:
        dtype: DType
        d_head: int

    @property
    def head_dims(self) -> HeadDims:
        """The widths for which the kernel is compiled: d_head alone, or the pair of d_head and
        d_v."""
        d_v = getattr(self, "d_v", 0)
        return HeadPair(self.d_head, d_v) if d_v else self.d_head

    @property
    def d_head_v(self) -> int:
        """The number of columns in the tiles of V and O."""
        return getattr(self, "d_v", 0) or self.d_head

    def __post_init__(self) -> None:
        for declared in fields(self):
            value = getattr(self, declared.name)
            checked = checked_value(declared, value)
            if checked is not value:
                object.__setattr__(self, declared.name, checked)

    # --- names -----------------------------------------------------------------------------------

    def _shape(self, include_d_head: bool) -> str:
        """The tuple of the short form, as a string."""
        shown = [name for name in self.SHAPE if include_d_head or name != "d_head"]
        values = [
            value.name if isinstance(value, DType) else str(value)
            for value in (getattr(self, "head_dims" if n == "d_head" else n) for n in shown)
        ]
        return ", ".join(values) + self.SHAPE_SUFFIX

    def _feature_words(self) -> list[str]:
        """The features of the short form, which follow the tuple."""
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
        """The short form, such as '(FP16, 128, 64, 64, 4):
        async+swizzled+load_0_2_2_tiles+opt_softmax'.

        Args:
            include_d_head: whether the tuple contains the head dimension.
            include_tup: whether the short form contains the tuple.
        """
        features = "+".join(self._feature_words())
        if not include_tup:
            return features
        return f"({self._shape(include_d_head)}): {features}"

    def __str__(self) -> str:
        return self.short_form()

    def kernel_name(self) -> str:
        """The short form as a C identifier, for the names of files and functions.

        Different configs have different identifiers.
        """
        return re.sub(r"[^a-z0-9]+", "_", self.short_form().lower()).strip("_")

    def to_cpp_struct(self) -> str:
        """The config as a C++20 expression with designated initialisers."""
        values = ", ".join(
            f".{knob.name} = {_cpp_literal(getattr(self, knob.name))}" for knob in fields(self)
        )
        return f"{type(self).__name__}{{{values}}}"

    def to_ints(self) -> tuple[int, ...]:
        """The fields in order, as ints.

        Calling the config class with these ints makes an equal config.
        """
        return tuple(int(getattr(self, knob.name)) for knob in fields(self))

    def with_knobs(self, **values: Any) -> Any:
        """A copy of the config in which the named knobs have new values; the values are checked."""
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
        """The number of Q rows that one warp computes; by default all rows of the tile."""
        rows, _ = self.family.loop_tiles(self) or (1, 1)
        return rows

    def fills_tiles(self, seq_q: int, seq_k: int, d: int) -> bool:
        """Whether these sizes consist of whole tiles, so that a kernel without bounds checks can
        compute the problem."""
        return d == self.d_head

    def cta_limits(
        self,
        max_smem_bytes: int,
        registers: int | None = None,
        *,
        max_threads: int = MAX_THREADS_PER_SM,
        max_ctas: int = MAX_CTAS_PER_SM,
    ) -> dict[str, int]:
        """For each resource of an SM, the number of CTAs that it allows, keyed by the resource's
        name.

        Args:
            max_smem_bytes: bytes of shared memory of an SM.
            registers: registers per thread as the compiler reports them; with None or 0, registers
            are not considered. max_threads, max_ctas: the limits of an SM.
        """
        limits = {
            "shared memory": max_smem_bytes // (self.smem_bytes() + RESERVED_SMEM_PER_CTA),
            "threads": max_threads // self.n_threads,
            "CTAs": max_ctas,
        }
        if registers:
            # Registers are allocated in units of 8 per thread, which is 256 per warp.
            per_thread = -(-registers // REGISTERS_PER_THREAD_UNIT) * REGISTERS_PER_THREAD_UNIT
            limits["registers"] = REGISTERS_PER_SM // (per_thread * self.n_threads)
        return limits

    def num_ctas_per_sm(self, max_smem_bytes: int, registers: int | None = None) -> int:
        """The number of CTAs that an SM can hold; 0 if not even one fits.

        The arguments are those of cta_limits.
        """
        return min(self.cta_limits(max_smem_bytes, registers).values())


@dataclass(frozen=True, order=True)
class ForwardConfig(KernelConfig):
    """The base class of configs of forward families.

    Their configs have the knob B_c, the number of keys in a step of the loop.
    """

    @property
    def QK_steps(self) -> int:
        """The number of 16-column steps in which Q K^T is computed. At d_head 72, the last 8
        columns of the last step are zero padding."""
        return step_columns(self.d_head) // 16


def checked_value(declared: Field[Any], value: object) -> object:
    """Returns `value` converted to the type of the knob.

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
