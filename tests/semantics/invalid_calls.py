"""Calls that must be refused: one argument of a valid call replaced by something unusable."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

from flashsmith.families import DType, FlashForwardKernelConfig
from flashsmith.families.mma_sync.sets import proof_configs
from flashsmith.printable import quoted

NUMPY = {DType.FP16: np.dtype(np.float16), DType.BF16: np.dtype(ml_dtypes.bfloat16)}
Arguments = dict[str, Any]


@dataclass(frozen=True)
class InvalidCall:
    """``arguments`` by name, of which ``argument`` is the bad one; ``what`` says how."""

    argument: str
    what: str
    arguments: Arguments


# ---- valid calls ----


def tensor(dtype: DType, *shape: int) -> np.ndarray:
    return np.zeros(shape, NUMPY[dtype])


def config_for(dtype: DType) -> FlashForwardKernelConfig:
    return proof_configs(dtype, 32)[0]


def dense_call(dtype: DType, heads_k: int) -> Arguments:
    """Batch 2, 4 heads, 5 queries and 9 keys of d 24, every option in use."""
    k = tensor(dtype, 2, 9, heads_k, 24)
    return options() | {
        "q": tensor(dtype, 2, 5, 4, 24),
        "k": k,
        "v": k.copy(),
        "o": tensor(dtype, 2, 5, 4, 24),
    }


def packed_call(dtype: DType, heads_k: int) -> Arguments:
    """Three sequences, one of them without queries."""
    k = tensor(dtype, 18, heads_k, 24)
    return options() | {
        "q": tensor(dtype, 12, 4, 24),
        "k": k,
        "v": k.copy(),
        "o": tensor(dtype, 12, 4, 24),
        "cu_seqlens_q": np.array([0, 5, 5, 12], np.int32),
        "cu_seqlens_k": np.array([0, 9, 11, 18], np.int32),
        "max_seqlen_q": 7,
        "max_seqlen_k": 9,
    }


def options() -> Arguments:
    return {
        "causal": False,
        "window": (3, 2),
        "softcap": 30.0,
        "scale": 0.2,
        "sinks": np.zeros(4, np.float32),
        "return_lse": True,
        "return_row_max": True,
        "emulate": True,
    }


def valid_calls() -> Iterator[tuple[str, Arguments]]:
    """(name, arguments) without the config."""
    for dtype, heads_k in product(DType, (4, 2, 1)):
        yield f"dense {dtype.name} {heads_k}", dense_call(dtype, heads_k)
        yield f"packed {dtype.name} {heads_k}", packed_call(dtype, heads_k)


# ---- what can be wrong with a tensor ----

Damage = Callable[[np.ndarray], Any]


def _misaligned(array: np.ndarray) -> np.ndarray:
    room = np.zeros(array.size + 1, array.dtype)
    return room[1:].reshape(array.shape)


def _rows_of_odd_length(array: np.ndarray) -> np.ndarray:
    *rows, d = array.shape
    return np.zeros((*rows, d + 4), array.dtype)[..., :d]


def _bytes_between_elements(array: np.ndarray) -> np.ndarray:
    room = np.zeros((*array.shape[:-1], 3 * array.shape[-1]), np.uint8)
    return np.ndarray(array.shape, array.dtype, room, strides=(*room.strides[:-1], 3))


def _longer(axis: int, by: int) -> Damage:
    def damage(array: np.ndarray) -> np.ndarray:
        shape = list(array.shape)
        shape[axis] += by
        return np.zeros(shape, array.dtype)

    return damage


def _other_dtype(array: np.ndarray) -> np.ndarray:
    other = NUMPY[DType.BF16 if array.dtype == NUMPY[DType.FP16] else DType.FP16]
    return array.astype(other)


TENSOR_DAMAGES: dict[str, Damage] = {
    "None for a tensor": lambda array: None,
    "a number": lambda array: 3,
    "a string": lambda array: "q",
    "hostile text": lambda array: HOSTILE[0],
    "5,000 digits": lambda array: HOSTILE[1],
    "no repr": lambda array: HOSTILE[-1],
    "a list": lambda array: array.astype(float).tolist(),
    "bytes": lambda array: array.tobytes(),
    "a NumPy scalar": lambda array: array.ravel()[0],
    "fp32": lambda array: array.astype(np.float32),
    "fp64": lambda array: array.astype(np.float64),
    "int16": lambda array: array.view(np.int16),
    "uint8": lambda array: array.astype(np.uint8),
    "complex": lambda array: array.astype(np.complex64),
    "bool": lambda array: array.astype(np.bool_),
    "objects": lambda array: array.astype(object),
    "the other 16-bit dtype": _other_dtype,
    "one dimension less": lambda array: array[0],
    "one dimension more": lambda array: array[None],
    "no dimensions": lambda array: array.reshape(-1)[:1].reshape(()),
    "every other column": lambda array: np.repeat(array, 2, axis=-1)[..., ::2],
    "columns backwards": lambda array: array[..., ::-1],
    "columns first": lambda array: np.asfortranarray(array),
    "address off by 2": _misaligned,
    "rows of d + 4": _rows_of_odd_length,
    "elements of 3 bytes": _bytes_between_elements,
    "d + 8": _longer(-1, 8),
    "d + 1": _longer(-1, 1),
    "d 0": lambda array: array[..., :0],
    "one head more": _longer(-2, 1),
    "no heads": lambda array: array[..., :0, :],
}
# Of k, v and o: what must equal another tensor's.
ROW_DAMAGES: dict[str, Damage] = {"one row more": _longer(-3, 1)}
BATCH_DAMAGES: dict[str, Damage] = {"one batch more": _longer(0, 1)}


def _output_damages(call: Arguments) -> dict[str, Damage]:
    q = call["q"]
    room = np.zeros((2, *q.shape), q.dtype)
    return {
        "q itself": lambda array: q,
        "q's rows, one later": lambda array: _shifted(q),
        "one row for all": lambda array: np.broadcast_to(room[0, :1], q.shape),
        "read-only": lambda array: _read_only(room[0]),
    }


def _shifted(q: np.ndarray) -> np.ndarray:
    """As large as q, and in part the same memory; what lies behind q is never touched."""
    return np.lib.stride_tricks.as_strided(q[1:], q.shape, q.strides)


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def _tensor_calls(call: Arguments) -> Iterator[InvalidCall]:
    packed = call["q"].ndim == 3
    for name in ("q", "k", "v", "o"):
        damages = dict(TENSOR_DAMAGES)
        if name == "o":
            del damages["None for a tensor"]  # allocates one
            damages |= _output_damages(call)
        if name in ("v", "o") or packed:
            damages |= ROW_DAMAGES
        if not packed:
            damages |= BATCH_DAMAGES
        for what, damage in damages.items():
            yield _with(call, name, what, damage(call[name]))


# ---- what can be wrong with the rest ----


class Unspeakable:
    """An object of a user's class whose repr() fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


