"""Plans for PyTorch's compiler: paths to what functions capture, and programs as text."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flashsmith import masks, scores
from flashsmith.errors import ArgumentError
from flashsmith.tracing import bind
from flashsmith.tracing.captures import captures_of, follow
from flashsmith.tracing.graph_plans import PARTS, TENSOR, plan_of, program_of_text

SLOPES, IDS = torch.rand(4), torch.arange(9)
SHIFT, FACTORS = 3, [0.5, 2.0]
TABLES = {"near": torch.rand(4, 9), "far": 7}


def with_globals(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + SLOPES[h] * (k - q + SHIFT) * FACTORS[1] + TABLES["near"][h, k] * TABLES["far"]


def with_defaults(
    s: Any, b: Any, h: Any, q: Any, k: Any, table: Any = SLOPES, *, n: int = 5
) -> Any:
    return s + table[h] * n


class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor, self.table = factor, torch.rand(4)

    def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * self.factor + self.table[h]

    def method(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s - self.table[h]


def of_closure(factor: float) -> Callable[..., Any]:
    table = torch.rand(4)
    inner = lambda h: table[h] * factor  # noqa: E731
    return lambda s, b, h, q, k: s + inner(h)


def with_more(factor: float, table: Any, s: Any, b: Any, h: Any, q: Any, k: Any, *, n: Any) -> Any:
    return s * factor + table[h] * n


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "globals": with_globals,
    "defaults": with_defaults,
    "closure": of_closure(1.5),
    "instance": Scaled(0.5),
    "method": Scaled(0.5).method,
    "partial": functools.partial(with_more, 2.5, SLOPES, n=4),
    "value": scores.alibi(SLOPES) + scores.softcap(20.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_paths_lead_to_the_leaves(name: str) -> None:
    function = FUNCTIONS[name]
    found = captures_of((function,), with_paths=True)
    assert found.leaves
    assert len(found.paths) == len(found.leaves)
    for path, leaf in zip(found.paths, found.leaves, strict=True):
        assert follow((function,), path) is leaf.value
    assert found[:3] == captures_of((function,))[:3]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_text_is_the_program_of_a_call(name: str) -> None:
    """With the call's tensors and numbers."""
    roots = (FUNCTIONS[name], None, masks.documents(IDS), masks.causal())
    plan = plan_of(roots, None, "end")
    assert plan is not None
    values = [[follow(roots, path) for path in paths] for paths in plan[1:4]]
    found = program_of_text(plan.text, *map(tuple, values))
    # A call's window and positions are found when the op runs.
    expected = bind(roots[0], roots[2:]).program
    assert expected is not None
    assert found.program == expected.program
    assert found.numbers == expected.numbers
    assert all(one is other for one, other in zip(found.tensors, expected.tensors, strict=True))


def test_values_by_their_parts() -> None:
    """Values that compiled code makes: their tensors are facts."""
    ids = TENSOR, (2,), torch.int64
    documents = masks.documents(IDS)
    parts = PARTS, documents.function, tuple(ids if it is IDS else it for it in documents.parts)
    both = masks.causal() & documents
    mask = PARTS, both.function, (both.parts[0], parts)
    plan = plan_of((None, None, None, mask), None, "start")
    assert plan is not None
    expected = bind(None, (both,)).program
    assert expected is not None
    assert program_of_text(plan.text, (IDS,) * len(plan.reads), (), ()).program == expected.program


def test_tensors_stand_for_masks_and_biases() -> None:
    bias, shown = torch.zeros(1, 4, 8, 9), torch.ones(8, 9, dtype=torch.bool)
    facts = [
        (TENSOR, tuple(1 if n == 1 else 2 for n in it.shape), it.dtype) for it in (bias, shown)
    ]
    plan = plan_of((None, facts[0], None, facts[1]), None, "start")
    assert plan is not None
    assert plan.reads == ((("item", 1),), (("item", 3),))
    expected = bind(None, (shown,), bias=bias).program
    assert expected is not None
    assert program_of_text(plan.text, (bias, shown), (), ()).program == expected.program


def test_captured_scalars_are_read() -> None:
    """Their values are not known while the compiler traces."""
    cap = torch.tensor(3.0)
    plan = plan_of((lambda s, b, h, q, k: s * cap, None, None, None), None, "start")
    assert plan is not None
    assert len(plan.reads) == 1


def test_what_no_path_leads_to() -> None:
    array = np.ones(4, np.float32)
    assert plan_of((lambda s, b, h, q, k: s + array[h], None, None, None), None, "start") is None
    heads = {1, 2}
    opaque = lambda s, b, h, q, k: s * len(heads)  # noqa: E731
    assert plan_of((opaque, None, None, None), None, "start") is None


def test_values_that_steer_python_are_frozen() -> None:
    n = 3
    plan = plan_of((lambda s, b, h, q, k: s if n > 2 else -s, None, None, None), None, "start")
    assert plan is not None
    assert [value for _, value in plan.frozen] == [3]


def test_other_texts_are_refused() -> None:
    with pytest.raises(ArgumentError, match="not the text of a program"):
        program_of_text("nonsense\n\n", (), (), ())
