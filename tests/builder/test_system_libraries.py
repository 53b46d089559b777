"""What shared objects need of the system, and the libraries that keep these needs old."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from flashsmith.builder.processes import run_all
from flashsmith.builder.system_libraries import (
    SystemNeeds,
    check_floors,
    library_stubs,
    newest_needs,
    older_glibc,
    system_needs,
)
from flashsmith.errors import CompileError
from flashsmith.host import this_cpu

SOURCE = """
#include <dlfcn.h>
#include <pthread.h>
extern "C" void* first(const char* name) { pthread_key_t key; pthread_key_create(&key, nullptr);
                                           return dlsym(dlopen(name, RTLD_NOW), name); }
"""


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    """An object that refers to functions that glibc 2.34 moved."""
    (tmp_path / "a.cc").write_text(SOURCE)
    subprocess.run(["g++", "-fPIC", "-c", "a.cc", "-o", "a.o"], cwd=tmp_path, check=True)
    return tmp_path


def link(folder: Path, *libraries: str) -> bytes:
    command = ["g++", "-shared", "a.o", *libraries, "-Wl,-z,defs", "-o", "a.so"]
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "a.so").read_bytes()


def test_functions_that_moved_get_the_versions_of_older_systems(compiled: Path) -> None:
    gxx = Path(shutil.which("g++") or "")
    (compiled / "system").mkdir()
    made = library_stubs(older_glibc(this_cpu()), gxx, compiled / "system", "system")
    run_all(list(made), cwd=compiled, jobs=1, finished=lambda done: None)
    needs = check_floors(link(compiled, *(str(path) for path in made.values())), "a.so")
    first = {"x86_64": "GLIBC_2.2.5", "aarch64": "GLIBC_2.17"}[this_cpu()]
    assert needs.symbols["dlsym"] == needs.symbols["pthread_key_create"] == first
    assert {"libdl.so.2", "libpthread.so.0"} <= set(needs.libraries)
    # Today's dynamic linker finds all of them.
    subprocess.run(
        ["python3", "-c", "import ctypes; ctypes.CDLL('./a.so', 2)"], cwd=compiled, check=True
    )


def test_a_newer_version_is_refused_by_name() -> None:
    symbols = {"dlsym": "GLIBC_2.34", "open": "GLIBC_2.2.5", "f": "GLIBCXX_3.4.25", "g": "NEW_1"}
    needs = SystemNeeds(("libc.so.6", "libstdc++.so.6"), symbols)
    assert needs.newer_than_floors() == ["dlsym@GLIBC_2.34", "f@GLIBCXX_3.4.25", "g@NEW_1"]
    for library in ("libcuda.so.1", "libtvm_ffi.so"):
        assert SystemNeeds((library,), {}).newer_than_floors() == [library]
    assert SystemNeeds((), {"x": "GLIBC_PRIVATE"}).newer_than_floors() == ["x@GLIBC_PRIVATE"]
    assert needs.newest == {"GLIBC": "2.34", "GLIBCXX": "3.4.25", "NEW": "1"}


def test_needs_are_those_that_readelf_prints(compiled: Path) -> None:
    data = link(compiled)
    needs = system_needs(data)
    printed = subprocess.run(
        ["readelf", "-W", "--dyn-syms", "a.so"],
        cwd=compiled, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    words = [line.split() for line in printed.splitlines() if " UND " in line]
    versioned = dict(line[7].split("@") for line in words if len(line) > 7 and "@" in line[7])
    assert needs.symbols == versioned
    assert "dlsym" in versioned
    assert newest_needs([data]).startswith("GLIBC 2.")


def test_symbols_that_no_library_defines_are_errors_unless_they_are_loaded(tmp_path: Path) -> None:
    text = """
    #include <cstdio>
    extern "C" void TVMFFIx();
    extern "C" void other();
    extern "C" __attribute__((weak)) void may_lack();
    void f() { puts(""); TVMFFIx(); other(); if (may_lack) may_lack(); }
    """
    (tmp_path / "a.cc").write_text(text)
    command = ["g++", "-fPIC", "-shared", "a.cc", "-nostdlib", "-lc", "-o", "a.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    data = (tmp_path / "a.so").read_bytes()
    assert sorted(system_needs(data).unversioned) == ["TVMFFIx", "other"]
    with pytest.raises(CompileError, match=r"^a\.so: undefined: other; define or link them$"):
        check_floors(data, "a.so", ["TVMFFIx"])
    check_floors(data, "a.so", ["TVMFFIx", "other"])


def test_a_library_that_needs_too_new_a_system_is_an_error(
    compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashsmith.builder.system_libraries.FLOORS", {"GLIBC": (2, 1)})
    with pytest.raises(CompileError, match=r"a\.so: needs .*dlsym@GLIBC.*manylinux_2_28"):
        check_floors(link(compiled), "a.so")


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x01\x01", b"\x7fELF\x02\x01" + bytes(60)])
def test_what_is_no_elf_file_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"ELF file|malformed"):
        system_needs(data)
