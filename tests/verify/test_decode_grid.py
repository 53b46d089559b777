"""The grid of decode problems: what is in it, and that its cover contains every pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from grids.decode_grid import (
    APPENDS,
    GROUPS,
    LENGTHS,
    PAGES,
    QUERIES,
    DecodeCase,
    case_pairs,
    covering_decode_cases,
    decode_grid,
)

from flashsmith.errors import ArgumentError
from flashsmith.families import FAMILIES, family_named
from flashsmith.operations import DECODE
from flashsmith.verify.decode_inputs import draw_decode_inputs
from flashsmith.verify.decode_reference import DecodeReference, expected_of

GRID = list(decode_grid())
COVER = covering_decode_cases()


def test_the_grid_has_thousands_of_problems_and_every_pair_of_the_cover() -> None:
    assert len(GRID) == len(set(map(str, GRID))) == 4128
    pairs: set[Any] = set()
    for case in GRID:
        pairs.update(case_pairs(case))
    drawn = {name for (name, _), _ in pairs}
    assert {"page", "append", "lengths_of", "layout", "split"} <= drawn
    plain = {
        pair
        for case in COVER
        for pair in case_pairs(case)
        if not {"inputs", "batch", "sm_count"} & {name for name, _ in pair}
    }
    assert len(plain - pairs) <= len(plain) // 100


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("d", (64, 96, 128, 256)),
        ("group", (1, 2, 4, 7, 8, 16)),
        ("queries", (1, 2, 5, 64)),
        ("page", (0, 1, 8, 16, 24, 256)),
        ("mask", ("none", "causal", "window")),
        ("append", APPENDS),
        ("lengths_of", tuple(LENGTHS)),
        ("inputs", DecodeReference.kinds),
    ],
)
def test_every_value_is_in_the_grid_and_in_its_cover(name: str, values: tuple[Any, ...]) -> None:
    for cases in (GRID, COVER):
        assert {getattr(case, name) for case in cases} == set(values)


def test_the_cover_has_every_pair_of_group_queries_and_page() -> None:
    pairs = {pair for case in COVER for pair in case_pairs(case)}
    for group in GROUPS:
        for queries in QUERIES:
            assert (("group", group), ("queries", queries)) in pairs
        for page in PAGES:
            assert (("group", group), ("page", page)) in pairs


def test_lengths_are_0_1_and_beside_pages_and_boundaries() -> None:
    seen: dict[str, set[int]] = {}
    for case in GRID[::3]:
        seen.setdefault(case.lengths_of, set()).update(case.options().get("lens_k", ()))
    assert seen["empty"] >= {0, 1}
    assert seen["page"] >= {15, 16, 17}
    assert {step - 1 for step in (64, 128, 256, 512)} & seen["boundary"]
    assert {step + 1 for step in (64, 128, 256, 512)} & seen["boundary"]
    assert max(seen["long"]) == LENGTHS["long"]


@pytest.mark.parametrize("case", COVER[::9], ids=str)
def test_a_case_has_inputs_and_what_is_right_for_them(case: DecodeCase) -> None:
    options = case.options()
    inputs = draw_decode_inputs(case.problem, case.inputs, case.seed, options)
    assert set(inputs) <= {tensor.name for tensor in DECODE.tensors}
    found = expected_of(case.problem, inputs, options)
    assert found.references.o.shape[0] == sum(found.lens_q)
    if not case.append:
        np.testing.assert_array_equal(
            found.k_cache.view(np.uint16), inputs["k_cache"].view(np.uint16)
        )
    keywords = case.keywords()
    assert (keywords["problem"], keywords["sm_count"]) == (case.problem, case.sm_count)


def test_a_family_without_proof_configs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(iter(FAMILIES))
    monkeypatch.setattr(type(family_named(name)), "proof_configs", lambda *of: [])
    case = DecodeCase(GRID[0].dtype, 8, 1, 1, 0, "none", family=name)
    with pytest.raises(ArgumentError, match="it has no proof_configs for FP16 and d 8"):
        _ = case.config
