"""Verdicts of proofs and of benchmarks on outputs that are right, slightly wrong or NaN, as words
and figures; recorded_verdicts.json has those of an earlier version.

    python tests/verify/recorded_verdicts.py    # records them
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmark"))

from stand_ins import HostMemory

from flashsmith.benchmark import workload as workload_module
from flashsmith.benchmark.workload import workload_of
from flashsmith.families import FAMILIES, Problem
from flashsmith.verify import Comparison, compute_references, reference_of
from flashsmith.verify.proof_inputs import default_scale

FILE = Path(__file__).with_name("recorded_verdicts.json")
PROBLEMS = (
    "b2 s96 h4 d32 fp16",
    "b3 s40:70 h2 d32 fp16 causal",
    "b3 s70:40 h2 d64 bf16 causal",
    "b3 s50 h4:1 d32 bf16 causal packed",
    "b2 s40:70 h2 d64 bf16 window softcap",
    "b2 s50 h2 d64 fp16 window softcap packed",
    "b2 s40 h2 d64 fp16 partial",
    "b2 s96 h4:2 d32 bf16 causal backward",
    "b2 s50 h2 d64 fp16 window softcap packed backward",
    "b3 s70:40 h2 d64 fp16 causal backward",
    "b3 s1:70 h4:2 d64 fp16 decode",
    "b2 s5:33 h4:1 d64 fp16 causal decode page8",
    "b2 s3:40 h2 d128 bf16 causal softcap packed decode page1",
    "b2 s64:3 h2 d64 bf16 merge",
)
Outputs = dict[str, np.ndarray]


def damaged(right: Mapping[str, np.ndarray]) -> Iterator[tuple[str, Outputs]]:
    """Outputs by name: right, a little off within the bounds and beyond, and spoilt at a place."""
    yield "right", dict(right)
    for what, share in (("1e-4 off", 1.0001), ("2% off", 1.02)):
        yield what, {name: scaled(array, share) for name, array in right.items()}
    for name, array in right.items():
        if array.dtype.kind in "iu":
            continue
        for at, place in (("first", 0), ("middle", array.size // 2), ("last", -1)):
            for what, value in (("NaN", np.nan), ("inf", np.inf), ("3", 3.0), ("0", 0.0)):
                wrong = array.copy()
                wrong.reshape(-1)[place] = value
                yield f"{what} at the {at} of {name}", {**right, name: wrong}


def scaled(array: np.ndarray, share: float) -> np.ndarray:
    if array.dtype.kind in "iu":
        return array
    return (array.astype(np.float32) * np.float32(share)).astype(array.dtype)


def in_words(found: Comparison) -> str:
    """The verdict without where the first mismatch is, figures to three digits."""
    statistics = [f"{it:.3g}" for it in (found.lse_error, found.row_max_error) if it is not None]
    figures = found.max_error, found.bound, found.rel_l2, found.rel_l2_bound
    return "; ".join(
        [
            "right" if found.ok else " and ".join(found.reasons),
            " ".join(f"{it:.3g}" for it in figures),
            *statistics,
            f"{found.mismatches} of {found.outputs}",
        ]
    )


# ---- proofs ----


def proofs(text: str) -> Iterator[tuple[str, str]]:
    """The verdicts of a proof of a problem."""
    problem = Problem.parse(text)
    family = next(it for it in FAMILIES.values() if it.operation == problem.operation)
    config = family.proof_configs(problem.dtype, problem.d)[0]
    reference = reference_of(problem.computed)
    options = reference.options(problem, seed=1)
    case = reference.case(config, problem, kind=reference.kinds[0], seed=1, options=options)
    expected = case.expected
    if hasattr(expected, "references"):
        found = expected.references
        right = {"o": found.same_precision, "lse": found.lse.astype(np.float32)}
        for name in ("k_cache", "v_cache"):
            if getattr(expected, name, None) is not None:
                right[name] = getattr(expected, name)
    else:
        right = dict(expected.rounded)
    for what, outputs in damaged(right):
        yield what, in_words(reference.compare(config, case, outputs))


# ---- benchmarks ----


def attend(q: Any, k: Any, v: Any, *, causal: bool = False, window: Any = (None, None),
           softcap: float = 0.0, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
           **others: Any) -> Any:  # fmt: skip
    """attention() by the reference."""
    lens = {}
    if cu_seqlens_q is not None:
        lens = {"lens_q": tuple(np.diff(cu_seqlens_q)), "lens_k": tuple(np.diff(cu_seqlens_k))}
    scale = default_scale(q.shape[-1])
    found = compute_references(
        q, k, v, scale, causal=causal, window=window, softcap=softcap, **lens
    )
    return found.same_precision, found.lse.astype(np.float32)


def benchmarks(text: str) -> Iterator[tuple[str, str]]:
    """The verdicts of a benchmark of a problem."""
    problem = Problem.parse(text)
    before, workload_module.attention = workload_module.attention, attend
    try:
        workload: Any = workload_of(problem, 1, HostMemory())
    finally:
        workload_module.attention = before
    right = right_output(problem, workload)
    for what, outputs in damaged(right):
        checked = outputs if isinstance(workload.output, Mapping) else outputs["o"]
        yield what, in_words(workload.check(checked))
    yield "few rows", in_words(workload.check(right if len(right) > 1 else right["o"], scores=600))


def right_output(problem: Problem, workload: Any) -> Outputs:
    """By the operation's own reference, of the whole problem."""
    p, reference = problem, reference_of(problem.computed)
    if problem.operation == "merge":
        return dict(workload._case.expected.rounded)
    lens: dict[str, Any] = {}
    if p.operation == "decode":
        lens = {"lens_k": (p.seq_k,) * p.batch}
        if workload.packed:
            lens["lens_q"] = (p.seq_q,) * p.batch
        names = ["q", "k_cache", "v_cache", "cache_lens", "page_table", "cu_seqlens_q"]
    elif p.operation == "backward":
        names = ["do", "q", "k", "v", "o", "lse"]
    else:
        return {"o": attend(workload.q, workload.k, workload.v, **workload.options)[0]}
    if workload.packed:
        lens |= {"lens_q": (p.seq_q,) * p.batch, "lens_k": (p.seq_k,) * p.batch}
    inputs = {name: it for name in names if (it := getattr(workload, name)) is not None}
    rounded = reference.expected(p, inputs, reference.options(p, **lens)).rounded
    return {name: it for name, it in rounded.items() if name != "lse" or p.operation != "decode"}


def verdicts(text: str) -> dict[str, str]:
    """All of a problem, by what is wrong with the outputs."""
    makers: tuple[tuple[str, Callable[[str], Iterator[tuple[str, str]]]], ...] = (
        ("proof", proofs),
        ("benchmark", benchmarks),
    )
    return {f"{name}: {what}": said for name, make in makers for what, said in make(text)}


if __name__ == "__main__":
    FILE.write_text(json.dumps({text: verdicts(text) for text in PROBLEMS}, indent=0) + "\n")
