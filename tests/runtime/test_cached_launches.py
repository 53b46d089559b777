"""A call like one before skips the checks and launches what a checked call launches; for how long
calls are remembered. No GPU: host tensors pass for one's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from flashsmith import Problem, attention, device_spec
from flashsmith.chooser import choose_config
from flashsmith.errors import LaunchError
from flashsmith.families import FlashForwardKernelConfig
from flashsmith.integrations import traceable
from flashsmith.runtime import (
    cached_calls,
    count_launches,
    forget_cached_launches,
    forward,
    forward_pass,
    process_forks,
    run_call,
)
from flashsmith.runtime.libraries import loaded_kernels
from flashsmith.semantics.signature import ForwardOptions

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")

from cached_calls import (  # noqa: E402
    CALLS,
    CFG,
    check_signatures_differ,
    dense,
    events,
    qkv,
    refuse_checks,
    run_while_others_forget,
    without_addresses,
)
from pretended_gpu import PretendedGpu, pretended_gpu  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu() as pretended:
        yield pretended


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After calling it, a call that goes through the checks fails."""
    return lambda: refuse_checks(monkeypatch, forward_pass)


def places(arguments: dict[str, Any], outputs: Any) -> tuple[int, ...]:
    """The addresses that a launch must be given."""
    o, *statistics = outputs if isinstance(outputs, tuple) else (outputs,)
    values = iter(statistics)
    has_lse = arguments.get("return_lse") or arguments.get("partial")
    lse = next(values) if has_lse else None
    row_max = next(values) if arguments.get("return_row_max") else None
    vectors = [arguments.get(name) for name in ("sinks", "cu_seqlens_q", "cu_seqlens_k")]
    # The last two are of parts of the keys, whose calls are not repeated so.
    tensors = (*(arguments[name] for name in "qkv"), o, lse, row_max, *vectors, None, None)
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)


def facts(outputs: Any) -> list[Any]:
    every = outputs if isinstance(outputs, tuple) else (outputs,)
    return [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in every]


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
    for call in (first, second):
        versions = {name: it._version for name, it in call.items() if torch.is_tensor(it)}
        assert all((version > 0) == (name == "out") for name, version in versions.items())


def test_different_calls_have_different_signatures(gpu: PretendedGpu) -> None:
    check_signatures_differ(gpu, attention, CALLS.values())


def test_no_real_kernel_is_launched(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever another test left on the kernels that are loaded: host addresses kill a GPU's
    context."""
    monkeypatch.setitem(vars(loaded_kernels), "get", None)
    forward(CFG, *qkv())
    assert len(gpu.launches) == 1


def test_forward_prepares_by_its_config(gpu: PretendedGpu, unchecked: Callable[[], None]) -> None:
    other = replace(CFG, swizzled=True)
    tensors = qkv()
    forward(CFG, *tensors)
    forward(other, *tensors)
    unchecked()
    forward(replace(CFG), *tensors)  # an equal one
    forward(other, *tensors)
    assert [launch.config for launch in gpu.launches] == [CFG, other] * 2


def test_the_current_stream_is_queried_every_time(gpu: PretendedGpu) -> None:
    tensors = qkv()
    for stream in (0, 7, 9):
        gpu.stream = stream
        attention(*tensors)
    assert [launch.stream for launch in gpu.launches] == [0, 7, 9]


# ---- what is remembered, and for how long ----


def test_what_rests_on_a_choice_is_forgotten_with_it(gpu: PretendedGpu) -> None:
    asked: list[Any] = []

    def choose(problem: Any, device: Any) -> FlashForwardKernelConfig:
        asked.append(problem)
        return CFG if len(asked) < 2 else replace(CFG, swizzled=True)

    def call() -> None:
        options = ForwardOptions()
        run_call(choose, (*qkv(), None), options, False, "out")

    for _ in range(3):
        call()
    assert len(asked) == 1
    forget_cached_launches()
    for _ in range(3):
        call()
    assert len(asked) == 2
    assert [launch.config.swizzled for launch in gpu.launches] == [False] * 3 + [True] * 3


def test_a_choice_that_is_out_of_date_when_it_is_made_is_not_kept(gpu: PretendedGpu) -> None:
    def choose(problem: Any, device: Any) -> FlashForwardKernelConfig:
        forget_cached_launches()
        return CFG

    options = ForwardOptions()
    run_call(choose, (*qkv(), None), options, False, "out")
    assert cached_calls.cached == {}


def test_a_general_edge_kernel_is_looked_up_every_time(gpu: PretendedGpu) -> None:
    """A better one may be built the next time."""
    gpu.only_uneven = True
    forward(CFG, *qkv())
    gpu.only_uneven = False
    forward(CFG, *qkv())
    assert [launch.semantics.uneven for launch in gpu.launches] == [True, False]


def test_the_number_of_calls_is_bounded(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch, unchecked: Callable[[], None]
) -> None:
    for most in ("MOST_CALLS", "MOST_SHAPES"):
        monkeypatch.setattr(cached_calls, most, 3)
    for seq in (64, 128, 192, 256):
        attention(*qkv(seq))
    assert len(cached_calls.cached) == 3
    unchecked()
    attention(*qkv(256))
    with pytest.raises(AssertionError, match="the call was checked"):
        attention(*qkv(64))


def test_an_empty_call_is_not_cached(gpu: PretendedGpu) -> None:
    attention(*qkv(seq_q=0))
    assert (cached_calls.cached, gpu.launches) == ({}, [])


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
    wrong: list[Any] = []

    def work(seq: int) -> None:
        for _ in range(200):
            tensors = qkv(seq)
            o = attention(*tensors)
            if o.shape != tensors[0].shape:
                wrong.append(o.shape)

    run_while_others_forget(work, range(8, 65, 8))
    assert not wrong
    assert len(gpu.launches) == 8 * 200
    for launch in gpu.launches:
        seq, q_rows = launch.prepared[6], launch.prepared[14] // (4 * 64)
        assert seq == q_rows


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_an_error_about_its_parents_cuda(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_forks, "_cuda_used", True)
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
    problem = Problem.parse("b2 s64 h4 d64 fp16 causal")
    assert launch.config == again.config == choose_config(problem, device_spec("H200"))


@pytest.mark.parametrize(("name", "most"), [("causal", 43), ("packed", 60)])
def test_a_call_like_one_before_does_little(name: str, most: int, gpu: PretendedGpu) -> None:
    """Counted, since time on a shared machine says nothing: a checked call enters hundreds."""
    arguments = CALLS[name]()
    assert events(lambda: attention(**arguments)) > 2 * most
    assert events(lambda: attention(**arguments)) <= most
    # Nor more in a process that has had calls with gradients.
    traceable._find_with_gradients()
    assert events(lambda: attention(**arguments)) <= most
