"""tools/gpu/sources_in_turns.py on made-up times: its pairs, its rounds, and that it can fail."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import shared_kernels
from stand_ins import HostMemory

from flashsmith.benchmark.timing import Replay
from flashsmith.benchmark.workload import workload_of
from flashsmith.builder.sources import package_sources
from flashsmith.families import (
    KernelConfig,
    Problem,
    device_spec,
    parse_kernel_name_into_config,
)
from flashsmith.runtime.libraries import load_library, loaded_kernels

# Kernels that other tests have, too.
LAUNCHED = [
    (parse_kernel_name_into_config(config), Problem.parse(text))
    for config, text in (
        (
            "(FP16, 64, 64, 32, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax",
            "b2 s63 h2:1 d64 fp16 causal",
        ),
        (
            "(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_2",
            "b2 s1:130 h4:2 d64 fp16 causal decode page16",
        ),
    )
]
for _config, _problem in LAUNCHED:
    shared_kernels.want([_config], _problem.required_semantics(_config))
CACHES = [
    ("b1 s1:8192 h32:8 d128 bf16 decode", True),
    ("b64 s1:8192 h32:8 d128 bf16 decode", False),
    ("b1 s128:8192 h32:8 d128 bf16", False),
]


@dataclass(frozen=True)
class MadeUpLibrary:
    """Kernels whose PTX is their name, and that of those that changed another one."""

    module: ModuleType
    is_new: bool

    def entry(self, config: Any) -> SimpleNamespace:
        report = dict.fromkeys(kernel_pairs(self.module).RESOURCES, 0)
        return SimpleNamespace(**report | {"registers": self.module.registers * self.is_new})

    def ptx(self, config: Any) -> str:
        return "mov;" if self.is_new and str(config) in self.module.changed else "add;"

    def ptx_beside(self, config: Any) -> dict[str, str]:
        return {"merge": "ret;"}


def kernel_pairs(tool: ModuleType) -> ModuleType:
    """The tool's other module."""
    return sys.modules[tool.Pair.__module__]


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool: the new kernels take 1 / module.ratio of the old ones' time, and no compiler."""
    module = load_tool("gpu/sources_in_turns.py")
    module.ratio, module.right, module.registers = 1.0, True, 168
    module.changed = ()

    def libraries_of(csrc: Path, pairs: Any) -> dict[Any, Any]:
        is_new = csrc == package_sources()
        return {pair.kernel: MadeUpLibrary(module, is_new) for pair in pairs}

    def measured(pair: Any, kernels: Any) -> Callable[[], dict[str, Any]]:
        row = {"problem": str(pair.problem), "ratio": str(module.ratio), "base_right": True}
        return lambda: row | {"new_right": module.right}

    monkeypatch.setattr(module, "libraries_of", libraries_of)
    monkeypatch.setattr(module, "loaded", dict)
    monkeypatch.setattr(module, "measured", measured)
    environment = SimpleNamespace(collect=lambda index: SimpleNamespace(gpu="none"))
    monkeypatch.setattr(module, "Environment", environment)
    return module


@pytest.fixture
def run(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, list[dict[str, str]]]]:
    """Runs it beside a copy of csrc's first header; exit status and rows."""
    base = tmp_path / "csrc"
    (base / "common").mkdir(parents=True)
    (base / "common" / "forward_args.cuh").write_text("// older\n")

    def run(*options: str) -> tuple[int, list[dict[str, str]]]:
        out = tmp_path / "rows.csv"
        monkeypatch.setattr(sys, "argv", ["tool", str(out), "--base", str(base), *options])
        status = tool.main()
        return status, list(csv.DictReader(out.open())) if out.exists() else []

    return run


