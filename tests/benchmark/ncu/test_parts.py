"""The parts of profiling: finding the profiler, its pages, the file of rows, the target process."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest
import shared_kernels
from plain_run import full_after

from flashsmith.benchmark import workload as workload_module
from flashsmith.benchmark.ncu import (
    ProfileRow,
    ProfileRowFile,
    profile_as_json,
    profiled_process,
    read_profile,
)
from flashsmith.benchmark.ncu.counters import TruncatedPage, parse_raw_page
from flashsmith.benchmark.ncu.profiled_process import ProfiledKernel, ProfilingJob, run_job
from flashsmith.benchmark.ncu.profiler import find_ncu
from flashsmith.benchmark.ncu.profiling import WavefrontCount, emulated_wavefronts
from flashsmith.benchmark.report import read_results
from flashsmith.errors import ArgumentError, EmulatorError, LaunchError, ProfilerError
from flashsmith.families import Problem, Semantics, get_hopper_configs
from flashsmith.families import parse_kernel_name_into_config as parse
from flashsmith.runtime import driver
from flashsmith.verify import prove
from ptxlab.checks import BankConflicts

PLAIN = parse("(FP16, 128, 64, 64, 4): async+load_0_0_0_tiles")
SWIZZLED = parse("(FP16, 128, 64, 64, 4): async+swizzled+load_0_0_0_tiles")
TRIMMED = parse("(FP16, 32, 128, 32, 8): async+eager+swizzled+load_2_2_2_tiles+opt_softmax+trim")
shared_kernels.want([SWIZZLED, TRIMMED], Semantics("causal"))

# --- finding it -----------------------------------------------------------------------------------


def executable(path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


def test_path_comes_first_then_cuda_home_then_the_newest_installed(tmp_path, monkeypatch) -> None:
    root, home, bin_folder = tmp_path / "root", tmp_path / "cuda", tmp_path / "bin"
    monkeypatch.setenv("PATH", str(bin_folder))
    monkeypatch.setenv("CUDA_HOME", str(home))
    old, new = (root / "opt/nvidia/nsight-compute" / v / "ncu" for v in ("2024.3.1", "2025.10.0"))
    for path in (old, new):
        executable(path)
    assert find_ncu(root) == new
    executable(root / "usr/local/cuda-13.0/bin/ncu")
    assert find_ncu(root) == root / "usr/local/cuda-13.0/bin/ncu"
    executable(home / "bin/ncu")
    assert find_ncu(root) == home / "bin/ncu"
    executable(bin_folder / "ncu")
    assert find_ncu(root) == bin_folder / "ncu"


def test_where_it_looked_is_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    (tmp_path / "opt/nvidia/nsight-compute/2025.1").mkdir(parents=True)
    (tmp_path / "opt/nvidia/nsight-compute/2025.1/ncu").write_text("not executable")
    with pytest.raises(ProfilerError) as raised:
        find_ncu(tmp_path)
    for place in ("PATH", "cuda/bin/ncu", "usr/local/cuda*/bin/ncu", "nsight-compute/*/ncu"):
        assert place in str(raised.value)


# --- its pages ------------------------------------------------------------------------------------

PAGE = """\
==PROF== Connected to process 1
"ID","Kernel Name","gpu__time_duration.sum","sm__pipe.pct","dram__bytes.sum","x.per_second"
"","","usecond","%","Gbyte","Ghz"
"0","kernel(int, float)","1,234.5","61.5","2.5","1.7"
"1","kernel(int, float)","nan","n/a","","(!) 3"
==WARNING== something
"""


def test_a_page_in_base_units() -> None:
    first, second = parse_raw_page(PAGE)
    assert first.kernel == "kernel(int, float)"
    assert first.metrics == pytest.approx(
        {
            "ID": 0,
            "gpu__time_duration.sum": 1_234_500,
            "sm__pipe.pct": 61.5,
            "dram__bytes.sum": 2.5e9,
            "x.per_second": 1.7e9,
        }
    )
    assert set(second.metrics) == {"ID"}


@pytest.mark.parametrize("text", ["", "==ERROR== no\n", '"ID","Metric Name"\n"0","x"\n'])
def test_what_is_no_page(text: str) -> None:
    with pytest.raises(ValueError, match="page"):
        parse_raw_page(text)


def test_a_page_that_ends_early_keeps_what_is_whole() -> None:
    lines = PAGE.splitlines(keepends=True)[:-1]
    for end in range(len("".join(lines[:-1])) + 1, len("".join(lines)) - 1):
        with pytest.raises(TruncatedPage) as cut:
            parse_raw_page("".join(lines)[:end])
        assert [launch.metrics["ID"] for launch in cut.value.launches] == [0]
    with pytest.raises(TruncatedPage) as cut:
        parse_raw_page("".join(lines[:2])[:-20])
    assert cut.value.launches == []


# --- the file of rows -----------------------------------------------------------------------------

ROW = ProfileRow(
    config=str(PLAIN),
    family="mma_sync",
    **dict.fromkeys(("batch", "heads_q", "heads_k"), 16),
    **dict.fromkeys(("seq_q", "seq_k"), 1024),
    d=128,
    dtype="fp16",
    semantics="causal",
    gpu="NVIDIA H200",
    verdict="pass",
    note='a "quoted", line',
    duration_us=812.345,
    registers=168,
    stalls="barrier 2.61, wait 2.44",
)


def test_rows_read_back_as_they_were(tmp_path) -> None:
    path = tmp_path / "rows.csv"
    with ProfileRowFile(path) as ledger:
        ledger.write(ROW)
        ledger.write(replace(ROW, seq_q=2048, seq_k=2048))
        assert len(ledger.rows) == 2
    with ProfileRowFile(path) as ledger:
        assert ledger.rows[0] == ROW
        assert ledger.rows[0].key == (str(PLAIN), "b16 s1024 h16 d128 fp16 causal", "NVIDIA H200")
        ledger.write(replace(ROW, gpu="another"))
    assert [row.gpu for row in read_profile(path)] == ["NVIDIA H200", "NVIDIA H200", "another"]


def test_a_line_that_was_cut_off_is_taken_away(tmp_path) -> None:
    path = tmp_path / "rows.csv"
    with ProfileRowFile(path) as ledger:
        ledger.write(ROW)
        ledger.write(ROW)
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    with ProfileRowFile(path) as ledger:
        assert ledger.rows == [ROW]
        ledger.write(ROW)
    assert path.read_bytes() == whole


def test_an_empty_file_is_begun(tmp_path) -> None:
    path = tmp_path / "rows.csv"
    path.touch()
    with ProfileRowFile(path) as ledger:
        ledger.write(ROW)
    assert read_profile(path) == [ROW]


def test_json_lines_are_continued_and_reported(tmp_path) -> None:
    path, row = tmp_path / "rows.jsonl", replace(ROW, ncu="2025.3")
    with ProfileRowFile(path) as ledger:
        ledger.write(row)
    path.write_text(path.read_text() + '{"config": "(FP1')
    with ProfileRowFile(path) as ledger:
        assert ledger.rows == [row]
        ledger.write(replace(row, gpu="another"))
    assert read_profile(path) == [row, replace(row, gpu="another")]
    assert read_results([path]).profiles == tuple(read_profile(path))
    assert list(profile_as_json([row])[0])[:3] == ["config", "family", "batch"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda text: text.replace("duration_us", "duration_ms"), "other columns"),
        (
            lambda text: text.replace("812.345", "soon"),
            "row 1: duration_us='soon' is not of",
        ),
        (lambda text: text.replace(",1024,", ",,"), "row 1: seq_q='' is not of type int"),
        (lambda text: text.replace("causal", "casual"), "row 1: problem="),
    ],
)
def test_a_file_that_is_none_of_ours_is_named(tmp_path, change, named: str) -> None:
    path = tmp_path / "rows.csv"
    with ProfileRowFile(path) as ledger:
        ledger.write(ROW)
    path.write_text(change(path.read_text()))
    with pytest.raises(ArgumentError, match=named):
        ProfileRowFile(path)


# --- the emulator's count -------------------------------------------------------------------------


def counted(cfg, problem: Problem) -> WavefrontCount:
    """The count of the whole problem, emulated in full."""
    conflicts = BankConflicts()
    verdict = prove(
        cfg,
        seq=problem.seq_q,
        seq_k=problem.seq_k,
        batch=problem.batch,
        heads=problem.heads_q,
        causal=problem.semantics.mask == "causal",
        observers=[conflicts],
    )
    assert verdict.problem.heads_q == problem.heads_q
    kinds = conflicts.by_kind.values()
    return WavefrontCount(sum(k.actual for k in kinds), sum(k.ideal for k in kinds))


LONG, HEADS, MASKED = "s320 d128 fp16", "b2 s64:256 h2 d128 fp16", "s256 d128 fp16 causal"


@pytest.mark.parametrize(
    ("cfg", "text"),
    full_after(
        3,
        [
            *((PLAIN, HEADS), (SWIZZLED, LONG), (SWIZZLED, MASKED)),
            *((PLAIN, LONG), (PLAIN, MASKED), (SWIZZLED, HEADS)),
        ],
    ),
    ids=lambda it: it if isinstance(it, str) else "plain" if it is PLAIN else "swizzled",
)
def test_the_extrapolated_count_is_the_emulated_one(cfg, text: str) -> None:
    problem = Problem.parse(text)
    found = emulated_wavefronts(cfg, problem, 80)
    assert found == counted(cfg, problem)
    assert (found.actual > 2 * found.ideal) == (cfg is PLAIN)


def test_a_trimmed_diagonal_over_many_tiles_is_extrapolated_too() -> None:
    cfg = TRIMMED
    problem = Problem.parse("s384 d32 fp16 causal")
    assert emulated_wavefronts(cfg, problem, 80) == counted(cfg, problem)


def test_what_the_emulator_cannot_tell_is_left_out(monkeypatch) -> None:
    from flashsmith.benchmark.ncu import profiling as wavefronts

    problem = Problem.parse("s256 d128 fp16")
    assert emulated_wavefronts(get_hopper_configs()[0], problem, 90) is None

    def no_such_opcode(*_):
        raise EmulatorError("unknown opcode")

    monkeypatch.setattr(wavefronts, "_of_a_cta", no_such_opcode)
    assert emulated_wavefronts(PLAIN, problem, 80) is None


# --- the process under the profiler ---------------------------------------------------------------


@pytest.fixture
def marks(monkeypatch, tmp_path):
    """A GPU of the emulator's making: what ran between marks and what did not, in order."""
    from stand_ins import HostMemory

    from flashsmith.benchmark import implementations

    log: list[str] = []
    monkeypatch.setattr(workload_module.Workload, "__post_init__", _on_host(HostMemory()))
    real = implementations.KernelImplementation.launch
    monkeypatch.setattr(
        implementations.KernelImplementation,
        "launch",
        lambda self: (log.append(f"launch {self.name}"), real(self))[1],
    )

    @contextmanager
    def current_gpu(ordinal):
        yield

    monkeypatch.setattr(driver, "current_gpu", current_gpu)
    monkeypatch.setattr(driver, "call", lambda what, *_: log.append(what))
    return log


