"""The ablation: what a step changed, in figures and in words; its JSON; its table; its run."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from ablations import ABLATION, PLAIN, SWIZZLED, TIMED, timed_step

from flashsmith.benchmark import run as run_module
from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.progression import (
    Ablation,
    change_between,
    change_words,
    config_words,
    run_ablation,
    step_names,
)
from flashsmith.benchmark.progression_table import print_ablation
from flashsmith.benchmark.table import make_console
from flashsmith.errors import ArgumentError, EmulatorError, IllegalConfigError
from flashsmith.families import parse_kernel_name_into_config as parse
from flashsmith.runtime.target import choose_target

TARGET = choose_target("sm_80", emulate=True)
CONFIGS = [parse(PLAIN.config), parse(SWIZZLED.config)]


def printed(ablation: Ablation) -> str:
    out = io.StringIO()
    print_ablation(make_console(out), ablation)
    return out.getvalue()


# --- changes -------------------------------------------------------------------------------------


def test_a_change_holds_what_differs_and_nothing_else() -> None:
    change = change_between(PLAIN, SWIZZLED)
    assert change.instructions == {"integer": 200, "move": -20}
    assert change.instructions_ratio == pytest.approx(7720 / 7540)
    assert change.conflicts == {"ldmatrix": (8.0, 1.0)}
    assert change.costs == {"registers": (170, 174)}
    assert change.speedup is None


def test_nothing_changed_says_nothing() -> None:
    assert change_words(change_between(PLAIN, PLAIN)) == []


def test_a_change_in_words() -> None:
    words = change_words(change_between(timed_step(PLAIN, 40.0), timed_step(SWIZZLED, 8.0)))
    assert words == [
        "time x 0.20",
        "registers 170 -> 174",
        "ldmatrix conflicts 8.0 -> 1.0",
        "instructions +180 (+2.4%): integer +200, move -20",
    ]


def test_many_classes_are_added_up_after_the_largest() -> None:
    many = replace(PLAIN, instructions={f"class {n}": n for n in range(1, 8)})
    none = replace(PLAIN, instructions={"class 0": 1})
    (words,) = change_words(change_between(none, many))
    assert words.endswith("class 7 +7, class 6 +6, class 5 +5, class 4 +4, others +5")


def test_a_kernel_that_did_not_end_changes_no_instructions() -> None:
    lost = replace(SWIZZLED, instructions=None)
    assert change_between(PLAIN, lost).instructions == {}
    assert change_between(lost, PLAIN).instructions_ratio is None


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("(A, 64): x", "(A, 64): x+y", "+ y"),
        ("(A, 64): x+y", "(A, 64): x", "- y"),
        ("(A, 64): x+load_0_0_tiles", "(A, 64): x+load_2_0_tiles",
         "load_0_0_tiles -> load_2_0_tiles"),
        ("(A, 64): x", "(A, 128): x", "(A, 64) -> (A, 128)"),
        ("(A, 64): a_1+b", "(A, 64): a_2+c", "a_1 -> a_2, + c, - b"),
        ("(A, 64): x", "(A, 64): x", ""),
    ],
)  # fmt: skip
def test_two_short_forms_compared(before: str, after: str, words: str) -> None:
    assert config_words(before, after) == words


def test_steps_are_named_by_what_is_new() -> None:
    assert step_names(ABLATION) == [PLAIN.config, "+ swizzled"]
    assert step_names(replace(ABLATION, steps=(PLAIN, PLAIN)))[1] == PLAIN.config
    assert step_names(replace(ABLATION, steps=())) == []


# --- JSON ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ablation", [ABLATION, TIMED])
def test_json_reads_back_as_it_was(ablation: Ablation) -> None:
    assert Ablation.from_json(json.loads(json.dumps(ablation.to_json()))) == ablation


def broken(path: tuple, value: object) -> dict:
    data = json.loads(json.dumps(TIMED.to_json()))
    *way, last = path
    place = data
    for key in way:
        place = place[key]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return data


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (broken(("schema",), 99), "schema=99"),
        (broken(("kind",), "else"), "kind='else'"),
        (broken(("device",), KeyError), "'device' is missing"),
        (broken(("steps",), 3), "the ablation"),
        (
            broken(("steps", 1, "registers"), KeyError),
            r"the ablation: 'steps\[1\].registers' is missing",
        ),
        (
            broken(("steps", 1, "time", "ms"), KeyError),
            r"the ablation: 'steps\[1\].time.ms' is missing",
        ),
        (broken(("steps", 0), 3), r"steps\[0\]=3 is not of type object"),
        (broken(("steps", 0, "counted_seq"), -1), r"steps\[0\]: counted_seq is -1, below 0"),
        (broken(("steps", 0, "registers"), 10**30), r"steps\[0\].registers=10+ is too large"),
        (
            broken(("steps", 0, "config"), "x" * 10**6),
            r"steps\[0\].config='x+'\.* .*at most 100,000",
        ),
        (broken(("steps", 1, "time", "peer_ms"), 1e30), "peer_ms is 1e\\+30, not finite"),
        (broken(("environment",), {"\x1b": 10**30}), r"environment\['\\x1b'\]=10+ is too large"),
        (
            broken(("steps", 0, "conflicts"), {"O st": "x"}),
            r"conflicts\[...\]=.* is not of type",
        ),
    ],
)
def test_a_broken_ablation_is_refused_with_the_place(data: dict, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        Ablation.from_json(data)


# --- the table -----------------------------------------------------------------------------------


def test_the_table_without_times_says_so_and_has_no_column_of_them() -> None:
    text = printed(ABLATION)
    assert "note:    no times" in text
    assert "TFLOP/s" not in text
    assert "ldmatrix x8" in text
    assert "2 registers 170 -> 174; ldmatrix conflicts 8.0 -> 1.0" in text


def test_the_table_with_times_has_the_share_of_the_peer() -> None:
    text = printed(TIMED)
    assert "% of FA2" in text
    assert "75.0%" in text
    assert "2 time x 0.21" in text


def test_times_without_a_peer_have_no_share() -> None:
    steps = (timed_step(PLAIN, 39.0, None), timed_step(SWIZZLED, 8.0, None))
    text = printed(replace(TIMED, steps=steps, peer="", peer_note="FA2 is absent: no PyTorch"))
    assert "TFLOP/s" in text
    assert "%" not in text.splitlines()[4]
    assert "note:    FA2 is absent" in text


def test_a_wrong_step_is_a_failure_with_its_reason() -> None:
    ablation = replace(ABLATION, steps=(PLAIN, replace(SWIZZLED, problems=("o[3] is NaN",))))
    assert not ablation.ok
    assert "| FAIL " in printed(ablation)
    assert "o[3] is NaN" in printed(ablation)


# --- the run ------------------------------------------------------------------------------------


def up(configs=CONFIGS) -> Ablation:
    return run_ablation(configs, TARGET, reporter=ProgressReporter(quiet=True))


def test_an_ablation_is_counted_without_a_gpu() -> None:
    ablation = up()
    assert ablation.ok
    assert not ablation.has_times
    assert "no times" in ablation.peer_note
    first, second = ablation.steps
    assert first.conflicts["ldmatrix"] == 8.0
    assert second.conflicts["ldmatrix"] == 1.0
    # 2 heads x 4 Q blocks x 4 K/V blocks x (2 products of 64 x 64 x 128 by m16n8k16).
    assert first.instructions["mma"] == 2 * 4 * 4 * 2 * (64 * 64 * 128) // (16 * 8 * 16)
    assert change_between(first, second).instructions["integer"] != 0


def test_a_kernel_that_hangs_is_a_step_with_a_problem(monkeypatch) -> None:
    def prove(cfg, problem, **options):
        raise EmulatorError("deadlock")

    monkeypatch.setattr(run_module, "prove", prove)
    step, _ = up().steps
    assert step.instructions is None
    assert "deadlock" in step.problems[0]
    assert "did not finish" in printed(up())


def test_an_illegal_config_is_refused_before_anything_is_built(monkeypatch) -> None:
    monkeypatch.setattr(run_module, "libraries_for", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(IllegalConfigError):
        up(configs=[replace(CONFIGS[0], B_r=16)])


def test_the_plain_kernel_is_counted_whatever_its_tiles(monkeypatch) -> None:
    asked = []

    def prove(cfg, problem, **options):
        asked.append(problem.seq_q)
        raise EmulatorError("not today")

    monkeypatch.setattr(run_module, "prove", prove)
    wide = parse("(FP16, 128, 64, 96, 4): async+swizzled+load_0_0_0_tiles")
    ablation = up(configs=[CONFIGS[1], wide])
    assert asked == [256, 384]
    assert ablation.counted == "batch 1, seq 256 to 384, heads 2"
    assert [step.counted_seq for step in ablation.steps] == [256, 384]


def test_instructions_of_two_lengths_are_not_compared() -> None:
    before = replace(PLAIN, counted_seq=256, instructions={"mma": 100})
    after = replace(SWIZZLED, counted_seq=256, instructions={"mma": 150})
    assert change_between(before, after).instructions == {"mma": 50}
    longer = change_between(before, replace(after, counted_seq=384))
    assert (longer.instructions, longer.instructions_ratio) == ({}, None)


def test_an_ablation_of_before_there_were_several_lengths_is_read() -> None:
    data = json.loads(json.dumps(ABLATION.to_json()))
    for step in data["steps"]:
        del step["counted_seq"]
    assert Ablation.from_json(data).steps[0].counted_seq == 0
