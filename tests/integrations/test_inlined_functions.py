"""Functions that compiled code itself defines: the compiler's graph has them as a program, the same
as for an eager call. Kernels run in the emulator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from test_compiled_functions import draw
from test_flex_gradients import BACKWARD, FORWARD, IDS, SLOPES, documents
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention.flex_attention import create_block_mask

import flashsmith
from flashsmith import masks, scores
from flashsmith.integrations import inlined_functions
from flashsmith.tracing.binding import limited
from flashsmith.tracing.graph_plans import program_of_text

pytestmark = pytest.mark.torch
KERNELS = {"config": FORWARD, "backward_config": BACKWARD}
LENGTHS = 100, 131


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


class Ops:
    """A backend that keeps the nodes of the op that takes a program, and computes nothing."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.backend = aot_autograd(fw_compiler=self._compile)

    def _compile(self, module: Any, _: Any) -> Any:
        nodes = module.graph.nodes
        self.calls += [it for it in nodes if "attention_of_program" in str(it.target)]
        assert not any("inlined" in str(it.target) for it in nodes)
        (results,) = (it.args[0] for it in nodes if it.op == "output")
        made = [(map(int, it.meta["val"].shape), it.meta["val"].dtype) for it in results]
        zeros = [torch.zeros(tuple(shape), dtype=dtype) for shape, dtype in made]
        return make_boxed_func(lambda *_: zeros)

    def compiled(self, function: Callable[..., Any], **options: Any) -> Any:
        """attention() of what ``function`` returns, which compiled code calls."""

        def call(q: Any, k: Any, v: Any, *more: Any) -> Any:
            return flashsmith.attention(q, k, v, **function(*more))

        call = torch.no_grad()(call)
        return torch.compile(call, backend=self.backend, fullgraph=True, **options)


def test_output_and_gradients() -> None:
    """The same bits as an eager call, with the gradients of a parameter and of a tensor that the
    compiled code computes."""
    slopes = torch.nn.Parameter(SLOPES.clone())

    def call(q: Any, k: Any, v: Any, tall: Any) -> Any:
        own, ids = slopes * tall, IDS + 0

        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s + own[h] * (j - i) / 8

        def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
            return ids[b, i] == ids[b, j]

        return flashsmith.attention(q, k, v, score_mod=score, mask_mod=mask, **KERNELS)

    given = (*draw(), torch.tensor([1.0, 2.0, 0.5, 3.0], requires_grad=True))
    do = torch.randn((2, 100, 4, 64), generator=torch.Generator().manual_seed(2)).bfloat16()
    expected = call(*given)
    o = torch.compile(call, fullgraph=True, backend="aot_eager")(*given)
    assert torch.equal(o, expected)
    wanted = torch.autograd.grad(expected, (*given, slopes), do)
    found = torch.autograd.grad(o, (*given, slopes), do)
    assert all(map(torch.equal, found, wanted))


# --- the program is that of an eager call ---------------------------------------------------------


