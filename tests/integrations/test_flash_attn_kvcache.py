"""flash_attn_with_kvcache has FlashAttention-3's names and meaning; FlashInfer's lists of pages
become page tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import shared_kernels

from flashsmith import attention_with_cache, flash_attn_varlen_func, flash_attn_with_kvcache
from flashsmith.chooser import decode
from flashsmith.errors import ArgumentError
from flashsmith.families import Semantics, parse_kernel_name_into_config
from flashsmith.integrations import flash_attn
from flashsmith.integrations.page_tables import from_flashinfer

CFG = parse_kernel_name_into_config("(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_2")
shared_kernels.want([CFG], Semantics("causal"))
PACKED = Semantics("causal", packed=True, uneven=True)
shared_kernels.want([CFG], PACKED)


@pytest.fixture(autouse=True)
def splits_asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes the splits that are asked for."""
    shared_kernels.load([CFG], Semantics("causal"))
    shared_kernels.load([CFG], PACKED)
    asked: list[str] = []

    def chooser(split: str) -> Any:
        def choose(problem: Any, device: Any) -> Any:
            asked.append(split)
            return CFG

        return choose

    monkeypatch.setattr(decode, "CHOOSERS", {name: chooser(name) for name in decode.CHOOSERS})
    return asked


def tensors() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(np.float16)

    return {"q": normal(2, 1, 2, 64), "k_cache": normal(2, 70, 1, 64),
            "v_cache": normal(2, 70, 1, 64)}  # fmt: skip


LENS = np.array([5, 68], np.int32)
LONGER = np.zeros((2, 2, 1, 64), np.float16)


def test_packed_queries_read_a_cache_through_a_block_table() -> None:
    rng = np.random.default_rng(1)
    q = rng.standard_normal((4, 2, 64), np.float32).astype(np.float16)
    pages = [rng.standard_normal((5, 16, 1, 64), np.float32).astype(np.float16) for _ in "kv"]
    starts_q, starts_k = np.array([0, 1, 4], np.int32), np.array([0, 20, 24], np.int32)
    table = np.array([[3, 1], [4, -1]], np.int32)
    how = {"softmax_scale": 0.1, "causal": True, "window_size": (-1, -1), "block_table": table}
    o, lse, none = flash_attn_varlen_func(
        q, *pages, starts_q, starts_k, 3, 20, return_attn_probs=True, **how
    )
    expected = attention_with_cache(
        *(q, *pages), cache_lens=np.array([20, 4], np.int32), page_table=table,
        cu_seqlens_q=starts_q, max_seqlen_q=3, scale=0.1, return_lse=True,
    )  # fmt: skip
    np.testing.assert_array_equal(o, expected[0])
    np.testing.assert_array_equal(lse, expected[1])
    assert none is None
    alone = flash_attn_varlen_func(q, *pages, starts_q, starts_k, 3, 20, **how)
    np.testing.assert_array_equal(alone, o)
    for wrong in (None, np.zeros((2, 2), np.int32)):
        with pytest.raises(ArgumentError, match=r"cu_seqlens_k: got .*; give a tensor of 1"):
            flash_attn_varlen_func(q, *pages, starts_q, wrong, 3, 20, **how)


def test_lengths_are_a_tensor_or_a_number_or_the_whole_cache() -> None:
    call = tensors()
    o, lse = flash_attn_with_kvcache(
        **call, cache_seqlens=LENS, causal=True, return_softmax_lse=True
    )
    expected = attention_with_cache(**call, cache_lens=LENS, return_lse=True)
    np.testing.assert_array_equal(o, expected[0])
    np.testing.assert_array_equal(lse, expected[1])
    for length in (7, None):
        lens = np.full(2, 70 if length is None else length, np.int32)
        o = flash_attn_with_kvcache(**call, cache_seqlens=length, causal=True)
        np.testing.assert_array_equal(o, attention_with_cache(**call, cache_lens=lens))
    paged = {**call, "k_cache": call["k_cache"].reshape(14, 10, 1, 64),
             "v_cache": call["v_cache"].reshape(14, 10, 1, 64),
             "page_table": np.arange(14, dtype=np.int32).reshape(2, 7)}  # fmt: skip
    whole = flash_attn_with_kvcache(**paged, causal=True)
    paged["block_table"] = paged.pop("page_table")
    by_other_name = flash_attn_with_kvcache(**paged, causal=True, alibi_slopes=None)
    np.testing.assert_array_equal(by_other_name, whole)
    np.testing.assert_array_equal(whole, flash_attn_with_kvcache(**call, causal=True))


