"""merge_attention(outs, lses): attention over parts of the keys becomes attention over all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashsmith.chooser.backward import check_config_for
from flashsmith.errors import ArgumentError
from flashsmith.families import DType, KernelConfig, Problem, Semantics, d_head_for, families
from flashsmith.operations.merge import MERGE, MOST_PARTS, part_names
from flashsmith.printable import quoted
from flashsmith.runtime.operation_run import run_operation
from flashsmith.runtime.tensors import DTYPES, Array, view_tensor

_FP32 = "float32"
_DTYPES = (_FP32, *DTYPES)


def merge_attention(
    outs: Sequence[Array],
    lses: Sequence[Array],
    sinks: Array | None = None,
    *,
    dtype: str | None = None,
    config: KernelConfig | None = None,
    emulate: bool = False,
) -> tuple[Any, Any]:
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
        sinks: (heads_q,) fp32, a logit a head that joins its rows once; None where there are none,
            or they are in a part already.
        dtype: of the output: 'float16', 'bfloat16' or 'float32'; None is that of ``outs``.
        config: the kernel to use; None chooses one.
        emulate: run host tensors in the emulator even when that is estimated above 60 s.

    Returns:
        (o, lse), like the first part in framework and device; the LSE with the sinks.

    Raises:
        ArgumentError: an argument is unusable; nothing was launched.
        The other errors of ``flashsmith.forward``.
    """
    outs, lses = _listed("outs", outs), _listed("lses", lses)
    if len(outs) != len(lses) or not outs:
        raise ArgumentError(
            f"lses: {len(lses)} for {len(outs)} outs; give at least one part, and an LSE for each"
        )
    check_config_for(MERGE.name, "config", config)
    first = view_tensor("outs[0]", outs[0], _DTYPES)
    parts_dtype, result = _dtypes(first.dtype, dtype)
    problem = _problem(first.shape, config, parts_dtype, result)
    if config is None:
        (family, *_) = families(MERGE.name)
        (config, *_) = family.proof_configs(problem.dtype, d_head_for(problem))
    while True:
        # More than a launch takes: the first are merged into one, which is then the first.
        last = len(outs) <= MOST_PARTS
        tensors = {} if sinks is None or not last else {"sinks": sinks}
        for part, (out, lse) in enumerate(zip(outs[:MOST_PARTS], lses, strict=False)):
            tensors.update(zip(part_names(part), (out, lse), strict=True))
        dtypes = {"parts_dtype": parts_dtype, "dtype": result if last else _FP32}
        found = run_operation(
            config,
            problem,
            tensors,
            options={name: _FP32 if it == _FP32 else None for name, it in dtypes.items()},
            emulate=emulate,
        ).outputs
        if last:
            return found["o"], found["lse"]
        outs, lses = [found["o"], *outs[MOST_PARTS:]], [found["lse"], *lses[MOST_PARTS:]]
