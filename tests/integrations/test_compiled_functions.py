"""Calls with score and mask functions under torch.compile: one graph, whose inputs are the captured
tensors. Kernels run in the emulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_flex_gradients import BACKWARD, FORWARD, IDS, SLOPES, alibi, documents
from torch.nn.attention.flex_attention import create_block_mask

import flashsmith
from flashsmith import masks, scores
from flashsmith.errors import ArgumentError, TraceError

pytestmark = pytest.mark.torch
KERNELS = {"config": FORWARD, "backward_config": BACKWARD}
NUMBER = 3


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


def draw(seq: int = 131) -> tuple[torch.Tensor, ...]:
    of = torch.Generator().manual_seed(1)
    shapes = (2, 100, 4, 64), *2 * [(2, seq, 2, 64)]
    return tuple(torch.randn(it, generator=of).bfloat16().requires_grad_() for it in shapes)


class Graphs:
    """A backend that keeps the ops' constants and inputs, and computes nothing."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, module: Any, inputs: Any) -> Any:
        (node,) = (it for it in module.graph.nodes if "attention_of_program" in str(it.target))
        self.calls.append(node)
        return lambda *_: (torch.zeros(1),)

    def compiled(self, function: Callable[..., Any], **options: Any) -> Any:
        def call(q: Any, k: Any, v: Any, *more: Any) -> Any:
            return flashsmith.attention(q, k, v, **function(*more))

        return torch.compile(call, backend=self, fullgraph=True, **options)


def test_output_and_gradients() -> None:
    """The same bits as an eager call, with the gradient of a captured parameter."""
    slopes = torch.nn.Parameter(SLOPES.clone())

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + slopes[h] * (k - q) / 8

    def call(q: Any, k: Any, v: Any) -> Any:
        return flashsmith.attention(q, k, v, score_mod=score, mask_mod=documents, **KERNELS)

    tensors, of = draw(), torch.Generator().manual_seed(2)
    do = torch.randn((2, 100, 4, 64), generator=of).bfloat16()
    expected = call(*tensors)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    o = compiled(*tensors)
    assert torch.equal(o, expected)
    wanted = torch.autograd.grad(expected, (*tensors, slopes), do)
    found = torch.autograd.grad(o, (*tensors, slopes), do)
    assert all(map(torch.equal, found, wanted))
    with torch.no_grad():
        slopes.mul_(2)
        assert torch.equal(compiled(*tensors), call(*tensors))


@pytest.mark.full
def test_inductor() -> None:
    tensors = draw()

    def call(q: Any, k: Any, v: Any) -> Any:
        return 2 * flashsmith.attention(q + 1, k, v, score_mod=alibi, mask=documents, **KERNELS)

    expected = call(*tensors)
    found = torch.compile(call, fullgraph=True)(*tensors)
    torch.testing.assert_close(found, expected)
    wanted, own = (torch.autograd.grad(it.sum(), tensors) for it in (expected, found))
    torch.testing.assert_close(own, wanted, rtol=2e-2, atol=2e-2)


def test_flex_attention_with_a_block_mask() -> None:
    """A BlockMask is an argument of the compiled function."""
    made = create_block_mask(documents, 2, None, 100, 131, "cpu", BLOCK_SIZE=64)

    def call(q: Any, k: Any, v: Any, mask: Any) -> Any:
        rows = [it.transpose(1, 2) for it in (q, k, v)]
        options = {"enable_gqa": True, "kernel_options": {"config": FORWARD}, "return_lse": True}
        return flashsmith.flex_attention(*rows, alibi, mask, **options)

    with torch.no_grad():
        found = torch.compile(call, fullgraph=True, backend="aot_eager")(*draw(), made)
        assert all(map(torch.equal, found, call(*draw(), made)))


