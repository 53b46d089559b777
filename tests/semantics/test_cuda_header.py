"""semantics.cuh, compiled for the host: kernels call for masks and scores what their values say."""

from __future__ import annotations

import ctypes
import math
import subprocess
from itertools import product
from pathlib import Path

import pytest

from flashsmith.builder.sources import package_sources
from flashsmith.errors import ArgumentError
from flashsmith.semantics import MASKS, PLAIN, SOFTCAP, UNLIMITED, Mask, Score, Semantics
from flashsmith.semantics import mask as masks
from flashsmith.semantics.cuda import semantics_header, semantics_numbers
from flashsmith.semantics.mask import KEY, POSITION, RIGHT
from flashsmith.semantics.score import ARGUMENT
from flashsmith.semantics.typed import FLOAT, apply, typed_symbol, where

PREFIX = Mask(
    "prefix", last=apply("maximum", POSITION, RIGHT), first_row=where(KEY <= RIGHT, -UNLIMITED, KEY)
)
ENDS = ("first_key", "last_key", "first_row", "last_row")
ON_THE_HOST = """\
#include <algorithm>
#include <cmath>
using std::max, std::min;
#define __device__
#define __forceinline__ inline
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
"""


@pytest.fixture(autouse=True)
def _known_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that a test uses is registered for that test alone."""
    monkeypatch.setattr(masks, "_KNOWN", dict(masks._KNOWN))


@pytest.mark.parametrize("mask", [*MASKS, PREFIX])
def test_the_ends_of_a_mask(mask: Mask, tmp_path: Path) -> None:
    header = semantics_header(Semantics(mask))
    assert "#include" not in header  # a family may lack the package's own headers
    functions = "".join(
        f'extern "C" int {end}(int at, int left, int right) '
        f"{{ return flashsmith::Mask::{end}(at, left, right); }}\n"
        for end in ENDS
    )
    constant = 'extern "C" bool one_further() { return flashsmith::Mask::kLastIsOneFurther; }\n'
    source, library = tmp_path / "mask.cc", tmp_path / "mask.so"
    source.write_text(ON_THE_HOST + header.removeprefix("#pragma once\n") + functions + constant)
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", source, "-o", library], check=True)
    compiled = ctypes.CDLL(str(library))
    values = dict(zip(ENDS, (mask.first, mask.last, mask.first_row, mask.last_row), strict=True))
    beyond = dict(zip(ENDS, (-UNLIMITED, UNLIMITED) * 2, strict=True))
    for end, (at, left, right) in product(ENDS, product((-3, 0, 5), (0, 2, UNLIMITED), (0, 7))):
        value = values[end]
        given = {"position": at, "key": at, "left": left, "right": right}
        expected = beyond[end] if value is None else value.evaluate(given)
        assert getattr(compiled, end)(at, left, right) == expected, (end, at, left, right)
    assert bool(compiled.one_further()) == (mask.last is not None and mask is not PREFIX)


def test_a_softcap_and_its_derivative(tmp_path: Path) -> None:
    """The body of the function by its one argument, and the slope by what has become of a score."""
    header = semantics_header(Semantics(softcap=True))
    assert '#include "common/score.cuh"' in header
    assert (package_sources() / "common" / "score.cuh").is_file()
    body = header.partition('#include "common/score.cuh"\n')[2]
    source, library = tmp_path / "score.cc", tmp_path / "score.so"
    source.write_text(
        f"{ON_THE_HOST}namespace flashsmith {{\n"
        "inline float tanh_of_2log2e(float y) { return std::tanh(y / (2 * 1.44269504f)); }\n}\n"
        f"{body}"
        'extern "C" float change(float s, float a) { return flashsmith::Score::change(s, a); }\n'
        'extern "C" float slope(float changed) { return flashsmith::Score::slope(changed); }\n'
    )
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", source, "-o", library], check=True)
    compiled = ctypes.CDLL(str(library))
    for function, arguments in ((compiled.change, 2), (compiled.slope, 1)):
        function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float] * arguments
    scale, cap = 0.125, 30.0
    argument = 2 * math.log2(math.e) * scale / cap
    for raw in (-4000.0, -100.0, 0.0, 3.0, 800.0):
        numbers = {"score": raw * scale, "softcap": cap}
        changed = compiled.change(raw, argument)
        assert changed == pytest.approx(SOFTCAP.body.evaluate(numbers), abs=1e-6)
        slope = SOFTCAP.slope.evaluate(numbers)
        assert compiled.slope(changed) == pytest.approx(slope, abs=1e-6)


def test_what_kernels_cannot_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (apply("exp", ARGUMENT), apply("tanh", 2 * ARGUMENT), ARGUMENT * ARGUMENT):
        other = Score("other", function, typed_symbol("a", FLOAT))
        monkeypatch.setattr(Semantics, "score", property(lambda self, other=other: other))
        with pytest.raises(ArgumentError, match=r"score='other': kernels compute a \* tanh"):
            semantics_header(Semantics())


def test_a_library_says_what_it_computes() -> None:
    every = [
        Semantics(mask, softcap, uneven=uneven)
        for mask, softcap, uneven in product([*MASKS, PREFIX], (False, True), (False, True))
    ]
    assert len({semantics_numbers(one) for one in every}) == len(every)
    # Equal flags, another mask: the checksum differs.
    causal, prefix = (semantics_numbers(Semantics(mask)) for mask in (MASKS[1], PREFIX))
    assert causal[0] != prefix[0]
    assert PLAIN.name in semantics_header(Semantics())
