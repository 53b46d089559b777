"""Lists the problems that ranks compute when they share one problem, so that their kernels can be
built ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, Problem, Semantics
from flashsmith.operations import BACKWARD, DEFAULT, MERGE
from flashsmith.parallel.allgather import head_parts
from flashsmith.parallel.calls import limits_of
from flashsmith.parallel.causal_allgather import PREFIXES
from flashsmith.parallel.group_call import GroupCall, GroupSchedule
from flashsmith.parallel.kernel_calls import KernelCall, kernel_calls
from flashsmith.parallel.layout import CAUSAL, FULL, Layout, Limits, Span
from flashsmith.parallel.partial_outputs import MOST_PARTS
from flashsmith.parallel.schedules import SCHEDULES, check_schedule, schedule_named
from flashsmith.parallel.zigzag import halves
from flashsmith.printable import quoted
from flashsmith.semantics.signature import NO_WINDOW, check_mask


def problems(
    problem: Problem | str,
    *,
    ranks: int,
    schedule: str = "auto",
    window: tuple[int | None, int | None] = NO_WINDOW,
    gradients: bool = False,
    sinks: bool = False,
) -> list[Problem]:
    """The problems whose kernels ``parallel.attention`` runs on any of the ranks, without
    duplicates.

    ``flashsmith.tuning.build_for`` builds their kernels, and so does ``flashsmith build --ranks``,
    without calling this function. Neither a group nor a GPU is needed.

    Args:
        problem: the problem of the whole sequences, a Problem or its text such as 'b1 s131072 h32:8
            d128 bf16 causal'. All packed sequences are assumed to have the greatest length.
        ranks: the number of ranks in the group.
        schedule: as for ``attention``.
        window: the limits of the window; None stands for ``Problem.window``.
        gradients: whether to include the problems of the backward pass.
        sinks: whether there are sinks; their gradient is another problem.

    Raises:
        ArgumentError: an argument cannot be used, or the schedule cannot serve these lengths.
    """
    whole = Problem.parse(problem) if isinstance(problem, str) else problem
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ArgumentError(f"ranks={quoted(ranks)}: give a whole number, at least 1")
    if whole.operation != DEFAULT or whole.semantics.partial:
        raise ArgumentError(
            f"problem={quoted(str(whole))}: give one of whole attention; gradients=True adds those "
            "of the backward pass"
        )
    check_schedule(schedule)
    if ranks == 1:
        return [whole, *([_backward(whole)] if gradients else [])]
    found: dict[Problem, None] = {}
    for rank in range(ranks):
        call = _call(whole, ranks, rank, window, gradients=gradients)
        named = schedule_named(schedule, call, whole.heads_k)
        for one in _OF_SCHEDULE[named](whole, call, sinks):
            if gradients or one.operation != BACKWARD.name:
                found[one] = None
    return list(found)


def _call(whole: Problem, ranks: int, rank: int, window: Any, *, gradients: bool) -> GroupCall:
    """The GroupCall of a rank. The call's group has a size and a rank, but cannot communicate."""
    packed = whole.semantics.packed
    count = whole.batch if packed else 1
    layouts = [Layout((length,) * count, ranks) for length in (whole.seq_q, whole.seq_k)]
    given = whole.window if window == NO_WINDOW and whole.window is not None else window
    mask = limits_of(check_mask(whole.semantics.causal, given))
    group: Any = SimpleNamespace(size=ranks, rank=rank)
    rows = layouts[0].rows(rank)
    shape = (*([] if packed else [whole.batch]), rows, whole.heads_q, whole.d)
    return GroupCall(
        group,
        layouts[0],
        layouts[1],
        packed,
        mask,
        options={},
        config=None,
        backward_config=None,
        deterministic=False,
        has_gradients=gradients,
        return_lse=False,
        return_row_max=False,
        shape=shape,
        d_v=whole.d_v,
        confirm=lambda: None,
        bits=whole.bits,
    )


def _attention(
    whole: Problem, limits: Limits, sizes: tuple[int, int, int], heads_k: int, **flags: Any
) -> Problem:
    """``whole`` with other limits, other sizes (sequences, queries, keys) and another number of KV
    heads."""
    batch, seq_q, seq_k = sizes
    packed = whole.semantics.packed
    mask = check_mask(False, tuple(limits))
    semantics = replace(
        whole.semantics,
        mask=mask.kind,
        uneven=packed or flags.get("partial", False),
        **flags,
    )
    return replace(
        whole,
        batch=batch,
        seq_q=seq_q,
        seq_k=seq_k,
        heads_q=whole.heads_q // whole.heads_k * heads_k,
        heads_k=heads_k,
        semantics=semantics,
        window_keys=mask.window_keys,
    )


