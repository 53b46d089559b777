"""The problems that a sweep tunes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import product

from flashsmith.benchmark.problems import PROBLEM_SETS, SEQ_LENS, default_problem
from flashsmith.errors import ArgumentError
from flashsmith.families import DeviceSpec, DType, Problem
from flashsmith.printable import quoted
from flashsmith.safe_json import UnusableTextError, read_text

# The lengths that are tuned, for each head dimension. A problem of any other length uses the winner
# for the nearest length.
_LENGTHS = {128: SEQ_LENS, **dict.fromkeys((64, 96, 256), (512, 1024, 4096, 16384))}
# A reference problem has at least this length, and at least 8 tiles of 128 rows for each SM.
_REFERENCE_LENGTH = 2048
_REFERENCE_ROWS_PER_SM = 8 * 128


def default_problems() -> list[Problem]:
    """The problems of the benchmarks, in both dtypes, full and causal.

    Problems that use the same compiled kernels are adjacent.
    """
    return [
        default_problem(d, seq, dtype, causal=causal)
        for d, lengths in _LENGTHS.items()
        for dtype, causal, seq in product(DType, (False, True), lengths)
    ]


def read_problems(text: str) -> list[Problem]:
    """Reads problems from a file, one per line, or from a string in which ';' separates them.

    Blank lines and everything after '#' are ignored. In place of a problem, the name of a problem
    set of `flashsmith bench` stands for all problems of the set. Duplicates are removed.

    Raises:
        ArgumentError: the file cannot be read, a problem cannot be parsed (the message names the
            line), or there is no problem.
    """
    if os.path.isfile(text):
        try:
            lines = read_text(text).splitlines()
        except UnusableTextError as error:
            raise ArgumentError(
                f"problems={quoted(text)}{error.place}: cannot be read: {error}"
            ) from error
        parts = [(f"{text}, line {number}: ", line) for number, line in enumerate(lines, start=1)]
    else:
        parts = [("", part) for part in text.split(";")]
    problems: list[Problem] = []
    for where, part in parts:
        words = part.partition("#")[0].strip()
        if words in PROBLEM_SETS:
            problems += PROBLEM_SETS[words]()
        elif words:
            try:
                problems.append(Problem.parse(words))
            except ArgumentError as error:
                if not where and ("/" in words or os.path.splitext(words)[1]):
                    raise ArgumentError(f"problems={quoted(text)}: there is no such file") from None
                raise ArgumentError(f"{where}{error}") from None
    if not problems:
        raise ArgumentError(
            f"problems={quoted(text)}: no problem in it; write them like 'b16 s4096 h16 d128 fp16; "
            "...'"
        )
    return list(dict.fromkeys(problems))


def reference_problem(
    problem: Problem, device: DeviceSpec, others: Iterable[Problem]
) -> Problem | None:
    """The shortest problem in ``others`` whose race can serve as the reference for `problem`. The
    times in that race's first rung decide which kernels are tried on `problem`.

    It has the same heads, dtype and semantics, and the same ratio of its two lengths. It is so long
    that the prologue and epilogue of a kernel's loop hardly affect the time, and it has enough
    tiles to fill the GPU several times. Returns None if there is no such problem.
    """
    alike = [
        other
        for other in others
        if _kind(other) == _kind(problem)
        and other.seq_q * problem.seq_k == problem.seq_q * other.seq_k
        and min(other.seq_q, other.seq_k) >= _REFERENCE_LENGTH
        and other.seq_q < problem.seq_q
        and other.batch * other.heads_q * other.seq_q >= _REFERENCE_ROWS_PER_SM * device.sm_count
    ]
    return min(alike, key=lambda other: (other.seq_q, other), default=None)


def _kind(problem: Problem) -> tuple[object, ...]:
    return (
        problem.operation,
        problem.gradients,
        (problem.d, problem.d_v),
        problem.dtype,
        problem.semantics,
        problem.cache,
        problem.heads_q // problem.heads_k,
    )
