"""NaN, infinities and huge values: what a row sees decides its result, and nothing else does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import shared_kernels
from built_kernels import SEMANTICS, built, marked
from runs import Run, options_for, run_for
from test_wgmma_family import CAUSAL, KERNELS, PACKED, WINDOW, Kernel

from flashsmith.families import DType, KernelConfig, Semantics
from flashsmith.families.mma_sync.sets import proof_configs
from flashsmith.runtime import run_forward
from flashsmith.verify import prove

BEYOND = ("nonfinite", "lost_keys", "huge", "far_scores")
SOFTCAPPED = KERNELS[4]


def smallest(semantics: Semantics) -> KernelConfig:
    return min(built(semantics), key=lambda known: known.d_head)


def problem(config: KernelConfig, semantics: Semantics) -> dict[str, Any]:
    """Keywords of prove(): rows that see nothing, several blocks of keys."""
    call = options_for(semantics) | {"heads": 2, "heads_k": 1, "sinks": True}
    if semantics.packed:
        return call | {"lens_q": (70, 0, 90), "lens_k": (200, 20, 33)}
    if semantics.uneven:
        return call | {"seq": 90, "seq_k": 75, "batch": 2}
    return call | {"seq": config.B_r, "seq_k": 4 * config.B_c}


@pytest.mark.parametrize("kind", BEYOND)
@pytest.mark.parametrize("semantics", marked(SEMANTICS), ids=str)
def test_what_is_not_finite_stays_where_it_belongs(semantics: Semantics, kind: str) -> None:
    config = smallest(semantics)
    verdict = prove(config, **problem(config, semantics), inputs=kind)
    assert verdict.ok, str(verdict)


@pytest.mark.full
@pytest.mark.parametrize("kind", BEYOND)
@pytest.mark.parametrize("semantics", SEMANTICS, ids=str)
def test_what_is_not_finite_in_every_schedule(semantics: Semantics, kind: str) -> None:
    """And of several seeds, which draw where such values lie."""
    for config in built(semantics, whole=True):
        for seed in range(1, 6):
            verdict = prove(config, **problem(config, semantics), inputs=kind, seed=seed)
            assert verdict.ok, str(verdict)


@pytest.mark.parametrize("kind", BEYOND)
@pytest.mark.parametrize(
    "known",
    [pytest.param(known, marks=[pytest.mark.full] * (known != WINDOW)) for known in KERNELS],
    ids=str,
)
def test_what_is_not_finite_in_wgmma_kernels(known: Kernel, kind: str) -> None:
    known.load()
    for seed, row_max in ((0, True), (1, False)):
        verdict = prove(
            known.config, **known.problem(), inputs=kind, seed=seed, row_max=row_max, sm_count=2
        )
        assert verdict.ok, str(verdict)


# ---- scores of -inf in the blocks that are visited first ----


def with_lost_keys(seq_k: int, lost: int, d: int, dtype: Any) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seq_k)
    q = (np.abs(rng.standard_normal((1, 64, 2, d))) + 0.1).astype(dtype)
    k, v = (rng.standard_normal((1, seq_k, 2, d)).astype(dtype) for _ in range(2))
    k[:, seq_k - lost :] = -math.inf
    return q, k, v


# Of both softmaxes, by whether it is folded into the exponent.
SOFTMAXES = {config.optimized_softmax: config for config in proof_configs(DType.FP16, 64)[:2]}
for _uneven in (False, True):
    shared_kernels.want(SOFTMAXES.values(), Semantics(uneven=_uneven))


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("folded", [False, True])
def test_blocks_of_lost_keys_leave_no_trace(folded: bool, uneven: bool, blocks: int) -> None:
    """The rows are those of the keys that are left, whichever kernel computes them."""
    config = SOFTMAXES[folded]
    seq_k = 4 * config.B_c + 8 * uneven
    dtype = run_for(Semantics(uneven=uneven), config=config).inputs.q.dtype
    q, k, v = with_lost_keys(seq_k, blocks * config.B_c, config.d_head, dtype)
    q = np.repeat(q, -(-config.B_r // 64), axis=1)
    outputs = run_forward(config, q, k, v, return_lse=True, return_row_max=True, emulate=True)
    kept = seq_k - blocks * config.B_c
    alone = run_forward(
        config, q, k[:, :kept], v[:, :kept], return_lse=True, return_row_max=True, emulate=True
    )
    for name in ("o", "lse", "row_max"):
        got, expected = (getattr(x, name).astype(np.float32) for x in (outputs, alone))
        np.testing.assert_allclose(got, expected, rtol=1e-2, atol=1e-3)
        assert np.isfinite(got).all()


# ---- rows that see nothing ----


@pytest.mark.parametrize("family", ["mma_sync", "wgmma"])
def test_rows_without_a_key_are_zero_whatever_v_holds(family: str) -> None:
    """200 queries on 20 keys, causal: rows 0 to 179 see none, and share tiles with the others."""
    if family == "wgmma":
        CAUSAL.load()
        config: KernelConfig = CAUSAL.config
    else:
        config = smallest(Semantics("causal", uneven=True))
    dtype = run_for(Semantics("causal", uneven=True), config=config).inputs.q.dtype
    q = np.ones((1, 200, 2, config.d_head), dtype)
    k = np.random.default_rng(0).standard_normal((1, 20, 2, config.d_head)).astype(dtype)
    v = np.full_like(k, math.nan)
    for sinks in (None, np.array([1.0, -math.inf], np.float32)):
        result = run_forward(
            config, q, k, v, causal=True, sinks=sinks, return_lse=True, return_row_max=True,
            emulate=True,
        )  # fmt: skip
        blind = result.o[:, :180].astype(np.float32)
        assert not blind.any()
        assert not np.signbit(blind).any()
        expected = np.full(2, -math.inf) if sinks is None else sinks
        np.testing.assert_array_equal(result.lse[0, :, :180], expected[:, None].repeat(180, 1))
        assert (result.row_max[:, :, :180] == -math.inf).all()
        assert np.isnan(result.o[:, 180:].astype(np.float32)).all()
        assert np.isfinite(result.lse[0, 0, 180:]).all()


def far_masked_keys(run: Run) -> tuple[Run, slice]:
    """The run with NaN in v's last keys, and the query rows whose tiles never reach them."""
    arrays = run.inputs
    v = np.array(arrays.v)
    v[:, -8:] = math.nan
    return Run(run.config, run.semantics, type(arrays)(arrays.q, arrays.k, v, arrays.sinks),
               run.lens_q, run.lens_k), slice(0, run.config.B_r)  # fmt: skip


