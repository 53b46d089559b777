"""Calls like one before skip the checks: they launch what checked calls launch, and no mistake
slips through. No GPU: host tensors pass for one's."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from invalid_calls import InvalidCall, invalid_calls, valid_calls

import flashsmith
from flashsmith.configs import DType, FlashForwardKernelConfig
from flashsmith.errors import ArgumentError, LaunchError
from flashsmith.runtime import (
    count_launches,
    forget_prepared_calls,
    forks,
    forward,
    forward_pass,
    prepared,
    run_call,
)
from flashsmith.runtime.options import NO_WINDOW
from flashsmith.tuning import choose_config

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")

from pretended_gpu import Launch, PretendedGpu, pretended_gpu  # noqa: E402

pytestmark = pytest.mark.torch

CFG = FlashForwardKernelConfig(DType.FP16, 64, 64, 32, 4)
attention = flashsmith.attention


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu() as pretended:
        yield pretended


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After calling it, a call that goes through the checks fails."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the call was checked")

    return lambda: monkeypatch.setattr(forward_pass, "check_request", refuse)


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
    "packed": packed,
    "packed, everything": lambda: packed(
        causal=True,
        return_lse=True,
        return_row_max=True,
        sinks=torch.zeros(4),
        out=half(128, 4, 64),
    ),
}


def places(arguments: dict[str, Any], outputs: Any) -> tuple[int, ...]:
    """The addresses that a launch must be given."""
    o, *statistics = outputs if isinstance(outputs, tuple) else (outputs,)
    values = iter(statistics)
    lse = next(values) if arguments.get("return_lse") else None
    row_max = next(values) if arguments.get("return_row_max") else None
    vectors = [arguments.get(name) for name in ("sinks", "cu_seqlens_q", "cu_seqlens_k")]
    tensors = (*(arguments[name] for name in "qkv"), o, lse, row_max, *vectors)
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)


def facts(outputs: Any) -> list[Any]:
    every = outputs if isinstance(outputs, tuple) else (outputs,)
    return [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in every]


def without_addresses(launch: Launch) -> Any:
    """Sizes, strides, options, device: arguments but for nine addresses among them."""
    sizes_and_strides = 8 + 4 * 3
    arguments = launch.prepared
    return (
        *(launch.config, launch.semantics, launch.stream),
        *(arguments[:sizes_and_strides], arguments[sizes_and_strides + 9 :]),
    )


@pytest.mark.parametrize("name", CALLS)
def test_a_call_like_one_before_launches_the_same_elsewhere(
    name: str, gpu: PretendedGpu, unchecked: Callable[[], None]
) -> None:
    first, second = CALLS[name](), CALLS[name]()
    checked = attention(**first)
    unchecked()
    with count_launches() as counted:
        outputs = attention(**second)
    assert counted.gpu == 1
    assert facts(outputs) == facts(checked)
    launches = gpu.launches
    assert [launch.addresses for launch in launches] == [
        places(first, checked),
        places(second, outputs),
    ]
    assert without_addresses(launches[0]) == without_addresses(launches[1])
    if "out" in second:
        assert second["out"] is (outputs[0] if isinstance(outputs, tuple) else outputs)


def test_calls_that_differ_are_told_apart(gpu: PretendedGpu) -> None:
    """Each of these launches something of its own, also after all others were prepared."""
    for make in CALLS.values():
        attention(**make())
    prepared_first = [without_addresses(launch) for launch in gpu.launches]
    gpu.launches.clear()
    for make in CALLS.values():
        attention(**make())
    assert [without_addresses(launch) for launch in gpu.launches] == prepared_first
    assert len(prepared.known) == len(CALLS)


def test_forward_prepares_by_its_config(gpu: PretendedGpu, unchecked: Callable[[], None]) -> None:
    other = replace(CFG, swizzled=True)
    tensors = qkv()
    forward(CFG, *tensors)
    forward(other, *tensors)
    unchecked()
    forward(replace(CFG), *tensors)  # an equal one
    forward(other, *tensors)
    assert [launch.config for launch in gpu.launches] == [CFG, other] * 2


def test_the_current_stream_is_asked_for_every_time(gpu: PretendedGpu) -> None:
    tensors = qkv()
    for stream in (0, 7, 9):
        gpu.stream = stream
        attention(*tensors)
    assert [launch.stream for launch in gpu.launches] == [0, 7, 9]


# ---- what must not pass for a call that was prepared ----

# One of each pair equals the other, and is something else.
CONFUSABLE: list[tuple[str, Any, Any]] = [
    ("causal", True, 1),
    ("causal", False, 0),
    ("causal", True, 1.0),
    ("return_lse", False, 0),
    ("return_row_max", True, 1),
    ("emulate", False, 0),
    ("scale", 1.0, True),
    ("scale", 1.0, np.True_),
    ("scale", 1.0, Decimal(1)),
    ("scale", 1.0, 1 + 0j),
    ("softcap", 0.0, False),
    ("softcap", 1.0, True),
    ("softcap", 1.0, Decimal(1)),
    ("window", (1, 0), (True, 0)),
    ("window", (1, 0), (1, False)),
    ("window", (1, None), (1.0, None)),
    ("window", (1, None), (Decimal(1), None)),
]


@pytest.mark.parametrize(("name", "good", "bad"), CONFUSABLE)
def test_equal_is_not_the_same(name: str, good: Any, bad: Any, gpu: PretendedGpu) -> None:
    assert good == bad
    attention(**dense(**{name: good}))
    with pytest.raises(ArgumentError, match=f"{name}="):
        attention(**dense(**{name: bad}))
    assert len(gpu.launches) == 1


@pytest.mark.parametrize("bad", [True, 1.0, Decimal(1)])
@pytest.mark.parametrize("side", ["q", "k"])
def test_equal_limits_are_not_the_same(side: str, bad: Any, gpu: PretendedGpu) -> None:
    attention(**packed(max_seqlen_q=1, max_seqlen_k=1))
    with pytest.raises(ArgumentError, match=f"max_seqlen_{side}="):
        attention(**packed(**{"max_seqlen_q": 1, "max_seqlen_k": 1, f"max_seqlen_{side}": bad}))
    assert len(gpu.launches) == 1


def test_limits_and_offsets_that_go_missing(gpu: PretendedGpu) -> None:
    attention(**packed())
    attention(**dense())
    with pytest.raises(ArgumentError, match="cu_seqlens_k: missing"):
        attention(**packed(cu_seqlens_k=None))
    with pytest.raises(ArgumentError, match="cu_seqlens_q: missing"):
        attention(**packed(cu_seqlens_q=None))
    with pytest.raises(ArgumentError, match="max_seqlen_q=100: is of packed sequences"):
        attention(**dense(max_seqlen_q=100, max_seqlen_k=100))
    with pytest.raises(ArgumentError, match="q: rank 3"):
        attention(**packed(cu_seqlens_q=None, cu_seqlens_k=None))
    assert len(gpu.launches) == 2


def test_a_limit_that_is_missing_is_found_out_every_time(gpu: PretendedGpu) -> None:
    lengths = packed(max_seqlen_q=None)
    attention(**lengths)
    lengths["cu_seqlens_q"].copy_(offsets(60, 68))
    attention(**lengths)
    assert [launch.prepared[1] for launch in gpu.launches] == [100, 68]


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_a_misaligned_address(name: str, gpu: PretendedGpu) -> None:
    attention(**dense(out=half(2, 64, 4, 64)))
    shifted = half(2 * 64 * 4 * 64 + 1)[1:].view(2, 64, 4, 64)
    with pytest.raises(ArgumentError, match=f"{name}: address .* is not a multiple of 16"):
        attention(**dense(out=half(2, 64, 4, 64)) | {name: shifted})
    assert len(gpu.launches) == 1


def test_a_misaligned_vector(gpu: PretendedGpu) -> None:
    attention(**dense(sinks=torch.zeros(4)))
    room = torch.zeros(18, dtype=torch.uint8)
    shifted = torch.frombuffer(room.numpy(), dtype=torch.float32, count=4, offset=1)
    with pytest.raises(ArgumentError, match=r"sinks: address .* is not a multiple of 4"):
        attention(**dense(sinks=shifted))
    assert len(gpu.launches) == 1


def test_an_output_that_shares_memory(gpu: PretendedGpu) -> None:
    call = dense(out=half(2, 64, 4, 64), sinks=torch.zeros(4))
    attention(**call)
    for name in "qkv":
        with pytest.raises(ArgumentError, match=f"out: shares memory with {name}"):
            attention(**call | {"out": call[name]})
    rows = half(3, 64, 4, 64)
    with pytest.raises(ArgumentError, match="out: shares memory with v"):
        attention(**call | {"v": rows[:2], "out": rows[1:]})
    out = half(2, 64, 4, 64)
    with pytest.raises(ArgumentError, match="out: shares memory with sinks"):
        attention(**call | {"out": out, "sinks": out.view(-1)[64:72].view(torch.float32)})
    assert len(gpu.launches) == 1


def test_an_output_between_the_inputs_is_fine(gpu: PretendedGpu) -> None:
    """Slices of one tensor, whose outer bounds meet."""

    def slices() -> dict[str, Any]:
        rows = half(2, 64, 4, 4, 64)
        return {name: rows[:, :, i] for i, name in enumerate(("q", "k", "v", "out"))}

    for _ in range(2):
        call = slices()
        attention(**call)
        assert gpu.launches[-1].addresses[:4] == tuple(t.data_ptr() for t in call.values())


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "sinks"])
def test_gradients(name: str, gpu: PretendedGpu) -> None:
    call = dense(out=half(2, 64, 4, 64), sinks=torch.zeros(4))
    attention(**call)
    grown = call | {name: call[name].clone().requires_grad_()}
    with pytest.raises(ArgumentError, match=f"{name}: requires grad"):
        attention(**grown)
    with torch.no_grad():
        attention(**grown)
    with pytest.raises(ArgumentError, match=f"{name}: requires grad"):
        attention(**grown)
    assert len(gpu.launches) == 2


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_tensors_of_another_kind(name: str, gpu: PretendedGpu) -> None:
    class Derived(torch.Tensor):
        pass

    call = dense(out=half(2, 64, 4, 64))
    attention(**call)
    derived = call | {name: call[name].as_subclass(Derived)}
    attention(**derived)
    attention(**derived)
    assert len(prepared.known) == 1  # which may look different every time
    for other in (call[name].numpy(), call[name].bfloat16(), call[name].to_sparse(), 3):
        with pytest.raises(ArgumentError, match=r"[qkv]|out: "):
            attention(**call | {name: other})
    assert len(gpu.launches) == 3


def on_gpu(value: Any) -> Any:
    """A NumPy array as PyTorch's, if that can be."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(value)


