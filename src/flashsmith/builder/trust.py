"""Decides which code may be loaded: files that belong to this user or to root and that no other
user can write."""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from flashsmith import env
from flashsmith.errors import CacheError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC

# For each cache, by device and inode: an open descriptor of its folder libraries/. The paths that
# the dynamic linker gets contain the number of the descriptor, and the linker assumes that equal
# paths mean the same library. So a number must always refer to the same folder, and therefore the
# descriptors are never closed.
_folders: dict[tuple[int, int], int] = {}


def check_owner(path: Path, status: os.stat_result) -> None:
    """Raises CacheError unless ``path`` belongs to this user or to root and no other user may write
    to it.

    FLASHSMITH_TRUST_CACHE=1 turns the check off.
    """
    if status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return
    if env.trusts_cache():
        return
    raise CacheError(
        f"{path}: owner {_name(status.st_uid)}, mode {stat.S_IMODE(status.st_mode):04o}: what is "
        "loaded from the kernel cache runs as you, so you or root must own it and no other user "
        "may write to it. Set FLASHSMITH_CACHE_DIR to a folder of yours, remove the permission "
        f"(chmod go-w), or set {env.TRUST_CACHE.name}=1 if you trust all who can write to it"
    )


def check_folder(path: Path) -> None:
    """Does what check_owner() does, for a folder. The folder itself must not be a symbolic link,
    but its parents may be."""
    fd = os.open(path, _FOLDER)
    try:
        check_owner(path, os.fstat(fd))
    finally:
        os.close(fd)


@contextlib.contextmanager
def checked_path(shared_object: Path) -> Iterator[str]:
    """Checks <cache>/libraries/<key>/x.so. Yields a path through which only this file can be
    loaded.

    The path leads through an open folder, so that renaming a parent between the check and the
    loading has no effect. Raises the errors of check_owner, and OSError.
    """
    library = shared_object.parent
    with contextlib.ExitStack() as stack:

        def opened(name: Path | str, path: Path, flags: int, above: int | None = None) -> int:
            fd = os.open(name, flags, dir_fd=above)
            stack.callback(os.close, fd)
            check_owner(path, os.fstat(fd))
            return fd

        cache = opened(library.parents[1], library.parents[1], _FOLDER)
        libraries = opened(library.parent.name, library.parent, _FOLDER, cache)
        folder = opened(library.name, library, _FOLDER, libraries)
        file = opened(shared_object.name, shared_object, _FILE, folder)
        through = f"/proc/self/fd/{_kept(libraries)}/{library.name}/{shared_object.name}"
        same = False
        with contextlib.suppress(OSError):  # no /proc
            same = os.path.samestat(os.stat(through), os.fstat(file))
        yield through if same else os.fspath(shared_object)


def _kept(fd: int) -> int:
    """Returns a descriptor of the same folder as ``fd``. For one folder, every call returns the
    same descriptor."""
    status = os.fstat(fd)
    key = status.st_dev, status.st_ino
    with contextlib.suppress(KeyError, OSError):
        if os.path.samestat(os.fstat(_folders[key]), status):
            return _folders[key]
    _folders[key] = os.dup(fd)  # This is the first call, or other code has closed the descriptor
    return _folders[key]


def _name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)