def test_masked_keys_that_no_row_of_the_tile_sees_never_matter() -> None:
    semantics = Semantics("causal")
    config = smallest(semantics)
    run = run_for(semantics, config=config)
    inputs = type(run.inputs)(
        *(np.concatenate([x] * 3, axis=1) for x in (run.inputs.q, run.inputs.k, run.inputs.v)),
        run.inputs.sinks,
    )
    long = Run(config, semantics, inputs, None, None)
    poisoned, rows = far_masked_keys(long)
    shift = inputs.k.shape[1] - inputs.q.shape[1]
    assert rows.stop + shift + config.B_c <= inputs.k.shape[1] - 8
    expected, got = long(), poisoned()
    assert got["o"][:, rows].tobytes() == expected["o"][:, rows].tobytes()
    assert np.isnan(got["o"][:, -1].astype(np.float32)).all()


# ---- statistics of rows that are not finite ----


@pytest.mark.parametrize("family", ["mma_sync", "wgmma"])
@pytest.mark.parametrize(
    ("scores", "row_max"),
    [
        ((math.nan,), math.nan),
        ((math.inf,), math.inf),
        ((math.nan, math.inf), math.inf),
        ((-math.inf, math.nan), math.nan),
    ],
    ids=str,
)
def test_row_max_of_rows_that_are_nan(
    scores: tuple[float, ...], row_max: float, family: str
) -> None:
    """Comparisons pass NaN by, but a maximum of the other scores is not the row's."""
    config: KernelConfig = smallest(Semantics(uneven=True))
    if family == "wgmma":
        PACKED.load()
        config = PACKED.config
    dtype = run_for(PACKED.semantics, config=config).inputs.q.dtype
    q = np.zeros((5, 1, config.d_head), dtype)
    q[..., 0] = 1
    k = np.zeros((70, 1, config.d_head), dtype)
    k[: len(scores), 0, 0] = scores  # the other columns are 0 x 0
    v = np.ones_like(k)
    call: dict[str, Any] = {"return_lse": True, "return_row_max": True, "emulate": True}
    if family == "wgmma":
        ends = {"cu_seqlens_q": np.array([0, 5], np.int32), "cu_seqlens_k": np.array([0, 70])}
        ends["cu_seqlens_k"] = ends["cu_seqlens_k"].astype(np.int32)
        result = run_forward(config, q, k, v, **ends, **call)
    else:
        result = run_forward(config, q[None], k[None], v[None], **call)
    assert np.isnan(result.o.astype(np.float32)).all()
    assert np.isnan(result.lse).all()
    np.testing.assert_array_equal(result.row_max.ravel(), np.full(5, row_max))


