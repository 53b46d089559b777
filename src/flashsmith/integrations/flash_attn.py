"""flash_attn_func, flash_attn_varlen_func and flash_attn_with_kvcache, which call attention() and
attention_with_cache(), but take FlashAttention's argument names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

from flashsmith import masks
from flashsmith.errors import ArgumentError
from flashsmith.integrations import latent_views
from flashsmith.integrations.flash_attn_keywords import translates
from flashsmith.integrations.page_tables import full_int32
from flashsmith.integrations.traceable import attention, attention_with_cache, is_tracing
from flashsmith.integrations.translated_calls import Translated
from flashsmith.printable import quoted
from flashsmith.runtime.bits import cannot_keep, resolve_bits
from flashsmith.runtime.frameworks import framework_of
from flashsmith.runtime.option_values import in_dtype, plain_pair
from flashsmith.runtime.tensors import Array, TensorT, check_beside
from flashsmith.scores import alibi
from flashsmith.semantics.signature import whole_number
from flashsmith.tracing.captures import Constant

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flashsmith.runtime.keywords import (
        FlashAttnKeywords,
        FlashCacheKeywords,
        FlashVarlenKeywords,
    )

_UNLIMITED = -1


@overload
def flash_attn_func(
    q: TensorT,
    k: Array,
    v: Array,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int | None, int | None] = ...,
    *,
    return_attn_probs: Literal[False] = ...,
    **keywords: Unpack[FlashAttnKeywords],
) -> TensorT: ...


@overload
def flash_attn_func(
    q: TensorT,
    k: Array,
    v: Array,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int | None, int | None] = ...,
    *,
    return_attn_probs: Literal[True],
    **keywords: Unpack[FlashAttnKeywords],
) -> tuple[TensorT, TensorT, None]: ...


@overload
def flash_attn_func(
    q: TensorT,
    k: Array,
    v: Array,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int | None, int | None] = ...,
    *,
    return_attn_probs: bool,
    **keywords: Unpack[FlashAttnKeywords],
) -> Any: ...


@translates
def flash_attn_func(
    q: Array,
    k: Array,
    v: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (_UNLIMITED, _UNLIMITED),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Array | None = None,
    bits: str | None = None,
) -> Any:
    """attention() for code written for FlashAttention; out and lse are differentiable.

    Args:
        q: (batch, seq_q, heads, d); k, v: (batch, seq_k, heads_k, d).
        softmax_scale: None means 1/sqrt(d).
        causal, window_size: aligned to the bottom right; -1 and None mean no limit.
        softcap: 0 means none.
        deterministic: whether dq has to be bitwise repeatable; the output, dk and dv are always
            repeatable. With False, torch.use_deterministic_algorithms decides.
        return_attn_probs: return (out, lse, None); the probabilities are never stored.
        s_aux: (heads,), FlashAttention 3's name of attention()'s sinks.
        bits: as for attention(); keyword-only, since FlashAttention has no such argument.
        alibi_slopes: (heads,) or (batch, heads): scores become score - slope |i + seq_k - seq_q -
            j|.
        dropout_p: must be left at its default.

    Raises:
        ArgumentError: the named argument is unusable or not supported.
    """
    _check_unsupported(dropout_p)
    keywords = {
        **_alibi(alibi_slopes, q),
        **_options(causal, window_size, softcap, softmax_scale, s_aux, bits),
        "return_lse": return_attn_probs,
        "deterministic": deterministic or None,
    }
    return Translated(attention, (q, k, v), keywords, _probs(return_attn_probs), _NAMES)


@overload
def flash_attn_varlen_func(
    q: TensorT,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int | None, int | None] = ...,
    *,
    return_attn_probs: Literal[False] = ...,
    **keywords: Unpack[FlashVarlenKeywords],
) -> TensorT: ...


@overload
def flash_attn_varlen_func(
    q: TensorT,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int | None, int | None] = ...,
    *,
    return_attn_probs: Literal[True],
    **keywords: Unpack[FlashVarlenKeywords],
) -> tuple[TensorT, TensorT, None]: ...


@overload
def flash_attn_varlen_func(
    q: TensorT,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int | None, int | None] = ...,
    *,
    return_attn_probs: bool,
    **keywords: Unpack[FlashVarlenKeywords],
) -> Any: ...


@translates
def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (_UNLIMITED, _UNLIMITED),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Array | None = None,
    seqused_k: Array | None = None,
    *,
    s_aux: Array | None = None,
    bits: str | None = None,
) -> Any:
    """attention() on packed sequences for code written for FlashAttention; differentiable.

    Args:
        q: (total_q, heads, d); k, v: (total_k, heads_k, d).
        cu_seqlens_q, cu_seqlens_k: (sequences + 1), int32, where the sequences begin.
        max_seqlen_q, max_seqlen_k: the greatest lengths; computed if None, as in attention().
        block_table: (sequences, maximum pages) int32; k and v are then pages (pages, page, heads_k,
            d) of any size. The lengths are seqused_k, or without it the differences of
            cu_seqlens_k. attention_with_cache() computes such calls, without gradients.
        seqused_k: (sequences,) int32: how many of the first keys of each sequence to use. Such
            calls have no gradients, and without block_table no canonical bits. With block_table,
            cu_seqlens_k may be left out.
        The other arguments are as for flash_attn_func.

    Raises:
        ArgumentError: the named argument is unusable or not supported.
    """
    uses_parts = seqused_k is not None and block_table is None
    _check_unsupported(dropout_p, alibi_slopes=alibi_slopes if uses_parts else None)
    keywords = {
        **_options(causal, window_size, softcap, softmax_scale, s_aux, bits),
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": max_seqlen_q,
        "return_lse": return_attn_probs,
    }
    function: Callable[..., Any] = attention if block_table is None else attention_with_cache
    if block_table is not None:
        lens = _lengths_between("cu_seqlens_k", cu_seqlens_k) if seqused_k is None else seqused_k
        keywords |= {"cache_lens": lens, "page_table": block_table}
        keywords |= _alibi_over_cache(alibi_slopes, q, cu_seqlens_q)
    else:
        keywords |= {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": max_seqlen_k}
    if uses_parts:
        _check_bits_of_parts(bits)
        function, keywords["seqused_k"] = _of_used_keys, seqused_k
    elif block_table is None:
        slopes = _alibi(alibi_slopes, q, cu_seqlens_q)
        keywords |= {**slopes, "deterministic": deterministic or None}
    names = _VARLEN_NAMES if seqused_k is None else _USED_NAMES
    return Translated(function, (q, k, v), keywords, _probs(return_attn_probs), names)


# FlashAttention's names of arguments of attention() and attention_with_cache(). The latter's
# lengths and caches have other names in each of the functions.
_NAMES = {
    **{"scale": "softmax_scale", "sinks": "s_aux", "window": "window_size"},
    **{"score_mod": "alibi_slopes", "return_lse": "return_attn_probs"},
}
_VARLEN_NAMES = {
    **_NAMES,
    **{"page_table": "block_table", "k_cache": "k", "v_cache": "v", "cache_lens": "cu_seqlens_k"},
}
_USED_NAMES = {**_VARLEN_NAMES, "cache_lens": "seqused_k"}
_CACHE_NAMES = {
    **_NAMES,
    **{"cache_lens": "cache_seqlens", "cos": "rotary_cos", "sin": "rotary_sin"},
    **{"mask": "attention_chunk", "return_lse": "return_softmax_lse"},
}


def _options(
    causal: bool, window_size: Any, softcap: float, scale: float | None, sinks: Any, bits: Any
) -> dict[str, Any]:
    """Returns the keywords for masks, scores and bits that attention() and attention_with_cache()
    share."""
    return {
        "causal": causal,
        "window": _window(window_size),
        "softcap": softcap,
        "scale": scale,
        "sinks": sinks,
        "bits": bits,
    }


def _check_bits_of_parts(bits: str | None) -> None:
    if resolve_bits(bits):
        raise cannot_keep(
            bits,
            "seqused_k: given without block_table, so the call uses parts of the keys; give "
            "lengths in cu_seqlens_k, or block_table",
        )


def _of_used_keys(q: Any, k: Any, v: Any, return_lse: bool, **keywords: Any) -> Any:
    """Calls attention() with seqused_k, and rounds the output to q's dtype."""
    o, lse = attention(q, k, v, **keywords, partial=True)
    o = in_dtype(o, q.dtype)
    return (o, lse) if return_lse else o


