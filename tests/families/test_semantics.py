"""Semantics: what may be said, and its forms as text and as C++."""

from __future__ import annotations

import re
import subprocess
from itertools import product
from pathlib import Path

import pytest
from config_samples import any_semantics
from hypothesis import given

from flashsmith.errors import ArgumentError
from flashsmith.families import Semantics
from flashsmith.semantics import MASKS

CSRC = Path(__file__).parents[2] / "src" / "flashsmith" / "csrc"
ALL = [
    Semantics(mask, softcap, packed, uneven, partial)
    for mask, softcap, packed, uneven, partial in product(MASKS, *[(False, True)] * 4)
    if uneven or not (packed or partial)
]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mask": "bottom"}, "mask='bottom': allowed are none, causal, window"),
        ({"mask": None}, "mask=None: allowed are"),
        ({"softcap": 30.0}, "softcap=30.0: allowed are True and False"),
        ({"packed": 1, "uneven": True}, "packed=1: allowed are"),
        ({"uneven": "yes"}, "uneven='yes': allowed are"),
        ({"packed": True}, "packed=True: needs uneven=True"),
        ({"partial": True}, "partial=True: needs uneven=True"),
    ],
)
def test_what_cannot_be_compiled_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}"):
        Semantics(**values)  # type: ignore[arg-type]


def test_the_text_lists_what_differs_from_plain() -> None:
    assert str(Semantics()) == "plain"
    assert str(Semantics("causal", packed=True, uneven=True)) == "causal+packed+uneven"
    assert str(Semantics(softcap=True)) == "softcap"
    assert len({str(semantics) for semantics in ALL}) == len(ALL) == 30


@given(any_semantics)
def test_text_and_parse_are_inverses(semantics: Semantics) -> None:
    assert Semantics.parse(str(semantics)) == semantics


def test_words_stand_in_any_order() -> None:
    assert Semantics.parse("uneven + window") == Semantics("window", uneven=True)


def test_packed_implies_uneven() -> None:
    packed = Semantics("causal", packed=True, uneven=True)
    assert Semantics.parse("packed+causal") == Semantics.parse("causal+uneven+packed") == packed
    assert Semantics.parse("partial") == Semantics(uneven=True, partial=True)


@pytest.mark.parametrize("text", ["", "caused", "causal+window", "plain+causal", "uneven+uneven"])
def test_an_unknown_or_doubled_word_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match=f"semantics={re.escape(repr(text))}: allowed are"):
        Semantics.parse(text)


def test_a_mistyped_word_is_answered_with_the_likely_one() -> None:
    with pytest.raises(ArgumentError, match=r"joined by '\+'; did you mean 'causal'\?"):
        Semantics.parse("casual+uneven")


def test_cpp_has_the_same_fields_values_and_default(tmp_path: Path) -> None:
    """Compiled and printed by C++: mask kind, softcap, packed, uneven."""
    prints = "".join(
        f"    {{ constexpr Semantics s = {semantics.to_cpp_struct()};\n"
        '      std::printf("%d %d %d %d\\n", s.masked(), s.is_triangular(), s.packed,\n'
        "                  s == Semantics{}); }\n"
        for semantics in ALL
    )
    source = tmp_path / "semantics.cc"
    source.write_text(
        '#include <cstdio>\n#include "common/types.cuh"\nusing namespace flashsmith;\n'
        f"int main() {{\n{prints}}}\n"
    )
    program = tmp_path / "semantics"
    subprocess.run(["g++", "-std=c++20", f"-I{CSRC}", source, "-o", program], check=True)
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split("\n")
    for semantics, line in zip(ALL, lines, strict=False):
        mask = semantics.key_mask
        facts = (mask.hides or semantics.uneven, mask.is_triangular, semantics.packed)
        assert line == " ".join(str(int(i)) for i in (*facts, semantics == Semantics()))
