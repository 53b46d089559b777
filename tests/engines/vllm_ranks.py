"""Two ranks of decode context parallelism in one process: vLLM's scheduler and metadata, and its
collectives replaced by exchanges between two threads, of which one runs at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm_driver import Engine, Layer, Where, config_of

from flashsmith.integrations.vllm import impl as impls

try:
    from vllm.v1.attention.ops.dcp import _lse_weighted_combine as lse_weighted_combine
except ImportError:  # before 0.33
    from vllm.v1.attention.ops.dcp_alltoall import _lse_weighted_combine as lse_weighted_combine

RANKS = 2


class Ranks:
    """The engine's group of ranks, each of which is a thread."""

    world_size = RANKS

    def __init__(self) -> None:
        self._here = threading.local()
        self._barrier = threading.Barrier(RANKS)
        self._running = threading.Lock()
        self._given: list[Any] = [None] * RANKS

    @property
    def rank_in_group(self) -> int:
        return getattr(self._here, "rank", 0)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What ``work`` returns for each rank."""
        found: list[Any] = [None] * RANKS
        errors: list[BaseException] = []

        def start(rank: int) -> None:
            self._here.rank = rank
            try:
                with self._running:
                    found[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=start, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return found

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        self._given[self.rank_in_group] = value
        self._wait()
        everyone = list(self._given)
        self._wait()
        return everyone

    def _wait(self) -> None:
        self._running.release()
        try:
            self._barrier.wait()
        finally:
            self._running.acquire()

    def all_gather(self, tensor: Any, dim: int) -> Any:
        return torch.cat(self.exchange(tensor), dim=dim)

    def combine(self, out: Any, lse: Any, group: Any, return_lse: bool = False) -> Any:
        """The rank's heads of the merged outputs (tokens, heads, d) and LSEs (tokens, heads), by
        the engine's reference of its collective."""
        assert (group, return_lse) == (self, True)
        outs, lses = map(torch.stack, zip(*self.exchange((out, lse)), strict=True))
        merged, total = lse_weighted_combine(outs, lses, return_lse=True, is_lse_base_on_e=True)
        count = merged.shape[1] // RANKS
        heads = slice(count * self.rank_in_group, count * (self.rank_in_group + 1))
        return merged[:, heads].to(out.dtype), total[:, heads]


class ParallelEngine(Engine):
    """Key p of a request is on rank (p // run) % RANKS, and each rank has half of the heads."""

    ranks = RANKS

    def __init__(
        self, folder: Path, layer: Layer, blocks: int, run: int, patch: pytest.MonkeyPatch
    ) -> None:
        self.group, self.run_of_keys = Ranks(), run
        self.local_keys: list[int] = []
        patch.setattr(parallel_state, "_DCP", self.group)
        patch.setattr(impls, "dcp_combine", lambda: self.group.combine)
        config = config_of(folder, dtype=str(layer.dtype).removeprefix("torch."))
        config.parallel_config.decode_context_parallel_size = RANKS
        config.parallel_config.cp_kv_cache_interleave_size = run
        super().__init__(config, layer, blocks)

    def _add_layer(self, spec: Any, blocks: int) -> None:
        halves = (None,) * RANKS if self.sinks is None else self.sinks.chunk(RANKS)
        self.layers = self.group.run(lambda rank: self._layer_of_a_rank(spec, blocks, halves[rank]))
        assert all(impl.need_to_return_lse_for_decode for impl, *_ in self.layers)

    def _forward(self, step: CommonAttentionMetadata, where: Where, q: Any, k: Any, v: Any) -> Any:
        def one(rank: int) -> Any:
            impl, builder, cache = self.layers[rank]
            own = replace(step, slot_mapping=self._slots(step, where, rank, len(q)))
            return self._call(impl, builder, cache, own, q.chunk(RANKS, dim=1)[rank], k, v)

        return torch.cat(self.group.run(one), dim=1)

    def _cached(self, positions: range) -> int:
        """A step's own keys come from the model."""
        return positions.start

    def _slots(self, step: CommonAttentionMetadata, where: Where, rank: int, rows: int) -> Any:
        """As the engine's kernel maps them: blocks of the table hold block * RANKS keys, and a rank
        skips those of others."""
        block, run = self.config.cache_config.block_size, self.run_of_keys
        slots = torch.full((rows,), -1)
        for row, (at, position) in enumerate(where):
            number, offset = divmod(position, block * RANKS)
            if offset // run % RANKS == rank:
                local = offset // (run * RANKS) * run + offset % run
                slots[row] = int(step.block_table_tensor[at, number]) * block + local
        return slots
