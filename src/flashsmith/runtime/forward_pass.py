"""forward(cfg, q, k, v): one forward pass by one named kernel, wherever the tensors are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from flashsmith.configs import DeviceSpec, FlashForwardKernelConfig, Problem, device_spec
from flashsmith.emulator import EmulationResult, Observer
from flashsmith.errors import ArgumentError
from flashsmith.runtime import driver, forks
from flashsmith.runtime.allocation import address_of, allocate, host_array
from flashsmith.runtime.arguments import (
    check_config,
    check_device,
    check_inputs,
    check_output,
    check_scale,
)
from flashsmith.runtime.call import ForwardCall, tensor_ints, unplaced_call
from flashsmith.runtime.emulation import check_estimate, run_in_emulator
from flashsmith.runtime.gpu import run_on_gpu
from flashsmith.runtime.libraries import LoadedKernel, loaded_kernels
from flashsmith.runtime.plan import LaunchPlan
from flashsmith.runtime.tensors import TensorView, view_tensor

# What the emulator runs for when nobody says otherwise.
DEFAULT_EMULATED_ARCH = 80


@dataclass(frozen=True)
class ForwardResult:
    """o and, if asked for, lse in the caller's framework; ms on the GPU if timed; else None."""

    o: Any
    lse: Any
    ms: float | None
    emulation: EmulationResult | None


def forward(
    cfg: FlashForwardKernelConfig,
    q: Any,
    k: Any,
    v: Any,
    o: Any = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    emulate: bool = False,
) -> Any:
    """softmax(scale q k^T) v by the kernel that ``cfg`` names.

    Tensors on a GPU run there, on PyTorch's current stream for their device, and the call does not
    wait; host tensors run in the emulator (as on sm_80). A config that is not built is built first.

    Args:
        cfg: the kernel; its dtype, d_head and tiles must fit the tensors.
        q: (batch, seq_q, n_heads, d_head), fp16 or bf16, a PyTorch tensor or a NumPy array (bf16
            as ml_dtypes.bfloat16). Last dimension contiguous, every row 16-byte aligned.
        k, v: (batch, seq_k, n_heads, d_head), like q.
        o: where to write the output, q's shape and dtype; None allocates it.
        scale: finite and > 0; None is 1/sqrt(d_head).
        return_lse: also return log(sum(exp(scale q k^T))), fp32, (batch, n_heads, seq_q).
        emulate: run host tensors in the emulator even when that is estimated above 60 s.

    Returns:
        o, or (o, lse), like q in framework and device.

    Raises:
        ArgumentError: an argument is unusable; nothing was launched.
        IllegalConfigError: no kernel can be built for the config on this device.
        KernelNotBuiltError: it is not built and FLASHSMITH_JIT=0.
        EmulationTooLongError: the estimate for the emulator is above 60 s and emulate is False.
        LaunchError: the GPU refused the launch.
    """
    result = run_forward(cfg, q, k, v, o, scale=scale, return_lse=return_lse, emulate=emulate)
    return (result.o, result.lse) if return_lse else result.o


def forward_timed(
    cfg: FlashForwardKernelConfig,
    q: Any,
    k: Any,
    v: Any,
    o: Any = None,
    *,
    scale: float | None = None,
    emulate: bool = False,
) -> tuple[Any, float | None]:
    """``forward`` and the kernel's own time: (o, ms).

    On a GPU the call waits, and ms is the time between two events around the launch. On the host
    ms is None: the emulator's time says nothing about the kernel's.
    """
    result = run_forward(cfg, q, k, v, o, scale=scale, emulate=emulate, timed=True)
    return result.o, result.ms


def plan_forward(
    config: FlashForwardKernelConfig, problem: Problem, device: DeviceSpec
) -> LaunchPlan:
    """The launch of ``config``'s kernel for dense tensors of ``problem`` on ``device``.

    Asks no GPU: ``device`` may be one this machine lacks. The tensors' addresses in the argument
    bytes are 0. A config that is not built for ``device.arch`` is built first.

    Raises ArgumentError when config, problem and device do not fit together, and what building
    raises.
    """
    check_config(config)
    if problem.dtype != config.dtype:
        raise ArgumentError(
            f"problem: dtype {problem.dtype.name}; the config's kernel is for {config.dtype.name}"
        )
    _check_once(config, device)
    kernel = loaded_kernels.get(config, device.arch)
    return kernel.plan(unplaced_call(problem, check_scale(None, problem.d), device))


def run_forward(
    cfg: FlashForwardKernelConfig,
    q: Any,
    k: Any,
    v: Any,
    o: Any = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    emulate: bool = False,
    timed: bool = False,
    poisoned: bool = False,
    arch: int = DEFAULT_EMULATED_ARCH,
    observers: Sequence[Observer] = (),
) -> ForwardResult:
    """``forward`` with what verification and benchmarks need besides.

    Outputs allocated here are NaN throughout before the launch when ``poisoned``. ``arch`` is what
    the emulator runs host tensors for, and ``observers`` watch it; a GPU has an arch of its own.
    """
    check_config(cfg)
    problem, *inputs = check_inputs(cfg, q, k, v)
    scale = check_scale(scale, problem.d)
    first = inputs[0]
    if o is None:
        o_view = view_tensor("o", allocate(first, first.shape, poisoned=poisoned))
    else:
        o_view = check_output(o, first, inputs)
    device = _device(first, emulate, arch)
    _check_once(cfg, device)
    if first.device.kind == "cpu" and not emulate:
        check_estimate(cfg, problem)
    kernel = loaded_kernels.get(cfg, device.arch)
    lse = None
    if return_lse:
        shape = (problem.batch, problem.heads_q, problem.seq_q)
        lse = allocate(first, shape, float32=True, poisoned=poisoned)
    lse_address = 0 if lse is None else address_of(lse)
    q_ints, k_ints, v_ints = map(tensor_ints, inputs)
    tensors = (q_ints, k_ints, v_ints, tensor_ints(o_view))
    call = ForwardCall(problem, tensors, lse_address, scale, device)
    if first.device.kind == "cuda":
        ms = run_on_gpu(kernel, call, first, timed=timed)
        return ForwardResult(o_view.source, lse, ms, None)
    emulation = _emulate(kernel, call, inputs, o_view, lse, observers)
    return ForwardResult(o_view.source, lse, None, emulation)


def _device(q: TensorView, emulate: bool, arch: int) -> DeviceSpec:
    """The limits to plan for: the tensors' own GPU's, or those of the emulated arch."""
    if q.device.kind == "cpu":
        return device_spec(arch)
    if emulate:
        raise ArgumentError(
            f"emulate=True: the tensors live on {q.device}; the emulator runs host tensors, copy "
            "them there"
        )
    forks.check_not_forked()
    return driver.query_gpu(q.device.ordinal)


def _emulate(
    kernel: LoadedKernel,
    call: ForwardCall,
    inputs: Sequence[TensorView],
    o: TensorView,
    lse: Any,
    observers: Sequence[Observer],
) -> EmulationResult:
    writable = {"o": host_array(o.source)}
    if lse is not None:
        writable["lse"] = host_array(lse)
    return run_in_emulator(
        kernel.ptx,
        kernel.plan(call),
        readable={view.name: host_array(view.source) for view in inputs},
        writable=writable,
        observers=observers,
    )


@cache
def _check_once(cfg: FlashForwardKernelConfig, device: DeviceSpec) -> None:
    check_device(cfg, device)
