"""forward(cfg, q, k, v): a forward pass with one named kernel, on a GPU or in the emulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, overload

from flashsmith.errors import ArgumentError
from flashsmith.families import DeviceSpec, KernelConfig, Problem
from flashsmith.families.canonical import emulated_arch
from flashsmith.operations.operation import READS
from flashsmith.runtime.arguments import check_config, check_device, check_request, check_serves
from flashsmith.runtime.cached_calls import Invocation, Remember, run_cached
from flashsmith.runtime.fallback_kernels import fallback_kernels
from flashsmith.runtime.kernel_choice import (
    Chooser,
    arch_to_emulate,
    check_server,
    check_tma,
    choose_for,
    kernel_for,
    limits_of,
)
from flashsmith.runtime.launch_plan import LaunchPlan
from flashsmith.runtime.libraries import LoadedKernel, loaded_kernels
from flashsmith.runtime.option_values import plain_options
from flashsmith.runtime.prepared_call import (
    OperationResult,
    PreparedCall,
    prepare,
    unplaced_call,
)
from flashsmith.runtime.request import Request
from flashsmith.runtime.running_time import check_estimate
from flashsmith.runtime.tensors import Array, TensorT
from flashsmith.semantics.signature import (
    NO_WINDOW,
    TENSORS,
    ForwardOptions,
    check_flag,
    others_of,
    tensors_of,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flashsmith.runtime.emulation import EmulationResult, Observer
    from flashsmith.runtime.keywords import ForwardKeywords


class ForwardResult(NamedTuple):
    """The requested outputs in the caller's framework, and the time in ms if timed on a GPU.

    An output that was not requested is None; ``emulation`` is None if nothing was emulated.
    """

    o: Any
    lse: Any
    row_max: Any
    ms: float | None
    emulation: EmulationResult | None


def returned(outputs: Mapping[str, Any]) -> Any:
    """Returns the return value of forward: o alone, or a tuple of o and the requested
    statistics."""
    return tuple(outputs.values()) if len(outputs) > 1 else outputs["o"]


Tensors = tuple[Any, Any, Any, Any]  # q, k, v, and o or None


class NextKernel(Protocol):
    """A pass that follows a forward pass; both passes' kernels are found or built together.

    It is part of a call's signature, so equal calls must have NextKernels that compare equal.
    """

    def config_for(self, request: Request, device: DeviceSpec) -> KernelConfig:
        """Returns the config of the pass's kernel; by the time this returns, the kernel has been
        found or built."""


@overload
def forward(
    cfg: KernelConfig,
    q: TensorT,
    k: Array,
    v: Array,
    o: Array | None = ...,
    *,
    return_lse: Literal[False] = ...,
    return_row_max: Literal[False] = ...,
    partial: Literal[False] = ...,
    **keywords: Unpack[ForwardKeywords],
) -> TensorT: ...


@overload
def forward(
    cfg: KernelConfig,
    q: TensorT,
    k: Array,
    v: Array,
    o: Array | None = ...,
    *,
    return_lse: Literal[True],
    return_row_max: Literal[False] = ...,
    partial: Literal[False] = ...,
    **keywords: Unpack[ForwardKeywords],
) -> tuple[TensorT, TensorT]: ...


@overload
def forward(
    cfg: KernelConfig,
    q: TensorT,
    k: Array,
    v: Array,
    o: Array | None = ...,
    *,
    return_lse: Literal[False] = ...,
    return_row_max: Literal[True],
    partial: Literal[False] = ...,
    **keywords: Unpack[ForwardKeywords],
) -> tuple[TensorT, TensorT]: ...


@overload
def forward(
    cfg: KernelConfig,
    q: TensorT,
    k: Array,
    v: Array,
    o: Array | None = ...,
    *,
    return_lse: Literal[True],
    return_row_max: Literal[True],
    partial: Literal[False] = ...,
    **keywords: Unpack[ForwardKeywords],
) -> tuple[TensorT, TensorT, TensorT]: ...


@overload
def forward(
    cfg: KernelConfig,
    q: TensorT,
    k: Array,
    v: Array,
    o: Array | None = ...,
    *,
    return_lse: bool = ...,
    return_row_max: Literal[False] = ...,
    partial: Literal[True],
    **keywords: Unpack[ForwardKeywords],
) -> tuple[TensorT, TensorT]: ...


@overload
def forward(
    cfg: KernelConfig,
    q: TensorT,
    k: Array,
    v: Array,
    o: Array | None = ...,
    *,
    return_lse: bool = ...,
    return_row_max: bool = ...,
    partial: bool = ...,
    **keywords: Unpack[ForwardKeywords],
) -> Any: ...


def forward(
    cfg: KernelConfig,
    q: Array,
    k: Array,
    v: Array,
    o: Array | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = NO_WINDOW,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    return_row_max: bool = False,
    partial: bool = False,
    seqused_k: Array | None = None,
    k_begin: Array | None = None,
    bits: str | None = None,
    emulate: bool = False,
) -> Any:
    """softmax(scale q k^T) v from the kernel that ``cfg`` names, with optional mask and softcap.

    Streams, waiting and the positions of masks are as for attention(). Host tensors run in the
    emulator, for the oldest architecture that the config has a kernel for. A kernel that is not
    built is built first.

    Args:
        cfg: the kernel; its dtype must be the tensors' dtype, and its d_head at least their d.
        o: the tensor to write the output to, of q's shape (with v's d) and dtype; None allocates
            it.
        q, k, v, causal, window, softcap, scale, sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
            max_seqlen_k, return_lse, return_row_max, partial, seqused_k, k_begin, emulate: as for
            attention().
        bits: as for attention(); 'canonical' requires a config that keeps that order.

    Returns:
        o, (o, lse), (o, row_max) or (o, lse, row_max), in q's framework and on its device.

    Raises:
        ArgumentError: an argument is unusable, or the config does not keep the order that bits
            requires; nothing was launched.
        IllegalConfigError: no kernel can be built for the config on this device.
        KernelNotBuiltError: the kernel is not built, and FLASHSMITH_JIT is 0 or a CUDA graph is
            being captured.
        EmulationTooLongError: the estimated time in the emulator is above 60 s and emulate is
            False.
        LaunchError: the GPU refused the launch, or its driver is too old for the library.
    """
    plain = plain_options({"window": window, "softcap": softcap, "scale": scale, "sinks": sinks})
    options = ForwardOptions(
        causal, plain["window"], plain["softcap"], plain["scale"], plain["sinks"], cu_seqlens_q,
        cu_seqlens_k, max_seqlen_q, max_seqlen_k, return_lse, return_row_max, partial, seqused_k,
        k_begin, bits,
    )  # fmt: skip
    return run_call(check_config(cfg), (q, k, v, o), options, emulate, "o")


def forward_timed(
    cfg: KernelConfig,
    q: Array,
    k: Array,
    v: Array,
    o: Array | None = None,
    *,
    emulate: bool = False,
    **options: Any,
) -> tuple[Any, float | None]:
    """Returns the result of ``forward``, and the kernel's time: (o, ms), ((o, lse), ms) and so on.

    Takes forward's keywords. On a GPU the call waits, and ms is the time between two events around
    the launch. On the host ms is None: the emulator's time is unrelated to the kernel's.
    """
    asked = ForwardOptions(**plain_options(options))
    result = run_request(check_config(cfg), (q, k, v, o), asked, emulate=emulate, timed=True)
    return returned(result.outputs), result.ms


def plan_forward(config: KernelConfig, problem: Problem, device: DeviceSpec) -> LaunchPlan:
    """Returns the launches of ``config``'s kernel for dense tensors of ``problem`` on ``device``.

    No GPU is used, so this machine need not have the ``device``. In the argument bytes, all tensors
    have address 0 except cu_seqlens, which have address 1. The softcap is 1, and a window's left
    limit is 0. A kernel that is not built for ``device.arch`` is built first.

    Raises ArgumentError when config, problem and device do not fit together, and the errors of
    building the kernel.
    """
    check_config(config)
    for name, value, kind in (("problem", problem, Problem), ("device", device, DeviceSpec)):
        if not isinstance(value, kind):
            raise ArgumentError(f"{name}: got {type(value).__name__}; give a {kind.__name__}")
    semantics = check_serves(config, problem)
    check_device(config, device)
    kernel = loaded_kernels.get(config, device.arch, semantics)
    return kernel.plan(unplaced_call(problem, device))


def run_forward(
    cfg: KernelConfig,
    q: Any,
    k: Any,
    v: Any,
    o: Any = None,
    *,
    emulate: bool = False,
    timed: bool = False,
    poisoned: bool = False,
    check_contents: bool = True,
    arch: int | DeviceSpec | None = None,
    observers: Sequence[Observer] = (),
    schedule_seed: int | None = None,
    **options: Any,
) -> ForwardResult:
    """Does the same as ``forward``, with further arguments for verification and benchmarks;
    ``options`` are forward's keywords.

    ``poisoned`` fills the outputs and workspaces allocated here with NaN before the launch. Without
    ``check_contents``, the values of host cu_seqlens are not checked before the launch.

    ``arch`` is the architecture to emulate (None: the oldest that the config has a kernel for); it
    has no effect on a GPU. A DeviceSpec as ``arch`` replaces the device's limits when the launch is
    planned, even on a GPU, for example to plan for fewer SMs. ``observers`` watch the emulator, and
    ``schedule_seed`` selects its schedule (None: the fixed one).
    """
    outputs, ms, emulation = run_request(
        check_config(cfg),
        (q, k, v, o),
        ForwardOptions(**options),
        emulate=emulate,
        timed=timed,
        poisoned=poisoned,
        check_contents=check_contents,
        arch=arch,
        observers=observers,
        schedule_seed=schedule_seed,
    )
    return ForwardResult(outputs["o"], outputs.get("lse"), outputs.get("row_max"), ms, emulation)


# The operation's names for the tensors of an attention_call, in order.
_NAMES = ("q", "k", "v", "o", *TENSORS)


def run_call(
    config: KernelConfig | Chooser,
    tensors: Tensors,
    options: ForwardOptions,
    emulate: bool,
    output: str,
    next_kernel: NextKernel | None = None,
) -> Any:
    """Returns the outputs for q, k, v and o (or None) from the kernel of a config or a Chooser's
    choice.

    ``output`` names o in errors, and ``next_kernel`` is the pass that will follow. The full
    checks run once for calls that differ only in tensor addresses.
    """

    def run(remember: Remember) -> Any:
        result = run_request(
            *(config, tensors, options),
            emulate=emulate,
            output=output,
            next_kernel=next_kernel,
            launched=lambda prepared: remember(prepared, tuple(prepared.outputs)),
        )
        return returned(result.outputs)

    asked = attention_call(config, tensors, options, emulate, next_kernel)
    return run_cached(asked, _names(options), run)


def _names(options: ForwardOptions) -> tuple[str, ...]:
    """Returns the operation's names for the tensors in the call's Invocation."""
    return (*_NAMES, *read_names(options)) if options.program is not None else _NAMES


def read_names(options: Any) -> tuple[str, ...]:
    """Returns the operation's names for the tensors that the call's program reads."""
    if options.program is None:
        return ()
    return tuple(it.name for it, _ in zip(READS, options.program.tensors, strict=False))


def attention_call(
    config: KernelConfig | Chooser,
    tensors: Tensors,
    options: ForwardOptions,
    emulate: bool,
    next_kernel: NextKernel | None = None,
) -> Invocation | None:
    """Returns the Invocation under which this call is cached. Returns None, so that the call is not
    cached, when lengths must be read from the device or when seqused_k or k_begin is given."""
    if options.seqused_k is not None or options.k_begin is not None or waits_for(options):
        return None
    name, options, reads = with_reads("forward", options)
    return Invocation(
        name,
        (*tensors, *tensors_of(options), *reads),
        (*others_of(options), config, next_kernel, emulate),
    )


def with_reads(name: str, options: Any) -> tuple[str, Any, tuple[Any, ...]]:
    """Returns the name, options and additional tensors of an Invocation whose call may have a
    program.

    In the options, the program keeps only its numbers; its tensors are returned separately.
    """
    bound = options.program
    if bound is None:
        return name, options, ()
    made = options._replace(program=(bound.program, *bound.numbers))
    return f"{name} {len(bound.tensors)}", made, tuple(bound.tensors)


def waits_for(options: ForwardOptions) -> bool:
    """Whether the maximum lengths must be read from cu_seqlens."""
    if options.cu_seqlens_q is None and options.cu_seqlens_k is None:
        return False
    return options.max_seqlen_q is None or options.max_seqlen_k is None


def run_request(
    config: KernelConfig | Chooser,
    tensors: Tensors,
    options: ForwardOptions,
    *,
    emulate: bool,
    timed: bool = False,
    poisoned: bool = False,
    check_contents: bool = True,
    arch: int | DeviceSpec | None = None,
    observers: Sequence[Observer] = (),
    schedule_seed: int | None = None,
    output: str = "o",
    next_kernel: NextKernel | None = None,
    launched: Callable[[PreparedCall], None] | None = None,
) -> OperationResult:
    """Does the same as ``run_forward`` for q, k, v and o (or None), with the kernel of a config or
    of a Chooser's choice.

    ``output`` names o in errors, and ``next_kernel`` is the pass that will follow. After a
    launch on a GPU, ``launched`` is called with the PreparedCall, unless a substitute ran.
    """
    request = check_request(tensors, options, check_contents=check_contents, output=output)
    q = request.first
    if arch is None:
        arch = arch_to_emulate(request.problem) if callable(config) else emulated_arch(config)
    device = limits_of(q, check_flag("emulate", emulate), arch)
    cfg = choose_for(config, request, device) if callable(config) else config
    semantics = check_server(cfg, request.problem, device)
    check_tma(cfg, [request.views[name] for name in "qkv"])
    following = None if next_kernel is None else next_kernel.config_for(request, device)
    if q.device.kind == "cpu" and not emulate:
        check_estimate(request, cfg, *([] if following is None else [following]))

    def find_kernel() -> LoadedKernel:
        return kernel_for(cfg, semantics, request, device, config if callable(config) else None)

    prepared = prepare(request, device, find_kernel, timed=timed, poisoned=poisoned)
    result = prepared.run(observers, schedule_seed)
    if launched is not None and (
        prepared.is_by(cfg, semantics)
        or (
            prepared.launch is not None
            and fallback_kernels.stands_for((cfg, device.arch, semantics), request)
        )
    ):
        launched(prepared)
    return result
