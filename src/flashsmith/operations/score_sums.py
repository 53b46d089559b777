"""The operation `score_sums`: sums of the gradients of scores.

With P = exp(scores - lse) and D = rowsum(do o) - dlse, each visible score has the value P (do v^T -
D) slope. Here slope is the own slope of the call's program or, without a program, the derivative of
the softcap. The values are summed over all scores that have the same coordinate on an axis:

- 'rows': the query, for each sequence and query head; sums (batch, heads_q, 1, seq_q).
- 'keys': the key; sums (batch, heads_q, 1, seq_k).
- 'distances': key - query; sums (batch, heads_q, strips, 2 TILE). A strip has the tiles of TILE
  queries and TILE keys on one diagonal. Its sum j is for the distance (i + 1 - tiles) TILE + j -
  (TILE - 1), where i is the strip and tiles the number of tiles of queries. Two strips share a
  distance, and its sum is the sum of both.
- 'elements': query and key, summed over sequences or heads where sums have the size 1; (batch or 1,
  heads_q or 1, seq_q, seq_k).

The order of the additions is fixed.
"""

from __future__ import annotations

from flashsmith.errors import ArgumentError
from flashsmith.operations.forward import (
    PACKED_K,
    PACKED_Q,
    PACKED_ROWS,
    ROWS,
    K,
    Q,
    attn_flop,
    batch_seq_head,
    mask_limits,
    scale_of,
)
from flashsmith.operations.operation import (
    SEMANTIC_WORDS,
    Call,
    Operation,
    TensorSpec,
    packed_rows,
    program_numbers,
)
from flashsmith.printable import quoted
from flashsmith.semantics.sizes import Sizes

AXES = ("rows", "keys", "distances", "elements")
# The number of queries, and the number of keys, of a tile.
TILE = 64
_STRIDED = ("do", "q", "k", "v", "o")
_SUMS = ("sums_batch", "sums_heads", "sums_rows", "sums_columns")


def score_sums_flop(sizes: Sizes) -> int:
    """The FLOP of the two GEMMs, which are as many as in attention."""
    return attn_flop(sizes)


def sums_shape(
    axis: str, batch: int, heads_q: int, seq_q: int, seq_k: int
) -> tuple[int, int, int, int]:
    """The shape of the sums for an axis. For 'elements', this is the shape in which nothing is
    summed.

    Raises ArgumentError if the axis is unknown.
    """
    if axis == "distances":
        return batch, heads_q, _tiles(seq_q) + _tiles(seq_k) - 1, 2 * TILE
    shapes = {"rows": (1, seq_q), "keys": (1, seq_k), "elements": (seq_q, seq_k)}
    if axis not in shapes:
        raise ArgumentError(f"axis={quoted(axis)}: allowed are {', '.join(AXES)}")
    return batch, heads_q, *shapes[axis]


def _tiles(length: int) -> int:
    return -(-length // TILE)


def _sizes(problem: Sizes) -> dict[str, int]:
    """The sizes of the operation's own dimensions in measurements, which use the axis 'rows'."""
    shape = sums_shape("rows", problem.batch, problem.heads_q, problem.seq_q, problem.seq_k)
    return packed_rows(problem) | dict(zip(_SUMS, shape, strict=True))


def _numbers(call: Call) -> tuple[int | float, ...]:
    """Returns the numbers that the C++ host path takes, in its order.

    The numbers of `backward` up to the window come first, with 0 in the place of the strides of
    gradients. Then come the index of the axis in AXES, the sizes of the tensor `sums`, and all its
    strides except the last. The numbers of a program are last.

    Raises ArgumentError if the axis is unknown, or if `sums` does not have the shape for this axis.
    """
    p, strides, options = call.problem, call.strides, call.options
    shape = tuple(call.sizes[name] for name in _SUMS)
    expected = sums_shape(options["axis"], p.batch, p.heads_q, p.seq_q, p.seq_k)
    may_be_one = options["axis"] == "elements"
    if not all(
        found == size or (may_be_one and i < 2 and found == 1)
        for i, (found, size) in enumerate(zip(shape, expected, strict=True))
    ):
        raise ArgumentError(
            f"sums: shape {shape}; for axis={options['axis']!r} it must be {expected}"
        )
    return (
        *(p.batch, p.seq_q, p.seq_k, p.heads_q, p.heads_k, p.d, p.d_v),
        *(call.sizes.get(name, 0) for name in ("total_q", "total_k")),
        *(step for name in _STRIDED for step in batch_seq_head(strides[name])),
        *(0,) * 9,  # The strides of dq, dk and dv
        *(step for name in ("lse", "dlse") for step in _batch_head(strides.get(name, (0,)))),
        *(scale_of(p, options["scale"]), options["softcap"]),
        *mask_limits(p, options["left"], options["right"]),
        AXES.index(options["axis"]),
        *shape,
        *strides["sums"][:3],
        *program_numbers(call),
    )


def _batch_head(strides: tuple[int, ...]) -> tuple[int, ...]:
    return (0,) * (3 - len(strides)) + strides[:-1]


SCORE_SUMS = Operation(
    name="score_gradients",
    tensors=(
        TensorSpec("do", Q, packed=PACKED_Q),
        TensorSpec("q", Q, packed=PACKED_Q),
        TensorSpec("k", K, packed=PACKED_K),
        TensorSpec("v", K, packed=PACKED_K),
        TensorSpec("o", Q, packed=PACKED_Q),
        TensorSpec("lse", ROWS, "float32", packed=PACKED_ROWS, alignment=4),
        TensorSpec("sums", _SUMS, "float32", "out", alignment=4),
        TensorSpec("dlse", ROWS, "float32", "in", "optional", PACKED_ROWS, alignment=4),
        TensorSpec("sinks", ("heads_q",), "float32", presence="optional", alignment=4),
        TensorSpec("cu_seqlens_q", ("batch+1",), "int32", presence="packed", alignment=4),
        TensorSpec("cu_seqlens_k", ("batch+1",), "int32", presence="packed", alignment=4),
    ),
    numbers=_numbers,
    flop=score_sums_flop,
    semantics=frozenset(SEMANTIC_WORDS) - {"partial"},
    options={"scale": None, "softcap": 0.0, "left": None, "right": None, "axis": "rows"},
    sizes=_sizes,
    takes_programs=True,
)
