"""What can go wrong around a build ends in a correct library or in a clear error."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import textwrap
from itertools import product

import pytest
import shared_kernels
from check_library import check_stand_in_library
from stand_in_sources import CONFIGS, calls, write_compiler, write_sources

import flashsmith.builder as builder
import flashsmith.builder.library_build as build_module
from flashsmith.builder import find_toolchain, library_spec
from flashsmith.builder.library_build import build_from
from flashsmith.builder.library_lookup import find_library_from
from flashsmith.errors import (
    ArgumentError,
    CacheError,
    CompileError,
    IllegalConfigError,
    ToolchainError,
)
from flashsmith.families import FlashForwardKernelConfig


@pytest.fixture
def build_all(cache_root, cuda_home, tiny_csrc):
    """Build the stand-in library, its host code too."""

    def run(csrc=tiny_csrc, configs=CONFIGS, **options):
        return build_from(csrc, configs, **{"jobs": 1, **options})

    return run


@pytest.fixture
def build(build_all, cache_root, host_code):
    """Build the stand-in library, quickly."""
    shared_kernels.with_host_code(cache_root, host_code)
    return build_all


# ---- a build that goes well ----


def test_a_build_and_its_progress(build_all, cuda_home):
    events = []
    library = build_all(progress=events.append)
    check_stand_in_library(library)
    assert [(e.stage, e.done, e.total) for e in events] == [
        ("compile", 0, 7),
        ("compile", 1, 7),
        ("compile", 2, 7),
        *(("host", done, 7) for done in (3, 4, 5, 6)),
        ("link", 6, 7),
        ("publish", 7, 7),
        ("done", 7, 7),
    ]
    left = [e.seconds_left for e in events]
    assert left[0] > left[-1] == 0.0
    assert "about " in events[0].message
    assert [e.entry for e in events[1:3]] == list(map(library.entry, sorted(CONFIGS)))
    assert "(FP16, 128, 64, 64, 4): async+load_0_0_0_tiles" in events[1].message


def test_nothing_is_compiled_again(build, cuda_home, tiny_csrc):
    first = build()
    events = []
    again = build(configs=reversed(CONFIGS), progress=events.append)
    assert again.path == first.path
    assert [e.stage for e in events] == ["reuse"]
    assert calls(cuda_home) == ["shard_0"]
    found = find_library_from(tiny_csrc, CONFIGS[:1], arch=80)
    assert found is not None
    assert found.path == first.path


def test_host_code_is_compiled_once_for_all_libraries(build_all, cuda_home, cache):
    events = []
    library = build_all()
    cache.discard(library.manifest.key)
    build_all(progress=events.append)
    assert calls(cuda_home) == ["shard_0", "shard_0"]
    assert [e.stage for e in events].count("host") == 1  # the library's own


def test_a_library_is_found_only_for_its_arch_sources_and_version(
    build, tiny_csrc, tmp_path, monkeypatch
):
    build()
    assert find_library_from(tiny_csrc, CONFIGS, arch=80) is not None
    assert find_library_from(tiny_csrc, CONFIGS, arch=90) is None
    other = write_sources(tmp_path / "csrc")
    assert find_library_from(other, CONFIGS, arch=80) is not None  # the same text elsewhere
    (other / "common" / "twice.cuh").write_text("// other\n")
    assert find_library_from(other, CONFIGS, arch=80) is None
    monkeypatch.setattr("flashsmith.builder.library_lookup.package_version", lambda: "9")
    assert find_library_from(tiny_csrc, CONFIGS, arch=80) is None


# ---- the cache ----

DAMAGED = ("library.so", "manifest.json", "ptx", "sources")
DAMAGES = ("flip", "truncate", "remove")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("lock", "remove"),
        (DAMAGED[0], "flip"),
        *(pytest.param(*each, marks=pytest.mark.full) for each in product(DAMAGED, DAMAGES)),
    ],
)
def test_a_damaged_library_is_built_again(build, cuda_home, tiny_csrc, name, how):
    path = build().path / name
    if path.is_dir():
        path = sorted(path.iterdir())[0]
    content = bytearray(path.read_bytes())
    if how == "remove":
        path.unlink()
    else:
        content[len(content) // 3] ^= 1
        path.write_bytes(content if how == "flip" else content[: len(content) // 3])
    assert find_library_from(tiny_csrc, CONFIGS, arch=80) is None
    check_stand_in_library(build())
    assert calls(cuda_home).count("shard_0") == 2
    assert builder.verify() == []


def test_a_full_disk(build, cache, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for function in ("fsync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, full)
            with pytest.raises(CacheError, match=r"the disk is full: free some space"):
                build()
        assert cache.entries() == []
        assert list((cache.root / "tmp").glob("*")) == []
    check_stand_in_library(build())


def test_a_disk_that_is_full_for_the_compiler(build, cuda_home, cache):
    right = (cuda_home / "bin" / "nvcc").read_text()
    write_compiler(
        cuda_home / "bin" / "nvcc",
        right.replace(
            'echo "$name"', 'echo "x.cubin: No space left on device" >&2; exit 1; echo "$name"'
        ),
    )
    with pytest.raises(CacheError, match=r"shard_0: the disk is full"):
        build()
    assert list((cache.root / "tmp").glob("*")) == []
    write_compiler(cuda_home / "bin" / "nvcc", right)
    check_stand_in_library(build())


def test_a_read_only_file_system(build, monkeypatch):
    def refuse(*arguments, **keywords):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/read-only")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(CacheError, match=r"cannot write .*read-only.*FLASHSMITH_CACHE_DIR"):
        build()


AS_AN_ORDINARY_USER = """
    import ctypes, os, sys
    from pathlib import Path
    from flashsmith.builder.library_build import build_from
    from flashsmith.builder.library_lookup import find_library_from
    from flashsmith.errors import CacheError
    from stand_in_sources import CONFIGS

    if os.geteuid() == 0:
        # Permissions bind root too once it has no capabilities. (Another user might not be let
        # into the folders where the tests and the compilers are.)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        if ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()):
            raise OSError(ctypes.get_errno(), "capset")
    try:
        print(build_from(Path(sys.argv[1]), CONFIGS, jobs=1).path)
        print(find_library_from(Path(sys.argv[1]), CONFIGS, arch=80).path)
    except CacheError as error:
        print("CacheError:", error)
