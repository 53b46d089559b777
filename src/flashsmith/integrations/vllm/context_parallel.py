"""Computes attention over a cache whose keys are distributed over ranks (decode context
parallelism).

The cache of a rank has every N-th run of a request's keys, and the layers of a rank have a part of
the query heads. With the query heads of all ranks, each rank attends to its own part of the keys
from before the step. The engine's collective merges the results for these parts, and returns to
each rank the outputs for the rank's own heads. These outputs are then merged with attention to the
step's own keys, which every rank has.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.worker.cp_utils import should_skip_dcp_context_attention

import flashsmith
from flashsmith.integrations.layer_kernels import merged_sizes
from flashsmith.integrations.vllm.metadata import StepMetadata
from flashsmith.operations.cache_scales import SCALES


class LocalKeys:
    """Counts the keys in this rank's cache that are from before a step."""

    def __init__(self, config: Any, size: int, rank: int, device: torch.device) -> None:
        self._size, self._rank = size, rank
        self._run = config.parallel_config.cp_kv_cache_interleave_size
        # One tensor for all steps, because captured graphs read it.
        requests = config.scheduler_config.max_num_seqs
        self._counts = torch.zeros(requests, dtype=torch.int32, device=device)

    def count(self, step: CommonAttentionMetadata) -> torch.Tensor | None:
        """Returns the number of such keys of each request, (requests,) int32; None if no rank has
        any such keys. All ranks must reach the same decision, because each waits for the others."""
        before, requests = step.seq_lens_cpu_upper_bound, step.num_reqs
        if before is not None:
            starts = step.query_start_loc_cpu[: requests + 1]
            if should_skip_dcp_context_attention(before[:requests] - starts.diff()):
                return None
        new = step.query_start_loc[1:] - step.query_start_loc[:-1]
        local = get_dcp_local_seq_lens(step.seq_lens - new, self._size, self._rank, self._run)
        counts = self._counts[: len(local)]
        counts.copy_(local)
        return counts


def attend_across_ranks(
    impl: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    caches: tuple[torch.Tensor, ...],
    scales: tuple[torch.Tensor, ...],
    output: torch.Tensor,
    step: StepMetadata,
) -> None:
    """Computes attention of a step's queries (tokens, heads, d) to the keys of all ranks. ``impl``
    is the FlashsmithImpl of the layer; ``scales`` are the scales of the layer's cache, if it has
    any. The step's own keys are not read from the cache, so that the keys are exactly the model's,
    not rounded."""
    if step.local_keys is None:
        impl.attend_directly(query, key, value, output, step)
        return
    everyone = get_dcp_group().all_gather(query.contiguous(), dim=1)
    k_cache, v_cache = caches
    requests, longest = step.seq_lens.shape[0], step.max_query_len
    before, before_lse = flashsmith.attention_with_cache(
        everyone,
        k_cache,
        v_cache,
        cache_lens=step.local_keys,
        page_table=step.block_table,
        cu_seqlens_q=step.query_start_loc,
        max_seqlen_q=longest,
        causal=False,
        softcap=impl.softcap,
        scale=impl.scale,
        split=impl.split,
        bits=impl.bits,
        return_lse=True,
        **dict(zip(SCALES, scales, strict=False)),
        config=impl.cache_kernels(everyone, k_cache, step, False).config_for(requests, longest),
    )
    # The collective takes and returns the LSE as (tokens, heads).
    before, before_lse = impl.combine(
        before, before_lse.transpose(0, 1), get_dcp_group(), return_lse=True
    )
    # Only this part of the attention includes the sinks, so that they count once.
    own, own_lse = impl.attend_directly(query, key, value, None, step, return_lse=True)
    output.copy_(_merge([before, own], [before_lse.transpose(0, 1), own_lse]))


def _merge(outputs: list[torch.Tensor], lses: list[torch.Tensor]) -> torch.Tensor:
    """Merges outputs (tokens, heads, d), weighted by their LSEs (heads, tokens). Heads that are too
    wide for the kernels are merged in pieces, because each element of a merge depends only on its
    head's LSEs."""
    _, heads, d = outputs[0].shape
    more, piece = merged_sizes(heads, d)
    pieces = [it.reshape(-1, more, piece) for it in outputs]
    if more > heads:
        lses = [it.repeat_interleave(more // heads, dim=0) for it in lses]
    merged, _ = flashsmith.merge_attention(pieces, [it.contiguous() for it in lses])
    return merged.view(-1, heads, d)
