"""FlashsmithBackend: computes the attention of SGLang's layers over the engine's pool of tokens."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_parallel

import flashsmith
from flashsmith.integrations.layer_kernels import build_kernels, device_of, unserved_head
from flashsmith.integrations.sglang.layers import LayerAttention, unserved_layer
from flashsmith.integrations.sglang.releases import (
    cache_name,
    draft_settings,
    is_deterministic,
    most_tokens,
    speculative_settings,
    write_location,
    written_slots,
)
from flashsmith.integrations.sglang.steps import GraphSteps, PageTables, Step, eager_step
from flashsmith.operations.decode import FREE, INVARIANT
from flashsmith.semantics.cache_format import CacheFormat

_MODEL_DTYPES = (torch.float16, torch.bfloat16)
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
# The engine's names for caches whose elements are in _EIGHT_BITS and that have no scales per block.
_NAMES_OF_8_BITS = ("auto", "fp8_e4m3", "fp8_e5m2")
# The algorithms of speculative decoding whose drafts are chains when speculative_eagle_topk is 1.
_CHAINS = ("EAGLE", "EAGLE3", "STANDALONE")


class FlashsmithBackend(AttentionBackend):
    """Computes prefill, chunked prefill, decode and mixes of these in one
    ``flashsmith.attention_with_cache`` call. With --enable-deterministic-inference the bits are
    canonical (docs/bits.md).

    Raises NotImplementedError for unsupported features, when the engine starts.
    """

    def __init__(self, model_runner: Any, *, earlier: int = 0) -> None:
        """``earlier``: for a decode step of a draft model, the number of drafted tokens that each
        request has. The engine's lengths do not include them."""
        super().__init__()
        self.earlier = earlier
        topk, self.drafts = draft_settings(model_runner)
        self.model_runner = model_runner
        self.page = int(model_runner.page_size or 1)
        dtype = str(model_runner.kv_cache_dtype).removeprefix("torch.")
        self.cache_format = CacheFormat.of_dtype(dtype)
        self.tables = PageTables(model_runner, self.page)
        _refuse_unserved(model_runner, topk, self.tables)
        canonical = is_deterministic(model_runner)
        self.split, self.bits = (INVARIANT, "canonical") if canonical else (FREE, "free")
        self.forward_metadata: Step | None = None
        self._graphs: GraphSteps | None = None
        self._layers = {
            layer: self._attention_of(layer)
            for layer in model_runner.model.modules()
            if isinstance(layer, RadixAttention)
        }
        build_kernels(
            [it.kernels for it in self._layers.values()],
            model_runner.req_to_token_pool.size,
            most_tokens(model_runner),
            with_writes=self.cache_format.is_8bit,
        )

    def _attention_of(self, layer: RadixAttention) -> Any:
        slots = self.tables.slots
        device = device_of(slots.device.type, slots.device.index or 0)
        problem = unserved_layer(layer, self.cache_format) or unserved_head(
            layer.head_dim, device, canonical=self.bits == "canonical"
        )
        if problem:
            raise NotImplementedError(f"flashsmith: {problem}; choose another attention backend")
        return LayerAttention.of(
            layer,
            dtype=self.model_runner.dtype,
            page=self.page,
            keys=self.tables.most_pages * self.page,
            split=self.split,
            bits=self.bits,
            cache=self.cache_format,
            device=device,
        )

    # --- a step's metadata -----------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.forward_metadata = eager_step(
            self.tables, self.model_runner, forward_batch, self.drafts, self.earlier
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._graphs = GraphSteps(self.tables, max_bs, max_num_tokens, self.drafts, self.earlier)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fills the tensors that a captured graph reads. Raises NotImplementedError unless the
        graph is for a decode step or a verification step."""
        mode = forward_batch.forward_mode
        if not (mode.is_decode_or_idle() or mode.is_target_verify()):
            raise NotImplementedError(
                "flashsmith: whole-forward graphs of prefills are not served; choose another "
                "prefill backend of --cuda-graph-config, such as breakable"
            )
        if self._graphs is None:
            raise RuntimeError("flashsmith: init_cuda_graph_state was not called")
        self.forward_metadata = self._graphs.step(self.model_runner, forward_batch, in_capture)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    # --- attention -------------------------------------------------------------------------------

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        """Computes attention for a step's queries; q and the result are (tokens, heads * d). If
        keys and values are given, they are first written to the cache."""
        sinks = options.pop("sinks", None)
        step, attention = self._ready(layer, options)
        in_window_pool = self.tables.window_pool is not None and attention.window is not None
        if save_kv_cache and k is not None:
            self._write(layer, k, v, forward_batch, in_window_pool)
        q = q.view(-1, attention.heads, attention.d)
        output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        flashsmith.attention_with_cache(
            q[: step.rows],
            *self._caches(layer),
            cache_lens=step.lens,
            page_table=step.window_table if in_window_pool else step.table,
            cu_seqlens_q=step.starts,
            max_seqlen_q=step.longest,
            causal=attention.causal,
            window=attention.window_limits,
            softcap=attention.softcap,
            scale=attention.scale,
            # No copy is kept, because weights may be loaded again while graphs exist.
            sinks=None if sinks is None else sinks.float(),
            **self._scales(layer),
            split=self.split,
            bits=self.bits,
            out=output[: step.rows],
            config=attention.kernels.config_for(step.requests, step.longest),
        )
        return output.view(-1, attention.heads * attention.d)

    def forward_decode(self, *tensors: Any, **options: Any) -> torch.Tensor:
        """A decode step is an extension of each request by one token."""
        return self.forward_extend(*tensors, **options)

    def _ready(self, layer: RadixAttention, options: dict[str, Any]) -> tuple[Step, Any]:
        """Returns the step's metadata, and the layer's attention. Raises NotImplementedError if any
        options are given, because none are served."""
        given = sorted(name for name, it in options.items() if it is not None and it is not False)
        if given:
            raise NotImplementedError(
                f"flashsmith: {', '.join(given)} of layer {layer.layer_id} not served; choose "
                "another attention backend"
            )
        step, attention = self.forward_metadata, self._layers.get(layer)
        if step is None:
            raise RuntimeError("flashsmith: init_forward_metadata was not called before a layer")
        if attention is None:
            attention = self._layers[layer] = self._attention_of(layer)
        return step, attention

    def _write(
        self,
        layer: RadixAttention,
        k: torch.Tensor,
        v: Any,
        forward_batch: Any,
        in_window_pool: bool,
    ) -> None:
        """Writes a step's keys and values into the layer's slots.

        8-bit floats are rounded once, from the fp32 quotient, and saturate. The engine's own pools
        divide k and v in place, in 16 bits.
        """
        window_slots = None if self.forward_metadata is None else self.forward_metadata.window_slots
        location = write_location(forward_batch, window_slots)
        if not self.cache_format.is_8bit:
            pool = self.model_runner.token_to_kv_pool
            pool.set_kv_buffer(layer, location, k, v, layer.k_scale, layer.v_scale)
            return
        # The slots of a draft model's step are a column of the slots of all its steps.
        slots = written_slots(location, in_window_pool).contiguous()
        flashsmith.write_slots(k, v, *self._caches(layer), slots, **self._scales(layer))

    def _scales(self, layer: RadixAttention) -> dict[str, Any]:
        """Returns the scales of the layer's cached keys and values, from the checkpoint. Each is a
        number or a tensor with one number; None means 1."""
        if not self.cache_format.is_8bit:
            return {}
        return {"k_scale": layer.k_scale, "v_scale": layer.v_scale}

    def _caches(self, layer: RadixAttention) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.model_runner.token_to_kv_pool
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        return self._pages(keys), self._pages(values)

    def _pages(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns a view (pages, tokens of a page, heads, d) of a pool's buffer. The buffer is
        (slots, heads, d) or (pages, heads, tokens of a page, d)."""
        if buffer.dim() == 4:
            return buffer.transpose(1, 2)
        pages = buffer.shape[0] // self.page
        return buffer[: pages * self.page].unflatten(0, (pages, self.page))


