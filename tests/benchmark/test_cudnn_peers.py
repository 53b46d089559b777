"""cuDNN's frontend as a peer: the graphs that it is given, computed by a stand-in on the CPU."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from peer_workloads import (
    CAPPED,
    CAUSAL,
    DENSE,
    FULL,
    PACKED,
    PAGED,
    SEVERAL,
    UNEQUAL,
    WINDOW,
    TorchOnTheHost,
    exact_attention,
    over_cache,
)

from flashsmith.benchmark import cudnn_peers
from flashsmith.benchmark import workload as workload_module
from flashsmith.benchmark.cudnn_peers import CudnnGradientPeer, CudnnPeer
from flashsmith.benchmark.peers import BACKWARD_PEERS, DECODE_PEERS, PEERS
from flashsmith.benchmark.workload import Workload, workload_of
from flashsmith.families import Problem

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_is_there")]
SEVERAL_PAGED = Problem.parse("b2 s3:70 h8:2 d64 fp16 causal decode page16")
DATA_TYPES = {"HALF": "float16", "BFLOAT16": "bfloat16", "FLOAT": "float32", "INT32": "int32"}


@dataclass
class Node:
    """A tensor of a graph: what was said of it."""

    dim: list[int] = field(default_factory=list)
    stride: list[int] = field(default_factory=list)
    data_type: str = ""
    uid: int = 0
    is_output: bool = False

    def set_output(self, value: bool) -> Node:
        self.is_output = value
        return self

    def set_dim(self, dim: list[int]) -> Node:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Node:
        self.stride = stride
        return self

    def set_data_type(self, data_type: str) -> Node:
        self.data_type = data_type
        return self

    def set_uid(self, uid: int) -> Node:
        self.uid = uid
        return self

    def of(self, tensors: dict[int, Any]) -> Any:
        """The tensor, which must be as the graph was told."""
        tensor = tensors[self.uid]
        assert list(tensor.shape) == self.dim
        assert list(tensor.stride()) == self.stride
        assert str(tensor.dtype) == f"torch.{DATA_TYPES[self.data_type]}"
        return tensor


class Graph:
    """A pygraph with one operation, which float64 computes when it is executed."""

    def __init__(self, *, handle: Any, io_data_type: str, intermediate_data_type: str,
                 compute_data_type: str) -> None:  # fmt: skip
        assert (intermediate_data_type, compute_data_type) == ("FLOAT", "FLOAT")
        self.handle, self.built = handle, False

    def tensor(self, *, name: str, dim: list[int], stride: list[int], data_type: str) -> Node:
        return Node(dim, stride, data_type)

    def sdpa(self, *, generate_stats: bool, **given: Any) -> tuple[Node, Node | None]:
        self.given, self.outputs = given, (Node(), Node() if generate_stats else None)
        self.compute = self._forward
        return self.outputs

    def sdpa_backward(self, **given: Any) -> tuple[Node, ...]:
        self.given, self.outputs = given, (Node(), Node(), Node())
        self.compute = self._backward
        return self.outputs

    def build(self, modes: list[str]) -> None:
        assert modes == ["A", "FALLBACK"]
        assert all(it.is_output for it in self.outputs if it is not None)
        self.built = True

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, tensors: dict[int, Any], workspace: Any, handle: Any) -> None:
        assert self.built
        assert handle is self.handle
        assert workspace.numel() > 0
        given = {
            name: it.of(tensors) if isinstance(it, Node) else it for name, it in self.given.items()
        }
        for node, found in zip(self.outputs, self.compute(**given), strict=False):
            if node is not None:
                node.of(tensors).copy_(found)

    def _forward(self, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
        if options.get("use_padding_mask"):
            assert (options["seq_len_q"] == q.shape[2]).all()
            k = _in_order(k, options["paged_attention_k_table"], options)
            v = _in_order(v, options["paged_attention_v_table"], options)
        return _attention(*(it.double() for it in (q, k, v)), options)

    def _backward(self, q: Any, k: Any, v: Any, o: Any, dO: Any, stats: Any,
                  **options: Any) -> tuple[Any, ...]:  # fmt: skip
        import torch

        leaves = [it.double().requires_grad_() for it in (q, k, v)]
        own_o, own_stats = _attention(*leaves, options)
        assert (own_o - o).abs().max() < 1e-2
        assert (own_stats - stats).abs().max() < 1e-5
        return torch.autograd.grad(own_o, leaves, dO.double())


def _in_order(pages: Any, table: Any, options: dict[str, Any]) -> Any:
    """(batch, heads, seq, d) of pages (pages, heads, page, d) and a table (batch, 1, pages, 1)."""
    (length,) = set(options["seq_len_kv"].flatten().tolist())
    assert length == options["paged_attention_max_seq_len_kv"]
    found = pages[table[:, 0, :, 0].long()].transpose(1, 2).flatten(2, 3)
    return found[:, :, :length]


def _attention(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """o and the LSE; the bounds of the band count as cuDNN's do."""
    import torch

    k, v = (it.repeat_interleave(q.shape[1] // k.shape[1], 1) for it in (k, v))
    scores = q @ k.transpose(-1, -2) * options["attn_scale"]
    rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    if options.get("diagonal_alignment") == "BOTTOM_RIGHT":
        rows = rows + k.shape[2] - q.shape[2]
    if (right := options.get("diagonal_band_right_bound")) is not None:
        scores = scores.masked_fill(keys > rows + right, -torch.inf)
    if (left := options.get("diagonal_band_left_bound")) is not None:
        scores = scores.masked_fill(keys <= rows - left, -torch.inf)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1, keepdim=True)


@pytest.fixture
def cudnn(monkeypatch) -> Any:
    """Puts the stand-in there; returns the streams that were set."""
    import torch

    module, streams = ModuleType("cudnn"), []
    enums = {
        "data_type": tuple(DATA_TYPES),
        "heur_mode": ("A", "FALLBACK"),
        "diagonal_alignment": ("TOP_LEFT", "BOTTOM_RIGHT"),
    }
    for name, members in enums.items():
        setattr(module, name, SimpleNamespace(**{it: it for it in members}))
    handle = object()
    vars(module).update(
        pygraph=Graph,
        create_handle=lambda: handle,
        set_stream=lambda *, handle, stream: streams.append(stream),
        backend_version=lambda: 91900,
    )
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(cudnn_peers, "_handle", lambda device: handle)
    monkeypatch.setattr(cudnn_peers, "_BUILT", {})
    current = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    return streams


@pytest.mark.parametrize("problem", [FULL, CAUSAL, UNEQUAL, WINDOW], ids=str)
def test_it_computes_the_same_problem(problem: Problem, cudnn) -> None:
    assert CudnnPeer().absence(problem) is None
    w = Workload(problem, memory=TorchOnTheHost())
    output = CudnnPeer().prepare(w).output()
    verdict = w.check(output)
    assert verdict.ok, verdict.reasons
    assert cudnn == [7]


@pytest.mark.parametrize("problem", [DENSE, PAGED, SEVERAL, SEVERAL_PAGED], ids=str)
def test_it_reads_a_cache(problem: Problem, cudnn) -> None:
    w = over_cache(problem, TorchOnTheHost())
    output = CudnnPeer().prepare(w).output()
    assert output.shape == w.q.shape
    verdict = w.check(output)
    assert verdict.ok, verdict.reasons


@pytest.mark.parametrize(
    ("problem", "needed"), [(FULL, ""), (CAUSAL, ""), (CAUSAL, "only_dq"), (CAUSAL, "no_dq")]
)
def test_its_gradients(problem: Problem, needed: str, cudnn, monkeypatch) -> None:
    monkeypatch.setattr(workload_module, "attention", exact_attention)
    w = workload_of(replace(problem, operation="backward", gradients=needed), 0, TorchOnTheHost())
    gradients = CudnnGradientPeer().prepare(w).output()
    assert list(gradients) == list(w.output)
    assert w.check(gradients).rel_l2 < 1e-3


@pytest.mark.parametrize("problem", [CAUSAL, PAGED], ids=str)
def test_workloads_of_a_problem_share_a_graph(problem: Problem, cudnn, monkeypatch) -> None:
    """A CUDA graph rotates through dozens of small caches."""
    built, build = [], Graph.build

    def counted(graph: Graph, modes: list[str]) -> None:
        built.append(graph)
        build(graph, modes)

    monkeypatch.setattr(Graph, "build", counted)
    workloads = [workload_of(problem, seed, TorchOnTheHost()) for seed in (0, 1)]
    made = [CudnnPeer().prepare(w) for w in workloads]
    assert len(built) == 1
    assert all(w.check(it.output()).ok for w, it in zip(workloads, made, strict=True))
    for other in (FULL, UNEQUAL, DENSE):
        CudnnPeer().prepare(workload_of(other, 0, TorchOnTheHost()))
    assert len(built) == 4


def test_an_output_that_was_not_written_shows(cudnn, monkeypatch) -> None:
    monkeypatch.setattr(Graph, "_forward", lambda self, **given: ())
    w = Workload(FULL, memory=TorchOnTheHost())
    assert np.isnan(np.asarray(CudnnPeer().prepare(w).output())).all()


def test_its_absence_has_a_reason(cudnn, monkeypatch) -> None:
    peer = CudnnPeer()
    assert "packed" in str(peer.absence(PACKED))
    assert peer.absence(CAPPED) == "cuDNN's frontend is compared without softcap"
    assert "16-bit" in str(peer.absence(replace(DENSE, cache="e4m3")))
    monkeypatch.setitem(sys.modules, "cudnn", None)
    assert "cudnn" in str(peer.absence(FULL))
    assert CudnnGradientPeer().absence(FULL) == peer.absence(FULL)


def test_its_version_names_frontend_and_library(cudnn, monkeypatch) -> None:
    monkeypatch.setattr(cudnn_peers.importlib.metadata, "version", lambda name: f"1.32 ({name})")
    said = "cudnn-frontend 1.32 (nvidia-cudnn-frontend), cuDNN 91900"
    assert CudnnPeer().version() == CudnnGradientPeer().version() == said


def test_it_takes_part_everywhere() -> None:
    assert PEERS["cudnn_frontend"] == CudnnPeer()
    assert CudnnPeer() in DECODE_PEERS
    assert CudnnGradientPeer() in BACKWARD_PEERS
