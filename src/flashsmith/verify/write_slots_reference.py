"""WriteSlotsReference: the reference of the operation `write_slots`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashsmith.families import Problem
from flashsmith.operations.write_slots import WRITE_SLOTS
from flashsmith.runtime.frameworks.base import NUMPY_DTYPES
from flashsmith.verify.operation_reference import OperationReference
from flashsmith.verify.stored_rows import TYPICAL_SCALES, scales_of, stored
from flashsmith.verify.tolerance import ExpectedOutputs

# The share of rows that have slot -1 and are not written.
_SKIPPED_SHARE = 0.1
# How many rows k and v have beyond the slots; they are not read.
_MORE_ROWS = 3


class WriteSlotsReference(OperationReference):
    """Rows for distinct slots in random order, some of which are skipped, and caches that already
    have contents."""

    def draw(self, problem: Problem, kind: str, seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        sizes = WRITE_SLOTS.sizes(problem)
        count, slots = sizes["slot_count"], sizes["blocks"] * sizes["slots"]
        blocks = sizes["blocks"], sizes["slots"]
        of_k, of_v = ((problem.heads_k, d) for d in (problem.d, problem.d_v))
        shapes = {
            "k": (count + _MORE_ROWS, *of_k),
            "v": (count + _MORE_ROWS, *of_v),
            "k_cache": (*blocks, *of_k),
            "v_cache": (*blocks, *of_v),
        }
        dtype = NUMPY_DTYPES[problem.dtype.numpy_name]
        drawn = {
            name: rng.standard_normal(shape, dtype=np.float32).astype(dtype)
            for name, shape in shapes.items()
        }
        scales = scales_of(problem, {})
        for name, scale in zip(("k_cache", "v_cache"), scales, strict=True):
            drawn[name] = stored(drawn[name], scale, problem.cache_format)
        mapping = rng.permutation(slots)[:count].astype(np.int64)
        mapping[rng.random(count) < _SKIPPED_SHARE] = -1
        return {**drawn, "slot_mapping": mapping}

    def options(self, problem: Problem, *, seed: int = 0, **asked: Any) -> dict[str, Any]:
        return super().options(problem, seed=seed, **asked) | (
            TYPICAL_SCALES if problem.cache else {}
        )

    def expected(
        self, problem: Problem, inputs: Mapping[str, np.ndarray], options: Mapping[str, Any]
    ) -> ExpectedOutputs:
        written = {name: inputs[name].copy() for name in ("k_cache", "v_cache")}
        scales = dict(zip("kv", scales_of(problem, options), strict=True))
        for name, source in (("k_cache", "k"), ("v_cache", "v")):
            cache = written[name]
            slots = cache.shape[1]
            rows = stored(inputs[source], scales[source], problem.cache_format)
            for row, slot in enumerate(inputs["slot_mapping"]):
                if 0 <= slot < cache.shape[0] * slots:
                    cache[slot // slots, slot % slots] = rows[row]
        exact = {name: it.astype(np.float64) for name, it in written.items()}
        return ExpectedOutputs(exact, written)
