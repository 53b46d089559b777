"""Which compilers are found, and what is said when one is missing, old or broken."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys

import pytest
from stand_in_sources import write_compiler

import flashsmith.builder.toolchain as module
from flashsmith.builder import find_toolchain
from flashsmith.errors import PlatformError, ToolchainError

VERSION = '#!/bin/sh\necho "Cuda compilation tools, release %s, V%s.88"\n'


def test_the_compiler_from_pip(toolchain):
    assert toolchain.nvcc.name == "nvcc"
    assert toolchain.nvcc_version.startswith("13.0.")
    assert toolchain.gxx_version[0].isdigit()
    assert {80, 86, 89, 90, 100, 120} <= toolchain.archs
    assert (toolchain.cuda_lib_dir / "libcudart_static.a").is_file()
    assert (toolchain.include_dirs[1] / "tvm" / "ffi" / "tvm_ffi.h").is_file()


def test_finding_it_does_not_import_what_it_looks_for(toolchain):
    """tvm_ffi imports PyTorch where there is one: more than a second for every no-op build."""
    code = (
        "import sys; from flashsmith.builder import find_toolchain; find_toolchain()\n"
        "print([name for name in ('tvm_ffi', 'torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_cuda_home_comes_first(cuda_home):
    found = find_toolchain()
    assert found.nvcc == cuda_home / "bin" / "nvcc"
    assert found.archs == {80, 90}
    assert found.cuda_lib_dir == cuda_home / "lib"


def test_a_toolkit_on_path_is_the_last_resort(cuda_home, monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(module, "_pip_nvcc", lambda: None)
    links = tmp_path / "links"
    links.mkdir()
    (links / "nvcc").symlink_to(cuda_home / "bin" / "nvcc")
    (links / "g++").symlink_to(shutil.which("g++"))
    monkeypatch.setenv("PATH", f"{links}:/usr/bin:/bin")
    assert find_toolchain().nvcc == cuda_home / "bin" / "nvcc"


def refused(pattern):
    return pytest.raises(ToolchainError, match=pattern)


def test_no_nvcc(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(module, "_pip_nvcc", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused(r"nvcc: not found.*the extra 'compiler'.*pip install '\.\[compiler\]'"):
        find_toolchain()


def test_no_gxx(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused(r"g\+\+: not found.*apt-get install g\+\+"):
        find_toolchain()


def test_a_wrong_cuda_home(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with refused(r"CUDA_HOME='.*no bin/nvcc.*unset it"):
        find_toolchain()


@pytest.mark.parametrize(
    ("script", "pattern"),
    [
        (VERSION % ("11.8", "11.8"), r"release 11\.8 is too old.*needs 12\.0"),
        ("#!/bin/sh\necho something else\n", "its --version is not nvcc's: 'something else"),
        ("#!/bin/sh\necho 'cannot load' >&2; exit 3\n", "--version ended with 3: cannot load"),
        ("\x7fELF nonsense", "does not run"),
    ],
    ids=["old", "another program", "broken", "not executable"],
)
def test_an_unusable_nvcc(cuda_home, script, pattern):
    write_compiler(cuda_home / "bin" / "nvcc", script)
    with refused(pattern):
        find_toolchain()


@pytest.mark.parametrize(
    ("script", "pattern"),
    [
        ("#!/bin/sh\necho 9.4.0\n", r"version 9\.4\.0 is too old"),
        ("#!/bin/sh\necho clang\n", r"its version is not g\+\+'s: 'clang'"),
        ("#!/bin/sh\nexit 1\n", "ended with 1"),
    ],
    ids=["old", "another program", "broken"],
)
def test_an_unusable_gxx(monkeypatch, tmp_path, script, pattern):
    write_compiler(tmp_path / "g++", script)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with refused(pattern):
        find_toolchain()


@pytest.mark.parametrize(
    ("part", "pattern"),
    [("include", r"cuda_runtime\.h: not in"), ("lib", r"libcudart_static\.a: not in")],
)
def test_an_incomplete_toolkit(cuda_home, part, pattern):
    (cuda_home / part).unlink()
    with refused(pattern):
        find_toolchain()


def test_an_arch_the_compiler_does_not_know(toolchain):
    toolchain.check_arch(80)
    with refused(r"cannot compile for sm_70; it supports .*sm_80"):
        toolchain.check_arch(70)


@pytest.mark.parametrize(
    ("system", "machine"), [("win32", "AMD64"), ("darwin", "arm64"), ("linux", "riscv64")]
)
def test_another_platform_is_refused(monkeypatch, system, machine):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(PlatformError, match="Linux x86-64 and aarch64 only"):
        find_toolchain()
