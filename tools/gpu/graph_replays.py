#!/usr/bin/env python3
"""Compares replays of CUDA graphs with eager launches, for attention(), our other schedules and
PyTorch.

    python tools/gpu/graph_replays.py

Prints the median microseconds of an eager launch, of a replay of its graph, and the difference.
They are launched alternately, each between two events, and the L2 is overwritten before each.

The output of a replay must have the same bits as that of the eager launch, and agree with float64;
otherwise it gets no time. The exit status is 1 if a replay is wrong, or if a replay of attention()
takes --limit-us more than its launch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import flashsmith
from flashsmith.benchmark.rounds import AlternatingRounds, Contender
from flashsmith.benchmark.timing import Protocol
from flashsmith.families import DType, parse_kernel_name_into_config
from flashsmith.verify import compare, compute_references
from flashsmith.verify.proof_inputs import default_scale

OURS = "attention()"
# (batch, length, heads of q, heads of k, causal)
SHAPES = ((1, 512, 32, 8, True), (1, 128, 8, 8, False))
D = 128
_FORM = "(BF16, 128, 128, 128, 2wg): tma+stages_2+q_buffers_2+regs_32_232+overlap+pingpong_gemm"
SCHEDULES = {"dynamic": "+dynamic", "static": "+static_persistent", "one tile a CTA": ""}

Launch = Callable[[], Any]


def launches(
    shape: tuple[int, int, int, int, bool],
) -> tuple[dict[str, Launch], Callable[[Any], str]]:
    """The launches; and a function that returns why an output is wrong, '' if it is right.

    Each launch returns its output, (batch, seq, heads, d).
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, seq, heads_q, heads_k, causal = shape
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(batch, seq, heads, D, device="cuda", dtype=torch.bfloat16)
        for heads in (heads_q, heads_k, heads_k)
    )
    found: dict[str, Launch] = {OURS: lambda: flashsmith.attention(q, k, v, causal=causal)}
    for name, words in SCHEDULES.items():
        order = "+longest_first" if causal and words else ""
        config = parse_kernel_name_into_config(f"{_FORM}{words}{order}+rescale_8")
        found[name] = lambda config=config: flashsmith.forward(config, q, k, v, causal=causal)
    views = [x.transpose(1, 2) for x in (q, k, v)]

    def cudnn() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                *views, is_causal=causal, enable_gqa=heads_q != heads_k
            ).transpose(1, 2)

    found["cudnn"] = cudnn

    import ml_dtypes

    def host(x: Any) -> Any:
        return x.contiguous().view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)

    references = compute_references(*map(host, (q, k, v)), default_scale(D), causal=causal)

    def why_wrong(output: Any) -> str:
        return "; ".join(compare(DType.BF16, host(output), None, references).reasons)

    return found, why_wrong


def captured(launch: Launch) -> tuple[Launch, Any]:
    """A function that replays a graph of one launch, and the output of the graph."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = launch()
    return graph.replay, output


def times_us(turns: AlternatingRounds, rounds: int) -> dict[str, float]:
    """The median microseconds of those contenders that are correct; they are launched
    alternately."""
    protocol = Protocol(num_warmups=5, runs=rounds, warmup_ms=0.0, measure_ms=0.0)
    return {name: 1e3 * it.median_ms for name, it in turns.round(protocol).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--limit-us", type=float, default=1.2)
    options = parser.parse_args()
    try:
        import torch
    except ModuleNotFoundError:
        parser.error("needs PyTorch")
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU that PyTorch can use")
    bad = 0
    for shape in SHAPES:
        found, why_wrong = launches(shape)
        print("b{} s{} h{}:{} d128 {}".format(*shape[:4], "causal" if shape[4] else "full"))
        contenders = []
        for name, launch in found.items():
            replay, output = captured(launch)
            replay()
            eager = launch()
            why = why_wrong(eager)
            if not why and not torch.equal(output, eager):
                why = "the replay's output differs from the launch's"
            for way, call in (("eager", launch), ("replay", replay)):
                contenders.append(Contender(f"{name}, {way}", call, lambda why=why: why))
        turns = AlternatingRounds(contenders)
        times = times_us(turns, options.rounds)
        for name in found:
            if why := turns.wrong.get(f"{name}, eager"):
                bad += 1
                print(f"  {name:16} WRONG: {why}")
                continue
            eager_us, replay_us = (times[f"{name}, {way}"] for way in ("eager", "replay"))
            apart = replay_us - eager_us
            print(f"  {name:16} eager {eager_us:6.2f}  replay {replay_us:6.2f}  {apart:+.2f}")
            bad += name == OURS and apart > options.limit_us
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
