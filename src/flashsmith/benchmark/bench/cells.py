"""The named sets of problems that kernels are judged on, so that figures of different days and
machines are of the same cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, product

from flashsmith.benchmark.bench.problems import SEQ_LENS, default_problem
from flashsmith.errors import ArgumentError
from flashsmith.families import DType, Problem

_MASKS = (False, True)
_FROM_1024 = SEQ_LENS[1:]
_UNSEEN = (
    "b1 s4096 h32:8 d128 bf16 causal",
    "b1 s4096 h32:8 d128 fp16",
    "b2 s4096 h32:8 d128 bf16",
    "b2 s2048 h32:8 d128 fp16 causal",
    "b1 s1024 h32:8 d128 fp16",
    "b1 s16384 h32:8 d128 bf16 causal",
    "b16 s1536 h16 d128 fp16",
    "b16 s1536 h16 d128 bf16 causal",
    "b16 s3000 h16 d128 fp16",
    "b16 s3000 h16 d128 bf16 causal",
    "b4 s10000 h16 d128 fp16",
    "b4 s10000 h16 d128 bf16 causal",
)


def _main() -> Iterator[Problem]:
    for dtype, causal, seq in product(DType, _MASKS, SEQ_LENS):
        yield default_problem(128, seq, dtype, causal=causal)


def _heads() -> Iterator[Problem]:
    for d, dtype, causal, seq in product((64, 96, 256), DType, _MASKS, _FROM_1024):
        yield default_problem(d, seq, dtype, causal=causal)


def _grouped() -> Iterator[Problem]:
    for (d, heads), dtype, seq in product(((128, (16, 4)), (64, (32, 8))), DType, _FROM_1024):
        yield default_problem(d, seq, dtype, causal=True, heads=heads)


def _packed() -> Iterator[Problem]:
    for d, dtype, seq in product((128, 64), DType, _FROM_1024):
        yield default_problem(d, seq, dtype, causal=True, packed=True)


def _unseen() -> Iterator[Problem]:
    return map(Problem.parse, _UNSEEN)


def _public() -> Iterator[Problem]:
    for dtype, causal, seq in product(DType, _MASKS, (512, 1024, 4096, 16384)):
        yield default_problem(128, seq, dtype, causal=causal)
    for d, causal, seq in product((64, 256), _MASKS, (1024, 4096, 16384)):
        yield default_problem(d, seq, DType.FP16, causal=causal)


def _verdict() -> Iterator[Problem]:
    return chain(_main(), _heads(), _grouped(), _packed(), _unseen())


# main: d 128; heads: d 64, 96 and 256; grouped: four heads of q to one of k; packed; unseen:
# batches and lengths that no default sweep tunes on; verdict: all of these; public: the cells for
# which the best public kernel's figures are known (benchmarks/h200/best-public.csv).
CELL_SETS: dict[str, Callable[[], Iterator[Problem]]] = {
    "main": _main,
    "heads": _heads,
    "grouped": _grouped,
    "packed": _packed,
    "unseen": _unseen,
    "verdict": _verdict,
    "public": _public,
}


def cell_problems(names: str) -> tuple[Problem, ...]:
    """The problems of a comma-separated list of sets, each once.

    Raises ArgumentError for a name that is none; the message lists what is known.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in CELL_SETS]
    if unknown or not wanted:
        raise ArgumentError(
            f"cells={names!r}: {', '.join(unknown) or 'no name'}: allowed are "
            f"{', '.join(CELL_SETS)}, separated by commas"
        )
    return tuple(dict.fromkeys(chain.from_iterable(CELL_SETS[name]() for name in wanted)))
