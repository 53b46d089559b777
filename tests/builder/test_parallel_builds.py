"""Several processes want the same library at the same time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from check_library import check_stand_in_library
from stand_in_sources import CONFIGS, calls

from flashsmith.builder.library_build import build_from

PROGRAM = Path(__file__).parent / "stand_in_build.py"


def start_build(csrc):
    return subprocess.Popen(
        [sys.executable, PROGRAM, csrc], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_one_builds_and_the_others_wait_for_it(cache, cuda_home, tiny_csrc):
    (cuda_home / "recorded" / "seconds").write_text("0.5")
    processes = [start_build(tiny_csrc) for _ in range(3)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    stages = [[line.split()[0] for line in output.splitlines()[:-1]] for output, _ in outputs]
    assert sorted("done" in seen for seen in stages) == [False, False, True]
    assert sorted("reuse" in seen for seen in stages) == [False, True, True]
    assert any("wait" in seen for seen in stages)
    assert len({output.splitlines()[-1] for output, _ in outputs}) == 1
    assert calls(cuda_home) == ["shard_0"]
    check_stand_in_library(build_from(tiny_csrc, CONFIGS, jobs=1))


def test_a_waiting_build_takes_over_when_the_other_is_killed(cache, cuda_home, tiny_csrc):
    (cuda_home / "recorded" / "seconds").write_text("2")
    first = start_build(tiny_csrc)
    assert first.stdout.readline().startswith("compile")
    second = start_build(tiny_csrc)
    assert second.stdout.readline().startswith("wait")
    (cuda_home / "recorded" / "seconds").write_text("0.02")
    first.kill()
    first.communicate()
    output, errors = second.communicate(timeout=120)
    assert second.returncode == 0, errors
    assert "done 7 7" in output
    check_stand_in_library(build_from(tiny_csrc, CONFIGS, jobs=1))


def test_without_patience_both_build_and_one_publishes(cache, cuda_home, tiny_csrc, monkeypatch):
    """What happens on the far side of the waiting limit: work is doubled, nothing is broken."""
    monkeypatch.setattr("flashsmith.builder.kernel_cache._BUILD_PATIENCE_SECONDS", 0.0)
    (cuda_home / "recorded" / "seconds").write_text("1")
    other = start_build(tiny_csrc)
    assert other.stdout.readline().startswith("compile")
    ours = build_from(tiny_csrc, CONFIGS, jobs=1)
    output, errors = other.communicate(timeout=120)
    assert other.returncode == 0, errors
    assert output.splitlines()[-1] == str(ours.path)
    assert calls(cuda_home) == ["shard_0"] * 2
    check_stand_in_library(ours)
    assert [entry.damage for entry in cache.entries(thorough=True)] == [None]
