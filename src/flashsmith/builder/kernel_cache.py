"""The kernel cache.

A library's key is the hash of its specification; libraries are published atomically.

    <folder>/flashsmith-cache-1/
        CACHEDIR.TAG       marks the folder as flashsmith's
        libraries/<key>/   manifest.json, library.so, ptx/, sources/, lock
        objects/           compiled host code shared by libraries; names end in a content hash
        locks/<key>.lock   held to build, replace or remove that library
        tmp/               copies of libraries before they are renamed into place

A process that is killed leaves at most a folder in tmp/, which the next build removes. A process
that uses a library holds a shared lock on it, so that the library is not evicted. Files and folders
with other names are neither used nor removed; the same holds for libraries whose folders contain
other files. Links are never followed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shlex
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flashsmith import env
from flashsmith.builder.cache_folder import (
    CACHE_FOLDER,
    foreign_file,
    is_cache_folder,
    is_key,
    is_library,
    is_object,
    make_cache_folder,
    tree_bytes,
)
from flashsmith.builder.library import KernelLibrary
from flashsmith.builder.locks import try_lock, wait_for_lock
from flashsmith.builder.manifest import MANIFEST_NAME, FileRecord, Manifest
from flashsmith.builder.safe_files import (
    Check,
    any_owner,
    copy_tree,
    kind_of,
    make_folder,
    read_below,
    sync,
    write_new,
)
from flashsmith.builder.temporary_folders import LOCK, TemporaryFolders, folder_errors, subfolders
from flashsmith.builder.trust import check_folder, check_owner
from flashsmith.errors import CacheError
from flashsmith.system_errors import is_from_system

_MIB = 2**20
# The number of seconds to wait for another process's build of the same library, which is longer
# than any build takes. After that, building the library twice is better than hanging.
_BUILD_PATIENCE_SECONDS = 1800.0


@dataclass(frozen=True)
class CacheEntry:
    """A library in the cache.

    If the library is unusable, ``damage`` says why and ``manifest`` is None.
    """

    key: str
    path: Path
    bytes: int
    last_used: float  # In seconds since the epoch
    manifest: Manifest | None
    damage: str | None


@dataclass(frozen=True)
class RemovedLibraries:
    """The entries that ``prune`` or ``clear`` removed, and the number of libraries that were kept
    because they are in use."""

    entries: int
    bytes: int
    in_use: int


class Cache:
    """The cache in a folder.

    Methods raise CacheError if the folder cannot be read or written, or if flashsmith did not
    create it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / CACHE_FOLDER
        self.libraries = self.root / "libraries"
        self.objects = self.root / "objects"
        self._locks = self.root / "locks"
        self._temporary = TemporaryFolders(self.root / "tmp", "build-")

    # ---- reading ----

    def open(self, key: str) -> KernelLibrary | None:
        """Opens the library ``key`` after verifying all its files.

        Returns None if it is missing or damaged.

        Also raises CacheError if other users could have written the files.
        """
        path = self.libraries / key
        with self.errors("read"):
            if not is_cache_folder(self.root) or kind_of(path) != stat.S_IFDIR:
                return None
            in_use = None
            with contextlib.suppress(FileNotFoundError):  # The library was evicted meanwhile
                for folder in (self.root, self.libraries, path):
                    check_folder(folder)
                in_use = try_lock(path / LOCK, shared=True)
            if in_use is None:
                return None
            try:
                manifest = _verified_manifest(path, check_owner)
            except PermissionError:
                in_use.release()
                raise  # The library may be intact, and building it again would hide the problem
            except (OSError, ValueError) as error:
                in_use.release()
                if not is_from_system(error):
                    raise
                return None
            # If the cache is read-only, this call does nothing.
            in_use.note_use()
            return KernelLibrary(path, manifest, in_use)

    def entries(self, *, thorough: bool = False) -> list[CacheEntry]:
        """Returns the entries of all libraries, the most recently used first. With ``thorough``,
        every file is hashed."""
        with self.errors("read"):
            found = [self._entry(path, thorough) for path in self._folders() if is_library(path)]
            return sorted(found, key=lambda entry: (-entry.last_used, entry.key))

    def manifests(self) -> list[Manifest]:
        """Returns all readable manifests, starting with that of the most recently used library.

        The other files of the libraries are not checked.
        """
        found = []
        with self.errors("read"):
            for path in sorted(self._folders(), key=_last_used, reverse=True):
                try:
                    found.append(_remembered_manifest(path))
                except (OSError, ValueError) as error:
                    if not is_from_system(error):
                        raise
        return found

    def _folders(self) -> list[Path]:
        if not is_cache_folder(self.root):
            return []
        return [path for path in subfolders(self.libraries) if is_key(path.name)]

    def _entry(self, path: Path, thorough: bool) -> CacheEntry:
        manifest, damage = None, None
        try:
            manifest = _verified_manifest(path) if thorough else _remembered_manifest(path)
        except (OSError, ValueError) as error:
            if not is_from_system(error):
                raise
            if thorough and isinstance(error, PermissionError):
                raise  # A file that cannot be read may be undamaged
            damage = str(error)
        return CacheEntry(path.name, path, tree_bytes(path), _last_used(path), manifest, damage)

    def object(self, name: str) -> bytes | None:
        """Returns the content of the host object ``name``; None if the object is missing or
        damaged.

        Also raises CacheError if other users could have written the object.
        """
        with self.errors("read"):
            for path in self._objects(name):
                check_folder(self.root)
                with contextlib.suppress(FileNotFoundError):
                    data = read_below(self.objects, path.name, check=check_owner)
                    if path.name == _object_name(name, data):
                        with contextlib.suppress(OSError):
                            os.utime(path, follow_symlinks=False)
                        return data
        return None

    def _objects(self, name: str = "") -> list[Path]:
        if not is_cache_folder(self.root):
            return []
        pattern = f"{name}-*.o" if name else "*.o"
        return [path for path in sorted(self.objects.glob(pattern)) if is_object(path)]

    # ---- writing ----

    @contextlib.contextmanager
    def building(self, key: str, waiting: Callable[[float], None]) -> Iterator[None]:
        """Holds the lock that is needed to build or replace the library ``key``; waits while
        another process holds the lock.

        Also raises CacheError if other users could write to the cache.
        """
        with self.errors("write"):
            make_cache_folder(self.root)
            for folder in (self.root, self.libraries):
                check_folder(folder)
            lock = wait_for_lock(
                self._locks / f"{key}.lock", patience=_BUILD_PATIENCE_SECONDS, waiting=waiting
            )
        try:
            yield
        finally:
            if lock is not None:
                lock.release(everywhere=True)

    @contextlib.contextmanager
    def temporary_folder(self) -> Iterator[Path]:
        """Yields a new folder in the cache, and removes the folder when the block ends.

        Folders that dead processes left are removed first.
        """
        with contextlib.ExitStack() as stack:
            with self.errors("write"):
                temporary = stack.enter_context(self._temporary.new())
            yield temporary

    def publish(self, folder: Path, manifest: Manifest) -> KernelLibrary:
        """Copies ``folder`` to its final path and adds the manifest.

        The caller must hold the lock of the key. If another process has published the key
        meanwhile, returns that library and discards the copy.
        """
        target = self.libraries / manifest.key
        with self.temporary_folder() as temporary, self.errors("write"):
            copy = temporary / "library"
            copy_tree(folder, copy)
            write_new(copy / MANIFEST_NAME, manifest.to_json().encode())
            write_new(copy / LOCK, b"")
            in_use = try_lock(copy / LOCK, shared=True)
            sync(copy)
            while True:
                try:
                    os.rename(copy, target)
                    break
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                        raise
                theirs = self.open(manifest.key)
                if theirs is not None:
                    return theirs
                self.discard(manifest.key)
            sync(self.libraries)
        if in_use is None:
            raise CacheError(f"{target}: cannot be locked; is it on a network file system?")
        return KernelLibrary(target, manifest, in_use)

    def publish_object(self, name: str, built: Path) -> None:
        """Stores a compiled host object, so that later library builds can reuse it."""
        with self.temporary_folder() as temporary, self.errors("write"):
            data = read_below(built.parent, built.name, check=any_owner)
            for damaged in self._objects(name):
                damaged.unlink(missing_ok=True)
            write_new(temporary / "object", data)
            os.replace(temporary / "object", self.objects / _object_name(name, data))

    def discard(self, key: str) -> None:
        """Removes the library ``key`` if it exists, even if it is in use.

        The caller must hold the lock of the key. Raises CacheError if the folder of the library has
        files that flashsmith did not put there.
        """
        path = self.libraries / key
        with self.errors("write"):
            kind = kind_of(path)
            if kind == 0 or not is_cache_folder(self.root):
                return
            if kind != stat.S_IFDIR or not is_key(key):
                raise CacheError(f"{path}: is not a library that flashsmith made; move it away")
            foreign = foreign_file(path)
            if foreign is not None:
                raise CacheError(
                    f"{foreign}: flashsmith did not put this into its cache, and so does not "
                    f"replace {path}; move it away"
                )
            self._temporary.trash(path)

    # ---- room ----

    def prune(self, limit_mib: float) -> RemovedLibraries:
        """Evicts the least recently used files, until at most ``limit_mib`` MiB are left.

        Libraries that a process uses or builds are kept.
        """
        with self.errors("write"):
            items = [*filter(is_library, self._folders()), *self._objects()]
            if items:
                make_folder(self._locks)
            sizes = {item: tree_bytes(item) for item in items}
            excess = sum(sizes.values()) - limit_mib * _MIB
            entries = freed = in_use = 0
            for item in sorted(items, key=_last_used):
                if freed >= excess:
                    break
                if not self._evict(item):
                    in_use += 1
                    continue
                freed += sizes[item]
                entries += item.parent == self.libraries
            return RemovedLibraries(entries, freed, in_use)

    def _evict(self, item: Path) -> bool:
        if item.parent == self.objects:
            item.unlink(missing_ok=True)  # A build copies host objects before it uses them
            return True
        lock_file = self._locks / f"{item.name}.lock"
        key_lock = try_lock(lock_file, create=True)
        if key_lock is None:
            return False
        try:
            in_use = try_lock(item / LOCK)
            if in_use is None and kind_of(item / LOCK) == stat.S_IFREG:
                return False
            self.discard(item.name)
            if in_use is not None:
                in_use.release()
            lock_file.unlink(missing_ok=True)
            return True
        finally:
            key_lock.release()

    def clear(self) -> RemovedLibraries:
        """Removes everything that flashsmith put into the cache, except what a process is using:
        libraries, and the temporary folders of running builds."""
        removed = self.prune(0)
        with self.errors("write"):
            if is_cache_folder(self.root):
                self._temporary.sweep()
        return removed

    def errors(self, action: str) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that turns the system's OSErrors in its block into CacheErrors
        with advice."""
        return folder_errors(
            action,
            f"the kernel cache {self.root}",
            env.CACHE_DIR.name,
            readable=f"chmod -R go+rX {shlex.quote(str(self.folder))}",
        )


def _remembered_manifest(path: Path) -> Manifest:
    """Returns the manifest in ``path``. After the first call, its file is parsed again only if it
    has changed.

    Raises OSError or ValueError if the manifest is missing or damaged.
    """
    status = (path / MANIFEST_NAME).lstat()
    return _parsed(path, (status.st_ino, status.st_size, status.st_mtime_ns))


# This size exceeds the number of libraries that a sweep leaves behind. In a smaller LRU cache, a
# pass over all libraries would evict each manifest before the next pass reads it.
@lru_cache(maxsize=4096)
def _parsed(path: Path, status: tuple[int, ...]) -> Manifest:
    return Manifest.read(path)


def _verified_manifest(path: Path, check: Check = any_owner) -> Manifest:
    """Returns the manifest in ``path`` after verifying the size and the checksum of all files that
    it lists.

    ``check`` is called for each file and for each folder that contains one. Raises the same errors
    as _remembered_manifest.
    """
    manifest = Manifest.read(path, check)
    for name, record in manifest.files.items():
        found = FileRecord.of(path, name, check)
        if found.size != record.size:
            raise ValueError(f"{name} has {found.size} bytes, not {record.size}")
        if found != record:
            raise ValueError(f"{name}: its checksum does not match")
    return manifest


def _object_name(name: str, content: bytes) -> str:
    return f"{name}-{hashlib.sha256(content).hexdigest()[:32]}.o"


def _last_used(path: Path) -> float:
    """The time at which a library or a host object was last opened; 0 if its lock file is
    missing."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return (path / LOCK if kind_of(path) == stat.S_IFDIR else path).lstat().st_mtime
    return 0.0
