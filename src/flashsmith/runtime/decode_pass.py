"""Attention over a KV cache by one named or chosen kernel, wherever the tensors are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.families import KernelConfig, Problem, Semantics
from flashsmith.families.legality import D_STEP, padding_advice, unequal_d_advice
from flashsmith.operations.decode import DECODE, FREE, check_given, check_split
from flashsmith.runtime import cached_launches
from flashsmith.runtime.arguments import LONGEST, check_output, check_sinks
from flashsmith.runtime.cached_launches import (
    CachedCalls,
    Options,
    Signature,
    overlap,
)
from flashsmith.runtime.forward_options import (
    NO_WINDOW,
    ForwardOptions,
    Mask,
    check_flag,
    check_mask,
    check_scale,
    check_softcap,
)
from flashsmith.runtime.forward_pass import (
    DEFAULT_EMULATED_ARCH,
    Chooser,
    check_server,
    kernel_for,
    limits_of,
)
from flashsmith.runtime.frameworks.base import TensorView
from flashsmith.runtime.launch_counter import note_launch
from flashsmith.runtime.operation_run import (
    CachedOperation,
    PreparedOperation,
    prepare_operation,
)
from flashsmith.runtime.repeated_calls import Arguments, remember_repeated
from flashsmith.runtime.running_time import check_seconds, estimate_seconds
from flashsmith.runtime.sequences import check_packing
from flashsmith.runtime.tensors import (
    DTYPES,
    check_beside,
    share_memory,
    view_tensor,
    view_vector,
)

_SPECS = {tensor.name: tensor for tensor in DECODE.tensors}
# Addresses of a CachedDecode's tensors that need no further look, 100 KiB of the host's memory.
_MOST_KNOWN = 256


class DecodeTensors(NamedTuple):
    """The tensors of a call in the operation's order, but for the LSE, which is never given."""

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


# Those that are keywords of ``attention_with_cache``.
_KEYWORDS = DecodeTensors._fields[3:]


class DecodeOptions(NamedTuple):
    """The other keywords of ``attention_with_cache``, as the caller gave them."""

    causal: Any = True
    window: Any = NO_WINDOW
    softcap: Any = 0.0
    scale: Any = None
    max_seqlen_q: Any = None
    rotary_interleaved: Any = False
    split: Any = "invariant"
    return_lse: Any = False


class DecodeRequest(NamedTuple):
    """A checked call: its problem, whose seq_k is the capacity of the cache, and its tensors."""

    problem: Problem
    views: Mapping[str, TensorView]
    mask: Mask
    scale: float
    softcap: float
    rotary_interleaved: bool
    split: str
    lse: bool

    @property
    def q(self) -> TensorView:
        return self.views["q"]

    @property
    def suits_tma(self) -> bool:
        """Whether TMA can copy the tensors, which these kernels do not ask of it."""
        return False

    @property
    def deterministic(self) -> bool:
        """Whether only repeatable kernels serve, which all of them are."""
        return False


