"""tune() and `flashsmith tune`: budgets, plans, Ctrl-C, and what works without a GPU."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sweep_fakes as fakes
from command_in_process import flashsmith
from processes import child_pids, wait_until_gone, with_path
from sweep_fakes import NAMES, PROBLEM, Kernel, World, but, times

from flashsmith.benchmark.measurement_files import read_rows
from flashsmith.benchmark.table import make_console
from flashsmith.builder import KernelEntry
from flashsmith.chooser.decode import CHOOSERS
from flashsmith.chooser.winners import Entry, RankedConfig, WinnersTable, join_winners, storage
from flashsmith.errors import (
    ArgumentError,
    CompileError,
    LaunchError,
    SelectionError,
    TableError,
)
from flashsmith.families import (
    DeviceSpec,
    Problem,
    device_spec,
    parse_kernel_name_into_config,
)
from flashsmith.tuning import sweep as sweep_module
from flashsmith.tuning import tune as tune_module
from flashsmith.tuning.journal import Journal
from flashsmith.tuning.race import RaceState, states_of
from flashsmith.tuning.ranking import print_plan, print_ranking, summary
from flashsmith.tuning.space import shipped_choices
from flashsmith.tuning.sweep import Settings
from flashsmith.tuning.sweep_progress import SweepProgress
from flashsmith.tuning.trial import Build, Trials
from flashsmith.tuning.tune import (
    SweepResult,
    build_ahead,
    check_gpu,
    make_race,
    parse_budget,
    plan_races,
    tune,
)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("none", math.inf)]
)
def test_budgets(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "m", "-5m", "0s", "5 m", "10d", "nan"])
def test_what_is_no_budget(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"^budget='.*write it like 90s, 10m or 1h"):
        parse_budget(text)


def test_the_default_problems_leave_out_what_the_space_has_nothing_for() -> None:
    settings = Settings()
    races = plan_races(None, fakes.DEVICE, NAMES[0], settings)
    assert {(r.problem.d, r.problem.dtype.name) for r in races} == {(128, "FP16")}
    assert len(races) == 12
    assert len(plan_races(None, fakes.DEVICE, "tune", settings)) == 72
    with pytest.raises(SelectionError, match="is not a known key"):
        plan_races([PROBLEM], fakes.DEVICE, "nonsense", settings)
    with pytest.raises(SelectionError, match=r"none of its configs \(1\)"):
        plan_races(
            [PROBLEM, races[0].problem], fakes.DEVICE, NAMES[0].replace("128", "64"), settings
        )


def test_long_problems_are_given_a_reference_in_whatever_order_they_come() -> None:
    problems = [race.problem for race in plan_races(None, fakes.DEVICE, "tune", Settings())][:6]
    races = plan_races(problems[::-1], fakes.DEVICE, "tune", Settings())
    assert [race.problem for race in races] == problems[::-1]
    references = [race.reference and race.reference.problem.seq_q for race in races]
    assert references == [2048, 2048, 2048, None, None, None]


def test_a_plan_says_each_reason_once() -> None:
    """Tiles too large for the GPU in dozens of ways: one line, in the words of the first."""
    device = device_spec("RTX 4090")
    states = states_of(plan_races(None, device, "space", Settings()), Trials(device))
    out = io.StringIO()
    print_plan(make_console(out), states)
    reasons = [line for line in out.getvalue().splitlines() if " x " in line]
    assert len(reasons) == 1
    assert "must fit in the shared memory" in reasons[0]
    assert "(for example B_r=" in reasons[0]
    culled = sum(len(state.trials) - len(state.active) for state in states)
    assert reasons[0].startswith(f"{culled:,} x illegal: ")


def test_building_ahead_compiles_and_culls() -> None:
    kernels = but(
        times(best=0, count=8),
        {1: {"spill_bytes": 999}, 2: {"fails": "compile", "how": "refuse"}},
    )
    kernels = but(kernels, {3: {"fails": "compile", "how": "abort"}})
    world = World(kernels)
    key = "; ".join(kernels)
    longer = replace(PROBLEM, seq_q=1024)
    races = [make_race(problem, fakes.DEVICE, key) for problem in (PROBLEM, longer)]
    with SweepProgress(quiet=True) as progress:
        settings = Settings(jobs=2)
        states = build_ahead(races, fakes.FakeCompiler(world), fakes.DEVICE, settings, progress)
    for state in states:
        assert [state.trials[name].status for name in NAMES[:5]] == [
            "active", "culled", "culled", "culled", "active",
        ]  # fmt: skip


def test_building_ahead_without_a_compiler_is_an_error() -> None:
    kernels = but(times(best=0, count=2), {1: {"fails": "compile", "how": "raise"}})
    races = [make_race(PROBLEM, fakes.DEVICE, "; ".join(kernels))]
    compiler = fakes.FakeCompiler(World(kernels))
    with pytest.raises(CompileError, match="a compile process failed: RuntimeError"):
        build_ahead(races, compiler, fakes.DEVICE, Settings(), SweepProgress(quiet=True))


TUNE_PROGRAM = """
import signal
import sys
from pathlib import Path
# A shell's background jobs, this suite's among them perhaps, hand down that they ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path[:0] = [{tests!r}]
import sweep_fakes as fakes
from flashsmith.tuning.sweep import Settings
from flashsmith.tuning.sweep_progress import SweepProgress
from flashsmith.tuning.tune import make_race, tune
world = fakes.World(fakes.times(best=3, count=30), seconds_per_request=0.1)
race = make_race(fakes.PROBLEM, fakes.DEVICE, "; ".join(world.kernels))
with SweepProgress() as progress:
    done = tune([race], fakes.fake_runner(world), Settings(), Path({out!r}), progress,
                table=Path({out!r}) / "mine.json")
