#!/usr/bin/env python3
"""Uses flashsmith.sdpa in a PyTorch module instead of scaled_dot_product_attention.

With a GPU the module runs there. On the host, PyTorch would compute the attention. With
FLASHSMITH_EMULATE=1, the emulator executes flashsmith's kernel there, which is slow.
"""

from __future__ import annotations

import os

import torch
from torch import nn

import flashsmith


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, attend=flashsmith.sdpa) -> torch.Tensor:
        """x: (batch, length, width); attend is called like scaled_dot_product_attention."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        o = attend(q, k, v, is_causal=True)
        return self.out(o.transpose(1, 2).flatten(-2))


def main() -> None:
    os.environ.setdefault("FLASHSMITH_EMULATE", "1")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = SelfAttention(width=256, heads=4).to(device, torch.float16).eval()
    x = torch.randn(1, 100, 256, device=device, dtype=torch.float16)
    with torch.no_grad():  # With gradients, sdpa() calls PyTorch and warns
        ours = layer(x)
        theirs = layer(x, attend=nn.functional.scaled_dot_product_attention)
    error = (ours - theirs).abs().max().item()
    print(f"on {device}: largest difference from PyTorch's {error:.1e}")
    assert error < 2e-3


if __name__ == "__main__":
    main()
