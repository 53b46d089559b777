"""Rows as a benchmark and a search write them, made up; some of them are meant to hurt."""

from __future__ import annotations

from dataclasses import replace

from flashsmith.benchmark.measurement import Measurement
from flashsmith.benchmark.ncu import ProfileRow
from flashsmith.benchmark.roofline import Ceiling, Roofline
from flashsmith.families import Problem

CONFIG = "(FP16, 128, 128, 64, 4): async+eager+swizzled+load_2_2_2_tiles"
HOSTILE = '<img src="http://example.org/x.png" onerror="alert(1)"> & more'
ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "arch": 90,
    "driver": "580.159.04",
    "cuda": "13.0",
    "torch": "2.11.0+cu130",
    "flashsmith": "0.1.0",
    "revision": "v0.1-2-gabc",
    "python": "3.12.3",
    "time": "2026-11-21T03:00:00+00:00",
}

ROOFLINE = Roofline(
    gpu="NVIDIA H200",
    arch=90,
    sm_count=132,
    time="2026-11-20T00:00:00+00:00",
    environment={},
    ceilings=(
        Ceiling("mma_registers_fp16", "TFLOP/s", 600.0),
        Ceiling("mma_shared_32_rows_fp16", "TFLOP/s", 500.0),
        Ceiling("exp2", "Gop/s", 4000.0),
        Ceiling("l2_read", "TB/s", 9.0),
        Ceiling("dram_read", "TB/s", 4.0),
    ),
)

PROFILED = ProfileRow(
    config=CONFIG,
    family="mma_sync",
    batch=2,
    seq_q=4096,
    seq_k=4096,
    heads_q=16,
    heads_k=16,
    d=128,
    dtype="fp16",
    semantics="plain",
    gpu="NVIDIA H200",
    verdict="pass",
    duration_us=812.5,
    tensor_pct=61.2,
    wavefronts=110,
    wavefronts_ideal=100,
    l2_bytes=10**9,
    dram_read_bytes=10**8,
    dram_write_bytes=10**8,
    stalls="math pipe 1.2, <wait> 0.8",
)


def row(implementation: str = "ours", seq: int = 1024, tflops: float | None = 300.0, **changes):
    """A row of a plain problem; its time follows from its rate."""
    batch, heads, d = changes.get("batch", 16), changes.get("heads_q", 16), changes.get("d", 128)
    flop = 4 * batch * heads * seq * seq * d
    ours = implementation not in ("fa2", "cudnn", "flex", "flash_attn_3")
    facts = {
        "kind": "ours" if ours else "peer",
        "family": "mma_sync" if ours else "",
        "config": (CONFIG if implementation == "ours" else implementation) if ours else "",
        "batch": 16,
        "seq_q": seq,
        "seq_k": seq,
        "heads_q": 16,
        "heads_k": 16,
        "d": 128,
        "dtype": "fp16",
        "semantics": "plain",
        "verdict": "pass",
        "ms": flop / tflops / 1e9 if tflops else None,
        "tflops": tflops,
        "protocol": "interleaved",
        **ENVIRONMENT,
    }
    return Measurement(implementation=implementation, **(facts | changes))


def bench_rows() -> list[Measurement]:
    """Two charts' worth: full and causal, ours and two peers at three lengths, one peer absent."""
    rows = []
    for semantics, ours in (("plain", 340.0), ("causal", 280.0)):
        for step, seq in enumerate((1024, 4096, 8192)):
            options = {"semantics": semantics, "batch": 8 if seq == 8192 else 16}
            rate = ours + 10 * step
            rows += [
                row("ours", seq, rate, spread=0.01, sm_clock_mhz=1600.0, power_w=650.0, **options),
                row("fa2", seq, rate / 1.1, **options),
                row("cudnn", seq, rate * 1.5, **options),
                row("flash_attn_3", seq, None, verdict="absent", note="not installed", **options),
            ]
    return rows


def wrong_row() -> Measurement:
    """A kernel of ours that failed its check, with a name and a reason that are no HTML."""
    return row(HOSTILE, 512, None, verdict="fail", note=f"output is {HOSTILE}")


def search_rows() -> list[Measurement]:
    """A search's ranking over eight configs, one of them wrong and one dropped."""
    rows = []
    for B_r in (64, 128):
        for number, words in enumerate(("load_2_2_2_tiles", "load_2_2_0_tiles+buffer")):
            for B_c in (32, 64):
                config = f"(FP16, 128, {B_r}, {B_c}, 4): async+eager+swizzled+{words}"
                rate = 200.0 + B_r + number + B_c / 10
                rows.append(row(config, 4096, rate, protocol="final"))
                rows.append(row(config, 4096, rate - 50, protocol="rung 1"))
    lost = "(FP16, 128, 128, 128, 4): async+eager+swizzled+load_2_2_2_tiles"
    rows.append(row(lost, 4096, None, verdict="fail", protocol="", note="wrong: o[0]"))
    culled = lost.replace("128, 128, 4", "128, 128, 8")
    rows.append(row(culled, 4096, None, verdict="absent", protocol="", note="culled: spills"))
    return rows


def elsewhere(rows: list[Measurement]) -> list[Measurement]:
    """The same rows from another GPU."""
    return [replace(one, gpu="NVIDIA H100", driver="570.1") for one in rows]


CACHE_CONFIG = "(BF16, 128, 16, 64, 4): decode+stages_3+least_128+parts_2"


def cache_rows() -> list[Measurement]:
    """Over dense caches and pages, ours with either split and cuDNN: 3 TB/s of ours at most."""
    rows = []
    for batch, keys, us in ((1, 1024, 8.0), (8, 1024, 14.0), (8, 8192, 90.0)):
        for page in ("", "+page16"):
            for name, longer in (("ours", 1.0), ("ours_free", 0.9), ("cudnn", 1.25)):
                own = name != "cudnn"
                absent = bool(page) and not own
                ms = None if absent else us * longer / 1e3
                problem = Problem.parse(
                    f"b{batch} s1:{keys} h32:8 d128 bf16 decode{page.replace('+', ' ')}"
                )
                made = row(
                    name, keys, problem.attn_flop() / ms / 1e9 if ms else None, batch=batch,
                    seq_q=1, heads_q=32, heads_k=8, dtype="bf16", semantics=f"decode{page}", ms=ms,
                    verdict="absent" if absent else "pass", note="no pages" if absent else "",
                    protocol="interleaved" + ", in graphs" * (keys == 1024),
                    config=CACHE_CONFIG if own else "",
                    family="mma_sync_decode" if own else "", kind="ours" if own else "peer",
                )  # fmt: skip
                rows.append(made)
    return rows
