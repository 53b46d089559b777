"""FlashInfer as a peer: its prefill, and its decode attention over pages.

FlashInfer compiles a kernel when the first call to the kernel is planned; this can take minutes.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from flashsmith.benchmark.peer import (
    NO_OTHER_DTYPE,
    PeerImplementation,
    import_absence,
    torch_absence,
)
from flashsmith.benchmark.workload import DecodeWorkload, Workload
from flashsmith.errors import ArgumentError
from flashsmith.families import Problem
from flashsmith.operations import DECODE

# The size of FlashInfer's scratch memory: twice the size that its documentation recommends.
_WORKSPACE_BYTES = 256 << 20
# The page sizes for which FlashInfer has XQA kernels.
_XQA_PAGES = (16, 32, 64, 128)
# The number of keys in the pages as which XQA kernels read a dense cache.
_XQA_PAGE = 64
_XQA = "xqa_batch_decode_with_kv_cache"


def _version() -> str:
    return f"flashinfer {importlib.metadata.version('flashinfer-python')}"


@dataclass(frozen=True)
class FlashInferPrefillPeer:
    """FlashInfer's attention for packed sequences.

    A dense batch is passed as packed sequences of equal lengths. Planning a call waits for the GPU;
    the plan is made once, and only the run is timed.
    """

    name: str = "flashinfer"

    def absence(self, problem: Problem) -> str | None:
        return torch_absence() or import_absence("flashinfer")

    def version(self) -> str:
        return _version()

    def prepare(self, workload: Workload) -> PeerImplementation:
        flashinfer = importlib.import_module("flashinfer")
        w, p = workload, workload.problem
        starts = [
            _whole(range(0, (p.batch + 1) * seq, seq), w.q.device) for seq in (p.seq_q, p.seq_k)
        ]
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(w.q.device), "NHD")
        options = {"causal": p.semantics.key_mask.hides, **_options(p, w.q, w.k)}
        _check_keywords(wrapper.plan, options)
        wrapper.plan(*starts, p.heads_q, p.heads_k, p.d, p.d_v, **options)
        tensors = [tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (w.q, w.k, w.v)]
        shape = (*w.q.shape[:-1], p.d_v)

        def call() -> Any:
            return wrapper.run(*tensors)

        return PeerImplementation(self.name, call, lambda returned: returned.reshape(shape))


@dataclass(frozen=True)
class FlashInferDecodePeer:
    """FlashInfer's decode attention over a paged cache; a dense cache is passed as one page per
    sequence.

    Planning a call waits for the GPU; the plan is made once, and only the run is timed.
    """

    name: str
    tensor_cores: bool

    def absence(self, problem: Problem) -> str | None:
        if absent := _decode_absence(problem):
            return absent
        if problem.seq_q > 1 and not problem.semantics.key_mask.hides:
            return "FlashInfer always masks several queries of a sequence causally"
        if problem.seq_q > 1 and not self.tensor_cores:
            return "FlashInfer takes several queries only with tensor cores"
        return import_absence("flashinfer")

    def version(self) -> str:
        return _version()

    def prepare(self, workload: DecodeWorkload) -> PeerImplementation:
        flashinfer = importlib.import_module("flashinfer")
        w, p = workload, workload.problem
        page = p.page or p.seq_k
        pages = -(-p.seq_k // page)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(w.q.device), "NHD", use_tensor_cores=self.tensor_cores
        )
        options = _options(p, w.q, w.k_cache)
        if p.seq_q > 1:
            options["q_len_per_req"] = p.seq_q
        _check_keywords(wrapper.plan, options)
        device = w.q.device
        wrapper.plan(
            _whole(range(0, (p.batch + 1) * pages, pages), device),
            _whole(range(p.batch), device) if w.page_table is None else w.page_table.flatten(),
            _whole([p.seq_k - (pages - 1) * page] * p.batch, device),
            *(p.heads_q, p.heads_k, p.d, page),
            **options,
        )
        q, caches = w.q.reshape(-1, p.heads_q, p.d), (w.k_cache, w.v_cache)

        def call() -> Any:
            return wrapper.run(q, caches)

        return PeerImplementation(self.name, call, lambda returned: returned.reshape(w.q.shape))


@dataclass(frozen=True)
class FlashInferXqaPeer:
    """FlashInfer's XQA kernels for decode; they read a dense cache as pages of 64 keys."""

    name: str = "flashinfer_xqa"

    def absence(self, problem: Problem) -> str | None:
        if absent := _decode_absence(problem):
            return absent
        if problem.seq_q > 1:
            return "FlashInfer's XQA kernels are compared with one query per sequence"
        if not problem.semantics.score.is_plain:
            return f"FlashInfer's XQA kernels have no {problem.semantics.score}"
        if problem.page and problem.page not in _XQA_PAGES:
            return f"FlashInfer's XQA kernels take pages of {_XQA_PAGES} keys"
        if not problem.page and problem.seq_k % _XQA_PAGE:
            return f"FlashInfer's XQA kernels take a dense cache of a multiple of {_XQA_PAGE} keys"
        if absent := import_absence("flashinfer.decode"):
            return absent
        has_xqa = hasattr(importlib.import_module("flashinfer.decode"), _XQA)
        return None if has_xqa else f"flashinfer.decode has no {_XQA}"

    def version(self) -> str:
        return _version()

    def prepare(self, workload: DecodeWorkload) -> PeerImplementation:
        import torch

        function = getattr(importlib.import_module("flashinfer.decode"), _XQA)
        w, p = workload, workload.problem
        table, caches = w.page_table, (w.k_cache, w.v_cache)
        if table is None:
            pages = p.seq_k // _XQA_PAGE
            table = _whole(range(p.batch * pages), w.q.device).view(p.batch, pages)
            caches = tuple(it.view(-1, _XQA_PAGE, p.heads_k, p.d) for it in caches)
        # The default of bmm1_scale would be 1. XQA names its scales after the two GEMMs; this scale
        # is that of the first GEMM.
        options = {"bmm1_scale": p.d**-0.5, "kv_layout": "NHD"}
        if p.window is not None:
            options["window_left"] = p.window[0]
        q, lens = w.q.reshape(-1, p.heads_q, p.d), w.cache_lens.view(torch.uint32)
        # XQA kernels keep semaphores in the workspace and leave them at zero. Other kernels would
        # not, so the workspace is not shared with them.
        workspace = _workspace(w.q.device, _XQA)

        def call() -> Any:
            return function(q, caches, workspace, table, lens, p.seq_k, **options)

        return PeerImplementation(self.name, call, lambda returned: returned.reshape(w.q.shape))


