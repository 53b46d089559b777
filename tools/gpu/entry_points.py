#!/usr/bin/env python3
"""Measures how long the host takes for calls of sdpa(), FlashAttention's functions and compiled
code, compared with attention(); a CSV row per pair, in microseconds.

    python tools/gpu/entry_points.py rows.csv --check
    python tools/gpu/entry_points.py rows.csv --pretend    # no GPU: launches do nothing

The two calls of a pair alternate in short bursts, each followed by a synchronisation. `ratio` is
that of their fastest tenths, since other work on the machine moves medians. With --check, the exit
status is 1 if a ratio is above the pair's limit. On a GPU, attention() and sdpa() are also compared
with PyTorch's cuDNN. `functions` are those that Python enters in a call.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pretended_gpu import pretended_gpu
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashsmith
from flashsmith.benchmark.environment import Environment
from flashsmith.runtime import forget_cached_launches

BURST = 20
BATCH, SEQ, HEADS, HEADS_K, D = 2, 512, 16, 4, 128
# Largest ratios to attention(), and to cuDNN of a call and of one with gradients.
OURS, THEIRS, THEIR_GRADIENTS = 1.1, 0.7, 0.85
Call = Callable[[], Any]


@dataclass(frozen=True)
class Pair:
    """A call, the call that it is compared with, and the largest ratio of their times."""

    name: str
    call: Call
    than: str
    other: Call
    limit: float


def half(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.float16)


def inference(device: str) -> Iterator[Pair]:
    """Calls without gradients."""
    q, k, v = (half(device, BATCH, SEQ, HEADS, D) for _ in range(3))
    groups = [half(device, BATCH, SEQ, HEADS_K, D) for _ in range(2)]
    attention = partial(flashsmith.attention, q, k, v)
    causal = partial(attention, causal=True)
    outside = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    sdpa = partial(flashsmith.sdpa, *outside)
    yield Pair("sdpa", sdpa, "attention", attention, OURS)
    yield Pair("sdpa, causal", partial(sdpa, is_causal=True), "attention", causal, OURS)
    grouped = partial(flashsmith.sdpa, outside[0], *(it.transpose(1, 2) for it in groups))
    grouped = partial(grouped, is_causal=True, enable_gqa=True)
    like = partial(flashsmith.attention, q, *groups, causal=True)
    yield Pair("sdpa, grouped heads", grouped, "attention", like, OURS)
    func = partial(flashsmith.flash_attn_func, q, k, v, causal=True)
    yield Pair("flash_attn_func", func, "attention", causal, OURS)
    yield packed(device)
    yield cached(device)
    # PyTorch alone takes longer for these than attention() takes, so they have no limit there.
    compiled, empty = (
        torch.compile(call, backend="aot_eager") for call in (causal_attention, torch.empty_like)
    )
    yield Pair("torch.compile", partial(compiled, q, k, v), "attention", causal, math.inf)
    yield Pair("torch.compile", partial(compiled, q, k, v), "empty_like", partial(empty, q), 2.0)
    op = partial(torch.ops.flashsmith.attention.default, q, k, v, causal=True)
    yield Pair("op", op, "attention", causal, math.inf)
    if device == "cuda":
        theirs = partial(torch.nn.functional.scaled_dot_product_attention, *outside)
        with cudnn_first():
            yield Pair("attention", attention, "cuDNN", theirs, THEIRS)
            yield Pair("sdpa", sdpa, "cuDNN", theirs, THEIRS)


def causal_attention(q: Any, k: Any, v: Any) -> Any:
    return flashsmith.attention(q, k, v, causal=True)


def packed(device: str) -> Pair:
    at = torch.arange(0, BATCH * SEQ + 1, SEQ, dtype=torch.int32, device=device)
    given = [half(device, BATCH * SEQ, HEADS, D) for _ in range(3)]
    call = partial(flashsmith.flash_attn_varlen_func, *given, at, at, SEQ, SEQ, causal=True)
    like = partial(
        *(flashsmith.attention, *given),
        causal=True,
        cu_seqlens_q=at,
        cu_seqlens_k=at,
        max_seqlen_q=SEQ,
        max_seqlen_k=SEQ,
    )
    return Pair("flash_attn_varlen_func", call, "attention", like, OURS)


def cached(device: str) -> Pair:
    lens = torch.full((BATCH,), SEQ - 1, dtype=torch.int32, device=device)
    given = (
        half(device, BATCH, 1, HEADS, D),
        *(half(device, BATCH, SEQ, HEADS_K, D) for _ in range(2)),
    )
    call = partial(flashsmith.flash_attn_with_kvcache, *given, cache_seqlens=lens)
    like = partial(flashsmith.attention_with_cache, *given, cache_lens=lens)
    return Pair("flash_attn_with_kvcache", call, "attention_with_cache", like, OURS)


def cudnn_first() -> AbstractContextManager[None]:
    """PyTorch prefers cuDNN. Flash attention stays on, because sdpa() obeys its switch."""
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    found: AbstractContextManager[None] = sdpa_kernel(kernels, set_priority=True)
    return found


def training(device: str) -> Iterator[Pair]:
    """A forward pass and torch.autograd.grad()."""
    leaves = [half(device, BATCH, SEQ, HEADS, D).requires_grad_() for _ in range(3)]
    do = half(device, BATCH, SEQ, HEADS, D)
    outside = [it.detach().transpose(1, 2).requires_grad_() for it in leaves]

    def both(function: Any, given: Any, gradient: Any, **options: Any) -> Call:
        return lambda: torch.autograd.grad(function(*given, **options), given, gradient)

    attention = both(flashsmith.attention, leaves, do, causal=True)
    sdpa = both(flashsmith.sdpa, outside, do.transpose(1, 2), is_causal=True)
    yield Pair("sdpa, gradients", sdpa, "attention", attention, OURS)
    func = both(flashsmith.flash_attn_func, leaves, do, causal=True)
    yield Pair("flash_attn_func, gradients", func, "attention", attention, OURS)
    if device == "cuda":
        function = torch.nn.functional.scaled_dot_product_attention
        theirs = both(function, outside, do.transpose(1, 2), is_causal=True)
        with cudnn_first():
            yield Pair("attention, gradients", attention, "cuDNN", theirs, THEIR_GRADIENTS)
            yield Pair("sdpa, gradients", sdpa, "cuDNN", theirs, THEIR_GRADIENTS)


def timed(call: Call) -> float:
    """The host time of a call in microseconds."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1000


