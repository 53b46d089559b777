"""Packs a library into one byte string, with which it can be sent to a machine with another
cache."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from flashsmith.builder.kernel_cache import Cache
from flashsmith.builder.library import KernelLibrary
from flashsmith.builder.library_lookup import is_current
from flashsmith.builder.manifest import MANIFEST_NAME, FileRecord, Manifest
from flashsmith.builder.safe_files import any_owner, make_folder, read_below, write_new
from flashsmith.errors import CacheError
from flashsmith.system_errors import is_from_system


def pack_library(library: KernelLibrary) -> bytes:
    """Returns a zip archive of a library's manifest and of the files that the manifest lists.

    Raises CacheError if one of the files can no longer be read.
    """
    packed = io.BytesIO()
    try:
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
            for name in (MANIFEST_NAME, *library.manifest.files):
                archive.writestr(name, read_below(library.path, name, check=any_owner))
    except OSError as error:
        if not is_from_system(error):
            raise
        raise CacheError(f"{library.path}: cannot be read ({error.strerror})") from error
    return packed.getvalue()


def unpack_library(cache: Cache, key: str, packed: bytes) -> KernelLibrary:
    """Publishes the packed library ``key`` in ``cache``, unless the cache already has it.

    Raises CacheError if other users can write to the cache, if the files are not exactly the ones
    in the manifest, or if the library was not built from the sources that are installed here.
    """
    try:
        manifest, files = _unpacked(packed)
        if manifest.key != key:
            raise ValueError(f"it is the library {manifest.key}")
        if not is_current(manifest):
            raise ValueError("it was made from other sources, or by another version")
    except (ValueError, KeyError, OSError, zipfile.BadZipFile, NotImplementedError) as error:
        if not is_from_system(error):
            raise
        raise CacheError(f"the library {key}, received from another machine: {error}") from error
    with cache.building(key, waiting=lambda seconds: None):
        found = cache.open(key)
        if found is not None:
            return found
        with cache.temporary_folder() as temporary, cache.errors("write"):
            folder = temporary / "unpacked"
            make_folder(folder)
            for name, data in files.items():
                _write(folder, name, data)
            return cache.publish(folder, manifest)


def _unpacked(packed: bytes) -> tuple[Manifest, dict[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        # Without compression, no file can be longer than the received data.
        if any(one.compress_type != zipfile.ZIP_STORED for one in archive.infolist()):
            raise ValueError("its files are compressed")
        manifest = Manifest.from_json(archive.read(MANIFEST_NAME).decode())
        # The names were checked when the manifest was read, so no name leads out of the folder.
        files = {name: archive.read(name) for name in manifest.files}
    for name, record in manifest.files.items():
        if FileRecord.of_bytes(files[name]) != record:
            raise ValueError(f"{name}: its checksum does not match")
    return manifest, files


def _write(folder: Path, name: str, data: bytes) -> None:
    path = folder / name
    if path.parent != folder:
        make_folder(path.parent)
    write_new(path, data)
