"""PyTorch's tracers and a wgmma config: the op takes its short form, as that of any other."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from flashsmith import attention
from flashsmith.families import parse_kernel_name_into_config

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")

pytestmark = pytest.mark.torch

HOPPER = parse_kernel_name_into_config(
    "(FP16, 128, 192, 128, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_gemm+dynamic"
    "+rescale_8"
)


def drawn(seq: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, seq, 1, 128, generator=generator).half()


def test_ops_and_compiled_calls_run_the_config_that_they_are_given() -> None:
    tensors = drawn(100, 0), drawn(128, 1), drawn(128, 2)
    expected = attention(*tensors, config=HOPPER)
    importlib.import_module("flashsmith.integrations.torch_ops")
    assert torch.equal(torch.ops.flashsmith.attention(*tensors, config=str(HOPPER)), expected)

    @torch.compile(backend="eager", fullgraph=True)
    def call(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, config=HOPPER)

    assert torch.equal(call(*tensors), expected)
