"""write_slots(k, v, k_cache, v_cache, slot_mapping): writes new keys and values to a cache."""

from __future__ import annotations

import numpy as np

from flashsmith.chooser.backward import check_config_for
from flashsmith.errors import ArgumentError
from flashsmith.families import KernelConfig, Problem, Semantics, d_head_for, families
from flashsmith.families.legality import D_STEP
from flashsmith.operations.cache_scales import SCALES
from flashsmith.operations.write_slots import WRITE_SLOTS
from flashsmith.runtime.cache_scales import (
    Scales,
    add_scales,
    cache_format,
    check_d,
    check_one_dtype,
)
from flashsmith.runtime.cached_calls import Invocation, Remember, run_cached
from flashsmith.runtime.frameworks.base import TensorView
from flashsmith.runtime.operation_run import prepare_operation
from flashsmith.runtime.request import Request, check_operation
from flashsmith.runtime.tensors import (
    DTYPES,
    Array,
    check_beside,
    share_memory,
    view_tensor,
    view_vector,
)
from flashsmith.semantics.cache_format import DTYPES_OF_8BIT

_NAMES = ("k", "v", "k_cache", "v_cache", "slot_mapping")


def write_slots(
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: Array,
    *,
    k_scale: float | Array | None = None,
    v_scale: float | Array | None = None,
    config: KernelConfig | None = None,
    emulate: bool = False,
) -> None:
    """Writes row i of k and v to slot ``slot_mapping[i]`` of k_cache and v_cache.

    With pages of n rows, slot s is row `s % n` of page `s // n`, as serving engines number slots.
    On a GPU nothing is copied to the host and the call does not wait, so that a CUDA graph can be
    replayed with other slots. Without scales, rows are copied to a cache of k's dtype without a
    change of their bits.

    Args:
        k, v: (rows, heads_k, d), fp16 or bf16, PyTorch tensors or NumPy or CuPy arrays, with
            strides as for attention(). v may have its own d. Rows without a slot in slot_mapping
            are not read.
        k_cache, v_cache: (pages, page, heads_k, d) or (batch, capacity, heads_k, d), with dtype and
            strides as for k; both may be parts of one tensor. They are changed. Both may be
            float8_e4m3fn or float8_e5m2: elements are rounded to nearest even and saturate.
        slot_mapping: (at most rows,) int64, contiguous: the slot of each row. A row with a negative
            slot is skipped. A slot beyond the cache is an error on the host; on a device its row is
            skipped. If several rows have the same slot, one of these rows is written.
        k_scale, v_scale: the divisors of k and v, as for attention_with_cache(); None is 1.
        config: the kernel to use; None chooses one.
        emulate: run host tensors in the emulator even when the estimated time is above 60 s.

    Raises:
        ArgumentError: an argument is invalid; nothing was written.
        The other errors of ``flashsmith.forward``.
    """
    check_config_for(WRITE_SLOTS.name, "config", config)
    scales = Scales.of(k_scale, v_scale)
    tensors = k, v, k_cache, v_cache, slot_mapping, *scales.tensors

    def run(remember: Remember) -> Array:
        views, numbers = _views(k, v, k_cache, v_cache, slot_mapping, scales)
        problem = _problem(views, has_scales=scales.are_given)
        if _is_empty(problem, views):
            return k_cache
        chosen = config or write_config(problem)
        prepared = prepare_operation(chosen, problem, views, emulate=emulate, options=numbers)
        prepared.run()
        # A repeated call must return a value other than None, because None means that no call was
        # repeated.
        remember(prepared, ("k_cache",))
        return k_cache

    asked = Invocation(("write_slots",), tensors, (config, emulate, *scales.numbers))
    run_cached(asked, (*_NAMES, *SCALES), run)


def write_config(problem: Problem) -> KernelConfig:
    """Returns the config whose kernel serves a problem of this operation."""
    (family, *_) = families(WRITE_SLOTS.name)
    (config, *_) = family.proof_configs(problem.dtype, d_head_for(problem))
    found: KernelConfig = config.with_knobs(cache=problem.cache_format)
    return found


