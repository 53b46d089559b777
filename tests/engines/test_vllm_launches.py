"""A layer launches what the public calls launch, without their checks. No GPU: host tensors pass
for one's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cached_calls import events
from pretended_gpu import H200, PretendedGpu, pretended_gpu
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm_driver import LAYER, config_of

from flashsmith.errors import ArgumentError
from flashsmith.integrations import layer_kernels, layer_launches
from flashsmith.integrations.vllm import impl as impls
from flashsmith.integrations.vllm.backend import FlashsmithBackend
from flashsmith.integrations.vllm.impl import FlashsmithImpl
from flashsmith.runtime import forget_cached_launches

HEADS, KV_HEADS, D, BLOCKS, PAGE = 8, 2, 64, 40, 16
# Tokens of each request.
STEPS = [[37], [1], [1, 1, 1], [5, 1, 1], [1, 1, 1], [38], [37], [64, 3]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedGpu]:
    with pretended_gpu() as pretended:

        def get(config: Any, arch: int, semantics: Any, *_: Any) -> Any:
            return pretended.kernel(config, arch, semantics, None)

        monkeypatch.setattr(layer_kernels, "loaded_kernels", SimpleNamespace(get=get))
        for module in (layer_kernels, impls):
            monkeypatch.setattr(module, "device_of", lambda kind, ordinal: H200)
        yield pretended


class Model:
    """Layers that are called as an engine calls them."""

    def __init__(self, folder: Path, layers: list[dict[str, Any]]) -> None:
        config = config_of(folder, tokens=256, requests=8)
        spec = FullAttentionSpec(
            block_size=PAGE, num_kv_heads=KV_HEADS, head_size=D, dtype=torch.bfloat16
        )
        with set_current_vllm_config(config):
            self.impls = [
                FlashsmithImpl(HEADS, D, D**-0.5, KV_HEADS, **options) for options in layers
            ]
        names = [f"{LAYER}.{at}" for at in range(len(layers))]
        for name, impl in zip(names, self.impls, strict=True):
            config.compilation_config.static_forward_context[name] = SimpleNamespace(impl=impl)
        self.builder = FlashsmithBackend.get_builder_cls()(spec, names, config, torch.device("cpu"))
        self.caches = [
            torch.zeros(BLOCKS, PAGE, KV_HEADS, 2 * D, dtype=torch.bfloat16).transpose(1, 2)
            for _ in layers
        ]

    def step(self, counts: list[int], padding: int = 0) -> list[Any]:
        """Calls all layers for a step, and returns its tensors, so that they stay."""
        rows = sum(counts)
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        slots = torch.arange(rows)
        step = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(counts, dtype=torch.int32),
            num_reqs=len(counts),
            num_actual_tokens=rows,
            max_query_len=max(counts),
            max_seq_len=max(counts),
            block_table_tensor=torch.zeros(len(counts), 16, dtype=torch.int32),
            slot_mapping=slots,
        )
        metadata, kept = self.builder.build(0, step), [step]
        for impl, cache in zip(self.impls, self.caches, strict=True):
            width = (HEADS + 2 * KV_HEADS) * D
            qkv = torch.zeros(rows + padding, width, dtype=torch.bfloat16)
            q, k, v = qkv.split([HEADS * D, KV_HEADS * D, KV_HEADS * D], dim=-1)
            output = torch.zeros(rows + padding, HEADS, D, dtype=torch.bfloat16)
            k, v = (it.view(-1, KV_HEADS, D) for it in (k, v))
            layer = SimpleNamespace()
            impl.do_kv_cache_update(layer, k, v, cache, slots)
            impl.forward(layer, q.view(-1, HEADS, D), k, v, cache, metadata, output)
            kept += [qkv, output]
        return kept


def launched(gpu: PretendedGpu, model: Model, kept: list[Any]) -> list[Any]:
    """What a step launched, with the names of tensors instead of their addresses."""
    step, *tensors = kept
    names = {0: None}
    for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
        names[getattr(step, name).data_ptr()] = name
    for at, (impl, cache) in enumerate(zip(model.impls, model.caches, strict=True)):
        names[cache.data_ptr()] = f"keys {at}"
        names[cache.data_ptr() + D * 2] = f"values {at}"
        if impl._sinks_fp32 is not None:
            names[impl._sinks_fp32.data_ptr()] = f"sinks {at}"
    for at, tensor in enumerate(tensors):
        names[tensor.data_ptr()] = f"tensor {at}"
    for at, qkv in enumerate(tensors[::2]):
        names[qkv.data_ptr() + HEADS * D * 2] = f"k {at}"
        names[qkv.data_ptr() + (HEADS + KV_HEADS) * D * 2] = f"v {at}"
    found = [
        (
            *(it.config, it.semantics, it.stream, [names[at] for at in it.addresses]),
            # The numbers; addresses follow them.
            it.prepared[: 5 + it.prepared[4]],
        )
        for it in gpu.launches
    ]
    gpu.launches.clear()
    return found


LAYERS = {
    "plain": [{}] * 3,
    "windows between": [{}, {"sliding_window": 20}] * 2,
    "softcap": [{"logits_soft_cap": 30.0}] * 2,
    "sinks": [{"sinks": torch.zeros(HEADS, dtype=torch.bfloat16)} for _ in range(2)],
}


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("layers", LAYERS)
def test_layers_launch_what_checked_calls_launch(
    layers: str, padding: int, gpu: PretendedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = []
    for is_checked in (False, True):
        forget_cached_launches()
        with monkeypatch.context() as patch:
            if is_checked:
                for name in ("_find_attention", "_find_write"):
                    patch.setattr(FlashsmithImpl, name, lambda *_: None)
            model = Model(tmp_path, LAYERS[layers])
            found = []
            for counts in STEPS:
                kept = model.step(counts, padding)
                found.append(launched(gpu, model, kept))
            outcomes.append(found)
    ours, checked = outcomes
    assert [len(step) for step in ours] == [2 * len(LAYERS[layers])] * len(STEPS)
    assert ours == checked


def test_new_sizes_are_not_checked_in_full(
    gpu: PretendedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(tmp_path, LAYERS["plain"])
    # A single row may have other strides, so it is checked once, too.
    for counts in ([7, 1], [1]):
        model.step(counts)
    gpu.launches.clear()
    checked: list[str] = []
    for name in ("check_request", "check_operation", "write_request"):
        monkeypatch.setattr(layer_launches, name, lambda *_, name=name, **__: checked.append(name))
    for counts in ([8, 1], [1], [100], [1] * 8):
        model.step(counts)
    assert checked == []
    assert len(gpu.launches) == 2 * 3 * 4


def test_a_repeated_layer_enters_few_functions(gpu: PretendedGpu, tmp_path: Path) -> None:
    """What the host does for a layer of an eager step is the same for any number of layers."""
    counts = {}
    for layers in (2, 16):
        model = Model(tmp_path, [{}] * layers)
        model.step([37])
        metadata, first = model.builder, model.step([37])
        impl, cache = model.impls[-1], model.caches[-1]
        qkv, output = first[-2:]
        q, k, v = qkv.split([HEADS * D, KV_HEADS * D, KV_HEADS * D], dim=-1)
        q, k, v = (it.view(37, -1, D) for it in (q, k, v))
        step = metadata.build(0, first[0])
        layer = SimpleNamespace()
        slots = first[0].slot_mapping
        write = events(lambda: impl.do_kv_cache_update(layer, k, v, cache, slots))  # noqa: B023
        attend = events(lambda: impl.forward(layer, q, k, v, cache, step, output))  # noqa: B023
        counts[layers] = write, attend
    assert counts[2] == counts[16]
    write, attend = counts[16]
    assert write <= 18, write
    assert attend <= 22, attend


def test_a_wrong_tensor_is_refused_after_right_ones(gpu: PretendedGpu, tmp_path: Path) -> None:
    model = Model(tmp_path, LAYERS["plain"])
    kept = model.step([37])
    step = model.builder.build(0, kept[0])
    impl, cache = model.impls[0], model.caches[0]
    odd = torch.zeros(37 * HEADS * D + 1, dtype=torch.bfloat16)[1:].view(37, HEADS, D)
    right = torch.zeros(37, HEADS, D, dtype=torch.bfloat16)
    layer = SimpleNamespace()
    for query, message in (
        (odd, "q: address 0x.* is not a multiple of 16"),
        (right.float(), "q: dtype"),
        (right[..., :56], "k_cache: shape"),
    ):
        with pytest.raises(ArgumentError, match=message):
            impl.forward(layer, query, right, right, cache, step, right)
