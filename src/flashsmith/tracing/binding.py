"""Turns the score and mask functions of one call into a program that kernels compute, with the
values that the program takes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted
from flashsmith.semantics.band import Band, band_of
from flashsmith.semantics.dtype import dtype_name
from flashsmith.semantics.program import SEQ_K, SEQ_Q, BoundProgram, K, Program, Q, program_of
from flashsmith.semantics.typed import Typed
from flashsmith.tracing.captures import Watch, captures_of, is_array, is_unchanged
from flashsmith.tracing.part_keys import first_key
from flashsmith.tracing.symbols import Symbol
from flashsmith.tracing.tracer import watched_trace

Function = Callable[..., Any]
POSITIONS = ("start", "end")


class BoundFunctions(NamedTuple):
    """A call's functions in the form that kernels take: a program, and a window, which also hides
    keys.

    program: None if the window expresses the functions.
    left, right: the number of keys that a row sees before and after its own position, aligned to
        the bottom right; None for no limit.
    """

    program: BoundProgram | None
    left: int | None = None
    right: int | None = None


def bind(
    score_mod: Function | None,
    masks: tuple[Any, ...],
    lengths: tuple[int, int] | None = None,
    positions: str = "start",
    bias: Any = None,
    part: tuple[str, ...] = (),
) -> BoundFunctions:
    """Traces a call's functions. ``masks`` are functions, bool tensors or None; a key is visible
    only if all of them show it. ``bias`` is a float tensor that is added to scores after score_mod,
    or None. ``lengths`` are seq_q and seq_k if all sequences of the call share them.

    ``positions`` is 'start' if q_idx counts from the sequence's first query, and 'end' if the last
    query is at the last key: then q_idx is larger by seq_k - seq_q. The rows of tensors always
    count from the first query. ``part`` names the vectors of a part of the keys, for
    part_keys.first_key(); these names are among the program's tensors.

    Raises ArgumentError for other values, and TraceError as trace() does.
    """
    given = (score_mod, *masks)
    key = (*map(id, given), lengths, positions, part)
    # Results are not kept: they refer to tensors, and would keep the caller's mask or bias in
    # memory.
    is_kept = bias is None and not any(map(is_array, masks))
    known = _RECENT.get(key) if is_kept else None
    if known is not None and known.still_holds(given):
        return known.found
    found, watch = _bound(score_mod, masks, lengths, positions, bias, part)
    if watch and is_kept:
        _remember(key, given, watch, found)
    return found


class _Recent(NamedTuple):
    """The result of an earlier call, and the functions to which it belongs."""

    given: tuple[weakref.ref[Any] | None, ...]
    watch: tuple[Watch, ...]
    found: BoundFunctions

    def still_holds(self, given: tuple[Any, ...]) -> bool:
        """Whether ``given`` are the functions to which this result belongs, and they still capture
        the same objects."""
        for known, it in zip(self.given, given, strict=True):
            if (None if known is None else known()) is not it:
                return False
        return is_unchanged(self.watch)


_RECENT: dict[Any, _Recent] = {}
_MOST_RECENT = 512


def _remember(
    key: Any, given: tuple[Any, ...], watch: tuple[Watch, ...], found: BoundFunctions
) -> None:
    """Keeps a result for as long as the functions to which the result belongs exist."""

    # This is a default argument, because modules may lose their globals before this runs at the end
    # of the process.
    def forget(_: Any, recent: dict[Any, _Recent] = _RECENT) -> None:
        recent.pop(key, None)

    try:
        refs = tuple(None if it is None else weakref.ref(it, forget) for it in given)
    except TypeError:  # an object without weak references
        return
    if len(_RECENT) >= _MOST_RECENT:
        _RECENT.clear()
    _RECENT[key] = _Recent(refs, watch, found)


def _bound(
    score_mod: Function | None,
    masks: tuple[Any, ...],
    lengths: tuple[int, int] | None,
    positions: str,
    bias: Any,
    part: tuple[str, ...],
) -> tuple[BoundFunctions, tuple[Watch, ...]]:
    """Returns the result of bind(), and the objects on which it depends."""
    score, mask = composed(score_mod, masks, bias, positions)
    if score is None and mask is None:
        return BoundFunctions(None), ()
    bound, watch = watched_trace(score, mask)
    if watch and sum(it is not None for it in masks) > 1:
        # The function that all_of() returns refers to the masks, whose results are kept as long as
        # they exist.
        watch = captures_of((score_mod, *masks)).watch
    return limited(_named(bound, bias, masks), lengths, positions, part), watch


def composed(
    score_mod: Function | None, masks: tuple[Any, ...], bias: Any, positions: str
) -> tuple[Function | None, Function | None]:
    """Returns the score function and the mask function that bind() traces. Raises ArgumentError for
    positions other than POSITIONS, and the errors of bind() for tensors."""
    if positions not in POSITIONS:
        raise ArgumentError(
            f"positions={quoted(positions)}: give 'start' (q_idx counts from the first query) or "
            "'end' (the last query is at the last key)"
        )
    functions = [_placed_mask(it, positions) for it in masks if it is not None]
    score = score_mod if bias is None else _plus(score_mod, bias, positions)
    return score, functions[0] if len(functions) == 1 else all_of(*functions) if functions else None


def limited(
    bound: BoundProgram,
    lengths: tuple[int, int] | None,
    positions: str,
    part: tuple[str, ...] = (),
) -> BoundFunctions:
    """Converts a traced program for kernels: a mask that equals a window becomes limits, q_idx and
    kv_idx become positions, and the program's tensors get names."""
    offset = 0 if positions == "end" else None if lengths is None else lengths[1] - lengths[0]
    limits = _limits(bound, offset)
    if limits is not None:
        rest = _without_mask(bound)
        return BoundFunctions(_placed(rest, positions, part), *limits)
    return BoundFunctions(_placed(bound, positions, part))


