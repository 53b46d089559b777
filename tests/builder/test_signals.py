"""What a signal handler raises while a library is built, opened or loaded, such as TimeoutError,
reaches the caller: it is no error of the cache, the disk or the compiler."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stand_in_sources import CONFIGS
from synthetic_library import key_of, publish

from flashsmith import safe_json
from flashsmith.builder import kernel_cache
from flashsmith.builder.library_build import build_from
from flashsmith.builder.locks import try_lock
from flashsmith.builder.packed_library import pack_library
from flashsmith.builder.processes import Command, run_all
from flashsmith.builder.toolchain import find_toolchain
from flashsmith.chooser.winners import storage
from flashsmith.runtime import libraries
from flashsmith.system_errors import is_from_system


class Expired(OSError):
    """As another package may define it."""


def _wake(number: int, frame: Any) -> None:
    raise TimeoutError("the call took too long")


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    former = signal.signal(signal.SIGUSR1, _wake)
    yield
    signal.signal(signal.SIGUSR1, former)


def interrupted(*_: Any, **__: Any) -> Any:
    """In place of any function: a signal comes while it runs."""
    signal.raise_signal(signal.SIGUSR1)


passes = pytest.raises(TimeoutError, match="the call took too long")


def test_exceptions_of_programs_are_told_from_those_of_the_system(tmp_path: Path) -> None:
    for foreign in (
        TimeoutError("too long"),
        ConnectionResetError("peer"),
        Expired("by now"),
        TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)),
    ):
        assert not is_from_system(foreign)
    of_a_file = OSError(errno.ETIMEDOUT, "Connection timed out", "/on/a/network")
    assert isinstance(of_a_file, TimeoutError)
    for own in (PermissionError(errno.EACCES, "no"), of_a_file, shutil.Error([]), ValueError()):
        assert is_from_system(own)
    library = tmp_path / "library.so"
    library.write_bytes(b"no library")
    with pytest.raises(OSError, match=r"library\.so") as caught:
        ctypes.CDLL(str(library))
    assert is_from_system(caught.value)


def test_a_signal_while_a_library_is_built(
    cache_root: Path, cuda_home: Path, tiny_csrc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every event of the build, and while compilers are waited for: nothing is left behind."""
    for moment in range(4):
        seen = []

        def progress(event: Any, seen: list[Any] = seen, moment: int = moment) -> None:
            seen.append(event)
            if len(seen) > moment:
                interrupted()

        with passes:
            build_from(tiny_csrc, CONFIGS, jobs=1, progress=progress)
        assert len(seen) == moment + 1
    with monkeypatch.context() as patched, passes:
        patched.setattr("flashsmith.builder.processes.time.sleep", interrupted)
        build_from(tiny_csrc, CONFIGS, jobs=1)
    assert len(build_from(tiny_csrc, CONFIGS, jobs=1)) == len(CONFIGS)


def test_a_signal_while_another_process_builds(cache: Any, tiny_csrc: Path) -> None:
    key = key_of("one")
    with cache.building(key, interrupted):
        pass  # nothing to wait for
    held = try_lock(cache.root / "locks" / f"{key}.lock", create=True)
    assert held is not None
    with passes, cache.building(key, interrupted):
        pass
    held.release()


@pytest.mark.parametrize("function", ["subprocess.Popen", "os.memfd_create"])
def test_a_signal_while_a_compiler_is_started(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function, interrupted)
    with passes:
        run_all([Command("x", ("/bin/true",))], cwd=tmp_path, jobs=1, finished=print)


def test_a_signal_while_the_compiler_is_looked_for(
    cuda_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.run", interrupted)
    with passes:
        find_toolchain()


def test_a_signal_while_a_library_is_opened_is_no_missing_library(
    cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be built again, and the caller would wait on."""
    library = publish(cache, "one")
    key = library.manifest.key
    for function in ("Manifest.read", "try_lock", "is_cache_folder"):
        with monkeypatch.context() as patched:
            patched.setattr(f"flashsmith.builder.kernel_cache.{function}", interrupted)
            with passes:
                cache.open(key)
    kernel_cache._parsed.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(kernel_cache.Manifest, "read", interrupted)
        for listed in (cache.manifests, cache.entries, lambda: cache.entries(thorough=True)):
            with passes:
                listed()
    monkeypatch.setattr(Path, "read_bytes", interrupted)
    with passes:
        library.ptx(CONFIGS[0])
    monkeypatch.setattr("flashsmith.builder.packed_library.read_below", interrupted)
    with passes:
        pack_library(library)


def test_a_signal_while_a_library_is_loaded_is_no_damaged_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged one is removed and built again."""
    monkeypatch.setattr(libraries, "checked_path", interrupted)
    with passes:
        libraries._load_functions(tmp_path / "library.so")


def test_a_signal_while_a_table_of_winners_is_read_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table.json"
    table.write_text("{}")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", interrupted)
        with passes:
            storage.write_json(table, {})
    monkeypatch.setattr(os, "open", interrupted)
    with passes:
        safe_json.read_json(table)
