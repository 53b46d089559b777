"""Locks between processes: flock on a file, which the system releases when its holder dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

# Without O_NONBLOCK, opening a fifo in place of a lock file blocks until its other end is open.
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# The errors of open() for a symbolic link, a folder, a socket, or a device without a driver.
_NO_LOCK_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.ENOTDIR)


class HeldLock:
    """An flock that this process holds until ``release`` or until it exits.

    The lock survives renaming the file. A process that is forked while the lock is held also holds
    the lock.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._owner = os.getpid()

    def release(self, *, everywhere: bool = False) -> None:
        """Releases the lock; a second call does nothing.

        ``everywhere`` also releases the lock for processes forked since, unless this process is one
        of them.
        """
        if self._fd >= 0:
            if everywhere and os.getpid() == self._owner:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1

    def note_use(self) -> None:
        """Sets the file's time stamp to now, if this process has permission."""
        with contextlib.suppress(OSError):
            os.utime(self._fd)

    def __del__(self) -> None:
        self.release()


def try_lock(path: Path, *, shared: bool = False, create: bool = False) -> HeldLock | None:
    """Locks ``path`` without waiting, or returns None when another process holds a conflicting
    lock.

    Also returns None when the file is removed or replaced between opening and locking, since the
    lock would then protect nothing. A symbolic link, a fifo or a device is not a lock file: the
    result is None or, with ``create``, an OSError. Other OSErrors pass through.
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
        # NFS grants exclusive locks only on files opened for writing.
        with contextlib.suppress(PermissionError):
            return os.open(path, os.O_RDWR | _FLAGS)
    return os.open(path, os.O_RDONLY | _FLAGS)


def wait_for_lock(
    path: Path, *, patience: float, waiting: Callable[[float], None]
) -> HeldLock | None:
    """Waits for the exclusive lock ``path``; None after ``patience`` seconds.

    ``waiting(seconds)`` is called about ten times a second while another process holds the lock.
    """
    start = time.monotonic()
    while (lock := try_lock(path, create=True)) is None:
        waited = time.monotonic() - start
        if waited > patience:
            return None
        waiting(waited)
        time.sleep(0.1)
    return lock
