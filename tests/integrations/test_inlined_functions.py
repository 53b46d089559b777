"""Functions that compiled code itself defines: the compiler's graph has them as a program, the same
as for an eager call. Kernels run in the emulator."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from test_compiled_functions import draw, of_numbers
from test_flex_gradients import BACKWARD, FORWARD, IDS, SLOPES, documents
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention.flex_attention import create_block_mask

import flashsmith
from flashsmith import masks, scores
from flashsmith.errors import ArgumentError, TraceError
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


def test_values_of_new_floats() -> None:
    """PyTorch's ops take floats as constants, so that each is compiled, with one program."""
    ops = Ops()
    call = ops.compiled(lambda x: of_numbers(7, x) | {"scale": x, "softcap": 2 * x})
    for number in (5.0, 6.0):
        call(*draw(), number)
    found = [it.kwargs for it in ops.calls]
    assert [it["scale"] for it in found] == [5.0, 6.0]
    assert [it["softcap"] for it in found] == [10.0, 12.0]
    assert [it["floats"][0] for it in found] == [5.0, 6.0]
    assert len({it["program"] for it in found}) == 1


def _remainder(b: Any, h: Any, q: Any, k: Any, n: int) -> Any:
    return q % n == k % n


def test_a_partial_of_a_dynamic_number() -> None:
    ops = Ops()
    call = ops.compiled(lambda n: {"mask_mod": functools.partial(_remainder, n=n)}, dynamic=True)
    for number in (11, 12, 13):
        call(*draw(), number)
    (node,) = ops.calls
    assert not any(isinstance(it, int) for it in node.kwargs["ints"])


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


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * self.factor[h]

    def method(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * self.factor[h]

    @classmethod
    def of_class(cls, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * SLOPES[h]


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(SLOPES.clone())

    def forward(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * self.factor[h]


def _of(function: Any) -> Any:
    return scores.ScoreValue(lambda inner, *given: inner(*given), function)


KINDS = {
    "object": Scaled(SLOPES),
    "slots": Slotted(SLOPES),
    "method": Slotted(SLOPES).method,
    "classmethod": Slotted.of_class,
    "module": Layer(),
    "object in a value": _of(Scaled(SLOPES)),
    "method in a value": _of(Slotted(SLOPES).method),
    "module in a value": _of(Layer()),
    "partial": functools.partial(_scaled, factor=SLOPES),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_functions_from_outside(kind: str) -> None:
    ops = Ops()
    ops.compiled(lambda: {"score_mod": KINDS[kind]})(*draw())
    assert program_of(ops.calls[0]) == eager_program(lambda s, b, h, q, k: s * SLOPES[h])


@pytest.mark.parametrize("kind", ["input", "branch"])
def test_an_object_from_outside(kind: str) -> None:
    """A new attribute of an object is seen, also by versions of the compiler that inline it."""
    ops = Ops()

    class Score:
        factor = 1.0

        def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            if kind == "branch":
                return s if self.factor > 2 else -s
            return s * self.factor

    instance = Score()
    instance.factor = 1.5
    call = ops.compiled(lambda: {"score_mod": instance})
    for factor in (1.5, 1.5, 2.5):
        instance.factor = factor
        call(*draw())
    first, second = ((it.kwargs["program"], it.kwargs["floats"]) for it in ops.calls)
    assert first != second


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


def _exported(function: Callable[[int, Any], dict[str, Any]], strict: bool) -> Any:
    """The node of the op in an export with a dynamic length, which ``function`` gets with the
    sequence's ids."""

    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, ids: Any) -> Any:
            return flashsmith.attention(q, k, v, **function(ids.shape[0], ids))

    given = *(it.detach() for it in draw()), torch.zeros(131, dtype=torch.int64)
    length = torch.export.Dim("length", min=2, max=4096)
    sizes = {}, {1: length}, {1: length}, {0: length}
    made = torch.export.export(Layer(), given, dynamic_shapes=sizes, strict=strict)
    (call,) = (it for it in made.graph.nodes if "attention_of_program" in str(it.target))
    return call


@pytest.mark.parametrize("strict", [False, True])
def test_exported_with_a_dynamic_length(strict: bool) -> None:
    """An int that depends on it is an input of the op."""

    def functions(length: Any, ids: Any) -> dict[str, Any]:
        half = length // 2
        return {"mask_mod": lambda b, h, i, j: (j < half) | (ids[i] == ids[j])}

    call = _exported(functions, strict)
    (value,) = (it.meta["val"] for it in call.kwargs["ints"])
    assert value.node.expr.free_symbols
    assert value.node.hint == 65


class _Opaque:
    """A callable that is not scanned for captured values."""

    __slots__ = ("half",)

    def __init__(self, half: Any) -> None:
        self.half = half

    def __call__(self, b: Any, h: Any, i: Any, j: Any) -> Any:
        return j < i


def test_exported_with_what_no_plan_describes() -> None:
    def functions(length: Any, ids: Any) -> dict[str, Any]:
        half, opaque = length // 2, _Opaque(length)
        return {"mask_mod": lambda b, h, i, j: (j < half) | opaque(b, h, i, j)}

    (value,) = (it.meta["val"] for it in _exported(functions, strict=False).kwargs["ints"])
    assert value.node.expr.free_symbols


def test_a_float_of_a_dynamic_length() -> None:
    """The function can compute it; as a captured number it would be fixed, and is refused."""

    def inside(length: Any, ids: Any) -> dict[str, Any]:
        return {"score_mod": lambda s, b, h, i, j: s + length * 0.01}

    def outside(length: Any, ids: Any) -> dict[str, Any]:
        slope = length * 0.01
        return {"score_mod": lambda s, b, h, i, j: s + slope}

    assert len(_exported(inside, strict=False).kwargs["ints"]) == 1
    for function, strict in ((inside, True), (outside, True), (outside, False)):
        with pytest.raises(Exception, match=r"captures the number .* give strict=False"):
            _exported(function, strict)


def test_a_branch_on_a_dynamic_length() -> None:
    """It needs the value, so PyTorch refuses to keep the length dynamic."""

    def functions(length: Any, ids: Any) -> dict[str, Any]:
        return {"score_mod": lambda s, b, h, i, j: s + j if length > 9 else s}

    with pytest.raises(Exception, match=r"specialized it to be a constant \(131\)"):
        _exported(functions, strict=False)


def test_a_dynamic_size_that_a_function_reads() -> None:
    def functions(length: Any, ids: Any) -> dict[str, Any]:
        return {"mask_mod": lambda b, h, i, j: j < ids.shape[0] // 2}

    with pytest.raises(TraceError, match=r"dynamic size .* read it outside the function"):
        _exported(functions, strict=False)
    assert _exported(functions, strict=True).kwargs["ints"]


# --- tensors that share memory --------------------------------------------------------------------


def _of_views(qkv: Any, both: Any) -> Any:
    """attention() of views of one tensor, with a function that reads views of another."""
    (q, k, v), by, more = qkv.unbind(2), both[:4], both[4:]
    mod = lambda s, b, h, i, j: s * by[h] + more[h]  # noqa: E731
    return flashsmith.attention(q, k, v, score_mod=mod, **KERNELS)


def _bases() -> tuple[torch.Tensor, torch.Tensor]:
    of = torch.Generator().manual_seed(4)
    qkv = torch.randn((2, 100, 3, 4, 64), generator=of).bfloat16()
    return qkv.requires_grad_(), torch.cat([SLOPES, SLOPES * 3]).requires_grad_()


def test_views_of_one_tensor() -> None:
    """The same bits as an eager call, with the gradients of both tensors."""
    given = _bases()
    expected = _of_views(*given)
    o = torch.compile(_of_views, fullgraph=True, backend="aot_eager")(*given)
    assert torch.equal(o, expected)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(5)).bfloat16()
    wanted = torch.autograd.grad(expected, given, do)
    found = torch.autograd.grad(o, given, do)
    assert all(map(torch.equal, found, wanted))


class _Views(torch.nn.Module):
    def forward(self, qkv: Any, both: Any) -> Any:
        return _of_views(qkv, both)


def test_views_in_a_strict_export() -> None:
    given = [it.detach() for it in _bases()]
    exported = torch.export.export(_Views(), tuple(given), strict=True)
    assert torch.equal(exported.module()(*given), _of_views(*given))


def test_a_bias_and_its_base() -> None:
    """A function reads the tensor of which the bias is a slice."""

    def functions(table: Any) -> dict[str, Any]:
        return {"score_mod": lambda s, b, h, i, j: s + table[h, i, j], "bias": table[..., 131:]}

    ops = Ops()
    ops.compiled(functions)(*draw(), torch.zeros(4, 100, 262))
    shapes = [tuple(it.meta["val"].shape) for it in ops.calls[0].args[6]]
    assert sorted(shapes) == [(4, 100, 131), (4, 100, 262)]


# --- graphs ---------------------------------------------------------------------------------------


def test_a_copy_of_a_graph() -> None:
    """A backend may copy a graph that has run; the copy computes the same."""
    graphs, given = [], [it.detach() for it in _bases()]

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    expected = torch.compile(_of_views, fullgraph=True, backend=keep)(*given)
    (result,) = copy.deepcopy(graphs[0])(*given)
    assert torch.equal(result, expected)


def test_graphs_are_freed() -> None:
    """What is known of a graph does not keep it in memory."""
    ops, graphs = Ops(), []
    inner = ops.backend

    def keep(module: Any, inputs: Any) -> Any:
        graphs.extend(weakref.ref(it) for it in module.children())
        return inner(module, inputs)

    ops.backend = keep
    ops.compiled(_plain)(*draw())
    (graph,) = graphs
    del ops
    torch._dynamo.reset()
    gc.collect()
    assert graph() is None


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


def test_vmap() -> None:
    """An op of the compiler's graph is refused as the op that takes a program."""
    q, k, v = (torch.zeros((3, 1, 16, 1, 64), dtype=torch.bfloat16) for _ in range(3))
    lens = torch.zeros((3, 1), dtype=torch.int32)
    ops, positions = torch.ops.flashsmith, {"positions": "start"}
    calls = {
        ops.score_arguments: ((q,), {}),
        ops.attention_of_inlined: ((q, k, v, *(None,) * 5), positions),
        ops.attention_of_inlined_with_cache: ((q, k, v, None, None, lens), {}),
        ops.attention_of_inlined_with_cache_appended: ((q, k, v, None, None, lens), {}),
    }
    for op, (args, keywords) in calls.items():
        places = tuple(None if it is None else 0 for it in args)
        with pytest.raises(ArgumentError, match=r"inside torch\.vmap"):
            torch.vmap(functools.partial(op, **keywords), places)(*args)


def test_vmap_of_compiled_code() -> None:
    def call(q: Any, k: Any, v: Any) -> Any:
        zero = SLOPES * 0.0
        return flashsmith.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + zero[h])

    given = [it.detach()[None] for it in draw()]
    with pytest.raises(Exception, match=r"inside torch\.vmap"):
        torch.compile(torch.vmap(call), backend="aot_eager", fullgraph=True)(*given)