class CachedDecode(CachedOperation):
    """A call of ``attention_with_cache``."""

    def __init__(self, prepared: PreparedOperation, given: Sequence[str]) -> None:
        """``given`` are the operation's names of the tensors that the caller gave, in the order of
        DecodeTensors."""
        super().__init__(prepared)
        framework, views = self._framework, prepared.views
        q = views["q"]
        self._address_of = framework.tensor_type.data_ptr
        placed = [(_SPECS[name], views[name]) for name in given]
        self._masks = [
            (place, max(spec.alignment, view.element_size) - 1)
            for place, (spec, view) in enumerate(placed)
            if 0 not in view.shape
        ]
        # What is not to lie between two addresses' bounds, or at the distance that was checked.
        self._overlaps = [
            (
                *(place, other, *overlap(view, its)),
                its.address - view.address if others.name in spec.may_share else None,
            )
            for place, (spec, view) in enumerate(placed)
            if spec.name in prepared.outputs
            for other, (others, its) in enumerate(placed)
            if other != place
        ]
        self._known: set[tuple[int, ...]] = set()
        self._new_o, self._new_lse = None, None
        addressed = [*given]
        if "o" in given:
            self._out = given.index("o")
        else:
            self._new_o = framework.allocator(q.source, views["o"].shape, views["o"].dtype)
            addressed.append("o")
        if "lse" in views:
            self._new_lse = framework.allocator(q.source, views["lse"].shape, "float32")
            addressed.append("lse")
        places = {name: place for place, name in enumerate(addressed)}
        absent = len(addressed) + (self._new_block is not None)
        order = [places.get(tensor.name, absent) for tensor in DECODE.tensors]
        if self._new_block is not None:
            order.append(absent - 1)
        while order[-1] == absent:  # may be left out
            order.pop()
        # From the addresses of ``addressed``, the block if there is one, and 0.
        self._in_order = itemgetter(*order)

    def run(self, given: tuple[Any, ...]) -> Any:
        """Launches on these tensors; returns the outputs, or None, without launching, when the
        addresses need the full checks.

        Raises LaunchError when the launch is refused.
        """
        at = (*map(self._address_of, given),)
        if at not in self._known and not self._is_usable(at):
            return None
        if self._new_o is None:
            o = given[self._out]
        else:
            o = self._new_o()
            at += (o.data_ptr(),)
        lse = None
        if self._new_lse is not None:
            lse = self._new_lse()
            at += (lse.data_ptr(),)
        stream = self._stream_of(self._ordinal)
        if self._new_block is not None:
            block_at, _block = self._block_on(stream)  # alive until the launch
            at += (block_at,)
        try:
            self._function(stream, *self._in_order((*at, 0)))
        except RuntimeError as error:
            raise self._launch.refused(error) from None
        note_launch("gpu", self._n_kernels)
        return o if lse is None else (o, lse)

    def _is_usable(self, at: tuple[int, ...]) -> bool:
        """Whether tensors at these addresses are aligned, and none is written where another lies.

        Notes those that are: a model's layers have theirs, at every step.
        """
        for place, unaligned in self._masks:
            if not at[place] or at[place] & unaligned:
                return False
        for written, read, low, high, checked in self._overlaps:
            apart = at[read] - at[written]
            if low < apart < high and apart != checked:
                return False
        if len(self._known) >= _MOST_KNOWN:
            self._known = set()
        self._known.add(at)
        return True


def run_decode(
    config: KernelConfig | Chooser, tensors: tuple[Any, ...], options: Options, emulate: bool
) -> Any:
    """The output, or (output, LSE), by ``config``'s kernel; ``config`` may be a Chooser.

    ``tensors`` are in the order of DecodeTensors, ``options`` in that of DecodeOptions. Calls that
    differ only in addresses are checked in full once.
    """
    calls = cached_launches.cached
    signature, call = cached_launches.find(
        decode_signature, calls, config, tensors, options, emulate
    )
    if call is not None:
        outputs = call.run(tuple(tensor for tensor in tensors if tensor is not None))
        if outputs is not None:
            return outputs
    asked = DecodeOptions(*options)
    return _run_and_remember(config, DecodeTensors(*tensors), asked, emulate, calls, signature)


def remember_decode(
    config: KernelConfig | Chooser, arguments: Arguments, names: tuple[str, ...]
) -> None:
    """Has run_repeated serve calls with such arguments, three tensors and then the values of the
    keywords ``names``, if a call with these is cached."""
    orders, calls = cached_launches.repeated, cached_launches.cached
    keywords = dict(zip(names, arguments[3:], strict=True))
    tensors = (*arguments[:3], *map(keywords.pop, _KEYWORDS, repeat(None)))
    defaults = DecodeOptions._field_defaults
    options = tuple(map(keywords.pop, defaults, defaults.values()))
    emulate = keywords.pop("emulate", False)
    keywords.pop("config", None)
    # Autograd follows some only where it is enabled: what holds now may not hold later.
    if keywords or any(getattr(tensor, "requires_grad", False) for tensor in tensors):
        return
    _, call = cached_launches.find(decode_signature, calls, config, tensors, options, emulate)
    if call is not None:
        remember_repeated(orders, arguments, names, tensors, call.run)


