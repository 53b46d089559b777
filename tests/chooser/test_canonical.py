"""Problems with canonical bits: which kernels serve them, what tables say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashsmith.chooser import choose
from flashsmith.chooser.winners import RankedConfig, WinnersTable
from flashsmith.families import Problem, device_spec, parse_kernel_name_into_config

H200 = device_spec("H200")
FREE = "b16 s4096 h16 d128 fp16 causal"
CANONICAL = f"{FREE} canonical"
OWN = "(FP16, 128, 128, 64, 4): async+eager+swizzled+load_2_2_2_tiles"


def table_of(*winners: tuple[str, Any]) -> WinnersTable:
    table = WinnersTable()
    for words, config in winners:
        problem = Problem.parse(words)
        tflops = problem.attn_flop() / 3.0 / 1e9
        stamp = {"time": "2026-11-21T00:00:00+00:00"}
        table.add(problem, H200, [RankedConfig(config.FAMILY, str(config), 3.0, tflops, stamp)])
    return table


def measured() -> tuple[Any, Any]:
    """A canonical config, and one of an order of its own, that nothing but a table would choose."""
    own = parse_kernel_name_into_config(OWN)
    return own.family.canonical(own, H200), own


@pytest.mark.parametrize("device", ["H200", "A100", "sm_86"])
@pytest.mark.parametrize("words", [CANONICAL, "b2 s1:4096 h16 d128 fp16 decode causal canonical"])
def test_a_canonical_config_serves_everywhere(words: str, device: str) -> None:
    choice = choose(words, device)
    assert choice.order == choice.to_json()["order"] == "canonical-1"
    assert "  order       canonical-1\n" in str(choice)
    assert all(one.config.canonical for one in choice.runners_up)


def test_the_order_of_others_is_their_own_and_gradients_have_none() -> None:
    assert "  order       its own\n" in str(choose(FREE, H200))
    assert choose(f"backward {FREE}", H200).order == ""


def test_what_was_measured_of_one_order_is_not_for_another(tmp_path: Path) -> None:
    canonical, own = measured()
    table = table_of((CANONICAL, canonical), (FREE, own))
    table.save(tmp_path / "own.json")
    table = WinnersTable.load(tmp_path / "own.json")
    assert not table.notes
    assert not table.validate()
    for words, config in ((CANONICAL, canonical), (FREE, own)):
        choice = choose(words, H200, table=table)
        assert (choice.config, choice.evidence) == (config, "table")
    only_canonical = choose(FREE, H200, table=table_of((CANONICAL, canonical)))
    assert (only_canonical.order, only_canonical.evidence) == ("its own", "cost model")
    only_own = choose(CANONICAL, H200, table=table_of((FREE, own)))
    assert only_own.order == "canonical-1"
    assert f"takes the place of {own} in canonical-1" in only_own.why
