"""Operations: registering them, naming them in a problem, and what they say of a problem."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, Problem, Semantics
from flashsmith.operations import (
    FORWARD,
    OPERATIONS,
    Operation,
    TensorSpec,
    find_more_with,
    operation,
    parse_kind,
    register_operation,
    registry,
)
from flashsmith.operations.operation import load_attribute

PAGED = Operation(
    name="paged_copy",
    tensors=(
        TensorSpec("pages", ("pages", "page", "heads_k", "d"), role="inout"),
        TensorSpec("table", ("batch", "width"), "int32"),
        TensorSpec("total", ("batch+1",), "float32", "out"),
    ),
    numbers=lambda call: (call.problem.batch, call.sizes["pages"]),
    flop=lambda problem: problem.batch * problem.d,
    semantics=frozenset({"causal"}),
)
PROBLEM = Problem(2, 64, 128, 8, 2, 64, DType.FP16)


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(OPERATIONS)
    monkeypatch.setattr(registry, "_finders", [])
    yield
    OPERATIONS.clear()
    OPERATIONS.update(before)


def test_forward_is_the_default_operation_of_a_problem() -> None:
    assert PROBLEM.operation == "forward"
    assert PROBLEM.computed is FORWARD is operation("forward")
    assert Problem.parse(f"{PROBLEM} forward") == PROBLEM
    assert str(PROBLEM) == "b2 s64:128 h8:2 d64 fp16"
    assert PROBLEM.kind == "plain"


def test_another_operation_is_a_word_of_a_problems_text() -> None:
    register_operation(PAGED)
    problem = replace(PROBLEM, operation="paged_copy", semantics=Semantics("causal"))
    assert str(problem) == "b2 s64:128 h8:2 d64 fp16 paged_copy causal"
    assert Problem.parse(str(problem)) == problem
    assert Problem.parse("paged_copy+causal b2 s64:128 h8:2 d64 fp16") == problem
    assert problem.kind == "paged_copy+causal"
    assert parse_kind(problem.kind) == (Semantics("causal"), "paged_copy", 0, "", 0, "", "")
    assert problem.attn_flop() == 128
    assert problem != replace(problem, operation="forward")


def test_an_unknown_name_looks_for_installed_operations_once_more() -> None:
    found: list[str] = []

    def find() -> None:
        found.append("asked")
        register_operation(PAGED)

    find_more_with(find)
    assert operation("forward") is FORWARD
    assert not found
    assert Problem.parse("s64 d64 fp16 paged_copy").computed is PAGED
    assert operation("paged_copy") is PAGED
    assert found == ["asked"]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: operation("foward"), "operation='foward': no such operation is registered; did "
         "you mean 'forward'? known are backward, decode"),
        (lambda: operation(3), "operation=3: no such operation"),
        (lambda: replace(PROBLEM, operation="encode"), "operation='encode': no such operation"),
        (lambda: Problem.parse("s64 d64 fp16 encode"), "unknown word 'encode'"),
        (lambda: Problem.parse("s64 d64 fp16 page_copy"), "did you mean 'paged_copy'?"),
        (lambda: Problem.parse("s64 d64 fp16 paged_copy forward"),
         "problem='s64 d64 fp16 paged_copy forward': operation='paged_copy+forward': give one"),
        (lambda: Problem.parse("s64 d64 fp16 paged_copy softcap"),
         "semantics='softcap': paged_copy supports no softcap; leave it out (known: causal)"),
        (lambda: register_operation(replace(PAGED)),
         "operation='paged_copy': the name is taken by another operation"),
        (lambda: register_operation(replace(PAGED, name="causal")),
         "operation='causal': the name is taken by a word of problems"),
        (lambda: register_operation(replace(PAGED, name="bf16")),
         "operation='bf16': the name is taken by a word of problems"),
        (lambda: register_operation(replace(PAGED, name="s128")),
         "operation='s128': reads as a size in a problem's text; choose another name"),
        (lambda: replace(PAGED.tensors[0], role="output"),
         "role='output' of the tensor pages: allowed are in, out, inout"),
        (lambda: TensorSpec("x", ("d",), presence="maybe"),  # type: ignore[arg-type]
         "presence='maybe' of the tensor x: allowed are required, usual, optional, packed"),
        (lambda: register_operation("paged"), "operation='paged': give a flashsmith Operation"),
        (lambda: replace(PAGED, name="Paged copy"), "name='Paged copy': give lower-case letters"),
        (lambda: replace(PAGED, semantics=frozenset({"alibi"})), "semantics of paged_copy: 'ali"),
        (lambda: replace(PAGED, tensors=PAGED.tensors * 2), "tensors of paged_copy: pages, table"),
        (lambda: replace(PAGED, tensors=PAGED.tensors[1:2]), "tensors of paged_copy: no output"),
        (lambda: load_attribute("no.such:thing", "reference of paged_copy"),
         "reference of paged_copy: 'no.such:thing' cannot be loaded (No module named 'no')"),
        (lambda: load_attribute("flashsmith.verify:nothing", "peers"),
         "peers: 'flashsmith.verify:nothing' cannot be loaded"),
        (lambda: load_attribute("flashsmith", "peers"), "peers: 'flashsmith' cannot be loaded"),
        (lambda: replace(PAGED, tensors=(TensorSpec("x", ("d",), "int8", "out"),)),
         "x of paged_copy: dtype 'int8'; allowed are float16"),
        (lambda: replace(PAGED, tensors=(TensorSpec("x", ("d",), presence="optional"),
         *PAGED.tensors)), "tensors of paged_copy: a required tensor follows one"),
        (lambda: PAGED.bytes(PROBLEM), "pages: the size of 'pages' is not known; give the tensor"),
    ],
)  # fmt: skip
def test_the_error_names_the_mistake(act: Callable[[], Any], message: str) -> None:
    register_operation(PAGED)
    with pytest.raises(ArgumentError, match=re.escape(message)):
        act()


def test_an_operation_may_be_registered_again() -> None:
    assert register_operation(PAGED) is register_operation(PAGED) is operation("paged_copy")


@pytest.mark.parametrize("semantics", ["plain", "causal+packed+uneven"])
def test_the_shapes_and_bytes_of_forwards_tensors(semantics: str) -> None:
    problem = replace(PROBLEM, semantics=Semantics.parse(semantics))
    shapes = {t.name: FORWARD.shape(t, problem) for t in FORWARD.tensors}
    packed = problem.semantics.packed
    assert shapes["q"] == shapes["o"] == ((128, 8, 64) if packed else (2, 64, 8, 64))
    assert shapes["k"] == shapes["v"] == ((256, 2, 64) if packed else (2, 128, 2, 64))
    assert shapes["lse"] == shapes["row_max"] == ((8, 128) if packed else (2, 8, 64))
    assert (shapes["sinks"], shapes["cu_seqlens_q"]) == ((8,), (3,))
    # q, k, v and o of two bytes, and the offsets of packed sequences.
    assert FORWARD.bytes(problem) == 2 * (2 * 65536 + 2 * 32768) + packed * 2 * 3 * 4
