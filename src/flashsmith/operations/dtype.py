"""The element types of q, k, v and o."""

from __future__ import annotations

import operator
from enum import IntEnum

from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted


class DType(IntEnum):
    """Element type of a kernel's tensors; the numbers are the ScalarType codes of the C++ side."""

    FP16 = 5
    BF16 = 15

    @classmethod
    def parse(cls, value: object) -> DType:
        """The DType that a name ('fp16', any case) or a code (5, '5') stands for.

        Raises:
            ArgumentError: neither a known name nor a known code.
        """
        if isinstance(value, str):
            text = value.strip().upper()
            for dtype in cls:
                if text in (dtype.name, str(int(dtype))):
                    return dtype
        elif hasattr(value, "__index__") and not isinstance(value, bool):
            for dtype in cls:
                if operator.index(value) == dtype:
                    return dtype
        allowed = ", ".join(f"{dtype.name} ({int(dtype)})" for dtype in cls)
        raise ArgumentError(f"dtype={quoted(value)}: allowed are {allowed}, by name or number")

    @property
    def numpy_name(self) -> str:
        """The name NumPy, ml_dtypes and torch give this type."""
        return "float16" if self is DType.FP16 else "bfloat16"

    @property
    def element_size(self) -> int:
        """Bytes of one element."""
        return 2