def at_row(function: Function) -> Function:
    """Converts a mask function whose argument is the row, counted from the first query, to a mask
    function whose argument is q_idx under positions='end'."""
    return lambda b, h, q_idx, kv_idx: function(b, h, row_of(q_idx), kv_idx)


# The row of a query whose position is Q.
_ROW = Q - (SEQ_K - SEQ_Q)


def row_of(q_idx: Any) -> Any:
    """Returns the row, counted from the first query, of a query at position ``q_idx``, a symbol."""
    return Symbol(_ROW, q_idx.trace)


def _placed_mask(mask: Any, positions: str) -> Function:
    function = mask_function(mask)
    return at_row(function) if positions == "end" and is_array(mask) else function


def _plus(score_mod: Function | None, bias: Any, positions: str) -> Function:
    """Returns a score function that adds a bias to the result of ``score_mod``."""
    at = bias_table(bias)
    if positions == "end":
        at = at_row(at)
    if score_mod is None:
        return lambda s, b, h, q, k: s + at(b, h, q, k)
    if not callable(score_mod):
        raise ArgumentError(f"score_mod={quoted(score_mod)}: give a function, or None for none")
    return lambda s, b, h, q, k: score_mod(s, b, h, q, k) + at(b, h, q, k)


def bias_table(bias: Any) -> Function:
    """Returns the function of a float tensor (b or 1, h or 1, q, k), (h or 1, q, k) or (q, k)."""
    if not is_array(bias):
        raise ArgumentError(f"bias={quoted(bias)}: give a float tensor, or None for none")
    kind = dtype_name(bias.dtype) or str(bias.dtype)
    if not 2 <= len(bias.shape) <= 4 or kind not in _BIASES:
        instead = "; a bool tensor is a mask: give it as mask" if kind == "bool" else ""
        raise ArgumentError(
            f"bias: a tensor of shape {tuple(bias.shape)} and dtype {bias.dtype}; give one of "
            f"{', '.join(_BIASES)}, (batch or 1, heads or 1, seq_q, seq_k){instead}"
        )
    return table_function(bias)


_BIASES = ("float16", "bfloat16", "float32")


def _named(bound: BoundProgram, bias: Any, masks: tuple[Any, ...]) -> BoundProgram:
    """Renames the program's tensors to the caller's names for them, where these names are known."""
    names = {id(it): "mask" for it in masks if is_array(it)} | {id(bias): "bias"}
    return bound._replace(names=tuple(names.get(id(it), "") for it in bound.tensors))


def mask_function(mask: Any) -> Function:
    """Returns a mask as a function: a function itself, or a bool tensor (b or 1, h or 1, q, k), of
    which leading dimensions may be missing."""
    if is_array(mask):
        return bool_table(mask)
    if not callable(mask):
        raise ArgumentError(
            f"mask={quoted(mask)}: give a function (b, h, q_idx, kv_idx), a value of "
            "flashsmith.masks, a bool tensor or a BlockMask"
        )
    return mask


def bool_table(table: Any) -> Function:
    """Returns the mask of a bool tensor (b or 1, h or 1, q, k), (h or 1, q, k) or (q, k)."""
    rank = len(table.shape)
    if not 2 <= rank <= 4 or "bool" not in str(table.dtype):
        raise ArgumentError(
            f"mask: a tensor of shape {tuple(table.shape)} and dtype {table.dtype}; give a bool "
            "tensor (batch or 1, heads or 1, seq_q, seq_k), True where a query sees the key"
        )
    return table_function(table)


