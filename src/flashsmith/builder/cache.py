"""The kernel cache: libraries under the hash of their recipe, published whole or not at all.

    libraries/<key>/   manifest.json, library.so, ptx/, sources/, lock
    objects/           compiled host code shared by libraries; the name ends in the content's hash
    locks/<key>.lock   held by whoever builds, replaces or removes that library
    tmp/               where libraries grow before they are renamed into place

Whatever kills a process leaves at most a folder in tmp/, which the next build removes. A library's
own lock is held shared by its users, so that eviction passes it by.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flashsmith.builder.library import KernelLibrary
from flashsmith.builder.locks import try_lock, wait_for_lock
from flashsmith.builder.manifest import MANIFEST_NAME, FileRecord, Manifest
from flashsmith.builder.workspaces import LOCK, Workspaces, cache_errors, subfolders
from flashsmith.errors import CacheError

_MIB = 2**20
# Longer than any build; after it, building twice is better than hanging.
_BUILD_PATIENCE_SECONDS = 1800.0


@dataclass(frozen=True)
class CacheEntry:
    """One library in the cache; when unusable, ``damage`` says why and ``manifest`` is None."""

    key: str
    path: Path
    bytes: int
    last_used: float  # seconds since the epoch
    manifest: Manifest | None
    damage: str | None


@dataclass(frozen=True)
class Removed:
    """What ``prune`` or ``clear`` took away, and how many libraries stayed because of their use."""

    entries: int
    bytes: int
    in_use: int


class Cache:
    """One cache folder. Methods raise CacheError when it cannot be read or written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.libraries = root / "libraries"
        self.objects = root / "objects"
        self._locks = root / "locks"
        self._workspaces = Workspaces(root / "tmp", root)

    # ---- reading ----

    def open(self, key: str) -> KernelLibrary | None:
        """The library ``key`` with every file verified; None when missing or damaged."""
        path = self.libraries / key
        with self.errors("read"):
            in_use = try_lock(path / LOCK, shared=True)
            if in_use is None:
                return None
            try:
                manifest = _verified_manifest(path)
            except (OSError, ValueError):
                in_use.release()
                return None
            # A cache one may only read has no record of its use.
            with contextlib.suppress(OSError):
                os.utime(path / LOCK)
            return KernelLibrary(path, manifest, in_use)

    def entries(self, *, thorough: bool = False) -> list[CacheEntry]:
        """Every library, most recently used first; ``thorough`` hashes every file."""
        with self.errors("read"):
            found = [self._entry(path, thorough) for path in subfolders(self.libraries)]
            return sorted(found, key=lambda entry: (-entry.last_used, entry.key))

    def manifests(self) -> list[Manifest]:
        """What the readable manifests say, most recently used first; files are not looked at."""
        found = []
        with self.errors("read"):
            for path in sorted(subfolders(self.libraries), key=_last_used, reverse=True):
                with contextlib.suppress(OSError, ValueError):
                    found.append(_remembered_manifest(path))
        return found

    def _entry(self, path: Path, thorough: bool) -> CacheEntry:
        manifest, damage = None, None
        try:
            manifest = _verified_manifest(path) if thorough else _remembered_manifest(path)
        except (OSError, ValueError) as error:
            damage = str(error)
        return CacheEntry(path.name, path, _size(path), _last_used(path), manifest, damage)

    def object(self, name: str) -> bytes | None:
        """The shared object file ``name``, or None when missing or damaged."""
        with self.errors("read"):
            for path in self.objects.glob(f"{name}-*.o"):
                with contextlib.suppress(FileNotFoundError):
                    data = path.read_bytes()
                    if path.name == _object_name(name, data):
                        with contextlib.suppress(OSError):
                            os.utime(path)
                        return data
        return None

    # ---- writing ----

    @contextlib.contextmanager
    def building(self, key: str, waiting: Callable[[float], None]) -> Iterator[None]:
        """Hold the right to build or replace ``key``, waiting for another process that does."""
        with self.errors("write"):
            for folder in (self.libraries, self.objects, self._locks, self._workspaces.folder):
                folder.mkdir(parents=True, exist_ok=True)
            lock = wait_for_lock(
                self._locks / f"{key}.lock", patience=_BUILD_PATIENCE_SECONDS, waiting=waiting
            )
        try:
            yield
        finally:
            if lock is not None:
                lock.release(everywhere=True)

    def workspace(self) -> contextlib.AbstractContextManager[Path]:
        """A new folder in the cache, removed at the end; a dead process's are swept first."""
        return self._workspaces.new()

    def publish(self, folder: Path, manifest: Manifest) -> KernelLibrary:
        """Move ``folder``, complete but for its manifest, to its place; the caller holds the key.

        Should another process have published the same key, its library is used and ours dropped.
        """
        with self.errors("write"):
            (folder / MANIFEST_NAME).write_text(manifest.to_json())
            in_use = try_lock(folder / LOCK, shared=True, create=True)
            _sync_tree(folder)
            target = self.libraries / manifest.key
            while True:
                try:
                    os.rename(folder, target)
                    break
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                theirs = self.open(manifest.key)
                if theirs is not None:
                    return theirs
                self.discard(manifest.key)
            _sync(self.libraries)
        if in_use is None:
            raise CacheError(f"{target}: cannot be locked; is it on a network file system?")
        return KernelLibrary(target, manifest, in_use)

    def publish_object(self, name: str, built: Path) -> None:
        """Keep a compiled host object for later libraries."""
        with self.errors("write"):
            for damaged in self.objects.glob(f"{name}-*.o"):
                damaged.unlink(missing_ok=True)
            copy = built.with_suffix(".published")
            shutil.copyfile(built, copy)
            _sync(copy)
            os.replace(copy, self.objects / _object_name(name, built.read_bytes()))

    def discard(self, key: str) -> None:
        """Remove the library ``key``, used or not, if there; the caller holds the key."""
        with self.errors("write"):
            self._workspaces.bury(self.libraries / key)

    # ---- room ----

    def prune(self, limit_mib: float) -> Removed:
        """Evict what was unused longest until at most ``limit_mib`` MiB are left.

        Libraries that a process has open, or is building, stay.
        """
        with self.errors("write"):
            items = [*subfolders(self.libraries), *self.objects.glob("*.o")]
            if items:
                self._locks.mkdir(exist_ok=True)
            sizes = {item: _size(item) for item in items}
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
            return Removed(entries, freed, in_use)

    def _evict(self, item: Path) -> bool:
        if item.parent == self.objects:
            item.unlink(missing_ok=True)  # builds copy it before they use it
            return True
        lock_file = self._locks / f"{item.name}.lock"
        key_lock = try_lock(lock_file, create=True)
        if key_lock is None:
            return False
        try:
            in_use = try_lock(item / LOCK)
            if in_use is None and (item / LOCK).exists():
                return False
            self.discard(item.name)
            if in_use is not None:
                in_use.release()
            lock_file.unlink(missing_ok=True)
            return True
        finally:
            key_lock.release()

    def clear(self) -> Removed:
        """Remove everything that no process uses."""
        removed = self.prune(0)
        with self.errors("write"):
            self._workspaces.sweep()
        return removed

    def errors(self, action: str) -> contextlib.AbstractContextManager[None]:
        """OSErrors of the block as CacheErrors that say what to do."""
        return cache_errors(action, self.root)


