"""Programs, as values. A program has a score function and a mask function, which kernels compute
for each element."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted
from flashsmith.semantics.derivatives import derivative
from flashsmith.semantics.typed import BOOL, FLOAT, INT, Typed, all_parts, cast, read, typed_symbol
from flashsmith.semantics.typed_text import canonical, parse_canonical

# The scaled score; the indices of sequence, query head, query and key; and the lengths of the
# sequence. q counts from the sequence's first query, k from its first key.
SCORE = typed_symbol("score", FLOAT)
B, H, Q, K, SEQ_Q, SEQ_K = INDICES = tuple(
    typed_symbol(name, INT) for name in ("b", "h", "q", "k", "seq_q", "seq_k")
)
_SYMBOLS = tuple(it.operands[0] for it in (SCORE, *INDICES))
MOST_READS, MOST_NUMBERS, MOST_RANK = 8, 16, 4
# A function with more parts would take minutes to compile, and its kernels would spill registers.
MOST_PARTS = 2000
PREFIX = "program_"
# The first line of a program's text if the program is exact (Program.is_exact).
_EXACT = "exact\n"


def is_uniform(it: Typed) -> bool:
    """Whether the value is the same in the whole call, because the expression has only numbers and
    constants."""
    varying = (SCORE, *INDICES)
    return all(part not in varying and part.function != "read" for part in it.parts())


class Read(NamedTuple):
    """A tensor that a program reads: its name, element type and number of dimensions."""

    name: str
    dtype: str
    rank: int


class Number(NamedTuple):
    """A number that a call passes: 'int' (an int32) or 'float' (an fp32)."""

    name: str
    kind: str


class Program(str):
    """A score function and a mask function, as expressions.

    A Program is a str: its name, which is 'program_' and 12 hexadecimal digits of the hash of its
    text. Equal functions have equal names, even if their captured variables are named differently.
    Use program_of() to make one.

    score: the score that enters the softmax, an expression of SCORE (scaled, in natural units), the
        INDICES, numbers and reads; None leaves scores as they are.
    mask: whether the row q sees the key k; None hides none.
    own_slope: a derivative of the score function with respect to something other than SCORE, for
        programs whose kernels sum that gradient; None in programs of attention.
    is_exact: whether kernels round each operation separately, wherever the score is in a tile, so
        that scores have the same bits in all kernels.
    reads: the tensors, named 'read0', 'read1', ... in the order in which they occur in the text.
    numbers: the numbers of a call, named 'number0', ... in the order in which they occur in the
        text.
    """

    __slots__ = ("is_exact", "mask", "numbers", "own_slope", "reads", "score", "text")

    is_exact: bool

    score: Typed | None
    mask: Typed | None
    own_slope: Typed | None
    reads: tuple[Read, ...]
    numbers: tuple[Number, ...]
    text: str

    def __reduce__(self) -> tuple[Any, ...]:
        return parse_program, (self.text,)

    @property
    def exact(self) -> Program:
        """The exact program with the same functions."""
        return self if self.is_exact else parse_program(_EXACT + self.text)

    @property
    def slope(self) -> Typed | None:
        """The program's ``own_slope`` if it has one; otherwise the derivative of the score function
        with respect to the score."""
        if self.own_slope is not None:
            return self.own_slope
        return None if self.score is None else derivative(self.score, SCORE, is_uniform)

    @property
    def dims_by_key(self) -> frozenset[tuple[str, int]]:
        """The dimensions, of the tensors that are read, whose index depends on the key; kernels
        read the strides of these dimensions as int32."""
        return frozenset(
            (it.operands[0], dim)
            for it in all_parts([self.score, self.mask, self.own_slope])
            if it.function == "read"
            for dim, index in enumerate(it.arguments)
            if K in index.parts()
        )

    @property
    def mask_reads_batch(self) -> bool:
        """Whether the mask depends on the sequence."""
        return not self._mask_symbols.isdisjoint(("b", "seq_q", "seq_k"))

    @property
    def mask_reads_head(self) -> bool:
        """Whether the mask depends on the query head."""
        return "h" in self._mask_symbols

    @property
    def _mask_symbols(self) -> frozenset[str]:
        return frozenset(() if self.mask is None else self.mask.symbols())


class BoundProgram(NamedTuple):
    """A program with the tensors and numbers of one call, in the order of the program's ``reads``
    and ``numbers``.

    names: the tensors' names for messages.
    """

    program: Program
    tensors: tuple[Any, ...] = ()
    numbers: tuple[int | float, ...] = ()
    names: tuple[str, ...] = ()


class Renamed(NamedTuple):
    """A program, and the original names of its reads and numbers, in the program's order."""

    program: Program
    reads: tuple[str, ...]
    numbers: tuple[str, ...]


