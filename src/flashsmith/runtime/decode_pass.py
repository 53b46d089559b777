"""Computes attention over a KV cache with a named or chosen kernel, on a GPU or in the emulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.families import KernelConfig, Problem, Semantics
from flashsmith.families.legality import D_STEP, padding_advice, unequal_d_advice
from flashsmith.operations.decode import DECODE, FREE, check_given, check_split
from flashsmith.runtime.arguments import (
    LONGEST,
    check_output,
    check_sinks,
    mask_options,
    program_for,
)
from flashsmith.runtime.bits import resolve_bits
from flashsmith.runtime.cache_scales import (
    Scales,
    add_scales,
    cache_format,
    check_d,
    check_one_dtype,
)
from flashsmith.runtime.cached_calls import Invocation, Remember, run_cached
from flashsmith.runtime.forward_pass import read_names, with_reads
from flashsmith.runtime.frameworks.base import TensorView
from flashsmith.runtime.kernel_choice import (
    Chooser,
    as_installed,
    check_server,
    config_and_device,
    kernel_for,
)
from flashsmith.runtime.libraries import LoadedKernel
from flashsmith.runtime.prepared_call import prepare
from flashsmith.runtime.program_arguments import check_program_arguments
from flashsmith.runtime.request import Request, check_operation
from flashsmith.runtime.running_time import check_seconds, estimate_seconds
from flashsmith.runtime.sequences import check_packing
from flashsmith.runtime.tensors import (
    DTYPES,
    check_beside,
    share_memory,
    view_tensor,
    view_vector,
)
from flashsmith.semantics.cache_format import DTYPES_OF_8BIT
from flashsmith.semantics.signature import (
    NO_WINDOW,
    ForwardOptions,
    check_flag,
    check_k_scale,
    check_mask,
    check_scale,
    check_softcap,
)


class DecodeTensors(NamedTuple):
    """A call's tensors in the operation's order, without the LSE, which callers never pass. Scales
    of the cache that are given as numbers are in DecodeOptions."""

    q: Any
    k_cache: Any
    v_cache: Any
    cache_lens: Any
    out: Any = None
    page_table: Any = None
    k: Any = None
    v: Any = None
    cos: Any = None
    sin: Any = None
    sinks: Any = None
    cu_seqlens_q: Any = None
    kv_offset: Any = None
    k_scale: Any = None
    v_scale: Any = None


class DecodeOptions(NamedTuple):
    """The other keywords of ``attention_with_cache``, as the caller passed them."""

    causal: Any = True
    window: Any = NO_WINDOW
    softcap: Any = 0.0
    scale: Any = None
    max_seqlen_q: Any = None
    rotary_interleaved: Any = False
    split: Any = "invariant"
    return_lse: Any = False
    bits: Any = None
    program: Any = None
    k_scale_value: Any = None
    v_scale_value: Any = None


# The operation's names for the tensors of a decode_call, in order.
_NAMES = tuple("o" if name == "out" else name for name in DecodeTensors._fields)


def run_decode(
    config: KernelConfig | Chooser,
    tensors: DecodeTensors,
    options: DecodeOptions,
    emulate: bool,
) -> Any:
    """Returns the output, or (output, LSE), computed by the kernel of ``config`` or of the config
    that a Chooser picks.

    The full checks run once for calls that differ only in tensor addresses.
    """

    def run(remember: Remember) -> Any:
        return _run(config, tensors, options, emulate, remember)

    asked = decode_call(config, tensors, options, emulate)
    return run_cached(asked, (*_NAMES, *read_names(options)), run)


def decode_call(
    config: KernelConfig | Chooser,
    tensors: DecodeTensors,
    options: DecodeOptions,
    emulate: bool,
) -> Invocation:
    """Returns the Invocation under which this call is cached."""
    name, options, reads = with_reads("decode", options)
    return Invocation(name, (*tensors, *reads), (*options, config, emulate))


def _run(
    config: KernelConfig | Chooser,
    tensors: DecodeTensors,
    asked: DecodeOptions,
    emulate: bool,
    remember: Remember,
) -> Any:
    request = check_request(tensors, asked)
    q, problem = request.first, request.problem
    cfg, device = config_and_device(config, request, check_flag("emulate", emulate))
    semantics = check_server(cfg, problem, device)
    names = ("o", "lse") if "lse" in request.wanted else ("o",)
    if 0 in q.shape:
        return _nothing(request, tensors.out)
    chosen, kernel = cfg, None
    may_be_another = request.options["split"] == FREE or problem.bits != ""
    if may_be_another and not isinstance(config, KernelConfig):
        # Another built kernel may serve the call: either the bits are canonical and so do not
        # depend on the kernel, or the bits may differ from batch to batch anyway.
        kernel = kernel_for(cfg, semantics, request, device, config)
        cfg = kernel.config
    if q.device.kind == "cpu":
        longest = check_contents(request)
        if not emulate:
            known = replace(problem, seq_k=longest)
            check_seconds(cfg, known, estimate_seconds(cfg, known))
    request = with_own_checked(request)

    def find_kernel() -> LoadedKernel:
        if kernel is not None:
            return kernel
        has_config = isinstance(config, KernelConfig)
        wanted = semantics if has_config else as_installed(cfg, semantics, device)
        return kernel_for(cfg, wanted, request, device, None)

    prepared = prepare(request, device, find_kernel)
    outputs = prepared.run().outputs
    if cfg == chosen:
        remember(prepared, names)
    return tuple(outputs[name] for name in names) if len(names) > 1 else outputs["o"]


def with_own_checked(request: Request) -> Request:
    """Checks the operation's own tensors and options by the operation's specification, and returns
    the request."""
    own = {spec.name for spec in DECODE.tensors}
    found = check_operation(
        request.problem,
        {name: view for name, view in request.views.items() if name in own},
        options={name: it for name, it in request.options.items() if name in DECODE.options},
        wanted=request.wanted,
    )
    return found._replace(
        views={**found.views, **request.views},
        options={**request.options, **found.options},
        sizes={**request.sizes, **found.sizes},
    )


def _nothing(request: Request, out: Any) -> Any:
    """Returns the empty outputs of a call that has no queries."""
    q, p = request.first, request.problem
    o = q.framework.allocate(q.source, (*q.shape[:-1], p.d_v)) if out is None else out
    if "lse" not in request.wanted:
        return o
    shape = (p.heads_q, q.shape[0]) if p.semantics.packed else (p.batch, p.heads_q, p.seq_q)
    return o, q.framework.allocate(q.source, shape, "float32")


# --- checks --------------------------------------------------------------------------------------


def check_request(tensors: DecodeTensors, asked: DecodeOptions) -> Request:
    """Checks tensors and options, and returns the request, which does not depend on the kernel. No
    tensor's contents are read.

    Raises ArgumentError, starting with the argument's name, when an argument is unusable.
    """
    check_given([name for name, it in tensors._asdict().items() if it is not None])
    packed = tensors.cu_seqlens_q is not None
    q = _view_q(tensors.q, packed)
    heads_q, d = q.shape[-2:]
    views = {"q": q}
    _add_caches(views, tensors)
    _, slots, heads_k, d_v = views["v_cache"].shape
    _check_heads(heads_q, heads_k)
    batch, seq_q, capacity = add_sequences(views, tensors, asked)
    _add_new(views, tensors, q, (heads_k, d_v))
    _add_rotary(views, tensors, q)
    _add_offset(views, tensors, batch)
    scales = Scales((tensors.k_scale, tensors.v_scale), (asked.k_scale_value, asked.v_scale_value))
    scale_numbers = add_scales(views, scales)
    its_format = cache_format(views, has_scales=scales.are_given)
    mask, bits = check_mask(asked.causal, asked.window), resolve_bits(asked.bits)
    if "kv_offset" in views and bits:
        # Kernels for windows find the first chunk themselves and mask keys at positions before the
        # cache's start.
        mask = mask._replace(kind="window")
    scale = check_scale(asked.scale, d)
    softcap = check_softcap(asked.softcap, scale)
    sinks = check_sinks(tensors.sinks, q, heads_q)
    if sinks is not None:
        views["sinks"] = sinks
    _add_outputs(views, tensors, d_v)
    if max(capacity, seq_q) > LONGEST:
        raise ArgumentError(f"k_cache: {capacity} keys; kernels count up to {LONGEST}")
    check_d(its_format, "k_cache", d)
    check_d(its_format, "v_cache", d_v)
    check_k_scale(scale_numbers.get("k_scale_value", 1.0), scale, softcap)
    bound = asked.program
    semantics = Semantics(
        *(mask.kind, softcap > 0, packed),
        uneven=packed or bound is not None,
        program=program_for(bound, bits),
    )
    page = slots if tensors.page_table is not None else 0
    problem = Problem(
        *(batch, seq_q, capacity, heads_q, heads_k, d, DTYPES[q.dtype], semantics),
        *(DECODE.name, page, "", mask.window_keys, bits, its_format.label, d_v),
    )
    options = mask_options(mask, scale, softcap) | {
        **_rotary_options(asked, views),
        "split": check_split(asked.split),
        **scale_numbers,
    }
    wanted = ["lse"] if check_flag("return_lse", asked.return_lse) else []
    if bound is None:
        return Request(problem, views, options, {}, wanted)
    read = check_program_arguments(bound, q)
    options["program_numbers"] = read.numbers
    return Request(problem, views | read.views, options, read.sizes, wanted)


def _add_outputs(views: dict[str, TensorView], tensors: DecodeTensors, d_v: int) -> None:
    """Adds the output, if one is given, and checks that the caches may be written if rows are
    appended."""
    for name in ("k_cache", "v_cache") if "k" in views else ():
        _check_writable(views[name], views)
    if tensors.out is not None:
        views["o"] = check_output(tensors.out, views["q"], list(views.values()), "out", d_v=d_v)


def _rotary_options(asked: DecodeOptions, views: dict[str, TensorView]) -> dict[str, Any]:
    cos = views.get("cos")
    return {
        "rotary_interleaved": check_flag("rotary_interleaved", asked.rotary_interleaved),
        "rotary_dtype": "float32" if cos is not None and cos.dtype == "float32" else None,
    }


def _check_heads(heads_q: int, heads_k: int) -> None:
    if not heads_q or not heads_k or heads_q % heads_k:
        raise ArgumentError(
            f"k_cache: {heads_k} heads and q {heads_q}; q's must be a multiple of the cache's: "
            "check that heads are the second-to-last dimension"
        )


def _view_q(tensor: Any, packed: bool) -> TensorView:
    q = view_tensor("q", tensor)
    _check_rank(
        q,
        3 if packed else 4,
        "(total_q, heads_q, d) with cu_seqlens_q"
        if packed
        else "(batch, seq_q, heads_q, d), or (total_q, heads_q, d) with cu_seqlens_q",
    )
    d = q.shape[-1]
    if not d or d % D_STEP:
        raise ArgumentError(
            f"q: d_head {d} (shape {q.shape}); must be a multiple of {D_STEP}: {padding_advice(d)}"
        )
    return q


def add_sequences(
    views: dict[str, TensorView], tensors: DecodeTensors, asked: DecodeOptions
) -> tuple[int, int, int]:
    """Adds views of the tensors that describe the sequences to the views of q and k_cache.

    Returns the number of sequences and upper bounds on the numbers of queries and keys per
    sequence.
    """
    batch, seq_q = _add_lengths(views, tensors, asked)
    return batch, seq_q, _capacity(tensors, views, batch)


def _add_lengths(
    views: dict[str, TensorView], tensors: DecodeTensors, asked: DecodeOptions
) -> tuple[int, int]:
    """Returns the number of sequences, and an upper bound on the number of queries per sequence."""
    q = views["q"]
    lens = view_vector("cache_lens", tensors.cache_lens, "int32")
    check_beside(lens, q)
    views["cache_lens"] = lens
    if tensors.cu_seqlens_q is not None:
        batch_q, seq_q = _packed(tensors, asked, q, views)
    else:
        if asked.max_seqlen_q is not None:
            raise ArgumentError(
                f"max_seqlen_q={asked.max_seqlen_q}: is for packed sequences; give cu_seqlens_q "
                "too, or leave it out"
            )
        batch_q, seq_q = q.shape[:2]
    batch = lens.shape[0]
    if batch != batch_q:
        raise ArgumentError(
            f"cache_lens: {batch} lengths, but q has {batch_q} sequences; give one length for each"
        )
    return batch, seq_q


def _add_offset(views: dict[str, TensorView], tensors: DecodeTensors, batch: int) -> None:
    if tensors.kv_offset is None:
        return
    offset = view_vector("kv_offset", tensors.kv_offset, "int32")
    check_beside(offset, views["q"])
    if offset.shape[0] != batch:
        raise ArgumentError(
            f"kv_offset: {offset.shape[0]} numbers, but q has {batch} sequences; give the number "
            "of dropped keys of each"
        )
    views["kv_offset"] = offset


def _check_rank(view: TensorView, rank: int, meaning: str) -> None:
    if len(view.shape) != rank:
        raise ArgumentError(
            f"{view.name}: rank {len(view.shape)} (shape {view.shape}); must be {rank}: {meaning}"
        )


def _like_q(name: str, tensor: Any, q: TensorView, others: tuple[str, ...] = ()) -> TensorView:
    """Returns a view of a tensor that must have q's framework and device, and q's dtype or a dtype
    in ``others``."""
    if tensor is None:
        raise ArgumentError(f"{name}: missing; give a tensor")
    view = view_tensor(name, tensor, (q.dtype, *others))
    check_beside(view, q)
    return view


def _add_caches(views: dict[str, TensorView], tensors: DecodeTensors) -> None:
    q = views["q"]
    paged = tensors.page_table is not None
    meaning = "(pages, page, heads_k, d)" if paged else "(batch, capacity, heads_k, d)"
    k_cache = _like_q("k_cache", tensors.k_cache, q, DTYPES_OF_8BIT)
    v_cache = _like_q("v_cache", tensors.v_cache, q, DTYPES_OF_8BIT)
    check_one_dtype(k_cache, v_cache)
    for view in (k_cache, v_cache):
        _check_rank(view, 4, f"{meaning} {'with' if paged else 'without'} page_table")
    d, d_v, d_q = k_cache.shape[-1], v_cache.shape[-1], q.shape[-1]
    if d != d_q:
        raise ArgumentError(
            f"k_cache: shape {k_cache.shape}; d_head must be q's, {d_q}: "
            f"{unequal_d_advice('k_cache', d, d_q)}"
        )
    if v_cache.shape[:-1] != k_cache.shape[:-1]:
        raise ArgumentError(
            f"v_cache: shape {v_cache.shape}; all but d_head must be k_cache's, {k_cache.shape}: "
            "give a value for every key"
        )
    if not d_v or d_v % D_STEP:
        raise ArgumentError(
            f"v_cache: d_head {d_v} (shape {v_cache.shape}); must be a multiple of {D_STEP}: pad "
            "v_cache with zeros, and keep the output's first columns"
        )
    views |= {"k_cache": k_cache, "v_cache": v_cache}


def _packed(
    tensors: DecodeTensors, asked: DecodeOptions, q: TensorView, views: dict[str, TensorView]
) -> tuple[int, int]:
    """Returns the number of packed sequences and an upper bound on their lengths.

    Nothing is read from a device: for device tensors, the bound is the caller's or, without one,
    the total number of rows.
    """
    limit, total = asked.max_seqlen_q, q.shape[0]
    if limit is None and q.device.kind != "cpu":
        limit = total
    offsets = tensors.cu_seqlens_q
    options = ForwardOptions(
        cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=limit, max_seqlen_k=limit
    )
    packing = check_packing(options, q, q, check_contents=True)
    assert packing is not None
    views["cu_seqlens_q"] = packing.cu_seqlens_q
    return packing.batch, packing.max_seqlen_q


def _capacity(tensors: DecodeTensors, views: dict[str, TensorView], batch: int) -> int:
    """Returns how many keys the cache can hold for each sequence."""
    q, (blocks, slots, *_) = views["q"], views["k_cache"].shape
    if tensors.page_table is None:
        if blocks != batch:
            raise ArgumentError(
                f"k_cache: shape {views['k_cache'].shape}; q has {batch} sequences: give a cache "
                "of as many, or a page_table"
            )
        return slots
    table = view_tensor("page_table", tensors.page_table, ("int32",))
    check_beside(table, q)
    _check_rank(table, 2, "(batch, maximum pages of a sequence)")
    if table.shape[0] != batch:
        raise ArgumentError(
            f"page_table: shape {table.shape}; q has {batch} sequences: give a row of pages for "
            "each"
        )
    if not slots:
        raise ArgumentError(
            f"k_cache: shape {views['k_cache'].shape}; a page must have at least one key"
        )
    views["page_table"] = table
    return table.shape[1] * slots


def _add_new(
    views: dict[str, TensorView],
    tensors: DecodeTensors,
    q: TensorView,
    of_value: tuple[int, int],
) -> None:
    """Adds views of the keys and values to append. ``of_value`` is (heads_k, d_v), the shape of one
    position's values."""
    heads_k, d_v = of_value
    for name, tensor, d in (("k", tensors.k, q.shape[-1]), ("v", tensors.v, d_v)):
        if tensor is None:
            continue
        view = _like_q(name, tensor, q)
        wanted = (*q.shape[:-2], heads_k, d)
        if view.shape != wanted:
            whose = "" if d == q.shape[-1] else " and d"
            raise ArgumentError(
                f"{name}: shape {view.shape}; must be q's with the cache's heads{whose}, {wanted}: "
                "a key and a value for every query are appended; write others to the caches before "
                "the call, at cache_lens, count them there, and leave k and v out"
            )
        views[name] = view