def decode_signature(
    kind: Any,
    grad_enabled: bool,
    chosen: Any,
    tensors: tuple[Any, ...],
    options: Options,
    emulate: Any,
) -> Signature | None:
    """Everything but addresses that checks and the choice of a kernel depend on, as
    cached_launches.call_signature."""
    found = ["decode", chosen, emulate, type(emulate), options, *map(type, options)]
    window = options[1]
    if window is not NO_WINDOW:
        found += map(type, window)
    for tensor in tensors:
        if tensor is None:
            found.append(None)
            continue
        if type(tensor) is not kind or (grad_enabled and tensor.requires_grad) or tensor.is_neg():
            return None
        found += (tensor.dtype, tensor.device, tensor.shape, tensor.stride())
    return tuple(found)


def _run_and_remember(
    config: KernelConfig | Chooser,
    tensors: DecodeTensors,
    asked: DecodeOptions,
    emulate: bool,
    calls: CachedCalls,
    signature: Signature | None,
) -> Any:
    request = check_request(tensors, asked)
    q, problem = request.q, request.problem
    device = limits_of(
        q,
        check_flag("emulate", emulate),
        config.OLDEST_ARCH if isinstance(config, KernelConfig) else DEFAULT_EMULATED_ARCH,
    )
    cfg = config if isinstance(config, KernelConfig) else config(problem, device)
    semantics = check_server(cfg, problem, device)
    if 0 in q.shape:
        return _nothing(request, tensors.out)
    chosen = cfg
    if request.split == FREE and not isinstance(config, KernelConfig):
        # Bits may differ from batch to batch: another kernel that is built serves as well.
        cfg = kernel_for(cfg, semantics, request, device, config).config
    on_host = q.device.kind == "cpu"
    if on_host:
        longest = check_contents(request)
        if not emulate:
            known = replace(problem, seq_k=longest)
            check_seconds(cfg, known, estimate_seconds(cfg, known))
    windowed = request.mask.kind == "window"
    given = {"o" if name == "out" else name: it for name, it in tensors._asdict().items()}
    prepared = prepare_operation(
        cfg,
        problem,
        given,
        options={
            "scale": request.scale,
            "softcap": request.softcap,
            "left": request.mask.left if windowed else None,
            "right": request.mask.right if windowed else None,
            "rotary_interleaved": request.rotary_interleaved,
            "rotary_dtype": _rotary_dtype(request),
            "split": request.split,
        },
        wanted=["lse"] if request.lse else [],
        emulate=on_host,
    )
    outputs = prepared.run().outputs
    if signature is not None and prepared.launch is not None and cfg == chosen:
        call = CachedDecode(prepared, [name for name, it in given.items() if it is not None])
        options = ForwardOptions(
            window=asked.window,
            softcap=asked.softcap,
            scale=asked.scale,
            max_seqlen_q=asked.max_seqlen_q,
        )
        cached_launches.remember(calls, signature, call, options)
    return (outputs["o"], outputs["lse"]) if request.lse else outputs["o"]


def _nothing(request: DecodeRequest, out: Any) -> Any:
    """The outputs of a call without queries."""
    q, p = request.q, request.problem
    o = q.framework.allocate(q.source, q.shape) if out is None else out
    if not request.lse:
        return o
    shape = (p.heads_q, q.shape[0]) if p.semantics.packed else (p.batch, p.heads_q, p.seq_q)
    return o, q.framework.allocate(q.source, shape, "float32")


# --- checks --------------------------------------------------------------------------------------


