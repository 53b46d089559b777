"""Finds packed sequences in the arguments of transformers' models: cumulative lengths, or position
ids that restart."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from flashsmith.errors import ArgumentError
from flashsmith.integrations.pytorch_state import transform
from flashsmith.integrations.traceable import is_tracing


class Sequences(NamedTuple):
    """The offsets of packed sequences, (sequences + 1) int32, and upper bounds of the lengths."""

    starts_q: Any
    starts_k: Any
    longest_q: int
    longest_k: int


def sequences_of(
    starts: tuple[Any, Any], longest: tuple[Any, Any], query: Any, key: Any
) -> Sequences | None:
    """Returns the packed sequences that a caller's arguments describe; None if there are none.

    ``starts`` are cu_seq_lens_q and cu_seq_lens_k, ``longest`` are max_length_q and max_length_k. A
    value that is given for only one of q and k is used for both. Maximum lengths that are missing
    are computed.

    Raises:
        ArgumentError: the cumulative lengths are given for only one of q and k, and do not fit the
            other.
    """
    starts_q, starts_k = starts
    longest_q, longest_k = longest
    if starts_q is None and starts_k is None:
        for name, value in (("max_length_q", longest_q), ("max_length_k", longest_k)):
            if value is not None:
                raise ArgumentError(
                    f"{name}={value}: given without cu_seq_lens_q, which says where packed "
                    "sequences begin; pass both, or neither"
                )
        return None
    if starts_q is None or starts_k is None:
        if query.shape[2] != key.shape[2]:
            given, missing = "qk" if starts_k is None else "kq"
            raise ArgumentError(
                f"cu_seq_lens_{missing}: missing, and cu_seq_lens_{given} cannot replace it for "
                f"{query.shape[2]} queries and {key.shape[2]} keys: pass both"
            )
        starts_q = starts_k = starts_k if starts_q is None else starts_q
        longest_q = longest_k = longest_k if longest_q is None else longest_q
    return Sequences(
        starts_q.to(torch.int32),
        starts_k.to(torch.int32),
        _longest(starts_q, longest_q, query),
        _longest(starts_k, longest_k, key),
    )


# Every layer gets the same tensors, so the result is cached, and each tensor is read from the GPU
# once.
_longest_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_numbers_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _longest(starts: Any, given: Any, tensor: Any) -> int:
    if given is not None:
        return int(given)
    if is_tracing():  # a tracer reads no values; the total is an upper bound
        rows: int = tensor.shape[0] * tensor.shape[2]
        return rows
    if starts not in _longest_of:
        _longest_of[starts] = int(starts.diff().max())
    longest: int = _longest_of[starts]
    return longest


def sequences_by_position(position_ids: Any, query: Any, key: Any) -> Any:
    """Returns the sequence numbers (1, keys) that a single batch row of position ids describes.

    None if the row is one sequence. As for FlashAttention in transformers, a sequence begins at
    every occurrence of the smallest position, and rows with cached keys are not split. The first
    sequence of the row may lack its beginning. A tracer cannot read positions, so a row that is
    being traced counts as one sequence.
    """
    if position_ids is None or position_ids.dim() != 2 or query.shape[0] != 1:
        return None
    length = query.shape[2]
    if length == 1 or key.shape[2] != length or position_ids.shape != (1, length):
        return None
    tracing = is_tracing()
    if tracing or transform(tracing) is not None:
        return None
    if position_ids not in _numbers_of:
        begins = position_ids == position_ids.min()
        begins[:, 0] = True
        several = int(begins.sum()) > 1
        _numbers_of[position_ids] = begins.cumsum(1) if several else None
    return _numbers_of[position_ids]
