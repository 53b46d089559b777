"""Rescaling lazily costs no accuracy: a key that has much of a row's weight is weighted exactly."""

from __future__ import annotations

import numpy as np
import pytest
import shared_kernels
from plain_run import full_except

from flashsmith.families import DType, KernelConfig, Semantics
from flashsmith.families import parse_kernel_name_into_config as parse
from flashsmith.runtime import forward
from flashsmith.verify import prove
from flashsmith.verify.proof_inputs import numpy_dtype

MMA_SYNC = (
    parse("(FP16, 64, 64, 32, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax+lazy_rescale"),
    parse("(BF16, 64, 128, 64, 4): async+eager+swizzled+load_2_2_2_tiles+stages_2+lazy_rescale"),
)
WGMMA = (
    parse("(FP16, 64, 128, 64, 2wg): tma+stages_2+q_buffers_1+regs_32_232+rescale_8"),
    parse("(BF16, 64, 128, 64, 2wg): tma+stages_2+q_buffers_1+regs_32_232+overlap+rescale_8"),
)
ROUNDED = parse(
    "(FP16, 96, 128, 32, 8): async+eager+swizzled+load_2_2_2_tiles+stages_3+lazy_rescale+ping_pong"
)
# Half the distance of neighbours in [0.5, 1), and what fp32 adds.
HALF_STEP = {DType.FP16: 2.0**-12, DType.BF16: 2.0**-9}
FP32_ERROR = 1e-6


# Of each family the plain run has one.
shared_kernels.want([MMA_SYNC[0], WGMMA[0]])
shared_kernels.want([ROUNDED], Semantics(mask="window", uneven=True))


@pytest.mark.parametrize("cfg", full_except([*MMA_SYNC, *WGMMA], MMA_SYNC[0], WGMMA[0]), ids=str)
def test_a_key_that_outweighs_the_others_has_weight_one(cfg: KernelConfig) -> None:
    """The first key is visited last; by then each row's maximum lies some way, up to 2^8, below."""
    rows, keys, d = cfg.B_r, 4 * cfg.B_c, cfg.d_head
    dtype = numpy_dtype(cfg.dtype)
    q = np.zeros((1, rows, 1, d), dtype)
    q[0, :, 0, 0] = np.linspace(0.1, 7.9, rows)
    k = np.zeros((1, keys, 1, d), dtype)
    v = np.zeros((1, keys, 1, d), dtype)
    k[0, 0, 0, 0], v[0, 0] = 1.0, 1.0
    # All other keys but the last have next to no weight.
    k[0, 1:-1, 0, 1], q[..., 1] = -200.0, 1.0
    o = forward(cfg, q, k, v, scale=np.log(2.0), emulate=True)
    expected = 1.0 / (1.0 + np.exp2(-q[0, :, 0, 0].astype(np.float64)))
    error = np.abs(np.asarray(o)[0, :, 0].astype(np.float64) - expected[:, None])
    assert error.max() <= HALF_STEP[cfg.dtype] + FP32_ERROR


@pytest.mark.parametrize("cfg", [MMA_SYNC[0], WGMMA[0]], ids=str)
def test_maxima_that_grow_as_fast_as_sums_do_are_caught_up_with(cfg: KernelConfig) -> None:
    """Of the two bounds on what maxima may grow by, the one on growth alone holds here: without it
    probabilities leave fp16 after 16 octaves."""
    verdict = prove(cfg, seq=cfg.B_r, seq_k=24 * cfg.B_c, inputs="growing_maxima", row_max=False)
    assert verdict.ok, str(verdict)


def test_a_problem_whose_largest_weights_were_rounded() -> None:
    """Many keys of some weight: with the growth of a maximum alone for a measure, the largest error
    is 4% above its bound."""
    verdict = prove(ROUNDED, seq=1024, seq_k=1023, heads=6, heads_k=1, window=(None, 355))
    assert verdict.ok, str(verdict)
    assert verdict.max_error < 0.6 * verdict.bound
