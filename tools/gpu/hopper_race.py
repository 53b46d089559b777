"""Which wgmma configs are worth shipping: candidates proven, then timed in turns beside cuDNN.

    python tools/gpu/hopper_race.py rows.csv [--d 64,128,256] [--masks full,causal] [--seconds 500]
    python tools/gpu/hopper_race.py --list

Each head dimension and mask is a `flashsmith bench` of its own, on the verdict's problems of it, in
a child process: one that hangs is ended, and costs its group. Rows are appended to the CSV file as
they are measured. At the end a line for every problem and every candidate: TFLOP/s over cuDNN's.
The exit status is 1 where cuDNN's output is wrong.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from flashsmith.benchmark.measurement import Measurement
from flashsmith.benchmark.measurement_files import read_rows

MASKS = ("full", "causal")
HEADS = {64: 32, 96: 16, 128: 16, 192: 8, 256: 8}
BATCH = {512: 16, 1024: 16, 4096: 16, 16384: 4}
LENGTHS = {64: (1024, 4096, 16384), 96: (1024, 4096), 128: tuple(BATCH), 192: (1024, 4096)}
LENGTHS[256] = LENGTHS[64]

_THREE = "192, {B_c}, 3wg): tma+stages_2+q_buffers_2+regs_32_160+"
_TWO = "128, {B_c}, 2wg): tma+stages_2+q_buffers_{q}+regs_32_232+"
_TWO_CLUSTERED = "128, {B_c}, 2wg): tma+stages_2+q_buffers_{q}+regs_40_232+"


def _three(B_c: int, rest: str) -> str:
    return _THREE.format(B_c=B_c) + rest + "+rescale_8"


def _two(B_c: int, q: int, rest: str) -> str:
    form = _TWO_CLUSTERED if "cluster_2" in rest else _TWO
    return form.format(B_c=B_c, q=q) + rest + "+rescale_8"


# By head dimension and mask, without dtype and d_head.
CANDIDATES: dict[tuple[int, str], tuple[str, ...]] = {
    (128, "full"): (
        _three(128, "pingpong_gemm+dynamic"),
        _three(128, "pingpong_gemm+cluster_2+dynamic"),
        _three(128, "pingpong_gemm+cluster_2+static_persistent"),
        _three(128, "pingpong_gemm+dynamic+longest_first") + "+section_4",
        _three(128, "pingpong_exp+dynamic"),
        _three(128, "dynamic"),
        _two(128, 2, "overlap+pingpong_gemm+dynamic"),
    ),
    (128, "causal"): (
        _three(128, "pingpong_gemm+dynamic+longest_first"),
        _three(128, "pingpong_gemm+dynamic+longest_first") + "+section_8",
        _three(128, "pingpong_gemm+dynamic"),
        _three(128, "pingpong_gemm+cluster_2+dynamic+longest_first"),
        _two(128, 2, "overlap+pingpong_gemm+dynamic+longest_first"),
        _two(128, 2, "overlap+pingpong_gemm+dynamic+longest_first") + "+section_8",
    ),
    (64, "full"): (
        _three(128, "pingpong_gemm+dynamic"),
        _three(128, "pingpong_gemm+dynamic") + "+exp2_fma_10",
        _three(128, "pingpong_gemm+dynamic") + "+exp2_fma_20",
        _three(128, "overlap+pingpong_gemm+dynamic"),
        _three(128, "overlap+pingpong_gemm+dynamic") + "+exp2_fma_10",
        _three(128, "overlap+pingpong_gemm+dynamic") + "+early_exp",
        _three(128, "overlap+pingpong_gemm+dynamic") + "+exp2_fma_10+early_exp",
        _three(128, "overlap+dynamic") + "+early_exp",
        _three(176, "pingpong_gemm+dynamic"),
        _three(128, "pingpong_exp+dynamic"),
        _three(128, "pingpong_gemm+cluster_2+dynamic"),
        _two(128, 2, "overlap+pingpong_gemm+dynamic"),
        "64, 80, 1wg): tma+stages_2+q_buffers_2+regs_24_136+overlap+dynamic+rescale_8+ctas_3",
    ),
    (64, "causal"): (
        _three(128, "pingpong_gemm+dynamic+longest_first"),
        _three(128, "pingpong_gemm+dynamic+longest_first") + "+section_8",
        _three(128, "pingpong_gemm+dynamic+longest_first") + "+exp2_fma_10",
        _three(128, "overlap+pingpong_gemm+dynamic+longest_first"),
        _three(128, "overlap+pingpong_gemm+dynamic+longest_first") + "+exp2_fma_10",
        _three(128, "overlap+pingpong_gemm+dynamic+longest_first") + "+early_exp",
        _two(128, 2, "overlap+pingpong_gemm+dynamic+longest_first"),
        _two(128, 2, "overlap+pingpong_gemm+dynamic+longest_first") + "+section_8",
        "64, 80, 1wg): tma+stages_2+q_buffers_2+regs_24_136+overlap+dynamic+longest_first+rescale_8"
        "+ctas_3",
    ),
    (256, "full"): (
        _two(80, 1, "overlap+pingpong_gemm+dynamic"),
        _two(80, 1, "overlap+dynamic"),
        _two(80, 1, "overlap+pingpong_gemm+dynamic") + "+early_exp",
        _two(80, 1, "overlap+dynamic") + "+early_exp",
        _two(80, 1, "pingpong_gemm+dynamic"),
        _two(64, 1, "overlap+pingpong_gemm+dynamic"),
        _two(80, 1, "overlap+cluster_2+dynamic"),
        _two(80, 1, "overlap+cluster_2+static_persistent"),
    ),
    (256, "causal"): (
        _two(80, 1, "overlap+pingpong_gemm+dynamic+longest_first"),
        _two(80, 1, "overlap+dynamic+longest_first"),
        _two(80, 1, "overlap+pingpong_gemm+dynamic+longest_first") + "+early_exp",
        _two(80, 1, "overlap+dynamic+longest_first") + "+section_8",
        _two(64, 1, "overlap+pingpong_gemm+dynamic+longest_first"),
        _two(80, 1, "overlap+cluster_2+dynamic+longest_first"),
    ),
    (96, "full"): (
        _three(144, "pingpong_gemm+dynamic"),
        _three(128, "pingpong_gemm+dynamic"),
        _three(112, "overlap+pingpong_gemm+dynamic"),
        _three(112, "overlap+pingpong_gemm+dynamic") + "+early_exp",
    ),
    (96, "causal"): (
        _three(128, "pingpong_gemm+dynamic+longest_first"),
        _three(112, "overlap+pingpong_gemm+dynamic+longest_first"),
        _two(128, 2, "overlap+pingpong_gemm+dynamic+longest_first"),
    ),
    (192, "full"): (
        _two(112, 1, "overlap+pingpong_gemm+dynamic"),
        _two(112, 1, "overlap+dynamic"),
        _two(112, 1, "overlap+dynamic") + "+early_exp",
        _two(80, 2, "overlap+dynamic"),
    ),
    (192, "causal"): (
        _two(96, 1, "overlap+pingpong_gemm+dynamic+longest_first"),
        _two(96, 1, "overlap+dynamic+longest_first"),
        _two(80, 2, "overlap+dynamic+longest_first"),
    ),
}


def dtypes(d: int) -> tuple[str, ...]:
    """What the verdict measures: both at d 128, fp16 elsewhere."""
    return ("FP16", "BF16") if d == 128 else ("FP16",)


def kernels(d: int, mask: str) -> list[str]:
    """The group's short forms."""
    return [f"({dtype}, {d}, {rest}" for dtype in dtypes(d) for rest in CANDIDATES[d, mask]]


