"""Runs a layer of flashsmith on host tensors under vLLM's own scheduler, block tables and metadata
builders.

The keys, values and queries of a request depend only on its tokens and their positions. So if a
prefix is in the prefix cache, another request has written the right values there. The output of
each step is compared with attention in float64 over all tokens of the request.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import block_table as block_tables

from flashsmith.integrations.vllm.backend import FlashsmithBackend

VOCABULARY = 97
SCALES = (0.02, 0.03)  # of keys and values in 8-bit floats
LAYER = "model.layers.0.self_attn.attn"
# A request's place in the batch and a token's position, of each token of a step.
Where = list[tuple[int, int]]


@dataclass(frozen=True)
class Layer:
    """One layer, and the options of its attention."""

    heads: int = 4
    kv_heads: int = 2
    d: int = 64
    window: int | None = None
    chunk: int | None = None  # of the keys that a query sees, as in Llama 4
    softcap: float | None = None
    sinks: bool = False
    dtype: Any = torch.bfloat16
    layout: str = "NHD"  # the cache's order in memory
    cache: str = "auto"  # kv_cache_dtype


@dataclass
class Checked:
    """What a run went through: counts that a test asserts, so that it tests what it says."""

    steps: int = 0
    mixed: int = 0  # steps with a decode and a prefill
    prefix_hits: int = 0
    preempted: int = 0
    rows: int = 0
    largest_error: float = 0.0
    outputs: dict[str, dict[int, Any]] = field(default_factory=dict)


def config_of(
    folder: Path,
    *,
    dtype: str = "bfloat16",
    max_model_len: int = 256,
    tokens: int = 48,
    requests: int = 6,
    block: int = 16,
) -> VllmConfig:
    """The engine's config for a tiny model, of which only the sizes matter here."""
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 256,
                "intermediate_size": 256,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "num_hidden_layers": 1,
                "vocab_size": VOCABULARY,
                "max_position_embeddings": max_model_len,
            }
        )
    )
    model = ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype=dtype, max_model_len=max_model_len
    )
    scheduler = SchedulerConfig(
        max_num_seqs=requests,
        max_num_batched_tokens=tokens,
        max_model_len=max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
    )
    cache = CacheConfig(block_size=block, enable_prefix_caching=True)
    return VllmConfig(
        model_config=model,
        scheduler_config=scheduler,
        cache_config=cache,
        device_config=DeviceConfig(device="cpu"),
    )