def check_request(tensors: DecodeTensors, asked: DecodeOptions) -> DecodeRequest:
    """The request of tensors and options, for any kernel; no contents are read.

    Raises ArgumentError, its message beginning with the argument's name, when one is unusable.
    """
    check_given([name for name, it in tensors._asdict().items() if it is not None])
    packed = tensors.cu_seqlens_q is not None
    q = view_tensor("q", tensors.q)
    _check_rank(
        q,
        3 if packed else 4,
        "(total_q, heads_q, d) with cu_seqlens_q"
        if packed
        else "(batch, seq_q, heads_q, d), or (total_q, heads_q, d) with cu_seqlens_q",
    )
    *rows, heads_q, d = q.shape
    if not d or d % D_STEP:
        raise ArgumentError(
            f"q: d_head {d} (shape {q.shape}); must be a multiple of {D_STEP}: {padding_advice(d)}"
        )
    views = {"q": q}
    _add_caches(views, tensors)
    _, slots, heads_k, _ = views["k_cache"].shape
    if not heads_q or not heads_k or heads_q % heads_k:
        raise ArgumentError(
            f"k_cache: {heads_k} heads and q {heads_q}; q's must be a multiple of the cache's: "
            "check that heads are the last dimension but one"
        )
    lens = view_vector("cache_lens", tensors.cache_lens, "int32")
    check_beside(lens, q)
    views["cache_lens"] = lens
    batch, seq_q = lens.shape[0], rows[0]
    if packed:
        batch_q, seq_q = _packed(tensors, asked, q, views)
    else:
        if asked.max_seqlen_q is not None:
            raise ArgumentError(
                f"max_seqlen_q={asked.max_seqlen_q}: is of packed sequences; give cu_seqlens_q "
                "too, or leave it out"
            )
        batch_q, seq_q = rows
    if batch != batch_q:
        raise ArgumentError(
            f"cache_lens: {batch} lengths, and q has {batch_q} sequences; give one of each"
        )
    capacity = _capacity(tensors, views, batch)
    _add_new(views, tensors, q, heads_k)
    _add_rotary(views, tensors, q)
    mask = check_mask(asked.causal, asked.window)
    scale = check_scale(asked.scale, d)
    softcap = check_softcap(asked.softcap, scale)
    sinks = check_sinks(tensors.sinks, q, heads_q)
    if sinks is not None:
        views["sinks"] = sinks
    appended = [views[name] for name in ("k_cache", "v_cache")] if "k" in views else []
    for cache in appended:
        _check_writable(cache, views)
    if tensors.out is not None:
        views["o"] = check_output(tensors.out, q, list(views.values()), "out")
    longest = max(capacity, seq_q)
    if longest > LONGEST:
        raise ArgumentError(f"k_cache: {capacity} keys; kernels count up to {LONGEST}")
    semantics = Semantics(mask.kind, softcap > 0, packed, uneven=packed)
    page = slots if tensors.page_table is not None else 0
    problem = Problem(
        *(batch, seq_q, capacity, heads_q, heads_k, d, DTYPES[q.dtype], semantics),
        *(DECODE.name, page, "", mask.window_keys),
    )
    return DecodeRequest(
        problem,
        views,
        mask,
        scale,
        softcap,
        check_flag("rotary_interleaved", asked.rotary_interleaved),
        check_split(asked.split),
        check_flag("return_lse", asked.return_lse),
    )


def _check_rank(view: TensorView, rank: int, meaning: str) -> None:
    if len(view.shape) != rank:
        raise ArgumentError(
            f"{view.name}: rank {len(view.shape)} (shape {view.shape}); must be {rank}: {meaning}"
        )


def _like_q(name: str, tensor: Any, q: TensorView) -> TensorView:
    """A view of a tensor of q's framework, device and dtype."""
    if tensor is None:
        raise ArgumentError(f"{name}: missing; give a tensor")
    view = view_tensor(name, tensor, (q.dtype,))
    check_beside(view, q)
    return view


