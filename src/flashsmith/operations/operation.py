"""Operation: describes what a kernel computes, by its tensors, options, FLOP and reference."""

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
from flashsmith.semantics.cache_format import DTYPES_OF_8BIT
from flashsmith.semantics.compiled import FLAGS, Semantics
from flashsmith.semantics.dtype import dtype_name
from flashsmith.semantics.mask import MASKS, WINDOW, known_masks
from flashsmith.semantics.sizes import Sizes

SEMANTIC_WORDS = (*MASKS[1:], *FLAGS)
# Bytes per element, by NumPy's dtype name.
ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "int32": 4, "int64": 8}
ELEMENT_BYTES |= dict.fromkeys(DTYPES_OF_8BIT, 1)
# Dimensions whose sizes are fields of a Problem.
_SIZES = ("batch", "seq_q", "seq_k", "heads_q", "heads_k", "d", "d_v")
_NAME = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")

Role = Literal["in", "out", "inout"]
Presence = Literal["required", "usual", "optional", "packed", "paged"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of an operation's calls.

    Args:
        name: its name in errors, references and results.
        dims: its dimensions. Each is a size of Problem ('batch', 'heads_q', 'd_v'), a whole number,
            or a name that the operation defines ('pages'), which stands for the same size in all
            tensors of a call. 'batch+1' is batch plus 1.
        dtype: the element type by NumPy's name ('float32', 'int32'); '' means the problem's dtype.
        role: whether a kernel reads the tensor ('in'), writes it ('out'), or both ('inout').
        presence: 'required', 'usual' (an output that a call may decline), 'optional' (the caller
            may omit it), or 'packed' or 'paged' (required in such problems and absent from all
            others).
        packed: its dimensions for packed sequences; () means the same as dims.
        may_share: if it is written, the names of the tensors whose memory may overlap its memory.
        alignment: the address, and every stride except the last, must be a multiple of this number
            of bytes.
        dtype_option: the option that sets the element type, unless its value is None.
        partial_dtype: the element type in partial problems; '' means the same as dtype.
        written_with: the optional input without which a call only reads this 'inout' tensor.
        is_cache: whether it is a KV cache; if so, its elements have the problem's cache format.
        unless: the value of a problem's ``gradients`` for which no call has this tensor.

    Raises:
        ArgumentError: the role or the presence is unknown.
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
    is_cache: bool = False
    unless: str = ""

    def __post_init__(self) -> None:
        for what, allowed in (("role", get_args(Role)), ("presence", get_args(Presence))):
            if getattr(self, what) not in allowed:
                raise ArgumentError(
                    f"{what}={quoted(getattr(self, what))} of the tensor {self.name}: allowed are "
                    f"{', '.join(allowed)}"
                )

    def dims_of(self, problem: Sizes) -> tuple[str | int, ...]:
        """The tensor's dimensions in `problem`."""
        return self.packed if self.packed and problem.semantics.packed else self.dims

    def dtype_of(self, problem: Sizes, options: Mapping[str, Any] = MappingProxyType({})) -> str:
        """The NumPy dtype name of this tensor when the operation is called on `problem` with these
        options."""
        if self.partial_dtype and problem.semantics.partial:
            return self.partial_dtype
        if self.is_cache and problem.cache_format.is_8bit:
            return problem.cache_format.numpy_name
        asked = options.get(self.dtype_option)
        return (dtype_name(asked) or asked) if asked else self.dtype or problem.dtype.numpy_name

    def is_required(self, problem: Sizes) -> bool:
        """Whether every call on `problem` has the tensor. This is also True for a 'usual' output,
        which a call may decline."""
        if not self.is_of_kind(problem):
            return False
        return self.presence != "optional"

    def is_of_kind(self, problem: Sizes) -> bool:
        """Whether calls on `problem` may have the tensor.

        Only packed problems have 'packed' tensors, and only paged problems have 'paged' ones. A
        gradient's tensor is absent from problems that do not need the gradient.
        """
        if self.unless and self.unless == problem.gradients:
            return False
        if self.presence == "paged":
            return problem.page > 0
        return self.presence != "packed" or problem.semantics.packed

    def is_written(self, given: Collection[str]) -> bool:
        """Whether a call writes this tensor if the tensors named in ``given`` are passed to it."""
        return self.role != "in" and (not self.written_with or self.written_with in given)


class Call(NamedTuple):
    """One call whose tensors were checked, from which an operation computes the numbers for the C++
    host path.

    strides: the strides of every given tensor, in elements, by the tensor's name.
    sizes: the sizes of the dimensions that the operation itself names.
    options: the value of every option of the operation, by name.
    """

    problem: Sizes
    strides: Mapping[str, tuple[int, ...]]
    sizes: Mapping[str, int]
    options: Mapping[str, Any]


Numbers = Callable[[Call], tuple[int | float, ...]]


def packed_rows(problem: Sizes) -> dict[str, int]:
    """The total numbers of rows of q and k in a packed problem if all sequences have the maximum
    length; {} if the problem is not packed."""
    if not problem.semantics.packed:
        return {}
    return {
        "total_q": problem.batch * problem.seq_q,
        "total_k": problem.batch * problem.seq_k,
    }


@dataclass(frozen=True)
class Operation:
    """One computation, which kernels of any family may implement. Each operation is registered
    under its name.

    Args:
        name: its word in a problem string, in tables and in rows: lower case.
        tensors: the tensors of a call, in the order in which the C++ host path takes their
            addresses; required ones come first.
        numbers: computes the numbers that the C++ host path takes in addition to tensors and
            device, in its order.
        reference: 'module:attribute' of the OperationReference, which draws inputs and compares
            outputs; the first proof imports it. '' means the package's own reference for this name.
        flop: floating-point operations of a problem; above 0 unless the problem is empty.
        semantics: the words of Semantics that may differ from the plain case.
        options: the other arguments of a call, by name, with their default values.
        peers: 'module:attribute' of a sequence of the benchmark's peers; '' means the package's
            own.
        traffic: bytes that a kernel must read and write for a problem; None counts all tensors that
            every call has.
        sizes: in measurements, the sizes of the dimensions that the operation names, such as
            'total_q'.
        has_canonical: whether it has kernels that keep the canonical order (docs/bits.md).
        takes_programs: whether it has kernels for score and mask functions.

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
    takes_programs: bool = False

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
                f"tensors of {self.name}: {wrong}; give each a name of its own, and at least one "
                "the role 'out' or 'inout'"
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
                f"tensors of {self.name}: a required tensor follows one that may be missing; "
                "put the required ones first"
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
        """The shape of a tensor in a problem; if packed, all sequences have the maximum length.

        Raises ArgumentError if a dimension's size depends on the tensor that a caller passes.
        """
        return shape_of(tensor, problem, self.sizes(problem))

    def bytes(self, problem: Sizes) -> int:
        """Bytes that a kernel must read and write.

        This is the operation's own count or, without one, the size of all tensors that every call
        of `problem` has.
        """
        if self.traffic is not None:
            return self.traffic(problem)
        return sum(
            math.prod(self.shape(tensor, problem)) * ELEMENT_BYTES[tensor.dtype_of(problem)]
            for tensor in self.tensors
            if tensor.is_required(problem)
        )

    def tensors_of(self, semantics: Semantics) -> tuple[TensorSpec, ...]:
        """The tensors of a call with these semantics: the operation's own, followed by the tensors
        that a program reads."""
        return self.tensors + READS if semantics.program else self.tensors

    @property
    def has_pages(self) -> bool:
        """Whether the operation's problems may have pages."""
        return any(tensor.presence == "paged" for tensor in self.tensors)

    @property
    def has_cache(self) -> bool:
        """Whether the operation reads or writes a KV cache, which may have any cache format."""
        return any(tensor.is_cache for tensor in self.tensors)

    @property
    def has_d_v(self) -> bool:
        """Whether v may have a different head dimension than q and k."""
        return any("d_v" in tensor.dims for tensor in self.tensors)

    @property
    def gradient_words(self) -> tuple[str, ...]:
        """The values other than '' that Problem.gradients may have for this operation."""
        return tuple(dict.fromkeys(it.unless for it in self.tensors if it.unless))

    def check_semantics(self, semantics: Semantics) -> None:
        """Raises ArgumentError for semantics that the operation does not support."""
        # A kernel that supports windows supports every registered mask, because its library's
        # header defines the mask.
        others = known_masks()[len(MASKS) :] if WINDOW in self.semantics else ()
        supported = {*self.semantics, *others}
        if self.takes_programs:
            supported.add(semantics.program)
        unknown = [word for word in semantics.words() if word not in supported]
        if unknown:
            known = ", ".join(word for word in SEMANTIC_WORDS if word in self.semantics) or "none"
            raise ArgumentError(
                f"semantics={quoted(str(semantics))}: {self.name} supports no "
                f"{' and no '.join(unknown)}; leave it out (known: {known})"
            )


# The maximum number of dimensions of a tensor that a program reads, and the maximum number of such
# tensors.
MOST_READ_DIMS, MOST_READS = 4, 8
# The tensors that a program reads. The program defines their number, dtypes and ranks.
READS = tuple(
    TensorSpec(f"read{i}", (), presence="optional", alignment=1) for i in range(MOST_READS)
)


def program_numbers(call: Call) -> tuple[int | float, ...]:
    """The numbers that follow the operation's own numbers if a call has a program, in the order of
    the C++ host path; () without a program.

    They are the number of tensors, the four sizes and strides of each tensor, the number of the
    program's numbers, and these numbers.
    """
    program = call.problem.semantics.caller_program
    if program is None:
        return ()
    reads: list[int] = []
    for spec, read in zip(READS, program.reads, strict=False):
        strides = call.strides.get(spec.name, (0,) * read.rank)
        absent = MOST_READ_DIMS - read.rank
        sizes = (call.sizes.get(f"{spec.name}_{i}", 1) for i in range(read.rank))
        reads += [*sizes, *(1,) * absent, *strides, *(0,) * absent]
    numbers = call.options.get("program_numbers") or (0,) * len(program.numbers)
    return (len(program.reads), *reads, len(numbers), *numbers)


def shape_of(tensor: TensorSpec, problem: Sizes, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a tensor in `problem`; `sizes` has the sizes of the dimensions that the
    operation itself names.

    Raises ArgumentError if the size of a dimension is unknown.
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
    """The size of a dimension; None if the operation itself names the dimension and `sizes` lacks
    it."""
    if isinstance(dim, int):
        return dim
    name, _, more = dim.partition("+")
    found = sizes.get(name, getattr(problem, name) if name in _SIZES else None)
    return found + int(more or 0) if isinstance(found, int) else None


def load_attribute(target: str, what: str) -> Any:
    """The object that 'module:attribute' names. Raises ArgumentError if there is no such object."""
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
