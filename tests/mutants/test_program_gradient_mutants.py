"""Mistakes in the sources of gradients with score and mask functions: all must be caught."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from operation_victims import OperationVictim, SourcePatch, patched_modules
from program_calls import Call
from program_gradients import wrong_gradients
from program_mistakes import MAKERS, MISTAKES

from flashsmith.errors import EmulatorError
from flashsmith.families import Semantics
from flashsmith.families import parse_kernel_name_into_config as config
from flashsmith.runtime.libraries import loaded_kernels

CONFIG = config(
    "(FP16, 64, 64, 128, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_40_232"
    "+scores_together+lagged_dq+pingpong+persistent+sums_under_dk+early_rows"
)
CALL = Call(seq_q=140, seq_k=201, d=64)


def said(name: str, mistake: SourcePatch | None) -> str:
    """What is wrong with the gradients of kernels that have the mistake."""
    made = MAKERS[name](CALL, np.random.default_rng(3))
    victim = OperationVictim(CONFIG, Semantics(uneven=True, program=made.program), ())
    changed = replace(victim.kernel)
    if mistake is not None:
        changed.__dict__["modules"] = patched_modules(victim, mistake)
    key = victim.config, victim.arch, victim.semantics
    with patch.dict(loaded_kernels.kernels, {key: changed}):
        try:
            return wrong_gradients(CONFIG, CALL, made, sm_count=3, checks=False)
        except EmulatorError as stopped:
            return str(stopped)


@pytest.mark.full
@pytest.mark.parametrize("mistake", MISTAKES, ids=[it[0] for it in MISTAKES])
def test_mistakes(mistake: tuple[str, str, str, str, str]) -> None:
    *of_sources, program = mistake
    assert said(program, SourcePatch(*of_sources)) != ""


@pytest.mark.full
@pytest.mark.parametrize("program", sorted({it[-1] for it in MISTAKES}))
def test_no_mistake(program: str) -> None:
    assert said(program, None) == ""
