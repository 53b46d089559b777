"""Peers: who is absent and why, what each is given, and what is made of what it returns."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from itertools import product
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
    right_answer,
    right_answer_of,
    right_over_cache,
)
from stand_ins import HostMemory

import flashsmith
from flashsmith.benchmark import peers as peers_module
from flashsmith.benchmark import workload as workload_module
from flashsmith.benchmark.bench import BenchEntry, BenchPlan
from flashsmith.benchmark.implementations import OURS
from flashsmith.benchmark.peer import torch_absence
from flashsmith.benchmark.peers import (
    BACKWARD_PEERS,
    DECODE_PEERS,
    FORWARD_PEERS,
    PEERS,
    GradientPeer,
    Peer,
    get_peers,
)
from flashsmith.benchmark.workload import BackwardWorkload, Workload, workload_of
from flashsmith.errors import ArgumentError
from flashsmith.families import Problem, device_spec, parse_kernel_name_into_config
from flashsmith.verify.tolerance import why_over

BACKWARD_CFG = parse_kernel_name_into_config("(FP16, 32, 64, 64, 4): backward+stages_2")


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
    known = ("flash_attn", "flash_attn.cute", "flash_attn_interface", "flash_attn_3")
    for name in (*known, "fa3_fwd_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    class Finder:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name.partition(".")[0].startswith(("flash_attn", "fa3_fwd")):
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
    assert w.check(implementation.output()).ok
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


@pytest.mark.torch
@pytest.mark.parametrize(
    ("problem", "needed"),
    [(FULL, ""), (CAUSAL, ""), (CAUSAL, "only_dq"), (CAUSAL, "no_dq")],
)
def test_gradients_of_pytorchs_own_function(problem: Problem, needed: str, monkeypatch) -> None:
    """On the CPU: of the same tensors, for the same do, in our layout and by our names."""
    monkeypatch.setattr(workload_module, "attention", exact_attention)
    problem = replace(problem, operation="backward", gradients=needed)
    w = workload_of(problem, 0, TorchOnTheHost())
    assert isinstance(w, BackwardWorkload)
    names = {"": ["dq", "dk", "dv"], "only_dq": ["dq"], "no_dq": ["dk", "dv"]}
    assert list(w.output) == names[needed]
    peer = GradientPeer(peers_module.SdpaPeer("math", "MATH"))
    implementation = peer.prepare(w)
    gradients = implementation.output()
    assert w.check(gradients).rel_l2 < 1e-3
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
    for entry in (
        BenchEntry(OURS, BACKWARD_CFG, attention=True),
        BenchEntry("named", BACKWARD_CFG),
    ):
        implementation = entry.implementation(w)
        assert (implementation.name, implementation.note) == (entry.name, "torch.autograd.grad")
        assert w.check(implementation.output()).rel_l2 < 1e-3
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
    output = BenchEntry(OURS, BACKWARD_CFG, attention=True).implementation(w).output()
    assert all(bool(gradient.isnan().all()) for gradient in output.values())


def test_a_backward_problem_has_the_peers_whose_names_are_asked_for() -> None:
    problem = replace(FULL, operation="backward")
    of_gradients = [name for name in PEERS if not name.startswith("flashinfer")]
    assert [peer.name for peer in BACKWARD_PEERS] == of_gradients
    for asked in ("fa2,cudnn", "flex", "flash_attn_4"):
        found = BenchPlan((problem,), peers=get_peers(asked)).peers_of(problem)
        assert ",".join(peer.name for peer in found) == asked
        assert all(isinstance(peer, GradientPeer) for peer in found)
    assert BenchPlan((problem,), ours=True).peers_of(problem) == ()
    assert BenchPlan((problem,), peers=get_peers("flashinfer")).peers_of(problem) == ()


# --- over a cache --------------------------------------------------------------------------------

OVER_CACHES = {peer.name: peer for peer in DECODE_PEERS}


@pytest.mark.usefixtures("torch_is_there")
@pytest.mark.parametrize(
    ("text", "absent"),
    [
        ("b2 s1:70 h2 d64 fp16 decode", {}),
        ("b2 s1:70 h2 d64 fp16 causal decode", {}),
        ("b2 s1:70 h2 d64 fp16 decode page16", dict.fromkeys(("fa2", "cudnn"), "no page tables")),
        ("b2 s3:70 h2 d64 fp16 causal decode", {"cudnn": "top left"}),
        ("b2 s1:70 h2 d64 fp16 window decode", {"cudnn": "top left"}),
        ("b2 s1:70 h2 d64 fp16 softcap decode", dict.fromkeys(("fa2", "cudnn"), "softcap")),
        ("b2 s3:70 h2 d64 fp16 window softcap decode", {"fa2": "softcap", "cudnn": "top left"}),
        ("b2 s3:70 h2 d64 fp16 packed decode", dict.fromkeys(("fa2", "cudnn"), "packed")),
    ],
)
def test_what_pytorch_cannot_do_over_a_cache_is_said(text: str, absent: dict[str, str]) -> None:
    for name in ("fa2", "cudnn"):
        assert absent.get(name, "None") in str(OVER_CACHES[name].absence(Problem.parse(text)))


def test_a_problem_over_a_cache_has_peers_of_its_own() -> None:
    plan = BenchPlan((DENSE,), peers=get_peers("all"))
    assert [peer.name for peer in plan.peers_of(DENSE)] == [*PEERS] == list(OVER_CACHES)
    only_over_caches = [*PEERS][-2:]
    assert only_over_caches == ["flashinfer_cuda_cores", "flashinfer_xqa"]
    assert plan.peers_of(FULL) == FORWARD_PEERS == tuple(PEERS.values())[:-2]
    (found,) = BenchPlan((DENSE,), peers=get_peers("flash-attn-3")).peers_of(DENSE)
    assert found is OVER_CACHES["flash_attn_3"]


@pytest.mark.torch
@pytest.mark.parametrize("text", ["decode", "causal decode"])
def test_pytorchs_own_function_reads_a_dense_cache(text: str) -> None:
    """On the CPU, by the backend that is there; one query sees all keys under a causal mask."""
    w = over_cache(Problem.parse(f"b2 s1:70 h8:2 d64 fp16 {text}"), TorchOnTheHost())
    peer = peers_module.DenseCachePeer(peers_module.SdpaPeer("math", "MATH"))
    output = peer.prepare(w).output()
    assert output.shape == w.q.shape
    error = np.abs(np.asarray(output, np.float32) - right_over_cache(w)).max()
    assert error < 5e-3


@pytest.mark.torch
def test_several_queries_go_to_the_function_that_aligns_them(monkeypatch) -> None:
    import torch

    w = over_cache(SEVERAL, TorchOnTheHost())
    given = []

    def function(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, **options):
        given.append((cu_q, cu_k, max_q, max_k, causal, options))
        return torch.from_numpy(right_over_cache(w)), None

    aten = SimpleNamespace(_flash_attention_forward=function)
    monkeypatch.setattr(torch, "ops", SimpleNamespace(aten=aten))
    assert w.check(OVER_CACHES["fa2"].prepare(w).output()).ok
    assert given == [(None, None, 3, 70, True, {})]


@pytest.mark.usefixtures("torch_is_there")
@pytest.mark.parametrize("problem", [DENSE, PAGED, SEVERAL], ids=str)
@pytest.mark.parametrize("theirs", ["page_table", "block_table"])
def test_flash_attention_gets_a_cache_by_its_own_names(problem, theirs: str, modules) -> None:
    w = over_cache(problem)
    given = {}

    def newer(q, k_cache, v_cache, cache_seqlens=None, page_table=None, causal=False):
        given.update(cache_seqlens=cache_seqlens, pages=page_table, causal=causal)
        return right_over_cache(w)

    def older(q, k_cache, v_cache, cache_seqlens=None, block_table=None, causal=False):
        return newer(q, k_cache, v_cache, cache_seqlens, block_table, causal)

    function = newer if theirs == "page_table" else older
    modules("flash_attn_interface", flash_attn_with_kvcache=function)
    peer = OVER_CACHES["flash_attn_3"]
    assert peer.absence(problem) is None
    assert w.check(peer.prepare(w).output()).ok
    assert given["cache_seqlens"].tolist() == [70, 70]
    assert given["causal"] == (problem is SEVERAL)
    assert (given["pages"] is None) == (problem is not PAGED)


@pytest.mark.usefixtures("torch_is_there")
@pytest.mark.parametrize("problem", [DENSE, PAGED, SEVERAL], ids=str)
def test_flash_attention_4_reads_a_cache_by_its_packed_function(problem, modules) -> None:
    w = over_cache(problem)
    given = {}

    def packed(q, k, v, cu_seqlens_q=None, seqused_k=None, page_table=None, causal=False):
        given.update(lens=seqused_k, pages=page_table, causal=causal)
        return right_over_cache(w), None

    modules("flash_attn", __path__=[])
    modules("flash_attn.cute", flash_attn_varlen_func=packed)
    peer = OVER_CACHES["flash_attn_4"]
    assert peer.absence(problem) is None
    assert w.check(peer.prepare(w).output()).ok
    assert given["lens"].tolist() == [70, 70]
    assert given["causal"] == (problem is SEVERAL)
    assert (given["pages"] is None) == (problem is not PAGED)


@pytest.mark.usefixtures("torch_is_there")
def test_flash_attention_3_is_found_in_its_forward_wheel(modules) -> None:
    modules("fa3_fwd_interface", flash_attn_func=lambda q, k, v, causal=False: q)
    assert PEERS["flash_attn_3"].absence(FULL) is None
    assert PEERS["flash_attn_3"].absence(PACKED) == (
        "flash_attn_interface is not installed; flash_attn_3 is not installed; "
        "fa3_fwd_interface has no flash_attn_varlen_func"
    )


@pytest.mark.usefixtures("torch_is_there")
def test_flash_attention_without_what_a_cache_needs_refuses(modules) -> None:
    modules("flash_attn", __path__=[], flash_attn_func=lambda q, k, v: q)
    peer = OVER_CACHES["flash_attn_2"]
    assert peer.absence(DENSE) == "flash_attn has no flash_attn_with_kvcache"

    def oldest(q, k_cache, v_cache, cache_seqlens=None, causal=False):
        return q

    modules("flash_attn", __path__=[], flash_attn_with_kvcache=oldest)
    assert peer.absence(PAGED) is None
    with pytest.raises(ArgumentError, match="oldest has no block_table"):
        peer.prepare(over_cache(PAGED))


@pytest.mark.torch
@pytest.mark.parametrize(
    "words",
    ["s1:70", "s1:70 page16", "s3:70 causal page24", "s3:70 causal packed softcap",
     "s3:3000 window"],
)  # fmt: skip
def test_ours_over_a_cache_takes_what_a_workload_holds(words: str, load_tool) -> None:
    """Up to the launch of the kernel that was built for it, on a GPU that is not there."""
    pretended_gpu = load_tool("gpu/pretended_gpu.py").pretended_gpu
    problem = Problem.parse(f"b2 h8:2 d64 fp16 decode {words}")
    w = over_cache(problem, TorchOnTheHost())
    (first, second) = BenchPlan((problem,), ours=True).entries(problem, device_spec("H200"))
    assert (first.name, second.name) == ("ours", "ours_free")
    for entry in (first, second):
        with pretended_gpu() as gpu:
            entry.implementation(w).launch()
            (launch,) = gpu.launches
        assert entry.config is not None
        assert launch.config == entry.config
        assert launch.semantics == problem.required_semantics(entry.config)
        named = BenchEntry(str(entry.config), entry.config)
        with pretended_gpu() as gpu:
            named.implementation(w).launch()
            assert len(gpu.launches) == 1


# What a peer says when it does not serve a problem: of PyTorch's backends, which problems these are
# depends on its version; of packages, pages of 16 keys or grouped heads. CUDA's errors are others.
REFUSAL = re.compile(
    "No available kernel|No valid|must be divisible by|[Uu]nsupported|not support|only support"
)


@pytest.mark.gpu
@pytest.mark.torch
@pytest.mark.parametrize(
    ("peer", "problem"),
    [
        pytest.param(peer, problem, id=f"{peer.name}-{problem}")
        for peers, problems in (
            (PEERS, (FULL, CAUSAL, PACKED, WINDOW, CAPPED)),
            (OVER_CACHES, (DENSE, PAGED, SEVERAL)),
        )
        for peer, problem in product(peers.values(), problems)
    ],
)
def test_on_a_gpu_whoever_is_there_is_right(peer: Peer, problem: Problem) -> None:
    import torch

    assert torch.cuda.is_available(), "there is a GPU, and PyTorch is built without CUDA"
    absence = peer.absence(problem)
    if absence is not None:
        pytest.skip(f"needs {peer.name}: {absence}")
    w = workload_of(problem)
    try:
        output = peer.prepare(w).output()
    except Exception as error:
        if peer.name == "fa2" or not REFUSAL.search(str(error)):
            raise
        return
    verdict = w.check(output)
    assert verdict.ok, verdict.reasons


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"o": 0.03, "dq": 0.1}, ""),
        ({"o": 0.031, "dq": 0.1}, "o: largest error 0.031 is above 0.03, 3 times ours"),
        ({"o": 9.0, "dq": math.inf}, "o: largest error 9 is above 0.03, 3 times ours; dq: largest"),
        ({"o": 0.01, "dq": 0.1, "dv": 1.1e-5}, "dv: largest error 1.1e-05 is above 1e-05, 3 times"),
        ({"o": 0.01, "dq": 0.1, "dv": 0.9e-5}, ""),
        ({"o": math.nan, "dq": 0.1}, "o: largest error nan is above 0.03, 3 times ours"),
    ],
)
def test_a_peer_is_wrong_whose_error_is_above_three_times_ours(
    theirs: dict[str, float], said: str
) -> None:
    ours = {"o": 0.01, "dq": 0.2, "dv": 0.0}
    why = "; ".join(why_over({"dv": 0.0, **theirs}, ours))
    assert why.startswith(said)
    assert bool(why) == bool(said)