def outcome(call: Callable[..., Any], gpu: PretendedGpu, arguments: dict[str, Any]) -> Any:
    gpu.launches.clear()
    try:
        call(**arguments)
    except Exception as error:
        # Addresses differ from call to call.
        return type(error), str(error), len(gpu.launches)
    return [without_addresses(launch) for launch in gpu.launches]


def pytorch_calls() -> Iterator[tuple[dict[str, Any], InvalidCall]]:
    """Valid calls as calls of attention(), each with the invalid ones made from it."""
    valid = {name: on_gpu_call(arguments) for name, arguments in valid_calls()}
    for bad in invalid_calls():
        name = bad.what.partition(":")[0]
        try:
            arguments = on_gpu_call({k: v for k, v in bad.arguments.items() if k != "cfg"})
        except (TypeError, ValueError, RuntimeError):
            continue  # PyTorch has no such tensors
        if bad.argument != "emulate":
            arguments["emulate"] = False
        if bad.argument == "cfg":
            arguments["config"] = bad.arguments["cfg"]
        yield valid[name], replace(bad, arguments=arguments)


def on_gpu_call(arguments: dict[str, Any]) -> dict[str, Any]:
    call = {name: on_gpu(value) for name, value in arguments.items()}
    call["out"] = call.pop("o")
    return call | {"emulate": False}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
