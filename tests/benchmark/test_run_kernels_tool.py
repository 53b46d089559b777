"""Named kernels for a profiler: exactly so many launches of those that were named."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from stand_ins import HostMemory, PretendedClock

from flashsmith.benchmark import bench as plan_module
from flashsmith.benchmark import implementations
from flashsmith.benchmark.peers import PEERS, PeerImplementation
from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.timing import INTERLEAVED, Protocol
from flashsmith.benchmark.workload import Workload
from flashsmith.errors import ArgumentError, SelectionError
from flashsmith.families import device_spec
from flashsmith.families import parse_kernel_name_into_config as parse

CFG = parse("(FP16, 64, 64, 64, 4): async+swizzled+load_0_0_0_tiles")
A100 = device_spec("A100")
SCRIPTS = Path(__file__).parents[2] / "tools" / "benchmark"


@pytest.fixture(autouse=True)
def _no_selection(monkeypatch) -> None:
    monkeypatch.delenv("KERNELS", raising=False)


@pytest.fixture(autouse=True)
def calls_of_attention(monkeypatch) -> list[dict[str, Any]]:
    """The options of each call of attention(), which does nothing and chooses CFG."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(implementations, "attention", lambda *_, **options: calls.append(options))
    monkeypatch.setattr(plan_module, "choose_config", lambda problem, device: CFG)
    return calls


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("benchmark/run_kernels.py")


@dataclass
class Launches:
    """What the tool launches, by a clock that pretends."""

    tool: ModuleType
    clock: PretendedClock

    def __call__(self, *arguments: str) -> list[str]:
        plan = self.tool.make_plan(self.tool.parse_arguments(arguments))
        return list(self.tool.launch_named(plan, A100, self.clock, ProgressReporter(quiet=True)))


@pytest.fixture
def launched(tool: ModuleType, monkeypatch) -> Launches:
    monkeypatch.setattr(
        tool, "workload_of", lambda problem, seed: Workload(problem, seed, HostMemory())
    )
    return Launches(tool, PretendedClock())


def test_every_kernel_is_launched_so_many_times(
    launched: Launches, calls_of_attention: list[dict[str, Any]], monkeypatch
) -> None:
    calls = []
    make = implementations.kernel_implementation

    def counted(cfg: Any, workload: Workload) -> Any:
        made = make(cfg, workload)
        return type(made)(made.name, cfg, workload, lambda: calls.append(str(workload.problem)))

    monkeypatch.setattr(plan_module, "kernel_implementation", counted)
    lines = launched(
        "--kernels", str(CFG), "--runs", "3", "--num_warmups", "1",
        "--problems", "b1 s64 h2 d64 fp16;b1 s128 h2 d64 fp16",
    )  # fmt: skip
    assert calls == ["b1 s64 h2 d64 fp16"] * 4 + ["b1 s128 h2 d64 fp16"] * 4
    assert lines[0] == f"b1 s64 h2 d64 fp16: {CFG}: 4 launches"
    assert len(lines) == 2
    assert not calls_of_attention
    # Nothing is flushed or marked between them.
    assert launched.clock.log == ["begin", "wait", "end"] * 2


def test_a_peer_is_launched_the_same_way(launched: Launches, monkeypatch) -> None:
    calls = []

    class Here:
        name = "fa2"

        def absence(self, problem: Any) -> None:
            return None

        def prepare(self, workload: Workload) -> PeerImplementation:
            return PeerImplementation("fa2", lambda: calls.append("fa2"), lambda returned: returned)

    monkeypatch.setattr(launched.tool, "get_peers", lambda names: (Here(),))
    problem = "b1 s64 h2 d64 fp16"
    lines = launched("--ref", "fa2", "--runs", "2", "--problems", problem)
    assert calls == ["fa2"] * 2
    assert lines == [f"{problem}: fa2: 2 launches"]


def test_attention_itself_can_be_named(
    launched: Launches, calls_of_attention: list[dict[str, Any]]
) -> None:
    problem = "b1 s64 h2 d64 fp16 causal"
    launched("--kernels", "ours", "--runs", "2", "--problems", problem)
    assert [options["causal"] for options in calls_of_attention] == [True, True]


