"""Computes attention over a latent cache with a named or chosen kernel, on a GPU or in the
emulator."""

from __future__ import annotations

from typing import Any, NamedTuple

from flashsmith.errors import ArgumentError
from flashsmith.families import KernelConfig, Problem, Semantics, families
from flashsmith.operations.latent_decode import LATENT_DECODE
from flashsmith.printable import quoted
from flashsmith.runtime.arguments import LONGEST, check_sinks, mask_options, program_for
from flashsmith.runtime.cache_scales import Scales, add_scales, cache_format
from flashsmith.runtime.cached_calls import Invocation, Remember, run_cached
from flashsmith.runtime.decode_pass import (
    DecodeOptions,
    DecodeTensors,
    add_sequences,
    check_contents,
)
from flashsmith.runtime.forward_pass import read_names, with_reads
from flashsmith.runtime.frameworks.base import TensorView
from flashsmith.runtime.kernel_choice import (
    Chooser,
    check_server,
    config_and_device,
    kernel_for,
)
from flashsmith.runtime.libraries import LoadedKernel
from flashsmith.runtime.prepared_call import prepare
from flashsmith.runtime.program_arguments import check_program_arguments
from flashsmith.runtime.request import Request, check_operation
from flashsmith.runtime.running_time import check_seconds, estimate_seconds
from flashsmith.runtime.tensors import DTYPES, check_beside, view_tensor
from flashsmith.semantics.cache_format import DTYPES_OF_8BIT
from flashsmith.semantics.signature import (
    check_flag,
    check_k_scale,
    check_mask,
    check_scale,
    whole_number,
)


class LatentTensors(NamedTuple):
    """A call's tensors in the operation's order, except the LSE, which callers never pass."""

    q: Any
    k_cache: Any
    cache_lens: Any
    out: Any = None
    page_table: Any = None
    k: Any = None
    sinks: Any = None
    cu_seqlens_q: Any = None
    k_scale: Any = None


class LatentOptions(NamedTuple):
    """The other keywords of ``attention_with_cache`` over a latent cache, as the caller gave
    them."""

    v_width: Any
    causal: Any
    window: Any
    scale: Any
    max_seqlen_q: Any
    split: Any
    return_lse: Any
    program: Any = None
    k_scale_value: Any = None


_NAMES = tuple("o" if name == "out" else name for name in LatentTensors._fields)


def run_latent(
    config: KernelConfig | Chooser,
    tensors: LatentTensors,
    options: LatentOptions,
    emulate: bool,
) -> Any:
    """Returns the output, or (output, LSE), computed by the kernel of ``config`` or of the config
    that a Chooser picks."""

    def run(remember: Remember) -> Any:
        return _run(config, tensors, options, emulate, remember)

    name, plain, reads = with_reads("latent_decode", options)
    asked = Invocation(name, (*tensors, *reads), (*plain, config, emulate))
    return run_cached(asked, (*_NAMES, *read_names(options)), run)


def _run(
    config: KernelConfig | Chooser,
    tensors: LatentTensors,
    options: LatentOptions,
    emulate: bool,
    remember: Remember,
) -> Any:
    request = check_latent_request(tensors, options)
    q, problem = request.first, request.problem
    cfg, device = config_and_device(config, request, check_flag("emulate", emulate))
    semantics = check_server(cfg, problem, device)
    if q.device.kind == "cpu":
        check_contents(request)
        if not emulate:
            check_seconds(cfg, problem, estimate_seconds(cfg, problem))

    def find_kernel() -> LoadedKernel:
        return kernel_for(cfg, semantics, request, device, None)

    prepared = prepare(request, device, find_kernel)
    outputs = prepared.run().outputs
    names = ("o", "lse") if "lse" in request.wanted else ("o",)
    remember(prepared, names)
    return tuple(outputs[name] for name in names) if len(names) > 1 else outputs["o"]


def check_latent_request(tensors: LatentTensors, asked: LatentOptions) -> Request:
    """Returns the checked request for these tensors and options; it does not depend on the kernel.
    No tensor's contents are read.

    Raises ArgumentError, starting with the argument's name, when an argument is unusable.
    """
    packed = tensors.cu_seqlens_q is not None
    q = _view_queries(tensors.q, packed)
    heads_q, d = q.shape[-2:]
    v_width = _check_widths(asked.v_width, d)
    views = {"q": q, "k_cache": _view_cache(tensors, q)}
    shared = DecodeTensors(
        *(tensors.q, tensors.k_cache, tensors.k_cache, tensors.cache_lens),
        page_table=tensors.page_table,
        cu_seqlens_q=tensors.cu_seqlens_q,
    )
    limits = DecodeOptions(max_seqlen_q=asked.max_seqlen_q)
    batch, seq_q, capacity = add_sequences(views, shared, limits)
    if max(capacity, seq_q) > LONGEST:
        raise ArgumentError(f"k_cache: {capacity} keys; kernels count up to {LONGEST}")
    _add_new(views, tensors, q)
    sinks = check_sinks(tensors.sinks, q, heads_q)
    if sinks is not None:
        views["sinks"] = sinks
    if tensors.out is not None:
        views["o"] = _view_output(tensors.out, q, v_width)
    mask = check_mask(asked.causal, asked.window)
    scale = _check_given_scale(asked.scale, d)
    scales = Scales((tensors.k_scale, None), (asked.k_scale_value, None))
    numbers = add_scales(views, scales)
    check_k_scale(numbers.get("k_scale_value", 1.0), scale, 0.0)
    options = mask_options(mask, scale, 0.0) | {"split": asked.split, **numbers}
    del options["softcap"]
    bound = asked.program
    problem = Problem(
        *(batch, seq_q, capacity, heads_q, 1, d, DTYPES[q.dtype]),
        Semantics(
            mask.kind,
            packed=packed,
            uneven=packed or bound is not None,
            program=program_for(bound, ""),
        ),
        operation=LATENT_DECODE.name,
        page=views["k_cache"].shape[1] if tensors.page_table is not None else 0,
        window_keys=mask.window_keys,
        cache=cache_format(views, has_scales=scales.are_given).label,
        d_v=v_width,
    )
    wanted = ["lse"] if check_flag("return_lse", asked.return_lse) else []
    request = check_operation(problem, views, options=options, wanted=wanted)
    return request if bound is None else _with_program(request, bound)