def write_request(
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: Array,
    k_scale: float | Array | None = None,
    v_scale: float | Array | None = None,
) -> Request | None:
    """Checks arguments as write_slots() does and returns the request for its kernel; None if there
    is nothing to write. Raises ArgumentError in the same cases as write_slots()."""
    scales = Scales.of(k_scale, v_scale)
    views, numbers = _views(k, v, k_cache, v_cache, slot_mapping, scales)
    problem = _problem(views, has_scales=scales.are_given)
    return None if _is_empty(problem, views) else check_operation(problem, views, options=numbers)


def _is_empty(problem: Problem, views: dict[str, TensorView]) -> bool:
    return 0 in views["k"].shape or 0 in views["k_cache"].shape or not problem.seq_q


def _views(
    k: Array, v: Array, k_cache: Array, v_cache: Array, slot_mapping: Array, scales: Scales
) -> tuple[dict[str, TensorView], dict[str, float]]:
    """Returns the checked views of all tensors, and those scales that are numbers."""
    first = view_tensor("k", k)
    views = {"k": first}
    for name, tensor in (("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        others = DTYPES_OF_8BIT if name.endswith("_cache") else ()
        views[name] = view_tensor(name, tensor, (first.dtype, *others))
        check_beside(views[name], first)
    check_one_dtype(views["k_cache"], views["v_cache"])
    if len(first.shape) != 3:
        raise ArgumentError(
            f"k: rank {len(first.shape)} (shape {first.shape}); must be 3: (rows, heads_k, d)"
        )
    if views["v"].shape[:-1] != first.shape[:-1]:
        raise ArgumentError(
            f"v: shape {views['v'].shape}; all but d must be k's, {first.shape}: give a value for "
            "every key"
        )
    for name in ("k", "v"):
        _, heads, d = views[name].shape
        if not heads or not d or d % D_STEP:
            raise ArgumentError(
                f"{name}: shape {views[name].shape}; heads_k must be 1 or more, and d a multiple "
                f"of {D_STEP}: pad {name} and its cache"
            )
        shape = views[f"{name}_cache"].shape
        if len(shape) != 4 or shape[2:] != (heads, d):
            raise ArgumentError(
                f"{name}_cache: shape {shape}; must be (pages, page, {heads}, {d}), with {name}'s "
                "heads and d"
            )
    if views["v_cache"].shape[:-1] != views["k_cache"].shape[:-1]:
        raise ArgumentError(
            f"v_cache: shape {views['v_cache'].shape}; all but d must be k_cache's, "
            f"{views['k_cache'].shape}: give a value for every key"
        )
    if share_memory(views["k_cache"], views["v_cache"]):
        raise ArgumentError(
            "v_cache: shares memory with k_cache, and both are written; give separate caches"
        )
    slots = view_vector("slot_mapping", slot_mapping, "int64")
    check_beside(slots, first)
    if slots.shape[0] > first.shape[0]:
        raise ArgumentError(
            f"slot_mapping: {slots.shape[0]} slots for the {first.shape[0]} rows of k and v; give "
            "at most as many"
        )
    if first.device.kind == "cpu":
        _check_slots(slots, views["k_cache"].shape)
    views["slot_mapping"] = slots
    numbers = add_scales(views, scales)
    return views, numbers


def _check_slots(view: TensorView, cache: tuple[int, ...]) -> None:
    """Raises ArgumentError if a slot is beyond the cache. The slots must be on the host."""
    slots = np.asarray(view.framework.as_numpy(view.source))
    for wrong in np.flatnonzero(slots >= cache[0] * cache[1])[:1]:
        raise ArgumentError(
            f"slot_mapping[{wrong}]={slots[wrong]}: the cache has {cache[0]} pages of {cache[1]}, "
            f"so slots are 0 to {cache[0] * cache[1] - 1}; give one of them, or -1 to skip the row"
        )


def _problem(views: dict[str, TensorView], *, has_scales: bool) -> Problem:
    _, heads, d = views["k"].shape
    count = views["slot_mapping"].shape[0]
    dtype = DTYPES[views["k"].dtype]
    cache = cache_format(views, has_scales=has_scales)
    d_v = views["v"].shape[-1]
    check_d(cache, "k_cache", d)
    check_d(cache, "v_cache", d_v)
    sizes = 1, count, 1, heads, heads, d
    return Problem(*sizes, dtype, Semantics(), WRITE_SLOTS.name, cache=cache.label, d_v=d_v)
