"""A first look at the wgmma kernels on a GPU: right results, then times beside cuDNN.

    python tools/gpu/hopper_smoke.py [--kernels KEY] [--quick | --wide] [--no-times] [--seconds 240]

Builds the configs of a KERNELS key ('hopper') for plain and causal attention, compares forward()
with float64 on random problems, O poisoned before every launch, and prints a line for each; then a
line of TFLOP/s for each length, dtype and mask, cuDNN through PyTorch's SDPA beside. Everything
runs in a child process, so that a kernel that hangs is ended and named. --wide adds ragged lengths,
packed sequences, grouped heads, windows, softcap, sinks and statistics.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import time
from dataclasses import dataclass, field
from typing import Any

LENGTHS = {512: 16, 1024: 16, 4096: 16, 16384: 4}  # to the batch
HEADS = 16
# What the cases need: built at once, where each config by itself would take seconds.
SEMANTICS = ("plain", "causal")
WIDE_SEMANTICS = (
    "uneven",
    "causal+uneven",
    "window+uneven",
    "window+softcap+uneven",
    "packed+uneven",
    "causal+packed+uneven",
)
# Relative L2 error against float64; measured of right kernels: 3e-4 (fp16) and 2.3e-3 (bf16).
MOST_ERROR = {"FP16": 6e-4, "BF16": 5e-3}


@dataclass
class Case:
    """One problem; lengths of several sequences make it packed."""

    batch: int
    seq_q: int
    seq_k: int
    heads_q: int
    heads_k: int
    d: int
    options: dict[str, Any] = field(default_factory=dict)
    gain: float = 1.0  # of q: large ones make row maxima grow from block to block
    lengths: tuple[tuple[int, int], ...] = ()
    sinks: bool = False

    def __str__(self) -> str:
        what = [
            f"b{self.batch} s{self.seq_q}:{self.seq_k} h{self.heads_q}:{self.heads_k} d{self.d}"
        ]
        what += [f"{name}={value}" for name, value in self.options.items()]
        if self.lengths:
            what[0] = f"packed {self.lengths} h{self.heads_q}:{self.heads_k} d{self.d}"
        return " ".join(what + ["sinks"] * self.sinks + [f"gain {self.gain}"] * (self.gain != 1))


def cases(d: int, mode: str) -> list[Case]:
    """The problems of a mode, the smallest first."""
    sizes = [(1, 256, 1), (2, 512, 2), (1, 4096, 2), (2, 1024, 33)]
    found = [
        Case(b, s, s, h, h, d, {"causal": causal})
        for causal in (False, True)
        for b, s, h in (sizes[:2] if mode == "quick" else sizes)
    ]
    found += [Case(2, 1024, 1024, 2, 2, d, {"causal": c}, gain=12.0) for c in (False, True)]
    if mode != "wide":
        return found
    found += [
        Case(2, q, k, 4, 2, d, {"causal": causal})
        for causal in (False, True)
        for q, k in ((1000, 1000), (77, 300), (300, 77), (1, 999), (193, 129))
    ]
    found += [
        Case(1, 700, 700, 2, 2, d, {"window": (100, 30)}),
        Case(1, 700, 900, 4, 2, d, {"window": (200, 0), "softcap": 20.0}, sinks=True),
        Case(1, 640, 640, 2, 2, d - 8, {}),
        Case(2, 500, 500, 4, 2, d, {"causal": True, "return_lse": True, "return_row_max": True}),
        Case(2, 512, 512, 2, 2, d, {"return_row_max": True}, gain=12.0),
        Case(2, 300, 0, 2, 2, d, {"return_lse": True}),
        Case(3, 0, 0, 4, 2, d, {}, lengths=((100, 100), (513, 600), (1, 40))),
        Case(4, 0, 0, 4, 1, d, {"causal": True}, lengths=((333, 333), (0, 5), (1, 1), (700, 900))),
    ]
    return found


# --- results -------------------------------------------------------------------------------------


def reference(q: Any, k: Any, v: Any, case: Case, sinks: Any) -> tuple[Any, Any, Any]:
    """O, log-sum-exp and row maximum of one sequence in float64; q is (seq, heads, d)."""
    import torch

    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    softcap = case.options.get("softcap")
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    row = torch.arange(s.shape[1], device=s.device)[:, None] + s.shape[2] - s.shape[1]
    key = torch.arange(s.shape[2], device=s.device)[None]
    left, right = case.options.get("window", (None, None))
    right = 0 if case.options.get("causal") else right
    if right is not None:
        s = s.masked_fill(key > row + right, -math.inf)
    if left is not None:
        s = s.masked_fill(key < row - left, -math.inf)
    top = s.amax(-1) if s.shape[2] else s.new_full(s.shape[:2], -math.inf)
    every = (
        s
        if sinks is None
        else torch.cat([s, sinks.double()[:, None, None].expand(s.shape[0], s.shape[1], 1)], -1)
    )
    lse = every.logsumexp(-1) if every.shape[-1] else top
    p = torch.exp(s - lse[..., None]).nan_to_num(0.0)
    return (p @ v).transpose(0, 1), lse, top


def worst(got: Any, expected: Any) -> float:
    """Relative L2 error; not finite when something is not that should be."""
    import torch

    infinite = torch.isinf(expected)
    if not torch.equal(got[infinite].double(), expected[infinite]):
        return math.inf
    got, expected = got.double()[~infinite], expected[~infinite]
    if not len(expected):
        return 0.0
    return ((got - expected).norm() / (expected.norm() + 1e-30)).item()


def error_of(cfg: Any, case: Case) -> tuple[float, float]:
    """Relative error of O, and of the statistics, the worst of three launches."""
    import torch

    import flashsmith

    torch.manual_seed(case.seq_q + case.heads_q)
    dtype = torch.float16 if cfg.dtype.name == "FP16" else torch.bfloat16
    options: dict[str, Any] = dict(case.options)

    def draw(rows: tuple[int, ...], heads: int) -> Any:
        return torch.randn(*rows, heads, case.d, device="cuda", dtype=dtype)

    if case.lengths:
        q_lens, k_lens = zip(*case.lengths, strict=True)
        q, k, v = (
            draw((sum(q_lens),), case.heads_q),
            *(draw((sum(k_lens),), case.heads_k) for _ in range(2)),
        )
        ends = [torch.tensor([0, *n], device="cuda").cumsum(0).int() for n in (q_lens, k_lens)]
        options |= {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
        options |= {"max_seqlen_q": max(q_lens), "max_seqlen_k": max(k_lens)}
        parts = list(zip(q.split(q_lens), k.split(k_lens), v.split(k_lens), strict=True))
    else:
        q = draw((case.batch, case.seq_q), case.heads_q) * case.gain
        k, v = (draw((case.batch, case.seq_k), case.heads_k) for _ in range(2))
        parts = list(zip(q, k, v, strict=True))
    sinks = torch.randn(case.heads_q, device="cuda") if case.sinks else None
    expected = [reference(*part, case, sinks) for part in parts]
    o = torch.empty_like(q)
    errors, of_statistics = [], [0.0]
    for _ in range(3):
        o.fill_(math.nan)
        result = flashsmith.forward(cfg, q, k, v, o, sinks=sinks, **options)
        torch.cuda.synchronize()
        errors.append(
            worst(
                o,
                torch.cat([e[0] for e in expected])
                if case.lengths
                else torch.stack([e[0] for e in expected]),
            )
        )
        if not case.lengths and isinstance(result, tuple):
            wanted = [1] * bool(options.get("return_lse"))
            wanted += [2] * bool(options.get("return_row_max"))
            of_statistics += [
                worst(result[i + 1], torch.stack([e[w] for e in expected]))
                for i, w in enumerate(wanted)
            ]
    return (max(errors) if all(e == e for e in errors) else math.nan), max(of_statistics)


# --- times ---------------------------------------------------------------------------------------


def tflops(launch: Any, flop: int) -> float:
    """Median rate by do_bench's protocol."""
    from triton.testing import do_bench

    return flop / do_bench(launch, warmup=25, rep=150, return_mode="median") / 1e9


