"""The layers of much-used models, with the sizes of their configs: what the backend takes has a
kernel for each step on each GPU, and the rest is refused as docs/engines.md says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.selector import AttentionSelectorConfig

from flashsmith.families import device_spec
from flashsmith.integrations.layer_kernels import LayerKernels
from flashsmith.integrations.vllm.backend import FlashsmithBackend
from flashsmith.integrations.vllm.impl import CROSS, ENCODERS, FlashsmithImpl

PAGE, CONTEXT = 16, 32768
# Requests and tokens of a step.
STEPS = [(1, 1), (256, 1), (1, 8192), (64, 512), (8, 4)]


@dataclass(frozen=True)
class Kind:
    """A kind of layers of a model, on one GPU."""

    name: str
    heads: int
    kv_heads: int
    d: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    attn_type: str = AttentionType.DECODER
    cache: str = "auto"
    prefix: bool = False  # image blocks with bidirectional attention


TAKEN = [
    Kind("Llama 3.1 8B", 32, 8, 128),
    Kind("Llama 3.2 1B", 32, 8, 64),
    Kind("Llama 3.1 70B", 64, 8, 128, cache="fp8"),
    Kind("Llama 4", 40, 8, 128),
    Kind("Qwen 2.5 7B", 28, 4, 128),
    Kind("Qwen 2.5 0.5B", 14, 2, 64),
    Kind("Qwen 3 8B", 32, 8, 128),
    Kind("Qwen 3 30B A3B", 32, 4, 128),
    Kind("Qwen 3 Next", 16, 2, 256),
    Kind("Gemma 2 9B", 16, 8, 256, window=4096, softcap=50.0),
    Kind("Gemma 2 27B", 32, 16, 128, softcap=50.0),
    Kind("Gemma 3 1B", 4, 1, 256, window=512),
    Kind("Gemma 3 27B", 32, 16, 128, window=1024),
    Kind("Gemma 4 windows", 32, 16, 256, window=1024),
    Kind("Gemma 4 global", 32, 4, 512),
    Kind("gpt-oss", 64, 8, 64, window=128, sinks=True),
    Kind("gpt-oss global", 64, 8, 64, sinks=True),
    Kind("GLM 4.5", 96, 8, 128),
    Kind("GLM 4 9B", 32, 2, 128),
    Kind("Mistral 7B", 32, 8, 128, window=4096),
    Kind("Mistral Small 3", 32, 8, 128),
    Kind("Phi 3 mini", 32, 32, 96, window=2047),
    Kind("Phi 4", 40, 10, 128),
    Kind("MiMo 7B", 32, 8, 128),
    Kind("OLMo 3 7B", 32, 32, 128, window=4096),
    Kind("Granite 3 8B", 32, 8, 128),
    Kind("Command A", 96, 8, 128, window=4096),
    Kind("MiniMax M2", 48, 8, 128),
    Kind("SmolLM 135M", 9, 3, 64),
    Kind("StableLM 3B", 32, 32, 80),
    Kind("BERT", 12, 12, 64, attn_type=AttentionType.ENCODER_ONLY),
    Kind("ModernBERT", 12, 12, 64, window=65, attn_type=AttentionType.ENCODER_ONLY),
    Kind("Whisper large", 20, 20, 64),
    Kind("Whisper large, cross", 20, 20, 64, attn_type=AttentionType.ENCODER_DECODER),
]
REFUSED = [
    (Kind("Gemma 3 27B with images", 32, 16, 128, prefix=True), "multimodal token full attention"),
    (Kind("d 100", 32, 32, 100), "head_size not supported"),
    (Kind("d 72 in 8 bits", 32, 32, 72, cache="fp8"), "multiple of 16"),
]


def reasons(kind: Kind, gpu: Any) -> list[str]:
    """Why the backend does not take a layer, as it tells the engine."""
    from vllm.platforms.interface import DeviceCapability

    config = AttentionSelectorConfig(
        head_size=kind.d,
        dtype=torch.bfloat16,
        kv_cache_dtype=kind.cache,
        block_size=PAGE,
        attn_type=kind.attn_type,
        has_sink=kind.sinks,
        has_sliding_window=kind.window is not None,
        use_mm_prefix=kind.prefix,
    )
    return FlashsmithBackend.validate_configuration(
        device_capability=DeviceCapability(*divmod(gpu.arch, 10)), **config._asdict()
    )


def problems(kind: Kind, ranks: int) -> list[LayerKernels]:
    """The kernels of a layer of which each of ``ranks`` GPUs has a part of the heads."""
    layer = FlashsmithImpl(
        *(kind.heads // ranks, kind.d, kind.d**-0.5, max(1, kind.kv_heads // ranks), None),
        *(kind.window, kind.cache, kind.softcap, kind.attn_type),
        sinks=torch.zeros(kind.heads // ranks) if kind.sinks else None,
    )
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    if kind.attn_type in ENCODERS:
        return [layer.direct_kernels(dtype, cpu, False)]
    return [layer._over_cache(PAGE, dtype, CONTEXT, cpu, kind.attn_type != CROSS)]


@pytest.mark.parametrize("gpu", ["A100", "L4", "H100"])
@pytest.mark.parametrize("kind", TAKEN, ids=lambda kind: kind.name)
def test_a_taken_layer_has_a_kernel_for_each_step(kind: Kind, gpu: str) -> None:
    device = device_spec(gpu)
    if kind.d > 256 and gpu == "L4":
        assert "head_size 512 on L4 not supported" in " ".join(reasons(kind, device))
        return
    assert reasons(kind, device) == []
    for ranks in (1, 2) if kind.heads % 2 == 0 else (1,):
        for found in problems(kind, ranks):
            kernels = replace(found, device=device, _configs={})
            for sizes in STEPS:
                assert kernels.config_for(*sizes).family.name


@pytest.mark.parametrize(("kind", "reason"), REFUSED, ids=lambda it: getattr(it, "name", ""))
def test_another_layer_is_refused_with_a_reason(kind: Kind, reason: str) -> None:
    found = reasons(kind, device_spec("H100"))
    assert [it for it in found if reason in it], found
