"""Turns the score and mask functions of a call into a program, a causal mask and a window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flashsmith.errors import ArgumentError
from flashsmith.semantics.mask import UNLIMITED
from flashsmith.semantics.signature import NO_WINDOW, check_mask
from flashsmith.tracing import BoundFunctions, BoundProgram, bind
from flashsmith.tracing.block_masks import is_block_mask, mask_of_blocks, mask_over_cache
from flashsmith.tracing.captures import is_array
from flashsmith.tracing.part_keys import PartKeys, with_vectors

# A call's program, causal and window.
Bound = tuple[BoundProgram | None, bool, tuple[int | None, int | None]]


class CallFunctions(NamedTuple):
    """The values of those keywords of attention() that define a program."""

    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    mask: Any = None
    bias: Any = None
    positions: str = "start"


class ScoreSizes(NamedTuple):
    """The sizes of a call's scores; an unknown size is None. ``lengths`` are seq_q and seq_k if
    these are the same for all sequences of the call."""

    batch: int | None
    heads: int | None
    lengths: tuple[int, int] | None


def sizes_of(q: Any, k: Any, cu_seqlens_q: Any = None) -> ScoreSizes | None:
    """Returns the sizes of a call's scores, from the call's tensors. None if the tensors are
    invalid; a later check reports this."""
    shapes = [tuple(getattr(it, "shape", ())) for it in (q, k)]
    if cu_seqlens_q is not None:
        offsets = tuple(getattr(cu_seqlens_q, "shape", ()))
        if len(shapes[0]) != 3 or len(offsets) != 1:
            return None
        return ScoreSizes(int(offsets[0]) - 1, int(shapes[0][1]), None)
    if any(len(shape) != 4 for shape in shapes):
        return None
    return ScoreSizes(int(shapes[0][0]), int(shapes[0][2]), (int(shapes[0][1]), int(shapes[1][1])))


_ALL_KEYS = PartKeys()


def bound_functions(
    functions: CallFunctions,
    limits: tuple[Any, Any],
    sizes: ScoreSizes | None,
    part: PartKeys = _ALL_KEYS,
) -> Bound:
    """Returns a call's program, causal and window. ``limits`` are the caller's causal and window,
    which hide keys in addition to the functions.

    If a mask function equals a causal mask or a window, causal or window replaces it, so that it
    needs no kernel with a program. In partial attention, the indices of keys count from the first
    key of the sequence.

    Raises ArgumentError and TraceError as tracing.bind() does, and ArgumentError if a tensor does
    not fit the sizes.
    """
    lengths = None if sizes is None else sizes.lengths
    _check_tensors(functions, sizes)
    positions = functions.positions
    own = [
        mask_of_blocks(it, lengths, positions) if is_block_mask(it) else it
        for it in (functions.mask_mod, functions.mask)
    ]
    if part.has_range:
        lengths = None
    vectors, bias = part.vectors, functions.bias
    found = bind(functions.score_mod, tuple(own), lengths, positions, bias, tuple(vectors))
    program, causal, window = with_limits(found, limits)
    return with_vectors(program, vectors), causal, window


class CacheSizes(NamedTuple):
    """The sizes of a call over a cache.

    seq_q: the number of queries of each sequence; None if sequences have different numbers.
    capacity: the number of keys that the cache can hold for a sequence.
    is_rolling: whether the cache has dropped keys.
    """

    sizes: ScoreSizes | None = None
    seq_q: int | None = None
    capacity: int = 0
    is_rolling: bool = False


def sizes_over_cache(
    q: Any, k_cache: Any, page_table: Any, cu_seqlens_q: Any, kv_offset: Any
) -> CacheSizes:
    """Returns the sizes of a call over a cache, from the call's tensors. If a tensor is invalid,
    the sizes that depend on it are unknown; a later check reports this."""
    sizes, cache = sizes_of(q, k_cache, cu_seqlens_q), tuple(getattr(k_cache, "shape", ()))
    if sizes is None or len(cache) != 4:
        return CacheSizes(sizes)
    pages = 1 if page_table is None else getattr(page_table, "shape", (0,))[-1]
    seq_q = None if sizes.lengths is None else sizes.lengths[0]
    return CacheSizes(sizes, seq_q, cache[1] * pages, kv_offset is not None)


def bound_over_cache(functions: CallFunctions, limits: tuple[Any, Any], over: CacheSizes) -> Bound:
    """Returns the program, causal and window of a call over a cache. The indices that functions get
    are positions in the whole sequence, but the rows of tensors are the queries of the call.

    If a BlockMask has as many queries as keys, its rows are positions, too. The rows of any other
    BlockMask are the queries of the call, which its function counts from 0.

    Raises the errors of bound_functions(), and ArgumentError if a BlockMask has another size or the
    cache is rolling.
    """
    own = [
        mask_over_cache(it, *lengths_for_blocks(over)) if is_block_mask(it) else it
        for it in (functions.mask_mod, functions.mask)
    ]
    sizes = over.sizes
    _check_tensors(functions, None if sizes is None else sizes._replace(lengths=None))
    return with_limits(bind(functions.score_mod, tuple(own), None, "end", functions.bias), limits)


def lengths_for_blocks(over: CacheSizes) -> tuple[int | None, int]:
    """Returns the sizes that a BlockMask must fit: the number of queries of each sequence (None if
    the sequences differ in it), and the number of keys that the cache can hold. Raises
    ArgumentError if the cache is rolling."""
    if over.is_rolling:
        raise ArgumentError(
            "kv_offset: given, and a BlockMask's lists count keys from the first of the cache; "
            "give a function, or a value of flashsmith.masks such as masks.blocks()"
        )
    return over.seq_q, over.capacity


def with_limits(found: BoundFunctions, limits: tuple[Any, Any]) -> Bound:
    """Returns the program in ``found``, and a causal and a window that hide every key that
    ``found`` or ``limits`` hides by a causal mask or window."""
    causal, window = limits
    if found.left is None and found.right is None:
        return found.program, causal, window
    asked = check_mask(causal, window)
    left = min(asked.left, UNLIMITED if found.left is None else found.left)
    right = min(asked.right, UNLIMITED if found.right is None else found.right)
    if left == UNLIMITED and right == 0:
        return found.program, True, NO_WINDOW
    window = None if left == UNLIMITED else left, None if right == UNLIMITED else right
    return found.program, False, window


def _check_tensors(functions: CallFunctions, sizes: ScoreSizes | None) -> None:
    """Raises ArgumentError if the tensor of a mask or the bias does not fit the call. Checks
    nothing if the sizes of the call are unknown."""
    if sizes is not None:
        for name in ("mask_mod", "mask", "bias"):
            _check_sizes(name, getattr(functions, name), sizes)


def _check_sizes(name: str, tensor: Any, sizes: ScoreSizes) -> None:
    """Raises ArgumentError unless a tensor can be broadcast to the scores of the call."""
    if not is_array(tensor):
        return
    check_broadcast(name, tuple(tensor.shape), sizes)


def check_broadcast(name: str, shape: tuple[int, ...], sizes: ScoreSizes) -> None:
    """Raises ArgumentError unless a shape can be broadcast to the scores of a call."""
    wanted = (sizes.batch, sizes.heads, *(sizes.lengths or (None, None)))
    pairs = zip(reversed(shape), reversed(wanted), strict=False)
    if any(most is not None and size not in (1, most) for size, most in pairs):
        allowed = ", ".join("any" if it is None else f"{it} or 1" for it in wanted)
        raise ArgumentError(
            f"{name}: shape {shape}; the scores of this call need ({allowed}), of which leading "
            "sizes may be missing: slice or expand it"
        )