def program_of(score: Typed | None, mask: Typed | None, own_slope: Typed | None = None) -> Renamed:
    """Returns the program of a score and a mask expression, whose reads and numbers may have any
    names.

    Raises:
        ArgumentError: there is neither a score nor a mask, or the program has too many tensors,
        numbers, dimensions or parts.
    """
    roots = _roots(score, mask)
    if own_slope is not None:
        roots["slope"] = cast(own_slope, FLOAT)
    reads: dict[str, Read] = {}
    numbers: dict[str, str] = {}
    for it in all_parts(roots.values()):
        if it.function == "read":
            old, dtype, *indices = it.operands
            new = Read(f"read{len(reads)}", dtype, len(indices))
            if reads.setdefault(old, new)[1:] != new[1:]:
                raise ArgumentError(
                    f"tensor {quoted(old)}: read as {reads[old].dtype} with {reads[old].rank} "
                    f"indices and as {dtype} with {len(indices)}; read it in one way"
                )
        elif it.function == "symbol" and it.operands[0] not in _SYMBOLS:
            numbers.setdefault(it.operands[0], it.dtype)
    _check_size(roots, reads, numbers)
    others = {
        typed_symbol(old, dtype): typed_symbol(f"number{i}", dtype)
        for i, (old, dtype) in enumerate(numbers.items())
    }
    names = {old: it.name for old, it in reads.items()}
    roots = {name: _renamed(root, names, others) for name, root in roots.items()}
    return Renamed(_made(roots), tuple(reads), tuple(numbers))


def _roots(score: Typed | None, mask: Typed | None) -> dict[str, Typed]:
    if score is None and mask is None:
        raise ArgumentError("score=None, mask=None: give a score, a mask, or both")
    if mask is not None and SCORE in mask.parts():
        raise ArgumentError("mask: it reads the score; a mask is a function of indices and tensors")
    roots = {} if score is None else {"score": cast(score, FLOAT)}
    return roots if mask is None else {**roots, "mask": cast(mask, BOOL)}


def _check_size(
    roots: Mapping[str, Typed], reads: Mapping[str, Read], numbers: Mapping[str, str]
) -> None:
    ranks = [it.rank for it in reads.values()]
    n_parts = sum(1 for _ in all_parts(roots.values()))
    for what, found, most, instead in (
        (
            "read {} tensors",
            len(reads),
            MOST_READS,
            "stack tensors of one shape",
        ),
        ("capture {} numbers", len(numbers), MOST_NUMBERS, "put numbers in a tensor and read it"),
        ("read a tensor of {} dimensions", max(ranks, default=0), MOST_RANK, "reshape it"),
        ("have {} operations", n_parts, MOST_PARTS, "precompute a part as a tensor and read it"),
    ):
        if found > most:
            raise ArgumentError(
                f"score and mask functions: they {what.format(found)}; allowed are at most {most}: "
                f"{instead}"
            )


def _renamed(root: Typed, names: Mapping[str, str], others: dict[Typed, Typed]) -> Typed:
    for it in root.parts():
        if it.function == "read":
            old, dtype, *indices = it.operands
            others[it] = read(names[old], dtype, *(index.replace(others) for index in indices))
    return root.replace(others)


def parse_program(text: str) -> Program:
    """Returns the program with this ``text``. Raises ArgumentError for any other text."""
    is_exact = text.startswith(_EXACT)
    roots = parse_canonical(text.removeprefix(_EXACT))
    if not roots.keys() & {"score", "mask"} or not roots.keys() <= {"score", "mask", "slope"}:
        raise ArgumentError(f"program={quoted(text)}: it has neither a score nor a mask")
    found = program_of(*map(roots.get, ("score", "mask", "slope"))).program
    if is_exact:
        found = _made(_roots_of(found), is_exact=True)
    if found.text != text:
        raise ArgumentError(f"program={quoted(text)}: not the text of a program; trace it again")
    return found


_KNOWN: dict[str, Program] = {}


def _roots_of(program: Program) -> dict[str, Typed]:
    roots = {"score": program.score, "mask": program.mask, "slope": program.own_slope}
    return {name: it for name, it in roots.items() if it is not None}


def _made(roots: Mapping[str, Typed], *, is_exact: bool = False) -> Program:
    text = _EXACT * is_exact + canonical(roots)
    name = PREFIX + hashlib.sha256(text.encode()).hexdigest()[:12]
    known = _KNOWN.get(name)
    if known is not None and known.text == text:
        return known
    made = Program(name)
    made.text, made.is_exact = text, is_exact
    made.score, made.mask, made.own_slope = map(roots.get, ("score", "mask", "slope"))
    reads, numbers = {}, {}
    for it in all_parts(roots.values()):
        if it.function == "read":
            reads[it.operands[0]] = Read(it.operands[0], it.operands[1], len(it.operands) - 2)
        elif it.function == "symbol" and it.operands[0] not in _SYMBOLS:
            kind = "float" if it.dtype == FLOAT else "int"
            numbers[it.operands[0]] = Number(it.operands[0], kind)
    made.reads, made.numbers = tuple(reads.values()), tuple(numbers.values())
    return _KNOWN.setdefault(name, made)


def known_programs() -> tuple[Program, ...]:
    """Returns the programs that this process has made."""
    return tuple(_KNOWN.values())


def program_named(program: str) -> Program | str:
    """Returns a Program unchanged, or the program that has the given name or text; '' for ''.

    Raises ArgumentError for any other text.
    """
    if isinstance(program, Program) or program == "":
        return program
    if isinstance(program, str):
        if program in _KNOWN:
            return _KNOWN[program]
        if "\n" in program:
            return parse_program(program)
    raise ArgumentError(
        f"program={quoted(program)}: no program of this process has that name; trace the function "
        "first"
    )
