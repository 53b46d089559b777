"""Which kernel a backward pass gets, and which with deterministic=True."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashsmith.chooser import choose, choose_config, forget_choices
from flashsmith.chooser.evidence import COST_OF_REPEATING
from flashsmith.chooser.prebuild import choose_for_any_length
from flashsmith.chooser.winners import RankedConfig, WinnersTable, storage
from flashsmith.cli import app
from flashsmith.errors import ArgumentError
from flashsmith.families import (
    KNOWN_DEVICES,
    DeviceSpec,
    DType,
    Problem,
    Semantics,
    device_spec,
    is_legal,
    parse_kernel_name_into_config,
)
from flashsmith.semantics import MASKS

H200 = device_spec("H200")
TEXT = "b16 s4096 h16 d128 bf16 backward"
PROBLEM = Problem.parse(TEXT)
FREE = "(BF16, 128, 64, 128, 8): backward+stages_2+dq_atomics"
REPEATABLE = "(BF16, 128, 64, 128, 8): backward+stages_2"
OTHER = "(BF16, 128, 64, 64, 8): backward+columns_2+stages_2"


@pytest.fixture(autouse=True)
def no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the user's nor a shipped one."""
    monkeypatch.setenv("FLASHSMITH_TABLE", str(tmp_path / "own.json"))
    monkeypatch.setattr(storage, "SHIPPED_FOLDER", tmp_path / "nothing")
    forget_choices()


def measured(times: dict[str, float]) -> WinnersTable:
    table = WinnersTable()
    figures = [
        RankedConfig("mma_sync_backward", config, ms, PROBLEM.attn_flop() / ms / 1e9)
        for config, ms in times.items()
    ]
    table.add(PROBLEM, H200, sorted(figures, key=lambda one: one.ms))
    return table


@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda device: device.name)
def test_every_problem_has_a_kernel_of_either_kind(device: DeviceSpec) -> None:
    flags = itertools.product((False, True), repeat=3)
    semantics = [
        Semantics(mask, softcap, packed, packed or uneven)
        for mask, (softcap, packed, uneven) in itertools.product(MASKS, flags)
    ]
    for d, dtype, kind in itertools.product((8, 32, 40, 64, 96, 128, 200, 256), DType, semantics):
        problem = Problem(2, 300, 333, 8, 2, d, dtype, kind, "backward")
        for deterministic in (False, True):
            config = choose_config(problem, device, deterministic=deterministic)
            assert is_legal(config, device)
            assert config.family.operation == "backward"
            assert config.d_head >= d
            assert config.family.is_deterministic(config) or not deterministic


def test_deterministic_is_chosen_among_those_that_are_built() -> None:
    free, repeatable = map(parse_kernel_name_into_config, (FREE, REPEATABLE))
    both = (free, repeatable)
    assert choose_config(PROBLEM, H200, None, both, deterministic=True) == repeatable
    assert choose_config(PROBLEM, H200, None, both) in both
    with pytest.raises(ArgumentError, match="that is built gives the same bits"):
        choose_config(PROBLEM, H200, None, (free,), deterministic=True)


@pytest.mark.parametrize(
    ("behind", "chosen"), [(COST_OF_REPEATING - 0.001, REPEATABLE), (0.04, FREE)]
)
def test_the_repeatable_kernel_serves_where_it_costs_next_to_nothing(
    behind: float, chosen: str
) -> None:
    table = measured({FREE: 10.0, REPEATABLE: 10.0 * (1 + behind), OTHER: 12.0})
    answer = choose(TEXT, H200, table=table)
    assert str(answer.config) == chosen
    assert [one.ms for one in answer.runners_up] == sorted(one.ms for one in answer.runners_up)
    asked = choose(TEXT, H200, table=table, deterministic=True)
    assert (str(asked.config), asked.evidence) == (REPEATABLE, "table")
    assert FREE not in {str(one.config) for one in asked.runners_up}


def test_a_choice_says_which_kernel_is_repeatable() -> None:
    table = measured({FREE: 10.0, REPEATABLE: 11.0})
    answer = choose(TEXT, H200, table=table)
    line = f"  repeatable  no; with deterministic=True {REPEATABLE}  11 ms (+10.0%)"
    assert line in str(answer).splitlines()
    facts = json.loads(json.dumps(answer.to_json()))
    assert facts["repeatable"] == {
        "config": REPEATABLE, "family": "mma_sync_backward", "ms": 11.0
    }  # fmt: skip
    assert facts["deterministic"] is False
    near = choose(TEXT, H200, table=measured({FREE: 10.0, REPEATABLE: 10.2}))
    assert "  repeatable  yes: the same bits in every run" in str(near).splitlines()
    assert near.why.endswith(f"{FREE} is 2.0% faster but not deterministic")
    forward = choose("b16 s4096 h16 d128 bf16", H200)
    assert "repeatable" not in str(forward)
    assert forward.to_json()["deterministic"] is True


def test_a_choice_says_that_no_kernel_is_repeatable() -> None:
    text = "b2 s512 h8:2 d320 bf16 backward"
    answer = choose(text, H200)
    assert not answer.config.family.is_deterministic(answer.config)
    line = "  repeatable  no, and no other kernel of this d gives the same bits in every run"
    assert line in str(answer).splitlines()
    facts = answer.to_json()
    assert (facts["deterministic"], facts["repeatable"]) == (False, None)
    with pytest.raises(ArgumentError, match=r"^deterministic=True: no backward kernel"):
        choose(text, H200, deterministic=True)


def test_an_entry_of_free_kernels_alone_does_not_keep_deterministic_from_a_kernel() -> None:
    answer = choose(TEXT, H200, table=measured({FREE: 10.0}), deterministic=True)
    assert answer.config.family.is_deterministic(answer.config)
    assert answer.evidence in ("offered", "cost model")


def test_any_length_of_either_kind() -> None:
    problem = Problem.parse("b1 s1 h8 d64 fp16 causal backward")
    for deterministic in (False, True):
        found = choose_for_any_length(
            problem,
            H200,
            sizes=[(1, length, length) for length in (1, 512, 4097)],
            deterministic=deterministic,
        )
        configs = {config for group in found.configs.values() for config in group}
        assert configs
        assert all(cfg.family.operation == "backward" for cfg in configs)
        assert not deterministic or all(cfg.family.is_deterministic(cfg) for cfg in configs)


def test_the_commands_take_deterministic() -> None:
    runner = CliRunner()
    said = runner.invoke(app, ["choose", TEXT, "--device", "H200", "--deterministic"])
    assert said.exit_code == 0, said.output
    assert "dq_atomics" not in said.output
    alone = runner.invoke(app, ["build", "--deterministic"])
    assert alone.exit_code != 0
    assert "--deterministic: goes with --for" in str(alone.exception)
