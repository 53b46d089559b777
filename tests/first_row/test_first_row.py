"""A stranger's family and operation: everything that is there for attention is there for them."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import sweep_fakes as fakes
from stand_ins import HostMemory, PretendedClock

import flashsmith
from flashsmith.benchmark.bench import BenchPlan, run_bench
from flashsmith.benchmark.environment import Environment, Telemetry
from flashsmith.benchmark.measurement import Measurement, Proof
from flashsmith.benchmark.measurement_files import read_rows, write_rows
from flashsmith.benchmark.peers import PeerImplementation, get_peers
from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.timing import Protocol
from flashsmith.benchmark.workload import OperationWorkload, workload_of
from flashsmith.builder import library_for
from flashsmith.chooser import choose
from flashsmith.chooser.winners import WinnersTable
from flashsmith.chooser.winners.key import parse_class
from flashsmith.errors import (
    ArgumentError,
    ConfigParseError,
    IllegalConfigError,
    SelectionError,
)
from flashsmith.families import (
    FAMILIES,
    DType,
    KernelConfig,
    Problem,
    check_legal,
    device_spec,
    get_kernel_configs,
    nearest_legal,
)
from flashsmith.families import parse_kernel_name_into_config as parse
from flashsmith.families.family import register_family
from flashsmith.families.knob import knob
from flashsmith.operations import OPERATIONS
from flashsmith.runtime import libraries, run_operation
from flashsmith.runtime.launch_plan import InitialContents, LaunchPlan
from flashsmith.runtime.libraries import loaded_kernels
from flashsmith.tuning import gpu_runner
from flashsmith.tuning.journal import Journal
from flashsmith.tuning.space import search_space
from flashsmith.tuning.sweep import Settings
from flashsmith.tuning.sweep_progress import SweepProgress
from flashsmith.tuning.trial import PROVE, Build, Record, is_right
from flashsmith.tuning.tune import plan_races, tune
from flashsmith.verify import prove

PLAIN, STAGED = "(FP16, 64, 2): first_row", "(FP16, 64, 2): first_row+staged"
PROBLEM = "b2 s1:5 h3 d64 fp16 first_row"
A100 = device_spec("A100")


@pytest.fixture
def built(first_row: ModuleType) -> dict[str, Any]:
    """Both configs, their kernels loaded from one library."""
    configs = {text: parse(text) for text in (PLAIN, STAGED)}
    loaded_kernels.add(library_for(list(configs.values()), arch=80))
    return configs


# --- names and rules -----------------------------------------------------------------------------


def test_its_configs_parse_and_are_listed(first_row: ModuleType) -> None:
    for cfg in get_kernel_configs("first-row"):
        assert parse(str(cfg)) == cfg
        assert cfg.family.operation == "first_row"
    assert parse("first_row_kernel<FirstRowKernelConfig{(flashsmith::DType)5, 64, 2}>()") == parse(
        PLAIN
    )
    assert parse(STAGED) == first_row.FirstRowKernelConfig("fp16", 64, 2, staged=True)
    with pytest.raises(ConfigParseError, match="unknown feature 'stagde'; did you mean 'staged'"):
        parse("(FP16, 64, 2): first_row+stagde")


def test_a_broken_rule_is_reported_with_the_nearest_legal_config(first_row: ModuleType) -> None:
    wide = parse("(FP16, 64, 4): first_row")
    with pytest.raises(IllegalConfigError, match="at most d_head: each copies an element or more"):
        check_legal(wide, A100)
    assert parse(PLAIN) in nearest_legal(wide, A100)
    with pytest.raises(IllegalConfigError, match="n_warps must be 1, 2 or 4: there are kernels"):
        check_legal(parse("(FP16, 128, 3): first_row"), A100)
    with pytest.raises(IllegalConfigError, match="d_head must be 64 or 128: there are kernels for"):
        check_legal(parse("(FP16, 4000, 2): first_row"), A100)


def test_its_problems_have_a_word_of_their_own(first_row: ModuleType) -> None:
    problem = Problem.parse(PROBLEM)
    assert (str(problem), problem.computed) == (PROBLEM, first_row.FIRST_ROW)
    assert problem.attn_flop() == 2 * 3 * 64
    assert first_row.FIRST_ROW.bytes(problem) == 2 * (2 * 5 * 3 * 64 + 2 * 3 * 64)
    with pytest.raises(ArgumentError, match="semantics='causal': first_row supports no causal"):
        Problem.parse(f"{PROBLEM} causal")


# --- kernels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [PLAIN, STAGED])
def test_its_kernels_are_right(built: dict[str, Any], text: str) -> None:
    for schedule_seed in (None, 7):
        verdict = prove(
            built[text], seq=3, batch=2, heads=2, d=40, checks=True, schedule_seed=schedule_seed
        )
        assert verdict.ok, str(verdict)
        assert verdict.outputs >= 4096
        assert (verdict.max_error, verdict.meaning) == (0.0, "plain")


def test_any_strides_and_an_output_of_ones_own(built: dict[str, Any]) -> None:
    problem = Problem.parse("b2 s1:5 h3 d40 fp16 first_row")
    wide = np.random.default_rng(0).standard_normal((2, 5, 4, 48)).astype(np.float16)
    v, o = wide[:, :, 1:, 8:], np.zeros((2, 3, 40), np.float16)
    for cfg in built.values():
        o[:] = 0
        result = run_operation(cfg, problem, {"v": v, "o": o})
        assert result.outputs["o"] is o
        np.testing.assert_array_equal(o, v[:, 0])
        made = run_operation(cfg, problem, {"v": v}, poisoned=True).outputs["o"]
        np.testing.assert_array_equal(made, o)


def _later(plan: LaunchPlan, offset: int) -> LaunchPlan:
    first, second = plan.launches
    (place,) = second.workspace_addresses
    moved = replace(second, workspace_addresses=(place._replace(byte_offset=offset),))
    return replace(plan, launches=(first, moved))


MUTANTS: dict[str, Callable[[LaunchPlan], LaunchPlan]] = {
    "not zeroed": lambda plan: replace(
        plan,
        workspaces=tuple(w._replace(contents=InitialContents.UNDEFINED) for w in plan.workspaces),
    ),
    "swapped": lambda plan: replace(plan, launches=plan.launches[::-1]),
    "the second left out": lambda plan: replace(plan, launches=plan.launches[:1]),
    "an offset wrong": lambda plan: _later(plan, 4),
    "too small a workspace": lambda plan: replace(
        plan, workspaces=tuple(w._replace(nbytes=w.nbytes - 4) for w in plan.workspaces)
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_plan_of_two_launches_is_caught(
    built: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    right = libraries.plan_from_library
    wrong = MUTANTS[name]
    monkeypatch.setattr(libraries, "plan_from_library", lambda *described: wrong(right(*described)))
    assert not prove(built[STAGED], seq=2, checks=True).ok


def test_a_wrong_kernel_is_located(built: dict[str, Any], first_row: ModuleType) -> None:
    reference = first_row.reference.REFERENCE
    case = reference.case(built[PLAIN], Problem.parse(PROBLEM), kind="random", seed=0, options={})
    o = case.expected.rounded["o"].copy()
    o[1, 2, 3] += 1
    found = reference.compare(built[PLAIN], case, {"o": o})
    assert not found.ok
    assert str(found.first_mismatch).startswith("o[1, 2, 3]: got ")
    assert found.mismatches == 1


def _v(**change: Any) -> np.ndarray:
    return np.zeros(change.get("shape", (2, 5, 3, 64)), change.get("dtype", np.float16))


@pytest.mark.parametrize(
    ("tensors", "keywords", "message"),
    [
        ({}, {}, "v: missing; first_row reads it"),
        ({"w": _v()}, {}, "w: first_row has no such tensor"),
        ({"v": _v(shape=(2, 5, 64))}, {}, "v: shape (2, 5, 64); must be (batch, seq_k, heads_k,"),
        ({"v": _v(shape=(2, 4, 3, 64))}, {}, "(2, 5, 3, 64) of 'b2 s1:5 h3 d64 fp16 first_row'"),
        ({"v": _v(dtype=np.float32)}, {}, "v: dtype float32; must be float16"),
        ({"v": _v().transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2)}, {},
         "v: stride of the last dimension is 3; must be 1"),
        ({"v": _v(shape=(2, 5, 3, 65))[..., :64]}, {}, "v: stride 975 of dimension 0 is not a"),
        ({"v": _v(), "o": _v()[:, 0][:, :2]}, {}, "o: shape (2, 2, 64); must be (batch, heads_k"),
        ({"v": _v()}, {"options": {"scale": 2.0}}, "scale=2.0: first_row has no such option"),
        ({"v": _v()}, {"wanted": ("lse",)}, "wanted='lse': first_row has no such output"),
        ({"v": [1.0]}, {}, "v: got builtins.list; give a PyTorch tensor"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(
    first_row: ModuleType, tensors: dict[str, Any], keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        run_operation(parse(PLAIN), Problem.parse(PROBLEM), tensors, **keywords)


def test_an_output_may_be_left_out_where_the_operation_says_so(first_row: ModuleType) -> None:
    v, problem, cfg = _v(), Problem.parse(PROBLEM), parse(PLAIN)
    with pytest.raises(ArgumentError, match="unwanted='o': first_row has no such output; usual ar"):
        run_operation(cfg, problem, {"v": v}, unwanted=["o"])
    tensors = tuple(
        replace(it, presence="usual") if it.name == "o" else it
        for it in first_row.FIRST_ROW.tensors
    )
    OPERATIONS["first_row"] = replace(
        first_row.FIRST_ROW, tensors=tensors, numbers=lambda call: tuple(call.sizes.values())
    )
    assert run_operation(cfg, problem, {"v": v}, unwanted=["o"]).outputs == {}
    assert problem.computed.bytes(problem) == first_row.FIRST_ROW.bytes(problem)
    with pytest.raises(ArgumentError, match="o: given, and unwanted='o'; leave one out"):
        run_operation(cfg, problem, {"v": v, "o": v[:, 0].copy()}, unwanted=["o"])


def test_an_option_may_say_the_dtype_of_outputs(first_row: ModuleType) -> None:
    tensors = tuple(
        replace(it, presence="usual", dtype_option="out_dtype") if it.name == "o" else it
        for it in first_row.FIRST_ROW.tensors
    )
    changed = replace(first_row.FIRST_ROW, tensors=tensors, options={"out_dtype": None})
    OPERATIONS["first_row"] = changed
    problem, cfg, o = Problem.parse(PROBLEM), parse(PLAIN), np.zeros((2, 3, 64), np.float32)
    with pytest.raises(ArgumentError, match="o: dtype float32; must be float16"):
        run_operation(cfg, problem, {"v": _v(), "o": o})
    with pytest.raises(ArgumentError, match="o: dtype float16; must be float32"):
        run_operation(
            *(cfg, problem, {"v": _v(), "o": o.astype(np.float16)}),
            options={"out_dtype": "float32"},
        )


def test_repeatable_sums_are_a_matter_of_the_config(
    first_row: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    OPERATIONS["first_row"] = replace(first_row.FIRST_ROW, options={"deterministic": False})
    monkeypatch.setattr(first_row.FirstRowFamily, "is_deterministic", lambda self, cfg: cfg.staged)
    with pytest.raises(
        ArgumentError, match=r"deterministic=True: \(FP16, 64, 2\): first_row sums in an order "
    ):
        run_operation(
            parse(PLAIN), Problem.parse(PROBLEM), {"v": _v()}, options={"deterministic": True}
        )


def test_an_output_may_not_lie_in_what_is_read_nor_be_read_only(first_row: ModuleType) -> None:
    v, problem = _v(), Problem.parse(PROBLEM)
    with pytest.raises(ArgumentError, match="o: shares memory with v"):
        run_operation(parse(PLAIN), problem, {"v": v, "o": v[:, 0]})
    o = np.zeros((2, 3, 64), np.float16)
    o.flags.writeable = False
    with pytest.raises(ArgumentError, match="o: is read-only"):
        run_operation(parse(PLAIN), problem, {"v": v, "o": o})


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("s5 d64 fp16", "problem: 'b1 s5 h1 d64 fp16' needs the operation forward; the config's"),
        ("s5 d64 bf16 first_row", "problem: dtype BF16; the config's kernel is for FP16"),
        ("s5 d72 fp16 first_row", "problem: d 72; the config's kernel is for up to 64"),
    ],
)
def test_problems_of_others_are_refused(first_row: ModuleType, problem: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        prove(parse(PLAIN), Problem.parse(problem))


def test_a_proof_refuses_options_that_its_operation_lacks(
    first_row: ModuleType,
) -> None:
    with pytest.raises(ArgumentError, match="sinks=True: first_row has no such option"):
        prove(parse(PLAIN), sinks=True)
    with pytest.raises(ArgumentError, match="semantics='softcap': first_row supports no softcap"):
        prove(parse(PLAIN), softcap=3.0)
    with pytest.raises(ArgumentError, match="inputs='huge': allowed are random"):
        prove(parse(PLAIN), inputs="huge")


# --- benchmark, tuner, table ---------------------------------------------------------------------


def bench(*configs: Any, peers: str = "none") -> list[Measurement]:
    """Rows of PROBLEM on pretended hardware: the emulator runs the kernels, and a clock says what
    they took."""
    return run_bench(
        BenchPlan(
            (Problem.parse(PROBLEM),),
            configs=configs,
            ours=True,
            peers=get_peers(peers),
            protocol=Protocol(num_warmups=0, runs=3, warmup_ms=0, measure_ms=0, num_estimates=1),
        ),
        A100,
        environment=Environment("Pretended", 80, "1", "13.0", "", "0.1", "abc", "3.11"),
        clock=PretendedClock(tick=1e-7),
        telemetry=Telemetry(sensor=lambda: (1500.0, 650.0)),
        reporter=ProgressReporter(quiet=True),
        make_workload=lambda problem, seed: workload_of(problem, seed, HostMemory()),
    )


def test_it_is_benched(built: dict[str, Any], tmp_path: Path) -> None:
    rows = bench(*built.values(), peers="all")
    assert [(row.implementation, row.verdict) for row in rows] == [
        (PLAIN, "pass"),
        (STAGED, "pass"),
    ]
    assert all(row.family == "first_row" and row.tflops for row in rows)
    write_rows(tmp_path / "rows.csv", rows)
    assert [row.problem for row in read_rows(tmp_path / "rows.csv")] == 2 * [Problem.parse(PROBLEM)]


@pytest.mark.parametrize("off", [0.0, 1.0])
def test_peers_of_its_operation_take_part(
    built: dict[str, Any], first_row: ModuleType, monkeypatch: pytest.MonkeyPatch, off: float
) -> None:
    def prepare(workload: OperationWorkload) -> PeerImplementation:
        o = workload.inputs["v"][:, 0] + np.float16(off)
        return PeerImplementation("numpy", lambda: {"o": o}, lambda found: found)

    peer = SimpleNamespace(
        name="numpy", absence=lambda problem: None, version=lambda: "2", prepare=prepare
    )
    monkeypatch.setitem(sys.modules, "first_row_peers", SimpleNamespace(ALL=[peer]))
    OPERATIONS["first_row"] = replace(first_row.FIRST_ROW, peers="first_row_peers:ALL")
    ours, theirs = bench(built[PLAIN], peers="fa2")
    assert (ours.implementation, ours.verdict) == (PLAIN, "pass")
    assert (theirs.implementation, theirs.kind) == ("numpy", "peer")
    assert theirs.verdict == ("fail" if off else "pass")


def test_the_tuners_own_bench_serves_it(
    built: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler and the bench of real sweeps, with the emulator instead of the GPU."""
    monkeypatch.setattr(gpu_runner, "CudaEvents", partial(PretendedClock, tick=1.0))
    monkeypatch.setattr(gpu_runner, "Telemetry", partial(Telemetry, sensor=lambda: (1.0, 1.0)))
    monkeypatch.setattr(gpu_runner, "gpu_memory", HostMemory)
    problem = Problem.parse(PROBLEM)
    builds = [Build.of(problem, cfg) for cfg in built.values()]
    compiled = gpu_runner.NvccCompiler(A100).compile(builds)
    assert not any(one.error for one in compiled)
    bench = gpu_runner.GpuBench()
    bench.open()
    bench.prepare(problem)
    kernels = [(build, one.library) for build, one in zip(builds, compiled, strict=True)]
    for kernel in kernels:
        assert is_right(bench.prove(problem, *kernel, thorough=True))
    assert [one.median_ms for one in bench.time(problem, kernels, 2, 0.0, False)] == [1.0, 1.0]


