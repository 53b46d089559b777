"""Cross attention, as in Whisper: vLLM's builder and layer over a cache of an encoder's keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import CrossAttentionSpec
from vllm_driver import LAYER, config_of

from flashsmith.integrations.vllm.backend import FlashsmithBackend
from flashsmith.runtime import libraries

HEADS, D, BLOCK, BLOCKS = 4, 64, 16, 12
TOLERANCE = 0.02
# Of each request: its blocks, and how many keys the encoder gave it.
BLOCK_TABLE = torch.tensor([[3, 7, 5], [2, 9, 0], [8, 1, 11]], dtype=torch.int32)
ENCODED = [37, 20, 48]
LAYER_OF_ENGINE = SimpleNamespace(kv_sharing_target_layer_name=None)


class CrossLayer:
    """A layer with the engine's builder, and a cache that is NaN where nothing was written."""

    def __init__(self, folder: Path) -> None:
        config = config_of(folder, tokens=64, requests=4)
        backend = create_cross_attention_backend(FlashsmithBackend)
        with set_current_vllm_config(config):
            self.impl = backend.get_impl_cls()(
                *(HEADS, D, D**-0.5, HEADS), attn_type=AttentionType.ENCODER_DECODER
            )
        context = config.compilation_config.static_forward_context
        context[LAYER] = SimpleNamespace(impl=self.impl)
        sizes: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": D}
        spec = CrossAttentionSpec(**sizes, dtype=torch.bfloat16)
        self.builder = backend.get_builder_cls()(spec, [LAYER], config, torch.device("cpu"))
        self.cache = torch.full((BLOCKS, HEADS, BLOCK, 2 * D), torch.nan).bfloat16()
        generator = torch.Generator().manual_seed(3)
        self.encoded = [
            torch.randn(2, keys, HEADS, D, generator=generator).bfloat16() for keys in ENCODED
        ]

    def step(self, requests: list[int], counts: list[int], computed: list[int]) -> float:
        """A step of new tokens of some requests, after which the largest error is returned."""
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        lens = torch.tensor([a + b for a, b in zip(counts, computed, strict=True)])
        keys = torch.tensor([ENCODED[it] for it in requests], dtype=torch.int32)
        step = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lens.int(),
            num_reqs=len(requests),
            num_actual_tokens=sum(counts),
            max_query_len=max(counts),
            max_seq_len=int(lens.max()),
            block_table_tensor=BLOCK_TABLE[requests],
            slot_mapping=torch.full((sum(counts),), -1),
            encoder_seq_lens=keys,
            encoder_seq_lens_cpu=keys.numpy(),
            seq_lens_cpu_upper_bound=lens.int(),
        )
        # The encoder's keys are given in the step of a request's first tokens.
        new = [it for it, before in zip(requests, computed, strict=True) if not before]
        k, v = torch.cat([self.encoded[it] for it in new], dim=1) if new else (None, None)
        q = torch.randn(sum(counts) + 3, HEADS, D).bfloat16()
        output = torch.full(q.shape, torch.nan).bfloat16()
        self.impl.forward(LAYER_OF_ENGINE, q, k, v, self.cache, self.builder.build(0, step), output)
        assert output[sum(counts) :].isnan().all(), "padding was written"
        parts = zip(requests, q.split([*counts, 3]), output.split([*counts, 3]), strict=False)
        return max(self._error(*part) for part in parts)

    def _error(self, request: int, q: Any, output: Any) -> float:
        k, v = self.encoded[request].double()
        weights = (torch.einsum("qhd,khd->hqk", q.double(), k) * D**-0.5).softmax(dim=-1)
        expected = torch.einsum("hqk,khd->qhd", weights, v)
        return (output.double() - expected).abs().max().item()


def test_queries_see_all_keys_of_their_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = CrossLayer(tmp_path)
    built: list[Any] = []
    monkeypatch.setattr(type(libraries.loaded_kernels), "_build", lambda _, key: built.append(key))
    assert layer.step([0, 1], [4, 7], [0, 0]) < TOLERANCE
    assert layer.step([0, 1], [1, 1], [4, 7]) < TOLERANCE
    # A new request beside those that decode.
    assert layer.step([0, 1, 2], [1, 1, 5], [5, 8, 0]) < TOLERANCE
    assert built == []


def test_a_wrong_number_of_keys_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = CrossLayer(tmp_path)
    build = FlashsmithBackend.get_builder_cls().build

    def one_less(*given: Any) -> Any:
        step = build(*given)
        return replace(step, seq_lens=step.seq_lens - 1)

    monkeypatch.setattr(FlashsmithBackend.get_builder_cls(), "build", one_less)
    assert layer.step([0, 1], [4, 7], [0, 0]) > TOLERANCE
