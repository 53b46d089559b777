"""Latent attention (MLA) under vLLM: its layer and its metadata builder on host tensors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm_driver import config_of

from flashsmith.integrations import vllm as plugin
from flashsmith.integrations.vllm.latent_backend import FlashsmithLatentBackend
from flashsmith.integrations.vllm.releases import LATENT_NAME
from flashsmith.runtime import libraries

HEADS, RANK, ROPE = 4, 256, 64
SCALE = 192**-0.5
LAYER = "model.layers.0.self_attn.attn"
WIDTHS: dict[str, Any] = {
    "q_lora_rank": None,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": 128,
}


def layer_of(config: Any, **change: Any) -> Any:
    """The backend's layer, as the engine makes one."""
    asked: dict[str, Any] = {
        "num_heads": HEADS,
        "head_size": RANK + ROPE,
        "scale": SCALE,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": AttentionType.DECODER,
        "kv_sharing_target_layer_name": None,
        "qk_head_dim": 128 + ROPE,
        "kv_b_proj": None,
    }
    with set_current_vllm_config(config):
        return FlashsmithLatentBackend.get_impl_cls()(**(asked | WIDTHS | change))


def builder_of(config: Any, impl: Any) -> Any:
    prefill = SimpleNamespace(clone=lambda: SimpleNamespace(get_name=lambda: "none"))
    layer = SimpleNamespace(impl=impl, prefill_backend=prefill, **WIDTHS)
    config.compilation_config.static_forward_context[LAYER] = layer
    spec = SimpleNamespace(block_size=16, dtype=torch.bfloat16)
    builder = FlashsmithLatentBackend.get_builder_cls()
    with set_current_vllm_config(config):
        return builder(spec, [LAYER], config, torch.device("cpu"))


def step_of(lens: list[int], queries: list[int], table: Any) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        num_reqs=len(lens),
        num_actual_tokens=sum(queries),
        max_query_len=max(queries),
        max_seq_len=max(lens),
        block_table_tensor=table,
        slot_mapping=torch.zeros(sum(queries), dtype=torch.int64),
    )


@pytest.mark.parametrize("queries", [[1, 1, 1], [3, 1, 2]])
def test_a_step_that_decodes_is_attention_over_the_latent_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queries: list[int]
) -> None:
    config, lens = config_of(tmp_path), [70, 3, 33]
    monkeypatch.setattr(type(config.model_config), "get_head_size", lambda _: RANK + ROPE)
    # As with a draft model
    builder_class = FlashsmithLatentBackend.get_builder_cls()
    monkeypatch.setattr(builder_class, "reorder_batch_threshold", max(queries))
    impl = layer_of(config)
    builder = builder_of(config, impl)
    built: list[Any] = []
    monkeypatch.setattr(type(libraries.loaded_kernels), "_build", lambda _, key: built.append(key))
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(queries), HEADS, RANK + ROPE, generator=generator).bfloat16()
    cache = torch.randn(20, 16, RANK + ROPE, generator=generator).bfloat16()
    table = torch.randperm(18, generator=generator).int().view(3, 6)
    metadata = builder.build(0, step_of(lens, queries, table))
    assert (metadata.num_decodes, metadata.num_prefills) == (3, 0)
    o, lse = impl.forward_mqa((q[..., :RANK], q[..., RANK:]), cache, metadata, None)
    assert lse is None
    assert built == []
    assert o.shape == (sum(queries), HEADS, RANK)
    first = 0
    for pages, length, count in zip(table.tolist(), lens, queries, strict=True):
        rows = cache[pages].reshape(-1, RANK + ROPE)[:length].double()
        for i in range(count):
            seen = rows[: length - count + i + 1]
            weights = (q[first + i].double() @ seen.T * SCALE).softmax(-1)
            assert (o[first + i] - weights @ seen[:, :RANK]).abs().max() < 1e-2
        first += count


