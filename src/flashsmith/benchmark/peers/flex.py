"""PyTorch's FlexAttention, compiled for each problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashsmith.benchmark.peers.peer import PeerContender, torch_absence
from flashsmith.benchmark.workload import Workload
from flashsmith.families import Problem


@dataclass(frozen=True)
class FlexPeer:
    """FlexAttention; masks as a block mask, so that tiles without visible keys are passed over.

    ``mode`` is torch.compile's. Its default takes seconds a problem; max-autotune, which tries a
    dozen tiles and prints what it finds, half a minute.
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

    def prepare(self, workload: Workload) -> PeerContender:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # Beyond a few shapes of one function the compiler gives up and runs it uncompiled.
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, dynamic=False, mode=self.mode)
        p = workload.problem
        q, k, v = (tensor.transpose(1, 2) for tensor in (workload.q, workload.k, workload.v))
        sees = _visible(p)
        mask = None
        if sees is not None:
            mask = create_block_mask(sees, None, None, p.seq_q, p.seq_k, device=q.device)
        grouped = p.heads_q != p.heads_k
        changed = _capped(p.softcap) if p.softcap else None

        def call() -> Any:
            return compiled(q, k, v, score_mod=changed, block_mask=mask, enable_gqa=grouped)

        return PeerContender(self.name, call, lambda returned: returned.transpose(1, 2))


def _visible(problem: Problem) -> Callable[..., Any] | None:
    """Which keys a query sees, aligned to the bottom right; None: all."""
    offset = problem.seq_k - problem.seq_q
    if problem.window is not None:
        left, right = problem.window

        def within(batch: Any, head: Any, row: Any, key: Any) -> Any:
            position = row + offset
            return (key >= position - left) & (key <= position + right)

        return within
    if problem.semantics.mask == "causal":

        def before(batch: Any, head: Any, row: Any, key: Any) -> Any:
            return row + offset >= key

        return before
    return None


def _capped(softcap: float) -> Callable[..., Any]:
    import torch

    def cap(score: Any, batch: Any, head: Any, row: Any, key: Any) -> Any:
        return softcap * torch.tanh(score / softcap)

    return cap