def _add_rotary(views: dict[str, TensorView], tensors: DecodeTensors, q: TensorView) -> None:
    if tensors.cos is None:
        return
    for name, tensor in (("cos", tensors.cos), ("sin", tensors.sin)):
        view = view_tensor(name, tensor, (q.dtype, "float32"))
        check_beside(view, q)
        _check_rank(view, 2, "(positions, pairs of a row)")
        views[name] = view
    cos, sin = views["cos"], views["sin"]
    if (sin.shape, sin.dtype) != (cos.shape, cos.dtype):
        raise ArgumentError(
            f"sin: {sin.dtype} of shape {sin.shape}; must match cos, {cos.dtype} of {cos.shape}"
        )
    if 2 * cos.shape[1] > q.shape[-1]:
        raise ArgumentError(
            f"cos: shape {cos.shape}; a row of d={q.shape[-1]} has at most {q.shape[-1] // 2} pairs"
        )


def _check_writable(cache: TensorView, views: Mapping[str, TensorView]) -> None:
    if not cache.writable:
        raise ArgumentError(
            f"{cache.name}: is read-only (in some frameworks all arrays are), but k and v are "
            "appended to it; give a writable one, or append before the call and leave out k and v"
        )
    if cache.name == "k_cache" and share_memory(cache, views["v_cache"]):
        raise ArgumentError(
            "v_cache: shares memory with k_cache, and both are written; give separate caches"
        )


