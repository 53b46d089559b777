#!/usr/bin/env python3
"""Measures how long the host takes for a call and for a bare launch, in microseconds; a CSV row per
kind.

A bare launch is only the library's launcher, with arguments that are prepared.

    python tools/gpu/host_overhead.py rows.csv --limit-us 15
    python tools/gpu/host_overhead.py rows.csv --over-a-cache    # attention_with_cache()
    python tools/gpu/host_overhead.py rows.csv --pretend     # no GPU: launches do nothing
    python tools/gpu/host_overhead.py rows.csv --config "(FP16, 128, ...): ..."

Calls and bare launches alternate in short bursts, each followed by a synchronisation, so that
neither waits for space in the launch queue. `first` is the first call of its kind after its kernel
is loaded. With --limit-us, the exit status is 1 if a repeated call takes longer than its bare
launch by more than this. Without --config, attention() chooses the kernel.

For a wgmma kernel, the bare launch includes tensor maps and the counter. Over a cache, it includes
all launches of a call; memory for the results of the parts is allocated before.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from pretended_gpu import pretended_gpu

import flashsmith
from flashsmith.benchmark.environment import Environment
from flashsmith.families import KernelConfig, parse_kernel_name_into_config
from flashsmith.operations import DECODE
from flashsmith.runtime import forget_cached_launches
from flashsmith.runtime.frameworks import framework_of
from flashsmith.runtime.frameworks.base import Device, Workspace
from flashsmith.runtime.libraries import LoadedKernel

BURST = 20
BATCH, SEQ, HEADS, D = 2, 512, 16, 128


@dataclass(frozen=True)
class Cell:
    """A kind of call: its name, and a function without arguments."""

    name: str
    call: Callable[[], Any]


def cells(device: str, config: KernelConfig | None) -> Iterator[Cell]:
    """Calls of `config` for problems so small that kernels finish before the next call is made."""

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.float16)

    attention = partial(flashsmith.attention, config=config)
    q, k, v = (half(BATCH, SEQ, HEADS, D) for _ in range(3))
    causal = partial(attention, q, k, v, causal=True)
    yield Cell("full", partial(attention, q, k, v))
    yield Cell("causal", causal)
    yield Cell("causal, out", partial(causal, out=torch.empty_like(q)))
    yield Cell("causal, lse", partial(causal, return_lse=True))
    yield Cell("causal, sinks", partial(causal, sinks=torch.zeros(HEADS, device=device)))
    yield Cell("window", partial(attention, q, k, v, window=(256, 0)))
    grouped = [half(BATCH, SEQ, HEADS // 4, D) for _ in range(2)]
    yield Cell("causal, grouped heads", partial(attention, q, *grouped, causal=True))
    outside = [half(BATCH, HEADS, SEQ, D).transpose(1, 2) for _ in range(3)]
    yield Cell("causal, heads outside", partial(attention, *outside, causal=True))
    offsets = torch.arange(0, BATCH * SEQ + 1, SEQ, dtype=torch.int32, device=device)
    packed = partial(
        attention,
        *(tensor.flatten(0, 1) for tensor in (q, k, v)),
        causal=True,
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        max_seqlen_q=SEQ,
        max_seqlen_k=SEQ,
    )
    yield Cell("packed causal", packed)
    yield Cell(
        "packed causal, out, lse", partial(packed, out=half(BATCH * SEQ, HEADS, D), return_lse=True)
    )


def cache_cells(device: str, config: KernelConfig | None) -> Iterator[Cell]:
    """Calls of `config` over a KV cache: one token per sequence, with keys split into parts."""

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.float16)

    def whole(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    heads_k, page, seq = 4, 16, SEQ - 1
    q, k, v = half(BATCH, 1, HEADS, D), *(half(BATCH, 1, heads_k, D) for _ in range(2))
    lens = whole([seq] * BATCH)
    attend = partial(flashsmith.attention_with_cache, q, cache_lens=lens, config=config)
    dense = partial(attend, *(half(BATCH, SEQ, heads_k, D) for _ in range(2)))
    table = torch.arange(BATCH * SEQ // page, dtype=torch.int32, device=device).view(BATCH, -1)
    pages = [half(BATCH * SEQ // page, page, heads_k, D) for _ in range(2)]
    paged = partial(attend, *pages, page_table=table)
    yield Cell("over a cache", dense)
    yield Cell("over a cache, out", partial(dense, out=torch.empty_like(q)))
    yield Cell("over a cache, lse", partial(dense, return_lse=True))
    yield Cell("over a cache, split='free'", partial(dense, split="free"))
    yield Cell("over pages", paged)
    appended = partial(paged, k=k, v=v)
    yield Cell("over pages, append", appended)
    turns = (torch.ones(SEQ, D // 2, device=device), torch.zeros(SEQ, D // 2, device=device))
    yield Cell("over pages, append, rotary", partial(appended, cos=turns[0], sin=turns[1]))
    packed = partial(
        *(flashsmith.attention_with_cache, q.flatten(0, 1), *pages),
        page_table=table,
        cache_lens=lens,
        cu_seqlens_q=whole(list(range(BATCH + 1))),
        max_seqlen_q=1,
        config=config,
    )
    yield Cell("over pages, packed", packed)


def bare_launch(cell: Cell) -> tuple[Callable[[], Any], Any]:
    """A function that repeats the launches of a call, and the outputs, which must stay alive."""
    seen: list[Callable[[], Any]] = []
    held: list[Workspace] = []
    prepare = LoadedKernel.prepare

    def noting(kernel: LoadedKernel, call: Any, ordinal: int, **options: Any) -> Any:
        function, block_bytes = kernel.planned_by(
            kernel.functions.prepare, call, ordinal, options["timed"]
        )
        adapter = framework_of(torch.Tensor)
        stream = adapter.current_stream(ordinal)
        addresses = call.addresses
        if call.problem.operation == DECODE.name and block_bytes:
            held.append(adapter.workspace(block_bytes, Device("cuda", ordinal), stream))
            addresses = (*addresses, held[0].address)
        else:
            while addresses[-1] == 0:
                addresses = addresses[:-1]
        seen.append(partial(function, stream, *addresses))
        return prepare(kernel, call, ordinal, **options)

    forget_cached_launches()
    with mock.patch.object(LoadedKernel, "prepare", noting):
        outputs = cell.call()
    (launch,) = seen
    return launch, (outputs, held)


def timed(call: Callable[[], Any]) -> float:
    """The host time of a call in microseconds."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1000