def test_a_sweep_is_gone_on_with_until_its_sources_change(
    first_row: ModuleType, tmp_path: Path
) -> None:
    """Its C++ lies elsewhere than the package's, and a header of it is included by another."""
    problem = Problem.parse("b4 s512 h4 d64 fp16 first_row")
    build = Build.of(problem, parse(PLAIN))
    csrc = tmp_path / "csrc" / "first_row"
    shutil.copytree(FAMILIES["first_row"].csrc, csrc)

    def records() -> tuple[int, int]:
        FAMILIES.pop("first_row")
        register_family(first_row.FirstRowFamily(), csrc)
        journal = Journal(tmp_path / "journal.jsonl", "here")
        journal.close()
        return len(journal.records), journal.foreign

    assert records() == (0, 0)
    journal = Journal(tmp_path / "journal.jsonl", "here")
    journal.part("here").add([Record(PROVE, problem, (build,), proof=Proof("pass"))])
    journal.close()
    assert records() == (1, 0)
    header = csrc / "config.cuh"
    header.write_text(header.read_text() + "// changed\n")
    assert records() == (0, 1)


def test_it_is_tuned_and_its_winner_kept(first_row: ModuleType, tmp_path: Path) -> None:
    problem = Problem.parse("b4 s512 h4 d64 fp16 first_row")
    races = plan_races([problem], fakes.DEVICE, "both", Settings())
    assert [build.name for build in races[0].builds] == [PLAIN, STAGED]
    world = fakes.World({PLAIN: fakes.Kernel(ms=1.0), STAGED: fakes.Kernel(ms=1.5)})
    table = tmp_path / "mine.json"
    done = tune(races, fakes.fake_runner(world), Settings(), tmp_path / "out",
                SweepProgress(quiet=True), table=table)  # fmt: skip
    assert done.ok
    found = WinnersTable.load(table)
    (entry,) = found
    assert (entry.best.family, entry.best.config) == ("first_row", PLAIN)
    assert str(entry.key) == "H200 sm_90 fp16 d64 first_row s512 bh16"
    assert not found.validate()
    assert [one.entry for one in found.lookup(problem, fakes.DEVICE)] == [entry]
    assert found.lookup(Problem.parse("b4 s512 h4 d64 fp16"), fakes.DEVICE) == []
    chosen = choose(problem, fakes.DEVICE, table=found)
    assert (str(chosen.config), chosen.evidence) == (PLAIN, "table")
    offered = choose(problem, fakes.DEVICE, table=WinnersTable())
    assert (str(offered.config), offered.evidence, offered.tflops) == (PLAIN, "offered", 0.0)
    assert "expected" not in str(offered)
    assert f"runner-up   {STAGED}\n" in f"{offered}\n"
    # Without the package the entry is kept, and a note names its operation.
    del OPERATIONS["first_row"]
    parse_class.cache_clear()
    strange = WinnersTable.load(table)
    assert len(strange) == 0
    assert (
        "'first_row' is not a word of semantics, and no operation of that name" in strange.notes[0]
    )
    assert strange.to_json()["entries"] == found.to_json()["entries"]