def test_no_mistake_slips_through_after_the_right_call(gpu: PretendedGpu) -> None:
    """Over a thousand calls end as they end in a process that has prepared nothing."""
    tried, differ = 0, []
    for valid, bad in pytorch_calls():
        forget_prepared_calls()
        fresh = outcome(attention, gpu, bad.arguments)
        forget_prepared_calls()
        attention(**valid)
        attention(**valid)
        assert len(prepared.known) == 1
        after = outcome(attention, gpu, bad.arguments)
        tried += isinstance(fresh, tuple)
        if after != fresh:
            differ.append(f"{bad.argument}, {bad.what}: {fresh} became {after}")
    assert tried >= 1000
    assert not differ, "\n".join(differ[:20])


# ---- what is remembered, and for how long ----


def test_what_rests_on_a_choice_is_forgotten_with_it(gpu: PretendedGpu) -> None:
    asked: list[Any] = []

    def choose(problem: Any, device: Any) -> FlashForwardKernelConfig:
        asked.append(problem)
        return CFG if len(asked) < 2 else replace(CFG, swizzled=True)

    def call() -> None:
        options = (False, NO_WINDOW, 0.0, None, *[None] * 5, False, False)
        run_call(choose, (*qkv(), None), options, False, "out")

    for _ in range(3):
        call()
    assert len(asked) == 1
    forget_prepared_calls()
    for _ in range(3):
        call()
    assert len(asked) == 2
    assert [launch.config.swizzled for launch in gpu.launches] == [False] * 3 + [True] * 3


