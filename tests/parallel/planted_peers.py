"""tools/gpu/parallel_bench.py beside stand-ins for PyTorch's context_parallel, which does not run
on the host: as it works on GPUs, and in ways in which it, or its use, may be wrong.

    python planted_peers.py ROWS
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parallel_bench as tool
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import experimental
from torch.distributed.tensor.experimental import _attention
from torch.nn import functional

# As it works, K and V as grouped heads and repeated; without communication, as where PyTorch's
# function is not the one that it puts there; NaN; refuses.
RIGHT, LOCAL, NAN, REFUSING = "allgather", "alltoall", "nan", "refusing"
PEERS = (
    tool.ContextParallel("cudnn", RIGHT, gqa=True),
    tool.ContextParallel("cudnn", RIGHT, gqa=False),
    tool.ContextParallel("cudnn", LOCAL, gqa=False),
    tool.ContextParallel("cudnn", NAN, gqa=False),
    tool.ContextParallel("cudnn", REFUSING, gqa=False),
)
manners: list[str] = []


class Gathered(torch.autograd.Function):
    """Every rank's rows, along dimension 2."""

    @staticmethod
    def forward(ctx: Any, mine: Any) -> Any:
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        total = gradient.contiguous()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size(), 2)[dist.get_rank()]


def attention_of_all(q: Any, k: Any, v: Any, *, is_causal: bool, enable_gqa: bool) -> Any:
    """What this rank's queries see of all ranks' keys, rounded once."""
    repeats = q.shape[1] // k.shape[1] if enable_gqa else 1
    whole, rows = [it.float() for it in (k, v)], torch.arange(q.shape[2])
    if manners[-1] != LOCAL:
        whole = [Gathered.apply(it) for it in whole]
        rows = rows + dist.get_rank() * q.shape[2]
    whole = [it.repeat_interleave(repeats, 1) for it in whole]
    scores = q.float() @ whole[0].transpose(2, 3) * q.shape[3] ** -0.5
    hidden = rows[:, None] < torch.arange(whole[0].shape[2])
    found = scores.masked_fill(hidden, -torch.inf).softmax(3) @ whole[1]
    return (found * torch.nan if manners[-1] == NAN else found).to(q.dtype)


@contextlib.contextmanager
def context_parallel(mesh: Any, *, buffers: Any, **_: Any) -> Iterator[None]:
    if manners[-1] == REFUSING:
        raise NotImplementedError("not on this device")
    for buffer in buffers:
        buffer.set_(buffer.chunk(mesh.size(), 2)[mesh.get_local_rank()].clone())
    before = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = attention_of_all
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before


def measured(rank: int, ranks: int, folder: str, path: Path, options: Any) -> None:
    experimental.context_parallel = context_parallel
    _attention.set_rotate_method = manners.append
    _attention.context_parallel_unshard = lambda mesh, found, dims: [
        Gathered.apply(it) for it in found
    ]
    tool.measuring(rank, ranks, folder, path, options)


def main() -> int:
    options = argparse.Namespace(
        device="cpu", heads=(4, 2), d=64, sizes=[(1, 32)], steps=["speed"], rounds=2,
        measure_ms=1.0, schedules=tool.SCHEDULES, directions=["forward", "both"],
        beside="",
        kernels={"emulate": True}, peers=PEERS,
    )  # fmt: skip
    path = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(measured, (2, folder, path, options), nprocs=2, start_method="spawn")
    return tool.status_of(path, 0)


if __name__ == "__main__":
    sys.exit(main())
