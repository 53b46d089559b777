"""The backend FLASHSMITH_MLA, for models with multi-head latent attention: vLLM 0.32 and later.

Decoding runs on ``flashsmith.attention_with_cache`` over the engine's latent cache. Prompts are
computed by the engine's own code, with the projections not absorbed into the queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf

from flashsmith.families.latent import PAIRS
from flashsmith.integrations.layer_kernels import (
    LayerKernels,
    build_kernels,
    device_of,
    latent_problem,
)
from flashsmith.integrations.traceable import attention_with_cache
from flashsmith.integrations.vllm.cache_dtypes import format_of, in_own_dtype
from flashsmith.integrations.vllm.releases import LATENT_NAME
from flashsmith.operations.decode import INVARIANT


class FlashsmithLatentBackend(MLACommonBackend):
    """Declares the supported features; for all others the engine reports the reason."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        *("auto", "float16", "bfloat16"),
        # For prompts, the engine reads every cache of 8-bit floats as e4m3, whichever type the
        # cache's name states.
        *("fp8", "fp8_e4m3"),
    ]

    @staticmethod
    def get_name() -> str:
        return LATENT_NAME

    @staticmethod
    def get_impl_cls() -> type[FlashsmithLatentImpl]:
        return FlashsmithLatentImpl

    @staticmethod
    def get_builder_cls() -> type[FlashsmithLatentBuilder]:
        return FlashsmithLatentBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [d for d, _ in PAIRS]

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool((8, 0) <= (capability.major, capability.minor) < (10, 0))


@dataclass
class LatentDecodeStep(MLACommonDecodeMetadata):
    """Those requests of a step that decode, and the offsets of their tokens."""

    query_start_loc: torch.Tensor
    most_queries: int  # of a request


class FlashsmithLatentBuilder(MLACommonMetadataBuilder[MLACommonMetadata[LatentDecodeStep]]):
    """The engine's builder; decoding requests may differ in their number of tokens."""

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        *more: Any,
        **options: Any,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, *more, **options)
        model, page = vllm_config.model_config, kv_cache_spec.block_size
        keys = -(-model.max_model_len // page) * page
        layers = vllm_config.compilation_config.static_forward_context
        impls = [layers[name].impl for name in layer_names]
        build_kernels(
            [impl.kernels(page, model.dtype, keys, device) for impl in impls],
            vllm_config.scheduler_config.max_num_seqs,
            self.reorder_batch_threshold,
            with_writes=False,  # the engine writes latent rows
        )

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        *,
        query_start_loc_device: torch.Tensor,
        dcp_tot_seq_lens_device: torch.Tensor | None,
        **_: Any,
    ) -> LatentDecodeStep:
        return LatentDecodeStep(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_start_loc=query_start_loc_device,
            # The engine treats requests with more tokens as prompts. A graph may be replayed with
            # requests of up to this number of tokens.
            most_queries=self.reorder_batch_threshold,
        )


class FlashsmithLatentImpl(MLACommonImpl[MLACommonMetadata[LatentDecodeStep]]):
    """Computes the attention of one layer, in which absorbed queries attend to latent rows.

    With decode context parallelism, a rank has some of a request's keys, and the queries of all
    heads. The engine merges the outputs of all ranks, weighted by the LSE.
    """

    can_return_lse_for_decode = True
    supports_dcp = True

    def __init__(self, **layer: Any) -> None:
        super().__init__(**layer)
        for name in ("alibi_slopes", "sliding_window", "logits_soft_cap"):
            if layer[name]:
                raise NotImplementedError(f"{LATENT_NAME}: {name}={layer[name]} is not served")
        kind = layer["attn_type"]
        if kind != AttentionType.DECODER:
            raise NotImplementedError(f"{LATENT_NAME}: attn_type={kind} is not served")
        self.supports_quant_query_input = False
        self.cache_format = format_of(self.kv_cache_dtype)
        self._kernels: dict[tuple[int, torch.dtype], LayerKernels] = {}

    def kernels(
        self, page: int, dtype: torch.dtype, keys: int, device: torch.device
    ) -> LayerKernels:
        """Returns the layer's kernels over pages of this size, where a request has room for
        ``keys`` keys on all ranks together."""
        found = self._kernels.get((page, dtype))
        if found is None:
            problem = latent_problem(
                heads=self.num_heads * self.dcp_world_size,
                d=self.head_size,
                v_width=self.kv_lora_rank,
                dtype=dtype,
                page=page,
                keys=-(-keys // (page * self.dcp_world_size)) * page,
                cache=self.cache_format,
            )
            gpu = device_of(device.type, device.index or 0)
            found = self._kernels[page, dtype] = LayerKernels(problem, INVARIANT, gpu)
        return found

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata[LatentDecodeStep],
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the latent outputs of decoding tokens, (tokens, heads, kv_lora_rank), and the
        LSE, (tokens, heads), if the engine merges the outputs of several ranks."""
        step = attn_metadata.decode
        assert step is not None
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        page, (requests, pages) = kv_c_and_k_pe_cache.shape[1], step.block_table.shape
        keys = page * pages * self.dcp_world_size
        kernels = self.kernels(page, queries.dtype, keys, queries.device)
        found = attention_with_cache(
            queries,
            in_own_dtype(kv_c_and_k_pe_cache, self.kv_cache_dtype).unsqueeze(2),
            v_width=self.kv_lora_rank,
            cache_lens=step.seq_lens,
            page_table=step.block_table,
            cu_seqlens_q=step.query_start_loc,
            max_seqlen_q=step.most_queries,
            scale=self.scale,
            # When the engine writes rows, it divides them, all columns included, by this scale.
            k_scale=layer._k_scale if self.cache_format else None,
            return_lse=self.need_to_return_lse_for_decode,
            config=kernels.config_for(requests, step.most_queries),
        )
        if not self.need_to_return_lse_for_decode:
            return found, None
        o, lse = found
        return o, lse.transpose(0, 1).contiguous()
