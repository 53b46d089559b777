"""CachedCall: a call to any operation that was checked and planned once and can be launched again.

Checks take most of a call's host time. Their outcome depends on the *call signature*: everything
except the tensors' addresses. A call with a cached signature skips the checks. Only calls on
tensors of a RepeatableFramework have a signature; all others run all checks. A call that fails the
checks is never cached.

Reading, hashing and comparing a signature would take half of a call's time, and binding its
keywords another tenth. A *repeated call* needs none of this, because it is looked up by the
arguments exactly as the caller passes them. One function of the framework compares all tensors, and
most options are the same objects as in the earlier call.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial, reduce
from operator import itemgetter, or_
from threading import get_ident
from typing import Any, NamedTuple

from flashsmith.families import KernelConfig
from flashsmith.operations import TensorSpec
from flashsmith.runtime.frameworks import framework_of
from flashsmith.runtime.frameworks.base import (
    RepeatableFramework,
    TensorView,
    contiguous_strides,
)
from flashsmith.runtime.launch_counter import launched
from flashsmith.runtime.libraries import PreparedLaunch
from flashsmith.runtime.prepared_call import PreparedCall
from flashsmith.runtime.tensors import byte_range
from flashsmith.semantics.dtype import dtype_name

# Limits on the calls cached by signature, the groups of repeated calls, the shapes in a group, and
# the calls of one shape. The oldest are dropped first.
MOST_CALLS, MOST_GROUPS, MOST_SHAPES, MOST_OF_SHAPE = 1024, 256, 256, 32
# The maximum number of usable address tuples that a call remembers; that many take 100 KiB of host
# memory.
_MOST_KNOWN = 256
# Workspace blocks are allocated as int32; this is the element size in bytes.
_BLOCK_ELEMENT = 4
# All calls of a thread that need at most this many bytes of workspace share one block.
KEPT_BYTES = 1 << 20
# The address bits that are 0 in a 16-byte aligned address; no tensor needs a higher alignment.
_UNALIGNED = 15
# Options whose types come from these modules are immutable and compare by value.
_OPTION_MODULES = {"builtins", "numpy"}

Signature = tuple[Any, ...]
Run = Callable[[tuple[Any, ...]], Any]


class CachedCall:
    """Everything about a call except the addresses of its tensors; threads may share it."""

    def __init__(
        self,
        prepared: PreparedCall,
        given: Sequence[str],
        returned: Sequence[str | None],
        copied: Sequence[str] = (),
    ) -> None:
        """``prepared`` is a call on tensors of a RepeatableFramework and includes its launch.

        ``given`` names the tensors that ``run`` takes, and ``returned`` the tensors that it
        returns; a single tensor is returned without a tuple. The kernel reads dense copies of the
        tensors named in ``copied``. All names are the operation's.
        """
        first, launch = next(iter(prepared.views.values())), prepared.launch
        framework, views = first.framework, prepared.views
        assert isinstance(framework, RepeatableFramework)
        assert launch is not None
        self._stream_of, self._ordinal = framework.stream_of, first.device.ordinal
        self._address_of = framework.tensor_type.data_ptr
        self._copied = [given.index(name) for name in copied]
        self._is_swapped = False
        problem = prepared.call.problem
        tensors = problem.computed.tensors_of(problem.semantics)
        specs = {tensor.name: tensor for tensor in tensors}
        placed = [(specs[name], views[name]) for name in given]
        self._masks = [
            (place, max(spec.alignment, view.element_size) - 1)
            for place, (spec, view) in enumerate(placed)
            if 0 not in view.shape
        ]
        self._overlaps = _overlaps_of(placed, prepared.outputs)
        written = [place for place, name in enumerate(given) if name in prepared.outputs]
        self._count_writes = framework.count_writes
        self._written = _several(written) if written else None
        self._known: set[tuple[int, ...]] = set()
        new = [name for name in prepared.outputs if name not in given]
        self._new_layouts: list[_Layout] = [
            (views[name].shape, views[name].dtype, contiguous_strides(views[name].shape))
            for name in new
        ]
        self._set_allocators(framework, first.source)
        self._fills = framework.fills
        addressed = {name: place for place, name in enumerate((*given, *new))}
        self._places = [addressed.get(tensor.name) for tensor in tensors]
        self._n_addressed = len(addressed)
        self._set_launch(launch, framework, first.source)
        # An extra None after the given and allocated tensors; absent outputs have the index of this
        # None.
        self._absent = (None,) if None in returned else ()
        at = [len(addressed) if name is None else addressed[name] for name in returned]
        self._returned = itemgetter(*at) if at else tuple
        self._new_returned = [new.index(name) if name in new else None for name in returned]
        self.returned = tuple(returned)

    def with_launch(
        self, launch: PreparedLaunch, framework: RepeatableFramework, like: Any
    ) -> CachedCall:
        """Returns a copy of this call with another launch, for tensors of other shapes. ``like`` is
        any tensor on the same device. All outputs must be given, and they are not checked for
        overlaps."""
        assert not self._new
        other = copy.copy(self)
        other._overlaps, other._known = [], set()
        other._set_launch(launch, framework, like)
        return other

    def swapped(self, like: Any) -> CachedCall:
        """Returns a copy of this call for callers that use the transposed layout: their 4-D inputs
        and outputs are views of this call's tensors with dimensions 1 and 2 swapped.

        A view has the same address, so the launch stays the same; only the layouts of copies and of
        new outputs differ. ``like`` is any tensor on the same device.
        """
        other = copy.copy(self)
        other._known, other._is_swapped = set(), not self._is_swapped
        other._new_layouts = [
            (swapped_sizes(shape), dtype, swapped_sizes(strides))
            for shape, dtype, strides in self._new_layouts
        ]
        framework = framework_of(type(like))
        assert isinstance(framework, RepeatableFramework)
        other._set_allocators(framework, like)
        return other

    def _set_allocators(self, framework: RepeatableFramework, like: Any) -> None:
        self._new, self._new_filled = (
            [
                framework.allocator(like, shape, dtype, strides=strides, filled=filled)
                for shape, dtype, strides in self._new_layouts
            ]
            for filled in (False, True)
        )

    def _set_launch(
        self, launch: PreparedLaunch, framework: RepeatableFramework, like: Any
    ) -> None:
        self._launch, self._function, self._n_kernels = launch, launch.function, launch.n_kernels
        self._new_block: Callable[[], Any] | None = None
        self._new_kept: Callable[[], Any] | None = None
        self._kept: _Kept | None = None
        if launch.block_bytes:
            # The memory is allocated on the current stream, where the kernel is launched.
            block = (-(-launch.block_bytes // _BLOCK_ELEMENT),)
            self._new_block = framework.allocator(like, block, "int32")
            if launch.block_bytes <= KEPT_BYTES:
                kept = (KEPT_BYTES // _BLOCK_ELEMENT,)
                self._new_kept = framework.allocator(like, kept, "int32")
                self._kept = _kept.setdefault((framework, self._ordinal), _Kept())
        self._in_order = self._order()

    def _order(self) -> Callable[[Any], Any] | None:
        """Returns a function that puts addresses in the library's order; None if they are in that
        order already. Its argument holds the addresses of the given tensors, the allocated tensors
        and the block, and then a 0 for absent tensors."""
        count = self._n_addressed
        absent = count + (self._new_block is not None)
        order = [absent if place is None else place for place in self._places]
        if self._new_block is not None:
            order.append(count)
        while order[-1] == absent:  # trailing zeros may be left out
            order.pop()
        return None if order == [*range(absent)] else itemgetter(*order)

    def run(self, given: tuple[Any, ...]) -> Any:
        """Launches on these tensors and returns the outputs. Returns None and launches nothing when
        these addresses still need the full checks.

        Raises LaunchError when the launch is refused.
        """
        if self._copied:
            given = self._with_copies(given)
        at = (*map(self._address_of, given),)
        if at not in self._known and not self._is_usable(at):
            return None
        for allocate in self._new_filled if self._fills() else self._new:
            tensor = allocate()
            given += (tensor,)
            at += (tensor.data_ptr(),)
        if self._written is not None:
            self._count_writes(self._written(given))
        self._launch_at(at)
        return self._returned(given + self._absent)

    def run_at(self, at: tuple[int, ...]) -> bool:
        """Does the same as ``run`` for the tensors at these addresses; the addresses of all outputs
        must be included. Returns whether the call was launched."""
        if at not in self._known and not self._is_usable(at):
            return False
        self._launch_at(at)
        return True

    def run_from(self, at: tuple[int, ...]) -> tuple[Any, ...] | None:
        """Does the same as ``run`` for the tensors at these addresses. Returns a tuple of the
        outputs, in which outputs that were given or are absent are None; returns None if nothing
        was launched."""
        if self._copied or (at not in self._known and not self._is_usable(at)):
            return None
        made = []
        for allocate in self._new_filled if self._fills() else self._new:
            tensor = allocate()
            made.append(tensor)
            at += (tensor.data_ptr(),)
        self._launch_at(at)
        return tuple([None if place is None else made[place] for place in self._new_returned])

    def _launch_at(self, at: tuple[int, ...]) -> None:
        stream = self._stream_of(self._ordinal)
        if self._new_block is not None:
            # A thread's calls on the default stream (handle 0) share one small block. These calls
            # run one after the other, the default stream is never captured, and its handle is never
            # reused. On an H200 this saves 3 µs of the 60 µs that a call with gradients takes.
            kept = self._kept if stream == 0 else None
            block = None if kept is None else kept.block
            if block is None:
                block = self._make_block(kept)
            at += (block[0],)  # ``block`` keeps its memory alive until the launch
        if self._in_order is not None:
            at = self._in_order((*at, 0))
        try:
            self._function(stream, *at)
        except RuntimeError as error:
            raise self._launch.refused(error) from None
        launched[get_ident(), "gpu"] += self._n_kernels  # inlined note_launch()

    def _with_copies(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        copies = [*given]
        for place in self._copied:
            tensor = copies[place]
            if self._is_swapped and tensor.dim() == 4:
                tensor = tensor.transpose(1, 2)
            copies[place] = tensor.contiguous()
        return tuple(copies)

    def _is_usable(self, at: tuple[int, ...]) -> bool:
        """Whether tensors at these addresses are aligned and no output overlaps another tensor.

        Remembers usable addresses, because a model's layers reuse the same addresses at every step.
        """
        if 0 in at or reduce(or_, at) & _UNALIGNED:  # faster than checking each address
            for place, unaligned in self._masks:
                if not at[place] or at[place] & unaligned:
                    return False
        for written, read, low, high, checked in self._overlaps:
            apart = at[read] - at[written]
            if low < apart < high and apart != checked:
                return False
        if len(self._known) >= _MOST_KNOWN:
            self._known = set()
        self._known.add(at)
        return True

    def _make_block(self, kept: _Kept | None) -> _Block:
        """Allocates the call's block. If ``kept`` is given, stores the block there for other
        calls."""
        new = self._new_block if kept is None else self._new_kept
        assert new is not None
        memory = new()
        block = memory.data_ptr(), memory
        if kept is not None:
            kept.block = block
        return block


# The shape, dtype and strides of an output that a call allocates.
_Layout = tuple[tuple[int, ...], str, tuple[int, ...]]


def swapped_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sizes or strides of a tensor; if it is 4-D, with dimensions 1 and 2 swapped."""
    return (sizes[0], sizes[2], sizes[1], sizes[3]) if len(sizes) == 4 else sizes


