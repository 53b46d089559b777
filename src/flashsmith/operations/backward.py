"""The operation `backward`: the gradients of `forward` with respect to q, k, v and sinks.

With P = exp(scores - lse), D = rowsum(do o) - dlse and dS = P (do v^T - D):
dv = P^T do, dk = scale dS^T q, dq = scale dS k, dsinks = -sum over rows of exp(sink - lse) D.
"""

from __future__ import annotations

from flashsmith.errors import ArgumentError
from flashsmith.operations.forward import (
    OUT,
    PACKED_K,
    PACKED_OUT,
    PACKED_Q,
    PACKED_ROWS,
    PACKED_V,
    ROWS,
    K,
    Q,
    V,
    batch_seq_head,
    mask_limits,
    scale_of,
)
from flashsmith.operations.operation import (
    SEMANTIC_WORDS,
    Call,
    Operation,
    TensorSpec,
    program_numbers,
)
from flashsmith.printable import quoted
from flashsmith.semantics.dtype import dtype_name
from flashsmith.semantics.flop import twice_nominal_pairs
from flashsmith.semantics.sizes import NO_DQ, ONLY_DQ, Sizes

# The tensors that have (batch, row, head) strides, in the order in which _numbers() lists these
# strides.
_STRIDED = ("do", "q", "k", "v", "o", "dq", "dk", "dv")
_STATISTICS = ("lse", "dlse")
# The strides that are passed for a tensor that the call omits.
_ABSENT = (0,)


def backward_flop(sizes: Sizes) -> int:
    """The FLOP of the GEMMs that the needed gradients require; dq, dk and dv together require five.

    Five GEMMs cost 2 b h s_q s_k (3 d + 2 d_v) FLOP, or half of that if the mask is causal. With a
    window, the number of visible query-key pairs takes the place of s_q s_k. dq alone requires
    three of the five GEMMs; dk and dv without dq require four. Every packed sequence counts as if
    it had the maximum length.
    """
    columns = n_columns(sizes.gradients, sizes.d, sizes.d_v)
    return sizes.batch * sizes.heads_q * twice_nominal_pairs(sizes) * columns


def n_products(gradients: str = "") -> int:
    """The number of GEMMs that a problem's ``gradients`` ('', 'only_dq' or 'no_dq') require."""
    return {ONLY_DQ: 3, NO_DQ: 4}.get(gradients, 5)


def n_columns(gradients: str, d: int, d_v: int) -> int:
    """The sum of the widths of the GEMMs that ``gradients`` require. The width is d_v for do v^T
    and for dv, and d for every other GEMM."""
    of_v = 1 if gradients == ONLY_DQ else 2
    return (n_products(gradients) - of_v) * d + of_v * d_v


def gradients_word(dq: bool, dk: bool, dv: bool) -> str:
    """Returns the value of Problem.gradients for the gradients that are needed.

    'only_dq' stands for dq alone, 'no_dq' for dk or dv without dq, and '' for every other case.
    """
    if dk or dv:
        return "" if dq else NO_DQ
    return ONLY_DQ if dq else ""


def _numbers(call: Call) -> tuple[int | float, ...]:
    """Returns the numbers that the C++ host path takes, in its order.

    Sizes and the total rows of packed q and k come first. Strides follow: (batch, row, head) of do,
    q, k, v, o, dq, dk and dv, and (batch, head) of lse and dlse. Then come scale (None: 1/sqrt(d)),
    softcap, the window's limits, and a flag, 1 if gradients are fp32 and 0 otherwise. The numbers
    of a program are last. The strides of an absent tensor are 0.

    Raises ArgumentError if grad_dtype is unknown, and the errors that mask_limits() raises.
    """
    p, strides, options = call.problem, call.strides, call.options
    grad_dtype = check_grad_dtype(options["grad_dtype"])
    return (
        *(p.batch, p.seq_q, p.seq_k, p.heads_q, p.heads_k, p.d, p.d_v),
        *(call.sizes.get(name, 0) for name in ("total_q", "total_k")),
        *(step for name in _STRIDED for step in batch_seq_head(strides.get(name, _ABSENT))),
        *(step for name in _STATISTICS for step in _batch_head(strides.get(name, _ABSENT))),
        *(scale_of(p, options["scale"]), options["softcap"]),
        *mask_limits(p, options["left"], options["right"]),
        int(grad_dtype is not None),
        *program_numbers(call),
    )


def check_grad_dtype(grad_dtype: object) -> str | None:
    """Returns 'float32' if ``grad_dtype`` is the float32 dtype of any framework. Returns None if it
    is None, which means the dtype of the inputs.

    Raises ArgumentError for anything else.
    """
    if grad_dtype is None:
        return None
    if dtype_name(grad_dtype) == "float32":
        return "float32"
    raise ArgumentError(
        f"grad_dtype={quoted(grad_dtype)}: give 'float32', or None for the dtype of the inputs"
    )


def _batch_head(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the (batch, head) strides of a (batch, heads, seq) tensor. The batch stride is 0 if
    the tensor is packed."""
    return (0,) * (3 - len(strides)) + strides[:-1]


def _gradient(name: str, dims: tuple[str, ...], packed: tuple[str, ...], unless: str) -> TensorSpec:
    return TensorSpec(
        name, dims, "", "out", "usual", packed, dtype_option="grad_dtype", unless=unless
    )


# o and lse may come from attention over more keys than k holds. The gradients are 0 in rows that
# belong to no sequence or are beyond the longest length.
BACKWARD = Operation(
    name="backward",
    tensors=(
        TensorSpec("do", OUT, packed=PACKED_OUT),
        TensorSpec("q", Q, packed=PACKED_Q),
        TensorSpec("k", K, packed=PACKED_K),
        TensorSpec("v", V, packed=PACKED_V),
        TensorSpec("o", OUT, packed=PACKED_OUT),
        TensorSpec("lse", ROWS, "float32", packed=PACKED_ROWS, alignment=4),
        _gradient("dq", Q, PACKED_Q, unless=NO_DQ),
        _gradient("dk", K, PACKED_K, unless=ONLY_DQ),
        _gradient("dv", V, PACKED_V, unless=ONLY_DQ),
        TensorSpec("dsinks", ("heads_q",), "float32", "out", "optional", alignment=4),
        TensorSpec("dlse", ROWS, "float32", "in", "optional", PACKED_ROWS, alignment=4),
        TensorSpec("sinks", ("heads_q",), "float32", presence="optional", alignment=4),
        TensorSpec("cu_seqlens_q", ("batch+1",), "int32", presence="packed", alignment=4),
        TensorSpec("cu_seqlens_k", ("batch+1",), "int32", presence="packed", alignment=4),
    ),
    numbers=_numbers,
    flop=backward_flop,
    semantics=frozenset(SEMANTIC_WORDS) - {"partial"},
    # grad_dtype is None (the problem's dtype) or 'float32'. deterministic says whether dq must be
    # bitwise repeatable; dk, dv and dsinks always are.
    options={
        "scale": None,
        "softcap": 0.0,
        "left": None,
        "right": None,
        "grad_dtype": None,
        "deterministic": False,
    },
    takes_programs=True,
)