def _decode_absence(problem: Problem) -> str | None:
    """Why FlashInfer's decode kernels cannot take part in the comparison; None if no reason is
    known."""
    if absent := torch_absence():
        return absent
    if problem.operation != DECODE.name:
        return "it is compared only over a cache"
    return NO_OTHER_DTYPE if problem.cache else None


def _options(problem: Problem, q: Any, k: Any) -> dict[str, Any]:
    """Returns the keywords of a plan, for the dtypes, the window and the softcap."""
    options: dict[str, Any] = {"q_data_type": q.dtype, "kv_data_type": k.dtype}
    if problem.window is not None:
        options["window_left"] = problem.window[0]
    if not problem.semantics.score.is_plain:
        options["logits_soft_cap"] = problem.softcap
    return options


def _check_keywords(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raises ArgumentError if a function lacks one of these keywords."""
    known = inspect.signature(function).parameters
    if any(it.kind is inspect.Parameter.VAR_KEYWORD for it in known.values()):
        return  # It refuses unknown keywords itself.
    if lacking := sorted(options.keys() - known.keys()):
        raise ArgumentError(f"{function.__qualname__} has no {lacking[0]}")


def _whole(numbers: Any, device: Any) -> Any:
    import torch

    return torch.as_tensor(numbers, dtype=torch.int32, device=device)


@cache
def _workspace(device: Any, kernels: str = "") -> Any:
    """FlashInfer's scratch memory, initially zero.

    One workspace per group of kernels is enough, because FlashInfer's calls run one after another
    on one stream.
    """
    import torch

    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
