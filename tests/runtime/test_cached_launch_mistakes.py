"""No mistake slips through because a call like it, but for the mistake, was prepared. No GPU: host
tensors pass for one's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from invalid_calls import InvalidCall, invalid_calls, valid_calls

from flashsmith import attention
from flashsmith.errors import ArgumentError
from flashsmith.runtime import cached_calls, forget_cached_launches, forward_pass

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")

from cached_calls import dense, half, offsets, packed, without_addresses  # noqa: E402
from pretended_gpu import PretendedGpu, pretended_gpu  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu() as pretended:
        yield pretended


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
    with pytest.raises(ArgumentError, match="max_seqlen_q=100: is for packed sequences"):
        attention(**dense(max_seqlen_q=100, max_seqlen_k=100))
    with pytest.raises(ArgumentError, match="q: rank 3"):
        attention(**packed(cu_seqlens_q=None, cu_seqlens_k=None))
    assert len(gpu.launches) == 2


@pytest.mark.parametrize("side", ["q", "k"])
def test_a_limit_that_is_missing_is_found_out_every_time(side: str, gpu: PretendedGpu) -> None:
    lengths = packed(**{f"max_seqlen_{side}": None})
    attention(**lengths)
    lengths[f"cu_seqlens_{side}"].copy_(offsets(60, 68))
    attention(**lengths)
    index = {"q": 6, "k": 7}[side]  # behind the device and how many numbers there are
    assert [launch.prepared[index] for launch in gpu.launches] == [100, 68]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_seqlen_q", 64),
        ("max_seqlen_k", 64),
        ("cu_seqlens_q", offsets(64)),
        ("cu_seqlens_k", offsets(64)),
        ("sinks", torch.zeros(3)),
        ("out", half(2, 64, 3, 64)),
        ("window", (3,)),
        ("emulate", True),
    ],
)
def test_one_argument_more_than_a_plain_call(name: str, value: Any, gpu: PretendedGpu) -> None:
    attention(**dense())
    with pytest.raises(ArgumentError, match=rf"{name}|q: rank|emulate=True"):
        attention(**dense(**{name: value}))
    assert len(gpu.launches) == 1


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


@pytest.mark.parametrize("name", ["sinks", "cu_seqlens_q", "cu_seqlens_k"])
def test_an_output_that_shares_a_vectors_last_bytes(name: str, gpu: PretendedGpu) -> None:
    call = packed(sinks=torch.zeros(4), out=half(128, 4, 64))
    attention(**call)
    room = torch.zeros(8 + 128 * 4 * 64 + 8, dtype=torch.float16)
    vector = call[name]
    last = room[8 - 2 * (len(vector) - 1) :][: 2 * len(vector)].view(vector.dtype)
    last.copy_(vector)
    out = room[8 : 8 + 128 * 4 * 64].view(128, 4, 64)
    with pytest.raises(ArgumentError, match=f"out: shares memory with {name}"):
        attention(**call | {name: last, "out": out})
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
    refused = "out: requires grad" if name == "out" else f"out: given, and {name} requires grad"
    with pytest.raises(ArgumentError, match=refused):
        attention(**grown)
    with torch.no_grad():
        attention(**grown)
    with pytest.raises(ArgumentError, match=refused):
        attention(**grown)
    assert len(gpu.launches) == 2


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "sinks"])
def test_tensors_of_another_kind(
    name: str, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Derived(torch.Tensor):
        pass

    checked: list[Any] = []
    check = forward_pass.check_request

    def note(*arguments: Any, **options: Any) -> Any:
        checked.append(arguments)
        return check(*arguments, **options)

    monkeypatch.setattr(forward_pass, "check_request", note)
    call = dense(out=half(2, 64, 4, 64), sinks=torch.zeros(4))
    attention(**call)
    attention(**call)
    assert len(checked) == 1
    derived = call | {name: call[name].as_subclass(Derived)}
    attention(**derived)
    attention(**derived)
    assert len(checked) == 3  # they may look different every time
    for other in (call[name].numpy(), call[name].double(), call[name].to_sparse(), 3):
        with pytest.raises(ArgumentError, match=r"[qkv]: |out: |sinks: "):
            attention(**call | {name: other})
    assert len(gpu.launches) == 4


def test_numbers_of_an_unusual_type_are_checked_every_time(gpu: PretendedGpu) -> None:
    for scale in (Fraction(1, 8), np.float64(0.125), 0.125):
        attention(**dense(scale=scale))
    assert len(cached_calls.cached) == 2
    assert without_addresses(gpu.launches[0]) == without_addresses(gpu.launches[2])


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
        forget_cached_launches()
        fresh = outcome(attention, gpu, bad.arguments)
        forget_cached_launches()
        attention(**valid)
        attention(**valid)
        assert len(cached_calls.cached) == 1
        after = outcome(attention, gpu, bad.arguments)
        tried += isinstance(fresh, tuple)
        if after != fresh:
            differ.append(f"{bad.argument}, {bad.what}: {fresh} became {after}")
    assert tried >= 1000
    assert not differ, "\n".join(differ[:20])
