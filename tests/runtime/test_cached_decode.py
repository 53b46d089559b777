"""A call over a cache like one before skips the checks and launches what a checked one launches;
one that must be refused is refused all the same. No GPU: host tensors pass for one's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flashsmith.errors import ArgumentError
from flashsmith.families import parse_kernel_name_into_config
from flashsmith.runtime import decode_pass, forget_cached_launches, operation_run
from flashsmith.runtime.decode_pass import CachedDecode

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")

from cached_calls import (  # noqa: E402
    GROWN,
    ODD,
    Mistakes,
    check_mistake_stays_one,
    check_signatures_differ,
    half,
    offsets,
    refuse_checks,
)
from pretended_gpu import PretendedGpu, pretended_gpu  # noqa: E402

from flashsmith import attention_with_cache  # noqa: E402
from flashsmith.runtime.frameworks.torch import TorchTensors  # noqa: E402

pytestmark = pytest.mark.torch

CFG = parse_kernel_name_into_config("(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_2")
ORDER = (
    *("q", "k_cache", "v_cache", "cache_lens", "o", "lse", "page_table", "k", "v", "cos", "sin"),
    *("sinks", "cu_seqlens_q"),
)
LENS = [100, 0]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedGpu]:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("a tensor of the device was read")

    monkeypatch.setattr(TorchTensors, "as_numpy", refuse)
    monkeypatch.setattr(TorchTensors, "longest_steps", refuse)
    with pretended_gpu() as pretended:
        yield pretended


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After calling it, a call that goes through the checks fails."""
    return lambda: refuse_checks(monkeypatch, decode_pass)


def dense(**options: Any) -> dict[str, Any]:
    return {
        "q": half(2, 1, 4, 64),
        "k_cache": half(2, 128, 2, 64),
        "v_cache": half(2, 128, 2, 64),
        "cache_lens": torch.tensor(LENS, dtype=torch.int32),
        **options,
    }


def paged(**options: Any) -> dict[str, Any]:
    table = torch.zeros(2, 8, dtype=torch.int32)
    caches = {name: half(10, 16, 2, 64) for name in ("k_cache", "v_cache")}
    return dense(**{**caches, "page_table": table, **options})


def appending(**options: Any) -> dict[str, Any]:
    return {"k": half(2, 1, 2, 64), "v": half(2, 1, 2, 64), **options}


def interleaved() -> dict[str, Any]:
    both = half(2, 2, 128, 2, 64)
    return dense(**appending(k_cache=both[:, 0], v_cache=both[:, 1]))


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "dense": dense,
    "paged": paged,
    "with its LSE": lambda: dense(return_lse=True),
    "an output of one's own": lambda: dense(out=half(2, 1, 4, 64), return_lse=True),
    "not causal": lambda: dense(causal=False),
    "window, capped and scaled": lambda: dense(window=(5, None), softcap=20.0, scale=0.5),
    "sinks": lambda: dense(sinks=torch.zeros(4)),
    "a free split": lambda: dense(split="free"),
    "a config": lambda: dense(config=CFG),
    "appending": lambda: paged(**appending()),
    "appending to halves of one tensor": interleaved,
    "rotary": lambda: dense(**appending(cos=half(128, 32), sin=half(128, 32))),
    "rotary in fp32": lambda: dense(
        **appending(cos=torch.zeros(128, 8), sin=torch.zeros(128, 8), rotary_interleaved=True)
    ),
    "heads outside": lambda: dense(k_cache=half(2, 2, 128, 64).transpose(1, 2)),
    "packed, everything": lambda: paged(
        q=half(7, 4, 64), k=half(7, 2, 64), v=half(7, 2, 64), cos=half(128, 32), sin=half(128, 32),
        sinks=torch.zeros(4), cu_seqlens_q=offsets(2, 5), max_seqlen_q=5, out=half(7, 4, 64),
        return_lse=True,
    ),
    "packed, of unknown lengths": lambda: dense(q=half(7, 4, 64), cu_seqlens_q=offsets(2, 5)),
}  # fmt: skip


def places(call: dict[str, Any], outputs: Any) -> tuple[int, ...]:
    """The addresses that a launch must be given."""
    o, lse = outputs if isinstance(outputs, tuple) else (outputs, None)
    found = ((call | {"o": o, "lse": lse}).get(name) for name in ORDER)
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in found)


def facts(outputs: Any) -> list[Any]:
    found = outputs if isinstance(outputs, tuple) else (outputs,)
    return [(t.shape, t.stride(), t.dtype) for t in found]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_like_one_before_launches_the_same_elsewhere_and_reads_nothing(
    name: str, gpu: PretendedGpu, unchecked: Callable[[], None]
) -> None:
    # There is no plan of the lengths on the host that the next step could overwrite (vllm#23737).
    first, second = CALLS[name](), CALLS[name]()
    checked = attention_with_cache(**first)
    unchecked()
    outputs = attention_with_cache(**second)
    assert facts(outputs) == facts(checked)
    assert [launch.addresses for launch in gpu.launches] == [
        places(first, checked),
        places(second, outputs),
    ]
    assert gpu.launches[0].prepared is gpu.launches[1].prepared


