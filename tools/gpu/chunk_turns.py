#!/usr/bin/env python3
"""Checks and measures chunks of a prompt over a KV cache; kernels are launched alternately.

    python tools/gpu/chunk_turns.py rows.csv
    python tools/gpu/chunk_turns.py rows.csv --only s512 --rounds 9
    python tools/gpu/chunk_turns.py --list    # the builds that the cells need

A cell is the last queries of one sequence with heads 32:8 and d 128, causal, over a cache that is
dense or has pages; or a mixed batch of chunks and single tokens. Compared are attention() on the
same keys without a cache, free and canonical, and attention_with_cache() with and without
chunk_warpgroups. The L2 is overwritten before each launch. Outputs are compared with those of
attention(): canonical ones must be equal, others must be within a tolerance. A row has the time of
one round. The summary has medians relative to free attention().
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from flashsmith import attention, attention_with_cache, parse_kernel_name_into_config
from flashsmith.benchmark.rounds import AlternatingRounds, Contender
from flashsmith.benchmark.timing import Protocol

HEADS_Q, HEADS_K, D = 32, 8, 128
# The kernels that were used for chunks before, free and canonical, and the kernels with which they
# are compared.
FREE = "(BF16, 128, 16, 64, 4): decode+stages_3+least_128+parts_2+chunks_128+early+cluster_8"
CANONICAL = "(BF16, 128, 32, 128, 4): decode+stages_3+least_128+parts_1+canonical_1"
CONFIGS = {
    "free": FREE,
    "free_2wg": f"{FREE}+chunk_warpgroups_2",
    "free_3wg": f"{FREE}+chunk_warpgroups_3",
    "canonical": CANONICAL,
    "canonical_2wg": f"{CANONICAL}+chunk_warpgroups_2",
    "canonical_3wg": f"{CANONICAL}+chunk_warpgroups_3",
}
ATTENTION, ATTENTION_CANONICAL = "attention", "attention_canonical"
CHUNKS = (
    *((512, 8192), (2048, 16384), (512, 32768), (2048, 8192), (2048, 32768)),
    *((8192, 8192), (8192, 32768)),
)
PAGES = (0, 16, 64, 256, 1)
# For each sequence of a mixed batch (chunks and single tokens), its queries and keys.
MIXED = {
    "mixed 1x1024+64x1": [(1024, 4096)] + [(1, 4096)] * 64,
    "mixed 2x2048+200x1": [(2048, 8192)] * 2 + [(1, 2048)] * 200,
}
ROUND = Protocol(num_warmups=2, runs=8, warmup_ms=0.0, measure_ms=15.0)
_TOLERANCE = 0.02


class Cell(NamedTuple):
    name: str
    calls: dict[str, Callable[[], Any]]


def _random(*shape: int) -> Any:
    import torch

    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _in_pages(cache: Any, page: int) -> tuple[Any, Any]:
    """A cache (batch, keys, heads, d) cut into pages in random order, and its page table."""
    import torch

    batch, keys, heads, d = cache.shape
    of_each = -(-keys // page)
    order = torch.randperm(batch * of_each, device="cuda")
    padded = torch.full(
        (batch, of_each * page, heads, d), float("nan"), device="cuda", dtype=cache.dtype
    )
    padded[:, :keys] = cache
    pages = torch.empty(batch * of_each, page, heads, d, device="cuda", dtype=cache.dtype)
    pages[order] = padded.view(batch * of_each, page, heads, d)
    return pages, order.to(torch.int32).view(batch, of_each)


def chunk_cells(pages: tuple[int, ...]) -> Iterator[Cell]:
    """Chunks of one sequence."""
    import torch

    for queries, keys in CHUNKS:
        for page in pages:
            torch.manual_seed(0)
            q, k, v = (
                _random(1, rows, heads, D)
                for rows, heads in ((queries, HEADS_Q), (keys, HEADS_K), (keys, HEADS_K))
            )
            lengths = torch.full((1,), keys, device="cuda", dtype=torch.int32)
            how: dict[str, Any] = {"cache_lens": lengths}
            k_cache, v_cache = k, v
            if page:
                torch.manual_seed(1)
                k_cache, how["page_table"] = _in_pages(k, page)
                torch.manual_seed(1)
                v_cache, _ = _in_pages(v, page)
            calls: dict[str, Callable[[], Any]] = {
                ATTENTION: lambda q=q, k=k, v=v: attention(q, k, v, causal=True),
                ATTENTION_CANONICAL: lambda q=q, k=k, v=v: attention(
                    q, k, v, causal=True, bits="canonical"
                ),
            }
            for name, text in CONFIGS.items():
                bits = name.partition("_")[0]
                calls[name] = _call(q, k_cache, v_cache, text, bits, how)
            yield Cell(f"b1 s{queries}:{keys} " + (f"page{page}" if page else "dense"), calls)


def mixed_cells(pages: tuple[int, ...]) -> Iterator[Cell]:
    """Chunks and single tokens in one packed call over a cache, which attention() cannot
    compute."""
    import torch

    for name, sequences in MIXED.items():
        for page in pages:
            torch.manual_seed(0)
            longest = max(keys for _, keys in sequences)
            cache = [_random(len(sequences), longest, HEADS_K, D) for _ in "kv"]
            rows = [queries for queries, _ in sequences]
            q = _random(sum(rows), HEADS_Q, D)
            offsets = torch.tensor([0, *rows], device="cuda").cumsum(0).to(torch.int32)
            lengths = torch.tensor([keys for _, keys in sequences], device="cuda").to(torch.int32)
            how = {"cache_lens": lengths, "cu_seqlens_q": offsets, "max_seqlen_q": max(rows)}
            if page:
                paged = []
                for one in cache:
                    torch.manual_seed(1)
                    pages_of_one, how["page_table"] = _in_pages(one, page)
                    paged.append(pages_of_one)
                cache = paged
            calls = {
                kind: _call(q, *cache, CONFIGS[kind], "free", how) for kind in ("free", "free_2wg")
            }
            yield Cell(f"{name} " + (f"page{page}" if page else "dense"), calls)


def _call(
    q: Any, k_cache: Any, v_cache: Any, text: str, bits: str, how: dict[str, Any]
) -> Callable[[], Any]:
    config = parse_kernel_name_into_config(text)
    return lambda: attention_with_cache(q, k_cache, v_cache, config=config, bits=bits, **how)


def wrong(name: str, found: Any, outputs: dict[str, Any]) -> str:
    """Why an output is wrong; '' if it is right."""
    import torch

    if not torch.isfinite(found).all():
        return "not finite"
    if name.startswith("canonical"):
        differing = int((found != outputs[ATTENTION_CANONICAL]).sum())
        return f"{differing} outputs differ from attention's" if differing else ""
    expected = outputs.get(ATTENTION, next(iter(outputs.values())))
    most = expected.float().abs().max().item()
    worst = (found.float() - expected.float()).abs().max().item()
    return "" if worst <= _TOLERANCE * most else f"differs by {worst:.3g} of {most:.3g}"


def print_builds() -> None:
    """The builds that the cells need."""
    every = ";".join(CONFIGS.values())
    print(f'flashsmith build --arch H200 --semantics causal -k "{every}"')
    mixed = ";".join(CONFIGS[kind] for kind in ("free", "free_2wg"))
    print(f'flashsmith build --arch H200 --semantics causal+packed+uneven -k "{mixed}"')
    for bits in ("", " canonical"):
        cells = " ".join(
            f'--for "b1 s{queries}:{keys} h{HEADS_Q}:{HEADS_K} d{D} bf16 causal{bits}"'
            for queries, keys in CHUNKS
        )
        print(f"flashsmith build --arch H200 {cells}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", nargs="?", help="the CSV file to write; overwritten")
    parser.add_argument("--only", default="", help="cells whose name matches a regex")
    parser.add_argument("--without", default="^$", help="no contenders whose name matches a regex")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--list", action="store_true", help="print the builds and stop")
    options = parser.parse_args()
    if options.list:
        print_builds()
        return 0
    import torch

    gpu, bad = torch.cuda.get_device_name(), 0
    shares: dict[str, list[float]] = {}
    with open(options.csv, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("gpu", "cell", "contender", "round", "us"))
        for name, calls in chain(chunk_cells(PAGES), mixed_cells((0, 16))):
            if not re.search(options.only, name):
                continue
            kept = {it: call for it, call in calls.items() if not re.search(options.without, it)}
            outputs = {it: call().clone() for it, call in kept.items()}
            torch.cuda.synchronize()
            reasons = {it: wrong(it, found, outputs) for it, found in outputs.items()}
            if {"free_2wg", "free_3wg"} <= outputs.keys():
                differing = int((outputs["free_2wg"] != outputs["free_3wg"]).sum())
                print(f"{name}: {differing} outputs of free_3wg differ from free_2wg's", flush=True)
            for it, why in reasons.items():
                if why:
                    bad += 1
                    print(f"WRONG {name} {it}: {why}", flush=True)
            del outputs
            turns = AlternatingRounds(
                [Contender(it, call, lambda: "") for it, call in kept.items()]
            )
            rounds: dict[str, list[float]] = {it: [] for it in kept}
            for number in range(options.rounds):
                for it, timing in turns.round(ROUND).items():
                    rounds[it].append(1e3 * timing.median_ms)
                    writer.writerow((gpu, name, it, number, f"{rounds[it][-1]:.2f}"))
            file.flush()
            first = next(iter(rounds))
            base = rounds[first]
            for it, times in rounds.items():
                its = [one / other for one, other in zip(base, times, strict=True)]
                shares.setdefault(it, []).append(statistics.median(its))
                print(
                    f"{name:28} {it:20} {statistics.median(times):9.1f} us  {first} takes "
                    f"{statistics.median(its):.3f} ({min(its):.3f} to {max(its):.3f}) of it",
                    flush=True,
                )
            del kept, calls, turns
            torch.cuda.empty_cache()
    for it, found in shares.items():
        print(f"{it}: mean {statistics.geometric_mean(found):.3f}, least {min(found):.3f}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
