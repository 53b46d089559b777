"""Kernels whose v has another d than q and k: every family's, with the emulator's checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plain_run import full_after

from flashsmith.families import (
    MMA_SYNC,
    MMA_SYNC_BACKWARD,
    MMA_SYNC_DECODE,
    WGMMA,
    WGMMA_BACKWARD,
    DType,
    KernelConfig,
    Problem,
    device_spec,
    parse_kernel_name_into_config,
)
from flashsmith.families.family import Family
from flashsmith.families.head_dims import PAIRS, HeadPair
from flashsmith.families.mma_sync_decode.sets import over_cache
from flashsmith.semantics.cache_format import CacheFormat
from flashsmith.verify import prove

DENSE: dict[str, Any] = {"seq": 128}
PACKED: dict[str, Any] = {
    "lens_q": (70, 130),
    "lens_k": (90, 64),
    "causal": True,
    "heads": 4,
    "heads_k": 2,
}
FAMILIES = (MMA_SYNC, WGMMA, MMA_SYNC_BACKWARD, WGMMA_BACKWARD)


def _configs(*families: Family) -> list[Any]:
    return [
        pytest.param(cfg, id=f"{family.name}-{pair}-{number}")
        for family in families
        for pair in PAIRS
        for number, cfg in enumerate(family.proof_configs(DType.BF16, pair))
    ]


# Over a cache: sizes, and options of the reference.
CACHED: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("b2 s1:600 h8:2 {whole} decode", {}),
    "appended": (
        "b3 s4:700 h6:2 {narrower} decode window softcap packed page24",
        {
            "append": True,
            "rotary": "interleaved",
            "window": (250, 0),
            "lens_q": (1, 0, 4),
            "lens_k": (700, 0, 97),
        },
    ),
    "chunks": ("b2 s90:400 h2:1 {narrower} decode causal", {"layout": "heads first"}),
    "split": (
        "b1 s2:3000 h4:2 {narrower} decode causal page16",
        {"append": True, "layout": "interleaved", "capacity": 40, "split": "free"},
    ),
}
QUICK_CACHED = "(FP16, 64:128, 16, 64, 4): decode+stages_4+least_128+parts_1"
QUICK = (
    "(BF16, 192:128, 128, 128, 2wg): tma+stages_2+q_buffers_1+regs_32_232+overlap+dynamic"
    "+longest_first+rescale_8+direct_O",
    "(FP16, 64:128, 128, 32, 8): async+eager+swizzled+load_2_2_2_tiles+stages_3+lazy_rescale"
    "+ping_pong",
)


def _cached_problem(cfg: KernelConfig, case: str) -> tuple[Problem, dict[str, Any]]:
    sizes, options = CACHED[case]
    narrower = _narrower(cfg)
    if cfg.family.cache_of(cfg):  # rows of 8-bit floats are copied by 16
        narrower = {name: d // 16 * 16 for name, d in narrower.items()}
    text = sizes.format(
        whole=f"d{cfg.d_head}:{cfg.d_head_v}", narrower=f"d{narrower['d']}:{narrower['d_v']}"
    )
    cache = cfg.family.cache_of(cfg)
    words = [text, cfg.dtype.name.lower(), *[f"cache_{cache}"] * bool(cache)]
    return Problem.parse(" ".join(words)), options


def _narrower(cfg: KernelConfig) -> dict[str, int]:
    return {"d": cfg.d_head - 8, "d_v": cfg.d_head_v - 16}


@pytest.mark.parametrize("text", full_after(1, QUICK), ids=["wgmma", "mma_sync"])
def test_the_forward_pass_of_two_pairs(text: str) -> None:
    cfg = parse_kernel_name_into_config(text)
    verdict = prove(cfg, checks=True, **_narrower(cfg), **PACKED)
    assert verdict.ok, verdict


def prove_cached(cfg: KernelConfig, case: str, **how: Any) -> None:
    problem, options = _cached_problem(cfg, case)
    verdict = prove(cfg, problem, options=options, checks=True, **how)
    assert verdict.ok, verdict


@pytest.mark.parametrize("case", ["appended", pytest.param("split", marks=pytest.mark.full)])
def test_a_pair_over_a_cache(case: str) -> None:
    cfg = parse_kernel_name_into_config(QUICK_CACHED)
    prove_cached(cfg, case)


@pytest.mark.full
@pytest.mark.parametrize("case", CACHED)
@pytest.mark.parametrize("cfg", _configs(MMA_SYNC_DECODE))
def test_every_pair_over_a_cache(cfg: KernelConfig, case: str) -> None:
    prove_cached(cfg, case)


@pytest.mark.full
@pytest.mark.parametrize("case", ["appended", "chunks"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("cache", [CacheFormat.E4M3, CacheFormat.SCALED])
def test_every_pair_over_a_cache_with_scales(cache: CacheFormat, pair: HeadPair, case: str) -> None:
    device = device_spec(80)
    cfg = replace(MMA_SYNC_DECODE.candidates(DType.FP16, pair, device, False)[0], chunk_rows=64)
    prove_cached(over_cache(cfg, cache, device), case)


@pytest.mark.full
@pytest.mark.parametrize("case", ["whole", "packed"])
@pytest.mark.parametrize("cfg", _configs(*FAMILIES))
def test_every_pair(cfg: KernelConfig, case: str) -> None:
    how = {**DENSE, "seq_k": 2 * DENSE["seq"]} if case == "whole" else {**PACKED, **_narrower(cfg)}
    verdict = prove(cfg, checks=True, **how)
    assert verdict.ok, verdict