def _read_manifest(path: Path) -> Manifest:
    """The manifest in ``path``; OSError or ValueError when there is none that can be trusted."""
    manifest = Manifest.from_json((path / MANIFEST_NAME).read_text())
    if manifest.key != path.name:
        raise ValueError(f"its manifest is that of {manifest.key}")
    return manifest


def _remembered_manifest(path: Path) -> Manifest:
    """_read_manifest, parsed anew only when the file was replaced or changed."""
    status = (path / MANIFEST_NAME).stat()
    return _parsed(path, (status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=256)
def _parsed(path: Path, status: tuple[int, ...]) -> Manifest:
    return _read_manifest(path)


def _verified_manifest(path: Path) -> Manifest:
    """The manifest after every file it lists was compared with it; raises as _read_manifest."""
    manifest = _read_manifest(path)
    for name, record in manifest.files.items():
        found = FileRecord.of(path / name)
        if found.size != record.size:
            raise ValueError(f"{name} has {found.size} bytes, not {record.size}")
        if found != record:
            raise ValueError(f"{name}: its checksum does not match")
    return manifest


def _object_name(name: str, content: bytes) -> str:
    return f"{name}-{hashlib.sha256(content).hexdigest()[:32]}.o"


def _size(path: Path) -> int:
    """Bytes of a file or of all files below a folder; what vanishes meanwhile counts nothing."""
    files = [path]
    if path.is_dir():
        files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    total = 0
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            total += file.lstat().st_size
    return total


def _last_used(path: Path) -> float:
    """When a library or object was last opened; one without a lock file is nobody's: 0."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return ((path / LOCK) if path.is_dir() else path).stat().st_mtime
    return 0.0


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    """Have the disk hold ``path`` before anything points at it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