def _plain() -> dict[str, Any]:
    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        far = torch.where(j > i, torch.tanh(s / 3) * 3, s - 0.25 * torch.abs(i - j))
        return torch.clamp(far, min=-5.0) + SLOPES[h] * s.exp2()

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return ((i - j).abs() <= 9) | (i // 16 == j // 16) & (j % 3 != 1) | ~(h < 2)

    return {"score_mod": score, "mask_mod": mask}


def _nested() -> dict[str, Any]:
    window, ids = 7, IDS

    def near(i: Any, j: Any) -> Any:
        return i - j <= window

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = near(i, j)
        for head in (1, 3):
            seen = seen | (h == head)
        return seen & (ids[b][i] == ids[b][j])

    return {"mask_mod": mask}


def _with_tensors() -> dict[str, Any]:
    shown, bias = torch.ones(131, 131, dtype=torch.bool), torch.zeros(4, 131, 131)
    options = {"bias": bias, "mask": shown, "positions": "end"}
    return {"score_mod": lambda s, b, h, i, j: s * 2.0 - (j - i) * 0.5, **options}


def _with_values() -> dict[str, Any]:
    mask = masks.documents(IDS) & masks.causal()
    return {"mask": mask | masks.window(4), "mask_mod": lambda b, h, i, j: (i + j) % 2 == h % 2}


def _constants() -> dict[str, Any]:
    return {"score_mod": lambda s, b, h, i, j: 0.5, "mask_mod": lambda b, h, i, j: True}


@pytest.mark.parametrize("make", [_plain, _nested, _with_tensors, _with_values, _constants])
def test_program_is_that_of_an_eager_call(make: Any) -> None:
    ops, (_, k, v) = Ops(), draw()
    ops.compiled(make)(torch.zeros((2, 131, 4, 64), dtype=torch.bfloat16), k, v)
    assert program_of(ops.calls[0]) == eager_program(**make(), lengths=(131, 131))


def eager_program(*functions: Any, **asked: Any) -> str:
    """The program of an eager call, with captured numbers as constants, as the compiler has
    them."""
    bound = flashsmith.explain(*functions, **asked).bound
    assert bound is not None
    text = bound.program.text
    for number, value in zip(bound.program.numbers, bound.numbers, strict=True):
        kind = "int32" if number.kind == "int" else "float32"
        text = text.replace(f"symbol:{kind}('{number.name}')", f"constant:{kind}({value})")
    return text


def program_of(node: Any) -> str:
    """The program that the op of a node passes to kernels."""
    its, reads = node.kwargs, tuple(it.meta["val"] for it in node.args[6])
    ints = (3,) * len(its["ints"])  # nodes of the graph: the program is the same for all values
    bound = program_of_text(its["program"], reads, ints, tuple(its["floats"]))
    found = limited(bound, LENGTHS, its["positions"]).program
    assert found is not None
    return found.program.text


@pytest.mark.parametrize("made", ["outside", "function", "mask"])
def test_a_block_mask(made: str) -> None:
    """Its lists hide blocks, also if the compiled code defines its function, or all of it."""
    sizes = 2, None, *LENGTHS, "cpu", 64
    ops, block_mask = Ops(), create_block_mask(documents, *sizes)

    def functions(mask: Any) -> dict[str, Any]:
        same = lambda b, h, i, j: IDS[b, i] == IDS[b, j]  # noqa: E731
        if made == "function":
            mask.mask_mod = same
        if made == "mask":
            mask = create_block_mask(same, *sizes)
        return {"mask": mask, "score_mod": lambda s, b, h, i, j: -s}

    ops.compiled(functions)(*draw(), block_mask)
    eager = functions(block_mask)
    expected = eager_program(eager["score_mod"], eager["mask"], lengths=LENGTHS)
    assert program_of(ops.calls[0]) == expected


# --- numbers, lengths and kinds of functions ------------------------------------------------------


def test_new_numbers() -> None:
    """The second value of a number makes it an input, and so do lengths."""
    ops = Ops()

    def functions(left: Any) -> dict[str, Any]:
        return {"mask_mod": lambda b, h, i, j: (i - j <= left) & (h < 3)}

    call = ops.compiled(functions)
    for left in (5, 6, 7, 8):
        call(*draw(), left)
    assert [len(it.kwargs["ints"]) for it in ops.calls] == [0, 1]
    assert len({program_of(it) for it in ops.calls}) == 2


def test_dynamic_lengths() -> None:
    ops = Ops()

    def functions(ids: Any) -> dict[str, Any]:
        half = ids.shape[0] // 2
        return {"mask_mod": lambda b, h, i, j: (j < half) | (ids[i] == ids[j])}

    call = ops.compiled(functions, dynamic=True)
    for seq in (131, 140, 150):
        call(*draw(seq), torch.zeros(seq, dtype=torch.int64))
    assert len(ops.calls) == 1


class Scaled:
    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * self.factor[h]


def _scaled(s: Any, b: Any, h: Any, q: Any, k: Any, factor: Any) -> Any:
    return s * factor[h]


@pytest.mark.parametrize(
    "make",
    [
        Scaled,
        lambda factor: functools.partial(_scaled, factor=factor),
        lambda factor: functools.partial(lambda f, s, *_: s * f[_[1]], factor),
        lambda factor: scores.ScoreValue(lambda f, s, b, h, q, k: s * f[h], factor),
    ],
)
def test_what_else_compiled_code_makes(make: Any) -> None:
    """Objects, partials, and values with parts that the compiled code computes."""
    ops = Ops()
    ops.compiled(lambda: {"score_mod": make(SLOPES * 2.0)})(*draw())
    assert program_of(ops.calls[0]) == eager_program(lambda s, b, h, q, k: s * SLOPES[h])


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slopes = torch.nn.Parameter(SLOPES.clone())

        def forward(self, q: Any, k: Any, v: Any, ids: Any) -> Any:
            return flashsmith.attention(
                *(q, k, v),
                score_mod=lambda s, b, h, i, j: s + self.slopes[h] * (j - i),
                mask_mod=lambda b, h, i, j: ids[b, i] == ids[b, j],
            )

    tensors = [it.detach() for it in draw()]
    graph = torch.export.export(Layer(), (*tensors, IDS), strict=strict).graph
    (call,) = (it for it in graph.nodes if it.op == "call_function" and "getitem" not in it.name)
    assert [it.name for it in call.args[6]] == ["p_slopes", "ids"]


# --- what it cannot do ----------------------------------------------------------------------------


def test_an_operation_that_kernels_do_not_have() -> None:
    """The error quotes the operation and the line of the function."""

    def functions() -> dict[str, Any]:
        return {"score_mod": lambda s, b, h, i, j: torch.lgamma(s)}

    with pytest.raises(Exception, match=r"test_inlined_functions.py:\d+: .*torch.lgamma"):
        Ops().compiled(functions)(*draw())


def test_a_branch_on_an_index() -> None:
    """It breaks the graph, and is then the error of an eager call."""

    def call(q: Any, k: Any, v: Any) -> Any:
        zero = q[0, 0, 0, 0]
        mod = lambda s, b, h, i, j: s if i > j else zero  # noqa: E731
        return flashsmith.attention(q, k, v, score_mod=mod)

    with pytest.raises(Exception, match=r"the truth value of .*, which 'if'"):
        torch.compile(call, backend="eager")(*draw())


def test_a_compiler_that_does_not_trace_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call runs outside of the graph, for a reason that names what to do."""
    monkeypatch.setattr(inlined_functions, "INLINED", None)

    def call(q: Any, k: Any, v: Any) -> Any:
        slopes = SLOPES * 1.0
        mod = lambda s, b, h, i, j: s + slopes[h] * (j - i) / 8  # noqa: E731
        return flashsmith.attention(q, k, v, score_mod=mod, mask_mod=documents, config=FORWARD)

    with torch.no_grad():
        assert torch.equal(torch.compile(call, backend="eager")(*draw()), call(*draw()))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="define it outside"):
        torch.compile(call, backend="eager", fullgraph=True)(*draw())


def test_a_bias_of_another_dtype() -> None:
    """It is refused, as in an eager call."""
    bias = torch.zeros(100, 131, dtype=torch.int32)

    def call(q: Any, k: Any, v: Any) -> Any:
        two = q.shape[1] * 0.02
        return flashsmith.attention(q, k, v, score_mod=lambda s, *_: s * two, bias=bias)

    with pytest.raises(Exception, match=r"bias: .* dtype torch\.int32; give one of"):
        torch.compile(call, backend="eager")(*draw())
