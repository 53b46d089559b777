"""What a length that is no whole number of tiles costs: one block's mask, and nothing in others."""

from __future__ import annotations

from collections import Counter

import pytest
import shared_kernels
from hopper_plans import wgmma_config
from plain_run import full_except

from flashsmith.families import Semantics, WgmmaForwardKernelConfig
from flashsmith.verify import prove

CONFIGS = [
    wgmma_config(text)
    for text in (
        "(FP16, 64, 64, 32, 1wg): tma+stages_2+q_buffers_1+regs_24_240+dynamic",
        "(BF16, 64, 128, 32, 2wg): tma+stages_2+q_buffers_2+regs_32_232+overlap+pingpong_gemm"
        "+dynamic+rescale_8",
        "(FP16, 64, 128, 32, 2wg): tma+stages_2+q_buffers_2+regs_32_232+pingpong_gemm+dynamic"
        "+rescale_8+stale_max",
    )
]
# Of the plain run: GEMMs under the softmax, and in turns.
OVERLAP = CONFIGS[1]
for uneven in (False, True):
    shared_kernels.want([OVERLAP], Semantics(uneven=uneven))
FEW, MANY = 4, 7


def of_more_blocks(config: WgmmaForwardKernelConfig, missing: int) -> Counter[str]:
    """Instructions of warps, by mnemonic, that MANY blocks take and FEW do not; the last block
    lacks some keys."""
    few, many = (
        prove(config, seq=config.B_r, seq_k=blocks * config.B_c - missing, heads=1, sm_count=1)
        for blocks in (FEW, MANY)
    )
    assert few.ok
    assert many.ok
    assert few.problem.semantics.uneven == bool(missing)
    assert few.emulation is not None
    assert many.emulation is not None
    counts = Counter(many.emulation.instructions)
    counts.subtract(few.emulation.instructions)
    return counts


@pytest.mark.parametrize("config", full_except(CONFIGS, OVERLAP), ids=str)
def test_only_one_block_is_masked(config: WgmmaForwardKernelConfig) -> None:
    whole, ragged = of_more_blocks(config, 0), of_more_blocks(config, 1)
    floats = {mnemonic for mnemonic in whole | ragged if "f32" in mnemonic}
    assert len(floats) > 8
    assert {m: whole[m] for m in floats} == {m: ragged[m] for m in floats}
    assert ragged.total() <= 1.01 * whole.total()
