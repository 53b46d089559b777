"""What a PeerCase calls, as a user of the peer would, and what is right.

Arguments that flashsmith refuses must be refused by their name; then the call is made as the
refusal, or docs/coming-from-flash-attn.md, says to.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashsmith
from flashsmith import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flashsmith.errors import ArgumentError
from flashsmith.families import DType
from flashsmith.verify import compare, compute_references
from flashsmith.verify.attention_semantics import Attention, offsets, row_slices
from flashsmith.verify.decode_reference import rotated
from flashsmith.verify.gradient_tolerance import compare_gradients
from flashsmith.verify.gradients import Rows, compute_gradients
from flashsmith.verify.tolerance import heads_for_enough_outputs
from peer_suites.case import PeerCase

_DTYPES = {"fp16": (np.dtype(np.float16), DType.FP16),
           "bf16": (np.dtype(ml_dtypes.bfloat16), DType.BF16)}  # fmt: skip
_NAN = np.float32("nan")
Lens = tuple[int, ...]
Outputs = tuple[Any, Any]
# Makes an array a tensor of a framework, and the other way round.
ToDevice, ToHost = Callable[[np.ndarray], Any], Callable[[Any], np.ndarray]


@dataclass
class Device:
    """Where tensors of a case are, and whether its references are computed on a GPU."""

    put: ToDevice
    get: ToHost
    on_gpu: bool = False


def check(case: PeerCase, device: Device) -> None:
    """Runs a case. Raises AssertionError where a result is wrong, or what cannot be served is not
    refused by its name."""
    run = {"dense": _dense, "packed": _packed, "cache": _cache}[case.call]
    run(case, Drawn(case), device)


def check_gradients(case: PeerCase, device: Device) -> None:
    """The same of the gradients of a packed call without pages; tensors are PyTorch's."""
    drawn = Drawn(case)
    lens_q, lens_k = drawn.lens_q, drawn.lens_k
    q, (k, v) = drawn.q(sum(lens_q)), drawn.kv(sum(lens_k))
    do = drawn.rng.standard_normal(q.shape, np.float32).astype(drawn.dtype)
    leaves = [device.put(it).requires_grad_() for it in (q, k, v)]
    o, lse, _ = flash_attn_varlen_func(
        *leaves, device.put(offsets(lens_q)), device.put(offsets(lens_k)), max(lens_q),
        max(lens_k), softmax_scale=case.scale, causal=case.causal,
        window_size=_window_size(drawn.window), softcap=case.softcap, return_attn_probs=True,
    )  # fmt: skip
    o.backward(device.put(do))
    attention = Attention(
        drawn.scale, case.causal, drawn.window, case.softcap, lens_q=lens_q, lens_k=lens_k
    )
    exact = compute_references(
        q, k, v, drawn.scale, causal=case.causal, window=drawn.window, softcap=case.softcap,
        lens_q=lens_q, lens_k=lens_k, on_gpu=device.on_gpu,
    )  # fmt: skip
    inputs = {"q": q, "k": k, "v": v, "do": do, "o": device.get(o.detach()),
              "lse": device.get(lse.detach())}  # fmt: skip
    places = [Rows(None, *its) for its in zip(row_slices(lens_q), row_slices(lens_k), strict=True)]
    expected = compute_gradients(
        inputs, attention, places, exact.o, exact.lse, on_gpu=device.on_gpu
    )
    got = {f"d{name}": device.get(it.grad) for name, it in zip("qkv", leaves, strict=True)}
    found = compare_gradients(drawn.kind, got, expected)
    assert found.ok, f"{case}: {'; '.join(found.reasons)}"


