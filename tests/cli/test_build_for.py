"""`flashsmith build` for a problem, and for semantics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import command_in_process
import pytest
import shared_kernels
from plain_run import full_after

from flashsmith.families import Semantics

CONFIG = "(FP16, 32, 64, 32, 4): async+swizzled+load_0_2_2_tiles"


def flashsmith(*arguments: str, cache: Path) -> Any:
    return command_in_process.flashsmith(*arguments, FLASHSMITH_CACHE_DIR=str(cache))


# As on a server: the file system of the cache is read-only (for root, whom modes do not stop, too),
# and no compiler can be started, nor anything else.
DEPLOYED = """
import errno, os, sys

cache = os.path.realpath(os.environ["FLASHSMITH_CACHE_DIR"])
writes = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate",
          "os.utime", "os.chmod", "os.chown"}
starts = {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "os.system"}

def refuse(event, arguments):
    # How ctypes looks a library up, which cuda-pathfinder does when it is imported.
    lookup = event == "subprocess.Popen" and arguments[0] == "/sbin/ldconfig"
    if event in starts and not lookup:
        sys.exit(f"a process is started: {event} {arguments}")
    writing = event in writes or (
        event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    )
    if writing:
        place = arguments[0]
        name = f"/proc/self/fd/{place}" if isinstance(place, int) else os.fsdecode(place)
        path = os.path.realpath(name)
        if path == cache or path.startswith(cache + "/"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

sys.addaudithook(refuse)
try:
    open(f"{cache}/probe", "w")
except OSError:
    pass
else:
    sys.exit("the cache can be written")

import numpy as np, flashsmith
"""
# A problem, the semantics of its kernels, and a call of it.
SERVED = {
    "causal": (
        "b1 s70:90 h4:2 d24 fp16 causal",
        Semantics("causal", uneven=True),
        "q = np.zeros((1, 70, 4, 24), np.float16); k = np.zeros((1, 90, 2, 24), np.float16)\n"
        "print(flashsmith.attention(q, k, k, causal=True).shape)",
        (1, 70, 4, 24),
    ),
    "pages": (
        "b2 s1:70 h4:2 d64 fp16 decode page16",
        Semantics(),
        "q = np.zeros((2, 1, 4, 64), np.float16); k = np.zeros((9, 16, 2, 64), np.float16)\n"
        "lens = np.array([60, 3], np.int32); table = np.arange(8, dtype=np.int32).reshape(2, 4)\n"
        "print(flashsmith.attention_with_cache(q, k, k.copy(), cache_lens=lens, page_table=table,"
        " k=q[:, :, :2], v=q[:, :, 2:], causal=False).shape)",
        (2, 1, 4, 64),
    ),
}


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """What is in a folder: size and time of the last change of every file, by its path."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


@pytest.mark.parametrize("name", full_after(1, SERVED))
def test_what_is_built_for_a_problem_serves_read_only_and_without_a_compiler(
    name: str, tmp_path: Path
) -> None:
    cache = shared_kernels.with_host_code(tmp_path / "cache")
    text, semantics, call, shape = SERVED[name]
    done = flashsmith("build", "--for", text, "--arch", "80", "--json", cache=cache)
    assert done.returncode == 0, done.stderr
    (library,) = json.loads(done.stdout)
    assert library["semantics"] == str(semantics)

    for path in (cache, *cache.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = files(cache)
    try:
        used = subprocess.run(
            [sys.executable, "-c", DEPLOYED + call],
            capture_output=True,
            text=True,
            timeout=120,
            env={
                **{name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ},
                "PATH": str(tmp_path / "no-compiler-here"),
                "HOME": str(tmp_path),
                "FLASHSMITH_CACHE_DIR": str(cache),
                "FLASHSMITH_JIT": "0",
            },
        )
    finally:
        for path in (cache, *cache.rglob("*")):
            path.chmod(path.stat().st_mode | 0o200)
    assert used.returncode == 0, used.stderr
    assert used.stdout.strip() == str(shape)
    assert files(cache) == before


def test_several_problems_of_one_kernel_are_one_library(tmp_path: Path) -> None:
    shared_kernels.with_host_code(tmp_path)
    problems = ("b1 s70 h4 d32 fp16", "b2 s80 h4 d32 fp16 uneven", "b1 s70 h4 d32 fp16")
    arguments = [word for text in problems for word in ("--for", text)]
    done = flashsmith("build", *arguments, "--arch", "80", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 config for sm_80, uneven, in") == 1


def test_a_set_is_built_for_semantics(tmp_path: Path) -> None:
    shared_kernels.with_host_code(tmp_path)
    words = "uneven+causal"
    done = flashsmith("build", "-k", CONFIG, "--semantics", words, "--json", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["semantics"] == "causal+uneven"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--for", "b1 s64 h1"), "d, dtype missing"),
        (("--for", "b1 s64 h1 d59 fp16"), "d=59"),
        (("--for", "b1 s64 h1 d64 fp16", "-k", CONFIG), "--for: already selects the kernels"),
        (("--for", "b1 s64 h1 d64 fp16", "--semantics", "causal"), "--for: already selects"),
        (("-k", CONFIG, "--semantics", "backwards"), "semantics='backwards'"),
    ],
)
def test_bad_arguments_build_nothing(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = flashsmith("build", *arguments, cache=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert not list(tmp_path.rglob("*.so"))
