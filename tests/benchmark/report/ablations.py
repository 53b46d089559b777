"""Ablations that no GPU was needed for: two steps, wrong ones and timed ones."""

from __future__ import annotations

from dataclasses import replace

from flashsmith.benchmark.progression import Ablation, Step, StepTime

PLAIN = Step(
    config="(FP16, 128, 64, 64, 4): async+load_0_0_0_tiles",
    family="mma_sync",
    problems=(),
    registers=170,
    spill_store_bytes=0,
    spill_load_bytes=0,
    smem_bytes=49152,
    ctas_per_sm=2,
    instructions={"float": 4000, "mma": 2048, "integer": 900, "ldmatrix": 512, "move": 80},
    conflicts={"ldmatrix": 8.0, "copy st": 1.0, "O st": None},
    time=None,
)
SWIZZLED = replace(
    PLAIN,
    config="(FP16, 128, 64, 64, 4): async+swizzled+load_0_0_0_tiles",
    registers=174,
    instructions={"float": 4000, "mma": 2048, "integer": 1100, "ldmatrix": 512, "move": 60},
    conflicts={"ldmatrix": 1.0, "copy st": 1.0, "O st": None},
)
ABLATION = Ablation(
    arch="sm_90",
    device="NVIDIA H200",
    counted="batch 1, seq 256, heads 2",
    timed=None,
    peer="",
    peer_note="no times",
    protocol="",
    environment={},
    steps=(PLAIN, SWIZZLED),
)


def timed_step(step: Step, ms: float, peer_ms: float | None = 6.0) -> Step:
    return replace(step, time=StepTime(ms, ms * 0.99, 0.01, 2000.0 / ms, peer_ms))


TIMED = replace(
    ABLATION,
    timed="b16 s4096 h16 d128 fp16",
    peer="FA2",
    peer_note="",
    protocol="interleaved",
    environment={"gpu": "NVIDIA H200", "arch": 90},
    steps=(timed_step(PLAIN, 39.0), timed_step(SWIZZLED, 8.0)),
)
