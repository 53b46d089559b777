"""attention() differentiates: its gradients against float64 autograd, in the emulator."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import shared_kernels

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

from exact_attention import exact_attention  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import flashsmith  # noqa: E402
from flashsmith.errors import (  # noqa: E402
    ArgumentError,
    EmulationTooLongError,
    KernelNotBuiltError,
)
from flashsmith.families import DType, FlashForwardKernelConfig, Semantics  # noqa: E402
from flashsmith.families import parse_kernel_name_into_config as parse  # noqa: E402
from flashsmith.integrations import saved_call  # noqa: E402
from flashsmith.runtime import count_launches, running_time  # noqa: E402
from flashsmith.runtime.arguments import check_request  # noqa: E402
from flashsmith.runtime.backward_pass import BackwardAhead, BackwardOptions  # noqa: E402
from flashsmith.semantics.signature import ForwardOptions  # noqa: E402

# What other tests have, too.
CFG = FlashForwardKernelConfig(
    DType.FP16, 64, 64, 32, 4, True, True, True, 2, 2, 2, optimized_softmax=True
)
REPEATABLE = parse("(FP16, 64, 64, 64, 4): backward")
FREE = parse("(FP16, 64, 64, 64, 4): backward+stages_2+dq_atomics")
KERNELS = {"config": CFG, "backward_config": FREE}
CAUSAL = Semantics("causal", uneven=True)
EVERYTHING = Semantics("window", softcap=True, packed=True, uneven=True)
for _semantics in (CAUSAL, EVERYTHING):
    shared_kernels.want([CFG], _semantics)
    shared_kernels.want([REPEATABLE, FREE], _semantics)


def drawn(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).half()


def dense(seq_q: int = 40, seq_k: int = 50) -> dict[str, Any]:
    return {
        "q": drawn(1, seq_q, 2, 40),
        "k": drawn(1, seq_k, 1, 40, seed=1),
        "v": drawn(1, seq_k, 1, 40, seed=2),
        "causal": True,
    }


def packed() -> dict[str, Any]:
    q_starts, k_starts = torch.tensor([[0, 30, 30, 43], [0, 20, 29, 75]], dtype=torch.int32)
    return {
        "q": drawn(43, 2, 40),
        "k": drawn(75, 1, 40, seed=1),
        "v": drawn(75, 1, 40, seed=2),
        "sinks": torch.tensor([0.5, -1.0]),
        "window": (20, 4),
        "softcap": 5.0,
        "scale": 0.25,
        "cu_seqlens_q": q_starts,
        "cu_seqlens_k": k_starts,
    }


def grown(call: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The call on tensors that require grad, and these."""
    names = [name for name in ("q", "k", "v", "sinks") if name in call]
    leaves = {name: call[name].detach().clone().requires_grad_() for name in names}
    return call | leaves, list(leaves.values())


def exact_gradients(call: dict[str, Any], do: Any, dlse: Any = None) -> list[Any]:
    wide, leaves = grown({k: v.double() if _is_real(v) else v for k, v in call.items()})
    o, lse = exact_attention(**wide)
    outputs, grads = ([o], [do.double()])
    if dlse is not None:
        seen = lse > -torch.inf
        outputs.append(lse[seen])
        grads.append(dlse[seen].double())
    return list(torch.autograd.grad(outputs, leaves, grads))


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def assert_gradients(found: Any, expected: list[Any], leaves: list[Any]) -> None:
    for ours, exact, leaf in zip(found, expected, leaves, strict=True):
        assert ours.dtype == leaf.dtype
        assert ours.shape == leaf.shape
        size = max(1.0, exact.abs().max().item())
        torch.testing.assert_close(ours.double(), exact, atol=4e-3 * size, rtol=0)


@pytest.mark.parametrize("backward_config", [FREE, REPEATABLE], ids=str)
@pytest.mark.parametrize("make", [dense, packed])
def test_gradients(make: Any, backward_config: Any) -> None:
    call, leaves = grown(make())
    kernels = {"config": CFG, "backward_config": backward_config}
    o, lse = flashsmith.attention(**call, **kernels, return_lse=True)
    do, dlse = drawn(*o.shape, seed=3), drawn(*lse.shape, seed=4).float()
    found = torch.autograd.grad((o, lse), leaves, (do, dlse))
    assert_gradients(found, exact_gradients(make(), do, dlse), leaves)
    with torch.no_grad():
        assert torch.equal(o, flashsmith.attention(**call, config=CFG))


