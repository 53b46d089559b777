"""Makes attn_implementation="flashsmith" available in Hugging Face transformers.

    import flashsmith.integrations.transformers as flashsmith_transformers

    flashsmith_transformers.register()
    model = AutoModel.from_pretrained(..., attn_implementation="flashsmith")

Padded batches are computed as packed sequences. Calls that the kernels cannot serve fall back to
PyTorch, with one warning for each reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    masking_utils,
    modeling_utils,
)
from transformers.generation import utils as generation_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from flashsmith.errors import ArgumentError, UnservedError
from flashsmith.integrations.fallbacks import Reason, note, note_fallback
from flashsmith.integrations.packing import Packing, packing_of, packing_of_all
from flashsmith.integrations.pytorch_state import (
    check_emulate,
    needs_gradients,
    under_autocast,
    why_not_now,
    why_not_on,
)
from flashsmith.integrations.sdpa import mask_keywords, tensor_facts
from flashsmith.integrations.sdpa_problem import SdpaProblem, why_not, why_not_mask
from flashsmith.integrations.traceable import attention, attention_with_cache, is_tracing
from flashsmith.integrations.transformers_bits import (
    ask_for_bits,
    asked_bits,
    refuse_rolling,
    refuse_under_canonical,
    wants_canonical,
)
from flashsmith.integrations.transformers_masks import (
    HiddenKeys,
    flashsmith_mask,
    hidden_by,
    selected_by,
)
from flashsmith.integrations.transformers_models import (
    check_that_it_builds_masks,
    stated_causality,
)
from flashsmith.integrations.transformers_pages import (
    CALLER,
    NAME,
    Pages,
    gathered,
    leave_pages_unread,
    of_kind,
    offer_block_tables,
    unread_of,
    updated,
)
from flashsmith.integrations.transformers_sequences import (
    Sequences,
    sequences_by_position,
    sequences_of,
)
from flashsmith.semantics.dtype import dtype_name


@dataclass
class _Options:
    float32_as: Any = None
    strict: bool = False
    emulate: bool | None = None


_options = _Options()

# Keywords that a few models pass to their attention functions: block_indices selects the keys of
# block-sparse attention, and sinks has one sink per token.
_UNSERVED = ("block_indices", "sinks")


def register(
    *,
    float32_as: Any = None,
    strict: bool = False,
    emulate: bool | None = None,
    bits: str | None = None,
) -> None:
    """Registers attn_implementation="flashsmith" with transformers; a second call replaces the
    options.

    Args:
        float32_as: the dtype in which the attention of float32 models is computed: torch.float16 or
            torch.bfloat16, its name or NumPy dtype. None leaves these models to PyTorch.
        strict: raise if a layer's attention would be left to PyTorch.
        emulate: run host tensors in the slow emulator instead of leaving them to PyTorch. None
            reads the environment variable FLASHSMITH_EMULATE (default 0) at every call.
        bits: as for attention(). With 'canonical', a call also raises if it would be left to
            PyTorch, or if it is continuous batching of a layer with a window.

    Raises:
        ArgumentError: float32_as, emulate or bits has an invalid value.
    """
    narrow = {"float16": torch.float16, "bfloat16": torch.bfloat16, None: None}
    name = None if float32_as is None else dtype_name(float32_as) or ""
    if name not in narrow:
        raise ArgumentError(
            f"float32_as={float32_as!r}: give torch.float16, torch.bfloat16 or None"
        )
    ask_for_bits(bits)
    _options.emulate = check_emulate(emulate)
    _options.float32_as, _options.strict = narrow[name], strict
    AttentionInterface.register(NAME, flashsmith_attention_forward)
    AttentionMaskInterface.register(NAME, flashsmith_mask)
    _keep_from_the_hub()
    leave_pages_unread()
    offer_block_tables()


def _keep_from_the_hub() -> None:
    """Patches transformers so that transformers does not load a kernel for the name 'flashsmith'.

    For any attention implementation with 'flash' in its name, transformers loads a kernel, possibly
    from the hub, and refuses chunked masks. flashsmith needs no such kernel and supports any mask.
    """
    load = modeling_utils.lazy_import_flash_attention
    if getattr(load, "loads_nothing_for", None) == NAME:
        return

    def load_unless_ours(implementation: str | None, *args: Any, **keywords: Any) -> Any:
        if implementation == NAME:
            return None
        return load(implementation, *args, **keywords)

    load_unless_ours.loads_nothing_for = NAME  # type: ignore[attr-defined]
    modeling_utils.lazy_import_flash_attention = load_unless_ours
    # Without this patch, generate() passes a mask for a static cache even if the mask hides
    # nothing. Such a mask would have to be read at every step, and the read would break the
    # compiled graph. Vision towers keep the original check, so that they pass their images as
    # packed sequences.
    for where in (generation_utils, masking_utils):
        asks = getattr(where, "is_flash_attention_requested", None)
        if asks is not None:
            where.is_flash_attention_requested = _for_another(asks)


def _for_another(asks: Callable[..., bool]) -> Callable[..., bool]:
    """Wraps transformers' check for flash attention so that the check returns False for configs
    that select flashsmith."""

    def asks_for_another(config: Any = None, *args: Any, **keywords: Any) -> bool:
        if getattr(config, "_attn_implementation", None) == NAME:
            return False
        return bool(asks(config, *args, **keywords))

    return asks_for_another


class _Call(NamedTuple):
    """One call of a layer's attention. Tensors are (batch, heads, length, d), as in
    transformers."""

    query: Any
    key: Any
    value: Any
    padding: Any  # (batch, keys): real keys, or the sequence numbers of packed sequences
    pattern: Any  # (batch, 1, queries, keys): a mask without a smaller form, bool or added
    causal: bool
    window: int | None  # keys on each side (causal: left), including the query's own
    softcap: float | None
    scale: float | None
    sinks: Any
    sequences: Sequences | None  # packed into one batch row by the caller
    longest_q: Any  # with pages: the largest number of queries of a sequence
    filled: Any = None  # (batch,) int32: how many keys of a static or rolling cache are filled
    dropped: Any = None  # (batch,) int32: how many keys a rolling cache dropped before its first
    pages: Pages | None = None

    def keywords(self) -> dict[str, Any]:
        """Returns the keywords of attention() for masks, scores, bits and emulation."""
        limit = None if self.window is None else self.window - 1
        return {
            "causal": self.causal,
            "window": (limit, None if self.causal else limit),
            "softcap": self.softcap or 0.0,
            "scale": self.scale,
            "sinks": None if self.sinks is None else self.sinks.float().contiguous(),
            "bits": asked_bits(),
            # Host tensors get here only if the emulator computes the call.
            "emulate": self.query.device.type == "cpu",
        }


def flashsmith_attention_forward(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Any = None,
    position_bias: Any = None,
    cache: Any = None,
    cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    indices: Any = None,
    **keywords: Any,
) -> tuple[Any, None]:
    """Computes a layer's attention; transformers calls this function for every layer. It returns
    the output, (batch, length, heads, d), and None in place of the attention weights.

    Raises:
        ArgumentError: neither flashsmith nor PyTorch's function can compute the layer's attention.
    """
    _check_keywords(module, keywords)
    if cache is not None:  # in transformers 5.23 the attention function updates the cache
        lengths = {**keywords, "cu_seq_lens_q": cu_seq_lens_q}
        lengths |= {"cu_seq_lens_k": cu_seq_lens_k, "max_length_k": max_length_k}
        key, value = updated(module, key, value, cache, lengths)
        cu_seq_lens_k, max_length_k = lengths["cu_seq_lens_k"], lengths["max_length_k"]
        attention_mask = None  # this mask covers only the new tokens; the offsets describe all keys
    pages, key, value = _pages_and_rows(module, key, value, keywords)
    if pages is None:
        cu_seq_lens_k, max_length_k = (of_kind(module, it) for it in (cu_seq_lens_k, max_length_k))
    if indices is not None:
        attention_mask = selected_by(attention_mask, indices, key.shape[2])
    hidden = _hidden(attention_mask, query, key, value, s_aux)
    if hidden.keys is not None:
        key, value = (tensor[:, :, : hidden.keys] for tensor in (key, value))
    offsets, longest = (cu_seq_lens_q, cu_seq_lens_k), (max_length_q, max_length_k)
    sequences = sequences_of(offsets, longest, query, key) if pages is None else None
    causal, window = _causality(module, hidden, is_causal, sliding_window, query, key, pages)
    query, key, value = under_autocast(query, key, value)
    q, k, v = _converted(query, key, value)
    padding = _padding(hidden, pages, sequences, keywords.get("position_ids"), q, k)
    call = _Call(
        *(q, k, v, padding, hidden.pattern, causal, window, softcap, scaling, s_aux),
        *(sequences, max_length_q, hidden.filled, hidden.dropped, pages),
    )
    if (reason := _why_not(call, dropout, position_bias)) is None:
        try:
            return _by_kernel(call).to(query.dtype), None
        except UnservedError:  # a pattern that is not on the kernels' device
            reason = _PATTERN
    _refuse_or_note(call, reason)
    return _by_pytorch(module, call, (query, key, value), dropout, position_bias, keywords)


def _check_keywords(module: Any, keywords: Mapping[str, Any]) -> None:
    """Raises ArgumentError for keywords that neither the kernels nor PyTorch's attention have."""
    for name in _UNSERVED:
        if keywords.get(name) is not None:
            raise ArgumentError(
                f"{name}: passed by {type(module).__name__}; neither the kernels nor PyTorch's "
                'attention have this argument: use attn_implementation="eager"'
            )
    if keywords.get("output_attentions") and not is_tracing():
        note(CALLER, "output_attentions", "the kernels keep no weights; use eager attention")


