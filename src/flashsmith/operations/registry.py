"""The registered operations, by name."""

from __future__ import annotations

from collections.abc import Callable

from flashsmith.did_you_mean import did_you_mean
from flashsmith.errors import ArgumentError
from flashsmith.operations.backward import BACKWARD
from flashsmith.operations.decode import DECODE
from flashsmith.operations.forward import FORWARD
from flashsmith.operations.latent_decode import LATENT_DECODE
from flashsmith.operations.merge import MERGE
from flashsmith.operations.operation import SEMANTIC_WORDS, Operation
from flashsmith.operations.score_sums import SCORE_SUMS
from flashsmith.operations.write_slots import WRITE_SLOTS
from flashsmith.printable import quoted
from flashsmith.semantics.dtype import DType
from flashsmith.semantics.mask import MASKS
from flashsmith.semantics.sizes import GRADIENT_WORDS, PAGE, SIZE, WINDOW_KEYS

# The operation of a Problem that is made without one; problem strings omit its name.
DEFAULT = FORWARD.name
# Words that already have another meaning in a problem string; no operation may have one of them as
# its name.
_TAKEN = {
    *(*MASKS, *SEMANTIC_WORDS, *GRADIENT_WORDS, "plain"),
    *(dtype.name.lower() for dtype in DType),
}

OPERATIONS: dict[str, Operation] = {
    it.name: it for it in (FORWARD, BACKWARD, DECODE, LATENT_DECODE, MERGE, WRITE_SLOTS, SCORE_SUMS)
}
# Functions that register the operations of installed packages. They are called when a name is
# unknown.
_finders: list[Callable[[], object]] = []


def register_operation(operation: Operation) -> Operation:
    """Registers an operation and returns it; registering the same object again is allowed.

    Raises:
        ArgumentError: the argument is not an Operation, its name is taken by another operation or a
        word of problems, or the name reads like a size (b2, page16).
    """
    if not isinstance(operation, Operation):
        raise ArgumentError(f"operation={quoted(operation)}: give a flashsmith Operation")
    known = OPERATIONS.get(operation.name)
    if known is operation:
        return operation
    if known is not None or operation.name in _TAKEN:
        owner = "another operation" if known is not None else "a word of problems"
        raise ArgumentError(
            f"operation={quoted(operation.name)}: the name is taken by {owner}; choose one that "
            f"is none of {', '.join(sorted({*OPERATIONS, *_TAKEN}))}"
        )
    if any(word.fullmatch(operation.name) for word in (SIZE, PAGE, WINDOW_KEYS)):
        raise ArgumentError(
            f"operation={quoted(operation.name)}: reads as a size in a problem's text; choose "
            "another name"
        )
    OPERATIONS[operation.name] = operation
    return operation


def find_more_with(finder: Callable[[], object]) -> None:
    """Registers a function that adds more operations. The function is called when a name is
    unknown."""
    _finders.append(finder)


def known_operation(name: str) -> Operation | None:
    """The operation of that name, possibly from an installed package; None if there is none."""
    if name not in OPERATIONS:
        for finder in _finders:
            finder()
    return OPERATIONS.get(name)


def operation(name: str) -> Operation:
    """The operation of that name.

    Raises:
        ArgumentError: there is no such operation; the message lists the known ones.
    """
    found = known_operation(name) if isinstance(name, str) else None
    if found is None:
        hint = did_you_mean(str(name), OPERATIONS) or ";"
        raise ArgumentError(
            f"operation={quoted(name)}: no such operation is registered{hint} known are "
            f"{', '.join(sorted(OPERATIONS))}. Install or import the package that registers it"
        )
    return found