def _with_program(request: Request, bound: Any) -> Request:
    """Returns the request with the checked tensors and numbers of its program."""
    read = check_program_arguments(bound, request.first)
    return request._replace(
        views={**request.views, **read.views},
        options={**request.options, "program_numbers": read.numbers},
        sizes={**request.sizes, **read.sizes},
    )


def _view_queries(tensor: Any, packed: bool) -> TensorView:
    q = view_tensor("q", tensor)
    if packed:
        _check_rank(q, 3, "(total_q, heads_q, d) with cu_seqlens_q")
    else:
        _check_rank(q, 4, "(batch, seq_q, heads_q, d) without cu_seqlens_q")
    return q


def _check_rank(view: TensorView, rank: int, meaning: str) -> None:
    if len(view.shape) != rank:
        raise ArgumentError(
            f"{view.name}: rank {len(view.shape)} (shape {view.shape}); must be {rank}: {meaning}"
        )


def _check_widths(v_width: Any, d: int) -> int:
    """Returns the number of columns of o. Raises ArgumentError unless there are kernels for this
    width of the cache and of o."""
    served = dict(pair for family in families(LATENT_DECODE.name) for pair in family.pairs)
    pairs = " and ".join(f"{d_head} with v_width={width}" for d_head, width in served.items())
    if d not in served:
        raise ArgumentError(
            f"q: d_head {d}; kernels over a latent cache (v_width) exist for {pairs}: pad q and "
            "the cache's rows with zeros, the value columns first, or give k_cache and v_cache"
        )
    width = whole_number(v_width)
    if width is None or width != served[d]:
        raise ArgumentError(
            f"v_width={quoted(v_width)}: kernels over a latent cache exist for {pairs}; pad the "
            "rows so that the value columns come first"
        )
    return width


def _check_given_scale(scale: Any, d: int) -> float:
    """Returns the scale. The caller must give it, because the usual default would be computed from
    the wrong d."""
    if scale is None:
        raise ArgumentError(
            f"scale: missing; give 1/sqrt of the d of a head before its projection was absorbed, "
            f"such as 192**-0.5, and not of the latent rows' {d}"
        )
    return check_scale(scale, d)


def _view_cache(tensors: LatentTensors, q: TensorView) -> TensorView:
    cache = view_tensor("k_cache", tensors.k_cache, (q.dtype, *DTYPES_OF_8BIT))
    check_beside(cache, q)
    d = q.shape[-1]
    paged = tensors.page_table is not None
    meaning = f"(pages, page, 1, {d})" if paged else f"(batch, capacity, 1, {d})"
    _check_rank(cache, 4, f"{meaning} {'with' if paged else 'without'} page_table")
    if cache.shape[2:] != (1, d):
        raise ArgumentError(
            f"k_cache: shape {cache.shape}; must be {meaning}: all query heads share one latent "
            "row per key, of q's width"
        )
    if tensors.k is not None and not cache.writable:
        raise ArgumentError(
            "k_cache: is read-only (in some frameworks all arrays are), but k is appended to it; "
            "give a writable one, or append before the call and leave out k"
        )
    return cache


def _view_output(out: Any, q: TensorView, v_width: int) -> TensorView:
    view = view_tensor("out", out, (q.dtype,))
    wanted = (*q.shape[:-1], v_width)
    if view.shape != wanted:
        raise ArgumentError(
            f"out: shape {view.shape}; must be q's with v_width columns, {wanted}: give such a "
            "tensor, or None"
        )
    return view


def _add_new(views: dict[str, TensorView], tensors: LatentTensors, q: TensorView) -> None:
    if tensors.k is None:
        return
    view = view_tensor("k", tensors.k, (q.dtype,))
    check_beside(view, q)
    wanted = (*q.shape[:-2], 1, q.shape[-1])
    if view.shape != wanted:
        raise ArgumentError(
            f"k: shape {view.shape}; must be {wanted}: a latent row for every query is appended; "
            "write others to the cache before the call, and count them in cache_lens"
        )
    views["k"] = view
