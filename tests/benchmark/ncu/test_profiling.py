"""Profiling end to end with a profiler of our own making: rows, resuming, and what goes wrong."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from fake_ncu import mangled
from profiler_stand_in import FakeNcu

from flashsmith.benchmark.kernel_facts import KernelFacts
from flashsmith.benchmark.ncu import (
    ProfilePlan,
    ProfileRowFile,
    profiler,
    profiling,
    read_profile,
    run_profile,
    settled,
)
from flashsmith.benchmark.ncu.profile_rows import ProfileRow
from flashsmith.benchmark.ncu.profiled_process import ProfiledKernel
from flashsmith.benchmark.ncu.profiler import Profiler
from flashsmith.benchmark.ncu.profiling import WavefrontCount
from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.errors import ArgumentError, ProfilerError
from flashsmith.families import Problem, device_spec
from flashsmith.families import parse_kernel_name_into_config as parse

PLAIN = parse("(FP16, 128, 64, 64, 4): async+load_0_0_0_tiles")
BEST = parse("(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax")
BF16 = parse("(BF16, 128, 128, 32, 4): async+swizzled+load_2_2_2_tiles+buffer")
SHORT, LONG = (Problem.parse(f"b16 s{seq} h16 d128 fp16") for seq in (1024, 4096))
DEVICE = replace(device_spec("H200"), name="NVIDIA H200")


@pytest.fixture
def fake(tmp_path, monkeypatch) -> FakeNcu:
    class Built:
        """Kernels are built already; one is illegal if its tiles are 128 by 128."""

        def __init__(self, device) -> None: ...

        def build(self, uses, progress) -> None:
            list(uses)

        def illegality(self, cfg) -> str | None:
            return "no room for it" if cfg.B_c == 128 else None

        def facts(self, cfg, problem) -> KernelFacts:
            return KernelFacts(168, 0, 0, cfg.smem_bytes(), 2)

    monkeypatch.setattr(profiling, "BuiltKernels", Built)
    monkeypatch.setattr(profiling.Environment, "collect", lambda: ENVIRONMENT)
    monkeypatch.setattr(
        profiling, "emulated_wavefronts", lambda cfg, problem, arch: WavefrontCount(12, 10)
    )
    return FakeNcu(tmp_path / "bin")


ENVIRONMENT = profiling.Environment(
    *("NVIDIA H200", 90, "580.1", "13.0", "", "0.1.0", "abc123", "3.11.7")
)


def profile(fake: FakeNcu, configs, problems, *, runs=1, known=()) -> list[ProfileRow]:
    rows: list[ProfileRow] = []
    run_profile(
        ProfilePlan(tuple(configs), tuple(problems), runs),
        Profiler(fake.path),
        DEVICE,
        known,
        rows.append,
        ProgressReporter(quiet=True),
    )
    return rows


def test_a_row_holds_what_the_profiler_counted(fake) -> None:
    (row,) = profile(fake, [BEST], [LONG])
    assert row.config == str(BEST)
    assert row.problem == LONG
    assert (row.verdict, row.gpu, row.ncu, row.revision) == (
        *("pass", "NVIDIA H200", "2025.3.1.0", "abc123"),
    )
    assert row.duration_us == pytest.approx(812.345)
    assert row.tflops == pytest.approx(LONG.attn_flop() / 812.345e-6 / 1e12)
    assert row.sm_clock_mhz == pytest.approx(1695)
    assert (row.tensor_pct, row.mufu_pct, row.issue_pct) == (61.25, 33.5, 40.0)
    assert (row.occupancy_pct, row.max_occupancy_pct, row.registers) == (24.9, 25.0, 168)
    assert row.smem_bytes == BEST.smem_bytes()
    assert (row.wavefronts, row.wavefronts_ideal) == (1_250_000, 1_000_000)
    assert (row.emulated_wavefronts, row.emulated_wavefronts_ideal) == (12, 10)
    # Scaled although base units were asked for.
    assert row.l2_bytes == 2_150_500_000
    assert (row.dram_read_bytes, row.dram_write_bytes) == (100_000_000, 33_000_000)
    assert row.stalls == "math_pipe_throttle 3.75, barrier 2.61, wait 2.44"
    assert row.note == ""


def test_the_profiler_leaves_the_clocks_alone_and_takes_marked_launches_only(fake) -> None:
    profile(fake, [BEST], [LONG])
    (call,) = fake.profiles

    def value(option: str) -> str:
        return call[call.index(option) + 1]

    assert value("--clock-control") == "none"
    assert value("--profile-from-start") == "off"
    assert value("--page") == "raw"
    assert call[-3:-1] == ["-m", "flashsmith.benchmark.ncu.profiled_process"]


def test_one_process_a_length(fake) -> None:
    rows = profile(fake, [PLAIN, BEST], [LONG, SHORT])
    assert [(row.seq_q, row.config) for row in rows] == [
        *((1024, str(PLAIN)), (1024, str(BEST))),
        *((4096, str(PLAIN)), (4096, str(BEST))),
    ]
    assert len(fake.profiles) == 2


STAGED = parse("(FP16, 128, 64, 64, 4): backward+stages_2")
_ROLES = ("prepare", "main", "queries")
LEAN = parse("(FP16, 128, 64, 64, 4): backward")


def backward_kernel(what: str, stages: int) -> str:
    return (
        f"_ZN10flashsmith{len(what)}{what}INS_26StaticBackwardKernelConfigIXtlNS_"
        "25FlashBackwardKernelConfigELNS_5DTypeE5ELi128ELi64ELi64ELi4ELi1E"
        f"Li{stages}ELNS_6DqModeE0EEEXtlNS_9SemanticsEEEEEEEvNS_18BackwardKernelArgsE"
    )


def backward_kernels(stages: int) -> list[str]:
    names = ("backward_prepare_kernel", "flash_backward_kernel", "backward_queries_kernel")
    return [backward_kernel(name, stages) for name in names]


@pytest.mark.parametrize("runs", [1, 3])
def test_all_launches_of_a_call_are_a_row(fake, runs: int) -> None:
    """Times and traffic are added, shares are means; the note has each launch's time."""
    problem = replace(LONG, operation="backward")
    fake.plan(renamed={str(STAGED): backward_kernels(2), str(LEAN): backward_kernels(1)})
    found = profile(fake, [STAGED, LEAN], [problem], runs=runs)
    assert [row.config for row in found] == [str(STAGED), str(LEAN)]
    for number, row in enumerate(found):
        # Each launch takes 1% longer; the call in the middle is the median.
        first = 3 * (number * runs + runs // 2)
        us = [812.345 * 1.01 ** (first + place) for place in range(3)]
        assert row.duration_us == pytest.approx(sum(us), rel=1e-4)
        assert row.tflops == pytest.approx(problem.attn_flop() / sum(us) / 1e6, rel=1e-4)
        assert (row.tensor_pct, row.registers) == (pytest.approx(61.25), 168)
        assert (row.wavefronts, row.dram_write_bytes) == (3_750_000, 99_000_000)
        words = (f"{role} {t:.0f} us" for role, t in zip(_ROLES, us, strict=True))
        assert row.note == ", ".join(words)


def test_a_call_of_another_config_than_expected_is_refused(fake) -> None:
    fake.plan(renamed={str(STAGED): backward_kernels(1)})
    with pytest.raises(ProfilerError, match=r"profiled .*: backward where .* was launched"):
        profile(fake, [STAGED], [replace(LONG, operation="backward")])


def test_several_problems_of_a_length_share_its_process(fake) -> None:
    causal, bf16 = (Problem.parse(f"b16 s1024 h16 d128 {w}") for w in ("fp16 causal", "bf16"))
    rows = profile(fake, [BEST, BF16], [SHORT, causal, bf16])
    assert [(row.config, row.semantics) for row in rows] == [
        *((str(BEST), "plain"), (str(BEST), "causal"), (str(BF16), "plain")),
    ]
    assert len(fake.profiles) == 1


def test_of_several_launches_the_median_counts(fake) -> None:
    first, second = profile(fake, [PLAIN, BEST], [SHORT], runs=3)
    assert first.duration_us == pytest.approx(812.345 * 1.01)
    assert second.duration_us == pytest.approx(812.345 * 1.01**4)


def test_rows_that_are_there_are_not_profiled_again(fake, tmp_path) -> None:
    path = tmp_path / "all.csv"
    with ProfileRowFile(path) as ledger:
        for row in profile(fake, [PLAIN], [SHORT, LONG]):
            ledger.write(row)
    with ProfileRowFile(path) as ledger:
        rows = profile(fake, [PLAIN, BEST], [SHORT, LONG], known=ledger.rows)
        assert [row.config for row in rows] == [str(BEST)] * 2
        for row in rows:
            ledger.write(row)
    calls = len(fake.profiles)
    assert profile(fake, [PLAIN, BEST], [SHORT, LONG], known=read_profile(path)) == []
    assert len(fake.profiles) == calls
    assert len(path.read_text().splitlines()) == 5


def test_another_gpus_rows_do_not_count(fake) -> None:
    (row,) = profile(fake, [PLAIN], [SHORT])
    assert profile(fake, [PLAIN], [SHORT], known=[replace(row, gpu="NVIDIA H100")])


def test_another_revisions_rows_and_failures_do_not_count(fake) -> None:
    (row,) = profile(fake, [PLAIN], [SHORT])
    assert profile(fake, [PLAIN], [SHORT], known=[replace(row, revision="older")])
    failed = replace(row, verdict="fail", note="row 0 is wrong")
    assert profile(fake, [PLAIN], [SHORT], known=[failed])
    # The last row of a kernel is what counts.
    assert profile(fake, [PLAIN], [SHORT], known=[row, failed])
    assert profile(fake, [PLAIN], [SHORT], known=[failed, row]) == []
    plan = ProfilePlan((PLAIN, BEST), (SHORT, LONG))
    other = replace(row, gpu="NVIDIA H100")
    assert settled(plan, DEVICE, [failed, row, other]) == [row]


def test_a_wrong_kernel_is_a_row_without_figures(fake) -> None:
    fake.plan(wrong=[str(PLAIN)])
    wrong, right = profile(fake, [PLAIN, BEST], [SHORT], runs=2)
    assert (wrong.verdict, wrong.note, wrong.duration_us) == ("fail", "row 0 is wrong", None)
    assert (right.verdict, right.config) == ("pass", str(BEST))
    assert right.duration_us == pytest.approx(812.345)


def test_an_illegal_config_is_a_row_that_says_why(fake) -> None:
    illegal = parse("(FP16, 128, 128, 128, 4): async+load_2_2_2_tiles")
    error, right = profile(fake, [illegal, BEST], [SHORT])
    assert (error.verdict, error.note, error.config) == ("error", "no room for it", str(illegal))
    assert right.verdict == "pass"


# --- metrics that are missing ---------------------------------------------------------------------


def test_metrics_that_the_gpu_lacks_are_empty_cells_with_a_note(fake) -> None:
    fake.plan(
        unknown=["memory_l1_wavefronts_shared_ideal", "sm__maximum_warps_per_active_cycle_pct"]
    )
    (row,) = profile(fake, [BEST], [SHORT])
    assert (row.wavefronts_ideal, row.max_occupancy_pct) == (None, None)
    assert row.note == "no counter here for max_occupancy_pct, wavefronts_ideal"
    assert row.wavefronts == 1_250_000
    # Each refusal names one metric, and the next attempt goes without it.
    assert len(fake.profiles) == 3


def test_another_name_for_the_same_is_tried(fake) -> None:
    fake.plan(unknown=["memory_l1_wavefronts_shared"])
    (row,) = profile(fake, [BEST], [SHORT])
    assert row.wavefronts == 1_260_000


def test_a_cell_without_a_number_is_empty(fake) -> None:
    fake.plan(not_available=["lts__t_bytes.sum", "gpu__time_duration.sum"])
    (row,) = profile(fake, [BEST], [SHORT])
    assert (row.l2_bytes, row.duration_us, row.tflops) == (None, None, None)
    assert row.mufu_pct == 33.5


# --- what goes wrong ------------------------------------------------------------------------------


def test_its_words_are_shown_when_it_fails(fake) -> None:
    words = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access counters"
    fake.plan(error=words, exit_status=1)
    with pytest.raises(ProfilerError, match="run as root") as raised:
        profile(fake, [BEST], [SHORT])
    assert words in str(raised.value)


def test_the_applications_words_are_shown_too(fake) -> None:
    fake.plan(
        error="==ERROR== The application returned an error code (2).",
        application_says="flashsmith: LaunchError: an illegal memory access was encountered",
        exit_status=2,
    )
    with pytest.raises(ProfilerError, match="an illegal memory access"):
        profile(fake, [BEST], [SHORT])


def test_no_kernels_is_a_failure_even_with_exit_status_0(fake) -> None:
    fake.plan(error="==WARNING== No kernels were profiled.")
    with pytest.raises(ProfilerError, match="No kernels were profiled"):
        profile(fake, [BEST], [SHORT])


def test_a_profiler_that_hangs_is_stopped(fake, monkeypatch) -> None:
    monkeypatch.setattr(profiler, "_SECONDS_TO_BEGIN", 3.0)
    monkeypatch.setattr(profiler, "_SECONDS_A_USE", 0.0)
    monkeypatch.setattr(profiler, "_REPLAYS", 0)
    fake.plan(hangs=True, application_says="waiting for the GPU")
    begin = time.monotonic()
    with pytest.raises(ProfilerError, match="did not end within 3 s") as raised:
        profile(fake, [BEST], [SHORT])
    assert time.monotonic() - begin < 30
    assert "waiting for the GPU" in str(raised.value)


def test_the_limit_grows_with_the_work() -> None:
    one = profiler.time_limit((ProfiledKernel(str(SHORT), str(BEST)),), 1)
    assert one > profiler.time_limit((), 1) + 60
    assert profiler.time_limit((ProfiledKernel(str(LONG), str(BEST)),), 1) > one
    assert profiler.time_limit((ProfiledKernel(str(SHORT), str(BEST)),), 100) > one


def rows_before(fake, *configs) -> tuple[list[ProfileRow], str]:
    rows: list[ProfileRow] = []
    plan = ProfilePlan(configs, (SHORT, LONG))
    with pytest.raises(ProfilerError) as raised:
        run_profile(
            plan, Profiler(fake.path), DEVICE, (), rows.append, ProgressReporter(quiet=True)
        )
    return rows, str(raised.value)


def test_what_was_profiled_before_it_was_cut_off_is_kept(fake) -> None:
    fake.plan(cut_off=40)
    rows, words = rows_before(fake, PLAIN, BEST)
    assert [(row.seq_q, row.config) for row in rows] == [(1024, str(PLAIN))]
    assert "ends within the line of launch 1" in words
    assert len(fake.profiles) == 1


def test_a_page_that_is_cut_off_at_a_cells_last_quote_is_noticed(fake) -> None:
    fake.plan(cut_off=2)
    rows, words = rows_before(fake, PLAIN)
    assert rows == []
    assert "ends within the line of launch 0" in words


def test_a_process_that_stops_early_is_noticed(fake) -> None:
    fake.plan(stops_after=1, application_says="Segmentation fault")
    rows, words = rows_before(fake, PLAIN, BEST)
    assert [row.config for row in rows] == [str(PLAIN)]
    assert "stopped before the end" in words
    assert "Segmentation fault" in words


def test_an_exit_status_is_a_failure_though_the_page_is_whole(fake) -> None:
    fake.plan(exit_status=3, tail="==ERROR== something at the very end\n")
    rows, words = rows_before(fake, PLAIN)
    assert [row.seq_q for row in rows] == [1024]
    assert "exit status 3" in words
    assert "at the very end" in words


def test_kernels_that_are_none_of_ours_are_passed_over(fake) -> None:
    fake.plan(other_kernels=["_ZN2at6native4fillEv", "some_c_kernel"])
    (row,) = profile(fake, [BEST], [SHORT])
    assert row.config == str(BEST)


def test_demangled_names_are_understood_as_well(fake) -> None:
    name = (
        "void flashsmith::flash_forward_kernel<flashsmith::StaticForwardKernelConfig<flashsmith::"
        "FlashForwardKernelConfig{(flashsmith::DType)5, (int)128, (int)64, (int)64, (int)4, "
        "(bool)1, (bool)1, (bool)1, (int)0, (int)2, (int)2, (bool)0, (bool)1}, flashsmith::"
        "Semantics{}>>(flashsmith::ForwardKernelArgs)"
    )
    fake.plan(renamed={str(BEST): [name]})
    (row,) = profile(fake, [BEST], [SHORT])
    assert row.duration_us == pytest.approx(812.345)


def test_a_name_that_is_not_understood_is_named(fake) -> None:
    fake.plan(renamed={str(BEST): ["flash_forward_kernel"]})
    rows, words = rows_before(fake, BEST)
    assert rows == []
    assert "kernels on it: flash_forward_kernel" in words


def test_a_launch_of_another_kernel_than_expected_is_refused(fake) -> None:
    fake.plan(renamed={str(BEST): [mangled(str(PLAIN))]})
    _, words = rows_before(fake, BEST)
    assert f"profiled {PLAIN} where {BEST} was launched" in words


def test_a_gpu_whose_metrics_cannot_be_listed(fake) -> None:
    fake.plan(listing_error="==ERROR== Failed to initialize the profiler: LibraryNotLoaded")
    with pytest.raises(ProfilerError, match=r"cannot list .*(\n.*)*LibraryNotLoaded"):
        Profiler(fake.path)


def test_something_else_that_is_called_ncu(fake) -> None:
    fake.path.write_text("#!/bin/sh\necho a norton commander clone\n")
    with pytest.raises(ProfilerError, match=r"does not report its version.*(\n.*)*norton"):
        Profiler(fake.path)
    fake.path.write_text("no script")
    with pytest.raises(ProfilerError, match="does not run"):
        Profiler(fake.path)


def test_plans_that_make_no_sense() -> None:
    with pytest.raises(ArgumentError, match="runs=0"):
        ProfilePlan((BEST,), (SHORT,), 0).uses()
    with pytest.raises(ArgumentError, match="serves any of the 1 problems"):
        ProfilePlan((BF16,), (SHORT,)).uses()
