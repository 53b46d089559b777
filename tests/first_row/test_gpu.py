"""The stranger's kernels on a GPU: proven, timed, and tuned by the real runner."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import pytest

from flashsmith.benchmark.measurement import Times
from flashsmith.benchmark.run import time_kernels
from flashsmith.chooser.winners import WinnersTable
from flashsmith.families import Problem, get_kernel_configs
from flashsmith.runtime import query_gpu
from flashsmith.tuning.gpu_runner import gpu_runner
from flashsmith.tuning.race import DEFAULT_HALVING
from flashsmith.tuning.sweep import Settings
from flashsmith.tuning.sweep_progress import SweepProgress
from flashsmith.tuning.tune import plan_races, tune
from flashsmith.verify import prove

pytestmark = pytest.mark.gpu


def test_it_is_proven_and_timed(first_row: ModuleType) -> None:
    configs = [cfg for cfg in get_kernel_configs("first-row") if cfg.d_head == 64]
    for cfg in configs:
        verdict = prove(cfg, seq=3, batch=2, heads=2, d=40, backend="gpu")
        assert verdict.ok, str(verdict)
    problem = Problem.parse("b16 s1:512 h16 d64 fp16 first_row")
    fp16 = [cfg for cfg in configs if cfg.dtype is problem.dtype]
    for found in time_kernels(dict.fromkeys(fp16, problem), 0).values():
        assert isinstance(found, Times), found
        assert 0 < found.ms < math.inf


def test_it_is_tuned(
    first_row: ModuleType,
    installed: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The measuring process finds the package by its entry point."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    device = query_gpu(0)
    races = plan_races(
        [Problem.parse("b16 s1:512 h16 d64 fp16 first_row")], device, "both", Settings()
    )
    table = tmp_path / "mine.json"
    done = tune(races, gpu_runner(device, 0, DEFAULT_HALVING), Settings(budget=120.0),
                tmp_path / "out", SweepProgress(quiet=True), table=table)  # fmt: skip
    assert done.ok
    (entry,) = WinnersTable.load(table)
    assert {one.config for one in entry.ranked} == {build.name for build in races[0].builds}
