"""LatentDecodeReference: the inputs for proofs of the operation `latent_decode`, and the rule for
its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.families import KernelConfig, Problem
from flashsmith.printable import quoted
from flashsmith.runtime import OperationResult, run_operation
from flashsmith.verify.decode_reference import (
    DecodeReference,
    ExpectedDecode,
    draw_decode_inputs,
    expected_of,
    queries_of,
)
from flashsmith.verify.operation_reference import ProofCase, ToDevice
from flashsmith.verify.tolerance import MIN_OUTPUTS, ExpectedOutputs

# Options of DecodeReference that calls of this operation do not have.
_WITHOUT = (
    *("rotary", "rotary_half", "rotary_dtype", "layout", "softcap"),
    *("k_scale_value", "v_scale_value"),
)


class LatentDecodeReference(DecodeReference):
    """Attention over a latent cache, computed by DecodeReference: the cache's rows are the keys
    and, without their last columns, the values. Calls have no rotary embedding and no layouts."""

    def options(self, problem: Problem, **asked: Any) -> dict[str, Any]:
        for name in _WITHOUT:
            if asked.get(name):
                raise ArgumentError(
                    f"{name}={quoted(asked[name])}: {problem.operation} has no such option; leave "
                    "it out"
                )
        return super().options(problem, **asked)

    def call_options(self, problem: Problem, options: Mapping[str, Any]) -> dict[str, Any]:
        return {name: it for name, it in options.items() if name in problem.computed.options}

    def draw(self, problem: Problem, kind: str, seed: int) -> dict[str, np.ndarray]:
        options = self.options(problem, seed=seed, lens_k=(problem.seq_k,) * problem.batch)
        return _draw(problem, kind, seed, options)

    def given(
        self, problem: Problem, inputs: Mapping[str, np.ndarray], options: Mapping[str, Any]
    ) -> ProofCase:
        """The case for given inputs, with their lengths."""
        lens = inputs["cache_lens"].tolist()
        if options.get("append"):
            lens = [sum(both) for both in zip(lens, queries_of(problem, options), strict=True)]
        return super().given(problem, inputs, {**options, "lens_k": tuple(lens)})

    def expected(
        self, problem: Problem, inputs: Mapping[str, np.ndarray], options: Mapping[str, Any]
    ) -> ExpectedOutputs:
        found = _expected(problem, inputs, options, False)
        o, lse = found.references.o, found.references.lse
        same = found.references.same_precision
        if not problem.semantics.packed:
            shape = (problem.batch, problem.seq_q, problem.heads_q, o.shape[-1])
            o, same = o.reshape(shape), same.reshape(shape)
            lse = np.moveaxis(lse.reshape(problem.heads_q, *shape[:2]), 0, 1)
        exact = {"o": o, "lse": lse}
        rounded = {"o": same, "lse": lse}
        if options.get("append"):
            rounded["k_cache"] = found.k_cache
            exact["k_cache"] = found.k_cache.astype(np.float64)
        return ExpectedOutputs(exact, rounded)

    def case(
        self,
        cfg: KernelConfig,
        problem: Problem,
        *,
        kind: str,
        seed: int,
        options: Mapping[str, Any],
        on_gpu: bool = False,
    ) -> ProofCase:
        """The case for a proof of ``cfg``'s kernel, with query heads repeated until there are
        enough outputs."""
        options = self.options(problem, seed=seed, **options)
        outputs = sum(queries_of(problem, options)) * problem.heads_q * problem.d_v
        repeats = -(-MIN_OUTPUTS // outputs) if outputs else 1
        problem = replace(problem, heads_q=problem.heads_q * repeats)
        inputs, expected = _drawn_case(problem, kind, seed, tuple(sorted(options.items())), on_gpu)
        problem = replace(problem, semantics=problem.required_semantics(cfg))
        return ProofCase(problem, inputs, options, expected)

    def run(
        self, cfg: KernelConfig, case: ProofCase, to_device: ToDevice, **how: Any
    ) -> OperationResult:
        """Runs the kernel on a copy of the cache, because it may append to it."""
        inputs = {**case.inputs, "k_cache": case.inputs["k_cache"].copy()}
        return run_operation(
            cfg,
            case.problem,
            {name: to_device(array) for name, array in inputs.items()},
            options=self.call_options(case.problem, case.options),
            wanted=["lse"],
            poisoned=True,
            **how,
        )


def _draw(
    problem: Problem, kind: str, seed: int, options: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The inputs of DecodeReference without the values, which are columns of the keys."""
    drawn = draw_decode_inputs(replace(problem, d_v=problem.d), kind, seed, options)
    return {name: array for name, array in drawn.items() if name not in ("v_cache", "v")}


def _expected(
    problem: Problem, inputs: Mapping[str, np.ndarray], options: Mapping[str, Any], on_gpu: bool
) -> ExpectedDecode:
    """The expected outputs. Columns of o are independent of each other, so the columns that belong
    only to the key are computed, too, and then left out."""
    values = {f"v{name[1:]}": inputs[name] for name in ("k_cache", "k") if name in inputs}
    wide = replace(problem, d_v=problem.d)
    found = expected_of(wide, {**inputs, **values}, options, on_gpu)
    kept = {
        name: array[..., : problem.d_v]
        for name in ("o", "same_precision", "tainted")
        if (array := getattr(found.references, name)) is not None
    }
    return replace(found, references=replace(found.references, **kept))


@lru_cache(maxsize=4)
def _drawn_case(
    problem: Problem, kind: str, seed: int, options: tuple[tuple[str, Any], ...], on_gpu: bool
) -> tuple[dict[str, np.ndarray], ExpectedDecode]:
    """Inputs and expected outputs. They are cached, because the configs of a set share them."""
    said = dict(options)
    inputs = _draw(problem, kind, seed, said)
    for array in inputs.values():
        array.flags.writeable = False
    return inputs, _expected(problem, inputs, said, on_gpu)