_Block = tuple[int, Any]  # its address, and the object that owns the memory


class _Kept(threading.local):
    """The block that the calls of one thread on one GPU share, if the block is large enough for
    them.

    Threads do not share a block, because one thread's launches could run between two launches of
    another thread's plan."""

    block: _Block | None = None


# One entry per framework and GPU.
_kept: dict[tuple[RepeatableFramework, int], _Kept] = {}


def overlap(o: TensorView, view: TensorView) -> tuple[int, int]:
    """Returns the open interval of address differences (the view's minus o's) at which the address
    ranges of the two tensors overlap."""
    (first, end), (o_first, o_end) = byte_range(view), byte_range(o)
    apart = view.address - o.address
    return apart + o_first - end, apart + o_end - first


def _overlaps_of(
    placed: Sequence[tuple[TensorSpec, TensorView]], outputs: Container[str]
) -> list[tuple[int, int, int, int, int | None]]:
    """Returns, for each pair of an output and another tensor, the places of both, the open interval
    of address differences at which the two overlap, and, if they may share memory, their address
    difference in this call (else None)."""
    return [
        (
            *(place, other, *overlap(view, its)),
            its.address - view.address if others.name in spec.may_share else None,
        )
        for place, (spec, view) in enumerate(placed)
        if spec.name in outputs
        for other, (others, its) in enumerate(placed)
        if other != place
    ]


