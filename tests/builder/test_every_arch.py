"""The covering set, compiled for every architecture whose GPUs are known."""

from __future__ import annotations

import pytest
from shared_kernels import with_every_value

import flashsmith.builder as builder
from flashsmith.families import DeviceSpec, FlashForwardKernelConfig, device_spec, get_cover_configs

# One here that no GPU of ours has: the others' kernels are built for 80 and 90.
ARCHS = (120, *(pytest.param(arch, marks=pytest.mark.full) for arch in (80, 86, 89, 90, 100, 103)))


@pytest.fixture(params=ARCHS, ids="sm_{}".format)
def device(request: pytest.FixtureRequest) -> DeviceSpec:
    """The GPU that stands for the architecture: of all that have it, the first known."""
    return device_spec(request.param)


def check_compiles(configs: list[FlashForwardKernelConfig], device: DeviceSpec) -> None:
    library = builder.library_for(configs, arch=device.arch)
    assert set(library.configs) >= set(configs)
    for cfg in configs:
        assert f".target sm_{device.arch}" in library.ptx(cfg)
        entry = library.entry(cfg)
        assert 0 < entry.registers <= 255
        assert cfg.num_ctas_per_sm(device.max_smem_per_sm, entry.registers) >= 1


def test_every_value_of_every_knob_compiles(device: DeviceSpec) -> None:
    """That all pairs of values compile for sm_80 is seen where the covering set is proven."""
    few = with_every_value(get_cover_configs(device))
    assert 3 < len(few) < 12
    check_compiles(few, device)


@pytest.mark.full
def test_cover_compiles(device: DeviceSpec) -> None:
    configs = get_cover_configs(device)
    assert len(configs) > 30
    check_compiles(configs, device)
