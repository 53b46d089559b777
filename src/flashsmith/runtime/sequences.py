"""Checks the offsets and maximum lengths of packed sequences, and the key ranges of partial
attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.printable import quoted
from flashsmith.runtime.frameworks.base import TensorView
from flashsmith.runtime.tensors import check_beside, view_vector
from flashsmith.semantics.signature import ForwardOptions, check_flag, whole_number

_SIDES = ("q", "k")


class Packing(NamedTuple):
    """Where the sequences of a packed batch begin and end, and their maximum lengths."""

    cu_seqlens_q: TensorView
    cu_seqlens_k: TensorView
    batch: int
    max_seqlen_q: int
    max_seqlen_k: int


class KeyRanges(NamedTuple):
    """The range of keys that each sequence sees in partial attention; each vector has one element
    per sequence."""

    seqused_k: TensorView | None
    k_begin: TensorView | None

    @property
    def views(self) -> dict[str, TensorView]:
        """The given vectors, by name."""
        return {view.name: view for view in self if view is not None}


def check_packing(
    options: ForwardOptions, q: TensorView, k: TensorView, *, check_contents: bool
) -> Packing | None:
    """Returns the packing that the options describe, or None if sequences are not packed. Packed q
    and k have shape (total, heads, d).

    On the host the offsets are read, and checked if ``check_contents``. Offsets on a device are
    read only if a max_seqlen is missing; reading them waits for the device once. If k_begin is
    given, it may point anywhere in k, so a missing max_seqlen_k defaults to the total number of
    keys. With both k_begin and seqused_k, cu_seqlens_k may be missing.

    Raises ArgumentError when only one of cu_seqlens_q and cu_seqlens_k is given, or a max_seqlen
    without them. Also raised for offsets of a wrong dtype, device or length, and for offsets that
    do not rise from 0 to the total. Also raised for a max_seqlen below the longest sequence, and
    for a missing max_seqlen during CUDA graph capture.
    """
    if options.cu_seqlens_q is None and options.cu_seqlens_k is None:
        _refuse_limits(options)
        return None
    by_range = options.k_begin is not None
    offsets_k = options.cu_seqlens_k
    has_offsets_k = offsets_k is not None or not by_range or options.seqused_k is None
    offsets = (
        _view_offsets("q", options.cu_seqlens_q, q),
        # Kernels always read k's offsets, but if both k_begin and seqused_k are given, the offsets'
        # values have no effect.
        _view_offsets("k", offsets_k if has_offsets_k else options.cu_seqlens_q, q),
    )
    batch, batch_k = (view.shape[0] - 1 for view in offsets)
    if batch_k != batch:
        raise ArgumentError(
            f"cu_seqlens_k: describes {batch_k} sequences, but cu_seqlens_q {batch}; must be "
            "equal: give both one offset more than there are sequences"
        )
    totals = (q.shape[0], k.shape[0])
    for side, total in zip(_SIDES, totals, strict=True):
        if batch == 0 and total > 0:
            raise ArgumentError(
                f"cu_seqlens_{side}: describes no sequence, but {side} has {total} rows; give the "
                f"offsets of some, from 0 to {total}"
            )
    limits = (
        _check_limit("q", options.max_seqlen_q),
        _check_limit("k", options.max_seqlen_k),
    )
    if by_range:
        if has_offsets_k and offsets[1].device.kind == "cpu":
            _longest_on_host(offsets[1], totals[1], None, check_contents)
        longest = _longest(offsets[:1], totals[:1], limits[:1], check_contents)
        longest.append(totals[1] if limits[1] is None else limits[1])
    else:
        longest = _longest(offsets, totals, limits, check_contents)
    # The limit is cut to the tensor's rows, which no sequence exceeds, so that a generous limit
    # does not enlarge the grid.
    return Packing(*offsets, batch, *(min(pair) for pair in zip(longest, totals, strict=True)))


def check_key_ranges(
    options: ForwardOptions,
    q: TensorView,
    k: TensorView,
    packing: Packing | None,
    *,
    check_contents: bool,
) -> KeyRanges | None:
    """Returns the ranges of keys that the options describe; None without partial=True.

    Raises ArgumentError for ranges without partial=True, and for vectors of a wrong dtype, device
    or length. With ``check_contents`` it is also raised for host ranges outside the keys.
    """
    named = {"seqused_k": options.seqused_k, "k_begin": options.k_begin}
    if not check_flag("partial", options.partial):
        for name, value in named.items():
            if value is not None:
                raise ArgumentError(
                    f"{name}: given without partial=True; attention to some of the keys is "
                    "partial: add partial=True; flashsmith.merge_attention() rounds and adds sinks"
                )
        return None
    batch = q.shape[0] if packing is None else packing.batch
    views = []
    for name, value in named.items():
        view = None if value is None else view_vector(name, value, "int32")
        if view is not None:
            check_beside(view, q)
            if view.shape[0] != batch:
                raise ArgumentError(
                    f"{name}: shape {view.shape}; must be (batch,), ({batch},): give one number a "
                    "sequence"
                )
        views.append(view)
    ranges = KeyRanges(*views)
    if check_contents and q.device.kind == "cpu":
        _check_ranges(ranges, k, packing)
    return ranges


def _check_ranges(ranges: KeyRanges, k: TensorView, packing: Packing | None) -> None:
    rows = k.shape[0] if packing else k.shape[1]

    def numbers(view: TensorView | None) -> np.ndarray | None:
        if view is None:
            return None
        return np.asarray(view.framework.as_numpy(view.source)).astype(np.int64)

    begin, used = numbers(ranges.k_begin), numbers(ranges.seqused_k)
    if begin is not None and (begin.min(initial=0) < 0 or begin.max(initial=0) > rows):
        raise ArgumentError(
            f"k_begin: goes from {begin.min()} to {begin.max()}; must be rows of k, 0 to {rows}"
        )
    if used is None:
        return
    room: np.ndarray | int = rows
    if begin is not None:
        room = rows - begin
    elif packing is not None:
        offsets = packing.cu_seqlens_k
        room = np.diff(offsets.framework.as_numpy(offsets.source).astype(np.int64))
    beyond = np.flatnonzero((used < 0) | (used > room))
    if beyond.size:
        at = int(beyond[0])
        most = int(np.broadcast_to(room, used.shape)[at])
        raise ArgumentError(
            f"seqused_k: {used[at]} keys of sequence {at}; there are {most}: give 0 to {most}"
        )


def _refuse_limits(options: ForwardOptions) -> None:
    if options.max_seqlen_q is None and options.max_seqlen_k is None:
        return
    side = "k" if options.max_seqlen_q is None else "q"
    raise ArgumentError(
        f"max_seqlen_{side}={quoted(getattr(options, f'max_seqlen_{side}'))}: is for packed "
        "sequences "
        "only; give cu_seqlens_q and cu_seqlens_k too, or leave it out"
    )


def _view_offsets(side: str, value: Any, q: TensorView) -> TensorView:
    if value is None:
        raise ArgumentError(f"cu_seqlens_{side}: missing; packed sequences need both: give it")
    view = view_vector(f"cu_seqlens_{side}", value, "int32")
    check_beside(view, q)
    if view.shape[0] == 0:
        raise ArgumentError(f"{view.name}: is empty; a batch of n sequences has n + 1 offsets")
    return view


def _check_limit(side: str, limit: Any) -> int | None:
    if limit is None:
        return None
    value = whole_number(limit)
    if value is not None and value >= 0:
        return value
    raise ArgumentError(f"max_seqlen_{side}={quoted(limit)}: give a whole number from 0, or None")


def _longest(
    offsets: Sequence[TensorView],
    totals: Sequence[int],
    limits: Sequence[int | None],
    check_contents: bool,
) -> list[int]:
    """Returns the maximum lengths: the limits that were given, or else the lengths of the longest
    sequences."""
    if offsets[0].device.kind == "cpu":
        return [
            _longest_on_host(view, total, limit, check_contents)
            for view, total, limit in zip(offsets, totals, limits, strict=True)
        ]
    missing = [view for view, limit in zip(offsets, limits, strict=True) if limit is None]
    measured = iter(_longest_on_device(missing) if missing else ())
    return [next(measured) if limit is None else limit for limit in limits]


def _longest_on_host(view: TensorView, total: int, limit: int | None, check_contents: bool) -> int:
    offsets = view.framework.as_numpy(view.source)
    lengths = np.diff(offsets.astype(np.int64))
    longest = max(0, int(lengths.max(initial=0)))
    side = view.name[-1]
    if check_contents:
        if offsets[0] != 0 or offsets[-1] != total or lengths.min(initial=0) < 0:
            raise ArgumentError(
                f"{view.name}: goes from {offsets[0]} to {offsets[-1]}, smallest step "
                f"{lengths.min(initial=0)}; must rise, or stay, from 0 to {side}'s {total} rows"
            )
        if limit is not None and limit < longest:
            raise ArgumentError(
                f"max_seqlen_{side}={limit}: the longest sequence has {longest} rows; give at "
                "least that, or None"
            )
    return longest if limit is None else limit


def _longest_on_device(missing: list[TensorView]) -> list[int]:
    """Returns the lengths of the longest sequences, read from the device in one step. Invalid
    lengths are not clamped; the caller does that."""
    first = missing[0]
    if first.framework.is_capturing(first.device.ordinal):
        raise ArgumentError(
            f"max_seqlen_{first.name[-1]}: missing during CUDA graph capture, where it cannot be "
            f"read from {first.name}; give it"
        )
    return first.framework.longest_steps([view.source for view in missing])
