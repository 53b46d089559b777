"""Opens files safely in folders where other users may write: never a symbolic link, a fifo or a
device.

A link could lead out of the folder, and a fifo could block its reader forever.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

# Without O_NONBLOCK, opening a fifo blocks until another process opens its other end.
_SAFE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Check = Callable[[Path, os.stat_result], None]


def no_follow(path: str, flags: int) -> int:
    """An ``opener`` for open(). It raises OSError unless ``path`` itself is a regular file."""
    fd = os.open(path, flags | _SAFE_FLAGS, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd


@contextlib.contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Yields a new empty file in the folder of ``path``. At the end, the file replaces ``path``.

    The name of the file is random, so that no other user can put a link there. If an exception is
    raised, the file is removed.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    os.close(no_follow(os.fspath(unfinished), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_below(folder: Path, name: str, *, most: int | None = None, check: Check) -> bytes:
    """Reads the file ``name`` ('ptx/x.ptx') below ``folder`` without following links.

    ``check(path, status)`` is called for each folder on the path, and for the file after it is
    opened. Raises OSError; raises ValueError if the file has more than ``most`` bytes.
    """
    path, *parts = folder, *name.split("/")
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFE_FLAGS)
    try:
        check(path, os.fstat(fd))
        for i, part in enumerate(parts, 1):
            path /= part
            kind = 0 if i == len(parts) else os.O_DIRECTORY
            try:
                below = os.open(part, os.O_RDONLY | kind | _SAFE_FLAGS, dir_fd=fd)
            except OSError as error:
                raise OSError(error.errno, error.strerror, os.fspath(path)) from None
            os.close(fd)
            fd = below
            check(path, os.fstat(fd))
        return _read(fd, path, most)
    finally:
        os.close(fd)


def _read(fd: int, path: Path, most: int | None) -> bytes:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if most is not None and status.st_size > most:
        raise ValueError(f"{path.name} has {status.st_size} bytes, more than {most}")
    with open(fd, "rb", closefd=False) as file:
        return file.read()


def any_owner(path: Path, status: os.stat_result) -> None:
    """Accepts every file; the ``check`` to use for files that are read only for information."""


def kind_of(path: Path) -> int:
    """The type of the file ``path``, as stat.S_IFMT gives it, without following links; 0 if
    ``path`` does not exist."""
    try:
        return stat.S_IFMT(path.lstat().st_mode)
    except FileNotFoundError:
        return 0


def make_folder(path: Path) -> None:
    """Creates ``path`` and its parents with mode 0700; existing folders keep their mode."""
    if kind_of(path):
        return
    make_folder(path.parent)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return
    # The umask may have removed bits of the owner, or a setgid parent may have added its bit.
    if stat.S_IMODE(path.lstat().st_mode) != 0o700:
        path.chmod(0o700)


def sync(path: Path) -> None:
    """Flushes ``path`` to disk, before anything refers to it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def copy_tree(source: Path, target: Path) -> None:
    """Copies the folders and files in ``source``, except links, to the new folder ``target``.

    Folders get mode 0700 and files 0644, whatever the umask is. Everything is flushed to disk.
    """
    make_folder(target)
    for entry in sorted(source.iterdir()):
        if kind_of(entry) == stat.S_IFDIR:
            copy_tree(entry, target / entry.name)
        else:
            data = read_below(source, entry.name, check=any_owner)
            write_new(target / entry.name, data)
    sync(target)


def write_new(path: Path, data: bytes) -> None:
    """Writes the new file ``path`` with mode 0644, and flushes it to disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE_FLAGS, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fchmod(fd, 0o644)
        os.fsync(fd)
