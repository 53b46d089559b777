"""A warpgroup's last block ends where its rows' keys do: fewer keys are multiplied."""

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

# Blocks of 1 to 5 steps, GEMMs under the softmax; and of 2 or 3, with maxima that may be stale.
FINE = wgmma_config(
    "(FP16, 64, 128, 80, 2wg): tma+stages_2+q_buffers_2+regs_24_240+overlap+pingpong_gemm+dynamic"
    "+rescale_8+short_16"
)
COARSE = wgmma_config(
    "(BF16, 64, 128, 48, 2wg): tma+stages_2+q_buffers_1+regs_24_240+static_persistent+rescale_8"
    "+stale_max+short_32"
)
WHOLE_FINE, WHOLE_COARSE = (replace(cfg, short_block=0) for cfg in (FINE, COARSE))
UNEVEN = Semantics(uneven=True)
CAUSAL = Semantics("causal", uneven=True)
WINDOW = Semantics("window", uneven=True)
PACKED = Semantics("causal", packed=True, uneven=True)
KERNELS = {
    UNEVEN: [FINE, WHOLE_FINE],
    CAUSAL: [COARSE, WHOLE_COARSE],
    WINDOW: [COARSE],
    PACKED: [COARSE],
}
for computed, configs in KERNELS.items():
    shared_kernels.want(configs, computed)
ENDS = [
    *({"seq": 100, "seq_k": 240 + keys} for keys in (1, 33, 79)),
    {"seq": 200, "seq_k": 16},  # one short block, and no other
]
DIAGONALS = [
    {"seq": 203, "seq_k": 203, "causal": True},
    {"seq": 200, "seq_k": 131, "causal": True},  # rows without keys
]
PACKED_CALL = {"lens_q": (70, 0, 1, 150), "lens_k": (70, 9, 0, 200), "causal": True}
QUICK = [
    *((FINE, UNEVEN, problem) for problem in ENDS),
    *((COARSE, CAUSAL, problem) for problem in DIAGONALS),
    (COARSE, PACKED, PACKED_CALL),
    (COARSE, WINDOW, {"seq": 200, "seq_k": 260, "window": (90, 20)}),
]
OF_FULL = [
    *((COARSE, UNEVEN, problem) for problem in ENDS),
    *((FINE, CAUSAL, problem) for problem in DIAGONALS),
]


@pytest.mark.parametrize(
    ("cfg", "semantics", "problem"),
    full_after(len(QUICK), [*QUICK, *OF_FULL]),
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_outputs_are_right_and_nothing_is_found(
    cfg: WgmmaForwardKernelConfig, semantics: Semantics, problem: dict[str, Any]
) -> None:
    shared_kernels.load([cfg], semantics)
    verdict = prove(cfg, **problem, row_max=False, checks=True, sm_count=2)
    assert verdict.ok, str(verdict)


def run(
    cfg: WgmmaForwardKernelConfig, seq: int, seq_k: int, *, causal: bool
) -> tuple[np.ndarray, Counter[int]]:
    """The LSE, and how often a wgmma of each number of columns was executed."""
    rng = np.random.default_rng(0)
    dtype = numpy_dtype(cfg.dtype)
    q, k, v = (
        rng.standard_normal((1, length, 1, cfg.d_head)).astype(dtype)
        for length in (seq, seq_k, seq_k)
    )
    device = replace(device_spec(90), sm_count=1)
    done = run_forward(cfg, q, k, v, causal=causal, return_lse=True, emulate=True, arch=device)
    assert done.emulation is not None
    columns: Counter[int] = Counter()
    for name, count in done.emulation.instructions.items():
        if name.startswith("wgmma.mma_async"):
            columns[int(name.split("m64n")[1].split("k16")[0])] += count
    return np.asarray(done.lse), columns


def assert_same(lse: np.ndarray, expected: np.ndarray) -> None:
    """But for the last bits: NumPy adds up products of other shapes in another order on some
    processors."""
    np.testing.assert_allclose(lse, expected, rtol=1e-6)


def test_only_the_steps_that_hold_visible_keys_are_multiplied() -> None:
    # 256 keys: three blocks of 80, and one of 16.
    shared_kernels.load(KERNELS[UNEVEN], UNEVEN)
    lse, columns = run(FINE, 128, 256, causal=False)
    expected, all_columns = run(WHOLE_FINE, 128, 256, causal=False)
    assert_same(lse, expected)
    assert all_columns[80] % 4 == 0
    assert (columns[80], columns[16]) == (all_columns[80] // 4 * 3, all_columns[80] // 4)
    # Of PV GEMMs 5 + 5 + 5 + 1 steps instead of 20.
    assert columns[64] * 20 == all_columns[64] * 16
    # On the diagonal the first warpgroup sees 64 keys of 96, the second 128 of 144.
    shared_kernels.load(KERNELS[CAUSAL], CAUSAL)
    lse, columns = run(COARSE, 128, 128, causal=True)
    expected, all_columns = run(WHOLE_COARSE, 128, 128, causal=True)
    assert_same(lse, expected)
    # 16 keys of the second block, in a unit of 32, and 32 of the third: 1 + 2 blocks stay whole.
    assert (columns[48], columns[32]) == (all_columns[48] // 5 * 3, all_columns[48] // 5 * 2)
    assert columns[64] * 15 == all_columns[64] * (3 + 2 + 6 + 2)