def test_a_choice_that_is_out_of_date_when_it_is_made_is_not_kept(gpu: PretendedGpu) -> None:
    def choose(problem: Any, device: Any) -> FlashForwardKernelConfig:
        forget_prepared_calls()
        return CFG

    options = (False, NO_WINDOW, 0.0, None, *[None] * 5, False, False)
    run_call(choose, (*qkv(), None), options, False, "out")
    assert prepared.known == {}


def test_a_kernel_that_stands_in_is_looked_up_every_time(gpu: PretendedGpu) -> None:
    """A better one may be built the next time."""
    gpu.only_uneven = True
    attention(**dense())
    gpu.only_uneven = False
    attention(**dense())
    assert [launch.semantics.uneven for launch in gpu.launches] == [True, False]


def test_the_number_of_calls_is_bounded(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch, unchecked: Callable[[], None]
) -> None:
    monkeypatch.setattr(prepared, "MOST_CALLS", 3)
    for seq in (64, 128, 192, 256):
        attention(*qkv(seq))
    assert len(prepared.known) == 3
    unchecked()
    attention(*qkv(256))
    with pytest.raises(AssertionError, match="the call was checked"):
        attention(*qkv(64))


def test_nothing_to_compute_is_not_prepared(gpu: PretendedGpu) -> None:
    attention(*qkv(seq_q=0))
    assert (prepared.known, gpu.launches) == ({}, [])


def test_a_refused_launch(gpu: PretendedGpu) -> None:
    def launch(*arguments: int) -> None:
        if refusing:
            raise RuntimeError("cudaLaunchKernel: cudaErrorNoWay: no way")

    gpu.launcher, refusing = launch, False
    attention(*qkv())
    refusing = True
    with count_launches() as counted, pytest.raises(LaunchError, match=r"b2 s64 .*: no way"):
        attention(*qkv())
    refusing = False
    attention(*qkv())
    assert counted.gpu == 0


def test_threads(gpu: PretendedGpu) -> None:
    """Each with lengths of its own, while others forget what was prepared."""
    done = threading.Event()
    wrong: list[Any] = []

    def work(seq: int) -> None:
        for _ in range(200):
            tensors = qkv(seq)
            o = attention(*tensors)
            if o.shape != tensors[0].shape:
                wrong.append(o.shape)

    def forget() -> None:
        while not done.is_set():
            forget_prepared_calls()

    threads = [threading.Thread(target=work, args=(8 * i,)) for i in range(1, 9)]
    forgetting = threading.Thread(target=forget)
    for thread in (*threads, forgetting):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    forgetting.join()
    assert not wrong
    assert len(gpu.launches) == 8 * 200
    for launch in gpu.launches:
        seq, q_rows = launch.prepared[1], launch.prepared[8] // (4 * 64)
        assert seq == q_rows


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_about_its_parents_cuda(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "_cuda_used", True)
    tensors = qkv()
    attention(*tensors)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            attention(*tensors)
        except LaunchError as error:
            status = 0 if "forked after CUDA had been initialised" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    attention(*tensors)


def test_the_choice_is_that_of_the_chooser(gpu: PretendedGpu) -> None:
    attention(**dense(causal=True))
    attention(**dense(causal=True))
    (launch, again) = gpu.launches
    problem = flashsmith.Problem.parse("b2 s64 h4 d64 fp16 causal")
    assert launch.config == again.config == choose_config(problem, flashsmith.device_spec("H200"))
