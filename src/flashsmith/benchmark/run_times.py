"""Times a kernel on the GPU, and judges the very output that was timed."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import numpy as np

from flashsmith.configs import DType, FlashForwardKernelConfig, Problem
from flashsmith.runtime import run_forward
from flashsmith.runtime.device_array import DeviceArray
from flashsmith.verify import References, compare, compute_references
from flashsmith.verify.inputs import default_scale, numpy_dtype


@dataclass(frozen=True)
class TimedSize:
    """The problem that is timed."""

    batch: int = 16
    seq: int = 4096
    heads: int = 16


TIMED = TimedSize()
WARM_UP_LAUNCHES = 3
TIMED_LAUNCHES = 20


@dataclass(frozen=True)
class Timing:
    """Median and best time of the launches; FLOP are those of the two products, 4 b h s^2 d.

    `problems` is what was wrong with the timed output, empty when it is right.
    """

    ms: float
    best_ms: float
    tflops: float
    problems: tuple[str, ...]


@dataclass(frozen=True)
class _OnGpu:
    """q, k, v on the GPU, and the references of the first and the last head."""

    qkv: tuple[DeviceArray, DeviceArray, DeviceArray]
    references: References


@dataclass
class TimedInputs:
    """The tensors that kernels are timed on, made once per dtype and head dimension."""

    seed: int
    _made: dict[tuple[DType, int], _OnGpu] = field(default_factory=dict)

    def get(self, cfg: FlashForwardKernelConfig) -> _OnGpu:
        """The tensors for a config, on GPU 0."""
        key = (cfg.dtype, cfg.d_head)
        if key not in self._made:
            # Others' tensors leave the GPU first: three of them take close to a gigabyte.
            self._made.clear()
            self._made[key] = self._make(cfg)
        return self._made[key]

    def _make(self, cfg: FlashForwardKernelConfig) -> _OnGpu:
        rng = np.random.default_rng(self.seed)
        shape = (TIMED.batch, TIMED.seq, TIMED.heads, cfg.d_head)
        host = [
            rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(cfg.dtype))
            for _ in range(3)
        ]
        q_heads, k_heads, v_heads = map(sampled_heads, host)
        references = compute_references(q_heads, k_heads, v_heads, default_scale(cfg.d_head))
        q, k, v = (DeviceArray.from_host(array) for array in host)
        return _OnGpu((q, k, v), references)


def sampled_heads(tensor: np.ndarray) -> np.ndarray:
    """The first head of the first batch and the last of the last, as two batches of one head."""
    return np.stack([tensor[0, :, :1], tensor[-1, :, -1:]])


def time_kernel(cfg: FlashForwardKernelConfig, inputs: TimedInputs) -> Timing:
    """Launches the kernel on TIMED, judges two heads of its output, then times it.

    Raises LaunchError when the GPU refuses or fails a launch.
    """
    on_gpu = inputs.get(cfg)
    q, k, v = on_gpu.qkv
    result = run_forward(cfg, q, k, v, poisoned=True)
    comparison = compare(cfg, sampled_heads(result.o.to_host()), None, on_gpu.references)
    times = [
        run_forward(cfg, q, k, v, result.o, timed=True).ms
        for _ in range(WARM_UP_LAUNCHES + TIMED_LAUNCHES)
    ][WARM_UP_LAUNCHES:]
    milliseconds = [ms for ms in times if ms is not None]
    ms = statistics.median(milliseconds)
    problem = Problem(
        TIMED.batch, TIMED.seq, TIMED.seq, TIMED.heads, TIMED.heads, cfg.d_head, cfg.dtype
    )
    return Timing(
        ms=ms,
        best_ms=min(milliseconds),
        tflops=problem.attn_flop() / ms / 1e9,
        problems=tuple(f"the timed launch: {reason}" for reason in comparison.reasons),
    )
