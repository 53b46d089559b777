"""merge_attention(outs, lses): attention over all keys from attention over parts of the keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flashsmith.chooser.backward import check_config_for
from flashsmith.errors import ArgumentError
from flashsmith.families import DType, KernelConfig, Problem, Semantics, d_head_for, families
from flashsmith.families.legality import D_STEP
from flashsmith.operations.merge import MERGE, MOST_PARTS, part_names
from flashsmith.printable import quoted
from flashsmith.runtime.cached_calls import Invocation, Remember, run_cached
from flashsmith.runtime.frameworks.base import TensorView
from flashsmith.runtime.operation_run import prepare_operation
from flashsmith.runtime.prepared_call import PreparedCall
from flashsmith.runtime.tensors import DTYPES, Array, Dtype, TensorT, view_tensor
from flashsmith.semantics.dtype import dtype_name

_FP32 = "float32"
_DTYPES = (_FP32, *DTYPES)


# The names of the operation's tensors; the index is the number of parts.
_NAMES = [
    (*(part_names(i)[0] for i in range(n)), *(part_names(i)[1] for i in range(n)), "sinks")
    for n in range(MOST_PARTS + 1)
]


def merge_attention(
    outs: Sequence[TensorT],
    lses: Sequence[Array],
    sinks: Array | None = None,
    *,
    dtype: Dtype | None = None,
    config: KernelConfig | None = None,
    emulate: bool = False,
) -> tuple[TensorT, TensorT]:
    """Merges attention over parts of the keys into attention over all keys.

    Parts are summed in fp32 in the given order and rounded once, so the same parts give the same
    bits in every run. A row that has no key in any part (every LSE is -inf) gives 0 and -inf; with
    a sink, the LSE is the sink. NaN in a part gives NaN in the result, as it would in one kernel
    over all keys. The function is not differentiable: ``flashsmith.backward`` computes each part's
    gradients from the merged output and LSE.

    Args:
        outs: the parts' outputs, (batch, seq_q, heads_q, d) or packed (total_q, heads_q, d), of one
            dtype: fp32, as ``attention(..., partial=True)`` returns them, fp16 or bf16. PyTorch
            tensors or NumPy, CuPy or JAX arrays, with any strides that attention() takes.
        lses: the natural log-sum-exps of the parts, fp32, (batch, heads_q, seq_q) or (heads_q,
            total_q).
        sinks: (heads_q,) fp32, fp16 or bf16: one logit per head, which joins the softmax of the
            rows of this head. None if there are no sinks, or if a part already includes them.
        dtype: the dtype of the output: 'float16', 'bfloat16' or 'float32', or such a dtype of
            PyTorch or NumPy; None uses the dtype of ``outs``.
        config: the kernel to use; None chooses one.
        emulate: run host tensors in the emulator even when the estimated time is above 60 s.

    Returns:
        (o, lse), in the framework and on the device of the first part; the LSE includes the sinks.

    Raises:
        ArgumentError: an argument is invalid; nothing was launched.
        The other errors of ``flashsmith.forward``.
    """
    check_config_for(MERGE.name, "config", config)
    outs, lses = _listed("outs", outs), _listed("lses", lses)
    asked = None
    if len(outs) == len(lses) and 0 < len(outs) <= MOST_PARTS:
        asked = Invocation(("merge", len(outs)), (*outs, *lses, sinks), (dtype, config, emulate))

    def run(remember: Remember) -> tuple[TensorT, TensorT]:
        return _merge(outs, lses, sinks, dtype, config, emulate, remember)

    names = _NAMES[min(len(outs), MOST_PARTS)]
    merged: tuple[TensorT, TensorT] = run_cached(asked, names, run)
    return merged


def _merge(
    outs: list[Any],
    lses: list[Any],
    sinks: Any,
    dtype: Dtype | None,
    config: KernelConfig | None,
    emulate: bool,
    remember: Remember,
) -> tuple[Any, Any]:
    if len(outs) != len(lses) or not outs:
        raise ArgumentError(
            f"lses: {len(lses)} for {len(outs)} outs; give at least one part, and an LSE for each"
        )
    first = view_tensor("outs[0]", outs[0], _DTYPES)
    given, wanted = first.dtype, first.dtype if dtype is None else _output_dtype(dtype)
    problem = _problem(first, wanted, None if config is None else config.dtype)
    if config is None:
        (family, *_) = families(MERGE.name)
        (config, *_) = family.proof_configs(problem.dtype, d_head_for(problem))
    named = dict(zip(("first_dtype", "parts_dtype", "dtype"), (given, given, wanted), strict=True))
    # A launch takes at most MOST_PARTS parts. While there are more parts, the first MOST_PARTS of
    # them are merged into one.
    while len(outs) > MOST_PARTS:
        named["dtype"] = _FP32
        few = _prepared(config, problem, outs[:MOST_PARTS], lses[:MOST_PARTS], None, named, emulate)
        o, lse = _run(few)
        outs, lses = [o, *outs[MOST_PARTS:]], [lse, *lses[MOST_PARTS:]]
        named |= {"first_dtype": _FP32, "dtype": wanted}
    prepared = _prepared(config, problem, outs, lses, sinks, named, emulate)
    merged = _run(prepared)
    remember(prepared, ("o", "lse"))
    return merged


def _listed(name: str, parts: Sequence[Any]) -> list[Any]:
    if isinstance(parts, (list, tuple)):
        return list(parts)
    raise ArgumentError(f"{name}: got {type(parts).__name__}; give a list or tuple of parts")


def _output_dtype(dtype: object) -> str:
    name = dtype_name(dtype)
    if name not in _DTYPES:
        raise ArgumentError(
            f"dtype={quoted(dtype)}: allowed are {', '.join(_DTYPES)}, by name or as a dtype of "
            "PyTorch or NumPy, and None for that of outs"
        )
    return name


def _problem(first: TensorView, wanted: str, dtype: DType | None) -> Problem:
    """Returns the problem of merging parts with the sizes and dtype of ``first``; ``wanted`` is the
    dtype of the output.

    If the parts and the output are fp32, ``dtype`` selects the kernels.
    """
    shorter = {first.dtype, wanted} - {_FP32}
    if len(shorter) > 1:
        raise ArgumentError(
            f"dtype={quoted(wanted)}: outs are {first.dtype}; give that, float32 or None"
        )
    if len(first.shape) not in (3, 4):
        raise ArgumentError(
            f"outs[0]: rank {len(first.shape)} (shape {first.shape}); must be 4, (batch, seq_q, "
            "n_heads, d_head), or 3 of packed sequences"
        )
    packed = len(first.shape) == 3
    *batch, rows, heads, d = first.shape
    if not heads or not d or d % D_STEP:
        raise ArgumentError(
            f"outs[0]: shape {first.shape}; heads must be 1 or more, and d_head a multiple of "
            f"{D_STEP}: pad parts as q, k and v were padded"
        )
    found = DTYPES[shorter.pop()] if shorter else dtype or DType.FP16
    semantics = Semantics(packed=packed, uneven=packed)
    return Problem(batch[0] if batch else 1, rows, 1, heads, heads, d, found, semantics, MERGE.name)


def _prepared(
    config: KernelConfig,
    problem: Problem,
    outs: Sequence[Array],
    lses: Sequence[Array],
    sinks: Array | None,
    dtypes: Mapping[str, str],
    emulate: bool,
) -> PreparedCall:
    """Prepares one launch for at most MOST_PARTS parts; ``dtypes`` are the dtypes of the launch's
    tensors."""
    tensors = {} if sinks is None else {"sinks": sinks}
    for part, pair in enumerate(zip(outs, lses, strict=True)):
        tensors.update(zip(part_names(part), pair, strict=True))
    options = {name: _FP32 if it == _FP32 else None for name, it in dtypes.items()}
    return prepare_operation(
        config, replace(problem, seq_k=len(outs)), tensors, options=options, emulate=emulate
    )


def _run(prepared: PreparedCall) -> tuple[Any, Any]:
    outputs = prepared.run().outputs
    return outputs["o"], outputs["lse"]
