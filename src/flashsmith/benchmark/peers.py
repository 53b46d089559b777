"""Peers: the attention of other libraries, behind one small interface, for comparisons with
flashsmith.

A peer that is not installed or cannot serve a problem is absent; it has not failed. Its row gives
the reason.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

from flashsmith.benchmark.workload import (
    BackwardWorkload,
    DecodeWorkload,
    Workload,
)
from flashsmith.errors import ArgumentError
from flashsmith.families import Problem, Semantics
from flashsmith.operations import BACKWARD, DECODE, DEFAULT
from flashsmith.operations.operation import load_attribute
from flashsmith.semantics import UNLIMITED


class Peer(Protocol):
    """The attention of another library."""

    @property
    def name(self) -> str:
        """The name of the peer in --peers and in tables."""

    def absence(self, problem: Problem) -> str | None:
        """Why the peer cannot take part; None if this is unknown before it is tried."""

    def version(self) -> str:
        """The version of the library that computes; valid only if the peer is not absent."""

    def prepare(self, workload: Any) -> PeerImplementation:
        """The implementation for a workload, whose tensors are PyTorch's.

        If this raises an exception, the peer is absent.
        """


@dataclass(frozen=True)
class PeerImplementation:
    """A peer with the tensors of one workload.

    ``in_q_layout`` converts what ``call`` returns: to q's layout, or to gradients by name.
    """

    name: str
    call: Callable[[], Any]
    in_q_layout: Callable[[Any], Any]

    def launch(self) -> Any:
        """Enqueues one call."""
        return self.call()

    def output(self) -> Any:
        """Runs one call and returns its output in q's layout."""
        return self.result(self.call())

    def result(self, returned: Any) -> Any:
        """The result of a call in q's layout."""
        return self.in_q_layout(returned)


# A peer's error against the reference may be at most this many times flashsmith's error. Kernels
# that round more often, for example because they merge partial results in 16 bits, stay far below
# this factor. Kernels that compute a different function are far above it.
MOST_OVER_OURS = 3.0


def why_wrong(theirs: Mapping[str, float], ours: Mapping[str, float]) -> str:
    """Why the result of a peer is wrong; '' if it is correct.

    Peers with a wrong result are not timed.

    ``theirs`` and ``ours`` map the names of outputs to their largest errors. For benchmarks whose
    problems Workload.check() does not support.
    """
    return "; ".join(
        f"{name}: error {theirs[name]:.3g}, above {MOST_OVER_OURS:g} times ours, {error:.3g}"
        for name, error in ours.items()
        if not theirs[name] <= MOST_OVER_OURS * error
    )


def torch_absence() -> str | None:
    """Why PyTorch cannot use a GPU here; None if it can."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    import torch

    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU"
    return None


# --- PyTorch ---


@dataclass(frozen=True)
class SdpaPeer:
    """One backend of PyTorch's SDPA; ``backend`` is its name in torch.nn.attention.SDPBackend.

    ``direct``: whether packed batches and windows call the function below the backend.
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
    """A call of the function below the flash backend, which PyTorch uses for nested tensors.

    It aligns masks to the bottom right.
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


@dataclass(frozen=True)
class FlexPeer:
    """FlexAttention.

    PyTorch's FlexAttention. Masks become block masks, so that tiles without visible keys are
    skipped.

    ``mode`` is torch.compile's. The default mode takes seconds per problem; max-autotune
    takes half a minute, because it tries a dozen tiles.
    """

    name: str = "flex"
    mode: str = "default"

    def absence(self, problem: Problem) -> str | None:
        if problem.semantics.packed:
            return "FlexAttention has no packed batches"
        return torch_absence()

    def version(self) -> str:
        import torch

        return f"torch {torch.__version__}"

    def prepare(self, workload: Workload) -> PeerImplementation:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # Otherwise torch.compile gives up after a few shapes and runs the function uncompiled.
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, dynamic=False, mode=self.mode)
        p = workload.problem
        q, k, v = (tensor.transpose(1, 2) for tensor in (workload.q, workload.k, workload.v))
        sees = _visible(p)
        mask = None
        if sees is not None:
            mask = create_block_mask(sees, None, None, p.seq_q, p.seq_k, device=q.device)
        grouped = p.heads_q != p.heads_k
        changed = _changed(p)

        def call() -> Any:
            return compiled(q, k, v, score_mod=changed, block_mask=mask, enable_gqa=grouped)

        return PeerImplementation(self.name, call, lambda returned: returned.transpose(1, 2))


def _visible(problem: Problem) -> Callable[..., Any] | None:
    """The mask as FlexAttention's function, aligned to the bottom right; None if all keys are
    visible."""
    mask, offset = problem.semantics.key_mask, problem.seq_k - problem.seq_q
    if not mask.hides:
        return None
    left, right = problem.window or (UNLIMITED, UNLIMITED)
    import torch

    def sees(batch: Any, head: Any, row: Any, key: Any) -> Any:
        return mask.sees(row + offset, key, left, right, torch)

    return sees


def _changed(problem: Problem) -> Callable[..., Any] | None:
    """FlexAttention's function that changes scores; None if scores do not change."""
    score, numbers = problem.semantics.score, problem.numbers
    if score.is_plain:
        return None
    import torch

    changed = score.value

    def change(value: Any, batch: Any, head: Any, row: Any, key: Any) -> Any:
        return changed.evaluate({"score": value, **numbers}, xp=torch, exact=False)

    return change


