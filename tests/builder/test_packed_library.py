"""Libraries sent from one machine's cache to another's: what arrives is what the manifest says."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
from synthetic_library import key_of, publish

from flashsmith.builder import packed_library
from flashsmith.builder.kernel_cache import Cache
from flashsmith.builder.packed_library import pack_library, unpack_library
from flashsmith.errors import CacheError
from flashsmith.tuning.gpu_runner import CachedLibraries
from flashsmith.tuning.runner import LibraryGoneError


@pytest.fixture
def there(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "there")


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins are made from no sources; these count as those that are here."""
    monkeypatch.setattr(packed_library, "is_current", lambda manifest: True)


def test_a_library_arrives_whole(cache: Cache, there: Cache, current: None) -> None:
    library = publish(cache, "a")
    packed = pack_library(library)
    arrived = unpack_library(there, key_of("a"), packed)
    assert arrived.path == there.root / "libraries" / key_of("a")
    assert arrived.manifest == library.manifest
    assert arrived.so_path.read_bytes() == library.so_path.read_bytes()
    # The second time it is there.
    assert unpack_library(there, key_of("a"), packed).path == arrived.path
    assert list((there.root / "tmp").glob("*")) == []


def changed(packed: bytes, name: str, data: bytes | None, how: int = zipfile.ZIP_STORED) -> bytes:
    """With a file replaced, or without it."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(packed)) as old, zipfile.ZipFile(made, "w", how) as new:
        for one in old.namelist():
            if one != name:
                new.writestr(one, old.read(one))
            elif data is not None:
                new.writestr(one, data)
    return made.getvalue()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda packed: changed(packed, "library.so", b"another"), "checksum does not match"),
        (lambda packed: changed(packed, "library.so", None), "library.so"),
        (lambda packed: changed(packed, "manifest.json", b"{}"), "checksum does not match"),
        (lambda packed: changed(packed, "manifest.json", None), "manifest.json"),
        (lambda packed: changed(packed, "", b"", zipfile.ZIP_DEFLATED), "are compressed"),
        (lambda packed: packed[: len(packed) // 2], "not a zip file"),
        (lambda packed: b"", "not a zip file"),
    ],
)
def test_what_was_damaged_on_the_way_is_refused(
    cache: Cache, there: Cache, current: None, damage, said: str
) -> None:
    packed = damage(pack_library(publish(cache, "a")))
    with pytest.raises(
        CacheError, match=rf"the library \w+, received from another machine: .*{said}"
    ):
        unpack_library(there, key_of("a"), packed)
    assert there.entries() == []


def test_another_library_or_one_of_other_sources_is_refused(
    cache: Cache, there: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = pack_library(publish(cache, "a"))
    with pytest.raises(CacheError, match=f"it is the library {key_of('a')}"):
        unpack_library(there, key_of("b"), packed)
    with pytest.raises(CacheError, match="made from other sources, or by another version"):
        unpack_library(there, key_of("a"), packed)
    assert there.entries() == []


def test_a_cache_that_others_can_write_takes_none(
    cache: Cache, there: Cache, current: None
) -> None:
    packed = pack_library(publish(cache, "a"))
    publish(there, "b")
    there.libraries.chmod(0o777)
    with pytest.raises(CacheError, match="libraries"):
        unpack_library(there, key_of("a"), packed)


def test_the_users_cache_as_a_sweep_sees_it(
    cache: Cache, there: Cache, current: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(cache, "a")
    libraries = CachedLibraries()
    packed = libraries.pack(key_of("a"))
    with pytest.raises(LibraryGoneError, match="gone from the kernel cache"):
        libraries.pack(key_of("b"))
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(there.folder))
    assert not libraries.has(key_of("a"))
    libraries.unpack(key_of("a"), packed)
    assert libraries.has(key_of("a"))
