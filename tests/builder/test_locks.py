"""Locks exclude, are shared, and die with their holder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

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


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_forked_process_keeps_a_lock_unless_it_is_released_everywhere(tmp_path, everywhere):
    path = tmp_path / "lock"
    held = try_lock(path, create=True)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        held.release(everywhere=everywhere)
        assert (try_lock(path) is not None) == everywhere
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert try_lock(path) is not None


def test_a_child_cannot_release_what_its_parent_holds(tmp_path):
    path = tmp_path / "lock"
    held = try_lock(path, create=True)
    child = os.fork()
    if child == 0:
        try:
            held.release(everywhere=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert try_lock(path) is None
    held.release()


def test_an_exclusive_lock_opens_the_file_for_writing_as_nfs_needs(tmp_path, monkeypatch):
    """Of a file opened to be written; one that may only be read is locked all the same."""
    path = tmp_path / "lock"
    path.touch()
    modes, really_open = [], os.open

    def note(path, flags, *rest):
        modes.append(flags & os.O_ACCMODE)
        if refused and modes[-1] != os.O_RDONLY:
            raise PermissionError(path)
        return really_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", note)
    refused = False
    assert try_lock(path) is not None
    refused = True
    assert try_lock(path) is not None
    assert modes == [os.O_RDWR, os.O_RDWR, os.O_RDONLY]


@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "folder"])
def test_what_is_no_file_of_its_own_is_no_lock(tmp_path, kind):
    path, target = tmp_path / "lock", tmp_path / "target"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(target)
        if kind == "link":
            target.write_text("mine")
    before = sorted(tmp_path.iterdir())
    assert try_lock(path) is None
    assert try_lock(path, shared=True) is None
    with pytest.raises(OSError, match=r"symbolic links|regular file|Is a directory"):
        try_lock(path, create=True)
    assert sorted(tmp_path.iterdir()) == before
