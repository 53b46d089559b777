"""forward(cfg, q, k, v): one forward pass by one named kernel, wherever the tensors are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from flashsmith.builder import count_noted
from flashsmith.errors import ArgumentError
from flashsmith.families import (
    DeviceSpec,
    KernelConfig,
    Problem,
    Semantics,
    device_spec,
    families,
)
from flashsmith.runtime import cached_launches, driver, process_forks
from flashsmith.runtime.arguments import (
    check_config,
    check_device,
    check_fit,
    check_serves,
)
from flashsmith.runtime.cached_launches import (
    CachedCalls,
    CachedLaunch,
    Options,
    Signature,
    Tensors,
    call_signature,
)
from flashsmith.runtime.forward_call import (
    ForwardCall,
    ForwardResult,
    LibraryCall,
    forward_call,
    unplaced_call,
)
from flashsmith.runtime.forward_options import NO_WINDOW, ForwardOptions, check_flag, check_scale
from flashsmith.runtime.forward_request import Request, check_request, check_tma
from flashsmith.runtime.frameworks.base import TensorView
from flashsmith.runtime.launch_plan import LaunchPlan
from flashsmith.runtime.libraries import LoadedKernel, PreparedLaunch, loaded_kernels
from flashsmith.runtime.option_values import plain_options
from flashsmith.runtime.running_time import check_estimate
from flashsmith.runtime.substitutes import Wish, substitutes
from flashsmith.runtime.tensors import Array, TensorT

if TYPE_CHECKING:
    from flashsmith.runtime.emulation import EmulationResult, Observer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flashsmith.runtime.keywords import ForwardKeywords

# A built kernel is as fast as the chosen one that takes at most this share longer on paper: less is
# within the error of the expectation, and what `flashsmith build --any-length` allows.
_AS_FAST = 0.02
# The emulator's default architecture.
DEFAULT_EMULATED_ARCH = 80

# Chooses the config for a problem on a device; called for new call signatures. A family's name
# follows where only that family's kernels can read the tensors' layout; ``among`` is a tuple of
# configs where only these are built and none may be, of which the first serves that takes at most
# the share ``tolerance`` longer than the fastest.
Chooser = Callable[..., KernelConfig]


class Ahead(Protocol):
    """What will follow a forward pass, and whose kernel is found or built with the forward's.

    Of one value for equal calls: it is a part of call signatures.
    """

    def config_for(self, request: Request, device: DeviceSpec) -> KernelConfig:
        """The config of its kernel, which is there when this returns."""


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
    emulate: bool = False,
) -> Any:
    """softmax(scale q k^T) v by the kernel that ``cfg`` names, masked and capped as asked for.

    Tensors on a GPU run there, on PyTorch's or CuPy's current stream for their device, and the call
    does not wait (JAX lends no streams: its arrays are waited for); host tensors run in the
    emulator (as on sm_80). A kernel that is not built is built first.
    Query i of seq_q stands at key i + seq_k - seq_q: masks are aligned to the bottom right. A row
    that sees no key gives 0.

    Args:
        cfg: the kernel; its dtype must be the tensors', and its d_head at least theirs.
        q: (batch, seq_q, heads_q, d), fp16 or bf16, a PyTorch tensor or a NumPy, CuPy or JAX array
            (bf16 as ml_dtypes.bfloat16); packed (total_q, heads_q, d). Any strides with a
            contiguous last dimension and 16-byte aligned rows; d a multiple of 8; lengths from 0.
        k, v: (batch, seq_k, heads_k, d) or (total_k, heads_k, d), like q; heads_q must be a
            multiple of heads_k, and heads_q / heads_k heads of q share one of k and v.
        o: where to write the output, q's shape and dtype; None allocates it.
        causal: whether a query sees keys up to its own position only.
        window: (left, right): how many keys before and after its own position a query sees; None
            is no limit. With causal the right limit is 0.
        softcap: above 0, scaled scores become softcap * tanh(score / softcap).
        scale: of q k^T, finite and > 0; None is 1/sqrt(d).
        sinks: (heads_q,) fp32, fp16 or bf16, one logit a head that joins the softmax of its rows;
            may be None.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32: packed sequence b of q (of k and v) has
            rows cu_seqlens[b] to cu_seqlens[b + 1] - 1. On a device their contents are not
            checked; a kernel clamps them, and leaves rows of o alone that they do not reach.
        max_seqlen_q, max_seqlen_k: at least the longest packed sequence's length; longer ones are
            cut off. None finds it out, on a device at the price of waiting for it once.
        return_lse: also return log(sum(exp(scores))) with the sink, fp32, (batch, heads_q, seq_q)
            or (heads_q, total_q); -inf where a row sees nothing and there is no sink.
        return_row_max: also return the maximum of every row's scaled and capped scores, without
            the sink, in the same shape; -inf where a row sees nothing.
        partial: whether o is a part, for ``flashsmith.merge_attention``: fp32, not rounded, without
            sinks; (o, lse) is returned, without gradients. seqused_k and k_begin are of parts only.
        seqused_k: (batch,) int32: how many keys of each sequence count; None is all from k_begin
            on. Read where it lies.
        k_begin: (batch,) int32: the row of k where a sequence's keys begin, of a packed k any,
            cu_seqlens_k aside; None is its first. The last query has the position of the last key
            that counts, k_begin + seqused_k - 1, for every mask.
        emulate: run host tensors in the emulator even when that is estimated above 60 s.

    Returns:
        o, (o, lse), (o, row_max) or (o, lse, row_max), like q in framework and device.

    Raises:
        ArgumentError: an argument is unusable; nothing was launched.
        IllegalConfigError: no kernel can be built for the config on this device.
        KernelNotBuiltError: it is not built, and FLASHSMITH_JIT=0 or a CUDA graph is captured.
        EmulationTooLongError: the estimate for the emulator is above 60 s and emulate is False.
        LaunchError: the GPU refused the launch, or its driver is too old for the library.
    """
    named = {"window": window, "softcap": softcap, "scale": scale, "sinks": sinks}
    options: Options = (
        causal, *plain_options(named).values(), cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k, return_lse, return_row_max,
    )  # fmt: skip
    if partial is not False or seqused_k is not None or k_begin is not None:
        options += (partial, seqused_k, k_begin)
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
    """The result of ``forward``, and the kernel's time: (o, ms) or ((o, lse), ms) and so on.

    Takes forward's keywords. On a GPU the call waits, and ms is the time between two events around
    the launch. On the host ms is None: the emulator's time says nothing about the kernel's.
    """
    asked = ForwardOptions(**plain_options(options))
    result = run_request(check_config(cfg), (q, k, v, o), asked, emulate=emulate, timed=True)
    return result.outputs, result.ms


def plan_forward(config: KernelConfig, problem: Problem, device: DeviceSpec) -> LaunchPlan:
    """The launches of ``config``'s kernel for dense tensors of ``problem`` on ``device``.

    Uses no GPU: ``device`` may be one this machine lacks. Tensors have address 0 in the argument
    bytes (cu_seqlens 1), a softcap is 1, and a window's left limit 0. A kernel that is not built
    for ``device.arch`` is built first.

    Raises ArgumentError when config, problem and device do not fit together, and what building
    raises.
    """
    check_config(config)
    for name, value, kind in (("problem", problem, Problem), ("device", device, DeviceSpec)):
        if not isinstance(value, kind):
            raise ArgumentError(f"{name}: got {type(value).__name__}; give a {kind.__name__}")
    semantics = check_serves(config, problem)
    check_device(config, device)
    kernel = loaded_kernels.get(config, device.arch, semantics)
    return kernel.plan(unplaced_call(problem, check_scale(None, problem.d), device))


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
    """``forward``, whose keywords ``options`` are, with further arguments for verification and
    benchmarks.

    Outputs and workspaces allocated here are NaN throughout before the launch when ``poisoned``.
    The contents of host cu_seqlens go to the kernel as they are unless ``check_contents``. ``arch``
    is what the emulator runs host tensors for (None: the first that the config runs on), or the
    limits to plan for, a GPU's too (fewer SMs, say); a GPU has an arch of its own. ``observers``
    watch the emulator, and ``schedule_seed`` decides its schedule (None: the fixed one).
    """
    return run_request(
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


def run_call(
    config: KernelConfig | Chooser,
    tensors: Tensors,
    options: Options,
    emulate: bool,
    output: str,
    ahead: Ahead | None = None,
) -> Any:
    """The outputs for q, k, v and o (or None) of ``config``'s kernel; ``config`` may be a Chooser.

    ``options`` are in the order of ForwardOptions; errors call o ``output``. ``ahead`` is what will
    follow. Calls that differ only in addresses are checked in full once.
    """
    calls = cached_launches.cached
    chosen = config if ahead is None else (config, ahead)
    signature, call = cached_launches.find(call_signature, calls, chosen, tensors, options, emulate)
    if call is not None:
        outputs = call.run(tensors, options)
        if outputs is not None:
            return outputs

    asked = ForwardOptions(*options)
    return _run_and_remember(
        config, tensors, asked, emulate, output, ahead, calls, signature
    ).outputs


def run_followed(
    config: KernelConfig | Chooser,
    tensors: Tensors,
    options: Options,
    emulate: bool,
    output: str,
    ahead: Ahead,
) -> tuple[Any, CachedLaunch | None]:
    """``run_call``, and its cached launch where it repeated one, for what follows."""
    calls = cached_launches.cached
    chosen = config, ahead
    signature, call = cached_launches.find(call_signature, calls, chosen, tensors, options, emulate)
    if call is not None:
        outputs = call.run(tensors, options)
        if outputs is not None:
            return outputs, call
    asked = ForwardOptions(*options)
    result = _run_and_remember(config, tensors, asked, emulate, output, ahead, calls, signature)
    return result.outputs, None


def _run_and_remember(
    config: KernelConfig | Chooser,
    tensors: Tensors,
    options: ForwardOptions,
    emulate: bool,
    output: str,
    ahead: Ahead | None,
    calls: CachedCalls,
    signature: Signature | None,
) -> ForwardResult:
    # A separate function, because a closure within run_call would cost every call.
    def remember(request: Request, launch: PreparedLaunch) -> None:
        if signature is not None:
            cached_launches.remember(calls, signature, CachedLaunch(request, launch), options)

    return run_request(
        config,
        tensors,
        options,
        emulate=emulate,
        output=output,
        ahead=ahead,
        launched=remember,
    )


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
    ahead: Ahead | None = None,
    launched: Callable[[Request, PreparedLaunch], None] | None = None,
) -> ForwardResult:
    """``run_forward`` of q, k, v and o (or None), by the kernel of ``config``, which may be a
    Chooser.

    Errors call o ``output``. ``ahead`` is what will follow. ``launched`` is called with the request
    and its launch function, if a GPU's kernel was launched for just this request.
    """
    request = check_request(tensors, options, check_contents=check_contents, output=output)
    q = request.q
    if arch is None:
        arch = DEFAULT_EMULATED_ARCH if callable(config) else config.OLDEST_ARCH
    device = limits_of(q, check_flag("emulate", emulate), arch)
    cfg = choose_for(config, request, device) if callable(config) else config
    semantics = check_server(cfg, request.problem, device)
    check_tma(cfg, (q, request.k, request.v))
    on_gpu = q.device.kind == "cuda"
    following = None if ahead is None else ahead.config_for(request, device)
    if not on_gpu and not emulate:
        check_estimate(request, cfg, *([] if following is None else [following]))
    chooser = config if callable(config) else None
    kernel = None if request.is_empty else kernel_for(cfg, semantics, request, device, chooser)

    allocate = partial(q.framework.allocate, q.source, poisoned=poisoned)
    o_dtype = None if request.ranges is None else "float32"
    o = request.o.source if request.o else allocate(q.shape, o_dtype)
    lse = allocate(request.statistics_shape, "float32") if request.lse else None
    row_max = allocate(request.statistics_shape, "float32") if request.row_max else None

    ms, emulation = 0.0 if on_gpu and timed else None, None
    if kernel is not None:
        call = forward_call(request, o, lse, row_max, device)
        if on_gpu:
            launch = kernel.prepare(
                *(call, q.device.ordinal),
                timed=timed,
                framework=q.framework,
                poisoned=poisoned,
            )
            ms = run_on_gpu(launch, call, q)
            if launched is not None and (kernel.config, kernel.semantics) == (cfg, semantics):
                launched(request, launch)
        else:
            outputs = o, lse, row_max
            emulation = _emulate(kernel, call, request, outputs, observers, schedule_seed)
    return ForwardResult(o, lse, row_max, ms, emulation)


def choose_for(chooser: Chooser, request: Wish, device: DeviceSpec) -> KernelConfig:
    """The chooser's config for a request. Choosers get problems, without the tensors' layouts."""
    cfg = chooser(request.problem, device)
    if not cfg.family.needs_tma or request.suits_tma:
        return cfg
    others = (other for other in families(cfg.family.operation) if not other.needs_tma)
    return chooser(request.problem, device, next(others).name)


@lru_cache(maxsize=1024)
def check_server(cfg: KernelConfig, problem: Problem, device: DeviceSpec) -> Semantics:
    """The semantics that a config needs to serve a problem on a device."""
    semantics = check_fit(cfg, problem)
    check_device(cfg, device)
    return semantics


def limits_of(view: TensorView, emulate: bool, arch: int | DeviceSpec) -> DeviceSpec:
    """The limits to plan for: those given, the tensors' own GPU's, or the emulated arch's."""
    limits = arch if isinstance(arch, DeviceSpec) else None
    if view.device.kind == "cpu":
        return arch if isinstance(arch, DeviceSpec) else device_spec(arch)
    if emulate:
        raise ArgumentError(
            f"emulate=True: the tensors live on {view.device}; the emulator runs host tensors, "
            "copy them there"
        )
    process_forks.check_not_forked()
    return limits or driver.query_gpu(view.device.ordinal)


