"""The covering set, compiled for every architecture whose GPUs are known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import flashsmith.builder as builder
from flashsmith.families import DeviceSpec, FlashForwardKernelConfig, device_spec, get_cover_configs

ARCHS = (80, 86, 89, 90, 100, pytest.param(103, marks=pytest.mark.full), 120)


@pytest.fixture(params=ARCHS, ids="sm_{}".format)
def device(request: pytest.FixtureRequest) -> DeviceSpec:
    """The GPU that stands for the architecture: of all that have it, the first known."""
    return device_spec(request.param)


def values(cfg: FlashForwardKernelConfig) -> set[tuple[str, object]]:
    return {(name, getattr(cfg, name)) for name in cfg.__dataclass_fields__}


def with_every_value(
    configs: Sequence[FlashForwardKernelConfig],
) -> list[FlashForwardKernelConfig]:
    """Few of the configs, in which every knob has every value it has in all."""
    missing, chosen = set[tuple[str, object]]().union(*map(values, configs)), []
    while missing:
        chosen.append(max(configs, key=lambda cfg: len(values(cfg) & missing)))
        missing -= values(chosen[-1])
    return chosen


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
