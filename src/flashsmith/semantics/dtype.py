"""The element types of q, k, v and o."""

from __future__ import annotations

import operator
from enum import IntEnum

from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted

_SHORT_NAMES = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}


def dtype_name(value: object) -> str | None:
    """Returns the name that NumPy and PyTorch give a dtype: 'float16', 'bfloat16', 'float32', ...

    The value may be such a name, a short name such as 'fp16', a DType, a torch.dtype, a NumPy or
    ml_dtypes dtype, or a scalar type such as jax.numpy's. Anything else gives None. Imports no
    framework.
    """
    if isinstance(value, DType):
        return value.numpy_name
    if isinstance(value, str):
        name = value.strip().lower().removeprefix("torch.")
        return _SHORT_NAMES.get(name, name)
    if isinstance(value, type):
        return value.__name__
    kind = type(value)
    if (kind.__module__, kind.__name__) == ("torch", "dtype"):
        return str(value).removeprefix("torch.")
    if kind.__module__.partition(".")[0] != "numpy":
        return None
    known = getattr(value, "name", None)  # of a numpy.dtype
    return known if isinstance(known, str) else None


def _code(value: object) -> int | None:
    """Converts the value to an int; returns None if it is not a whole number."""
    if isinstance(value, (bool, type)):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


class DType(IntEnum):
    """Element type of a kernel's tensors; the numbers are the ScalarType codes of the C++ side."""

    FP16 = 5
    BF16 = 15

    @classmethod
    def parse(cls, value: object) -> DType:
        """Returns the DType for a name ('fp16', 'float16', any case), a code (5, '5'), or a dtype
        object.

        Dtype objects may be PyTorch's or NumPy's.

        Raises:
            ArgumentError: the value is none of these.
        """
        name = dtype_name(value)
        code = value.strip() if isinstance(value, str) else str(_code(value))
        for dtype in cls:
            if name == dtype.numpy_name or code == str(int(dtype)):
                return dtype
        allowed = ", ".join(f"{dtype.name} ({int(dtype)})" for dtype in cls)
        raise ArgumentError(
            f"dtype={quoted(value)}: allowed are {allowed}, by name or number, and PyTorch's and "
            "NumPy's float16 and bfloat16"
        )

    @property
    def numpy_name(self) -> str:
        """The name NumPy, ml_dtypes and torch give this type."""
        return "float16" if self is DType.FP16 else "bfloat16"

    @property
    def element_size(self) -> int:
        """Bytes of one element."""
        return 2
