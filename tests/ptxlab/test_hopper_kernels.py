"""Hand-written Hopper kernels against NumPy, with all checks on and under random schedules."""

from __future__ import annotations

import pytest
from hopper_probes import Probe, probes, ptx_of, run_emulated

from ptxlab.checks import all_checks

PROBES = {probe.name: probe for probe in probes()}
#: float32 products; what goes through shared memory is rounded to float16 on the way.
BOUND = {"drained": 5e-4, "turns": 5e-5}


def check(probe: Probe, seed: int | None) -> None:
    run = run_emulated(probe, ptx_of(probe), observers=all_checks(), seed=seed)
    assert not run.result.findings, "\n".join(map(str, run.result.findings))
    assert probe.error(run.output, run.inputs) <= BOUND.get(probe.name, 1e-6)


@pytest.mark.parametrize("name", PROBES)
def test_a_kernel_is_right_and_clean(name: str) -> None:
    check(PROBES[name], None)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["ring_5", "multicast", "drained", "turns", "sums", "box_sums"])
def test_a_kernel_under_random_schedules(name: str, seed: int) -> None:
    check(PROBES[name], seed)


def test_without_checks_nothing_changes() -> None:
    probe = PROBES["multicast"]
    run = run_emulated(probe, ptx_of(probe))
    assert probe.error(run.output, run.inputs) <= 1e-6
    assert run.result.instructions["wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16"]
