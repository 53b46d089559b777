"""The operation first_row: o is the first row of v, for each batch and head."""

from __future__ import annotations

from flashsmith.operations import Call, Operation, TensorSpec


def numbers(call: Call) -> tuple[int, ...]:
    """What plan.cc reads: sizes, then the strides of v and o but the last, which is 1."""
    p, strides = call.problem, call.strides
    return (p.batch, p.seq_k, p.heads_k, p.d, *strides["v"][:-1], *strides["o"][:-1])


FIRST_ROW = Operation(
    name="first_row",
    tensors=(
        TensorSpec("v", ("batch", "seq_k", "heads_k", "d")),
        TensorSpec("o", ("batch", "heads_k", "d"), role="out"),
    ),
    numbers=numbers,
    # An element that is moved counts as one.
    flop=lambda problem: problem.batch * problem.heads_k * problem.d,
    reference="first_row.reference:REFERENCE",
)