def _add_caches(views: dict[str, TensorView], tensors: DecodeTensors) -> None:
    q = views["q"]
    paged = tensors.page_table is not None
    meaning = "(pages, page, heads_k, d)" if paged else "(batch, capacity, heads_k, d)"
    k_cache = _like_q("k_cache", tensors.k_cache, q)
    v_cache = _like_q("v_cache", tensors.v_cache, q)
    for view in (k_cache, v_cache):
        _check_rank(view, 4, f"{meaning} {'with' if paged else 'without'} page_table")
    for view in (k_cache, v_cache):
        d, d_q = view.shape[-1], q.shape[-1]
        if d != d_q:
            raise ArgumentError(
                f"{view.name}: shape {view.shape}; d_head must be q's, {d_q}: "
                f"{unequal_d_advice(view.name, d, d_q)}"
            )
    if v_cache.shape != k_cache.shape:
        raise ArgumentError(
            f"v_cache: shape {v_cache.shape}; must be k_cache's, {k_cache.shape}: give a value for "
            "every key"
        )
    views |= {"k_cache": k_cache, "v_cache": v_cache}


def _packed(
    tensors: DecodeTensors, asked: DecodeOptions, q: TensorView, views: dict[str, TensorView]
) -> tuple[int, int]:
    """How many packed sequences there are, and a length that none exceeds. On a device it is the
    caller's, or that of all rows: nothing is read there."""
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
    """How many keys the cache can hold of a sequence."""
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
    _check_rank(table, 2, "(batch, most pages of a sequence)")
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
    views: dict[str, TensorView], tensors: DecodeTensors, q: TensorView, heads_k: int
) -> None:
    """Views of what is appended."""
    for name, tensor in (("k", tensors.k), ("v", tensors.v)):
        if tensor is None:
            continue
        view = _like_q(name, tensor, q)
        wanted = (*q.shape[:-2], heads_k, q.shape[-1])
        if view.shape != wanted:
            raise ArgumentError(
                f"{name}: shape {view.shape}; must be q's with the cache's heads, {wanted}: a key "
                "and a value for every query are appended; write others to the caches before the "
                "call, at cache_lens, count them there, and leave k and v out"
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
            f"sin: {sin.dtype} of shape {sin.shape}; must be as cos, {cos.dtype} of {cos.shape}"
        )
    if 2 * cos.shape[1] > q.shape[-1]:
        raise ArgumentError(
            f"cos: shape {cos.shape}; a row of d={q.shape[-1]} has {q.shape[-1] // 2} pairs at most"
        )


def _check_writable(cache: TensorView, views: Mapping[str, TensorView]) -> None:
    if not cache.writable:
        raise ArgumentError(
            f"{cache.name}: is read-only, as all arrays of some frameworks are, and k and v are "
            "appended to it; give a writable one, or append before the call and leave them out"
        )
    if cache.name == "k_cache" and share_memory(cache, views["v_cache"]):
        raise ArgumentError("v_cache: shares memory with k_cache, and both are written")


def _rotary_dtype(request: DecodeRequest) -> str | None:
    cos = request.views.get("cos")
    return "float32" if cos is not None and cos.dtype == "float32" else None


def check_contents(request: DecodeRequest) -> int:
    """Checks lengths and page table of host tensors; returns the length of the longest sequence.

    Raises ArgumentError where a sequence has fewer keys than none, or more than fit, where a page
    that it uses does not exist, where a sequence appends to a slot that another uses, and where a
    position has no angle.
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
        room = f"{p.seq_k} less the {more[wrong]} that are appended" if more[wrong] else p.seq_k
        raise ArgumentError(
            f"cache_lens[{wrong}]={before[wrong]}: must be from 0 to what the cache can hold, "
            f"{room}; give a larger cache{' or more pages' * bool(p.page)}"
        )
    if "cos" in views and (after > (positions := views["cos"].shape[0])).any():
        raise ArgumentError(
            f"cos: {positions} positions, and the longest sequence has {after.max()} keys after "
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
    """Raises ArgumentError where a slot that is appended to holds another key, too: of a second
    sequence, or of another page of the same one."""
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
            f"page_table: sequence {row} appends to {here}, which sequence {rows[other]} {doing}, "
            "too; give each a page of its own where it appends"
        )
