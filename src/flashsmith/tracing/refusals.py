"""Raises the errors of tracing, which name the operation that cannot be traced, and its
location."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, NoReturn

from flashsmith.errors import TraceError
from flashsmith.printable import quoted

_PACKAGE = str(Path(__file__).parent.parent)
_ARGUMENTS = {
    "score_mod": "(score, b, h, q_idx, kv_idx)",
    "mask_mod": "(b, h, q_idx, kv_idx)",
}


class NeedsValue(BaseException):
    """Raised if a function needs the value of captured numbers, for example to choose a branch.

    This class is not a subclass of Exception, so that 'except Exception' in the function does not
    catch it.
    """

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(names)
        self.names = names


# The file and line of an operation that runs outside of the function to which the operation
# belongs.
_PLACE: ContextVar[tuple[str, int] | None] = ContextVar("_PLACE", default=None)


@contextlib.contextmanager
def at_line(place: tuple[str, int] | None) -> Iterator[None]:
    """Lets errors name this file and line, unless it is None."""
    before = _PLACE.set(place)
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        if place is not None and not hasattr(error, "traced_at"):
            error.traced_at = place  # type: ignore[attr-defined]
        raise
    finally:
        _PLACE.reset(before)


def source_line() -> str:
    """Returns the current location in the traced function: file, line number and source line."""
    place = _PLACE.get()
    if place is not None:
        return _line(*place)
    frame = sys._getframe(1)
    while frame is not None:
        if _is_callers(frame):
            return _line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown line"


def _is_callers(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return not name.startswith(_PACKAGE) and "/torch/" not in name and "/numpy/" not in name


def _line(file: str, number: int) -> str:
    line = linecache.getline(file, number).strip()
    where = f"{Path(file).name}:{number}"
    return f"{where}: {line}" if line else where


def check_arguments(name: str, function: Callable[..., Any]) -> None:
    """Raises TraceError if a function cannot be called with its arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function in C has no signature; calling it raises the error
        return
    try:
        signature.bind(*_ARGUMENTS[name].split(","))
    except TypeError as error:
        raise TraceError(
            f"{name}={quoted(function)}: it takes {signature}, and is called with "
            f"{_ARGUMENTS[name]} ({error}); let it take these arguments, in this order"
        ) from None


def raised(name: str, error: Exception) -> TraceError:
    """Makes the TraceError for a function that raised ``error`` while it was traced."""
    known = getattr(error, "traced_at", None)
    where = [] if known is None else [_line(*known)]
    where = where or [
        _line(frame.f_code.co_filename, number)
        for frame, number in walk_tb(error.__traceback__)
        if _is_callers(frame)
    ]
    first = str(error).partition("\n")[0]
    return TraceError(
        f"{name} raised {type(error).__name__} while it was traced: {first} "
        f"({where[-1] if where else 'an unknown line'}); its arguments are 0-dimensional tensors "
        "without values, so it may use only the operations in docs/programs.md"
    )


def refuse(operation: str, instead: str) -> NoReturn:
    """Raises the TraceError for an operation that the traced function must not use."""
    raise TraceError(f"{operation} cannot be traced ({source_line()}); {instead}")
