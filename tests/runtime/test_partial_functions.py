"""attention(..., partial=True) with score and mask functions: indices count from the first key of
the sequence in every part, so that parts of one call take the same functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashsmith
from flashsmith.chooser.choice import choose_config
from flashsmith.chooser.function_problems import parse_with_functions
from flashsmith.errors import ArgumentError
from flashsmith.families import device_spec, parse_kernel_name_into_config

MMA, WGMMA = tuple(
    parse_kernel_name_into_config(text)
    for text in (
        "(FP16, 64, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax",
        "(FP16, 64, 128, 48, 2wg): tma+stages_3+q_buffers_1+regs_24_240+overlap+pingpong_exp"
        "+static_persistent+separate_O",
    )
)
SEQ_Q, SEQ_K, HEADS, GROUP, D = 50, 200, 4, 2, 64
CUT = np.array([90, 30], np.int32)  # where the second part of each sequence's keys begins


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float16)


RNG = np.random.default_rng(7)
SLOPES = RNG.uniform(-0.05, 0.05, HEADS).astype(np.float32)
IDS = np.sort(RNG.integers(0, 3, (2, SEQ_K)), axis=1).astype(np.int32)
BIAS = RNG.standard_normal((2, 1, SEQ_Q, SEQ_K)).astype(np.float32)
SHOWN = RNG.random((2, HEADS, SEQ_Q, SEQ_K)) < 0.7


def alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + SLOPES[h] * (k - q)


def same_document(b: Any, h: Any, q: Any, k: Any) -> Any:
    return IDS[b, q] == IDS[b, k]


def expected(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    change: Callable[..., Any],
    seen: Callable[..., Any],
    *,
    number: int = 0,
    at_end: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """o and lse of one sequence, (seq, heads, d), in float64 over all of its keys."""
    rows, keys = np.arange(len(q))[:, None], np.arange(len(k))
    rows = rows + (len(k) - len(q)) * at_end
    o, lse = np.zeros(q.shape), np.full((q.shape[1], len(q)), -np.inf)
    for h in range(q.shape[1]):
        score = q[:, h].astype(float) @ k[:, h // GROUP].astype(float).T / D**0.5
        score = np.asarray(change(score, number, h, rows, keys), float)
        score = np.where(np.broadcast_to(seen(number, h, rows, keys), score.shape), score, -np.inf)
        most = score.max(-1, keepdims=True, initial=-1e30)
        weights = np.exp(score - most)
        total = weights.sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse[h] = (most + np.log(total))[:, 0]
        o[:, h] = weights / np.maximum(total, 1e-300) @ v[:, h // GROUP].astype(float)
    return o, lse


def check(o: np.ndarray, lse: np.ndarray, wanted: tuple[np.ndarray, np.ndarray]) -> None:
    assert o.dtype == lse.dtype == np.float32
    np.testing.assert_allclose(o, wanted[0], atol=4e-3)
    np.testing.assert_allclose(lse, wanted[1], atol=1e-3)
    assert not np.moveaxis(o, 1, 0)[np.isneginf(wanted[1])].any()


def dense() -> tuple[np.ndarray, ...]:
    return (
        draw(2, SEQ_Q, HEADS, D),
        draw(2, SEQ_K, HEADS // GROUP, D, seed=1),
        draw(2, SEQ_K, HEADS // GROUP, D, seed=2),
    )


def merged(*parts: Any) -> Any:
    return flashsmith.merge_attention(*map(list, zip(*parts, strict=True)))


def test_parts_of_dense_keys_take_the_same_functions() -> None:
    """The part that begins with its sequence, too: it is a k_begin of zeros."""
    q, k, v = dense()
    ranges = ((CUT * 0, CUT), (CUT, SEQ_K - CUT))
    parts = [
        flashsmith.attention(
            *(q, k, v), partial=True, k_begin=begin, seqused_k=used.astype(np.int32),
            score_mod=alibi, mask_mod=same_document, config=MMA,
        )
        for begin, used in ranges
    ]  # fmt: skip
    o, lse = merged(*parts)
    for b in range(2):
        check(o[b], lse[b], expected(q[b], k[b], v[b], alibi, same_document, number=b))


def test_positions_count_from_the_end_of_a_part() -> None:
    """The last query is at the last key of the part, as causal has it, while a bias and a mask have
    the rows of the call and the keys of the sequence. The rows see no key of the others' parts."""
    q, k, v = dense()
    used = np.array([80, 130], np.int32)
    o, lse = flashsmith.attention(
        *(q, k, v), partial=True, k_begin=CUT, seqused_k=used, positions="end", causal=True,
        score_mod=lambda s, b, h, q, k: s - 0.01 * (q - k), bias=BIAS, mask=SHOWN, config=WGMMA,
    )  # fmt: skip
    for b, (begin, end) in enumerate(zip(CUT, CUT + used, strict=True)):
        first = end - SEQ_Q

        def change(s: Any, n: int, h: int, i: Any, j: Any) -> Any:
            return s - 0.01 * (i + first - j) + BIAS[n, 0]  # noqa: B023

        def seen(n: int, h: int, i: Any, j: Any) -> Any:
            return SHOWN[n, h] & (j >= begin) & (j <= i + first)  # noqa: B023

        check(o[b], lse[b], expected(q[b], k[b], v[b], change, seen, number=b))


