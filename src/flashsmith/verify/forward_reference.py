"""ForwardReference: the reference of attention, with options like the keywords of forward()."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, KernelConfig, Problem, Semantics
from flashsmith.runtime import OperationResult, run_forward
from flashsmith.semantics.signature import check_mask, check_scale
from flashsmith.semantics.sizes import FREE
from flashsmith.verify.attention_semantics import NO_WINDOW, Attention, Lens, offsets
from flashsmith.verify.operation_reference import OperationReference, ProofCase, ToDevice
from flashsmith.verify.problem_options import problem_options
from flashsmith.verify.proof_inputs import INPUT_KINDS, TILE_KINDS, InputSpec
from flashsmith.verify.reference import (
    References,
    inputs_and_references,
    joined,
    references_of,
)
from flashsmith.verify.tolerance import (
    Comparison,
    ExpectedOutputs,
    compare,
    heads_for_enough_outputs,
)


class _Expected(NamedTuple):
    attention: Attention
    references: References


class ForwardReference(OperationReference):
    """Attention.

    The options are those of describe_problem() (``causal``, ``window``, ``softcap``, ``scale``,
    ``lens_q``, ``lens_k``), ``ranges`` for partial attention, ``sinks`` (whether the call has
    sinks) and ``row_max`` (whether to return row maxima). Keys outside ``ranges`` are NaN.
    """

    kinds = INPUT_KINDS

    def options(self, problem: Problem, *, seed: int = 0, **asked: Any) -> dict[str, Any]:
        return problem_options(problem, seed=seed, **asked)

    def meaning(self, problem: Problem, options: Mapping[str, Any]) -> str:
        words = str(_attention(1.0, options))
        return f"{words}, sinks" if options.get("sinks") else words

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
        attention = _attention(check_scale(options.get("scale"), problem.d), options)
        problem = repeated_over_heads(problem, attention.lens_q)
        problem = replace(problem, semantics=problem.required_semantics(cfg))
        tile = (cfg.family.loop_tiles(cfg) or (0, 0))[1] if kind in TILE_KINDS else 0
        spec = InputSpec.of(problem, attention, kind, seed, options.get("sinks"), tile)
        drawn, references = inputs_and_references(spec, attention, on_gpu)
        inputs = {"q": drawn.q, "k": drawn.k, "v": drawn.v}
        if attention.ranges is not None:
            counting = [at.k for at in attention.sequences(problem.batch)]
            inputs |= {name: _amid_nan(inputs[name], counting) for name in "kv"}
            begin, used = np.array(attention.ranges, np.int32).reshape(-1, 2).T.copy()
            inputs |= {"seqused_k": used, "k_begin": begin}
        if drawn.sinks is not None:
            inputs["sinks"] = drawn.sinks
        if attention.lens_q is not None and attention.lens_k is not None:
            inputs["cu_seqlens_q"] = offsets(attention.lens_q)
            inputs["cu_seqlens_k"] = offsets(attention.lens_k)
        return ProofCase(problem, inputs, options, _Expected(attention, references))

    def given_rows(
        self,
        problem: Problem,
        parts: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]],
        options: Mapping[str, Any],
        *,
        on_gpu: bool = False,
    ) -> ProofCase:
        """The case for some rows of a problem; the output is (rows, heads, d).

        ``parts`` are (q, k, v) with q (rows, heads, d), and k and v (keys, heads_k, d). Masks are
        aligned so that the last row is at the last key. Parts are used one at a time, so an
        iterator may copy each part to the host only when it is needed.
        """
        attention = _attention(check_scale(options.get("scale"), problem.d), options)
        references = joined(
            references_of(attention, q[None], k[None], v[None], on_gpu=on_gpu) for q, k, v in parts
        )
        return ProofCase(problem, {}, options, _Expected(attention, references), self)

    def expected(
        self, problem: Problem, inputs: Mapping[str, np.ndarray], options: Mapping[str, Any]
    ) -> ExpectedOutputs:
        """The expected outputs. Unlike case(), this does not cache the references for other
        configs."""
        attention = _attention(check_scale(options.get("scale"), problem.d), options)
        q, k, v = (inputs[name] for name in "qkv")
        found = references_of(attention, q, k, v, inputs.get("sinks"))
        statistics = {"lse": found.lse, "row_max": found.row_max}
        return ExpectedOutputs(
            {"o": found.o, **statistics}, {"o": found.same_precision, **statistics}
        )

    def run(
        self, cfg: KernelConfig, case: ProofCase, to_device: ToDevice, **how: Any
    ) -> OperationResult:
        """Runs the kernel through run_forward(), as a user's call does."""
        attention: Attention = case.expected.attention
        packed: dict[str, Any] = {}
        if attention.lens_q is not None and attention.lens_k is not None:
            packed = {
                "max_seqlen_q": max(attention.lens_q),
                "max_seqlen_k": max(attention.lens_k),
            }
        given = {name: to_device(array) for name, array in case.inputs.items()}
        partial = attention.ranges is not None
        result = run_forward(
            cfg,
            **given,
            causal=attention.causal,
            window=attention.window,
            softcap=attention.softcap,
            scale=attention.scale,
            return_lse=True,
            return_row_max=case.options.get("row_max", True) and not partial,
            partial=partial,
            bits=case.problem.bits or FREE,
            poisoned=True,
            **packed,
            **how,
        )
        named = {"o": result.o, "lse": result.lse, "row_max": result.row_max}
        outputs = {name: array for name, array in named.items() if array is not None}
        return OperationResult(outputs, result.ms, result.emulation)

    def compare(
        self, kernel: KernelConfig | DType, case: ProofCase, outputs: Mapping[str, np.ndarray]
    ) -> Comparison:
        return compare(
            kernel,
            outputs["o"],
            outputs.get("lse"),
            case.expected.references,
            row_max=outputs.get("row_max"),
            lens_q=case.expected.attention.lens_q,
        )


def _attention(scale: float, options: Mapping[str, Any]) -> Attention:
    return Attention(
        scale,
        options.get("causal", False),
        options.get("window") or NO_WINDOW,
        options.get("softcap", 0.0),
        options.get("lens_q"),
        options.get("lens_k"),
        options.get("ranges"),
    )


def _amid_nan(array: np.ndarray, parts: list[tuple[int | slice, ...]]) -> np.ndarray:
    """A copy of the array with NaN everywhere outside the given parts."""
    found = np.full_like(array, np.nan)
    for part in parts:
        found[part] = array[part]
    return found


def semantics_of(attention: Attention) -> Semantics:
    """The semantics to compile for, without those that depend on the lengths."""
    packed, partial = attention.packed, attention.ranges is not None
    mask = check_mask(attention.causal, attention.window).kind
    return Semantics(mask, attention.softcap > 0, packed, packed or partial, partial)


def check_lens(lens_q: Lens, lens_k: Lens) -> None:
    """Raises ArgumentError unless these can be the lengths of packed sequences."""
    if len(lens_q) != len(lens_k) or not lens_q or min(*lens_q, *lens_k) < 0:
        raise ArgumentError(
            f"lens_q={lens_q}, lens_k={lens_k}: give both for each sequence, "
            "at least one, none negative"
        )


def repeated_over_heads(problem: Problem, lens_q: Lens | None) -> Problem:
    """The problem with its groups of heads repeated until there are enough outputs."""
    rows = problem.batch * problem.seq_q if lens_q is None else sum(lens_q)
    heads = heads_for_enough_outputs(1, rows, problem.heads_q, problem.d_v)
    repeats = heads // problem.heads_q
    return replace(problem, heads_q=heads, heads_k=problem.heads_k * repeats)
