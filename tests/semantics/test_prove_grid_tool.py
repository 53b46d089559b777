"""tools/gpu/prove_grid.py: what it writes, and that it goes on where it stopped. No GPU: the proof
and the build are stand-ins."""

from __future__ import annotations

import csv
import re
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from grids.decode_grid import APPENDS, watched_decode_cases
from grids.proof_grid import proof_grid

from flashsmith.errors import EmulatorError, LaunchError
from flashsmith.families import device_spec, family_named, get_kernel_configs
from flashsmith.runtime.operation_run import prepare_operation
from flashsmith.verify import prove
from flashsmith.verify.decode_reference import DecodeReference
from flashsmith.verify.engine import gpu_engine_pays
from flashsmith.verify.tolerance import heads_for_enough_outputs

MATCH = "fp16, d40, s113:203, dense, gqa"
CASES = [str(case) for case in proof_grid() if MATCH in str(case)]
REFUSED = 4


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_tool("gpu/prove_grid.py")
    monkeypatch.setattr(module, "query_gpu", lambda ordinal: SimpleNamespace(arch=90))
    monkeypatch.setattr(module, "build", lambda cases, arch: None)
    return module


@pytest.fixture
def run(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def start(prove: Callable[..., Any], *options: str) -> int:
        monkeypatch.setattr(tool, "prove", prove)
        arguments = ["prove_grid.py", str(tmp_path / "rows.csv"), "--match", MATCH, *options]
        monkeypatch.setattr(sys, "argv", arguments)
        return tool.main()

    return start


def verdict(ok: bool = True) -> Any:
    figures = dict.fromkeys(("max_error", "bound", "rel_l2", "lse_error", "row_max_error"), 1e-4)
    return SimpleNamespace(ok=ok, **figures)


class Prover:
    """Counts proofs; the one at ``bad`` is wrong, the one at ``fatal`` kills the GPU."""

    def __init__(self, bad: int = -1, fatal: int = -1, refused: int = -1) -> None:
        self.bad, self.fatal, self.refused = bad, fatal, refused
        self.calls: list[dict[str, Any]] = []

    def __call__(self, config: Any, **call: Any) -> Any:
        self.calls.append(call)
        place = len(self.calls) - 1
        if place == self.fatal:
            raise LaunchError("the kernel: cudaErrorIllegalAddress")
        if place == self.refused:
            raise EmulatorError("deadlock")
        return verdict(place != self.bad)


def rows_of(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "rows.csv").open(newline="") as file:
        return {row["case"]: row for row in csv.DictReader(file)}


def test_every_case_gets_a_row(run: Callable[..., int], tmp_path: Path) -> None:
    prover = Prover()
    assert run(prover) == 0
    rows = rows_of(tmp_path)
    assert set(CASES) < set(rows)
    assert len(rows) == len(CASES) + REFUSED
    assert all(call["d"] == 40 for call in prover.calls)
    assert all(call["backend"] == "gpu" for call in prover.calls)
    assert rows["fp16, d59"]["ok"] == rows["bf16, d111"]["ok"] == "True"
    assert "multiple of 8" in rows["fp16, d59"]["said"]
    assert rows[CASES[0]]["semantics"]


def test_finished_rows_are_not_proven_again(run: Callable[..., int], tmp_path: Path) -> None:
    assert run(Prover(), "--workers", "1") == 0
    path = tmp_path / "rows.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-3]) + lines[-3][:20])
    again = Prover()
    assert run(again) == 0
    assert len(again.calls) == 3
    assert len(rows_of(tmp_path)) == len(CASES) + REFUSED


def test_a_wrong_row_shows_in_the_exit_status_ever_after(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Prover(bad=3), "--workers", "1") == 1
    assert "WRONG: fp16, d40" in capsys.readouterr().err
    assert sum(row["ok"] == "False" for row in rows_of(tmp_path).values()) == 1
    assert run(Prover()) == 1


def test_a_proof_that_cannot_run_is_a_wrong_row(run: Callable[..., int], tmp_path: Path) -> None:
    assert run(Prover(refused=3), "--workers", "1") == 1
    assert [row["said"] for row in rows_of(tmp_path).values() if row["ok"] == "False"] == [
        "deadlock"
    ]


def test_a_failed_launch_stops_the_run(run: Callable[..., int], tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="IllegalAddress"):
        run(Prover(fatal=0), "--workers", "1")
    assert run(Prover()) == 0


def right(config: Any, **call: Any) -> Any:
    """Of some calls."""
    return verdict(zlib.crc32(repr(call).encode()) % 3 > 0)


def forks(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes have the stand-ins of this one."""
    monkeypatch.setattr(tool, "START_METHOD", "fork")
    monkeypatch.setitem(sys.modules, tool.__name__, tool)
    for name in ("OPENBLAS", "OMP", "MKL"):
        monkeypatch.setenv(f"{name}_NUM_THREADS", "2")


@pytest.mark.parametrize("count", ["1", "2"])
def test_processes_write_the_rows_of_threads(
    tool: ModuleType,
    run: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: str,
) -> None:
    forks(tool, monkeypatch)
    assert run(right) == 1
    expected = rows_of(tmp_path)
    assert {row["ok"] for row in expected.values()} == {"True", "False"}
    (tmp_path / "rows.csv").unlink()
    assert run(right, "--processes", count) == 1
    assert rows_of(tmp_path) == expected
    assert run(right, "--processes", count, "--seconds", "0") == 1
    (tmp_path / "rows.csv").unlink()
    assert run(right, "--processes", count, "--seconds", "0") == 2


def test_a_process_has_no_pytorch(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch"))
    built: list[Any] = []
    monkeypatch.setattr(tool, "build", lambda cases, arch: built.append((cases, arch)))
    tool.begin_process(["a case"], 90)
    assert built == [(["a case"], 90)]
    assert not gpu_engine_pays(1 << 40)


def test_a_failed_launch_of_a_process_stops_the_run(
    tool: ModuleType, run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    forks(tool, monkeypatch)
    with pytest.raises(LaunchError, match="IllegalAddress"):
        run(Prover(fatal=0), "--processes", "2")


def test_it_stops_in_time_and_goes_on(run: Callable[..., int], tmp_path: Path) -> None:
    late = Prover()
    assert run(late, "--seconds", "0") == 2
    assert late.calls == []
    assert run(Prover()) == 0


def test_a_family_of_ones_choice(run: Callable[..., int], tmp_path: Path) -> None:
    prover = Prover()
    assert run(prover, "--family", "wgmma") == 0
    rows = rows_of(tmp_path)
    proven = [row for row in rows.values() if MATCH in row["case"]]
    assert len(proven) == len(prover.calls) == len(CASES)
    assert all(row["case"].startswith("wgmma, ") and "wg): tma+" in row["config"] for row in proven)
    assert {call["sm_count"] for call in prover.calls} == {1, 3, None}
    assert rows["fp16, d59"]["ok"] == "True"


def test_parts_are_the_whole(run: Callable[..., int], tmp_path: Path) -> None:
    proven: list[str] = []
    for number in (1, 2, 3):
        (tmp_path / "rows.csv").unlink(missing_ok=True)
        assert run(Prover(), "--part", f"{number}/3") == 0
        proven += [case for case in rows_of(tmp_path) if MATCH in case]
    assert sorted(proven) == sorted(CASES)


@pytest.mark.parametrize("part", ["0/3", "4/3", "3", "a/b"])
def test_a_part_that_is_none(
    run: Callable[..., int], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(Prover(), "--part", part)
    assert "as 3/8" in capsys.readouterr().err


@pytest.mark.full
def test_gradients_are_proven_as_the_grid_says(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the real proof, in the emulator."""

    def in_emulator(config: Any, *, backend: str, **call: Any) -> Any:
        return prove(config, backend="emulator", **call)

    monkeypatch.setattr(tool, "prove", in_emulator)
    match = "fp16, d32, s3:3, dense, mha, mask left, dlse"
    rows = str(tmp_path / "rows.csv")
    arguments = ["prove_grid.py", rows, "--family", "mma_sync_backward", "--match", match]
    monkeypatch.setattr(sys, "argv", arguments)
    assert tool.main() == 0
    (row,) = rows_of(tmp_path).values()
    assert row["ok"] == "True"
    assert float(row["max_error"]) <= float(row["bound"])


def test_equal_inputs_stand_together(tool: ModuleType) -> None:
    groups: list[Any] = []
    for case in proof_grid():
        key = tool.same_inputs(case)
        if not groups or groups[-1] != key:
            groups.append(key)
    assert len(groups) == len(set(groups))


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("wgmma_dq", "hopper-dq"),
        pytest.param("mma_sync_backward", "backward", marks=pytest.mark.full),
        pytest.param("wgmma_backward", "hopper-backward", marks=pytest.mark.full),
    ],
)
def test_a_handful_of_gradients_shows_every_kernel(
    tool: ModuleType, name: str, kernels: str
) -> None:
    family = family_named(name)
    cases = tool.handful(name)
    assert len(cases) <= 40
    sizes = [case.lengths[0] * case.lengths[1] for case in cases]
    assert sizes == sorted(sizes), "a sanitizer's time may end before the last"
    assert max(max(case.lengths) for case in cases) <= 512
    shown = {knob for case in cases for knob in vars(case.config).items()}
    every = {knob for cfg in get_kernel_configs(kernels) for knob in vars(cfg).items()}
    assert shown >= every
    kernels_of = [
        {str(it.config).split(", ", 1)[1] for it in of} for of in (cases, tool.grid_of(name))
    ]
    assert kernels_of[0] == kernels_of[1]
    launched = {role for case in cases for role in family.kernel_templates(case.config)}
    finish = set() if name == "wgmma_dq" else {"finish"}
    assert launched >= {"main", "prepare", "gaps", "sinks"} | finish
    # Whose dq repeats its bits by another kernel, or by an order of its sums.
    assert ("queries" in launched) == (name == "mma_sync_backward")
    assert any(family.is_deterministic(case.config) for case in cases)


