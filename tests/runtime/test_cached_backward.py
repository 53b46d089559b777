"""A backward pass like one before skips the checks and launches what a checked one launches; one
that must be refused is refused all the same. No GPU: host tensors pass for one's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest

from flashsmith import backward, chooser
from flashsmith.errors import ArgumentError
from flashsmith.families import parse_kernel_name_into_config
from flashsmith.runtime import (
    backward_pass,
    cached_calls,
    forget_cached_launches,
)

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")

from cached_calls import (  # noqa: E402
    GROWN,
    ODD,
    Mistakes,
    check_mistake_stays_one,
    check_signatures_differ,
    events,
    half,
    offsets,
    qkv,
    refuse_checks,
)
from pretended_gpu import PretendedGpu, pretended_gpu  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import flashsmith  # noqa: E402
from flashsmith.runtime.frameworks.torch import TorchTensors  # noqa: E402

pytestmark = pytest.mark.torch

CFG = parse_kernel_name_into_config("(FP16, 64, 64, 64, 4): backward")
ORDER = (
    *("do", "q", "k", "v", "o", "lse", "dq", "dk", "dv", "dsinks"),
    *("dlse", "sinks", "cu_seqlens_q", "cu_seqlens_k"),
)


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu() as pretended:
        yield pretended


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After calling it, a call that goes through the checks fails."""
    return lambda: refuse_checks(monkeypatch, backward_pass)


def dense(**options: Any) -> dict[str, Any]:
    q, k, v = qkv(heads_k=2)
    lse = torch.zeros(2, 4, 64)
    return {"do": half(*q.shape), "q": q, "k": k, "v": v, "o": half(*q.shape), "lse": lse} | options


def packed(**options: Any) -> dict[str, Any]:
    call = dense()
    rows = {name: call[name].flatten(0, 1) for name in ("do", "q", "k", "v", "o")}
    return {
        **rows,
        **{"lse": torch.zeros(4, 128)},
        **{"cu_seqlens_q": offsets(100, 28), "cu_seqlens_k": offsets(28, 100)},
        **{"max_seqlen_q": 100, "max_seqlen_k": 100},
        **options,
    }


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "dense": dense,
    "causal": lambda: dense(causal=True),
    "window, capped and scaled": lambda: dense(window=(5, None), softcap=20.0, scale=0.5),
    "sinks": lambda: dense(sinks=torch.zeros(4)),
    "sinks and dlse": lambda: dense(sinks=torch.zeros(4), dlse=torch.zeros(2, 4, 64)),
    "dq alone": lambda: dense(needs=(True, False, False, False)),
    "without dq": lambda: dense(needs=(False, True, True, True)),
    "repeatable": lambda: dense(deterministic=True),
    "fp32 gradients": lambda: dense(grad_dtype="float32"),
    "a config": lambda: dense(config=CFG),
    "all said": lambda: dense(
        causal=True,
        sinks=None,
        dlse=torch.zeros(2, 4, 64),
        deterministic=False,
        needs=(True, True, True, False),
        grad_dtype="float32",
        config=None,
        softcap=0.0,
        scale=None,
        emulate=False,
    ),
    "heads outside": lambda: dense(q=half(2, 4, 64, 64).transpose(1, 2)),
    "broadcast keys": lambda: dense(k=half(2, 64, 1, 64).expand(-1, -1, 2, -1)),
    "rows of do apart": lambda: dense(do=half(2, 64, 4, 128)[..., :64]),
    "packed": packed,
    "packed, everything": lambda: packed(
        causal=True, sinks=torch.zeros(4), dlse=torch.zeros(4, 128)
    ),
}
COPIED: dict[str, Callable[[], dict[str, Any]]] = {
    "one number": lambda: dense(
        do=half(1).expand(2, 64, 4, 64), dlse=torch.zeros(1).expand(2, 4, 64)
    ),
    "columns outside": lambda: dense(do=half(64, 2, 64, 4).permute(1, 2, 3, 0)),
}


