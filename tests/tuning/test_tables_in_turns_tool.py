"""tools/gpu/tables_in_turns.py on made-up times: what it compares, what it settles, and that it can
fail."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from flashsmith.benchmark import rounds as rounds_module
from flashsmith.benchmark.environment import Environment
from flashsmith.benchmark.rounds import Contender
from flashsmith.benchmark.timing import Samples
from flashsmith.chooser import choose
from flashsmith.chooser.winners import Entry, RankedConfig, WinnersTable
from flashsmith.families import Problem, device_spec, parse_kernel_name_into_config

# Of a GPU without a table that resembles one with a table.
DEVICE = device_spec("GH200")
PROBLEM = Problem.parse("b16 s4096 h16 d128 fp16")
BACKWARD = Problem.parse("b16 s4096 h16 d128 bf16 backward causal")


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool on a GPU where every kernel takes 1 ms, or what `times` says of its config."""
    module = load_tool("gpu/tables_in_turns.py")
    module.times, module.wrong = {}, ()

    def prepared(cell: Any, *, replays: bool) -> tuple[list[Any], dict[str, float], None]:
        names = [*cell.kernels, *(["cudnn"] if replays else [])]
        contenders = []
        for name in names:
            config = str(cell.kernels.get(name))
            ms, why = module.times.get(config, 1.0), "NaN" if config in module.wrong else ""
            contenders.append(Contender(name, lambda ms=ms: ms, lambda why=why: why))
        return contenders, dict.fromkeys(names, 1e-4), None

    def measure(contenders: Any, protocol: Any, clock: None) -> dict[str, Samples]:
        return {one.name: Samples((one.launch(),) * 3, 1755.0, 700.0) for one in contenders}

    monkeypatch.setattr(module, "prepared", prepared)
    monkeypatch.setattr(rounds_module, "measure", measure)
    monkeypatch.setattr(module, "query_gpu", lambda ordinal: DEVICE)
    environment = Environment(DEVICE.name, 90, "580", "13.0", "2.11", "0.1.0", "csrc 0", "3.12")
    monkeypatch.setattr(module, "Environment", SimpleNamespace(collect=lambda ordinal: environment))
    return module


def chosen(problem: Problem, table: WinnersTable | None = None, **asked: Any) -> str:
    return str(choose(problem, DEVICE, table=table or WinnersTable.shipped(), **asked).config)


def tuned(path: Path, problem: Problem, *configs: str, step: float = 0.01) -> None:
    """A table with these configs in that order, a step apart."""
    table = WinnersTable()
    ranked = [
        RankedConfig(
            family=parse_kernel_name_into_config(config).FAMILY,
            config=config,
            ms=1 + place * step,
            tflops=problem.attn_flop() / (1 + place * step) / 1e9,
            environment={"gpu": DEVICE.name, "time": "2026-11-23T12:00:00+00:00"},
        )
        for place, config in enumerate(configs)
    ]
    table.add(problem, DEVICE, ranked)
    table.save(path)


def entry_of_h200(problem: Problem) -> Entry:
    return next(one for one in WinnersTable.shipped().select("H200") if one.problem == problem)


def others_of(problem: Problem, count: int) -> list[str]:
    """What the H200's table has there after its choice."""
    entry = entry_of_h200(problem)
    first = chosen(problem)
    return [one.config for one in entry.ranked if one.config != first][:count]


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open()))


