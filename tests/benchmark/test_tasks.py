"""What a run gives its kernels to compute: each the kernel that the semantics name, or an error."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest

from flashsmith.benchmark.tasks import EMULATED, TIMED, OneProblem, Size, default_size
from flashsmith.errors import ArgumentError
from flashsmith.families import Problem, Semantics, device_spec, get_kernel_configs
from flashsmith.families import parse_kernel_name_into_config as parse
from flashsmith.runtime.target import choose_target
from flashsmith.semantics import MASKS

SEMANTICS = [
    Semantics(mask, softcap, packed, uneven)
    for mask, softcap, packed, uneven in product(MASKS, *[(False, True)] * 3)
    if uneven or not packed
]
EMULATOR = choose_target("sm_80", emulate=True)
TARGETS = [EMULATOR, replace(EMULATOR, backend="gpu")]
CFG = parse("(FP16, 128, 64, 64, 4): async+swizzled+load_0_0_0_tiles")
BF16 = replace(CFG, dtype=15)


@pytest.mark.parametrize("key", ["prog-all", "cover", "hopper"])
@pytest.mark.parametrize("target", TARGETS, ids=["emulator", "gpu"])
def test_the_default_size_runs_the_kernel_of_the_semantics(target, key: str) -> None:
    configs = get_kernel_configs(key)
    for semantics in SEMANTICS:
        size = default_size(target, semantics)
        assert size.batch > 1 or not semantics.packed
        even = replace(semantics, uneven=semantics.packed)
        for cfg in configs:
            size.check(cfg)
            # As prove() and forward() see it, who are told nothing of uneven.
            problem = replace(size.problem(cfg), semantics=even)
            assert problem.required_semantics(cfg) == semantics


@pytest.mark.parametrize("semantics", SEMANTICS, ids=str)
def test_the_size_that_is_timed_runs_it_too(semantics: Semantics) -> None:
    timed = Size(1, 64, 1, semantics).timed(CFG)
    assert timed is not None
    assert timed.semantics == semantics
    even = replace(semantics, uneven=semantics.packed)
    assert replace(timed, semantics=even).required_semantics(CFG) == semantics


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Size(1, 100, 2, Semantics("causal")), "seq=100: must be a multiple of B_r=64 of (FP16"),
        (Size(1, 128, 2, Semantics("causal", uneven=True)), "seq=128: fills whole tiles of (FP16"),
        (OneProblem(Problem.parse("s128 d128 fp16 uneven")), "problem='b1 s128 h1 d128 fp16 une"),
        (
            OneProblem(Problem.parse("s128 d100 fp16")),
            "problem='b1 s128 h1 d100 fp16': d=100 is no",
        ),
        (OneProblem(Problem.parse("b0 s128 d64 fp16")), "problem='b0 s128 h1 d64 fp16': has no q"),
        (OneProblem(Problem.parse("s0:9 d64 fp16")), "problem='b1 s0:9 h1 d64 fp16': has no q"),
    ],
)
def test_what_would_not_prove_what_it_says_is_refused(task, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}"):
        task.check(CFG)


def test_all_heads_share_the_head_of_a_latent_cache() -> None:
    for cfg in (*get_kernel_configs("latent"), *get_kernel_configs("latent-mma")):
        timed = TIMED.problem(cfg)
        assert (timed.seq_q, timed.heads_q, timed.heads_k) == (1, TIMED.heads, 1)
        assert cfg.family.unsupported_reason(timed, device_spec("H200")) is None
        assert Size(1, 64, 4).problem(cfg).heads_k == 1


def test_packed_lengths_may_be_any() -> None:
    for seq in (64, 100):
        Size(3, seq, 2, Semantics.parse("packed")).check(CFG)
        OneProblem(Problem.parse(f"b3 s{seq} d128 fp16 packed")).check(CFG)


@pytest.mark.parametrize(
    ("text", "semantics"),
    [
        ("s128 d128 fp16 causal", "causal"),
        ("s130 d128 fp16 causal", "causal+uneven"),
        ("s128 d64 fp16 window", "window+uneven"),
        ("s128 d128 fp16 packed softcap", "softcap+packed+uneven"),
    ],
)
def test_a_problem_is_computed_by_the_kernel_that_it_takes(text: str, semantics: str) -> None:
    task = OneProblem(Problem.parse(text))
    task.check(CFG)
    assert str(task.problem(CFG).semantics) == semantics
    assert task.timed(CFG) == task.problem(CFG)
    assert task.describe([CFG]) == str(Problem.parse(text))


def test_a_problem_with_nothing_to_compute_is_not_timed() -> None:
    assert OneProblem(Problem.parse("s9:0 d64 fp16")).timed(CFG) is None


def test_kernels_that_a_problem_is_not_for() -> None:
    task = OneProblem(Problem.parse("s128 d96 fp16"))
    assert task.why_not(CFG) is None
    assert task.why_not(BF16) == "is for bf16"
    assert task.why_not(replace(CFG, d_head=64)) == "has d_head 64"
    assert EMULATED.why_not(BF16) is None