@pytest.mark.parametrize("family", ["mma_sync", "wgmma"])
def test_a_handful_shows_every_semantics(tool: ModuleType, family: str) -> None:
    cases = tool.handful(family)
    assert len(cases) <= 24
    assert len({case.semantics for case in cases}) == 18
    assert len({case.d for case in cases}) == 9
    assert {case.schedule for case in cases} == {0, 1, 2, 3}
    assert max(max(case.lengths) for case in cases) <= 512


def test_a_handful_over_caches_shows_every_kernel(tool: ModuleType) -> None:
    name = "mma_sync_decode"
    cases = tool.handful(name)
    assert len(cases) <= 60
    longest = {str(case) for case in cases if max(case.lengths) > 512}
    assert longest < {str(case) for case in watched_decode_cases(name)} < set(map(str, cases))
    sizes = [case.lengths[0] * case.lengths[1] for case in cases]
    assert sizes == sorted(sizes), "a sanitizer's time may end before the last"
    kernels_of = [
        {str(it.config).split(", ", 1)[1] for it in of} for of in (cases, tool.grid_of(name))
    ]
    assert kernels_of[0] == kernels_of[1]
    assert {case.page for case in cases} == {case.page for case in tool.grid_of(name)}
    assert {case.append for case in cases} == set(APPENDS)


