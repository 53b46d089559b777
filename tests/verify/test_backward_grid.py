"""The backward grid: how many problems, what they contain, and which kernels they are for."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import combinations
from typing import Any

import pytest
from grids.backward_grid import (
    MASKS,
    BackwardCase,
    backward_grid,
    case_pairs,
    covering_backward_cases,
)

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, Semantics, family_named
from flashsmith.verify.backward_reference import BackwardReference

CASE = BackwardCase(DType.FP16, 64, (113, 203), "causal", 0.0, "zero lengths")


@pytest.fixture(scope="module")
def grid() -> list[BackwardCase]:
    return list(backward_grid())


def test_its_size(grid: list[BackwardCase]) -> None:
    """12,000 problems over two families."""
    assert len(grid) == len(set(grid)) == 6264
    assert len({str(case) for case in grid}) == len(grid)
    theirs = list(backward_grid("wgmma"))
    assert len(theirs) == len(grid)
    assert {case.seed for case in theirs}.isdisjoint(case.seed for case in grid[:50])


@pytest.mark.parametrize("family", ["mma_sync_backward", "wgmma_backward", "wgmma_dq"])
def test_heads_of_vision_models_have_a_smaller_part(family: str) -> None:
    narrow = [case for case in backward_grid(family) if case.d in (72, 80)]
    assert len(narrow) == len(set(narrow)) == 432
    assert all(case.config.d_head == case.d for case in narrow)


def test_wider_heads_have_a_smaller_part() -> None:
    wide = [case for case in backward_grid("wgmma_backward") if case.d > 256]
    assert len(wide) == len(set(wide)) == 432
    assert {case.d for case in wide} == {264, 512}
    assert all("cta_pair" in str(case.config) for case in wide)
    assert not [case for case in backward_grid("wgmma_dq") if case.d > 256]


def test_every_pair_occurs_often(grid: list[BackwardCase]) -> None:
    """Of whatever two things a kernel could mix up; a window's limits are drawn."""
    flags = ("sinks", "dlse", "deterministic", "fp32_gradients")
    for first, second in combinations((*flags, "heads", "mask", "softcap", "batch", "dtype"), 2):
        counts: dict[tuple[Any, Any], int] = {}
        for case in grid:
            pair = getattr(case, first), getattr(case, second)
            counts[pair] = counts.get(pair, 0) + 1
        values = [len({getattr(case, name) for case in grid}) for name in (first, second)]
        assert len(counts) == values[0] * values[1], (first, second)
        assert min(counts.values()) >= 100, (first, second, counts)


def test_every_problem_can_be_asked(grid: list[BackwardCase]) -> None:
    seen: set[str] = set()
    for case in grid[::7]:
        problem, options = case.problem, case.options()
        assert problem.operation == "backward"
        assert problem.semantics.packed == ("lens_q" in options)
        assert (problem.semantics.mask == "window") == bool({"left", "right"} & set(options))
        assert problem.semantics.softcap == ("softcap" in options)
        if "lens_q" in options:
            assert len(options["lens_q"]) == problem.batch
            assert max(options["lens_q"]) >= problem.seq_q
        assert set(options.get("unneeded", ())) != {"dq", "dk", "dv"}
        seen |= set(options)
    every = {"scale", "sinks", "dlse", "spare", "more_keys", "unneeded", "grad_dtype"}
    assert seen >= every | {"deterministic"}


def test_the_cover_contains_every_pair() -> None:
    cover = covering_backward_cases()
    assert 50 <= len(cover) <= 200
    assert cover == covering_backward_cases()
    held = {frozenset(pair) for case in cover for pair in case_pairs(case)}
    values = {name: {getattr(case, name) for case in cover}
              for name in ("dtype", "d", "mask", "heads", "inputs", "sinks", "dlse")}  # fmt: skip
    assert values["mask"] == set(MASKS)
    assert values["inputs"] == set(BackwardReference.kinds)
    for first, second in combinations(values, 2):
        for a in values[first]:
            for b in values[second]:
                assert {(first, a), (second, b)} in held, (first, a, second, b)


def test_a_case_is_for_a_config_of_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    family, case = family_named("mma_sync"), replace(CASE, family="mma_sync")
    found = family.proof_configs(CASE.dtype, CASE.d)
    assert case.config in found
    assert case.semantics == Semantics("causal", packed=True, uneven=True)
    assert case.keywords() == {
        "problem": case.problem, "options": case.options(), "inputs": "random", "seed": case.seed
    }  # fmt: skip
    deterministic, repeatable = replace(case, deterministic=True), found[-1]
    monkeypatch.setattr(type(family), "is_deterministic", lambda self, cfg: cfg == repeatable)
    assert deterministic.config == repeatable
    monkeypatch.setattr(type(family), "is_deterministic", lambda self, cfg: False)
    with pytest.raises(ArgumentError, match="it has no deterministic proof_configs for FP16 and"):
        assert replace(case, deterministic=True).config


def test_a_case_says_what_differs() -> None:
    assert str(CASE) == "fp16, d64, s113:203, zero lengths, mha, mask causal"
    full = replace(
        CASE, sinks=True, dlse=True, scale=0.3, unneeded=("dk", "dv"), more_keys=77, spare=9, cut=5
    )
    assert str(full) == (
        "fp16, d64, s113:203, zero lengths, mha, mask causal, sinks, dlse, scale 0.3, without "
        "dk+dv, more_keys 77, spare 9, cut 5"
    )
    said = {str(replace(CASE, **{field.name: value})) for field, value in _changes()}
    assert len(said) == len(list(_changes()))


def _changes() -> list[tuple[Any, Any]]:
    other = {
        "dtype": DType.BF16, "d": 96, "lengths": (1, 1), "mask": "left", "softcap": 30.0,
        "batch": "dense", "heads": "gqa", "scale": 0.3, "unneeded": ("dq",), "more_keys": 77,
        "spare": 9, "cut": 5, "inputs": "one_hot", "family": "wgmma",
    }  # fmt: skip
    return [(field, other.get(field.name, True)) for field in fields(CASE)]