# ---- which gradients, and of what ----


def small(**options: Any) -> tuple[dict[str, Any], list[Any]]:
    """A call of few rows by kernels that are built, on tensors that require grad, and these."""
    call, leaves = grown(dense(12, 20))
    return call | KERNELS | options, leaves


def loss(call: dict[str, Any]) -> Any:
    return flashsmith.attention(**call).float().square().sum()


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    call, leaves = small()
    return list(torch.autograd.grad(loss(call), leaves))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[BackwardOptions]:
    """The options of every backward pass."""
    seen: list[BackwardOptions] = []
    right = saved_call.run_backward

    def noting(config: Any, tensors: Any, options: Any, emulate: Any) -> Any:
        seen.append(options)
        return right(config, tensors, options, emulate)

    monkeypatch.setattr(saved_call, "run_backward", noting)
    return seen


@pytest.mark.parametrize("names", ["q", "kv", "v"])
def test_what_is_frozen_costs_nothing(
    names: str, asked: list[BackwardOptions], expected: list[Any]
) -> None:
    call, leaves = small()
    for name, leaf in zip("qkv", leaves, strict=True):
        leaf.requires_grad_(name in names)
    found = torch.autograd.grad(loss(call), [call[name] for name in names])
    for name, gradient in zip(names, found, strict=True):
        assert torch.equal(gradient, expected["qkv".index(name)])
    assert asked[0].needs == (*(name in names for name in "qkv"), False)


def test_the_forward_call_prepares_what_will_be_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tensors that require gradients, and again where others do."""
    found = []
    right = saved_call.run_call

    def noting(*call: Any) -> Any:
        found.append(call[-1].gradients)
        return right(*call)

    monkeypatch.setattr(saved_call, "run_call", noting)
    call, leaves = small()
    for names in ("qkv", "q", "kv", "v", "qv"):
        for name, leaf in zip("qkv", leaves, strict=True):
            leaf.requires_grad_(name in names)
        flashsmith.attention(**call)
    assert found == ["", "only_dq", "no_dq", "no_dq", ""]


def test_through_the_log_sum_exp_alone(asked: list[BackwardOptions]) -> None:
    call, leaves = small(return_lse=True, return_row_max=True)
    _, lse, row_max = flashsmith.attention(**call)
    assert not row_max.requires_grad
    found = torch.autograd.grad(lse.sum(), leaves)
    assert_gradients(
        found,
        exact_gradients(dense(12, 20), torch.zeros(1, 12, 2, 40), torch.ones_like(lse)),
        leaves,
    )
    assert not found[2].any()
    call, leaves = small(return_lse=True)
    o, _ = flashsmith.attention(**call)
    torch.autograd.grad(o.sum(), leaves)
    assert [options.dlse is None for options in asked] == [False, True]


def test_gradients_accumulate(expected: list[Any]) -> None:
    call, leaves = small()
    for _ in range(2):
        loss(call).backward()
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, 2 * gradient)


@pytest.mark.parametrize("given", [None, False])
def test_repeatable_as_asked_at_the_forward_call(
    given: bool | None, asked: list[BackwardOptions]
) -> None:
    call, leaves = small(backward_config=REPEATABLE, deterministic=given)
    torch.use_deterministic_algorithms(True)
    try:
        result = loss(call)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.autograd.grad(result, leaves)
    assert asked[0].deterministic is (given is None)


def test_a_free_kernel_is_refused_at_the_forward_call() -> None:
    call, _ = small(deterministic=True)
    with pytest.raises(ArgumentError, match=r"deterministic=True: .*dq_atomics sums in"):
        flashsmith.attention(**call)


def test_the_backward_kernel_is_found_at_the_forward_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHSMITH_JIT", "0")
    missing = parse("(FP16, 64, 32, 64, 4): backward")
    call, _ = small(backward_config=missing)
    with pytest.raises(KernelNotBuiltError, match=r"backward.*is not built"):
        flashsmith.attention(**call)


def test_each_direction_is_emulated_as_its_config_wants() -> None:
    """A forward kernel of another architecture does not choose the backward pass's."""
    q = np.zeros((1, 12, 2, 40), np.float16)
    request = check_request((q, q, q, None), ForwardOptions(causal=True))
    seen: list[Any] = []

    def choose(problem: Any, device: Any, *_: Any) -> Any:
        seen.append((problem.operation, device.arch))
        return FREE

    BackwardAhead(choose, False).config_for(request, flashsmith.device_spec(90))
    assert seen == [("backward", 80)]