def test_its_space_is_for_its_own_problems(first_row: ModuleType) -> None:
    theirs, ours = (Problem.parse(f"s512 d64 fp16 {word}") for word in ("plain", "first_row"))
    with pytest.raises(SelectionError, match="space='first-row': its kernels compute first_row"):
        search_space(theirs, A100, "first-row")
    assert {str(cfg) for cfg in search_space(ours, A100, "first-row")} == {PLAIN, STAGED}
    assert [str(cfg) for cfg in search_space(ours, A100, PLAIN)] == [PLAIN]
    with pytest.raises(SelectionError, match=r"none of its configs \(7\) is for"):
        search_space(ours, A100, "prog")
    assert {cfg.family.operation for cfg in search_space(theirs, A100, "both")} == {"forward"}


def test_notes_on_a_short_d_are_not_about_attention(first_row: ModuleType) -> None:
    notes = choose("b2 s5 h3 d40 fp16 first_row", A100).notes
    assert "d = 40 runs on d_head 64: 38% are columns that do not exist" in notes


# --- what cannot be registered -------------------------------------------------------------------


def test_a_family_of_an_operation_that_is_not_there_is_refused(first_row: ModuleType) -> None:
    class Lost(first_row.FirstRowFamily):  # type: ignore[misc, name-defined]
        operation = "first_rwo"

    del FAMILIES["first_row"]
    with pytest.raises(ArgumentError, match="operation='first_rwo': no such operation is reg"):
        register_family(Lost())


