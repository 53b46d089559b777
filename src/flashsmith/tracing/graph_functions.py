"""Score and mask functions that PyTorch's compiler has already traced: nodes of its graph."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from flashsmith.tracing.binding import row_of
from flashsmith.tracing.refusals import at_line

# The symbols that a graph has in place of a function's arguments, in this order. The row is the
# argument of functions that at_row() takes.
SCORE_ARGUMENTS = ("score", "b", "h", "q_idx", "kv_idx", "row")
_FILE_AND_LINE = re.compile(r'File "([^"]*)", line (\d+)')


class GraphFunction:
    """One value of a graph as a function. Its arguments are the tensors and numbers that the graph
    takes, followed by the arguments of score_mod or mask_mod.

    ``nodes`` compute the value ``result`` in order, from ``inputs`` and from ``arguments``, one
    node for each of SCORE_ARGUMENTS.
    """

    __slots__ = ("arguments", "inputs", "nodes", "result")
    captures_nothing = True

    def __init__(
        self, inputs: Sequence[Any], arguments: Sequence[Any], nodes: Iterable[Any], result: Any
    ) -> None:
        self.inputs = tuple(inputs)
        self.arguments = tuple(arguments)
        self.nodes = tuple(nodes)
        self.result = result

    def __call__(self, *given: Any) -> Any:
        """Returns the value, as PyTorch's functions compute it for symbols."""
        own, symbols = given[: len(self.inputs)], given[len(self.inputs) :]
        if len(symbols) < len(SCORE_ARGUMENTS) - 1:
            symbols = None, *symbols  # a mask function gets no score
        values = dict(zip(self.inputs, own, strict=True))
        values |= zip(self.arguments, (*symbols, row_of(symbols[3])), strict=True)
        for node in self.nodes:
            with at_line(_line_of(node)):
                values[node] = evaluated(node, values)
        return values[self.result]


def evaluated(node: Any, values: dict[Any, Any]) -> Any:
    """Computes the value of a node of torch.fx from the values of the nodes that it takes."""
    from torch.fx.node import map_arg

    args, keywords = (map_arg(it, values.__getitem__) for it in (node.args, node.kwargs))
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **keywords)
    return node.target(*args, **keywords)


def _line_of(node: Any) -> tuple[str, int] | None:
    """Returns the file and line of the caller that a node came from; None if the compiler did not
    record them."""
    places = _FILE_AND_LINE.findall(node.meta.get("stack_trace") or "")
    return (places[-1][0], int(places[-1][1])) if places else None
