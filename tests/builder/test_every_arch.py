"""The covering set, compiled for every architecture whose GPUs are known."""

from __future__ import annotations

import pytest

import flashsmith.builder as builder
from flashsmith.configs import DeviceSpec, device_spec, get_cover_configs

ARCHS = (80, 86, 89, 90, 100, 120)


@pytest.fixture(params=ARCHS, ids="sm_{}".format)
def device(request: pytest.FixtureRequest) -> DeviceSpec:
    """The GPU that stands for the architecture: of all that have it, the first known."""
    return device_spec(request.param)


def test_cover_compiles(device: DeviceSpec, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path))
    configs = get_cover_configs(device)
    library = builder.build(configs, arch=device.arch)
    assert list(library.configs) == sorted(configs)
    assert len(configs) > 30
    for cfg in configs:
        assert f".target sm_{device.arch}" in library.ptx(cfg)
        entry = library.entry(cfg)
        assert 0 < entry.registers <= 255
        assert cfg.num_ctas_per_sm(device.max_smem_per_sm, entry.registers) >= 1
