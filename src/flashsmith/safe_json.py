"""Reads files and numbers from untrusted sources and rejects bad content safely.

For any content and any kind of file, these functions guarantee:

- The only exception they raise is UnusableTextError, besides MemoryError and exceptions from
  signal handlers. OSErrors of the system and UnicodeError, RecursionError, OverflowError or
  ValueError of the standard library do not escape.
- They neither hang nor read without end. They read only regular files (or symlinks to them), up
  to a stated number of bytes, and reject fifos, devices, sockets and folders before reading.
- JSON is nested at most MOST_LEVELS deep, so walking, comparing, printing or rewriting it cannot
  exhaust the stack. Whole numbers have at most MOST_DIGITS digits, and no name occurs twice in an
  object. Strings can be encoded as UTF-8 (no lone surrogates).
- The caller must still check the rest: strings may hold control characters
  (flashsmith.printable), numbers may be NaN or infinite, and values may have any JSON type.
- Messages are one line and quote nothing of the content except a duplicate name. They do not name
  the path, which the caller adds.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flashsmith.printable import quoted
from flashsmith.system_errors import is_from_system

MOST_BYTES = 64 << 20
MOST_LEVELS = 64
# More digits than any real count or time has, but few enough for a float.
MOST_DIGITS = 300
# The largest number of digits in counts, which occur in names and variables. 18 digits always fit
# into 64 bits.
MOST_DIGITS_OF_COUNTS = 18

_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class UnusableTextError(ValueError):
    """A file or text cannot be read; callers raise their own error from it with the message
    f"{path}{error.place}: {error}".

    ``place`` is text like ', line 3, column 5', counted from 1, or '' when it is unknown.
    """

    def __init__(self, reason: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(reason)
        self.place = f", line {line}" if line else ""
        self.place += f", column {column}" if column else ""


def read_bytes(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a regular file of at most ``most_bytes`` bytes; raises UnusableTextError."""
    try:
        # Without O_NONBLOCK, opening a pipe would block until its other end is opened.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with os.fdopen(fd, "rb") as file:
            mode = os.fstat(fd).st_mode
            if not stat.S_ISREG(mode):
                kind = next((name for test, name in _KINDS if test(mode)), "no regular file")
                raise UnusableTextError(f"it is {kind}, not a file")
            content = file.read(most_bytes + 1)
    except OSError as error:
        if not is_from_system(error):
            raise
        raise UnusableTextError(error.strerror or str(error)) from error
    except UnusableTextError:
        raise
    except ValueError as error:  # a path with a NUL, or a path that the file system cannot encode
        raise UnusableTextError(f"it is not a path: {error}") from error
    if len(content) > most_bytes:
        raise UnusableTextError(f"it has more than {most_bytes:,} bytes")
    return content


def read_text(path: str | Path, most_bytes: int = MOST_BYTES) -> str:
    """A file's UTF-8 text without a byte order mark; raises UnusableTextError."""
    content = read_bytes(path, most_bytes)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UnusableTextError(f"it is not UTF-8 text: {error.reason}", line) from error


def read_json(path: str | Path, most_bytes: int = MOST_BYTES) -> Any:
    """A file's JSON, checked as the module describes; raises UnusableTextError."""
    return parse_json(read_text(path, most_bytes))


def parse_json(text: str) -> Any:
    """The value of a JSON text, checked as the module describes; raises UnusableTextError."""
    try:
        value = json.loads(text, parse_int=_whole_number, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise UnusableTextError(
            f"it is not JSON: {error.msg}", error.lineno, error.colno
        ) from error
    except RecursionError as error:
        raise _too_deep() from error
    _check_levels(value)
    if _SURROGATE.search(text) or not _is_utf8(text):
        _check_strings(value)
    return value


def whole_number(text: str) -> int | None:
    """The number that 1 to MOST_DIGITS_OF_COUNTS ASCII digits spell; None for anything else."""
    # isdecimal() also accepts other scripts' digits, and int() fails on thousands of digits.
    if len(text) <= MOST_DIGITS_OF_COUNTS and text.isascii() and text.isdecimal():
        return int(text)
    return None


def _whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise UnusableTextError(f"it has a number of {len(digits):,} digits")
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise UnusableTextError(f"the name {quoted(twice, 40)} stands twice in an object")
    return made


def _check_levels(value: Any) -> None:
    containers: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_LEVELS):
        if not containers:
            return
        containers = [
            part
            for container in containers
            for part in _parts(container)
            if isinstance(part, dict | list)
        ]
    if containers:
        raise _too_deep()


def _parts(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _too_deep() -> UnusableTextError:
    return UnusableTextError(f"its JSON is nested more than {MOST_LEVELS} levels deep")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_strings(value: Any) -> None:
    if not _is_utf8(json.dumps(value, ensure_ascii=False)):
        raise UnusableTextError("a text in it has a lone surrogate, which is not a character")
