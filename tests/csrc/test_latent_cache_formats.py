"""Kernels over latent caches of 8-bit floats have the bits of the 16-bit kernels on converted
caches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import shared_kernels
from plain_bits import assert_same, plain_bits

from flashsmith.families import Problem, parse_kernel_name_into_config
from flashsmith.families.device import device_spec
from flashsmith.families.mma_sync_mla.sets import over_cache
from flashsmith.runtime.emulation import exact_mma
from flashsmith.runtime.operation_run import run_operation
from flashsmith.semantics.cache_format import CacheFormat
from ptxlab.checks import all_checks

CODES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
VALUES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
# Not a power of two, so that a product by it rounds.
SCALE = 0.73


@dataclass(frozen=True)
class Case:
    """A config for 16-bit caches, the format of the others, and a call whose first sequence is
    split."""

    name: str
    config: str
    cache: str
    words: str
    lengths: tuple[int, ...]
    seq_q: int = 1
    heads: int = 8
    page: int = 0
    arch: int = 90

    @property
    def plain(self) -> Any:
        return parse_kernel_name_into_config(self.config)

    def of_format(self, cache: str) -> Any:
        return over_cache(self.plain, CacheFormat.parse(cache), device_spec(self.arch))

    @property
    def problem(self) -> Problem:
        cfg = self.plain
        text = f"b{len(self.lengths)} s{self.seq_q}:{max(self.lengths)} h{self.heads}:1 "
        text += f"d{cfg.d_head}:{cfg.d_v} {cfg.dtype.name.lower()} latent_decode {self.words}"
        return Problem.parse(text + f" page{self.page}" * bool(self.page))


CASES = [
    Case(
        "packed pages", "(BF16, 576:512, 32): latent_mma+stages_3+least_128+parts_4+lazy", "e4m3",
        "causal packed", (300, 90), seq_q=3, page=16,
    ),
    Case(
        "two blocks before sm_89", "(FP16, 320:256, 64): latent_mma+stages_2+least_64+parts_4",
        "e4m3", "window", (300, 70), heads=20, arch=80,
    ),
    Case(
        "e5m2", "(FP16, 576:512, 32): latent_mma+stages_2+least_64+parts_2+lazy", "e5m2", "",
        (200, 33), seq_q=2, page=24,
    ),
    Case(
        "e5m2 in bf16", "(BF16, 320:256, 32): latent_mma+stages_4+least_128+parts_1", "e5m2",
        "causal", (140, 33), seq_q=2, arch=80,
    ),
]  # fmt: skip
QUICK = CASES[0]
ALL = [pytest.param(it, id=it.name, marks=[] if it is QUICK else pytest.mark.full) for it in CASES]
for cache in (QUICK.cache, "scaled"):
    config = QUICK.of_format(cache)
    shared_kernels.want([config], QUICK.problem.required_semantics(config), QUICK.arch)


def draw(case: Case, *, finite: bool = False) -> dict[str, np.ndarray]:
    """Queries, and a cache of all codes in random order. Without ``finite``, a key of the last
    sequence has a NaN in its last column, which is no value."""
    rng = np.random.default_rng(0)
    problem, dtype = case.problem, VALUES[case.plain.dtype.name.lower()]
    rows = -(-max(case.lengths) // (case.page or 1)) * (case.page or 1)
    shape = (len(case.lengths), rows, 1, problem.d)
    codes = rng.permutation(np.resize(np.arange(256), np.prod(shape))).astype(np.uint8)
    codes[~np.isfinite(codes.view(CODES[case.cache]).astype(np.float32))] = 0
    codes = codes.reshape(shape)
    if not finite:
        codes[-1, 3, 0, -1] = 0x7F
    q = rng.standard_normal((len(case.lengths), case.seq_q, case.heads, problem.d), np.float32)
    return {
        "q": q.astype(dtype),
        "k_cache": codes.view(CODES[case.cache]),
        "cache_lens": np.array(case.lengths, np.int32),
    }


def in_layout(case: Case, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors in pages and packed, if those of the case are so."""
    tensors = dict(tensors)
    if case.page:
        batch, rows, *rest = tensors["k_cache"].shape
        order = np.random.default_rng(1).permutation(batch * rows // case.page)
        tensors["page_table"] = np.argsort(order).reshape(batch, -1).astype(np.int32)
        pages = tensors["k_cache"].reshape(-1, case.page, *rest)
        tensors["k_cache"] = np.ascontiguousarray(pages[order])
    if case.problem.semantics.packed:
        starts = np.arange(len(case.lengths) + 1, dtype=np.int32) * case.seq_q
        for name in ("q", "k"):
            if name in tensors:
                tensors[name] = tensors[name].reshape(-1, *tensors[name].shape[2:])
        tensors["cu_seqlens_q"] = starts
    return tensors


def run(case: Case, cache: str, tensors: dict[str, np.ndarray], **how: Any) -> Any:
    cfg = case.of_format(cache) if cache else case.plain
    problem = replace(case.problem, cache=cache)
    largest = float(ml_dtypes.finfo(CODES[case.cache]).max)
    options = {"scale": 3.0 / largest / problem.d**0.5, **how.pop("options", {})}
    if problem.semantics.mask == "window":
        options |= {"left": 150, "right": 0}
    shared_kernels.load([cfg], problem.required_semantics(cfg), case.arch)
    with exact_mma():
        found = run_operation(
            *(cfg, problem, tensors), options=options, wanted=["lse"], emulate=True, poisoned=True,
            arch=device_spec(case.arch), **how,
        )  # fmt: skip
    assert found.emulation is not None
    assert not found.emulation.findings
    return found


def attend(case: Case, cache: str, tensors: dict[str, np.ndarray], **how: Any) -> Any:
    """The bits of o and of the LSE, with every NaN alike."""
    found = run(case, cache, in_layout(case, tensors), **how)
    return {name: plain_bits(found.outputs[name]) for name in ("o", "lse")}


def converted(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {**tensors, "k_cache": tensors["k_cache"].astype(tensors["q"].dtype)}


@pytest.mark.parametrize("case", ALL)
def test_bits_are_those_of_the_converted_cache(case: Case) -> None:
    tensors = draw(case)
    scale = {"k_scale": np.array([SCALE], np.float32)}
    found = attend(case, case.cache, tensors | scale, observers=all_checks())
    assert_same(found, attend(case, "scaled", converted(tensors) | scale))
    nan = found["o"] == 0xFFFF
    assert nan.any()
    assert not nan.all()
    # A number is rounded as the tensor's is, and neither is in vain.
    number = {"options": {"k_scale_value": SCALE}}
    assert_same(attend(case, case.cache, tensors, **number), found)
    assert (attend(case, case.cache, tensors)["o"] != found["o"])[~nan].mean() > 0.6


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_without_a_scale_they_are_those_of_the_plain_kernel(case: Case) -> None:
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
    return np.where(np.isnan(quotient), np.uint8(0x7F), codes.view(np.uint8))


@pytest.mark.parametrize("case", ALL[:2])
def test_appended_rows_are_divided_rounded_and_saturated(case: Case) -> None:
    tensors, rng = draw(case, finite=True), np.random.default_rng(2)
    lengths = np.array(case.lengths, np.int32) - case.seq_q
    shape = (len(lengths), case.seq_q, 1, case.problem.d)
    size = np.exp2(rng.uniform(-24, 16, shape)) * rng.choice([-1.0, 1.0], shape)
    new = size.astype(tensors["q"].dtype)
    new[0, 0, 0, :3] = [np.nan, np.inf, -np.inf]
    wanted = tensors["k_cache"].view(np.uint8).copy()
    for i, first in enumerate(lengths):
        wanted[i, first : first + case.seq_q] = quantised(new[i], SCALE, case.cache)
    given = in_layout(case, {**tensors, "k": new, "cache_lens": lengths})
    run(case, case.cache, given, options={"k_scale_value": SCALE})
    cache = given["k_cache"].view(np.uint8)
    if case.page:
        cache = cache[given["page_table"]].reshape(wanted.shape)
    np.testing.assert_array_equal(cache, wanted)
