#!/usr/bin/env python3
"""Measures what bits='canonical' costs: launches canonical kernels and others alternately.

    python tools/gpu/canonical_turns.py rows.csv
    python tools/gpu/canonical_turns.py rows.csv --only decode --rounds 15

Forward: 32 cells with d 64, 128 and 256, with and without a causal mask. The L2 is overwritten
before each launch. Decode: CUDA graphs with kernels for split='invariant' and canonical ones. Their
calls cycle through caches that are larger than the L2 together. Outputs are checked in the same
run, and those of canonical kernels are also compared with the others.

There is a CSV row per round. The summary has the ratio for each cell with the spread over its
rounds, and the geometric means. The ratio is the time of the free kernel divided by that of the
canonical one, so above 1 the canonical one is faster.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

from flashsmith import attention, attention_with_cache, parse_kernel_name_into_config
from flashsmith.benchmark.rounds import AlternatingRounds, Contender
from flashsmith.benchmark.timing import Protocol

FREE, CANONICAL = "free", "canonical"
HEADS = {64: 32, 128: 16, 256: 8}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# (batch, queries, keys, heads of q, heads of k, d)
DECODES = (
    *((1, 1, keys, 32, 8, 128) for keys in (1024, 4096, 8192, 16384, 65536)),
    *((8, 1, keys, 32, 8, 128) for keys in (1024, 4096, 16384)),
    *((64, 1, keys, 32, 8, 128) for keys in (1024, 4096)),
    (16, 4, 4096, 32, 8, 128),
    (16, 1, 4096, 8, 1, 64),
    (16, 1, 4096, 8, 8, 128),
    (16, 1, 4096, 16, 2, 256),
    # Chunks of a prompt.
    (1, 512, 8192, 32, 8, 128),
    (1, 2048, 16384, 32, 8, 128),
)
ROUND = Protocol(num_warmups=2, runs=8, warmup_ms=0.0, measure_ms=15.0)
_CACHE_BYTES = 150e6


def forward_cells() -> Iterator[tuple[str, dict[str, Callable[[], Any]]]]:
    import torch

    for d, heads in HEADS.items():
        for causal in (True, False):
            for length in LENGTHS if d != 256 else LENGTHS[1:]:
                batch = max(1, min(16, 65536 // length))
                name = f"b{batch} s{length} h{heads} d{d} bf16" + " causal" * causal
                if d == 64 and not causal and length in (512, 16384):
                    continue

                def calls(d=d, heads=heads, causal=causal, length=length, batch=batch) -> Any:
                    torch.manual_seed(0)
                    q, k, v = (
                        torch.randn(batch, length, heads, d, device="cuda", dtype=torch.bfloat16)
                        for _ in range(3)
                    )
                    return {
                        bits: lambda bits=bits: attention(q, k, v, causal=causal, bits=bits)
                        for bits in (FREE, CANONICAL)
                    }

                yield name, calls


def decode_cells(others: list[str]) -> Iterator[tuple[str, Any]]:
    import torch

    for batch, queries, keys, heads_q, heads_k, d in DECODES:
        name = f"decode b{batch} s{queries}:{keys} h{heads_q}:{heads_k} d{d} bf16"

        def calls(
            batch=batch, queries=queries, keys=keys, heads_q=heads_q, heads_k=heads_k, d=d
        ) -> Any:
            torch.manual_seed(0)
            one = 4.0 * batch * keys * heads_k * d
            count = max(1, min(64, round(_CACHE_BYTES / one)))
            q = torch.randn(batch, queries, heads_q, d, device="cuda", dtype=torch.bfloat16)
            caches = [
                torch.randn(2, batch, keys, heads_k, d, device="cuda", dtype=torch.bfloat16)
                for _ in range(count)
            ]
            lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)

            def graph(way: str) -> Callable[[], Any]:
                out = torch.empty_like(q)
                how = {"bits": way}
                if way not in (FREE, CANONICAL):
                    how = {"config": parse_kernel_name_into_config(way)}

                def run() -> None:
                    for k, v in caches:
                        attention_with_cache(q, k, v, cache_lens=lengths, out=out, **how)

                torch.cuda.synchronize()
                stream = torch.cuda.Stream()
                with torch.cuda.stream(stream):
                    run()
                torch.cuda.synchronize()
                eager = out.clone()
                captured = torch.cuda.CUDAGraph()
                with torch.cuda.graph(captured, stream=stream):
                    run()

                def replay(_run: Any = run) -> Any:  # Keeps the tensors alive that the graph reads
                    captured.replay()
                    return out

                out.zero_()
                replay()
                torch.cuda.synchronize()
                if not torch.equal(out, eager):
                    print("the replay's output differs from the launch's:", way, flush=True)

                return replay

            also = [text for text in others if text.split(", ")[1] == str(d)]
            found = {it: graph(it) for it in (FREE, CANONICAL, *also)}
            found["calls"] = count
            return found

        yield name, calls


def differ(a: Any, b: Any) -> str:
    """Why the two outputs cannot be those of the same attention; '' if they can."""
    import torch

    if not torch.isfinite(b).all():
        return "not finite"
    worst = (a.float() - b.float()).abs().max().item()
    most = a.float().abs().max().item()
    return "" if worst <= 0.02 * most else f"differ by {worst:.3g} of {most:.3g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", help="the CSV file to write; overwritten")
    parser.add_argument("--only", default="", help="cells whose name matches a regex")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--also", action="append", default=[], help="also decode with this config, for its d_head"
    )
    options = parser.parse_args()
    import torch

    gpu = torch.cuda.get_device_name()
    ratios: dict[str, list[float]] = {}
    wrong = 0
    with open(options.csv, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("gpu", "cell", "round", "free_us", "canonical_us", "ratio"))
        for name, calls in (*forward_cells(), *decode_cells(options.also)):
            if not re.search(options.only, name):
                continue
            found = calls()
            count = found.pop("calls", 1)
            outputs = {bits: call().clone() for bits, call in found.items()}
            torch.cuda.synchronize()
            why = next(filter(None, (differ(outputs[FREE], it) for it in outputs.values())), "")
            if not all(
                torch.equal(outputs[CANONICAL], outputs[it]) for it in options.also if it in outputs
            ):
                why = why or "canonical configs differ"
            del outputs
            turns = AlternatingRounds(
                [Contender(it, call, lambda why=why: why) for it, call in found.items()]
            )
            if turns.wrong:
                wrong += 1
                print("WRONG", name, why, flush=True)
                continue
            for number in range(options.rounds):
                times = {it: 1e3 * x.median_ms / count for it, x in turns.round(ROUND).items()}
                ratio = times[FREE] / times[CANONICAL]
                ratios.setdefault(name, []).append(ratio)
                row = [f"{times[it]:.3f}" for it in (FREE, CANONICAL)]
                writer.writerow((gpu, name, number, *row, f"{ratio:.4f}"))
            its = ratios[name]
            for text in times.keys() - {FREE, CANONICAL}:
                writer.writerow((gpu, f"{name} {text}", number, "", f"{times[text]:.3f}", ""))
                print(f"      {times[text]:.2f} us by {text}")
            print(
                f"{statistics.median(its):.3f} ({min(its):.3f} to {max(its):.3f})  free "
                f"{times[FREE]:.2f} us, canonical {times[CANONICAL]:.2f}: {name}",
                flush=True,
            )
            del found, turns
            torch.cuda.empty_cache()
    for kind in ("causal", "^b", "decode"):
        some = [statistics.median(x) for name, x in ratios.items() if re.search(kind, name)]
        if some:
            mean = statistics.geometric_mean(some)
            print(f"{kind}: mean {mean:.4f}, least {min(some):.4f}, {len(some)} cells")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
