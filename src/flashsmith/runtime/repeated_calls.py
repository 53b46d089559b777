"""RepeatedCall: a cached launch by a call's arguments as its caller wrote them.

A call signature (cached_launches.py) has five properties of every tensor, and every option. To
read, hash and compare them would take half of a call over a cache, to bind its keywords another
tenth. Calls with the same keywords in the same order need neither: one function of the framework
compares all tensors, and most options are the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, NamedTuple

from flashsmith.runtime import cached_launches
from flashsmith.runtime.cached_launches import Orders
from flashsmith.runtime.frameworks import framework_of
from flashsmith.runtime.frameworks.base import RepeatableFramework

Arguments = tuple[Any, ...]  # positional ones, then the values of the keywords
Run = Callable[[tuple[Any, ...]], Any]


class RepeatedCall(NamedTuple):
    """What arguments must be for ``run`` to serve them, and which of them are its tensors."""

    tensors_of: Callable[[Arguments], tuple[Any, ...]]
    # Whether tensors have the types, dtypes, devices, shapes and strides of those before.
    has_layout: Callable[..., bool]
    # Of every other argument its place and value.
    options: tuple[tuple[int, Any], ...]
    run: Run


def run_repeated(arguments: Arguments, names: tuple[str, ...]) -> Any:
    """What a call like one that was remembered returns; None, without launching, where there is
    none, or the addresses need the full checks.

    ``names`` are those of the keywords. Not for calls that a dispatch mode, a transform or
    forward-mode differentiation looks at. Raises LaunchError when the launch is refused.
    """
    for tensors_of, has_layout, options, run in cached_launches.repeated.get(names, ()):
        tensors = tensors_of(arguments)
        if has_layout(*tensors):
            for place, value in options:
                given = arguments[place]
                if given is not value and not _is_same(given, value):
                    break
            else:
                return run(tensors)
    return None


def remember_repeated(
    orders: Orders, arguments: Arguments, names: tuple[str, ...], tensors: Iterable[Any], run: Run
) -> None:
    """Has run_repeated serve such arguments by ``run``, which takes those of ``tensors`` that are
    not None.

    The arguments have a call signature. ``orders`` is what cached_launches.repeated was before
    ``run`` was looked for.
    """
    given = tuple(tensor for tensor in tensors if tensor is not None)
    framework = framework_of(type(given[0]))
    assert isinstance(framework, RepeatableFramework)
    has_layout = framework.layout_check(given)
    if not has_layout(*given):
        return
    place_of = {id(argument): place for place, argument in enumerate(arguments)}
    places = [place_of[id(tensor)] for tensor in given]
    options = tuple((i, value) for i, value in enumerate(arguments) if i not in places)
    call = RepeatedCall(itemgetter(*places), has_layout, options, run)
    cached_launches.add_repeated(orders, names, call, lambda other: _is_for(other, arguments))


def _is_for(call: RepeatedCall, arguments: Arguments) -> bool:
    """Whether run_repeated would have such arguments served by it, were it the only one."""
    return call.has_layout(*call.tensors_of(arguments)) and all(
        arguments[place] is value or _is_same(arguments[place], value)
        for place, value in call.options
    )


def _is_same(given: Any, value: Any) -> bool:
    """Whether an option is what it was before, its type included: 1 equals True."""
    if type(given) is not type(value) or given != value:
        return False
    return not isinstance(value, tuple) or [*map(type, given)] == [*map(type, value)]
