"""Peers: the attention of other libraries, behind one small interface, for comparisons with
flashsmith.

A peer that is not installed or cannot serve a problem is absent; it has not failed. Its row gives
the reason.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashsmith.benchmark.cudnn_peers import CudnnGradientPeer, CudnnPeer
from flashsmith.benchmark.flashinfer_peers import (
    FlashInferDecodePeer,
    FlashInferPrefillPeer,
    FlashInferXqaPeer,
)
from flashsmith.benchmark.flex_peers import FlexPeer
from flashsmith.benchmark.peer import NO_OTHER_DTYPE, Peer, PeerImplementation, torch_absence
from flashsmith.benchmark.workload import (
    BackwardWorkload,
    DecodeWorkload,
    Workload,
)
from flashsmith.errors import ArgumentError
from flashsmith.families import Problem, Semantics
from flashsmith.operations import BACKWARD, DECODE, DEFAULT
from flashsmith.operations.operation import load_attribute

# --- PyTorch ---


@dataclass(frozen=True)
class SdpaPeer:
    """One backend of PyTorch's SDPA; ``backend`` is its name in torch.nn.attention.SDPBackend.

    ``direct``: whether packed batches and windows are computed by directly calling the function
    that the backend calls.
    """

    name: str
    backend: str
    direct: bool = False

    def absence(self, problem: Problem) -> str | None:
        semantics = problem.semantics
        direct = semantics.packed or semantics.key_mask.takes_limits
        if not semantics.score.is_plain:
            return f"PyTorch has no {semantics.score}"
        if direct and not self.direct:
            return f"PyTorch has no {'packed batches' if semantics.packed else 'windows'} for it"
        if semantics.key_mask.is_triangular and not direct and problem.seq_q != problem.seq_k:
            return "PyTorch aligns causal masks to the top left"
        return torch_absence()

    def version(self) -> str:
        import torch

        if self.backend == "CUDNN_ATTENTION":
            return f"cuDNN {torch.backends.cudnn.version()}"
        return f"torch {torch.__version__}"

    def prepare(self, workload: Workload) -> PeerImplementation:
        if workload.packed or workload.problem.window is not None:
            return PeerImplementation(
                self.name, _direct_call(workload), lambda returned: returned[0]
            )
        return PeerImplementation(
            self.name, self._dense_call(workload), lambda returned: returned.transpose(1, 2)
        )

    def _dense_call(self, workload: Workload) -> Callable[[], Any]:
        from torch.nn import functional
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = getattr(SDPBackend, self.backend)
        # Views of shape (batch, heads, seq, d); nothing is copied.
        q, k, v = (tensor.transpose(1, 2) for tensor in (workload.q, workload.k, workload.v))
        grouped = workload.problem.heads_q != workload.problem.heads_k
        causal = workload.causal

        def call() -> Any:
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, enable_gqa=grouped
                )

        return call


def _direct_call(workload: Workload) -> Callable[[], Any]:
    """A direct call to the function that the flash backend calls; PyTorch also uses this function
    for nested tensors.

    The function aligns masks to the bottom right.
    """
    import torch

    w, p = workload, workload.problem
    function = torch.ops.aten._flash_attention_forward
    sequences = (w.cu_seqlens_q, w.cu_seqlens_k, p.seq_q, p.seq_k)
    options = {}
    if p.window is not None:
        options = dict(zip(("window_size_left", "window_size_right"), p.window, strict=True))

    def call() -> Any:
        return function(w.q, w.k, w.v, *sequences, 0.0, w.causal, False, **options)

    return call


# --- packages ---

# For each option that packages name differently from flashsmith, the names in packages, the usual
# one first.
_THEIR_NAMES = {
    "window": ("window_size",),
    "cache_lens": ("cache_seqlens", "seqused_k"),
    "page_table": ("block_table",),
}
# The keywords that change the result: a function that lacks one of them would compute something
# else.
_NEEDED = {"causal", "window_size", "softcap", "cache_seqlens", "block_table", "cu_seqlens_q"}
_DENSE, _PACKED = "flash_attn_func", "flash_attn_varlen_func"
_CACHED = "flash_attn_with_kvcache"


@dataclass(frozen=True)
class FlashAttnPeer:
    """One generation of FlashAttention: the modules that may contain its functions, and the
    distributions that contain these modules.

    ``cached``: the function for a KV cache.
    """

    name: str
    modules: tuple[str, ...]
    distributions: tuple[str, ...]
    cached: str = _CACHED

    def absence(self, problem: Problem) -> str | None:
        return self.absence_of(_PACKED if problem.semantics.packed else _DENSE)

    def absence_of(self, function: str) -> str | None:
        """Returns the reason why the function with this name cannot be used here; None if it
        can."""
        # The cheap check is first: without PyTorch, none of the modules can be imported.
        if absent := torch_absence():
            return absent
        found = self._function(function)
        return found if isinstance(found, str) else None

    def version(self) -> str:
        for name in self.distributions:
            try:
                return f"{name} {importlib.metadata.version(name)}"
            except importlib.metadata.PackageNotFoundError:
                continue
        return ""

    def prepare(self, workload: Workload) -> PeerImplementation:
        tensors = workload.q, workload.k, workload.v
        name = _PACKED if workload.packed else _DENSE
        return self.prepare_call(name, tensors, workload.options)

    def prepare_call(
        self, name: str, tensors: Sequence[Any], options: Mapping[str, Any]
    ) -> PeerImplementation:
        """Calls the function ``name`` of the package; ``options`` have flashsmith's names."""
        function = self._function(name)
        # Which keywords exist depends on the version of the package.
        known = inspect.signature(function).parameters
        options = {_their_name(name, known): value for name, value in options.items()}
        if lacking := sorted(_NEEDED & options.keys() - known.keys()):
            raise ArgumentError(f"{function.__name__} has no {' and no '.join(lacking)}")
        options = {name: value for name, value in options.items() if name in known}

        def call() -> Any:
            return function(*tensors, **options)

        return PeerImplementation(self.name, call, _output)

    def _function(self, name: str) -> Any:
        """The function, or a string that says why there is none."""
        reasons = []
        for module in self.modules:
            try:
                return getattr(importlib.import_module(module), name)
            except ModuleNotFoundError as error:
                missing = error.name or module
                itself = module == missing or module.startswith(f"{missing}.")
                reasons.append(
                    f"{missing} is not installed"
                    if itself
                    else f"{module} needs {missing}, which is not installed"
                )
            except AttributeError:
                reasons.append(f"{module} has no {name}")
            except Exception as error:  # wheels for another PyTorch fail in many ways
                reasons.append(f"{module} cannot be imported: {str(error).splitlines()[0]}")
        return "; ".join(reasons)


