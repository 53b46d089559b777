"""`flashsmith bits`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from flashsmith.chooser import choose
from flashsmith.cli import app
from flashsmith.errors import ArgumentError, FlashsmithError, IllegalConfigError

FORWARD = (
    "(FP16, 64, 128, 64, 8): async+eager+swizzled+load_0_2_2_tiles+opt_softmax+stages_2+canonical_1"
)
DECODE = str(choose("b1 s1:512 h4:2 d64 fp16 decode causal canonical", "A100").config)
FREE = "(FP16, 64, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax"
TRAINED = "b1 s4096 h32:8 d128 bf16 causal"
DECODED = "b1 s1:4096 h32:8 d128 bf16 decode causal"


def run(*words: str, status: int = 0) -> str:
    result: Result = CliRunner().invoke(app, ["bits", *words])
    if isinstance(result.exception, FlashsmithError):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.output


def test_two_canonical_configs_have_one_order() -> None:
    assert run(FORWARD, DECODE).splitlines() == [
        f"A  {FORWARD}: canonical-1",
        f"B  {DECODE}: canonical-1",
        "one order: a row has the same bits with both",
    ]


def test_the_first_operation_that_differs_is_named() -> None:
    assert run(FORWARD, FREE, status=1).splitlines()[2:] == [
        "another order: direction",
        "A  from the first tile on",
        "B  from the last tile on",
    ]


def test_one_order_of_its_own_promises_no_bits() -> None:
    assert "one order, but not canonical: bits may depend" in run(FREE, FREE)
    assert json.loads(run(FREE, FREE, "--json"))["equal_bits"] is False


@pytest.mark.parametrize("device", ["H200", "A100", "sm_86"])
def test_problems_stand_for_the_configs_that_are_taken(device: str) -> None:
    both = f"{TRAINED} canonical", f"{DECODED} canonical"
    facts = json.loads(run(*both, "--device", device, "--json"))
    assert facts["one_order"] is facts["equal_bits"] is True
    assert facts["names"] == ["canonical-1"] * 2
    assert facts["difference"] is None
    assert facts["orders"][0] == facts["orders"][1]
    facts = json.loads(run(TRAINED, DECODED, "--device", device, "--json", status=1))
    assert facts["difference"]["first"] != facts["difference"]["second"]


def test_what_has_no_bits_to_compare_is_refused() -> None:
    with pytest.raises(ArgumentError, match="a kernel of backward, which computes no rows"):
        run(FREE, "(FP16, 64, 64, 64, 4): backward")
    with pytest.raises(ArgumentError, match="B: dtype BF16, but A has FP16"):
        run(FREE, TRAINED)
    with pytest.raises(IllegalConfigError, match="B_c must be the tile of canonical-1: 128 keys"):
        run(DECODE, DECODE, "--device", "H200")
    with pytest.raises(ArgumentError, match="problem='hello'"):
        run(FREE, "hello")