def table_function(table: Any) -> Function:
    """Returns a function (b, h, x, y) that reads a tensor (b or 1, h or 1, x, y), of which leading
    dimensions may be missing."""
    at = table_reader(tuple(table.shape))
    return lambda b, h, x, y: at(table, b, h, x, y)


def table_reader(sizes: tuple[int, ...]) -> Function:
    """Returns a function (table, b, h, x, y) that does the same as table_function() for a table of
    these sizes."""
    if len(sizes) == 2:
        return _of_rows
    # A size of 1 is broadcast by the index 0, because PyTorch's functions do not clamp indices as
    # programs do.
    if len(sizes) == 3:
        return _of_one_head if sizes[0] == 1 else _of_head
    if sizes[1] == 1:
        return _of_one if sizes[0] == 1 else _of_batch
    return _of_shared_head if sizes[0] == 1 else _of_each


def _of_rows(table: Any, b: Any, h: Any, x: Any, y: Any) -> Any:
    return table[x, y]


def _of_one_head(table: Any, b: Any, h: Any, x: Any, y: Any) -> Any:
    return table[0, x, y]


def _of_head(table: Any, b: Any, h: Any, x: Any, y: Any) -> Any:
    return table[h, x, y]


def _of_one(table: Any, b: Any, h: Any, x: Any, y: Any) -> Any:
    return table[0, 0, x, y]


def _of_shared_head(table: Any, b: Any, h: Any, x: Any, y: Any) -> Any:
    return table[0, h, x, y]


def _of_batch(table: Any, b: Any, h: Any, x: Any, y: Any) -> Any:
    return table[b, 0, x, y]


def _of_each(table: Any, b: Any, h: Any, x: Any, y: Any) -> Any:
    return table[b, h, x, y]


def all_of(*functions: Function) -> Function:
    """Returns a mask function that shows the keys that all of the given functions show."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        seen = functions[0](b, h, q_idx, kv_idx)
        for function in functions[1:]:
            seen = seen & function(b, h, q_idx, kv_idx)
        return seen

    return mask


@lru_cache(maxsize=1024)
def _known_band(mask: Typed) -> Band | None:
    return band_of(mask)


def _limits(bound: BoundProgram, offset: int | None) -> tuple[int | None, int | None] | None:
    """Returns the window that equals the mask, in positions aligned to the bottom right; None if
    there is none.

    ``offset`` is the position of the first query.
    """
    mask = bound.program.mask
    band = None if mask is None or offset is None else _known_band(mask)
    if band is None or offset is None:
        return None
    numbers = zip(bound.program.numbers, bound.numbers, strict=True)
    limits = band.limits({it.name: int(n) for it, n in numbers if it.kind == "int"})
    if limits is None:
        return None
    left, right = limits
    left = None if left is None else left + offset
    right = None if right is None else right - offset
    # Kernels with a window need limits of at least 0: then each row sees at least its own position.
    if (left is not None and left < 0) or (right is not None and right < 0):
        return None
    return left, right


def _without_mask(bound: BoundProgram) -> BoundProgram | None:
    if bound.program.score is None:
        return None
    return _rebound(bound, bound.program.score, None)


def _placed(
    bound: BoundProgram | None, positions: str, part: tuple[str, ...]
) -> BoundProgram | None:
    """Converts q_idx and kv_idx in the program to positions."""
    if bound is None or (positions == "start" and not part):
        return bound
    first = first_key(part)
    place = {K: K + first}
    if positions == "end":
        place |= {_ROW: Q, Q: Q + (SEQ_K - SEQ_Q) + first}
    score, mask = (None if it is None else it.replace(place) for it in _both(bound.program))
    return _rebound(bound, score, mask, part)


def _both(program: Program) -> tuple[Any, Any]:
    return program.score, program.mask


def _rebound(
    bound: BoundProgram, score: Typed | None, mask: Typed | None, part: tuple[str, ...] = ()
) -> BoundProgram:
    """Returns the program of these expressions, which use some of the tensors and numbers of
    ``bound``, and the vectors of a part of the keys."""
    program, reads, numbers = program_of(score, mask)
    old = bound.program
    given = zip(bound.tensors, bound.names, strict=True)
    tensors = {name: (name, name) for name in part}
    tensors |= dict(zip([it.name for it in old.reads], given, strict=True))
    values = dict(zip([it.name for it in old.numbers], bound.numbers, strict=True))
    return BoundProgram(
        program,
        tuple(tensors[it][0] for it in reads),
        tuple(values[it] for it in numbers),
        tuple(tensors[it][1] for it in reads),
    )
