"""How long a problem will take in the emulator, before it runs."""

from __future__ import annotations

from flashsmith.configs import FlashForwardKernelConfig, Problem
from flashsmith.emulator.execute import WAVE_THREADS

#: Measured on one core of a 2.6 GHz server over tune and prog-all at seq 128 to 2048, checks off.
TRANSLATION_SECONDS = 0.2
STEP_SECONDS = 1.2e-3
SECONDS_PER_SCORE = 90e-9


def estimate_seconds(cfg: FlashForwardKernelConfig, problem: Problem) -> float:
    """Expected seconds of ``forward`` on the host, checks off, within a factor of about two.

    The first term is paid once a kernel; the second is NumPy's cost per call, once for every KV
    block of every wave of CTAs; the third grows with the scores (seq_q x seq_k of every head), each
    worth 4 d_head FLOP, and dominates from about seq 512 on. A causal mask leaves half of both out.
    """
    ctas = problem.batch * problem.heads_q * -(-problem.seq_q // cfg.B_r)
    waves = -(-ctas // max(1, WAVE_THREADS // (32 * cfg.n_warps)))
    steps = waves * -(-problem.seq_k // cfg.B_c)
    scores = problem.batch * problem.heads_q * problem.seq_q * problem.seq_k
    seconds = steps * STEP_SECONDS + scores * SECONDS_PER_SCORE * cfg.d_head / 128
    return TRANSLATION_SECONDS + (seconds / 2 if problem.semantics.mask == "causal" else seconds)
