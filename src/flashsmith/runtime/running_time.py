"""Estimates how long a problem takes in the emulator, and refuses one that takes too long."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flashsmith.errors import EmulationTooLongError
from flashsmith.families import KernelConfig, Problem
from flashsmith.runtime.request import Request

# Above this estimate the caller must pass emulate=True.
LONGEST_UNASKED_SECONDS = 60.0
# These were measured on one core of a 2.6 GHz server, for the configs of the set tune, d 64 and
# 128, and lengths from 128 to 1024.
_STEP_SECONDS = 1.0e-3
_SECONDS_PER_SCORE = 25e-9
_SECONDS_PER_SCORE_AND_COLUMN = 0.6e-9
# For kernels that do not have a single loop over keys: seconds per element of q and k, and per
# FLOP.
_SECONDS_PER_ELEMENT = 1e-7
_SECONDS_PER_FLOP = 2.5e-10


def estimate_seconds(cfg: KernelConfig, problem: Problem) -> float:
    """Estimates the seconds that one launch takes on the host without checks, within a factor of
    about two.

    The first term is the translation, paid once per kernel. The second term is NumPy's cost per
    call, paid for every KV block of every wave of CTAs. The third term grows with the number of
    scores (seq_q x seq_k per head) and dominates from about seq 512. A causal mask halves the
    second and third terms.

    Kernels that do not consist of one loop over keys, such as the backward pass's, are estimated
    from the number of elements of q and k and from the problem's FLOP at a fixed rate.
    """
    loop = cfg.family.loop_tiles(cfg)
    if loop is None:
        rows = problem.seq_q * problem.heads_q + problem.seq_k * problem.heads_k
        elements = problem.batch * rows * max(problem.d, problem.d_v)
        seconds = elements * _SECONDS_PER_ELEMENT + problem.attn_flop() * _SECONDS_PER_FLOP
        return cfg.family.translation_seconds + seconds
    from flashsmith.runtime.emulation import WAVE_THREADS

    B_r, B_c = loop
    ctas = problem.batch * problem.heads_q * -(-problem.seq_q // B_r)
    waves = -(-ctas // max(1, WAVE_THREADS // cfg.n_threads))
    steps = waves * -(-problem.seq_k // B_c)
    scores = problem.batch * problem.heads_q * problem.seq_q * problem.seq_k
    per_score = _SECONDS_PER_SCORE + _SECONDS_PER_SCORE_AND_COLUMN * (cfg.d_head + cfg.d_head_v) / 2
    seconds = steps * _STEP_SECONDS + scores * per_score
    return cfg.family.translation_seconds + (
        seconds / 2 if problem.semantics.key_mask.is_triangular else seconds
    )


def check_estimate(request: Request, cfg: KernelConfig, *following: KernelConfig) -> None:
    """Raises EmulationTooLongError when the estimated emulation time is above 60 s. The estimate
    includes the request's kernel and the kernels of ``following`` operations on the same
    problem."""
    packed = request.problem.semantics.packed
    estimated = _as_one_sequence(request) if packed else request.problem
    seconds = sum(
        estimate_seconds(one, estimated.of_operation(one.family.operation))
        for one in (cfg, *following)
    )
    problem = request.problem.of_operation(cfg.family.operation)
    check_seconds(cfg, problem, seconds)


def check_seconds(cfg: KernelConfig, problem: Problem, seconds: float) -> None:
    """Raises EmulationTooLongError when the estimated time is above 60 s."""
    if seconds > LONGEST_UNASKED_SECONDS:
        raise EmulationTooLongError(
            f"emulating {problem} with {cfg} is estimated to take {seconds:.0f} s, above "
            f"{LONGEST_UNASKED_SECONDS:.0f} s; pass emulate=True to run it anyway, give a "
            "smaller problem, or move the tensors to a GPU"
        )


def _as_one_sequence(request: Request) -> Problem:
    """Returns one dense problem whose numbers of rows and scores are the totals of all packed
    sequences."""
    views, p = request.views, request.problem
    lengths = [
        np.diff(view.framework.as_numpy(view.source).astype(np.int64)).clip(0, longest)
        for view, longest in ((views["cu_seqlens_q"], p.seq_q), (views["cu_seqlens_k"], p.seq_k))
    ]
    rows, scores = views["q"].shape[0], int((lengths[0] * lengths[1]).sum())
    return replace(request.problem, batch=1, seq_q=rows, seq_k=-(-scores // max(1, rows)))