# --- packages ---

# Names of options that packages call differently: flashsmith's name -> theirs.
_THEIR_NAMES = {
    "window": "window_size",
    "cache_lens": "cache_seqlens",
    "page_table": "block_table",
}
# If a function does not have one of these keywords, it would compute something else.
_NEEDED = {"causal", "window_size", "softcap", "cache_seqlens", "block_table", "cu_seqlens_q"}
_DENSE, _PACKED = "flash_attn_func", "flash_attn_varlen_func"
_CACHED = "flash_attn_with_kvcache"


@dataclass(frozen=True)
class FlashAttnPeer:
    """One generation of FlashAttention: the modules in which its functions may be, and the
    distributions that contain it."""

    name: str
    modules: tuple[str, ...]
    distributions: tuple[str, ...]

    def absence(self, problem: Problem) -> str | None:
        return self.absence_of(_PACKED if problem.semantics.packed else _DENSE)

    def absence_of(self, function: str) -> str | None:
        """Why the function with this name cannot be used here; None if it can."""
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
        options = {
            name if name in known else _THEIR_NAMES.get(name, name): value
            for name, value in options.items()
        }
        if lacking := sorted(_NEEDED & options.keys() - known.keys()):
            raise ArgumentError(f"{function.__name__} has no {' and no '.join(lacking)}")
        options = {name: value for name, value in options.items() if name in known}

        def call() -> Any:
            return function(*tensors, **options)

        return PeerImplementation(self.name, call, _output)

    def _function(self, name: str) -> Any:
        """The function, or a text that says why there is none."""
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


def _output(returned: Any) -> Any:
    """The output o of a function, some versions of which also return the LSE."""
    return returned[0] if isinstance(returned, tuple) else returned


# --- gradients ---


@dataclass(frozen=True)
class GradientPeer:
    """The gradients of another peer's forward pass, computed by torch.autograd.grad().

    This measures only the kernels, not the accumulation into .grad.
    """

    of: SdpaPeer | FlashAttnPeer

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
    """PyTorch's attention over a dense cache that every sequence fills, because SDPA does not take
    cache lengths.

    With one query, a causal mask shows all keys, so SDPA is called without a mask. With other
    masks, the function below the flash backend is called, which aligns masks to the bottom right.
    """

    of: SdpaPeer

    @property
    def name(self) -> str:
        return self.of.name

    def absence(self, problem: Problem) -> str | None:
        if problem.page:
            return "PyTorch's SDPA has no page tables"
        if problem.cache:
            return _NO_OTHER_DTYPE
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


_NO_OTHER_DTYPE = "it takes no cache with scales or of another dtype than 16-bit queries"


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
        return _NO_OTHER_DTYPE if problem.cache else self.of.absence_of(_CACHED)

    def version(self) -> str:
        return self.of.version()

    def prepare(self, workload: DecodeWorkload) -> PeerImplementation:
        w = workload
        return self.of.prepare_call(_CACHED, (w.q, w.k_cache, w.v_cache), w.options)


