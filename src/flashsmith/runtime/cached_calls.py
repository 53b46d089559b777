"""CachedCall: a call of any operation that was checked, planned and launched once, to be repeated.

Most of a call's host time are checks, whose outcome depends on everything but the tensors'
addresses: on the *call signature*. A call with a cached signature skips them. Only calls on tensors
of a RepeatableFramework have a signature; all others go through all checks. A refused call is never
cached.

To read, hash and compare a signature would take half of a call, to bind its keywords another tenth.
A *repeated call* needs neither: it is found by its caller's own arguments, whose tensors one
function of the framework compares, and most of whose options are the same objects.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from operator import itemgetter, or_
from threading import get_ident
from typing import Any, NamedTuple

from flashsmith.families import KernelConfig
from flashsmith.runtime.frameworks import framework_of
from flashsmith.runtime.frameworks.base import RepeatableFramework, TensorView
from flashsmith.runtime.launch_counter import launched
from flashsmith.runtime.prepared_call import PreparedCall
from flashsmith.runtime.tensors import byte_range
from flashsmith.semantics.dtype import dtype_name

# The oldest are dropped first: of calls by their signature, of groups of repeated calls, of shapes
# in a group, and of the calls of a shape.
MOST_CALLS, MOST_GROUPS, MOST_SHAPES, MOST_OF_SHAPE = 1024, 256, 256, 32
# Addresses of a call's tensors that need no further look, 100 KiB of the host's memory.
_MOST_KNOWN = 256
# Blocks of workspaces are allocated in elements of so many bytes, int32.
_BLOCK_ELEMENT = 4
# Up to so many bytes a thread's calls share one.
KEPT_BYTES = 1 << 20
# The bits of an address that are 0 where any tensor may begin.
_UNALIGNED = 15
# Options of types from these modules are immutable and compare by value.
_OPTION_MODULES = {"builtins", "numpy"}

Signature = tuple[Any, ...]
Run = Callable[[tuple[Any, ...]], Any]


class CachedCall:
    """Everything about a call but the addresses of its tensors; safe to share between threads."""

    def __init__(
        self,
        prepared: PreparedCall,
        given: Sequence[str],
        returned: Sequence[str | None],
        copied: Sequence[str] = (),
    ) -> None:
        """``prepared`` is the call on tensors of a RepeatableFramework, its launch among it.

        ``given`` are the operation's names of the tensors that ``run`` takes, and ``returned`` of
        those that it returns, a single one by itself. Of those ``copied`` the kernel reads dense
        copies.
        """
        first, launch = next(iter(prepared.views.values())), prepared.launch
        framework, views = first.framework, prepared.views
        assert isinstance(framework, RepeatableFramework)
        assert launch is not None
        self._launch, self._function, self._n_kernels = launch, launch.function, launch.n_kernels
        self._stream_of, self._ordinal = framework.stream_of, first.device.ordinal
        self._address_of = framework.tensor_type.data_ptr
        self._copied = [given.index(name) for name in copied]
        operation = prepared.call.problem.computed
        specs = {tensor.name: tensor for tensor in operation.tensors}
        placed = [(specs[name], views[name]) for name in given]
        self._masks = [
            (place, max(spec.alignment, view.element_size) - 1)
            for place, (spec, view) in enumerate(placed)
            if 0 not in view.shape
        ]
        # What is not to lie between two addresses' bounds, or at the distance that was checked.
        self._overlaps = [
            (
                *(place, other, *overlap(view, its)),
                its.address - view.address if others.name in spec.may_share else None,
            )
            for place, (spec, view) in enumerate(placed)
            if spec.name in prepared.outputs
            for other, (others, its) in enumerate(placed)
            if other != place
        ]
        self._known: set[tuple[int, ...]] = set()
        new = [name for name in prepared.outputs if name not in given]
        self._new, self._new_filled = (
            [
                framework.allocator(first.source, view.shape, view.dtype, filled=filled)
                for view in map(views.__getitem__, new)
            ]
            for filled in (False, True)
        )
        self._fills = framework.fills
        self._new_block: Callable[[], Any] | None = None
        self._new_kept: Callable[[], Any] | None = None
        self._kept: _Kept | None = None
        if launch.block_bytes:
            # On the current stream, which is the launch's.
            block = (-(-launch.block_bytes // _BLOCK_ELEMENT),)
            self._new_block = framework.allocator(first.source, block, "int32")
            if launch.block_bytes <= KEPT_BYTES:
                kept = (KEPT_BYTES // _BLOCK_ELEMENT,)
                self._new_kept = framework.allocator(first.source, kept, "int32")
                self._kept = _kept.setdefault((framework, self._ordinal), _Kept())
        addressed = {name: place for place, name in enumerate((*given, *new))}
        self._in_order = self._order(
            [addressed.get(tensor.name) for tensor in operation.tensors], len(addressed)
        )
        # Behind what is given and allocated.
        self._absent = (None,) if None in returned else ()
        at = [len(addressed) if name is None else addressed[name] for name in returned]
        self._returned = itemgetter(*at)
        self.returned = tuple(returned)

    def _order(self, places: list[int | None], count: int) -> Callable[[Any], Any] | None:
        """A function of the addresses of what is given and allocated, of the block and of 0, to
        those that the library takes; None where that leaves all but the 0 as they are."""
        absent = count + (self._new_block is not None)
        order = [absent if place is None else place for place in places]
        if self._new_block is not None:
            order.append(count)
        while order[-1] == absent:  # may be left out
            order.pop()
        return None if order == [*range(absent)] else itemgetter(*order)

    def run(self, given: tuple[Any, ...]) -> Any:
        """Launches on these tensors; returns the outputs, or None, without launching, when the
        addresses need the full checks.

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
        stream = self._stream_of(self._ordinal)
        if self._new_block is not None:
            # Of a thread's calls on the stream with handle 0 a small one is the same for all: these
            # run one after the other, and the stream is neither captured nor followed by another
            # with its handle. On an H200 allocating and freeing it takes 3 µs, of the 60 of a call
            # with gradients.
            kept = self._kept if stream == 0 else None
            block = None if kept is None else kept.block
            if block is None:
                block = self._make_block(kept)
            at += (block[0],)  # it is alive until the launch
        if self._in_order is not None:
            at = self._in_order((*at, 0))
        try:
            self._function(stream, *at)
        except RuntimeError as error:
            raise self._launch.refused(error) from None
        launched[get_ident(), "gpu"] += self._n_kernels  # as note_launch
        return self._returned(given + self._absent)

    def _with_copies(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        copies = [*given]
        for place in self._copied:
            copies[place] = copies[place].contiguous()
        return tuple(copies)

    def _is_usable(self, at: tuple[int, ...]) -> bool:
        """Whether tensors at these addresses are aligned, and none is written where another lies.

        Notes those that are: a model's layers have theirs, at every step.
        """
        if 0 in at or reduce(or_, at) & _UNALIGNED:  # sooner than to ask for each
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
        """The block of a call, which is ``kept`` where it is the same for others."""
        new = self._new_block if kept is None else self._new_kept
        assert new is not None
        memory = new()
        block = memory.data_ptr(), memory
        if kept is not None:
            kept.block = block
        return block


_Block = tuple[int, Any]  # its address, and what is to be held until it is launched


class _Kept(threading.local):
    """The block that a thread's calls share: another thread's launches could come between those of
    a plan, so each has its own."""

    block: _Block | None = None


# By framework and GPU.
_kept: dict[tuple[RepeatableFramework, int], _Kept] = {}


def overlap(o: TensorView, view: TensorView) -> tuple[int, int]:
    """The open interval of address differences (input's minus o's) in which their bounds
    overlap."""
    (first, end), (o_first, o_end) = byte_range(view), byte_range(o)
    apart = view.address - o.address
    return apart + o_first - end, apart + o_end - first


# --- by signature --------------------------------------------------------------------------------

CachedCalls = dict[Signature, CachedCall]
# Replaced, not emptied, when calls are forgotten: a running call adds itself to the old dict.
cached: CachedCalls = {}
Groups = dict[Any, "_Group"]
# Replaced after ``cached``: who has read this one first finds no call there that was forgotten.
repeated: Groups = {}
_lock = threading.Lock()
# Tensor types of a RepeatableFramework that have been seen, with its ``grad_enabled``.
_grad_enabled: dict[type, Callable[[], bool]] = {}


def forget_cached_launches() -> None:
    """Makes every call go through all checks and the choice of its kernel again.

    Called when the choice may change, as by a new table of winners. Safe to call at any time, from
    any thread.
    """
    global cached, repeated
    cached = {}
    repeated = {}


def _forget_in_child() -> None:
    global _lock
    # A thread of the parent may have held it.
    _lock = threading.Lock()
    # A child cannot use its parent's CUDA: the full checks raise that error.
    forget_cached_launches()


os.register_at_fork(after_in_child=_forget_in_child)


class Invocation(NamedTuple):
    """A call as its function was asked for it: the tensors, None for those that are not given, and
    the options, each in one order. ``names`` says what they are."""

    names: Any
    tensors: tuple[Any, ...]
    options: tuple[Any, ...]

    def signature(self) -> Signature | None:
        """Everything but addresses that checks and the choice of a kernel depend on.

        None for calls that may need gradients, or on tensors of no RepeatableFramework. Equal
        signatures have equal outcomes: since 1 equals True, types are part of them.
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
        """Whether all options are immutable and compare by value."""
        for value in self.options:
            for part in value if type(value) is tuple else (value,):
                known = type(part).__module__ in _OPTION_MODULES or dtype_name(part) is not None
                if not known and not _is_own(part):
                    return False
        return True

    def given(self) -> tuple[Any, ...]:
        """The tensors that there are, as CachedCall.run takes them."""
        return tuple(tensor for tensor in self.tensors if tensor is not None)


def _is_own(value: Any) -> bool:
    """Whether an option is what a kernel is chosen by: a config, a chooser, or what follows."""
    return isinstance(value, (KernelConfig, tuple)) or callable(value)


def find(asked: Invocation | None) -> tuple[Signature | None, CachedCall | None]:
    """The signature of a call, if it has one, and its cached call, if there is one."""
    if asked is None:
        return None, None
    try:
        signature = asked.signature()
        return signature, None if signature is None else cached.get(signature)
    except Exception:
        # No tensor where one should be, or an option that cannot be hashed: the checks raise the
        # error.
        return None, None


Remember = Callable[..., None]


def run_cached(
    asked: Invocation | None, names: Sequence[str], run: Callable[[Remember], Any]
) -> Any:
    """What a call returns: by its cached call, if there is one, else by ``run``.

    ``asked`` is None for calls that are checked every time; ``names`` are the operation's of its
    tensors. ``run`` goes through all checks, and where the call may be repeated calls its argument
    with the PreparedCall, the names of what is returned and of tensors of which it made dense
    copies.
    """
    if asked is None:
        return run(_never)
    arguments = asked.tensors + asked.options
    # Autograd follows tensors only where it is enabled: what holds now may not hold later.
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
    """Adds a call to those that ``find`` looks through, unless an option is of an unusual type.

    ``calls`` is what ``cached`` was before the call was checked; the rest as of ``run_cached``.
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
    """Remembers nothing."""


def _is_repeatable(kind: type) -> bool:
    framework = framework_of(kind)
    if isinstance(framework, RepeatableFramework) and framework.tensor_type is kind:
        _grad_enabled[kind] = framework.grad_enabled
        return True
    return False


# --- by the caller's arguments -------------------------------------------------------------------


class RepeatedCall(NamedTuple):
    """What arguments must be for ``run`` to serve them, and which of them are its tensors."""

    # Each tensor once, as has_layout takes them.
    distinct: Callable[[Any], tuple[Any, ...]]
    # Whether tensors have the types, dtypes, devices, shapes and strides of those before.
    has_layout: Callable[..., bool]
    # Of every other argument its place and value.
    options: tuple[tuple[int, Any], ...]
    # Where some tensor is given twice: the places of each such, and the tensors as run takes them.
    same: tuple[tuple[int, int], ...]
    tensors_of: Callable[[Any], tuple[Any, ...]]
    run: Run

    def serves(self, arguments: tuple[Any, ...]) -> bool:
        """Whether run_repeated has such arguments served by it, if by none before it."""
        return (
            self.has_layout(*self.distinct(arguments))
            and all(
                arguments[place] is value or _is_same(arguments[place], value)
                for place, value in self.options
            )
            and all(arguments[a] is arguments[b] for a, b in self.same)
        )


class _Group:
    """Calls whose arguments have one meaning: the latest, and by the shape of their first tensor
    all, the last first."""

    __slots__ = ("by_shape", "latest")

    def __init__(self) -> None:
        self.latest: tuple[RepeatedCall, ...] = ()
        self.by_shape: dict[Any, tuple[RepeatedCall, ...]] = {}

    def add(self, shape: Any, call: RepeatedCall, arguments: tuple[Any, ...]) -> None:
        """Adds a call for ``arguments``, in the place of those that would serve them."""
        while shape not in self.by_shape and len(self.by_shape) >= MOST_SHAPES:
            del self.by_shape[next(iter(self.by_shape))]
        others = [it for it in self.by_shape.get(shape, ()) if not it.serves(arguments)]
        self.by_shape[shape] = (call, *others[: MOST_OF_SHAPE - 1])
        self.latest = (call,)


def run_repeated(arguments: tuple[Any, ...], names: Any) -> Any:
    """What a call like one that was remembered returns; None, without launching, where there is
    none, or the addresses need the full checks.

    ``arguments`` begin with a tensor; ``names`` says by its value what the others are. Not for
    calls that a dispatch mode, a transform or forward-mode differentiation looks at. Raises
    LaunchError when the launch is refused.
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
            return None  # no tensor where one should be: the checks raise the error


def remember_repeated(
    groups: Groups, arguments: tuple[Any, ...], names: Any, tensors: Iterable[Any], run: Run
) -> None:
    """Has run_repeated serve such arguments by ``run``, which takes those of ``tensors`` that are
    not None.

    The arguments have a call signature. ``groups`` is what ``repeated`` was before ``run`` was
    looked for.
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
    """From arguments to a tuple of those at the places."""
    if len(places) > 1:
        return itemgetter(*places)
    (place,) = places
    return lambda arguments: (arguments[place],)


def _is_same(given: Any, value: Any) -> bool:
    """Whether an option is what it was before, its type included: 1 equals True."""
    if type(given) is not type(value):
        return False
    try:
        if given != value:
            return False
    except Exception:
        return False  # the checks raise the error
    return not isinstance(value, tuple) or [*map(type, given)] == [*map(type, value)]
