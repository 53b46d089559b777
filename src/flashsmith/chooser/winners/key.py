"""WinnerKey: the GPU, kind of kernel and bucket of sizes of an entry in the table."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, TypeGuard

from flashsmith.errors import ArgumentError
from flashsmith.families import DeviceSpec, DType, Problem, d_head_for
from flashsmith.families.gpu_names import gpu_name
from flashsmith.operations import ProblemKind, parse_kind
from flashsmith.operations.decode import DECODE
from flashsmith.printable import quoted

# Limit of characters of the name of a GPU, dtype or class; real names are far shorter.
MOST_CHARACTERS_OF_A_NAME = 200
# The largest size allowed; a product of two numbers in a problem's text is smaller.
LARGEST_NUMBER = 1 << 128


@dataclass(frozen=True, order=True)
class WinnerKey:
    """One cell of the table; sizes are bucketed.

    gpu: the name that gpu_name() returns. arch: 90 is sm_90. dtype: 'fp16' or 'bf16'. d_head: the
    head dimension for which the kernels are compiled. semantics: see kind_class(). seq_q, seq_k,
    batch_heads: buckets of sizes_of().

    Raises:
        ValueError: a field has another type, a name is not printable or too long, a number is out
            of range, or a size is not a bucket.
    """

    gpu: str
    arch: int
    dtype: str
    d_head: int
    semantics: str
    seq_q: int
    seq_k: int
    batch_heads: int

    def __post_init__(self) -> None:
        for knob in fields(self):
            value, wanted = getattr(self, knob.name), str if knob.type == "str" else int
            if type(value) is not wanted:
                raise ValueError(
                    f"{knob.name} is {quoted(value, 80)}, not of type {wanted.__name__}"
                )
            if isinstance(value, str) and not is_name(value, MOST_CHARACTERS_OF_A_NAME):
                raise ValueError(f"{knob.name} is {quoted(value, 80)}, not a name")
            if isinstance(value, int) and not 1 <= value <= LARGEST_NUMBER:
                raise ValueError(
                    f"{knob.name} is {quoted(value, 80)}; it must be 1 to {LARGEST_NUMBER:.0e}"
                )
        for name in ("seq_q", "seq_k", "batch_heads"):
            if bucket(getattr(self, name)) != getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)}, which is not a power of two")

    @classmethod
    def of(cls, problem: Problem, device: DeviceSpec) -> WinnerKey:
        """The key of a problem on a device.

        Raises ArgumentError if there is no kernel for the problem's d.
        """
        rows, keys, batch_heads = sizes_of(problem)
        return cls(
            gpu=gpu_name(device.name),
            arch=device.arch,
            dtype=problem.dtype.name.lower(),
            d_head=d_head_for(problem),
            semantics=kind_class(problem),
            seq_q=bucket(rows),
            seq_k=bucket(keys),
            batch_heads=bucket(batch_heads),
        )

    @property
    def element(self) -> DType:
        """The dtype as used by configs."""
        return DType.parse(self.dtype)

    def to_json(self) -> dict[str, Any]:
        return {knob.name: getattr(self, knob.name) for knob in fields(self)}

    def __str__(self) -> str:
        sizes = f"s{self.seq_q}" + (f":{self.seq_k}" if self.seq_k != self.seq_q else "")
        return (
            f"{self.gpu} sm_{self.arch} {self.dtype} d{self.d_head} {self.semantics} "
            f"{sizes} bh{self.batch_heads}"
        )


def is_name(value: object, most: int) -> TypeGuard[str]:
    """Whether a value is a non-empty printable text of at most ``most`` characters."""
    return isinstance(value, str) and 0 < len(value) <= most and value.isprintable()


def bucket(size: int) -> int:
    """The power of two nearest to ``size`` on a log scale: 2048 for 1536, 8192 for 10000."""
    return int(2 ** round(math.log2(max(1, size))))


def sizes_of(problem: Problem) -> tuple[int, int, int]:
    """The sizes by which a problem's entry is found: rows of queries, keys, and batch x heads.

    Over a cache the query heads of a group are rows of one tile, so heads and rows are counted per
    K/V head. With 32 query heads, the best tile height for 8 K/V heads differs from that for 1 K/V
    head.
    """
    p = problem
    if p.operation == DECODE.name and p.heads_k:
        return p.seq_q * (p.heads_q // p.heads_k), p.seq_k, p.batch * p.heads_k
    return p.seq_q, p.seq_k, p.batch * p.heads_q


def kind_class(problem: Problem) -> str:
    """The class of what a problem computes, such as 'causal+packed', 'plain' or 'first_row'. It
    omits `uneven`, which follows from lengths, and the page size, which does not affect kernels."""
    kind = replace(problem, page=0).kind
    words = [word for word in kind.split("+") if word != "uneven"]
    return "+".join(words) or "plain"


@lru_cache(maxsize=64)
def parse_class(text: str) -> ProblemKind:
    """The kind, without a page size, of a text written by kind_class().

    Raises ArgumentError if a word is unknown or gives a page size.
    """
    kind = parse_kind(text + "+uneven" if "packed" in text.split("+") else text)
    if kind.page:
        raise ArgumentError(f"semantics={quoted(text)}: kernels are not for one page size")
    return kind