def _pages_and_rows(
    module: Any, key: Any, value: Any, keywords: Mapping[str, Any]
) -> tuple[Any, Any, Any]:
    """Returns the pages that a call reads (None if it reads no pages), and its keys and values."""
    if (unread := unread_of(key, value)) is not None:
        return unread.pages, unread.key, unread.value
    if keywords.get("block_table") is not None:
        raise ArgumentError(
            f"cache: {type(module).__name__} changes keys or values of its cache, and {CALLER} "
            "reads tables of pages as they are: set max_blocks_per_request=0 in the "
            "ContinuousBatchingConfig"
        )
    return None, gathered(key), gathered(value)


def _hidden(mask: Any, query: Any, key: Any, value: Any, sinks: Any) -> HiddenKeys:
    """Returns the keys that a mask hides. If the call needs gradients, the hidden keys are given in
    a form for which flashsmith computes gradients."""
    hidden = hidden_by(mask, query.shape[2])
    is_cache = hidden.filled is not None or hidden.dropped is not None
    if not is_cache or not needs_gradients(query, key, value, sinks):
        return hidden
    if hidden.dropped is not None:
        refuse_rolling("cache", "has dropped keys, which gradients need")
    # All batch rows have the same number of filled keys.
    return hidden._replace(keys=int(hidden.filled.max()), filled=None)