def test_what_cannot_be_launched_is_an_error_and_no_gap(launched: Launches) -> None:
    illegal = "(FP16, 64, 512, 512, 4): async+swizzled+load_0_0_0_tiles"
    with pytest.raises(ArgumentError, match="shared memory"):
        launched("--kernels", illegal, "--problems", "b1 s64 h2 d64 fp16")
    absent = "flash_attn_3"
    if PEERS[absent].absence(make_problem()) is not None:
        with pytest.raises(ArgumentError, match=f"ref='{absent}' on 'b1 s64 h2 d64 fp16': "):
            launched("--ref", absent, "--problems", "b1 s64 h2 d64 fp16")


def make_problem() -> Any:
    from flashsmith.families import Problem

    return Problem.parse("b1 s64 h2 d64 fp16")


def test_kernels_come_from_the_environment(tool: ModuleType, monkeypatch) -> None:
    monkeypatch.setenv("KERNELS", "prog")
    plan = tool.make_plan(tool.parse_arguments(["--causal"]))
    assert len(plan.configs) == 7
    assert [str(problem) for problem in plan.problems] == ["b16 s4096 h16 d128 fp16 causal"]
    assert not plan.ours


def test_only_what_is_timed_is_launched_as_often_as_the_protocol_says(tool: ModuleType) -> None:
    def protocol(*options: str) -> Protocol:
        arguments = tool.parse_arguments(["--kernels", str(CFG), *options])
        return tool.make_plan(arguments).protocol

    assert protocol("--time") == INTERLEAVED
    assert protocol("--time", "--runs", "7").runs == 7
    assert protocol("--time", "--num_warmups", "0").num_warmups == 0
    plain = protocol()
    assert (plain.runs, plain.num_warmups) == (1, 0)


def test_nobody_named_is_an_error_that_lists_the_keys(tool: ModuleType) -> None:
    with pytest.raises(SelectionError, match=r"KERNELS is unset.*prog"):
        tool.make_plan(tool.parse_arguments([]))


# --- the scripts ----------------------------------------------------------------------------------


@pytest.fixture
def sweep(tmp_path: Path):
    """Runs a copy of benchmark_autotune.sh with an interpreter that only notes what it is given."""
    folder = tmp_path / "tools" / "benchmark"
    folder.mkdir(parents=True)
    script = folder / "benchmark_autotune.sh"
    script.write_bytes((SCRIPTS / "benchmark_autotune.sh").read_bytes())
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$KERNELS" "$@"\nfor last; do :; done\necho new > "$last"\n')
    python.chmod(0o755)

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(python), **variables}
        return subprocess.run(
            ["bash", str(script), *arguments], capture_output=True, text=True, env=environment
        )

    return run


def test_the_sweep_measures_tune_into_its_file(sweep, tmp_path: Path) -> None:
    done = sweep()
    assert done.stdout == (
        "tune tools/benchmark/pt_bench.py --peers none --seq_lens 1024,2048,4096,8192,16384 "
        "--d_heads 128 --csv profiles/autotune.csv\n"
    )
    (tmp_path / "profiles" / "autotune.csv").write_text("old\n")
    assert "--seq_lens 512 " in sweep("512", KERNELS="64,32").stdout
    assert (tmp_path / "profiles" / "autotune.csv").read_text() == "new\n"
    assert (tmp_path / "profiles" / "autotune.previous.csv").read_text() == "old\n"


def test_the_sweep_by_the_profiler_goes_on_where_it_was(sweep, tmp_path: Path) -> None:
    done = sweep("--ncu", "512")
    assert done.stdout.startswith("tune tools/benchmark/ncu_bench.py --seq_lens 512 ")
    assert done.stdout.endswith("--csv profiles/autotune-ncu.csv\n")


@pytest.mark.parametrize("arguments", [("--fast",), ("512", "1024")])
def test_the_sweep_refuses_what_it_does_not_know(sweep, arguments: tuple[str, ...]) -> None:
    done = sweep(*arguments)
    assert done.returncode == 2
    assert "usage:" in done.stderr


@pytest.mark.gpu
def test_on_a_gpu_named_kernels_run_and_are_timed(tool: ModuleType, capsys) -> None:
    problem = "b2 s256 h4 d64 fp16"
    assert tool.main(["--kernels", str(CFG), "--runs", "2", "--problems", problem]) == 0
    assert capsys.readouterr().out == f"{problem}: {CFG}: 2 launches\n"
    timed = ["--kernels", str(CFG), "--runs", "5", "--problems", problem, "--time"]
    assert tool.main(timed) == 0
    assert "| pass " in capsys.readouterr().out
