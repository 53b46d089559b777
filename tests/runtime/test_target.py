"""Which device a command works for, with a GPU and without."""

from __future__ import annotations

import pytest

from flashsmith.errors import ArgumentError
from flashsmith.families import device_spec, get_kernel_configs
from flashsmith.runtime import driver
from flashsmith.runtime.target import choose_target

H200 = device_spec("H200")


@pytest.fixture
def no_gpu(monkeypatch) -> None:
    monkeypatch.setattr(driver, "gpu_count", lambda: 0)


@pytest.fixture
def one_h200(monkeypatch) -> None:
    monkeypatch.setattr(driver, "gpu_count", lambda: 1)
    monkeypatch.setattr(driver, "query_gpu", lambda ordinal: H200)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_emulator_plays_an_a100() -> None:
    target = choose_target()
    assert (target.arch, target.device.name, target.backend) == ("sm_80", "A100", "emulator")
    assert str(target) == "sm_80 (A100) in the emulator"


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_wgmma_kernels_get_one_that_runs_them() -> None:
    configs = [*get_kernel_configs("hopper"), *get_kernel_configs("prog")]
    assert choose_target(configs=configs).device.name == "H100"
    assert choose_target(configs=configs[-7:]).device.name == "A100"
    assert choose_target("sm_80", configs=configs).device.name == "A100"


@pytest.mark.usefixtures("no_gpu")
def test_arch_changes_both_architecture_and_device() -> None:
    target = choose_target("sm_90")
    assert (target.arch, target.device.name, target.backend) == ("sm_90", "H100", "emulator")


@pytest.mark.usefixtures("one_h200")
def test_a_gpu_is_used() -> None:
    assert choose_target().backend == "gpu"
    assert choose_target().device == H200
    assert choose_target("sm_90").device == H200
    assert choose_target("90").backend == "gpu"


@pytest.mark.usefixtures("one_h200")
def test_another_architecture_than_the_gpus_goes_to_the_emulator() -> None:
    assert choose_target("sm_80").backend == "emulator"


@pytest.mark.usefixtures("one_h200")
def test_the_emulator_on_request() -> None:
    assert choose_target(emulate=True).backend == "emulator"
    assert choose_target(emulate=True).device == H200


def test_an_unknown_arch_is_refused() -> None:
    with pytest.raises(ArgumentError, match="known are A100"):
        choose_target("sm_35")