sys.exit(42 if done.interrupted else 0)
"""


def test_ctrl_c_writes_what_was_found_and_takes_all_processes_along(tmp_path: Path) -> None:
    program = TUNE_PROGRAM.format(tests=str(Path(__file__).parent), out=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", program], env=with_path())
    journal = tmp_path / "journal.jsonl"
    deadline = time.monotonic() + 60
    while not (journal.exists() and b'"rung 1"' in journal.read_bytes()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    children = child_pids(process.pid)
    assert len(children) == 2
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 42
    wait_until_gone(children)
    rows = read_rows(tmp_path / "ranking.csv")
    assert len(rows) == 30
    assert rows[0].verdict == "pass"
    # There was no final: its winner is this sweep's alone.
    assert len(WinnersTable.load(tmp_path / "winners.json")) == 1
    assert not (tmp_path / "mine.json").exists()


def test_an_out_folder_in_use_is_refused(tmp_path: Path) -> None:
    world = World(times(best=0, count=2))
    held = Journal(tmp_path / "journal.jsonl", "whatever")
    race = make_race(PROBLEM, fakes.DEVICE, "; ".join(world.kernels))
    with pytest.raises(ArgumentError, match="another sweep is writing there"):
        tune([race], fakes.fake_runner(world), Settings(), tmp_path, SweepProgress(quiet=True))
    held.close()


# ---- what it leaves in a table of others ----


def run_tune(folder: Path, kernels: dict[str, Kernel], table: Path, **settings: Any) -> SweepResult:
    world = World(kernels)
    race = make_race(PROBLEM, fakes.DEVICE, "; ".join(kernels))
    return tune([race], fakes.fake_runner(world), Settings(**settings), folder,
                SweepProgress(quiet=True), table=table)  # fmt: skip


def entry_of(table: Path) -> Entry:
    (entry,) = WinnersTable.load(table)
    return entry


def test_a_smaller_space_leaves_better_winners_of_another_sweep(tmp_path: Path) -> None:
    table, kernels = tmp_path / "mine.json", times(best=0, count=4)
    run_tune(tmp_path / "wide", kernels, table)
    run_tune(tmp_path / "one", {NAMES[3]: kernels[NAMES[3]]}, table)
    assert {one.config for one in entry_of(table).ranked} == set(NAMES[:4])
    assert entry_of(table).best.config == NAMES[0]
    # Of the same config it is the new figure that counts; and what is wrong goes.
    run_tune(tmp_path / "slow", {NAMES[0]: Kernel(ms=1.07)}, table)
    assert entry_of(table).best.config == NAMES[1]
    wrong = {NAMES[1]: Kernel(fails="prove", how="lie"), NAMES[2]: kernels[NAMES[2]]}
    run_tune(tmp_path / "wrong", wrong, table)
    assert NAMES[1] not in [one.config for one in entry_of(table).ranked]


def test_a_sweep_without_a_final_leaves_the_table_alone(tmp_path: Path) -> None:
    table, kernels = tmp_path / "mine.json", times(best=0, count=3)
    run_tune(tmp_path / "all", kernels, table)
    before = table.read_bytes()
    broken = {name: replace(k, fails="final", how="raise") for name, k in kernels.items()}
    run_tune(tmp_path / "broken", broken, table)
    assert table.read_bytes() == before
    assert len(entry_of(tmp_path / "broken" / "winners.json").ranked) == 3


def test_going_on_with_a_finished_sweep_makes_its_figures_no_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mine.json"
    for day, (folder, kernels) in enumerate(
        [("old", times(0, 3)), ("new", {NAMES[0]: Kernel(ms=3.0)}), ("old", times(0, 3))], 1
    ):
        monkeypatch.setattr(sweep_module, "now", lambda day=day: f"2026-11-{day:02}")
        run_tune(tmp_path / folder, kernels, table)
    assert entry_of(tmp_path / "old" / "winners.json").time == "2026-11-01"
    assert entry_of(table).time == "2026-11-02"
    assert {one.config: round(one.ms / entry_of(table).best.ms, 2) for one in
            entry_of(table).ranked}[NAMES[0]] == round(3 / 1.05, 2)  # fmt: skip
    rows = read_rows(tmp_path / "old" / "ranking.csv")
    assert {row.time for row in rows} == {"2026-11-01"}


def test_the_users_table_does_not_hide_the_shipped_winner(
    tmp_path: Path, own_table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = times(best=0, count=3)
    monkeypatch.setattr(storage, "SHIPPED_FOLDER", tmp_path / "shipped")
    run_tune(tmp_path / "maker", kernels, tmp_path / "shipped" / "fake.json")
    run_tune(tmp_path / "mine", {NAMES[2]: kernels[NAMES[2]]}, None)  # type: ignore[arg-type]
    assert entry_of(own_table).best.config == NAMES[0]


def test_figures_of_another_environment_give_way_to_their_best_measured_again(
    own_table: Path,
) -> None:
    def join(driver: str, times: dict[str, float]) -> None:
        flop = PROBLEM.attn_flop()
        ranked = [
            RankedConfig("mma_sync", name, ms, flop / ms / 1e9, {"driver": driver, "time": driver})
            for name, ms in times.items()
        ]
        join_winners(PROBLEM, fakes.DEVICE, ranked, (), own_table)

    join("1", {NAMES[0]: 1.0, NAMES[1]: 1.1})
    join("2", {NAMES[2]: 1.5})
    assert [one.config for one in entry_of(own_table).ranked] == [NAMES[0], NAMES[1], NAMES[2]]
    join("3", {NAMES[0]: 1.2})
    assert [one.config for one in entry_of(own_table).ranked] == [NAMES[0]]


def test_a_table_that_cannot_be_written_is_said_before_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TableError, match=r"mine\.json: cannot be written"):
        run_tune(tmp_path / "out", times(0, 2), tmp_path / "file" / "mine.json")
    assert not (tmp_path / "out").exists()


def test_each_problem_is_entered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are hundreds, and a sweep is stopped: writing a table takes milliseconds."""
    written: list[str] = []

    def record_alone(state: RaceState, *rest: object) -> None:
        written.append(str(state.problem))

    monkeypatch.setattr(tune_module, "record_alone", record_alone)
    races = [
        make_race(problem, fakes.DEVICE, "; ".join(NAMES[:2]))
        for problem in (PROBLEM, Problem.parse("b2 s512 h4 d128 fp16 causal"))
    ]
    tune(
        races,
        fakes.fake_runner(World(times(best=1, count=2))),
        Settings(jobs=1),
        tmp_path,
        SweepProgress(quiet=True),
        table=tmp_path / "table.json",
    )
    assert written == [str(race.problem) for race in races]