def places(call: dict[str, Any], gradients: Any) -> tuple[int, ...]:
    """The addresses that a launch must be given."""
    tensors = call | gradients._asdict()
    found = (tensors.get(name) for name in ORDER)
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in found)


def facts(gradients: Any) -> list[Any]:
    return [None if t is None else (t.shape, t.stride(), t.dtype) for t in gradients]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_like_one_before_launches_the_same_elsewhere(
    name: str, gpu: PretendedGpu, unchecked: Callable[[], None]
) -> None:
    first, second = CALLS[name](), CALLS[name]()
    checked = backward(**first)
    unchecked()
    gradients = backward(**second)
    assert facts(gradients) == facts(checked)
    launches = gpu.launches
    assert [launch.addresses for launch in launches] == [
        places(first, checked),
        places(second, gradients),
    ]
    assert launches[0].prepared is launches[1].prepared
    for tensor in gradients:
        assert tensor is None or tensor.is_contiguous()


@pytest.mark.parametrize(("name", "served"), [("all said", True), ("dense", False)])
def test_a_call_that_leaves_nothing_to_pytorchs_state_is_served_by_its_arguments(
    name: str, served: bool, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = CALLS[name]()
    expected = facts(backward(**first))
    refused = mock.Mock(side_effect=AssertionError("it was not served"))
    monkeypatch.setattr(chooser, "backward", refused)
    for changes, is_served in (
        ({}, served),
        ({"do": first["do"][..., :32]}, False),
        ({"o": first["o"].bfloat16()}, False),
        ({"needs": (True, True, False, False)}, False),
        ({"causal": None}, False),
    ):
        call = {**CALLS[name](), **changes}
        with nullcontext() if is_served else pytest.raises(AssertionError, match="not served"):
            assert facts(backward(**call)) == expected
            assert gpu.launches[-1].addresses[1] == call["q"].data_ptr()
    forget_cached_launches()
    with pytest.raises(AssertionError, match="not served"):
        backward(**CALLS[name]())


@pytest.mark.parametrize("name", COPIED)
def test_what_a_kernel_cannot_read_is_copied_every_time(
    name: str, gpu: PretendedGpu, unchecked: Callable[[], None]
) -> None:
    call = COPIED[name]()
    backward(**call)
    unchecked()
    backward(**COPIED[name]())
    for launch in gpu.launches:
        assert launch.addresses[0] not in (0, call["do"].data_ptr())
    # The kernel was planned for the copy's strides.
    numbers = gpu.launches[0].prepared[5:]
    assert numbers[9:12] == (64 * 4 * 64, 4 * 64, 64)


def test_different_calls_have_different_signatures(gpu: PretendedGpu) -> None:
    check_signatures_differ(gpu, backward, (*CALLS.values(), *COPIED.values()))


def test_small_workspaces_are_kept_on_the_default_stream(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither another thread nor another stream has them, nor has a large block's call."""
    seen: list[tuple[int, int]] = []
    gpu.launcher = lambda stream, *at: seen.append((stream, at[14]))
    made: list[Any] = []
    right = TorchTensors.allocator

    def noting(self: Any, like: Any, shape: Any, dtype: str, **how: Any) -> Callable[[], Any]:
        new = right(self, like, shape, dtype, **how)

        def allocate() -> Any:
            made.append(new())  # alive, so that no other has its address
            return made[-1]

        return allocate if dtype == "int32" else new

    monkeypatch.setattr(TorchTensors, "allocator", noting)

    def blocks(of_size: int, stream: int = 0, count: int = 3) -> list[int]:
        gpu.block_bytes, gpu.stream = of_size, stream
        forget_cached_launches()
        gpu.kernels.clear()
        for _ in range(count + 1):
            backward(**dense())
        found = seen[-count:]  # the first one is checked
        assert {stream for stream, _ in found} == {stream}
        assert all(any(it.data_ptr() == at for it in made) for _, at in found)
        assert all(it.numel() * it.element_size() >= of_size for it in made[-1:])
        return [at for _, at in found]

    small = blocks(4096) + blocks(cached_calls.KEPT_BYTES)
    assert len(set(small)) == 1
    assert len({*small, *blocks(4096, stream=7)}) == 4
    assert len({*small, *blocks(cached_calls.KEPT_BYTES + 4)}) == 4
    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(blocks, 4096).result()
    assert len(set(elsewhere)) == 1
    assert elsewhere[0] != small[0]


def test_a_copy_for_an_address_is_not_for_others(gpu: PretendedGpu) -> None:
    """do lies at an odd address in one call, at a good one in the next."""
    memory = half(2 * 64 * 4 * 64 + 8)
    odd, good = (memory[i:][: 2 * 64 * 4 * 64].view(2, 64, 4, 64) for i in (1, 8))
    for _ in range(2):
        backward(**dense(do=odd))
        assert gpu.launches[-1].addresses[0] != odd.data_ptr()
        backward(**dense(do=good))
        assert gpu.launches[-1].addresses[0] == good.data_ptr()
    assert len(cached_calls.cached) == 1


MISTAKES: Mistakes = {
    **{f"{name} that grows": {name: GROWN} for name in (*ORDER[:6], "sinks", "dlse")},
    **{f"an odd {name}": {name: ODD} for name in ("q", "k", "v", "o")},
    **{f"no {name}": {name: None} for name in ORDER[:6]},
    "a need that is a number": {"needs": (1, True, True, True)},
    "causal that is a number": {"causal": 0},
    "another grad_dtype": {"grad_dtype": "float16"},
    "deterministic that is a number": {"deterministic": 0},
    "a longer lse": {"lse": torch.zeros(2, 4, 65)},
    "lse of 16 bits": {"lse": half(2, 4, 64)},
    "dlse of 16 bits": {"dlse": half(2, 4, 64)},
    "fewer heads of do": {"do": half(2, 64, 2, 64)},
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_after_a_valid_call_is_still_one(name: str, gpu: PretendedGpu) -> None:
    def valid() -> dict[str, Any]:
        return dense(causal=False, sinks=torch.zeros(4), dlse=torch.zeros(2, 4, 64))

    check_mistake_stays_one(gpu, backward, valid, MISTAKES[name])


def test_attention_and_its_gradients_are_not_checked_again(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = [tensor.requires_grad_() for tensor in qkv()]

    def step() -> Any:
        o, lse = flashsmith.attention(*leaves, causal=True, return_lse=True)
        return torch.autograd.grad((o.sum(), lse.sum()), leaves)

    step()
    refuse_checks(monkeypatch, backward_pass, flashsmith.runtime.forward_pass)
    step()
    first, first_back, second, second_back = gpu.launches
    assert first.prepared is second.prepared
    assert first_back.prepared is second_back.prepared
    assert [len(launch.addresses) for launch in gpu.launches] == [11, 14, 11, 14]


def test_gradients_that_follow_a_cached_forward_pass_are_found_with_it(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the backward pass's own signature, from the second step like one before."""
    q, k, v = [tensor.requires_grad_() for tensor in qkv()]
    found: list[Any] = []
    right = cached_calls.find

    def noting(asked: Any) -> Any:
        found.append(asked.names)
        return right(asked)

    monkeypatch.setattr(cached_calls, "find", noting)

    def looked_up(
        leaves: tuple[Any, ...] = (q, k, v), do: Any = None, swap: Any = None, **hooks: Any
    ) -> int:
        with torch.autograd.graph.saved_tensors_hooks(*hooks["hooks"]) if hooks else nullcontext():
            o = flashsmith.attention(q, k, v, causal=True)
        found.clear()
        if swap is not None:
            swap()
        gradients = torch.autograd.grad(o, leaves, half(*o.shape) if do is None else do)
        assert [tuple(it.shape) for it in gradients] == [tuple(it.shape) for it in leaves]
        assert set(found) <= {"backward"}
        return len(found)

    assert looked_up() > 0
    assert [looked_up() for _ in range(3)] == [0, 0, 0]
    # What differs is found by its signature, and remembered.
    k.requires_grad_(False)
    assert [looked_up((q, v)) > 0 for _ in range(3)] == [True, False, False]
    k.requires_grad_()
    strided = half(*q.transpose(1, 2).shape).transpose(1, 2)
    assert [looked_up(do=strided) > 0 for _ in range(3)] == [True, False, False]
    # Nothing that the forward pass had may be taken for granted.

    def with_other_strides(saved: Any) -> Any:
        return saved.transpose(1, 2).contiguous().transpose(1, 2) if saved.dim() == 4 else saved

    hooks = (lambda it: it, with_other_strides)
    assert [looked_up(hooks=hooks) > 0 for _ in range(2)] == [True, False]
    assert looked_up(swap=forget_cached_launches) > 0
    launched = len(gpu.launches)
    looked_up()
    assert len(gpu.launches) == launched + 2


def test_a_step_like_one_before_does_little(gpu: PretendedGpu) -> None:
    """Counted, since time on a shared machine says nothing."""
    leaves = [tensor.requires_grad_() for tensor in qkv()]
    do = half(*leaves[0].shape)

    def counts() -> tuple[int, int]:
        made: list[Any] = []
        forward = events(lambda: made.append(flashsmith.attention(*leaves, causal=True)))
        ctx, needs = made[0].grad_fn, (True, True, True, False)
        tensors = do, *ctx.saved_tensors
        run = events(lambda: cached_calls.run_repeated(tensors, (ctx.this, needs)))
        torch.autograd.grad(*made, leaves, do)
        return forward, run

    checked = counts()
    for _ in range(3):
        repeated = counts()
    assert checked[0] > 200
    assert repeated[0] <= 50
    assert 10 < repeated[1] <= 25


def forward_grown(**options: Any) -> Any:
    leaves = [tensor.requires_grad_() for tensor in qkv()]
    return flashsmith.attention(*leaves, **options)


# Equal to what a valid call had, and no valid value.
EQUAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({"causal": True}, {"causal": 1}),
    "a window's limit": ({"window": (5, None)}, {"window": (5.0, None)}),
    "deterministic": ({"deterministic": True}, {"deterministic": 1}),
    "return_lse": ({"return_lse": True}, {"return_lse": 1}),
    "emulate": ({"emulate": False}, {"emulate": 0}),
    "max_seqlen_q": ({}, {"max_seqlen_q": 5}),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_options_are_not_the_same_with_gradients(name: str, gpu: PretendedGpu) -> None:
    good, bad = EQUAL[name]
    for _ in range(3):
        forward_grown(**good)
    with pytest.raises(ArgumentError):
        forward_grown(**bad)


def test_other_tensors_of_the_same_shapes_are_not_the_same(gpu: PretendedGpu) -> None:
    """Nor is another state of PyTorch."""
    for _ in range(3):
        forward_grown(causal=True)
    usual = gpu.launches[-1]

    def differs(make: Callable[[], Any]) -> bool:
        for _ in range(3):
            make()
        last, before = gpu.launches[-1], gpu.launches[-2]
        assert (last.config, last.prepared) == (before.config, before.prepared)
        forward_grown(causal=True)
        again = gpu.launches[-1]
        assert (again.config, again.prepared) == (usual.config, usual.prepared)
        return (last.config, last.prepared) != (usual.config, usual.prepared)

    q, k, v = qkv()
    apart = half(2, 64, 4, 128)[..., :64].requires_grad_()
    bf16 = [tensor.bfloat16().requires_grad_() for tensor in (q, k, v)]
    assert differs(lambda: flashsmith.attention(apart, k, v, causal=True))
    assert differs(lambda: flashsmith.attention(*bf16, causal=True))
    odd = half(q.numel() + 1)[1:].view(q.shape).requires_grad_()
    with pytest.raises(ArgumentError, match=r"^q: address"):
        flashsmith.attention(odd, k.requires_grad_(), v.requires_grad_(), causal=True)
    with pytest.raises(ArgumentError, match="out: given"):
        forward_grown(causal=True, out=half(*q.shape))


Attend = Callable[[], Any]


def changed(output: Any) -> Any:
    with torch.no_grad():
        output.mul_(2)
    return output


def with_dual(attend: Attend, leaves: list[Any]) -> Any:
    q, k, v = leaves
    with forward_ad.dual_level():
        return flashsmith.attention(forward_ad.make_dual(q, q.detach()), k, v, causal=True)


def with_a_second(attend: Attend, leaves: list[Any]) -> Any:
    first = torch.autograd.grad(attend().float().square().sum(), leaves, create_graph=True)
    return torch.autograd.grad(first[0].sum(), leaves)


def with_many_at_once(attend: Attend, leaves: list[Any]) -> Any:
    o = attend()
    return torch.autograd.grad(o, leaves, torch.stack([o, o]), is_grads_batched=True)


def used_twice(attend: Attend, leaves: list[Any]) -> Any:
    o = attend()
    torch.autograd.grad(o.sum(), leaves)
    return torch.autograd.grad(o.sum(), leaves)


def used_again(attend: Attend, leaves: list[Any]) -> Any:
    o = attend()
    torch.autograd.grad(o.sum(), leaves, retain_graph=True)
    return torch.autograd.grad(o.sum(), leaves)


def with_statistics(attend: Attend, leaves: list[Any], change: bool = False) -> Any:
    o, lse, row_max = flashsmith.attention(
        *leaves, causal=True, return_lse=True, return_row_max=True
    )
    assert (lse.requires_grad, row_max.requires_grad) == (True, False)
    if change:
        changed(lse)
    return torch.autograd.grad(o.sum() + lse.sum(), leaves)


class WithoutGradient(torch.autograd.Function):
    """The gradient of its input is not 0, but undefined."""

    @staticmethod
    def forward(x: Any) -> Any:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return None


def undefined(attend: Attend, leaves: list[Any]) -> Any:
    found = torch.autograd.grad(WithoutGradient.apply(attend()).sum(), leaves, allow_unused=True)
    assert found == (None, None, None)
    return leaves


# What is done with the output, and the words of the error, if it is one.
USES: dict[str, tuple[Callable[[Attend, list[Any]], Any], str | None]] = {
    "forward mode": (with_dual, "q, k, v: forward-mode"),
    "a second derivative": (with_a_second, "q, k, v: a second derivative"),
    "a batch of gradients": (with_many_at_once, "q, k, v: inside torch.vmap"),
    "used twice": (used_twice, "backward through the graph a second time"),
    "used again": (used_again, None),
    "changed": (
        lambda attend, leaves: torch.autograd.grad(changed(attend()).sum(), leaves),
        "modified by an inplace operation",
    ),
    "q changed": (
        lambda attend, leaves: (
            (o := attend()),
            changed(leaves[0]),
            torch.autograd.grad(o.sum(), leaves),
        ),
        "modified by an inplace operation",
    ),
    "all outputs": (with_statistics, None),
    "lse changed": (partial(with_statistics, change=True), "modified by an inplace operation"),
    "an undefined gradient": (undefined, None),
    "checkpoint": (
        lambda attend, leaves: torch.autograd.grad(
            checkpoint(partial(flashsmith.attention, causal=True), *leaves, use_reentrant=False),
            leaves,
            leaves[0].detach(),
        ),
        None,
    ),
}


@pytest.mark.parametrize("name", USES)
def test_autograd_sees_a_call_like_one_before_as_the_first(name: str, gpu: PretendedGpu) -> None:
    use, words = USES[name]
    functions = {forward_grown(causal=True).grad_fn.name()}
    for _ in range(4):
        leaves = [tensor.requires_grad_() for tensor in qkv(heads_k=4)]

        def attend(leaves: list[Any] = leaves) -> Any:
            o = flashsmith.attention(*leaves, causal=True)
            functions.add(o.grad_fn.name())
            saved = [(it.shape, it.stride(), it.dtype) for it in o.grad_fn.saved_tensors]
            assert saved[:4] == [(it.shape, it.stride(), it.dtype) for it in (*leaves, o)]
            assert saved[4] == (torch.Size([2, 4, 64]), (256, 64, 1), torch.float32)
            return o

        launched = len(gpu.launches)
        if words is None:
            use(attend, leaves)
            assert len(gpu.launches) > launched
        else:
            with pytest.raises((ArgumentError, RuntimeError), match=words):
                use(attend, leaves)
        torch.autograd.grad(attend().sum(), leaves)
    assert len(functions) == 2  # the second one's is not what the first one's was


def test_the_default_of_deterministic_is_asked_for_every_time(gpu: PretendedGpu) -> None:
    def ahead() -> bool:
        o = forward_grown(causal=True)
        return bool(o.grad_fn.this.opts.deterministic)

    assert [ahead() for _ in range(3)] == [False] * 3
    torch.use_deterministic_algorithms(True)
    try:
        assert [ahead() for _ in range(3)] == [True] * 3
    finally:
        torch.use_deterministic_algorithms(False)
    assert not ahead()


def test_the_number_of_repeatable_forward_passes_is_bounded(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_calls, "MOST_SHAPES", 2)
    for length in (8, 16, 24, 32):
        for _ in range(2):
            leaves = [tensor.requires_grad_() for tensor in qkv(length, length)]
            flashsmith.attention(*leaves)
        assert 0 < len(cached_calls.repeated[()].by_shape) <= 2
    # With other tensors it is an autograd function of more inputs.
    for _ in range(3):
        forward_grown(sinks=torch.zeros(4))
    assert ("sinks",) not in cached_calls.repeated


def test_lengths_and_frozen_tensors_that_alternate_are_each_repeated(gpu: PretendedGpu) -> None:
    calls = [(length, frozen) for length in (8, 16) for frozen in (None, 0, 1)]
    for turn in range(4):
        for length, frozen in calls:
            leaves = [it.requires_grad_(i != frozen) for i, it in enumerate(qkv(length, length))]
            o = flashsmith.attention(*leaves, causal=True)
            assert turn < 2 or o.grad_fn.name().startswith("RepeatedAttention")
            found = torch.autograd.grad(o.sum(), [it for it in leaves if it.requires_grad])
            assert [it.shape[1] for it in found] == [length] * (3 - (frozen is not None))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_config_that_cannot_read_a_tensor(name: str, gpu: PretendedGpu) -> None:
    """Said at the forward call, with the config of gradients that can; do is copied instead."""
    config = parse_kernel_name_into_config(
        "(FP16, 64, 64, 128, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_24_240"
    )
    call = dense(do=half(1).expand(2, 64, 4, 64), config=config)
    backward(**call)
    call[name] = call[name][:, :, :1].expand_as(call[name])
    message = rf"^{name}: strides .* by TMA, .* or use a FlashBackwardKernelConfig$"
    with pytest.raises(ArgumentError, match=message):
        backward(**call)
    tensors = [call[it].detach().requires_grad_() for it in "qkv"]
    with pytest.raises(ArgumentError, match=message):
        flashsmith.attention(*tensors, backward_config=config)
    assert len(gpu.launches) == 1
    torch.autograd.grad(flashsmith.attention(*tensors).sum(), tensors)
    assert len(gpu.launches) == 3


def test_lengths_are_read_from_the_device_once(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For both directions: each reading waits for the device."""
    call = packed(causal=True)
    leaves = [call[name].requires_grad_() for name in "qkv"]
    given = {name: call[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    read: list[int] = []
    right = TorchTensors.longest_steps

    def noting(self: Any, vectors: Any) -> list[int]:
        read.append(len(vectors))
        return right(self, vectors)

    monkeypatch.setattr(TorchTensors, "longest_steps", noting)
    for limit, count in ((None, 2), (100, 1)):
        o = flashsmith.attention(*leaves, causal=True, max_seqlen_k=limit, **given)
        torch.autograd.grad(o.sum(), leaves)
        assert read == [count]
        read.clear()
    assert len(gpu.launches) == 4
