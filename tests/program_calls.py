"""Calls with score and mask functions, and their proof against the references of float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from flashsmith.families import DType, KernelConfig, device_spec
from flashsmith.runtime import run_forward
from flashsmith.runtime.emulation import Observer, all_checks
from flashsmith.semantics.program import SCORE, B, BoundProgram, H, K, Q, program_of
from flashsmith.semantics.typed import FLOAT, INT, Typed, apply, read, typed_symbol, where
from flashsmith.verify.attention_semantics import Attention, Ranges, offsets
from flashsmith.verify.reference import references_of
from flashsmith.verify.tolerance import compare

NUMPY = {DType.FP16: np.dtype(np.float16), DType.BF16: np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class Call:
    """The shapes and options of a call; with lens_q and lens_k its sequences are packed. With
    ranges, the first key and the number of keys of each sequence, it is partial."""

    seq_q: int = 150
    seq_k: int = 201
    batch: int = 2
    heads_q: int = 4
    heads_k: int = 2
    d: int = 56
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    lens_q: tuple[int, ...] | None = None
    lens_k: tuple[int, ...] | None = None
    ranges: Ranges | None = None

    @property
    def sequences(self) -> int:
        return self.batch if self.lens_q is None else len(self.lens_q)

    @property
    def longest(self) -> tuple[int, int]:
        if self.lens_q is None or self.lens_k is None:
            return self.seq_q, self.seq_k
        return max(self.lens_q), max(self.lens_k)


Make = Callable[[Call, np.random.Generator], BoundProgram]


def bound(score: Typed | None, mask: Typed | None, **given: Any) -> BoundProgram:
    """The program of these expressions with tensors and numbers by their names in them."""
    program, reads, numbers = program_of(score, mask)
    return BoundProgram(
        program, tuple(given[name] for name in reads), tuple(given[name] for name in numbers)
    )


# --- programs ------------------------------------------------------------------------------------


def alibi(call: Call, draw: np.random.Generator) -> BoundProgram:
    slopes = draw.uniform(-0.1, 0.4, call.heads_q).astype(np.float32)
    return bound(SCORE + read("slopes", "float32", H) * (K - Q), None, slopes=slopes)


def squared(call: Call, draw: np.random.Generator) -> BoundProgram:
    strength = typed_symbol("strength", FLOAT)
    return bound(SCORE - strength * (Q - K) * (Q - K), None, strength=3e-4)


def capped(call: Call, draw: np.random.Generator) -> BoundProgram:
    cap = typed_symbol("cap", FLOAT)
    return bound(cap * apply("tanh", SCORE / cap), None, cap=2.5)


def documents(call: Call, draw: np.random.Generator) -> BoundProgram:
    """Sorted documents; queries and keys have different ones, so that some rows see no key."""
    q, k = (
        np.sort(draw.integers(0, most, (call.sequences, length)), axis=1).astype(np.int32)
        for most, length in zip((4, 5), call.longest, strict=True)
    )
    q[0, : call.longest[0] // 3] = 7
    same = read("doc_q", "int32", B, Q).equals(read("doc_k", "int32", B, K))
    return bound(None, same, doc_q=q, doc_k=k)


def alibi_in_documents(call: Call, draw: np.random.Generator) -> BoundProgram:
    """Both functions, with strided and 64-bit tensors."""
    wide = np.sort(draw.integers(0, 4, (call.sequences, 2 * max(call.longest))), axis=1)
    slopes = draw.uniform(-0.1, 0.4, 2 * call.heads_q).astype(np.float32)
    doc = wide[:, ::2]
    same = read("doc", "int64", B, Q).equals(read("doc", "int64", B, K))
    score = SCORE + read("slopes", "float32", H) * (K - Q)
    return bound(score, same, doc=doc, slopes=slopes[::2])


def blocks(call: Call, draw: np.random.Generator) -> BoundProgram:
    """A random table of visible blocks of 64 x 128, the same for all sequences and heads: lists
    with absent and full blocks, and rows without any."""
    rows, columns = (-(-n // size) for n, size in zip(call.longest, (64, 128), strict=True))
    table = draw.random((rows, columns)) < 0.5
    table[rows // 2] = False
    sees = read("table", "bool", apply("floor_divide", Q, 64), apply("floor_divide", K, 128))
    return bound(None, sees, table=table)


def widths(call: Call, draw: np.random.Generator) -> BoundProgram:
    """A window of another width in each head."""
    width = draw.integers(1, max(call.longest), call.heads_q).astype(np.int16)
    return bound(None, (read("width", "int16", H) > Q - K) & (K - Q < 9), width=width)


def scattered(call: Call, draw: np.random.Generator) -> BoundProgram:
    """Every block is partial; one number decides which elements are hidden."""
    step = typed_symbol("step", INT)
    return bound(None, apply("remainder", Q * 7 + K * 3, step) < 2, step=5)


def everything(call: Call, draw: np.random.Generator) -> BoundProgram:
    """Visible blocks of 64 x 32 that depend on sequence and head; one head sees some elements only,
    and one row none. So there are full, partial and absent blocks, and rows without keys."""
    tiles = (-(-n // size) for n, size in zip(call.longest, (64, 32), strict=True))
    shape = call.sequences, call.heads_q, *tiles
    table = draw.random(shape) < 0.5
    table[0, 0, 1] = False
    block = read("table", "bool", B, H, apply("floor_divide", Q, 64), apply("floor_divide", K, 32))
    element = apply("remainder", Q + K, 7).equals(0)
    slopes = draw.uniform(-0.1, 0.4, call.heads_q).astype(np.float32)
    mask = block & ((H >= 1) | apply("not", element)) & apply("not_equal", Q, 77)
    return bound(SCORE + read("slopes", "float32", H) * (K - Q), mask, table=table, slopes=slopes)


def minus_infinity(call: Call, draw: np.random.Generator) -> BoundProgram:
    """A score function that hides keys by -inf, whole rows among them."""
    table = np.where(draw.random(call.longest) < 0.3, -np.inf, 0).astype(np.float32)
    table[1] = -np.inf
    return bound(SCORE + read("bias", "float32", Q, K), None, bias=table)


def distances(call: Call, draw: np.random.Generator) -> BoundProgram:
    """A table by head and distance that has all distances of queries and keys that exist."""
    reach, length = call.longest[0] - 1, sum(call.longest) - 1
    table = draw.standard_normal((call.heads_q, length)).astype(np.float32)
    bias = read("table", "float32", H, K - Q + typed_symbol("reach", INT))
    return bound(SCORE + bias, None, table=table, reach=reach)


def near(call: Call, draw: np.random.Generator) -> BoundProgram:
    """Distances beyond 40 are clamped: some tiles have no such distance, some only such."""
    last = typed_symbol("last", INT)
    counted = K - Q + 40
    above = where(last < counted, last, counted)
    table = draw.standard_normal((call.heads_q, 81)).astype(np.float16)
    bias = read("table", "float16", H, where(above < 0, 0, above))
    return bound(SCORE + bias, None, table=table, last=80)


def from_the_end(call: Call, draw: np.random.Generator) -> BoundProgram:
    """A table by q - k whose negative indices count from its end, and that is too short."""
    table = draw.standard_normal(130).astype(np.float32)
    return bound(SCORE + read("table", "float32", Q - K - 3), None, table=table)


def strided(call: Call, draw: np.random.Generator) -> BoundProgram:
    """Two tables, one with strides, whose indices run in opposite directions."""
    tables = draw.standard_normal((2, 4 * max(call.longest))).astype(np.float32)
    reach = max(call.longest)
    one = read("one", "float32", K - Q + reach)
    other = read("other", "float32", apply("minimum", Q - K, 60) + reach)
    return bound(SCORE + one * other, None, one=tables[0], other=tables[1, ::2])


def by_key(call: Call, draw: np.random.Generator) -> BoundProgram:
    """A value of each key, added in one head and a limit of scores in the others."""
    table = draw.standard_normal((call.sequences, call.longest[1])).astype(np.float32)
    value = read("table", "float32", B, K)
    changed = where(H.equals(1), SCORE + value, apply("minimum", SCORE, value))
    return bound(changed, None, table=table)


# Scores that read tensors at indices that run with the key.
TABLES: dict[str, Make] = {
    it.__name__: it for it in (distances, near, from_the_end, strided, by_key)
}
PROGRAMS: dict[str, Make] = {
    it.__name__: it
    for it in (
        *(alibi, squared, capped, documents, alibi_in_documents),
        *(blocks, widths, scattered, everything, minus_infinity),
    )
}


# --- proof ---------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    sinks: np.ndarray | None


def draw_inputs(call: Call, dtype: DType, draw: np.random.Generator, *, sinks: bool) -> Inputs:
    if call.lens_q is None or call.lens_k is None:
        q, k = (call.batch, call.seq_q), (call.batch, call.seq_k)
    else:
        q, k = (sum(call.lens_q),), (sum(call.lens_k),)
    shapes = (*q, call.heads_q, call.d), (*k, call.heads_k, call.d), (*k, call.heads_k, call.d)
    tensors = (draw.standard_normal(shape).astype(NUMPY[dtype]) for shape in shapes)
    logits = draw.standard_normal(call.heads_q).astype(np.float32) if sinks else None
    return Inputs(*tensors, logits)


def wrong(
    cfg: KernelConfig,
    call: Call,
    made: BoundProgram,
    *,
    seed: int = 0,
    sinks: bool = False,
    checks: bool = True,
    observers: Sequence[Observer] = (),
    arch: int = 90,
    sm_count: int | None = None,
) -> str:
    """What is wrong with the kernel's outputs, which are NaN before; '' if nothing is."""
    draw = np.random.default_rng(seed + 1000)
    q, k, v, logits = draw_inputs(call, cfg.dtype, draw, sinks=sinks)
    packed = {}
    if call.lens_q is not None and call.lens_k is not None:
        packed = {"cu_seqlens_q": offsets(call.lens_q), "cu_seqlens_k": offsets(call.lens_k)}
    part = {}
    if call.ranges is not None:
        begin, count = np.array(call.ranges, np.int32).T
        part = {"partial": True, "k_begin": begin.copy(), "seqused_k": count.copy()}
    options = {"causal": call.causal, "window": call.window, "softcap": call.softcap}
    watching = [*(all_checks() if checks else ()), *observers]
    device = device_spec(arch)
    result = run_forward(
        *(cfg, q, k, v),
        program=made,
        return_lse=True,
        return_row_max=call.ranges is None,
        sinks=logits,
        poisoned=True,
        arch=device if sm_count is None else replace(device, sm_count=sm_count),
        observers=watching,
        **options,
        **packed,
        **part,
    )
    if result.emulation is not None and result.emulation.findings:
        return str(result.emulation.findings[0])
    attention = Attention(
        call.d**-0.5,
        **options,
        lens_q=call.lens_q,
        lens_k=call.lens_k,
        ranges=call.ranges,
        program=made,
    )
    expected = references_of(attention, q, k, v, logits)
    found = compare(cfg, result.o, result.lse, expected, row_max=result.row_max, lens_q=call.lens_q)
    return "; ".join(map(str, found.reasons))
