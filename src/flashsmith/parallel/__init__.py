"""Attention over several GPUs: sequences are sharded over a PyTorch process group.

    o = flashsmith.parallel.attention(q, k, v, causal=True)  # each rank's rows of o

A sequence is cut into 2P chunks for P ranks. With every schedule, rank r has the chunks r and 2P -
1 - r, so that all ranks have the same work under a causal mask. ``shard`` returns a rank's rows,
``positions`` returns their positions, and ``unshard`` gathers them. Every rank of the group must
make the same calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch._compile import _disable_dynamo

from flashsmith.integrations.traceable import is_tracing
from flashsmith.parallel.call_options import CallOptions
from flashsmith.parallel.calls import attend
from flashsmith.parallel.group import Group
from flashsmith.parallel.rank_problems import problems
from flashsmith.parallel.rank_rows import shard_of
from flashsmith.parallel.shards import check_whole, layout_of, row_dim, unsharded
from flashsmith.semantics.signature import NO_WINDOW

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flashsmith.parallel.attention_keywords import ParallelKeywords

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
    """``flashsmith.attention`` for sequences that are sharded over a group of processes.

    It is differentiable with respect to q, k, v and sinks, through the output and the log-sum-exp.
    All ranks of the group must call it with the same options. If one rank refuses its arguments,
    all ranks raise an error. Under torch.compile it causes a graph break.

    Args:
        q, k, v: this rank's shards, (batch, rows, heads, d) or packed (rows, heads, d), as
            ``shard`` returns them; fp16 or bf16, on a GPU (NCCL group) or on the host (gloo). v may
            have its own d.
        group: a ProcessGroup or a DeviceMesh of one dimension; None means the group of all
            processes.
        schedule: 'zigzag' passes K and V around a ring of ranks while kernels run. Every length
            must be a multiple of twice the number of ranks, and return_row_max is not possible.
            'allgather' gathers K and V from all ranks and takes any lengths. 'ulysses' exchanges
            rows for heads; the number of ranks must divide the number of heads of k. 'auto' is
            'zigzag' if it can serve the call and there is no window, and 'allgather' otherwise.
            Under a causal mask, it is 'zigzag' only if q and k have the same lengths, and either
            the sequences are packed or K and V of the whole batch have more than 512 MiB.
        causal, window, softcap, scale: as for attention(), applied to the whole sequences.
        sinks: (heads_q,) fp32, the same on every rank. A rank computes the part of their gradient
            that comes from its rows, or with 'ulysses' from its heads. The sum over all ranks is
            the gradient.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, offsets of the whole packed sequences, the
            same on every rank. If they are on a GPU, the call waits once to read them.
        max_seqlen_q, max_seqlen_k: not needed; if given, they must not be less than the longest
            whole sequence.
        out: a tensor for this rank's output; not possible with gradients.
        return_lse, return_row_max: also return this rank's log-sum-exp, or row maximum, fp32,
            (batch, heads_q, rows) or (heads_q, rows).
        config, backward_config, deterministic, emulate: as for attention().
        bits: as for attention(), the same on every rank. With 'canonical', a row has the same bits
            as if one process computed everything. 'auto' is then 'allgather', and 'zigzag' is
            refused.

    Returns:
        This rank's rows of the output o, (o, lse), (o, row_max) or (o, lse, row_max).

    Raises:
        ArgumentError: an argument cannot be used, the ranks disagree, or a tensor is not the shard
            that ``shard`` returns. All ranks raise it; the message names the rank at fault.
        GroupError: another rank has ended, or did not make the call within the group's timeout.
        The other errors of ``flashsmith.forward``.
    """
    asked = CallOptions(
        schedule, causal, window, softcap, scale, sinks, cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k, out, return_lse, return_row_max, config, backward_config,
        deterministic, emulate, bits,
    )  # fmt: skip
    # PyTorch's compiler cannot trace the messages between ranks.
    return (_attend_outside_graphs if is_tracing() else attend)(group, q, k, v, asked)


def shard(
    tensor: torch.Tensor,
    *,
    dim: int | None = None,
    group: Any = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's rows of a tensor that has all rows, as a differentiable copy; ranks do not
    communicate.

    Args:
        tensor: a tensor with whole sequences along ``dim``, such as queries, token ids or labels.
        dim: the dimension of rows; the default is 1, or 0 with cu_seqlens.
        group: as for ``attention``.
        cu_seqlens: (sequences + 1,) int32, the offsets of packed sequences; None if there is one
            sequence.

    Raises:
        ArgumentError: an argument cannot be used.
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
    """Gathers the rows of all ranks; every rank gets the whole tensor, without a gradient.

    Args:
        tensor: this rank's rows along ``dim``.
        dim, group, cu_seqlens: as for ``shard``.

    Raises:
        ArgumentError: an argument cannot be used, the ranks disagree, or a tensor is not the shard
            that ``shard`` returns. All ranks raise it; the message names the rank at fault.
        GroupError: another rank has ended, or did not make the call within the group's timeout.
    """
    return unsharded(group, tensor, dim, cu_seqlens)


def positions(
    length: int | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    group: Any = None,
    device: Any = None,
) -> torch.Tensor:
    """For each of this rank's rows, its position in its sequence, for positional embeddings:
    (rows,) int64.

    Args:
        length: the number of rows of the whole sequence; give either this or cu_seqlens.
        cu_seqlens: (sequences + 1,) int32, the offsets of packed sequences.
        group: as for ``attention``.
        device: the device of the result.

    Raises:
        ArgumentError: an argument cannot be used.
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