# This is twice the size that FlashInfer's documentation recommends.
_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True)
class FlashInferPeer:
    """FlashInfer's decode attention over pages; a dense cache is one page per sequence.

    FlashInfer's plan waits for the GPU; it is made once, and only the run is timed.
    """

    name: str = "flashinfer"

    def absence(self, problem: Problem) -> str | None:
        if absent := torch_absence():
            return absent
        if problem.operation != DECODE.name:
            return "FlashInfer is compared only over a cache"
        if problem.seq_q > 1 and not problem.semantics.key_mask.hides:
            return "FlashInfer always masks several queries of a sequence causally"
        try:
            importlib.import_module("flashinfer")
        except ModuleNotFoundError as error:
            return f"{error.name or 'flashinfer'} is not installed"
        except Exception as error:  # wheels for another PyTorch fail in many ways
            return f"flashinfer cannot be imported: {str(error).splitlines()[0]}"
        return None

    def version(self) -> str:
        return f"flashinfer {importlib.metadata.version('flashinfer-python')}"

    def prepare(self, workload: DecodeWorkload) -> PeerImplementation:
        import torch

        flashinfer = importlib.import_module("flashinfer")
        w, p = workload, workload.problem
        page = p.page or p.seq_k
        pages = -(-p.seq_k // page)

        def whole(array: Any) -> Any:
            return torch.as_tensor(array, dtype=torch.int32, device=w.q.device)

        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(w.q.device), "NHD", use_tensor_cores=True
        )
        options: dict[str, Any] = {"q_data_type": w.q.dtype, "kv_data_type": w.k_cache.dtype}
        if p.window is not None:
            options["window_left"] = p.window[0]
        if not p.semantics.score.is_plain:
            options["logits_soft_cap"] = p.softcap
        if p.seq_q > 1:
            options["q_len_per_req"] = p.seq_q
        known = inspect.signature(wrapper.plan).parameters
        if lacking := sorted(options.keys() - known.keys()):
            raise ArgumentError(f"BatchDecodeWithPagedKVCacheWrapper.plan has no {lacking[0]}")
        wrapper.plan(
            whole(range(0, (p.batch + 1) * pages, pages)),
            whole(range(p.batch)) if w.page_table is None else w.page_table.flatten(),
            whole([p.seq_k - (pages - 1) * page] * p.batch),
            *(p.heads_q, p.heads_k, p.d, page),
            **options,
        )
        q, caches = w.q.reshape(-1, p.heads_q, p.d), (w.k_cache, w.v_cache)

        def call() -> Any:
            return wrapper.run(q, caches)

        return PeerImplementation(self.name, call, lambda returned: returned.reshape(w.q.shape))


@cache
def _workspace(device: Any) -> Any:
    """FlashInfer's scratch memory.

    One is enough, because FlashInfer's calls run one after the other on one stream.
    """
    import torch

    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


# --- by name ---

# PyTorch's built-in FlashAttention-2, to which all speeds are related.
BASELINE = "fa2"
_ALL: tuple[SdpaPeer | FlexPeer | FlashAttnPeer, ...] = (
    SdpaPeer(BASELINE, "FLASH_ATTENTION", direct=True),
    SdpaPeer("cudnn", "CUDNN_ATTENTION"),
    SdpaPeer("mem_efficient", "EFFICIENT_ATTENTION"),
    FlexPeer(),
    FlashAttnPeer("flash_attn_2", ("flash_attn",), ("flash-attn",)),
    FlashAttnPeer(
        "flash_attn_3",
        ("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
        ("flash-attn-3", "flash_attn_3"),
    ),
    FlashAttnPeer("flash_attn_4", ("flash_attn.cute",), ("flash-attn-4",)),
)
_FLASHINFER = FlashInferPeer()
PEERS: dict[str, Peer] = {peer.name: peer for peer in (*_ALL, _FLASHINFER)}
BACKWARD_PEERS = tuple(GradientPeer(peer) for peer in _ALL if not isinstance(peer, FlexPeer))
DECODE_PEERS: tuple[Peer, ...] = (
    *(DenseCachePeer(peer) for peer in _ALL if isinstance(peer, SdpaPeer)),
    *(CachePeer(peer) for peer in _ALL if isinstance(peer, FlashAttnPeer)),
    _FLASHINFER,
)
_OWN: dict[str, Sequence[Peer]] = {BACKWARD.name: BACKWARD_PEERS, DECODE.name: DECODE_PEERS}


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
    """Those peers in ``asked`` that can be compared on a problem.

    FlashInfer can be compared only over a KV cache. Operations other than attention bring their own
    peers. The result has the ones with names in ``asked``, or all if no name matches.

    Raises ArgumentError if an operation's peers cannot be loaded.
    """
    if problem.operation == DEFAULT or not asked:
        return tuple(peer for peer in asked if peer is not _FLASHINFER)
    own = _OWN.get(problem.operation, ())
    if problem.computed.peers:
        own = load_attribute(problem.computed.peers, f"peers of {problem.operation}")
    names = {peer.name for peer in asked}
    return tuple(peer for peer in own if peer.name in names) or tuple(own)
