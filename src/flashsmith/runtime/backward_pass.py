"""Computes attention's gradients with a named or chosen kernel, on a GPU or in the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flashsmith.errors import ArgumentError
from flashsmith.families import DeviceSpec, KernelConfig, Problem
from flashsmith.families.canonical import emulated_arch
from flashsmith.operations.backward import BACKWARD, check_grad_dtype, gradients_word
from flashsmith.printable import quoted
from flashsmith.runtime.arguments import check_config, check_request
from flashsmith.runtime.cached_calls import Invocation, Remember, run_cached
from flashsmith.runtime.fallback_kernels import fallback_kernels
from flashsmith.runtime.forward_pass import read_names, waits_for, with_reads
from flashsmith.runtime.kernel_choice import (
    Chooser,
    arch_to_emulate,
    check_server,
    check_tma,
    choose_for,
    kernel_for,
    limits_of,
)
from flashsmith.runtime.libraries import LoadedKernel
from flashsmith.runtime.prepared_call import OperationResult, PreparedCall, prepare
from flashsmith.runtime.request import (
    Request,
    check_operation,
    suit_tma,
    wrong_address,
    wrong_strides,
)
from flashsmith.runtime.running_time import check_estimate
from flashsmith.runtime.tensors import view_tensor
from flashsmith.semantics.signature import (
    TENSORS,
    BackwardOptions,
    check_flag,
    others_of,
    tensors_of,
)

if TYPE_CHECKING:
    from flashsmith.runtime.emulation import Observer

NAMES = ("dq", "dk", "dv", "dsinks")
_SPECS = {tensor.name: tensor for tensor in BACKWARD.tensors}
# The operation's names for the tensors of a backward_call, in order.
_NAMES = ("do", "q", "k", "v", "o", "lse", "dlse", *TENSORS)

Tensors = tuple[Any, Any, Any, Any, Any, Any]  # do, q, k, v, o, lse


class Gradients(NamedTuple):
    """The dense gradients of q, k, v and sinks; a gradient that was not needed is None."""

    dq: Any
    dk: Any
    dv: Any
    dsinks: Any


class BackwardAhead(NamedTuple):
    """The backward pass that follows a forward pass; both passes' kernels are found or built
    together."""

    config: KernelConfig | Chooser
    deterministic: bool
    gradients: str = ""  # the gradients that will be needed, as in Problem.gradients

    def config_for(self, request: Request, device: DeviceSpec) -> KernelConfig:
        """Returns the config whose kernel will compute the gradients of ``request``.

        Raises the errors of choosing, finding and building that kernel.
        """
        if request.first.device.kind == "cpu":
            device = _limits(self.config, request, emulate=False)
        problem = _backward(request.problem, self.gradients)
        options = {**request.options, "deterministic": self.deterministic}
        wish = request._replace(problem=problem, options=options, wanted=NAMES[:3])
        return _kernel_for(self.config, wish, device)[0]


def run_backward(
    config: KernelConfig | Chooser, tensors: Tensors, options: BackwardOptions, emulate: bool
) -> Gradients:
    """Computes the gradients from do, q, k, v, o and lse, with the kernel of a config or of a
    Chooser's choice.

    The full checks run once for calls that differ only in tensor addresses.
    """

    def run(remember: Remember) -> Any:
        return _run(config, tensors, options, emulate, remember)

    asked = backward_call(config, tensors, options, emulate)
    return Gradients(*run_cached(asked, (*_NAMES, *read_names(options.forward)), run))


def backward_call(
    config: KernelConfig | Chooser, tensors: Tensors, options: BackwardOptions, emulate: bool
) -> Invocation | None:
    """Returns the Invocation under which this call is cached; None when lengths must be read from
    the device."""
    forward, dlse, *others = options
    if waits_for(forward):
        return None
    name, forward, reads = with_reads("backward", forward)
    return Invocation(
        name,
        (*tensors, dlse, *tensors_of(forward), *reads),
        (*others_of(forward), *others, config, emulate),
    )


def _run(
    config: KernelConfig | Chooser,
    tensors: Tensors,
    asked: BackwardOptions,
    emulate: bool,
    remember: Remember,
) -> Gradients:
    prepared, copied, is_repeatable = _prepare(config, tensors, asked, emulate)
    outputs = prepared.run().outputs
    if is_repeatable:
        remember(prepared, [name if name in outputs else None for name in NAMES], copied)
    return Gradients(*map(outputs.get, NAMES))


def run_gradients(
    cfg: KernelConfig,
    tensors: Tensors,
    options: BackwardOptions,
    *,
    emulate: bool = False,
    timed: bool = False,
    poisoned: bool = False,
    arch: int | DeviceSpec | None = None,
    observers: Sequence[Observer] = (),
    schedule_seed: int | None = None,
) -> OperationResult:
    """Does the same as ``backward``, with the kernel of a given config; for verification and
    benchmarks it also takes the additional arguments of ``run_forward``."""
    prepared = _prepare(
        *(check_config(cfg, BACKWARD.name), tensors, options, emulate),
        timed=timed,
        poisoned=poisoned,
        arch=arch,
    )[0]
    return prepared.run(observers, schedule_seed)


class _Prepared(NamedTuple):
    """A prepared call, the names of the tensors that the call copied, and whether later calls may
    repeat it."""

    call: PreparedCall
    copied: list[str]
    is_repeatable: bool


def _prepare(
    config: KernelConfig | Chooser,
    tensors: Tensors,
    asked: BackwardOptions,
    emulate: bool,
    *,
    timed: bool = False,
    poisoned: bool = False,
    arch: int | DeviceSpec | None = None,
) -> _Prepared:
    needs = check_needs(asked.needs)
    deterministic = check_flag("deterministic", asked.deterministic)
    grad_dtype = check_grad_dtype(asked.grad_dtype)
    forward = check_request((*tensors[1:4], None), asked.forward)
    device = _limits(config, forward, check_flag("emulate", emulate), arch)

    problem = _backward(forward.problem, gradients_word(*needs[:3]))
    views = {**forward.views, "o": view_tensor("o", tensors[4])}
    chosen = {**forward.options, "deterministic": deterministic}
    wish = Request(problem, views, chosen, forward.sizes, NAMES[:3])
    cfg, kernel, is_own = _kernel_for(config, wish, device)

    on_host = wish.first.device.kind == "cpu"
    if on_host and not emulate:
        check_estimate(forward, cfg)
    do, copies_do = _readable("do", tensors[0], wish, cfg)
    dlse, copies_dlse = _readable("dlse", asked.dlse, wish, cfg)
    own = {name: it for name, it in views.items() if name in _SPECS}
    reads = {name: it for name, it in views.items() if name not in _SPECS}
    numbers = {name: it for name, it in chosen.items() if name in BACKWARD.options}
    request = check_operation(
        problem,
        {"do": do, **own, "o": tensors[4], "lse": tensors[5], "dlse": dlse},
        options={**numbers, "grad_dtype": grad_dtype},
        wanted=["dsinks"] if needs[3] and asked.forward.sinks is not None else [],
        unwanted=[name for name, need in zip(NAMES[:3], needs, strict=False) if not need],
    )
    if "program_numbers" in chosen:
        request = request._replace(
            views={**request.views, **reads},
            options={**chosen, **request.options},
            sizes={**forward.sizes, **request.sizes},
        )

    def find_kernel() -> LoadedKernel:
        # If ``wish`` is empty, its outputs need no kernel, but dsinks may still need one.
        return kernel or kernel_for(cfg, problem.required_semantics(cfg), request, device, None)

    prepared = prepare(request, device, find_kernel, timed=timed, poisoned=poisoned)
    # A call that copied a tensor only because of its address is not cached, because a call with
    # other addresses may need no copy.
    copied = [name for name, why in (("do", copies_do), ("dlse", copies_dlse)) if why]
    return _Prepared(prepared, copied, is_own and "address" not in (copies_do, copies_dlse))


def check_needs(needs: Any) -> tuple[bool, bool, bool, bool]:
    """Raises ArgumentError unless ``needs`` is a sequence of four bools."""
    if isinstance(needs, (tuple, list)) and len(needs) == 4:
        dq, dk, dv, dsinks = (check_flag("needs", need) for need in needs)
        return dq, dk, dv, dsinks
    raise ArgumentError(
        f"needs={quoted(needs)}: give four of True and False, for dq, dk, dv and dsinks"
    )


def check_deterministic(cfg: KernelConfig, deterministic: bool) -> None:
    """Raises ArgumentError when gradients must be deterministic and the kernel's gradients are
    not."""
    if deterministic and not cfg.family.is_deterministic(cfg):
        raise ArgumentError(
            f"deterministic=True: {cfg} sums in an order that depends on timing; choose another "
            "config, or give none"
        )


def _limits(
    config: KernelConfig | Chooser,
    forward: Request,
    emulate: bool,
    arch: int | DeviceSpec | None = None,
) -> DeviceSpec:
    """Returns the limits of the tensors' GPU or, for host tensors, of the emulated GPU."""
    if arch is None:
        is_config = isinstance(config, KernelConfig)
        arch = emulated_arch(config) if is_config else arch_to_emulate(forward.problem)
    return limits_of(forward.first, emulate, arch)


