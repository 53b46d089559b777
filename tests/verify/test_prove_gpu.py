"""Real kernels, proven on a GPU, and against the emulator running the same PTX."""

from __future__ import annotations

import numpy as np
import pytest

from flashsmith.builder import library_for
from flashsmith.families import (
    DType,
    FlashForwardKernelConfig,
    get_cover_configs,
    get_kernel_configs,
    get_kernel_progression_configs,
)
from flashsmith.runtime import query_gpu, run_forward
from flashsmith.runtime.frameworks.device_array import DeviceArray
from flashsmith.runtime.libraries import loaded_kernels
from flashsmith.verify import INPUT_KINDS, TILE_KINDS, InputSpec, make_inputs, prove
from flashsmith.verify.proof_inputs import default_scale

pytestmark = pytest.mark.gpu


def built_together(configs: list[FlashForwardKernelConfig]) -> list[FlashForwardKernelConfig]:
    """The same configs, their kernels loaded from one library for this GPU."""
    loaded_kernels.add(library_for(configs, arch=query_gpu(0).arch))
    return configs


def assert_right(configs: list[FlashForwardKernelConfig], seq: int, kind: str) -> None:
    for cfg in built_together(configs):
        if kind not in TILE_KINDS or seq > cfg.B_c:
            verdict = prove(cfg, seq=seq, heads=2, inputs=kind, backend="gpu")
            assert verdict.ok, str(verdict)
            assert verdict.arch == query_gpu(0).arch


@pytest.mark.parametrize("kind", INPUT_KINDS)
@pytest.mark.parametrize("seq", [128, 1024])
def test_the_progression_is_right(seq: int, kind: str) -> None:
    assert_right(get_kernel_progression_configs(), seq, kind)


@pytest.mark.parametrize("seq", [128, 256, 512])
def test_a_covering_set_is_right(seq: int) -> None:
    assert_right(get_cover_configs(), seq, "random")


def test_emulator_and_gpu_agree_on_identical_ptx() -> None:
    arch = query_gpu(0).arch
    for cfg in built_together(get_cover_configs()):
        scale = default_scale(cfg.d_head)
        drawn = make_inputs(InputSpec("random", cfg.dtype, 1, 256, 256, 1, cfg.d_head, scale))
        qkv = (drawn.q, drawn.k, drawn.v)
        emulated = run_forward(cfg, *qkv, arch=arch, emulate=True, return_lse=True)
        computed = run_forward(cfg, *map(DeviceArray.from_host, qkv), return_lse=True)
        ours, theirs = emulated.o.astype(np.float64), computed.o.to_host().astype(np.float64)
        relative = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        assert relative <= (1e-3 if cfg.dtype is DType.FP16 else 5e-3), str(cfg)
        np.testing.assert_allclose(emulated.lse, computed.lse.to_host(), atol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("seq", [128, 256, 512, 1024, 2048, 4096])
@pytest.mark.parametrize("name", ["tune", "prog-all", "cover"])
def test_every_config_is_right(name: str, seq: int) -> None:
    assert_right(get_kernel_configs(name), seq, "random")


@pytest.mark.full
@pytest.mark.parametrize("kind", INPUT_KINDS[1:])
@pytest.mark.parametrize("name", ["tune", "prog-all", "cover"])
def test_every_config_is_right_on_hard_inputs(name: str, kind: str) -> None:
    assert_right(get_kernel_configs(name), 256, kind)
