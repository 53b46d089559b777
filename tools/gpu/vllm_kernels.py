#!/usr/bin/env python3
"""Times calls of flashsmith's backend and of vLLM's FlashAttention 3, alternately, over vLLM's
cache.

    python tools/gpu/vllm_kernels.py rows.csv [--only PATTERN] [--rounds 7]

A cell is one step of an engine: prefills, chunks, decodes or a mix, with heads 32:8, d 128, bf16,
pages of 16. Block tables have room for 16,384 keys per request. Contenders are replays of graphs.
Before they are timed, the output of FlashAttention is compared with ours.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
from collections.abc import Callable
from typing import Any

HEADS_Q, HEADS_K, D, PAGE, MOST_KEYS = 32, 8, 128, 16, 16384
LAUNCHES = 20
# By name: the queries and keys of each request.
CELLS: dict[str, list[tuple[int, int]]] = {
    "prefill 8 x 1024": [(1024, 1024)] * 8,
    "prefill 4 x 2048": [(2048, 2048)] * 4,
    "prefill 1 x 8192": [(8192, 8192)],
    "chunk 512 at 8192": [(512, 8192)],
    "chunk 2048 at 16384": [(2048, 16384)],
    "decode 1 x 1000": [(1, 1000)],
    "decode 1 x 8000": [(1, 8000)],
    "decode 16 x 1000": [(1, 1000)] * 16,
    "decode 16 x 8000": [(1, 8000)] * 16,
    "decode 64 x 1000": [(1, 1000)] * 64,
    "decode 64 x 8000": [(1, 8000)] * 64,
    "mix 1 x 2048, 32 x 1 at 4000": [(2048, 2048)] + [(1, 4000)] * 32,
    "mix 1 x 512 at 8192, 63 x 1 at 2000": [(512, 8192)] + [(1, 2000)] * 63,
}


def contenders(requests: list[tuple[int, int]]) -> dict[str, Callable[[], Any]]:
    """The calls for a step by name; each returns its output."""
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    import flashsmith
    from flashsmith.families import DType, Problem
    from flashsmith.integrations.layer_kernels import LayerKernels, device_of
    from flashsmith.semantics.compiled import Semantics

    def ints(values: list[int]) -> Any:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    counts, keys = [it[0] for it in requests], [it[1] for it in requests]
    blocks = sum(-(-it // PAGE) for it in keys)
    cache = torch.randn(blocks, PAGE, HEADS_K, 2 * D, device="cuda", dtype=torch.bfloat16)
    k_cache, v_cache = cache.split(D, dim=-1)
    table = torch.zeros(len(keys), MOST_KEYS // PAGE, dtype=torch.int32)
    order = torch.randperm(blocks, dtype=torch.int32)
    first = 0
    for row, length in enumerate(keys):
        count = -(-length // PAGE)
        table[row, :count] = order[first : first + count]
        first += count
    table = table.cuda()
    starts, lens, longest = (
        ints([sum(counts[:i]) for i in range(len(counts) + 1)]),
        ints(keys),
        max(counts),
    )
    q = torch.randn(sum(counts), HEADS_Q, D, device="cuda", dtype=torch.bfloat16)

    def ours(split: str, bits: str) -> Callable[[], Any]:
        semantics = Semantics("causal", packed=True, uneven=True)
        sizes = 1, 1, MOST_KEYS, HEADS_Q, HEADS_K, D, DType.BF16, semantics, "decode", PAGE
        problem = Problem(*sizes, "", 0, "" if bits == "free" else bits)
        config = LayerKernels(problem, split, device_of("cuda", 0)).config_for(len(keys), longest)
        return lambda: flashsmith.attention_with_cache(
            *(q, k_cache, v_cache),
            cache_lens=lens,
            page_table=table,
            cu_seqlens_q=starts,
            max_seqlen_q=longest,
            split=split,
            bits=bits,
            config=config,
        )

    def theirs() -> Any:
        return flash_attn_varlen_func(
            q=q,
            k=k_cache,
            v=v_cache,
            cu_seqlens_q=starts,
            max_seqlen_q=longest,
            seqused_k=lens,
            max_seqlen_k=max(keys),
            causal=True,
            block_table=table,
            fa_version=3,
        )

    return {
        "flash_attn_3": theirs,
        "free": ours("free", "free"),
        "canonical": ours("invariant", "canonical"),
    }


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows")
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    rows = []
    for cell, requests in CELLS.items():
        if not re.search(args.only, cell):
            continue
        torch.manual_seed(0)
        calls = contenders(requests)
        outputs = {name: call() for name, call in calls.items()}
        graphs = {}
        for name, call in calls.items():
            error = (outputs[name].float() - outputs["free"].float()).abs().max().item()
            if not error < 0.02:
                print(f"{cell}: WRONG {name}, off by {error}")
                continue
            torch.cuda.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                for _ in range(LAUNCHES):
                    call()
        for number in range(args.rounds + 1):
            for name, graph in graphs.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                if number:  # The first one is a warm-up
                    us = begin.elapsed_time(end) * 1000 / LAUNCHES
                    rows.append(
                        {"cell": cell, "contender": name, "round": number, "us": f"{us:.2f}"}
                    )
        of = {
            n: [float(r["us"]) for r in rows if (r["cell"], r["contender"]) == (cell, n)]
            for n in graphs
        }
        text = ", ".join(f"{n} {statistics.median(us):.1f} us" for n, us in of.items())
        if {"flash_attn_3", "free"} <= of.keys():
            ratio = statistics.median(of["flash_attn_3"]) / statistics.median(of["free"])
            text += f"; flash_attn_3 takes {ratio:.3f} of free's time"
        print(f"{cell:36} {text}", flush=True)
    with open(args.rows, "w", newline="") as file:
        writer = csv.DictWriter(file, ["gpu", "cell", "contender", "round", "us"])
        writer.writeheader()
        writer.writerows({"gpu": torch.cuda.get_device_name(), **row} for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
