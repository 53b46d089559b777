"""The gradients of attention by one named or chosen kernel, wherever the tensors are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from flashsmith.errors import ArgumentError
from flashsmith.families import DeviceSpec, KernelConfig, Problem
from flashsmith.operations.backward import BACKWARD, check_grad_dtype, gradients_word
from flashsmith.printable import quoted
from flashsmith.runtime import cached_launches
from flashsmith.runtime.cached_launches import (
    UNALIGNED,
    UNALIGNED_VECTOR,
    CachedCalls,
    Options,
    Signature,
    backward_signature,
)
from flashsmith.runtime.forward_options import NO_WINDOW, ForwardOptions, check_flag
from flashsmith.runtime.forward_pass import (
    DEFAULT_EMULATED_ARCH,
    Chooser,
    check_server,
    choose_for,
    kernel_for,
    limits_of,
)
from flashsmith.runtime.forward_request import Request, check_request, check_tma, suit_tma
from flashsmith.runtime.frameworks.base import TensorView, contiguous_strides
from flashsmith.runtime.launch_counter import note_launch
from flashsmith.runtime.operation_run import (
    CachedOperation,
    PreparedOperation,
    prepare_operation,
    wrong_address,
    wrong_strides,
)
from flashsmith.runtime.running_time import check_estimate
from flashsmith.runtime.tensors import view_tensor

NAMES = ("dq", "dk", "dv", "dsinks")
_SPECS = {tensor.name: tensor for tensor in BACKWARD.tensors}
# The first of BackwardOptions are also the first of ForwardOptions.
_OF_FORWARD = 9

Tensors = tuple[Any, Any, Any, Any, Any, Any]  # do, q, k, v, o, lse


class Gradients(NamedTuple):
    """The gradients of q, k, v and sinks, dense; None for those that were not needed."""

    dq: Any
    dk: Any
    dv: Any
    dsinks: Any


class BackwardOptions(NamedTuple):
    """The keywords of ``backward`` that define what is computed, as the caller gave them."""

    causal: Any = False
    window: Any = NO_WINDOW
    softcap: Any = 0.0
    scale: Any = None
    sinks: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None
    dlse: Any = None
    deterministic: Any = False
    needs: Any = (True,) * 4
    grad_dtype: Any = None


class BackwardRequest(NamedTuple):
    """The properties of a call that decide which kernel computes it."""

    problem: Problem
    q: TensorView
    k: TensorView
    suits_tma: bool
    deterministic: bool

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a query nor a key."""
        return 0 in self.q.shape and 0 in self.k.shape


class BackwardAhead(NamedTuple):
    """The backward pass that follows a forward pass, whose kernel is found or built with the
    forward's."""

    config: KernelConfig | Chooser
    deterministic: bool
    gradients: str = ""  # a problem's word for those that will be needed

    def config_for(self, request: Request, device: DeviceSpec) -> KernelConfig:
        """The config whose kernel will compute the gradients of ``request``.

        Raises what choosing, finding and building it raises.
        """
        if request.q.device.kind == "cpu":
            device = _limits(self.config, request.q, emulate=False)
        problem = _backward(request.problem, self.gradients)
        wish = BackwardRequest(problem, request.q, request.k, request.suits_tma, self.deterministic)
        return _config_for(self.config, wish, request.v, device)[0]


