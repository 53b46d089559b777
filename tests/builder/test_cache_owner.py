"""What is loaded from the cache is this user's or root's, and no other user may write it."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from stand_in_sources import CONFIGS
from synthetic_library import PTX, key_of, publish

from flashsmith.builder.kernel_cache import Cache
from flashsmith.builder.trust import checked_path
from flashsmith.errors import CacheError

STRANGER = 54321
OBJECT = f"{key_of('sources')}-bindings"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: gives files to another user")

PARTS = {
    "root": lambda cache: cache.root,
    "libraries": lambda cache: cache.libraries,
    "library": lambda cache: cache.libraries / key_of("a"),
    "manifest": lambda cache: cache.libraries / key_of("a") / "manifest.json",
    "library.so": lambda cache: cache.libraries / key_of("a") / "library.so",
    "ptx folder": lambda cache: cache.libraries / key_of("a") / "ptx",
    "ptx": lambda cache: next((cache.libraries / key_of("a") / "ptx").iterdir()),
}


@pytest.fixture
def filled(cache, tmp_path) -> Cache:
    """A cache with a library and a host object."""
    publish(cache, "a")
    (tmp_path / "built.o").write_bytes(b"object")
    cache.publish_object(OBJECT, tmp_path / "built.o")
    return cache


def check_refused(path: Path, use: Callable[[], object], monkeypatch) -> None:
    """``use`` names the path, its owner, its mode and what to set; that has it pass."""
    status = path.lstat()
    owner = "root (0)" if status.st_uid == 0 else str(status.st_uid)
    if status.st_uid == os.geteuid() != 0:
        owner = f"{pwd.getpwuid(status.st_uid).pw_name} ({status.st_uid})"
    with pytest.raises(CacheError) as caught:
        use()
    said = f"{path}: owner {owner}, mode {stat.S_IMODE(status.st_mode):04o}: "
    assert str(caught.value).startswith(said)
    assert "FLASHSMITH_TRUST_CACHE=1" in str(caught.value)
    with monkeypatch.context() as patch:
        patch.setenv("FLASHSMITH_TRUST_CACHE", "0")
        with pytest.raises(CacheError):
            use()
        patch.setenv("FLASHSMITH_TRUST_CACHE", "1")
        assert use() is not None


@needs_root
@pytest.mark.parametrize("part", PARTS)
def test_a_strangers_part_is_refused(filled, part, monkeypatch):
    path = PARTS[part](filled)
    os.chown(path, STRANGER, -1)
    check_refused(path, lambda: filled.open(key_of("a")), monkeypatch)


@pytest.mark.parametrize("bit", [stat.S_IWGRP, stat.S_IWOTH])
@pytest.mark.parametrize("part", PARTS)
def test_what_others_may_write_is_refused(filled, part, bit, monkeypatch):
    path = PARTS[part](filled)
    path.chmod(path.stat().st_mode | bit)
    check_refused(path, lambda: filled.open(key_of("a")), monkeypatch)


@pytest.mark.parametrize("part", ["root", "objects", "object"])
def test_host_code_that_others_may_write_is_refused(filled, part, monkeypatch):
    path = {
        "root": filled.root,
        "objects": filled.objects,
        "object": next(filled.objects.iterdir()),
    }[part]
    path.chmod(path.stat().st_mode | stat.S_IWOTH)
    check_refused(path, lambda: filled.object(OBJECT), monkeypatch)


def test_nothing_is_built_into_a_cache_that_others_may_write(filled, monkeypatch):
    filled.root.chmod(0o777)
    with pytest.raises(CacheError, match=r"flashsmith-cache-1: owner .*, mode 0777: .*TRUST_CACHE"):
        publish(filled, "b")
    monkeypatch.setenv("FLASHSMITH_TRUST_CACHE", "1")
    assert publish(filled, "b").ptx(CONFIGS[0]) == PTX


@pytest.mark.parametrize("damage", ["checksum", "link", "link to the folder"])
def test_trust_is_about_owner_and_mode_alone(filled, damage, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHSMITH_TRUST_CACHE", "1")
    path = filled.libraries / key_of("a") / ("ptx" if "folder" in damage else "library.so")
    if damage == "checksum":
        content = path.read_bytes()  # random: any byte may stand there already
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        path.rename(tmp_path / "aside")
        path.symlink_to(tmp_path / "aside")
    assert filled.open(key_of("a")) is None


def test_what_others_may_write_is_listed_all_the_same(filled):
    """To look is not to load."""
    filled.root.chmod(0o777)
    assert [entry.damage for entry in filled.entries(thorough=True)] == [None]
    assert filled.clear().entries == 1


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077, 0o277, 0o777])
def test_folders_are_private_whatever_the_umask(tmp_path, umask):
    cache = Cache(tmp_path / "new" / "deep" / "cache")
    former = os.umask(umask)
    try:
        library = publish(cache, "a")
        cache.publish_object(OBJECT, library.so_path)
    finally:
        os.umask(former)
    for path in (tmp_path / "new").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.is_dir():
            assert mode == 0o700, path
        elif path.parent.name != "locks":
            assert mode == 0o644, path
    assert cache.open(key_of("a")) is not None


def test_a_folder_that_is_there_keeps_its_mode(tmp_path):
    chosen = tmp_path / "chosen"
    chosen.mkdir(mode=0o755)
    chosen.chmod(0o1777)
    publish(Cache(chosen), "a")
    assert stat.S_IMODE(chosen.stat().st_mode) == 0o1777


def as_user(uid: int, use: Callable[[], None]) -> None:
    """Runs ``use`` in a child of ours that has become another user."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            use()
            status = 0
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def modes(folder: Path) -> dict[str, tuple[int, float]]:
    return {str(path): (path.stat().st_mode, path.stat().st_ctime) for path in folder.rglob("*")}


