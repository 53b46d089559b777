"""Gradients whose launches are one CUDA graph, on a GPU: the same bits as by launches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import flashsmith
from flashsmith.runtime import forget_cached_launches

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

CALLS = 12
SPLIT = (
    "(BF16, 128, 64, 64, 1wg): tma+stages_2+q_buffers_1+regs_24_232+overlap+dynamic+rescale_8"
    "+ctas_2+split_16+pack_gqa"
)
ATOMICS = "(BF16, 128, 64, 64, 4): backward+columns_2+stages_2+dq_atomics"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget_cached_launches()
    yield
    torch.cuda.synchronize()


def drawn(seed: int) -> tuple[Any, ...]:
    """do, q, k, v, o and lse, always the same of a seed."""
    generator = torch.Generator("cuda").manual_seed(seed)
    do, q, k, v = (
        torch.randn(1, 256, 2, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(4)
    )
    return do, q, k, v, *flashsmith.attention(q, k, v, causal=True, return_lse=True)


def gradients(tensors: tuple[Any, ...]) -> Any:
    return flashsmith.backward(*tensors, causal=True, deterministic=True)[:3]


def by_launches(tensors: tuple[Any, ...]) -> Any:
    """A first call gets no graph."""
    forget_cached_launches()
    return gradients(tensors)


def assert_same(found: Any, expected: Any) -> None:
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def launched(call: Any) -> set[str]:
    """What CUDA was called for."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return {event.name for event in profiled.events() if "aunch" in event.name}


def assert_by_graphs(call: Any) -> None:
    names = launched(call)
    assert names
    assert all("GraphLaunch" in name for name in names)


def test_a_repeated_call_is_one_graph_of_other_arguments() -> None:
    cases = [drawn(seed) for seed in range(CALLS)]
    expected = [by_launches(case) for case in cases]
    found = [gradients(case) for case in cases]
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)
    assert_by_graphs(lambda: gradients(cases[0]))


def test_forward_passes_in_parts_too() -> None:
    """Parts of the keys, then their merge, which leaves the counters zero."""
    config = flashsmith.parse_kernel_name_into_config(SPLIT)
    cases = []
    for seed in range(CALLS):
        generator = torch.Generator("cuda").manual_seed(seed)
        cases.append(
            [
                torch.randn(
                    1, length, 4, 128, device="cuda", dtype=torch.bfloat16, generator=generator
                )
                for length in (64, 4096, 4096)
            ]
        )

    def call(case: Any) -> Any:
        return flashsmith.attention(*case, return_lse=True, config=config)

    expected = []
    for case in cases:
        forget_cached_launches()
        expected.append(call(case))
    found = [call(case) for case in cases]
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)
    assert_by_graphs(lambda: call(cases[0]))


def test_sums_are_zeroed_before_every_graph() -> None:
    """Atomics add to them, in an order that timing decides."""
    config = flashsmith.parse_kernel_name_into_config(ATOMICS)
    cases = [drawn(seed) for seed in range(CALLS)]
    for case in (*cases, *cases):
        found = flashsmith.backward(*case, causal=True, config=config)[:3]
        for ours, theirs in zip(found, gradients(case), strict=True):
            error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
            assert error.item() < 0.01


def test_captured_and_replayed_between_calls() -> None:
    first, second = drawn(1), drawn(2)
    expected = by_launches(first), by_launches(second)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            gradients(first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = gradients(first)
    for _ in range(3):
        for gradient in captured:
            gradient.zero_()
        graph.replay()
        between = gradients(second)
    assert_same(captured, expected[0])
    assert_same(between, expected[1])


def test_threads_and_streams_get_their_own_gradients() -> None:
    cases = [drawn(seed) for seed in range(4)]
    expected = [by_launches(case) for case in cases]
    torch.cuda.synchronize()
    found: list[Any] = [None] * len(cases)

    def work(index: int) -> None:
        stream = torch.cuda.Stream() if index % 2 else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            for _ in range(CALLS):
                found[index] = gradients(cases[index])
        stream.synchronize()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)


def test_forgotten_while_it_runs() -> None:
    """A graph that runs is not disturbed by its end."""
    case = drawn(3)
    expected = by_launches(case)
    torch.cuda._sleep(50_000_000)
    found = [gradients(case) for _ in range(CALLS)]
    forget_cached_launches()
    for ours in found:
        assert_same(ours, expected)
