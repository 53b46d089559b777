"""The folder of the cache, in which a marker file shows that flashsmith created the folder."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from pathlib import Path

from flashsmith.builder.manifest import LIBRARY_FILE, MANIFEST_NAME
from flashsmith.builder.safe_files import any_owner, kind_of, make_folder, no_follow, read_below
from flashsmith.builder.temporary_folders import LOCK
from flashsmith.errors import CacheError

# The name of the folder. Its number increases when the layout of the folder changes; caches with an
# older layout are not touched.
CACHE_FOLDER = "flashsmith-cache-1"
# The name and the first line of the file by which backup programs recognise cache folders
# (bford.info/cachedir).
MARKER = "CACHEDIR.TAG"
_MARKER_TEXT = b"""\
Signature: 8a477f597d28d172789f06886806bc55
# Kernels that flashsmith compiled. This file marks the folder as its own: it removes what it finds
# here. 'flashsmith cache' lists, checks and clears it.
"""
# The errors raised by reading the marker when the marker is missing, or is a link, a fifo or a
# socket.
_NO_MARKER = (errno.ENOENT, errno.ELOOP, errno.EINVAL, errno.ENXIO)
FOLDERS = ("libraries", "objects", "locks", "tmp")

_KEY = re.compile(r"[0-9a-f]{32}")
_OBJECT = re.compile(r"[0-9a-f]{32}-\w+-[0-9a-f]{32}\.o")
_LIBRARY_FOLDERS = ("ptx", "sources")


def is_key(name: str) -> bool:
    """Whether ``name`` could be the key of a library: 32 hexadecimal digits."""
    return _KEY.fullmatch(name) is not None


def is_object(path: Path) -> bool:
    """Whether ``path`` is a regular file named like a host object, which is compiled host code that
    several libraries share."""
    return _OBJECT.fullmatch(path.name) is not None and kind_of(path) == stat.S_IFREG


def is_library(path: Path) -> bool:
    """Whether flashsmith made the library at ``path``. A library that it made may still be
    damaged."""
    return (
        is_key(path.name)
        and kind_of(path) == stat.S_IFDIR
        and any(kind_of(path / name) for name in (MANIFEST_NAME, LOCK))
        and foreign_file(path) is None
    )


def foreign_file(library: Path) -> Path | None:
    """A path inside a library's folder that flashsmith did not create; None if there is no such
    path."""
    for path in _below(library):
        name = path.relative_to(library).as_posix()
        if kind_of(path) == stat.S_IFDIR:
            known = name in _LIBRARY_FOLDERS
        else:
            known = name in (MANIFEST_NAME, LOCK) or LIBRARY_FILE.fullmatch(name) is not None
        if not known:
            return path
    return None


def _below(folder: Path) -> list[Path]:
    """All files and folders below ``folder``, without following links.

    A folder that disappears during the listing is left out.
    """
    return [
        Path(top, name)
        for top, folders, files in os.walk(folder)
        for name in sorted((*folders, *files))
    ]


def tree_bytes(path: Path) -> int:
    """The size in bytes of a file, or of all files below a folder together.

    A file that disappears during the count counts as 0.
    """
    total = 0
    for file in [path, *_below(path)]:
        with contextlib.suppress(FileNotFoundError):
            status = file.lstat()
            total += 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    return total


def is_cache_folder(root: Path) -> bool:
    """Whether the cache ``root`` exists.

    Raises CacheError if ``root`` is not a folder that flashsmith created, or if one of its
    subfolders is a link.
    """
    kind = kind_of(root)
    if kind == 0:
        return False
    if kind != stat.S_IFDIR:
        raise _refused(root, "is not a folder, or is a symbolic link")
    # The folder is listed before the marker is read, because a process completes the marker before
    # it adds other files.
    names = os.listdir(root)
    if _marker(root) != _MARKER_TEXT:
        if _may_become_ours(root, names):
            return False
        raise _refused(root, f"lacks the marker of flashsmith's own folders, {MARKER}")
    for name in FOLDERS:
        if kind_of(root / name) not in (0, stat.S_IFDIR):
            raise _refused(root / name, "is not a folder, or is a symbolic link")
    return True


def make_cache_folder(root: Path) -> None:
    """Creates the cache ``root`` and its subfolders if they are missing.

    Raises the errors of is_cache_folder, and OSError.
    """
    if not is_cache_folder(root):
        make_folder(root)
        # The file is not truncated, because another process may be creating it too; both write the
        # same bytes.
        with open(root / MARKER, "r+b", opener=_open_or_create) as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(_MARKER_TEXT)
            file.flush()
            os.fsync(file.fileno())
        is_cache_folder(root)
    for name in FOLDERS:
        make_folder(root / name)


def _open_or_create(path: str, flags: int) -> int:
    return no_follow(path, flags | os.O_CREAT)


def _marker(root: Path) -> bytes | None:
    try:
        return read_below(root, MARKER, most=len(_MARKER_TEXT), check=any_owner)
    except ValueError:
        return None
    except OSError as error:
        if error.errno not in _NO_MARKER:
            raise
        return None


def _may_become_ours(root: Path, names: list[str]) -> bool:
    """Whether the folder is empty, or was left by a process that was killed while it wrote the
    marker."""
    if not names:
        return True
    begun = _marker(root)
    return names == [MARKER] and begun is not None and _MARKER_TEXT.startswith(begun)


def _refused(path: Path, why: str) -> CacheError:
    return CacheError(
        f"{path} {why}: flashsmith does not touch it. Move it away, or set FLASHSMITH_CACHE_DIR "
        "to another folder"
    )