def time_all(configs: list[Any], lengths: list[int]) -> None:
    import torch
    import torch.nn.functional as functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import flashsmith

    for seq in lengths:
        batch = LENGTHS[seq]
        for dtype in sorted({cfg.dtype for cfg in configs}):
            kind = torch.float16 if dtype.name == "FP16" else torch.bfloat16
            d = configs[0].d_head
            q, k, v = (
                torch.randn(batch, seq, HEADS, d, device="cuda", dtype=kind) for _ in range(3)
            )
            for causal in (False, True):
                flop = 4 * batch * HEADS * seq * seq * d // (2 if causal else 1)

                def cudnn(q: Any = q, k: Any = k, v: Any = v, causal: bool = causal) -> Any:
                    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                        return functional.scaled_dot_product_attention(
                            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal
                        )

                peer = tflops(cudnn, flop)
                what = f"{dtype.name} {'causal' if causal else 'full  '} {seq:6d}"
                print(f"{what}: cuDNN {peer:4.0f}", flush=True)
                for cfg in (cfg for cfg in configs if cfg.dtype == dtype):
                    o = torch.empty_like(q)
                    ours = tflops(
                        lambda cfg=cfg, o=o, q=q, k=k, v=v, causal=causal: flashsmith.forward(
                            cfg, q, k, v, o, causal=causal
                        ),
                        flop,
                    )
                    shape = cfg.short_form(include_d_head=False)
                    print(f"{what}: {ours:6.0f} ({ours / peer:.2f} x) {shape}", flush=True)


