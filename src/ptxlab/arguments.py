"""Packs the arguments of a launch (NumPy arrays and scalars) into the bytes that a kernel reads."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.machine.memory import GlobalMemory
from ptxlab.ptx.syntax import Entry, Parameter

_FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


def pack_arguments(entry: Entry, arguments: Sequence[Any], memory: GlobalMemory) -> bytes:
    """Returns the argument buffer of an entry.

    Registers the arrays in ``memory`` as "argument 0" and so on.

    Raises ArgumentError if an argument does not fit its parameter.
    """
    parameters = entry.parameters
    if len(arguments) != len(parameters):
        kinds = ", ".join(map(str, parameters)) or "none"
        raise ArgumentError(
            f"arguments: got {len(arguments)}, but {entry.name} takes {len(parameters)}: {kinds}"
        )
    packed = bytearray(entry.parameter_bytes)
    for number, (parameter, value) in enumerate(zip(parameters, arguments, strict=True)):
        data = _encoded(f"argument {number}", parameter, value, memory)
        packed[parameter.offset : parameter.offset + parameter.size] = data
    return bytes(packed)


def _encoded(name: str, parameter: Parameter, value: Any, memory: GlobalMemory) -> bytes:
    if parameter.is_array:
        return _structure(name, parameter, value)
    if isinstance(value, np.ndarray):
        return _address(name, parameter, value, memory).to_bytes(8, "little")
    if parameter.kind in _FLOATS:
        return _float(name, parameter, value)
    if parameter.kind[0] == "b" and isinstance(value, np.generic):
        # PTX gives only the width of a .b type, not its meaning.
        return _structure(name, parameter, value)
    return _integer(name, parameter, value)


def _address(name: str, parameter: Parameter, array: np.ndarray, memory: GlobalMemory) -> int:
    if parameter.size != 8 or parameter.kind in _FLOATS:
        raise ArgumentError(
            f"{name}: got an array of shape {array.shape}, but the kernel takes a number there "
            f"({parameter}); give a scalar"
        )
    if array.dtype.hasobject:
        raise ArgumentError(f"{name}: got an array of Python objects; give one of numbers")
    if not array.flags.c_contiguous:
        raise ArgumentError(
            f"{name}: the array of shape {array.shape} has strides {array.strides}, but a kernel "
            "only gets its address; give a C-contiguous one, such as "
            "np.ascontiguousarray(array)"
        )
    return memory.register(name, array, writable=array.flags.writeable)


def _float(name: str, parameter: Parameter, value: Any) -> bytes:
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real | np.floating | np.integer):
        raise ArgumentError(f"{name}: got {_shown(value)}; {parameter} takes a number")
    kind = _FLOATS[parameter.kind]
    with np.errstate(over="ignore"):
        rounded = kind(value)
    if np.isinf(rounded) and np.isfinite(np.float64(value)):
        raise ArgumentError(f"{name}: {value!r} is beyond the range of {parameter}")
    return rounded.tobytes()


def _integer(name: str, parameter: Parameter, value: Any) -> bytes:
    if parameter.size == 8 and value is None:
        return bytes(8)  # a null pointer
    if not isinstance(value, Integral | np.bool_):
        wanted = "an array, an integer or None (null)" if parameter.size == 8 else "an integer"
        raise ArgumentError(f"{name}: got {_shown(value)}; {parameter} takes {wanted}")
    bits = 8 * parameter.size
    # PTX has one type for int and unsigned.
    if not -(1 << bits - 1) <= int(value) < 1 << bits:
        raise ArgumentError(
            f"{name}: {int(value)} does not fit {parameter}; give a number from {-(1 << bits - 1)} "
            f"to {(1 << bits) - 1}"
        )
    return (int(value) % (1 << bits)).to_bytes(parameter.size, "little")


def _structure(name: str, parameter: Parameter, value: Any) -> bytes:
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        data = value.tobytes()
    elif isinstance(value, bytes):
        data = value
    else:
        raise ArgumentError(
            f"{name}: got {_shown(value)}; the kernel takes {parameter.size} bytes by value "
            f"({parameter}): give bytes, or a NumPy scalar, whose dtype may have fields"
        )
    if len(data) != parameter.size:
        raise ArgumentError(
            f"{name}: {_shown(value)} has {len(data)} bytes; the kernel takes {parameter.size} by "
            f"value ({parameter})"
        )
    return data


def _shown(value: Any) -> str:
    kind = type(value)
    if isinstance(value, bool | int | float | complex | np.generic) or value is None:
        return f"{value!r}"
    package = kind.__module__.split(".")[0]
    name = kind.__name__ if package == "builtins" else f"{package}.{kind.__name__}"
    return f"a value of type {name}"
