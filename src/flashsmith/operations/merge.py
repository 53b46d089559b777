"""The operation `merge`: merges attention over parts of the keys into attention over all keys.

With m the largest LSE of a row's parts: o = sum_i exp(lse_i - m) o_i / sum_i exp(lse_i - m), and
lse = m + log(sum_i exp(lse_i - m)); a sink is added to the sums once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.operations.forward import PACKED_Q, PACKED_ROWS, ROWS, Q, batch_seq_head
from flashsmith.operations.operation import Call, Operation, Presence, TensorSpec
from flashsmith.printable import quoted
from flashsmith.semantics.sizes import Sizes

# The maximum number of parts that one launch merges; equal to kMostParts in csrc.
MOST_PARTS = 8
# The strides that are passed for a tensor that the call omits.
_ABSENT = (0,)


def part_names(part: int) -> tuple[str, str]:
    """The names of the tensors with a part's output and LSE."""
    return f"outs[{part}]", f"lses[{part}]"


def parts_of(sizes: Sizes) -> int:
    """The number of parts of a problem, which is seq_k, clamped to 1..MOST_PARTS."""
    return min(max(sizes.seq_k, 1), MOST_PARTS)


def _flop(sizes: Sizes) -> int:
    """The FLOP of a problem: one multiplication and one addition for every element of every
    part."""
    return 2 * sizes.batch * sizes.heads_q * sizes.seq_q * sizes.d * parts_of(sizes)


def _numbers(call: Call) -> tuple[int | float, ...]:
    """Returns the numbers that the C++ host path takes, in its order.

    First come the number of rows of a sequence (of all sequences if packed), batch (1 if packed),
    heads, d and the number of parts. Three flags, 0 or 1, follow: whether the first part, the other
    parts, and o are fp32. Last are the strides: (batch, row, head) of o and each part, and (batch,
    head) of lse and each part's LSE.

    Raises ArgumentError if a part has an output but no LSE, if it has an LSE but no output, or if
    an earlier part is missing.
    """
    p, strides, options = call.problem, call.strides, call.options
    names = [part_names(part) for part in range(MOST_PARTS)]
    given = [[name in strides for name in pair] for pair in names]
    n_parts = sum(output for output, _ in given)
    for part, pair in enumerate(given):
        if pair != [part < n_parts] * 2:
            name = names[part][0 if part < n_parts and not pair[0] else 1]
            raise ArgumentError(f"{name}: parts come one after another, each with its LSE; give it")
    batch, rows = (1, call.sizes["total_q"]) if p.semantics.packed else (p.batch, p.seq_q)
    outs, lses = (["o", *(a for a, _ in names)], ["lse", *(b for _, b in names)])
    return (
        *(batch, rows, p.heads_q, p.d, n_parts),
        *(int(_is_fp32(options, name)) for name in ("first_dtype", "parts_dtype", "dtype")),
        *(step for name in outs for step in batch_seq_head(strides.get(name, _ABSENT))),
        *(step for name in lses for step in _batch_head(strides.get(name, _ABSENT))),
    )


def _is_fp32(options: Mapping[str, Any], name: str) -> bool:
    value = options[name]
    if value in (None, "float32"):
        return value is not None
    raise ArgumentError(
        f"{name}={quoted(value)}: give 'float32', or None for the dtype of the problem"
    )


def _batch_head(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the (batch, head) strides of a (batch, heads, seq) tensor. The batch stride is 0 if
    the tensor is packed."""
    return (0,) * (3 - len(strides)) + strides[:-1]


def _part(part: int) -> tuple[TensorSpec, TensorSpec]:
    output, lse = part_names(part)
    presence: Presence = "optional" if part else "required"
    dtype = "parts_dtype" if part else "first_dtype"
    return (
        TensorSpec(output, Q, "", "in", presence, PACKED_Q, dtype_option=dtype),
        TensorSpec(lse, ROWS, "float32", "in", presence, PACKED_ROWS, alignment=4),
    )


# seq_k is the number of parts. The options are the dtypes of the first part (which may be the
# result of another merge), of the other parts, and of o. Each is None (the problem's dtype) or
# 'float32'.
MERGE = Operation(
    name="merge",
    tensors=(
        *_part(0),
        TensorSpec("o", Q, "", "out", "required", PACKED_Q, dtype_option="dtype"),
        TensorSpec("lse", ROWS, "float32", "out", "required", PACKED_ROWS, alignment=4),
        *(spec for part in range(1, MOST_PARTS) for spec in _part(part)),
        TensorSpec("sinks", ("heads_q",), "float32", presence="optional", alignment=4),
    ),
    numbers=_numbers,
    flop=_flop,
    semantics=frozenset({"packed", "uneven"}),
    options={"first_dtype": None, "parts_dtype": None, "dtype": None},
)