def problems(d: int, mask: str) -> Iterator[str]:
    """The group's problems."""
    for dtype in dtypes(d):
        for seq in LENGTHS[d]:
            words = f"b{BATCH[seq]} s{seq} h{HEADS[d]} d{d} {dtype.lower()}"
            yield words + (" causal" if mask == "causal" else "")


def race(d: int, mask: str, csv: Path, seconds: float) -> str:
    """Runs one group; what came of it in a few words."""
    command = [sys.executable, "-m", "flashsmith", "bench", "--peers", "cudnn", "--csv", str(csv)]
    command += ["--kernels", ";".join(kernels(d, mask))]
    for problem in problems(d, mask):
        command += ["--problems", problem]
    begin = time.monotonic()
    try:
        status = subprocess.run(command, timeout=max(1.0, seconds)).returncode
    except subprocess.TimeoutExpired:
        return f"ended after {seconds:.0f} s"
    return f"status {status} after {time.monotonic() - begin:.0f} s"


def ranking(rows: list[Measurement]) -> Iterator[str]:
    """For every problem its candidates, fastest first, as shares of cuDNN."""
    cells: dict[tuple[object, ...], list[Measurement]] = {}
    for row in rows:
        cells.setdefault((row.d, row.dtype, row.semantics, row.seq_k), []).append(row)
    for key, cell in cells.items():
        theirs = next((row for row in cell if row.implementation == "cudnn"), None)
        peer = theirs.tflops if theirs else None
        said = f"{peer:.0f}" if peer else f"{theirs.verdict} {theirs.note}" if theirs else "absent"
        yield f"d{key[0]} {key[1]} {key[2]} {key[3]}: cuDNN {said}"
        ours = [row for row in cell if row.kind == "ours"]
        for row in sorted(ours, key=lambda row: -(row.tflops or 0)):
            share = f"{row.tflops / peer:.3f}" if row.tflops and peer else row.verdict
            yield f"  {share} {row.tflops or 0:4.0f} {row.config}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("csv", type=Path, nargs="?")
    parser.add_argument("--d", default="128,64,256,96,192")
    parser.add_argument("--masks", default=",".join(MASKS))
    parser.add_argument("--seconds", type=float, default=500.0, help="of all groups together")
    parser.add_argument("--list", action="store_true", help="print the candidates and end")
    args = parser.parse_args()
    groups = [(int(d), mask) for d in args.d.split(",") for mask in args.masks.split(",")]
    if args.list or args.csv is None:
        print("\n".join(text for group in groups for text in kernels(*group)))
        return 0
    end = time.monotonic() + args.seconds
    for d, mask in groups:
        print(f"d {d} {mask}: {race(d, mask, args.csv, end - time.monotonic())}", flush=True)
    rows = read_rows(args.csv) if args.csv.exists() else []
    print("\n".join(ranking(rows)) if rows else "no rows")
    return int(any(row.kind == "peer" and row.is_failure for row in rows))


if __name__ == "__main__":
    sys.exit(main())
