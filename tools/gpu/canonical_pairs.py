#!/usr/bin/env python3
"""Compares, on a GPU, calls that must have equal bits with bits='canonical'.

    python tools/gpu/canonical_pairs.py rows.csv
    python tools/gpu/canonical_pairs.py rows.csv --d 128 --dtype bf16
    python tools/gpu/canonical_pairs.py rows.csv --build-only --arch 90    # needs no GPU

For each dtype, d, mask and number of heads, attention() of one sequence is the reference. It is
compared with other ways to compute the same rows: other configs, a batch, packed sequences, fewer
queries in the call, and attention_with_cache(). For the latter, rows come in chunks of 1 to 300
that end near boundaries of tiles and chunks. Caches are dense or paged, and everything that no row
sees is NaN. The output and the log-sum-exp of each row must have equal bits.

A row of the CSV file has a case and a way, how many calls and rows were compared, how many differ,
and a digest of the output, by which GPUs can be compared. The exit status is 1 if a bit differs.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import flashsmith
from flashsmith import attention, attention_with_cache
from flashsmith.builder import library_for
from flashsmith.chooser.decode import CHOOSERS
from flashsmith.families import (
    DeviceSpec,
    DType,
    KernelConfig,
    Problem,
    Semantics,
    by_family,
    device_spec,
    families,
)
from flashsmith.families.canonical import CHUNK
from flashsmith.runtime import query_gpu

LENGTH = 2 * CHUNK + 300
HEADS_K = 2
CHUNKS = (1, 2, 7, 64, 300)
PAGES = (0, 16, 48)  # 0: dense


@dataclass(frozen=True)
class Case:
    """What is computed: the attention of one sequence."""

    dtype: DType
    d: int
    group: int
    mask: str
    keywords: tuple[tuple[str, Any], ...] = ()

    @property
    def problem(self) -> Problem:
        words = {"causal": Semantics("causal"), "window": Semantics("window")}
        semantics = replace(words[self.mask], softcap="softcap" in dict(self.keywords))
        heads = self.group * HEADS_K
        window = 1024 if self.mask == "window" else 0
        return Problem(
            *(1, LENGTH, LENGTH, heads, HEADS_K, self.d, self.dtype, semantics),
            window_keys=window,
            bits="canonical",
        )

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.keywords]
        return " ".join([self.dtype.name.lower(), f"d{self.d}", f"group{self.group}", *words])


def cases(ds: list[int], dtypes: list[DType]) -> Iterator[Case]:
    masks = (
        ("causal", (("causal", True),)),
        ("window", (("causal", True), ("window", (900, 0)))),
        ("causal", (("causal", True), ("softcap", 20.0))),
        ("causal", (("causal", True), ("sinks", True))),
    )
    for dtype in dtypes:
        for d in ds:
            for number, (mask, keywords) in enumerate(masks):
                for group in (1, 4, 8) if number == 0 else (4,):
                    yield Case(dtype, d, group, mask, keywords)


def other_configs(case: Case, device: DeviceSpec) -> list[KernelConfig]:
    """Canonical configs of all families for a case, without the chosen config."""
    found = []
    for family in families("forward"):
        d_heads = [d for d in family.knob_values["d_head"] if d >= case.d]
        if not d_heads:
            continue
        masked = True
        for cfg in family.candidates(case.dtype, min(d_heads), device, masked):
            other = family.canonical(cfg, device)
            if other is not None and other not in found:
                found.append(other)
    by_shape: dict[Any, KernelConfig] = {}
    for cfg in found:
        by_shape.setdefault((cfg.FAMILY, getattr(cfg, "B_r", 0)), cfg)
    return list(by_shape.values())


def kernels(every: list[Case], device: DeviceSpec) -> dict[Semantics, set[KernelConfig]]:
    """All kernels that the calls of the cases launch."""
    wanted: dict[Semantics, set[KernelConfig]] = {}

    def add(problem: Problem, cfg: KernelConfig) -> None:
        wanted.setdefault(problem.required_semantics(cfg), set()).add(cfg)

    for case in every:
        problem = case.problem
        packed = replace(problem, semantics=replace(problem.semantics, packed=True, uneven=True))
        for cfg in other_configs(case, device):
            add(problem, cfg)
        for kind in (problem, replace(problem, batch=3), packed):
            add(kind, flashsmith.choose(kind, device).config)
        for queries in CHUNKS:
            for page in PAGES:
                kind = replace(problem, seq_q=queries, operation="decode", page=page)
                add(kind, CHOOSERS["invariant"](kind, device))
    return wanted


def build(every: list[Case], device: DeviceSpec) -> int:
    count = 0
    for semantics, configs in kernels(every, device).items():
        for group in by_family(list(configs)):
            count += len(group)
            library_for(group, arch=device.arch, semantics=semantics)
    return count


class Sequence:
    """The tensors of a case, and the rows that every way must reproduce."""

    def __init__(self, case: Case, seed: int) -> None:
        import torch

        self.case, self.torch = case, torch
        torch.manual_seed(seed)
        dtype = torch.float16 if case.dtype is DType.FP16 else torch.bfloat16
        heads = case.group * HEADS_K

        def draw(batch: int, heads: int) -> Any:
            x = torch.randn(batch, LENGTH, heads, case.d, device="cuda")
            x *= torch.where(torch.rand_like(x[..., :1]) < 0.02, 6.0, 1.0)  # Some rows are large
            return x.to(dtype)

        # The first entry of the batch is the sequence; the others only fill the batch.
        self.q, self.k, self.v = draw(3, heads), draw(3, HEADS_K), draw(3, HEADS_K)
        self.keywords = dict(case.keywords)
        if self.keywords.get("sinks"):
            self.keywords["sinks"] = torch.randn(heads, device="cuda")
        self.rows = self.forward(None)

    def forward(self, config: KernelConfig | None) -> tuple[Any, Any]:
        tensors = (self.q[:1], self.k[:1], self.v[:1])
        return attention(
            *tensors, **self.keywords, bits="canonical", return_lse=True, config=config
        )

    def ways(self, device: DeviceSpec) -> Iterator[tuple[str, Any, slice]]:
        """All ways, each as a name, (o, lse) of some rows, and the slice of these rows."""
        every = slice(0, LENGTH)
        yield "forward without lse", (self.plain(), self.rows[1]), every
        for cfg in other_configs(self.case, device):
            yield f"forward {cfg}", self.forward(cfg), every
        both = attention(self.q, self.k, self.v, **self.keywords, bits="canonical", return_lse=True)
        yield "in a batch", (both[0][:1], both[1][:1]), every
        yield "last rows alone", *self.suffix(130)
        yield "packed", self.packed(), every
        for page in PAGES:
            for queries in CHUNKS:
                for end in self.ends(queries):
                    rows = slice(end - queries, end)
                    yield f"cache page {page} chunk {queries}", self.cached(rows, page), rows

    def plain(self) -> Any:
        return attention(self.q[:1], self.k[:1], self.v[:1], **self.keywords, bits="canonical")

    def suffix(self, count: int) -> tuple[tuple[Any, Any], slice]:
        rows = slice(LENGTH - count, LENGTH)
        found = attention(
            self.q[:1, rows], self.k[:1], self.v[:1], **self.keywords, bits="canonical",
            return_lse=True,
        )  # fmt: skip
        return found, rows

    def packed(self) -> tuple[Any, Any]:
        torch = self.torch
        short = 77
        q, k, v = (torch.cat([x[1, :short], x[0], x[2, :short]]) for x in (self.q, self.k, self.v))
        offsets = torch.tensor(
            [0, short, short + LENGTH, 2 * short + LENGTH], dtype=torch.int32, device="cuda"
        )
        o, lse = attention(
            q, k, v, **self.keywords, bits="canonical", return_lse=True,
            cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=LENGTH, max_seqlen_k=LENGTH,
        )  # fmt: skip
        rows = slice(short, short + LENGTH)
        return o[None, rows], lse[None, :, rows]

    @staticmethod
    def ends(queries: int) -> list[int]:
        around = (1, 16, 64, 128, CHUNK, 2 * CHUNK, LENGTH - 1)
        ends = {it + apart for it in around for apart in (-1, 0, 1)}
        return sorted(end for end in ends if queries <= end <= LENGTH)

    def cached(self, rows: slice, page: int) -> tuple[Any, Any]:
        """Rows computed by attention_with_cache(), in a batch with a longer sequence.

        After the keys, and in pages that are not used, the cache is NaN.
        """
        torch, end = self.torch, rows.stop
        capacity = LENGTH + 52
        caches = []
        table = None
        if page:
            pages = -(-capacity // page)
            table = torch.randperm(2 * pages, device="cuda", dtype=torch.int32).view(2, pages)
        for x in (self.k, self.v):
            dense = x.new_full((2, capacity, *x.shape[2:]), float("nan"))
            dense[0, :end] = x[0, :end]
            dense[1, :LENGTH] = x[1]
            if page:
                padded = x.new_full((2, pages * page, *x.shape[2:]), float("nan"))
                padded[:, :capacity] = dense
                cache = x.new_full((2 * pages, page, *x.shape[2:]), float("nan"))
                cache[table.long().view(-1)] = padded.view(2 * pages, page, *x.shape[2:])
                caches.append(cache)
            else:
                caches.append(dense)
        lengths = torch.tensor([end, LENGTH], dtype=torch.int32, device="cuda")
        q = torch.stack([self.q[0, rows], self.q[1, rows]])
        o, lse = attention_with_cache(
            q, *caches, cache_lens=lengths, page_table=table, **self.keywords, bits="canonical",
            return_lse=True,
        )  # fmt: skip
        return o[:1], lse[:1]

    def differing(self, found: tuple[Any, Any], rows: slice) -> int:
        """How many elements of o and lse have other bits."""
        torch = self.torch
        o, lse = self.rows[0][:, rows], self.rows[1][:, :, rows]
        apart = (found[0].contiguous().view(torch.int16) != o.contiguous().view(torch.int16)).sum()
        of_lse = found[1].contiguous().view(torch.int32) != lse.contiguous().view(torch.int32)
        return int(apart + of_lse.sum())

    def digest(self) -> str:
        sha = hashlib.sha256()
        for x in self.rows:
            sha.update(x.contiguous().view(self.torch.uint8).cpu().numpy().tobytes())
        return sha.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", help="the CSV file to write; overwritten")
    parser.add_argument("--d", type=int, action="append", help="default: 64, 96, 128 and 256")
    parser.add_argument("--dtype", choices=("fp16", "bf16"), action="append", help="default: both")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--arch", type=int, help="of --build-only")
    options = parser.parse_args()
    dtypes = [DType.parse(it) for it in options.dtype or ("fp16", "bf16")]
    every = list(cases(options.d or [64, 96, 128, 256], dtypes))
    device = device_spec(options.arch) if options.build_only and options.arch else query_gpu(0)
    begin = time.monotonic()
    count = build(every, device)
    print(f"{count} kernels, {time.monotonic() - begin:.0f} s", flush=True)
    if options.build_only:
        return 0
    pairs = bad = 0
    with open(options.csv, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("gpu", "case", "way", "calls", "elements", "differing", "digest"))
        for number, case in enumerate(every):
            sequence = Sequence(case, number)
            calls, elements, apart = Counter(), Counter(), Counter()
            for way, found, rows in sequence.ways(device):
                calls[way] += 1
                elements[way] += found[0].numel() + found[1].numel()
                apart[way] += sequence.differing(found, rows)
            for way in calls:
                row = device.name, case, way, calls[way], elements[way], apart[way]
                writer.writerow((*row, sequence.digest()))
                if apart[way]:
                    print("DIFFERS", case, way, apart[way], "of", elements[way], flush=True)
            pairs += sum(calls.values())
            bad += sum(map(bool, apart.values()))
            file.flush()
            print(case, sum(calls.values()), "pairs", flush=True)
    print(f"{pairs} pairs, {bad} ways differ, {time.monotonic() - begin:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
