"""Valid calls of attention() on PyTorch's host tensors, what distinguishes launches, and what holds
for a call like one before of any operation."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from pretended_gpu import Launch, PretendedGpu

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, FlashForwardKernelConfig
from flashsmith.runtime import cached_calls

CFG = FlashForwardKernelConfig(DType.FP16, 64, 64, 32, 4)


def half(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.float16)


def qkv(seq_q: int = 64, seq_k: int = 64, heads: int = 4, heads_k: int = 4, d: int = 64) -> list:
    return [half(2, seq_q, heads, d), half(2, seq_k, heads_k, d), half(2, seq_k, heads_k, d)]


def offsets(*lengths: int) -> Any:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def dense(**options: Any) -> dict[str, Any]:
    return dict(zip("qkv", qkv(), strict=True)) | options


def packed(**options: Any) -> dict[str, Any]:
    return {
        **{name: tensor.flatten(0, 1) for name, tensor in zip("qkv", qkv(), strict=True)},
        **{"cu_seqlens_q": offsets(100, 28), "cu_seqlens_k": offsets(28, 100)},
        **{"max_seqlen_q": 100, "max_seqlen_k": 100},
        **options,
    }


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "dense": dense,
    "causal": lambda: dense(causal=True),
    "window": lambda: dense(window=(5, None)),
    "capped and scaled": lambda: dense(softcap=20.0, scale=0.5),
    "sinks": lambda: dense(sinks=torch.zeros(4)),
    "lse": lambda: dense(return_lse=True),
    "row_max": lambda: dense(return_row_max=True),
    "both statistics and sinks": lambda: dense(
        return_lse=True, return_row_max=True, sinks=torch.zeros(4)
    ),
    "an output of one's own": lambda: dense(out=half(2, 64, 4, 64)),
    "uneven, grouped heads": lambda: dict(zip("qkv", qkv(37, 90, 4, 2, 56), strict=True)),
    "no keys": lambda: dict(zip("qkv", qkv(seq_k=0), strict=True)),
    "heads outside": lambda: dense(q=half(2, 4, 64, 64).transpose(1, 2)),
    "broadcast keys": lambda: dense(k=half(2, 64, 1, 64).expand(-1, -1, 4, -1)),
    "a config": lambda: dense(config=CFG),
    "a part": lambda: dense(partial=True, causal=True),
    "a part in an output of one's own": lambda: dense(partial=True, out=torch.zeros(2, 64, 4, 64)),
    "packed": packed,
    "packed, a part": lambda: packed(partial=True),
    "packed, everything": lambda: packed(
        causal=True,
        return_lse=True,
        return_row_max=True,
        sinks=torch.zeros(4),
        out=half(128, 4, 64),
    ),
}


def run_while_others_forget(work: Callable[[int], None], arguments: Iterable[int]) -> None:
    """Runs ``work`` in a thread for each argument, while another forgets what was prepared."""
    done = threading.Event()

    def forget() -> None:
        while not done.is_set():
            cached_calls.forget_cached_launches()

    threads = [threading.Thread(target=work, args=(argument,)) for argument in arguments]
    forgetting = threading.Thread(target=forget)
    for thread in (*threads, forgetting):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    forgetting.join()


def without_addresses(launch: Launch) -> Any:
    """Sizes, strides, options, device: arguments but for eleven addresses among them."""
    arguments = launch.prepared
    # Four numbers of the device, how many of the operation's follow, and these.
    numbers = 4 + 1 + arguments[4]
    return (
        *(launch.config, launch.semantics, launch.stream),
        *(arguments[:numbers], arguments[numbers + 11 :]),
    )


def events(call: Callable[[], Any]) -> int:
    """Functions, of Python's and of C's, that a call enters."""
    entered = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal entered
        entered += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def refuse_checks(monkeypatch: pytest.MonkeyPatch, *passes: ModuleType) -> None:
    """From now on a call that goes through the checks fails."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the call was checked")

    for module in passes:
        monkeypatch.setattr(module, "check_request", refuse)


Call = Callable[..., Any]
#: Makes the arguments of a call, of new tensors every time.
Maker = Callable[[], dict[str, Any]]


def check_signatures_differ(gpu: PretendedGpu, call: Call, makers: Iterable[Maker]) -> None:
    """Each of the calls launches something of its own, also after all others were prepared."""
    makers = list(makers)
    for make in makers:
        call(**make())
    prepared = [(launch.config, launch.semantics, launch.prepared) for launch in gpu.launches]
    assert len(cached_calls.cached) == len(makers)
    gpu.launches.clear()
    for make in makers:
        call(**make())
    assert prepared == [
        (launch.config, launch.semantics, launch.prepared) for launch in gpu.launches
    ]


#: What a mistake makes of a tensor: one that needs a gradient, one at an odd address.
GROWN, ODD = object(), object()
#: By name, what each makes of a valid call's arguments.
Mistakes = dict[str, dict[str, Any]]


def check_mistake_stays_one(
    gpu: PretendedGpu, call: Call, valid: Maker, mistake: Mapping[str, Any]
) -> None:
    """After valid calls like it, a call with a mistake raises the error of a fresh process."""

    def spoiled() -> dict[str, Any]:
        arguments = valid()
        for name, value in mistake.items():
            if value is GROWN:
                arguments[name].requires_grad_()
            elif value is ODD:
                shape = arguments[name].shape
                arguments[name] = half(shape.numel() + 1)[1:].view(shape)
            else:
                arguments[name] = value
        return arguments

    def said() -> str:
        with pytest.raises(ArgumentError) as caught:
            call(**spoiled())
        return " ".join(word for word in str(caught.value).split() if not word.startswith("0x"))

    fresh = said()
    for _ in range(2):
        call(**valid())
    assert said() == fresh
    assert len(gpu.launches) == 2
