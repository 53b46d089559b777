"""Workloads of PyTorch's CPU tensors for tests of peers, and their right answers."""

from __future__ import annotations

from typing import Any

import numpy as np
from stand_ins import HostMemory

from flashsmith.benchmark.workload import DecodeWorkload, Workload, workload_of
from flashsmith.families import Problem
from flashsmith.verify import compute_references
from flashsmith.verify.attention_semantics import NO_WINDOW
from flashsmith.verify.proof_inputs import default_scale

FULL = Problem.parse("b2 s64 h2 d32 fp16")
CAUSAL = Problem.parse("b2 s64 h4:2 d32 fp16 causal")
UNEQUAL = Problem.parse("b2 s32:64 h2 d32 fp16 causal")
WINDOW = Problem.parse("b2 s192:256 h4:2 d32 fp16 window")
CAPPED = Problem.parse("b2 s64 h2 d32 fp16 causal softcap")
PACKED = Problem.parse("b2 s64 h2 d32 fp16 causal packed")
DENSE = Problem.parse("b2 s1:70 h8:2 d64 fp16 decode")
PAGED = Problem.parse("b2 s1:70 h8:2 d64 fp16 decode page16")
SEVERAL = Problem.parse("b2 s3:70 h8:2 d64 fp16 causal decode")


class TorchOnTheHost(HostMemory):
    """PyTorch's CPU tensors."""

    def draw(self, shape, dtype, seed, *cache) -> Any:
        import torch

        return torch.from_numpy(super().draw(shape, dtype, seed, *cache))

    def put(self, array: np.ndarray) -> Any:
        import torch

        return torch.from_numpy(array)

    def fetch(self, tensor: Any) -> np.ndarray:
        return np.asarray(tensor)

    def head(self, tensor: Any, at: Any, head: int) -> np.ndarray:
        return np.asarray(tensor[at][..., head, :])


def right_answer(w: Workload) -> np.ndarray:
    p = w.problem
    lens = {}
    if w.packed:
        lens = {"lens_q": (p.seq_q,) * p.batch, "lens_k": (p.seq_k,) * p.batch}
    found = compute_references(w.q, w.k, w.v, default_scale(p.d), causal=w.causal, **lens)
    return found.same_precision


def right_answer_of(w: Workload) -> np.ndarray:
    q, k, v = (np.asarray(tensor) for tensor in (w.q, w.k, w.v))
    p = w.problem
    return compute_references(
        q,
        k,
        v,
        default_scale(p.d),
        causal=w.causal,
        window=p.window or NO_WINDOW,
        softcap=p.softcap,
    ).o


def exact_attention(q: Any, k: Any, v: Any, *, return_lse: bool, causal: bool) -> Any:
    """o and lse of PyTorch's tensors."""
    import torch

    arrays = [np.asarray(tensor) for tensor in (q, k, v)]
    found = compute_references(*arrays, scale=default_scale(q.shape[-1]), causal=causal)
    return torch.from_numpy(found.o.astype(arrays[0].dtype)), torch.from_numpy(
        found.lse.astype(np.float32)
    )


def over_cache(problem: Problem, memory: Any = None) -> DecodeWorkload:
    made = workload_of(problem, 0, memory or HostMemory())
    assert isinstance(made, DecodeWorkload)
    return made


def right_over_cache(w: DecodeWorkload) -> np.ndarray:
    """Of a dense cache or pages, in q's layout."""
    caches = [np.asarray(cache) for cache in (w.k_cache, w.v_cache)]
    if w.problem.page:
        pages = np.asarray(w.page_table)
        caches = [cache[pages].reshape(len(pages), -1, *cache.shape[2:]) for cache in caches]
    k, v = (cache[:, : w.problem.seq_k] for cache in caches)
    scale = default_scale(w.problem.d)
    return compute_references(np.asarray(w.q), k, v, scale, causal=w.causal).same_precision
