"""attention() differentiates: its gradients against float64 autograd, in the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import shared_kernels

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

from exact_attention import exact_attention  # noqa: E402

import flashsmith  # noqa: E402
from flashsmith.families import DType, FlashForwardKernelConfig, Semantics  # noqa: E402
from flashsmith.families import parse_kernel_name_into_config as parse  # noqa: E402

# What other tests have, too.
CFG = FlashForwardKernelConfig(
    DType.FP16, 64, 64, 32, 4, True, True, True, 2, 2, 2, optimized_softmax=True
)
REPEATABLE = parse("(FP16, 64, 64, 64, 4): backward")
FREE = parse("(FP16, 64, 64, 64, 4): backward+stages_2+dq_atomics")
KERNELS = {"config": CFG, "backward_config": FREE}
CAUSAL = Semantics("causal", uneven=True)
EVERYTHING = Semantics("window", softcap=True, packed=True, uneven=True)
for _semantics in (CAUSAL, EVERYTHING):
    shared_kernels.want([CFG], _semantics)
    shared_kernels.want([REPEATABLE, FREE], _semantics)


def drawn(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).half()


def dense(seq_q: int = 40, seq_k: int = 50) -> dict[str, Any]:
    return {
        "q": drawn(1, seq_q, 2, 40),
        "k": drawn(1, seq_k, 1, 40, seed=1),
        "v": drawn(1, seq_k, 1, 40, seed=2),
        "causal": True,
    }


def packed() -> dict[str, Any]:
    q_starts, k_starts = torch.tensor([[0, 30, 30, 43], [0, 20, 29, 75]], dtype=torch.int32)
    return {
        "q": drawn(43, 2, 40),
        "k": drawn(75, 1, 40, seed=1),
        "v": drawn(75, 1, 40, seed=2),
        "sinks": torch.tensor([0.5, -1.0]),
        "window": (20, 4),
        "softcap": 5.0,
        "scale": 0.25,
        "cu_seqlens_q": q_starts,
        "cu_seqlens_k": k_starts,
    }


def grown(call: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The call on tensors that require grad, and these."""
    names = [name for name in ("q", "k", "v", "sinks") if name in call]
    leaves = {name: call[name].detach().clone().requires_grad_() for name in names}
    return call | leaves, list(leaves.values())


def exact_gradients(call: dict[str, Any], do: Any, dlse: Any = None) -> list[Any]:
    wide, leaves = grown({k: v.double() if _is_real(v) else v for k, v in call.items()})
    o, lse = exact_attention(**wide)
    outputs, grads = ([o], [do.double()])
    if dlse is not None:
        seen = lse > -torch.inf
        outputs.append(lse[seen])
        grads.append(dlse[seen].double())
    return list(torch.autograd.grad(outputs, leaves, grads))


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def assert_gradients(found: Any, expected: list[Any], leaves: list[Any]) -> None:
    for ours, exact, leaf in zip(found, expected, leaves, strict=True):
        assert ours.dtype == leaf.dtype
        assert ours.shape == leaf.shape
        size = max(1.0, exact.abs().max().item())
        torch.testing.assert_close(ours.double(), exact, atol=4e-3 * size, rtol=0)


@pytest.mark.parametrize("backward_config", [FREE, REPEATABLE], ids=str)
@pytest.mark.parametrize("make", [dense, packed])
def test_gradients(make: Any, backward_config: Any) -> None:
    call, leaves = grown(make())
    kernels = {"config": CFG, "backward_config": backward_config}
    o, lse = flashsmith.attention(**call, **kernels, return_lse=True)
    do, dlse = drawn(*o.shape, seed=3), drawn(*lse.shape, seed=4).float()
    found = torch.autograd.grad((o, lse), leaves, (do, dlse))
    assert_gradients(found, exact_gradients(make(), do, dlse), leaves)
    with torch.no_grad():
        assert torch.equal(o, flashsmith.attention(**call, config=CFG))
