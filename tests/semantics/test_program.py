"""Programs: texts, names, pickles, and the C++ of every operator."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest

from flashsmith.errors import ArgumentError
from flashsmith.semantics import Semantics
from flashsmith.semantics.cuda import semantics_header
from flashsmith.semantics.program import SCORE, B, H, K, Program, Q, parse_program, program_of
from flashsmith.semantics.typed import FLOAT, INT, apply, read, typed_symbol


def alibi_in_documents(slopes: str = "slopes", documents: str = "doc", cap: str = "cap") -> Program:
    limit = typed_symbol(cap, FLOAT)
    score = limit * apply("tanh", (SCORE + read(slopes, "float32", H) * (K - Q)) / limit)
    same = read(documents, "int64", B, Q).equals(read(documents, "int64", B, K))
    return program_of(score, same & (K <= Q)).program


def test_names_of_captured_variables_do_not_matter() -> None:
    assert alibi_in_documents() is alibi_in_documents("other", "names", "here")


def test_texts_give_the_same_program_in_another_process() -> None:
    program = alibi_in_documents()
    code = (
        "import sys; from flashsmith.semantics.program import parse_program; "
        "print(parse_program(sys.stdin.read()))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], input=program.text, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(program), done.stderr


def test_pickles() -> None:
    program = alibi_in_documents()
    assert pickle.loads(pickle.dumps(program)) is program
    assert program.reads[1] == ("read1", "int64", 2)
    assert program.numbers == (("number0", "float"),)


def test_semantics_with_a_program_have_texts_and_files() -> None:
    semantics = Semantics("causal", packed=True, uneven=True, program=alibi_in_documents())
    assert Semantics.parse(str(semantics)) == semantics
    assert Semantics(**semantics.to_json()) == semantics
    assert "program" not in Semantics().to_json()
    assert "Program" not in semantics_header(Semantics())
    assert semantics.cpp_fields()["mask_by_batch"] is True


def test_a_program_needs_uneven() -> None:
    with pytest.raises(ArgumentError, match="uneven=True"):
        Semantics(program=alibi_in_documents())


def test_a_mask_does_not_read_the_score() -> None:
    with pytest.raises(ArgumentError, match="reads the score"):
        program_of(None, SCORE < 0.0)


@pytest.mark.parametrize("text", ["", "score = %0", "nonsense", "call:int32('x')\nmask = %0"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="program"):
        parse_program(text)


def test_too_many_tensors_are_refused() -> None:
    total = SCORE
    for i in range(9):
        total = total + read(f"table{i}", "float32", H)
    with pytest.raises(ArgumentError, match="they read 9 tensors; allowed are at most 8: stack"):
        program_of(total, None)


def test_values() -> None:
    program = alibi_in_documents()
    heads, queries = np.arange(3), np.int64(4)
    assert program.score is not None
    found = program.score.evaluate(
        {"score": 1.0, "h": heads, "q": queries, "k": 7, "number0": 2.0},
        {"read0": np.array([0.5, 0.25, 0.0])},
    )
    np.testing.assert_allclose(found, 2 * np.tanh((1 + np.array([1.5, 0.75, 0])) / 2))


def test_int32_wraps_around() -> None:
    product = Q * 65536 + K
    found = product.evaluate({"q": np.array([32767, 32768]), "k": 5})
    assert found.tolist() == [32767 * 65536 + 5, 32768 * 65536 + 5 - 2**32]
    assert product.dtype == INT
