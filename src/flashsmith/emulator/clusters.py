"""How CTAs group into clusters: ranks, cluster numbers, peers, by flat CTA number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Extent = tuple[int, int, int]


@dataclass(frozen=True)
class Clusters:
    """Clusters of a grid. CTAs are flat numbers, ``x + grid_x * (y + grid_y * z)``."""

    grid: Extent
    cluster: Extent

    @property
    def size(self) -> int:
        """CTAs of one cluster."""
        return self.cluster[0] * self.cluster[1] * self.cluster[2]

    def rank(self, cta: Any) -> Any:
        """Rank of CTAs (ints or arrays) within their cluster."""
        if self.size == 1:
            return cta * 0
        (gx, gy, _), (cx, cy, cz) = self.grid, self.cluster
        return cta % gx % cx + cx * (cta // gx % gy % cy + cy * (cta // gx // gy % cz))

    def number(self, cta: Any) -> Any:
        """Flat number of the CTAs' cluster."""
        if self.size == 1:
            return cta
        (gx, gy, _), (cx, cy, cz) = self.grid, self.cluster
        row = cta // gx % gy // cy + gy // cy * (cta // gx // gy // cz)
        return cta % gx // cx + gx // cx * row

    def peer(self, cta: Any, rank: Any) -> Any:
        """The CTA of a rank in the cluster of ``cta``; both ints or arrays."""
        if self.size == 1:
            return cta + rank * 0
        (gx, gy, _), (cx, cy, cz) = self.grid, self.cluster
        x = cta % gx // cx * cx + rank % cx
        y = cta // gx % gy // cy * cy + rank // cx % cy
        z = cta // gx // gy // cz * cz + rank // cx // cy
        return x + gx * (y + gy * z)
