"""One sequence's rows, and the ways to compute them that promise the same bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import oracle
from bit_inputs import draw
from ml_dtypes import bfloat16

from flashsmith import attention_with_cache
from flashsmith.families import DType, KernelConfig, Problem, Semantics
from flashsmith.runtime.forward_pass import run_forward

_DTYPES = {DType.FP16: np.float16, DType.BF16: bfloat16}
Result = tuple[Any, Any]  # (o, lse)


@dataclass(frozen=True)
class Sequence:
    """A problem: its last ``queries`` rows over ``keys`` keys."""

    queries: int
    keys: int
    dtype: DType = DType.FP16
    d: int = 64
    heads_k: int = 1
    group: int = 1
    causal: bool = True
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    sinks: tuple[float, ...] = ()
    packed: bool = False
    kind: str = "random"
    arch: int = 90
    seed: int = 0
    #: That of v; 0 stands for d.
    d_v: int = 0

    @property
    def keywords(self) -> dict[str, Any]:
        sinks = np.resize(np.array(self.sinks, np.float32), self.heads) if self.sinks else None
        return {
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": sinks,
        }

    @property
    def heads(self) -> int:
        return self.heads_k * self.group

    @property
    def semantics(self) -> Semantics:
        """Of forward kernels for any lengths."""
        mask = "window" if self.window != (None, None) else "causal" if self.causal else "none"
        return Semantics(mask, self.softcap > 0, self.packed, uneven=True)

    def semantics_of_cache(self, cfg: KernelConfig) -> Semantics:
        """Of decode kernels."""
        problem = Problem(
            *(1, self.queries, self.keys, self.heads, self.heads_k, self.d, self.dtype),
            Semantics(self.semantics.mask, self.softcap > 0, self.packed, uneven=self.packed),
            operation="decode",
            d_v=self.d_v,
        )
        return problem.required_semantics(cfg)

    @cached_property
    def tensors(self) -> tuple[Any, Any, Any]:
        """q, k and v of a batch of one."""
        q, k, v = draw(
            self.kind,
            self.seed,
            _DTYPES[self.dtype],
            (1, self.queries, self.heads, self.d),
            (1, self.keys, self.heads_k, self.d),
        )
        # Columns that v has beyond d are halves of others.
        column = np.arange(self.d_v or self.d)
        wide = v[..., column % self.d] * (0.5 ** (column // self.d)).astype(v.dtype)
        return q, k, np.ascontiguousarray(wide)

    @cached_property
    def expected(self) -> Result:
        return oracle.attention(*self.tensors, **self.keywords, arch=self.arch)

    # --- forward ---------------------------------------------------------------------------------

    def forward(self, cfg: KernelConfig, *tensors: Any, **keywords: Any) -> Result:
        """By a kernel, of these tensors or others. The log-sum-exp is None where none is asked
        for."""
        keywords = {"return_lse": True, **self.keywords, **keywords}
        tensors = tensors or self.tensors
        if self.packed:
            return self._packed(cfg, tensors, keywords)
        result = run_forward(cfg, *tensors, emulate=True, arch=self.arch, **keywords)
        return result.o, result.lse

    def _packed(self, cfg: KernelConfig, tensors: Any, keywords: Any) -> Result:
        """Behind a sequence of NaN, and an empty one."""
        before = 70
        q, k, v = (
            np.concatenate([np.full((before, *x.shape[2:]), np.nan, x.dtype), x[0]])
            for x in tensors
        )
        result = run_forward(
            *(cfg, q, k, v),
            cu_seqlens_q=np.array([0, before, before, len(q)], np.int32),
            cu_seqlens_k=np.array([0, before, before, len(k)], np.int32),
            max_seqlen_q=max(before, self.queries),
            max_seqlen_k=max(before, self.keys),
            emulate=True,
            arch=self.arch,
            **keywords,
        )
        lse = None if result.lse is None else result.lse[None, :, before:]
        return result.o[None, before:], lse

    # --- over a cache ----------------------------------------------------------------------------

    def cached(self, cfg: KernelConfig, rows: slice, page: int = 0, beside: int = 40) -> Result:
        """The rows (of the queries; end exclusive) after as many keys as they see, as a chunk of
        a prompt, beside another sequence of as many queries and ``beside`` keys. What no row may
        read, and V of unused slots too, is NaN."""
        q, k, v = self.tensors
        length = self.keys - self.queries + rows.stop
        count = rows.stop - rows.start
        others = replace(self, queries=count, keys=beside, kind="random", seed=11).tensors
        caches, table = [], None
        capacity = max(length, beside) + 21
        for own, other in ((k, others[1]), (v, others[2])):
            cache = np.full((2, capacity, *own.shape[2:]), np.nan, k.dtype)
            cache[0, :length], cache[1, :beside] = own[0, :length], other[0]
            if page:
                cache, table = _in_pages(cache, page)
            caches.append(cache)
        queries: Any = [q[:, rows], others[0]]
        offsets = None
        if self.packed:
            queries, offsets = [it[0] for it in queries], np.array([0, count, 2 * count], np.int32)
        o, lse = attention_with_cache(
            np.concatenate(queries),
            *caches,
            cache_lens=np.array([length, beside], np.int32),
            page_table=table,
            cu_seqlens_q=offsets,
            **self.keywords,
            return_lse=True,
            config=cfg,
            emulate=True,
        )
        return (o[None, :count], lse[None, :, :count]) if self.packed else (o[:1], lse[:1])

    # --- rows ------------------------------------------------------------------------------------

    def differing(self, found: Result, rows: slice | None = None) -> int:
        """Elements of o and lse with other bits than the specification says."""
        rows = rows or slice(0, self.queries)
        o, lse = self.expected
        return differing(found[0], o[:, rows]) + differing(found[1], lse[:, :, rows])


def differing(found: Any, expected: Any) -> int:
    """Elements with other bits. NaN equals NaN."""
    assert found.shape == expected.shape
    kind = f"u{found.dtype.itemsize}"
    found, expected = np.ascontiguousarray(found), np.ascontiguousarray(expected)
    apart = found.view(kind) != expected.view(kind)
    both_nan = np.isnan(found.astype(np.float32)) & np.isnan(expected.astype(np.float32))
    return int((apart & ~both_nan).sum())


def _in_pages(cache: Any, page: int) -> tuple[Any, Any]:
    """The cache's slots in pages, in no order, and the table of these."""
    batch, capacity = cache.shape[:2]
    pages = -(-capacity // page)
    padded = np.full((batch, pages * page, *cache.shape[2:]), np.nan, cache.dtype)
    padded[:, :capacity] = cache
    order = np.random.default_rng(5).permutation(batch * pages).astype(np.int32)
    paged = np.empty((batch * pages, page, *cache.shape[2:]), cache.dtype)
    paged[order] = padded.reshape(batch * pages, page, *cache.shape[2:])
    return paged, order.reshape(batch, pages)