def kernel_for(
    cfg: KernelConfig,
    semantics: Semantics,
    request: Wish,
    device: DeviceSpec,
    chooser: Chooser | None,
) -> LoadedKernel:
    """The kernel for a request; during CUDA graph capture none is built. Where a chosen kernel is
    missing, or is found to be slow as compiled, the ``chooser`` may take another: before any
    launch, so that every call of the kind has the same kernel."""
    q = request.q
    wanted = cfg, device.arch, semantics

    def may_build() -> bool:
        return q.device.kind == "cpu" or not q.framework.is_capturing(q.device.ordinal)

    def choose_among(configs: tuple[KernelConfig, ...]) -> KernelConfig:
        assert chooser is not None
        return chooser(request.problem, device, among=configs)

    if chooser is None:
        return loaded_kernels.get(*wanted, may_build)

    def is_as_fast(other: KernelConfig) -> bool:
        assert chooser is not None
        pair = other, cfg
        return chooser(request.problem, device, among=pair, tolerance=_AS_FAST) == other

    noted = count_noted()
    kernel = substitutes.kernel_or_other(
        loaded_kernels, wanted, request, device, choose_among, may_build, is_as_fast
    )
    if noted != count_noted():
        other = choose_for(chooser, request, device)
        if other != cfg:
            needed = check_server(other, request.problem, device)
            return kernel_for(other, needed, request, device, chooser)
    return kernel


def run_on_gpu(launch: PreparedLaunch, call: LibraryCall, view: TensorView) -> float | None:
    """Launches ``call`` by its kernel's prepared launch, on the current stream of the tensor's
    framework for its device.

    Returns milliseconds if prepared so, else None. Raises LaunchError when the launch is refused.
    """
    framework, ordinal = view.framework, view.device.ordinal
    result = launch(framework.current_stream(ordinal), *call.addresses)
    framework.finish(ordinal)
    return result


def _emulate(
    kernel: LoadedKernel,
    call: ForwardCall,
    request: Request,
    outputs: tuple[Any, Any, Any],
    observers: Sequence[Observer],
    schedule_seed: int | None,
) -> EmulationResult:
    from flashsmith.runtime.emulation import run_in_emulator

    as_numpy = request.q.framework.as_numpy
    named = zip(("o", "lse", "row_max"), outputs, strict=True)
    return run_in_emulator(
        kernel.modules,
        kernel.plan(call),
        readable={view.name: as_numpy(view.source) for view in request.readable},
        writable={name: as_numpy(array) for name, array in named if array is not None},
        observers=observers,
        schedule_seed=schedule_seed,
        sm_count=call.device.sm_count,
    )
