"""Mistakes in forward kernels of d_head 72 and 80, whose last panel of shared memory is wider than
the columns that exist. All must be caught.

The default run takes one mistake of each family; ``-m full`` takes all.
"""

from __future__ import annotations

import pytest
import shared_kernels
from mutant_suite import (  # noqa: F401 - the tests are tests of this file
    MutantSuite,
    test_mistakes_are_caught,
    test_mistakes_are_in_the_sources,
    test_the_kernels_themselves_are_right,
)
from operation_victims import AskedForward, OperationVictim, SourcePatch

from flashsmith.families import Problem, Semantics
from flashsmith.families import parse_kernel_name_into_config as config


class AskedWhole(AskedForward):
    """A problem of whole tiles, whose kernels know d when they are compiled."""

    def problem(self, cfg: object) -> Problem:
        return Problem.parse(f"{self.sizes} fp16")


# Behind the columns of a row are those of the next head, or NaN.
WHOLE = (AskedWhole("b1 s128 h3 d72"), AskedWhole("b1 s128 h3 d72", "nonfinite"))
SPLIT = (AskedWhole("b1 s64:640 h2 d80"),)
VICTIMS = {
    "mma_sync": OperationVictim(
        config("(FP16, 72, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax"),
        Semantics(),
        WHOLE,
    ),
    "wgmma": OperationVictim(
        config("(FP16, 72, 64, 32, 1wg): tma+stages_2+q_buffers_1+regs_24_240+direct_O"),
        Semantics(),
        WHOLE,
    ),
    "wgmma 80": OperationVictim(
        config("(FP16, 80, 64, 32, 1wg): tma+stages_2+q_buffers_1+regs_24_240+split_4"),
        Semantics(),
        SPLIT,
    ),
}
shared_kernels.want([VICTIMS["mma_sync"].config], Semantics())

_MMA = "mma_sync/static_kernel_configuration.cuh"
_WGMMA, _STORE = "sm90_forward/static_kernel_configuration.cuh", "sm90_forward/output.cuh"
_PANEL = "sm90/wgmma.cuh"
MISTAKES = {
    "mma_sync": (
        SourcePatch("copies of whole tiles read 96 columns", _MMA,
                    "SEMANTICS.uneven || tile_columns(d_head) > d_head;", "SEMANTICS.uneven;"),
        SourcePatch("Q K^T lacks the last 8 columns", _MMA, "(CFG.d_head + 15) / 16;",
                    "CFG.d_head / 16;"),
    ),
    "wgmma": (
        SourcePatch("Q K^T lacks the last 8 columns", _WGMMA, "QK_steps = (d_head + 15) / 16;",
                    "QK_steps = d_head / 16;"),
        SourcePatch("the tile after the last one is stored", _STORE,
                    "exists && (n + 1 < kTiles || !odd) &&", "exists &&"),
    ),
    "wgmma 80": (
        SourcePatch("the last 16 columns are those of the panel before", _PANEL,
                    "(k / kStepsPerPanel * kRows * kRowBytes +",
                    "((k > 3 ? 1 : k / kStepsPerPanel) * kRows * kRowBytes +"),
        SourcePatch("panels of V are a row further apart", "sm90_forward/consumer.cuh",
                    "Panel::descriptor(V.tile(), Kernel::KV_panel_bytes);",
                    "Panel::descriptor(V.tile(), Kernel::KV_panel_bytes + 64);"),
        SourcePatch("parts' rows are as wide as a tile of d 96", _STORE,
                    "int64_t{info.part_row + row} * Kernel::d_v",
                    "int64_t{info.part_row + row} * (Kernel::d_v + 16)"),
    ),
}  # fmt: skip
SUITE = MutantSuite(VICTIMS, mistakes=MISTAKES)


@pytest.mark.parametrize("name", ["mma_sync", "wgmma"])
def test_the_first_mistake_is_caught(name: str) -> None:
    assert SUITE.unnoticed_mistakes(name, slice(0, 1)) == set()
