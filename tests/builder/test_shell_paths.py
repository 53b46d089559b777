"""Compilers and the shell they start never see a path that is more than a name to it."""

from __future__ import annotations

import os
import random
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from check_library import check_stand_in_library
from stand_in_sources import CONFIGS, copy_home, write_sources

import flashsmith.builder.scratch as scratch_module
from flashsmith.builder import find_toolchain
from flashsmith.builder.library_build import build_from
from flashsmith.builder.scratch import require_plain, scratch_folder
from flashsmith.errors import CacheError, ToolchainError

EXECUTING = "$(touch canary)`touch canary`;touch canary"
HOSTILE = [
    *("$HOME", "`id`", 'say "x"', "it's", "a,b", "back\\slash", "line\nbreak", "tab\t"),
    *(EXECUTING, "-o", "a b", "*?[x]", "{a}", "#!", "~", "&|<>()", "über", "%s", "="),
]
REFUSED = re.compile(r"""[$`"'\\,\n\t]""")


def hostile_name(draw: random.Random) -> str:
    """A folder's name out of pieces that mean something to shells and compilers."""
    return "".join(draw.choices([*HOSTILE, "x", " ", "..x"], k=draw.randrange(1, 5)))[:200]


@pytest.fixture
def temporary(monkeypatch):
    """Sets TMPDIR for this process, too."""

    def use(folder: Path) -> Path:
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setattr(tempfile, "tempdir", None)
        return folder

    return use


def canaries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*canary") if path.name == "canary"]


def build_in(folder: Path, csrc: Path, monkeypatch, **options) -> None:
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(folder))
    library = build_from(csrc, CONFIGS, jobs=1, **options)
    assert library.path.parents[2] == folder
    check_stand_in_library(library)


@pytest.mark.parametrize("name", [EXECUTING, 'it\'s "quoted", with commas\nand lines'])
def test_a_cache_anywhere(name, cuda_home, tiny_csrc, tmp_path, monkeypatch, temporary):
    """The cache, and the folder for temporary files."""
    monkeypatch.chdir(tmp_path)
    hostile = tmp_path / name
    (hostile / "tmp").mkdir(parents=True)
    temporary(hostile / "tmp")
    build_in(hostile / "cache", tiny_csrc, monkeypatch)
    assert not canaries(tmp_path)
    assert list((hostile / "tmp").iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize("seed", range(30))
def test_a_cache_anywhere_with_the_real_compiler(seed, tiny_csrc, tmp_path, monkeypatch, temporary):
    draw = random.Random(seed)
    monkeypatch.chdir(tmp_path)
    hostile = tmp_path / "x" / hostile_name(draw) / hostile_name(draw)
    (hostile / "tmp").mkdir(parents=True)
    temporary(hostile / "tmp")
    build_in(hostile / "cache", tiny_csrc, monkeypatch)
    assert not canaries(tmp_path)


@pytest.mark.parametrize("seed", range(3))
def test_sources_and_toolkits_anywhere(
    seed, recorded_home, tiny_csrc, tmp_path, monkeypatch, cache_root
):
    check_sources_and_toolkits(random.Random(seed), recorded_home, tiny_csrc, tmp_path, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 160))
def test_sources_and_toolkits_in_many_places(
    seed, recorded_home, tiny_csrc, tmp_path, monkeypatch, cache_root
):
    check_sources_and_toolkits(random.Random(seed), recorded_home, tiny_csrc, tmp_path, monkeypatch)