def test_rows_of_8_bit_floats_have_the_layers_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the cache comes as bytes, or as the engine's view of them."""
    config, lens = config_of(tmp_path), [70, 3, 33]
    monkeypatch.setattr(type(config.model_config), "get_head_size", lambda _: RANK + ROPE)
    impl = layer_of(config, kv_cache_dtype="fp8")
    builder = builder_of(config, impl)
    built: list[Any] = []
    monkeypatch.setattr(type(libraries.loaded_kernels), "_build", lambda _, key: built.append(key))
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, HEADS, RANK + ROPE, generator=generator).bfloat16()
    rows = torch.randn(20, 16, RANK + ROPE, generator=generator)
    layer = SimpleNamespace(_k_scale=torch.tensor(0.02))
    codes = (rows / layer._k_scale).to(torch.float8_e4m3fn)
    table = torch.randperm(18, generator=generator).int().view(3, 6)
    metadata = builder.build(0, step_of(lens, [1, 1, 1], table))
    o, _ = impl.forward_mqa(q, codes, metadata, layer)
    assert built == []
    assert torch.equal(o, impl.forward_mqa(q, codes.view(torch.uint8), metadata, layer)[0])
    for i, pages in enumerate(table.tolist()):
        seen = codes[pages].reshape(-1, RANK + ROPE)[: lens[i]].double() * layer._k_scale
        weights = (q[i].double() @ seen.T * SCALE).softmax(-1)
        assert (o[i] - weights @ seen[:, :RANK]).abs().max() < 1e-2


def test_two_ranks_have_parts_of_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode context parallelism: each rank has the queries of all heads, and some requests have no
    key on one of them. What the engine's collective does with outputs and LSE is done here."""
    config, parts = config_of(tmp_path), [[40, 0, 17], [30, 3, 16]]
    monkeypatch.setattr(type(config.model_config), "get_head_size", lambda _: RANK + ROPE)
    impl = layer_of(config)
    impl.dcp_world_size, impl.need_to_return_lse_for_decode = 2, True
    builder = builder_of(config, impl)
    built: list[Any] = []
    monkeypatch.setattr(type(libraries.loaded_kernels), "_build", lambda _, key: built.append(key))
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 2 * HEADS, RANK + ROPE, generator=generator).bfloat16()
    caches = torch.randn(2, 20, 16, RANK + ROPE, generator=generator).bfloat16()
    table = torch.randperm(18, generator=generator).int().view(3, 6)
    outs, lses = [], []
    for cache, lens in zip(caches, parts, strict=True):
        metadata = builder.build(0, step_of(lens, [1, 1, 1], table))
        o, lse = impl.forward_mqa(q, cache, metadata, None)
        assert lse.is_contiguous()
        outs.append(o.double())
        lses.append(lse.double())
    assert lses[0][1].tolist() == [-torch.inf] * 2 * HEADS
    weights = torch.stack(lses).softmax(0)
    found = (torch.stack(outs) * weights[..., None]).sum(0)
    for i, pages in enumerate(table.tolist()):
        rows = torch.cat(
            [
                cache[pages].reshape(-1, RANK + ROPE)[: lens[i]].double()
                for cache, lens in zip(caches, parts, strict=True)
            ]
        )
        right = (q[i].double() @ rows.T * SCALE).softmax(-1) @ rows[:, :RANK]
        assert (found[i] - right).abs().max() < 1e-2
    assert built == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sliding_window": 7}, "sliding_window=7 is not served"),
        ({"logits_soft_cap": 3.0}, "logits_soft_cap=3.0 is not served"),
        ({"attn_type": AttentionType.ENCODER}, "attn_type=.* is not served"),
    ],
)
def test_layers_that_are_not_served_say_so(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(NotImplementedError, match=f"{LATENT_NAME}: {words}"):
        layer_of(config_of(tmp_path), **change)


def test_it_is_registered_and_the_engine_accepts_it() -> None:
    plugin.register()
    backend = AttentionBackendEnum[LATENT_NAME].get_class()
    assert backend is FlashsmithLatentBackend
    assert backend.get_name() == LATENT_NAME
    asked: dict[str, Any] = {
        "head_size": 576,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 64,
        "use_mla": True,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": AttentionType.DECODER,
    }
    assert backend.validate_configuration(**asked) == []
    assert backend.validate_configuration(**asked, use_dcp=True) == []
    assert backend.validate_configuration(**(asked | {"kv_cache_dtype": "fp8"})) == []
    for change in (
        {"head_size": 128},
        {"use_mla": False},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"kv_cache_dtype": "fp8_ds_mla"},
        {"device_capability": DeviceCapability(10, 0)},
    ):
        assert backend.validate_configuration(**(asked | change))
