"""Converts options given as tensors: a 0-d scale, a window of two numbers, 16-bit sinks.

Checks, call caches and custom ops accept only numbers, pairs and fp32 sinks.
"""

from __future__ import annotations

from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.runtime.frameworks import framework_of
from flashsmith.runtime.tensors import DTYPES

_NUMBERS = ("scale", "softcap")
_NAMES = frozenset((*_NUMBERS, "window", "sinks"))


def plain_options(options: dict[str, Any]) -> dict[str, Any]:
    """Returns a call's keywords with tensors replaced by numbers and with fp32 sinks; ``options``
    itself if nothing changes.

    Sinks stay differentiable, and their gradient has the sinks' original dtype. Raises
    ArgumentError for a scale, softcap or window that requires grad or is on a device, because
    reading it from a device would wait for the device.
    """
    if _NAMES.isdisjoint(options):
        return options
    changed: dict[str, Any] = {}
    for name in _NUMBERS:
        value = options.get(name)
        if value is not None and type(value) is not float and _has_shape(value, ()):
            changed[name] = _numbers(name, value, "a number")
    window = options.get("window")
    if window is not None and type(window) is not tuple:
        changed["window"] = plain_pair("window", window)
    sinks = options.get("sinks")
    if sinks is not None and is_16_bits(sinks):
        changed["sinks"] = in_dtype(sinks, "float32")
    return {**options, **changed} if changed else options


def plain_pair(name: str, pair: Any) -> Any:
    """Returns a tensor of two numbers as a pair; any other value unchanged.

    Raises the errors of plain_options.
    """
    return tuple(_numbers(name, pair, "a pair of numbers")) if _has_shape(pair, (2,)) else pair


def is_16_bits(tensor: Any) -> bool:
    """Whether this is an fp16 or bf16 tensor, or the placeholder that a function transformation
    passes for one."""
    dtype = getattr(tensor, "dtype", None)
    # The size is checked first, because most sinks are fp32 and reading a dtype's name takes
    # longer.
    return getattr(dtype, "itemsize", 0) == 2 and str(dtype).rpartition(".")[2] in DTYPES


def in_dtype(tensor: Any, dtype: Any) -> Any:
    """Returns a tensor converted to 'float32' or to another dtype of its framework."""
    if hasattr(tensor, "astype"):
        return tensor.astype(dtype)
    return tensor.float() if dtype == "float32" else tensor.to(dtype)


# torch.compile cannot trace framework_of() for a type that was not looked up before.
_NO_TENSORS = (tuple, list, int, float, bool, str)


def _has_shape(value: Any, shape: tuple[int, ...]) -> bool:
    """Whether a value is a tensor of this shape."""
    if type(value) in _NO_TENSORS:
        return False
    return framework_of(type(value)) is not None and tuple(value.shape) == shape


def _numbers(name: str, tensor: Any, meaning: str) -> Any:
    """Returns a host tensor's contents as a number or a list of numbers."""
    framework = framework_of(type(tensor))
    assert framework is not None
    view = framework.view(name, tensor)
    if view.device.kind != "cpu":
        raise ArgumentError(
            f"{name}: is a tensor on {view.device}, and reading it would wait for the device at "
            f"every call; give {meaning}, read once"
        )
    array = framework.as_numpy(tensor)
    # NumPy does not count bf16 among its number types.
    return float(array) if array.dtype.kind == "V" else array.tolist()
