"""cuDNN as a peer, through its Python frontend: the forward pass, gradients, and attention over a
cache.

The frontend chooses between cuDNN's engines and kernels of its own.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from flashsmith.benchmark.peer import (
    NO_OTHER_DTYPE,
    PeerImplementation,
    import_absence,
    torch_absence,
)
from flashsmith.benchmark.workload import BackwardWorkload, Workload
from flashsmith.families import Problem

# The graphs that were built, keyed by _Graph._signature().
_BUILT: dict[tuple[Any, ...], Any] = {}


@dataclass(frozen=True)
class CudnnPeer:
    """cuDNN's forward pass over dense sequences, over a dense cache that every sequence fills, or
    over a paged cache.

    The graph of a problem is built once, and only its execution is timed.
    """

    name: str = "cudnn_frontend"

    def absence(self, problem: Problem) -> str | None:
        if absent := torch_absence():
            return absent
        if problem.semantics.packed:
            return "cuDNN's frontend is compared without packed batches"
        if not problem.semantics.score.is_plain:
            return f"cuDNN's frontend is compared without {problem.semantics.score}"
        return NO_OTHER_DTYPE if problem.cache else import_absence("cudnn")

    def version(self) -> str:
        frontend = importlib.metadata.version("nvidia-cudnn-frontend")
        return f"cudnn-frontend {frontend}, cuDNN {_cudnn().backend_version()}"

    def prepare(self, workload: Workload) -> PeerImplementation:
        graph = _Graph(workload.q)
        o = graph.forward(workload)
        return PeerImplementation(self.name, graph.launch(o), lambda returned: returned)


@dataclass(frozen=True)
class CudnnGradientPeer:
    """cuDNN's gradients. The forward pass of CudnnPeer runs once, before the timing."""

    name: str = "cudnn_frontend"

    def absence(self, problem: Problem) -> str | None:
        return CudnnPeer(self.name).absence(problem)

    def version(self) -> str:
        return CudnnPeer(self.name).version()

    def prepare(self, workload: BackwardWorkload) -> PeerImplementation:
        import torch

        w, p = workload, workload.problem
        shape = (p.batch, p.heads_q, p.seq_q, 1)
        statistics = torch.empty(shape, dtype=torch.float32, device=w.q.device)
        forward = _Graph(w.q)
        o = forward.forward(w, statistics)
        forward.launch(o)()
        backward = _Graph(w.q)
        gradients = backward.backward(w, o, statistics)
        needed = [gradients[name] for name in w.gradients]
        return PeerImplementation(self.name, backward.launch(needed), w.by_name)