def _causality(
    module: Any,
    hidden: HiddenKeys,
    given: bool | None,
    window: int | None,
    query: Any,
    key: Any,
    pages: Any,
) -> tuple[bool, int | None]:
    """Whether a layer's attention is causal, and its window.

    If the mask determines both, the layer's attributes are ignored.
    """
    causal, window = _stated_or_masked(module, hidden, given, window, query, pages)
    if window is not None and hidden.causal is None and key.shape[2] != query.shape[2]:
        refuse_rolling(
            "sliding_window", "of a layer without a mask, whose cache may have dropped keys"
        )
    return causal, window


def _stated_or_masked(
    module: Any, hidden: HiddenKeys, given: bool | None, window: int | None, query: Any, pages: Any
) -> tuple[bool, int | None]:
    if hidden.causal is not None:
        return hidden.causal, hidden.window or None
    if hidden.pattern is not None:
        check_that_it_builds_masks(module)
        return False, None
    if pages is not None and given is None:
        return bool(getattr(module, "is_causal", True)), window
    return stated_causality(module, given, query.shape[2]), window


def _padding(
    hidden: HiddenKeys,
    pages: Any,
    sequences: Any,
    position_ids: Any,
    q: Any,
    k: Any,
) -> Any:
    if hidden.padding is not None:
        one_for_all = hidden.padding.shape[0] == 1 != k.shape[0]
        return hidden.padding.expand(k.shape[0], -1) if one_for_all else hidden.padding
    if any(it is not None for it in (hidden.pattern, hidden.filled, pages, sequences)):
        return None
    return sequences_by_position(position_ids, q, k)


def _converted(*tensors: Any) -> tuple[Any, ...]:
    if _options.float32_as is None:
        return tensors
    wide = torch.float32
    return tuple(t.to(_options.float32_as) if t.dtype is wide else t for t in tensors)


_PATTERN = Reason("attention_mask", "a pattern that is neither causal, a window nor padding")


