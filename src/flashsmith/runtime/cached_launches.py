"""CachedLaunch: a call that was checked, planned and launched once, to be repeated.

Most of a call's host time are checks, whose outcome depends on everything but the tensors'
addresses: on the *call signature*. A call with a cached signature skips them. Only calls on tensors
of a RepeatableFramework have a signature; all others go through all checks. A refused call is never
cached.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from flashsmith.runtime.forward_call import outputs_of
from flashsmith.runtime.forward_options import NO_WINDOW, ForwardOptions
from flashsmith.runtime.forward_request import Request
from flashsmith.runtime.frameworks import framework_of
from flashsmith.runtime.frameworks.base import RepeatableFramework, TensorView, contiguous_strides
from flashsmith.runtime.launch_counter import note_launch
from flashsmith.runtime.libraries import PreparedLaunch
from flashsmith.runtime.tensors import byte_range

# The oldest are dropped first.
MOST_CALLS = 1024
# Of repeated_calls.py: orders of keywords, and calls of one, as those of batches that grow and
# shrink. To look through as many takes as long as to bind keywords.
MOST_ORDERS, MOST_OF_ORDER = 64, 32
# Of one forward pass: layouts of gradients hardly differ between calls that are otherwise alike.
MOST_FOLLOWING = 8

Tensors = tuple[Any, Any, Any, Any]  # q, k, v, and o or None
Options = tuple[Any, ...]  # in the order of ForwardOptions, or of BackwardOptions
Signature = tuple[Any, ...]

# Options of a call whose output is not a part; else partial, seqused_k and k_begin follow.
_OPTIONS = 11

# The bits of an address that must be 0: tensors begin at 16 bytes, vectors at whole elements.
UNALIGNED, UNALIGNED_VECTOR = 15, 3
# Options of types from these modules are immutable and compare by value.
_OPTION_MODULES = {"builtins", "numpy"}


class CachedLaunch:
    """Everything about a call but the addresses of its tensors; safe to share between threads."""

    def __init__(self, request: Request, launch: PreparedLaunch) -> None:
        """``launch`` is the result of LoadedKernel.prepare for the request, whose tensors are of a
        RepeatableFramework."""
        q, framework = request.q, request.q.framework
        assert isinstance(framework, RepeatableFramework)
        self._launch = launch
        # The library's own, where it can be called without more ado: a call of Python's less.
        self._function = None if launch.block_bytes else launch.function
        self._n_kernels = launch.n_kernels
        self._stream_of, self._ordinal = framework.stream_of, q.device.ordinal
        self._new_o = framework.like_allocator(dense=q.strides == contiguous_strides(q.shape))
        if request.ranges is not None:  # a part, fp32
            allocate = framework.allocator(q.source, q.shape, "float32")
            self._new_o = lambda _: allocate()
        self._has_keys = 0 not in request.k.shape  # empty tensors have no memory
        self._lse, self._row_max = request.lse, request.row_max
        if self._lse or self._row_max:
            shape = request.statistics_shape
            self._new_statistic = framework.allocator(q.source, shape, "float32")
        packing, sinks = request.packing, request.sinks
        self._has_vectors = not (packing is None and sinks is None)
        self._is_plain = not (self._has_vectors or self._lse or self._row_max)
        if request.o is not None:
            offsets = (None, None) if packing is None else packing[:2]
            inputs = (q, request.k, request.v, sinks, *offsets)
            self._overlaps = [overlap(request.o, view) for view in inputs]
        # The module's, unless launches were forgotten since.
        self.generation = generation
        # Backward passes that came after, the last first: gradients needed, has_layout, run.
        self._following: tuple[tuple[Any, Callable[..., bool], Callable[..., Any]], ...] = ()

    def follow(self, needs: Any, tensors: tuple[Any, ...], layout_check: Any, call: Any) -> None:
        """Has run_following run ``call``, a cached backward pass after this, on such tensors.

        ``layout_check`` makes a function of them that says whether as many others have their types,
        dtypes, devices, shapes and strides.
        """
        following = needs, layout_check(tensors), call.run
        self._following = (following, *self._following[: MOST_FOLLOWING - 1])

    def run_following(self, needs: Any, tensors: tuple[Any, ...]) -> Any:
        """What a backward pass that ``follow`` was given returns for do, q, k, v, o and lse; None,
        without launching, where there is none for them, or launches were forgotten since.

        The options and the BackwardAhead are those of this call, which has neither sinks nor packed
        sequences; there is no dlse.
        """
        if self.generation is generation:
            for their_needs, has_layout, run in self._following:
                # A hook on saved tensors may give others back than it got, and .data may be set.
                if their_needs == needs and has_layout(*tensors):
                    return run(tensors, ())
        return None

    def run(self, tensors: Tensors, options: Options) -> Any:
        """Launches on these tensors; returns the outputs, or None, without launching, when the
        addresses need the full checks.

        Raises LaunchError when the launch is refused.
        """
        q, k, v, o = tensors
        q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (q_at | k_at | v_at) & UNALIGNED or not q_at:
            return None
        if self._has_keys and not (k_at and v_at):
            return None
        sinks_at = cu_q_at = cu_k_at = 0
        if self._has_vectors:
            sinks, cu_q, cu_k = options[4:7]
            if sinks is not None:
                sinks_at = sinks.data_ptr()
            if cu_q is not None:
                cu_q_at = cu_q.data_ptr()
                cu_k_at = cu_q_at if cu_k is cu_q else cu_k.data_ptr()
            if (sinks_at | cu_q_at | cu_k_at) & UNALIGNED_VECTOR:
                return None
        if o is None:
            o = self._new_o(q)
            o_at = o.data_ptr()
        else:
            o_at = o.data_ptr()
            if o_at & UNALIGNED:
                return None
            addresses = (q_at, k_at, v_at, sinks_at, cu_q_at, cu_k_at)
            for at, (low, high) in zip(addresses, self._overlaps, strict=True):
                if low < at - o_at < high:
                    return None
        lse = row_max = None
        places: tuple[int, ...] = q_at, k_at, v_at, o_at
        if not self._is_plain:
            lse_at = row_max_at = 0
            if self._lse:
                lse = self._new_statistic()
                lse_at = lse.data_ptr()
            if self._row_max:
                row_max = self._new_statistic()
                row_max_at = row_max.data_ptr()
            places += lse_at, row_max_at, sinks_at, cu_q_at, cu_k_at
        if self._function is None:
            self._launch(self._stream_of(self._ordinal), *places)
        else:
            try:
                self._function(self._stream_of(self._ordinal), *places)
            except RuntimeError as error:
                raise self._launch.refused(error) from None
            note_launch("gpu", self._n_kernels)
        return o if self._is_plain else outputs_of(o, lse, row_max)


def overlap(o: TensorView, view: TensorView | None) -> tuple[int, int]:
    """The open interval of address differences (input's minus o's) in which their bounds
    overlap."""
    if view is None:
        return 0, 0
    (first, end), (o_first, o_end) = byte_range(view), byte_range(o)
    apart = view.address - o.address
    return apart + o_first - end, apart + o_end - first


# Of CachedLaunch, and what is derived from CachedOperation.
CachedCalls = dict[Signature, Any]
# Replaced, not emptied, when calls are forgotten: a running call adds itself to the old dict.
cached: CachedCalls = {}
# Each a RepeatedCall (repeated_calls.py), the last first, by the names of its keywords.
Orders = dict[tuple[str, ...], tuple[Any, ...]]
# Replaced after ``cached``: who has read this one first finds no call there that was forgotten.
repeated: Orders = {}
# Another object whenever calls are forgotten: a forward pass from before may have its backward pass
# after.
generation = object()
_lock = threading.Lock()
# Tensor types of a RepeatableFramework that have been seen, with its ``grad_enabled``.
_grad_enabled: dict[type, Callable[[], bool]] = {}


def forget_cached_launches() -> None:
    """Makes every call go through all checks and the choice of its kernel again.

    Called when the choice may change, as by a new table of winners. Safe to call at any time, from
    any thread.
    """
    global cached, repeated, generation
    cached = {}
    repeated, generation = {}, object()


def _forget_in_child() -> None:
    global _lock
    # A thread of the parent may have held it.
    _lock = threading.Lock()
    # A child cannot use its parent's CUDA: the full checks raise that error.
    forget_cached_launches()


os.register_at_fork(after_in_child=_forget_in_child)


def remember(calls: CachedCalls, signature: Signature, call: Any, asked: ForwardOptions) -> None:
    """Adds a call to those that ``find`` looks through, unless an option is of an unusual type."""
    numbers = (asked.softcap, asked.scale, asked.max_seqlen_q, asked.max_seqlen_k)
    for value in (asked.window, *asked.window, *numbers):
        if type(value).__module__ not in _OPTION_MODULES:
            return
    with _lock:
        while len(calls) >= MOST_CALLS:
            del calls[next(iter(calls))]
        calls[signature] = call


def add_repeated(
    orders: Orders, names: tuple[str, ...], call: Any, replaces: Callable[[Any], bool]
) -> None:
    """Adds a RepeatedCall to ``orders``, in the place of those that it ``replaces``."""
    with _lock:
        while names not in orders and len(orders) >= MOST_ORDERS:
            del orders[next(iter(orders))]
        others = [other for other in orders.get(names, ()) if not replaces(other)]
        orders[names] = (call, *others[: MOST_OF_ORDER - 1])


def find(
    signature_of: Callable[..., Signature | None],
    calls: CachedCalls,
    chosen: Any,
    tensors: tuple[Any, ...],
    options: Options,
    emulate: Any,
) -> tuple[Signature | None, Any]:
    """The signature of a call, if it has one, and its cached launch, if there is one.

    ``signature_of`` is call_signature or backward_signature.
    """
    kind = type(tensors[0])
    grad_enabled = _grad_enabled.get(kind)
    if grad_enabled is None:
        if not _is_repeatable(kind):
            return None, None
        grad_enabled = _grad_enabled[kind]
    try:
        signature = signature_of(kind, grad_enabled(), chosen, tensors, options, emulate)
        return signature, None if signature is None else calls.get(signature)
    except Exception:
        # No tensor where one should be, or an option that cannot be hashed: the checks raise the
        # error.
        return None, None


def call_signature(
    kind: Any, grad_enabled: bool, chosen: Any, tensors: Tensors, options: Options, emulate: Any
) -> Signature | None:
    """Everything but addresses that checks and the choice of a kernel depend on.

    None for calls that may need gradients, or a length that must be read from the device. Equal
    signatures have equal outcomes: since 1 equals True, types are part of them.
    """
    part: Signature = ()
    if len(options) > _OPTIONS:
        partial, used, begin = options[_OPTIONS:]
        if partial is not True or used is not None or begin is not None:
            return None  # of keys that vectors name
        options, part = options[:_OPTIONS], ("part",)
    q, k, v, o = tensors
    causal, window, softcap, scale, sinks, cu_q, cu_k, max_q, max_k, lse, row_max = options
    if type(k) is not kind or type(v) is not kind:
        return None
    if grad_enabled and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    if q.is_neg() or k.is_neg() or v.is_neg():
        return None  # copied first
    signature: Signature = (
        chosen,
        q.dtype, q.device, q.shape, q.stride(),
        k.dtype, k.device, k.shape, k.stride(),
        v.dtype, v.device, v.shape, v.stride(),
        causal, softcap, scale, lse, row_max, emulate,
        type(causal), type(softcap), type(scale), type(lse), type(row_max), type(emulate),
    )  # fmt: skip
    if window is not NO_WINDOW:
        signature += ("window", window, type(window), *map(type, window))
    if cu_q is not None or cu_k is not None:
        if max_q is None or max_k is None:
            return None
    elif o is None and sinks is None and max_q is None and max_k is None:
        return signature + part
    signature += (max_q, max_k, type(max_q), type(max_k), *part)
    others = _of_others(kind, grad_enabled, o, sinks, cu_q, cu_k)
    return None if others is None else signature + others


def backward_signature(
    kind: Any,
    grad_enabled: bool,
    chosen: Any,
    tensors: tuple[Any, ...],
    options: Options,
    emulate: Any,
) -> Signature | None:
    """The same of a backward pass."""
    do, q, k, v, o, lse = tensors
    causal, window, softcap, scale, sinks, cu_q, cu_k, max_q, max_k, *rest = options
    dlse, deterministic, needs, grad_dtype = rest
    for tensor in (q, k, v, o, lse):
        if type(tensor) is not kind or tensor.is_neg():
            return None
    if do.is_neg():
        return None
    if grad_enabled and any(tensor.requires_grad for tensor in tensors):
        return None
    signature: Signature = (
        "backward", chosen,
        do.dtype, do.device, do.shape, do.stride(),
        q.dtype, q.device, q.shape, q.stride(),
        k.dtype, k.device, k.shape, k.stride(),
        v.dtype, v.device, v.shape, v.stride(),
        o.dtype, o.device, o.shape, o.stride(),
        lse.dtype, lse.device, lse.shape, lse.stride(),
        causal, softcap, scale, deterministic, needs, grad_dtype, emulate,
        type(causal), type(softcap), type(scale), type(deterministic), *map(type, needs),
        type(emulate),
    )  # fmt: skip
    if window is not NO_WINDOW:
        signature += ("window", window, type(window), *map(type, window))
    if cu_q is not None or cu_k is not None:
        if max_q is None or max_k is None:
            return None
    elif dlse is None and sinks is None and max_q is None and max_k is None:
        return signature
    signature += (max_q, max_k, type(max_q), type(max_k))
    others = _of_others(kind, grad_enabled, dlse, sinks, cu_q, cu_k)
    return None if others is None else signature + others


def _of_others(
    kind: Any, grad_enabled: bool, first: Any, sinks: Any, cu_q: Any, cu_k: Any
) -> Signature | None:
    """The part of a signature that is of tensors most calls do not have."""
    signature: Signature = ()
    for tensor in (first, sinks, cu_q, None if cu_k is cu_q else cu_k):
        if tensor is None:
            signature += (None,)
            continue
        if type(tensor) is not kind or (grad_enabled and tensor.requires_grad) or tensor.is_neg():
            return None
        signature += (tensor.dtype, tensor.device, tensor.shape, tensor.stride())
    return (*signature, cu_k is cu_q)


def _is_repeatable(kind: type) -> bool:
    framework = framework_of(kind)
    if isinstance(framework, RepeatableFramework) and framework.tensor_type is kind:
        _grad_enabled[kind] = framework.grad_enabled
        return True
    return False
