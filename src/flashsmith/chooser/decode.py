"""attention_with_cache(q, k_cache, v_cache): attention over a KV cache, with an automatically
chosen kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

from flashsmith.chooser.backward import check_config_for
from flashsmith.chooser.batch_invariant import for_free_split, without_batch
from flashsmith.chooser.choice import adapt_to_problem, choose_config
from flashsmith.chooser.functions import CallFunctions, bound_over_cache, sizes_over_cache
from flashsmith.chooser.latent_decode import attention_with_latent_cache
from flashsmith.families import DeviceSpec, KernelConfig, Problem, is_legal
from flashsmith.operations.cache_scales import SCALES
from flashsmith.operations.decode import DECODE, FREE, INVARIANT, check_split
from flashsmith.runtime import Chooser, cached_calls
from flashsmith.runtime.cache_scales import Scales
from flashsmith.runtime.decode_pass import DecodeOptions, DecodeTensors, decode_call, run_decode
from flashsmith.runtime.tensors import Array, TensorT
from flashsmith.semantics.cache_format import CacheFormat
from flashsmith.semantics.signature import CACHE, NO_WINDOW

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flashsmith.runtime.keywords import CacheKeywords


@overload
def attention_with_cache(
    q: TensorT,
    k_cache: Array,
    v_cache: Array | None = None,
    *,
    cache_lens: Array,
    return_lse: Literal[False] = ...,
    **keywords: Unpack[CacheKeywords],
) -> TensorT: ...


@overload
def attention_with_cache(
    q: TensorT,
    k_cache: Array,
    v_cache: Array | None = None,
    *,
    cache_lens: Array,
    return_lse: Literal[True],
    **keywords: Unpack[CacheKeywords],
) -> tuple[TensorT, TensorT]: ...


@overload
def attention_with_cache(
    q: TensorT,
    k_cache: Array,
    v_cache: Array | None = None,
    *,
    cache_lens: Array,
    return_lse: bool,
    **keywords: Unpack[CacheKeywords],
) -> Any: ...


def attention_with_cache(
    q: Array,
    k_cache: Array,
    v_cache: Array | None = None,
    *,
    cache_lens: Array,
    v_width: int | None = None,
    page_table: Array | None = None,
    kv_offset: Array | None = None,
    k: Array | None = None,
    v: Array | None = None,
    cos: Array | None = None,
    sin: Array | None = None,
    rotary_interleaved: bool = False,
    cu_seqlens_q: Array | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] = NO_WINDOW,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: Array | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    mask: Any = None,
    bias: Array | None = None,
    k_scale: float | Array | None = None,
    v_scale: float | Array | None = None,
    split: str = "invariant",
    bits: str | None = None,
    out: Array | None = None,
    return_lse: bool = False,
    config: KernelConfig | None = None,
    emulate: bool = False,
) -> Any:
    """Attention of q over the keys and values of a cache, to which k and v are appended first.

    The kernel reads the lengths and the page table on the tensors' device. On a GPU the call copies
    nothing to the host and does not wait, so that a CUDA graph can be replayed with other contents.
    If a sequence has L keys after appending, query i of n is at key position L - n + i. A row
    without keys gives 0. There are no gradients.

    With split='invariant' a sequence has the same bits in any batch. With pages of any size, in any
    order, it has the same bits as with a dense cache.

    Args:
        q: (batch, seq_q, heads_q, d), fp16 or bf16, a PyTorch tensor or a NumPy, CuPy or JAX array;
            packed (total_q, heads_q, d) with cu_seqlens_q. Strides as for attention(). d is at most
            512, and 256 on sm_86, sm_89 and sm_120.
        k_cache, v_cache: (batch, capacity, heads_k, d), or with page_table (pages, page, heads_k,
            d), with strides as for attention(): both may be halves of one tensor. v_cache may have
            its own d, which is then the d of o. heads_q must be a multiple of heads_k. Rows beyond
            a sequence's length may hold anything. Both may be float8_e4m3fn or float8_e5m2, with d
            a multiple of 16: the result has the bits of the caches converted to q's dtype.
        v_width: for a latent cache (MLA, docs/serving.md): the first v_width columns of k_cache's
            one head are the values, and o has v_width columns. v_cache and v must be None, and
            scale must be given.
        cache_lens: (batch,) int32, the number of keys of each sequence before appending; the call
            does not change cache_lens. On the host a length that does not fit is an error. On a
            device reads are clamped to the cache, and rows that do not fit are not appended.
        page_table: (batch, maximum pages of a sequence) int32: key i of a sequence is in slot i %
            page of page page_table[., i // page]. Unused entries may be anything, such as -1. Other
            invalid entries are errors on the host, and are clamped on a device.
        kv_offset: (batch,) int32, for rolling caches: how many keys each sequence has dropped, all
            of them before the cache's first key and outside every query's window. cache_lens does
            not count them; positions of cos and sin do. With bits='canonical', rows then have the
            bits that they would have with the whole cache.
        k, v: q's shape with heads_k heads, and v with v_cache's d; they are appended at cache_lens
            before attention. None appends nothing. Sequences must not share the pages to which they
            append. JAX arrays cannot be appended to.
        cos, sin: (positions, rotary_d / 2) of q's dtype or fp32. They rotate the first rotary_d
            elements of k and q (rotary embedding). The rotation is computed in fp32 and rounded
            once. Row i of k is rotated by position cache_lens + i. With causal or a window query i
            is rotated by cache_lens + i, otherwise every query by cache_lens.
        rotary_interleaved: whether the elements 2i and 2i + 1 form a pair; otherwise i and i +
            rotary_d / 2 do.
        cu_seqlens_q: (batch + 1,) int32: the rows of packed sequences, as for attention().
        max_seqlen_q: an upper bound on the number of queries of a packed sequence; longer sequences
            are cut off. None computes it on the host. On a device, None means total_q, which starts
            more CTAs than necessary.
        causal, window, softcap, scale, sinks: as for attention().
        score_mod, mask_mod, mask, bias: as for attention(). In functions, kv_idx and q_idx are
            positions in the whole sequence, which includes the keys that kv_offset counts. Columns
            of tensors are positions, too, and their rows are the queries of the call. The rows of a
            BlockMask are positions, too, if it has as many queries as keys; otherwise they are the
            queries of the call, which its mask_mod counts from 0, as after slicing. causal is True
            unless given, also with a mask.
        k_scale, v_scale: the factors of the cache's keys and values: numbers, or fp32 tensors with
            one number or one for each K/V head; None is 1. A latent cache has k_scale alone. In
            fp32, k_scale multiplies the scores before score_mod, and v_scale multiplies o before it
            is rounded. Appended k and v are divided by these scales; 8-bit floats are rounded to
            nearest even and saturate.
        split: 'invariant' splits the keys of a sequence by its own length alone; 'free' may take
            the batch into account and may be faster.
        bits: 'canonical' gives each row the bits that attention(bits='canonical') gives it, in any
            chunks, batch and pages, and with any split. None is FLASHSMITH_BITS, or 'free'.
        out: a tensor for the result, with q's shape (but v_cache's d) and dtype; None allocates
            one.
        return_lse: also return log(sum(exp(scores))) with the sink, fp32, (batch, heads_q, seq_q)
            or (heads_q, total_q). It is -inf for a row without keys and sink.
        config: the kernel to use; None chooses one.
        emulate: run host tensors in the emulator even when the estimated time is above 60 s.

    Returns:
        The output o, or (o, lse), in the framework and on the device of q.

    Raises:
        ArgumentError: an argument is invalid, no kernel serves these tensors, or one of them
            requires a gradient.
        The other errors of ``flashsmith.forward``.
    """
    if v_width is not None:
        given = locals()
        keywords = {name: given[name] for name in CACHE.defaults}
        return attention_with_latent_cache(q, k_cache, v_cache, keywords, CHOOSERS)
    check_config_for(DECODE.name, "config", config)
    chosen = config or CHOOSERS[check_split(split)]
    program = None
    if not (score_mod is None and mask_mod is None and mask is None and bias is None):
        functions = CallFunctions(score_mod, mask_mod, mask, bias)
        over = sizes_over_cache(q, k_cache, page_table, cu_seqlens_q, kv_offset)
        program, causal, window = bound_over_cache(functions, (causal, window), over)
    scales = Scales.of(k_scale, v_scale)
    tensors = DecodeTensors(
        *(q, k_cache, v_cache, cache_lens, out, page_table, k, v, cos, sin, sinks, cu_seqlens_q),
        *(kv_offset, *scales.tensors),
    )
    options = DecodeOptions(
        *(causal, window, softcap, scale, max_seqlen_q, rotary_interleaved, split, return_lse),
        *(bits, program, *scales.numbers),
    )
    return run_decode(chosen, tensors, options, emulate)


def remember_attention_with_cache(arguments: tuple[Any, ...], names: tuple[str, ...]) -> None:
    """Remembers a call that attention_with_cache() has just served, so that run_repeated can serve
    equivalent calls. ``arguments`` are q, k_cache and v_cache, followed by the values of the
    keywords in ``names``."""
    groups = cached_calls.repeated
    keywords = dict(zip(names, arguments[3:], strict=True))
    chosen = keywords.pop("config", None) or CHOOSERS[keywords.get("split", INVARIANT)]
    emulate = keywords.pop("emulate", False)
    keywords.pop("v_width", None)  # If it is not None, latent_decode served the call
    options = {name: keywords.pop(name) for name in DecodeOptions._fields if name in keywords}
    scales = Scales.of(*(keywords.pop(name, None) for name in SCALES))
    options |= {f"{name}_value": it for name, it in zip(SCALES, scales.numbers, strict=True)}
    keywords |= zip(SCALES, scales.tensors, strict=True)
    tensors = DecodeTensors(*arguments[:3], **keywords)
    # A call is not remembered if a tensor requires grad, because autograd may be enabled in later
    # calls.
    if any(getattr(tensor, "requires_grad", False) for tensor in tensors):
        return
    _, call = cached_calls.find(decode_call(chosen, tensors, DecodeOptions(**options), emulate))
    if call is not None:
        cached_calls.remember_repeated(groups, arguments, names, tensors, call.run)


def _choose_invariant(problem: Problem, device: DeviceSpec, **how: Any) -> Any:
    return _for_its_queries(without_batch(problem), problem, device, **how)


def _choose_freely(problem: Problem, device: DeviceSpec, **how: Any) -> Any:
    return _for_its_queries(for_free_split(problem), problem, device, **how)


def _for_its_queries(alike: Problem, problem: Problem, device: DeviceSpec, **how: Any) -> Any:
    among = how.pop("among", ())
    if not among:
        return adapt_to_problem(choose_config(alike, device, **how), problem, device)
    # If only built configs may be chosen, the adapted config might not be built. Configs are
    # compared as if the cache were plain, because the problem ``alike`` has a plain cache.
    built = {replace(config, cache=CacheFormat.PLAIN): config for config in among}
    legal = tuple(config for config in built if is_legal(config, device))
    return built[choose_config(alike, device, among=legal, **how)] if legal else among[0]


# For each value of `split`, the function that chooses a kernel.
CHOOSERS: dict[str, Chooser] = {INVARIANT: _choose_invariant, FREE: _choose_freely}
