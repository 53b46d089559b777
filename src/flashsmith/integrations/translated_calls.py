"""Makes calls to attention() and attention_with_cache() for functions that have other arguments.

Translating the arguments takes as long as the call. Therefore, a repeated call is looked up by its
original arguments and runs the cached launch of its translation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from flashsmith.errors import ArgumentError, TraceError
from flashsmith.integrations.traceable import attention, attention_with_cache, is_tracing
from flashsmith.runtime import cached_calls
from flashsmith.runtime.cached_calls import is_constant


class Translated(NamedTuple):
    """A translated call, the values to append to its results, and the caller's names of those
    arguments that the called function names differently."""

    function: Callable[..., Any]
    tensors: tuple[Any, Any, Any]
    keywords: dict[str, Any]
    also: tuple[Any, ...] = ()
    names: Mapping[str, str] = MappingProxyType({})


def run_translated(call: Translated) -> Any:
    """Makes the call, and returns its results followed by ``call.also``.

    An ArgumentError of the call has the caller's names of its arguments.
    """
    if is_tracing():  # torch.compile cannot trace the changes of an error
        results = call.function(*call.tensors, **call.keywords)
    else:
        try:
            results = call.function(*call.tensors, **call.keywords)
        except ArgumentError as error:
            if not isinstance(error, TraceError):  # this quotes a line of the caller's code
                error.args = (in_callers_names(str(error), call.names),)
            raise
    return (*results, *call.also) if call.also else results


# What an error is about, at its beginning: 'q, k, v:', 'cache_lens[0]=9:'; and arguments that its
# advice mentions: 'pass scale=', 'and cos is given'.
_NAMED = re.compile(r"^\w+(?:, \w+)*(?=[:=\[])|\b\w+(?==| is given| is missing)")


def in_callers_names(message: str, names: Mapping[str, str]) -> str:
    """Returns an error's message with the arguments renamed by ``names``."""

    def renamed(found: re.Match[str]) -> str:
        return ", ".join(names.get(name, name) for name in found[0].split(", "))

    return _NAMED.sub(renamed, message)


def remember_translated(arguments: tuple[Any, ...], names: Any, call: Translated) -> None:
    """Makes run_repeated serve later calls with arguments equivalent to these, for which ``call``
    was just made.

    ``names`` identifies the function and the meaning of its arguments. A call is remembered only if
    the given arguments fully determine its translation: tensors of the call, and constants.
    """
    if call.function not in (attention, attention_with_cache):
        return
    groups, words = cached_calls.repeated, (*call.tensors, *call.keywords.values())
    repeated = cached_calls.find_repeated(groups, words, tuple(call.keywords))
    if repeated is None:
        return
    tensors = repeated.tensors_of(words)
    known, given = {*map(id, tensors)}, [*map(id, arguments)]
    if not known.issubset(given) or given[0] not in known:
        return
    if all(id(it) in known or is_constant(it) for it in arguments):
        run = _with(repeated.run, call.also) if call.also else repeated.run
        cached_calls.remember_repeated(groups, arguments, names, tensors, run)


def _with(run: cached_calls.Run, also: tuple[Any, ...]) -> cached_calls.Run:
    """Returns a function that returns the results of ``run`` followed by ``also``."""

    def run_and_add(given: tuple[Any, ...]) -> Any:
        results = run(given)
        return None if results is None else (*results, *also)

    return run_and_add
