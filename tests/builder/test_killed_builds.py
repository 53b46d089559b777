"""A build that is killed leaves nothing behind that the next build would trip over."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from check_library import check_stand_in_library
from plain_run import full_except
from stand_in_sources import CONFIGS, copy_home

from flashsmith.builder.library_build import build_from
from flashsmith.builder.scratch import scratch_folder

PROGRAM = Path(__file__).parent / "stand_in_build.py"
PARTS = 12
NEVER = 10**9


def run_build(csrc: Path, die_at: int) -> tuple[bool, int]:
    """Run a build that dies at a step: whether it survived, and how many steps it took then."""
    done = subprocess.run(
        [sys.executable, PROGRAM, csrc, "--die-at", str(die_at)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if done.returncode == -signal.SIGKILL:
        return False, 0
    assert done.returncode == 0, done.stderr
    return True, int(done.stdout.split()[0])


@pytest.fixture(scope="module")
def all_steps(tmp_path_factory, recorded_home, tiny_csrc) -> int:
    """The steps of a build that is not killed."""
    folder = tmp_path_factory.mktemp("counting")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHSMITH_CACHE_DIR", str(folder / "cache"))
        patch.setenv("CUDA_HOME", str(copy_home(recorded_home, folder / "cuda")))
        return run_build(tiny_csrc, NEVER)[1]


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> Path:
    """Where compilers run in this test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def check_recovery(cache, csrc) -> None:
    """The next build works, and nothing of the dead one stays."""
    check_stand_in_library(build_from(csrc, CONFIGS, jobs=1))
    assert [entry.damage for entry in cache.entries(thorough=True)] == [None]

    def leftovers() -> list[Path]:
        scratch = Path(tempfile.gettempdir()).glob("flashsmith-build-*")
        return [*scratch, *(cache.root / "tmp").iterdir()]

    deadline = time.monotonic() + 20
    while leftovers() and time.monotonic() < deadline:
        # A compiler that outlived its parent may still write; a folder that its creator did not
        # live to lock is given an hour.
        time.sleep(0.05)
        for folder in leftovers():
            if not (folder / "lock").exists() and not list(folder.iterdir()):
                folder.rmdir()
        cache.clear()
        with scratch_folder():
            pass
    assert leftovers() == []


@pytest.mark.parametrize(
    "part",
    full_except(range(PARTS), PARTS // 2),
)
def test_killed_at_a_step(part, all_steps, cache, cuda_home, tiny_csrc):
    survived, _ = run_build(tiny_csrc, 1 + part * all_steps // PARTS)
    assert not survived
    check_recovery(cache, tiny_csrc)


@pytest.mark.full
@pytest.mark.parametrize("first", range(1, PARTS + 1))
def test_killed_at_every_step(first, cache, cuda_home, tiny_csrc):
    survived, step = False, first
    while not survived:
        survived, _ = run_build(tiny_csrc, step)
        check_recovery(cache, tiny_csrc)
        for entry in cache.entries():
            cache.discard(entry.key)
        for path in cache.objects.iterdir():
            path.unlink()
        step += PARTS
    assert step > 50


@pytest.mark.full
def test_killed_again_and_again(all_steps, cache, cuda_home, tiny_csrc):
    for part in range(1, 6):
        run_build(tiny_csrc, part * all_steps // 6)
    check_recovery(cache, tiny_csrc)
