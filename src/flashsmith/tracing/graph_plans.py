"""Programs of functions for PyTorch's compiler, which makes the tensors and numbers that functions
capture inputs of its graph.

A plan is made once, while the compiler traces a call. It has the program as text, and for each
captured value a path from the functions to it. The compiler follows these paths, and so guards
what it finds: a function that captures other numbers or functions later is traced again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from flashsmith.semantics.program import BoundProgram, Program, parse_program
from flashsmith.semantics.typed import INT, Typed
from flashsmith.semantics.typed_text import canonical, parse_canonical
from flashsmith.tracing.binding import composed
from flashsmith.tracing.block_masks import function_of_blocks
from flashsmith.tracing.captures import Constant, Path, captures_of, is_tensor
from flashsmith.tracing.tracer import Traced, traced


class TensorFacts(NamedTuple):
    """What a trace needs to know of a mask or bias tensor: which sizes are 1 and not 2, and the
    dtype of PyTorch."""

    sizes: tuple[int, ...]
    dtype: Any

    def placeholder(self) -> Any:
        """A tensor without memory of these facts."""
        import torch

        return torch.empty(self.sizes, dtype=self.dtype, device="meta")


class GraphPlan(NamedTuple):
    """text: the program and the names of its numbers. reads, ints, floats: the paths to captured
    tensors and numbers. frozen: paths to numbers that are compiled in, with their values. others:
    paths to what else the program depends on."""

    text: str
    reads: tuple[Path, ...]
    ints: tuple[Path, ...]
    floats: tuple[Path, ...]
    frozen: tuple[tuple[Path, Any], ...]
    others: tuple[Path, ...]


# Roots of paths: the score function, the bias, two masks (functions, tensors, or a BlockMask's
# blocks and function), None where there is none.
Roots = tuple[Any, Any, Any, Any]


def plan_of(roots: Roots, block_sizes: tuple[int, int] | None, positions: str) -> GraphPlan | None:
    """The plan for functions, in which TensorFacts stand for tensors. ``block_sizes`` are those of
    the BlockMask that is the last root.

    None if the functions capture something that paths do not lead to.

    Raises ArgumentError and TraceError as bind() does.
    """
    given = tuple(_with_placeholders(it) for it in roots)
    captures = captures_of(given, with_paths=True)

    def compose(made: Roots) -> Any:
        score_mod, bias, mask_mod, mask = made
        # A trace replaces what functions capture; the placeholders are as they were.
        if block_sizes is not None:
            rows, keys = map(Constant, block_sizes)
            mask = function_of_blocks(mask[0], mask[1], rows, keys)
        return composed(score_mod, (mask_mod, mask), bias, positions)

    made = traced(given, captures, compose, reads_scalars=True)
    if not captures.is_complete or not made.is_reusable:
        return None
    leaves, paths = captures.leaves, captures.paths
    places = [it.leaf for it in made.reads]
    if not all(is_tensor(leaves[it].value) for it in places):
        return None  # NumPy's, which a call with PyTorch's tensors does not take
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


def _with_placeholders(root: Any) -> Any:
    if isinstance(root, TensorFacts):
        return root.placeholder()
    if isinstance(root, tuple):
        return tuple(_with_placeholders(it) for it in root)
    return root


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
    """The program of a GraphPlan's text with the values that its paths led to.

    Raises ArgumentError for any other text.
    """
    program, names, numbers = _parsed(text)
    given = dict(zip(names, (*ints, *floats), strict=True))
    values = [it.evaluate(given).item() for it in numbers]
    kinds = [int if it.dtype == INT else float for it in numbers]
    made = tuple(kind(it) for kind, it in zip(kinds, values, strict=True))
    return BoundProgram(program, reads, made, ("",) * len(reads))
