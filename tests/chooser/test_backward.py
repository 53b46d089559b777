"""backward(): gradients of any framework's arrays, in the emulator; and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import shared_kernels

import flashsmith
from flashsmith.chooser import choose
from flashsmith.chooser.backward import CHOOSERS
from flashsmith.errors import ArgumentError
from flashsmith.families import (
    DType,
    FlashForwardKernelConfig,
    Problem,
    Semantics,
    device_spec,
)
from flashsmith.families import parse_kernel_name_into_config as parse
from flashsmith.runtime.arguments import check_serves
from flashsmith.verify import reference_of
from flashsmith.verify.gradient_tolerance import compare_gradients

# What tests/integrations/test_autograd.py has, too.
CFG = FlashForwardKernelConfig(
    DType.FP16, 64, 64, 32, 4, True, True, True, 2, 2, 2, optimized_softmax=True
)
REPEATABLE = parse("(FP16, 64, 64, 64, 4): backward")
FREE = parse("(FP16, 64, 64, 64, 4): backward+stages_2+dq_atomics")
CAUSAL = Semantics("causal", uneven=True)
shared_kernels.want([CFG], CAUSAL)
shared_kernels.want([REPEATABLE, FREE], CAUSAL)
NAMES = ("do", "q", "k", "v", "o", "lse")


def drawn(seq_q: int = 12, seq_k: int = 20) -> dict[str, Any]:
    """A causal call: what attention() took and gave, and a gradient."""
    rng = np.random.default_rng(0)
    q, do = rng.standard_normal((2, 1, seq_q, 2, 40)).astype(np.float16)
    k, v = rng.standard_normal((2, 1, seq_k, 1, 40)).astype(np.float16)
    o, lse = flashsmith.attention(q, k, v, causal=True, return_lse=True, config=CFG)
    return {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}


def backward(call: dict[str, Any], **options: Any) -> Any:
    how = {"causal": True, "config": REPEATABLE} | options
    return flashsmith.backward(*(call[name] for name in NAMES), **how)


@pytest.fixture(scope="module")
def call() -> dict[str, Any]:
    return drawn()


@pytest.fixture(scope="module")
def gradients(call: dict[str, Any]) -> Any:
    return backward(call)


def assert_same(found: Any, expected: Any) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        if theirs is None:
            assert ours is None
        else:
            np.testing.assert_array_equal(ours, theirs)


def test_they_are_right(call: dict[str, Any], gradients: Any) -> None:
    problem = Problem.parse("b1 s12:20 h2:1 d40 fp16 causal uneven backward")
    reference = reference_of(problem.computed)
    expected = reference.expected(problem, call, reference.options(problem))
    found = {name: it for name, it in gradients._asdict().items() if it is not None}
    comparison = compare_gradients(problem.dtype, found, expected)
    assert comparison.ok, comparison
    for name, gradient in gradients._asdict().items():
        if name != "dsinks":
            like = call[name[1:]]
            assert (gradient.shape, gradient.dtype) == (like.shape, like.dtype)
            assert gradient.flags.c_contiguous


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "heads outside": lambda do: np.ascontiguousarray(do.swapaxes(1, 2)).swapaxes(1, 2),
    "columns apart": lambda do: np.repeat(do, 2, -1)[..., ::2],
    "backwards": lambda do: do[:, ::-1].copy()[:, ::-1],
    "odd rows": lambda do: np.pad(do, ((0, 0), (0, 0), (0, 0), (0, 3)))[..., :40],
    "odd address": lambda do: np.frombuffer(b"\0\0" + do.tobytes(), do.dtype)[1:].reshape(do.shape),
    "read-only": lambda do: np.broadcast_to(do, do.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_do_of_any_layout(layout: str, call: dict[str, Any], gradients: Any) -> None:
    do = LAYOUTS[layout](call["do"])
    np.testing.assert_array_equal(do, call["do"])
    assert_same(backward(call | {"do": do}), gradients)


def test_one_number_for_all_of_do_and_dlse(call: dict[str, Any]) -> None:
    do, dlse = np.float16(0.5), np.float32(0.25)
    broadcast = np.broadcast_to(do, call["do"].shape), np.broadcast_to(dlse, call["lse"].shape)
    full = np.full_like(call["do"], do), np.full_like(call["lse"], dlse)
    assert broadcast[0].strides == (0, 0, 0, 0)
    assert_same(*(backward(call | {"do": do}, dlse=dlse) for do, dlse in (broadcast, full)))


@pytest.mark.parametrize(
    "needs", [(True, False, False, False), (False, True, True, True), (False,) * 4]
)
def test_only_what_is_needed(needs: Any, call: dict[str, Any], gradients: Any) -> None:
    expected = [it if need else None for it, need in zip(gradients, needs, strict=True)]
    assert_same(backward(call, needs=needs), expected)


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype("float32")], ids=str)
def test_gradients_that_are_not_rounded(dtype: Any, call: dict[str, Any], gradients: Any) -> None:
    wide = backward(call, grad_dtype=dtype)
    for ours, rounded in zip(wide[:3], gradients, strict=False):
        assert ours.dtype == np.float32
        np.testing.assert_array_equal(ours.astype(np.float16), rounded)


def test_some_of_the_keys_with_the_statistics_of_all(call: dict[str, Any], gradients: Any) -> None:
    """As where several GPUs have a part of the keys each."""
    last = call | {name: call[name][:, 9:] for name in "kv"}
    _, dk, dv, _ = backward(last, needs=(False, True, True, False))
    for ours, whole in ((dk, gradients.dk), (dv, gradients.dv)):
        np.testing.assert_allclose(ours, whole[:, 9:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mask", ["", "causal "])
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_frozen_inputs_have_kernels_of_their_own(d: int, mask: str) -> None:
    """On Hopper they compute no other gradients, at less FLOP, and repeat their bits."""
    device = device_spec("H200")
    problem = Problem.parse(f"b4 s4096 h16 d{d} bf16 {mask}backward")
    expected = choose(problem, device).ms
    for word, products in (("only_dq", 3), ("no_dq", 4)):
        some = replace(problem, gradients=word)
        assert Problem.parse(str(some)) == some
        assert 5 * some.attn_flop() == products * problem.attn_flop()
        choice = choose(some, device)
        config, family = choice.config, choice.config.family
        assert family.gradients_of(config) == word
        assert CHOOSERS[True](some, device) == config
        assert choice.ms < 0.95 * expected
        with pytest.raises(ArgumentError, match=f"'{word}' problems only"):
            check_serves(config, problem)


def test_other_gpus_serve_frozen_inputs_as_before() -> None:
    for word in ("only_dq", "no_dq"):
        config = CHOOSERS[True](Problem.parse(f"s4096 d128 bf16 backward {word}"), device_spec(80))
        assert config.family.gradients_of(config) == ""


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("s64 d64 fp16 only_dq", "forward has no such word"),
        ("s64 d64 fp16 backward only_dq no_dq", "give one"),
    ],
)
def test_gradients_that_no_problem_has(text: str, wrong: str) -> None:
    with pytest.raises(ArgumentError, match=wrong):
        Problem.parse(text)


def test_repeatable_kernels_are_chosen_where_asked() -> None:
    for problem in ("b1 s64 h2 d64 fp16 backward", "b4 s4096 h16 d128 bf16 causal backward"):
        chosen = CHOOSERS[True](Problem.parse(problem), device_spec("H200"))
        assert chosen.family.is_deterministic(chosen)
    with pytest.raises(ArgumentError, match=r"deterministic=True: .*dq_atomics"):
        backward(drawn(), config=FREE, deterministic=True)


EMPTY = {"no rows": (0, 20), "no keys": (12, 0), "nothing": (0, 0)}


@pytest.mark.parametrize("sizes", EMPTY.values(), ids=EMPTY)
def test_nothing_to_sum_is_0(sizes: tuple[int, int]) -> None:
    empty = drawn(*sizes)
    found = backward(empty)
    for name, gradient in zip("qkv", found, strict=False):
        assert gradient.shape == empty[name].shape
        assert not gradient.any()


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "do's shape": ({"do": np.zeros((1, 12, 2, 48), np.float16)}, {}, r"do: shape \(1, 12, 2, 48\)"),
    "do's dtype": ({"do": np.zeros((1, 12, 2, 40), np.float32)}, {}, "do: dtype float32; must be"),
    "no do": ({"do": None}, {}, "do: missing"),
    "no tensor": ({"do": 3.0}, {}, "do: got builtins.float"),
    "o's shape": ({"o": np.zeros((1, 13, 2, 40), np.float16)}, {}, "o: shape"),
    "lse's dtype": ({"lse": np.zeros((1, 2, 12), np.float16)}, {}, "lse: dtype float16; must be"),
    "lse's shape": ({"lse": np.zeros((1, 12, 2), np.float32)}, {}, "lse: shape"),
    "v's shape": ({"v": np.zeros((1, 21, 1, 40), np.float16)}, {}, "v: shape"),
    "dlse's shape": ({}, {"dlse": np.zeros((1, 2), np.float32)}, "dlse: shape"),
    "causal": ({}, {"causal": 1}, "causal=1: allowed are"),
    "needs": ({}, {"needs": (True, True)}, "needs=.*: give four"),
    "a need": ({}, {"needs": (1, True, True, True)}, "needs=1: allowed are"),
    "grad_dtype": ({}, {"grad_dtype": "float16"}, "grad_dtype='float16': give 'float32'"),
    "no grad_dtype": ({}, {"grad_dtype": "float64"}, "grad_dtype='float64': give 'float32'"),
    "deterministic": ({}, {"deterministic": 1}, "deterministic=1: allowed are"),
    "the forward's config": ({}, {"config": CFG}, "config: got .*FlashBackwardKernelConfig"),
    "no config": ({}, {"config": "fast"}, "config: got str; give a FlashBackwardKernelConfig"),
    "another dtype's": ({}, {"config": replace(FREE, dtype=DType.BF16)}, "q: dtype FP16"),
    "max_seqlen": ({}, {"max_seqlen_q": 12}, "max_seqlen_q='?12'?: is for packed"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case: str, call: dict[str, Any]) -> None:
    tensors, options, message = WRONG[case]
    with pytest.raises(ArgumentError, match=f"^{message}"):
        backward(call | tensors, **options)


def test_a_config_that_is_not_repeatable_is_refused_before_it_is_built(
    call: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHSMITH_JIT", "0")
    missing = parse("(FP16, 64, 32, 64, 4): backward+dq_atomics")
    with pytest.raises(ArgumentError, match=r"^deterministic=True: .*dq_atomics sums in"):
        backward(call, config=missing, deterministic=True)


def test_a_d_beyond_every_kernel() -> None:
    wide = np.zeros((1, 8, 1, 520), np.float16)
    call = dict.fromkeys(NAMES, wide) | {"lse": np.zeros((1, 1, 8), np.float32)}
    with pytest.raises(ArgumentError, match=r"d=520: backward has kernels of d_head 32, .*, 512"):
        backward(call, config=None)