def test_emulation_of_both_directions_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    def estimate(cfg: Any, problem: Any) -> float:
        assert problem.operation == cfg.family.operation
        return 40.0

    monkeypatch.setattr(running_time, "estimate_seconds", estimate)
    call, _ = small()
    with torch.no_grad():
        flashsmith.attention(**call)
    with pytest.raises(EmulationTooLongError, match="80 s"):
        flashsmith.attention(**call)


def test_what_has_no_gradient() -> None:
    call, _ = small()
    with pytest.raises(ArgumentError, match="out: given, and q requires grad"):
        flashsmith.attention(**call, out=torch.empty_like(call["q"]))
    with pytest.raises(ArgumentError, match="q: requires grad"):
        flashsmith.forward(CFG, call["q"], call["k"], call["v"], causal=True)
    with pytest.raises(ArgumentError, match=r"backward_config: got .*FlashBackwardKernelConfig"):
        flashsmith.attention(**call | {"backward_config": CFG})
    with pytest.raises(ArgumentError, match=r"^config: got .*FlashForwardKernelConfig"):
        flashsmith.attention(**call | {"config": REPEATABLE})


@pytest.mark.parametrize("k", [None, np.zeros((1, 12, 2, 40), np.float16)])
def test_beside_a_tensor_with_gradients_is_none(k: Any) -> None:
    call, _ = small()
    with pytest.raises(ArgumentError, match=r"^k: "):
        flashsmith.attention(**call | {"k": k})


# ---- what PyTorch does with it ----


def test_autocast(expected: list[Any]) -> None:
    call, leaves = small()
    wide, wide_leaves = grown({name: call[name].detach().float() for name in "qkv"})
    with torch.autocast("cpu", dtype=torch.float16):
        found = torch.autograd.grad(loss(call), leaves)
        widened = torch.autograd.grad(loss(call | wide), wide_leaves)
    for ours, cast, gradient in zip(found, widened, expected, strict=True):
        assert torch.equal(ours, gradient)
        assert cast.dtype == torch.float32
        assert torch.equal(cast, gradient.float())


@pytest.mark.parametrize("dtypes", [("float16", "float32", "bfloat16"), ("bfloat16",) * 3])
def test_autocast_casts_whatever_differs(dtypes: tuple[str, ...], expected: list[Any]) -> None:
    """Each of q, k and v for itself, as PyTorch's own attention does."""
    call, _ = small()
    given = (
        call[name].detach().to(getattr(torch, it)) for name, it in zip("qkv", dtypes, strict=True)
    )
    mixed, leaves = grown(dict(zip("qkv", given, strict=True)))
    cast = {name: leaf.detach().half() for name, leaf in mixed.items()}
    with torch.autocast("cpu", dtype=torch.float16):
        o = flashsmith.attention(**call | mixed)
        gradients = torch.autograd.grad(o.float().sum(), leaves)
        with torch.no_grad():
            unfollowed = flashsmith.attention(**call | mixed)
    assert o.dtype == torch.float16
    assert torch.equal(o, unfollowed)
    assert torch.equal(o, flashsmith.attention(**call | cast))
    assert [it.dtype for it in gradients] == [leaf.dtype for leaf in leaves]


def test_do_of_another_dtype_and_layout_and_a_graph_used_again() -> None:
    """FREE sums dq in the order of the emulator's fixed schedule: the same bits."""
    call, leaves = small()
    o = flashsmith.attention(**call)
    do = drawn(1, 2, 12, 40, seed=7).transpose(1, 2)
    first = torch.autograd.grad(o, leaves, do.contiguous(), retain_graph=True)
    for other in (do, do.float()):
        again = torch.autograd.grad(o, leaves, other, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    o.backward(do)
    with pytest.raises(RuntimeError, match="second time"):
        o.backward(do)


def test_an_output_that_is_changed_in_place_is_noticed() -> None:
    call, _ = small()
    o = flashsmith.attention(**call)
    o.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()
    with torch.inference_mode():
        assert not flashsmith.attention(**call).requires_grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool, expected: list[Any]) -> None:
    call, leaves = small()

    def run(q: Any, k: Any, v: Any) -> Any:
        return loss(call | {"q": q, "k": k, "v": v})

    checkpoint(run, *leaves, use_reentrant=reentrant).backward()
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, gradient)