def measure(cell: Cell, calls: int, wait: Callable[[], None]) -> dict[str, Any]:
    launch, outputs = bare_launch(cell)
    for _ in range(3 * BURST):
        cell.call()
        launch()
        wait()
    ours, bare, first = [], [], []
    for _ in range(calls // BURST):
        for _ in range(BURST):
            ours.append(timed(cell.call))
            bare.append(timed(launch))
        wait()
        forget_cached_launches()
        first.append(timed(cell.call))
        cell.call()
        wait()
    del outputs
    tenths = statistics.quantiles(ours, n=10)
    return {
        "call": cell.name,
        "median": statistics.median(ours),
        "p10": tenths[0],
        "p90": tenths[-1],
        "bare": statistics.median(bare),
        "overhead": statistics.median(ours) - statistics.median(bare),
        "first": statistics.median(first),
        "calls": len(ours),
    }


def write_rows(
    out: Path,
    cells: Iterable[Cell],
    calls: int,
    wait: Callable[[], None],
    environment: Environment,
) -> dict[str, float]:
    """Measures the cells and writes their rows.

    Returns by how much each call is longer than its bare launch.
    """
    overheads, writer = {}, None
    with out.open("w", newline="") as file:
        for cell in cells:
            row = measure(cell, calls, wait)
            overheads[cell.name] = row["overhead"]
            rounded = {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}
            rounded |= asdict(environment)
            if writer is None:
                writer = csv.DictWriter(file, list(rounded))
                writer.writeheader()
            writer.writerow(rounded)
            file.flush()
            print(
                f"{cell.name:24} {row['median']:6.2f} us (p10 {row['p10']:.2f}, p90 "
                f"{row['p90']:.2f}), bare {row['bare']:.2f}: overhead {row['overhead']:.2f}; "
                f"first {row['first']:.1f}",
                flush=True,
            )
    return overheads


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the CSV file to write")
    parser.add_argument("--pretend", action="store_true", help="on the host; launches do nothing")
    parser.add_argument("--calls", type=int, default=2000, help="timed calls of each kind")
    parser.add_argument("--limit-us", type=float, default=float("inf"), help="fail above this")
    parser.add_argument("--config", help="the short form of an fp16 kernel with d_head 128")
    parser.add_argument("--over-a-cache", action="store_true", help="attention_with_cache()")
    options = parser.parse_args()
    make_cells = cache_cells if options.over_a_cache else cells
    config = None if options.config is None else parse_kernel_name_into_config(options.config)
    if options.pretend:
        with pretended_gpu() as pretended:
            import tvm_ffi

            pretended.launcher = tvm_ffi.get_global_func("testing.nop")
            nowhere = replace(Environment.collect(), gpu="pretended", arch=0, driver="", cuda="")
            pretended.block_bytes = 4096 if options.over_a_cache else 0
            calls = make_cells("cpu", config)
            overheads = write_rows(options.out, calls, options.calls, lambda: None, nowhere)
    else:
        overheads = write_rows(
            options.out,
            make_cells("cuda", config),
            options.calls,
            torch.cuda.synchronize,
            Environment.collect(),
        )
    too_slow = [name for name, overhead in overheads.items() if overhead > options.limit_us]
    if too_slow:
        print(f"above {options.limit_us} us: {', '.join(too_slow)}", file=sys.stderr)
    return int(bool(too_slow))


if __name__ == "__main__":
    sys.exit(main())
