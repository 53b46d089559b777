"""Problems of the backward pass with inputs that a kernel must cope with, and their verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flashsmith.families import KernelConfig, Problem
from flashsmith.verify import ProofCase, compute_references, reference_of
from flashsmith.verify.backward_reference import sequences_of
from flashsmith.verify.problem_options import attention_of
from ptxlab.interface import Observer

#: The case with other inputs, and which elements of gradients are not to be checked.
Spoiled = tuple[ProofCase, dict[str, np.ndarray]]


@dataclass(frozen=True)
class Asked:
    """A problem without its dtype, the kind of its inputs, and options of the reference."""

    sizes: str
    inputs: str = "random"
    options: Mapping[str, Any] = field(default_factory=dict)
    schedule_seed: int | None = None
    #: A change of the inputs drawn, by its name among SPOILERS.
    spoiled: str = ""

    def problem(self, cfg: KernelConfig) -> Problem:
        """The problem, with the config's dtype."""
        return Problem.parse(f"{self.sizes} {cfg.dtype.name.lower()} backward")

    def case(self, cfg: KernelConfig) -> Spoiled:
        """The inputs and what is expected of the config's kernel."""
        problem = self.problem(cfg)
        reference = reference_of(problem.computed)
        options = reference.options(problem, **self.options)
        case = reference.case(cfg, problem, kind=self.inputs, seed=0, options=options)
        return SPOILERS[self.spoiled](case)

    def reasons(
        self,
        cfg: KernelConfig,
        observers: Sequence[Observer] = (),
        *,
        spoiled: Spoiled | None = None,
        **how: Any,
    ) -> tuple[str, ...]:
        """Why the gradients of the config's kernel in the emulator are wrong. ``spoiled``: the
        case, if it was made before; ``how`` are run_operation's keywords."""
        case, judged_not = spoiled or self.case(cfg)
        reference = reference_of(case.problem.computed)
        result = reference.run(
            cfg,
            case,
            lambda array: array,
            emulate=True,
            observers=observers,
            schedule_seed=self.schedule_seed,
            **how,
        )
        outputs = dict(result.outputs)
        for name, mask in judged_not.items():
            outputs[name] = np.where(mask, case.expected.exact[name], outputs[name])
        return reference.compare(cfg, case, outputs).reasons


def _as_drawn(case: ProofCase) -> Spoiled:
    return case, {}


def _unseeing_queries(case: ProofCase) -> Spoiled:
    """NaN in q where a row sees no key: no gradient shows it."""
    q, unseeing = case.inputs["q"].copy(), _rows(case, lambda first, end: first == end)
    q[unseeing] = np.nan
    return replace(case, inputs={**case.inputs, "q": q}), {}


def _last_key(case: ProofCase) -> Spoiled:
    """NaN in every sequence's last key: rows that see no key have a dq of 0 all the same."""
    k = case.inputs["k"].copy()
    for rows in sequences_of(case.problem, case.options):
        rows.of_keys(k)[-1:] = np.nan
    seeing = _rows(case, lambda first, end: first < end)
    exact = case.expected.exact
    masks = {name: np.ones(array.shape, bool) for name, array in exact.items() if name != "dq"}
    masks["dq"] = np.broadcast_to(seeing[..., None, None], exact["dq"].shape)
    return replace(case, inputs={**case.inputs, "k": k}), masks


def _last_value(case: ProofCase) -> Spoiled:
    """NaN in every sequence's last value: but for dq of the rows that see it, and dk of its key,
    nothing changes."""
    v, exact = case.inputs["v"].copy(), case.expected.exact
    last = np.zeros(v.shape[:-2], bool)
    seeing = np.zeros(case.inputs["q"].shape[:-2], bool)
    for rows in sequences_of(case.problem, case.options):
        rows.of_keys(v)[-1:] = np.nan
        rows.of_keys(last)[-1:] = True
        count = rows.q.stop - rows.q.start, rows.k.stop - rows.k.start
        attention = attention_of(case.problem, case.options)
        _, end = attention.visible_keys(np.arange(count[0]), *count)
        rows.of_queries(seeing)[:] = end == count[1]
    masks = {
        "dq": np.broadcast_to(seeing[..., None, None], exact["dq"].shape),
        "dk": np.broadcast_to(last[..., None, None], exact["dk"].shape),
    }
    return replace(case, inputs={**case.inputs, "v": v}), masks


def _low_scores(case: ProofCase) -> Spoiled:
    """All scores below -100: keys that are not there, with scores of 0, have an infinite P unless
    they are masked."""
    q, k = (np.abs(case.inputs[name]) + case.inputs[name].dtype.type(0.5) for name in "qk")
    changed = _recomputed(case, q=q, k=-k)
    lse = changed.inputs["lse"]
    assert lse[np.isfinite(lse)].max() < -100
    return changed, {}


def _no_sink(case: ProofCase) -> Spoiled:
    """A sink of -inf for the first head, which then has rows with an lse of -inf."""
    sinks = case.inputs["sinks"].copy()
    sinks[0] = -np.inf
    changed = _recomputed(case, sinks=sinks)
    assert np.isneginf(changed.inputs["lse"]).any()
    return changed, {}


def _recomputed(case: ProofCase, **changes: np.ndarray) -> ProofCase:
    """The case with other inputs, and o, lse and the expected gradients that belong to these."""
    inputs = {**case.inputs, **changes}
    attention = attention_of(case.problem, case.options)
    o, lse = inputs["o"].copy(), inputs["lse"].copy()
    for rows in sequences_of(case.problem, case.options):
        found = compute_references(
            rows.of_queries(inputs["q"])[None],
            *(rows.of_keys(inputs[name])[None] for name in "kv"),
            attention.scale,
            causal=attention.causal,
            window=attention.window,
            softcap=attention.softcap,
            sinks=inputs.get("sinks"),
        )
        rows.of_queries(o)[:], rows.of_statistics(lse)[:] = found.o[0], found.lse[0]
    inputs |= {"o": o, "lse": lse}
    expected = reference_of(case.problem.computed).expected(case.problem, inputs, case.options)
    return replace(case, inputs=inputs, expected=expected)


def _rows(case: ProofCase, which: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """The rows of q that ``which`` selects by the first key that they see and the end of those."""
    chosen = np.zeros(case.inputs["q"].shape[:-2], bool)
    attention = attention_of(case.problem, case.options)
    for rows in sequences_of(case.problem, case.options):
        count = rows.q.stop - rows.q.start, rows.k.stop - rows.k.start
        seen = attention.visible_keys(np.arange(count[0]), *count)
        rows.of_queries(chosen)[:] = which(*seen)
    assert chosen.any()
    return chosen


def _no_do(case: ProofCase) -> Spoiled:
    """do of 0: what is left are the gradients of lse, which dsinks must have to its last bits."""
    inputs = {**case.inputs, "do": np.zeros_like(case.inputs["do"])}
    expected = reference_of(case.problem.computed).expected(case.problem, inputs, case.options)
    return replace(case, inputs=inputs, expected=expected), {}


SPOILERS: dict[str, Callable[[ProofCase], Spoiled]] = {
    "": _as_drawn,
    "unseeing queries": _unseeing_queries,
    "last key": _last_key,
    "last value": _last_value,
    "low scores": _low_scores,
    "no sink": _no_sink,
    "no do": _no_do,
}