# --- by signature --------------------------------------------------------------------------------

CachedCalls = dict[Signature, CachedCall]
# When calls are forgotten, this dict is replaced, not emptied, so that a call still running then
# adds itself to the old dict.
cached: CachedCalls = {}
Groups = dict[Any, "_Group"]
# This dict is replaced after ``cached``: a thread that reads the new dict here also reads the new
# ``cached``, so no forgotten call enters the new dict.
repeated: Groups = {}
_lock = threading.Lock()
# The tensor types of RepeatableFrameworks in use, each with its framework's ``grad_enabled``.
_grad_enabled: dict[type, Callable[[], bool]] = {}


def forget_cached_launches() -> None:
    """Drops all cached calls, so that every call runs all checks and chooses its kernel again.

    Called when the choice may change, for example because of a new table of winners. Safe to call
    at any time, from any thread.
    """
    global cached, repeated
    cached = {}
    repeated = {}


def _forget_in_child() -> None:
    global _lock
    # A thread of the parent may have held the lock during the fork.
    _lock = threading.Lock()
    # A child cannot use its parent's CUDA; the full checks raise the error for that.
    forget_cached_launches()


os.register_at_fork(after_in_child=_forget_in_child)


class Invocation(NamedTuple):
    """A call's tensors (None for each that is not given) and options, both in a fixed order.

    ``names`` identifies the function, and thus the meaning of the tensors and options.
    """

    names: Any
    tensors: tuple[Any, ...]
    options: tuple[Any, ...]

    def signature(self) -> Signature | None:
        """Everything except addresses that the checks and the choice of a kernel depend on.

        None for calls that may need gradients, and for tensors of other frameworks than a
        RepeatableFramework. Equal signatures must have equal outcomes, so they include the options'
        types: 1 equals True.
        """
        kind = type(self.tensors[0])
        grad_enabled = _grad_enabled.get(kind)
        if grad_enabled is None:
            if not _is_repeatable(kind):
                return None
            grad_enabled = _grad_enabled[kind]
        follows = grad_enabled()
        found = [self.names, *self.options, *map(type, self.options)]
        for option in self.options:
            if type(option) is tuple:
                found += map(type, option)
        for tensor in self.tensors:
            if tensor is None:
                found.append(None)
                continue
            if type(tensor) is not kind or (follows and tensor.requires_grad) or tensor.is_neg():
                return None
            found += (tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        return tuple(found)

    def is_comparable(self) -> bool:
        """Whether every option is immutable and compares by value."""
        for value in self.options:
            for part in value if type(value) is tuple else (value,):
                known = type(part).__module__ in _OPTION_MODULES or dtype_name(part) is not None
                if not known and not _is_own(part):
                    return False
        return True

    def given(self) -> tuple[Any, ...]:
        """Returns the tensors that are not None, as CachedCall.run takes them."""
        return tuple(tensor for tensor in self.tensors if tensor is not None)


def is_constant(value: Any) -> bool:
    """Whether an argument is None, a number, a string, or a tuple of these (compared by value)."""
    kind = type(value)
    return kind in _CONSTANTS or (kind is tuple and all(type(it) in _CONSTANTS for it in value))


_CONSTANTS = {type(None), bool, int, float, str}


def _is_own(value: Any) -> bool:
    """Whether an option selects a kernel, that is, whether it is a config, a Chooser or a
    NextKernel."""
    return isinstance(value, (KernelConfig, tuple)) or callable(value)


def find(asked: Invocation | None) -> tuple[Signature | None, CachedCall | None]:
    """Returns the signature of a call (None if it has no signature) and its CachedCall (None if it
    is not cached)."""
    if asked is None:
        return None, None
    try:
        signature = asked.signature()
        return signature, None if signature is None else cached.get(signature)
    except Exception:
        # An argument is not a tensor, or an option cannot be hashed: the full checks raise the
        # error.
        return None, None


Remember = Callable[..., None]


def run_cached(
    asked: Invocation | None, names: Sequence[str], run: Callable[[Remember], Any]
) -> Any:
    """Returns the result of a call, by its CachedCall if there is one, else by ``run``.

    ``asked`` is None for a call that must be checked every time. ``names`` are the operation's
    names for the call's tensors. ``run`` does all checks and takes a callback. If the call may be
    repeated, ``run`` passes the callback the PreparedCall, the names of the returned tensors and
    the names of the copied tensors.
    """
    if asked is None:
        return run(_never)
    arguments = asked.tensors + asked.options
    # Autograd records operations only while grad mode is on, so the lookup depends on that mode.
    follows = _grad_enabled.get(type(arguments[0]), bool)()
    outputs = run_repeated(arguments, (asked.names, follows))
    if outputs is not None:
        return outputs
    calls, groups = cached, repeated
    signature, call = find(asked)
    if signature is None:
        return run(_never)
    if call is not None:
        outputs = call.run(asked.given())
        if outputs is not None:
            remember_repeated(groups, arguments, (asked.names, follows), asked.tensors, call.run)
            return outputs
    return run(partial(remember, calls, signature, asked, names))


def remember(
    calls: CachedCalls,
    signature: Signature,
    asked: Invocation,
    names: Sequence[str],
    prepared: PreparedCall,
    returned: Sequence[str | None],
    copied: Sequence[str] = (),
) -> None:
    """Adds a call to the cache that ``find`` searches, unless an option has an unusual type.

    ``calls`` is the value of ``cached`` before the call was checked. ``run_cached`` describes the
    other arguments.
    """
    if prepared.launch is None or not asked.is_comparable():
        return
    given = [name for name, it in zip(names, asked.tensors, strict=True) if it is not None]
    call = CachedCall(prepared, given, returned, copied)
    with _lock:
        while len(calls) >= MOST_CALLS:
            del calls[next(iter(calls))]
        calls[signature] = call


def _never(*_: Any) -> None:
    """Does nothing: the callback for calls that are not cached."""


def _is_repeatable(kind: type) -> bool:
    framework = framework_of(kind)
    if isinstance(framework, RepeatableFramework) and framework.tensor_type is kind:
        _grad_enabled[kind] = framework.grad_enabled
        return True
    return False


# --- by the caller's arguments -------------------------------------------------------------------


class RepeatedCall(NamedTuple):
    """A function ``run``, the arguments that it can serve, and the positions of its tensors among
    them."""

    # A function that picks each distinct tensor once, in the order in which has_layout takes them.
    distinct: Callable[[Any], tuple[Any, ...]]
    # A function that returns whether tensors have the remembered types, dtypes, devices, shapes and
    # strides.
    has_layout: Callable[..., bool]
    # The position and value of every other argument.
    options: tuple[tuple[int, Any], ...]
    # Pairs of positions that hold the same tensor. If there are any, tensors_of picks the tensors
    # for ``run``.
    same: tuple[tuple[int, int], ...]
    tensors_of: Callable[[Any], tuple[Any, ...]]
    run: Run

    def serves(self, arguments: tuple[Any, ...]) -> bool:
        """Whether this call can serve these arguments. run_repeated uses the first call for which
        this is true."""
        return (
            self.has_layout(*self.distinct(arguments))
            and all(
                arguments[place] is value or _is_same(arguments[place], value)
                for place, value in self.options
            )
            and all(arguments[a] is arguments[b] for a, b in self.same)
        )


class _Group:
    """The remembered calls with one value of ``names``, whose arguments thus have the same meaning:
    the latest call, and for each shape of the first tensor all calls, newest first."""

    __slots__ = ("by_shape", "latest")

    def __init__(self) -> None:
        self.latest: tuple[RepeatedCall, ...] = ()
        self.by_shape: dict[Any, tuple[RepeatedCall, ...]] = {}

    def add(self, shape: Any, call: RepeatedCall, arguments: tuple[Any, ...]) -> None:
        """Adds a call for ``arguments``, and removes earlier calls that could have served them."""
        while shape not in self.by_shape and len(self.by_shape) >= MOST_SHAPES:
            del self.by_shape[next(iter(self.by_shape))]
        others = [it for it in self.by_shape.get(shape, ()) if not it.serves(arguments)]
        self.by_shape[shape] = (call, *others[: MOST_OF_SHAPE - 1])
        self.latest = (call,)


def run_repeated(arguments: tuple[Any, ...], names: Any) -> Any:
    """Runs the remembered call that matches these arguments and returns its outputs. Returns None
    and launches nothing when no call matches or the addresses need the full checks.

    ``arguments`` begin with a tensor; the value of ``names`` identifies the meaning of the others.
    Must not be used for calls that a dispatch mode, a transform or forward-mode differentiation
    intercepts. Raises LaunchError when the launch is refused.
    """
    group = repeated.get(names)
    if group is None:
        return None
    calls, is_latest = group.latest, True
    while True:
        for call in calls:
            distinct, has_layout, options, same, tensors_of, run = call
            tensors = distinct(arguments)
            if has_layout(*tensors):
                for place, value in options:
                    given = arguments[place]
                    if given is not value and not _is_same(given, value):
                        break
                else:
                    if not same:
                        return run(tensors)
                    if all(arguments[a] is arguments[b] for a, b in same):
                        return run(tensors_of(arguments))
        if not is_latest:
            return None
        try:
            calls, is_latest = group.by_shape.get(arguments[0].shape, ()), False
        except (AttributeError, TypeError):
            return None  # not a tensor: the full checks raise the error


def find_repeated(groups: Groups, arguments: tuple[Any, ...], names: Any) -> RepeatedCall | None:
    """Returns the remembered call that run_repeated would use for these arguments, or None.
    ``groups`` is the current value of this module's ``repeated``."""
    group = groups.get(names)
    if group is None:
        return None
    calls = (*group.latest, *group.by_shape.get(arguments[0].shape, ()))
    return next((call for call in calls if call.serves(arguments)), None)


def remember_repeated(
    groups: Groups, arguments: tuple[Any, ...], names: Any, tensors: Iterable[Any], run: Run
) -> None:
    """Makes run_repeated serve calls with matching arguments by ``run``, to which it passes those
    ``tensors`` that are not None.

    The arguments must have a call signature. ``groups`` is the value of ``repeated`` before ``run``
    was looked up.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    distinct = [*{id(tensor): tensor for tensor in given}.values()]
    framework = framework_of(type(given[0]))
    assert isinstance(framework, RepeatableFramework)
    has_layout = framework.layout_check(tuple(distinct))
    if not has_layout(*distinct):
        return
    places: dict[int, list[int]] = {id(tensor): [] for tensor in distinct}
    options = []
    for place, argument in enumerate(arguments):
        if id(argument) in places:
            places[id(argument)].append(place)
        else:
            options.append((place, argument))
    call = RepeatedCall(
        _several([places[id(tensor)][0] for tensor in distinct]),
        has_layout,
        tuple(options),
        tuple((first, other) for first, *others in places.values() for other in others),
        _several([places[id(tensor)][0] for tensor in given]),
        run,
    )
    with _lock:
        while names not in groups and len(groups) >= MOST_GROUPS:
            del groups[next(iter(groups))]
        groups.setdefault(names, _Group()).add(arguments[0].shape, call, arguments)


def _several(places: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns a function that returns the arguments at these positions as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    (place,) = places
    return lambda arguments: (arguments[place],)


def _is_same(given: Any, value: Any) -> bool:
    """Whether an option equals the remembered one in value and type (1 equals True, so the type
    matters)."""
    if type(given) is not type(value):
        return False
    try:
        if given != value:
            return False
    except Exception:
        return False  # the full checks raise the error
    return not isinstance(value, tuple) or [*map(type, given)] == [*map(type, value)]
