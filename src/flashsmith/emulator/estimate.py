"""How long a problem will take in the emulator, before it runs."""

from __future__ import annotations

from flashsmith.emulator.execute import WAVE_THREADS
from flashsmith.families import KernelConfig, Problem

# Measured on one core of a 2.6 GHz server over tune configs, d 64 and 128, seq 128 to 1024.
_STEP_SECONDS = 1.0e-3
_SECONDS_PER_SCORE = 25e-9
_SECONDS_PER_SCORE_AND_COLUMN = 0.6e-9
# Translating takes its time over the same lines as compiling: 0.18 to 0.32 ms for each unit of the
# compiler's cost, over 27 kernels.
_TRANSLATION_SECONDS_PER_COST = 0.3e-3


def estimate_seconds(cfg: KernelConfig, problem: Problem) -> float:
    """Expected seconds of one launch on the host, checks off, within a factor of about two.

    The first term is paid once a kernel; the second is NumPy's cost per call, once for every KV
    block of every wave of CTAs; the third grows with the scores (seq_q x seq_k of every head) and
    dominates from about seq 512 on. A causal mask leaves half of both out.
    """
    ctas = problem.batch * problem.heads_q * -(-problem.seq_q // cfg.B_r)
    waves = -(-ctas // max(1, WAVE_THREADS // cfg.n_threads))
    steps = waves * -(-problem.seq_k // cfg.B_c)
    scores = problem.batch * problem.heads_q * problem.seq_q * problem.seq_k
    per_score = _SECONDS_PER_SCORE + _SECONDS_PER_SCORE_AND_COLUMN * cfg.d_head
    seconds = steps * _STEP_SECONDS + scores * per_score
    if problem.semantics.mask == "causal":
        seconds /= 2
    return _TRANSLATION_SECONDS_PER_COST * cfg.family.compile_cost(cfg) + seconds
