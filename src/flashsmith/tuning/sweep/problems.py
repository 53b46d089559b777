"""Which problems a sweep is about."""

from __future__ import annotations

import os
from itertools import product

from flashsmith.configs import DType, Problem, Semantics
from flashsmith.errors import ArgumentError

_MASKS = (Semantics(), Semantics("causal"))
_TOKENS = 65536  # of a batch, where it is not cut to 16
_MAX_BATCH = 16
# Per head dimension: heads, so that every model is about as wide, and lengths. What lies between
# two lengths is served by the nearer one's winner.
_CELLS = {
    128: (16, (512, 1024, 2048, 4096, 8192, 16384)),
    64: (32, (512, 1024, 4096, 16384)),
    96: (16, (512, 1024, 4096, 16384)),
    256: (8, (512, 1024, 4096, 16384)),
}


def default_problems() -> list[Problem]:
    """The cells that the benchmarks report: both dtypes, full and causal, batch 16 up to 4096 keys,
    then as many as make 65,536 tokens; those that share kernels stand together."""
    return [
        Problem(min(_MAX_BATCH, _TOKENS // seq), seq, seq, heads, heads, d, dtype, semantics)
        for d, (heads, lengths) in _CELLS.items()
        for dtype, semantics, seq in product(DType, _MASKS, lengths)
    ]


def read_problems(text: str) -> list[Problem]:
    """The problems of a file (one a line; blank lines and '# ...' do not count), or of a text that
    separates them by ';'. Doubles count once.

    Raises:
        ArgumentError: the file cannot be read, a problem cannot be parsed (a file's line is named),
            or there is none.
    """
    if os.path.isfile(text):
        try:
            with open(text, encoding="utf-8") as file:
                lines = file.read().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"problems={text!r}: cannot be read: {error}") from error
        parts = [(f"{text}, line {number}: ", line) for number, line in enumerate(lines, start=1)]
    else:
        parts = [("", part) for part in text.split(";")]
    problems = []
    for where, part in parts:
        words = part.partition("#")[0].strip()
        if words:
            try:
                problems.append(Problem.parse(words))
            except ArgumentError as error:
                raise ArgumentError(f"{where}{error}") from None
    if not problems:
        raise ArgumentError(
            f"problems={text!r}: no problem in it; write them like 'b16 s4096 h16 d128 fp16; ...'"
        )
    return list(dict.fromkeys(problems))
