"""Plans by which PyTorch's compiler turns captured tensors and numbers into inputs of its graph.

A plan is made once, while the compiler traces a call. It has the program as a string and, for each
captured value, the path by which the functions reach it. The compiler follows these paths, and so
guards the values at their ends: a function that later captures other numbers or functions is traced
again.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

from flashsmith.semantics.program import BoundProgram, Program, parse_program
from flashsmith.semantics.typed import INT, Typed
from flashsmith.semantics.typed_text import canonical, parse_canonical
from flashsmith.tracing.binding import at_row, composed
from flashsmith.tracing.block_masks import function_of_blocks
from flashsmith.tracing.captures import Constant, Path, captures_of, follow, is_tensor
from flashsmith.tracing.tracer import Traced, traced

# Roots of paths: the score function, the bias, and two masks, None where there is none. A value of
# flashsmith.masks or scores is (PARTS, its function, its parts), and a BlockMask is (BLOCKS, the
# states of its blocks, its function); BLOCKS_OF_ROWS if its rows are a call's queries over a cache.
# They are plain tuples, because PyTorch's compiler can make no other kind.
PARTS, BLOCKS, BLOCKS_OF_ROWS = "parts", "blocks", "blocks of rows"
# A stand-in for a tensor: (TENSOR, sizes, PyTorch's dtype), where every size other than 1 is
# replaced by 2.
TENSOR = "tensor"
# A stand-in for a number: (NUMBER, int or float). Compilers cannot pass Python a number that is an
# input of their graph, and do not say which numbers are.
NUMBER = "number"
Root = Any
Roots = tuple[Root, Root, Root, Root]


class GraphPlan(NamedTuple):
    """A program that was traced in a PyTorch graph, and the paths to the values that its functions
    capture.

    text: the program and the names of its numbers.
    reads, ints, floats: the paths to captured tensors and numbers.
    frozen: paths to numbers that are compiled in, with their values.
    others: paths to the other values on which the program depends.
    """

    text: str
    reads: tuple[Path, ...]
    ints: tuple[Path, ...]
    floats: tuple[Path, ...]
    frozen: tuple[tuple[Path, Any], ...]
    others: tuple[Path, ...]


def plan_of(roots: Roots, block_sizes: tuple[int, int] | None, positions: str) -> GraphPlan | None:
    """Returns the plan for functions, in which TENSORs stand for tensors, and NUMBERs for numbers.
    ``block_sizes`` belong to the BlockMask that is the last root.

    Returns None if the functions capture something to which no path leads, or if the program
    depends on the value of a NUMBER.

    Raises ArgumentError and TraceError as bind() does.
    """
    made_of: dict[int, Any] = {}
    given = tuple(_with_placeholders(it, made_of) for it in roots)
    captures = captures_of(given, with_paths=True)
    made = traced(given, captures, _compose(block_sizes, positions), reads_scalars=True)
    if not captures.is_complete or not made.is_reusable:
        return None
    leaves, paths = captures.leaves, captures.paths
    if any(_is_number(follow(roots, paths[i])) for i, _ in made.frozen):
        return None
    places = [it.leaf for it in made.reads]
    if not all(is_tensor(leaves[it].value) for it in places):
        return None  # a NumPy array, which a call with PyTorch's tensors does not take
    numbers = {name: source.leaf for name, source in made.sources.items() if name[0] == "n"}
    ints, floats = (
        {name: paths[it] for name, it in numbers.items() if leaves[it].kind == kind}
        for kind in ("int", "float")
    )
    return GraphPlan(
        _text(made, (*ints, *floats)),
        tuple(paths[it] for it in places),
        tuple(ints.values()),
        tuple(floats.values()),
        tuple((paths[i], value) for i, value in made.frozen),
        captures.others,
    )


def values_of(
    roots: Roots, block_sizes: tuple[int, int] | None, positions: str
) -> tuple[str, tuple[Any, ...], list[int], list[float]]:
    """Returns a program as a string, its tensors, and its captured ints and floats. This is for a
    tracer that runs Python, where functions hold their real tensors and nothing is guarded.

    Raises ArgumentError and TraceError as bind() does.
    """
    captures = captures_of(roots)
    made = traced(roots, captures, _compose(block_sizes, positions), reads_scalars=True)
    numbers = {
        name: captures.leaves[it.leaf] for name, it in made.sources.items() if name[0] == "n"
    }
    ints, floats = (
        {name: it.value for name, it in numbers.items() if it.kind == kind}
        for kind in ("int", "float")
    )
    reads = made.tensors(captures.leaves)
    return _text(made, (*ints, *floats)), reads, [*ints.values()], [*floats.values()]


def _compose(block_sizes: tuple[int, int] | None, positions: str) -> Any:
    def compose(made: Roots) -> Any:
        score_mod, bias, *mask_roots = (_function_of(it, block_sizes) for it in made)
        return composed(score_mod, tuple(mask_roots), bias, positions)

    return compose


def _is_number(root: Root) -> bool:
    return type(root) is tuple and len(root) == 2 and root[0] is NUMBER


def _with_placeholders(root: Root, made_of: dict[int, Any]) -> Any:
    """Copies a root, and replaces each TENSOR object by a tensor without memory, and each NUMBER by
    2. ``made_of`` maps the identity of a TENSOR to the tensor in its place."""
    if type(root) is not tuple:
        return root
    if _is_number(root):
        return root[1](2)
    if root and root[0] is TENSOR:
        import torch
        from torch.utils._python_dispatch import _disable_current_modes

        if id(root) not in made_of:
            with _disable_current_modes():  # torch.export would record it
                made_of[id(root)] = torch.empty(root[1], dtype=root[2], device="meta")
        return made_of[id(root)]
    return tuple(_with_placeholders(it, made_of) for it in root)


def _function_of(root: Root, block_sizes: tuple[int, int] | None) -> Any:
    """Returns a root as a function or a tensor."""
    if type(root) is not tuple:
        return root
    kind, first, rest = root
    if kind == PARTS:
        return partial(first, *(_function_of(it, block_sizes) for it in rest))
    assert block_sizes is not None
    rows, keys = map(Constant, block_sizes)
    function = function_of_blocks(first, _function_of(rest, None), rows, keys)
    return at_row(function) if kind == BLOCKS_OF_ROWS else function


def _text(made: Traced, names: tuple[str, ...]) -> str:
    numbers = [canonical({"number": it}) for it in made.numbers]
    return "\n\n".join([made.program.text, " ".join(names), *numbers])


@lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[Program, tuple[str, ...], tuple[Typed, ...]]:
    program, names, *numbers = text.split("\n\n")
    found = tuple(parse_canonical(it)["number"] for it in numbers)
    return parse_program(program), tuple(names.split()), found


def program_of_text(
    text: str, reads: tuple[Any, ...], ints: tuple[int, ...], floats: tuple[float, ...]
) -> BoundProgram:
    """Returns the program that a GraphPlan's string describes, with the values found at the ends of
    the plan's paths.

    Raises ArgumentError for any other string.
    """
    program, names, numbers = _parsed(text)
    given = dict(zip(names, (*ints, *floats), strict=True))
    values = [it.evaluate(given).item() for it in numbers]
    kinds = [int if it.dtype == INT else float for it in numbers]
    made = tuple(kind(it) for kind, it in zip(kinds, values, strict=True))
    return BoundProgram(program, reads, made, ("",) * len(reads))
