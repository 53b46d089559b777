"""FamilyConfig: what the configs of all kernel families have in common, and an SM's limits."""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import Field, dataclass, fields
from enum import IntEnum
from typing import Any

from flashsmith.operations.dtype import DType

THREADS_PER_WARP = 32

# One SM (CUDA occupancy rules). Some GPUs allow fewer threads or CTAs; there shared memory or the
# registers are the tighter limit for every config, but for one tile shape of d_head 32 that would
# have to do with 32 registers a thread.
RESERVED_SMEM_PER_CTA = 1024
REGISTERS_PER_SM = 65536
REGISTERS_PER_THREAD_UNIT = 8
MAX_THREADS_PER_SM = 2048
MAX_CTAS_PER_SM = 32

# The widest value a C++ int field holds.
INT_MAX = 2**31 - 1


@dataclass(frozen=True, order=True)
class FamilyConfig:
    """A frozen, ordered dataclass of knobs that name one kernel; a family's class adds the knobs.

    Raises:
        ArgumentError: a field has the wrong type or is out of range.
    """

    def __post_init__(self) -> None:
        for knob in fields(self):
            value = getattr(self, knob.name)
            checked = self._checked(knob, value)
            if checked is not value:
                object.__setattr__(self, knob.name, checked)

    @staticmethod
    @abstractmethod
    def _checked(knob: Field[Any], value: object) -> object:
        """`value` as the field's own type, or ArgumentError."""

    # --- names -----------------------------------------------------------------------------------

    @abstractmethod
    def _shape(self, include_d_head: bool) -> str:
        """What the tuple of the short form says."""

    @abstractmethod
    def _feature_words(self) -> list[str]:
        """What follows the tuple."""

    def short_form(self, include_d_head: bool = True, include_tup: bool = True) -> str:
        """For example '(FP16, 128, 64, 64, 4): async+swizzled+load_0_2_2_tiles+opt_softmax'.

        Args:
            include_d_head: whether the tuple names the head dimension.
            include_tup: whether the tuple stands there at all.
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
        """The fields in order as ints; the class called with them gives the config back."""
        return tuple(int(getattr(self, knob.name)) for knob in fields(self))

    # --- resources -------------------------------------------------------------------------------

    @property
    @abstractmethod
    def n_threads(self) -> int:
        """Threads of one CTA."""

    @abstractmethod
    def smem_bytes(self, elem_size: int = 2) -> int:
        """Dynamic shared memory of one CTA, bytes."""

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
            limits["registers"] = REGISTERS_PER_SM // (per_thread * self.n_threads)
        return limits

    def num_ctas_per_sm(self, max_smem_bytes: int, registers: int | None = None) -> int:
        """CTAs resident on one SM; the arguments are cta_limits' first. 0: it does not fit."""
        return min(self.cta_limits(max_smem_bytes, registers).values())


def is_flag(knob: Field[Any]) -> bool:
    """Whether the knob is on or off rather than a number."""
    return knob.type in ("bool", bool)


def _cpp_literal(value: object) -> str:
    if isinstance(value, DType):
        return f"DType::{value.name}"
    if isinstance(value, IntEnum):
        return f"{type(value).__name__}::{value.name.lower()}"
    return str(value).lower()
