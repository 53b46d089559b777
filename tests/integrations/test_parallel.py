"""Gradients over two processes, by DistributedDataParallel and by FSDP2 (gloo, in the emulator):
those of one process with the whole batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = [pytest.mark.torch, pytest.mark.full]

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import flashsmith  # noqa: E402

RANKS, ROWS, HEADS, D = 2, 24, 2, 32
WIDTH = HEADS * D


class Layer(torch.nn.Module):
    """Causal self-attention with a sink a head."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.bfloat16)
        self.sinks = torch.nn.Parameter(torch.tensor([0.5, -0.5], dtype=torch.bfloat16))

    def forward(self, x: Any) -> Any:
        q, k, v = self.project(x).unflatten(-1, (3, HEADS, D)).unbind(-3)
        return flashsmith.attention(q, k, v, causal=True, sinks=self.sinks.float())


def made() -> tuple[Layer, Any]:
    """The layer and a batch of one sequence a rank."""
    torch.manual_seed(0)
    return Layer(), torch.randn(RANKS, ROWS, WIDTH).bfloat16()


def gradients(layer: Any, x: Any) -> list[Any]:
    # The mean over sequences alone, as ranks take theirs: larger than any rounding.
    (layer(x).float().square().sum() / len(x)).backward()
    return [parameter.grad for parameter in layer.parameters()]


def by_ddp(layer: Layer) -> Any:
    return DistributedDataParallel(layer)


def by_fsdp(layer: Layer) -> Any:
    return fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (RANKS,)))


def one_rank(rank: int, wrap: Callable[[Layer], Any], folder: str) -> None:
    store = dist.FileStore(os.path.join(folder, "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    layer, x = made()
    found = gradients(wrap(layer), x[rank : rank + 1])
    whole = [it.full_tensor() if hasattr(it, "full_tensor") else it for it in found]
    if rank == 0:
        torch.save(whole, os.path.join(folder, "gradients.pt"))
    dist.destroy_process_group()


@pytest.mark.parametrize("wrap", [by_ddp, by_fsdp])
def test_two_ranks(
    wrap: Callable[[Layer], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradients(*made())  # which builds the kernels, too
    # Processes import this file by its name, from what this process has in its path.
    monkeypatch.syspath_prepend(Path(__file__).parents[__name__.count(".")])
    mp.spawn(one_rank, (wrap, str(tmp_path)), nprocs=RANKS)
    found = torch.load(tmp_path / "gradients.pt")
    for ours, whole in zip(found, expected, strict=True):
        assert (ours - whole).norm() <= 1e-2 * whole.norm()
