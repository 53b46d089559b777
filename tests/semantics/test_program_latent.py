"""attention_with_cache(v_width=) with score and mask functions: positions in the whole sequence,
over rows that are keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from latent_calls import (
    CAPACITY,
    CODES,
    HEADS,
    PLAIN,
    LatentCache,
    LatentEmulation,
    curved_in_documents,
    run,
)

import flashsmith
from flashsmith import masks, scores
from flashsmith.errors import ArgumentError
from flashsmith.families import Problem, Semantics, device_spec
from flashsmith.families import parse_kernel_name_into_config as parse_config
from flashsmith.tracing import trace
from ptxlab.checks import all_checks


@pytest.mark.parametrize("coded", [False, True], ids=["q's dtype", "8-bit floats"])
def test_curved_scores_in_documents(*, coded: bool) -> None:
    """Tiles that end within a token's heads, several parts, pages, appended rows, a sequence
    without keys, and rows that see no key."""
    cache = LatentCache((470, 150, 0, 37), (5, 1, 0, 4), seed=3, coded=coded)
    score, mask = curved_in_documents(cache)
    config = CODES if coded else PLAIN
    for tensor in (False, True) if coded else (False,):
        call = LatentEmulation(config, score, mask, packed=True, scale_as_tensor=tensor)
        assert call.wrong(cache, observers=all_checks()) == ""


def test_rows_of_tensors_are_the_queries() -> None:
    cache = LatentCache((300, 90), (3, 3), seed=7)
    shown = cache.draw.random((2, 1, 3, CAPACITY)) < 0.5
    bias = cache.draw.standard_normal((HEADS, 3, CAPACITY)).astype(np.float32)

    def row(b: int, q: np.ndarray) -> np.ndarray:
        return q - cache.lens[b] + 3

    expected = cache.expected(
        lambda s, b, h, q, k: s + bias[h, row(b, q), k],
        lambda b, h, q, k: shown[b, 0, row(b, q), k],
        causal=True,
    )
    asked = {"mask": shown, "bias": bias, "config": PLAIN}
    found = run(cache, paged=False, append=True, **asked)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=3e-3)


def test_other_functions_of_the_same_expression_compute_with_their_own_tensors() -> None:
    """The second call is served from the cache of calls; a number and tensors differ."""
    cache = LatentCache((300, 90), (1, 1), seed=8)
    for least, seed in ((7, 0), (90, 1)):
        slopes = np.random.default_rng(seed).uniform(-0.1, 0.3, HEADS).astype(np.float32)

        def mask(b: Any, h: Any, q: Any, k: Any, least: int = least) -> Any:
            return (q - k <= least) | (k % 3 == 0)

        asked = {"score_mod": scores.alibi(slopes), "mask_mod": mask, "config": PLAIN}
        found = run(cache, paged=False, append=False, causal=False, **asked)
        expected = cache.expected(scores.alibi(slopes), mask, causal=False)
        for got, want in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, want, atol=3e-3)


def test_a_mask_that_is_causal_needs_no_program() -> None:
    """It is served by every kernel, also those that have no functions."""
    cache = LatentCache((90, 90), (2, 2), seed=2)
    expected = cache.expected(None, None, causal=True)
    asked = {"mask": masks.causal(), "causal": False}
    found = run(cache, paged=False, append=False, **asked)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=3e-3)


@pytest.mark.parametrize("gpu", ["H200", "A100"])
def test_a_kernel_for_functions_is_chosen(gpu: str) -> None:
    program = trace(None, masks.chunks(48)).program
    problem = Problem.parse("b4 s1:9000 h128:1 d576:512 bf16 latent_decode causal page64")
    semantics = Semantics("causal", uneven=True, program=program)
    choice = flashsmith.choose(replace(problem, semantics=semantics), device_spec(gpu))
    assert choice.config.FAMILY == "mma_sync_mla"


def test_kernels_without_functions_say_so() -> None:
    cache = LatentCache((90, 90), (1, 1))
    wgmma = parse_config("(FP16, 320:256): latent+least_128+parts_4+regs_24_240+rescale_8")
    with pytest.raises(ArgumentError, match="has no kernel for this score or mask function"):
        run(cache, paged=True, append=False, mask=masks.chunks(48), config=wgmma)
    with pytest.raises(ArgumentError, match="bias: shape"):
        run(cache, paged=True, append=False, bias=np.zeros((3, 1, 1), np.float32), config=PLAIN)
