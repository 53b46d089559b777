"""BackwardReference: the inputs for proofs of the operation `backward`, and the rule for its
outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, KernelConfig, Problem
from flashsmith.printable import quoted
from flashsmith.runtime import OperationResult, run_operation
from flashsmith.verify.attention_semantics import Attention, Lens, offsets
from flashsmith.verify.engine import gpu_engine_pays
from flashsmith.verify.forward_reference import repeated_over_heads
from flashsmith.verify.gradient_tolerance import compare_gradients
from flashsmith.verify.gradients import Rows, compute_gradients
from flashsmith.verify.operation_reference import OperationReference, ProofCase, ToDevice
from flashsmith.verify.problem_options import attention_of, options_by_limits, without_defaults
from flashsmith.verify.proof_inputs import InputSpec, make_inputs
from flashsmith.verify.reference import references_of
from flashsmith.verify.tolerance import Comparison, ExpectedOutputs, heads_for_enough_outputs

GRADIENTS = ("dq", "dk", "dv", "dsinks")
# The kinds of inputs for backward passes, and for each the kind of inputs from which its q, k and v
# are drawn. In 'large_do', do and dlse are as large as loss scaling makes them, so that dS
# overflows fp16. In 'neighbours', every second head of a sequence consists of NaN or inf.
_OF_QKV = {
    "random": "random",
    "large_scores": "large_scores",
    "constant": "constant",
    "one_hot": "one_hot",
    "far_scores": "far_scores",
    "nonfinite": "nonfinite",
    "lost_keys": "lost_keys",
    "large_do": "random",
    "neighbours": "random",
}
LARGE_DO = {DType.FP16: 2.0**13, DType.BF16: 2.0**60}
# Heads are repeated until dk and dv have enough elements, or until dq would have more elements than
# this (64 MiB in float64).
MOST_REPEATED = 2**23


@dataclass(frozen=True)
class BackwardInputs:
    """The tensors that a backward kernel reads, by the operation's names, and where the sequences
    are in these tensors. Also o and lse in float64, never rounded."""

    tensors: Mapping[str, np.ndarray]
    attention: Attention
    sequences: tuple[Rows, ...]
    exact_o: np.ndarray
    exact_lse: np.ndarray


class BackwardReference(OperationReference):
    """The gradients of attention. It has the options of the operation, and also:

    - ``lens_q`` and ``lens_k``: the lengths of packed sequences. Sequences are cut off at the
      lengths of the problem; rows beyond these get 0.
    - ``spare``: the number of rows after the last packed sequence, in the tensors of q and in the
      tensors of k.
    - ``sinks``, ``dlse``: whether the call has sinks and dlse.
    - ``more_keys``: how many keys beyond those in k are included in o and lse; every row sees these
      keys.
    - ``unneeded``: names of gradients that this call does not need, although other calls of the
      problem may need them.

    In all tensors, rows that belong to no sequence hold NaN, inf or the largest numbers. In rows
    that see no key, do is NaN.
    """

    kinds = tuple(_OF_QKV)

    def options(
        self,
        problem: Problem,
        *,
        seed: int = 0,
        scale: float | None = None,
        dlse: bool = False,
        lens_q: Lens | None = None,
        lens_k: Lens | None = None,
        spare: int = 0,
        more_keys: int = 0,
        unneeded: tuple[str, ...] = (),
        grad_dtype: str | None = None,
        deterministic: bool = False,
        **asked: Any,
    ) -> dict[str, Any]:
        """Makes the options from ``asked``, which has the options of options_by_limits()."""
        unknown = [name for name in unneeded if name not in GRADIENTS]
        if unknown or (set(unneeded) >= set(GRADIENTS[:3]) and not asked.get("sinks")):
            raise ArgumentError(
                f"unneeded={quoted(', '.join(unneeded))}: give some of {', '.join(GRADIENTS)}, but "
                "not all"
            )
        absent = [it.name for it in problem.computed.outputs if not it.is_of_kind(problem)]
        unneeded = tuple(name for name in GRADIENTS if name in (*unneeded, *absent))
        found = options_by_limits(problem, seed=seed, **asked)
        if lens_q is None:
            lens_q, lens_k = found.get("lens_q"), found.get("lens_k")
        options = {
            "scale": scale,
            **{name: found[name] for name in ("softcap", "left", "right", "sinks")},
            "dlse": dlse,
            "lens_q": lens_q,
            "lens_k": lens_k,
            "spare": spare,
            "more_keys": more_keys,
            "unneeded": unneeded,
            "grad_dtype": grad_dtype,
            "deterministic": deterministic,
        }
        return without_defaults(options)

    def meaning(self, problem: Problem, options: Mapping[str, Any]) -> str:
        attention = attention_of(problem, options)
        words = [str(attention)] if str(attention) != "plain" else []
        words += [f"scale {options['scale']:g}"] if "scale" in options else []
        words += [name for name in ("sinks", "dlse", "deterministic") if options.get(name)]
        words += [f"{options['spare']} spare rows"] if options.get("spare") else []
        words += [f"{options['more_keys']} more keys"] if options.get("more_keys") else []
        words += [f"no {name}" for name in options.get("unneeded", ())]
        words += [f"{options['grad_dtype']} gradients"] if options.get("grad_dtype") else []
        return ", ".join(words) or "plain"

    def draw(self, problem: Problem, kind: str, seed: int) -> dict[str, np.ndarray]:
        """Inputs of the given kind, drawn with the typical options of the problem."""
        options = self.options(problem, seed=seed)
        on_gpu = _gpu_pays(problem)
        return dict(draw_backward_inputs(problem, kind, seed, options, on_gpu).tensors)

    def expected(
        self, problem: Problem, inputs: Mapping[str, np.ndarray], options: Mapping[str, Any]
    ) -> ExpectedOutputs:
        """The expected gradients. o and lse are recomputed in float64, unless the given o and lse
        include more keys than k has."""
        attention, sequences = attention_of(problem, options), sequences_of(problem, options)
        exact = inputs["o"].astype(np.float64), inputs["lse"].astype(np.float64)
        on_gpu = _gpu_pays(problem)
        if not options.get("more_keys"):
            exact = _forward(inputs, attention, sequences, None, on_gpu)
        found = compute_gradients(
            *(inputs, attention, sequences, *exact),
            unrounded="grad_dtype" in options,
            on_gpu=on_gpu,
        )
        return found.only([name for name in GRADIENTS if name not in options.get("unneeded", ())])

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
        """The case for a proof of ``cfg``'s kernel: the problem for which the kernel is compiled,
        with heads repeated until each gradient has enough elements."""
        # Adds the options that the caller left out, such as the lengths of packed sequences.
        options = self.options(problem, seed=seed, **options)
        problem = repeated_for_gradients(problem, options)
        frozen = tuple(sorted(options.items()))
        drawn, expected = _drawn_case(problem, kind, seed, frozen, on_gpu)
        problem = replace(problem, semantics=problem.required_semantics(cfg))
        return ProofCase(problem, drawn.tensors, options, expected)

    def run(
        self, cfg: KernelConfig, case: ProofCase, to_device: ToDevice, **how: Any
    ) -> OperationResult:
        unneeded = case.options.get("unneeded", ())
        sinks = "sinks" in case.inputs and "dsinks" not in unneeded
        return run_operation(
            cfg,
            case.problem,
            {name: to_device(array) for name, array in case.inputs.items()},
            options=self.call_options(case.problem, case.options),
            wanted=("dsinks",) if sinks else (),
            unwanted=[name for name in unneeded if name != "dsinks"],
            poisoned=True,
            **how,
        )

    def compare(
        self, kernel: KernelConfig | DType, case: ProofCase, outputs: Mapping[str, np.ndarray]
    ) -> Comparison:
        dtype = kernel if isinstance(kernel, DType) else kernel.dtype
        return compare_gradients(dtype, outputs, case.expected)


def _gpu_pays(problem: Problem) -> bool:
    return gpu_engine_pays(problem.batch * problem.heads_q * problem.seq_q * problem.seq_k)


def sequences_of(problem: Problem, options: Mapping[str, Any]) -> tuple[Rows, ...]:
    """The rows of each sequence of a problem; each sequence is cut off at the problem's seq_q and
    seq_k."""
    lens_q, lens_k = options.get("lens_q"), options.get("lens_k")
    if lens_q is None or lens_k is None:
        return tuple(
            Rows(b, slice(0, problem.seq_q), slice(0, problem.seq_k)) for b in range(problem.batch)
        )
    return tuple(
        Rows(
            None,
            slice(begin_q, min(end_q, begin_q + problem.seq_q)),
            slice(begin_k, min(end_k, begin_k + problem.seq_k)),
        )
        for (begin_q, end_q), (begin_k, end_k) in zip(
            pairwise(offsets(lens_q).tolist()), pairwise(offsets(lens_k).tolist()), strict=True
        )
    )


def repeated_for_gradients(problem: Problem, options: Mapping[str, Any]) -> Problem:
    """The problem with its groups of heads repeated until dq, and dk and dv if needed, have enough
    elements. Because dk and dv may be much smaller than dq, repetition stops before dq would exceed
    MOST_REPEATED elements."""
    problem = repeated_over_heads(problem, options.get("lens_q"))
    if {"dk", "dv"} <= set(options.get("unneeded", ())):
        return problem
    lens_q, lens_k = options.get("lens_q"), options.get("lens_k")
    rows = problem.batch * problem.seq_q if lens_q is None else sum(lens_q)
    keys = problem.batch * problem.seq_k if lens_k is None else sum(lens_k)
    narrower = min(problem.d, problem.d_v)
    enough = heads_for_enough_outputs(1, keys, problem.heads_k, narrower) // problem.heads_k
    most = max(1, MOST_REPEATED // max(1, rows * problem.heads_q * problem.d))
    repeats = min(enough, most)
    return replace(problem, heads_q=problem.heads_q * repeats, heads_k=problem.heads_k * repeats)


def draw_backward_inputs(
    problem: Problem, kind: str, seed: int, options: Mapping[str, Any], on_gpu: bool = False
) -> BackwardInputs:
    """Draws the tensors of a call.

    ``on_gpu``: whether o and lse may be computed on a GPU.

    Raises ArgumentError for an unknown kind.
    """
    if kind not in _OF_QKV:
        raise ArgumentError(f"inputs={quoted(kind)}: allowed are {', '.join(_OF_QKV)}")
    p, lens_q, lens_k = problem, options.get("lens_q"), options.get("lens_k")
    attention, sequences = attention_of(p, options), sequences_of(p, options)
    made = make_inputs(InputSpec.of(p, attention, _OF_QKV[kind], seed, options.get("sinks")))
    rng = np.random.default_rng([seed, 1])
    with np.errstate(over="ignore"):
        do = rng.standard_normal((*made.q.shape[:-1], p.d_v), dtype=np.float32)
        if kind == "large_do":
            do *= np.float32(LARGE_DO[p.dtype])
        do = do.astype(made.q.dtype)
    drawn = {"do": do, "q": made.q, "k": made.k, "v": made.v}
    if options.get("spare"):
        drawn = {name: _longer(array, options["spare"]) for name, array in drawn.items()}
    if kind == "nonfinite" and do.size:
        drawn["do"][tuple(rng.integers(do.shape))] = rng.choice([math.nan, math.inf])
    if kind == "neighbours":
        _spoil_neighbours(drawn, sequences, rng)
    if made.sinks is not None:
        drawn["sinks"] = made.sinks
    more = None
    if options.get("more_keys"):
        more_k, more_v = (
            rng.standard_normal((1, options["more_keys"], p.heads_k, d), dtype=np.float32)
            for d in (p.d, p.d_v)
        )
        more = more_k.astype(do.dtype), more_v.astype(do.dtype)
    exact_o, exact_lse = _forward(drawn, attention, sequences, more, on_gpu)
    with np.errstate(over="ignore", invalid="ignore"):
        drawn |= {"o": exact_o.astype(do.dtype), "lse": exact_lse.astype(np.float32)}
    if options.get("dlse"):
        dlse = rng.standard_normal(exact_lse.shape, dtype=np.float32)
        dlse *= np.float32(LARGE_DO[p.dtype] if kind == "large_do" else 1.0)
        drawn["dlse"] = np.full_like(dlse, math.nan)
        for rows in sequences:
            rows.of_statistics(drawn["dlse"])[:] = rows.of_statistics(dlse)
    _poison(drawn, attention, sequences, keep_do=more is not None)
    if lens_q is not None and lens_k is not None:
        drawn |= {"cu_seqlens_q": offsets(lens_q), "cu_seqlens_k": offsets(lens_k)}
    return BackwardInputs(drawn, attention, sequences, exact_o, exact_lse)


@lru_cache(maxsize=4)
def _drawn_case(
    problem: Problem, kind: str, seed: int, options: tuple[tuple[str, Any], ...], on_gpu: bool
) -> tuple[BackwardInputs, ExpectedOutputs]:
    """Inputs and expected gradients.

    They are cached and read-only, because the configs of a set share them.
    """
    asked = dict(options)
    drawn = draw_backward_inputs(problem, kind, seed, asked, on_gpu)
    expected = compute_gradients(
        drawn.tensors,
        drawn.attention,
        drawn.sequences,
        drawn.exact_o,
        drawn.exact_lse,
        unrounded="grad_dtype" in asked,
        on_gpu=on_gpu,
    ).only([name for name in GRADIENTS if name not in asked.get("unneeded", ())])
    for array in drawn.tensors.values():
        array.flags.writeable = False
    return drawn, expected


def _longer(array: np.ndarray, rows: int) -> np.ndarray:
    """A copy of a packed tensor with ``rows`` more rows at the end."""
    return np.concatenate([array, np.zeros((rows, *array.shape[1:]), array.dtype)])


def _spoil_neighbours(
    drawn: Mapping[str, np.ndarray], sequences: tuple[Rows, ...], rng: np.random.Generator
) -> None:
    """Fills do, q, k and v of some heads of each sequence with NaN or inf. The gradients of the
    other heads must not be affected."""
    heads_k = drawn["k"].shape[-2]
    group = drawn["q"].shape[-2] // heads_k
    for i, rows in enumerate(sequences):
        for head in range(i % 2, heads_k, 2):
            value = rng.choice([math.nan, math.inf, -math.inf])
            for name in ("do", "q"):
                rows.of_queries(drawn[name])[:, head * group : (head + 1) * group] = value
            for name in ("k", "v"):
                rows.of_keys(drawn[name])[:, head] = value


def _poison(
    drawn: Mapping[str, np.ndarray],
    attention: Attention,
    sequences: tuple[Rows, ...],
    keep_do: bool,
) -> None:
    """Writes NaN, inf and the largest numbers to rows that belong to no sequence, and NaN to do in
    rows that see no key. With ``keep_do``, rows that see no key keep their do, because their o is
    not 0."""
    worst = np.array([math.nan, math.inf, float(ml_dtypes.finfo(drawn["q"].dtype).max)])
    outside = {name: np.ones(drawn[name].shape[:-2], bool) for name in ("q", "k")}
    for rows in sequences:
        rows.of_queries(outside["q"])[:] = False
        rows.of_keys(outside["k"])[:] = False
        count = rows.q.stop - rows.q.start, rows.k.stop - rows.k.start
        first, end = attention.visible_keys(np.arange(count[0]), *count)
        if not keep_do:
            rows.of_queries(drawn["do"])[end <= first] = math.nan
    for name, of in (("do", "q"), ("q", "q"), ("o", "q"), ("k", "k"), ("v", "k")):
        count_outside = int(outside[of].sum())
        if count_outside:
            values = worst[np.arange(count_outside) % len(worst)]
            drawn[name][outside[of]] = values[:, None, None]


def _forward(
    inputs: Mapping[str, np.ndarray],
    attention: Attention,
    sequences: tuple[Rows, ...],
    more: tuple[np.ndarray, np.ndarray] | None,
    on_gpu: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Computes o and lse in float64. Both are NaN in rows that belong to no sequence.

    ``more``: more keys and values, (1, keys, heads_k, d), which every row sees.
    """
    q, sinks = inputs["q"], inputs.get("sinks")
    statistics = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    shape = (*q.shape[:-1], inputs["v"].shape[-1])
    o, lse = np.full(shape, math.nan), np.full(statistics, math.nan)
    own = replace(attention, lens_q=None, lens_k=None)
    for rows in sequences:
        own_q = rows.of_queries(q)[None]
        k, v = (rows.of_keys(inputs[name])[None] for name in "kv")
        found = references_of(own, own_q, k, v, sinks, on_gpu=on_gpu)
        its_o, its_lse = found.o[0], found.lse[0]
        if more is not None:
            all_seen = Attention(attention.scale, softcap=attention.softcap)
            others = references_of(all_seen, own_q, *more, on_gpu=on_gpu)
            with np.errstate(invalid="ignore"):
                both = np.logaddexp(its_lse, others.lse[0])
                shares = [np.exp(part - both).T[..., None] for part in (its_lse, others.lse[0])]
                its_o, its_lse = shares[0] * its_o + shares[1] * others.o[0], both
        rows.of_queries(o)[:], rows.of_statistics(lse)[:] = its_o, its_lse
    return o, lse
