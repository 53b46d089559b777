"""The real runner: with the emulator and a pretended clock in the GPU's place, and on a GPU."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from stand_ins import HostMemory, PretendedClock

from flashsmith.benchmark.environment import Telemetry
from flashsmith.benchmark.implementations import KernelImplementation
from flashsmith.benchmark.kernel_facts import KernelFacts
from flashsmith.benchmark.measurement_files import read_rows
from flashsmith.benchmark.workload import Workload
from flashsmith.builder.manifest import AdditionalKernel, KernelEntry
from flashsmith.chooser.winners import WinnersTable
from flashsmith.errors import ArgumentError
from flashsmith.families import (
    Problem,
    Semantics,
    device_spec,
    parse_kernel_name_into_config,
)
from flashsmith.tuning import gpu_runner
from flashsmith.tuning.gpu_runner import GpuBench, NvccCompiler
from flashsmith.tuning.race import DEFAULT_HALVING
from flashsmith.tuning.runner import BuildResult, LibraryGoneError
from flashsmith.tuning.sweep import Settings
from flashsmith.tuning.sweep_progress import SweepProgress
from flashsmith.tuning.trial import Build, is_right
from flashsmith.tuning.tune import check_gpu, plan_races, tune

A100 = device_spec("A100")
CONFIG = parse_kernel_name_into_config(
    "(FP16, 64, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles"
)
PROBLEM = Problem.parse("b1 s256 h2 d64 fp16")
LONGER = Problem.parse("b2 s320 h2 d64 fp16")


@pytest.fixture(scope="module")
def compiled() -> BuildResult:
    (compiled,) = NvccCompiler(A100).compile([Build(CONFIG, Semantics())])
    return compiled


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> GpuBench:
    monkeypatch.setattr(gpu_runner, "CudaEvents", partial(PretendedClock, tick=1.0))
    monkeypatch.setattr(gpu_runner, "Telemetry", partial(Telemetry, sensor=lambda: (1500.0, 600.0)))
    monkeypatch.setattr(gpu_runner, "gpu_memory", HostMemory)
    bench = GpuBench()
    bench.open()
    return bench


def test_the_compilers_report_comes_with_the_library(compiled: BuildResult) -> None:
    assert not compiled.error
    assert compiled.facts is not None
    assert 64 <= compiled.facts.registers <= 255
    again = NvccCompiler(A100).compile([Build(CONFIG, Semantics())])
    assert again == [compiled]


def test_the_report_is_of_the_worst_of_a_configs_kernels() -> None:
    beside = AdditionalKernel("combine", "_Z1c", "ptx/c.ptx", 200, 16, 8, 12, 0, 10, 10)
    sizes = (128, 0, 4, 4, 0, 1.0, 10, 10)
    entry = KernelEntry(CONFIG, str(CONFIG), "_Z1k", "ptx/k.ptx", *sizes, (), (beside,))
    facts = KernelFacts.of(entry, A100)
    assert (facts.registers, facts.spill_bytes) == (200, 20)


def test_a_kernel_is_proven_and_timed(bench: GpuBench, compiled: BuildResult) -> None:
    build = Build(CONFIG, Semantics())
    for problem in (PROBLEM, LONGER):
        bench.prepare(problem)
        for thorough in (False, True):
            proof = bench.prove(problem, build, compiled.library, thorough)
            assert is_right(proof), proof
            assert proof.max_error is not None
            assert proof.error_bound is not None
            assert 0 < proof.max_error < proof.error_bound
    (samples,) = bench.time(PROBLEM, [(build, compiled.library)], 2, 4.5, False)
    assert samples.times_ms == (1.0,) * 4  # each takes a tick, and 4.5 ms are wanted
    assert (samples.sm_clock_mhz, samples.power_w) == (1500.0, 600.0)


def test_a_wrong_output_is_looked_at_twice(
    bench: GpuBench, compiled: BuildResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, outputs = Build(CONFIG, Semantics()), []
    right = KernelImplementation.output

    def spoiled(self: KernelImplementation):
        output = right(self)
        outputs.append(self.workload)
        if len(outputs) <= spoil:
            output[-1, -1, -1, -1] += 1.0
        return output

    monkeypatch.setattr(KernelImplementation, "output", spoiled)
    spoil = 1  # as by a kernel that ran before and wrote into the tensors
    assert is_right(bench.prove(PROBLEM, build, compiled.library, False))
    assert len(outputs) == 2
    assert outputs[0] is not outputs[1]
    spoil = 99
    proof = bench.prove(PROBLEM, build, compiled.library, False)
    assert not is_right(proof)
    assert "largest error" in proof.note


def test_a_library_that_is_gone_is_an_error(bench: GpuBench) -> None:
    with pytest.raises(LibraryGoneError, match="gone from the kernel cache"):
        bench.prove(PROBLEM, Build(CONFIG, Semantics()), "no such key", False)


def test_tensors_are_kept_and_make_room(bench: GpuBench, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Problem] = []

    def make(problem: Problem, memory: HostMemory) -> Workload:
        made.append(problem)
        if problem == LONGER and len(bench._workloads) > 0:
            raise MemoryError
        return Workload(problem, memory=memory)

    monkeypatch.setattr(gpu_runner, "workload_of", make)
    for _ in range(3):
        bench.prepare(PROBLEM)
    assert made == [PROBLEM]
    bench.prepare(LONGER)  # the second time there is room
    assert made == [PROBLEM, LONGER, LONGER]
    assert list(bench._workloads) == [LONGER]
    with pytest.raises(ArgumentError, match="nothing to compute"):
        GpuBench.prepare(bench, Problem.parse("b0 s256 d64 fp16 window"))


# ---- on a GPU ----

FORMS = (
    "(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax; "
    "(FP16, 128, 64, 32, 4): async+eager+swizzled+load_2_2_2_tiles+buffer; "
    "(FP16, 128, 128, 64, 4): async+eager+swizzled+load_2_2_2_tiles+buffer; "
    "(FP16, 128, 64, 64, 4): async+load_0_0_0_tiles"
)


@pytest.mark.gpu
def test_a_sweep_on_the_gpu_and_its_resumption(tmp_path: Path) -> None:
    device = check_gpu(0)
    problems = [Problem.parse(f"b2 s1024 h8 d128 fp16{mask}") for mask in ("", " causal")]
    out, table = tmp_path / "out", tmp_path / "mine.json"
    rankings = []
    for _ in range(2):
        settings = Settings(jobs=4)
        races = plan_races(problems, device, FORMS, settings)
        runner = gpu_runner.gpu_runner(device, 0, DEFAULT_HALVING)
        with SweepProgress() as progress:
            tuned = tune(races, runner, settings, out, progress, table=table)
        assert tuned.ok
        rankings.append([[trial.name for trial in race.ranked] for race in tuned.races])
        records = (out / "journal.jsonl").read_text().splitlines()
    assert rankings[0] == rankings[1]
    stages = [json.loads(record)["stage"] for record in records]
    assert stages.count("final") == 2  # the second sweep measured nothing
    rows = read_rows(out / "ranking.csv")
    assert len(rows) == 8
    for row in rows:
        assert row.verdict == "pass", row
        assert row.gpu == device.name
        assert row.ms is not None
        assert row.max_error is not None
    # Without the swizzle eight lanes share a bank.
    assert "load_0_0_0" in rankings[0][0][-1]
    assert len(WinnersTable.load(table)) == 2
