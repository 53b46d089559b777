"""Attention over several GPUs: sequences that are sharded over a process group of PyTorch.

    o = flashsmith.parallel.attention(q, k, v, causal=True)  # each rank's rows of o

Of a sequence over P ranks, rank r holds the chunks r and 2P - 1 - r of 2P, whatever the schedule:
every rank has the same work under a causal mask. ``shard`` gives a rank its rows, ``positions``
says which they are, ``unshard`` gathers them. Every rank of the group makes the same calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch._compile import _disable_dynamo

from flashsmith.integrations.traceable import is_tracing
from flashsmith.parallel.calls import (
    CallOptions,
    attend,
    check_whole,
    layout_of,
    row_dim,
    unsharded,
)
from flashsmith.parallel.group import Group
from flashsmith.parallel.problems import problems
from flashsmith.parallel.schedules import shard_of
from flashsmith.semantics.signature import NO_WINDOW

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flashsmith.parallel.keywords import ParallelKeywords

__all__ = ["attention", "positions", "problems", "shard", "unshard"]

_attend_outside_graphs = _disable_dynamo(attend)


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_row_max: Literal[False] = ...,
    **keywords: Unpack[ParallelKeywords],
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    return_row_max: Literal[False] = ...,
    **keywords: Unpack[ParallelKeywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_row_max: Literal[True],
    **keywords: Unpack[ParallelKeywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    return_row_max: Literal[True],
    **keywords: Unpack[ParallelKeywords],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool = ...,
    return_row_max: bool = ...,
    **keywords: Unpack[ParallelKeywords],
) -> Any: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any = None,
    schedule: str = "auto",
    causal: bool = False,
    window: tuple[int | None, int | None] = NO_WINDOW,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    return_row_max: bool = False,
    config: Any = None,
    backward_config: Any = None,
    deterministic: bool | None = None,
    emulate: bool = False,
    bits: str | None = None,
) -> Any:
    """``flashsmith.attention`` of sequences that are sharded over a group of processes.

    Differentiable with respect to q, k, v and sinks, through the output and the log-sum-exp. Every
    rank of the group calls it with the same options; all of them raise if one refuses its
    arguments. Under torch.compile it is a graph break.

    Args:
        q, k, v: this rank's shards, (batch, rows, heads, d) or packed (rows, heads, d), as
            ``shard`` gives them; fp16 or bf16, on a GPU (a group of NCCL) or on the host (gloo).
        group: the processes, a ProcessGroup or a DeviceMesh of one dimension; None is the world.
        schedule: 'zigzag' passes K and V around in a ring, beside the kernels; twice the ranks
            must divide every sequence. 'allgather' gathers K and V, of any lengths. 'ulysses'
            exchanges rows for heads; the ranks must divide k's heads. 'auto' is 'allgather' for a
            causal dense batch that 'zigzag' serves too, with K and V of at most 512 MiB in all;
            else 'zigzag' where it serves without a window, and with a causal mask where q and k
            have the same lengths; else, and for the row maximum, 'allgather'.
        causal, window, softcap, scale: of the whole sequences, as attention() has them.
        sinks: (heads_q,) fp32, the same on every rank. Each rank's gradient is the part that its
            rows give, or under 'ulysses' its heads: their sum over ranks is the gradient.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, offsets of the whole packed sequences, the
            same on every rank. They are read once from a device, which is waited for.
        max_seqlen_q, max_seqlen_k: not needed; at least the longest whole sequence's length.
        out: where to write this rank's output; not with gradients.
        return_lse, return_row_max: also return this rank's log-sum-exp, or row maximum, fp32,
            (batch, heads_q, rows) or (heads_q, rows).
        config, backward_config, deterministic, emulate: as attention() has them.
        bits: as attention() has it, the same on every rank: with 'canonical' a row has the bits
            that one process gives it. 'auto' is then 'allgather', and 'zigzag' is refused.

    Returns:
        This rank's rows of the output o, (o, lse), (o, row_max) or (o, lse, row_max).

    Raises:
        ArgumentError: an argument is unusable, ranks disagree, or shards are not what ``shard``
            gives; on every rank, naming the rank.
        GroupError: another rank has ended, or did not come within the group's timeout.
        The other errors of ``flashsmith.forward``.
    """
    asked = CallOptions(
        schedule, causal, window, softcap, scale, sinks, cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k, out, return_lse, return_row_max, config, backward_config,
        deterministic, emulate, bits,
    )  # fmt: skip
    # PyTorch's compiler cannot trace what the ranks tell each other.
    return (_attend_outside_graphs if is_tracing() else attend)(group, q, k, v, asked)


def shard(
    tensor: torch.Tensor,
    *,
    dim: int | None = None,
    group: Any = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's rows of a tensor that has all: a copy, differentiable, without communication.

    Args:
        tensor: with whole sequences along ``dim``: queries, token numbers, labels.
        dim: the dimension of rows; None is 1, and 0 with cu_seqlens.
        group: as ``attention`` has it.
        cu_seqlens: (sequences + 1,) int32, the offsets of packed sequences; None for one.

    Raises:
        ArgumentError: an argument is unusable.
    """
    members = Group(group)
    at = row_dim(tensor, dim, cu_seqlens is not None)
    layout = layout_of(tensor.shape[at] if cu_seqlens is None else None, cu_seqlens, members.size)
    check_whole(tensor, at, layout)
    return shard_of(tensor, layout, members.rank, at)


def unshard(
    tensor: torch.Tensor,
    *,
    dim: int | None = None,
    group: Any = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The whole tensor from every rank's rows, on every rank; without a gradient.

    Args:
        tensor: this rank's rows along ``dim``.
        dim, group, cu_seqlens: as ``shard`` has them.

    Raises:
        ArgumentError: an argument is unusable, ranks disagree, or shards are not what ``shard``
            gives; on every rank, naming the rank.
        GroupError: another rank has ended, or did not come within the group's timeout.
    """
    return unsharded(group, tensor, dim, cu_seqlens)


def positions(
    length: int | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    group: Any = None,
    device: Any = None,
) -> torch.Tensor:
    """The position of each of this rank's rows in its sequence, (rows,) int64: for embeddings of
    positions.

    Args:
        length: rows of the whole sequence; or cu_seqlens: (sequences + 1,) int32, the offsets of
            packed sequences.
        group: as ``attention`` has it.
        device: of the result.

    Raises:
        ArgumentError: an argument is unusable.
    """
    members = Group(group)
    layout = layout_of(length, cu_seqlens, members.size)
    parts = [
        torch.arange(run.position, run.position + run.length)
        for runs in layout.runs(members.rank)
        for run in runs
    ]
    found = torch.cat(parts) if parts else torch.empty(0, dtype=torch.long)
    return found.to(device)
