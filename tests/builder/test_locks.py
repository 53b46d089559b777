"""Locks exclude, are shared, and die with their holder."""

from __future__ import annotations

import subprocess
import sys

from flashsmith.builder.locks import try_lock, wait_for_lock


def test_an_exclusive_lock_excludes_until_it_is_released(tmp_path):
    path = tmp_path / "lock"
    first = try_lock(path, create=True)
    assert first is not None
    assert try_lock(path) is None
    assert try_lock(path, shared=True) is None
    first.release()
    first.release()
    assert try_lock(path) is not None


def test_a_shared_lock_excludes_only_exclusive_ones(tmp_path):
    path = tmp_path / "lock"
    held = [try_lock(path, create=True, shared=True), try_lock(path, shared=True)]
    assert None not in held
    assert try_lock(path) is None
    held.clear()
    assert try_lock(path) is not None


def test_a_lock_moves_with_its_file(tmp_path):
    (tmp_path / "a").mkdir()
    held = try_lock(tmp_path / "a" / "lock", create=True)
    (tmp_path / "a").rename(tmp_path / "b")
    assert try_lock(tmp_path / "b" / "lock") is None
    assert try_lock(tmp_path / "a" / "lock") is None
    held.release()
    assert try_lock(tmp_path / "b" / "lock") is not None


def test_a_file_that_was_replaced_is_not_locked_by_its_old_holder(tmp_path):
    path = tmp_path / "lock"
    old = try_lock(path, create=True)
    path.unlink()
    assert try_lock(path) is None
    assert try_lock(path, create=True) is not None
    old.release()


def test_a_lock_dies_with_its_process(tmp_path):
    path = tmp_path / "lock"
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from flashsmith.builder.locks import try_lock\n"
            "held = try_lock(Path(sys.argv[1]), create=True)\n"
            "print(held is not None, flush=True); sys.stdin.read()",
            str(path),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "True\n"
    assert try_lock(path) is None
    waited = []
    assert wait_for_lock(path, patience=0.15, waiting=waited.append) is None
    assert waited
    holder.kill()
    holder.communicate()
    assert wait_for_lock(path, patience=5, waiting=waited.append) is not None
