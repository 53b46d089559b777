"""How many exponentials a GPU computes."""

from __future__ import annotations

import ctypes

import numpy as np

from flashsmith.benchmark.roofline.microbenchmark import (
    Machine,
    Microbenchmark,
    Running,
    check_error,
)

# As csrc/roofline/exp2.cu has them.
THREADS = 512
CHAINS = 8
MIRROR = -8.0

_CHECKED_TURNS = 5
_ERROR_BOUND = 1e-5  # ex2.approx is within 2 units in the last place of fp32
_SEED = 21


class Exponentials(Running):
    """ex2.approx on every SM with as many threads as it holds; operands as a softmax has them."""

    def __init__(self, machine: Machine) -> None:
        device = machine.device
        self.ctas = device.sm_count * (device.max_threads_per_sm // THREADS)
        self.work = self.ctas * THREADS * CHAINS
        rng = np.random.default_rng(_SEED)
        self.x = rng.uniform(MIRROR, 0.0, (self.ctas * THREADS, CHAINS)).astype(np.float32)
        self._x = machine.array(self.x)
        self._sums = machine.array(np.full_like(self.x, np.nan))
        self._kernel = machine.kernel("exp2", "exp2_rate")

    def launch(self, turns: int) -> None:
        self._kernel.launch(self.ctas, THREADS, self._x, self._sums, ctypes.c_int(turns))

    def check(self) -> float:
        self.launch(_CHECKED_TURNS)
        x = self.x.astype(np.float64)
        odd = _CHECKED_TURNS // 2
        expected = (_CHECKED_TURNS - odd) * np.exp2(x) + odd * np.exp2(MIRROR - x)
        error = np.abs(self._sums.to_host() - expected) / expected
        return check_error(float(np.max(error)), _ERROR_BOUND)


EXPONENTIALS = (Microbenchmark("exp2", "Gop/s", "exp2", Exponentials),)