def test_what_a_sanitizer_watches_over_caches_is_short() -> None:
    """Its time goes with the keys and heads of a call: no call is repeated over more heads for more
    outputs, and none has many."""
    for case in watched_decode_cases("mma_sync_decode"):
        rows = case.batch * case.queries
        heads = heads_for_enough_outputs(1, rows, case.heads[0], case.d)
        assert heads == case.heads[0], case
        keys = sum(case.options()["lens_k"]) * case.heads_k * -(-case.queries * case.group // 16)
        assert keys <= 20_000, case


# What each call launches on an H200, or on a part of it: the kind of config, the kernel that reads
# the cache, its cluster, the one that merges, and whether CTAs ask a counter for runs.
_WAYS = (
    *(2 * (("exchange", "decode", 8, "", False), ("own rows", "decode", 8, "", False))),
    ("exchange", "decode", 4, "", False),
    ("own rows", "decode", 4, "", False),
    ("exchange", "decode", 1, "merge_rows", True),
    ("own rows", "decode", 1, "merge_rows", True),
    ("full", "decode", 8, "", False),
    ("full", "decode", 1, "", False),
    ("full", "chunk", 1, "merge_rows", False),
    ("no cluster", "decode", 1, "merge", False),
    ("no cluster", "decode", 1, "merge", False),
    ("no cluster", "decode", 1, "", False),
)


def kind_of(cfg: Any) -> str:
    if cfg.full_tiles:
        return "full"
    if cfg.own_rows:
        return "own rows"
    return "exchange" if cfg.cluster else "no cluster"


@pytest.mark.full
def test_what_a_sanitizer_watches_over_caches_runs_in_every_way(tool: ModuleType) -> None:
    """The plans of an H200, or of a part of it."""
    ways = []
    for case in watched_decode_cases("mma_sync_decode"):
        cfg, reference = case.config, DecodeReference()
        made = reference.case(
            *(cfg, case.problem),
            kind=case.inputs,
            seed=case.seed,
            options=case.options(),
            on_gpu=False,
        )
        device = device_spec("H200")
        device = replace(device, sm_count=case.sm_count or device.sm_count)
        prepared = prepare_operation(
            *(cfg, made.problem, {name: it.copy() for name, it in made.inputs.items()}),
            options=reference.call_options(made.problem, made.options),
            emulate=True,
            arch=device,
        )
        assert prepared.kernel is not None
        plan = prepared.kernel.plan(prepared.call)
        names = [re.sub(r".*decode_(?=[a-z])|_kernel.*", "", it.kernel) for it in plan.launches]
        launches = dict(zip(names, plan.launches, strict=True))
        assert ("append" in launches) == bool(case.page)
        launches.pop("append", None)
        attends, *merges = launches
        assert attends.startswith("paged") == bool(case.page)
        counts = any(workspace.name == "run_counter" for workspace in plan.workspaces)
        ways.append(
            (
                kind_of(cfg),
                "chunk" if "chunk" in attends else "decode",
                launches[attends].cluster[0],
                "".join(merges),
                counts,
            )
        )
    assert ways == [way for way in _WAYS for _ in range(2)]


@pytest.mark.parametrize("paged", [False, True])
def test_what_a_sanitizer_watches_over_caches_merges_few_and_many_runs(paged: bool) -> None:
    """A merging warp has up to eight runs, or several eights; four warps are a CTA."""
    runs = [
        -(-case.longest // case.config.min_keys)
        for case in watched_decode_cases("mma_sync_decode")
        if bool(case.page) == paged and kind_of(case.config) == "no cluster"
    ]
    assert max(runs) > 4 * 8
    assert 1 < min(runs) <= 4