@pytest.mark.parametrize("saves", [True, False])
def test_selective_checkpoints(saves: bool, expected: list[Any]) -> None:
    forward = torch.ops.flashsmith.attention_with_statistics.default

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> Any:
        kept = saves and op is forward
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    call, leaves = small()
    contexts = partial(create_selective_checkpoint_contexts, policy)
    with count_launches() as launches:
        result = checkpoint(loss, call, use_reentrant=False, context_fn=contexts)
        found = torch.autograd.grad(result, leaves)
    # One of the forward pass, and the three of the backward pass.
    assert launches.emulator == (4 if saves else 5)
    for ours, gradient in zip(found, expected, strict=True):
        assert torch.equal(ours, gradient)


def test_flop_are_counted() -> None:
    call, leaves = small()
    with FlopCounterMode(display=False) as counter:
        loss(call).backward()
    assert all(leaf.grad is not None for leaf in leaves)
    with FlopCounterMode(display=False) as inference, torch.no_grad():
        flashsmith.attention(**packed() | {"config": CFG})
    causal = 4 * 2 * 12 * 20 * 40 // 2
    assert counter.get_total_flops() == causal + causal * 5 // 2
    for names, products in (("q", 3), ("kv", 4)):
        for name, leaf in zip("qkv", leaves, strict=True):
            leaf.requires_grad_(name in names)
        with FlopCounterMode(display=False) as counter:
            loss(call).backward()
        assert counter.get_total_flops() == causal + causal * products // 2
    # Keys that the rows of each sequence see: 30 of 20, none of 9, 13 of 46, in windows.
    seen = sum(
        sum(-4 <= i + keys - rows - j <= 20 for i in range(rows) for j in range(keys))
        for rows, keys in ((30, 20), (13, 46))
    )
    assert inference.get_total_flops() == 4 * 2 * 40 * seen


def test_fake_tensors() -> None:
    with FakeTensorMode():
        call, leaves = grown(packed())
        o, lse = flashsmith.attention(**call, return_lse=True)
        assert (o.shape, lse.shape) == ((43, 2, 40), (2, 43))
        found = torch.autograd.grad((o.sum(), lse.sum()), leaves)
        assert [(it.shape, it.dtype) for it in found] == [(it.shape, it.dtype) for it in leaves]


@pytest.mark.parametrize("make", [partial(dense, 12, 20), packed])
def test_opcheck(make: Any) -> None:
    call, tensors = grown(make())
    tensors = tensors[:3]
    packing = [call.get(name) for name in ("sinks", "cu_seqlens_q", "cu_seqlens_k")]
    left, right = call.get("window", (None, None))
    options = {
        **{"causal": "causal" in call, "softcap": call.get("softcap", 0.0)},
        **{"scale": call.get("scale"), "window_left": left, "window_right": right},
    }
    forward = {"config": str(CFG), "backward_config": str(FREE), "return_lse": True}
    ops = torch.ops.flashsmith
    torch.library.opcheck(
        ops.attention_with_statistics.default, [*tensors, *packing], options | forward
    )
    torch.library.opcheck(
        ops.attention.default, [*tensors, *packing], options | {"config": str(CFG)}
    )
    tensors, packing = (
        [it if it is None else it.detach() for it in group] for group in (tensors, packing)
    )
    o, lse, _ = ops.attention_with_statistics(*tensors, *packing, **options | forward)
    given = [torch.ones_like(o), *tensors, o, lse, torch.ones_like(lse), *packing]
    for needs in ([True] * 4, [True, False, True, False]):
        torch.library.opcheck(
            ops.attention_backward.default,
            given,
            options | {"config": str(REPEATABLE), "needs": needs},
        )


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled(backend: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()

    def step(q: Any, k: Any, v: Any) -> Any:
        call = {"q": 2 * q, "k": k, "v": v, "causal": True, **KERNELS}
        o, lse = flashsmith.attention(**call, return_lse=True)
        return o.float().square().sum() + lse.sin().sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=backend)
    for rows, keys in ((12, 20), (25, 7))[: 2 if dynamic else 1]:
        _, leaves = grown(dense(rows, keys))
        leaves[1].requires_grad_(False)
        wanted = [leaves[0], leaves[2]]
        found = torch.autograd.grad(compiled(*leaves), wanted)
        for ours, gradient in zip(found, torch.autograd.grad(step(*leaves), wanted), strict=True):
            torch.testing.assert_close(ours, gradient)