def test_keys_are_appended_and_turned_interleaved_by_default() -> None:
    angles = np.random.default_rng(1).uniform(-3, 3, (70, 16))
    turn = np.cos(angles).astype(np.float16), np.sin(angles).astype(np.float16)
    k, v = (tensors()["q"][:, :, :1].copy() * factor for factor in (1, 2))
    theirs, ours = tensors(), tensors()
    o = flash_attn_with_kvcache(
        *theirs.values(), k, v, None, *turn, cache_seqlens=LENS, causal=True
    )
    expected = attention_with_cache(
        **ours, cache_lens=LENS, k=k, v=v, cos=turn[0], sin=turn[1], rotary_interleaved=True
    )
    np.testing.assert_array_equal(o, expected)
    for name in ("k_cache", "v_cache"):
        np.testing.assert_array_equal(theirs[name], ours[name])
        assert (theirs[name] != tensors()[name]).any()


def test_equal_lengths_may_be_other_tensors() -> None:
    """As FlashAttention's own tests give them: for packed queries those of the keys are worked out
    again, and positions of rotation are given beside equal lengths."""
    angles = np.random.default_rng(1).uniform(-3, 3, (70, 16))
    turn = {"rotary_cos": np.cos(angles).astype(np.float16),
            "rotary_sin": np.sin(angles).astype(np.float16)}  # fmt: skip
    starts = np.array([0, 1, 2], np.int32)
    results = []
    for lens_too, starts_too in ((None, None), (LENS, starts), (LENS.copy(), starts.copy())):
        call = tensors()
        q = call["q"][:, 0]
        results.append(
            flash_attn_with_kvcache(
                **{**call, "q": q}, k=q[:, :1], v=q[:, :1].copy(), cache_seqlens=LENS,
                cu_seqlens_q=starts, max_seqlen_q=1, cu_seqlens_k_new=starts_too,
                rotary_seqlens=lens_too, causal=True, **turn,
            )
        )  # fmt: skip
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_a_row_without_keys_is_0_with_lse_of_minus_infinity() -> None:
    """FlashAttention-3 says +inf there."""
    lens = np.array([0, 68], np.int32)
    call = tensors()
    o, lse = flash_attn_with_kvcache(
        **call, cache_seqlens=lens, causal=True, return_softmax_lse=True
    )
    pages = {name: call[name].reshape(14, 10, 1, 64) for name in ("k_cache", "v_cache")}
    table = np.arange(14, dtype=np.int32).reshape(2, 7)
    starts_q, starts_k = np.array([0, 1, 2], np.int32), np.array([0, 0, 68], np.int32)
    packed = flash_attn_varlen_func(
        *(call["q"][:, 0], *pages.values(), starts_q, starts_k, 1, 68),
        causal=True,
        block_table=table,
        return_attn_probs=True,
    )
    for rows, its_lse in ((o[:, 0], lse[:, :, 0].T), (packed[0], packed[1])):
        assert not rows[0].any()
        assert rows[1].all()
        assert (its_lse[:, 0] == -np.inf).all()
        assert np.isfinite(its_lse[:, 1]).all()


