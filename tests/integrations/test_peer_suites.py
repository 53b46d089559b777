"""The parametrisations of FlashAttention's, FlashInfer's and vLLM's own tests, in the emulator's
sizes: every case is right by the rule for our own kernels, or refused by the argument's name and
right as the refusal says."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import shared_kernels
from peer_suites import visit
from peer_suites.calls import Device, check, check_gradients, every
from peer_suites.case import LOCAL, PeerCase, PeerTest
from peer_suites.flash_attention import FLASH_ATTENTION_2, FLASH_ATTENTION_3, FLASH_ATTENTION_4
from peer_suites.flashinfer import FLASHINFER
from peer_suites.vllm import VLLM

from flashsmith.chooser import decode
from flashsmith.families import DType, FlashForwardKernelConfig, Problem, device_spec
from flashsmith.families import parse_kernel_name_into_config as parse
from flashsmith.integrations import flash_attn

SUITES = FLASH_ATTENTION_2, FLASH_ATTENTION_3, FLASH_ATTENTION_4, FLASHINFER, VLLM
CASES = [*every(*SUITES)]
HOST = Device(put=lambda array: array, get=lambda array: array)
# For fp16 what other tests build, too; all are loaded with the semantics that a case needs.
FORWARD, DECODE, BACKWARD = (
    {dtype: make(dtype) for dtype in DType}
    for make in (
        lambda dtype: FlashForwardKernelConfig(
            dtype, 64, 64, 32, 4, True, True, True, 2, 2, 2, optimized_softmax=True
        ),
        lambda dtype: parse(f"({dtype.name}, 64, 16, 64, 4): decode+stages_3+least_64+parts_2"),
        lambda dtype: parse(f"({dtype.name}, 64, 64, 64, 4): backward"),
    )
)


@pytest.fixture(autouse=True)
def _few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two configs a dtype, whatever the chooser would take: that is tested elsewhere."""

    def choose(configs: dict[DType, Any]) -> Any:
        def chosen(problem: Problem, device: Any, *_: Any, **__: Any) -> Any:
            config = configs[problem.dtype]
            shared_kernels.load([config], problem.required_semantics(config))
            return config

        return chosen

    # By its module's name: the package has a function of that name.
    module = sys.modules["flashsmith.chooser.attention"]
    monkeypatch.setattr(module, "choose_config", choose(FORWARD))
    chooser = choose(DECODE)
    monkeypatch.setattr(decode, "CHOOSERS", dict.fromkeys(decode.CHOOSERS, chooser))


def kernel_of(case: PeerCase) -> tuple[Any, ...]:
    """Cases with equal ones stand together, so that a shard builds few kernels."""
    paged = case.call == "cache" or bool(case.page)
    packed = case.call == "packed" or case.packed_queries
    mask = "local" if case.local else case.causal
    return paged, case.dtype, str(mask), case.softcap > 0, packed, case.used


SMALL = sorted((case.in_the_emulator() for case in CASES), key=kernel_of)


@pytest.mark.full
@pytest.mark.parametrize("case", SMALL, ids=[f"{i}-{case}" for i, case in enumerate(SMALL)])
def test_a_case_is_right_or_refused(case: PeerCase) -> None:
    check(case, HOST)


DIFFERENTIATED = [case for case in SMALL if case.has_gradients][::8]


@pytest.mark.full
@pytest.mark.torch
@pytest.mark.parametrize("case", DIFFERENTIATED,
                         ids=[f"{i}-{case}" for i, case in enumerate(DIFFERENTIATED)])  # fmt: skip
def test_a_gradient_is_right(case: PeerCase, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
    from peer_suites.torch_tensors import torch_device

    problem = visit.problem_of(case)[0]
    forward, backward = FORWARD[problem.dtype], BACKWARD[problem.dtype]
    shared_kernels.load([forward], problem.required_semantics(forward))
    differentiated = replace(problem, operation=backward.family.operation)
    shared_kernels.load([backward], differentiated.required_semantics(backward))
    kernels = {"config": forward, "backward_config": backward, "emulate": True}
    monkeypatch.setattr(flash_attn, "attention", partial(flash_attn.attention, **kernels))

    check_gradients(case, torch_device("cpu"))


# One of each kind whose kernel other tests of a plain run build.
QUICK = list({kernel_of(case)[0:1] + kernel_of(case)[2:]: case for case in SMALL
              if case.dtype == "fp16" and case.causal and not (case.local or case.softcap)
              and not case.used}.values())  # fmt: skip


@pytest.mark.parametrize("case", QUICK, ids=map(str, QUICK))
def test_a_few_cases(case: PeerCase) -> None:
    check(case, HOST)


def test_there_are_two_thousand_different_cases() -> None:
    assert len(set(SMALL)) >= 2000
    assert len({str(case) + str(case.seed) for case in CASES}) == len(CASES)
    assert {case.local for case in CASES} == set(LOCAL)


@pytest.mark.parametrize("test", [test for suite in SUITES for test in suite],
                         ids=lambda test: f"{test.suite}-{test.function}")  # fmt: skip
def test_every_value_of_a_test_is_among_its_cases(test: PeerTest) -> None:
    cases = test.cases()
    for name, values in test.values.items():
        names = name if isinstance(name, tuple) else (name,)
        found = Counter(tuple(getattr(case, each) for each in names) for case in cases)
        wanted = {value if isinstance(name, tuple) else (value,) for value in values}
        assert set(found) == wanted
    assert len(cases) == test.draw


def test_a_visit_to_a_gpu_runs_every_function_with_few_kernels() -> None:
    chosen = visit.chosen_cases(device_spec("H100"))
    cases = [case for its in chosen.values() for case in its]
    assert len(chosen) == visit.MOST_KERNELS
    assert len(cases) >= 300
    wanted = {(test.suite, test.function) for test in (*FLASH_ATTENTION_2, *FLASH_ATTENTION_3)
              if test.function in visit.FUNCTIONS}  # fmt: skip
    assert {(case.suite, case.function) for case in cases} == wanted
    gradients = visit.chosen_gradients(device_spec("H100"))
    assert len(gradients) == visit.MOST_BACKWARD_KERNELS
    assert sum(map(len, gradients.values())) >= 40


def test_sizes_of_the_emulator_keep_the_structure_of_lengths() -> None:
    for case, small in ((case, case.in_the_emulator()) for case in CASES):
        (q, k), (small_q, small_k) = case.lengths, small.lengths
        assert (q > k, q == k, q == 1, k == 1) == (
            small_q > small_k, small_q == small_k, small_q == 1, small_k == 1
        )  # fmt: skip
        assert max(small.lengths) <= 200
        assert (small.d <= 64) & ((case.d % 8 == 0) == (small.d % 8 == 0))
        assert small.heads[0] // small.heads[1] > 1 or case.heads[0] == case.heads[1]
        assert (small.heads[1] == 1) == (case.heads[1] == 1)
