"""Kernels over caches of 8-bit floats have the bits of the 16-bit kernels on converted caches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import shared_kernels
from plain_bits import assert_same, plain_bits

from flashsmith.families import Problem, device_spec, parse_kernel_name_into_config
from flashsmith.families.mma_sync_decode.sets import over_cache
from flashsmith.runtime.emulation import exact_mma
from flashsmith.runtime.operation_run import run_operation
from flashsmith.semantics.cache_format import CacheFormat
from ptxlab.checks import all_checks

CODES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
VALUES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class Case:
    """A config for 16-bit caches, the format of the others, and a call."""

    name: str
    config: str
    cache: str
    words: str
    lengths: tuple[int, ...]
    seq_q: int = 1
    heads: tuple[int, int] = (8, 2)
    d: int = 0
    page: int = 0
    arch: int = 90
    capacity: int = 0
    sm_count: int = 8

    def __str__(self) -> str:
        return self.name

    @property
    def plain(self) -> Any:
        return parse_kernel_name_into_config(self.config)

    @property
    def device(self) -> Any:
        return replace(device_spec(self.arch), sm_count=self.sm_count)

    def of_format(self, cache: str) -> Any:
        return over_cache(self.plain, CacheFormat.parse(cache), self.device)

    @property
    def problem(self) -> Problem:
        heads_q, heads_k = self.heads
        text = f"b{len(self.lengths)} s{self.seq_q}:{max(self.lengths)} h{heads_q}:{heads_k} "
        text += f"d{self.d or self.plain.d_head} {self.plain.dtype.name.lower()} decode "
        return Problem.parse(text + self.words + f" page{self.page}" * bool(self.page))


CASES = [
    Case(
        "sixteen rows", "(BF16, 128, 16, 64, 4): decode+stages_3+least_128+parts_2+early+cluster_8",
        "e4m3", "causal", (700, 3, 0), heads=(32, 2),
    ),
    Case(
        "packed pages", "(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_2", "e5m2",
        "window softcap packed", (500, 90), seq_q=3, page=16, arch=80,
    ),
    Case(
        "own rows", "(BF16, 128, 32, 64, 2): decode+stages_3+least_64+parts_2+cluster_8+own_rows",
        "e4m3", "causal", (700, 130), seq_q=5, heads=(12, 2),
    ),
    Case(
        "chunks", "(FP16, 96, 16, 64, 4): decode+stages_3+least_64+parts_2+chunks_64", "e4m3",
        "causal packed", (300, 90), seq_q=40, heads=(4, 2), d=80, arch=80,
    ),
    Case(
        "canonical", "(BF16, 128, 16, 128, 4): decode+stages_2+least_128+parts_1+canonical_1",
        "e4m3", "window", (900, 140), page=48, seq_q=2,
    ),
    Case(
        "canonical before sm_89",
        "(FP16, 64, 16, 64, 4): decode+stages_3+least_128+parts_1+canonical_1",
        "e4m3", "causal softcap", (300, 140), arch=80,
    ),
    Case(
        "two panels", "(BF16, 192, 16, 32, 2): decode+stages_3+least_64+parts_2", "e5m2", "causal",
        (200, 33), page=8,
    ),
    Case(
        "arriving", "(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_2+early+cluster_8",
        "e5m2", "causal", (900,), heads=(4, 2), capacity=8300, sm_count=32,
    ),
    Case(
        "widest", "(FP16, 256, 16, 32, 2): decode+stages_2+least_64+parts_2+full", "e4m3", "",
        (200, 33), heads=(24, 2),
    ),
]  # fmt: skip
QUICK = CASES[:1]
ALL = [pytest.param(it, id=it.name, marks=[] if it in QUICK else pytest.mark.full) for it in CASES]
for quick in QUICK:
    for cache in (quick.cache, "scaled"):
        config = quick.of_format(cache)
        shared_kernels.want([config], quick.problem.required_semantics(config), quick.arch)


def draw(case: Case, *, finite: bool = False) -> dict[str, np.ndarray]:
    """Queries, and caches of all codes in random order. Scores are of a moderate size."""
    rng = np.random.default_rng(0)
    problem, dtype = case.problem, VALUES[case.plain.dtype.name.lower()]
    rows = -(-max(*case.lengths, case.capacity) // (case.page or 1)) * (case.page or 1)
    shape = (len(case.lengths), rows, problem.heads_k, problem.d)
    tensors: dict[str, np.ndarray] = {}
    for name in ("k_cache", "v_cache"):
        codes = rng.permutation(np.resize(np.arange(256), np.prod(shape))).astype(np.uint8)
        codes = codes.reshape(shape).view(CODES[case.cache])
        # Most columns of values are finite, and so are the keys of all heads but one.
        unfinite = ~np.isfinite(codes.astype(np.float32))
        kept = np.zeros(shape, bool)
        if not finite:
            kept[..., : problem.heads_k - 1, :] = False
            kept[0, :, 0, 5] = name == "v_cache"
            kept[-1, 3, -1, :] = name == "k_cache"
        codes[unfinite & ~kept] = 0
        tensors[name] = codes
    q = rng.standard_normal((*shape[:1], case.seq_q, problem.heads_q, problem.d), np.float32)
    tensors["q"] = q.astype(dtype)
    tensors["cache_lens"] = np.array(case.lengths, np.int32)
    return tensors


def in_pages(tensors: dict[str, np.ndarray], page: int) -> dict[str, np.ndarray]:
    batch, rows, *rest = tensors["k_cache"].shape
    order = np.random.default_rng(1).permutation(batch * rows // page)
    table = np.argsort(order).reshape(batch, -1).astype(np.int32)
    paged = {
        name: np.ascontiguousarray(tensors[name].reshape(-1, page, *rest)[order])
        for name in ("k_cache", "v_cache")
    }
    return {**tensors, **paged, "page_table": table}


def attend(case: Case, cache: str, tensors: dict[str, np.ndarray], **how: Any) -> Any:
    """The bits of o and of the LSE, with every NaN alike."""
    cfg = case.of_format(cache) if cache else case.plain
    problem = replace(case.problem, cache=cache)
    semantics = problem.semantics
    if case.page:
        tensors = in_pages(tensors, case.page)
    if semantics.packed:
        q = tensors["q"]
        starts = np.arange(len(q) + 1, dtype=np.int32) * case.seq_q
        tensors = {**tensors, "q": q.reshape(-1, *q.shape[2:]), "cu_seqlens_q": starts}
    largest = 448.0 if case.cache == "e4m3" else 57344.0
    options = {"scale": 3.0 / largest / problem.d**0.5, **how.pop("options", {})}
    if semantics.softcap:
        options["softcap"] = 3.0
    if semantics.mask == "window":
        options |= {"left": 200, "right": 0}
    shared_kernels.load([cfg], problem.required_semantics(cfg), case.arch)
    with exact_mma():
        found = run_operation(
            *(cfg, problem, tensors), options=options, wanted=["lse"], emulate=True, poisoned=True,
            arch=case.device, **how,
        )  # fmt: skip
    assert found.emulation is not None
    assert not found.emulation.findings
    return {name: plain_bits(found.outputs[name]) for name in ("o", "lse")}


def converted(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    caches = {name: tensors[name].astype(tensors["q"].dtype) for name in ("k_cache", "v_cache")}
    return {**tensors, **caches}


@pytest.mark.parametrize("case", ALL)
def test_bits_are_those_of_the_converted_cache(case: Case) -> None:
    tensors = draw(case)
    heads = case.problem.heads_k
    scales = {
        "k_scale": np.linspace(0.37, 1.9, heads, dtype=np.float32),
        "v_scale": np.linspace(1.1, 0.013, heads, dtype=np.float32),
    }
    found = attend(case, case.cache, tensors | scales, observers=all_checks())
    assert_same(found, attend(case, "scaled", converted(tensors) | scales))
    nan = found["o"] == 0xFFFF
    assert nan.any()
    assert nan.mean() < 0.6
    # The scales are not in vain.
    without = attend(case, case.cache, tensors)
    assert (without["o"] != found["o"])[~nan].mean() > 0.6
    numbers = {"k_scale_value": float(scales["k_scale"][0]), "v_scale_value": 0.3}
    of_all = {"k_scale": scales["k_scale"][:1], "v_scale": np.array([0.3], np.float32)}
    assert_same(
        attend(case, case.cache, tensors, options=numbers),
        attend(case, case.cache, tensors | of_all),
    )


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_scales_they_are_those_of_the_plain_kernel(case: Case) -> None:
    tensors = draw(case)
    found = attend(case, case.cache, tensors)
    assert_same(found, attend(case, "", converted(tensors)))
    assert_same(found, attend(case, "scaled", converted(tensors)))


def quantised(x: np.ndarray, scale: float, cache: str) -> np.ndarray:
    """Quotients rounded to nearest even; larger ones are the largest finite number, and NaN has all
    bits but the sign."""
    largest = float(ml_dtypes.finfo(CODES[cache]).max)
    quotient = x.astype(np.float32) / np.float32(scale)
    codes = np.clip(quotient, -largest, largest).astype(CODES[cache])
    return np.where(np.isnan(quotient), np.uint8(0x7F), codes.view(np.uint8)).view(CODES[cache])


@pytest.mark.parametrize("case", ALL[:2])
def test_appended_rows_are_divided_rounded_and_saturated(case: Case) -> None:
    tensors, rng = draw(case, finite=True), np.random.default_rng(2)
    lengths = np.array([max(length - case.seq_q, 0) for length in case.lengths], np.int32)
    shape = (*tensors["q"].shape[:2], case.problem.heads_k, case.problem.d)
    for name in "kv":
        size = np.exp2(rng.uniform(-24, 16, shape)) * rng.choice([-1.0, 1.0], shape)
        tensors[name] = size.astype(tensors["q"].dtype)
    tensors["k"][0, 0, 0, :3] = [np.nan, np.inf, -np.inf]
    scale = 0.73
    wanted = {name: tensors[f"{name}_cache"].copy() for name in "kv"}
    for i, first in enumerate(lengths):
        for row in range(min(case.seq_q, wanted["k"].shape[1] - first)):
            for name in "kv":
                wanted[name][i, first + row] = quantised(tensors[name][i, row], scale, case.cache)
    if case.page:
        paged = in_pages(tensors, case.page)
        at = paged["page_table"]
    else:
        paged, at = {name: it.copy() for name, it in tensors.items()}, None
    paged["cache_lens"] = lengths
    problem = replace(case.problem, cache=case.cache)
    if problem.semantics.packed:
        starts = np.arange(len(lengths) + 1, dtype=np.int32) * case.seq_q
        flat = {name: paged[name].reshape(-1, *paged[name].shape[2:]) for name in ("q", "k", "v")}
        paged |= {**flat, "cu_seqlens_q": starts}
    cfg = case.of_format(case.cache)
    options: dict[str, Any] = {"k_scale_value": scale, "v_scale_value": scale}
    if problem.semantics.mask == "window":
        options |= {"left": 200, "right": 0, "softcap": 3.0}
    shared_kernels.load([cfg], problem.required_semantics(cfg), case.arch)
    run_operation(cfg, problem, paged, options=options, emulate=True, arch=case.device)
    for name in "kv":
        cache = paged[f"{name}_cache"]
        if at is not None:
            cache = cache[at].reshape(wanted[name].shape)
        np.testing.assert_array_equal(cache.view(np.uint8), wanted[name].view(np.uint8), name)
