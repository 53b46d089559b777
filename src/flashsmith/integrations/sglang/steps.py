"""Computes a step's lengths and page tables, on the device, from the engine's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashsmith.integrations.sglang.releases import window_slots


@dataclass
class Step:
    """The tensors and numbers that all layers of a step share.

    rows: the number of query tokens in the step; further rows of the query tensor are padding.
    longest: an upper bound on the tokens of one request.
    starts: (requests + 1,) int32.
    lens: (requests,) int32, how many keys each request has, the keys of this step included.
    table: (requests, most pages) int32.
    window_table and window_slots: the table and the written slots of layers with a window, if these
        layers have a separate pool.
    """

    rows: int
    longest: int
    starts: torch.Tensor
    lens: torch.Tensor
    table: torch.Tensor
    window_table: torch.Tensor | None = None
    window_slots: torch.Tensor | None = None

    @property
    def requests(self) -> int:
        return self.lens.shape[0]


class PageTables:
    """Computes page tables from the engine's table of token slots, (requests of the pool,
    tokens)."""

    def __init__(self, model_runner: Any, page: int) -> None:
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        self.page = page
        self.slots: torch.Tensor = model_runner.req_to_token_pool.req_to_token
        self.most_pages = -(-self.slots.shape[1] // page)
        pool = model_runner.token_to_kv_pool
        # Layers with a window may have a separate pool with a separate numbering of slots.
        self.window_pool = pool if isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0 else None

    def pages_for(self, forward_batch: Any, more: int = 0) -> int:
        """Returns how many pages the longest request needs after ``more`` tokens are added. The
        number is rounded up to a power of two, so that tables have only a few sizes. If the host
        does not know the lengths, the largest possible number is returned."""
        lens = forward_batch.seq_lens_cpu
        if lens is None or not len(lens):
            return self.most_pages
        pages = -(-(int(lens.max()) + more) // self.page)
        return int(min(self.most_pages, 1 << max(0, pages - 1).bit_length()))

    def gather(
        self, requests: torch.Tensor, pages: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the first ``pages`` columns of the page tables (requests, pages) of both pools.
        ``requests`` are indices of rows in the table of slots."""
        first = self.slots[:, : pages * self.page : self.page].index_select(0, requests)
        window = None
        if self.window_pool is not None:
            window = self._numbers(self.window_pool.translate_loc_from_full_to_swa(first))
        return self._numbers(first), window

    def _numbers(self, first_slots: torch.Tensor) -> torch.Tensor:
        pages = first_slots if self.page == 1 else first_slots // self.page
        return pages.to(torch.int32)


def drafted(forward_batch: Any, drafts: int) -> int:
    """Returns how many drafted tokens of each request a step verifies, or 0 if the step verifies
    none. The step's lengths do not include these tokens yet.

    ``drafts``: the number of tokens in a draft, which is a chain.

    Raises NotImplementedError for drafts of several lengths.
    """
    if not forward_batch.forward_mode.is_target_verify():
        return 0
    if getattr(forward_batch.spec_info, "ragged_verify_layout", None) is not None:
        raise NotImplementedError(
            "flashsmith: drafts of several lengths in a step are not served; choose another "
            "attention backend"
        )
    return drafts


class GraphSteps:
    """Makes the steps of captured graphs, which decode or verify. All steps use the same tensors,
    whose addresses do not change."""

    def __init__(
        self,
        tables: PageTables,
        most_requests: int,
        most_tokens: int,
        drafts: int,
        earlier: int = 0,
    ) -> None:
        """``drafts``: the tokens of a draft; 0 without speculative decoding. ``earlier``: as for
        eager_step()."""
        device = tables.slots.device
        self.tables, self._drafts, self._earlier = tables, drafts, earlier
        shape = (most_requests, tables.most_pages)

        def zeros(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        self._starts = torch.arange(most_requests + 1, dtype=torch.int32, device=device)
        self._draft_starts = self._starts * drafts
        self._lens = zeros(most_requests)
        self._table = zeros(*shape)
        has_window = tables.window_pool is not None
        self._window_table = zeros(*shape) if has_window else None
        self._window_slots = zeros(most_tokens, dtype=torch.int64) if has_window else None

    def step(self, model_runner: Any, forward_batch: Any, in_capture: bool) -> Step:
        """Fills the tensors for a batch in which each request, even a request that is padding, has
        one token or one draft."""
        requests, more = forward_batch.batch_size, drafted(forward_batch, self._drafts)
        rows = requests * max(1, more)
        added = more or self._earlier
        self._lens[:requests].copy_(forward_batch.seq_lens)
        if added:
            self._lens[:requests].add_(added)
        pages = self.tables.pages_for(forward_batch, added)
        table, window_table = self.tables.gather(forward_batch.req_pool_indices, pages)
        self._table[:requests, :pages].copy_(table)
        step = Step(
            rows,
            max(1, more),
            (self._draft_starts if more else self._starts)[: requests + 1],
            self._lens[:requests],
            self._table[:requests],
        )
        if self._window_table is not None and self._window_slots is not None:
            self._window_table[:requests, :pages].copy_(window_table)
            # Rows that are padding, and all rows while a graph is captured, write to the pool's
            # unused slot 0.
            self._window_slots[:rows].zero_()
            if not in_capture:
                slots = window_slots(model_runner, forward_batch)
                self._window_slots[: slots.shape[0]].copy_(slots)
            step.window_table = self._window_table[:requests]
            step.window_slots = self._window_slots[:rows]
        return step


def eager_step(
    tables: PageTables, model_runner: Any, forward_batch: Any, drafts: int, earlier: int = 0
) -> Step:
    """Returns the step of a batch that is not in a captured graph. It consists of prefills, chunks
    of prefills, decodes or a mix of these, or it verifies drafts of ``drafts`` tokens.

    ``earlier``: in a decode step of a draft model, how many tokens each request has in addition to
    the batch's lengths, this step's token included.
    """
    more = drafted(forward_batch, drafts)
    added = more or earlier
    lens = forward_batch.seq_lens + added if added else forward_batch.seq_lens
    requests = lens.shape[0]
    table, window_table = tables.gather(
        forward_batch.req_pool_indices, tables.pages_for(forward_batch, added)
    )
    if more:
        rows, longest = requests * more, more
        starts = torch.arange(0, rows + 1, more, dtype=torch.int32, device=lens.device)
    elif forward_batch.forward_mode.is_decode_or_idle():
        rows, longest = requests, 1
        starts = torch.arange(requests + 1, dtype=torch.int32, device=lens.device)
    else:
        counts = forward_batch.extend_seq_lens_cpu
        rows, longest = sum(counts), max(counts, default=0)
        starts = torch.zeros(requests + 1, dtype=torch.int32, device=lens.device)
        torch.cumsum(forward_batch.extend_seq_lens, 0, dtype=torch.int32, out=starts[1:])
    step = Step(rows, max(1, longest), starts, lens.to(torch.int32), table, window_table)
    if tables.window_pool is not None and forward_batch.out_cache_loc is not None:
        step.window_slots = window_slots(model_runner, forward_batch)
    return step
