"""Score and mask functions that PyTorch's compiler traces into its own graph.

The compiler has no Python function for a function that the compiled code itself defines, but can
call such a function. A call to attention() becomes a node of INLINED, whose graph computes the
values of the functions and passes them to an op without a kernel, from
``flashsmith::attention_of_inlined`` and its siblings. When that node runs, or is traced again, the
functions are taken from its graph as a program, and the op that takes a program replaces the node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from flashsmith.bundle import OPERATORS
from flashsmith.errors import ArgumentError, TraceError
from flashsmith.integrations.autograd_functions import refuse_vmap
from flashsmith.integrations.cache_program_ops import OPS_OVER_CACHES, OPS_OVER_LATENT_CACHES
from flashsmith.integrations.program_ops import PROGRAM
from flashsmith.integrations.torch_ops import OPS, TAGS
from flashsmith.tracing.binding import POSITIONS, table_function
from flashsmith.tracing.block_masks import function_of_blocks
from flashsmith.tracing.captures import follow, is_symbolic
from flashsmith.tracing.graph_functions import SCORE_ARGUMENTS, GraphFunction, evaluated
from flashsmith.tracing.graph_plans import BLOCKS_OF_ROWS, PARTS, TENSOR, GraphPlan, plan_of

try:
    from torch._higher_order_ops.base_hop import BaseHOP
    from torch._ops import HigherOrderOperator
except ImportError:  # a version of PyTorch whose compiler does not pass functions to operators
    BaseHOP = None
try:
    from torch._dynamo.variables import higher_order_ops as _known_to_dynamo
except ImportError:
    _known_to_dynamo = None


_NAME = "flashsmith_inlined"


class _Inlined(BaseHOP or object):  # type: ignore[misc]
    """An operator that takes a function; the compiler replaces the function by the function's
    graph.

    The compiler accepts only subclasses of BaseHOP. Nothing else is inherited from it: a call runs
    as plain Python, in which tracers see the op that takes a program.
    """

    def __init__(self) -> None:
        HigherOrderOperator.__init__(self, _NAME)

    def __call__(self, graph: Any, /, *operands: Any) -> Any:
        return _run(graph, operands)


INLINED = None if BaseHOP is None else _Inlined()


def _allow_views() -> None:
    """Lets the compiler pass INLINED tensors that share memory, such as the views that q, k and v
    often are: the graph does not write, and what it returns is new.

    A version of the compiler that has no such registry breaks its graph at such a call.
    """
    known = getattr(_known_to_dynamo, "_hop_name_to_variable_class", None)
    base = getattr(_known_to_dynamo, "BaseHOPVariable", None)
    if known is not None and base is not None:
        known[_NAME] = type("InlinedVariable", (base,), {"supports_aliasing": True})


_allow_views()


def inlined_call(
    op: Any, roots: Any, block_sizes: tuple[int, int] | None, positions: str
) -> Callable[..., Any] | None:
    """Returns a function that takes the tensors of ``op`` except ``reads``, and calls ``op``, an op
    that takes a program.

    ``roots`` are the roots of a plan: the score function, the bias and two masks. Returns None if
    the compiler cannot trace the roots into its graph, or attention() does not take such roots.
    """
    if INLINED is None or not torch.compiler.is_dynamo_compiling():
        return None
    if positions not in POSITIONS or not _are_usable(roots):
        return None
    stands, place = _STANDING_FOR[op]

    def call(*tensors: Any, **options: Any) -> Any:
        def traced() -> Any:
            arguments = OPS.score_arguments(tensors[0])
            values = _values(roots, block_sizes, positions, arguments)
            return stands(*tensors[:place], *values, *tensors[place:], **options)

        return INLINED(traced)

    return call


_BIASES = (torch.float16, torch.bfloat16, torch.float32)


def _are_usable(roots: Any) -> bool:
    """Whether all roots have kinds that attention() takes; an eager call's error names a root that
    does not."""
    score_mod, bias, *masks = roots
    for tensor, dtypes in ((bias, _BIASES), *((it, (torch.bool,)) for it in masks)):
        if isinstance(tensor, torch.Tensor):
            if tensor.dtype not in dtypes or not 2 <= tensor.dim() <= 4:
                return False
        elif tensor is not None and tensor is bias:
            return False
    others = [it for it in (score_mod, *masks) if not isinstance(it, torch.Tensor | tuple)]
    return all(it is None or callable(it) for it in others)


def _values(
    roots: Any, block_sizes: tuple[int, int] | None, positions: str, arguments: Any
) -> tuple[Any, Any]:
    """Returns the new score, and whether the query sees the key; each is None if no root changes
    it."""
    score_mod, bias, *masks = roots
    score, b, h, q, k, row = arguments
    row = row if positions == "end" else q
    new = shown = None
    if score_mod is not None or bias is not None:
        new = score if score_mod is None else _function(score_mod)(score, b, h, q, k)
        if bias is not None:
            new = new + table_function(bias)(b, h, row, k)
        new = _as_tensor(new, score)
    for root in masks:
        if root is not None:
            is_of_rows = isinstance(root, torch.Tensor) or (
                type(root) is tuple and root[0] == BLOCKS_OF_ROWS
            )
            one = _function(root, block_sizes)(b, h, row if is_of_rows else q, k)
            shown = one if shown is None else shown & one
    return new, None if shown is None else _as_tensor(shown, b)


def _function(root: Any, block_sizes: tuple[int, int] | None = None) -> Any:
    """Returns a root, or a part of one, as a function; tensors and numbers of a part are
    unchanged."""
    if isinstance(root, torch.Tensor):
        return table_function(root)
    if type(root) is not tuple:
        return root
    kind, first, rest = root
    if kind == PARTS:
        parts = [_function(it) if type(it) is tuple else it for it in rest]
        return partial(first, *parts)
    rows, columns = block_sizes or (0, 0)
    return function_of_blocks(first, _function(rest), rows, columns)


def _as_tensor(value: Any, like: Any) -> Any:
    """Converts the value that a function returned to a tensor, because a function may return a
    constant."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.full_like(like, value, dtype=torch.bool if isinstance(value, bool) else like.dtype)


