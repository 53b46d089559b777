#!/usr/bin/env python3
"""A tiny transformer whose log-probabilities have the same bits in training, in prefill by chunks,
and in decoding.

The log-probabilities of a text are computed in three ways: by a forward pass as in training, by a
prefill in chunks over a KV cache, and by a prefill whose last tokens are decoded one at a time.
With bits="canonical" the three are equal to the last bit; with the default, bits="free", they are
close.

Attention is not the only layer whose rounding depends on how many tokens are in a call: a matrix
multiplication uses another algorithm for another shape. So everything except attention is computed
for one token at a time, which is simple. A batch-invariant matrix multiplication would do the same
at full speed.

Without a GPU the kernels run in the emulator, for half a minute.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

import flashsmith

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def token_by_token(compute: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """The results of `compute` for each token alone; rows: (length, ...) each."""
    return torch.stack([compute(*row) for row in zip(*(x.unbind(0) for x in rows), strict=True)])


class Block(nn.Module):
    """Attention and an MLP; each has a layer norm before it, and its result is added to its
    input."""

    def __init__(self, heads: int, heads_k: int, d: int) -> None:
        super().__init__()
        width = heads * d
        self.heads, self.d = (heads, heads_k, heads_k), d
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, (heads + 2 * heads_k) * d, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """x: (length, width); attend takes and returns (1, length, heads, d) in bf16."""
        qkv = token_by_token(lambda row: self.qkv(self.norms[0](row)), x).bfloat16()
        o = attend(*(part[None] for part in qkv.unflatten(-1, (-1, self.d)).split(self.heads, 1)))
        x = token_by_token(lambda row, o: row + self.out(o.float()), x, o[0].flatten(1))
        return token_by_token(lambda row: row + self.mlp(self.norms[1](row)), x)


class Transformer(nn.Module):
    def __init__(self, symbols: int, layers: int, heads: int, heads_k: int, d: int) -> None:
        super().__init__()
        self.heads_k, self.d = heads_k, d
        self.embedding = nn.Embedding(symbols, heads * d)
        self.blocks = nn.ModuleList(Block(heads, heads_k, d) for _ in range(layers))
        self.head = nn.Linear(heads * d, symbols, bias=False)

    def forward(self, tokens: Tensor, attend: Attention) -> Tensor:
        """The log-probabilities of the next token: (length, symbols). tokens: (length,)."""
        x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, partial(attend, layer))
        return token_by_token(lambda row: functional.log_softmax(self.head(row), -1), x)


def in_training(model: Transformer, tokens: Tensor, bits: str, emulate: bool) -> Tensor:
    """The log-probabilities of the whole text, with gradients: each layer calls attention()
    once."""

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashsmith.attention(
            q, k, v, causal=True, bits=bits, deterministic=True, emulate=emulate
        )

    found = model(tokens, attend)
    functional.nll_loss(found[:-1], tokens[1:]).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    return found.detach()


@torch.no_grad()
def over_a_cache(
    model: Transformer, tokens: Tensor, chunks: Iterator[int], bits: str, emulate: bool
) -> Tensor:
    """The log-probabilities by attention_with_cache(), one chunk after the other.

    A chunk of one token is a step of decoding.
    """
    shape = (len(model.blocks), 1, len(tokens), model.heads_k, model.d)
    k_cache, v_cache = (
        torch.zeros(shape, dtype=torch.bfloat16, device=tokens.device) for _ in range(2)
    )
    found, done = [], 0
    for chunk in chunks:
        lens = torch.tensor([done], dtype=torch.int32, device=tokens.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, lens: Tensor = lens) -> Tensor:
            return flashsmith.attention_with_cache(
                q, k_cache[layer], v_cache[layer], cache_lens=lens, k=k, v=v, bits=bits,
                emulate=emulate,
            )  # fmt: skip

        found.append(model(tokens[done : done + chunk], attend))
        done += chunk
    return torch.cat(found)


def chunks_of(length: int, size: int, decoded: int = 0) -> Iterator[int]:
    """The lengths of the chunks: `size` tokens each (the last may have fewer), followed by
    `decoded` chunks of one token."""
    prefilled = length - decoded
    yield from (min(size, prefilled - first) for first in range(0, prefilled, size))
    yield from [1] * decoded


def main() -> None:
    on_a_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4500 if on_a_gpu else 40, help="tokens")
    parser.add_argument("--chunk", type=int, default=700 if on_a_gpu else 7, help="of a prefill")
    parser.add_argument("--decoded", type=int, default=100 if on_a_gpu else 4, help="last tokens")
    words = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if on_a_gpu else "cpu"
    model = Transformer(symbols=64, layers=2, heads=4, heads_k=2, d=64).to(device)
    tokens = torch.randint(64, (words.length,), device=device)
    for bits in ("canonical", "free"):
        call = partial(over_a_cache, model, tokens, bits=bits, emulate=not on_a_gpu)
        training = in_training(model, tokens, bits, emulate=not on_a_gpu)
        others = {
            f"prefill in chunks of {words.chunk}": call(chunks_of(words.length, words.chunk)),
            f"{words.decoded} tokens decoded": call(
                chunks_of(words.length, words.length, words.decoded)
            ),
        }
        for name, found in others.items():
            differ = int((found != training).sum())
            print(
                f"{bits:<10} {name:<26} {differ:>7,} of {found.numel():,} log-probabilities differ"
            )
            assert bits == "free" or not differ
            assert torch.allclose(found, training, atol=0.05)


if __name__ == "__main__":
    main()
