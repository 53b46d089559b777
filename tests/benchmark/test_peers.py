"""Peers: who is absent and why, what each is given, and what is made of what it returns."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from stand_ins import HostMemory

import flashsmith
from flashsmith.benchmark import peers as peers_module
from flashsmith.benchmark import workload as workload_module
from flashsmith.benchmark.bench import BenchPlan, Entry
from flashsmith.benchmark.implementations import OURS
from flashsmith.benchmark.peers import (
    BACKWARD_PEERS,
    PEERS,
    GradientPeer,
    get_peers,
    torch_absence,
)
from flashsmith.benchmark.workload import BackwardWorkload, Workload, workload_of
from flashsmith.errors import ArgumentError
from flashsmith.families import Problem, parse_kernel_name_into_config
from flashsmith.verify import compute_references
from flashsmith.verify.attention_semantics import NO_WINDOW
from flashsmith.verify.proof_inputs import default_scale

FULL = Problem.parse("b2 s64 h2 d32 fp16")
CAUSAL = Problem.parse("b2 s64 h4:2 d32 fp16 causal")
UNEQUAL = Problem.parse("b2 s32:64 h2 d32 fp16 causal")
WINDOW = Problem.parse("b2 s192:256 h4:2 d32 fp16 window")
CAPPED = Problem.parse("b2 s64 h2 d32 fp16 causal softcap")
PACKED = Problem.parse("b2 s64 h2 d32 fp16 causal packed")
BACKWARD_CFG = parse_kernel_name_into_config("(FP16, 32, 64, 64, 4): backward+stages_2")


def right_answer(w: Workload) -> np.ndarray:
    p = w.problem
    lens = {}
    if w.packed:
        lens = {"lens_q": (p.seq_q,) * p.batch, "lens_k": (p.seq_k,) * p.batch}
    found = compute_references(w.q, w.k, w.v, default_scale(p.d), causal=w.causal, **lens)
    return found.same_precision


@pytest.fixture
def torch_is_there(monkeypatch) -> None:
    monkeypatch.setattr(peers_module, "torch_absence", lambda: None)


# --- choosing -------------------------------------------------------------------------------------


def test_all_and_none() -> None:
    assert [peer.name for peer in get_peers("all")] == list(PEERS)
    assert get_peers("none") == ()


def test_some_in_their_own_order() -> None:
    assert [peer.name for peer in get_peers(" cudnn, fa2,cudnn")] == ["fa2", "cudnn"]
    assert [peer.name for peer in get_peers("mem-efficient")] == ["mem_efficient"]


@pytest.mark.parametrize("names", ["fa9", "fa2,all", "", " , "])
def test_unknown_peers_are_refused(names: str) -> None:
    with pytest.raises(ArgumentError, match="allowed are fa2, cudnn, mem_efficient, flex"):
        get_peers(names)


# --- absence --------------------------------------------------------------------------------------


def test_without_pytorch_nobody_is_there(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert torch_absence() == "PyTorch is not installed"
    assert {peer.absence(FULL) for peer in get_peers("all")} == {"PyTorch is not installed"}


@pytest.mark.usefixtures("torch_is_there")
@pytest.mark.parametrize(
    ("problem", "absent"),
    [
        (FULL, {}),
        (CAUSAL, {}),
        (UNEQUAL, dict.fromkeys(("fa2", "cudnn", "mem_efficient"), "top left")),
        (PACKED, dict.fromkeys(("cudnn", "mem_efficient", "flex"), "packed")),
        (WINDOW, dict.fromkeys(("cudnn", "mem_efficient"), "PyTorch has no windows for it")),
        (CAPPED, dict.fromkeys(("fa2", "cudnn", "mem_efficient"), "PyTorch has no softcap")),
    ],
)
def test_what_pytorch_cannot_do_is_said(problem: Problem, absent: dict[str, str]) -> None:
    for name in ("fa2", "cudnn", "mem_efficient", "flex"):
        reason = PEERS[name].absence(problem)
        assert absent.get(name, "None") in str(reason)


@pytest.fixture
def modules(monkeypatch) -> Any:
    """Puts modules there by name; those of the FlashAttention packages are absent at first."""
    for name in ("flash_attn", "flash_attn.cute", "flash_attn_interface", "flash_attn_3"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    class Finder:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name.partition(".")[0].startswith("flash_attn"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])

    def put(name: str, **functions: Any) -> None:
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)

    return put


@pytest.mark.usefixtures("torch_is_there")
def test_packages_that_are_not_installed(modules) -> None:
    for name in ("flash_attn_2", "flash_attn_3", "flash_attn_4"):
        assert "is not installed" in str(PEERS[name].absence(FULL))
    # The fourth generation lives beside the second, or alone.
    modules("flash_attn", __path__=[])
    assert PEERS["flash_attn_2"].absence(FULL) == "flash_attn has no flash_attn_func"
    assert PEERS["flash_attn_4"].absence(FULL) == "flash_attn.cute is not installed"
    modules("flash_attn.cute", flash_attn_func=lambda q, k, v: q)
    assert PEERS["flash_attn_4"].absence(FULL) is None
    assert PEERS["flash_attn_4"].absence(PACKED) == "flash_attn.cute has no flash_attn_varlen_func"


@pytest.mark.usefixtures("torch_is_there")
def test_a_package_that_breaks_on_import_is_absent(modules, monkeypatch) -> None:
    def import_module(name: str) -> Any:
        raise ImportError("undefined symbol: _ZN3c10\nmore")

    monkeypatch.setattr(peers_module.importlib, "import_module", import_module)
    reason = PEERS["flash_attn_2"].absence(FULL)
    assert reason == "flash_attn cannot be imported: undefined symbol: _ZN3c10"


# --- what they are given, and return -------------------------------------------------------------


@pytest.mark.usefixtures("torch_is_there")
@pytest.mark.parametrize("with_lse", [False, True])
def test_flash_attention_gets_what_its_version_takes(modules, with_lse: bool) -> None:
    w = Workload(PACKED, memory=HostMemory())
    given = {}

    def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=False):
        given.update(causal=causal, cu_seqlens_q=cu_seqlens_q)
        o = right_answer(w)
        return (o, None) if with_lse else o

    modules("flash_attn_interface", flash_attn_varlen_func=varlen)
    peer = PEERS["flash_attn_3"]
    assert peer.absence(PACKED) is None
    implementation = peer.prepare(w)
    assert w.judge(implementation.output()).ok
    assert given["causal"] is True
    assert given["cu_seqlens_q"].tolist() == [0, 64, 128]


@pytest.mark.usefixtures("torch_is_there")
def test_flash_attention_gets_windows_and_caps_by_its_own_names(modules) -> None:
    both = Problem.parse("b2 s64 h2 d32 fp16 window softcap")
    w = Workload(both, memory=HostMemory())
    given = {}

    def dense(q, k, v, causal=False, window_size=(-1, -1), softcap=0.0):
        given.update(window_size=window_size, softcap=softcap)
        return q

    modules("flash_attn", __path__=[], flash_attn_func=dense)
    PEERS["flash_attn_2"].prepare(w).launch()
    assert given == {"window_size": (32, 0), "softcap": 30.0}
    modules("flash_attn", __path__=[], flash_attn_func=lambda q, k, v, causal=False: q)
    with pytest.raises(ArgumentError, match="has no softcap and no window_size"):
        PEERS["flash_attn_2"].prepare(w)


class TorchOnTheHost(HostMemory):
    """PyTorch's CPU tensors."""

    def draw(self, shape, dtype, seed) -> Any:
        import torch

        return torch.from_numpy(super().draw(shape, dtype, seed))

    def put(self, array: np.ndarray) -> Any:
        import torch

        return torch.from_numpy(array)

    def fetch(self, tensor: Any) -> np.ndarray:
        return np.asarray(tensor)

    def head(self, tensor: Any, at: Any, head: int) -> np.ndarray:
        return np.asarray(tensor[at][:, head])