def _why_not(call: _Call, dropout: float, position_bias: Any) -> Reason | None:
    tracing = is_tracing()
    if (reason := why_not_now(tracing)) is not None:
        return reason
    if position_bias is not None:
        return Reason("position_bias", "the kernels add nothing to the scores")
    if call.pattern is not None and (tracing or wants_canonical()):
        return _PATTERN
    if call.padding is not None and call.padding.shape != (call.key.shape[0], call.key.shape[2]):
        raise ArgumentError(
            f"attention_mask: shape {tuple(call.padding.shape)}; must be (batch, keys), "
            f"{(call.key.shape[0], call.key.shape[2])}"
        )
    problem = SdpaProblem(
        tensor_facts(call.query, tracing),
        tensor_facts(call.key, tracing),
        tensor_facts(call.value, tracing),
        dropout_p=dropout,
        scale=call.scale,
        enable_gqa=True,
    )
    reason = why_not(problem)
    if reason is None and call.pattern is not None:
        needs_grad = needs_gradients(call.pattern)
        facts = tensor_facts(call.pattern, tracing)
        if why_not_mask(facts, problem, needs_grad=needs_grad) is not None:
            return _PATTERN
    if reason is not None and reason.facts.startswith("dtype float32"):
        return Reason(reason.argument, f"{reason.facts} (see register's float32_as)")
    if reason is None and call.window is not None and _has_holes(call.padding):
        return Reason("attention_mask", "padding between real tokens, and a window counts it")
    return reason or why_not_on(
        call.query.device,
        _options.emulate,
        call.query.shape[-1],
        with_gradients=needs_gradients(call.query, call.key, call.value, call.sinks),
        over_cache=call.filled is not None or call.pages is not None,
    )


def _has_holes(padding: Any) -> bool:
    return padding is not None and not packing_of(padding).unbroken


def _refuse_or_note(call: _Call, reason: Reason) -> None:
    """Raises ArgumentError if PyTorch must not or cannot compute the call; otherwise records the
    fallback."""
    refuse_under_canonical(
        f"{reason}; and PyTorch's attention, which would take over, has other bits"
    )
    for name, value in (("softcap", call.softcap), ("s_aux", call.sinks)):
        if value is not None:
            raise ArgumentError(
                f"{reason}; and PyTorch's attention, which would take over, has no {name}: use "
                'attn_implementation="eager"'
            )
    if call.sequences is not None or call.pages is not None:
        raise ArgumentError(
            f"{reason}; and PyTorch's attention, which would take over, has no packed sequences: "
            'use attn_implementation="sdpa"'
        )
    if _options.strict:
        raise reason.error()
    if not is_tracing():
        note_fallback(CALLER, *reason)