class CachedBackward(CachedOperation):
    """A backward pass."""

    def __init__(self, prepared: PreparedOperation, copies_do: bool, copies_dlse: bool) -> None:
        """``copies_do``: whether its do is a dense copy of the caller's, and so for dlse."""
        super().__init__(prepared)
        framework, views = self._framework, prepared.views
        self._copies_do, self._copies_dlse = copies_do, copies_dlse
        self._has_vectors = any(name in views for name in ("dlse", "sinks", "cu_seqlens_q"))

        def allocator(name: str, like: str) -> Callable[[Any], Any] | None:
            if name not in prepared.outputs:
                return None
            view, source = views[name], views[like]
            if view.dtype == source.dtype:
                is_dense = source.strides == contiguous_strides(source.shape)
                return framework.like_allocator(dense=is_dense)
            new = framework.allocator(source.source, view.shape, view.dtype)
            return lambda like: new()

        self._new_dq, self._new_dk = allocator("dq", "q"), allocator("dk", "k")
        self._new_dv, self._new_dsinks = allocator("dv", "v"), allocator("dsinks", "sinks")

    def run(self, tensors: tuple[Any, ...], options: Options) -> tuple[Any, Any, Any, Any] | None:
        """Launches on these tensors; returns the gradients, or None, without launching, when the
        addresses need the full checks.

        Raises LaunchError when the launch is refused.
        """
        do, q, k, v, o, lse = tensors
        if self._copies_do:
            do = do.contiguous()
        do_at, q_at, k_at, v_at = do.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr()
        o_at, lse_at = o.data_ptr(), lse.data_ptr()
        if (do_at | q_at | k_at | v_at | o_at) & UNALIGNED or lse_at & UNALIGNED_VECTOR:
            return None
        if not (do_at and q_at and k_at and v_at and o_at and lse_at):
            return None
        dlse_at = sinks_at = cu_q_at = cu_k_at = 0
        sinks = None
        if self._has_vectors:
            sinks, cu_q, cu_k, dlse = options[4], options[5], options[6], options[9]
            if dlse is not None:
                if self._copies_dlse:
                    dlse = dlse.contiguous()
                dlse_at = dlse.data_ptr()
            if sinks is not None:
                sinks_at = sinks.data_ptr()
            if cu_q is not None:
                cu_q_at = cu_q.data_ptr()
                cu_k_at = cu_q_at if cu_k is cu_q else cu_k.data_ptr()
            if (dlse_at | sinks_at | cu_q_at | cu_k_at) & UNALIGNED_VECTOR:
                return None
        dq = dk = dv = dsinks = None
        dq_at = dk_at = dv_at = dsinks_at = 0
        if self._new_dq is not None:
            dq = self._new_dq(q)
            dq_at = dq.data_ptr()
        if self._new_dk is not None:
            dk = self._new_dk(k)
            dk_at = dk.data_ptr()
        if self._new_dv is not None:
            dv = self._new_dv(v)
            dv_at = dv.data_ptr()
        if self._new_dsinks is not None:
            dsinks = self._new_dsinks(sinks)
            dsinks_at = dsinks.data_ptr()
        at: tuple[int, ...] = (
            do_at, q_at, k_at, v_at, o_at, lse_at,
            dq_at, dk_at, dv_at, dsinks_at, dlse_at, sinks_at, cu_q_at, cu_k_at,
        )  # fmt: skip
        stream = self._stream_of(self._ordinal)
        if self._new_block is not None:
            block_at, _block = self._block_on(stream)  # alive until the launch
            at += (block_at,)
        try:
            self._function(stream, *at)
        except RuntimeError as error:
            raise self._launch.refused(error) from None
        note_launch("gpu", self._n_kernels)
        return dq, dk, dv, dsinks


def run_backward(
    config: KernelConfig | Chooser,
    tensors: Tensors,
    options: Options,
    emulate: bool,
    follow: Callable[[Any], None] | None = None,
) -> Gradients:
    """The gradients for do, q, k, v, o and lse by ``config``'s kernel; ``config`` may be a Chooser.

    ``options`` are in the order of BackwardOptions. Calls that differ only in addresses are checked
    in full once; ``follow`` is called with the cached call of others.
    """
    calls = cached_launches.cached
    signature, call = cached_launches.find(
        backward_signature, calls, config, tensors, options, emulate
    )
    if call is not None:
        gradients = call.run(tensors, options)
        if gradients is not None:
            if follow is not None:
                follow(call)
            return Gradients(*gradients)
    return _run_and_remember(config, tensors, BackwardOptions(*options), emulate, calls, signature)


