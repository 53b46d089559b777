"""`flashsmith ncu` and its script, with a profiler of our own making."""

from __future__ import annotations

import csv
import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import flashsmith.runtime
from flashsmith.benchmark.environment import Environment
from flashsmith.benchmark.kernel_facts import KernelFacts
from flashsmith.benchmark.ncu import profiling, read_profile
from flashsmith.cli import app
from flashsmith.errors import ArgumentError, LaunchError, ProfilerError, SelectionError
from flashsmith.families import device_spec

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmark" / "ncu"))
from profiler_stand_in import FakeNcu

BEST = "(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax"
H200 = replace(device_spec("H200"), name="NVIDIA H200")


@pytest.fixture
def fake(tmp_path, monkeypatch) -> FakeNcu:
    class Built:
        def __init__(self, device) -> None: ...

        def build(self, uses, progress) -> None:
            list(uses)

        def illegality(self, cfg) -> None:
            return None

        def facts(self, cfg, problem) -> KernelFacts:
            return KernelFacts(168, 0, 0, cfg.smem_bytes(), 2)

    monkeypatch.setattr(profiling, "BuiltKernels", Built)
    monkeypatch.setattr(
        Environment,
        "collect",
        lambda: Environment("NVIDIA H200", 90, "580.1", "13.0", "", "0.1.0", "abc", "3.11"),
    )
    monkeypatch.setattr(profiling, "emulated_wavefronts", lambda cfg, problem, arch: None)
    monkeypatch.setattr(flashsmith.runtime, "gpu_count", lambda: 1)
    monkeypatch.setattr(flashsmith.runtime, "query_gpu", lambda ordinal: H200)
    monkeypatch.delenv("KERNELS", raising=False)
    fake = FakeNcu(tmp_path / "bin")
    python = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{fake.folder}:{python}:/usr/bin:/bin")
    return fake