def _by_kernel(call: _Call) -> Any:
    """Returns the output of the kernels, (batch, length, heads, d)."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (call.query, call.key, call.value))
    if call.pages is not None:
        return _on_pages(call, call.pages, q, k, v)
    if call.sequences is not None:
        return _packed_by_the_caller(call, call.sequences, q, k, v)
    if call.dropped is not None:
        return _on_rolled(call, q, k, v)
    if call.filled is not None:
        return attention_with_cache(q, k, v, cache_lens=call.filled, **call.keywords())
    if call.pattern is not None:
        of_mask = mask_keywords(call.pattern, call.query, call.key)
        return attention(q, k, v, **of_mask, **call.keywords())
    if call.padding is None:
        return attention(q, k, v, **call.keywords())
    real_k = packing_of(call.padding)
    if real_k.whole_lines:
        return attention(q, k, v, **call.keywords())
    if call.causal or call.window is not None or call.padding.dtype is not torch.bool:
        # The queries belong to the last keys, so the padding of these keys applies to the queries
        # too.
        real_q = packing_of(call.padding, last=q.shape[1])
        packed = _on_packed(call, real_q.pack(q), real_q, real_k.pack(k), real_k.pack(v), real_k)
        return real_q.unpack(packed, *q.shape[:2])
    # In cross-attention the mask does not cover the queries, and this function cannot know whether
    # its caller is cross-attention. So all queries are computed, which is always correct and only
    # wastes the work on padded rows.
    all_q = packing_of_all(q.shape[0], q.shape[1], q.device)
    rows = q.reshape(-1, *q.shape[2:])
    return _on_packed(call, rows, all_q, real_k.pack(k), real_k.pack(v), real_k).view(
        *q.shape[:-1], v.shape[-1]
    )


def _on_packed(call: _Call, q: Any, real_q: Packing, k: Any, v: Any, real_k: Packing) -> Any:
    return attention(
        q,
        k,
        v,
        cu_seqlens_q=real_q.cu_seqlens,
        cu_seqlens_k=real_k.cu_seqlens,
        max_seqlen_q=real_q.longest,
        max_seqlen_k=real_k.longest,
        **call.keywords(),
    )


def _on_rolled(call: _Call, q: Any, k: Any, v: Any) -> Any:
    """Computes attention over a rolling cache: a cache that drops keys once they have left the
    window."""
    how = {"cache_lens": call.filled, "kv_offset": call.dropped, **call.keywords()}
    if call.padding is None:
        return attention_with_cache(q, k, v, **how)
    real_k, real_q = packing_of(call.padding), packing_of(call.padding, last=q.shape[1])
    packed = attention_with_cache(
        *(real_q.pack(q), real_k.to_front(k), real_k.to_front(v)),
        cu_seqlens_q=real_q.cu_seqlens,
        max_seqlen_q=real_q.longest,
        **how,
    )
    return real_q.unpack(packed, *q.shape[:2])


def _packed_by_the_caller(call: _Call, sequences: Sequences, q: Any, k: Any, v: Any) -> Any:
    output = attention(
        *(tensor.reshape(-1, *tensor.shape[2:]) for tensor in (q, k, v)),
        cu_seqlens_q=sequences.starts_q,
        cu_seqlens_k=sequences.starts_k,
        max_seqlen_q=sequences.longest_q,
        max_seqlen_k=sequences.longest_k,
        **call.keywords(),
    )
    return output.view(*q.shape[:-1], v.shape[-1])


def _on_pages(call: _Call, pages: Pages, q: Any, k: Any, v: Any) -> Any:
    q, k, v = (tensor.reshape(-1, *tensor.shape[2:]) for tensor in (q, k, v))
    how = call.keywords()
    if pages.starts_q is None:
        q, k, v = q[:, None], k[:, None], v[:, None]
    else:
        longest = int(call.longest_q)
        how |= {"cu_seqlens_q": pages.starts_q.to(torch.int32), "max_seqlen_q": longest}
    output = attention_with_cache(
        q,
        pages.k_cache,
        pages.v_cache,
        cache_lens=pages.lens,
        page_table=pages.table,
        k=k,
        v=v,
        **how,
    )
    return output.view(*call.query.transpose(1, 2).shape[:-1], v.shape[-1])


def _by_pytorch(
    module: Any,
    call: _Call,
    tensors: tuple[Any, Any, Any],
    dropout: float,
    position_bias: Any,
    keywords: Mapping[str, Any],
) -> tuple[Any, None]:
    """Computes a call with PyTorch's attention; ``tensors`` are query, key and value."""
    mask = _as_pytorch_takes_it(call)
    found: tuple[Any, None] = sdpa_attention_forward(
        module,
        *tensors,
        mask,
        dropout,
        call.scale,
        is_causal=call.causal and mask is None,
        **({} if position_bias is None else {"position_bias": position_bias}),
        **keywords,
    )
    return found


def _as_pytorch_takes_it(call: _Call) -> Any:
    """Combines the call's mask, causality and window in one (batch, 1, queries, keys) mask.

    Returns None if no key is hidden, or if PyTorch's causal flag hides the same keys.
    """
    if call.pattern is not None:
        return call.pattern
    length_q, length_k = call.query.shape[2], call.key.shape[2]
    no_mask = call.padding is None and call.window is None and call.filled is None
    if no_mask and (not call.causal or length_q in (1, length_k)):
        return None
    keys = torch.arange(length_k, device=call.query.device)
    # All batch rows of a static cache have the same number of keys.
    end = length_k if call.filled is None else call.filled[0]
    distance = keys - (torch.arange(length_q, device=call.query.device) + end - length_q)[:, None]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if call.causal:
        visible = distance <= 0
    if call.window is not None:
        visible = visible & (distance.abs() < call.window)
    return _with_padding(call.padding, visible[None, None], length_q)


def _with_padding(mask: Any, visible: Any, length_q: int) -> Any:
    if mask is None:
        return visible
    if mask.dtype is torch.bool:
        return visible & mask[:, None, None, :]
    return visible & (mask[:, None, mask.shape[1] - length_q :, None] == mask[:, None, None, :])