def test_splits_of_0_and_1_are_invariant_and_more_are_free(splits_asked: list[str]) -> None:
    for num_splits in (0, 1, 2, 32):
        flash_attn_with_kvcache(
            **tensors(), cache_seqlens=LENS, causal=True, num_splits=num_splits, pack_gqa=True
        )
    assert splits_asked == ["invariant", "invariant", "free", "free"]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        *[({name: LENS}, f"{name}: not supported; must be None") for name in (
            "cache_batch_idx", "cache_leftpad", "q_descale", "k_descale",
            "v_descale", "scheduler_metadata")],
        ({"qv": LENS}, "qv: k_cache and v_cache are no PyTorch tensors; kernels read latent rows"),
        ({"rotary_seqlens": LENS // 2}, "rotary_seqlens: has other numbers than cache_seqlens, "),
        ({"rotary_seqlens": LENS[:1]}, "rotary_seqlens: has other numbers .* rows of rotary_cos"),
        ({"rotary_seqlens": 5}, "rotary_seqlens: has other numbers than cache_seqlens"),
        ({"cu_seqlens_k_new": LENS}, "cu_seqlens_k_new: has other numbers than cu_seqlens_q, and "
         "a key and a value for every query are appended; write others to the caches before"),
        ({"k": LONGER, "v": LONGER, "cache_seqlens": LENS - 4},
         "k: shape .* a key and a value for every query are appended; write others to the caches"),
        ({"attention_chunk": -1}, "attention_chunk=-1: give the positions of a chunk, or 0"),
        ({"attention_chunk": 1.5}, r"attention_chunk=1\.5: give the positions"),
        ({"attention_chunk": 16, "bits": "canonical"}, "bits='canonical'"),
        ({"alibi_slopes": np.zeros((1, 2, 3))}, r"alibi_slopes: shape \(1, 2, 3\)"),
        ({"sm_margin": 2}, "sm_margin=2: not supported; must be 0"),
        ({"num_splits": -1}, "num_splits=-1: give a whole number from 0"),
        ({"cache_seqlens": None, "k": LENS}, "cache_seqlens: missing; k is appended there"),
        ({"window_size": 3}, "window_size=3: give"),
        ({"cache_seqlens": 71}, r"cache_seqlens\[0\]=71: must be from 0"),
        ({"cache_seqlens": -1}, r"cache_seqlens\[0\]=-1: must be from 0"),
        ({"cache_seqlens": True}, "cache_seqlens=True: give a number of keys, or a tensor"),
        ({"cache_seqlens": 2**31}, "cache_seqlens=2147483648: give a number of keys"),
        ({"cache_seqlens": 2.0}, r"cache_seqlens: got builtins\.float; give"),
        ({"cache_seqlens": [5, 68]}, r"cache_seqlens: got builtins\.list; give"),
        ({"cache_seqlens": 3, "q": None}, "q: got NoneType; give a tensor of 4 dimensions"),
        ({"cache_seqlens": 3, "q": [1]}, "q: got list; give a tensor"),
        ({"cache_seqlens": 3, "q": np.float16(1)}, r"q: got float16 of shape \(\); give a tensor"),
        ({"cache_seqlens": 3, "cu_seqlens_q": 4}, "cu_seqlens_q: got int; give a tensor of 1"),
        ({"cache_seqlens": None, "k_cache": None}, "k_cache: got NoneType; give a tensor of 4"),
        ({"cache_seqlens": None, "page_table": LENS},
         r"page_table: got ndarray of shape \(2,\); give a tensor of 2 dimensions"),
        ({"softmax_scale": -1.0}, r"softmax_scale=-1\.0: give a finite number"),
        ({"s_aux": np.zeros(3, np.float32)}, r"s_aux: shape \(3,\)"),
        ({"rotary_cos": np.zeros((99, 8), np.float16)}, "rotary_sin: missing, and rotary_cos is"),
        ({"block_table": LENS[:, None].astype(np.int64)}, "block_table: dtype int64"),
        ({"page_table": LENS[:, None].astype(np.int64)}, "page_table: dtype int64"),
        ({"alibi_slopes": np.zeros(1)}, r"alibi_slopes: shape \(1,\); give one slope for each"),
        ({"alibi_slopes": np.zeros((1, 2))}, r"alibi_slopes: shape \(1, 2\); .* or \(2, 2\)"),
        ({"alibi_slopes": [0.5, 0.5]}, "alibi_slopes: got list; give a tensor"),
        ({"sm_margin": LENS}, r"sm_margin=.*: not supported; must be 0"),
        ({"page_table": LENS, "block_table": LENS}, "block_table: page_table, its other name"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_an_error_that_names_it(
    keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}"):
        flash_attn_with_kvcache(**{**tensors(), "cache_seqlens": LENS, "causal": True, **keywords})


def test_alibi_and_chunks_of_positions() -> None:
    call, slopes = tensors(), np.array([0.5, -0.2], np.float32)
    asked = {"cache_seqlens": LENS, "causal": True, "attention_chunk": 16, "alibi_slopes": slopes}
    o = flash_attn_with_kvcache(**call, **asked)
    for b, length in enumerate(LENS):
        keys = np.arange((length - 1) // 16 * 16, length)
        for h, slope in enumerate(slopes):
            k, v = (call[f"{it}_cache"][b, keys, 0].astype(float) for it in "kv")
            scores = k @ call["q"][b, 0, h].astype(float) / 8 - slope * (length - 1 - keys)
            weights = np.exp(scores - scores.max())
            np.testing.assert_allclose(o[b, 0, h], weights @ v / weights.sum(), atol=2e-3)


def test_pages_with_alibi(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(flash_attn, "attention_with_cache", lambda *_, **how: asked.update(how))
    table = np.zeros((1, 1), np.int32)
    starts = np.array([0, 1], np.int32)
    flash_attn_varlen_func(
        "q", "k", "v", starts, starts, 1, 1, block_table=table, alibi_slopes=LENS
    )  # fmt: skip
    assert callable(asked["score_mod"])
    assert "positions" not in asked


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_flashinfers_lists_of_pages_become_a_table(framework: str) -> None:
    module = pytest.importorskip(framework, reason="needs PyTorch: it is not installed")
    indptr, indices, last = (
        module.asarray(np.array(it, np.int32)) for it in ([0, 2, 2, 5], [7, 3, 1, 0, 4], [4, 0, 16])
    )
    for most, more in ((None, 0), (4, 1)):
        table, lens = from_flashinfer(indptr, indices, last, 16, most)
        rows = [[7, 3, -1], [-1, -1, -1], [1, 0, 4]]
        assert table.tolist() == [[*row, *[-1] * more] for row in rows]
        assert lens.tolist() == [20, 0, 48]
        assert {str(it.dtype).rpartition(".")[2] for it in (table, lens)} == {"int32"}
    empty = from_flashinfer(module.asarray(np.zeros(3, np.int32)), indices[:0], last[:2], 16, 2)
    assert empty.page_table.tolist() == [[-1, -1], [-1, -1]]
    assert empty.lens.tolist() == [0, 0]


def test_a_cache_of_flashinfers_is_attended_as_a_dense_one_is() -> None:
    call = tensors()
    pages = np.full((12, 2, 16, 1, 64), np.nan, np.float16)
    lists = ([9], [2, 11, 5, 0, 7])
    for row, (mine, length) in enumerate(zip(lists, LENS, strict=True)):
        for side, name in enumerate(("k_cache", "v_cache")):
            for key in range(length):
                pages[mine[key // 16], side, key % 16] = call[name][row, key]
    indptr, indices = np.array([0, 1, 6], np.int32), np.array([*lists[0], *lists[1]], np.int32)
    table, lens = from_flashinfer(indptr, indices, np.array([5, 4], np.int32), 16)
    o = attention_with_cache(call["q"], pages[:, 0], pages[:, 1], cache_lens=lens, page_table=table)
    expected = attention_with_cache(**call, cache_lens=LENS)
    np.testing.assert_array_equal(o, expected)


def test_lists_that_are_no_tensors_are_an_error() -> None:
    with pytest.raises(ArgumentError, match="indptr: got list; give a PyTorch tensor"):
        from_flashinfer([0], [], [], 16)
