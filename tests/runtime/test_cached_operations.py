"""Calls of run_operation() like one before are not checked again. No GPU: host tensors pass for
one's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, FlashForwardKernelConfig, Problem
from flashsmith.runtime import operation_run, run_operation

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")

from cached_calls import half, qkv  # noqa: E402
from pretended_gpu import PretendedGpu, pretended_gpu  # noqa: E402

import flashsmith  # noqa: E402

pytestmark = pytest.mark.torch

CFG = FlashForwardKernelConfig(DType.FP16, 64, 64, 32, 4)
PROBLEM = Problem.parse("b2 s64 h4 d64 fp16")


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu() as pretended:
        yield pretended


def tensors(**more: Any) -> dict[str, Any]:
    return dict(zip("qkv", qkv(), strict=True)) | more


def test_an_operation_is_checked_once(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_operation(CFG, PROBLEM, tensors(), wanted=["lse"])
    monkeypatch.setattr(operation_run, "prepare_operation", None)
    given = tensors()
    again = run_operation(CFG, PROBLEM, given, wanted=["lse"])
    assert list(first.outputs) == list(again.outputs) == ["o", "lse"]
    assert gpu.launches[0].prepared is gpu.launches[1].prepared
    places = [*map(torch.Tensor.data_ptr, given.values())]
    places += [it.data_ptr() for it in again.outputs.values()]
    assert gpu.launches[1].addresses[:5] == tuple(places)


def test_what_differs_is_checked(gpu: PretendedGpu) -> None:
    run_operation(CFG, PROBLEM, tensors())
    run_operation(CFG, PROBLEM, tensors(o=half(2, 64, 4, 64)))
    run_operation(CFG, PROBLEM, tensors(), options={"scale": 0.5})
    run_operation(CFG, PROBLEM, tensors(), wanted=["lse"])
    assert len({id(launch.prepared) for launch in gpu.launches}) == 4


def test_a_mistake_after_a_valid_call_is_still_one(gpu: PretendedGpu) -> None:
    for _ in range(2):
        run_operation(CFG, PROBLEM, tensors())
    odd = half(2 * 64 * 4 * 64 + 1)[1:].view(2, 64, 4, 64)
    for call in (tensors(q=odd), tensors(k=None), tensors(v=half(2, 64, 2, 64)), {"p": half(1)}):
        with pytest.raises(ArgumentError):
            run_operation(CFG, PROBLEM, call)
    shared = tensors()
    with pytest.raises(ArgumentError, match=r"^o: shares memory with q"):
        run_operation(CFG, PROBLEM, shared | {"o": shared["q"]})
    assert len(gpu.launches) == 2


def test_one_tensor_that_is_given_twice_is_repeated_as_such(gpu: PretendedGpu) -> None:
    q, k, _ = qkv()

    def call(k: Any, v: Any) -> Any:
        flashsmith.attention(q, k, v, causal=True)
        return gpu.launches[-1].addresses[1:3]

    for _ in range(3):
        assert call(k, k) == (k.data_ptr(), k.data_ptr())
        other = torch.zeros_like(k)
        assert call(k, other) == (k.data_ptr(), other.data_ptr())
