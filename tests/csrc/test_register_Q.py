"""Some steps of Q K^T read Q from registers: the same products, less of shared memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import shared_kernels
from hopper_plans import wgmma_config
from plain_run import full_after

from flashsmith.families import Semantics, WgmmaForwardKernelConfig, device_spec
from flashsmith.runtime import run_forward
from flashsmith.verify import prove
from flashsmith.verify.proof_inputs import numpy_dtype

# Every second step of eight in panels of 64 columns, GEMMs under the softmax; all six of panels of
# 32 do not divide by four, all four of 64 columns do, with maxima that may be stale.
HALF = wgmma_config(
    "(FP16, 128, 128, 64, 2wg): tma+stages_2+q_buffers_1+regs_24_240+overlap+dynamic+rescale_8"
    "+direct_O+register_Q_4"
)
ALL = wgmma_config(
    "(BF16, 64, 128, 48, 2wg): tma+stages_2+q_buffers_2+regs_24_240+static_persistent+rescale_8"
    "+stale_max+register_Q_4"
)
NONE_OF_HALF, NONE_OF_ALL = (replace(cfg, register_Q=0) for cfg in (HALF, ALL))
PLAIN = Semantics()
CAUSAL = Semantics("causal", uneven=True)
PLAIN_KERNELS = [HALF, NONE_OF_HALF, ALL, NONE_OF_ALL]
shared_kernels.want(PLAIN_KERNELS, PLAIN)
shared_kernels.want([HALF], CAUSAL)


@pytest.mark.parametrize(
    ("cfg", "semantics", "problem"),
    full_after(
        3,
        [
            (HALF, PLAIN, {"seq": 256, "seq_k": 192}),
            (HALF, CAUSAL, {"seq": 203, "seq_k": 203}),
            (ALL, PLAIN, {"seq": 256, "seq_k": 192}),
            (ALL, CAUSAL, {"seq": 203, "seq_k": 203}),
            *((cfg, CAUSAL, {"seq": 200, "seq_k": 131}) for cfg in (HALF, ALL)),  # unseeing rows
        ],
    ),
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_outputs_are_right_and_nothing_is_found(
    cfg: WgmmaForwardKernelConfig, semantics: Semantics, problem: dict[str, Any]
) -> None:
    shared_kernels.load([cfg], semantics)
    causal = semantics is CAUSAL
    verdict = prove(cfg, **problem, causal=causal, row_max=False, checks=True, sm_count=2)
    assert verdict.ok, str(verdict)


def run(cfg: WgmmaForwardKernelConfig) -> tuple[np.ndarray, np.ndarray, Counter[str]]:
    """O and LSE of three tiles on one SM, and how often each instruction was executed."""
    rng = np.random.default_rng(0)
    dtype = numpy_dtype(cfg.dtype)
    q, k, v = (
        rng.standard_normal((1, length, 1, cfg.d_head)).astype(dtype) for length in (384, 192, 192)
    )
    device = replace(device_spec(90), sm_count=1)
    done = run_forward(cfg, q, k, v, return_lse=True, emulate=True, arch=device)
    assert done.emulation is not None
    return np.asarray(done.o), np.asarray(done.lse), Counter(done.emulation.instructions)


@pytest.mark.parametrize(("cfg", "without"), [(HALF, NONE_OF_HALF), (ALL, NONE_OF_ALL)])
def test_bits_and_products_are_those_without_and_q_is_loaded_once_a_tile(
    cfg: WgmmaForwardKernelConfig, without: WgmmaForwardKernelConfig
) -> None:
    shared_kernels.load(PLAIN_KERNELS, PLAIN)
    o, lse, instructions = run(cfg)
    expected_o, expected_lse, before = run(without)
    assert (o == expected_o).all()
    assert (lse == expected_lse).all()

    def total(counts: Counter[str], start: str) -> int:
        return sum(count for name, count in counts.items() if name.startswith(start))

    assert total(instructions, "wgmma.mma_async") == total(before, "wgmma.mma_async") > 0
    # Three tiles of eight consumer warps each.
    assert total(instructions, "ldmatrix") - total(before, "ldmatrix") == 3 * 8 * cfg.register_Q