@pytest.mark.parametrize("family", ["mma_sync", "wgmma"])
def test_sinks_at_the_ends_of_fp32(family: str) -> None:
    """In base 2 they are beyond them."""
    if family == "wgmma":
        WINDOW.load()
        config: KernelConfig = WINDOW.config
        run = run_for(WINDOW.semantics, config=config)
    else:
        run = run_for(Semantics("window", uneven=True))
    sinks = np.array([3e38, -3e38, math.inf, -math.inf], np.float32)
    plain, got = run(sinks=None), run(sinks=sinks)
    o, lse = got["o"].astype(np.float32), got["lse"]
    assert not o[:, :, [0, 2]].any()
    np.testing.assert_array_equal(lse[:, 0], np.full_like(lse[:, 0], 3e38))
    np.testing.assert_array_equal(lse[:, 2], np.full_like(lse[:, 2], math.inf))
    seen = np.isfinite(plain["lse"])
    np.testing.assert_array_equal(got["o"][:, :, [1, 3]], plain["o"][:, :, [1, 3]])
    for head in (1, 3):
        expected = np.where(seen[:, head], plain["lse"][:, head], sinks[head])
        np.testing.assert_allclose(lse[:, head], expected, rtol=1e-6)


# ---- huge scores ----


@pytest.mark.parametrize("family", ["mma_sync", "wgmma"])
@pytest.mark.parametrize("size", [2.0**6, 2.0**10, 2.0**12.5, 2.0**13])
def test_scores_below_the_limit_have_the_right_key(size: float, family: str) -> None:
    """Up to 1.7e8: o within two roundings of the key's value, the LSE within fp32's."""
    config: KernelConfig = smallest(Semantics(uneven=True))
    if family == "wgmma":
        PACKED.load()
        config = PACKED.config
    rng = np.random.default_rng(3)
    run = run_for(PACKED.semantics if family == "wgmma" else Semantics(uneven=True), config=config)
    dtype, d = run.inputs.q.dtype, config.d_head
    k = (rng.choice([-1.0, 1.0], (150, 1, d)) * size).astype(dtype)
    v = rng.standard_normal((150, 1, d)).astype(dtype)
    chosen = rng.integers(150, size=70)
    scale = 2.5 / d
    call: dict[str, Any] = {"return_lse": True, "emulate": True, "scale": scale}
    if family == "wgmma":
        ends = {
            f"cu_seqlens_{side}": np.array([0, n], np.int32) for side, n in (("q", 70), ("k", 150))
        }
        result = run_forward(config, k[chosen], k, v, **ends, **call)
    else:
        result = run_forward(config, k[chosen][None], k[None], v[None], **call)
    step = 2.0**-8 if dtype.name == "bfloat16" else 2.0**-11
    expected = v[chosen].astype(float)
    np.testing.assert_allclose(
        result.o.astype(float).reshape(expected.shape), expected, rtol=2 * step
    )
    logits = scale * (k[chosen].astype(float) ** 2).sum(axis=-1).ravel()
    assert logits.max() < 1.8e8
    np.testing.assert_allclose(result.lse.ravel(), logits, rtol=1e-6)


# ---- softcaps ----

CAPS = (1e-3, 1.0, 50.0, 1e4, 1e5, 1e7, 1e8, 1e12, 1e30)


@pytest.mark.parametrize("family", ["mma_sync", "wgmma"])
@pytest.mark.parametrize("cap", CAPS)
def test_softcaps_err_relative_to_the_score(cap: float, family: str) -> None:
    """LSE and row maximum within the proof's rule: 2^-13 + 1e-6 of them, and never of the cap."""
    if family == "wgmma":
        SOFTCAPPED.load()
        config: KernelConfig = SOFTCAPPED.config
    else:
        config = smallest(Semantics(softcap=True, uneven=True))
    for kind, scale in (("random", None), ("large_scores", 0.3), ("one_hot", None)):
        verdict = prove(config, seq=70, seq_k=150, softcap=cap, inputs=kind, scale=scale)
        assert verdict.ok, str(verdict)