def check_contents(request: Request) -> int:
    """Checks the lengths and the page table of host tensors; returns the length of the longest
    sequence.

    Raises ArgumentError for a negative length, more keys than fit, a page that does not exist, an
    append to a slot that also holds another key, or a position without a rotary angle.
    """
    p, views = request.problem, request.views

    def numbers(name: str) -> np.ndarray:
        view = views[name]
        return view.framework.as_numpy(view.source).astype(np.int64)

    before = numbers("cache_lens")
    counts = np.diff(numbers("cu_seqlens_q")) if p.semantics.packed else np.full(p.batch, p.seq_q)
    more = counts * ("k" in views)
    after = before + more
    for wrong in np.flatnonzero((before < 0) | (after > p.seq_k))[:1]:
        room = f"{p.seq_k} minus the {more[wrong]} appended" if more[wrong] else p.seq_k
        raise ArgumentError(
            f"cache_lens[{wrong}]={before[wrong]}: must be from 0 to what the cache can hold, "
            f"{room}; give a larger cache{' or more pages' * bool(p.page)}"
        )
    dropped = numbers("kv_offset") if "kv_offset" in views else np.zeros_like(after)
    for wrong in np.flatnonzero((dropped < 0) | (dropped > LONGEST // 2))[:1]:
        raise ArgumentError(
            f"kv_offset[{wrong}]={dropped[wrong]}: give the number of keys before the cache's "
            f"first one, from 0 to {LONGEST // 2}"
        )
    last = after + dropped
    if "cos" in views and (last > (positions := views["cos"].shape[0])).any():
        raise ArgumentError(
            f"cos: {positions} positions, and the longest sequence has {last.max()} keys after "
            "appending; give an angle for each"
        )
    if p.page:
        _check_pages(numbers("page_table"), views["k_cache"].shape[0], p.page, before, after)
    return int(after.max(initial=0))


def _check_pages(
    table: np.ndarray, pages: int, page: int, before: np.ndarray, after: np.ndarray
) -> None:
    used = np.arange(table.shape[1]) < -(-after // page)[:, None]
    for row, column in np.argwhere(used & ((table < 0) | (table >= pages)))[:1]:
        raise ArgumentError(
            f"page_table[{row}, {column}]={table[row, column]}: the sequence's {after[row]} keys "
            f"need {-(-after[row] // page)} pages, and there "
            + (f"are 0 to {pages - 1}; give one of them" if pages else "is none; give some")
        )
    _check_appended(table, page, before, after)


def _check_appended(table: np.ndarray, page: int, before: np.ndarray, after: np.ndarray) -> None:
    """Raises ArgumentError when a slot that is appended to also holds another key.

    That key may belong to another sequence, or to the same sequence if the table lists a page
    twice.
    """
    if (after == before).all():
        return
    rows = np.repeat(np.arange(len(after)), after)
    keys = np.concatenate([*map(np.arange, after), np.zeros(0, np.int64)])
    slots = table[rows, keys // page] * page + keys % page
    _, which, times = np.unique(slots, return_inverse=True, return_counts=True)
    for wrong in np.flatnonzero((keys >= before[rows]) & (times[which] > 1))[:1]:
        row, slot = rows[wrong], slots[wrong]
        here = f"slot {slot % page} of page {slot // page}"
        others = np.flatnonzero(slots == slot)
        other = others[others != wrong][0]
        if rows[other] == row:
            columns = sorted({int(keys[it] // page) for it in (wrong, other)})
            raise ArgumentError(
                f"page_table[{row}]: names page {slot // page} at {columns[0]} and at "
                f"{columns[1]}, and the sequence appends to it; name each page once"
            )
        doing = "appends to" if keys[other] >= before[rows[other]] else "reads"
        raise ArgumentError(
            f"page_table: sequence {row} appends to {here}, which sequence {rows[other]} also "
            f"{doing}; give each sequence its own page to append to"
        )