def _probs(are_asked_for: bool) -> tuple[None, ...]:
    """Returns the last entry of FlashAttention's results, the probabilities: (None,) if they are
    requested, because flashsmith never stores them, and otherwise ()."""
    return (None,) if are_asked_for else ()


@overload
def flash_attn_with_kvcache(
    q: TensorT,
    k_cache: Array,
    v_cache: Array,
    k: Array | None = ...,
    v: Array | None = ...,
    *,
    return_softmax_lse: Literal[False] = ...,
    **keywords: Unpack[FlashCacheKeywords],
) -> TensorT: ...


@overload
def flash_attn_with_kvcache(
    q: TensorT,
    k_cache: Array,
    v_cache: Array,
    k: Array | None = ...,
    v: Array | None = ...,
    *,
    return_softmax_lse: Literal[True],
    **keywords: Unpack[FlashCacheKeywords],
) -> tuple[TensorT, TensorT]: ...


@overload
def flash_attn_with_kvcache(
    q: TensorT,
    k_cache: Array,
    v_cache: Array,
    k: Array | None = ...,
    v: Array | None = ...,
    *,
    return_softmax_lse: bool,
    **keywords: Unpack[FlashCacheKeywords],
) -> Any: ...


@translates
def flash_attn_with_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    k: Array | None = None,
    v: Array | None = None,
    qv: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    cache_seqlens: Array | int | None = None,
    cache_batch_idx: Array | None = None,
    cache_leftpad: Array | None = None,
    page_table: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k_new: Array | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Array | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (_UNLIMITED, _UNLIMITED),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Array | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    block_table: Array | None = None,
    alibi_slopes: Array | None = None,
    s_aux: Array | None = None,
    bits: str | None = None,
) -> Any:
    """attention_with_cache() for code written for FlashAttention 2 or 3.

    The arguments have the order of FlashAttention 3. Unlike in FlashAttention, the log-sum-exp of a
    row without keys is -inf, not +inf.

    Args:
        q: (batch, seq_q, heads, d), or (total_q, heads, d) with cu_seqlens_q and max_seqlen_q.
        k_cache, v_cache: (batch, capacity, heads_k, d), or (pages, page, heads_k, d) with
            page_table, of any page size.
        k, v: appended at cache_seqlens, which is not advanced; shaped like q, with heads_k heads.
        rotary_cos, rotary_sin: (positions, rotary_d / 2) of q's dtype or fp32.
        cache_seqlens: (batch,) int32, or one number for all sequences. None means the whole cache,
            which is allowed only if nothing is appended.
        cu_seqlens_k_new, rotary_seqlens: None, or equal to cu_seqlens_q and cache_seqlens. Tensors
            that are not the same object are compared by value, which synchronizes with a GPU.
        softmax_scale: None means 1/sqrt(d).
        causal, window_size: aligned to the bottom right; -1 and None mean no limit.
        num_splits: 0 and 1 give a sequence the same bits in any batch (split='invariant'). With
            larger numbers flashsmith chooses how to split keys (split='free').
        pack_gqa: has no effect: the heads of a group always share their keys.
        return_softmax_lse: return (out, lse).
        block_table: page_table by its name in FlashAttention 2; pass only one of the two.
        s_aux: (heads,), FlashAttention 3's name of sinks.
        bits: as for attention_with_cache().
        qv: (..., d_v), for a latent cache (MLA) of PyTorch tensors: q, k_cache and k are its rotary
            columns, v_cache and v its values; v_cache and k_cache are views of the same rows. The
            default of softmax_scale is then 1/sqrt(d + d_v).
        alibi_slopes: as for flash_attn_func().
        attention_chunk: if not 0, a query sees only the keys of its own chunk of this many keys.
            Each size needs its own kernel.
        cache_batch_idx, cache_leftpad, q_descale, k_descale, v_descale, scheduler_metadata,
            sm_margin: must be left at their defaults.

    Raises:
        ArgumentError: the named argument is unusable or not supported.
    """
    page_table = _only_one(page_table, block_table)
    _check_absent(
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        scheduler_metadata=scheduler_metadata,
    )
    _check_equal("cu_seqlens_k_new", cu_seqlens_k_new, "cu_seqlens_q", cu_seqlens_q, _NEW_KEYS)
    _check_equal("rotary_seqlens", rotary_seqlens, "cache_seqlens", cache_seqlens, _ROTATION)
    _check_launch(sm_margin, num_splits)
    if cache_seqlens is None and k is not None:
        raise ArgumentError("cache_seqlens: missing; k is appended there, give a length or tensor")
    if cache_seqlens is None or isinstance(cache_seqlens, int):
        cache_seqlens = _lengths(q, k_cache, page_table, cu_seqlens_q, cache_seqlens)
    values: Array | None = v_cache
    v_width = None
    if qv is not None:
        q, k_cache, k, v = _latent_tensors(q, qv, k_cache, v_cache, k, v)
        values, v_width = None, v_cache.shape[-1]
        softmax_scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    keywords = {
        **_options(causal, window_size, softcap, softmax_scale, s_aux, bits),
        "v_width": v_width,
        "cache_lens": cache_seqlens,
        "page_table": page_table,
        "k": k,
        "v": v,
        "cos": rotary_cos,
        "sin": rotary_sin,
        "rotary_interleaved": rotary_interleaved,
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": max_seqlen_q,
        "split": "invariant" if num_splits <= 1 else "free",
        "return_lse": return_softmax_lse,
        **_alibi_over_cache(alibi_slopes, q, cu_seqlens_q),
        **_chunks(attention_chunk),
    }
    names = _CACHE_NAMES if block_table is None else _CACHE_NAMES | {"page_table": "block_table"}
    return Translated(attention_with_cache, (q, k_cache, values), keywords, (), names)


