"""Publishing, finding damage, evicting: on libraries that no compiler made."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stand_in_sources import CONFIGS
from synthetic_library import PTX, key_of, publish

import flashsmith.builder as builder
from flashsmith.builder.kernel_cache import Cache
from flashsmith.builder.locks import try_lock
from flashsmith.builder.manifest import Manifest
from flashsmith.errors import ArgumentError, CacheError, KernelNotBuiltError

OBJECT = f"{key_of('sources')}-bindings"
NAMES = {key_of(name): name for name in ("a", "b", "c", "d", "k", "other")}


def keys(cache: Cache) -> list[str]:
    """The names whose keys are listed."""
    return [NAMES[entry.key] for entry in cache.entries()]


def test_what_is_published_can_be_opened(cache):
    published = publish(cache, "a")
    opened = cache.open(key_of("a"))
    assert opened is not None
    assert opened.path == published.path == cache.root / "libraries" / key_of("a")
    assert opened.manifest == published.manifest
    assert opened.configs == CONFIGS
    assert opened.so_path.stat().st_size == 1000
    assert [opened.ptx(cfg) for cfg in CONFIGS] == [PTX, PTX]
    assert list((cache.root / "tmp").glob("*")) == []


def test_a_missing_library_is_none(cache):
    assert cache.open(key_of("a")) is None
    publish(cache, "b")
    assert cache.open(key_of("a")) is None


def test_a_config_that_is_not_in_the_library_is_named(cache):
    library = publish(cache, "a")
    other = CONFIGS[0].__class__(**{**vars(CONFIGS[0]), "B_c": 32})
    assert other not in library
    with pytest.raises(KernelNotBuiltError, match=r"64, 32, 4\).*not among the 2 configs") as error:
        library.entry(other)
    assert str(error.value).endswith(f"flashsmith build --kernels '{other}' --arch sm_80")


def files_of(cache):
    return ["library.so", *(f"ptx/{cfg.kernel_name()}.ptx" for cfg in CONFIGS), "manifest.json"]


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("damage", ["flip first", "flip middle", "flip last", "truncate", "remove"])
def test_a_damaged_file_is_noticed_and_the_library_replaced(cache, index, damage):
    path = publish(cache, "a").path / files_of(cache)[index]
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(content[: len(content) // 2])
    else:
        at = {"flip first": 0, "flip middle": len(content) // 2, "flip last": -1}[damage]
        content[at] ^= 4
        path.write_bytes(content)

    assert cache.open(key_of("a")) is None
    (entry,) = cache.entries(thorough=True)
    assert entry.damage
    assert entry.manifest is None
    again = publish(cache, "a")
    assert again.ptx(CONFIGS[0]) == PTX
    assert [entry.damage for entry in cache.entries(thorough=True)] == [None]


def test_ptx_that_is_damaged_after_opening_is_an_error(cache):
    library = publish(cache, "a")
    path = library.path / library.entry(CONFIGS[0]).ptx_file
    path.write_text(PTX.replace("PTX", "PTY", 1))
    with pytest.raises(CacheError, match=r"damaged since .*checksum.*will be rebuilt"):
        library.ptx(CONFIGS[0])
    path.unlink()
    with pytest.raises(CacheError, match="damaged since"):
        library.ptx(CONFIGS[0])


def test_a_library_under_another_ones_key_is_refused(cache):
    publish(cache, "a").path.rename(cache.libraries / key_of("b"))
    assert cache.open(key_of("b")) is None
    assert [entry.damage for entry in cache.entries()] == [f"its manifest is that of {key_of('a')}"]


def test_verify_names_the_damaged_entry(cache):
    publish(cache, "a")
    (publish(cache, "b").path / "library.so").write_bytes(b"short")
    assert [(entry.key, entry.damage) for entry in builder.verify()] == [
        (key_of("b"), "library.so has 5 bytes, not 1000")
    ]
    assert len(builder.cache_entries()) == 2


def test_publishing_what_another_process_published_meanwhile_gives_theirs(cache):
    theirs = publish(cache, "a")
    ours = publish(cache, "a", size=50)
    assert ours.so_path.read_bytes() == theirs.so_path.read_bytes()
    assert len(ours.so_path.read_bytes()) == 1000
    assert list((cache.root / "tmp").glob("*")) == []


# ---- room ----


def test_the_libraries_unused_longest_go_first(cache):
    for i, key in enumerate("abcd"):
        publish(cache, key, size=2**20, used=1000.0 + i)
    assert keys(cache) == ["d", "c", "b", "a"]
    assert cache.open(key_of("a")) is not None  # which makes it the last used
    removed = cache.prune(2.5)
    assert (removed.entries, removed.in_use) == (2, 0)
    assert removed.bytes >= 2 * 2**20
    assert keys(cache) == ["a", "d"]


def test_a_library_in_use_is_not_evicted(cache):
    held = publish(cache, "a", used=1000.0)
    publish(cache, "b", used=2000.0)
    removed = cache.prune(0)
    assert (removed.entries, removed.in_use) == (1, 1)
    assert keys(cache) == ["a"]
    assert held.ptx(CONFIGS[0]) == PTX
    del held
    assert cache.prune(0).entries == 1
    assert keys(cache) == []


def test_a_library_in_use_by_another_process_is_not_evicted(cache):
    publish(cache, "a")
    user = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path\n"
            "from flashsmith.builder.kernel_cache import Cache\n"
            "library = Cache(Path(sys.argv[1])).open(sys.argv[2])\n"
            "print(library is not None, flush=True); sys.stdin.read()",
            str(cache.folder),
            key_of("a"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert user.stdout.readline() == "True\n"
        assert cache.clear().in_use == 1
        assert keys(cache) == ["a"]
    finally:
        user.kill()
        user.communicate()
    assert cache.clear().entries == 1


def test_a_library_that_is_being_built_is_not_evicted(cache):
    publish(cache, "a")
    with cache.building(key_of("a"), lambda seconds: None):
        assert cache.prune(0).in_use == 1
    assert keys(cache) == ["a"]


def test_pruning_a_cache_within_its_limit_removes_nothing(cache):
    publish(cache, "a")
    assert cache.prune(1).entries == 0
    assert keys(cache) == ["a"]


def test_a_damaged_library_can_be_evicted(cache):
    (publish(cache, "a").path / "lock").unlink()
    assert cache.open(key_of("a")) is None
    assert cache.clear().entries == 1


def test_host_objects_count_and_go_too(cache, tmp_path):
    publish(cache, "a", used=5000.0)
    built = tmp_path / "built.o"
    built.write_bytes(bytes(2**20))
    cache.publish_object(OBJECT, built)
    os.utime(next(cache.objects.iterdir()), (1000.0, 1000.0))
    assert cache.prune(0.5).bytes == 2**20
    assert list(cache.objects.iterdir()) == []
    assert keys(cache) == ["a"]


def test_a_damaged_host_object_is_not_used_and_is_replaced(cache, tmp_path):
    publish(cache, "a")
    built = tmp_path / "built.o"
    built.write_bytes(b"object code")
    cache.publish_object(OBJECT, built)
    assert cache.object(OBJECT) == b"object code"
    next(cache.objects.iterdir()).write_bytes(b"object c0de")
    assert cache.object(OBJECT) is None
    cache.publish_object(OBJECT, built)
    assert cache.object(OBJECT) == b"object code"
    assert len(list(cache.objects.iterdir())) == 1


def test_an_empty_cache_can_be_listed_pruned_verified_and_cleared(cache_root):
    assert builder.cache_entries() == []
    assert builder.verify() == []
    assert builder.prune().entries == 0
    assert builder.clear().entries == 0
    assert not cache_root.exists()


def test_prune_takes_its_limit_from_the_environment(cache, monkeypatch):
    publish(cache, "a", size=3 * 2**20)
    monkeypatch.setenv("FLASHSMITH_CACHE_LIMIT", "4")
    assert builder.prune().entries == 0
    monkeypatch.setenv("FLASHSMITH_CACHE_LIMIT", "1")
    assert builder.prune().entries == 1


@pytest.mark.parametrize("limit", [-1, float("-inf"), float("nan"), "12"])
def test_a_limit_that_is_none_evicts_nothing(cache, limit):
    publish(cache, "a")
    with pytest.raises(ArgumentError, match=r"^limit_mib=.*: give 0 or more"):
        builder.prune(limit)
    assert keys(cache) == ["a"]


def test_what_is_no_library_is_left_alone(cache):
    publish(cache, "a")
    (cache.libraries / "notes.txt").write_text("mine")
    assert keys(cache) == ["a"]
    assert cache.clear().entries == 1
    assert [path.name for path in cache.libraries.iterdir()] == ["notes.txt"]


def test_manifests_are_read_again_when_they_change(cache):
    publish(cache, "a")
    assert [NAMES[manifest.key] for manifest in cache.manifests()] == ["a"]
    path = cache.libraries / key_of("a") / "manifest.json"
    path.write_text(path.read_text().replace("0.1.0", "0.2.0"))
    assert cache.manifests() == []
    publish(cache, "a")
    publish(cache, "b", used=1000.0)
    assert [NAMES[manifest.key] for manifest in cache.manifests()] == ["a", "b"]


def test_the_manifests_of_many_libraries_are_read_once(cache, monkeypatch):
    """A sweep leaves a thousand, and every choice of a kernel looks through all of them."""
    publish(cache, "a")
    for number in range(1000):
        folder = cache.libraries / key_of(f"copy {number}")
        folder.mkdir()
        shutil.copy(cache.libraries / key_of("a") / "manifest.json", folder)
    read: list[Path] = []
    monkeypatch.setattr(Manifest, "read", lambda path, *_: read.append(path) or path.name)
    assert len(cache.manifests()) == 1001
    assert len(set(read)) == len(read) >= 1000  # some were read when they were published
    before = len(read)
    cache.manifests()
    assert len(read) == before


# ---- temporary folders of dead processes ----


def test_a_temporary_folder_swept_before_it_was_locked_gets_a_successor(cache, monkeypatch):
    publish(cache, "a")
    made, really_make = [], Path.mkdir

    def swept_at_once(folder, **options):
        really_make(folder, **options)
        made.append(folder)
        if len(made) == 1:
            folder.rmdir()

    monkeypatch.setattr(Path, "mkdir", swept_at_once)
    with cache.temporary_folder() as temporary:
        assert temporary.is_dir()
        assert made == [made[0], temporary]


def test_a_dead_processs_temporary_folder_is_swept_and_a_living_ones_stays(cache):
    publish(cache, "a")
    tmp = cache.root / "tmp"
    dead, alive, young, old = (f"build-{digit * 16}" for digit in "0123")
    for name in (dead, alive, young, old):
        (tmp / name / "build").mkdir(parents=True)
    (tmp / dead / "lock").touch()
    held = try_lock(tmp / alive / "lock", create=True)
    hours_ago = time.time() - 2 * 3600
    os.utime(tmp / old, (hours_ago, hours_ago))
    with cache.temporary_folder() as temporary:
        assert sorted(p.name for p in tmp.iterdir()) == sorted([alive, young, temporary.name])
    held.release()
    cache.clear()
    assert [p.name for p in tmp.iterdir()] == [young]


def test_a_temporary_folder_is_removed_when_its_build_fails(cache):
    publish(cache, "a")

    def fail():
        with cache.temporary_folder() as temporary:
            (temporary / "build").mkdir()
            raise RuntimeError("the build")

    with pytest.raises(RuntimeError, match="the build"):
        fail()
    assert list((cache.root / "tmp").glob("*")) == []


# ---- errors ----


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission denied"),
        (errno.EIO, "Input/output error"),
    ],
)
@pytest.mark.parametrize("function", ["mkdir", "open", "rename", "fsync"])
def test_an_operating_system_error_becomes_a_clear_one(cache, monkeypatch, number, words, function):
    publish(cache, "other")

    def fail(*arguments, **keywords):
        raise OSError(number, os.strerror(number), "/some/file")

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        with pytest.raises(CacheError) as caught:
            publish(cache, "a")
    assert words in str(caught.value)
    assert "FLASHSMITH_CACHE_DIR" in str(caught.value)
    assert keys(cache) == ["other"]
    assert publish(cache, "a").ptx(CONFIGS[0]) == PTX


def test_a_cache_that_is_a_file_is_a_clear_error(cache_root):
    cache_root.write_text("not a folder")
    with pytest.raises(CacheError, match=r"cannot write the kernel cache .*cache"):
        publish(Cache(cache_root), "a")


def test_the_cache_folder_is_the_users_unless_set(monkeypatch, tmp_path):
    monkeypatch.delenv("FLASHSMITH_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert builder.cache_dir() == tmp_path / "flashsmith"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", "~/kernels")
    assert builder.cache_dir() == tmp_path / "kernels"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", "kernels")
    assert builder.cache_dir() == tmp_path / "kernels"


def test_a_listing_beside_an_eviction(cache, monkeypatch):
    """What vanishes between two looks is left out."""
    library = publish(cache, "k")
    path = library.path
    del library
    walk = os.walk

    def vanish_first(top, *arguments, **options):
        shutil.rmtree(top, ignore_errors=True)
        return walk(top, *arguments, **options)

    monkeypatch.setattr(os, "walk", vanish_first)
    assert [entry.bytes for entry in cache.entries()] == [0]
    assert not path.exists()
    assert cache.entries() == []


def test_a_temporary_folder_that_another_process_removes_too(cache, monkeypatch):
    left = cache.root / "tmp" / f"build-{16 * '0'}"
    (left / "build").mkdir(parents=True)
    (left / "lock").touch()
    iterdir = Path.iterdir

    def vanish_first(folder):
        if folder == left:
            shutil.rmtree(left, ignore_errors=True)
        return iterdir(folder)

    monkeypatch.setattr(Path, "iterdir", vanish_first)
    with cache.temporary_folder() as temporary:
        assert temporary.is_dir()
    assert not left.exists()


def test_a_cache_folder_without_a_user(monkeypatch):
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", "~nobody-of-that-name/x")
    with pytest.raises(CacheError, match="FLASHSMITH_CACHE_DIR='~nobody-of-that-name/x'"):
        builder.cache_dir()
