"""Operation: what a kernel computes: its tensors, options, FLOP and reference."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted
from flashsmith.semantics.compiled import FLAGS, Semantics
from flashsmith.semantics.dtype import dtype_name
from flashsmith.semantics.mask import MASKS, WINDOW, known_masks
from flashsmith.semantics.sizes import Sizes

SEMANTIC_WORDS = (*MASKS[1:], *FLAGS)
# Bytes of an element, by NumPy's name of the type.
ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "int32": 4}
# Dimensions that problems have sizes of.
_SIZES = ("batch", "seq_q", "seq_k", "heads_q", "heads_k", "d")
_NAME = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")

Role = Literal["in", "out", "inout"]
Presence = Literal["required", "usual", "optional", "packed", "paged"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of an operation's calls.

    Args:
        name: what errors, references and results call it.
        dims: its dimensions: sizes of Problem ('batch', 'heads_q', 'd'), whole numbers, or names of
            its own ('pages'), each of which is one size in all tensors; 'batch+1' is one more.
        dtype: the element type by NumPy's name ('float32', 'int32'); '' is the problem's.
        role: whether a kernel reads it, writes it, or both.
        presence: 'required', 'usual' (an output that a call may say it does not want), 'optional'
            (the caller may leave it out), or 'packed' or 'paged' (required of such problems, which
            no others have).
        packed: the dimensions where sequences are packed; () is the same as dims.
        may_share: names of tensors that may lie where this one is written.
        alignment: its address and every stride but the last must be multiples of so many bytes.
        dtype_option: the name of an option that is its element type where it is not None.
        partial_dtype: its element type in problems of parts of the keys; '' is the same.
        written_with: of an 'inout' one, the name of an optional input without which a call only
            reads it.
        unless: the word of a problem's gradients with which no call has it.

    Raises:
        ArgumentError: the role or the presence is none of these.
    """

    name: str
    dims: tuple[str | int, ...]
    dtype: str = ""
    role: Role = "in"
    presence: Presence = "required"
    packed: tuple[str | int, ...] = ()
    may_share: tuple[str, ...] = ()
    alignment: int = 16
    dtype_option: str = ""
    partial_dtype: str = ""
    written_with: str = ""
    unless: str = ""

    def __post_init__(self) -> None:
        for what, allowed in (("role", get_args(Role)), ("presence", get_args(Presence))):
            if getattr(self, what) not in allowed:
                raise ArgumentError(
                    f"{what}={quoted(getattr(self, what))} of the tensor {self.name}: allowed are "
                    f"{', '.join(allowed)}"
                )

    def dims_of(self, problem: Sizes) -> tuple[str | int, ...]:
        """The dimensions that it has in `problem`."""
        return self.packed if self.packed and problem.semantics.packed else self.dims

    def dtype_of(self, problem: Sizes, options: Mapping[str, Any] = MappingProxyType({})) -> str:
        """NumPy's name of its element type in a call of `problem` with these options."""
        if self.partial_dtype and problem.semantics.partial:
            return self.partial_dtype
        asked = options.get(self.dtype_option)
        return (dtype_name(asked) or asked) if asked else self.dtype or problem.dtype.numpy_name

    def is_required(self, problem: Sizes) -> bool:
        """Whether every call of `problem` has it that does not say otherwise."""
        if not self.is_of_kind(problem):
            return False
        return self.presence != "optional"

    def is_of_kind(self, problem: Sizes) -> bool:
        """Whether calls of `problem` may have it: others than packed or paged ones have no such,
        nor have those that need no such gradient."""
        if self.unless and self.unless == problem.gradients:
            return False
        if self.presence == "paged":
            return problem.page > 0
        return self.presence != "packed" or problem.semantics.packed

    def is_written(self, given: Collection[str]) -> bool:
        """Whether a call with these tensors, by name, writes it."""
        return self.role != "in" and (not self.written_with or self.written_with in given)


class Call(NamedTuple):
    """One call, its tensors checked: what an operation computes its numbers from.

    strides: of every tensor that is given, in elements, by name. sizes: of the dimensions with
    names of their own. options: every option of the operation by name.
    """

    problem: Sizes
    strides: Mapping[str, tuple[int, ...]]
    sizes: Mapping[str, int]
    options: Mapping[str, Any]


Numbers = Callable[[Call], tuple[int | float, ...]]


def packed_rows(problem: Sizes) -> dict[str, int]:
    """Rows of q and of k of packed sequences that are all as long as the longest."""
    if not problem.semantics.packed:
        return {}
    return {
        "total_q": problem.batch * problem.seq_q,
        "total_k": problem.batch * problem.seq_k,
    }


