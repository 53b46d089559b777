"""write_slots(): rows of k and v go into their slots of a cache, and nothing else changes."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from plain_run import full_after

import flashsmith
from flashsmith.chooser.write_slots import write_config
from flashsmith.errors import ArgumentError
from flashsmith.families import DType, Problem
from flashsmith.verify import prove

PAGES, PAGE, HEADS = 5, 16, 2


def fresh(
    d: int, layout: str, dtype: Any = torch.bfloat16, d_v: int | None = None
) -> tuple[Any, Any]:
    """Both caches, as serving engines lay them out."""
    widths = d, d if d_v is None else d_v
    if layout == "heads first":  # (pages, heads, page, K and V)
        both = torch.randn(PAGES, HEADS, PAGE, sum(widths)).to(dtype)
        k_cache, v_cache = both.transpose(1, 2).split(widths, dim=-1)
    elif layout == "halves":
        both = torch.randn(PAGES, PAGE, HEADS, sum(widths)).to(dtype)
        k_cache, v_cache = both.split(widths, dim=-1)
    else:
        k_cache, v_cache = (torch.randn(PAGES, PAGE, HEADS, it).to(dtype) for it in widths)
    return k_cache, v_cache


def written(cache: Any, new: Any, slots: Any) -> Any:
    found = cache.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            found[slot // PAGE, slot % PAGE] = new[row]
    return found


@pytest.mark.parametrize("layout", ["apart", "halves", "heads first"])
@pytest.mark.parametrize(
    ("d", "d_v", "dtype"),
    full_after(
        2,
        [
            (80, 80, torch.float16),
            (192, 128, torch.bfloat16),
            (128, 128, torch.bfloat16),
            (40, 104, torch.float16),
        ],
    ),
)
def test_rows_go_into_their_slots(layout: str, d: int, d_v: int, dtype: Any) -> None:
    torch.manual_seed(0)
    k_cache, v_cache = fresh(d, layout, dtype, d_v)
    k, v = (torch.randn(9, HEADS, it).to(dtype) for it in (d, d_v))
    slots = torch.tensor([3, -1, 79, 16, 15, -7, 41])
    expected = written(k_cache, k, slots), written(v_cache, v, slots)
    assert flashsmith.write_slots(k, v, k_cache, v_cache, slots) is None
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


def test_bits_are_copied_as_they_are() -> None:
    """NaN keeps its payload, and -0 its sign."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(-1, 1, 64)
    k = bits.view(torch.bfloat16)
    k_cache, v_cache = torch.zeros(2, 64, 16, 1, 64, dtype=torch.bfloat16)
    flashsmith.write_slots(k, k, k_cache, v_cache, torch.arange(1024).flip(0))
    assert torch.equal(k_cache.view(torch.int16).view(-1, 1, 64).flip(0), bits)


def test_strided_rows_of_a_projection() -> None:
    """K and V as an engine has them: slices of one projection."""
    qkv = torch.randn(6, (4 + 2 * HEADS) * 64).half()
    k, v = (it.view(6, HEADS, 64) for it in qkv[:, 256:].split(HEADS * 64, dim=-1))
    k_cache, v_cache = fresh(64, "halves", torch.float16)
    slots = torch.tensor([5, 4, 3, 60, 61, 62])
    expected = written(k_cache, k, slots)
    flashsmith.write_slots(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache, expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"slot_mapping": torch.tensor([80])},
            r"slot_mapping\[0\]=80: the cache has 5 pages of 16",
        ),
        ({"slot_mapping": torch.zeros(1, dtype=torch.int32)}, "slot_mapping: dtype torch.int32"),
        ({"slot_mapping": torch.zeros(10, dtype=torch.int64)}, "10 slots for the 9 rows"),
        ({"v": torch.zeros(8, HEADS, 64).half()}, r"v: shape \(8, 2, 64\); all but d must be k's"),
        ({"v": torch.zeros(9, HEADS, 60).half()}, r"v: shape \(9, 2, 60\); heads_k must be 1 or"),
        ({"v": torch.zeros(9, HEADS, 32).half()}, r"v_cache: shape .* \(pages, page, 2, 32\)"),
        ({"v_cache": torch.zeros(5, 15, HEADS, 64).half()}, "v_cache: shape .* all but d must be"),
        ({"k": torch.zeros(9, HEADS * 64).half()}, "k: rank 2"),
        ({"v_cache": torch.zeros(5, 16, 3, 64).half()}, r"v_cache: shape .* must be \(pages, page"),
        ({"k": torch.zeros(9, HEADS, 64)}, "k: dtype torch.float32"),
    ],
)
def test_unusable_arguments_are_refused(change: dict[str, Any], words: str) -> None:
    k_cache, v_cache = fresh(64, "apart", torch.float16)
    k, v = torch.randn(2, 9, HEADS, 64).half()
    call = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}
    call["slot_mapping"] = torch.zeros(1, dtype=torch.int64)
    before = k_cache.clone()
    with pytest.raises(ArgumentError, match=words):
        flashsmith.write_slots(**(call | change))
    assert torch.equal(k_cache, before)


def test_one_cache_for_both_is_refused() -> None:
    cache, _ = fresh(64, "apart", torch.float16)
    k, v = torch.randn(2, 9, HEADS, 64).half()
    with pytest.raises(ArgumentError, match="v_cache: shares memory with k_cache"):
        flashsmith.write_slots(k, v, cache, cache, torch.arange(9))


def test_numpy_and_nothing_to_write() -> None:
    k = np.ones((2, 1, 64), np.float16)
    cache = np.zeros((2, 2, 4, 1, 64), np.float16)
    flashsmith.write_slots(k, k, *cache, np.zeros(0, np.int64))
    assert not cache.any()
    flashsmith.write_slots(k, k, *cache, np.array([6, 1]))
    assert cache[0].reshape(8, 64).any(axis=1).tolist() == [slot in (1, 6) for slot in range(8)]


def test_a_compiled_function_writes() -> None:
    """torch.compile sees the writes, so that it does not reorder them."""
    k_cache, v_cache = torch.zeros(2, PAGES, PAGE, HEADS, 64).half()
    k, v = torch.randn(2, 4, HEADS, 64).half()
    slots = torch.tensor([1, 2, 3, 70])

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(k: Any, v: Any) -> Any:
        flashsmith.write_slots(k * 2, v, k_cache, v_cache, slots)
        return k_cache.sum()

    assert step(k, v) == written(torch.zeros_like(k_cache), k * 2, slots).sum()


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        *((DType.FP16, it) for it in ("h3 d64", "h2 d176:112 cache_e4m3")),
        *((DType.BF16, it) for it in ("h3 d184:120", "h1 d64:128 cache_scaled")),
        *(
            pytest.param(dtype, it, marks=pytest.mark.full)
            for dtype, it in (
                *product(DType, ("h1 d96", "h8 d256", "h1 d56:128")),
                *((DType.BF16, it) for it in ("h3 d64", "h2 d176:112 cache_e4m3")),
                *((DType.FP16, it) for it in ("h3 d184:120", "h1 d64:128 cache_scaled")),
            )
        ),
    ],
)
def test_the_kernel_is_proven(dtype: DType, sizes: str) -> None:
    problem = Problem.parse(f"b1 s37 {sizes} {dtype.name.lower()} write_slots")
    verdict = prove(write_config(problem), problem, checks=True)
    assert verdict.ok, verdict