def check_sources_and_toolkits(draw, recorded_home, tiny_csrc, tmp_path, monkeypatch) -> None:
    """They are built from, or refused in one line, by what is in their names."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "x" / hostile_name(draw)
    folder.mkdir(parents=True)
    csrc, home = tiny_csrc, copy_home(recorded_home, tmp_path / "cuda")
    if draw.random() < 0.5:
        csrc = write_sources(folder / "csrc")
    else:
        home = copy_home(recorded_home, folder / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(home))
    if REFUSED.search(str(folder)):
        with pytest.raises(ToolchainError) as caught:
            build_from(csrc, CONFIGS, jobs=1)
        said = str(caught.value)
        assert re.match(r"(csrc|nvcc): .* cannot be given to the compilers: the shell", said)
        assert "\n" not in said
    else:
        check_stand_in_library(build_from(csrc, CONFIGS, jobs=1))
    assert not canaries(tmp_path)


@pytest.mark.parametrize("character", "$`\"'\\,\n\x07")
def test_a_character_that_is_refused(character):
    with pytest.raises(ToolchainError, match=r"^nvcc: .* cannot be given .*would interpret ['\"]"):
        require_plain("nvcc", Path(f"/a{character}b/nvcc"))


@pytest.mark.parametrize("name", [" ", "ü", "字", "(x)", "~x", "#x", "x=y", "a+b", "x:y", "@", "!"])
def test_a_character_that_the_compilers_take(name):
    require_plain("nvcc", Path(f"/opt/{name}/bin/nvcc"))


@pytest.mark.parametrize("what", ["csrc", "toolkit", "cache"])
def test_a_name_that_is_not_utf_8(what, cuda_home, tiny_csrc, tmp_path, monkeypatch):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    folder.mkdir()
    csrc = tiny_csrc
    if what == "csrc":
        csrc = write_sources(folder / "csrc")
    elif what == "toolkit":
        monkeypatch.setenv("CUDA_HOME", str(copy_home(cuda_home, folder / "cuda")))
    else:
        monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(folder))
    with pytest.raises((ToolchainError, CacheError), match="is not UTF-8") as caught:
        build_from(csrc, CONFIGS, jobs=1)
    str(caught.value).encode()  # it can be printed


def test_a_compiler_on_a_path_that_the_shell_would_interpret(cuda_home, tmp_path, monkeypatch):
    folder = tmp_path / "$HOME"
    folder.mkdir()
    (folder / "g++").symlink_to(shutil.which("g++"))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    with pytest.raises(ToolchainError, match=r"^g\+\+: .*the shell .* would interpret '\$'"):
        find_toolchain()


# ---- where compilers run ----


def test_compilers_run_in_the_folder_for_temporary_files(tmp_path, temporary):
    temporary(tmp_path)
    with scratch_folder() as scratch:
        assert scratch.parent == tmp_path.resolve()
        assert scratch.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("why", ["name", "mode", "link to such a name"])
def test_another_folder_where_that_will_not_do(tmp_path, temporary, monkeypatch, why):
    folder, other = tmp_path / "wanted", tmp_path / "other"
    other.mkdir(mode=0o700)
    monkeypatch.setattr(scratch_module, "_ELSEWHERE", (str(other),))
    if why == "name":
        folder = tmp_path / "a b"
        folder.mkdir()
    elif why == "mode":  # others could put something else in the place of what is in it
        folder.mkdir()
        folder.chmod(0o777)
    elif why == "link to such a name":
        (tmp_path / "$x").mkdir()
        folder.symlink_to(tmp_path / "$x")
    temporary(folder)
    with scratch_folder() as scratch:
        assert scratch.parent == other.resolve()
    other.chmod(0o777)
    with pytest.raises(CacheError, match=r"^TMPDIR: neither '.*' nor .*/other is a folder that"):
        scratch_folder().__enter__()


def test_what_a_dead_process_left_is_swept_and_what_is_not_ours_stays(tmp_path, temporary):
    temporary(tmp_path)
    dead, foreign = tmp_path / f"flashsmith-build-{'0' * 16}", tmp_path / "flashsmith-build-mine"
    for folder in (dead, foreign):
        (folder / "csrc").mkdir(parents=True)
        (folder / "lock").touch()
    (tmp_path / "aside").mkdir()
    link = tmp_path / f"flashsmith-build-{'1' * 16}"
    link.symlink_to(foreign)
    with scratch_folder() as scratch:
        left = {path.name for path in tmp_path.iterdir()}
    assert left == {foreign.name, link.name, "aside", scratch.name}
    assert (foreign / "csrc").is_dir()


# ---- nothing that is made depends on the folder ----


def test_ptx_and_keys_do_not_depend_on_the_folder(tiny_csrc, tmp_path, cache, temporary):
    """The real compiler. Line information has the sources' own names, not those of the copies."""
    made = []
    for name in ("a", "b/deeper"):
        csrc = tmp_path / name / "csrc"
        shutil.copytree(tiny_csrc, csrc)
        temporary(tmp_path / name)
        library = build_from(csrc, CONFIGS, jobs=1)
        made.append((library.path.name, [library.ptx(cfg) for cfg in CONFIGS]))
        content = library.so_path.read_bytes()
        assert f"{csrc}/mma_sync\0".encode() in content  # where tools look for a line's source
        assert b"flashsmith-build-" not in content
        files = re.findall(r'\.file\s+\d+ "(.*)"', library.ptx(CONFIGS[0]))
        assert sorted(files) == ["common/twice.cuh", "mma_sync/forward_kernel.cuh"]
        cache.discard(library.manifest.key)
    assert made[0] == made[1]
