"""A cache that has dropped its first keys has the bits of the whole one, if the call says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import shared_kernels

from flashsmith import attention, attention_with_cache
from flashsmith.errors import ArgumentError
from flashsmith.families import Semantics
from flashsmith.families import parse_kernel_name_into_config as parse

CHUNK = 4096
ONE_CTA = "(FP16, 64, 16, 128, 4): decode+stages_3+least_128+parts_1+canonical_1"
CLUSTER = "(FP16, 64, 16, 128, 8): decode+stages_3+least_128+parts_1+canonical_1+chunk_cluster_4"
WGMMA = "(FP16, 64, 16, 128, 4): decode+stages_3+least_128+parts_1+canonical_1+chunk_warpgroups_2"
for _text in (ONE_CTA, CLUSTER):
    shared_kernels.want([parse(_text)], Semantics(mask="window"), arch=90)


def bits(x: Any) -> np.ndarray:
    array = np.asarray(x)
    return array.view(f"u{array.itemsize}")


def differing(some: Sequence[Any], others: Sequence[Any]) -> int:
    return sum(int((bits(a) != bits(b)).sum()) for a, b in zip(some, others, strict=True))


class Rolled:
    """Two sequences of one head pair whose caches may have dropped keys behind the window."""

    def __init__(self, lens: Sequence[int], queries: int, window: int, d: int = 64) -> None:
        rng = np.random.default_rng(5)
        self.lens, self.queries, self.window = lens, queries, window
        self.q = rng.standard_normal((len(lens), queries, 2, d)).astype(np.float16)
        shape = len(lens), max(lens), 1, d
        self.k, self.v = (rng.standard_normal(shape).astype(np.float16) for _ in "kv")

    def whole(self, text: str, **options: Any) -> Any:
        return self.call(text, self.k, self.v, self.lens, **options)

    def rolled(
        self, text: str, dropped: Sequence[int], *, page: int = 0, tell: bool = True, **options: Any
    ) -> Any:
        """Slots of dropped keys and behind the last key hold NaN."""
        kept = [length - drop for length, drop in zip(self.lens, dropped, strict=True)]
        caches = []
        for source in (self.k, self.v):
            cache = np.full((len(kept), max(kept) + 3, *source.shape[2:]), np.nan, source.dtype)
            for i, (drop, count) in enumerate(zip(dropped, kept, strict=True)):
                cache[i, :count] = source[i, drop : drop + count]
            caches.append(cache)
        if page:
            most = -(-caches[0].shape[1] // page)
            table = np.random.default_rng(6).permutation(len(kept) * most).astype(np.int32)
            options["page_table"] = table.reshape(len(kept), most)
            for i, cache in enumerate(caches):
                padding = [(0, 0), (0, most * page - cache.shape[1]), (0, 0), (0, 0)]
                rows = np.pad(cache, padding, constant_values=np.nan)
                pages = np.empty_like(rows.reshape(-1, page, *rows.shape[2:]))
                pages[table] = rows.reshape(-1, page, *rows.shape[2:])
                caches[i] = pages
        if tell:
            options["kv_offset"] = np.array(dropped, np.int32)
        return self.call(text, *caches, kept, **options)

    def call(self, text: str, k: Any, v: Any, lens: Sequence[int], **options: Any) -> Any:
        return attention_with_cache(
            *(self.q, k, v),
            cache_lens=np.array(lens, np.int32),
            window=(self.window, 0),
            **({"bits": "canonical", "config": parse(text)} | options),
            return_lse=True,
            emulate=True,
        )


#: The window of the longer sequence begins in its first or its second chunk.
CASES = ((CHUNK + 700, 900), 650), ((CHUNK + 300, 513), 450)


@pytest.mark.parametrize("text", [ONE_CTA, CLUSTER])
@pytest.mark.parametrize(("lens", "window"), CASES)
def test_dropped_keys_change_no_bit(text: str, lens: tuple[int, ...], window: int) -> None:
    case = Rolled(lens, 3, window)
    whole = case.whole(ONE_CTA)
    most = [length - window - 3 for length in lens]
    for dropped in ((1, 0), (most[0], 7), (most[0] - 5, most[1])):
        assert differing(whole, case.rolled(text, dropped)) == 0, dropped
    assert differing(whole, case.rolled(text, most, tell=False)) > 0


@pytest.mark.parametrize("page", [7, 16, 48])
def test_pages_of_a_rolling_cache(page: int) -> None:
    case = Rolled((CHUNK + 700, 900), 2, 650)
    whole = case.whole(ONE_CTA)
    for text, drop in ((ONE_CTA, 4000), (CLUSTER, 4000 // page * page)):
        assert differing(whole, case.rolled(text, (drop, 11), page=page)) == 0


def test_it_gives_the_bits_of_attention() -> None:
    case = Rolled((CHUNK + 300,), 40, 450)
    o, lse = attention(
        *(case.q, case.k, case.v),
        window=(450, 0),
        bits="canonical",
        return_lse=True,
        emulate=True,
    )
    chosen = case.rolled(ONE_CTA, (3700,), config=None)
    assert differing(chosen, (o, lse)) == 0


@pytest.mark.full
def test_many_rows_use_no_warpgroups() -> None:
    case = Rolled((CHUNK + 300,), 40, 450)
    whole = case.whole(ONE_CTA)
    assert differing(whole, case.rolled(WGMMA, (3700,))) == 0


@pytest.mark.parametrize("how", ["canonical", pytest.param("free", marks=pytest.mark.full)])
def test_appended_keys_are_rotated_by_their_position_in_the_sequence(how: str) -> None:
    rng = np.random.default_rng(7)
    case = Rolled((900,), 2, 100)
    angles = rng.uniform(-3, 3, (902, 32)).astype(np.float32)
    new = [rng.standard_normal((1, 2, 1, 64)).astype(np.float16) for _ in "kv"]

    def appended(drop: int) -> tuple[Any, np.ndarray]:
        caches = [np.concatenate([x[:, drop:], np.zeros_like(new[0])], 1) for x in (case.k, case.v)]
        found = attention_with_cache(
            *(case.q, *caches),
            cache_lens=np.array([900 - drop], np.int32),
            kv_offset=np.array([drop], np.int32),
            **{"k": new[0], "v": new[1], "cos": np.cos(angles), "sin": np.sin(angles)},
            window=(case.window, 0),
            bits=how,
            return_lse=True,
            emulate=True,
        )
        return found, caches[0][:, -2:]

    (whole, keys), (rolled, rolled_keys) = appended(0), appended(700)
    assert np.array_equal(keys, rolled_keys)
    if how == "canonical":
        assert differing(whole, rolled) == 0
    else:
        np.testing.assert_allclose(whole[0], rolled[0], atol=2e-3)


@pytest.mark.parametrize(
    ("offset", "why"),
    [
        (np.array([-1], np.int32), r"kv_offset\[0\]=-1: give the number of keys"),
        (np.array([2**30], np.int32), r"kv_offset\[0\]=1073741824: .* from 0 to"),
        (np.array([1, 2], np.int32), r"kv_offset: 2 numbers, but q has 1 sequences"),
        (np.array([1], np.int64), "kv_offset"),
    ],
)
def test_offsets_that_cannot_be(offset: np.ndarray, why: str) -> None:
    case = Rolled((300,), 1, 100)
    with pytest.raises(ArgumentError, match=why):
        case.call(ONE_CTA, case.k, case.v, [300], kv_offset=offset)
