"""Runs flashsmith's backend on host tensors under SGLang's own pools, allocators, radix cache and
batches.

The keys, values and queries of a request depend only on its tokens and their positions. So if a
prefix is in the radix cache, another request has written the right values there. The output of each
step is compared with attention in float64 over all tokens of the request.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from flashsmith.integrations.sglang import register

VOCABULARY = 97
CONTEXT = 192
DEVICE = "cpu"


@dataclass(frozen=True)
class Layer:
    """One layer, and the options of its attention. ``window`` counts the query's own key."""

    heads: int = 4
    kv_heads: int = 2
    d: int = 64
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    attn_type: AttentionType = AttentionType.DECODER


@dataclass
class Checked:
    """What a run went through: counts that a test asserts, so that it tests what it says."""

    steps: int = 0
    mixed: int = 0  # steps with a decode and a prefill
    graphs: int = 0
    prefix_hits: int = 0
    freed: int = 0  # slots of windows given back
    largest_error: float = 0.0
    outputs: dict[tuple[int, str, int], Any] = field(default_factory=dict)


@dataclass
class Request:
    name: str
    row: int
    tokens: list[int]
    end: int  # how many tokens are asked for
    computed: int = 0
    slots: Any = None
    freed: int = 0


# The requests of a step, with the positions of its tokens.
Parts = list[tuple[Request, range]]


@contextmanager
def server(
    *,
    deterministic: bool = False,
    chunk: int = 48,
    drafts: int | None = None,
    topk: int = 1,
    **settings: Any,
) -> Iterator[None]:
    """The engine's settings of a process, as a server publishes them. ``drafts``: the tokens of a
    draft, None without speculative decoding. ``settings``: further ones, by name."""
    with ExitStack() as stack:
        stack.enter_context(
            get_context().override_server_args(
                enable_deterministic_inference=deterministic,
                chunked_prefill_size=chunk,
                speculative_num_draft_tokens=drafts,
                speculative_eagle_topk=None if drafts is None else topk,
                **settings,
            )
        )
        stack.enter_context(
            get_parallel().override(attn_cp_size=1, attn_dcp_size=1, dcp_size=1, dcp_enabled=False)
        )
        yield


