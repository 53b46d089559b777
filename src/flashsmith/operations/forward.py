"""The operation `forward`: o = softmax(scale q k^T) v, masked and capped."""

from __future__ import annotations

from collections.abc import Iterable

from flashsmith.errors import ArgumentError
from flashsmith.operations.operation import (
    SEMANTIC_WORDS,
    Call,
    Operation,
    TensorSpec,
    program_numbers,
)
from flashsmith.semantics.flop import twice_nominal_pairs
from flashsmith.semantics.mask import UNLIMITED
from flashsmith.semantics.sizes import Sizes

# The dimensions of q, k, v, o and the row statistics; for each tensor the unpacked ones, then the
# packed ones.
Q, PACKED_Q = ("batch", "seq_q", "heads_q", "d"), ("total_q", "heads_q", "d")
K, PACKED_K = ("batch", "seq_k", "heads_k", "d"), ("total_k", "heads_k", "d")
V, PACKED_V = ("batch", "seq_k", "heads_k", "d_v"), ("total_k", "heads_k", "d_v")
OUT, PACKED_OUT = ("batch", "seq_q", "heads_q", "d_v"), ("total_q", "heads_q", "d_v")
ROWS, PACKED_ROWS = ("batch", "heads_q", "seq_q"), ("heads_q", "total_q")


def attn_flop(sizes: Sizes) -> int:
    """FLOP of the two GEMMs.

    They cost 2 b h s_q s_k (d + d_v) FLOP, or half of that if the mask is causal. With a window,
    they cost 2 b h (d + d_v) FLOP for each visible query-key pair. Every packed sequence counts as
    if it had the maximum length.
    """
    return sizes.batch * sizes.heads_q * twice_nominal_pairs(sizes) * (sizes.d + sizes.d_v)


def batch_seq_head(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the (batch, seq, head) strides of a (batch, seq, heads, d) tensor. The batch stride
    is 0 if the tensor is packed."""
    return (0,) * (4 - len(strides)) + strides[:-1]


def forward_numbers(
    p: Sizes,
    totals: tuple[int, int],
    strides: Iterable[tuple[int, ...]],
    scale: float,
    softcap: float,
    left: int | None = None,
    right: int | None = None,
) -> tuple[int | float, ...]:
    """The numbers that the C++ host path takes, in the order in which it takes them.

    They are the sizes, the total rows of packed q and k (else 0), the strides (batch, row, head) of
    q, k, v and o in elements, scale, softcap, and the window's limits.
    """
    q, k, v, o = strides
    return (
        *(p.batch, p.seq_q, p.seq_k, p.heads_q, p.heads_k, p.d, p.d_v, *totals),
        *(*q, *k, *v, *o, scale, softcap),
        *mask_limits(p, left, right),
    )


def _numbers(call: Call) -> tuple[int | float, ...]:
    p, options = call.problem, call.options
    own = forward_numbers(
        p,
        (call.sizes.get("total_q", 0), call.sizes.get("total_k", 0)),
        [batch_seq_head(call.strides[name]) for name in "qkvo"],
        scale_of(p, options["scale"]),
        options["softcap"],
        options["left"],
        options["right"],
    )
    return own + program_numbers(call)


def scale_of(p: Sizes, scale: float | None) -> float:
    """The scale of scores; None means 1/sqrt(d)."""
    return p.d**-0.5 if scale is None else scale


def mask_limits(p: Sizes, left: int | None, right: int | None) -> tuple[int, int]:
    """Returns the limits of the window: the numbers of keys that a row sees before and after its
    own position.

    Where a limit is None, only the mask limits that side.

    Raises ArgumentError if the mask and the limits contradict each other.
    """
    mask = p.semantics.key_mask
    if mask.takes_limits != (left is not None or right is not None):
        raise ArgumentError(
            f"left={left}, right={right}: give the limits of a window, and of no other mask; the "
            f"problem's mask is {mask!r}"
        )
    if mask.hides_later and not mask.takes_limits:
        right = 0
    return UNLIMITED if left is None else left, UNLIMITED if right is None else right


FORWARD = Operation(
    name="forward",
    tensors=(
        TensorSpec("q", Q, packed=PACKED_Q),
        TensorSpec("k", K, packed=PACKED_K),
        TensorSpec("v", V, packed=PACKED_V),
        TensorSpec("o", OUT, role="out", packed=PACKED_OUT, partial_dtype="float32"),
        TensorSpec("lse", ROWS, "float32", "out", "optional", PACKED_ROWS, alignment=4),
        TensorSpec("row_max", ROWS, "float32", "out", "optional", PACKED_ROWS, alignment=4),
        TensorSpec("sinks", ("heads_q",), "float32", presence="optional", alignment=4),
        TensorSpec("cu_seqlens_q", ("batch+1",), "int32", presence="packed", alignment=4),
        TensorSpec("cu_seqlens_k", ("batch+1",), "int32", presence="packed", alignment=4),
        # seqused_k and k_begin, which select the keys that a row may see, occur only in partial
        # problems. sinks and row_max occur only in problems that are not partial.
        TensorSpec("seqused_k", ("batch",), "int32", presence="optional", alignment=4),
        TensorSpec("k_begin", ("batch",), "int32", presence="optional", alignment=4),
    ),
    numbers=_numbers,
    flop=attn_flop,
    semantics=frozenset(SEMANTIC_WORDS),
    options={"scale": None, "softcap": 0.0, "left": None, "right": None},
    has_canonical=True,
    takes_programs=True,
)
