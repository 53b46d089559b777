"""Locks between processes: flock on a file.

The system releases the lock when the process that holds it dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

# Without O_NONBLOCK, opening a fifo that is there instead of a lock file would block.
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# The errors that open() raises for a symbolic link, a folder, a socket, or a device without a
# driver.
_NO_LOCK_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.ENOTDIR)


class HeldLock:
    """A lock (flock) that this process holds until it calls ``release`` or exits.

    Renaming the file does not release the lock. If this process forks, the child holds the lock
    too.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._owner = os.getpid()

    def release(self, *, everywhere: bool = False) -> None:
        """Releases the lock. A second call does nothing.

        With ``everywhere``, processes that inherited the lock by a fork lose it too. Such a child
        process cannot take the lock away from its parent: in the child, ``everywhere`` has no
        effect.
        """
        if self._fd >= 0:
            if everywhere and os.getpid() == self._owner:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1

    def note_use(self) -> None:
        """Sets the time stamp of the file to now, if this is permitted."""
        with contextlib.suppress(OSError):
            os.utime(self._fd)

    def __del__(self) -> None:
        self.release()


def try_lock(path: Path, *, shared: bool = False, create: bool = False) -> HeldLock | None:
    """Locks ``path`` without waiting.

    Returns None if another process holds a lock that excludes this one.

    Also returns None if the file was removed or replaced before it was locked, since the lock would
    protect nothing. If ``path`` is a symbolic link, a fifo or a device, the result is None or, with
    ``create``, an OSError. Other OSErrors are raised.
    """
    try:
        fd = _open(path, shared, create)
    except FileNotFoundError:
        if create:
            raise
        return None
    except OSError as error:
        if create or error.errno not in _NO_LOCK_FILE:
            raise
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            if create:
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            os.close(fd)
            return None
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.lstat(path)):
            return HeldLock(fd)
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _open(path: Path, shared: bool, create: bool) -> int:
    if create:
        return os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o644)
    if not shared:
        # NFS grants an exclusive lock only on a file that is opened for writing.
        with contextlib.suppress(PermissionError):
            return os.open(path, os.O_RDWR | _FLAGS)
    return os.open(path, os.O_RDONLY | _FLAGS)


def wait_for_lock(
    path: Path, *, patience: float, waiting: Callable[[float], None]
) -> HeldLock | None:
    """Waits for the exclusive lock on ``path``; returns None if it is not free within ``patience``
    seconds.

    As long as another process holds the lock, ``waiting(seconds)`` is called about ten times per
    second.
    """
    start = time.monotonic()
    while (lock := try_lock(path, create=True)) is None:
        waited = time.monotonic() - start
        if waited > patience:
            return None
        waiting(waited)
        time.sleep(0.1)
    return lock
