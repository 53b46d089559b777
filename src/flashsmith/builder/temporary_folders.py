"""Temporary folders for building and removing libraries; the folders are removed even after a
crash.

Each folder contains a lock file, and the process that uses the folder holds the lock. If the
process dies, even by a signal, the operating system releases the lock, and the next build removes
the folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from flashsmith.builder.locks import HeldLock, try_lock
from flashsmith.builder.safe_files import kind_of, make_folder
from flashsmith.errors import CacheError
from flashsmith.system_errors import is_from_system

LOCK = "lock"
# The age from which on a folder without a lock file is removed. A younger folder may be one that a
# process is still creating.
_UNLOCKED_GRACE_SECONDS = 3600.0

_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space or run 'flashsmith cache clear'",
    errno.EDQUOT: "the disk quota is used up: free some space or run 'flashsmith cache clear'",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
}


@contextlib.contextmanager
def folder_errors(action: str, folder: str, variable: str, readable: str = "") -> Iterator[None]:
    """Converts OSErrors that are raised in the block to CacheErrors about ``folder``, with advice.

    ``variable`` is the environment variable that can select another folder. ``readable`` is the
    command with which the folder's owner can let others read the folder.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # The program that reads the progress has exited; this is no error of the cache
    except OSError as error:
        if not is_from_system(error):
            raise
        why = _ADVICE.get(error.errno or 0, error.strerror or str(error))
        if action == "read" and isinstance(error, PermissionError) and readable:
            why += f"; its owner can let you read it with '{readable}'"
        where = f" ({error.filename})" if error.filename else ""
        raise CacheError(
            f"cannot {action} {folder}{where}: {why}. "
            f"Set {variable} to another folder that you may {action}"
        ) from error


def subfolders(folder: Path) -> list[Path]:
    """The folders in ``folder``, sorted and without links; empty if ``folder`` does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(path for path in folder.iterdir() if kind_of(path) == stat.S_IFDIR)
    return []


class TemporaryFolders:
    """The temporary folders in ``folder``, whose names are ``prefix`` followed by 16 hexadecimal
    digits.

    Other folders, and folders of other users, are not touched. Methods raise OSError.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder = folder
        self._prefix = prefix
        self._name = re.compile(re.escape(prefix) + "[0-9a-f]{16}")

    @contextlib.contextmanager
    def new(self) -> Iterator[Path]:
        """Yields a new folder, and removes it when the block ends.

        Folders that dead processes left are removed first.
        """
        self.sweep()
        folder, lock = self._create()
        try:
            yield folder
        finally:
            _remove(folder)
            lock.release()

    def _create(self) -> tuple[Path, HeldLock]:
        while True:
            folder = self._new_path()
            # If another process removes the new folder before it is locked here, another folder is
            # created.
            with contextlib.suppress(FileNotFoundError):
                make_folder(folder)
                lock = try_lock(folder / LOCK, create=True)
                if lock is not None:
                    return folder, lock

    def _new_path(self) -> Path:
        return self.folder / f"{self._prefix}{secrets.token_hex(8)}"

    def sweep(self) -> None:
        """Removes the folders that dead processes left."""
        for folder in subfolders(self.folder):
            if not self._is_ours(folder):
                continue
            with contextlib.suppress(PermissionError):
                lock = try_lock(folder / LOCK)
                if lock is not None or _is_unlocked_and_old(folder):
                    _remove(folder)
                if lock is not None:
                    lock.release()

    def _is_ours(self, path: Path) -> bool:
        with contextlib.suppress(FileNotFoundError):
            named = self._name.fullmatch(path.name) is not None
            return named and path.lstat().st_uid == os.geteuid()
        return False

    def trash(self, library: Path) -> None:
        """Moves the folder ``library`` here atomically and then removes it; does nothing if there
        is no such folder."""
        # The lock file is moved with the library. If this process is killed now, the next sweep
        # removes both.
        trash = self._new_path()
        with contextlib.suppress(FileNotFoundError):
            os.rename(library, trash)
        _remove(trash)


def _remove(folder: Path) -> None:
    """Removes a folder, with its lock file last, since compilers that outlive their parent may
    still write to the folder.

    Another process may remove the folder at the same time.
    """
    with contextlib.suppress(FileNotFoundError):
        for path in list(folder.iterdir()):
            if kind_of(path) == stat.S_IFDIR:
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink(missing_ok=True)
        if [path.name for path in folder.iterdir()] in ([], [LOCK]):
            shutil.rmtree(folder, ignore_errors=True)


def _is_unlocked_and_old(folder: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        age = time.time() - folder.lstat().st_mtime
        return not kind_of(folder / LOCK) and age > _UNLOCKED_GRACE_SECONDS
    return False