def test_every_pair_that_ranks_first_is_measured_in_rounds(tool: ModuleType, run: Any) -> None:
    status, rows = run("--rounds", "3")
    assert status == 0
    pairs = tool.first_ranked(["forward"])
    assert len({(pair.config, pair.semantics) for pair in pairs}) == len(pairs) > 40
    assert {pair.problem.operation for pair in pairs} == {"forward"}, "unless others are asked for"
    assert [row["problem"] for row in rows] == [str(p.problem) for p in pairs for _ in range(3)]
    assert rows[0]["base_csrc"] != rows[0]["csrc"]


def test_softcapped_pairs_are_the_same_kernels(tool: ModuleType, run: Any) -> None:
    capped = tool.first_ranked(["forward"], True)
    assert {pair.config for pair in capped} == {
        pair.config for pair in tool.first_ranked(["forward"])
    }
    assert all(pair.semantics.softcap for pair in capped)
    _, rows = run("--softcap", "--only", "FP16", "--rounds", "1")
    assert rows
    assert all("softcap" in row["problem"] and "fp16" in row["problem"] for row in rows)


def test_of_a_family_it_measures_what_would_serve_alone(tool: ModuleType, run: Any) -> None:
    """Also where kernels of another family rank first, as wgmma's do throughout on an H200.

    mma_sync has no forward kernel of d 512.
    """
    problems = {pair.problem for pair in tool.first_ranked(["forward"])}
    pairs = tool.first_ranked(["forward"], family="mma_sync")
    assert {pair.config.FAMILY for pair in pairs} == {"mma_sync"}
    assert len({(pair.config, pair.semantics) for pair in pairs}) == len(pairs) > 20
    assert {pair.problem.d for pair in pairs} == {problem.d for problem in problems} - {512}
    _, rows = run("--family", "mma_sync", "--rounds", "1")
    assert [row["problem"] for row in rows] == [str(pair.problem) for pair in pairs]


def test_a_slow_pair_is_measured_longer(tool: ModuleType, run: Any) -> None:
    tool.ratio = 0.97
    _, rows = run("--rounds", "2", "--only", "d192.*causal")
    problems = {row["problem"] for row in rows}
    assert len(rows) == (2 + tool.MORE_ROUNDS) * len(problems) > 0


@pytest.mark.parametrize(("name", "value"), [("ratio", 0.9), ("right", False)])
def test_it_fails_for_slow_and_for_wrong_kernels(
    tool: ModuleType, run: Any, name: str, value: Any
) -> None:
    setattr(tool, name, value)
    assert run("--rounds", "1", "--least", "0.998")[0] == 1


