"""Runs kernels: forward(cfg, q, k, v) on the GPU or, for host tensors, in the emulator."""

from flashsmith.runtime.driver import gpu_count, query_gpu
from flashsmith.runtime.forward_pass import (
    DEFAULT_EMULATED_ARCH,
    Chooser,
    ForwardResult,
    forward,
    forward_timed,
    plan_forward,
    run_forward,
    run_request,
)
from flashsmith.runtime.launches import Launches, count_launches, launch_count
from flashsmith.runtime.options import ForwardOptions
from flashsmith.runtime.plan import LaunchPlan, TensorMapSpec

__all__ = [
    "DEFAULT_EMULATED_ARCH",
    "Chooser",
    "ForwardOptions",
    "ForwardResult",
    "LaunchPlan",
    "Launches",
    "TensorMapSpec",
    "count_launches",
    "forward",
    "forward_timed",
    "gpu_count",
    "launch_count",
    "plan_forward",
    "query_gpu",
    "run_forward",
    "run_request",
]