def run(*words: str):
    result = CliRunner().invoke(app, ["ncu", *words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_table_says_what_limits_a_kernel(fake) -> None:
    out = run("--kernels", BEST, "--seq_lens", "4096").stdout
    (line,) = [line for line in out.splitlines() if BEST in line]
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells == [
        *(BEST, "b16 s4096 h16 d128 fp16", "812.3", "2707", "1695", "61.2", "33.5", "40.0"),
        *("25 of 25", "168", "1.25x", "", "2.15", "0.13", "0.16"),
        *("math_pipe_throttle 3.75, barrier 2.61, wait 2.44", ""),
    ]
    assert "caches cold" in out


DECODE = "(BF16, 128, 16, 64, 4): decode+stages_3+least_128+parts_2"


def decode_kernel(name: str) -> str:
    return (
        f"_ZN10flashsmith{len(name)}{name}INS_24StaticDecodeKernelConfigIXtlNS_"
        "23FlashDecodeKernelConfigELNS_5DTypeE15ELi128ELi16ELi64ELi4ELi3ELi128ELi2ELi0ELi1EEEXtlNS_"
        "9SemanticsEEEEEEEvNS_16DecodeKernelArgsE"
    )


@pytest.mark.parametrize("page", ["", " page16"])
def test_a_call_over_a_cache_is_a_row(fake, page: str) -> None:
    """Of all its launches."""
    problem = f"b8 s1:65536 h32:8 d128 bf16 decode{page}"
    main = "decode_paged_kernel" if page else "decode_kernel"
    fake.plan(renamed={DECODE: [decode_kernel(main), decode_kernel("decode_merge_kernel")]})
    out = run("--kernels", DECODE, "--problems", f"{problem};b1 s1:8192 h32:8 d128 bf16 decode")
    shorter, longer = (line for line in out.stdout.splitlines() if DECODE in line)
    assert f"| {problem} " in longer
    assert "| b1 s1:8192 h32:8 d128 bf16 decode " in shorter
    role = "paged" if page else "main"
    assert f"{role} 812 us, merge 820 us" in shorter


def test_over_a_cache_a_length_is_of_its_keys(fake) -> None:
    fake.plan(renamed={DECODE: [decode_kernel("decode_kernel")]})
    (row,) = json.loads(run("--kernels", DECODE, "--seq_lens", "4096", "--json").stdout)
    assert (row["seq_q"], row["seq_k"], row["semantics"]) == (1, 4096, "decode")


def test_the_environments_kernels_are_honoured(fake, monkeypatch) -> None:
    monkeypatch.setenv("KERNELS", "128,32")
    rows = json.loads(run("--seq-lens", "512", "--dtypes", "bf16", "--json").stdout)
    assert rows
    assert {row["config"][:20] for row in rows} == {"(BF16, 128, 128, 32,"}


def test_without_a_selection_the_sets_are_listed(fake) -> None:
    with pytest.raises(SelectionError, match="prog-all"):
        run()


def test_a_file_is_continued(fake, tmp_path) -> None:
    path = tmp_path / "profile.csv"
    run("--kernels", BEST, "--seq_lens", "512", "--csv", str(path))
    run("--kernels", BEST, "--seq_lens", "512,1024", "--causal", "--csv", str(path))
    result = run("--kernels", BEST, "--seq_lens", "1024,512", "--causal", "--csv", str(path))
    # Nothing is left to profile, and all is shown.
    assert result.stdout.count(BEST) == 2
    assert [(row.seq_q, row.semantics) for row in read_profile(path)] == [
        *((512, "plain"), (512, "causal"), (1024, "causal")),
    ]
    assert len(fake.profiles) == 3


def test_a_dash_prints_the_rows(fake) -> None:
    (row,) = csv.DictReader(io.StringIO(run("-k", BEST, "--seq_lens", "512", "--csv=-").stdout))
    assert row["config"] == BEST
    assert row["registers"] == "168"


def test_a_wrong_kernel_is_exit_status_1(fake) -> None:
    fake.plan(wrong=[BEST])
    result = run("--kernels", BEST, "--seq_lens", "512")
    assert result.exit_code == 1
    assert "FAIL: row 0 is wrong" in result.stdout


def test_a_wrong_kernel_is_tried_again(fake, tmp_path) -> None:
    words = ("--kernels", BEST, "--seq_lens", "512", "--csv", str(tmp_path / "profile.csv"))
    fake.plan(wrong=[BEST])
    assert run(*words).exit_code == 1
    assert run(*words).exit_code == 1
    fake.plan()
    assert run(*words).exit_code == 0
    assert len(fake.profiles) == 3
    again = run(*words)
    assert (again.exit_code, len(fake.profiles)) == (0, 3)
    assert again.stdout.count(BEST) == 1


def test_a_failure_keeps_and_prints_what_was_profiled(fake, tmp_path, capsys) -> None:
    path = tmp_path / "profile.csv"
    fake.plan(exit_status=7, tail="==ERROR== out of luck\n")
    with pytest.raises(ProfilerError, match="out of luck"):
        run("--kernels", BEST, "--seq_lens", "512,1024", "--csv", str(path))
    assert [row.seq_q for row in read_profile(path)] == [512]


def test_without_a_profiler_nothing_is_built(fake, tmp_path, monkeypatch) -> None:
    from flashsmith.benchmark.ncu import profiler as executable

    def missing() -> Path:
        raise ProfilerError("ncu: Nsight Compute was not found; looked at PATH")

    monkeypatch.setattr(executable, "find_ncu", missing)
    monkeypatch.setattr(profiling, "BuiltKernels", lambda *_: pytest.fail("built"))
    with pytest.raises(ProfilerError, match="was not found"):
        run("--kernels", BEST)


def test_without_a_gpu_it_says_what_else_there_is(fake, monkeypatch) -> None:
    monkeypatch.setattr(flashsmith.runtime, "gpu_count", lambda: 0)
    with pytest.raises(LaunchError, match="flashsmith explain"):
        run("--kernels", BEST)


def test_bad_lists_are_refused(fake) -> None:
    with pytest.raises(ArgumentError, match="seq_lens='1k'"):
        run("--kernels", BEST, "--seq_lens", "1k")
    with pytest.raises(ArgumentError, match="serves any"):
        run("--kernels", BEST, "--d_heads", "64")


def test_the_script_takes_a_csv_without_a_name(load_tool) -> None:
    module = load_tool("benchmark/ncu_bench.py")
    given = ["--seq_lens=1024", "--csv", "--runs=1"]
    assert module.with_csv_value(given) == ["--seq_lens=1024", "--csv=-", "--runs=1"]
    assert module.with_csv_value(["--csv"]) == ["--csv=-"]
    assert module.with_csv_value(["--csv", "file", "--json"]) == ["--csv", "file", "--json"]