@pytest.mark.torch
@pytest.mark.parametrize("problem", [FULL, CAUSAL])
def test_pytorchs_own_function_gives_its_output_in_our_layout(problem: Problem) -> None:
    """On the CPU, by the backend that is there."""
    w = Workload(problem, memory=TorchOnTheHost())
    peer = peers_module.SdpaPeer("math", "MATH")
    implementation = peer.prepare(w)
    assert implementation.output().shape == w.q.shape
    # PyTorch rounds more often on the CPU than the rule allows.
    error = np.abs(np.asarray(implementation.output(), np.float32) - right_answer_of(w)).max()
    assert error < 5e-3
    assert peer.version().startswith("torch ")


def exact_attention(q: Any, k: Any, v: Any, *, return_lse: bool, causal: bool) -> Any:
    """o and lse of PyTorch's tensors."""
    import torch

    arrays = [np.asarray(tensor) for tensor in (q, k, v)]
    found = compute_references(*arrays, scale=default_scale(q.shape[-1]), causal=causal)
    return torch.from_numpy(found.o.astype(arrays[0].dtype)), torch.from_numpy(
        found.lse.astype(np.float32)
    )


@pytest.mark.torch
@pytest.mark.parametrize("problem", [FULL, CAUSAL])
def test_gradients_of_pytorchs_own_function(problem: Problem, monkeypatch) -> None:
    """On the CPU: of the same tensors, for the same do, in our layout and by our names."""
    monkeypatch.setattr(workload_module, "attention", exact_attention)
    w = workload_of(replace(problem, operation="backward"), 0, TorchOnTheHost())
    assert isinstance(w, BackwardWorkload)
    peer = GradientPeer(peers_module.SdpaPeer("math", "MATH"))
    implementation = peer.prepare(w)
    gradients = implementation.output()
    assert w.judge(gradients).rel_l2 < 1e-3
    assert not any(tensor.requires_grad for tensor in (w.q, w.k, w.v))
    again = implementation.output()
    assert all((again[name] == gradients[name]).all() for name in w.output)
    assert peer.version().endswith("torch.autograd.grad")


