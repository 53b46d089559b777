"""FlashInfer as a peer: page lists, page tables and packed sequences, computed by stand-ins."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from peer_workloads import (
    CAUSAL,
    DENSE,
    FULL,
    PACKED,
    PAGED,
    SEVERAL,
    UNEQUAL,
    WINDOW,
    TorchOnTheHost,
    over_cache,
)

from flashsmith.benchmark import flashinfer_peers
from flashsmith.benchmark.flashinfer_peers import (
    FlashInferDecodePeer,
    FlashInferPrefillPeer,
    FlashInferXqaPeer,
)
from flashsmith.benchmark.peers import DECODE_PEERS, PEERS
from flashsmith.benchmark.workload import Workload
from flashsmith.errors import ArgumentError
from flashsmith.families import Problem
from flashsmith.verify import compute_references
from flashsmith.verify.attention_semantics import NO_WINDOW
from flashsmith.verify.proof_inputs import default_scale

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_is_there")]
TENSOR_CORES = FlashInferDecodePeer("flashinfer", tensor_cores=True)
CUDA_CORES = FlashInferDecodePeer("flashinfer_cuda_cores", tensor_cores=False)
XQA = FlashInferXqaPeer()
WHOLE_PAGES = Problem.parse("b2 s1:192 h8:2 d64 fp16 decode")


def computed(q: Any, k: Any, v: Any, scale: float | None = None, **masks: Any) -> Any:
    """Attention of one sequence, (rows, heads, d)."""
    import torch

    arrays = [np.asarray(tensor)[None] for tensor in (q, k, v)]
    found = compute_references(*arrays, scale or default_scale(q.shape[-1]), **masks)
    return torch.from_numpy(found.same_precision[0])


class Decode:
    """Reads pages by lists, as BatchDecodeWithPagedKVCacheWrapper does: a plan, then runs."""

    def __init__(self, workspace: Any, layout: str, *, use_tensor_cores: bool) -> None:
        assert (workspace.ndim, layout) == (1, "NHD")
        self.tensor_cores = use_tensor_cores

    def plan(self, indptr, indices, last, heads_q, heads_k, d, page, *, q_data_type, kv_data_type,
             q_len_per_req=1, logits_soft_cap=None):  # fmt: skip
        assert q_len_per_req == 1 or self.tensor_cores
        self.lists = [x.tolist() for x in (indptr, indices, last)]
        self.page, self.queries, self.sizes = page, q_len_per_req, (heads_q, heads_k, d)

    def run(self, q: Any, caches: Any) -> Any:
        import torch

        heads_q, heads_k, d = self.sizes
        assert q.shape[1:] == (heads_q, d)
        assert all(cache.shape[1:] == (self.page, heads_k, d) for cache in caches)
        indptr, indices, last = self.lists
        rows = []
        for i, short in enumerate(last):
            pages = indices[indptr[i] : indptr[i + 1]]
            length = (len(pages) - 1) * self.page + short
            k, v = (np.asarray(x)[pages].reshape(-1, *x.shape[2:])[:length] for x in caches)
            of_sequence = q[i * self.queries : (i + 1) * self.queries]
            rows.append(computed(of_sequence, k, v, causal=self.queries > 1))
        return torch.cat(rows)


class NewerDecode(Decode):
    """Takes the plan's options as `**kwargs`, as FlashInfer 0.7.4 does."""

    def plan(self, *lists_and_sizes: Any, **kwargs: Any) -> None:
        super().plan(*lists_and_sizes, **kwargs)


class Ragged:
    """Packed sequences, as BatchPrefillWithRaggedKVCacheWrapper reads them."""

    def __init__(self, workspace: Any, layout: str) -> None:
        assert (workspace.ndim, layout) == (1, "NHD")

    def plan(self, qo_indptr, kv_indptr, heads_q, heads_k, d, d_v, *, causal, q_data_type,
             kv_data_type, window_left=-1):  # fmt: skip
        self.starts = qo_indptr.tolist(), kv_indptr.tolist()
        self.sizes, self.causal, self.left = (heads_q, heads_k, d, d_v), causal, window_left

    def run(self, q: Any, k: Any, v: Any) -> Any:
        import torch

        heads_q, heads_k, d, d_v = self.sizes
        assert (q.shape[1:], k.shape[1:], v.shape[1:]) == (
            (heads_q, d),
            (heads_k, d),
            (heads_k, d_v),
        )
        masks = {"causal": self.causal, "window": NO_WINDOW}
        if self.left >= 0:
            masks = {"causal": False, "window": (self.left, 0)}
        rows = []
        for i in range(len(self.starts[0]) - 1):
            of_q, of_k = (slice(starts[i], starts[i + 1]) for starts in self.starts)
            rows.append(computed(q[of_q], k[of_k], v[of_k], **masks))
        return torch.cat(rows)


def xqa(query: Any, kv_cache: Any, workspace: Any, block_tables: Any, seq_lens: Any,
        max_seq_len: int, bmm1_scale: float = 1.0, kv_layout: str = "NHD") -> Any:  # fmt: skip
    """Pages by a table, as xqa_batch_decode_with_kv_cache reads them."""
    import torch

    assert seq_lens.dtype == torch.uint32
    assert block_tables.dtype == torch.int32
    assert workspace.count_nonzero() == 0
    assert kv_layout == "NHD"
    rows = []
    for row, length in enumerate(seq_lens.tolist()):
        pages = block_tables[row].tolist()
        k, v = (np.asarray(it)[pages].reshape(-1, *it.shape[2:])[:length] for it in kv_cache)
        assert length <= max_seq_len <= len(pages) * kv_cache[0].shape[1]
        rows.append(computed(query[row : row + 1], k, v, bmm1_scale))
    return torch.cat(rows)


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch) -> None:
    monkeypatch.setattr(flashinfer_peers, "_WORKSPACE_BYTES", 1 << 10)
    flashinfer_peers._workspace.cache_clear()