class Drawn:
    """Random numbers of a case, the same in every run."""

    def __init__(self, case: PeerCase) -> None:
        self.case = case
        self.rng = np.random.default_rng(zlib.crc32(f"{case} {case.seed}".encode()))
        self.dtype, self.kind = _DTYPES[case.dtype]
        heads, heads_k = case.heads
        rows = case.lengths[0] * case.batch
        repeats = heads_for_enough_outputs(1, rows, heads, case.d) // heads
        self.heads, self.heads_k = heads * repeats, heads_k * repeats
        self.scale = case.d**-0.5 if case.scale is None else case.scale
        queries, keys = case.lengths
        self.lens_q = self.lengths(queries)
        self.lens_k = self.lengths(keys)
        self.window = self._window(keys)
        sinks = self.rng.standard_normal(self.heads, np.float32).astype(self.dtype)
        self.sinks = sinks if case.sinks else None

    def lengths(self, longest: int) -> Lens:
        least = {
            "near": longest - max(1, min(20, longest // 3)),
            "third": longest // 3,
            "full": longest,
            "any": 1,
        }[self.case.unequal]
        drawn = self.rng.integers(min(max(least, 1), longest), longest + 1, self.case.batch)
        return tuple(map(int, drawn))

    def _window(self, keys: int) -> tuple[int | None, int | None]:
        if self.case.window is not None:
            return self.case.window
        left, right = map(int, self.rng.integers(0, max(keys, 1), 2))
        # An offset of 0 or 1 is no offset: 0 is the diagonal, and -1 no limit.
        return {
            "": (None, None),
            "both": (left, right),
            "left": (left, None),
            "right": (None, right),
            "before": (None, -max(right, 2)),
            "after": (-max(left, 2), None),
        }[self.case.local]

    def q(self, *rows: int) -> np.ndarray:
        """Queries whose scores reach the cap, if there is one."""
        factor = max(1.0, self.case.softcap / 4)
        drawn = self.rng.standard_normal((*rows, self.heads, self.case.d), np.float32)
        return (drawn * factor).astype(self.dtype)

    def kv(self, *rows: int) -> tuple[np.ndarray, np.ndarray]:
        shape = (*rows, self.heads_k, self.case.d)
        first, second = (self.rng.standard_normal(shape, np.float32) for _ in "kv")
        return first.astype(self.dtype), second.astype(self.dtype)

    def nothing(self, *shape: int) -> np.ndarray:
        """What must never matter."""
        return np.full((*shape, self.heads_k, self.case.d), _NAN).astype(self.dtype)


# --- the three calls -----------------------------------------------------------------------------


def _dense(case: PeerCase, drawn: Drawn, device: Device) -> None:
    queries, keys = case.lengths
    q, (k, v) = drawn.q(case.batch, queries), drawn.kv(case.batch, keys)

    def call(*tensors: np.ndarray, window: Any, scale: float | None) -> Outputs:
        placed = [device.put(it) for it in tensors]
        if drawn.sinks is not None:
            none = tuple(None if limit == -1 else limit for limit in window)
            found = flashsmith.attention(
                *placed, causal=case.causal, window=none, softcap=case.softcap, scale=scale,
                sinks=device.put(drawn.sinks), return_lse=True,
            )  # fmt: skip
        else:
            found = flash_attn_func(
                *placed, causal=case.causal, window_size=window, softcap=case.softcap,
                softmax_scale=scale, return_attn_probs=True,
            )  # fmt: skip
        return device.get(found[0]), device.get(found[1])

    o, lse = _as_refusals_say(case, drawn, call, q, k, v)
    lens_q, lens_k = (queries,) * case.batch, (keys,) * case.batch
    flat = [it.reshape(-1, *it.shape[2:]) for it in (q, k, v)]
    o, lse = o.reshape(flat[0].shape), np.moveaxis(lse, 1, 0).reshape(drawn.heads, -1)
    _judge(case, drawn, device, (o, lse), flat, lens_q, lens_k)


def _packed(case: PeerCase, drawn: Drawn, device: Device) -> None:
    lens_q, lens_k = drawn.lens_q, drawn.lens_k
    q, (k, v) = drawn.q(sum(lens_q)), drawn.kv(sum(lens_k))
    used = lens_k
    if case.used and not case.page:
        used = tuple(int(drawn.rng.integers(0, n + 1)) for n in lens_k)
    own = [slice(it.start, it.start + n) for it, n in zip(row_slices(lens_k), used, strict=True)]
    seen = [np.concatenate([it[rows] for rows in own]) for it in (k, v)]
    for it in (k, v):  # what does not count is never read
        for rows, whole in zip(own, row_slices(lens_k), strict=True):
            it[rows.stop : whole.stop] = _NAN
    how: dict[str, Any] = {"max_seqlen_q": max(lens_q), "max_seqlen_k": max(lens_k)}
    how |= {"cu_seqlens_q": offsets(lens_q)}
    pages = None
    if case.used:
        how["seqused_k"] = np.array(used, np.int32)
    if case.page:
        pages = _Pages(case, drawn, [(k[rows], v[rows]) for rows in own])
        how["block_table"] = pages.table
    if not (case.page and case.used):  # vLLM gives none
        how["cu_seqlens_k"] = offsets(lens_k)
    placed = {name: device.put(it) if isinstance(it, np.ndarray) else it
              for name, it in how.items()}  # fmt: skip

    def call(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, window: Any, scale: Any) -> Outputs:
        o, lse, _ = flash_attn_varlen_func(
            *map(device.put, (q, k, v)), causal=case.causal, window_size=window,
            softcap=case.softcap, softmax_scale=scale, return_attn_probs=True, **placed,
        )  # fmt: skip
        return device.get(o), device.get(lse)

    keys = (k, v) if pages is None else pages.caches
    outputs = _as_refusals_say(case, drawn, call, q, *keys)
    _judge(case, drawn, device, outputs, [q, *seen], lens_q, used)


def _cache(case: PeerCase, drawn: Drawn, device: Device) -> None:
    queries, capacity = case.lengths
    lens_q = drawn.lens_q if case.packed_queries else (queries,) * case.batch
    new = _new_lengths(case, drawn, lens_q)
    room = max(max(new), max(lens_q) if case.rotary else 0)
    least = 0 if case.append else 1
    before = tuple(
        int(drawn.rng.integers(min(least, capacity), max(capacity - room, least) + 1)) for _ in new
    )
    q = drawn.q(sum(lens_q))
    old = [drawn.kv(n) for n in before]
    appended = [drawn.kv(n) for n in new]
    turn = _angles(case, drawn, capacity)

    # What is right, sequence by sequence.
    seen_q, seen = [], []
    for rows, length, (k, v), (more_k, more_v) in zip(
        row_slices(lens_q), before, old, appended, strict=True
    ):
        its, more = q[rows], more_k
        if turn is not None:
            steps = np.arange(len(its)) * (case.causal or bool(case.local))
            its = rotated(its, *turn, length + steps, case.interleaved)
            more = rotated(more_k, *turn, length + np.arange(len(more)), case.interleaved)
        seen_q.append(its)
        seen.append((np.concatenate([k, more]), np.concatenate([v, more_v])))
    after = tuple(len(k) for k, _ in seen)

    pages = _Pages(case, drawn, old, capacity)
    call = _CacheCall(case, drawn, device, q, lens_q, before, appended, turn, pages)
    o, lse = call.as_refusals_say(new, seen_q, seen, after)
    if o is None:
        return
    if not case.packed_queries:
        o, lse = o.reshape(q.shape), np.moveaxis(lse, 1, 0).reshape(drawn.heads, -1)
    inputs = [np.concatenate(it) for it in (seen_q, *zip(*seen, strict=True))]
    _judge(case, drawn, device, (o, lse), inputs, lens_q, after)


def _new_lengths(case: PeerCase, drawn: Drawn, lens_q: Lens) -> Lens:
    if not case.append:
        return (0,) * case.batch
    if case.append == "as many":
        return lens_q
    if case.packed_queries:
        return drawn.lengths(max(1, case.lengths[0] // 2))
    return (int(drawn.rng.integers(1, case.lengths[0] + 1)),) * case.batch


def _angles(case: PeerCase, drawn: Drawn, positions: int) -> tuple[np.ndarray, np.ndarray] | None:
    if not case.rotated:
        return None
    angles = drawn.rng.uniform(0, 2 * np.pi, (positions, case.rotated // 2))
    return np.cos(angles).astype(drawn.dtype), np.sin(angles).astype(drawn.dtype)


class _Pages:
    """Caches with the keys of sequences, NaN where there are none: pages in random order with a
    table, or dense ones."""

    def __init__(
        self,
        case: PeerCase,
        drawn: Drawn,
        sequences: list[tuple[np.ndarray, np.ndarray]],
        capacity: int = 0,
    ) -> None:
        longest = capacity or max(len(k) for k, _ in sequences)
        self.page = case.page or longest
        most = -(-longest // self.page)
        count = len(sequences) * most
        order = drawn.rng.permutation(count) if case.page else np.arange(count)
        self.table = order.reshape(len(sequences), most).astype(np.int32)
        self.caches = tuple(drawn.nothing(count, self.page) for _ in "kv")
        for b, pair in enumerate(sequences):
            self.write(b, 0, pair)

    def places(self, b: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        keys = np.arange(first, first + count)
        return self.table[b, keys // self.page], keys % self.page

    def write(self, b: int, first: int, pair: tuple[np.ndarray, np.ndarray]) -> None:
        for cache, rows in zip(self.caches, pair, strict=True):
            cache[self.places(b, first, len(rows))] = rows


class _CacheCall:
    """flash_attn_with_kvcache() for a case."""

    def __init__(self, case: PeerCase, drawn: Drawn, device: Device, q: np.ndarray, lens_q: Lens,
                 before: Lens, appended: list[Any], turn: Any, pages: _Pages) -> None:  # fmt: skip
        self.case, self.drawn, self.device, self.lens_q = case, drawn, device, lens_q
        self.before, self.pages = before, pages
        self.given: dict[str, Any] = {"q": q, "cache_seqlens": np.array(before, np.int32)}
        if case.append:
            rows = [np.concatenate(side) for side in zip(*appended, strict=True)]
            self.given |= dict(zip("kv", rows, strict=True))
        if turn is not None:
            self.given |= dict(zip(("rotary_cos", "rotary_sin"), turn, strict=True))
            self.given["rotary_seqlens"] = self.given["cache_seqlens"].copy()
        if case.page:
            self.given["page_table"] = pages.table
        if case.packed_queries:
            self.given |= {"cu_seqlens_q": offsets(lens_q), "max_seqlen_q": max(lens_q)}
            if case.append:
                self.given["cu_seqlens_k_new"] = offsets([len(k) for k, _ in appended])
        else:
            for name in self.given.keys() & {"q", "k", "v"}:
                it = self.given[name]
                self.given[name] = it.reshape(case.batch, -1, *it.shape[1:])

    def as_refusals_say(
        self, new: Lens, seen_q: list[Any], seen: list[Any], after: Lens
    ) -> tuple[Any, Any]:
        """The outputs; (None, None) where there is no way to them."""
        case = self.case
        if case.leftpad:
            left = np.array([n // 2 for n in self.before], np.int32)
            self._refused("cache_leftpad", cache_leftpad=left)
            return None, None
        if case.batch_idx:
            # Then the rows of the cache are indexed before the call, as they are here.
            idx = np.arange(case.batch, dtype=np.int32)
            self._refused("cache_batch_idx", cache_batch_idx=idx)
        if case.append and new != self.lens_q:
            checked_first = "q" if case.d % 8 else "k"
            self._refused("cu_seqlens_k_new" if case.packed_queries else checked_first)
            for name in ("k", "v", "cu_seqlens_k_new", "rotary_cos", "rotary_sin",
                         "rotary_seqlens"):  # fmt: skip
                self.given.pop(name, None)
            self.given["q"] = np.concatenate(seen_q).reshape(self.given["q"].shape)
            self.given["cache_seqlens"] = np.array(after, np.int32)
            for b, (k, v) in enumerate(seen):
                first = self.before[b]
                self.pages.write(b, first, (k[first:], v[first:]))
        if case.d % 8:
            return _padded(case, self, self.given, self.pages.caches)
        found = self.run(self.given, self.pages.caches, None)
        if case.append:
            for b, pair in enumerate(seen):
                self.pages.write(b, 0, pair)
            for got, wanted in zip(self.written, self.pages.caches, strict=True):
                np.testing.assert_array_equal(_bits(got), _bits(wanted))
        return found

    def run(self, given: dict[str, Any], caches: Any, scale: float | None, **more: Any) -> Outputs:
        put = self.device.put
        placed = {name: put(it.copy()) if isinstance(it, np.ndarray) else it
                  for name, it in {**given, **more}.items()}  # fmt: skip
        q, cached = placed.pop("q"), [put(it.copy()) for it in caches]
        case, window = self.case, _window_size(self.drawn.window)
        if self.drawn.sinks is None:
            o, lse = flash_attn_with_kvcache(
                q, *cached, **placed, softmax_scale=scale or case.scale, causal=case.causal,
                window_size=window, softcap=case.softcap, num_splits=case.splits,
                rotary_interleaved=case.interleaved, return_softmax_lse=True,
            )  # fmt: skip
        else:
            o, lse = flashsmith.attention_with_cache(
                q, *cached, cache_lens=placed["cache_seqlens"],
                page_table=placed.get("page_table"), cu_seqlens_q=placed.get("cu_seqlens_q"),
                max_seqlen_q=placed.get("max_seqlen_q"), causal=case.causal,
                window=self.drawn.window, softcap=case.softcap, scale=scale or case.scale,
                sinks=put(self.drawn.sinks), return_lse=True,
            )  # fmt: skip
        self.written = [self.device.get(it) for it in cached]
        return self.device.get(o), self.device.get(lse)

    def _refused(self, name: str, **more: Any) -> None:
        with pytest.raises(ArgumentError, match=f"^{name}: "):
            self.run(self.given, self.pages.caches, None, **more)


# --- what refusals say to do ---------------------------------------------------------------------


def _window_size(window: Any) -> tuple[int | None, ...]:
    """As FlashAttention 2 says no limit."""
    return tuple(-1 if limit is None else limit for limit in window)


def _as_refusals_say(
    case: PeerCase, drawn: Drawn, call: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> Outputs:
    scale, window = case.scale, _window_size(drawn.window)
    left, right = drawn.window
    if case.d % 8:
        with pytest.raises(ArgumentError, match=f"^q: d_head {case.d} .* pad q, k and v with"):
            call(q, k, v, window=window, scale=scale)
        q, k, v = (_wider(it, case.d) for it in (q, k, v))
        o, lse = call(q, k, v, window=window, scale=drawn.scale)
        return o[..., : case.d], lse
    if case.local == "before":
        assert right is not None
        with pytest.raises(ArgumentError, match=f"^window_size=.* leave out the last {-right} key"):
            _refused_window(call, q, k, v, (None, right))
        most = max(k.shape[1] + right, 0)
        return call(q, k[:, :most], v[:, :most], window=(-1, 0), scale=scale)
    if case.local == "after":
        assert left is not None
        with pytest.raises(ArgumentError, match=f"^window_size=.* leave out the last {-left} quer"):
            _refused_window(call, q, k, v, (left, None))
        most = max(q.shape[1] + left, 0)
        # Rows without keys are 0, and their LSE is that of nothing, or of their sink.
        nothing = np.full(drawn.heads, -np.inf) if drawn.sinks is None else drawn.sinks
        o, lse = np.zeros_like(q), np.empty((len(q), q.shape[2], q.shape[1]), np.float32)
        lse[:] = nothing.astype(np.float32)[:, None]
        o[:, :most], lse[..., :most] = call(q[:, :most], k, v, window=(0, -1), scale=scale)
        return o, lse
    return call(q, k, v, window=window, scale=scale)


def _refused_window(call: Any, q: Any, k: Any, v: Any, window: Any) -> None:
    flash_attn_func(q, k, v, window_size=window)


def _padded(case: PeerCase, call: _CacheCall, given: dict[str, Any], caches: Any) -> Outputs:
    with pytest.raises(ArgumentError, match=f"^q: d_head {case.d} .* pad q, k and v with zeros"):
        call.run(given, caches, None)
    wide = {name: _wider(it, case.d) if name in ("q", "k", "v") else it
            for name, it in given.items()}  # fmt: skip
    o, lse = call.run(wide, [_wider(it, case.d) for it in caches], call.drawn.scale)
    return o[..., : case.d], lse


def _wider(tensor: np.ndarray, d: int) -> np.ndarray:
    """The tensor with columns of zeros up to a multiple of 8."""
    wide = np.zeros((*tensor.shape[:-1], -(-d // 8) * 8), tensor.dtype)
    wide[..., :d] = tensor
    return wide


# --- what is right -------------------------------------------------------------------------------


def _judge(case: PeerCase, drawn: Drawn, device: Device, outputs: Outputs,
           inputs: list[np.ndarray], lens_q: Lens, lens_k: Lens) -> None:  # fmt: skip
    sinks = None if drawn.sinks is None else drawn.sinks.astype(np.float32)
    references = compute_references(
        *inputs, drawn.scale, causal=case.causal, window=drawn.window, softcap=case.softcap,
        sinks=sinks, lens_q=lens_q, lens_k=lens_k, on_gpu=device.on_gpu,
    )  # fmt: skip
    found = compare(drawn.kind, *outputs, references, lens_q=lens_q)
    assert not found.reasons, f"{case}: {'; '.join(found.reasons)}"


def _bits(array: np.ndarray) -> np.ndarray:
    """As integers, NaN of any kind as one."""
    return np.where(np.isnan(array.astype(np.float32)), 0xFFFF, array.view(np.uint16))


def every(*suites: Any) -> Iterator[PeerCase]:
    return itertools.chain.from_iterable(test.cases() for suite in suites for test in suite)
