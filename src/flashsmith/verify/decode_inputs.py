"""The inputs for proofs of the operation `decode`: lengths, caches in several layouts, and page
tables."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from flashsmith.families import Problem
from flashsmith.runtime.frameworks.base import NUMPY_DTYPES
from flashsmith.verify.attention_semantics import Lens, offsets, row_slices
from flashsmith.verify.problem_options import attention_of
from flashsmith.verify.proof_inputs import InputSpec, make_inputs
from flashsmith.verify.stored_rows import scales_of, stored

# Kernels split keys at the multiples of a power of two, which is between these two.
_SMALLEST_STEP, _LARGEST_STEP = 16, 4096
# The number of pages that belong to no sequence.
_SPARE_PAGES = 3
# The values of unused entries of the page table.
_UNUSED = (-1, -1, 2**31 - 1, -(2**31))


def queries_of(problem: Problem, options: Mapping[str, Any]) -> Lens:
    """The number of queries of each sequence."""
    found: Lens = options.get("lens_q") or (problem.seq_q,) * problem.batch
    return found


def draw_lengths(problem: Problem, draw: random.Random) -> Lens:
    """Draws the number of keys of each sequence: seq_k for one random sequence, and lengths at
    which errors are likely for the others."""
    longest, steps = problem.seq_k, []
    step = _SMALLEST_STEP
    while step <= min(longest, _LARGEST_STEP):
        steps.append(step)
        step *= 2
    found = [longest] * (problem.batch > 0)
    while len(found) < problem.batch:
        near = draw.choice([0, 0, 1, problem.page, *steps, longest])
        if near in steps:
            near *= draw.randint(1, longest // near)
        beside = near + draw.choice((-1, 0, 1)) if near > 1 else near
        found.append(min(longest, draw.choice((beside, draw.randint(0, longest)))))
    draw.shuffle(found)
    return tuple(found)


def draw_decode_inputs(
    problem: Problem, kind: str, seed: int, options: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Draws the tensors that a kernel reads, keyed by the operation's names for them; caches are
    dense."""
    draw, rng = random.Random(seed), np.random.default_rng([seed, 1])
    lens_q, lens_k = queries_of(problem, options), options["lens_k"]
    append = bool(options.get("append"))
    cache_lens = tuple(k - n * append for n, k in zip(lens_q, lens_k, strict=True))
    attention = replace(attention_of(problem, options), lens_q=lens_q, lens_k=lens_k)
    drawn = make_inputs(InputSpec.of(problem, attention, kind, seed, options.get("sinks")))
    keys, values = (
        [np.ascontiguousarray(x[rows]) for rows in row_slices(lens_k)] for x in (drawn.k, drawn.v)
    )
    slots, most_pages = problem.page or problem.seq_k + options.get("capacity", 0), 0
    blocks = problem.batch
    tensors: dict[str, np.ndarray] = {}
    if problem.page:
        most_pages = -(-problem.seq_k // slots) + options.get("capacity", 0)
        table, blocks = _draw_table(draw, cache_lens, lens_k, slots, most_pages, (keys, values))
        tensors["page_table"] = table
    widths = {"k": problem.d, "v": problem.d_v}
    q = np.ascontiguousarray(drawn.q)
    if not problem.semantics.packed:
        q = q.reshape(problem.batch, problem.seq_q, *q.shape[1:])
    tensors |= {"q": q, "cache_lens": np.array(cache_lens, np.int32)}
    scales = dict(zip("kv", scales_of(problem, options), strict=True))
    for name, content in (("k", keys), ("v", values)):
        dtype = NUMPY_DTYPES[problem.cache_format.numpy_name or problem.dtype.numpy_name]
        of_row = (problem.heads_k, widths[name])
        cache = np.full((blocks, slots, *of_row), np.nan, dtype)
        for sequence, length in enumerate(cache_lens):
            rows = stored(content[sequence][:length], scales[name], problem.cache_format)
            write_keys(cache, tensors.get("page_table"), sequence, 0, rows)
        tensors[f"{name}_cache"] = cache
        if append:
            new = [rows[length:] for rows, length in zip(content, cache_lens, strict=True)]
            rows = np.concatenate(new) if new else np.zeros((0, *of_row), q.dtype)
            tensors[name] = rows.reshape(*q.shape[:-2], *of_row)
    most_dropped = options.get("dropped", 0)
    if most_dropped:
        dropped = np.random.default_rng([seed, 2]).integers(0, most_dropped + 1, problem.batch)
        tensors["kv_offset"] = dropped.astype(np.int32)
    if options.get("rotary"):
        half = options.get("rotary_half") or problem.d // 2
        positions = max(lens_k, default=0) + most_dropped + 1
        angles = rng.uniform(-np.pi, np.pi, (positions, half))
        dtype = NUMPY_DTYPES[options.get("rotary_dtype") or problem.dtype.numpy_name]
        tensors |= {"cos": np.cos(angles).astype(dtype), "sin": np.sin(angles).astype(dtype)}
    if drawn.sinks is not None:
        tensors["sinks"] = drawn.sinks
    if problem.semantics.packed:
        tensors["cu_seqlens_q"] = offsets(lens_q)
    return tensors


def _draw_table(
    draw: random.Random,
    cache_lens: Lens,
    lens_k: Lens,
    page: int,
    most_pages: int,
    contents: tuple[list[np.ndarray], list[np.ndarray]],
) -> tuple[np.ndarray, int]:
    """Draws a page table for sequences of these lengths. Returns the table and the number of pages.

    Some sequences share whole pages at their beginnings; the keys and values to store there are
    made equal.
    """
    batch = len(lens_k)
    used = [-(-keys // page) for keys in lens_k]
    shared = [0] * batch
    for i in range(1, batch):
        most = min(cache_lens[i - 1], cache_lens[i]) // page
        shared[i] = draw.choice((0, draw.randint(0, most), most))
        for content in contents:
            content[i][: shared[i] * page] = content[i - 1][: shared[i] * page]
    blocks = sum(used) - sum(shared) + _SPARE_PAGES
    free = draw.sample(range(blocks), blocks)
    table = np.array(
        [[draw.choice(_UNUSED) for _ in range(most_pages)] for _ in range(batch)], np.int32
    ).reshape(batch, most_pages)
    for i in range(batch):
        table[i, : shared[i]] = table[i - 1, : shared[i]]
        for entry in range(shared[i], used[i]):
            table[i, entry] = free.pop()
    return table, blocks


def write_keys(
    cache: np.ndarray, table: np.ndarray | None, sequence: int, first: int, rows: np.ndarray
) -> None:
    """Writes keys or values of a sequence to its cache, from position ``first`` on."""
    if table is None:
        cache[sequence, first : first + len(rows)] = rows
        return
    at = np.arange(first, first + len(rows))
    cache[table[sequence, at // cache.shape[1]], at % cache.shape[1]] = rows


def read_keys(
    cache: np.ndarray, table: np.ndarray | None, sequence: int, length: int
) -> np.ndarray:
    """Reads a sequence's first ``length`` keys or values from its cache."""
    if table is None:
        return cache[sequence, :length]
    at = np.arange(length)
    return cache[table[sequence, at // cache.shape[1]], at % cache.shape[1]]


def laid_out(
    k_cache: np.ndarray, v_cache: np.ndarray, layout: str
) -> tuple[np.ndarray, np.ndarray]:
    """Copies dense caches to the memory layout ``layout``, with NaN around them.

    With 'heads first', V has smaller strides than K, so that a kernel that wrongly uses K's strides
    for V reads outside V's memory.
    """
    if layout == "interleaved" and k_cache.shape != v_cache.shape:
        both = np.concatenate((k_cache, v_cache), axis=-1)
        return both[..., : k_cache.shape[-1]], both[..., k_cache.shape[-1] :]
    if layout == "interleaved":
        both = np.stack((k_cache, v_cache), axis=1)
        return both[:, 0], both[:, 1]
    if layout == "heads first":
        first = (apart(it.swapaxes(1, 2), gap) for it, gap in ((k_cache, 2), (v_cache, 1)))
        k, v = (it.swapaxes(1, 2) for it in first)
        return k, v
    return k_cache.copy(), v_cache.copy()


def apart(array: np.ndarray, gap: int) -> np.ndarray:
    """A view with the same values inside a larger array of NaN.

    The inner dimensions get ``gap`` more heads or rows, and rows are 16 x ``gap`` bytes further
    apart. The first dimension is not enlarged.
    """
    first, *middle, d = array.shape
    wide = d + 16 // array.itemsize * gap
    whole = np.full((first, *(n + gap for n in middle), wide), np.nan, array.dtype)
    inside = whole[tuple(map(slice, array.shape))]
    inside[:] = array
    return inside
