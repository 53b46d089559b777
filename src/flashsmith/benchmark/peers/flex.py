"""PyTorch's FlexAttention, compiled for each problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashsmith.benchmark.peers.peer import PeerContender, torch_absence
from flashsmith.benchmark.workload import Workload
from flashsmith.configs import Problem


@dataclass(frozen=True)
class FlexPeer:
    """FlexAttention; causal by a block mask, so that tiles above the diagonal are passed over."""

    name: str = "flex"

    def absence(self, problem: Problem) -> str | None:
        if problem.semantics.packed:
            return "FlexAttention has no packed batches"
        return torch_absence()

    def version(self) -> str:
        import torch

        return f"torch {torch.__version__}"

    def prepare(self, workload: Workload) -> PeerContender:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # Beyond a few shapes of one function the compiler gives up and runs it uncompiled.
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, dynamic=False, mode="max-autotune-no-cudagraphs")
        p = workload.problem
        q, k, v = (tensor.transpose(1, 2) for tensor in (workload.q, workload.k, workload.v))
        mask = None
        if workload.causal:
            offset = p.seq_k - p.seq_q

            def sees(batch: Any, head: Any, row: Any, key: Any) -> Any:
                return row + offset >= key

            mask = create_block_mask(sees, None, None, p.seq_q, p.seq_k, device=q.device)
        grouped = p.heads_q != p.heads_k

        def call() -> Any:
            return compiled(q, k, v, block_mask=mask, enable_gqa=grouped)

        return PeerContender(self.name, call, lambda returned: returned.transpose(1, 2))