def _backward(of: Problem) -> Problem:
    return of.of_operation(BACKWARD.name)


def _of_part(whole: Problem, part: KernelCall, heads: Span, **flags: Any) -> Problem:
    """The problem of a kernel call on some KV heads."""
    keywords = part.keywords
    limits = CAUSAL if keywords.get("causal") else Limits(*keywords["window"])
    sizes = whole.batch, part.q.count, part.k.count
    if whole.semantics.packed:
        lengths = keywords["max_seqlen_q"], keywords["max_seqlen_k"]
        sizes = len(keywords["cu_seqlens_q"]) - 1, *lengths
    return _attention(whole, limits, sizes, heads[1] - heads[0], **flags)


def _parts(call: GroupCall, owner: int | None) -> tuple[KernelCall, ...]:
    args = call.q_layout, call.k_layout, call.group.rank, owner, call.packed, call.limits, "cpu"
    return kernel_calls(*args, call.bits)


def _gradient_of_sinks(whole: Problem, call: GroupCall) -> Problem:
    """The problem for the gradient of the sinks, in which queries see no key."""
    packed = whole.semantics.packed
    rows = call.q_layout.rows(call.group.rank)
    return _backward(
        _attention(whole, FULL, (1 if packed else whole.batch, rows, 0), whole.heads_k)
    )


def _of_zigzag(whole: Problem, call: GroupCall, sinks: bool) -> Iterator[Problem]:
    every, rank = (0, whole.heads_k), call.group.rank
    count = 0
    for owner in range(call.group.size):
        for part in _parts(call, owner):
            count += 1
            yield _of_part(whole, part, every, partial=True)
            for heads in halves(whole.heads_k) if owner == rank else (every,):
                if heads[1] > heads[0]:
                    yield _backward(_of_part(whole, part, heads))
    packed, rows = whole.semantics.packed, call.q_layout.rows(rank)
    # Intermediate results of merges are fp32; the kernels that merge them are the fp16 ones.
    for dtype in (whole.dtype, *[DType.FP16] * (count >= MOST_PARTS)):
        batch = 1 if packed else whole.batch
        sizes = batch, rows, 1, whole.heads_q, whole.heads_q, whole.d_v
        yield Problem(*sizes, dtype, Semantics(packed=packed, uneven=packed), MERGE.name)
    if sinks:
        yield _gradient_of_sinks(whole, call)


def _of_allgather(whole: Problem, call: GroupCall, sinks: bool) -> Iterator[Problem]:
    most = call.k_layout.most_rows
    batch = () if call.packed else (whole.batch,)
    shape = (*batch, most, whole.heads_k, whole.d + whole.d_v)
    for heads in head_parts(torch.empty(shape, dtype=torch.half, device="meta")):
        for part in _parts(call, None):
            one = _of_part(whole, part, heads)
            yield from (one, _backward(one))
    if sinks:
        yield _gradient_of_sinks(whole, call)


def _of_prefixes(whole: Problem, call: GroupCall, sinks: bool) -> Iterator[Problem]:
    ranks, rank = call.group.size, call.group.rank
    chunk = whole.seq_q // (2 * ranks)
    for chunks in (rank + 1, 2 * ranks - rank):
        one = _attention(whole, CAUSAL, (whole.batch, chunk, chunks * chunk), whole.heads_k)
        yield from (one, _backward(one))


def _of_ulysses(whole: Problem, call: GroupCall, sinks: bool) -> Iterator[Problem]:
    ranks = call.group.size
    if whole.heads_k % ranks:
        raise ArgumentError(
            f"schedule='ulysses': {ranks} ranks do not divide the {whole.heads_k} heads of k; take "
            "'allgather'"
        )
    sizes = whole.batch, whole.seq_q, whole.seq_k
    one = _attention(whole, call.limits, sizes, whole.heads_k // ranks)
    yield from (one, _backward(one))


_OF_SCHEDULE: dict[GroupSchedule, Callable[[Problem, GroupCall, bool], Iterator[Problem]]] = {
    SCHEDULES["zigzag"]: _of_zigzag,
    SCHEDULES["allgather"]: _of_allgather,
    SCHEDULES["ulysses"]: _of_ulysses,
    PREFIXES: _of_prefixes,
}
