"""Correct kernels have no findings: every config of every set, under every check."""

from __future__ import annotations

import pytest
import shared_kernels

from flashsmith.builder import build
from flashsmith.families import FlashForwardKernelConfig, get_kernel_configs
from flashsmith.verify import prove

ARCH = 80
PROGRESSION = get_kernel_configs("prog")
EVERYTHING = sorted(
    {cfg for key in ("tune", "prog", "prog-all", "cover") for cfg in get_kernel_configs(key)}
)


shared_kernels.want(PROGRESSION)


@pytest.fixture(scope="module")
def everything() -> None:
    build(EVERYTHING, arch=ARCH)


def check(config: FlashForwardKernelConfig, seq: int) -> None:
    verdict = prove(config, seq=seq, arch=ARCH, checks=True)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("config", PROGRESSION, ids=str)
def test_the_progression(config: FlashForwardKernelConfig) -> None:
    check(config, seq=256)


@pytest.mark.full
@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("config", EVERYTHING, ids=str)
def test_every_config(config: FlashForwardKernelConfig) -> None:
    check(config, seq=256)