# What cannot be quoted as it is: control characters, 5,000 digits, far too long, no repr at all.
HOSTILE = ("\x1b[31m", 10**5000, -(10**5000), "x" * 20_000, [0] * 20_000, Unspeakable())
# 10**5000 is more than enough of anything that is counted.
NO_SIZES = (HOSTILE[0], *HOSTILE[2:])
NO_FLAGS = (*HOSTILE, 1, 0, None, "yes", 0.0, [True], np.zeros(2, bool))
NO_NUMBERS = (
    *HOSTILE, "30", [1.0], (2,), {}, object(), True, np.bool_(True), 1j, np.ones(2), math.nan,
)  # fmt: skip
NO_COUNTS = (
    *NO_SIZES, -1, 2.0, 7.5, "7", [7], True, np.float32(9), np.array([7, 7]), math.nan, 1j,
)  # fmt: skip
NO_LIMITS = (
    *NO_SIZES, -1, -(2**40), 1.0, "3", (), [3], False, np.float64(2), math.inf, 1j,
    np.array([3, 2]),
)  # fmt: skip
NO_WINDOWS = (
    *HOSTILE, None, 3, "ab", (), (3,), (3, 2, 1), {3, 2}, {"left": 3}, True,
    np.array([3, 2, 1]), np.array([3.0, 2.0]), np.array([[3, 2]]),
)  # fmt: skip