def test_what_chooses_the_same_is_not_measured(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned(tmp_path / "mine.json", PROBLEM, chosen(PROBLEM), *others_of(PROBLEM, 1))
    arguments = [str(tmp_path / "rows.csv"), "--table", str(tmp_path / "mine.json")]
    assert tool.main(arguments) == 0
    assert "0 choices changed; 1 of 1 entries change none" in capsys.readouterr().out
    assert rows(tmp_path / "rows.csv") == []


@pytest.mark.parametrize(("ms", "status"), [(0.98, 0), (1.02, 1)])
def test_a_choice_that_differs_takes_turns_with_the_other_gpus(
    tool: ModuleType, tmp_path: Path, ms: float, status: int
) -> None:
    (other,) = others_of(PROBLEM, 1)
    tuned(tmp_path / "mine.json", PROBLEM, other, chosen(PROBLEM))
    tool.times = {other: ms}
    arguments = [str(tmp_path / "rows.csv"), "--table", str(tmp_path / "mine.json")]
    assert tool.main(arguments) == status
    found = rows(tmp_path / "rows.csv")
    assert len(found) == 2 * 9
    assert {(row["kernel"], row["config"]) for row in found} == {
        ("without the table", chosen(PROBLEM)),
        ("with the table", other),
    }
    # Each round begins with another.
    assert [row["kernel"] for row in found[:4]] == [
        "without the table", "with the table", "with the table", "without the table",
    ]  # fmt: skip


def test_a_slower_winner_is_settled_behind_the_other_choice(
    tool: ModuleType, tmp_path: Path
) -> None:
    mine, settled, choice = tmp_path / "mine.json", tmp_path / "settled.json", chosen(PROBLEM)
    winner, third, last = others_of(PROBLEM, 3)
    tuned(mine, PROBLEM, winner, third, choice, last)
    arguments = [str(tmp_path / "rows.csv"), "--table", str(mine), "--settled", str(settled)]
    tool.times = {winner: 1.012, choice: 1.004}
    assert tool.main(arguments) == 0
    (entry,) = table = WinnersTable.load(settled)
    # The rounds had another clock than the final, of which the others' times are. The third came
    # before the choice there, and was not in the rounds.
    assert third not in {one.config for one in entry.ranked}
    assert [(one.config, round(one.ms, 4)) for one in entry.ranked] == [
        (choice, 1.02), (winner, 1.0281), (last, 1.03),
    ]  # fmt: skip
    assert table.validate() == []
    # A winner that is the faster one here too stands as it was measured.
    tool.times = {winner: 0.9}
    assert tool.main(arguments) == 0
    assert WinnersTable.load(settled).to_json() == WinnersTable.load(mine).to_json()


def test_what_is_settled_is_so_by_the_rounds_ratios(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's clock differs from round to round: two medians may be of different rounds."""
    mine, choice = tmp_path / "mine.json", chosen(PROBLEM)
    (winner,) = others_of(PROBLEM, 1)
    tuned(mine, PROBLEM, winner, choice)
    (cell,) = tool.cells_of(WinnersTable.load(mine), WinnersTable.shipped(), DEVICE)
    # The winner is slower in two rounds of three; its median is the lower one.
    rounds = [(1.0, 1.01), (1.2, 1.21), (1.3, 0.9)]
    rows = [
        {"round": number, "kernel": kernel, "ms": f"{ms:.6f}"}
        for number, pair in enumerate(rounds)
        for kernel, ms in zip(("without the table", "with the table"), pair, strict=True)
    ]
    entry = tool.settled(cell, rows)
    assert [one.config for one in entry.ranked] == [choice, winner]
    assert [one.ms for one in entry.ranked] == [1.01, pytest.approx(1.01 * 1.21 / 1.2)]


def test_ctrl_c_leaves_what_was_settled(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, settled, choice = tmp_path / "mine.json", tmp_path / "settled.json", chosen(PROBLEM)
    winner = others_of(PROBLEM, 1)[0]
    tuned(mine, PROBLEM, winner, choice)
    tool.times = {winner: 1.1}
    measured = rounds_module.measure
    rounds: list[int] = []

    def measure(*arguments: Any, **options: Any) -> Any:
        rounds.append(1)
        if len(rounds) > 9:
            raise KeyboardInterrupt
        return measured(*arguments, **options)

    monkeypatch.setattr(rounds_module, "measure", measure)
    twice = tool.cells_of
    monkeypatch.setattr(tool, "cells_of", lambda *given: [*twice(*given), *twice(*given)])
    with pytest.raises(KeyboardInterrupt):
        tool.main([str(tmp_path / "rows.csv"), "--table", str(mine), "--settled", str(settled)])
    (entry,) = WinnersTable.load(settled)
    assert (entry.best.config, len(rows(tmp_path / "rows.csv"))) == (choice, 18)


def test_kernels_that_repeat_their_bits_are_cells_of_their_own(
    tool: ModuleType, tmp_path: Path
) -> None:
    mine, settled = tmp_path / "mine.json", tmp_path / "settled.json"
    entry = entry_of_h200(BACKWARD)
    free = chosen(BACKWARD)
    repeatable = chosen(BACKWARD, deterministic=True)
    assert free != repeatable
    other = next(
        one.config
        for one in entry.ranked
        if one.config not in (free, repeatable) and tool._repeats_its_bits(one)
    )
    # So far behind that they are chosen only where they are asked for.
    tuned(mine, BACKWARD, free, other, repeatable, step=1.0)
    tool.times = {other: 0.22, repeatable: 0.21}
    arguments = [str(tmp_path / "rows.csv"), "--table", str(mine)]
    assert tool.main(arguments) == 1
    assert {row["deterministic"] for row in rows(tmp_path / "rows.csv")} == {"True"}
    assert tool.main([*arguments, "--settled", str(settled)]) == 0
    found = WinnersTable.load(settled)
    assert chosen(BACKWARD, found) == free
    assert chosen(BACKWARD, found, deterministic=True) == repeatable


CACHE = Problem.parse("b1 s1:8192 h32:8 d128 bf16 decode causal")
TWO_STAGES = "(BF16, 128, 16, 64, 4): decode+stages_2+least_128+parts_2"


def test_one_kernel_for_all_batches_keeps_its_entry_where_it_is_slower_nowhere(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, settled, choice = tmp_path / "mine.json", tmp_path / "settled.json", chosen(CACHE)
    third = TWO_STAGES.replace("least_128", "least_256")
    tuned(mine, CACHE, TWO_STAGES, third, choice)
    arguments = [str(tmp_path / "rows.csv"), "--table", str(mine), "--settled", str(settled)]
    prepared, times = tool.prepared, dict[str, float]()

    def of_cell(cell: Any, *, replays: bool) -> Any:
        tool.times = {TWO_STAGES: times.get(str(cell.problem), 0.9)}
        return prepared(cell, replays=replays)

    monkeypatch.setattr(tool, "prepared", of_cell)
    assert tool.main(arguments) == 0
    found = rows(tmp_path / "rows.csv")
    assert {row["split"] for row in found} == {"invariant"}
    batches = {tuple(row["problem"].split()[:2]) for row in found}
    assert {("b1", "s1:1024"), ("b1", "s1:8192"), ("b64", "s1:1024")} < batches
    assert WinnersTable.load(settled).to_json() == WinnersTable.load(mine).to_json()
    # Slower in another batch than the entry's: what was faster than the other choice goes with it.
    times["b64 s1:1024 h32:8 d128 bf16 decode causal"] = 1.1
    assert tool.main(arguments) == 0
    (entry,) = WinnersTable.load(settled)
    assert [one.config for one in entry.ranked] == [choice]
    assert tool.main(arguments[:3]) == 1


def test_one_kernel_for_all_batches_needs_all_its_cells(tool: ModuleType, tmp_path: Path) -> None:
    mine, settled = tmp_path / "mine.json", tmp_path / "settled.json"
    tuned(mine, CACHE, TWO_STAGES)
    arguments = [str(tmp_path / "rows.csv"), "--table", str(mine), "--settled", str(settled)]
    tool.times = {TWO_STAGES: 0.5}
    assert tool.main([*arguments, "--seconds", "0"]) == 0
    # The other choice was not among its candidates: there is no entry to take.
    assert len(WinnersTable.load(settled)) == 0
    assert tool.main(arguments) == 0
    assert len(WinnersTable.load(settled)) == 1


def test_an_entry_for_one_batch_is_compared_there_as_split_free_takes_it(
    tool: ModuleType, tmp_path: Path
) -> None:
    problem = Problem.parse("b8 s1:1024 h32:8 d128 bf16 decode")
    other = entry_of_h200(problem).best.config
    tuned(tmp_path / "mine.json", problem, TWO_STAGES, other)
    assert other not in (TWO_STAGES, chosen(problem))
    assert tool.main([str(tmp_path / "rows.csv"), "--table", str(tmp_path / "mine.json")]) == 0
    found = rows(tmp_path / "rows.csv")
    assert {(row["problem"], row["split"]) for row in found} == {(str(problem), "free")}
    assert {row["config"] for row in found} == {TWO_STAGES, other}


def test_what_was_not_in_the_rounds_does_not_come_before_both(
    tool: ModuleType, tmp_path: Path
) -> None:
    """A kernel that repeats its bits is the choice behind a faster one that does not."""
    mine, settled = tmp_path / "mine.json", tmp_path / "settled.json"
    free, repeatable = chosen(BACKWARD), chosen(BACKWARD, deterministic=True)
    faster = next(
        one.config
        for one in entry_of_h200(BACKWARD).ranked
        if one.config != free and not tool._repeats_its_bits(one)
    )
    tuned(mine, BACKWARD, faster, repeatable)
    tool.times = {repeatable: 1.001, free: 1.0}
    arguments = [str(tmp_path / "rows.csv"), "--table", str(mine), "--settled", str(settled)]
    assert tool.main(arguments) == 0
    (entry,) = WinnersTable.load(settled)
    assert [one.config for one in entry.ranked] == [free, repeatable]


def test_replays_stand_beside_cudnn(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = "(FP16, 128, 192, 128, 3wg): tma+stages_2+q_buffers_2+regs_32_160+dynamic"
    in_bf16 = more.replace("FP16", "BF16")
    problem = "b16 s512 h16 d128 bf16 causal"
    tool.times = {in_bf16: 0.5}
    arguments = [str(tmp_path / "rows.csv"), "--replays", problem, "--more", more, "--rounds", "6"]
    assert tool.main(arguments) == 0
    found = rows(tmp_path / "rows.csv")
    assert {row["way"] for row in found} == {"replay"}
    configs = {row["config"] for row in found if row["kernel"] != "cudnn"}
    assert {in_bf16, chosen(Problem.parse(problem))} <= configs
    said = capsys.readouterr().out.splitlines()
    assert said[1] == f"  2.0000, 6 rounds: {in_bf16}"


def test_a_wrong_output_fails(tool: ModuleType, tmp_path: Path) -> None:
    (other,) = others_of(PROBLEM, 1)
    tuned(tmp_path / "mine.json", PROBLEM, other, chosen(PROBLEM))
    tool.wrong, tool.times = (other,), {other: 0.5}
    assert tool.main([str(tmp_path / "rows.csv"), "--table", str(tmp_path / "mine.json")]) == 1
    assert rows(tmp_path / "rows.csv") == []


def test_replays_that_write_the_same_tensor_are_judged_one_by_one(
    load_tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = load_tool("gpu/tables_in_turns.py")
    written, measured_by = SimpleNamespace(by=""), []

    def check(output: Any, scores: int, ours: Any) -> SimpleNamespace:
        measured_by.append((output.by, ours))
        return SimpleNamespace(reasons=() if output.by == "cudnn" else ("wrong",), max_error=0.0)

    def captured(name: str, *_: Any, least: int) -> tuple[Any, Any]:
        written.by = name
        return SimpleNamespace(launch=lambda: None), written

    workload = SimpleNamespace(check=check, memory=None)
    monkeypatch.setattr(tool, "workload_of", lambda problem: workload)
    monkeypatch.setattr(tool, "kernel_implementation", lambda config, workload: None)
    monkeypatch.setitem(tool.PEERS, "cudnn", SimpleNamespace(prepare=lambda workload: None))
    monkeypatch.setattr(tool, "captured", captured)
    monkeypatch.setattr(tool, "CudaEvents", lambda: None)
    cell = tool.Cell(Problem.parse("b1 s64 h2 d64 fp16"), {"ours": None})
    contenders, _, _ = tool.prepared(cell, replays=True)
    assert {one.name: one.why_wrong() for one in contenders} == {"ours": "wrong", "cudnn": ""}
    # A wrong kernel of ours is no measure.
    assert measured_by == [("ours", None), ("cudnn", None)]
