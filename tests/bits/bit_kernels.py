"""Small canonical kernels of every family, for the tests of this folder and of mutants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from flashsmith.families import DType, KernelConfig, parse_kernel_name_into_config
from flashsmith.families.canonical import canonical_tile
from flashsmith.families.head_dims import PAIRS, HeadDims

D_HEADS = (64, 96, 128, 256, 512)


@dataclass(frozen=True)
class Kernels:
    """Those for a dtype and d, of a class of GPUs: 90 for sm_90, 80 for those before it."""

    dtype: DType
    d: int
    arch: int = 90
    #: That of v; 0 stands for d.
    d_v: int = 0

    @property
    def widths(self) -> HeadDims:
        """Of the kernels."""
        if self.d_v in (0, self.d):
            return min(d_head for d_head in D_HEADS if d_head >= self.d)
        fitting = [it for it in PAIRS if it.d_head >= self.d and it.d_v >= self.d_v]
        return min(fitting, key=sum)

    @property
    def widest(self) -> int:
        return self.widths if isinstance(self.widths, int) else max(self.widths)

    @property
    def tile(self) -> int:
        return canonical_tile(self.d, self.arch, self.d_v)

    def _named(self, rows: int, workers: str, knobs: str) -> KernelConfig:
        shape = f"({self.dtype.name}, {self.widths}, {rows}, {self.tile}, {workers})"
        return parse_kernel_name_into_config(f"{shape}: {knobs}+canonical_1")

    @cached_property
    def mma_sync(self) -> KernelConfig:
        loads, stages = ("0_2_2", "+stages_2") if self.widest <= 128 else ("2_2_2", "")
        knobs = f"async+eager+swizzled+load_{loads}_tiles+opt_softmax{stages}"
        return self._named(64, "4", knobs)

    @cached_property
    def mma_sync_of_groups(self) -> KernelConfig:
        """With one tile of K and V, up to d 128 32 rows a warp, and the heads of a group side by
        side."""
        warps = "2" if self.widest <= 128 else "4"
        knobs = "async+eager+swizzled+load_2_2_2_tiles+opt_softmax+trim+pack_gqa"
        return self._named(64, warps, knobs)

    @cached_property
    def wgmma(self) -> KernelConfig:
        place = "+direct_O" if self.d_v > self.d or self.widest > 256 else ""
        regs = "24_240" if self.widest > 256 else "32_240"
        knobs = f"tma+stages_2+q_buffers_1+regs_{regs}+static_persistent"
        return self._named(64, "1wg", f"{knobs}{place}")

    @cached_property
    def wgmma_in_turns(self) -> KernelConfig:
        """Two warpgroups, whose softmax hides behind each other's products."""
        buffers, end = (2, "") if self.widest <= 128 else (1, "+direct_O")
        end = "+direct_O" if self.d_v > self.d else end
        return self._named(
            128,
            "2wg",
            f"tma+stages_2+q_buffers_{buffers}+regs_32_232+overlap+pingpong_gemm+dynamic"
            f"+longest_first{end}",
        )

    @cached_property
    def decode(self) -> KernelConfig:
        warps = 4 if self.tile >= 64 or self.widest > 256 else 2
        stages = 3 if self.widest <= 128 else 2
        return self._named(16, str(warps), f"decode+stages_{stages}+least_128+parts_1")

    def forward(self) -> Iterator[KernelConfig]:
        """All that compute whole sequences."""
        if self.arch >= 90:
            yield self.wgmma
            yield self.wgmma_in_turns
        yield self.mma_sync
        yield self.mma_sync_of_groups