def _on_host(memory):
    real = workload_module.Workload.__post_init__

    def post_init(self) -> None:
        self.memory = memory
        real(self)

    return post_init


SMALL = ProfiledKernel("b1 s128 h1 d128 fp16", str(PLAIN))


def test_kernels_are_proven_outside_of_the_marks_and_launched_between_them(marks, tmp_path) -> None:
    job = ProfilingJob((SMALL, replace(SMALL, config=str(SWIZZLED))), 2, str(tmp_path / "verdicts"))
    run_job(msgspec.json.decode(msgspec.json.encode(job), type=ProfilingJob))
    assert json.loads((tmp_path / "verdicts").read_text()) == ["", ""]
    assert marks == [
        step
        for cfg in (PLAIN, SWIZZLED)
        for step in (
            *("cuCtxSynchronize", "cuProfilerStart"),
            *(f"launch {cfg}", f"launch {cfg}"),
            *("cuCtxSynchronize", "cuProfilerStop"),
        )
    ]


def test_a_wrong_kernel_is_not_launched_between_marks(marks, tmp_path, monkeypatch) -> None:
    real = workload_module.Workload.check

    def check(self, output, scores=None):
        output[0, 5] = 0
        return real(self, output, scores)

    monkeypatch.setattr(workload_module.Workload, "check", check)
    run_job(ProfilingJob((SMALL,), 1, str(tmp_path / "verdicts")))
    (verdict,) = json.loads((tmp_path / "verdicts").read_text())
    assert "error" in verdict
    assert marks == []