@pytest.fixture
def put(monkeypatch) -> Any:
    """Puts a module there with these classes, and 'flashinfer.decode' with these functions."""

    def put_modules(**classes: Any) -> None:
        functions = {name: classes.pop(name) for name in list(classes) if name.islower()}
        for name, its in (("flashinfer", classes), ("flashinfer.decode", functions)):
            module = ModuleType(name)
            vars(module).update(its, __path__=[])
            monkeypatch.setitem(sys.modules, name, module)

    return put_modules


@pytest.mark.parametrize("stand_in", [Decode, NewerDecode])
@pytest.mark.parametrize(
    ("peer", "problem"),
    [
        *((TENSOR_CORES, problem) for problem in (DENSE, PAGED, SEVERAL)),
        *((CUDA_CORES, problem) for problem in (DENSE, PAGED)),
    ],
    ids=str,
)
def test_it_gets_lists_of_pages(peer: Any, problem: Problem, stand_in: Any, put) -> None:
    put(BatchDecodeWithPagedKVCacheWrapper=stand_in)
    assert peer.absence(problem) is None
    w = over_cache(problem, TorchOnTheHost())
    output = peer.prepare(w).output()
    assert output.shape == w.q.shape
    assert w.check(output).ok


@pytest.mark.parametrize("problem", [PAGED, WHOLE_PAGES], ids=str)
def test_xqa_kernels_get_a_page_table(problem: Problem, put) -> None:
    put(xqa_batch_decode_with_kv_cache=xqa)
    assert XQA.absence(problem) is None
    w = over_cache(problem, TorchOnTheHost())
    output = XQA.prepare(w).output()
    assert output.shape == w.q.shape
    assert w.check(output).ok


@pytest.mark.parametrize("problem", [FULL, CAUSAL, UNEQUAL, WINDOW, PACKED], ids=str)
def test_its_prefill_gets_packed_sequences(problem: Problem, put) -> None:
    put(BatchPrefillWithRaggedKVCacheWrapper=Ragged)
    peer = FlashInferPrefillPeer()
    assert peer.absence(problem) is None
    w = Workload(problem, memory=TorchOnTheHost())
    output = peer.prepare(w).output()
    assert output.shape == w.q.shape
    verdict = w.check(output)
    assert verdict.ok, verdict.reasons


def test_its_absence_has_a_reason(monkeypatch, put) -> None:
    for name in ("flashinfer", "flashinfer.decode"):
        monkeypatch.setitem(sys.modules, name, None)
    for peer in (TENSOR_CORES, CUDA_CORES, FlashInferPrefillPeer(), XQA):
        problem = FULL if isinstance(peer, FlashInferPrefillPeer) else PAGED
        assert "flashinfer" in str(peer.absence(problem))
    assert "over a cache" in str(TENSOR_CORES.absence(FULL))
    assert "causal" in str(TENSOR_CORES.absence(replace(SEVERAL, semantics=FULL.semantics)))
    assert "tensor cores" in str(CUDA_CORES.absence(SEVERAL))
    for scaled in (PAGED, DENSE):
        for peer in (TENSOR_CORES, CUDA_CORES, XQA):
            for cache in ("e4m3", "e5m2", "scaled"):
                assert "cache with scales" in str(peer.absence(replace(scaled, cache=cache)))
    assert "one query" in str(XQA.absence(SEVERAL))
    assert "(16, 32, 64, 128)" in str(XQA.absence(replace(PAGED, page=24)))
    assert "multiple of 64 keys" in str(XQA.absence(DENSE))
    capped = Problem.parse("b2 s1:70 h2 d64 fp16 softcap decode page16")
    assert XQA.absence(capped) == "FlashInfer's XQA kernels have no softcap"
    put()
    assert XQA.absence(PAGED) == "flashinfer.decode has no xqa_batch_decode_with_kv_cache"


def test_an_option_that_a_version_lacks_is_named(put) -> None:
    put(BatchDecodeWithPagedKVCacheWrapper=Decode)
    window = Problem.parse("b2 s1:70 h2 d64 fp16 window decode")
    with pytest.raises(ArgumentError, match=r"Decode\.plan has no window_left"):
        TENSOR_CORES.prepare(over_cache(window, TorchOnTheHost()))


def test_xqa_kernels_share_no_scratch_memory_with_others() -> None:
    """They expect zeros in it."""
    first, second = (flashinfer_peers._workspace("cpu", *it) for it in ((), ("xqa",)))
    assert first.data_ptr() != second.data_ptr()
    assert first.count_nonzero() == second.count_nonzero() == 0


def test_all_are_asked_for_by_name() -> None:
    names = ("flashinfer", "flashinfer_cuda_cores", "flashinfer_xqa")
    over_caches = {peer.name: peer for peer in DECODE_PEERS}
    assert [over_caches[name] for name in names] == [TENSOR_CORES, CUDA_CORES, XQA]
    assert PEERS["flashinfer"] == FlashInferPrefillPeer()
