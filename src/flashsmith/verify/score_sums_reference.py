"""ScoreSumsReference: the reference of the operation `score_sums`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashsmith.families import Problem
from flashsmith.operations.score_sums import TILE, sums_shape
from flashsmith.verify.attention_semantics import Attention
from flashsmith.verify.backward_reference import BackwardReference, sequences_of
from flashsmith.verify.gradients import Rows
from flashsmith.verify.operation_reference import OperationReference
from flashsmith.verify.problem_options import attention_of
from flashsmith.verify.tolerance import ExpectedOutputs


class ScoreSumsReference(OperationReference):
    """Sums by rows of the inputs of a backward pass."""

    def draw(self, problem: Problem, kind: str, seed: int) -> dict[str, np.ndarray]:
        backward = problem.of_operation("backward")
        return BackwardReference().draw(backward, kind, seed) | {"sums": _empty(problem)}

    def options(self, problem: Problem, *, seed: int = 0, **asked: Any) -> dict[str, Any]:
        return BackwardReference().options(problem.of_operation("backward"), seed=seed, **asked)

    def expected(
        self, problem: Problem, inputs: Mapping[str, np.ndarray], options: Mapping[str, Any]
    ) -> ExpectedOutputs:
        attention, sequences = attention_of(problem, options), sequences_of(problem, options)
        found = [
            expected_sums("rows", _empty(problem).shape, inputs, attention, sequences, precision)
            for precision in (np.float64, np.float32)
        ]
        return ExpectedOutputs({"sums": found[0]}, {"sums": found[1]})


def _empty(problem: Problem) -> np.ndarray:
    shape = sums_shape("rows", problem.batch, problem.heads_q, problem.seq_q, problem.seq_k)
    return np.zeros(shape, np.float32)


def expected_sums(
    axis: str,
    shape: tuple[int, ...],
    inputs: Mapping[str, np.ndarray],
    attention: Attention,
    sequences: tuple[Rows, ...] | list[Rows],
    precision: Any = np.float64,
) -> np.ndarray:
    """The sums along an axis, in the given shape and computed in the given precision."""
    total = np.zeros(shape, precision)
    for number, rows in enumerate(sequences):
        values = score_gradients(inputs, attention, number, rows, precision)
        own = total[number if shape[0] > 1 else 0]
        _, seq_q, seq_k = values.shape
        if axis == "elements":
            parts = values if shape[1] > 1 else values.sum(0, keepdims=True)
            own[:, :seq_q, :seq_k] += parts
        elif axis == "rows":
            own[:, 0, :seq_q] += values.sum(2)
        elif axis == "keys":
            own[:, 0, :seq_k] += values.sum(1)
        else:
            _add_distances(own, values, -(-_longest(sequences) // TILE))
    return total


def _longest(sequences: tuple[Rows, ...] | list[Rows]) -> int:
    return max(rows.q.stop - rows.q.start for rows in sequences)


def _add_distances(total: np.ndarray, values: np.ndarray, q_tiles: int) -> None:
    """Adds values (heads, q, k) to the strips of total (heads, strips, 2 TILE)."""
    _, seq_q, seq_k = values.shape
    q, k = np.arange(seq_q)[:, None], np.arange(seq_k)
    strips = k // TILE - q // TILE + q_tiles - 1
    places = k % TILE - q % TILE + TILE - 1
    for head, of_head in zip(total, values, strict=True):
        np.add.at(head, (strips, places), of_head)


def score_gradients(
    inputs: Mapping[str, np.ndarray],
    attention: Attention,
    number: int,
    rows: Rows,
    precision: Any = np.float64,
) -> np.ndarray:
    """P (dP - D) slope for each query head, query and key of a sequence; 0 for hidden pairs."""
    q, do, o = (_heads_first(rows.of_queries(inputs[it]), precision) for it in ("q", "do", "o"))
    k, v = (_heads_first(rows.of_keys(inputs[it]), precision) for it in ("k", "v"))
    group = q.shape[0] // k.shape[0]
    k, v = (np.repeat(x, group, 0) for x in (k, v))
    lse = rows.of_statistics(inputs["lse"]).astype(precision)[..., None]
    (heads, seq_q, _), seq_k = q.shape, k.shape[1]
    at = {
        "b": np.array(number), "h": np.arange(heads)[:, None, None],
        "q": np.arange(seq_q)[:, None], "k": np.arange(seq_k),
        "seq_q": np.array(seq_q), "seq_k": np.array(seq_k),
    }  # fmt: skip
    with np.errstate(all="ignore"):
        scores, slope = q @ k.swapaxes(1, 2) * precision(attention.scale), None
        if not attention.score.is_plain:
            cap = precision(attention.softcap)
            scores = cap * np.tanh(scores / cap)
            slope = 1 - (scores / cap) ** 2
        bound = attention.program
        if bound is not None and bound.program.score is not None:
            slope = attention.slope_of_program(scores, at, np)
            scores = attention.changed_by_program(scores, at, np)
        values = np.exp(scores - lse) * (do @ v.swapaxes(1, 2) - _row_sums(inputs, rows, do, o))
        values = values if slope is None else values * slope
    first, end = attention.visible_keys(np.arange(seq_q), seq_q, seq_k)
    seen = (np.arange(seq_k) >= first[:, None]) & (np.arange(seq_k) < end[:, None])
    seen = seen & (lse != -np.inf) & (scores != -np.inf)
    shown = attention.seen_by_program(at, np)
    return np.where(seen if shown is None else seen & shown, values, 0).astype(precision)


def _heads_first(array: np.ndarray, precision: Any) -> np.ndarray:
    return np.moveaxis(array.astype(precision), 1, 0)


def _row_sums(
    inputs: Mapping[str, np.ndarray], rows: Rows, do: np.ndarray, o: np.ndarray
) -> np.ndarray:
    sums = np.where(o == 0, 0, do * o).sum(-1)
    if "dlse" in inputs:
        sums = sums - rows.of_statistics(inputs["dlse"])
    return sums[..., None]