def _only_one(page_table: Any, block_table: Any) -> Any:
    """Returns the page table, which FlashAttention 3 calls page_table and FlashAttention 2
    block_table."""
    if block_table is not None and page_table is not None:
        raise ArgumentError("block_table: page_table, its other name, is also given; give one")
    return page_table if block_table is None else block_table


def _check_launch(sm_margin: Any, num_splits: Any) -> None:
    if not isinstance(sm_margin, int | None) or sm_margin:
        raise ArgumentError(f"sm_margin={quoted(sm_margin)}: not supported; must be 0")
    if isinstance(num_splits, bool) or not isinstance(num_splits, int) or num_splits < 0:
        raise ArgumentError(f"num_splits={quoted(num_splits)}: give a whole number from 0")


def _latent_tensors(
    q: Any, qv: Any, k_cache: Any, v_cache: Any, k: Any, v: Any
) -> tuple[Any, Any, Any, None]:
    """Returns q, k_cache, k and v for a call to attention_with_cache() over a latent cache, whose
    rows hold both the rotary columns and the values."""
    rows = latent_views.whole_rows(k_cache, v_cache)
    queries = latent_views.joined_rows("q", q, "qv", qv)
    if k is None and v is None:
        return queries, rows, None, None
    return queries, rows, latent_views.joined_rows("k", k, "v", v), None


