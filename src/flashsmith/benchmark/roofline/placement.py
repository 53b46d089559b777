"""Where a kernel lies below the roofline: its work per byte and exponential, and what that allows.

All bounds are in TFLOP/s of the problem's two products, 4 b h s_q s_k d, halved when causal: the
figure that every table prints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from flashsmith.benchmark.roofline.ceilings import Roofline
from flashsmith.families import Problem, Semantics
from flashsmith.operations import DEFAULT


@dataclass(frozen=True)
class Intensity:
    """FLOP of the products per byte of DRAM and L2 traffic, and per exponential.

    dram: q, k, v and o once each, the least there can be. l2: what the CTAs read and write, each
    its Q block and all of the keys it sees. Of another operation than attention both are all
    tensors once, and exp2 is infinite.
    """

    dram: float
    l2: float
    exp2: float


@dataclass(frozen=True)
class Bound:
    """What one ceiling allows. `ceiling` is its key in the roofline."""

    ceiling: str
    tflops: float


def intensity(problem: Problem, cfg: Any) -> Intensity:
    """The intensities of `cfg`'s kernel on `problem`, which must not be empty."""
    flop = problem.attn_flop()
    if problem.operation != DEFAULT:
        once = flop / problem.computed.bytes(problem)
        return Intensity(dram=once, l2=once, exp2=math.inf)
    q_bytes, k_bytes = _bytes_once(problem)
    all_scores = replace(problem, semantics=Semantics()).attn_flop()
    rows, _ = cfg.family.loop_tiles(cfg) or (problem.seq_q, 0)
    blocks = math.ceil(problem.seq_q / rows)
    group = problem.heads_q // problem.heads_k
    l2 = flop / (q_bytes + group * k_bytes * max(1.0, blocks * flop / all_scores))
    return Intensity(dram=flop / (q_bytes + k_bytes), l2=l2, exp2=4.0 * problem.d)


def _bytes_once(problem: Problem) -> tuple[int, int]:
    """Bytes of q and o together, and of k and v."""
    row = problem.batch * problem.d * problem.dtype.element_size
    return 2 * row * problem.heads_q * problem.seq_q, 2 * row * problem.heads_k * problem.seq_k


def bounds(roofline: Roofline, problem: Problem, cfg: Any) -> tuple[Bound, ...]:
    """What each measured ceiling that concerns the config allows on the problem, tightest first."""
    dtype = problem.dtype.name.lower()
    found = [
        Bound(f"{name}_{dtype}", rate)
        for name in _products_of(cfg)
        if (rate := roofline.rate(f"{name}_{dtype}")) is not None
    ]
    own = intensity(problem, cfg)
    for key, work in (("exp2", own.exp2), ("l2_read", own.l2), ("dram_read", own.dram)):
        rate = roofline.per_second(key)
        if rate is not None and math.isfinite(work):
            found.append(Bound(key, work * rate / 1e12))
    return tuple(sorted(found, key=lambda bound: bound.tflops))


def _products_of(cfg: Any) -> tuple[str, ...]:
    """The ceilings of the instruction that the config's family multiplies with."""
    names: tuple[str, ...] = cfg.family.multiplies_with(cfg)
    return names
