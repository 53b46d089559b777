"""A plain attention() in the kernels' place, behind transformers' attention_interface: what becomes
of masks, windows, caches and padding is tested with whole models in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import padded_attention
import pytest
import torch

from flashsmith.integrations import transformers as ours


class Calls(list):
    """What attention() was called with, call by call."""


@contextmanager
def replaced_kernels(**options: Any) -> Iterator[Calls]:
    """Registers flashsmith with ``options``, and its kernels replaced."""
    seen = Calls()

    def attention(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        seen.append({"q": q, "k": k, "v": v, **keywords})
        keywords.pop("bits")
        return padded_attention.attention(q, k, v, **keywords)

    def attention_with_cache(q: Any, k: Any, v: Any, /, *, cache_lens: Any, **keywords: Any) -> Any:
        seen.append({"q": q, "k": k, "v": v, "cache_lens": cache_lens, **keywords})
        keywords.pop("bits")
        if "page_table" in keywords:
            # transformers writes the next step's over them.
            if "cu_seqlens_q" in keywords:
                seen[-1]["cu_seqlens_q"] = keywords["cu_seqlens_q"].clone()
            return padded_attention.paged_attention(q, k, v, cache_lens, **keywords)
        keywords.pop("kv_offset", None)
        if "cu_seqlens_q" in keywords:
            return padded_attention.attention_to_front(q, k, v, cache_lens, **keywords)
        lines = [
            padded_attention.attention(q[i, None], k[i, None, :n], v[i, None, :n], **keywords)
            for i, n in enumerate(cache_lens.tolist())
        ]
        return torch.cat(lines)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "attention", attention)
        patch.setattr(ours, "attention_with_cache", attention_with_cache)
        ours.register(emulate=True, **options)
        yield seen
    ours.register()


@contextmanager
def exact_kernels(**options: Any) -> Iterator[Calls]:
    """The same for float32 models, in float32: what is right differs by the order of sums alone."""
    facts = ours.tensor_facts

    def as_float16(tensor: Any, tracing: bool) -> Any:
        found = facts(tensor, tracing)
        return found._replace(dtype="float16") if found.dtype == "float32" else found

    with replaced_kernels(**options) as calls, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "tensor_facts", as_float16)
        yield calls