def test_opcheck() -> None:
    from flashsmith.tracing.graph_plans import plan_of

    plan = plan_of((alibi, None, documents, None), None, "start")
    assert plan is not None
    reads = [SLOPES.clone().requires_grad_(), IDS]
    assert len(plan.reads) == len(reads)
    options = {"program": plan.text, "ints": [], "floats": [], "positions": "start"}
    options |= {"config": str(FORWARD), "backward_config": str(BACKWARD), "with_backward": True}
    tensors = (*draw(), None, None, None, reads)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.flashsmith.attention_of_program.default, tensors, options, test_utils=tests
    )


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool) -> None:
    """One op, of which the module's parameter and the argument are inputs."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slopes = torch.nn.Parameter(SLOPES.clone())

        def forward(self, q: Any, k: Any, v: Any, ids: Any) -> Any:
            score, mask = scores.alibi(self.slopes), masks.documents(ids)
            return flashsmith.attention(q, k, v, score_mod=score, mask=mask)

    tensors = [it.detach() for it in draw()]
    graph = torch.export.export(Layer(), (*tensors, IDS), strict=strict).graph
    (call,) = (it for it in graph.nodes if it.op == "call_function" and "getitem" not in it.name)
    assert [it.name for it in call.args[6]] == ["p_slopes", "ids"]


# --- what the compiler guards ---------------------------------------------------------------------


def test_captured_tensors_are_inputs() -> None:
    """Those of values, and tensors that are masks and biases, too."""
    graphs, bias = Graphs(), torch.zeros(4, 100, 131)
    score, shown = scores.alibi(SLOPES), torch.ones(100, 131, dtype=torch.bool)
    call = graphs.compiled(lambda: {"score_mod": score, "bias": bias, "mask": shown})
    call(*draw())
    (node,) = graphs.calls
    shapes = [tuple(it.meta["example_value"].shape) for it in node.args[6]]
    assert sorted(shapes) == sorted([(4,), (4, 100, 131), (100, 131)])


def test_new_values_are_not_compiled_again() -> None:
    """New tensors, and functions that are made anew in each step."""
    graphs = Graphs()
    call = graphs.compiled(lambda score, mask: {"score_mod": score, "mask": mask})
    for seed in range(3):
        ids = torch.full((131,), seed)
        call(*draw(), scores.alibi(SLOPES + seed), masks.documents(ids) & masks.causal())
    assert len(graphs.calls) == 1


def test_values_that_compiled_code_makes() -> None:
    """Their tensors may be results of it."""
    graphs = Graphs()

    def functions(ids: Any, slopes: Any) -> Any:
        mask = masks.documents(ids + 1) & (masks.window(9) | masks.chunks(16))
        return {"score_mod": scores.alibi(2 * slopes) + scores.softcap(20.0), "mask": mask}

    call = graphs.compiled(functions)
    call(*draw(), torch.zeros(131, dtype=torch.int64), SLOPES)
    (node,) = graphs.calls
    assert [it.op for it in node.args[6]] == 2 * ["call_function"]
    found = flashsmith.explain(**functions(IDS[0], SLOPES), lengths=(100, 131)).program
    assert found is not None
    assert node.kwargs["program"].startswith(found.text)


def test_a_changed_number_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs()

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * NUMBER

    call = graphs.compiled(lambda: {"score_mod": score})
    for number in (3, 5):
        monkeypatch.setitem(globals(), "NUMBER", number)
        call(*draw())
    first, second = (node.kwargs["ints"] for node in graphs.calls)
    assert first == [3]
    assert second != [3]


@pytest.mark.parametrize("kind", ["flag", "function", "list"])
def test_what_else_changes_is_seen(kind: str) -> None:
    graphs, state, box = Graphs(), [True], [lambda s: s * 2.0]
    flag, inner = True, box[0]

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        if kind == "flag":
            return s if flag else -s
        if kind == "list":
            return s if state[0] else -s
        return inner(s)

    call = graphs.compiled(lambda: {"score_mod": score})
    call(*draw())
    call(*draw())
    assert len(graphs.calls) == 1
    flag, inner, state[0] = False, lambda s: s * 3.0 + 1.0, False
    call(*draw())
    first, second = ((node.kwargs["program"], node.kwargs["floats"]) for node in graphs.calls)
    assert first != second


def test_dynamic_lengths() -> None:
    graphs = Graphs()
    call = graphs.compiled(lambda: {"score_mod": alibi, "mask": masks.causal()}, dynamic=True)
    for seq in (131, 140, 150):
        call(*draw(seq))
    assert len(graphs.calls) == 1


def of_numbers(n: int, x: float) -> dict[str, Any]:
    mask = (masks.window(n) | masks.window(n + 1, n) | masks.prefix_lm(n)) & masks.chunks(n * 3)
    return {"mask": mask, "score_mod": scores.softcap(x) + scores.squared_distance(x / 9)}


def test_values_of_dynamic_numbers() -> None:
    """The numbers are inputs of the op: another one compiles no other program, and each has its
    own."""
    graphs = Graphs()
    call = graphs.compiled(lambda n: of_numbers(n, 5.0) | {"window": (n, 0)}, dynamic=True)
    for number in (11, 12, 13):
        call(*draw(), number)
    (node,) = graphs.calls
    assert not any(isinstance(it, int) for it in (*node.kwargs["ints"], node.kwargs["window_left"]))
    eager = flashsmith.explain(**of_numbers(11, 5.0), lengths=(100, 131)).program
    assert eager is not None
    assert node.kwargs["program"].startswith(eager.text)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_with_dynamic_numbers(strict: bool) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, n: int) -> Any:
            window = n, k.shape[1] // 2
            return flashsmith.attention(q, k, v, window=window, **of_numbers(n, 5.0), scale=0.25)

    tensors = [it.detach() for it in draw()]
    keys = torch.export.Dim("keys", min=2, max=4096)
    sizes = {}, {1: keys}, {1: keys}, torch.export.Dim.DYNAMIC
    made = torch.export.export(Layer(), (*tensors, 11), dynamic_shapes=sizes, strict=strict)
    (call,) = (it for it in made.graph.nodes if "attention_of_program" in str(it.target))
    numbers = [call.kwargs[it] for it in ("window_left", "window_right")] + call.kwargs["ints"]
    assert all(isinstance(it, torch.fx.Node) for it in numbers)
    assert call.kwargs["scale"] == 0.25


def test_errors_are_those_of_eager_calls() -> None:
    graphs = Graphs()
    wide = torch.zeros(4, 100, 7)
    for functions, error, message in (
        ({"score_mod": lambda s, b, h, q, k: s if q > k else -s}, TraceError, "'if'"),
        ({"bias": wide}, ArgumentError, r"bias: shape \(4, 100, 7\)"),
        ({"mask": masks.causal(), "positions": "middle"}, ArgumentError, "positions='middle'"),
    ):
        with pytest.raises(Exception, match=message) as caught:
            graphs.compiled(lambda it=functions: it)(*draw())
        causes = [caught.value, caught.value.__cause__, caught.value.__context__]
        assert any(isinstance(it, error) for it in causes) or error.__name__ in str(caught.value)