def test_changed_registers_are_told(
    tool: ModuleType, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tool.registers = 200
    assert run("--build-only") == (0, [])
    assert "registers 0 -> 200" in capsys.readouterr().out


def test_pairs_of_other_operations_are_those_of_their_entries(tool: ModuleType, run: Any) -> None:
    _, rows = run("--rounds", "1", "--operations", "decode", "backward")
    problems = [row["problem"] for row in rows]
    assert {"decode" in problem or "backward" in problem for problem in problems} == {True}
    assert len(problems) == len(tool.first_ranked(["decode"])) + len(
        tool.first_ranked(["backward"])
    )


def test_equal_machine_code_is_not_timed(
    tool: ModuleType, run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal PTX makes equal code, and other PTX may."""
    pairs = tool.first_ranked(["decode"])
    first, second = pairs[0], next(p for p in pairs if p.config != pairs[0].config)
    tool.changed = str(first.config), str(second.config)
    digests = {"mov;": "1", "add;": "2"}
    monkeypatch.setattr(kernel_pairs(tool), "code_digest", digests.__getitem__)
    asked = "--rounds", "1", "--operations", "decode", "--changed-only"
    _, rows = run(*asked)
    said = f"of {len(pairs)} pairs differ in machine code"
    kernels = {pair.kernel for pair in pairs if str(pair.config) in tool.changed}
    assert len(rows) == len(kernels) >= 2
    assert f"{len(kernels)} of {len(pairs)} pairs differ in machine code" in capsys.readouterr().out
    digests["mov;"] = "2"
    status, _ = run(*asked)
    assert status == 0
    assert f"0 {said}" in capsys.readouterr().out


def test_the_mean_has_the_interval_of_single_rounds(tool: ModuleType) -> None:
    ratios = [[1.0, 1.2, 0.8, 1.0, 1.0, 1.0, 1.0], [0.81] * 30]
    mean = tool.geometric_mean(ratios)
    assert mean.median == pytest.approx(0.9)
    # Of seven rounds, all but none: the least and the greatest.
    assert (mean.low, mean.high) == pytest.approx(((0.8 * 0.81) ** 0.5, (1.2 * 0.81) ** 0.5))


def test_the_interval_decides_and_slow_pairs_are_named(
    tool: ModuleType, run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = iter([1.05, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0] * 2)
    right = {"base_right": True, "new_right": True}
    monkeypatch.setattr(
        tool, "measured", lambda pair, kernels: lambda: right | {"ratio": str(next(rounds))}
    )
    pair = str(tool.first_ranked(["forward"])[0])
    asked = "--only", f"^{re.escape(pair)}$", "--rounds", "7", "--least"
    assert run(*asked, "0.95")[0] == 1
    assert run(*asked, "0.89")[0] == 0
    assert "below" not in capsys.readouterr().out
    slow = right | {"ratio": "0.97"}
    monkeypatch.setattr(tool, "measured", lambda pair, kernels: lambda: slow)
    run(*asked, "0")
    assert f"below 0.98: 0.9700 {pair}" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "in_graphs"), CACHES)
def test_a_small_cache_is_measured_in_graphs(tool: ModuleType, text: str, in_graphs: bool) -> None:
    protocol = tool.protocol_of(Problem.parse(text))
    assert protocol.in_graphs is in_graphs
    assert protocol.flush_l2 is not in_graphs


@pytest.mark.parametrize(("config", "problem"), LAUNCHED)
def test_a_pair_is_launched_by_just_the_kernel_that_is_given(
    tool: ModuleType, config: KernelConfig, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the emulator, which runs host tensors; no other library is looked for."""
    library = shared_kernels.load([config], problem.required_semantics(config))
    kernel = load_library(library)[config]
    monkeypatch.setattr(tool, "query_gpu", lambda ordinal: device_spec(80))
    monkeypatch.setattr(loaded_kernels, "get", None)
    workload = workload_of(problem, memory=HostMemory())
    implementation = tool.implementation("new", kernel, workload)
    assert (implementation.name, implementation.config) == ("new", config)
    verdict = workload.check(implementation.output())
    assert verdict.ok, verdict.reasons


def test_kernels_in_graphs_that_write_the_same_tensor_are_judged_one_by_one(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = SimpleNamespace(by="")

    def check(output: Any) -> SimpleNamespace:
        return SimpleNamespace(reasons=() if output.by == "new" else ("it is wrong",))

    def captured(name: str, each: list[Any], *_: Any) -> tuple[Replay, Any]:
        assert len(each) > 1, "caches in turn"
        written.by = name
        return Replay(name, lambda: None, 48), written

    workload = SimpleNamespace(check=check, memory=None)
    monkeypatch.setattr(tool, "workload_of", lambda problem, seed=0: workload)
    monkeypatch.setattr(tool, "implementation", lambda name, kernel, workload: name)
    monkeypatch.setattr(tool, "captured", captured)
    monkeypatch.setattr(tool, "CudaEvents", lambda: None)
    pair = tool.Pair(None, Problem.parse(CACHES[0][0]))
    both, calls = tool.contenders(pair, {"base": None, "new": None})
    assert {one.name: one.why_wrong() for one in both} == {"base": "it is wrong", "new": ""}
    assert calls == 48


@pytest.mark.parametrize(
    "options",
    [("--base", "/nowhere"), ("--only", "d640"), ("--family", "wgmma", "--operations", "decode")],
)
def test_what_leaves_nothing_to_measure_is_said(run: Any, options: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        run(*options)