@pytest.fixture
def shared(tmp_path_factory):
    """A folder that other users may reach, unlike pytest's own."""
    folder = Path(f"/tmp/flashsmith-test-{os.getpid()}")
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@needs_root
def test_a_read_only_cache_of_roots_serves_another_user(shared):
    cache = Cache(shared / "cache")
    publish(cache, "a")
    for path in (cache.folder, *cache.folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = modes(cache.folder)

    def use() -> None:
        library = cache.open(key_of("a"))
        assert library is not None
        assert library.ptx(CONFIGS[0]) == PTX
        with checked_path(library.so_path) as path:
            assert Path(path).read_bytes() == library.so_path.read_bytes()
        assert [entry.damage for entry in cache.entries(thorough=True)] == [None]
        with pytest.raises(CacheError, match="cannot write the kernel cache"):
            publish(cache, "b")

    as_user(STRANGER, use)
    assert modes(cache.folder) == before


@needs_root
@pytest.mark.parametrize("what", ["cache", "library", "manifest", "kernel"])
def test_a_cache_that_may_not_be_read_names_what_lets_you(shared, what):
    """Folders that root made are root's alone; nothing is said to be damaged or not built."""
    cache = Cache(shared / "cache")
    library = publish(cache, "a")
    for path in (cache.folder, *cache.folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    {
        "cache": cache.root,
        "library": library.path,
        "manifest": library.path / "manifest.json",
        "kernel": library.so_path,
    }[what].chmod(0)

    def use() -> None:
        advice = rf"permission denied; its owner can let .* 'chmod -R go\+rX {cache.folder}'"
        for read in (lambda: cache.open(key_of("a")), lambda: cache.entries(thorough=True)):
            with pytest.raises(CacheError, match=advice):
                read()

    as_user(STRANGER, use)


@needs_root
def test_a_read_only_cache_of_another_user_has_to_be_trusted(shared, monkeypatch):
    cache = Cache(shared / "cache")
    publish(cache, "a")
    for path in (cache.folder, *cache.folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
        os.chown(path, STRANGER + 1, -1)

    def use() -> None:
        with pytest.raises(CacheError, match=rf"owner {STRANGER + 1}, mode 0555: .*TRUST_CACHE=1"):
            cache.open(key_of("a"))
        os.environ["FLASHSMITH_TRUST_CACHE"] = "1"
        assert cache.open(key_of("a")) is not None

    before = modes(cache.folder)
    as_user(STRANGER, use)
    assert modes(cache.folder) == before


@needs_root
def test_a_cache_that_another_user_put_into_a_shared_folder_is_refused(shared):
    """As in /tmp: the first process makes the folder."""
    shared.chmod(0o1777)
    cache = Cache(shared)
    as_user(STRANGER, lambda: cache.root.mkdir() or None)
    with pytest.raises(CacheError, match=rf"flashsmith-cache-1: owner {STRANGER}, mode"):
        publish(cache, "a")


# ---- between the check and the loading ----


def test_the_file_that_was_checked_is_the_one_that_is_loaded(filled, tmp_path):
    """Renaming folders above the cache gains an attacker nothing."""
    path = filled.libraries / key_of("a") / "library.so"
    right = path.read_bytes()
    with checked_path(path) as through:
        assert through.endswith(f"/{key_of('a')}/library.so")
        filled.root.rename(tmp_path / "aside")
        shutil.copytree(tmp_path / "aside", filled.root)
        path.write_bytes(b"planted")
        assert Path(through).read_bytes() == right
    assert path.read_bytes() == b"planted"


@pytest.mark.parametrize("part", ["root", "libraries", "library", "library.so"])
def test_the_check_before_loading(filled, part, monkeypatch, tmp_path):
    path = filled.libraries / key_of("a") / "library.so"
    changed = PARTS[part](filled)
    former = changed.stat().st_mode
    changed.chmod(former | stat.S_IWOTH)

    def use() -> str:
        with checked_path(path) as through:
            return through

    check_refused(changed, use, monkeypatch)
    changed.chmod(former)
    changed.rename(tmp_path / "aside")
    changed.symlink_to(tmp_path / "aside")
    with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
        use()
