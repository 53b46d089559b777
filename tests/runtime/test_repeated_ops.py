"""Custom ops, repeated: looked up by their own arguments. No GPU: host tensors pass for one's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import flashsmith
from flashsmith.errors import ArgumentError

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")

from pretended_gpu import PretendedGpu, pretended_gpu  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from flashsmith.integrations import torch_ops  # noqa: E402

pytestmark = pytest.mark.torch

OPS = torch.ops.flashsmith
ALL = (True, True, True, False)


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu() as pretended:
        yield pretended


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From then on an op whose arguments are read fails."""

    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise AssertionError("the op's arguments were read")

    def start() -> None:
        for name in ("run_call", "run_backward", "call_options", "call_options_backward"):
            monkeypatch.setattr(torch_ops, name, refuse)

    return start


def halves(count: int) -> list[Any]:
    return [torch.zeros(2, 64, 4, 64, dtype=torch.float16) for _ in range(count)]


def offsets() -> dict[str, Any]:
    at = torch.tensor([0, 100, 128], dtype=torch.int32)
    return {"cu_seqlens_q": at, "cu_seqlens_k": at, "max_seqlen_q": 100, "max_seqlen_k": 100}


def packed(count: int) -> list[Any]:
    return [tensor.flatten(0, 1) for tensor in halves(count)]


def lse() -> Any:
    return torch.zeros(2, 4, 64)


CALLS: dict[str, Callable[[], Callable[[], Any]]] = {
    "attention": lambda: partial(OPS.attention, *halves(3), causal=True),
    "attention, packed": lambda: partial(OPS.attention, *packed(3), **offsets()),
    "attention, a sink": lambda: partial(OPS.attention, *halves(3), torch.zeros(4), softcap=2.0),
    "no statistics": lambda: partial(OPS.attention_with_statistics, *halves(3)),
    "lse": lambda: partial(
        OPS.attention_with_statistics, *halves(3), return_lse=True, with_backward=True
    ),
    "row maximum": lambda: partial(
        OPS.attention_with_statistics, *halves(3), return_row_max=True, window_left=5
    ),
    "both": lambda: partial(
        OPS.attention_with_statistics, *halves(3), return_lse=True, return_row_max=True
    ),
    "backward": lambda: partial(OPS.attention_backward, *halves(5), lse(), needs=ALL),
    "backward, some in fp32": lambda: partial(
        *(OPS.attention_backward, *halves(5), lse()),
        needs=(True, False, False, False),
        fp32_gradients=True,
    ),
}


def facts(outputs: Any) -> list[Any]:
    every = outputs if isinstance(outputs, tuple) else (outputs,)
    return [(it.shape, it.stride(), it.dtype) for it in every]


def below_autograd(call: Callable[[], Any]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return call()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("how", [lambda call: call(), below_autograd], ids=["", "below autograd"])
def test_a_repeated_op_launches_the_same_elsewhere(
    name: str, how: Callable[[Any], Any], gpu: PretendedGpu, unread: Callable[[], None]
) -> None:
    first, second = CALLS[name](), CALLS[name]()
    read = how(first)
    unread()
    outputs = how(second)
    assert facts(outputs) == facts(read)
    before, after = gpu.launches
    assert (before.config, before.semantics) == (after.config, after.semantics)
    every = outputs if isinstance(outputs, tuple) else (outputs,)
    given = (*second.args, *second.keywords.values(), *every)
    own = {it.data_ptr() for it in given if torch.is_tensor(it)}
    assert own >= {address for address in after.addresses if address}
    assert own.isdisjoint({address for address in before.addresses if address})


def test_options_are_told_apart(gpu: PretendedGpu) -> None:
    for _ in range(2):
        for options in ({}, {"causal": True}, {"window_left": 1}, {"window_right": 1}):
            OPS.attention(*halves(3), **options)
    prepared = [launch.prepared for launch in gpu.launches]
    assert prepared[:4] == prepared[4:]
    assert len({*prepared}) == 4


def test_needed_gradients_are_told_apart(gpu: PretendedGpu) -> None:
    for needs in (ALL, (True, False, False, False), (False, True, True, False)) * 2:
        found = OPS.attention_backward(*halves(5), lse(), needs=needs)
        assert [it.numel() > 0 for it in found] == [*needs]


def test_a_repeated_op_keeps_what_intercepts_ops(gpu: PretendedGpu) -> None:
    for _ in range(3):
        OPS.attention(*halves(3))
    launches = len(gpu.launches)
    with FlopCounterMode(display=False) as counter:
        OPS.attention(*halves(3))
    assert counter.get_total_flops() == 4 * 2 * 4 * 64 * 64 * 64
    with pytest.raises(ArgumentError, match="vmap"):
        torch.vmap(OPS.attention)(*(it.unsqueeze(0) for it in halves(3)))
    q, k, v = (it.requires_grad_() for it in halves(3))
    assert OPS.attention(q, k, v).grad_fn is not None
    with torch.no_grad():
        assert OPS.attention(q, k, v).grad_fn is None
    assert len(gpu.launches) == launches + 3


def test_compiled_calls_are_repeated(gpu: PretendedGpu, unread: Callable[[], None]) -> None:
    compiled = torch.compile(
        partial(flashsmith.attention, causal=True), backend="aot_eager", fullgraph=True
    )
    with torch.no_grad():
        for _ in range(2):  # the first one runs in another state of the dispatcher
            compiled(*halves(3))
        unread()
        outputs = compiled(*halves(3))
    assert outputs.shape == (2, 64, 4, 64)
    assert gpu.launches[-1].addresses[3] == outputs.data_ptr()
