"""A merge like one before launches what a checked one launches, elsewhere. No GPU: host tensors
pass for one's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flashsmith import merge_attention
from flashsmith.chooser import merge
from flashsmith.errors import ArgumentError

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")

from cached_calls import without_addresses  # noqa: E402
from pretended_gpu import PretendedGpu, pretended_gpu  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu() as pretended:
        yield pretended


def parts(count: int, dtype: Any = torch.float32) -> tuple[list[Any], list[Any]]:
    outs = [torch.zeros(2, 5, 4, 64, dtype=dtype) for _ in range(count)]
    return outs, [torch.zeros(2, 4, 5) for _ in range(count)]


def places(outs: list[Any], lses: list[Any], sinks: Any, found: Any) -> tuple[int, ...]:
    """The addresses that a launch must be given: in the operation's order, 0 for what is absent."""
    tensors = [outs[0], lses[0], *found]
    for pair in zip(outs[1:], lses[1:], strict=True):
        tensors += pair
    tensors += [None] * (18 - len(tensors)) + [sinks]
    return tuple(0 if it is None else it.data_ptr() for it in tensors)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    ("count", "dtype", "wanted"),
    [(1, torch.float16, None), (2, torch.float32, "bfloat16"), (8, torch.float32, None)],
)
def test_a_merge_like_one_before(
    gpu: PretendedGpu,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    dtype: Any,
    wanted: Any,
    has_sinks: bool,
) -> None:
    def call() -> Any:
        outs, lses = parts(count, dtype)
        sinks = torch.zeros(4) if has_sinks else None
        found = merge_attention(outs, lses, sinks, dtype=wanted)
        assert gpu.launches[-1].addresses == places(outs, lses, sinks, found)
        return found

    o, lse = call()
    monkeypatch.setattr(merge, "prepare_operation", None)
    again, lse_again = call()
    first, second = (without_addresses(launch) for launch in gpu.launches)
    assert first == second
    for one, other in ((o, again), (lse, lse_again)):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())


def test_what_differs_is_checked(gpu: PretendedGpu) -> None:
    outs, lses = parts(2)
    merge_attention(outs, lses)
    merge_attention(outs, lses)
    with pytest.raises(ArgumentError, match=r"lses\[1\]"):
        merge_attention(outs, [lses[0], torch.zeros(2, 4, 6)])
    with pytest.raises(ArgumentError, match=r"outs\[1\]"):
        merge_attention([outs[0], torch.zeros(2 * 5 * 4 * 64 + 1)[1:].view(2, 5, 4, 64)], lses)
    with pytest.raises(ArgumentError, match="dtype='int8'"):
        merge_attention(outs, lses, dtype="int8")
    assert merge_attention(outs, lses, dtype="float16")[0].dtype is torch.float16
    assert len(gpu.launches) == 3