# --- a graph and its functions --------------------------------------------------------------------


class _Call(NamedTuple):
    """A graph's call to an op without a kernel: the call's node, the op that takes the place of the
    op without a kernel, and the position of ``reads`` among the arguments of the op in its
    place."""

    node: Any
    op: Any
    place: int


class _Parsed(NamedTuple):
    """What a graph contains: its call; the nodes that do not run, because they depend on a score
    function's arguments; the functions that these nodes compute; and the functions' input nodes."""

    call: _Call
    traced: frozenset[Any]
    score: GraphFunction | None
    mask: GraphFunction | None
    inputs: tuple[Any, ...]
    plans: dict[Any, list[GraphPlan]]


class _Kept:
    """What is known of a graph, as an attribute of it: the two refer to each other, so that no
    table elsewhere would ever lose the graph. A copy of the graph gets an empty one."""

    def __init__(self) -> None:
        self.parsed: _Parsed | None = None

    def __reduce__(self) -> Any:
        return _Kept, ()


def _parsed(graph: Any) -> _Parsed:
    """Parses a graph. The result is stored in the graph, because a program that nothing compiles
    further runs the graph in every step."""
    kept = vars(graph).setdefault("_flashsmith_parsed", _Kept())
    if kept.parsed is None:
        kept.parsed = _parse(graph)
    found: _Parsed = kept.parsed
    return found


def _parse(graph: Any) -> _Parsed:
    nodes = list(graph.graph.nodes)
    (call,) = (
        _Call(it, *_CALLS[it.target])
        for it in nodes
        if it.op == "call_function" and it.target in _CALLS
    )
    (source,) = (it for it in nodes if it.target in _SOURCES)
    traced = [source]
    for node in nodes[: nodes.index(call.node)]:
        if any(it in traced for it in node.all_input_nodes):
            traced.append(node)
    arguments = [
        next((it for it in source.users if it.args[1] == i), object())
        for i in range(len(SCORE_ARGUMENTS))
    ]
    results = call.node.args[call.place : call.place + 2]
    needed = [_needed(it, traced, {source, *arguments}) for it in results]
    inputs = {
        it: None
        for node in (*needed[0], *needed[1])
        for it in node.all_input_nodes
        if it not in traced
    }
    score, mask = (
        None if result is None else GraphFunction(tuple(inputs), arguments, own, result)
        for result, own in zip(results, needed, strict=True)
    )
    return _Parsed(call, frozenset(traced), score, mask, tuple(inputs), {})


def _needed(result: Any, traced: list[Any], given: set[Any]) -> list[Any]:
    """Returns the traced nodes from which ``result`` is computed, in order, without the given
    ones."""
    wanted = {result}
    for node in reversed(traced):
        if node in wanted:
            wanted.update(node.all_input_nodes)
    return [it for it in traced if it in wanted and it not in given]


def _run(graph: Any, operands: tuple[Any, ...]) -> Any:
    """Runs the graph on these operands, with its call replaced by a call to the op that takes a
    program."""
    parsed = _parsed(graph)
    values: dict[Any, Any] = {}
    given = iter(operands)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = getattr(graph, node.target)
        elif node is parsed.call.node:
            values[node] = _attend(parsed, values)
        elif node.op == "output":
            return torch.fx.node.map_arg(node.args[0], values.__getitem__)
        elif node not in parsed.traced:
            values[node] = evaluated(node, values)
    raise AssertionError("a graph without an output")


