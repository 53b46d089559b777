"""attention_with_cache() with score and mask functions over caches of 8-bit floats and with scales:
the bits of the cache in 16 bits, and functions of the scaled score."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cache_calls import (
    BLOCK,
    CHUNKS,
    EARLY,
    ROWS,
    Cache,
    Emulation,
    ScaledCache,
    curved_in_documents,
    listed,
)

import flashsmith
from flashsmith.families import DType, KernelConfig, Problem, Semantics, device_spec
from flashsmith.families.mma_sync_decode import MMA_SYNC_DECODE
from flashsmith.families.mma_sync_decode.sets import over_cache
from flashsmith.semantics.cache_format import CacheFormat
from flashsmith.tracing import trace

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
FORMATS = {E4M3: CacheFormat.E4M3, E5M2: CacheFormat.E5M2}
_full = pytest.mark.full


def over(codes: Any, cfg: KernelConfig = CHUNKS, arch: int = 80) -> KernelConfig:
    return over_cache(cfg, FORMATS[codes], device_spec(arch))


def attend(call: dict[str, Any], cfg: KernelConfig, **asked: Any) -> Any:
    return flashsmith.attention_with_cache(
        **call, config=cfg, emulate=True, return_lse=True, **asked
    )


def same(found: Any, expected: Any) -> bool:
    return all(map(np.array_equal, found, expected))


@pytest.mark.parametrize(
    ("codes", "queries", "bits"),
    [
        (E4M3, 3, None),
        (E4M3, 70, None),
        pytest.param(E5M2, 3, None, marks=_full),
        pytest.param(E4M3, 3, "canonical", marks=_full),
    ],
)
def test_bits_are_those_of_the_cache_in_16_bits(codes: Any, queries: int, bits: str | None) -> None:
    cache = ScaledCache((queries, 300, 317), (queries,) * 3, queries, codes=codes)
    score, mask = curved_in_documents(cache)
    call = cache.call(paged=queries == 3, append=False)
    del call["k_scale"], call["v_scale"]
    held = {name: call[name] for name in ("k_cache", "v_cache")}
    wide = {name: it.astype(np.float16) for name, it in held.items()}
    if bits:  # hidden values must be finite
        held = {
            name: np.nan_to_num(it.astype(np.float16)).astype(codes) for name, it in held.items()
        }
        wide = {name: it.astype(np.float16) for name, it in held.items()}
    cfg = MMA_SYNC_DECODE.canonical(CHUNKS, device_spec(80)) if bits else CHUNKS
    asked = {"score_mod": score, "mask": mask, "bits": bits}
    found = attend(call | held, over(codes, cfg), **asked)
    assert same(found, attend(call | wide, cfg, **asked))
    assert not np.isnan(found[0]).any()


@pytest.mark.parametrize("queries", [3, 70])
def test_a_function_gets_the_scaled_score(queries: int) -> None:
    cache = ScaledCache((queries, 300, 317), (queries,) * 3, seed=queries)
    score, mask = curved_in_documents(cache)
    o, _ = attend(cache.call(paged=queries == 70), over(E4M3), score_mod=score, mask=mask)
    expected = cache.expected(score, mask, causal=True)
    for got, want in zip(cache.split(o), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-3)


def test_a_number_is_a_tensor_of_one() -> None:
    cache = ScaledCache((90, 317), (3, 3), seed=1)
    score, mask = curved_in_documents(cache)
    asked = {"score_mod": score, "mask": mask}
    call = cache.call(append=False)
    one = attend(call | {"k_scale": 0.3, "v_scale": 0.7}, over(E4M3), **asked)
    scales = {"k_scale": np.float32([0.3]), "v_scale": np.float32([0.7])}
    assert same(one, attend(call | scales, over(E4M3), **asked))


@pytest.mark.full
@pytest.mark.parametrize("codes", [E4M3, None], ids=["8 bits", "16 bits"])
def test_a_softcap_gets_it_first(codes: Any) -> None:
    cache = ScaledCache((90, 317), (3, 3), seed=2)
    score, mask = curved_in_documents(cache)
    call, cfg = cache.call(), over(E4M3)
    if codes is None:
        cfg = over_cache(CHUNKS, CacheFormat.SCALED, device_spec(80))
        call |= {name: call[name].astype(np.float16) for name in ("k_cache", "v_cache")}
    o, _ = attend(call, cfg, score_mod=score, mask=mask, softcap=1.5)

    def capped(s: Any, *at: Any) -> Any:
        return score(1.5 * np.tanh(s / 1.5), *at)

    expected = cache.expected(capped, mask, causal=True)
    for got, want in zip(cache.split(o), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-3)


@pytest.mark.full
@pytest.mark.parametrize(
    ("cfg", "queries", "together"), [(EARLY, 3, BLOCK), (ROWS, 20, ROWS.B_c)], ids=["keys", "rows"]
)
def test_hopper_kernels_skip_blocks(cfg: KernelConfig, queries: int, together: int) -> None:
    cache = ScaledCache((queries, 300, 317, 255), (queries,) * 4, seed=queries)
    table, mask = listed(cache)
    table[1] = False
    cache.hide_unread(table, together)
    score, _ = curved_in_documents(cache)
    call = Emulation(over(E4M3, cfg, 90), 90, score, mask)
    for paged, append in ((False, False), (True, True)):
        assert call.wrong(cache, paged=paged, append=append) == ""


@pytest.mark.parametrize("bits", ["", "canonical"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_chosen_kernel_is_for_both(d: int, bits: str) -> None:
    score, mask = curved_in_documents(Cache((9,), (1,)))
    program = trace(score, mask).program
    semantics = Semantics("causal", uneven=True, program=program.exact if bits else program)
    for queries in (1, 200):
        problem = Problem.parse(f"b4 s{queries}:4096 h32:8 d{d} bf16 decode cache_e4m3 {bits}")
        problem = replace(problem, semantics=semantics)
        config = flashsmith.choose(problem, device_spec(90)).config
        assert config.family.cache_of(config) == problem.cache
        assert config.dtype is DType.BF16
        assert config.family.adapt_to_program(config, semantics) == config