@pytest.mark.torch
def test_our_gradients_are_taken_as_the_peers_are(monkeypatch) -> None:
    """Of attention() with its own choice, and with a named config for the gradients."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    configs = []

    def attention(q: Any, k: Any, v: Any, *, causal: bool, backward_config: Any) -> Any:
        configs.append(backward_config)
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        o = scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True)
        return o.transpose(1, 2)

    monkeypatch.setattr(workload_module, "attention", exact_attention)
    monkeypatch.setattr(flashsmith, "attention", attention)
    problem = replace(CAUSAL, operation="backward")
    w = workload_of(problem, 0, TorchOnTheHost())
    for entry in (Entry(OURS, BACKWARD_CFG, attention=True), Entry("named", BACKWARD_CFG)):
        implementation = entry.implementation(w)
        assert (implementation.name, implementation.note) == (entry.name, "torch.autograd.grad")
        assert w.judge(implementation.output()).rel_l2 < 1e-3
    assert configs == [None, BACKWARD_CFG]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.torch
def test_a_gradient_that_nobody_wrote_shows(monkeypatch) -> None:
    """Where PyTorch hands out memory that held the right one before."""
    import torch

    class Lazy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            return q + 0

        @staticmethod
        def backward(ctx: Any, do: Any) -> Any:
            return tuple(torch.empty_like(do) for _ in range(3))

    monkeypatch.setattr(workload_module, "attention", exact_attention)
    monkeypatch.setattr(flashsmith, "attention", lambda q, k, v, **_: Lazy.apply(q, k, v))
    w = workload_of(replace(FULL, operation="backward"), 0, TorchOnTheHost())
    output = Entry(OURS, BACKWARD_CFG, attention=True).implementation(w).output()
    assert all(bool(gradient.isnan().all()) for gradient in output.values())


def test_a_backward_problem_has_the_peers_whose_names_are_asked_for() -> None:
    problem = replace(FULL, operation="backward")
    assert [peer.name for peer in BACKWARD_PEERS] == [name for name in PEERS if name != "flex"]
    for asked in ("fa2,cudnn", "flash_attn_4"):
        found = BenchPlan((problem,), peers=get_peers(asked)).peers_of(problem)
        assert ",".join(peer.name for peer in found) == asked
        assert all(isinstance(peer, GradientPeer) for peer in found)
    assert BenchPlan((problem,), ours=True).peers_of(problem) == ()


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("problem", [FULL, CAUSAL, UNEQUAL, WINDOW, CAPPED], ids=str)
def test_flex_attention_computes_the_same_problem(problem: Problem, monkeypatch) -> None:
    """Uncompiled, on the CPU: which keys it sees, what it caps, how heads are grouped."""
    import torch

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    w = Workload(problem, memory=TorchOnTheHost())
    output = peers_module.FlexPeer().prepare(w).output()
    assert output.shape == w.q.shape
    assert np.abs(np.asarray(output, np.float32) - right_answer_of(w)).max() < 5e-3


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


@pytest.mark.gpu
@pytest.mark.torch
@pytest.mark.parametrize("problem", [FULL, CAUSAL, PACKED, WINDOW, CAPPED], ids=str)
@pytest.mark.parametrize("name", list(PEERS))
def test_on_a_gpu_whoever_is_there_is_right(name: str, problem: Problem) -> None:
    import torch

    assert torch.cuda.is_available(), "there is a GPU, and PyTorch is built without CUDA"
    peer = PEERS[name]
    absence = peer.absence(problem)
    if absence is not None:
        pytest.skip(f"needs {name}: {absence}")
    w = Workload(problem)
    try:
        output = peer.prepare(w).output()
    except RuntimeError:
        # Which problems the others refuse depends on PyTorch's version.
        assert name != "fa2"
        return
    verdict = w.judge(output)
    assert verdict.ok, verdict.reasons