def _attend(parsed: _Parsed, values: Mapping[Any, Any]) -> Any:
    """Calls the op that takes a program."""
    call = parsed.call
    args = call.node.args
    others = args[: call.place], args[call.place + 2 :], call.node.kwargs
    before, after, own = torch.fx.node.map_arg(others, values.__getitem__)
    keywords = dict(own)
    captured = tuple(values[it] for it in parsed.inputs)
    roots = _roots(parsed, captured)
    plan = _plan(parsed, captured, roots)
    reads, ints, floats = ([follow(roots, it) for it in paths] for paths in plan[1:4])
    check_known(*floats, *(follow(roots, path) for path, _ in plan.frozen))
    if "needs" in keywords and torch.is_grad_enabled():
        keywords["with_backward"] |= any(it.requires_grad for it in reads)
    return call.op(*before, reads, *after, program=plan.text, ints=ints, floats=floats, **keywords)


def check_known(*numbers: Any) -> None:
    """Raises ArgumentError for a number that depends on a dynamic size, if torch.export would
    record its present value: ops take such floats only as constants."""
    for it in numbers:
        if is_symbolic(it) and torch.compiler.is_exporting():
            raise ArgumentError(
                f"score_mod, mask_mod: a function captures the number {it}, which depends on a "
                "dynamic size, and torch.export would record its present value; capture the size "
                "as an int, compute the number within the function and give strict=False, or "
                "export with a static size"
            )


def _plan(parsed: _Parsed, captured: tuple[Any, ...], roots: Any) -> GraphPlan:
    """Returns the plan for the values that the graph takes now."""
    described = tuple(map(_stand_in, captured))
    kinds = tuple(it if isinstance(it, tuple) else type(it) for it in described)
    known = parsed.plans.setdefault(kinds, [])
    for plan in known:
        if all(follow(roots, path) == value for path, value in plan.frozen):
            return plan
    found = plan_of(_roots(parsed, described), None, "start")
    if found is None:
        raise TraceError(
            "a function that compiled code defines does something with a tensor that cannot be "
            "traced; define the function outside of the compiled code"
        )
    for path, value in found.frozen:
        assert follow(roots, path) == value  # the compiler guards the number
    known.append(found)
    return found


def _roots(parsed: _Parsed, captured: Any) -> Any:
    """Returns the roots of a plan's paths."""
    score, mask = (
        None if it is None else (PARTS, it, captured) for it in (parsed.score, parsed.mask)
    )
    return score, None, mask, None


def _stand_in(value: Any) -> Any:
    """Replaces a tensor or a number by the properties of it that a plan depends on."""
    if isinstance(value, torch.Tensor):
        return TENSOR, tuple(1 if size == 1 else 2 for size in value.shape), value.dtype
    if isinstance(value, torch.SymInt | torch.SymFloat):
        kind = int if isinstance(value, torch.SymInt) else float
        return kind(value.node.hint if value.node.has_hint() else 2)
    return value


# --- ops without a kernel -------------------------------------------------------------------------


def _fake_arguments(q: Any) -> list[Any]:
    """Makes tensors of one element, because the compiler cannot index a tensor by a tensor without
    dimensions."""
    dtypes = torch.float32, *(torch.int32,) * (len(SCORE_ARGUMENTS) - 1)
    return [q.new_empty((1,), dtype=it) for it in dtypes]


def _no_gradients(*_: Any) -> Any:
    raise AssertionError("an op without a kernel has no gradients")


def _define_without_kernel(op: Any) -> None:
    """Defines the op that stands for ``op``, which takes a program, in the compiler's graph."""
    schema = op.default._schema
    place = [it.name for it in schema.arguments].index("reads")
    name = schema.name.replace("of_program", "of_inlined")
    own = str(schema).replace(schema.name, name).replace(f"{PROGRAM}, ", "")
    own = re.sub(r"\([ab]!\)", "", own)  # op itself declares what it writes
    _library.define(
        own.replace("Tensor[] reads", "Tensor? score, Tensor? shown").removeprefix("flashsmith::"),
        tags=TAGS,
    )

    def fake(*given: Any, **keywords: Any) -> Any:
        tensors = *given[:place], [], *given[place + 2 :]
        return op(*tensors, program="", ints=[], floats=[], **keywords)

    torch.library.register_fake(name, fake, lib=_library)
    torch.library.register_vmap(name, refuse_vmap, lib=_library)
    torch.library.register_autograd(name, _no_gradients, lib=_library)
    stands = getattr(OPS, name.partition("::")[2])
    _STANDING_FOR[op] = stands, place
    _CALLS.update(dict.fromkeys((stands, stands.default), (op, place)))


_library = torch.library.Library(OPERATORS, "FRAGMENT")
_library.define("score_arguments(Tensor q) -> Tensor[]", tags=TAGS)
torch.library.register_fake(f"{OPERATORS}::score_arguments", _fake_arguments, lib=_library)
torch.library.register_vmap(f"{OPERATORS}::score_arguments", refuse_vmap, lib=_library)
_SOURCES = OPS.score_arguments, OPS.score_arguments.default
_CALLS: dict[Any, tuple[Any, int]] = {}
_STANDING_FOR: dict[Any, tuple[Any, int]] = {}
for _op in (OPS.attention_of_program, *OPS_OVER_CACHES, *OPS_OVER_LATENT_CACHES):
    _define_without_kernel(_op)
