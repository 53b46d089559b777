"""FlashsmithBackend: declares to vLLM what the backend supports, and makes the metadata of a
step."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import vllm.envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import CrossAttentionSpec

from flashsmith.families import DeviceSpec, device_spec
from flashsmith.integrations.layer_kernels import build_kernels, unserved_head
from flashsmith.integrations.vllm.cache_dtypes import SERVED_CACHES, unserved_cache
from flashsmith.integrations.vllm.context_parallel import LocalKeys
from flashsmith.integrations.vllm.impl import (
    ENCODERS,
    SERVED_TYPES,
    FlashsmithImpl,
    unserved_over_ranks,
)
from flashsmith.integrations.vllm.metadata import StepMetadata
from flashsmith.integrations.vllm.releases import CacheLayouts, backend_name, ranks_of_cache
from flashsmith.operations import DEFAULT

_LARGEST_HEAD, _HEAD_STEP = 512, 8


class FlashsmithBackend(CacheLayouts, AttentionBackend):
    """Computes prefill, chunked prefill, decode and mixes of these in one
    ``flashsmith.attention_with_cache`` call. The class's declarations exclude unsupported features,
    so that the engine reports the reason."""

    accept_output_buffer: ClassVar[bool] = True
    supported_kv_cache_dtypes: ClassVar[list[Any]] = SERVED_CACHES
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return backend_name()

    @staticmethod
    def get_impl_cls() -> type[FlashsmithImpl]:
        return FlashsmithImpl

    @staticmethod
    def get_builder_cls() -> type[FlashsmithMetadataBuilder]:
        return FlashsmithMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 0 < head_size <= _LARGEST_HEAD and head_size % _HEAD_STEP == 0

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in SERVED_TYPES

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool((8, 0) <= (capability.major, capability.minor) < (10, 0))

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        *others: Any,
        **named: Any,
    ) -> str | None:
        capability = named.get("device_capability", others[-1] if others else None)
        canonical = bool(vllm.envs.VLLM_BATCH_INVARIANT)
        reason = unserved_head(head_size, cls._device_of(capability), canonical=canonical)
        return reason or unserved_cache(head_size, dtype, kv_cache_dtype)

    @classmethod
    def validate_configuration(cls, **asked: Any) -> list[str]:
        """Returns the reasons why a configuration is not supported. If the engine has none, there
        may still be one against attention to a step's own keys. Encoders need this attention, and
        so do all layers if the cache is distributed over ranks."""
        reasons: list[str] = super().validate_configuration(**asked)
        # Older releases do not say here that the cache is distributed. In these releases the
        # kernels() of a layer raises the error.
        over_ranks = asked.get("use_dcp", False)
        if reasons or not (asked["attn_type"] in ENCODERS or over_ranks):
            return reasons
        device = cls._device_of(asked["device_capability"])
        canonical = bool(vllm.envs.VLLM_BATCH_INVARIANT)
        d = asked["head_size"]
        reason = unserved_head(d, device, canonical=canonical, operation=DEFAULT)
        if over_ranks and not reason:
            has_window = asked.get("has_sliding_window", False)
            reason = unserved_over_ranks(has_window, asked["attn_type"])
        return [reason] if reason else []

    @classmethod
    def _device_of(cls, capability: Any) -> DeviceSpec | None:
        """Returns the spec of a GPU of this capability; None if the capability is unknown or has no
        kernels."""
        if capability is None or not cls.supports_compute_capability(capability):
            return None
        return device_spec(10 * capability.major + capability.minor)


class FlashsmithMetadataBuilder(AttentionMetadataBuilder["StepMetadata"]):
    """Makes a step's metadata from the engine's tensors, without a copy and without waiting."""

    # Lengths and block tables are read on the device, so one graph serves any batch of its size.
    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
        layers = vllm_config.compilation_config.static_forward_context
        found = [layers[name].impl for name in layer_names if name in layers]
        impls = [impl for impl in found if isinstance(impl, FlashsmithImpl)]
        shared: dict[Any, Any] = {}
        for impl in impls:
            alike = shared.setdefault(impl.kind, impl)
            impl.attention, impl.writes = alike.attention, alike.writes
        ranks, rank = ranks_of_cache(kv_cache_spec)
        self._local_keys = LocalKeys(vllm_config, ranks, rank, device) if ranks > 1 else None
        # The steps of a draft model may be replayed with lengths that differ from those that
        # LocalKeys counted in build().
        self.supports_draft_decode_metadata_update = ranks == 1
        page, tokens = kv_cache_spec.block_size, scheduler.max_num_batched_tokens
        requests, keys = scheduler.max_num_seqs, model.max_model_len
        if chunk := self._chunk(kv_cache_spec):
            # A request's tokens are in at most two chunks more than they fill.
            requests, keys = 2 * requests + tokens // chunk, min(keys, chunk)
        elif isinstance(kv_cache_spec, CrossAttentionSpec):
            keys = scheduler.max_num_encoder_input_tokens
        keys = -(-keys // page) * page
        causal = not getattr(kv_cache_spec, "non_causal", False)
        build_kernels(
            [
                it
                for impl in impls
                for it in impl.kernels(page, model.dtype, keys, device, causal, ranks)
            ],
            requests,
            tokens,
            with_merges=ranks > 1,
        )

    def _chunk(self, kv_cache_spec: Any) -> int:
        """Returns the size of the chunks within which tokens attend to each other, as in Llama 4;
        0 without chunks. Layers with chunks have a subclass of this builder, which the engine makes
        and which turns each chunk into a request. The spec alone does not tell, because layers with
        and without chunks may share one."""
        if type(self).build is FlashsmithMetadataBuilder.build:
            return 0
        return int(getattr(kv_cache_spec, "attention_chunk_size", None) or 0)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> StepMetadata:
        step = common_attn_metadata
        return StepMetadata(
            step.num_actual_tokens,
            max(1, int(step.max_query_len)),
            step.query_start_loc,
            step.seq_lens,
            step.block_table_tensor,
            step.slot_mapping,
            step.causal,
            None if self._local_keys is None else self._local_keys.count(step),
            self._local_keys is not None,
        )

    def update_block_table(
        self, metadata: StepMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> StepMetadata:
        return metadata.with_block_table(blk_table, slot_mapping)

    def update_draft_decode_metadata(self, metadata: StepMetadata) -> None:
        """Does nothing, because all fields that change are tensors of the engine."""

    def use_cascade_attention(self, *_: Any, **__: Any) -> bool:
        return False
