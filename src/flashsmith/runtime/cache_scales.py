"""The scales of a KV cache: the factors by which its stored keys and values are multiplied."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

from flashsmith.errors import ArgumentError
from flashsmith.operations.cache_scales import SCALES
from flashsmith.printable import quoted
from flashsmith.runtime.frameworks import framework_of
from flashsmith.runtime.frameworks.base import TensorView
from flashsmith.runtime.tensors import check_beside, check_memory, view_tensor
from flashsmith.semantics.cache_format import D_STEP_OF_8BIT, CacheFormat
from flashsmith.semantics.signature import MAX_SCALE, MIN_SCALE

_ALLOWED = (
    "give a finite number above 0 that fp32 can hold, or an fp32 tensor of one number or of one "
    "for each K/V head"
)


class Scales(NamedTuple):
    """The scales of keys and values.

    Each scale has one field for a tensor and one for a number. The unused field is None; without a
    scale, both are None.
    """

    tensors: tuple[Any, Any] = (None, None)
    numbers: tuple[float | None, float | None] = (None, None)

    @classmethod
    def of(cls, k_scale: Any, v_scale: Any) -> Scales:
        """Returns the scales that a caller passed. Raises ArgumentError unless each is a tensor, a
        number or None."""
        if k_scale is None and v_scale is None:
            return _NO_SCALES
        (k, k_value), (v, v_value) = _split("k_scale", k_scale), _split("v_scale", v_scale)
        return cls((k, v), (k_value, v_value))

    @property
    def are_given(self) -> bool:
        """Whether at least one scale was given."""
        return any(it is not None for it in (*self.tensors, *self.numbers))


_NO_SCALES = Scales()


def _split(name: str, scale: Any) -> tuple[Any, float | None]:
    if scale is None or framework_of(type(scale)) is not None:
        return scale, None
    is_number = isinstance(scale, Real) and not isinstance(scale, bool)
    value = float(scale) if is_number else math.nan
    if not MIN_SCALE <= value <= MAX_SCALE:
        raise ArgumentError(f"{name}={quoted(scale)}: {_ALLOWED}")
    return None, value


def add_scales(views: dict[str, TensorView], scales: Scales) -> dict[str, float]:
    """Adds views of those scales that are tensors to the views of the caches; returns those scales
    that are numbers, by the operation's names for them."""
    numbers: dict[str, float] = {}
    for name, tensor, value in zip(SCALES, *scales, strict=True):
        if tensor is not None:
            views[name] = _scale_view(name, tensor, views["k_cache"])
        elif value is not None:
            numbers[f"{name}_value"] = value
    return numbers


def _scale_view(name: str, tensor: Any, cache: TensorView) -> TensorView:
    view = view_tensor(name, tensor, ("float32",))
    check_beside(view, cache)
    heads = cache.shape[-2]
    if view.shape not in ((), (1,), (heads,)):
        raise ArgumentError(
            f"{name}: shape {view.shape}; must be (), (1,) or ({heads},): {_ALLOWED}"
        )
    check_memory(view)
    if view.shape and view.strides[0] != 1 and view.shape[0] > 1:
        raise ArgumentError(f"{name}: stride {view.strides[0]}; must be 1 (make it contiguous)")
    return view._replace(shape=view.shape or (1,), strides=(1,))


def cache_format(views: Mapping[str, TensorView], *, has_scales: bool) -> CacheFormat:
    """Returns the format in which the caches of these views store their elements."""
    found = CacheFormat.of_dtype(views["k_cache"].dtype)
    return CacheFormat.SCALED if has_scales and not found else found


def check_one_dtype(k_cache: TensorView, v_cache: TensorView) -> None:
    """Raises ArgumentError unless both caches have the same dtype."""
    if v_cache.dtype != k_cache.dtype:
        raise ArgumentError(
            f"v_cache: dtype {v_cache.dtype}; must be k_cache's, {k_cache.dtype}: convert one"
        )


def check_d(cache: CacheFormat, name: str, d: int) -> None:
    """Raises ArgumentError unless a row of ``d`` 8-bit floats takes a multiple of 16 bytes."""
    if cache.is_8bit and d % D_STEP_OF_8BIT:
        raise ArgumentError(
            f"{name}: {cache.numpy_name} with d_head {d}; must be a multiple of "
            f"{D_STEP_OF_8BIT}: pad the rows, or keep the caches in 16 bits"
        )