@pytest.mark.parametrize(
    "has_offsets", [True, pytest.param(False, marks=pytest.mark.full)], ids=["own", "shared"]
)
def test_parts_of_packed_keys(has_offsets: bool) -> None:
    """Keys count from the first of their sequence: of cu_seqlens_k, or of k without it."""
    q, k, v = (it.reshape(-1, *it.shape[2:]) for it in dense())
    cu_q, cu_k = (np.arange(3, dtype=np.int32) * n for n in (SEQ_Q, SEQ_K))
    own = {"cu_seqlens_k": cu_k} if has_offsets else {}
    begin = CUT + cu_k[:2] * has_offsets
    used = SEQ_K - CUT
    o, lse = flashsmith.attention(
        *(q, k, v), partial=True, k_begin=begin, seqused_k=used.astype(np.int32),
        score_mod=alibi, mask_mod=same_document, cu_seqlens_q=cu_q, **own, config=WGMMA,
    )  # fmt: skip
    for b in range(2):
        rows, keys = (slice(cu[b], cu[b + 1]) for cu in (cu_q, cu_k))
        keys = keys if has_offsets else slice(SEQ_K)
        check(
            o[rows],
            lse[:, rows],
            expected(
                *(q[rows], k[keys], v[keys], alibi),
                lambda n, h, i, j: same_document(n, h, i, j) & (j >= CUT[n]),
                number=b,
            ),
        )


@pytest.mark.parametrize("arch", [80, 90])
def test_a_part_is_computed_by_the_kernel_of_the_whole(arch: int) -> None:
    for text in ("b2 s1024 h8:2 d64 fp16", "b4 s300 h4 d128 bf16 packed", "b1 s400 h2 d256 bf16"):
        config, of_part = (
            choose_config(
                parse_with_functions(f"{it} score=alibi mask=documents").problem, device_spec(arch)
            )
            for it in (text, f"{text} partial")
        )
        assert of_part == config


@pytest.mark.torch
def test_what_functions_read_may_not_require_grad() -> None:
    import torch

    q, k, v = map(torch.from_numpy, dense())
    ids, slopes = torch.from_numpy(IDS), torch.from_numpy(SLOPES.copy()).requires_grad_()
    begin = torch.zeros(2, dtype=torch.int32)

    def call() -> Any:
        return flashsmith.attention(
            *(q, k, v), partial=True, k_begin=begin,
            mask_mod=lambda b, h, q, k: ids[b, q] == ids[b, k],
            score_mod=lambda s, b, h, q, k: s + slopes[h] * (k - q), config=MMA,
        )  # fmt: skip

    with pytest.raises(ArgumentError, match=r"partial: .* shape \(4,\) .*requires grad.*no_grad"):
        call()
    with torch.no_grad():
        o, lse = call()
    for b in range(2):
        wanted = expected(*(it[b].numpy() for it in (q, k, v)), alibi, same_document, number=b)
        check(o[b].numpy(), lse[b].numpy(), wanted)


@pytest.mark.torch
def test_compiled_code_breaks_its_graph_at_a_part() -> None:
    import torch

    tensors = [torch.from_numpy(it) for it in (*dense(), CUT * 0, CUT)]
    slopes, ids = torch.from_numpy(SLOPES), torch.from_numpy(IDS)

    def part(q: Any, k: Any, v: Any, begin: Any, used: Any) -> Any:
        return flashsmith.attention(
            *(q, k, v), partial=True, k_begin=begin, seqused_k=used,
            mask_mod=lambda b, h, q, k: ids[b, q] == ids[b, k],
            score_mod=lambda s, b, h, q, k: s + slopes[h] * (k - q), config=MMA,
        )[0] * 2  # fmt: skip

    compiled: Any = torch.compile(part, backend="eager")
    assert torch.equal(compiled(*tensors), part(*tensors))
