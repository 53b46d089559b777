#!/usr/bin/env python3
"""Times attention() beside PyTorch's FlashAttention-2 backend: full, causal, grouped heads, packed
batches, and lengths one short of whole tiles. One CSV row a cell and contender.

    python tools/gpu/semantics_speed.py rows.csv

Every contender's output is compared before it is timed: ours, written over NaN, with float64 on two
heads. Contenders take turns within a cell; a row is the median over the rounds. FLOP are
4 b h s_q s_k d, halved when causal. FlashAttention-2 is `scaled_dot_product_attention` under
SDPBackend.FLASH_ATTENTION, and for packed batches `torch.ops.aten._flash_attention_forward` with
cu_seqlens.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

import flashsmith
from flashsmith.configs import parse_kernel_name_into_config

RELATIVE_L2_BOUND = {torch.float16: 1e-3, torch.bfloat16: 5e-3}
ROUNDS = 3


@dataclass(frozen=True)
class Cell:
    """One problem: `kind` is full, causal, gqa (causal), packed (causal) or short (full, n - 1)."""

    kind: str
    dtype: torch.dtype
    d: int
    seq: int

    @property
    def causal(self) -> bool:
        return self.kind in ("causal", "gqa", "packed")

    @property
    def batch(self) -> int:
        return 16 if self.seq <= 4096 else 8 if self.seq == 8192 else 4

    @property
    def heads(self) -> int:
        return {64: 32, 128: 16, 256: 8}.get(self.d, 16)

    @property
    def heads_k(self) -> int:
        return self.heads // 4 if self.kind == "gqa" else self.heads

    @property
    def true_seq(self) -> int:
        return self.seq - 1 if self.kind == "short" else self.seq

    @property
    def flop(self) -> float:
        full = 4 * self.batch * self.heads * self.true_seq**2 * self.d
        return full / 2 if self.causal else full


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_tensors(cell: Cell) -> Tensors:
    """q, k, v as (batch, seq, heads, d) on the GPU."""
    generator = torch.Generator("cuda").manual_seed(cell.seq + cell.d)

    def draw(heads: int) -> torch.Tensor:
        shape = (cell.batch, cell.true_seq, heads, cell.d)
        return torch.randn(shape, generator=generator, device="cuda", dtype=cell.dtype)

    return draw(cell.heads), draw(cell.heads_k), draw(cell.heads_k)


def ours(cell: Cell, tensors: Tensors, out: torch.Tensor, config: Any) -> Callable[[], Any]:
    q, k, v = tensors
    options: dict[str, Any] = {"causal": cell.causal, "config": config, "out": out}
    if cell.kind == "packed":
        q, k, v, options["out"] = (t.flatten(0, 1) for t in (*tensors, out))
        cu_seqlens = boundaries(cell)
        options |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        options |= {"max_seqlen_q": cell.seq, "max_seqlen_k": cell.seq}
    return lambda: flashsmith.attention(q, k, v, **options)


def boundaries(cell: Cell) -> torch.Tensor:
    """cu_seqlens of equally long sequences."""
    total = cell.batch * cell.seq
    return torch.arange(0, total + 1, cell.seq, dtype=torch.int32, device="cuda")


def flash_attention_2(cell: Cell, tensors: Tensors) -> Callable[[], torch.Tensor]:
    if cell.kind == "packed":
        q, k, v = (t.flatten(0, 1) for t in tensors)
        cu, longest = boundaries(cell), cell.seq
        return lambda: torch.ops.aten._flash_attention_forward(
            q, k, v, cu, cu, longest, longest, 0.0, True, False
        )[0]
    q, k, v = (t.transpose(1, 2) for t in tensors)

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=cell.causal, enable_gqa=cell.heads != cell.heads_k
            )

    return call


def relative_l2(cell: Cell, tensors: Tensors, out: torch.Tensor) -> float:
    """Against float64, of the first head of the first batch and the last of the last."""
    error = norm = 0.0
    for batch, head in ((0, 0), (cell.batch - 1, cell.heads - 1)):
        head_k = head * cell.heads_k // cell.heads
        q, k, v = (
            tensors[0][batch, :, head],
            tensors[1][batch, :, head_k],
            tensors[2][batch, :, head_k],
        )
        for rows in torch.arange(cell.true_seq, device="cuda").split(4096):
            scores = q[rows].double() @ k.double().T * cell.d**-0.5
            if cell.causal:
                keys = torch.arange(cell.true_seq, device="cuda")
                scores.masked_fill_(keys > rows[:, None], -torch.inf)
            reference = scores.softmax(-1) @ v.double()
            error += float((out[batch, rows, head].double() - reference).square().sum())
            norm += float(reference.square().sum())
    return (error / norm) ** 0.5


def measure(cell: Cell, configs: list[Any]) -> list[dict[str, Any]]:
    """Rows of attention()'s own choice, of every named config, and of FlashAttention-2."""
    tensors = make_tensors(cell)
    out = torch.full_like(tensors[0], torch.nan)
    contenders: dict[str, Callable[[], Any]] = {"attention()": ours(cell, tensors, out, None)}
    contenders |= {str(config): ours(cell, tensors, out, config) for config in configs}
    errors = {}
    for name, call in contenders.items():
        out.fill_(torch.nan)
        call()
        errors[name] = relative_l2(cell, tensors, out)
    contenders["FA2"] = flash_attention_2(cell, tensors)
    theirs = contenders["FA2"]()
    theirs = (
        theirs.unflatten(0, (cell.batch, -1)) if cell.kind == "packed" else theirs.transpose(1, 2)
    )
    errors["FA2"] = relative_l2(cell, tensors, theirs)
    wrong = [n for n, error in errors.items() if not error <= RELATIVE_L2_BOUND[cell.dtype]]
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            times[name].append(do_bench(call, warmup=10, rep=40, return_mode="median"))
    return [
        {
            "kind": cell.kind, "dtype": str(cell.dtype).removeprefix("torch."), "d": cell.d,
            "seq": cell.true_seq, "batch": cell.batch, "heads": cell.heads,
            "heads_k": cell.heads_k, "contender": name, "ms": statistics.median(times[name]),
            "tflops": cell.flop / statistics.median(times[name]) / 1e9,
            "relative_l2": errors[name], "right": name not in wrong,
        }
        for name in contenders
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the CSV file to write")
    parser.add_argument("--kinds", nargs="+", default=["full", "causal", "gqa", "packed", "short"])
    parser.add_argument("--dtypes", nargs="+", default=["float16"])
    parser.add_argument("--d", nargs="+", type=int, default=[128, 64])
    parser.add_argument("--seqs", nargs="+", type=int, default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--kernels", nargs="*", default=[], help="short forms to time as well")
    options = parser.parse_args()
    named = [parse_kernel_name_into_config(text) for text in options.kernels]

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    all_right, writer = True, None
    with options.out.open("w", newline="") as file:
        for d in options.d:
            for name in options.dtypes:
                dtype = getattr(torch, name)
                code = {"float16": "FP16", "bfloat16": "BF16"}[name]
                configs = [c for c in named if c.d_head == d and c.dtype.name == code]
                for kind in options.kinds:
                    for seq in options.seqs:
                        rows = measure(Cell(kind, dtype, d, seq), configs)
                        writer = writer or csv.DictWriter(file, list(rows[0]))
                        if file.tell() == 0:
                            writer.writeheader()
                        writer.writerows(rows)
                        file.flush()
                        all_right &= all(row["right"] for row in rows)
                        theirs = rows[-1]["tflops"]
                        told = "  ".join(
                            f"{row['tflops']:.0f}{'' if row['right'] else ' WRONG'}" for row in rows
                        )
                        print(
                            f"{name} d{d} {kind} {rows[0]['seq']}: {told}  "
                            f"(attention()/FA2 {rows[0]['tflops'] / theirs:.3f})",
                            flush=True,
                        )
    return int(not all_right)


if __name__ == "__main__":
    sys.exit(main())
