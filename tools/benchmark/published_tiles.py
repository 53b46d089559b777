"""How the cost model ranks the tiles of FlashAttention 2's forward kernels on GPUs for which no
table was measured.

    python tools/benchmark/published_tiles.py

benchmarks/published/flash-attention-2-tiles.json has pairs of tiles, rows x keys x warps of a CTA,
of which the sources of FlashAttention 2 say that one is faster; some say by how much. For each pair
the tool prints the ratio of the estimated times of the best configs with these tiles, and at the
end the rank correlation (Kendall's tau: pairs ordered as published minus the others, over all).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from flashsmith.chooser.cost_model import estimate
from flashsmith.families import FAMILIES, DType, Problem, device_spec

FILE = Path(__file__).parents[2] / "benchmarks/published/flash-attention-2-tiles.json"
# The benchmark of FlashAttention 2: 2,048 columns of heads, 16,384 tokens.
HIDDEN, TOKENS, SEQ = 2048, 16384, 2048

Tile = tuple[int, int, int]


class Pair(NamedTuple):
    """Two tiles of a GPU and problem: ``slower`` takes ``published`` times as long, if known."""

    gpu: str
    d_head: int
    causal: bool
    faster: Tile
    slower: Tile
    published: float | None

    @property
    def problem(self) -> Problem:
        heads = HIDDEN // self.d_head
        mask = " causal" if self.causal else ""
        return Problem.parse(f"b{TOKENS // SEQ} s{SEQ} h{heads} d{self.d_head} fp16{mask}")

    def estimated(self) -> float:
        """The ratio of the estimated times."""
        return _best_ms(self, self.slower) / _best_ms(self, self.faster)


def _best_ms(pair: Pair, tile: Tile) -> float:
    family = FAMILIES["mma_sync"]
    space = family.search_space(DType.FP16, pair.d_head, masked=pair.causal)
    device = device_spec(pair.gpu)
    return min(
        estimate(cfg, pair.problem, device).ms
        for cfg in space
        if (cfg.B_r, cfg.B_c, cfg.n_warps) == tile
    )


def pairs() -> Iterator[Pair]:
    """All pairs of the file."""
    for row in json.loads(FILE.read_text())["pairs"]:
        for gpu in row["gpus"]:
            for causal in row["causal"]:
                tiles = tuple(row["faster"]), tuple(row["slower"])
                yield Pair(gpu, row["d_head"], causal, *tiles, row.get("ratio"))


def correlation(ratios: list[float]) -> float:
    """Kendall's tau of pairs whose published ratio is above 1."""
    ordered = sum(ratio > 1 for ratio in ratios)
    return (2 * ordered - len(ratios)) / len(ratios)


def main() -> None:
    ratios = []
    for pair in pairs():
        ratios.append(pair.estimated())
        published = "-" if pair.published is None else f"{pair.published:.2f}"
        tiles = " over ".join("x".join(map(str, it)) for it in (pair.slower, pair.faster))
        mask = "causal" if pair.causal else "full"
        print(f"{pair.gpu:9} d {pair.d_head:3} {mask:6} {tiles:24} {published:>5} {ratios[-1]:.2f}")
    ordered = sum(ratio > 1 for ratio in ratios)
    print(f"{ordered} of {len(ratios)} pairs as published, tau {correlation(ratios):.2f}")


if __name__ == "__main__":
    main()
