"""Tiles of the wgmma family handed out in every way, proven with all checks on.

Few SMs, so that every CTA has several tiles; lengths that leave a cluster's second CTA without rows
in some of them, and warpgroups without keys.
"""

from __future__ import annotations

from typing import Any

import pytest
import shared_kernels

from flashsmith.families import (
    Semantics,
    WgmmaForwardKernelConfig,
    parse_kernel_name_into_config,
)
from flashsmith.verify import prove

CONFIGS = tuple(
    parse_kernel_name_into_config(text)
    for text in (
        "(FP16, 64, 128, 32, 2wg): tma+stages_2+q_buffers_2+regs_40_232+pingpong_gemm+cluster_2"
        "+dynamic+rescale_8",
        "(BF16, 64, 64, 64, 1wg): tma+stages_3+q_buffers_1+regs_40_240+overlap+cluster_2+dynamic"
        "+longest_first+section_1+early_exp",
        "(FP16, 64, 64, 32, 1wg): tma+stages_1+q_buffers_1+regs_40_240+cluster_2"
        "+static_persistent+separate_O",
        "(FP16, 64, 64, 48, 1wg): tma+stages_4+q_buffers_2+regs_40_240+cluster_2+exp2_fma_30",
        "(FP16, 64, 64, 64, 1wg): tma+stages_2+q_buffers_2+regs_24_136+dynamic+longest_first"
        "+section_1+ctas_3+exp2_fma_50",
    )
)
IDS = [cfg.short_form(include_tup=False) for cfg in CONFIGS]
CLUSTERS = [cfg for cfg in CONFIGS if cfg.cluster_size > 1]
PLAIN = Semantics(uneven=True)
CAUSAL = Semantics(mask="causal", uneven=True)
PACKED = Semantics(mask="causal", packed=True, uneven=True)


shared_kernels.want(CONFIGS, PLAIN)
CAUSAL_TOO = [cfg for cfg in CONFIGS if cfg in CLUSTERS[:2] or cfg.section_mib == 1]
shared_kernels.want(CAUSAL_TOO, CAUSAL)
shared_kernels.want(CLUSTERS[:2], PACKED)


def prove_right(cfg: WgmmaForwardKernelConfig, **problem: Any) -> None:
    verdict = prove(cfg, arch=90, checks=True, sm_count=4, row_max=False, **problem)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize(
    ("causal", "cfg"),
    [
        pytest.param(
            *(causal, cfg),
            id=f"{causal}-{name}",
            marks=[pytest.mark.full] * (causal and cfg not in CAUSAL_TOO),
        )
        for causal in (False, True)
        for cfg, name in zip(CONFIGS, IDS, strict=True)
    ],
)
def test_tiles_that_one_sm_has_several_of(cfg: WgmmaForwardKernelConfig, causal: bool) -> None:
    prove_right(cfg, seq=330, seq_k=100, heads=2, heads_k=1, causal=causal)


@pytest.mark.parametrize("cfg", CLUSTERS[:2], ids=IDS[:2])
def test_under_a_random_schedule(cfg: WgmmaForwardKernelConfig) -> None:
    prove_right(cfg, seq=200, heads=3, causal=True, schedule_seed=1)


@pytest.mark.parametrize("cfg", CLUSTERS[:2], ids=IDS[:2])
def test_sequences_shorter_than_a_group(cfg: WgmmaForwardKernelConfig) -> None:
    lengths = (70, 0, 1, 300), (70, 9, 0, 200)
    prove_right(cfg, lens_q=lengths[0], lens_k=lengths[1], heads=2, causal=True)


@pytest.mark.parametrize("cfg", CONFIGS[3:], ids=IDS[3:])
def test_maxima_that_rise(cfg: WgmmaForwardKernelConfig) -> None:
    prove_right(cfg, seq=128, heads=1, inputs="low_first_tile")


@pytest.mark.parametrize("cfg", [cfg for cfg in CONFIGS if cfg.section_mib == 1], ids=str)
def test_the_last_head_group_may_have_fewer_heads(cfg: WgmmaForwardKernelConfig) -> None:
    """Two heads' keys fill a group and there is a third head."""
    keys = 2000
    assert 2 <= (cfg.section_mib << 20) / (2 * keys * cfg.d_head * 2) < 3
    rows = cfg.cluster_size * cfg.B_r + 2
    verdict = prove(cfg, seq=rows, seq_k=keys, heads=3, causal=True, arch=90, sm_count=4)
    assert verdict.ok, str(verdict)