"""


def as_an_ordinary_user(csrc, **environment):
    """Build as someone whom permissions bind: what it prints."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("FLASH", "XDG_", "HOME"))}
    paths = filter(None, (os.path.dirname(__file__), os.environ.get("PYTHONPATH")))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(AS_AN_ORDINARY_USER), csrc],
        capture_output=True,
        text=True,
        check=False,
        env={**kept, **environment, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_home_one_may_not_write(cuda_home, tiny_csrc, tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    said = as_an_ordinary_user(tiny_csrc, HOME=str(home))
    assert said.startswith(f"CacheError: cannot write the kernel cache {home}/.cache/flashsmith")
    assert "permission denied" in said
    assert "FLASHSMITH_CACHE_DIR" in said


def test_a_home_that_does_not_exist(cuda_home, tiny_csrc, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    said = as_an_ordinary_user(tiny_csrc, HOME=str(tmp_path / "locked" / "home"))
    assert said.startswith("CacheError: cannot write the kernel cache")


def test_no_home_at_all(monkeypatch):
    monkeypatch.delenv("FLASHSMITH_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for an unknown user
    with pytest.raises(CacheError, match=r"no home folder.*HOME is unset"):
        builder.cache_dir()


def test_a_cache_one_may_only_read_serves_what_is_in_it(build, cache_root, cuda_home, tiny_csrc):
    library = build()
    for folder in [cache_root, *(path for path in cache_root.rglob("*") if path.is_dir())]:
        folder.chmod(0o555)
    said = as_an_ordinary_user(tiny_csrc, FLASHSMITH_CACHE_DIR=str(cache_root))
    assert said.split() == [str(library.path)] * 2


# ---- the compilers ----


def test_no_compiler(build, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"g\+\+: not found"):
        build()


def test_a_library_in_the_cache_needs_no_compiler(build, monkeypatch, tmp_path, tiny_csrc):
    built = build()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = find_library_from(tiny_csrc, CONFIGS, arch=80)
    assert found is not None
    assert found.path == built.path


def test_sources_that_do_not_compile(cache, tmp_path):
    """With the real nvcc: its own words reach the user."""
    csrc = write_sources(tmp_path / "csrc")
    (csrc / "common" / "twice.cuh").write_text("__device__ float twice(float x) { return y; }\n")
    with pytest.raises(CompileError) as caught:
        build_from(csrc, CONFIGS, jobs=2)
    words = str(caught.value)
    assert words.startswith("shard_")
    assert f'{csrc}/common/twice.cuh(1): error: identifier "y" is undefined' in words
    assert "The command was:" in words
    assert cache.entries() == []
    assert list((cache.root / "tmp").glob("*")) == []


def test_bindings_that_do_not_compile(build, tmp_path):
    csrc = write_sources(tmp_path / "csrc")
    (csrc / "host" / "bindings.cc").write_text("#error no bindings\n")
    with pytest.raises(CompileError, match=r"bindings: .*g\+\+ ended with 1:(.|\n)*no bindings"):
        build(csrc)


def test_a_missing_function_is_a_link_error(build, tmp_path):
    csrc = write_sources(tmp_path / "csrc")
    text = (csrc / "host" / "bindings.cc").read_text()
    (csrc / "host" / "bindings.cc").write_text(
        "int absent();\n" + text.replace("return device_count()", "return absent()")
    )
    with pytest.raises(CompileError, match=r"link: (.|\n)*undefined reference to `absent"):
        build(csrc)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("shard_0.ptx", "", "no kernel for (FP16, 128, 64, 64, 4): async+load_0_0_0_tiles"),
        ("shard_0.log", "nothing of use", "no report on"),
        ("shard_0.cubin", "", "not a 64-bit ELF file"),
    ],
)
def test_a_compiler_whose_output_makes_no_sense(build, cuda_home, name, content, words):
    (cuda_home / "recorded" / name).write_text(content)
    with pytest.raises(CompileError, match=r"output of .*nvcc .* was not understood") as caught:
        build()
    assert words in str(caught.value)


def test_a_compiler_that_dies(build, cuda_home):
    text = (cuda_home / "bin" / "nvcc").read_text()
    write_compiler(
        cuda_home / "bin" / "nvcc", text.replace('sleep "$(cat', 'kill -9 $$; sleep "$(cat')
    )
    with pytest.raises(CompileError, match="killed by signal 9"):
        build()


def test_sources_that_change_while_they_compile(build, cuda_home, tmp_path):
    """The library made of a mixture is dropped; the next attempt is of the new sources."""
    csrc = write_sources(tmp_path / "csrc")
    changes = []

    def edit(event):
        if event.stage == "link" and not changes:
            changes.append(event)
            with open(csrc / "common" / "twice.cuh", "a") as source:
                source.write("// edited\n")

    library = build(csrc, progress=edit)
    check_stand_in_library(library)
    assert library.manifest.source_hash == build_module.source_hash("mma_sync", csrc)
    assert calls(cuda_home).count("shard_0") == 2


def test_sources_that_never_stop_changing(build, tmp_path):
    csrc = write_sources(tmp_path / "csrc")

    def edit(event):
        if event.stage == "link":
            with open(csrc / "common" / "twice.cuh", "a") as source:
                source.write("// edited\n")

    with pytest.raises(CompileError, match="sources changed during compilation"):
        build(csrc, progress=edit)


# ---- what is asked for ----


def test_an_illegal_config_is_refused_before_the_compiler(build, cuda_home, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # were it looked for, a compiler would be missing
    illegal = FlashForwardKernelConfig("fp16", 128, 64, 64, 4, Q_mma_load_K_tiles=3)
    with pytest.raises(IllegalConfigError):
        build(configs=[*CONFIGS, illegal])
    assert calls(cuda_home) == []


def test_unusable_arguments(build):
    with pytest.raises(ArgumentError, match="configs: empty"):
        build(configs=[])
    with pytest.raises(ArgumentError, match="jobs=0"):
        build(jobs=0)
    with pytest.raises(ArgumentError, match="device=7"):
        build(arch=7)
    with pytest.raises(ToolchainError, match="cannot compile for sm_120"):
        build(arch=120)


# ---- afterwards ----


def test_spills_are_reported_and_kept(build, cuda_home, caplog):
    log = cuda_home / "recorded" / "shard_0.log"
    spilling = "8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads"
    log.write_text(
        log.read_text().replace(
            "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", spilling, 1
        )
    )
    events = []
    library = build(progress=events.append)
    (entry,) = library.spilling
    assert (entry.stack_bytes, entry.spill_store_bytes, entry.spill_load_bytes) == (8, 12, 16)
    (warning,) = [event for event in events if event.stage == "warn"]
    assert warning.message.startswith("1 of 2 configs spill registers")
    assert entry.short_form in warning.message
    assert "12 bytes of stores and 16 bytes of loads" in warning.message

    shutil.rmtree(library.path)
    build()
    assert "1 of 2 configs spill registers" in caplog.text


def test_a_build_makes_room(build, cache, monkeypatch):
    from synthetic_library import publish

    publish(cache, "old", size=2**20, used=1000.0)
    monkeypatch.setenv("FLASHSMITH_CACHE_LIMIT", "1")
    library = build()
    assert [entry.key for entry in cache.entries()] == [library.manifest.key]


def test_a_build_that_cannot_make_room_is_still_a_build(build, monkeypatch):
    def fail(*arguments):
        raise CacheError("no")

    monkeypatch.setattr(build_module.Cache, "prune", fail)
    events = []
    check_stand_in_library(build(progress=events.append))
    assert "nothing was evicted: no" in [event.message for event in events]


def test_a_watcher_that_hangs_up_is_not_a_cache_error(build):
    def hang_up(event):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        build(progress=hang_up)


def test_host_code_of_sources_that_change_and_change_back_is_not_kept(
    build_all, cuda_home, tmp_path
):
    """An object made of the text in between would serve later libraries under the old hash."""
    csrc = write_sources(tmp_path / "csrc")
    bindings = csrc / "host" / "bindings.cc"
    text = bindings.read_text()

    def edit(event):
        # Unfinished when the build ends: it has to begin again.
        if event.stage == "compile" and event.done == 0 and not edits:
            edits.append(event)
            bindings.write_text(text.replace("size()", "size() + 1000"))

    edits: list[object] = []
    build_all(csrc, progress=edit)
    bindings.write_text(text)
    check_stand_in_library(build_all(csrc))


def test_a_limit_that_is_no_number_is_refused_before_anything_is_built(
    build, cuda_home, monkeypatch
):
    monkeypatch.setenv("FLASHSMITH_CACHE_LIMIT", "4G")
    with pytest.raises(ArgumentError, match="FLASHSMITH_CACHE_LIMIT"):
        build()
    assert calls(cuda_home) == []


def test_libraries_made_with_other_flags_are_not_found(build, tiny_csrc, monkeypatch):
    build()
    monkeypatch.setattr(library_spec, "_NVCC_FLAGS", ("-O0", "-std=c++20"))
    assert find_library_from(tiny_csrc, CONFIGS, arch=80) is None


def test_another_toolkits_headers_are_not_read(build, cuda_home, monkeypatch, tmp_path):
    """Modules of clusters put them where g++ looks first."""
    (tmp_path / "map").write_text("#error another toolkit's\n")
    for name in ("CPATH", "CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    check_stand_in_library(build())


def test_compiler_versions_are_read_in_the_environment_of_builds(monkeypatch):
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "--no-such-flag")
    assert 80 in find_toolchain().archs


def test_a_toolkit_named_by_a_relative_path(build, cuda_home, monkeypatch):
    monkeypatch.chdir(cuda_home.parent)
    monkeypatch.setenv("CUDA_HOME", cuda_home.name)
    check_stand_in_library(build())
