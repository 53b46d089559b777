"""attention_with_cache() with score and mask functions under torch.compile and torch.export: one
op, whose inputs are the captured tensors. Kernels run in the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_calls import CAPACITY, CHUNKS, Cache
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flashsmith
import flashsmith.integrations.cache_program_ops
from flashsmith import masks, scores
from flashsmith.errors import ArgumentError
from flashsmith.tracing.graph_plans import plan_of

pytestmark = pytest.mark.torch
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
IDS = torch.arange(2 * CAPACITY, dtype=torch.int32).reshape(2, CAPACITY) // 90


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


def tensors(*, paged: bool = False, append: bool = True) -> dict[str, torch.Tensor]:
    call = Cache((317, 96), (3, 3), seed=1).call(paged=paged, append=append)
    return {name: torch.from_numpy(it) for name, it in call.items()}


def steep(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + SLOPES[h] * (k - q)


def decode(slopes: Any, ids: Any, **call: Any) -> Any:
    """A step of a model, with something before and after."""
    call["q"] = call["q"] + 0
    asked = {"score_mod": scores.alibi(slopes), "mask": masks.documents(ids), "config": CHUNKS}
    o, lse = flashsmith.attention_with_cache(**call, **asked, return_lse=True)
    return o * 2, lse + 1


class Graphs:
    """A backend that keeps the ops' nodes, and computes nothing."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.calls += [it for it in module.graph.nodes if "of_program_with_cache" in str(it.target)]
        return lambda *_: tuple(torch.zeros(9))


@pytest.mark.parametrize("append", [False, True])
def test_a_compiled_step_is_an_eager_one(append: bool) -> None:
    eager, compiled = (tensors(paged=append, append=append) for _ in range(2))
    expected = decode(SLOPES, IDS, **eager)
    step = torch.compile(decode, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, step(SLOPES, IDS, **compiled), expected))
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(compiled[name], eager[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.full
def test_inductor() -> None:
    eager, compiled = (tensors() for _ in range(2))
    expected = decode(SLOPES, IDS, **eager)
    step = torch.compile(decode, fullgraph=True)
    assert all(map(torch.equal, step(SLOPES, IDS, **compiled), expected))


def test_new_tensors_are_not_compiled_again() -> None:
    graphs = Graphs()
    step = torch.compile(decode, fullgraph=True, backend=graphs)
    for seed in range(3):
        step(SLOPES + seed, IDS + seed, **tensors())
    (node,) = graphs.calls
    assert "appended" in str(node.target)
    assert len(node.args[3]) == 2


def of_rows(whole: BlockMask) -> BlockMask:
    """FlexAttention's way to decode: a block of rows, and a function that adds an offset."""
    offset = torch.tensor(93)
    row = whole[:, :, offset[None] // 64]
    row.seq_lengths = 3, CAPACITY
    function = whole.mask_mod
    row.mask_mod = lambda b, h, q, k: function(b, h, q + offset, k)
    return row


@pytest.mark.parametrize("sliced", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_block_mask_is_an_argument(sliced: bool) -> None:
    def shown(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (IDS[0, q] == IDS[0, k]) | (k < 5)

    mask = create_block_mask(shown, None, None, CAPACITY, CAPACITY, "cpu", BLOCK_SIZE=(64, 32))
    mask = of_rows(mask) if sliced else mask

    def step(mask: Any, **call: Any) -> Any:
        return flashsmith.attention_with_cache(**call, mask=mask, score_mod=steep, config=CHUNKS)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(mask, **tensors()), step(mask, **tensors()))


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slopes = torch.nn.Parameter(SLOPES.clone(), requires_grad=False)

        def forward(self, ids: Any, **call: Any) -> Any:
            functions = {"score_mod": scores.alibi(self.slopes), "mask": masks.documents(ids)}
            return flashsmith.attention_with_cache(**call, **functions)

    made = torch.export.export(Layer(), (IDS,), tensors(append=False), strict=strict)
    calls = [it for it in made.graph.nodes if it.op == "call_function" and "getitem" not in it.name]
    assert [it.target for it in calls] == [
        torch.ops.flashsmith.attention_of_program_with_cache.default
    ]
    assert [it.name for it in calls[0].args[3]] == ["p_slopes", "ids"]


@pytest.mark.parametrize("append", [False, True])
def test_the_ops_are_what_pytorch_expects_of_one(append: bool) -> None:
    plan = plan_of((steep, None, masks.documents(IDS), None), None, "end")
    assert plan is not None
    assert len(plan.reads) == 2
    call, name = tensors(append=append), "attention_of_program_with_cache"
    first = [call[it] for it in ("q", "k_cache", "v_cache")]
    arguments = [*first, [SLOPES, IDS], call["cache_lens"], None]
    if append:
        arguments, name = [*arguments, call["k"], call["v"]], name + "_appended"
    program = {"program": plan.text, "ints": [], "floats": [], "config": str(CHUNKS)}
    op = getattr(torch.ops.flashsmith, name).default
    assert set(torch.library.opcheck(op, arguments, program).values()) == {"SUCCESS"}


def test_a_captured_tensor_that_requires_grad_is_an_error() -> None:
    step = torch.compile(decode, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="reads: requires grad, and attention over a cache"):
        step(SLOPES.clone().requires_grad_(), IDS, **tensors())
    with torch.no_grad():
        step(SLOPES.clone().requires_grad_(), IDS, **tensors())


@pytest.mark.parametrize("append", [False, True])
def test_a_function_of_the_compiled_code(append: bool) -> None:
    """The same bits as an eager step, in the output and in the caches."""

    def step(**call: Any) -> Any:
        slopes = SLOPES * 2

        def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s + slopes[h] * (k - q)

        return flashsmith.attention_with_cache(**call, score_mod=score, config=CHUNKS) * 2

    eager, compiled = (tensors(append=append) for _ in range(2))
    expected = step(**eager)
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(**compiled)
    assert torch.equal(found, expected)
    bits = [it["k_cache"].view(torch.int16) for it in (compiled, eager)]  # the cache has NaN
    assert torch.equal(*bits)


def test_caches_of_one_tensor() -> None:
    """A step appends to both halves of a tensor, with the bits of an eager step."""

    def step(both: Any, **call: Any) -> Any:
        (k_cache, v_cache), slopes = both.unbind(0), SLOPES * 2

        def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s + slopes[h] * (k - q)

        caches = {"k_cache": k_cache, "v_cache": v_cache}
        return flashsmith.attention_with_cache(**caches, **call, score_mod=score, config=CHUNKS)

    call = tensors()
    before = torch.stack([call.pop("k_cache"), call.pop("v_cache")])
    eager, compiled = before.clone(), before.clone()
    expected = step(eager, **call)
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(compiled, **call)
    assert torch.equal(found, expected)
    bits, old = compiled.view(torch.int16), before.view(torch.int16)  # the caches have NaN
    assert torch.equal(bits, eager.view(torch.int16))
    assert (bits != old).flatten(1).any(1).tolist() == [True, True]


def test_errors_are_those_of_eager_calls() -> None:
    wide = torch.zeros(3, 3, CAPACITY)

    def step(**call: Any) -> Any:
        return flashsmith.attention_with_cache(**call, bias=wide)

    with pytest.raises(Exception, match=r"bias: shape \(3, 3, 320\)") as caught:
        torch.compile(step, backend=Graphs(), fullgraph=True)(**tensors())
    assert "ArgumentError" in str(caught.value) or isinstance(caught.value, ArgumentError)
