"""Mistakes in the sources of gradients with score and mask functions: all must be caught."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from operation_victims import OperationVictim, SourcePatch, patched_modules, void_mistakes
from program_calls import Call
from program_gradients import wrong_gradients
from program_mistakes import DQ_MISTAKES, MAKERS, MISTAKES, MMA_SYNC_MISTAKES

from flashsmith.errors import EmulatorError
from flashsmith.families import KernelConfig, Semantics
from flashsmith.families import parse_kernel_name_into_config as config
from flashsmith.runtime.libraries import loaded_kernels

CONFIG = config(
    "(FP16, 64, 64, 128, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_40_232"
    "+scores_together+lagged_dq+pingpong+persistent+sums_under_dk+early_rows"
)
DQ = config("(FP16, 64, 128, 128, 2): tma_dq+k_stages_3+v_stages_3+regs_24_240+late_dq+pingpong")
MMA_SYNC = config("(BF16, 64, 64, 64, 4): backward+columns_2+stages_2")
CALL = Call(seq_q=140, seq_k=201, d=64)


def said(cfg: KernelConfig, name: str, mistake: SourcePatch | None) -> str:
    """What is wrong with the gradients of kernels that have the mistake."""
    made = MAKERS[name](CALL, np.random.default_rng(3))
    victim = OperationVictim(cfg, Semantics(uneven=True, program=made.program), ())
    changed = replace(victim.kernel)
    if mistake is not None:
        changed.__dict__["modules"] = patched_modules(victim, mistake)
    key = victim.config, victim.arch, victim.semantics
    with patch.dict(loaded_kernels.kernels, {key: changed}):
        try:
            needs = (True, cfg is not DQ, cfg is not DQ, True)
            return wrong_gradients(
                *(cfg, CALL, made),
                sinks=True,
                dlse=True,
                needs=needs,
                checks=False,
                arch=cfg.OLDEST_ARCH,
                sm_count=3,
            )
        except EmulatorError as stopped:
            return str(stopped)


ALL = [
    *((CONFIG, it) for it in MISTAKES),
    *((DQ, it) for it in DQ_MISTAKES),
    *((MMA_SYNC, it) for it in MMA_SYNC_MISTAKES),
]


def test_mistakes_are_in_the_sources() -> None:
    assert void_mistakes((SourcePatch(*it[:-1]) for _, it in ALL)) == []


@pytest.mark.full
@pytest.mark.parametrize(("cfg", "mistake"), ALL, ids=[f"{cfg.FAMILY}-{it[0]}" for cfg, it in ALL])
def test_mistakes(cfg: KernelConfig, mistake: tuple[str, str, str, str, str]) -> None:
    *of_sources, program = mistake
    assert said(cfg, program, SourcePatch(*of_sources)) != ""


@pytest.mark.full
@pytest.mark.parametrize(
    ("cfg", "program"), sorted({(cfg, it[-1]) for cfg, it in ALL}, key=lambda it: str(it))
)
def test_no_mistake(cfg: KernelConfig, program: str) -> None:
    assert said(cfg, program, None) == ""