def _backward(problem: Problem, gradients: str) -> Problem:
    return problem.of_operation(BACKWARD.name, gradients)


def _kernel_for(
    config: KernelConfig | Chooser, wish: Request, device: DeviceSpec
) -> tuple[KernelConfig, LoadedKernel | None, bool]:
    """Returns the config that serves ``wish``, its kernel, and whether this kernel was requested
    (True) or is a substitute (False).

    The kernel is None when there is nothing to compute.
    """
    chooser = None if isinstance(config, KernelConfig) else config
    cfg = config if isinstance(config, KernelConfig) else choose_for(config, wish, device)
    semantics = check_server(cfg, wish.problem, device)
    check_deterministic(cfg, wish.deterministic)
    check_tma(cfg, [wish.views[name] for name in "qkv"])
    if wish.is_empty:
        return cfg, None, True
    kernel = kernel_for(cfg, semantics, wish, device, chooser)
    is_own = (kernel.config, kernel.semantics) == (cfg, semantics)
    stands = fallback_kernels.stands_for((cfg, device.arch, semantics), wish)
    return kernel.config, kernel, is_own or stands


def _readable(name: str, tensor: Any, wish: Request, cfg: KernelConfig) -> tuple[Any, str]:
    """Returns a gradient that ``cfg``'s kernel can read, and why it is a copy ('' if it is not).

    The gradient is the tensor itself or, for the reason 'layout' or 'address', a dense copy.
    """
    if tensor is None:
        return None, ""
    spec = _SPECS[name]
    view = view_tensor(name, tensor, (spec.dtype_of(wish.problem),))
    by_tma = cfg.family.needs_tma and not suit_tma([view])
    if wrong_strides(spec, view) or by_tma:
        return view.framework.dense_copy(tensor), "layout"
    if wrong_address(spec, view):
        return view.framework.dense_copy(tensor), "address"
    return tensor, ""
