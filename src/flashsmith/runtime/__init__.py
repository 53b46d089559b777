"""Runs kernels: forward(cfg, q, k, v) on the GPU or, for host tensors, in the emulator."""

from flashsmith.runtime.backward_pass import (
    BackwardAhead,
    Gradients,
    run_backward,
    run_gradients,
)
from flashsmith.runtime.cached_calls import forget_cached_launches
from flashsmith.runtime.driver import gpu_count, query_gpu
from flashsmith.runtime.forward_pass import (
    ForwardResult,
    forward,
    forward_timed,
    plan_forward,
    run_call,
    run_forward,
)
from flashsmith.runtime.kernel_choice import DEFAULT_EMULATED_ARCH, Chooser
from flashsmith.runtime.launch_counter import Launches, count_launches, launch_count
from flashsmith.runtime.launch_plan import LaunchPlan, TensorMapSpec
from flashsmith.runtime.operation_run import prepare_operation, run_operation
from flashsmith.runtime.prepared_call import OperationResult
from flashsmith.semantics.signature import ForwardOptions

# The alias that earlier documentation uses.
forget_prepared_calls = forget_cached_launches

__all__ = [
    "DEFAULT_EMULATED_ARCH",
    "BackwardAhead",
    "Chooser",
    "ForwardOptions",
    "ForwardResult",
    "Gradients",
    "LaunchPlan",
    "Launches",
    "OperationResult",
    "TensorMapSpec",
    "count_launches",
    "forget_cached_launches",
    "forget_prepared_calls",
    "forward",
    "forward_timed",
    "gpu_count",
    "launch_count",
    "plan_forward",
    "prepare_operation",
    "query_gpu",
    "run_backward",
    "run_call",
    "run_forward",
    "run_gradients",
    "run_operation",
]
