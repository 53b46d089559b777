"""A mask of one's own: nothing but its value is written, and every family's kernels compute it.

Prefix LM: every row sees the first ``right + 1`` keys of its sequence, and those up to its own.
"""

from __future__ import annotations

import numpy as np
import pytest

from flashsmith.families import KernelConfig, Problem, Semantics, device_spec
from flashsmith.families import parse_kernel_name_into_config as parse
from flashsmith.runtime.operation_run import run_operation
from flashsmith.semantics import mask as masks
from flashsmith.semantics.mask import KEY, POSITION, RIGHT, UNLIMITED, Mask, register_mask
from flashsmith.semantics.typed import apply, where
from ptxlab.checks import all_checks

PREFIX = Mask(
    "prefix", last=apply("maximum", POSITION, RIGHT), first_row=where(KEY <= RIGHT, -UNLIMITED, KEY)
)
D, HEADS, SEQ = 64, 2, 150
FORWARD = "(FP16, 64, 64, 64, 4): async+eager+swizzled+load_2_2_2_tiles+buffer+opt_softmax"
HOPPER = "(FP16, 64, 128, 128, 2wg): tma+stages_2+q_buffers_1+regs_24_240"
DECODE = "(FP16, 64, 16, 64, 4): decode+stages_2+least_64+parts_2"


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_KNOWN", dict(masks._KNOWN))
    register_mask(PREFIX)


def draw(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def probabilities(q: np.ndarray, k: np.ndarray, prefix: int) -> tuple[np.ndarray, np.ndarray]:
    """Of (batch, seq, heads, d) q and k in float64, (batch, heads, rows, keys); and the LSE."""
    seq_q, seq_k = q.shape[1], k.shape[1]
    scores = np.einsum("bqhd,bkhd->bhqk", q.astype(float), k.astype(float)) / np.sqrt(q.shape[-1])
    position, key = np.arange(seq_q)[:, None] + seq_k - seq_q, np.arange(seq_k)
    scores = np.where((key <= position) | (key < prefix), scores, -np.inf)
    lse = np.log(np.exp(scores).sum(-1))
    return np.exp(scores - lse[..., None]), lse


def problem_of(operation: str, seq_q: int = SEQ) -> Problem:
    problem = Problem.parse(f"b1 s{seq_q}:{SEQ} h{HEADS} d{D} fp16 {operation} prefix uneven")
    assert Problem.parse(str(problem)) == problem
    return problem


@pytest.mark.parametrize(
    ("config", "device"),
    [(FORWARD, "a100"), pytest.param(HOPPER, "h100", marks=pytest.mark.full)],
)
def test_forward(config: str, device: str) -> None:
    q, k, v = (draw(1, SEQ, HEADS, D, seed=seed) for seed in range(3))
    cfg, problem = parse(config), problem_of("forward")
    for prefix in (1, 40, 129, SEQ):
        found = run_operation(
            cfg,
            problem,
            {"q": q, "k": k, "v": v},
            options={"right": prefix - 1},
            wanted=["lse"],
            poisoned=True,
            arch=device_spec(device),
            observers=all_checks(),
        )
        p, lse = probabilities(q, k, prefix)
        expected = np.einsum("bhqk,bkhd->bqhd", p, v.astype(float))
        np.testing.assert_allclose(found.outputs["o"].astype(float), expected, atol=4e-3)
        np.testing.assert_allclose(found.outputs["lse"], lse, atol=2e-3)
        assert found.emulation is not None
        assert not found.emulation.findings
    # A library of another mask with equal flags is another library.
    assert Semantics(PREFIX, uneven=True) != Semantics("causal", uneven=True)


BACKWARD = [
    ("backward", "a100", "mma_sync_backward"),
    ("backward", "h100", "wgmma_backward"),
    ("backward only_dq", "h100", "wgmma_dq"),
]


@pytest.mark.parametrize(
    ("operation", "device", "family"),
    [BACKWARD[0], *(pytest.param(*it, marks=pytest.mark.full) for it in BACKWARD[1:])],
)
def test_gradients(operation: str, device: str, family: str) -> None:
    q, k, v, do = (draw(1, SEQ, HEADS, D, seed=seed) for seed in range(4))
    cfg = first_config(family)
    problem = problem_of(operation)
    for prefix in (40, 129):
        p, lse = probabilities(q, k, prefix)
        o = np.einsum("bhqk,bkhd->bqhd", p, v.astype(float)).astype(np.float16)
        tensors = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse.astype(np.float32)}
        tensors = {name: np.ascontiguousarray(it) for name, it in tensors.items()}
        found = run_operation(
            cfg,
            problem,
            tensors,
            options={"right": prefix - 1},
            poisoned=True,
            arch=device_spec(device),
            observers=all_checks(),
        )
        dp = np.einsum("bqhd,bkhd->bhqk", do.astype(float), v.astype(float))
        d_rows = np.einsum("bqhd,bqhd->bhq", do.astype(float), o.astype(float))
        ds = p * (dp - d_rows[..., None]) / np.sqrt(D)
        expected = {
            "dq": np.einsum("bhqk,bkhd->bqhd", ds, k.astype(float)),
            "dk": np.einsum("bhqk,bqhd->bkhd", ds, q.astype(float)),
            "dv": np.einsum("bhqk,bqhd->bkhd", p, do.astype(float)),
        }
        assert found.outputs.keys() >= {"dq"}
        for name, gradient in found.outputs.items():
            np.testing.assert_allclose(
                gradient.astype(float), expected[name], atol=2e-2, err_msg=name
            )
        assert found.emulation is not None
        assert not found.emulation.findings


@pytest.mark.full
def test_over_a_cache() -> None:
    queries = 3
    q = draw(1, queries, HEADS, D, seed=0)
    k, v = (draw(1, SEQ, HEADS, D, seed=seed) for seed in (1, 2))
    for prefix, length in ((40, SEQ), (120, 100), (149, 149)):
        found = run_operation(
            parse(DECODE),
            problem_of("decode", queries),
            {"q": q, "k_cache": k, "v_cache": v, "cache_lens": np.array([length], np.int32)},
            options={"right": prefix - 1},
            poisoned=True,
            arch=device_spec("a100"),
            observers=all_checks(),
        )
        p, _ = probabilities(q, k[:, :length], prefix)
        expected = np.einsum("bhqk,bkhd->bqhd", p, v[:, :length].astype(float))
        np.testing.assert_allclose(found.outputs["o"].astype(float), expected, atol=4e-3)
        assert found.emulation is not None
        assert not found.emulation.findings


def first_config(family: str) -> KernelConfig:
    """The family's smallest kernel of d 64 that this file's problems fit."""
    from flashsmith.families import family_named

    of = family_named(family)
    device = device_spec("a100" if family == "mma_sync_backward" else "h100")
    dtype = problem_of("forward").dtype
    found: KernelConfig = next(iter(of.candidates(dtype, D, device, True)))
    return found
