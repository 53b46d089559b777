"""DDP and FSDP2 over two processes: the gradients of one process with both halves of the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shared_kernels

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = [pytest.mark.torch, pytest.mark.full]

import flashsmith  # noqa: E402

RANKS = 2
PROBLEM = "b2 s20 h2:1 d64 fp16 causal uneven"
for _text in (PROBLEM, f"{PROBLEM} backward"):
    _choice = flashsmith.choose(_text, 80)
    shared_kernels.want([_choice.config], _choice.problem.semantics)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(32, 4 * 64, bias=False)
        self.output = torch.nn.Linear(128, 32, bias=False)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).half().unflatten(-1, (-1, 64)).transpose(1, 2).split((2, 1, 1), 1)
        o = flashsmith.sdpa(q, k, v, is_causal=True, enable_gqa=True, strict=True, emulate=True)
        return x + self.output(o.transpose(1, 2).flatten(2).float())


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(Layer(), Layer())


def batch() -> Any:
    return torch.randn(2 * RANKS, 20, 32, generator=torch.Generator().manual_seed(1))


def loss_of(model: Any, x: Any) -> Any:
    # The mean over lines alone: do is in fp16.
    return model(x).square().sum() / len(x)


def train(rank: int, kind: str, folder: str) -> None:
    """One process: its half of the batch, then its gradients in a file."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS
    )
    try:
        whole = model()
        if kind == "DDP":
            trained = DistributedDataParallel(whole)
        else:
            mesh = init_device_mesh("cpu", (RANKS,))
            for layer in whole:
                fully_shard(layer, mesh=mesh)
            trained = fully_shard(whole, mesh=mesh)
        loss_of(trained, batch().chunk(RANKS)[rank]).backward()
        gradients = [weight.grad for weight in whole.parameters()]
        if kind == "FSDP2":
            gradients = [gradient.full_tensor() for gradient in gradients]
        torch.save(gradients, f"{folder}/{rank}.pt")
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_two_ranks(kind: str, tmp_path: Path) -> None:
    alone = model()
    loss_of(alone, batch()).backward()
    torch.multiprocessing.spawn(train, (kind, str(tmp_path)), nprocs=RANKS)
    for rank in range(RANKS):
        gradients = torch.load(tmp_path / f"{rank}.pt")
        for ours, weight in zip(gradients, alone.parameters(), strict=True):
            assert (ours - weight.grad).norm() <= 1e-3 * weight.grad.norm()