def functions(call: Call) -> int:
    """How many functions of Python a call enters; those of C are not counted."""
    entered = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal entered
        entered += event == "call"

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def measure(pair: Pair, calls: int, wait: Call) -> dict[str, Any]:
    both = pair.call, pair.other
    forget_cached_launches()  # those of another pair would be looked at first
    for call in both * 3:
        for _ in range(BURST):
            call()
        wait()
    times: tuple[list[float], list[float]] = [], []
    for turn in range(calls // BURST):
        for place in (0, 1) if turn % 2 else (1, 0):  # neither always follows the other
            times[place].extend(timed(both[place]) for _ in range(BURST))
            wait()
    fastest = [statistics.quantiles(it, n=10)[0] for it in times]
    return {
        "call": pair.name,
        "compared with": pair.than,
        "median": statistics.median(times[0]),
        "its median": statistics.median(times[1]),
        "p10": fastest[0],
        "its p10": fastest[1],
        "ratio": fastest[0] / fastest[1],
        "limit": pair.limit,
        "functions": functions(pair.call),
        "its functions": functions(pair.other),
    }


def write_rows(out: Path, device: str, calls: int, wait: Call, where: Environment) -> list[str]:
    """Measures the pairs and writes their rows. Returns those whose ratio is above its limit."""
    above, writer = [], None
    with out.open("w", newline="") as file:
        for pairs in (inference, training):
            with torch.set_grad_enabled(pairs is training):
                for pair in pairs(device):
                    row = measure(pair, calls, wait)
                    rounded = {
                        k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()
                    }
                    if writer is None:
                        writer = csv.DictWriter(file, [*rounded, *asdict(where)])
                        writer.writeheader()
                    writer.writerow({**rounded, **asdict(where)})
                    file.flush()
                    name = f"{pair.name} to {pair.than}"
                    print(
                        f"{name:50} {row['p10']:7.2f} us over {row['its p10']:7.2f}: "
                        f"{row['ratio']:.2f} (limit {pair.limit})",
                        flush=True,
                    )
                    if row["ratio"] > pair.limit:
                        above.append(name)
    return above


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the CSV file to write")
    parser.add_argument("--pretend", action="store_true", help="on the host; launches do nothing")
    parser.add_argument("--calls", type=int, default=4000, help="timed calls of each")
    parser.add_argument("--check", action="store_true", help="fail above a pair's limit")
    options = parser.parse_args()
    if options.pretend:
        with pretended_gpu() as pretended:
            import tvm_ffi

            pretended.launcher = tvm_ffi.get_global_func("testing.nop")
            pretended.block_bytes = 4096
            nowhere = replace(Environment.collect(), gpu="pretended", arch=0, driver="", cuda="")
            above = write_rows(options.out, "cpu", options.calls, lambda: None, nowhere)
    else:
        wait = torch.cuda.synchronize
        above = write_rows(options.out, "cuda", options.calls, wait, Environment.collect())
    if above:
        print(f"above their limits: {', '.join(above)}", file=sys.stderr)
    return int(bool(above) and options.check)


if __name__ == "__main__":
    sys.exit(main())