class Engine:
    """The engine without a model: it schedules, and calls one layer for each step."""

    ranks = 1  # over how many the keys and the heads are distributed

    def __init__(self, config: VllmConfig, layer: Layer, blocks: int) -> None:
        self.config, self.layer = config, layer
        block = config.cache_config.block_size
        config.cache_config.num_gpu_blocks = blocks
        sizes: dict[str, Any] = {
            "block_size": block,
            "num_kv_heads": layer.kv_heads,
            "head_size": layer.d,
            "dtype": layer.dtype,
        }
        if layer.chunk is None:
            self.backend, spec = FlashsmithBackend, FullAttentionSpec(**sizes)
        else:
            self.backend = create_chunked_local_attention_backend(FlashsmithBackend, layer.chunk)
            spec = ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=layer.chunk)
        group = KVCacheGroupSpec([LAYER], spec)
        groups = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group])
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(block * self.ranks, sha256)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=groups,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block * self.ranks,
            log_stats=False,
        )
        generator = torch.Generator().manual_seed(5)
        self.tables = [
            torch.randn(VOCABULARY, heads, layer.d, generator=generator)
            for heads in (layer.heads, layer.kv_heads, layer.kv_heads)
        ]
        sinks = torch.randn(layer.heads, generator=generator).to(layer.dtype)
        self.sinks = sinks if layer.sinks else None
        self._add_layer(spec, blocks)
        self.rows = _block_table(config)
        self.free_rows = [*range(config.scheduler_config.max_num_seqs)][::-1]
        self.row_of: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.checked = Checked()

    def _add_layer(self, spec: Any, blocks: int) -> None:
        self.impl, self.builder, self.cache = self._layer_of_a_rank(spec, blocks, self.sinks)

    def _layer_of_a_rank(self, spec: Any, blocks: int, sinks: Any) -> Any:
        """The layer, its metadata builder and its cache."""
        layer, config = self.layer, self.config
        more = {} if sinks is None else {"sinks": sinks}
        with set_current_vllm_config(config):
            impl = self.backend.get_impl_cls()(
                *(layer.heads // self.ranks, layer.d, layer.d**-0.5, layer.kv_heads, None),
                *(layer.window, layer.cache, layer.softcap),
                **more,
            )
        impl.process_weights_after_loading(layer.dtype)
        context = config.compilation_config.static_forward_context
        context.clear()
        context[LAYER] = SimpleNamespace(impl=impl)
        builder = self.backend.get_builder_cls()(spec, [LAYER], config, torch.device("cpu"))
        return impl, builder, _cache(layer, blocks, spec.block_size)

    def add(self, name: str, prompt: list[int], new_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=0.0)
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.tokens[name] = list(prompt)
        self.scheduler.add_request(request)

    def run(self, most_steps: int = 200) -> Checked:
        """Steps until all requests are finished."""
        while self.scheduler.has_unfinished_requests():
            self.checked.steps += 1
            assert self.checked.steps <= most_steps, "the requests do not finish"
            self._step()
        return self.checked

    # --- one step --------------------------------------------------------------------------------

    def _step(self) -> None:
        scheduled = self.scheduler.schedule()
        for name in scheduled.finished_req_ids:
            self._release(name)
        for name in scheduled.preempted_req_ids or ():
            self.checked.preempted += 1
            self._release(name)
        computed = self._place(scheduled)
        counts = scheduled.num_scheduled_tokens
        # Engines order requests by their row.
        names = sorted(counts, key=self.row_of.__getitem__)
        if not names:
            return
        self._attend(names, counts, computed)
        sampled = []
        for name in names:
            done = computed[name] + counts[name] >= len(self.tokens[name])
            token = (7 * len(self.tokens[name]) + self.tokens[name][-1]) % VOCABULARY
            if done:
                self.tokens[name].append(token)
            sampled.append([token] if done else [])
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
            pooler_output=[None] * len(names),
        )
        self.scheduler.update_from_output(scheduled, output)

    def _place(self, scheduled: Any) -> dict[str, int]:
        """Puts the scheduler's blocks into the block table; the computed tokens by request."""
        computed = {}
        for new in scheduled.scheduled_new_reqs:
            row = self.row_of[new.req_id] = self.free_rows.pop()
            self.rows.add_row(new.block_ids[0], row)
            computed[new.req_id] = new.num_computed_tokens
            self.checked.prefix_hits += new.num_computed_tokens > 0
        cached = scheduled.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[at]
            if name in cached.resumed_req_ids:
                row = self.row_of[name] = self.free_rows.pop()
                self.rows.add_row(blocks[0], row)
            elif blocks is not None:
                self.rows.append_row(blocks[0], self.row_of[name])
            computed[name] = cached.num_computed_tokens[at]
        return computed

    def _release(self, name: str) -> None:
        if name in self.row_of:
            row = self.row_of.pop(name)
            self.rows.clear_row(row)
            self.free_rows.append(row)

    def _attend(self, names: list[str], counts: dict[str, int], computed: dict[str, int]) -> None:
        table = torch.from_numpy(self.rows.block_table.np[[self.row_of[n] for n in names]].copy())
        positions = {n: range(computed[n], computed[n] + counts[n]) for n in names}
        q, k, v = (
            torch.cat([self._rows(which, name, positions[name]) for name in names])
            for which in range(3)
        )
        lens = torch.tensor([positions[n].stop for n in names], dtype=torch.int32)
        starts = torch.tensor([0, *np.cumsum([counts[n] for n in names])], dtype=torch.int32)
        self._run(names, positions, q, k, v, lens, starts, table)

    def _run(
        self,
        names: list[str],
        positions: dict[str, range],
        q: Any,
        k: Any,
        v: Any,
        lens: Any,
        starts: Any,
        table: Any,
    ) -> None:
        """As an engine calls a layer: a graph's size is a multiple of 8 tokens, and its padding has
        the slot -1 and requests of no token and no key."""
        rows, padding = len(q), -len(q) % 8
        counts = [len(positions[name]) for name in names]
        self.checked.mixed += min(counts) == 1 < max(counts)
        q, k, v = (torch.cat([it, torch.zeros(padding, *it.shape[1:]).to(it)]) for it in (q, k, v))
        more = padding % 3
        lens = torch.cat([lens, torch.zeros(more, dtype=torch.int32)])
        starts = torch.cat([starts, starts[-1:].expand(more)])
        table = torch.cat([table, torch.zeros(more, table.shape[1], dtype=torch.int32)])
        step = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lens,
            num_reqs=len(lens),
            num_actual_tokens=rows,
            max_query_len=max(counts),
            max_seq_len=int(lens.max()),
            block_table_tensor=table,
            slot_mapping=torch.empty(0),
            seq_lens_cpu_upper_bound=lens,
        )
        where = [(at, p) for at, name in enumerate(names) for p in positions[name]]
        output = self._forward(step, where, q, k, v)
        assert output[rows:].isnan().all(), "padding was written"
        for at, name in enumerate(names):
            self._check(name, positions[name], output[starts[at] : starts[at + 1]])

    def _forward(self, step: CommonAttentionMetadata, where: Where, q: Any, k: Any, v: Any) -> Any:
        block = self.config.cache_config.block_size
        slots = [
            int(step.block_table_tensor[at, p // block]) * block + p % block for at, p in where
        ]
        step.slot_mapping = torch.tensor(slots + [-1] * (len(q) - len(slots)))
        return self._call(self.impl, self.builder, self.cache, step, q, k, v)

    @staticmethod
    def _call(
        impl: Any, builder: Any, cache: Any, step: CommonAttentionMetadata, q: Any, k: Any, v: Any
    ) -> Any:
        metadata = builder.build(0, step)
        output = torch.full(q.shape, torch.nan, dtype=q.dtype)
        # Only caches of 8-bit floats have them.
        layer = SimpleNamespace(_k_scale=torch.tensor(SCALES[0]), _v_scale=torch.tensor(SCALES[1]))
        impl.do_kv_cache_update(layer, k, v, cache, step.slot_mapping)
        impl.forward(layer, q, k, v, cache, metadata, output)
        return output

    # --- what is expected ------------------------------------------------------------------------

    def _rows(self, which: int, name: str, positions: range) -> Any:
        """Rows of q (0), k (1) or v (2) of a request."""
        tokens = torch.tensor([self.tokens[name][p] for p in positions])
        turned = torch.cos(torch.tensor(positions)[:, None, None] * 0.37 + which)
        return (self.tables[which][tokens] * (1 + 0.5 * turned)).to(self.layer.dtype)

    def _stored(self, which: int, name: str, positions: range) -> Any:
        """Rows of k (1) or v (2) of a request, as a step with these positions reads them: keys in
        the cache have its rounding."""
        rows = self._rows(which, name, range(positions.stop))
        if self.layer.cache == "auto":
            return rows.double()
        dtype = torch.float8_e5m2 if "e5m2" in self.layer.cache else torch.float8_e4m3fn
        most, scale = torch.finfo(dtype).max, torch.tensor(SCALES[which - 1])
        codes = (rows.float() / scale).clamp(-most, most).to(dtype)
        cached = self._cached(positions)
        return torch.cat([codes[:cached].double() * scale.double(), rows[cached:].double()])

    def _cached(self, positions: range) -> int:
        """How many keys a step reads from the cache."""
        return positions.stop

    def _check(self, name: str, positions: range, output: Any) -> None:
        layer = self.layer
        q = self._rows(0, name, positions).double()
        k, v = (self._stored(it, name, positions) for it in (1, 2))
        k, v = (it.repeat_interleave(layer.heads // layer.kv_heads, dim=1) for it in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * layer.d**-0.5
        if layer.softcap:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        distance = torch.tensor(positions)[:, None] - torch.arange(positions.stop)
        hidden = (distance < 0) | (distance >= (layer.window or 1 << 30))
        if layer.chunk:
            chunks = torch.arange(positions.stop) // layer.chunk
            hidden |= chunks[positions.start :, None] != chunks
        scores.masked_fill_(hidden, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, len(positions), 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(dim=-1)[..., : positions.stop]
        expected = torch.einsum("hqk,khd->qhd", weights, v)
        error = (output.double() - expected).abs().max().item()
        self.checked.rows += len(positions)
        self.checked.largest_error = max(self.checked.largest_error, error)
        kept = self.checked.outputs.setdefault(name, {})
        kept.update(zip(positions, output.clone(), strict=True))


def _cache(layer: Layer, blocks: int, block: int) -> Any:
    """The engine's cache, (blocks, heads, tokens, K and V), with NaN where nothing was written."""
    shape = FlashsmithBackend.get_kv_cache_shape(blocks, block, layer.kv_heads, layer.d)
    order = (0, 2, 1, 3) if layer.layout == "NHD" else (0, 1, 2, 3)
    sizes = [shape[it] for it in order]
    if layer.cache == "auto":
        memory = torch.full(sizes, torch.nan, dtype=layer.dtype)
    else:  # bytes, of which this is NaN in any format
        memory = torch.full(sizes, 0x7F, dtype=torch.uint8)
    return memory.permute(*map(order.index, range(4)))


def _block_table(config: VllmConfig) -> Any:
    scheduler, block = config.scheduler_config, config.cache_config.block_size
    sizes: dict[str, Any] = {
        "block_size": block,
        "kernel_block_size": block,
        "max_num_reqs": scheduler.max_num_seqs,
        "max_num_blocks_per_req": -(-config.model_config.max_model_len // block),
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "pin_memory": False,
        "device": torch.device("cpu"),
        "cp_kv_cache_interleave_size": 1,
        # Slots are computed by a Triton kernel; here they follow from the table.
        "slot_mapping_mode": block_tables.SlotMappingMode.NONE,
    }
    known = inspect.signature(block_tables.BlockTable).parameters
    return block_tables.BlockTable(**{name: it for name, it in sizes.items() if name in known})


def prompts(seed: int, count: int, shared: int, longest: int) -> Iterator[list[int]]:
    """Prompts of random lengths that begin with the same tokens."""
    rng = np.random.default_rng(seed)
    first = rng.integers(VOCABULARY, size=shared).tolist()
    for _ in range(count):
        own = rng.integers(VOCABULARY, size=rng.integers(1, longest)).tolist()
        yield first + own