def test_backward_compiled() -> None:
    """flashsmith.backward() within a graph, fp32 gradients and those that are not needed too."""
    torch._dynamo.reset()
    q, k, v = (leaf.detach() for leaf in small()[1])
    o, lse = flashsmith.attention(q, k, v, causal=True, config=CFG, return_lse=True)

    def step(do: Any, q: Any) -> Any:
        needs, how = (True, False, True, True), {"causal": True, "config": REPEATABLE}
        return flashsmith.backward(
            2 * do, q, k, v, o, lse, needs=needs, grad_dtype="float32", **how
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found, expected = compiled(o, q), step(o, q)
    assert found.dk is expected.dk is found.dsinks is None
    for ours, theirs in ((found.dq, expected.dq), (found.dv, expected.dv)):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert step(o, q).dq.dtype == torch.float32
    with pytest.raises(ArgumentError, match="vmap"):
        torch.vmap(step, (0, None))(torch.stack([o, o]), q)


def test_compiled_autograd(expected: list[Any]) -> None:
    torch._dynamo.reset()
    call, leaves = small()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: loss(call).backward(), backend="aot_eager")()
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, gradient)


# ---- transforms of torch.func, and what is refused ----


def by_attention(q: Any, k: Any, v: Any) -> Any:
    return flashsmith.attention(q, k, v, causal=True, **KERNELS)


def by_op(q: Any, k: Any, v: Any) -> Any:
    texts = {name: str(config) for name, config in KERNELS.items()}
    return torch.ops.flashsmith.attention_with_statistics(q, k, v, causal=True, **texts)[0]


@pytest.mark.parametrize("attend", [by_attention, by_op])
def test_grad_and_vjp(attend: Any, expected: list[Any]) -> None:
    tensors = [leaf.detach() for leaf in small()[1]]

    def total(*tensors: Any) -> Any:
        return attend(*tensors).float().square().sum()

    value, pull = torch.func.vjp(total, *tensors)
    for found in (torch.func.grad(total, (0, 1, 2))(*tensors), pull(torch.ones_like(value))):
        for ours, gradient in zip(found, expected, strict=True):
            assert torch.equal(ours, gradient)


def by_backward(q: Any, k: Any, v: Any) -> Any:
    o, lse = torch.zeros(q.shape, dtype=q.dtype), torch.zeros(1, q.shape[2], q.shape[1])
    return flashsmith.backward(q, q, k, v, o, lse, causal=True, config=FREE).dq


def backward_op(q: Any, k: Any, v: Any) -> Any:
    o, lse = torch.zeros(q.shape, dtype=q.dtype), torch.zeros(1, q.shape[2], q.shape[1])
    return torch.ops.flashsmith.attention_backward(
        q, q, k, v, o, lse, causal=True, needs=[True, False, False, False], config=str(FREE)
    )[0]


def vmapped(attend: Any, q: Any, k: Any, v: Any) -> Any:
    return torch.vmap(lambda q: attend(q, k, v))(torch.stack([q, q]))


def pushed(attend: Any, q: Any, k: Any, v: Any) -> Any:
    return torch.func.jvp(lambda q: attend(q, k, v), (q,), (q,))


def dual(attend: Any, q: Any, k: Any, v: Any) -> Any:
    with forward_ad.dual_level():
        return attend(forward_ad.make_dual(q, q), k, v)


def twice(attend: Any, q: Any, k: Any, v: Any) -> Any:
    q = q.clone().requires_grad_()
    first = attend(q, k, v)
    if attend not in (backward_op, by_backward):
        (first,) = torch.autograd.grad(first.float().square().sum(), q, create_graph=True)
    return torch.autograd.grad(first.sum(), q)


def batched(attend: Any, q: Any, k: Any, v: Any) -> Any:
    q = q.clone().requires_grad_()
    o = attend(q, k, v)
    return torch.autograd.grad(o, q, torch.stack([o, o]), is_grads_batched=True)


@pytest.mark.parametrize("attend", [by_attention, by_op, by_backward, backward_op])
@pytest.mark.parametrize(
    ("transform", "message"),
    [(vmapped, "vmap"), (pushed, "jvp"), (dual, "jvp"), (twice, "second"), (batched, "vmap")],
)
def test_what_the_kernels_cannot_is_an_error(attend: Any, transform: Any, message: str) -> None:
    if attend is backward_op and transform is batched:
        message = "second"
    if attend is by_backward and transform in (batched, twice):
        message = "requires grad"
    with pytest.raises(ArgumentError, match=message):
        transform(attend, *(leaf.detach() for leaf in small()[1]))