class Engine:
    """The engine without a model: it makes batches, and calls its layers for each."""

    def __init__(
        self,
        layers: tuple[Layer, ...],
        *,
        page: int = 1,
        slots: int = 600,
        requests: int = 6,
        dtype: Any = torch.bfloat16,
        cache: Any = None,
        scales: tuple[Any, Any] | None = None,
        window_pool: int = 0,
        graphs: bool = False,
        changes: dict[str, Any] | None = None,
    ) -> None:
        self.layers, self.page, self.dtype = layers, page, dtype
        self.cache, self.scales = cache or dtype, scales or (1.0, 1.0)
        self.rows = ReqToTokenPool(requests, CONTEXT, DEVICE, enable_memory_saver=False)
        self.pool = self._pool(slots, window_pool)
        self.allocator = self._allocator(slots, window_pool)
        self.tree = RadixCache(CacheInitParams(False, self.rows, self.allocator, page))
        _fill_with_nan(self.pool)
        generator = torch.Generator().manual_seed(5)
        self.tables, self.sinks = [], []
        for layer in layers:
            self.tables.append(
                [
                    torch.randn(VOCABULARY, heads, layer.d, generator=generator)
                    for heads in (layer.heads, layer.kv_heads, layer.kv_heads)
                ]
            )
            sinks = torch.randn(layer.heads, generator=generator).to(dtype)
            self.sinks.append(sinks if layer.sinks else None)
        self.modules = self._modules()
        if scales is not None:
            for module in self.modules:
                module.k_scale, module.v_scale = scales
        self.runner = self._runner(changes or {})
        register()
        self.backend = ATTENTION_BACKENDS["flashsmith"](self.runner)
        self.graphs = graphs
        if graphs:
            self.backend.init_cuda_graph_state(requests, requests * max(1, self.backend.drafts))
        self.checked = Checked()

    def _pool(self, slots: int, window_pool: int) -> Any:
        layer = self.layers[0]
        common = {
            "page_size": self.page,
            "dtype": self.cache,
            "head_num": layer.kv_heads,
            "head_dim": layer.d,
            "device": DEVICE,
        }
        if window_pool:
            windows = [it for it, layer in enumerate(self.layers) if layer.window is not None]
            others = [it for it in range(len(self.layers)) if it not in windows]
            return SWAKVPool(
                slots,
                window_pool,
                swa_attention_layer_ids=windows,
                full_attention_layer_ids=others,
                **common,
            )
        return MHATokenToKVPool(
            slots, layer_num=len(self.layers), enable_memory_saver=False, **common
        )

    def _modules(self) -> Any:
        return torch.nn.ModuleList(map(module_of, self.layers, range(len(self.layers))))

    def _allocator(self, slots: int, window_pool: int) -> Any:
        end = (self.cache, DEVICE, self.pool, False)
        if window_pool:
            return SWATokenToKVPoolAllocator(slots, window_pool, self.page, *end)
        if self.page == 1:
            return TokenToKVPoolAllocator(slots, *end)
        return PagedTokenToKVPoolAllocator(slots, self.page, *end)

    def _runner(self, changes: dict[str, Any]) -> Any:
        config = {
            "attention_arch": AttentionArch.MHA,
            "is_encoder_decoder": False,
            "is_local_attention_model": False,
            "context_len": CONTEXT,
            "kv_lora_rank": None,
            "hf_config": SimpleNamespace(),
            "hf_text_config": SimpleNamespace(),
        }
        runner: dict[str, Any] = {
            "model": self.modules,
            "req_to_token_pool": self.rows,
            "token_to_kv_pool": self.pool,
            "token_to_kv_pool_allocator": self.allocator,
            "page_size": self.page,
            "dtype": self.dtype,
            "kv_cache_dtype": self.cache,
            "kv_cache_dtype_str": "auto",
            "spec_algorithm": SpeculativeAlgorithm.from_string(None),
            "is_draft_worker": False,
            "draft_attention_backend": None,
            "server_args": get_context().server_args,
            "device": DEVICE,
        }
        config |= {name: it for name, it in changes.items() if name in config}
        runner |= {name: it for name, it in changes.items() if name in runner}
        try:
            from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
        except ImportError:  # a release before 0.5.23's plans
            pass
        else:
            runner["kv_index_translator"] = KVIndexTranslator(
                req_to_token=self.rows.req_to_token,
                token_to_kv_pool_allocator=self.allocator,
                token_to_kv_pool=self.pool,
                page_size=self.page,
                device=DEVICE,
            )
        return SimpleNamespace(model_config=SimpleNamespace(**config), **runner)

    # --- a run -----------------------------------------------------------------------------------

    def run(
        self, prompts: dict[str, list[int]], new_tokens: int, *, chunk: int = 48, together: int = 4
    ) -> Checked:
        """Generates after each prompt, with ``together`` requests at a time and at most ``chunk``
        tokens of a step."""
        waiting, running = dict(prompts), list[Request]()
        while waiting or running:
            while waiting and len(running) < together:
                name = next(iter(waiting))
                running.append(self._start(name, waiting.pop(name), new_tokens))
            self._step(running, chunk)
            for request in [it for it in running if it.computed == it.end]:
                self._finish(request)
                running.remove(request)
        return self.checked

    def _start(self, name: str, prompt: list[int], new_tokens: int) -> Request:
        row = self.rows.free_slots.pop()
        request = Request(name, row, list(prompt), len(prompt) + new_tokens)
        key = RadixKey(array("q", prompt[:-1]))
        match = self.tree.match_prefix(MatchPrefixParams(key))
        if hasattr(match, "device_indices"):
            hit = match.device_indices
        else:
            hit = self.tree.path_device_indices(match.last_device_node)
        request.computed = len(hit)
        request.slots = hit
        self.rows.write((row, slice(0, len(hit))), hit.to(torch.int32))
        self.checked.prefix_hits += len(hit) > 0
        return request

    def _finish(self, request: Request) -> None:
        """The request's keys stay in the radix cache, as a finished request's do."""
        if not isinstance(self.pool, SWAKVPool):
            key = RadixKey(array("q", request.tokens[: request.computed]))
            self.tree.insert(InsertParams(key=key, value=request.slots[: request.computed]))
        self.rows.req_to_token[request.row] = 0
        self.rows.free_slots.append(request.row)

    def _step(self, running: list[Request], chunk: int) -> None:
        self.checked.steps += 1
        counts = []
        for request in running:
            known = len(request.tokens) - request.computed
            counts.append(min(known, max(1, chunk - sum(counts))))
            self._make_room(request, request.computed + counts[-1])
        decodes = all(
            count == 1 and request.computed + 1 == len(request.tokens)
            for count, request in zip(counts, running, strict=True)
        )
        self.checked.mixed += not decodes and min(counts) == 1 < max(counts)
        self._forward(running, counts, decodes)
        for request, count in zip(running, counts, strict=True):
            request.computed += count
            if request.computed == len(request.tokens) < request.end:
                token = (7 * len(request.tokens) + request.tokens[-1]) % VOCABULARY
                request.tokens.append(token)
            self._give_back_windows(request)

    def _make_room(self, request: Request, tokens: int) -> None:
        missing = tokens - len(request.slots)
        if missing <= 0:
            return
        new = self._alloc(-(-missing // self.page) * self.page)
        self.rows.write(
            (request.row, slice(len(request.slots), len(request.slots) + len(new))),
            new.to(torch.int32),
        )
        request.slots = torch.cat([request.slots, new])

    def _alloc(self, tokens: int) -> Any:
        if self.page == 1 or not isinstance(self.pool, SWAKVPool):
            slots = self.allocator.alloc(tokens)
        else:
            slots = self.allocator.full_attn_allocator.alloc(tokens)
            windows = self.allocator.swa_attn_allocator.alloc(tokens)
            self.allocator.set_full_to_swa_mapping(slots, windows)
        assert slots is not None, "too few slots for the test"
        return slots

    def _give_back_windows(self, request: Request) -> None:
        """What is behind all windows leaves their pool, as the engine's eviction does."""
        if not isinstance(self.pool, SWAKVPool):
            return
        window = max(layer.window or 0 for layer in self.layers)
        end = max(0, request.computed - window) // self.page * self.page
        if end > request.freed:
            self.allocator.free_swa(request.slots[request.freed : end])
            self.checked.freed += end - request.freed
            request.freed = end

    # --- a batch ---------------------------------------------------------------------------------

    def _forward(self, running: list[Request], counts: list[int], decodes: bool) -> None:
        parts = [
            (request, range(request.computed, request.computed + count))
            for request, count in zip(running, counts, strict=True)
        ]
        batch = self._batch(parts, decodes)
        padding = self._prepare(batch, decodes)
        self._run(self.backend, batch, parts, padding)

    def _run(self, backend: Any, batch: Any, parts: Parts, padding: int) -> None:
        """Calls ``backend`` for each layer, and checks the outputs."""
        sizes = [len(at) for _, at in parts]
        for number, layer in enumerate(self.layers):
            q, k, v = (
                torch.cat(
                    [self._values(number, which, *part) for part in parts]
                    + [torch.zeros(padding, heads, layer.d, dtype=self.dtype)]
                )
                for which, heads in enumerate((layer.heads, layer.kv_heads, layer.kv_heads))
            )
            options = {} if self.sinks[number] is None else {"sinks": self.sinks[number]}
            output = backend.forward(q.flatten(1), k, v, self.modules[number], batch, **options)
            assert output.shape == (len(q), layer.heads * layer.d)
            rows = output.view(q.shape).split([*sizes, padding])
            for part, row in zip(parts, rows[:-1], strict=True):
                self._check(number, *part, row)

    def _batch(self, parts: Parts, decodes: bool) -> Any:
        lens = torch.tensor([at.stop for _, at in parts])
        counts = [len(at) for _, at in parts]
        extends: dict[str, Any] = {}
        if not decodes:
            extends = {
                "extend_num_tokens": sum(counts),
                "extend_seq_lens": torch.tensor(counts, dtype=torch.int32),
                "extend_seq_lens_cpu": counts,
                "extend_prefix_lens": torch.tensor([at.start for _, at in parts]),
                "extend_prefix_lens_cpu": [at.start for _, at in parts],
            }
        extend = ForwardMode.MIXED if 1 in counts else ForwardMode.EXTEND
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if decodes else extend,
            batch_size=len(parts),
            input_ids=torch.tensor([request.tokens[p] for request, at in parts for p in at]),
            req_pool_indices=torch.tensor([request.row for request, _ in parts]),
            seq_lens=lens,
            out_cache_loc=torch.cat([it.slots[at.start : at.stop] for it, at in parts]),
            seq_lens_sum=int(lens.sum()),
            seq_lens_cpu=lens.clone(),
            positions=torch.tensor([p for _, at in parts for p in at]),
            **extends,
        )
        self._plan(batch)
        return batch

    def _plan(self, batch: Any) -> None:
        translator = getattr(self.runner, "kv_index_translator", None)
        if hasattr(translator, "bind_own_plan"):  # from 0.5.22 on
            translator.bind_own_plan(batch)

    def _prepare(self, batch: Any, decodes: bool) -> int:
        """Makes the step's metadata. For a graph's replay the batch is padded to a captured size,
        with requests of one key in the unused row and slot; returns their number."""
        if not (self.graphs and decodes):
            self.backend.init_forward_metadata(batch)
            return 0
        requests, padded = batch.batch_size, self.rows.size
        more = padded - requests
        view = SimpleNamespace(**vars(batch))
        view.batch_size = padded
        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        view.seq_lens = torch.cat([batch.seq_lens, torch.full((more,), fill)])
        view.seq_lens_cpu = view.seq_lens.clone()
        view.req_pool_indices = torch.cat([batch.req_pool_indices, torch.zeros(more).long()])
        self.backend.init_forward_metadata_out_graph(view, in_capture=True)
        captured = self.backend.forward_metadata
        self.backend.init_forward_metadata_out_graph(view)
        self.backend.init_forward_metadata_in_graph(view)
        replayed = self.backend.forward_metadata
        for name, tensor in vars(captured).items():
            if isinstance(tensor, torch.Tensor):
                assert tensor.data_ptr() == getattr(replayed, name).data_ptr(), name
        # What a graph has captured is what it reads.
        self.backend.forward_metadata = captured
        batch.out_cache_loc = torch.cat([batch.out_cache_loc, torch.zeros(more).long()])
        self.checked.graphs += 1
        return more

    # --- what is expected ------------------------------------------------------------------------

    def _values(self, number: int, which: int, request: Request, positions: range) -> Any:
        """Rows of q (0), k (1) or v (2) of a request."""
        tokens = torch.tensor([request.tokens[p] for p in positions])
        turned = torch.cos(torch.tensor(positions)[:, None, None] * 0.37 + which)
        return (self.tables[number][which][tokens] * (1 + 0.5 * turned)).to(self.dtype)

    def _stored(self, number: int, which: int, request: Request, positions: range) -> Any:
        """Rows of k or v as the cache's elements stand for them."""
        values = self._values(number, which, request, positions)
        if self.cache == self.dtype:
            return values.double()
        scale, most = float(self.scales[which - 1]), torch.finfo(self.cache).max
        elements = (values.float() / scale).clamp(-most, most).to(self.cache)
        return elements.double() * scale

    def _check(self, number: int, request: Request, positions: range, output: Any) -> None:
        layer = self.layers[number]
        q = self._values(number, 0, request, positions).double()
        keys = range(positions.stop)
        k, v = (self._stored(number, it, request, keys) for it in (1, 2))
        k, v = (it.repeat_interleave(layer.heads // layer.kv_heads, dim=1) for it in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * layer.d**-0.5
        if layer.softcap:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        distance = torch.tensor(positions)[:, None] - torch.arange(positions.stop)
        hidden = distance >= (layer.window or 1 << 30)
        if layer.attn_type == AttentionType.DECODER:
            hidden |= distance < 0
        else:
            hidden |= -distance >= (layer.window or 1 << 30)
        scores.masked_fill_(hidden, -torch.inf)
        if layer.sinks:
            sinks = self.sinks[number].double()[:, None, None].expand(-1, len(positions), 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(dim=-1)[..., : positions.stop]
        expected = torch.einsum("hqk,khd->qhd", weights, v)
        error = (output.double() - expected).abs().max().item()
        self.checked.largest_error = max(self.checked.largest_error, error)
        for position, row in zip(positions, output.clone(), strict=True):
            self.checked.outputs[number, request.name, position] = row


def module_of(layer: Layer, number: int) -> RadixAttention:
    return RadixAttention(
        layer.heads,
        layer.d,
        layer.d**-0.5,
        layer.kv_heads,
        number,
        logit_cap=layer.softcap,
        # The engine counts the keys before the query's own.
        sliding_window_size=-1 if layer.window is None else layer.window - 1,
        attn_type=layer.attn_type,
    )


def _fill_with_nan(pool: Any) -> None:
    """Slots that nothing was written to are NaN, except the unused page that padding reads."""
    parts = [getattr(pool, name, None) for name in ("full_kv_pool", "swa_kv_pool")]
    for each in [part for part in parts if part is not None] or [pool]:
        latent = isinstance(each, MLATokenToKVPool)
        for buffer in each.kv_buffer if latent else (*each.k_buffer, *each.v_buffer):
            is_paged = not latent and each.kv_cache_layout == "hnd"
            unused = 1 if is_paged else each.page_size
            # 8-bit floats are stored as bytes.
            buffer[unused:] = torch.nan if buffer.is_floating_point() else 0x7F


def prompts(seed: int, count: int, shared: int, longest: int) -> dict[str, list[int]]:
    """Prompts of random lengths that begin with the same tokens."""
    rng = np.random.default_rng(seed)
    first = rng.integers(VOCABULARY, size=shared).tolist()
    return {
        f"request {number}": first
        + rng.integers(VOCABULARY, size=rng.integers(1, longest)).tolist()
        for number in range(count)
    }
