"""Request: the arguments of one forward pass, all checked; nothing is allocated or launched yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flashsmith.errors import ArgumentError
from flashsmith.families import KernelConfig, Problem, families
from flashsmith.runtime.arguments import (
    check_inputs,
    check_output,
    check_problem,
    check_sinks,
)
from flashsmith.runtime.forward_options import (
    ForwardOptions,
    Mask,
    check_flag,
    check_mask,
    check_scale,
    check_softcap,
)
from flashsmith.runtime.frameworks.base import TensorView
from flashsmith.runtime.sequences import KeyRanges, Packing, check_key_ranges, check_packing


class Request(NamedTuple):
    """The checked arguments. ``o`` is None where it is to be allocated."""

    problem: Problem
    q: TensorView
    k: TensorView
    v: TensorView
    o: TensorView | None
    packing: Packing | None
    sinks: TensorView | None
    mask: Mask
    scale: float
    softcap: float
    lse: bool
    row_max: bool
    ranges: KeyRanges | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is no row to compute: then nothing is launched."""
        return self.problem.batch == 0 or self.problem.seq_q == 0

    @property
    def statistics_shape(self) -> tuple[int, ...]:
        """(batch, heads_q, seq_q), packed (heads_q, total_q)."""
        if self.packing:
            return self.problem.heads_q, self.q.shape[0]
        return self.problem.batch, self.problem.heads_q, self.problem.seq_q

    @property
    def suits_tma(self) -> bool:
        """Whether TMA, which some families use, can copy all tensors."""
        if self.ranges is not None and self.packing is None:
            # Batches of keys are rows of one long sequence.
            for view in (self.k, self.v):
                batch, rows = view.strides[:2]
                if view.shape[0] > 1 and view.shape[1] > 1 and (rows <= 0 or batch % rows):
                    return False
        return suit_tma([self.q, self.k, self.v, *([] if self.o is None else [self.o])])

    @property
    def deterministic(self) -> bool:
        """Whether a kernel must be one that always gives the same bits; all of this operation
        do."""
        return False

    @property
    def readable(self) -> tuple[TensorView, ...]:
        """Everything that the kernel reads."""
        return _readable((self.q, self.k, self.v), self.packing, self.sinks, self.ranges)


def suit_tma(views: Sequence[TensorView]) -> bool:
    """Whether TMA can copy all of some tensors: it takes no negative stride and none of 0, which
    broadcast tensors have."""
    return all(
        stride > 0
        for view in views
        for size, stride in zip(view.shape, view.strides, strict=True)
        if size > 1
    )


def check_tma(cfg: KernelConfig, views: Sequence[TensorView]) -> None:
    """Raises ArgumentError where the config's kernel copies by TMA, which cannot copy a view."""
    if not cfg.family.needs_tma or any(0 in view.shape for view in views):
        return
    for view in views:
        if not suit_tma([view]):
            others = (it.config_class for it in families(cfg.family.operation) if not it.needs_tma)
            raise ArgumentError(
                f"{view.name}: strides {view.strides} of shape {view.shape}; {cfg} copies by TMA, "
                "which takes positive strides only: make it contiguous, or take a "
                f"{' or a '.join(it.__name__ for it in others)}"
            )


def check_request(
    tensors: tuple[Any, Any, Any, Any],
    options: ForwardOptions,
    *,
    check_contents: bool = True,
    output: str = "o",
) -> Request:
    """The request of q, k, v, o (or None) and the options, for any kernel.

    ``output`` is the caller's name of o.

    Raises ArgumentError, its message beginning with the argument's name, when one is unusable.
    """
    packed = options.cu_seqlens_q is not None or options.cu_seqlens_k is not None
    q, k, v = inputs = check_inputs(*tensors[:3], packed=packed)
    mask = check_mask(options.causal, options.window)
    scale = check_scale(options.scale, max(1, q.shape[-1]))
    softcap = check_softcap(options.softcap, scale)
    packing = check_packing(options, q, k, check_contents=check_contents)
    ranges = check_key_ranges(options, q, k, packing, check_contents=check_contents)
    problem = check_problem(
        inputs,
        packing,
        mask.kind,
        softcap,
        partial=ranges is not None,
        window_keys=mask.window_keys,
    )
    sinks = check_sinks(options.sinks, q, problem.heads_q)
    lse = check_flag("return_lse", options.return_lse) or ranges is not None
    row_max = check_flag("return_row_max", options.return_row_max)
    if ranges is not None and (sinks is not None or row_max):
        wrong = "return_row_max" if sinks is None else "sinks"
        raise ArgumentError(
            f"{wrong}: given with partial=True, whose results have none; "
            + ("leave it out" if sinks is None else "give them to flashsmith.merge_attention()")
        )
    o = None
    if tensors[3] is not None:
        readable = _readable(inputs, packing, sinks, ranges)
        dtype = q.dtype if ranges is None else "float32"
        o = check_output(tensors[3], q, readable, output, dtype=dtype)
    return Request(problem, q, k, v, o, packing, sinks, mask, scale, softcap, lse, row_max, ranges)


def _readable(
    inputs: tuple[TensorView, ...],
    packing: Packing | None,
    sinks: TensorView | None,
    ranges: KeyRanges | None,
) -> tuple[TensorView, ...]:
    offsets = () if packing is None else (packing.cu_seqlens_q, packing.cu_seqlens_k)
    vectors = () if ranges is None else ranges.views
    return (*inputs, *offsets, *(() if sinks is None else (sinks,)), *vectors)