def test_small_workspaces_are_kept_on_the_default_stream(gpu: PretendedGpu) -> None:
    """As gradients' are; each call on another stream has its own."""
    seen: list[int] = []
    gpu.launcher = lambda stream, *at: seen.append(at[-1])

    def blocks(of_size: int, stream: int) -> tuple[list[int], list[Any]]:
        gpu.block_bytes, gpu.stream = of_size, stream
        forget_cached_launches()
        gpu.kernels.clear()
        outputs = [attention_with_cache(**dense()) for _ in range(4)]
        return seen[-3:], outputs  # the first one is checked

    small, outputs = blocks(4096, 0)
    assert len(set(small)) == 1
    assert {output.data_ptr() for output in outputs}.isdisjoint(small)
    assert blocks(8192, 0)[0] == small
    elsewhere = blocks(4096, 7)[0] + blocks(operation_run.KEPT_BYTES + 4, 0)[0]
    assert set(elsewhere).isdisjoint(small)


def test_different_calls_have_different_signatures(gpu: PretendedGpu) -> None:
    check_signatures_differ(gpu, attention_with_cache, CALLS.values())


def test_lengths_that_are_not_known_bound_the_grid_by_all_rows(gpu: PretendedGpu) -> None:
    for name in ("packed, everything", "packed, of unknown lengths"):
        attention_with_cache(**CALLS[name]())
    # batch and seq_q, the operation's first numbers.
    assert [launch.prepared[5:7] for launch in gpu.launches] == [(2, 5), (2, 7)]


MISTAKES: Mistakes = {
    **{f"{name} that grows": {name: GROWN} for name in ("q", "k_cache", "v", "cos", "sinks")},
    **{f"an odd {name}": {name: ODD} for name in ("q", "k_cache", "v_cache", "k", "v")},
    **{f"no {name}": {name: None} for name in ("q", "k_cache", "v_cache", "cache_lens", "k")},
    "causal that is a number": {"causal": 1},
    "another split": {"split": "odd"},
    "lengths of 64 bits": {"cache_lens": torch.zeros(2, dtype=torch.int64)},
    "a table of one row": {"page_table": torch.zeros(1, 8, dtype=torch.int32)},
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_after_a_valid_call_is_still_one(name: str, gpu: PretendedGpu) -> None:
    def valid() -> dict[str, Any]:
        angles = {name: torch.zeros(128, 8) for name in ("cos", "sin")}
        return paged(**appending(**angles, sinks=torch.zeros(4), causal=True))

    check_mistake_stays_one(gpu, attention_with_cache, valid, MISTAKES[name])


@pytest.mark.parametrize("written", ["out", "k_cache", "v_cache"])
def test_what_is_written_must_not_lie_where_the_call_reads(written: str, gpu: PretendedGpu) -> None:
    """Though a call like it before had memory of its own for each."""
    call = dense(**appending(out=half(2, 1, 4, 64)))
    attention_with_cache(**call)
    memory = half(2 * 128 * 2 * 64)
    shape = call[written].shape
    call |= {written: memory[: shape.numel()].view(shape), "q": memory[:512].view(2, 1, 4, 64)}
    with pytest.raises(ArgumentError, match=f"{'o' if written == 'out' else written}.* shares"):
        attention_with_cache(**call)
    assert len(gpu.launches) == 1


def test_caches_that_are_written_must_not_share_memory(gpu: PretendedGpu) -> None:
    """But they may be halves of one tensor, wherever it is."""
    call = dense(**appending())
    attention_with_cache(**call)
    for v_cache in (call["k_cache"], half(2 * 128 * 2 * 64 + 8)[8:].view(2, 128, 2, 64)):
        memory = v_cache if v_cache is call["k_cache"] else v_cache._base[:-8].view_as(v_cache)
        with pytest.raises(ArgumentError, match="v_cache: shares memory with k_cache"):
            attention_with_cache(**{**call, "k_cache": memory, "v_cache": v_cache})
    attention_with_cache(**interleaved())
    both = interleaved()
    both["v_cache"] = both["k_cache"]
    with pytest.raises(ArgumentError, match="v_cache: shares memory with k_cache"):
        attention_with_cache(**both)
    assert len(gpu.launches) == 2


def test_addresses_are_looked_at_once_and_their_number_is_bounded(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_pass, "_MOST_KNOWN", 3)
    looked_at: list[tuple[int, ...]] = []
    is_usable = CachedDecode._is_usable

    def note(cached: CachedDecode, at: tuple[int, ...]) -> bool:
        looked_at.append(at)
        assert len(cached._known) <= 3
        return is_usable(cached, at)

    monkeypatch.setattr(CachedDecode, "_is_usable", note)
    calls = [dense() for _ in range(4)]
    attention_with_cache(**dense())
    for call in calls[:3] * 2:
        attention_with_cache(**call)
    assert len(looked_at) == 3
    for call in calls[::-1]:
        attention_with_cache(**call)
    assert len(looked_at) == 3 + 1 + 3