def _unserved_draft(model_runner: Any, window_pool: Any) -> str:
    """Returns why a server's draft model cannot be served, or ''. ``window_pool``: the pool that
    only the draft model's layers with a window use, or None."""
    settings = speculative_settings(model_runner)
    if settings.enable_multi_layer_eagle:
        return "a draft model with a layer for each step (enable_multi_layer_eagle)"
    if window_pool is not None:
        return "a draft model whose layers with a window have a pool of their own"
    layers = (it for it in model_runner.model.modules() if isinstance(it, RadixAttention))
    if settings.speculative_draft_window_size and any(it.sliding_window_size < 0 for it in layers):
        return "speculative_draft_window_size for a draft model whose layers have no window"
    return ""


def _refuse_unserved(model_runner: Any, topk: int, tables: PageTables) -> None:
    """Raises NotImplementedError, with the reason, if flashsmith does not support the server's
    settings.

    ``topk``: the number of branches of a draft at each token.
    """
    config, pool = model_runner.model_config, model_runner.token_to_kv_pool
    parallel, algorithm = get_parallel(), model_runner.spec_algorithm
    is_speculative = not algorithm.is_none()
    if (
        is_speculative
        and model_runner.is_draft_worker
        and (problem := _unserved_draft(model_runner, tables.window_pool))
    ):
        raise NotImplementedError(
            f"flashsmith: {problem} not served; set --speculative-draft-attention-backend to a "
            "backend of SGLang"
        )
    dtype, cached = model_runner.dtype, model_runner.kv_cache_dtype
    name = cache_name(model_runner)
    is_served = cached == dtype or (cached in _EIGHT_BITS and name in _NAMES_OF_8_BITS)
    reasons = {
        f"speculative decoding by {algorithm.name}": is_speculative
        and algorithm.name not in _CHAINS,
        f"speculative decoding with trees of drafts (speculative_eagle_topk={topk}; 1 gives chains,"
        " which are served),": is_speculative and topk > 1,
        "cross attention": config.is_encoder_decoder,
        "attention in chunks of the context": config.is_local_attention_model,
        "context parallelism": parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1,
        f"kv_cache_dtype {cached} ({name}) with a model of {dtype}": not is_served
        or dtype not in _MODEL_DTYPES,
        f"a cache of layout {getattr(pool, 'kv_cache_layout', 'nhd')}": getattr(
            pool, "kv_cache_layout", "nhd"
        )
        not in ("nhd", "hnd"),
    }
    if unserved := [reason for reason, is_true in reasons.items() if is_true]:
        raise NotImplementedError(
            f"flashsmith: {', '.join(unserved)} not served; choose another attention backend"
        )