# --- running -------------------------------------------------------------------------------------


def check(configs: list[Any], mode: str) -> bool:
    """Prints a line for every config and problem; whether all are right."""
    right = True
    for cfg in configs:
        for case in cases(cfg.d_head, mode):
            print(f"  {cfg} | {case} ...", end="", flush=True)
            error, of_statistics = error_of(cfg, case)
            # A wrong tile shows as 1e-2 and more; peaked rows are not rounded better than others.
            ok = error <= MOST_ERROR[cfg.dtype.name] and of_statistics <= 1e-4
            right &= ok
            print(f" {'ok' if ok else 'WRONG'} {error:.1e} {of_statistics:.0e}", flush=True)
    return right


def work(key: str, mode: str, times: bool, lengths: list[int]) -> None:
    """Builds, checks and times; ends with 1 when a result is wrong."""
    from flashsmith.builder import build
    from flashsmith.configs import Semantics, get_kernel_configs
    from flashsmith.runtime.libraries import loaded_kernels

    begin = time.monotonic()
    configs = get_kernel_configs(key)
    for kind in SEMANTICS + WIDE_SEMANTICS * (mode == "wide"):
        loaded_kernels.add(build(configs, arch=90, semantics=Semantics.parse(kind)))
    print(f"built {len(configs)} configs in {time.monotonic() - begin:.0f} s", flush=True)
    right = check(configs, mode)
    print(f"checked after {time.monotonic() - begin:.0f} s: {'right' if right else 'WRONG'}")
    if times:
        time_all(configs, lengths)
    print(f"done after {time.monotonic() - begin:.0f} s", flush=True)
    sys.exit(0 if right else 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kernels", default="hopper")
    parser.add_argument("--quick", dest="mode", action="store_const", const="quick")
    parser.add_argument("--wide", dest="mode", action="store_const", const="wide")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--seconds", type=float, default=240.0)
    args = parser.parse_args()
    lengths = [int(text) for text in args.lengths.split(",")]
    child = multiprocessing.get_context("spawn").Process(
        target=work, args=(args.kernels, args.mode or "normal", not args.no_times, lengths)
    )
    child.start()
    child.join(args.seconds)
    if child.is_alive():
        child.kill()
        print(f"\nkilled after {args.seconds:.0f} s: the last line says what hung", flush=True)
        return 2
    return child.exitcode or 0


if __name__ == "__main__":
    sys.exit(main())