BAD_VALUES: dict[str, tuple[Any, ...]] = {
    "causal": NO_FLAGS,
    "return_lse": NO_FLAGS,
    "return_row_max": NO_FLAGS,
    "emulate": NO_FLAGS,
    "scale": (*NO_NUMBERS, 0, 0.0, -0.5, math.inf, -math.inf, 1e40, 1e-46, 10**400),
    "softcap": (*NO_NUMBERS, None, -1, -1e-9, math.inf, -math.inf, 1e40, 1e-46, 10**400),
    "window": (
        *NO_WINDOWS,
        *((limit, 2) for limit in NO_LIMITS),
        *((3, limit) for limit in NO_LIMITS),
    ),
    "sinks": (
        *HOSTILE, 3.0, "sinks", [0.0] * 4, np.zeros(3, np.float32), np.zeros(5, np.float32),
        np.zeros((1, 4), np.float32), np.zeros((), np.float32), np.zeros(4),
        np.zeros(3, np.float16), np.zeros(4, np.int32), np.zeros(8, np.float32)[::2],
        np.zeros(4, np.float32)[::-1], np.zeros(0, np.float32),
        np.zeros(17, np.uint8)[1:].view(np.float32),
    ),
}  # fmt: skip
BAD_OFFSETS: tuple[Any, ...] = (
    *HOSTILE,
    None, 3, "0 5 12", [0, 5, 5, 12], np.array([0, 5, 5, 12]), np.array([0, 5, 5, 12], np.uint32),
    np.array([0, 5, 5, 12], np.float32), np.array([[0, 5, 5, 12]], np.int32),
    np.array(12, np.int32), np.zeros(0, np.int32), np.array([0], np.int32),
    np.array([0, 12], np.int32), np.array([0, 1, 2, 3, 12], np.int32),
    np.array([0, 0, 5, 0, 5, 0, 12, 0], np.int32)[::2], np.array([12, 5, 5, 0], np.int32)[::-1],
    np.array([1, 5, 5, 12], np.int32), np.array([0, 5, 5, 11], np.int32),
    np.array([0, 5, 5, 99], np.int32), np.array([0, 6, 5, 12], np.int32),
    np.array([0, -5, 5, 12], np.int32), np.array([-3, 5, 5, 12], np.int32),
    np.array([0, 2**31 - 1, 2**31 - 1, 12], np.int32),
    np.frombuffer(bytes(17), np.uint8)[1:].view(np.int32),
)  # fmt: skip
SHORT_LIMITS = (0, 1, 6, np.int64(5))


def _option_calls(call: Arguments) -> Iterator[InvalidCall]:
    values = dict(BAD_VALUES)
    if "cu_seqlens_q" in call:
        for side in "qk":
            values[f"cu_seqlens_{side}"] = BAD_OFFSETS
            values[f"max_seqlen_{side}"] = (*NO_COUNTS, *SHORT_LIMITS)
    else:
        # Packed sequences' arguments beside dense tensors.
        offsets = np.array([0, 5, 10], np.int32)
        values |= {f"cu_seqlens_{side}": (offsets,) for side in "qk"}
        values |= {f"max_seqlen_{side}": (5, *NO_COUNTS) for side in "qk"}
    for name, bad in values.items():
        for value in bad:
            yield _with(call, name, shown(value), value)


def shown(value: Any) -> str:
    return f"{type(value).__name__} {quoted(value, 40)}"


def _config_calls(call: Arguments, dtype: DType) -> Iterator[InvalidCall]:
    """Called "cfg" here; a caller renames it."""
    good = config_for(dtype)
    other = DType.BF16 if dtype is DType.FP16 else DType.FP16
    bad: dict[str, Any] = {
        "its short form": str(good),
        "its ints": good.to_ints(),
        "its class": FlashForwardKernelConfig,
        "a dict": {"d_head": 32},
        "of the other dtype": config_for(other),
        "no repr": HOSTILE[-1],
        "hostile text": HOSTILE[0],
        "an illegal one": replace(good, B_c=40),
        "one for no GPU": replace(good, n_warps=3),
    }
    for what, config in bad.items():
        yield _with(call, "cfg", what, config)


def _with(call: Arguments, name: str, what: str, value: Any) -> InvalidCall:
    return InvalidCall(name, what, {**call, name: value})


def invalid_calls() -> Iterator[InvalidCall]:
    """Every call that is one mistake away from a valid one; with the config as "cfg"."""
    for name, call in valid_calls():
        dtype = DType.FP16 if "FP16" in name else DType.BF16
        whole = {"cfg": config_for(dtype)} | call
        for made in (_tensor_calls(whole), _option_calls(whole), _config_calls(whole, dtype)):
            for bad in made:
                yield replace(bad, what=f"{name}: {bad.what}")