_NEW_KEYS = (
    "a key and a value for every query are appended; write others to the caches before the call, "
    "at cache_seqlens, count them there, and leave k and v out"
)
_ROTATION = (
    "row i of k is rotated by position cache_seqlens + i; take rows of rotary_cos and rotary_sin "
    "that begin elsewhere, or rotate q and k before the call"
)


def _check_equal(name: str, given: Any, other_name: str, other: Any, advice: str) -> None:
    """Raises ArgumentError unless ``given`` is None, or holds the same numbers as ``other``.

    Unless both are the same object, numbers on a GPU are read, which synchronizes with the GPU.
    """
    if given is None or given is other:
        return
    if is_tracing():
        raise ArgumentError(
            f"{name}: its numbers are not known while the call is traced; give {other_name} itself"
        )
    framework = framework_of(type(given))
    if framework is None or framework is not framework_of(type(other)):
        same = type(given) is type(other) and given == other
    else:
        view = framework.view(name, given)
        check_beside(view, framework.view(other_name, other))
        device = view.device
        if device.kind != "cpu" and framework.is_capturing(device.ordinal):
            raise ArgumentError(
                f"{name}: cannot be compared with {other_name} during CUDA graph capture; give "
                f"{other_name} itself"
            )
        same = given.shape == other.shape and bool((given == other).all())
    if not same:
        raise ArgumentError(f"{name}: has other numbers than {other_name}, and {advice}")


def _lengths_between(name: str, offsets: Any) -> Any:
    """Returns the differences between consecutive offsets. Raises ArgumentError unless ``offsets``
    has one dimension."""
    _shape(name, offsets, 1)
    return offsets[1:] - offsets[:-1]


def _lengths(q: Any, k_cache: Any, page_table: Any, cu_seqlens_q: Any, length: int | None) -> Any:
    """Makes a tensor of q's framework that holds the same length for every sequence: ``length``, or
    the length of the whole cache if ``length`` is None.

    Raises ArgumentError if the length does not fit int32, or if the tensors' shapes do not
    determine the cache's length or the number of sequences.
    """
    if isinstance(length, bool) or (length is not None and not -(2**31) <= length < 2**31):
        raise ArgumentError(f"cache_seqlens={quoted(length)}: give a number of keys, or a tensor")
    if length is None:
        length = _shape("k_cache", k_cache, 4)[1]
        length *= 1 if page_table is None else _shape("page_table", page_table, 2)[1]
    if cu_seqlens_q is None:
        batch = _shape("q", q, 4)[0]
    else:
        batch = _shape("cu_seqlens_q", cu_seqlens_q, 1)[0] - 1
    return full_int32((max(batch, 0),), length, q)


