"""FlexAttention as a peer, on the CPU: what it computes, and what it is given."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
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
    right_answer_of,
    right_over_cache,
)

from flashsmith.benchmark import flex_peers
from flashsmith.benchmark import workload as workload_module
from flashsmith.benchmark.flex_peers import FlexPeer
from flashsmith.benchmark.peers import GradientPeer
from flashsmith.benchmark.workload import Workload, workload_of
from flashsmith.families import Problem

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
]
FLASH = FlexPeer("flex_flash", backend="FLASH")


@pytest.fixture
def uncompiled(monkeypatch) -> None:
    import torch

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def test_its_functions_can_be_compiled() -> None:
    """PyTorch traces their Python; they keep fp32, as a user's own functions would."""
    import torch

    change, sees = flex_peers._changed(CAPPED), flex_peers._visible(WINDOW)
    scores, at = torch.linspace(-90, 90, 61), torch.arange(0, 256, 5)
    compiled = torch.compile(change, backend="eager", fullgraph=True)
    cap = CAPPED.numbers["softcap"]
    found = compiled(scores, 0, 0, 0, 0)
    assert found.dtype == torch.float32
    assert torch.equal(found, cap * torch.tanh(scores / cap))
    compiled = torch.compile(sees, backend="eager", fullgraph=True)
    row, key = at[:, None], at
    left, right = WINDOW.window
    distance = key - (row + WINDOW.seq_k - WINDOW.seq_q)
    assert torch.equal(compiled(0, 0, row, key), (-left <= distance) & (distance <= right))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("problem", [FULL, CAUSAL, UNEQUAL, WINDOW, CAPPED], ids=str)
def test_it_computes_the_same_problem(problem: Problem) -> None:
    """Which keys it sees, what it caps, how heads are grouped."""
    w = Workload(problem, memory=TorchOnTheHost())
    output = FlexPeer().prepare(w).output()
    assert output.shape == w.q.shape
    assert np.abs(np.asarray(output, np.float32) - right_answer_of(w)).max() < 5e-3


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("problem", [DENSE, SEVERAL], ids=str)
def test_it_reads_a_dense_cache(problem: Problem) -> None:
    w = over_cache(problem, TorchOnTheHost())
    output = FlexPeer().prepare(w).output()
    assert output.shape == w.q.shape
    assert np.abs(np.asarray(output, np.float32) - right_over_cache(w)).max() < 5e-3


@pytest.fixture
def gradients_on_the_cpu(monkeypatch) -> None:
    """FlexAttention has no kernels for gradients on the CPU, but PyTorch can compute them."""
    import torch
    from torch.nn.attention import flex_attention

    compile_ = torch.compile
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile_(f, backend="aot_eager"))
    monkeypatch.setattr(workload_module, "attention", exact_attention)


@pytest.mark.usefixtures("gradients_on_the_cpu")
@pytest.mark.parametrize("needed", ["", "only_dq", "no_dq"])
def test_its_gradients_can_be_computed_again_and_again(needed: str) -> None:
    problem = replace(CAUSAL, operation="backward", gradients=needed)
    w = workload_of(problem, 0, TorchOnTheHost())
    implementation = GradientPeer(FlexPeer()).prepare(w)
    for _ in range(2):
        gradients = implementation.output()
        assert list(gradients) == list(w.output)
        assert w.check(gradients).rel_l2 < 1e-3


@pytest.mark.parametrize("problem", [CAPPED, SEVERAL], ids=str)
def test_workloads_of_a_problem_are_compiled_once(problem: Problem, monkeypatch) -> None:
    """A graph rotates through dozens of small caches."""
    import torch

    compile_, graphs = torch.compile, []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda f, **_: compile_(f, backend=backend, dynamic=False)
    )
    made = [FlexPeer().prepare(workload_of(problem, seed, TorchOnTheHost())) for seed in (0, 1, 2)]
    first, *others = (np.asarray(it.output()) for it in made)
    assert len(graphs) == 1
    assert all(np.abs(first - other).max() > 0.1 for other in others)


@pytest.mark.parametrize("peer", [FlexPeer(), FLASH], ids=lambda peer: peer.name)
def test_the_backend_is_asked_for(peer: FlexPeer, monkeypatch) -> None:
    import torch
    from torch.nn.attention import flex_attention

    given: list[Any] = []

    def pretended(q: Any, k: Any, v: Any, **options: Any) -> Any:
        given.append(options.get("kernel_options"))
        return q

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(flex_attention, "flex_attention", pretended)
    peer.prepare(Workload(FULL, memory=TorchOnTheHost())).launch()
    assert given == [{"BACKEND": peer.backend} if peer.backend else None]


@pytest.mark.usefixtures("torch_is_there")
def test_its_absence_has_a_reason(monkeypatch) -> None:
    from torch.nn.attention import flex_attention

    assert FlexPeer().absence(PACKED) == "FlexAttention has no packed batches"
    assert FlexPeer().absence(PAGED) == "FlexAttention has no page tables"
    assert "16-bit" in str(FlexPeer().absence(replace(DENSE, cache="e4m3")))
    assert all(FlexPeer().absence(problem) is None for problem in (FULL, CAPPED, SEVERAL))
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    assert "flash_attn" in str(FLASH.absence(FULL))
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", ModuleType("flash_attn.cute"))
    assert FLASH.absence(FULL) is None
    monkeypatch.delattr(flex_attention, "FlexKernelOptions")
    assert "no other backend" in str(FLASH.absence(FULL))
