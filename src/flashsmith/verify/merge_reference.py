"""MergeReference: the reference of the operation `merge`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashsmith.families import Problem
from flashsmith.operations.merge import part_names, parts_of
from flashsmith.operations.operation import packed_rows, shape_of
from flashsmith.runtime.frameworks.base import NUMPY_DTYPES
from flashsmith.verify.operation_reference import OperationReference
from flashsmith.verify.tolerance import ExpectedOutputs

# The fraction of rows that have no key in a given part, and the fraction that have no key in any
# part.
_EMPTY_SHARE, _ALL_EMPTY_SHARE = 0.2, 0.05


class MergeReference(OperationReference):
    """Draws parts whose LSEs differ by some nats; some rows have no keys.

    With the kind ``nonfinite``, outputs and LSEs contain NaN and infinities, and outputs are NaN
    where a part has no key.
    """

    kinds = ("random", "nonfinite")

    def draw(self, problem: Problem, kind: str, seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        specs = {tensor.name: tensor for tensor in problem.computed.tensors}
        drawn: dict[str, np.ndarray] = {}
        rows = packed_rows(problem)
        statistics = shape_of(specs["lse"], problem, rows)
        lost = rng.random(statistics) < _ALL_EMPTY_SHARE
        for part in range(parts_of(problem)):
            output, lse = part_names(part)
            o = rng.standard_normal(shape_of(specs["o"], problem, rows), dtype=np.float32)
            lses = rng.normal(3.0, 2.0, statistics).astype(np.float32)
            empty = lost | (rng.random(statistics) < _EMPTY_SHARE)
            lses[empty] = -np.inf
            unseen = np.moveaxis(empty, -2, -1)
            o[unseen] = np.nan if kind == "nonfinite" else 0.0
            if kind == "nonfinite":
                for array, values in ((o, (np.nan, np.inf, -np.inf)), (lses, (np.nan, np.inf))):
                    for value in values:
                        array[tuple(rng.integers(array.shape))] = value
            drawn[output], drawn[lse] = o, lses
        return drawn

    def call_options(self, problem: Problem, options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "first_dtype": "float32",
            "parts_dtype": "float32",
            **super().call_options(problem, options),
        }

    def expected(
        self, problem: Problem, inputs: Mapping[str, np.ndarray], options: Mapping[str, Any]
    ) -> ExpectedOutputs:
        names = [part_names(part) for part in range(parts_of(problem))]
        outs, lses = ([inputs[pair[i]] for pair in names] for i in range(2))
        o_dtype = NUMPY_DTYPES[options.get("dtype") or problem.dtype.numpy_name]
        o, lse = merged(outs, lses, inputs.get("sinks"), np.float64)
        rounded, rounded_lse = merged(outs, lses, inputs.get("sinks"), np.float32)
        return ExpectedOutputs(
            {"o": o, "lse": lse}, {"o": rounded.astype(o_dtype), "lse": rounded_lse}
        )


def merged(
    outs: list[np.ndarray], lses: list[np.ndarray], sinks: np.ndarray | None, precision: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The merged output (..., rows, heads, d) and LSE (..., heads, rows), computed in the given
    precision."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        logits = [lse.astype(precision) for lse in lses]
        top = np.maximum.reduce(logits)
        if sinks is not None:
            logit = np.clip(sinks, *(np.finfo(np.float32).max * np.array([-1, 1])))
            sink = np.broadcast_to(logit.astype(precision)[:, None], top.shape)
            top = np.maximum(top, sink)
        base = np.where(top == -np.inf, precision(0), top)
        total = np.zeros_like(base) if sinks is None else np.exp(sink - base)
        o: Any = precision(0)
        for out, lse in zip(outs, logits, strict=True):
            weight = np.exp(lse - base)
            total = total + weight
            column = np.moveaxis(weight, -2, -1)[..., None]
            part = np.where(np.moveaxis(lse, -2, -1)[..., None] == -np.inf, 0, out)
            o = o + column * part.astype(precision)
        lse = np.where(top == -np.inf, -np.inf, base + np.log(total))
        whole = np.where(total == 0, precision(1), total)
        return o / np.moveaxis(whole, -2, -1)[..., None], lse
