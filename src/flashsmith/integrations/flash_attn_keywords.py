"""Gives functions all of FlashAttention's keywords, even those that flashsmith does not support.

Code written for FlashAttention often passes all keywords. A value without effect is accepted; for
any other value, an error names the keyword.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from flashsmith.did_you_mean import did_you_mean
from flashsmith.errors import ArgumentError
from flashsmith.integrations.traceable import may_repeat, without_torchscript
from flashsmith.integrations.translated_calls import remember_translated, run_translated
from flashsmith.printable import quoted
from flashsmith.runtime.cached_calls import run_repeated

F = TypeVar("F", bound=Callable[..., Any])

_TENSORS = (
    "alibi_slopes block_table cache_batch_idx cache_leftpad k_descale learnable_sink leftpad_k "
    "page_table q_descale qv rotary_seqlens scheduler_metadata seqused_k seqused_q v_descale"
)
# For each keyword, the values that have no effect.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_TENSORS.split(), (None,)),
    "attention_chunk": (None, 0),
    "num_splits": (None, 0, 1),
    "pack_gqa": (None, False, True),  # the heads of a group always share their keys
    "sm_margin": (None, 0),
}


def translates(function: F) -> F:
    """A decorator for functions that only translate their arguments. The wrapper makes the
    Translated call that ``function`` returns, and returns the results of this call.

    Unknown keywords raise ArgumentError, not TypeError. Keywords of FlashAttention are dropped if
    their values have no effect.
    """
    own, name_of_it = tuple(inspect.signature(function).parameters), function.__name__

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        repeatable = may_repeat()
        if repeatable:
            given, names = (*arguments, *keywords.values()), (name_of_it, len(arguments), *keywords)
            results = run_repeated(given, names)
            if results is not None:
                return results
        others = [name for name in keywords if name not in own]
        for name in others:
            _check_neutral(name_of_it, own, name, keywords.pop(name))
        translated = function(*arguments, **keywords)
        results = run_translated(translated)
        if repeatable:
            remember_translated(given, names, translated)
        return results

    return cast(F, without_torchscript(call))


def _check_neutral(function: str, own: tuple[str, ...], name: str, value: Any) -> None:
    if name not in _NEUTRAL:
        raise ArgumentError(
            f"{name}: not an argument of {function}(){did_you_mean(name, own)}; "
            f"it has {', '.join(own)}"
        )
    is_plain = value is None or isinstance(value, int)
    if is_plain and value in _NEUTRAL[name]:
        return
    allowed = " or ".join(str(it) for it in _NEUTRAL[name][-2:])
    argument = f"{name}={quoted(value)}" if is_plain else name
    raise ArgumentError(f"{argument}: not supported by {function}(); must be {allowed}")