def _their_name(name: str, known: Collection[str]) -> str:
    """Returns the keyword for flashsmith's option ``name`` in a function whose keywords are
    ``known``."""
    theirs = _THEIR_NAMES.get(name, (name,))
    return next((it for it in (name, *theirs) if it in known), theirs[0])


def _output(returned: Any) -> Any:
    """The output o from a function's return value, which in some versions also contains the LSE."""
    return returned[0] if isinstance(returned, tuple) else returned


# --- gradients ---


@dataclass(frozen=True)
class GradientPeer:
    """The gradients of another peer's forward pass, computed by torch.autograd.grad().

    This measures only the kernels, not the accumulation into .grad.
    """

    of: SdpaPeer | FlexPeer | FlashAttnPeer

    @property
    def name(self) -> str:
        return self.of.name

    def absence(self, problem: Problem) -> str | None:
        return self.of.absence(problem)

    def version(self) -> str:
        return f"{self.of.version()}, torch.autograd.grad"

    def prepare(self, workload: BackwardWorkload) -> PeerImplementation:
        def forward(q: Any, k: Any, v: Any) -> Any:
            of_leaves = copy.copy(workload)
            of_leaves.q, of_leaves.k, of_leaves.v = q, k, v
            return self.of.prepare(of_leaves).output()

        return PeerImplementation(self.name, workload.differentiated(forward), workload.by_name)


# --- over a cache ---


@dataclass(frozen=True)
class DenseCachePeer:
    """PyTorch's attention over a dense cache. Every sequence must fill the cache, because SDPA
    takes no cache lengths.

    With one query, a causal mask shows all keys, so SDPA is called without a mask. With other
    masks, the function that the flash backend calls is used directly, because it aligns masks to
    the bottom right.
    """

    of: SdpaPeer

    @property
    def name(self) -> str:
        return self.of.name

    def absence(self, problem: Problem) -> str | None:
        if problem.page:
            return "PyTorch's SDPA has no page tables"
        if problem.cache:
            return NO_OTHER_DTYPE
        if problem.semantics.packed:
            return "PyTorch's SDPA has no packed queries over a cache"
        if _sees_all(problem):
            plain = Semantics(softcap=problem.semantics.softcap)
            problem = replace(problem, semantics=plain, window_keys=0)
        elif not self.of.direct:
            return "PyTorch aligns causal masks to the top left, and supports windows in fa2 only"
        elif problem.semantics.score.is_plain:
            return torch_absence()
        return self.of.absence(problem)

    def version(self) -> str:
        return self.of.version()

    def prepare(self, workload: DecodeWorkload) -> PeerImplementation:
        if _sees_all(workload.problem):
            plain = copy.copy(workload)
            plain.problem = replace(workload.problem, semantics=Semantics(), window_keys=0)
            return self.of.prepare(plain)
        return PeerImplementation(self.name, _direct_call(workload), _output)