class _Graph:
    """A graph of cuDNN's frontend, and the tensors of its execution.

    ``like``: a tensor with the dtype and device of q, k, v and o.
    """

    def __init__(self, like: Any) -> None:
        import torch

        cudnn = _cudnn()
        self._dtypes = {
            torch.float16: cudnn.data_type.HALF,
            torch.bfloat16: cudnn.data_type.BFLOAT16,
            torch.float32: cudnn.data_type.FLOAT,
            torch.int32: cudnn.data_type.INT32,
        }
        self._device = like.device
        self._handle = _handle(like.device)
        self._graph = cudnn.pygraph(
            handle=self._handle,
            io_data_type=self._dtypes[like.dtype],
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
        )
        self._tensors: dict[int, Any] = {}
        self._options: dict[str, Any] = {}

    def forward(self, workload: Workload, statistics: Any = None) -> Any:
        """Adds the forward pass; returns its output in q's layout.

        ``statistics``: the tensor to which the LSE is written, (batch, heads, seq_q, 1) in fp32;
        None if the LSE is not needed.
        """
        w = workload
        o = _blank((*w.q.shape[:-1], w.problem.d_v), w.q)
        names = {"q": w.q, "k": w.k, "v": w.v}
        inputs = {name: self._input(name, _heads_first(it)) for name, it in names.items()}
        self._options = {"generate_stats": statistics is not None, **_options(w.problem)}
        tables = self._tables(w) if w.problem.page else {}
        node, lse = self._graph.sdpa(**inputs, **tables, **self._options)
        self._output(node, _heads_first(o))
        if statistics is not None:
            self._output(lse, statistics)
        return o

    def backward(self, workload: BackwardWorkload, o: Any, statistics: Any) -> dict[str, Any]:
        """Adds the backward pass; returns the gradients by name, in the layouts of q, k and v."""
        w = workload
        names = {"q": w.q, "k": w.k, "v": w.v, "o": o, "dO": w.do}
        inputs = {name: self._input(name, _heads_first(it)) for name, it in names.items()}
        self._options = _options(w.problem)
        nodes = self._graph.sdpa_backward(
            **inputs, stats=self._input("stats", statistics), **self._options
        )
        gradients = {f"d{name}": _blank(names[name].shape, w.q) for name in "qkv"}
        for node, gradient in zip(nodes, gradients.values(), strict=True):
            self._output(node, _heads_first(gradient))
        return gradients

    def launch(self, returned: Any) -> Callable[[], Any]:
        """Returns a function that executes the graph and returns ``returned``.

        A graph that differs from an earlier one only in the addresses of its tensors is not built
        again.
        """
        import torch

        cudnn = _cudnn()
        graph = _BUILT.get(self._signature)
        if graph is None:
            graph = self._graph
            graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            _BUILT[self._signature] = graph
        size = max(1, graph.get_workspace_size())
        workspace = torch.empty(size, dtype=torch.uint8, device=self._device)

        def call() -> Any:
            stream = torch.cuda.current_stream(self._device).cuda_stream
            cudnn.set_stream(handle=self._handle, stream=stream)
            graph.execute(self._tensors, workspace, handle=self._handle)
            return returned

        return call

    @property
    def _signature(self) -> tuple[Any, ...]:
        """A value that is equal for two graphs if they do the same computation on tensors of the
        same layouts."""
        layouts = ((it.shape, it.stride(), it.dtype) for it in self._tensors.values())
        return (self._device, *self._options.items(), *layouts)

    def _tables(self, workload: Any) -> dict[str, Any]:
        """The keywords of the forward pass for a paged cache; their values are nodes of the
        graph."""
        import torch

        p = workload.problem
        self._options["use_padding_mask"] = True
        self._options["paged_attention_max_seq_len_kv"] = p.seq_k
        table = workload.page_table.view(p.batch, 1, -1, 1)
        queries = torch.full_like(workload.cache_lens, p.seq_q)
        return {
            "seq_len_q": self._input("seq_len_q", queries.view(-1, 1, 1, 1)),
            "seq_len_kv": self._input("seq_len_kv", workload.cache_lens.view(-1, 1, 1, 1)),
            "paged_attention_k_table": self._input("k_table", table),
            "paged_attention_v_table": self._input("v_table", table),
        }

    def _input(self, name: str, tensor: Any) -> Any:
        """Adds a node for a tensor that the graph reads, and returns the node."""
        node = self._graph.tensor(
            name=name,
            dim=list(tensor.shape),
            stride=list(tensor.stride()),
            data_type=self._dtypes[tensor.dtype],
        )
        return self._bind(node, tensor)

    def _output(self, node: Any, tensor: Any) -> None:
        """Makes the graph write the value of a node to a tensor."""
        node.set_output(True).set_dim(list(tensor.shape)).set_stride(list(tensor.stride()))
        self._bind(node.set_data_type(self._dtypes[tensor.dtype]), tensor)

    def _bind(self, node: Any, tensor: Any) -> Any:
        number = len(self._tensors) + 1
        self._tensors[number] = tensor
        return node.set_uid(number)


def _options(problem: Problem) -> dict[str, Any]:
    """Returns the keywords for the scale and the mask. If the lengths of q and k differ, masks are
    aligned to the bottom right."""
    options: dict[str, Any] = {"attn_scale": problem.d**-0.5}
    mask = problem.semantics.key_mask
    if not mask.hides or (mask.is_triangular and problem.seq_q == 1):
        return options
    alignment = _cudnn().diagonal_alignment
    equal = problem.seq_q == problem.seq_k
    options["diagonal_alignment"] = alignment.TOP_LEFT if equal else alignment.BOTTOM_RIGHT
    options["diagonal_band_right_bound"] = 0
    if problem.window is not None:
        left, options["diagonal_band_right_bound"] = problem.window
        options["diagonal_band_left_bound"] = left + 1  # cuDNN counts the diagonal too
    return options


def _heads_first(tensor: Any) -> Any:
    """A view of shape (batch, heads, seq, d); for a paged cache, of shape (pages, heads, page,
    d)."""
    return tensor.transpose(1, 2)


def _blank(shape: Any, like: Any) -> Any:
    """An output tensor, filled with NaN so that elements that the graph does not write are
    noticed."""
    import torch

    return torch.full(tuple(shape), torch.nan, dtype=like.dtype, device=like.device)


def _cudnn() -> Any:
    return importlib.import_module("cudnn")


@cache
def _handle(device: Any) -> Any:
    """cuDNN's handle for a device. One handle is enough, because only one thread makes calls."""
    import torch

    with torch.cuda.device(device):
        return _cudnn().create_handle()
