"""merge_attention(outs, lses): attention over parts of the keys becomes attention over all."""

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
from flashsmith.runtime import cached_launches
from flashsmith.runtime.cached_launches import (
    UNALIGNED,
    UNALIGNED_VECTOR,
    Options,
    Signature,
)
from flashsmith.runtime.forward_options import ForwardOptions
from flashsmith.runtime.frameworks.base import TensorView
from flashsmith.runtime.operation_run import (
    CachedOperation,
    PreparedOperation,
    prepare_operation,
)
from flashsmith.runtime.tensors import DTYPES, Array, Dtype, TensorT, view_tensor
from flashsmith.semantics.dtype import dtype_name

_FP32 = "float32"
_DTYPES = (_FP32, *DTYPES)


def merge_attention(
    outs: Sequence[TensorT],
    lses: Sequence[Array],
    sinks: Array | None = None,
    *,
    dtype: Dtype | None = None,
    config: KernelConfig | None = None,
    emulate: bool = False,
) -> tuple[TensorT, TensorT]:
    """Attention over all keys, from the outputs and LSEs of parts of them.

    Parts are added up in their order, in fp32, and rounded once: the same parts give the same bits
    in every run. A row without a key in any part (every LSE -inf) gives 0 and -inf, or its head's
    sink; NaN in a part is NaN in the result, as in one kernel over all keys. There are no
    gradients: ``flashsmith.backward`` computes each part's from the merged output and LSE.

    Args:
        outs: the parts' outputs, (batch, seq_q, heads_q, d) or packed (total_q, heads_q, d), of one
            dtype: fp32, as ``attention(..., partial=True)`` returns them, fp16 or bf16. PyTorch
            tensors or NumPy, CuPy or JAX arrays, with any strides that attention() takes.
        lses: the parts' natural log-sum-exps, fp32, (batch, heads_q, seq_q) or (heads_q, total_q).
        sinks: (heads_q,) fp32, fp16 or bf16, a logit a head that joins its rows once; None where
            there are none, or they are in a part already.
        dtype: of the output: 'float16', 'bfloat16' or 'float32', or such a dtype of PyTorch or
            NumPy; None is that of ``outs``.
        config: the kernel to use; None chooses one.
        emulate: run host tensors in the emulator even when that is estimated above 60 s.

    Returns:
        (o, lse), like the first part in framework and device; the LSE with the sinks.

    Raises:
        ArgumentError: an argument is unusable; nothing was launched.
        The other errors of ``flashsmith.forward``.
    """
    check_config_for(MERGE.name, "config", config)
    outs, lses = _listed("outs", outs), _listed("lses", lses)
    calls, parts = cached_launches.cached, (*outs, *lses)
    signature: Signature | None = None
    if len(outs) == len(lses) and 0 < len(outs) <= MOST_PARTS:
        chosen, options = ("merge", config), (len(outs), sinks, dtype)
        signature, call = cached_launches.find(
            merge_signature, calls, chosen, parts, options, emulate
        )
        if call is not None and (found := call.run(parts, sinks)) is not None:
            return found
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
    # More than a launch takes: the first ones become one, which is then the first.
    while len(outs) > MOST_PARTS:
        named["dtype"] = _FP32
        few = _prepared(config, problem, outs[:MOST_PARTS], lses[:MOST_PARTS], None, named, emulate)
        o, lse = _run(few)
        outs, lses = [o, *outs[MOST_PARTS:]], [lse, *lses[MOST_PARTS:]]
        named |= {"first_dtype": _FP32, "dtype": wanted}
    prepared = _prepared(config, problem, outs, lses, sinks, named, emulate)
    merged = _run(prepared)
    if signature is not None and prepared.launch is not None:
        cached_launches.remember(calls, signature, _CachedMerge(prepared, wanted), ForwardOptions())
    return merged


class _CachedMerge(CachedOperation):
    """A merge that was checked and planned once."""

    def __init__(self, prepared: PreparedOperation, dtype: str) -> None:
        super().__init__(prepared)
        new, views = self._framework.allocator, prepared.views
        first = views["outs[0]"].source
        self._new_o = new(first, views["o"].shape, dtype)
        self._new_lse = new(first, views["lse"].shape, _FP32)

    def run(self, parts: tuple[Any, ...], sinks: Any) -> tuple[Any, Any] | None:
        """Launches on these parts, the outputs and then the LSEs; None, without launching, when
        the addresses need the full checks.

        Raises LaunchError when the launch is refused.
        """
        at = [tensor.data_ptr() for tensor in parts]
        count = len(at) // 2
        outs, lses = at[:count], at[count:]
        sinks_at = 0 if sinks is None else sinks.data_ptr()
        unaligned = sinks_at & UNALIGNED_VECTOR
        for out_at, lse_at in zip(outs, lses, strict=True):
            if not (out_at and lse_at):
                return None
            unaligned |= out_at & UNALIGNED | lse_at & UNALIGNED_VECTOR
        if unaligned or (sinks is not None and not sinks_at):
            return None
        o, lse = self._new_o(), self._new_lse()
        # In the operation's order: outputs after the first part, sinks behind the last one's place.
        places = [outs[0], lses[0], o.data_ptr(), lse.data_ptr()]
        for pair in zip(outs[1:], lses[1:], strict=True):
            places += pair
        if sinks_at:
            places += [0] * (2 * (MOST_PARTS - count)) + [sinks_at]
        self._launch(self._stream_of(self._ordinal), *places)
        return o, lse


def merge_signature(
    kind: Any,
    grad_enabled: bool,
    chosen: Any,
    parts: tuple[Any, ...],
    options: Options,
    emulate: Any,
) -> Signature | None:
    """Everything but addresses that checks and the kernel depend on, as
    cached_launches.call_signature."""
    count, sinks, dtype = options
    found = [chosen, emulate, type(emulate), count, dtype]
    for tensor in (*parts, sinks):
        if tensor is None:
            found.append(None)
            continue
        if type(tensor) is not kind or (grad_enabled and tensor.requires_grad) or tensor.is_neg():
            return None
        found += (tensor.dtype, tensor.device, tensor.shape, tensor.stride())
    return tuple(found)


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
    """The problem of parts like the first, for an output of ``wanted``; ``dtype`` is of kernels
    for fp32 alone."""
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
) -> PreparedOperation:
    """One launch for at most MOST_PARTS parts, the names of whose dtypes are given."""
    tensors = {} if sinks is None else {"sinks": sinks}
    for part, pair in enumerate(zip(outs, lses, strict=True)):
        tensors.update(zip(part_names(part), pair, strict=True))
    options = {name: _FP32 if it == _FP32 else None for name, it in dtypes.items()}
    return prepare_operation(
        config, replace(problem, seq_k=len(outs)), tensors, options=options, emulate=emulate
    )


def _run(prepared: PreparedOperation) -> tuple[Any, Any]:
    outputs = prepared.run().outputs
    return outputs["o"], outputs["lse"]
