"""The cache is a folder of its own: what flashsmith did not make in or around it stays."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import stat
import time
from pathlib import Path

import pytest
from stand_in_sources import CONFIGS, calls
from synthetic_library import key_of, publish

from flashsmith.builder.cache_folder import MARKER
from flashsmith.builder.kernel_cache import Cache
from flashsmith.builder.library_build import build_from
from flashsmith.errors import CacheError

HOURS_AGO = time.time() - 5 * 3600


def contents(folder: Path) -> dict[str, object]:
    """Everything below a folder: bytes of files, targets of links."""
    found: dict[str, object] = {}
    for top, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(top, name)
            if path.is_symlink():
                found[str(path)] = os.readlink(path)
            elif path.is_dir():
                found[str(path)] = None
            elif stat.S_ISREG(path.lstat().st_mode):
                found[str(path)] = path.read_bytes()
            else:
                found[str(path)] = stat.S_IFMT(path.lstat().st_mode)
    return found


def survived(before: dict[str, object], folder: Path) -> bool:
    return before.items() <= contents(folder).items()


def grow_old(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (HOURS_AGO, HOURS_AGO), follow_symlinks=False)


def foreign_name(draw: random.Random) -> str:
    """A name of another program's, often like one of flashsmith's."""
    digits = "".join(draw.choices("0123456789abcdef", k=32))
    names = (
        *(
            "photos",
            "tmpk3j2h1g0",
            "lock",
            "manifest.json",
            "library.so",
            "-rf",
            "a b",
            "ü",
            "x\ny",
        ),
        *(digits, digits.upper(), digits[:31], f"{digits}.lock", f"{digits}-x-{digits}.o", "x.o"),
        *("build", f"build-{digits[:16]}x", f"build-{digits[:15]}", f"tmp-{digits}"),
    )
    return draw.choice(names)


def plant(draw: random.Random, folder: Path, elsewhere: Path, depth: int = 0) -> None:
    """Put something foreign into ``folder``: a file, a link out, a fifo or a folder of such."""
    path = folder / foreign_name(draw)
    if os.path.lexists(path):
        return
    kind = draw.choice(("file", "file", "link", "fifo", "folder", "folder"))
    if folder.name == "objects" and path.name.count("-") == 2 and path.name.endswith(".o"):
        kind = "link"  # a regular file of that name is ours
    if kind == "file":
        path.write_bytes(draw.randbytes(draw.randrange(100)))
    elif kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
        (path / "diary.txt").write_text("mine")
        for _ in range(draw.randrange(3) if depth < 2 else 0):
            plant(draw, path, elsewhere, depth + 1)


def check_foreign_files_survive(seed: int, folder: Path) -> None:
    draw = random.Random(seed)
    elsewhere = folder / "elsewhere"
    (elsewhere / "deep").mkdir(parents=True)
    (elsewhere / "deep" / "thesis.tex").write_text("years of work")
    (elsewhere / "lock").touch()
    chosen = folder / "chosen"
    cache = Cache(chosen)
    places = [chosen, *(chosen / name for name in ("libraries", "objects", "tmp", "locks"))]
    if draw.random() < 0.8:
        ours = publish(cache, "before", used=HOURS_AGO).path
        places += [cache.root, *(path for path in cache.root.iterdir() if path.is_dir()), ours]
    of_ours = contents(folder)
    for _ in range(draw.randrange(1, 20)):
        place = draw.choice(places)
        place.mkdir(parents=True, exist_ok=True)
        plant(draw, place, elsewhere)
    planted = dict(contents(folder).items() - of_ours.items())
    if cache.root.exists():
        grow_old(cache.root / "tmp")
    for step in (
        lambda: publish(cache, "new", used=HOURS_AGO),
        lambda: cache.prune(0),
        cache.clear,
        lambda: publish(cache, "before"),
    ):
        # An obstacle is an error, and only that.
        with contextlib.suppress(CacheError):
            step()
        assert survived(planted, folder)


@pytest.mark.parametrize("seed", range(12))
def test_foreign_files_survive(seed, tmp_path):
    check_foreign_files_survive(seed, tmp_path)


@pytest.mark.full
def test_foreign_files_survive_in_any_layout(tmp_path):
    for seed in range(1000, 1200):
        check_foreign_files_survive(seed, tmp_path / str(seed))
        shutil.rmtree(tmp_path / str(seed))


def test_a_folder_that_exists_for_something_else(cache_root, cuda_home, tiny_csrc):
    """The data loss itself: a build, an eviction and a clear where others keep their files."""
    for path in ("tmp/scratch/run1", "libraries/books", "objects", "locks"):
        (cache_root / path).mkdir(parents=True)
    (cache_root / "tmp/scratch/run1/result.csv").write_text("1,2,3")
    (cache_root / "libraries/books/thesis.pdf").write_bytes(bytes(3 * 2**20))
    (cache_root / "objects/mine.o").write_bytes(b"object")
    grow_old(cache_root)
    before = contents(cache_root)
    library = build_from(tiny_csrc, CONFIGS, jobs=1)
    assert library.path.parents[2] == cache_root
    del library
    assert Cache(cache_root).prune(0).entries == 1
    Cache(cache_root).clear()
    assert survived(before, cache_root)
    cache = Cache(cache_root)
    ours = {cache.root, *(cache.root / n for n in ("libraries", "objects", "locks", "tmp", MARKER))}
    assert {Path(path) for path in contents(cache_root).keys() - before.keys()} == ours


@pytest.mark.parametrize("name", ["", "tmp", "libraries", "objects", "locks"])
def test_a_folder_of_ours_that_is_a_link_is_never_followed(cache, name, tmp_path):
    held = publish(cache, "a")
    built = tmp_path / "built.o"
    built.write_bytes(b"object")
    cache.publish_object(f"{key_of('sources')}-bindings", built)
    del held
    aside = tmp_path / "aside"
    (cache.root / name).rename(aside)
    (aside / f"build-{'0' * 16}").mkdir()
    (aside / f"build-{'0' * 16}" / "lock").touch()
    (cache.root / name).symlink_to(aside)
    before = contents(tmp_path)
    for step in (
        *(cache.clear, cache.entries, cache.manifests, lambda: cache.prune(0)),
        *(lambda: cache.open(key_of("a")), lambda: publish(cache, "b")),
    ):
        with pytest.raises(
            CacheError, match=r"symbolic link: flashsmith does not touch it\. Move it"
        ):
            step()
    assert contents(tmp_path) == before


def test_a_temporary_folder_that_is_a_link_is_not_swept(cache, tmp_path):
    publish(cache, "a")
    (tmp_path / "aside" / "deep").mkdir(parents=True)
    (tmp_path / "aside" / "lock").touch()
    (cache.root / "tmp" / f"build-{'0' * 16}").symlink_to(tmp_path / "aside")
    before = contents(tmp_path / "aside")
    cache.clear()
    assert contents(tmp_path / "aside") == before


def test_a_library_that_holds_a_foreign_file_is_neither_evicted_nor_replaced(cache):
    path = publish(cache, "a").path
    (path / "notes.txt").write_text("mine")
    before = contents(path)
    assert cache.clear().entries == 0
    assert contents(path) == before
    assert cache.open(key_of("a")) is not None
    (path / "library.so").write_bytes(b"damaged")
    before = contents(path)
    with pytest.raises(CacheError, match=r"notes\.txt: flashsmith did not put this into its cache"):
        publish(cache, "a")
    assert contents(path) == before
    (path / "notes.txt").unlink()
    assert publish(cache, "a").so_path.stat().st_size == 1000


# ---- the marker ----


def test_the_marker_is_what_backups_know(cache):
    publish(cache, "a")
    text = (cache.root / MARKER).read_text()
    assert text.startswith("Signature: 8a477f597d28d172789f06886806bc55\n")
    assert "flashsmith" in text


@pytest.mark.parametrize("marker", [None, "", "Signature: other\n", "link", "fifo", "folder"])
def test_a_folder_of_that_name_without_our_marker_is_left_alone(cache, marker, tmp_path):
    cache.root.mkdir(parents=True)
    (cache.root / "file.txt").write_text("mine")
    path = cache.root / MARKER
    if marker == "link":
        (tmp_path / "target").write_text("")
        path.symlink_to(tmp_path / "target")
    elif marker == "fifo":
        os.mkfifo(path)
    elif marker == "folder":
        path.mkdir()
    elif marker is not None:
        path.write_text(marker)
    before = contents(tmp_path)
    for step in (cache.clear, cache.entries, lambda: cache.prune(0), lambda: publish(cache, "a")):
        with pytest.raises(
            CacheError, match=rf"lacks the marker .*{MARKER}: flashsmith does not touch it"
        ):
            step()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("written", [None, 0, 1, 60])
def test_a_folder_whose_maker_was_killed_is_finished(cache, written):
    cache.root.mkdir(parents=True)
    publish(Cache(cache.folder / "other"), "a")
    text = (cache.folder / "other" / cache.root.name / MARKER).read_bytes()
    if written is not None:
        (cache.root / MARKER).write_bytes(text[:written])
    assert cache.entries() == []
    publish(cache, "a")
    assert (cache.root / MARKER).read_bytes() == text
    assert [entry.key for entry in cache.entries()] == [key_of("a")]


# ---- what lies beside the cache ----


def test_libraries_beside_the_cache_are_neither_read_nor_removed(cache, cache_root, tmp_path):
    older = publish(Cache(tmp_path / "was"), "a", size=3 * 2**20).path.parents[1]
    for name in ("libraries", "objects", "tmp", "locks"):
        shutil.copytree(older / name, cache_root / name)
    (cache_root / "libraries" / "books").mkdir()
    (cache_root / "libraries" / "books" / "thesis.pdf").write_bytes(bytes(2**20))
    (cache_root / "libraries" / key_of("link")).symlink_to(older / "libraries" / key_of("a"))
    (cache_root / "objects" / "mine.o").write_bytes(bytes(2**20))
    before = contents(cache_root)
    assert cache.entries() == []
    assert cache.manifests() == []
    assert cache.open(key_of("a")) is None
    cache.clear()
    publish(cache, "b")
    cache.clear()
    assert survived(before, cache_root)


def test_host_code_of_others_is_not_linked(cache_root, cuda_home, tiny_csrc, cache):
    """An object file of our name that is a link is no object file of ours."""
    library = build_from(tiny_csrc, CONFIGS, jobs=1)
    for path in list(cache.objects.iterdir()):
        path.rename(cache_root / path.name)
        path.symlink_to(cache_root / path.name)
    cache.discard(library.manifest.key)
    build_from(tiny_csrc, CONFIGS, jobs=1)
    assert calls(cuda_home) == ["shard_0"] * 2
