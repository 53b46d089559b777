"""FlexAttention as a peer: the forward pass, gradients, and attention over a dense cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from flashsmith.benchmark.peer import (
    NO_OTHER_DTYPE,
    PeerImplementation,
    import_absence,
    torch_absence,
)
from flashsmith.families import Problem
from flashsmith.semantics import UNLIMITED

# The module for whose kernels FlexAttention generates functions with the backend FLASH.
_FLASH_KERNELS = "flash_attn.cute"


@dataclass(frozen=True)
class FlexPeer:
    """PyTorch's FlexAttention. Masks become block masks, so that tiles without visible keys are
    skipped.

    ``mode`` is torch.compile's mode. The default mode takes seconds per problem; max-autotune
    takes half a minute, because it tries a dozen tiles. ``backend`` is FlexAttention's option:
    'FLASH' selects the kernels of flash-attn-4; with '' PyTorch chooses, and takes Triton's
    kernels.
    """

    name: str = "flex"
    mode: str = "default"
    backend: str = ""

    def absence(self, problem: Problem) -> str | None:
        if problem.semantics.packed:
            return "FlexAttention has no packed batches"
        if problem.page:
            return "FlexAttention has no page tables"
        if problem.cache:
            return NO_OTHER_DTYPE
        if absent := torch_absence():
            return absent
        return self._backend_absence() if self.backend else None

    def _backend_absence(self) -> str | None:
        """Returns the reason why FlexAttention cannot use the backend; None if it can."""
        from torch.nn.attention import flex_attention

        # Older versions of PyTorch do not support the option and pass it on to Triton's kernels,
        # which ignore it.
        options = getattr(flex_attention, "FlexKernelOptions", None)
        if "BACKEND" not in getattr(options, "__annotations__", ()):
            return "FlexAttention has no other backend in this version of PyTorch"
        return import_absence(_FLASH_KERNELS)

    def version(self) -> str:
        import torch

        return f"torch {torch.__version__}"

    def prepare(self, workload: Any) -> PeerImplementation:
        import torch
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention, dynamic=False, mode=self.mode)
        p = workload.problem
        q, k, v = (tensor.transpose(1, 2) for tensor in (workload.q, workload.k, workload.v))
        mask, changed = _functions(p, q.device)
        options = {"kernel_options": {"BACKEND": self.backend}} if self.backend else {}
        grouped = p.heads_q != p.heads_k

        def call() -> Any:
            return compiled(
                q, k, v, score_mod=changed, block_mask=mask, enable_gqa=grouped, **options
            )

        return PeerImplementation(self.name, call, lambda returned: returned.transpose(1, 2))


@lru_cache(maxsize=1)
def _functions(problem: Problem, device: Any) -> tuple[Any, Callable[..., Any] | None]:
    """The block mask and the function that changes scores; each is None if the problem does not
    need it.

    All workloads of a problem get the same two objects, so that torch.compile compiles only once
    for the problem. The kernels for earlier problems are discarded: otherwise, after a few shapes,
    torch.compile would give up and run the function uncompiled.
    """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    torch._dynamo.reset()
    sees, mask = _visible(problem), None
    if sees is not None:
        mask = create_block_mask(sees, None, None, problem.seq_q, problem.seq_k, device=device)
    return mask, _changed(problem)


def _visible(problem: Problem) -> Callable[..., Any] | None:
    """Returns the mask as a function for FlexAttention, aligned to the bottom right; None if all
    keys are visible."""
    mask, offset = problem.semantics.key_mask, problem.seq_k - problem.seq_q
    if not mask.hides:
        return None
    left, right = problem.window or (UNLIMITED, UNLIMITED)
    import torch

    def sees(batch: Any, head: Any, row: Any, key: Any) -> Any:
        return mask.sees(row + offset, key, left, right, torch)

    return sees


def _changed(problem: Problem) -> Callable[..., Any] | None:
    """Returns the function with which FlexAttention changes scores; None if scores do not
    change."""
    score, numbers = problem.semantics.score, problem.numbers
    if score.is_plain:
        return None
    import torch

    changed = score.value

    def change(value: Any, batch: Any, head: Any, row: Any, key: Any) -> Any:
        return changed.evaluate({"score": value, **numbers}, xp=torch, exact=False)

    return change