def test_a_reference_that_is_none_is_refused(first_row: ModuleType) -> None:
    OPERATIONS["first_row"] = replace(first_row.FIRST_ROW, reference="first_row:FIRST_ROW")
    from flashsmith.verify.prove import _REFERENCES

    _REFERENCES.pop("first_row", None)
    with pytest.raises(ArgumentError, match=r"reference .*'first_row:FIRST_ROW' is an object of"):
        prove(parse(PLAIN))


def test_attention_refuses_a_config_that_computes_something_else(first_row: ModuleType) -> None:
    cfg = parse("(FP16, 64, 1): first_row")
    q = np.zeros((1, 64, 1, 64), np.float16)
    wrong = r"^cfg: \(FP16, 64, 1\): first_row computes first_row, but the call needs forward"
    with pytest.raises(ArgumentError, match=wrong):
        flashsmith.forward(cfg, q, q, q)
    with pytest.raises(ArgumentError, match=r"^config: got \(FP16, 64, 1\): first_row; give a "):
        flashsmith.attention(q, q, q, config=cfg)
    with pytest.raises(ArgumentError, match="computes first_row: choose another config"):
        flashsmith.plan_forward(cfg, Problem.parse("s64 d64 fp16"), device_spec("A100"))


def test_a_config_of_an_unregistered_family() -> None:
    @dataclass(frozen=True, order=True)
    class Stray(KernelConfig):
        FAMILY: ClassVar[str] = "stray"
        OLDEST_ARCH: ClassVar[int] = 80

        dtype: DType = knob("element type", values=tuple(DType))
        d_head: int = knob("head dimension", values=(64,))

    q = np.zeros((1, 64, 1, 64), np.float16)
    with pytest.raises(ArgumentError, match=r"^cfg: Stray belongs to no registered family"):
        flashsmith.forward(Stray(DType.FP16, 64), q, q, q)