def test_a_launch_that_fails_ends_the_process_with_its_words(marks, tmp_path, capsys, monkeypatch):
    def crash(self):
        raise LaunchError("an illegal memory access was encountered")

    from flashsmith.benchmark import implementations

    monkeypatch.setattr(implementations.KernelImplementation, "launch", crash)
    job = ProfilingJob((SMALL,), 1, str(tmp_path / "verdicts"))
    (tmp_path / "job").write_bytes(msgspec.json.encode(job))
    assert profiled_process.main([str(tmp_path / "job")]) == 2
    assert "an illegal memory access" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_real_profiler_counts_what_the_emulator_counts() -> None:
    """Where Nsight Compute is installed; elsewhere its absence must be named."""
    from flashsmith.benchmark.ncu import ProfilePlan, run_profile
    from flashsmith.benchmark.ncu.profiler import Profiler
    from flashsmith.benchmark.progress import ProgressReporter
    from flashsmith.runtime import query_gpu

    try:
        found = find_ncu()
    except ProfilerError:  # what it says then is tested above
        return
    rows: list[ProfileRow] = []
    plan = ProfilePlan((PLAIN, SWIZZLED), (Problem.parse("b2 s1024 h4 d128 fp16"),), runs=2)
    run_profile(plan, Profiler(found), query_gpu(0), (), rows.append, ProgressReporter(quiet=True))
    assert [row.config for row in rows] == [str(PLAIN), str(SWIZZLED)]
    for row in rows:
        assert row.verdict == "pass"
        assert row.duration_us > 0
        assert row.registers > 100
        assert 0 < row.tensor_pct <= 100
        assert row.stalls
        if row.wavefronts is not None:
            assert row.wavefronts == pytest.approx(row.emulated_wavefronts, rel=0.25)
    plain, swizzled = rows
    assert plain.wavefronts > 2 * swizzled.wavefronts
