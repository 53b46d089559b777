"""The folder in which compilers run. Its path has no characters that a shell interprets.

nvcc passes paths to sh in double quotes, and some of its options split paths at commas.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flashsmith.builder.safe_files import kind_of
from flashsmith.builder.temporary_folders import TemporaryFolders, folder_errors
from flashsmith.errors import CacheError, ToolchainError

_PREFIX = "flashsmith-build-"
_SAFE = re.compile(r"[\w./+@%=:-]+", re.ASCII)
_INTERPRETED = re.compile(r"""[$`"'\\,\x00-\x1f\x7f]""")
_ELSEWHERE = ("/tmp", "/var/tmp")


def require_plain(what: str, path: Path) -> None:
    """Raises ToolchainError if a shell would interpret a part of ``path``, or if it is not
    UTF-8."""
    text = os.fspath(path)
    found = _INTERPRETED.search(text)
    why = f"the shell that the compiler starts would interpret {found[0]!r}" if found else ""
    try:
        text.encode()
    except UnicodeEncodeError:
        why = "it is not UTF-8"
    if why:
        raise ToolchainError(
            f"{what}: {text!r} cannot be given to the compilers: {why}. Install it, or the Python "
            "environment it is in, in a folder without such characters"
        )


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yields a new private folder for compilers, and removes the folder when the block ends.

    Folders that dead processes left are removed first. The new folder is in the folder for
    temporary files (TMPDIR). If a shell would interpret that path, or if other users may rename
    files there, the new folder is in /tmp or /var/tmp instead. Raises CacheError if none of these
    folders can be used.
    """
    folder = _choose()
    errors = folder_errors("write", f"the folder for temporary files {folder}", "TMPDIR")
    with errors, TemporaryFolders(folder, _PREFIX).new() as scratch:
        yield scratch


def _choose() -> Path:
    wanted = _ELSEWHERE[0]
    with contextlib.suppress(FileNotFoundError):  # Not even the working folder can be used
        wanted = tempfile.gettempdir()
    for name in (wanted, *_ELSEWHERE):
        folder = Path(os.path.realpath(name))
        if _SAFE.fullmatch(os.fspath(folder)) and _is_usable(folder):
            return folder
    raise CacheError(
        f"TMPDIR: neither {wanted!r} nor {' nor '.join(_ELSEWHERE)} is a folder that you may write "
        "to and others may not rename files in. Set TMPDIR to such a folder, with a path of only "
        "ASCII letters, digits and ./_+@%=:-, since compilers pass it to a shell"
    )


def _is_usable(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        if kind_of(folder) != stat.S_IFDIR or not os.access(folder, os.W_OK | os.X_OK):
            return False
        status = folder.stat()
        shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        owned = status.st_uid in (0, os.geteuid())
        return owned and (not shared or bool(status.st_mode & stat.S_ISVTX))
    return False
