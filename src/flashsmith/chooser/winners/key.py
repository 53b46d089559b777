"""WinnerKey: the key of an entry in the table: GPU, kind of kernel, and bucket of sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, TypeGuard

from flashsmith.errors import ArgumentError
from flashsmith.families import DeviceSpec, DType, Problem, d_head_for
from flashsmith.families.gpu_names import gpu_name
from flashsmith.families.head_dims import HeadDims, HeadPair
from flashsmith.operations import ProblemKind, parse_kind
from flashsmith.operations.registry import known_operation
from flashsmith.printable import quoted

# The name of a GPU, dtype or class may have at most this many characters; real names are far
# shorter.
MOST_CHARACTERS_OF_A_NAME = 200
# The largest size in a key; the product of any two numbers in a problem string is smaller.
LARGEST_NUMBER = 1 << 128


@dataclass(frozen=True, order=True)
class WinnerKey:
    """The key of an entry. Its sizes are buckets, not exact sizes.

    gpu: the name that gpu_name() returns.
    arch: the architecture; 90 is sm_90.
    dtype: 'fp16' or 'bf16'.
    d_head: the head dimension for which the kernels are compiled.
    semantics: the class of the problem, as kind_class() writes it.
    seq_q, seq_k, batch_heads: the buckets of sizes_of().
    d_v: the head dimension of v for kernels that are compiled for two widths; otherwise 0.

    Raises:
        ValueError: a field has the wrong type, a name is not printable or too long, a number is out
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
    d_v: int = 0

    def __post_init__(self) -> None:
        for knob in fields(self):
            value, wanted = getattr(self, knob.name), str if knob.type == "str" else int
            if type(value) is not wanted:
                raise ValueError(
                    f"{knob.name} is {quoted(value, 80)}, not of type {wanted.__name__}"
                )
            if isinstance(value, str) and not is_name(value, MOST_CHARACTERS_OF_A_NAME):
                raise ValueError(f"{knob.name} is {quoted(value, 80)}, not a name")
            lowest = 0 if knob.name == "d_v" else 1
            if isinstance(value, int) and not lowest <= value <= LARGEST_NUMBER:
                raise ValueError(
                    f"{knob.name} is {quoted(value, 80)}; it must be {lowest} to "
                    f"{LARGEST_NUMBER:.0e}"
                )
        for name in ("seq_q", "seq_k", "batch_heads"):
            if bucket(getattr(self, name)) != getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)}, which is not a power of two")

    @classmethod
    def of(cls, problem: Problem, device: DeviceSpec) -> WinnerKey:
        """The key of a problem on a device.

        Raises ArgumentError if no kernel has the problem's d.
        """
        rows, keys, batch_heads = sizes_of(problem)
        dims = d_head_for(problem)
        d_head, d_v = dims if isinstance(dims, HeadPair) else (dims, 0)
        return cls(
            gpu=gpu_name(device.name),
            arch=device.arch,
            dtype=problem.dtype.name.lower(),
            d_head=d_head,
            semantics=kind_class(problem),
            seq_q=bucket(rows),
            seq_k=bucket(keys),
            batch_heads=bucket(batch_heads),
            d_v=d_v,
        )

    @property
    def element(self) -> DType:
        """The dtype as configs store it."""
        return DType.parse(self.dtype)

    @property
    def head_dims(self) -> HeadDims:
        """The widths for which the kernels are compiled."""
        return HeadPair(self.d_head, self.d_v) if self.d_v else self.d_head

    def to_json(self) -> dict[str, Any]:
        """The fields by name, without a d_v of 0."""
        values = {knob.name: getattr(self, knob.name) for knob in fields(self)}
        return values if self.d_v else {k: v for k, v in values.items() if k != "d_v"}

    def __str__(self) -> str:
        sizes = f"s{self.seq_q}" + (f":{self.seq_k}" if self.seq_k != self.seq_q else "")
        return (
            f"{self.gpu} sm_{self.arch} {self.dtype} d{self.head_dims} {self.semantics} "
            f"{sizes} bh{self.batch_heads}"
        )


def is_name(value: object, most: int) -> TypeGuard[str]:
    """Whether a value is a non-empty printable string of at most ``most`` characters."""
    return isinstance(value, str) and 0 < len(value) <= most and value.isprintable()


def bucket(size: int) -> int:
    """The power of two that is nearest to ``size`` on a logarithmic scale: 2048 if ``size`` is
    1536, 8192 if it is 10000."""
    return int(2 ** round(math.log2(max(1, size))))


def sizes_of(problem: Problem) -> tuple[int, int, int]:
    """The sizes by which the entry of a problem is found: rows of queries, keys, and batch x heads.

    Over a cache, the query heads of a group are rows of the same tile, so rows are counted per
    group, and heads are K/V heads. They must be distinguished: for 32 query heads, the best height
    of a tile is different with 8 K/V heads and with 1.
    """
    p = problem
    # A table may contain problems of operations whose packages are not installed.
    operation = known_operation(p.operation)
    if operation is not None and operation.has_pages and p.heads_k:
        return p.seq_q * (p.heads_q // p.heads_k), p.seq_k, p.batch * p.heads_k
    return p.seq_q, p.seq_k, p.batch * p.heads_q


def kind_class(problem: Problem) -> str:
    """The class of a problem, which says what is computed, such as 'causal+packed', 'plain' or
    'first_row'. It leaves out `uneven`, which follows from the lengths, and the page size, which
    does not change the kernel."""
    kind = replace(problem, page=0).kind
    words = [word for word in kind.split("+") if word != "uneven"]
    return "+".join(words) or "plain"


@lru_cache(maxsize=64)
def parse_class(text: str) -> ProblemKind:
    """Parses a string that kind_class() wrote. The result has no page size.

    Raises ArgumentError if a word is unknown or is a page size.
    """
    kind = parse_kind(text + "+uneven" if "packed" in text.split("+") else text)
    if kind.page:
        raise ArgumentError(f"semantics={quoted(text)}: kernels are not for one page size")
    return kind
