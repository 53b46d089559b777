"""PyTorch's scaled_dot_product_attention, pinned to one of its backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashsmith.benchmark.peers.peer import PeerContender, torch_absence
from flashsmith.benchmark.workload import Workload
from flashsmith.families import Problem


@dataclass(frozen=True)
class SdpaPeer:
    """One backend; ``backend`` is its name in torch.nn.attention.SDPBackend.

    ``direct``: whether packed batches and windows go to the function that lies under the backend.
    """

    name: str
    backend: str
    direct: bool = False

    def absence(self, problem: Problem) -> str | None:
        semantics = problem.semantics
        direct = semantics.packed or semantics.mask == "window"
        if semantics.softcap:
            return "PyTorch has no softcap"
        if direct and not self.direct:
            return f"PyTorch has no {'packed batches' if semantics.packed else 'windows'} for it"
        if semantics.mask == "causal" and not direct and problem.seq_q != problem.seq_k:
            return "PyTorch aligns causal masks to the top left"
        return torch_absence()

    def version(self) -> str:
        import torch

        if self.backend == "CUDNN_ATTENTION":
            return f"cuDNN {torch.backends.cudnn.version()}"
        return f"torch {torch.__version__}"

    def prepare(self, workload: Workload) -> PeerContender:
        if workload.packed or workload.problem.window is not None:
            return PeerContender(self.name, _direct_call(workload), lambda returned: returned[0])
        return PeerContender(
            self.name, self._dense_call(workload), lambda returned: returned.transpose(1, 2)
        )

    def _dense_call(self, workload: Workload) -> Callable[[], Any]:
        from torch.nn import functional
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = getattr(SDPBackend, self.backend)
        # (batch, heads, seq, d) in memory as it is: nothing is copied.
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
    """The function under the flash backend; PyTorch itself calls it for nested tensors. Its masks
    are aligned to the bottom right."""
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
