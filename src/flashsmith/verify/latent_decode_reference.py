"""LatentDecodeReference: the inputs for proofs of the operation `latent_decode`, and the rule for
its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.families import Problem
from flashsmith.printable import quoted
from flashsmith.verify.attention_semantics import Lens
from flashsmith.verify.decode_inputs import queries_of
from flashsmith.verify.decode_reference import DecodeReference, ExpectedDecode
from flashsmith.verify.operation_reference import ProofCase
from flashsmith.verify.stored_rows import scales_of
from flashsmith.verify.tolerance import MIN_OUTPUTS

# Options of DecodeReference that this operation's calls do not have.
_WITHOUT = (
    *("rotary", "rotary_half", "rotary_dtype", "layout", "softcap"),
    "v_scale_value",
)


class LatentDecodeReference(DecodeReference):
    """Attention over a latent cache, computed by DecodeReference. A row of the cache is a key, and
    its first d_v columns are the value; both have the scale k_scale_value. Calls have no rotary
    embedding and only one memory layout."""

    caches = ("k_cache",)

    def options(self, problem: Problem, **asked: Any) -> dict[str, Any]:
        for name in _WITHOUT:
            if asked.get(name):
                raise ArgumentError(
                    f"{name}={quoted(asked[name])}: {problem.operation} has no such option; leave "
                    "it out"
                )
        found = super().options(problem, **asked)
        found.pop("v_scale_value", None)
        return found

    def call_options(self, problem: Problem, options: Mapping[str, Any]) -> dict[str, Any]:
        return {name: it for name, it in options.items() if name in problem.computed.options}

    def given(
        self, problem: Problem, inputs: Mapping[str, np.ndarray], options: Mapping[str, Any]
    ) -> ProofCase:
        """The case for existing inputs, with the lengths of these inputs."""
        lens = inputs["cache_lens"].tolist()
        if options.get("append"):
            lens = [sum(both) for both in zip(lens, queries_of(problem, options), strict=True)]
        return super().given(problem, inputs, {**options, "lens_k": tuple(lens)})

    def draw_inputs(
        self, problem: Problem, kind: str, seed: int, options: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """The inputs that DecodeReference draws, but without values, because values are columns of
        the keys."""
        options = _with_one_scale(problem, options)
        drawn = super().draw_inputs(replace(problem, d_v=problem.d), kind, seed, options)
        return {name: array for name, array in drawn.items() if name not in ("v_cache", "v")}

    def expected_rows(
        self,
        problem: Problem,
        inputs: Mapping[str, np.ndarray],
        options: Mapping[str, Any],
        on_gpu: bool = False,
    ) -> ExpectedDecode:
        """The expected outputs. All d columns are used as values, and then the columns of o beyond
        d_v are dropped. This is correct because the columns of o do not depend on each other."""
        options = _with_one_scale(problem, options)
        values = {f"v{name[1:]}": inputs[name] for name in ("k_cache", "k") if name in inputs}
        wide = replace(problem, d_v=problem.d)
        found = super().expected_rows(wide, {**inputs, **values}, options, on_gpu)
        kept = {
            name: array[..., : problem.d_v]
            for name in ("o", "same_precision", "tainted")
            if (array := getattr(found.references, name)) is not None
        }
        return replace(found, references=replace(found.references, **kept))

    def with_more_heads(self, problem: Problem, lens_q: Lens) -> Problem:
        """The problem with more query heads, all of which share the cache's only head."""
        outputs = sum(lens_q) * problem.heads_q * problem.d_v
        repeats = -(-MIN_OUTPUTS // outputs) if outputs else 1
        return replace(problem, heads_q=problem.heads_q * repeats)

    def writable_inputs(self, case: ProofCase) -> dict[str, np.ndarray]:
        """The inputs with a copy of the cache."""
        return {**case.inputs, "k_cache": case.inputs["k_cache"].copy()}


def _with_one_scale(problem: Problem, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, in which the keys' scale is also the values' scale."""
    k_scale, _ = scales_of(problem, options)
    return {**options, "k_scale_value": k_scale, "v_scale_value": k_scale}
