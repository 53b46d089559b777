"""The timing protocol, with NumPy in the GPU's place: what is launched, judged and reported."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from flashsmith.benchmark import run_times as timing
from flashsmith.benchmark.run_times import TimedInputs, TimedSize, time_kernel
from flashsmith.configs import parse_kernel_name_into_config
from flashsmith.verify import compute_references

CFG = parse_kernel_name_into_config("(FP16, 64, 64, 64, 4): async+swizzled+load_0_0_0_tiles")
SIZE = TimedSize(batch=2, seq=64, heads=3)


class HostArray:
    """Stands for a DeviceArray."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @classmethod
    def from_host(cls, array: np.ndarray) -> HostArray:
        return cls(array)

    def to_host(self) -> np.ndarray:
        return self.array


class StandInGpu:
    """Counts launches; the n-th takes n milliseconds. `damage` spoils what it computes."""

    def __init__(self, damage=lambda o: None) -> None:
        self.damage = damage
        self.launches = 0
        self.timed = 0

    def run_forward(self, cfg, q, k, v, o=None, *, poisoned=False, timed=False):
        self.launches += 1
        self.timed += timed
        if o is None:
            assert poisoned
            scale = 1 / np.sqrt(cfg.d_head)
            result = compute_references(q.array, k.array, v.array, scale).same_precision
            self.damage(result)
            o = HostArray(result)
        return SimpleNamespace(o=o, ms=float(self.launches) if timed else None)


@pytest.fixture
def gpu(monkeypatch) -> StandInGpu:
    stand_in = StandInGpu()
    monkeypatch.setattr(timing, "run_forward", stand_in.run_forward)
    monkeypatch.setattr(timing, "DeviceArray", HostArray)
    monkeypatch.setattr(timing, "TIMED", SIZE)
    return stand_in


def test_the_median_of_the_launches_after_warming_up(gpu: StandInGpu) -> None:
    found = time_kernel(CFG, TimedInputs(seed=0))
    assert found.problems == ()
    # Launch 1 is judged, 2 to 4 warm up, 5 to 24 count.
    assert gpu.launches == 24
    assert gpu.timed == 23
    assert found.ms == 14.5
    assert found.best_ms == 5.0
    assert found.tflops == pytest.approx(4 * 2 * 3 * 64 * 64 * 64 / 14.5e-3 / 1e12)


@pytest.mark.parametrize(("batch", "head"), [(0, 0), (1, 2)])
def test_a_wrong_output_is_not_a_result(gpu: StandInGpu, batch: int, head: int) -> None:
    def damage(o: np.ndarray) -> None:
        o[batch, 17, head, 3] += 1.0

    gpu.damage = damage
    found = time_kernel(CFG, TimedInputs(seed=0))
    assert found.problems
    assert found.problems[0].startswith("the timed launch: largest error")


def test_inputs_are_made_once_per_dtype_and_head_dimension(gpu: StandInGpu, monkeypatch) -> None:
    inputs = TimedInputs(seed=0)
    first = inputs.get(CFG)
    streamed = parse_kernel_name_into_config("(FP16, 64, 64, 32, 4): load_2_2_2_tiles")
    assert inputs.get(streamed) is first
    bf16 = parse_kernel_name_into_config("(BF16, 64, 64, 64, 4): load_0_0_0_tiles")
    assert inputs.get(bf16) is not first
    assert inputs.get(CFG) is not first