def _run_and_remember(
    config: KernelConfig | Chooser,
    tensors: Tensors,
    asked: BackwardOptions,
    emulate: bool,
    calls: CachedCalls,
    signature: Signature | None,
) -> Gradients:
    needs = check_needs(asked.needs)
    deterministic = check_flag("deterministic", asked.deterministic)
    grad_dtype = check_grad_dtype(asked.grad_dtype)
    forward = ForwardOptions(*asked[:_OF_FORWARD])
    request = check_request((*tensors[1:4], None), forward)
    device = _limits(config, request.q, check_flag("emulate", emulate))

    problem = _backward(request.problem, gradients_word(*needs[:3]))
    o = view_tensor("o", tensors[4])
    suits_tma = request.suits_tma and suit_tma([o])
    wish = BackwardRequest(problem, request.q, request.k, suits_tma, deterministic)
    cfg, is_own = _config_for(config, wish, request.v, device)

    on_host = request.q.device.kind == "cpu"
    if on_host and not emulate:
        check_estimate(request, cfg)
    do, copies_do = _readable("do", tensors[0], wish, cfg)
    dlse, copies_dlse = _readable("dlse", asked.dlse, wish, cfg)
    windowed = request.mask.kind == "window"
    prepared = prepare_operation(
        cfg,
        problem,
        {
            "do": do,
            **dict(zip(("q", "k", "v", "o", "lse"), tensors[1:], strict=True)),
            "dlse": dlse,
            "sinks": asked.sinks,
            "cu_seqlens_q": asked.cu_seqlens_q,
            "cu_seqlens_k": asked.cu_seqlens_k,
        },
        options={
            "scale": request.scale,
            "softcap": request.softcap,
            "left": request.mask.left if windowed else None,
            "right": request.mask.right if windowed else None,
            "grad_dtype": grad_dtype,
            "deterministic": deterministic,
        },
        wanted=["dsinks"] if needs[3] and asked.sinks is not None else [],
        unwanted=[name for name, need in zip(NAMES[:3], needs, strict=False) if not need],
        emulate=on_host,
    )
    outputs = prepared.run().outputs
    # A copy that only an address needed is not for calls with others.
    is_general = is_own and "address" not in (copies_do, copies_dlse)
    if signature is not None and prepared.launch is not None and is_general:
        call = CachedBackward(prepared, bool(copies_do), bool(copies_dlse))
        cached_launches.remember(calls, signature, call, forward)
    return Gradients(*(outputs.get(name) for name in NAMES))


def check_needs(needs: Any) -> tuple[bool, bool, bool, bool]:
    """Raises ArgumentError unless ``needs`` are four bools."""
    if isinstance(needs, (tuple, list)) and len(needs) == 4:
        dq, dk, dv, dsinks = (check_flag("needs", need) for need in needs)
        return dq, dk, dv, dsinks
    raise ArgumentError(
        f"needs={quoted(needs)}: give four of True and False, for dq, dk, dv and dsinks"
    )


def check_deterministic(cfg: KernelConfig, deterministic: bool) -> None:
    """Raises ArgumentError where repeatable gradients are asked for of a kernel that has others."""
    if deterministic and not cfg.family.is_deterministic(cfg):
        raise ArgumentError(
            f"deterministic=True: {cfg} adds up in an order that timing decides; choose another "
            "config, or give none"
        )


def _limits(config: KernelConfig | Chooser, q: TensorView, emulate: bool) -> DeviceSpec:
    """Those of the tensors' GPU, or of the emulated one that ``config`` runs on."""
    arch = config.OLDEST_ARCH if isinstance(config, KernelConfig) else DEFAULT_EMULATED_ARCH
    return limits_of(q, emulate, arch)


def _backward(problem: Problem, gradients: str) -> Problem:
    return replace(problem, operation=BACKWARD.name, gradients=gradients)


def _config_for(
    config: KernelConfig | Chooser, wish: BackwardRequest, v: TensorView, device: DeviceSpec
) -> tuple[KernelConfig, bool]:
    """The config whose kernel computes what is wished, found or built; and whether it is the one
    that was given or chosen, not a substitute."""
    chooser = None if isinstance(config, KernelConfig) else config
    cfg = config if isinstance(config, KernelConfig) else choose_for(config, wish, device)
    semantics = check_server(cfg, wish.problem, device)
    check_deterministic(cfg, wish.deterministic)
    check_tma(cfg, (wish.q, wish.k, v))
    if wish.is_empty:
        return cfg, True
    kernel = kernel_for(cfg, semantics, wish, device, chooser)
    return kernel.config, (kernel.config, kernel.semantics) == (cfg, semantics)


def _readable(name: str, tensor: Any, wish: BackwardRequest, cfg: KernelConfig) -> tuple[Any, str]:
    """A gradient as ``cfg``'s kernel can read it: itself, or a dense copy; and why it was copied:
    '', 'layout' or 'address'."""
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
