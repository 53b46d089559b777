"""FlashAttention's argument names, on attention()."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from flashsmith.errors import ArgumentError
from flashsmith.integrations import flash_attn
from flashsmith.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

STARTS = object()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The keywords that attention() was called with last."""
    keywords: dict[str, Any] = {}

    def attention(q: Any, k: Any, v: Any, **given: Any) -> Any:
        keywords.clear()
        keywords.update(given)
        return ("o", "lse") if given["return_lse"] else "o"

    monkeypatch.setattr(flash_attn, "attention", attention)
    return keywords


def test_names_are_translated(asked: dict[str, Any]) -> None:
    output = flash_attn_func(
        "q", "k", "v", softmax_scale=0.5, causal=True, window_size=(7, -1), softcap=30.0
    )
    assert output == "o"
    assert asked == {
        "causal": True,
        "window": (7, None),
        "softcap": 30.0,
        "scale": 0.5,
        "sinks": None,
        "return_lse": False,
        "deterministic": None,
        "bits": None,
    }


def test_names_of_packed_sequences_are_translated(asked: dict[str, Any]) -> None:
    flash_attn_varlen_func("q", "k", "v", STARTS, STARTS, 5, 9, window_size=(-1, 0))
    assert asked["cu_seqlens_q"] is asked["cu_seqlens_k"] is STARTS
    assert (asked["max_seqlen_q"], asked["max_seqlen_k"]) == (5, 9)
    assert asked["window"] == (None, 0)
    assert asked["scale"] is None


def test_the_defaults_request_nothing(asked: dict[str, Any]) -> None:
    flash_attn_func("q", "k", "v", 0.0, None, False, (-1, -1), 0.0, None, True)
    assert asked["window"] == (None, None)


@pytest.mark.parametrize(
    ("given", "window"),
    [
        ((None, None), (None, None)),
        ((-1, None), (None, None)),
        ((None, 0), (None, 0)),
        ([7, -1], (7, None)),
        ((np.int64(7), np.int32(-1)), (7, None)),
        (np.array([7, 5]), (7, 5)),
        (np.array([-1, 5], np.int32), (None, 5)),
    ],
)
def test_limits_of_windows_are_pythons_numpys_or_none(
    given: Any, window: Any, asked: dict[str, Any]
) -> None:
    flash_attn_func("q", "k", "v", window_size=given)
    assert asked["window"] == window
    assert {type(limit) for limit in asked["window"]} <= {int, type(None)}


