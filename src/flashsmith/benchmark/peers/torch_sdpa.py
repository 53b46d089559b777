"""PyTorch's scaled_dot_product_attention, pinned to one of its backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashsmith.benchmark.peers.peer import PeerContender, torch_absence
from flashsmith.benchmark.workload import Workload
from flashsmith.configs import Problem


@dataclass(frozen=True)
class SdpaPeer:
    """One backend; ``backend`` is its name in torch.nn.attention.SDPBackend.

    ``packs``: whether packed batches go to the function that lies under the backend.
    """

    name: str
    backend: str
    packs: bool = False

    def absence(self, problem: Problem) -> str | None:
        packed, causal = problem.semantics.packed, problem.semantics.mask == "causal"
        if packed and not self.packs:
            return "PyTorch has no packed batches for it"
        if causal and not packed and problem.seq_q != problem.seq_k:
            return "PyTorch aligns causal masks to the top left"
        return torch_absence()

    def version(self) -> str:
        import torch

        if self.backend == "CUDNN_ATTENTION":
            return f"cuDNN {torch.backends.cudnn.version()}"
        return f"torch {torch.__version__}"

    def prepare(self, workload: Workload) -> PeerContender:
        if workload.packed:
            return PeerContender(self.name, _packed_call(workload), lambda returned: returned[0])
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


def _packed_call(workload: Workload) -> Callable[[], Any]:
    """The function under the flash backend; PyTorch itself calls it for nested tensors."""
    import torch

    w, p = workload, workload.problem
    function = torch.ops.aten._flash_attention_forward
    sequences = (w.cu_seqlens_q, w.cu_seqlens_k, p.seq_q, p.seq_k)

    def call() -> Any:
        return function(w.q, w.k, w.v, *sequences, 0.0, w.causal, False)

    return call
