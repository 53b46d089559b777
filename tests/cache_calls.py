"""Calls of attention over a cache with score and mask functions, and float64 results of the
functions themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

import flashsmith
from flashsmith import masks, scores
from flashsmith.chooser.functions import CacheSizes, CallFunctions, bound_over_cache
from flashsmith.families import DType, KernelConfig, Semantics, device_spec
from flashsmith.families.mma_sync_decode import MMA_SYNC_DECODE
from flashsmith.runtime.decode_pass import (
    DecodeOptions,
    DecodeTensors,
    check_request,
    with_own_checked,
)
from flashsmith.runtime.kernel_choice import check_server
from flashsmith.runtime.libraries import LoadedKernel, loaded_kernels
from flashsmith.runtime.prepared_call import prepare
from ptxlab.interface import Observer

HEADS_Q, HEADS_K, D, PAGE, BLOCK = 4, 2, 56, 16, 32
GROUP = HEADS_Q // HEADS_K
CAPACITY = 320
_CONFIGS = MMA_SYNC_DECODE.proof_configs(DType.FP16, D)
# The first also has a kernel for sequences of many rows. The second merges in clusters from sm_90
# on. In the third each warp has its own rows, also in clusters.
CHUNKS = next(it for it in _CONFIGS if it.chunk_rows)
EARLY = next(it for it in _CONFIGS if it.early and not it.own_rows)
ROWS = next(it for it in _CONFIGS if it.own_rows)
Function = Callable[..., Any]


@dataclass
class Cache:
    """Sequences with keys, of which the cache has dropped some before the first, and queries at the
    end of each. Appended keys are the queries' own."""

    lens: tuple[int, ...]
    queries: tuple[int, ...]
    seed: int = 0
    dropped: tuple[int, ...] = ()
    # Keys that are NaN in the cache: (sequence, K/V head, key).
    hidden: np.ndarray | None = None
    d: int = D

    def __post_init__(self) -> None:
        draw = self.draw = np.random.default_rng(self.seed)
        self.dropped = self.dropped or (0,) * len(self.lens)
        shape = len(self.lens), CAPACITY, HEADS_K, self.d
        self.k, self.v = draw.standard_normal((2, *shape)).astype(np.float16)
        of_rows = HEADS_Q, self.d
        self.q = [draw.standard_normal((n, *of_rows)).astype(np.float16) for n in self.queries]

    def call(self, *, paged: bool = False, append: bool = True) -> dict[str, Any]:
        """The tensors of a call; what the cache does not hold yet is NaN."""
        caches = [self.k.copy(), self.v.copy()]
        held = np.array(self.lens) - np.array(self.queries) * append
        for cache in caches:
            cache[np.arange(CAPACITY) >= held[:, None]] = np.nan
            if self.hidden is not None:
                cache.swapaxes(1, 2)[self.hidden] = np.nan
        call: dict[str, Any] = {"cache_lens": held.astype(np.int32)}
        if any(self.dropped):
            call["kv_offset"] = np.array(self.dropped, np.int32)
        if paged:
            order = self.draw.permutation(len(self.lens) * CAPACITY // PAGE)
            caches = [it.reshape(-1, PAGE, HEADS_K, self.d)[order] for it in caches]
            call["page_table"] = np.argsort(order).astype(np.int32).reshape(len(self.lens), -1)
        call["k_cache"], call["v_cache"] = caches
        packed = len(set(self.queries)) > 1
        join = np.concatenate if packed else np.stack
        call["q"] = join(self.q)
        if packed:
            call["cu_seqlens_q"] = np.cumsum([0, *self.queries]).astype(np.int32)
        if append:
            for name, whole in (("k", self.k), ("v", self.v)):
                ends = zip(whole, self.lens, self.queries, strict=True)
                call[name] = join([keys[end - n : end] for keys, end, n in ends])
        return call

    def split(self, o: np.ndarray) -> list[np.ndarray]:
        """The rows of each sequence."""
        return list(o) if o.ndim == 4 else np.split(o, np.cumsum(self.queries)[:-1])

    def expected(
        self, score: Function | None, mask: Function | None, *, causal: bool
    ) -> list[np.ndarray]:
        """The outputs of each sequence in float64, from the functions themselves."""
        found = []
        for b, (length, n) in enumerate(zip(self.lens, self.queries, strict=True)):
            keys = self.dropped[b] + np.arange(length)
            rows = self.dropped[b] + length - n + np.arange(n)[:, None]
            o = np.zeros((n, HEADS_Q, self.d))
            for h in range(HEADS_Q):
                k, v = (it[b, :length, h // GROUP].astype(float) for it in (self.k, self.v))
                s = self.q[b][:, h].astype(float) @ k.T * self.d**-0.5
                s = s if score is None else score(s, b, h, rows, keys)
                seen = (keys <= rows) | (not causal)
                seen = seen if mask is None else seen & mask(b, h, rows, keys)
                s = np.where(seen, s, -np.inf)
                weights = np.exp(s - s.max(axis=1, keepdims=True, initial=-1e30))
                total = weights.sum(axis=1, keepdims=True)
                o[:, h] = weights @ v / np.where(total > 0, total, 1)
            found.append(o)
        return found

    def hide_unread(self, table: np.ndarray, together: int) -> None:
        """Makes all keys NaN that a kernel does not read which reads ``together`` keys if the table
        of blocks (batch, K/V heads, 1, blocks) shows one of them."""
        short = -table.shape[-1] * BLOCK % together
        keys = np.pad(np.repeat(table[:, :, 0], BLOCK, axis=2), ((0, 0), (0, 0), (0, short)))
        is_read = keys.reshape(len(table), HEADS_K, -1, together).any(axis=3)
        self.hidden = np.repeat(~is_read, together, axis=2)[..., :CAPACITY]


@dataclass
class ScaledCache(Cache):
    """The same with 8-bit floats in the cache. Keys and values are these times the scales of their
    heads, which are powers of two, so that appended ones are exact."""

    d: int = 64
    codes: Any = ml_dtypes.float8_e4m3fn
    k_scale: tuple[float, float] = (0.5, 2.0)
    v_scale: tuple[float, float] = (0.25, 0.5)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("k", "v"):
            held = getattr(self, name).astype(self.codes).astype(np.float16)
            setattr(self, name, held * self._scale(name).astype(np.float16))

    def _scale(self, name: str) -> np.ndarray:
        return np.array(getattr(self, f"{name}_scale"), np.float32)[:, None]

    def call(self, *, paged: bool = False, append: bool = True) -> dict[str, Any]:
        call = super().call(paged=paged, append=append)
        for name in ("k", "v"):
            held = call[f"{name}_cache"] / self._scale(name)
            call[f"{name}_cache"] = held.astype(self.codes)
            call[f"{name}_scale"] = self._scale(name)[:, 0]
        return call


def curved_in_documents(cache: Cache) -> tuple[Function, Function]:
    """A score that is not linear in the score before, in documents."""
    slopes = cache.draw.uniform(-0.1, 0.4, HEADS_Q).astype(np.float32)

    def curved(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + 0.1 * s * s - slopes[h] * (q - k)

    return curved, in_documents(cache)[1]


def in_documents(cache: Cache) -> tuple[Function, Function]:
    """ALiBi in sorted documents; of every second sequence a document begins at each key."""
    most = CAPACITY + max(cache.dropped)
    ids = np.sort(cache.draw.integers(0, 5, (len(cache.lens), most)), axis=1)
    ids[::2] = np.arange(most)
    slopes = cache.draw.uniform(-0.1, 0.4, HEADS_Q).astype(np.float32)
    return scores.alibi(slopes), masks.documents(ids.astype(np.int32))


def listed(cache: Cache, share: float = 0.3) -> tuple[np.ndarray, Function]:
    """A table of the blocks that each K/V head of each sequence sees, and its mask."""
    n_blocks = -(-(CAPACITY + max(cache.dropped)) // BLOCK)
    table = cache.draw.random((len(cache.lens), HEADS_K, 1, n_blocks)) < share
    return table, masks.blocks(table, None, BLOCK, group=GROUP)


def run(cache: Cache, cfg: KernelConfig | None, *, paged: bool, **asked: Any) -> list[np.ndarray]:
    """The outputs of each sequence, from attention_with_cache()."""
    call = cache.call(paged=paged)
    o = flashsmith.attention_with_cache(**call, config=cfg, emulate=True, **asked)
    return cache.split(o)


@dataclass(frozen=True)
class Emulation:
    """A kernel of a config for a causal call with functions, on a small GPU of an architecture."""

    config: KernelConfig
    arch: int
    score: Function | None
    mask: Function | None
    sm_count: int = 12

    @property
    def options(self) -> DecodeOptions:
        functions = CallFunctions(self.score, None, self.mask)
        bound, causal, window = bound_over_cache(functions, (True, (None, None)), CacheSizes())
        return DecodeOptions(causal=causal, window=window, program=bound)

    @property
    def semantics(self) -> Semantics:
        return Semantics("causal", uneven=True, program=self.options.program.program)

    @property
    def kernel(self) -> LoadedKernel:
        return loaded_kernels.get(self.config, self.arch, self.semantics)

    def wrong(
        self,
        cache: Cache,
        *,
        paged: bool = False,
        append: bool = True,
        observers: Sequence[Observer] = (),
        changed: LoadedKernel | None = None,
    ) -> str:
        """What is wrong with the outputs, which are NaN before; '' if nothing is."""
        call = cache.call(paged=paged, append=append)
        request = check_request(DecodeTensors(**call), self.options)
        device = replace(device_spec(self.arch), sm_count=self.sm_count)
        check_server(self.config, request.problem, device)
        kernel = changed or self.kernel
        prepared = prepare(with_own_checked(request), device, lambda: kernel, poisoned=True)
        result = prepared.run(observers, None)
        findings = [it for one in observers for it in getattr(one, "findings", ())]
        if findings:
            return str(findings[0])
        expected = cache.expected(self.score, self.mask, causal=True)
        found = zip(cache.split(result.outputs["o"]), expected, strict=True)
        for i, (got, want) in enumerate(found):
            error = np.abs(got - want).max(initial=0.0)
            if not error <= 2e-3:
                return f"o of sequence {i}: an error of {error}"
        return ""