@pytest.mark.torch
def test_a_window_may_be_a_tensor(asked: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
    flash_attn_func("q", "k", "v", window_size=torch.tensor([7, -1]))
    assert asked["window"] == (7, None)
    flash_attn_func("q", "k", "v", window_size=tuple(torch.tensor([7, 9])))
    assert asked["window"] == (7, 9)


def test_used_keys_make_a_part_that_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """And, with pages, are the lengths, in place of what cu_seqlens_k says."""
    q, used = np.zeros((3, 1, 8), np.float16), np.array([2], np.int32)
    seen: dict[str, Any] = {}

    def attention(q: Any, k: Any, v: Any, **given: Any) -> Any:
        seen.update(given)
        return np.full(q.shape, 1.5, np.float32), "lse"

    def attention_with_cache(q: Any, k: Any, v: Any, **given: Any) -> Any:
        seen.update(given)
        return "o"

    monkeypatch.setattr(flash_attn, "attention", attention)
    monkeypatch.setattr(flash_attn, "attention_with_cache", attention_with_cache)
    o = flash_attn_varlen_func(q, q, q, STARTS, STARTS, 3, 3, seqused_k=used)
    assert (o.dtype, o.min()) == (np.float16, 1.5)
    assert seen["partial"] is True
    assert seen["seqused_k"] is used
    assert flash_attn_varlen_func(
        q, q, q, STARTS, STARTS, 3, 3, seqused_k=used, return_attn_probs=True
    )[1:] == ("lse", None)
    paged = {"block_table": STARTS, "seqused_k": used}
    assert flash_attn_varlen_func(q, q, q, cu_seqlens_q=STARTS, max_seqlen_q=3, **paged) == "o"
    assert seen["cache_lens"] is used


def test_repeatable_gradients_are_asked_for_or_left_to_pytorchs_setting(
    asked: dict[str, Any],
) -> None:
    for given, passed in ((True, True), (False, None)):
        flash_attn_func("q", "k", "v", deterministic=given)
        assert asked["deterministic"] is passed
        flash_attn_varlen_func("q", "k", "v", 0, 0, 1, 1, deterministic=given)
        assert asked["deterministic"] is passed


def test_alibi_is_a_score_function_of_positions(asked: dict[str, Any]) -> None:
    for call in (flash_attn_func, functools.partial(flash_attn_varlen_func, cu_seqlens_q=0)):
        call("q", "k", "v", alibi_slopes=np.zeros(4, np.float32))
        assert asked["positions"] == "end"
        assert callable(asked["score_mod"])
        call("q", "k", "v")
        assert asked.get("score_mod") is None


def test_probabilities_are_the_lse_and_nothing(asked: dict[str, Any]) -> None:
    assert flash_attn_func("q", "k", "v", return_attn_probs=True) == ("o", "lse", None)
    packed = flash_attn_varlen_func("q", "k", "v", 0, 0, 1, 1, return_attn_probs=True)
    assert packed == ("o", "lse", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout_p": 0.1}, r"dropout_p=0\.1: must be 0"),
        ({"alibi_slopes": np.zeros((1, 2, 3))}, r"alibi_slopes: shape \(1, 2, 3\)"),
        ({"window_size": (-2, 0)},
         r"window_size=\(-2, 0\): a left side of -2 begins 2 keys after .* last 2 queries"),
        ({"window_size": (None, -107)},
         r"window_size=\(None, -107\): a right side of -107 ends .* leave out the last 107 keys"),
        ({"window_size": np.array([2, -7])}, "window_size=.*: a right side of -7 ends 7 keys"),
        ({"window_size": np.array([2.0, 7.0])}, r"window_size=.*: give \(left, right\), whole"),
        ({"window_size": np.array([2, 7, 9])}, r"window_size=.*: give \(left, right\), whole"),
        ({"window_size": (1.5, 0)}, r"window_size=\(1\.5, 0\)"),
        ({"window_size": (True, 0)}, r"window_size=\(True, 0\)"),
        ({"window_size": 4}, "window_size=4"),
        ({"window_size": (1, 2, 3)}, r"window_size=\(1, 2, 3\)"),
        ({"window_size": None}, "window_size=None: give"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(
    arguments: dict[str, Any], message: str, asked: dict[str, Any]
) -> None:
    with pytest.raises(ArgumentError, match=message):
        flash_attn_varlen_func("q", "k", "v", STARTS, STARTS, 5, 9, **arguments)
    with pytest.raises(ArgumentError, match=message):
        flash_attn_func("q", "k", "v", **arguments)
    assert not asked


def test_other_versions_keywords_are_accepted_where_they_ask_for_nothing(
    asked: dict[str, Any],
) -> None:
    neutral = {"qv": None, "q_descale": None, "num_splits": 1, "pack_gqa": True, "sm_margin": 0}
    assert flash_attn_func("q", "k", "v", **neutral, seqused_q=None) == "o"
    varlen = flash_attn_varlen_func("q", "k", "v", STARTS, STARTS, 5, 9, **neutral, leftpad_k=None)
    assert varlen == "o"
    assert not {*neutral, "seqused_q", "leftpad_k"} & set(asked)


@pytest.mark.parametrize(
    "function", [flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache]
)
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"seqused_q": STARTS}, r"seqused_q: not supported by \w+\(\); must be None"),
        ({"leftpad_k": 3}, r"leftpad_k=3: not supported by \w+\(\); must be None"),
        ({"casual": True}, r"casual: not an argument of \w+\(\); did you mean 'causal'\?"),
        ({"zzz": 1}, r"zzz: not an argument of \w+\(\); it has q, k"),
    ],
)
def test_keywords_of_no_use_here_are_argument_errors(
    function: Any, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        function("q", "k", "v", **keywords)


def half(*shape: int) -> Any:
    return np.zeros(shape, np.float16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"softmax_scale": 0.0}, r"softmax_scale=0\.0: give a finite number"),
        ({"s_aux": np.zeros(3, np.float32)}, r"s_aux: shape \(3,\)"),
        ({"q": half(12, 4, 60)}, r"q: d_head 60 .* pass softmax_scale=1/sqrt\(60\)"),
        ({"alibi_slopes": np.zeros(3)}, r"alibi_slopes: shape \(3,\); give one slope .* \(4,\)"),
        ({"alibi_slopes": np.zeros(1)}, r"alibi_slopes: shape \(1,\); give one slope"),
        ({"alibi_slopes": np.zeros((3, 4))}, r"alibi_slopes: shape \(3, 4\); .* or \(2, 4\)"),
        ({"alibi_slopes": True}, "alibi_slopes: got bool; give a tensor"),
    ],
)
def test_errors_have_flash_attentions_names(changes: dict[str, Any], message: str) -> None:
    """Though the checks are those of attention(), which names some arguments differently."""
    packed = {"q": half(12, 4, 64), "k": half(12, 4, 64), "v": half(12, 4, 64), **changes}
    if "60" in message:
        packed["k"] = packed["v"] = packed["q"]
    dense = {name: packed[name].reshape(2, 6, *packed[name].shape[1:]) for name in "qkv"}
    with pytest.raises(ArgumentError, match=f"^{message}"):
        flash_attn_func(**(packed | dense))
    starts = np.array([0, 5, 12], np.int32)
    with pytest.raises(ArgumentError, match=f"^{message}"):
        flash_attn_varlen_func(**packed, cu_seqlens_q=starts, cu_seqlens_k=starts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_table": np.zeros((3, 1), np.int32)}, r"block_table: shape \(3, 1\)"),
        ({"k": half(2, 16, 2, 32)}, "k: "),
        ({"seqused_k": np.array([4, 99], np.int32)}, r"seqused_k\[1\]=99: "),
        ({"cu_seqlens_k": np.array([0, 4, 99], np.int32)}, r"cu_seqlens_k\[1\]=95: "),
    ],
)
def test_errors_of_pages_have_flash_attentions_names(changes: dict[str, Any], message: str) -> None:
    starts = np.array([0, 1, 2], np.int32)
    call = {
        **{"q": half(2, 4, 64), "k": half(2, 16, 4, 64), "v": half(2, 16, 4, 64)},
        **{"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 1},
        "block_table": np.zeros((2, 1), np.int32),
    }
    with pytest.raises(ArgumentError, match=f"^{message}"):
        flash_attn_varlen_func(**(call | changes))