def _shape(name: str, tensor: Any, rank: int) -> tuple[int, ...]:
    shape = getattr(tensor, "shape", None)
    if shape is None or len(shape) != rank:
        raise ArgumentError(f"{name}: got {_in_words(tensor)}; give a tensor of {rank} dimensions")
    return tuple(shape)


def _in_words(tensor: Any) -> str:
    shape = getattr(tensor, "shape", None)
    return type(tensor).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")


def _alibi(slopes: Array | None, q: Any, cu_seqlens_q: Any = None) -> dict[str, Any]:
    """Returns the keywords of attention() for ALiBi with the queries ``q``.

    The distances that ALiBi uses are measured between positions, not between indices.
    """
    if slopes is None:
        return {}
    if not hasattr(slopes, "shape"):
        raise ArgumentError(f"alibi_slopes: got {_in_words(slopes)}; give a tensor")
    shape: tuple[int, ...] = tuple(slopes.shape)
    wanted: tuple[int, ...] = getattr(q, "shape", ())
    if len(shape) not in (1, 2):
        raise ArgumentError(f"alibi_slopes: shape {shape}; give (heads,) or (batch, heads)")
    if len(wanted) in (3, 4):  # attention() refuses other queries
        batch = (
            wanted[0] if cu_seqlens_q is None else _shape("cu_seqlens_q", cu_seqlens_q, 1)[0] - 1
        )
        if shape[-1] != wanted[-2] or (len(shape) == 2 and shape[0] != batch):
            raise ArgumentError(
                f"alibi_slopes: shape {shape}; give one slope for each head of q, "
                f"({wanted[-2]},), or ({batch}, {wanted[-2]})"
            )
    return {"score_mod": alibi(slopes), "positions": "end"}


def _alibi_over_cache(slopes: Array | None, q: Any, cu_seqlens_q: Any) -> dict[str, Any]:
    """Returns the keywords of attention_with_cache() for ALiBi. There, indices are already
    positions."""
    found = _alibi(slopes, q, cu_seqlens_q)
    found.pop("positions", None)
    return found


def _chunks(attention_chunk: Any) -> dict[str, Any]:
    """Returns the keywords of attention_with_cache() for chunks of positions. There are none if
    ``attention_chunk`` is 0 or None."""
    size = 0 if attention_chunk is None else whole_number(attention_chunk)
    if size is None or size < 0:
        raise ArgumentError(
            f"attention_chunk={quoted(attention_chunk)}: give the positions of a chunk, or 0"
        )
    # The chunk size is compiled in, so that kernels can tell which keys belong to the same chunk.
    return {"mask": masks.chunks(Constant(size))} if size else {}


def _check_unsupported(dropout_p: float, **tensors: Any) -> None:
    if dropout_p != 0.0:
        raise ArgumentError(
            f"dropout_p={quoted(dropout_p)}: must be 0; the kernels drop no weights "
            "(flashsmith.sdpa() "
            "leaves dropout to PyTorch)"
        )
    _check_absent(**tensors)


def _check_absent(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            raise ArgumentError(f"{name}: not supported; must be None")


def _window(window_size: Any) -> tuple[int | None, int | None]:
    """Returns ``window_size`` with each -1 replaced by None; both mean no limit.

    Raises ArgumentError unless it has two entries, each one None, -1 or a whole number from 0.
    """
    try:
        left, right = plain_pair("window_size", window_size)
    except (TypeError, ValueError):
        left = right = "neither"
    limits = tuple(None if limit is None else whole_number(limit) for limit in (left, right))
    for given, limit in zip((left, right), limits, strict=True):
        if limit is None and given is not None:
            raise ArgumentError(
                f"window_size={quoted(window_size)}: give (left, right), whole numbers from 0 up, "
                "or -1 or None for no limit"
            )
    for side, limit in zip(("left", "right"), limits, strict=True):
        if limit is not None and limit < _UNLIMITED:
            raise ArgumentError(f"window_size={quoted(window_size)}: {_OFFSETS[side](-limit)}")
    left, right = (None if limit == _UNLIMITED else limit for limit in limits)
    return left, right


# FlashAttention 4 accepts windows that do not contain the diagonal. These errors suggest an
# equivalent call.
_OFFSETS = {
    "left": lambda n: (
        f"a left side of -{n} begins {n} keys after a query's own position, which windows must "
        f"contain; leave out the last {n} queries of each sequence, which see no key, and give "
        f"0 for left and right - {n} for right"
    ),
    "right": lambda n: (
        f"a right side of -{n} ends {n} keys before a query's own position, which windows must "
        f"contain; leave out the last {n} keys of each sequence, and give left - {n} for left "
        "and 0 for right"
    ),
}