@dataclass(frozen=True)
class Operation:
    """What a kernel of any family computes. Registered once, by its name.

    Args:
        name: its word in a problem's text, in tables and in rows: lower case.
        tensors: those of a call, in the order in which the C++ host path takes addresses; required
            ones come first.
        numbers: the numbers that the C++ host path takes beside tensors and device, in its order.
        reference: 'module:attribute' of the OperationReference, which draws inputs and compares
            outputs; imported by the first proof. '' is the package's own of that name.
        flop: floating-point operations of a problem, above 0 where there is anything to compute.
        semantics: the words of Semantics that may differ from the plain case.
        options: a call's options beside its tensors, by name, with their default values.
        peers: 'module:attribute' of a sequence of the benchmark's peers; '' is the package's own.
        traffic: bytes of a problem that a kernel must read and write; None is those of all tensors
            that every call has.
        sizes: in measurements, of the dimensions with names of their own, such as 'total_q'.
        has_canonical: whether there are kernels of it that keep the canonical order (docs/bits.md).

    Raises:
        ArgumentError: a name is invalid or used twice, a dtype or a word of semantics is unknown,
        or the tensors' order is wrong.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    numbers: Numbers
    flop: Callable[[Sizes], int]
    reference: str = ""
    semantics: frozenset[str] = frozenset({"uneven"})
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    peers: str = ""
    traffic: Callable[[Sizes], int] | None = None
    sizes: Callable[[Sizes], dict[str, int]] = packed_rows
    has_canonical: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ArgumentError(
                f"name={quoted(self.name)}: give lower-case letters, digits and '_', such as "
                "'first_row'"
            )
        names = [tensor.name for tensor in self.tensors]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled or not self.outputs:
            wrong = f"{', '.join(doubled)} twice" if doubled else "no output"
            raise ArgumentError(
                f"tensors of {self.name}: {wrong}; give each one name, and one of the role 'out' "
                "or 'inout' at least"
            )
        for tensor in self.tensors:
            if tensor.dtype and tensor.dtype not in ELEMENT_BYTES:
                raise ArgumentError(
                    f"{tensor.name} of {self.name}: dtype {quoted(tensor.dtype)}; allowed are "
                    f"{', '.join(ELEMENT_BYTES)}, and '' for the problem's"
                )
        required = [tensor.presence == "required" for tensor in self.tensors]
        if required != sorted(required, reverse=True):
            raise ArgumentError(
                f"tensors of {self.name}: one that every call has stands behind one that may be "
                "missing; put the required ones first"
            )
        unknown = sorted(self.semantics - set(SEMANTIC_WORDS))
        if unknown:
            raise ArgumentError(
                f"semantics of {self.name}: {', '.join(map(quoted, unknown))}; allowed are "
                f"{', '.join(SEMANTIC_WORDS)}"
            )

    def __str__(self) -> str:
        return self.name

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The tensors that a kernel reads."""
        return tuple(tensor for tensor in self.tensors if tensor.role != "out")

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The tensors that a kernel writes."""
        return tuple(tensor for tensor in self.tensors if tensor.role != "in")

    def shape(self, tensor: TensorSpec, problem: Sizes) -> tuple[int, ...]:
        """The shape of a problem's tensor; packed, of sequences that are all as long as the
        longest. Raises ArgumentError where a dimension's size depends on the caller's tensor."""
        return shape_of(tensor, problem, self.sizes(problem))

    def bytes(self, problem: Sizes) -> int:
        """Bytes that a kernel must read and write, by the operation's own count or, without one,
        of all tensors that every call of `problem` has, once each."""
        if self.traffic is not None:
            return self.traffic(problem)
        return sum(
            math.prod(self.shape(tensor, problem)) * ELEMENT_BYTES[tensor.dtype_of(problem)]
            for tensor in self.tensors
            if tensor.is_required(problem)
        )

    @property
    def has_pages(self) -> bool:
        """Whether problems of it may have pages."""
        return any(tensor.presence == "paged" for tensor in self.tensors)

    @property
    def gradient_words(self) -> tuple[str, ...]:
        """The words by which problems of it may say which gradients are needed."""
        return tuple(dict.fromkeys(it.unless for it in self.tensors if it.unless))

    def check_semantics(self, semantics: Semantics) -> None:
        """Raises ArgumentError for semantics that the operation does not support."""
        # Kernels that have windows take any mask from the header of their library.
        others = known_masks()[len(MASKS) :] if WINDOW in self.semantics else ()
        supported = {*self.semantics, *others}
        unknown = [word for word in semantics.words() if word not in supported]
        if unknown:
            known = ", ".join(word for word in SEMANTIC_WORDS if word in self.semantics) or "none"
            raise ArgumentError(
                f"semantics={quoted(str(semantics))}: {self.name} supports no "
                f"{' and no '.join(unknown)}; leave it out (known: {known})"
            )


def shape_of(tensor: TensorSpec, problem: Sizes, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A tensor's shape in `problem`; `sizes` are of the dimensions with names of their own.

    Raises ArgumentError for a dimension of unknown size.
    """
    shape = []
    for dim in tensor.dims_of(problem):
        size = size_of(dim, problem, sizes)
        if size is None:
            raise ArgumentError(
                f"{tensor.name}: the size of {dim!r} is not known; give the tensor itself"
            )
        shape.append(size)
    return tuple(shape)


def size_of(dim: str | int, problem: Sizes, sizes: Mapping[str, int]) -> int | None:
    """The size of a dimension; None for a dimension with a name of its own and no size yet."""
    if isinstance(dim, int):
        return dim
    name, _, more = dim.partition("+")
    found = sizes.get(name, getattr(problem, name) if name in _SIZES else None)
    return found + int(more or 0) if isinstance(found, int) else None


def load_attribute(target: str, what: str) -> Any:
    """The object that 'module:attribute' names. Raises ArgumentError when there is none."""
    module, _, attribute = target.partition(":")
    try:
        found: Any = import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError(
            f"{what}: {quoted(target)} cannot be loaded ({error}); give 'module:attribute' of an "
            "installed module"
        ) from error
    return found