def _sees_all(problem: Problem) -> bool:
    """Whether every query sees every key in the cache."""
    mask = problem.semantics.key_mask
    return not mask.hides or (mask.is_triangular and problem.seq_q == 1)


@dataclass(frozen=True)
class CachePeer:
    """The function of a FlashAttention package for a KV cache."""

    of: FlashAttnPeer

    @property
    def name(self) -> str:
        return self.of.name

    def absence(self, problem: Problem) -> str | None:
        return NO_OTHER_DTYPE if problem.cache else self.of.absence_of(self.of.cached)

    def version(self) -> str:
        return self.of.version()

    def prepare(self, workload: DecodeWorkload) -> PeerImplementation:
        w = workload
        return self.of.prepare_call(self.of.cached, (w.q, w.k_cache, w.v_cache), w.options)


def _over_cache(peer: SdpaPeer | FlexPeer | FlashAttnPeer) -> Peer:
    """A peer's attention over a cache."""
    if isinstance(peer, SdpaPeer):
        return DenseCachePeer(peer)
    return CachePeer(peer) if isinstance(peer, FlashAttnPeer) else peer


# --- by name ---

# PyTorch's built-in FlashAttention-2, to which all speeds are related.
BASELINE = "fa2"
_ALL: tuple[SdpaPeer | FlexPeer | FlashAttnPeer, ...] = (
    SdpaPeer(BASELINE, "FLASH_ATTENTION", direct=True),
    SdpaPeer("cudnn", "CUDNN_ATTENTION"),
    SdpaPeer("mem_efficient", "EFFICIENT_ATTENTION"),
    FlexPeer(),
    FlexPeer("flex_flash", backend="FLASH"),
    FlashAttnPeer("flash_attn_2", ("flash_attn",), ("flash-attn",)),
    FlashAttnPeer(
        "flash_attn_3",
        ("flash_attn_interface", "flash_attn_3.flash_attn_interface", "fa3_fwd_interface"),
        ("flash-attn-3", "flash_attn_3", "fa3-fwd"),
    ),
    FlashAttnPeer("flash_attn_4", ("flash_attn.cute",), ("flash-attn-4",), cached=_PACKED),
)
FORWARD_PEERS: tuple[Peer, ...] = (*_ALL, CudnnPeer(), FlashInferPrefillPeer())
BACKWARD_PEERS: tuple[Peer, ...] = (*map(GradientPeer, _ALL), CudnnGradientPeer())
DECODE_PEERS: tuple[Peer, ...] = (
    *(_over_cache(peer) for peer in _ALL),
    CudnnPeer(),
    FlashInferDecodePeer("flashinfer", tensor_cores=True),
    FlashInferDecodePeer("flashinfer_cuda_cores", tensor_cores=False),
    FlashInferXqaPeer(),
)
_OWN: dict[str, Sequence[Peer]] = {BACKWARD.name: BACKWARD_PEERS, DECODE.name: DECODE_PEERS}
# All peers by name: the peers of the forward pass, and peers that are compared only over a cache.
PEERS: dict[str, Peer] = {peer.name: peer for peer in (*DECODE_PEERS, *FORWARD_PEERS)}
_ONLY_OVER_CACHE = PEERS.keys() - {peer.name for peer in FORWARD_PEERS}


def get_peers(names: str) -> tuple[Peer, ...]:
    """The peers in a comma-separated list of names, without duplicates, in the order of PEERS.
    'all' and 'none' are allowed.

    Raises ArgumentError for an unknown name; the message lists the known names.
    """
    wanted = {name.strip().replace("-", "_") for name in names.split(",") if name.strip()}
    if wanted == {"all"}:
        return tuple(PEERS.values())
    if wanted == {"none"}:
        return ()
    unknown = sorted(wanted - set(PEERS))
    if unknown or not wanted:
        raise ArgumentError(
            f"peers={names!r}: {', '.join(unknown) or 'no name'}: allowed are "
            f"{', '.join(PEERS)} separated by commas, all, and none"
        )
    return tuple(peer for peer in PEERS.values() if peer.name in wanted)


def peers_of(problem: Problem, asked: Sequence[Peer]) -> tuple[Peer, ...]:
    """Returns the peers to compare on a problem, as ``asked`` selects them.

    There are separate peers for gradients and for caches; of these, the ones whose names are in
    ``asked`` are returned. An operation from another package has its own peers: those whose names
    are in ``asked`` are returned, or all its peers if none has such a name.

    Raises ArgumentError if an operation's peers cannot be loaded.
    """
    if problem.operation == DEFAULT or not asked:
        return tuple(peer for peer in asked if peer.name not in _ONLY_OVER_CACHE)
    names = {peer.name for peer in asked}
    if not problem.computed.peers:
        return tuple(it for it in _OWN.get(problem.operation, ()) if it.name in names)
    own = load_attribute(problem.computed.peers, f"peers of {problem.operation}")
    return tuple(peer for peer in own if peer.name in names) or tuple(own)