def test_a_table_that_breaks_during_the_sweep_costs_neither_sweep_nor_ranking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise TableError("mine.json: No space left")

    with monkeypatch.context() as patch:
        patch.setattr(tune_module, "record_beside", broken)
        with pytest.raises(TableError, match="No space left\nThe ranking is in"):
            run_tune(tmp_path / "out", times(0, 2), tmp_path / "mine.json")
    assert len(read_rows(tmp_path / "out" / "ranking.csv")) == 2
    assert len(entry_of(tmp_path / "out" / "winners.json").ranked) == 2
    run_tune(tmp_path / "out", times(0, 2), tmp_path / "mine.json")
    assert len(entry_of(tmp_path / "mine.json").ranked) == 2


# ---- the command ----


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if name != "KERNELS"}
    return subprocess.run(
        [sys.executable, "-c", "from flashsmith.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**clean, **environment},
    )


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashsmith.tuning.tune.gpu_count", lambda: 0)


def test_without_a_gpu_there_is_nothing_to_time(no_gpu: None) -> None:
    with pytest.raises(LaunchError, match=r"timing needs an NVIDIA GPU.*--dry-run.*--build-only"):
        check_gpu(0)


def test_the_command_without_a_gpu_is_an_error(tmp_path: Path) -> None:
    # A driver that finds no device, whatever machine this is.
    done = process("tune", "--out", str(tmp_path / "out"), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "timing needs an NVIDIA GPU" in done.stderr
    assert not (tmp_path / "out").exists()


def raced(races: list[Any], world: World, device: DeviceSpec, folder: Path) -> RaceState:
    """The end of the one race, in kernels that take the world's times."""
    tuned = tune(
        races,
        fakes.fake_runner(world, device),
        Settings(jobs=1),
        folder,
        SweepProgress(quiet=True),
        table=folder / "table.json",
    )
    (state,) = tuned.races
    return state


def test_another_gpus_choice_is_in_the_final_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An H100 takes what the H200's table says, until it is tuned: the tables' own choice is timed
    beside the candidates, also where it comes out slow."""
    h100 = device_spec("H100")
    (choice,) = shipped_choices(PROBLEM, h100)
    assert str(choice) not in NAMES[:4]
    world = World({**times(best=1, count=4, step=0.5), str(choice): Kernel(ms=4.0)})
    races = plan_races([PROBLEM], h100, "; ".join(NAMES[:4]), Settings())
    state = raced(races, world, h100, tmp_path)
    stages = {trial.name: trial.stage for trial in state.ranked}
    assert (stages[NAMES[1]], stages[str(choice)]) == ("final", "final")
    assert [one["config"] for one in summary([state])[0]["shipped"]] == [str(choice)]
    print_ranking(make_console(), [state])
    said = capsys.readouterr().out
    assert "final, shipped choice" in said
    (entry,) = WinnersTable.load(tmp_path / "table.json")
    assert (entry.key.gpu, entry.best.config) == ("H100", NAMES[1])
    assert str(choice) in [one.config for one in entry.ranked]


def test_what_the_tables_know_is_timed_in_the_final_at_once(tmp_path: Path) -> None:
    """One brief rung, and then the final of what the nearest GPU's table has, its choice too."""
    gh200, problem = device_spec("GH200"), Problem.parse("b16 s4096 h16 d128 fp16")
    (race,) = plan_races([problem], gh200, "known", Settings())
    (choice,) = shipped_choices(problem, gh200)
    names = [build.name for build in race.builds]
    assert names[0] == str(choice)
    world = World({name: Kernel(ms=1.1 - place / 100) for place, name in enumerate(names)})
    state = raced([race], world, gh200, tmp_path)
    assert {(trial.stage, *sorted(trial.samples)) for trial in state.ranked} == {
        ("final", "final", "rung 1")
    }
    (entry,) = WinnersTable.load(tmp_path / "table.json")
    assert [one.config for one in entry.ranked] == names[::-1]


def test_a_dry_run_needs_no_gpu() -> None:
    problems = "b1 s1024 h8 d256 fp16; b1 s1024 h8 d64 bf16 causal"
    done = flashsmith("tune", "--dry-run", "--arch", "rtx4090", "--problems", problems)
    assert done.returncode == 0, done.stderr
    assert "| b1 s1024 h8 d64 bf16 causal |" in done.stdout
    assert "x illegal: the Q, K and V tiles" in done.stdout
    done = flashsmith("tune", "--dry-run", "--arch", "H200", "--problems", problems, "--json")
    facts = json.loads(done.stdout)
    assert [fact["problem"] for fact in facts] == problems.split("; ")
    # What splits keys, since the tiles are few, comes after all.
    whole = [name for name in facts[0]["candidates"] if "+split_" not in name]
    of_wgmma = ["wg): tma" in name for name in whole]
    assert sum(of_wgmma) >= 6
    assert of_wgmma == sorted(of_wgmma, reverse=True)
    assert not all(of_wgmma)


def test_the_space_of_a_problem_over_a_cache() -> None:
    problems = "b8 s1:8192 h32:8 d128 bf16 decode page16; b1 s64:4096 h32:8 d128 bf16 decode causal"
    done = flashsmith("tune", "--dry-run", "--arch", "H200", "--problems", problems, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert [fact["problem"] for fact in facts] == problems.split("; ")
    for fact in facts:
        configs = list(map(parse_kernel_name_into_config, fact["candidates"]))
        assert {config.family.operation for config in configs} == {"decode"}
        assert len(configs) >= 10


def test_the_space_comes_from_the_environment_too() -> None:
    arguments = ("tune", "--dry-run", "--problems", str(PROBLEM), "--json")
    (fact,) = json.loads(flashsmith(*arguments, KERNELS=NAMES[2]).stdout)
    # Beside what attention() takes anyway.
    assert fact["candidates"][1:] == [NAMES[2]]
    (fact,) = json.loads(flashsmith(*arguments, "--space", NAMES[1], KERNELS=NAMES[2]).stdout)
    assert fact["candidates"][1:] == [NAMES[1]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--arch", "sm_90"), "arch='sm_90': only with --dry-run or --build-only"),
        (("--budget", "soon"), "budget='soon': write it like"),
        (("--max-spill", "-1"), "max_spill=-1: give 0 or more"),
        (("--jobs", "0"), "jobs=0: give at least 1"),
        # These two also where there is no GPU, which would be an error of its own.
        (("--problems", "b2"), "problem='b2': s, d, dtype missing"),
        (("--space", "nonsense"), "kernels='nonsense' is not a known key"),
        (("--space", "(FP16, 128, 64, 64, 4): asnyc"), "did you mean 'async'?"),
    ],
)
def test_bad_options_are_named(arguments: tuple[str, ...], said: str, no_gpu: None) -> None:
    done = flashsmith("tune", *arguments)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_what_is_built_ahead_is_what_is_chosen_from() -> None:
    """With the real compiler: the build of one config, found in the cache the second time. It is
    what attention() takes anyway, which every race has."""
    name = "(FP16, 64, 64, 128, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax"
    problem = "b1 s256 h2 d64 fp16"
    arguments = ("tune", "--build-only", "--arch", "sm_80", "--space", name, "--problems", problem)
    done = flashsmith(*arguments, "--json", "--jobs", "1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [{"problem": problem, "candidates": [name], "culled": {}}]
    done = flashsmith(*arguments, "--json", "--max-spill", "0")
    assert json.loads(done.stdout)[0]["candidates"] == [name]


def test_the_nvcc_compiler_names_the_config_that_does_not_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flashsmith.tuning import gpu_runner

    builds = [Build.of(PROBLEM, cfg) for cfg in fakes.CONFIGS[:5]]
    asked: list[int] = []

    def stand_in(configs, *, arch, semantics, jobs, progress):
        asked.append(len(configs))
        if fakes.CONFIGS[2] in configs:
            raise CompileError("shard_0: no")
        return Library()

    class Library:
        class manifest:
            key = "a key"

        def entry(self, config):
            return KernelEntry(config, str(config), "", "", 99, 0, 8, 16, 0, 0.5, 1, 1)

    monkeypatch.setattr(gpu_runner, "build", stand_in)
    monkeypatch.setattr(gpu_runner, "find_library", lambda *a, **k: None)
    monkeypatch.setattr(gpu_runner, "find_library_from", lambda *a, **k: None)
    found = gpu_runner.NvccCompiler(fakes.DEVICE).compile(builds)
    assert [compiled.error for compiled in found] == ["", "", "shard_0: no", "", ""]
    facts = found[0].facts
    assert facts is not None
    assert (facts.registers, facts.spill_bytes, found[0].library) == (99, 24, "a key")
    assert asked == [5, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("words", ["bf16 decode causal", "bf16 decode causal canonical"])
@pytest.mark.parametrize("cache", ["e4m3", "scaled"])
def test_kernels_of_a_cache_with_scales_have_the_order_of_the_plain_cache_s(
    cache: str, words: str
) -> None:
    device = device_spec("H200")
    problem = Problem.parse(f"b64 s1:8192 h32:8 d128 {words} cache_{cache}")
    (race,) = plan_races([problem], device, "decode", Settings())
    configs = [build.config for build in race.builds]
    plain = CHOOSERS["invariant"](replace(problem, cache=""), device)
    chosen = (plain, *(choose(problem, device) for choose in CHOOSERS.values()))
    orders = {one.family.order(one, device.arch) for one in chosen}
    assert {one.family.order(one, device.arch) for one in configs} == orders
    assert {one.family.cache_of(one) for one in configs} == {cache}
    assert len({one.stages for one in configs}) > 1
    near = {other for one in configs for other in one.family.neighbours(one)}
    assert {one.family.order(one, device.arch) for one in near} == orders
