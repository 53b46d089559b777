"""The kernels that compute first_row: their config, its rules, and what is known of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from flashsmith.families import DType
from flashsmith.families.config import THREADS_PER_WARP, KernelConfig
from flashsmith.families.cpp import CppNames
from flashsmith.families.family import ConfigSet, Family
from flashsmith.families.knob import knob
from flashsmith.families.rule import Rule, supported


@dataclass(frozen=True, order=True)
class FirstRowKernelConfig(KernelConfig):
    """One kernel; csrc/first_row/config.cuh has the same fields in the same order."""

    FAMILY: ClassVar[str] = "first_row"
    OLDEST_ARCH: ClassVar[int] = 80
    # '(FP16, 64, 2): first_row+staged'
    SHAPE: ClassVar[tuple[str, ...]] = ("dtype", "d_head", "n_warps")
    LEADING_WORD: ClassVar[str] = "first_row"

    dtype: DType = knob("element type of v and o", values=tuple(DType))
    d_head: int = knob("head dimension, elements", values=(64, 128))
    n_warps: int = knob("warps per CTA, which copies one row", values=(1, 2, 4))
    staged: bool = knob(
        "the row goes through a workspace, in two launches", word="staged", default=False
    )

    @property
    def n_threads(self) -> int:
        return THREADS_PER_WARP * self.n_warps

    def smem_bytes(self, elem_size: int = 2) -> int:
        return 0

    def fills_tiles(self, seq_q: int, seq_k: int, d: int) -> bool:
        return True


NO_IDLE_THREADS = Rule(
    "no_idle_threads",
    "32 n_warps, the threads of a CTA, must be at most d_head: each copies an element or more",
    lambda cfg, device: cfg.n_threads <= cfg.d_head,
    ("n_warps", "d_head"),
)


def first_row_configs(
    dtypes: Sequence[DType] = tuple(DType), d_heads: Sequence[int] = (64, 128)
) -> list[FirstRowKernelConfig]:
    """Kernels of two warps, which every d_head has threads for."""
    return [
        FirstRowKernelConfig(dtype, d_head, 2, staged)
        for dtype in dtypes
        for d_head in d_heads
        for staged in (False, True)
    ]


class FirstRowFamily(Family):
    """Kernels that copy one row per batch and head."""

    config_class = FirstRowKernelConfig
    title = "first_row"
    operation = "first_row"
    rules = (
        supported(FirstRowKernelConfig, "d_head"),
        supported(FirstRowKernelConfig, "n_warps"),
        NO_IDLE_THREADS,
    )
    space_key = "first-row"
    sets: ClassVar[Mapping[str, ConfigSet]] = {
        "first-row": ConfigSet("kernels that copy a first row", first_row_configs)
    }
    csrc = Path(__file__).parent / "csrc" / "first_row"
    cpp = CppNames(
        config_header="first_row/config.cuh",
        kernel_header="first_row/kernel.cuh",
        kernel="first_row_kernel",
        static_config="StaticFirstRowConfig",
        function="first_row_kernel_fn",
        plan_header="first_row/plan.h",
        plan_function="plan_first_row",
    )

    def kernel_templates(self, cfg: Any) -> Mapping[str, str]:
        second = {"finish": "finish_row_kernel"} if cfg.staged else {}
        return {"main": self.cpp.kernel, **second}

    def search_space(
        self, dtype: DType, d_head: int, masked: bool
    ) -> Sequence[FirstRowKernelConfig]:
        return first_row_configs((dtype,), (d_head,))
