"""Mistakes in kernels of d_head 72 and 80, whose last panel of shared memory is wider than
the columns that exist. All must be caught.

The default run takes one mistake of each family; ``-m full`` takes all.
"""

from __future__ import annotations

import pytest
import shared_kernels
from backward_cases import Asked
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
GRADIENTS = (Asked("b1 s128 h2 d72"), Asked("b1 s128 h2 d72", "nonfinite"))
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
    "mma_sync_backward": OperationVictim(
        config("(FP16, 72, 64, 64, 4): backward+columns_2+stages_2+dq_atomics"),
        Semantics(),
        GRADIENTS,
    ),
    "mma_sync_backward 80": OperationVictim(
        config("(FP16, 80, 64, 64, 4): backward+columns_2+stages_2+dq_atomics"),
        Semantics(),
        (Asked("b1 s128 h2 d80"),),
    ),
    "wgmma_backward": OperationVictim(
        config(
            "(FP16, 72, 64, 64, 1): tma_backward+q_stages_1+do_stages_1+ds_stages_1+regs_24_240"
            "+wide_stores"
        ),
        Semantics(),
        GRADIENTS,
    ),
    # Two warpgroups divide the 96 columns of tiles. Its counters are after the sums.
    "wgmma_backward 80": OperationVictim(
        config(
            "(FP16, 80, 64, 128, 2): tma_backward+q_stages_1+do_stages_1+ds_stages_1+regs_40_232"
            "+ordered_dq"
        ),
        Semantics(),
        (Asked("b1 s128:256 h1 d80"),),
    ),
    "wgmma_dq": OperationVictim(
        config("(FP16, 72, 64, 64, 1): tma_dq+k_stages_1+v_stages_1+regs_24_240"),
        Semantics(),
        (Asked("b1 s128 h2 d72 only_dq"),),
    ),
}
shared_kernels.want([VICTIMS["mma_sync"].config], Semantics())
shared_kernels.want([VICTIMS["mma_sync_backward"].config], Semantics())
shared_kernels.want([VICTIMS["wgmma_backward"].config], Semantics())

_MMA = "mma_sync/static_kernel_configuration.cuh"
_WGMMA, _STORE = "sm90_forward/static_kernel_configuration.cuh", "sm90_forward/output.cuh"
_PANEL = "sm90/wgmma.cuh"
_MMA_BACKWARD = "mma_sync_backward/static_kernel_configuration.cuh"
_WGMMA_BACKWARD = "wgmma_backward/static_kernel_configuration.cuh"
_DQ, _COLUMNS = "wgmma_dq/static_kernel_configuration.cuh", "common/warp_mma.cuh"
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
    "mma_sync_backward": (
        SourcePatch("copies of whole tiles read 96 columns", _MMA_BACKWARD,
                    "has_extent = SEMANTICS.uneven || tile_d > d_head;",
                    "has_extent = SEMANTICS.uneven;"),
        SourcePatch("S lacks the last 8 columns", _MMA_BACKWARD, "d_steps = (d_head + 15) / 16;",
                    "d_steps = d_head / 16;"),
        SourcePatch("dP lacks the last 8 columns", _MMA_BACKWARD, "d_v_steps = (d_v + 15) / 16;",
                    "d_v_steps = d_v / 16;"),
        SourcePatch("sums of dq overlap", "mma_sync_backward/config.cuh",
                    "return (d_head + 15) / 16 * 16;", "return d_head;"),
    ),
    "mma_sync_backward 80": (
        SourcePatch("two warps multiply the same last columns", _COLUMNS,
                    "single(tile, lane % 16, turn) {}", "single(tile, lane % 16, 0) {}"),
        SourcePatch("the last columns are stored as if they were pairs",
                    "mma_sync_backward/common_parts.cuh",
                    "single(tile, first_row + lane / 4, turn,",
                    "single(tile, first_row + lane / 4, 2 * turn,"),
    ),
    "wgmma_backward": (
        SourcePatch("S lacks the last 8 columns", _WGMMA_BACKWARD,
                    "d_steps = (columns + 15) / 16;", "d_steps = columns / 16;"),
        SourcePatch("dP lacks the last 8 columns", _WGMMA_BACKWARD,
                    "d_v_steps = (V_columns + 15) / 16;", "d_v_steps = V_columns / 16;"),
        SourcePatch("panels of Q and do are a row further apart",
                    "wgmma_backward/consumer_state.cuh",
                    "Panel::descriptor(opaque(tile), Kernel::Q_panel_bytes);",
                    "Panel::descriptor(opaque(tile), Kernel::Q_panel_bytes + 64);"),
        SourcePatch("columns after the last one are stored", "backward/store_gradient.cuh",
                    "8 * (n + lane % 4) < columns", "8 * (n + lane % 4) <= columns"),
    ),
    "wgmma_backward 80": (
        SourcePatch("counters are among the sums", "wgmma_backward/dq_order.cuh",
                    "Kernel::B_r * Kernel::dq_sum_columns)", "Kernel::B_r * Kernel::d_head)"),
        SourcePatch("sums of the second half are 40 columns behind", _WGMMA_BACKWARD,
                    "part_sums = kWarpgroupRows * dq_columns;",
                    "part_sums = kWarpgroupRows * (d_head / dq_parts);"),
        SourcePatch("S reads K's panels in the order of the columns", _WGMMA_BACKWARD,
                    "place_of_V_panel(k / kSteps) : place_of_panel(k / kSteps);",
                    "place_of_V_panel(k / kSteps) : k / kSteps;"),
    ),
    "wgmma_dq": (
        SourcePatch("S lacks the last 8 columns", _DQ, "d_steps = (d_head + 15) / 16;",
                    "d_steps = d_head / 16;"),
        SourcePatch("dP lacks the last 8 columns", _DQ, "d_v_steps = (d_head_v + 15) / 16;",
                    "d_v_steps = d_head_v / 16;"),
        SourcePatch("panels of K are a row further apart", "wgmma_dq/consumer.cuh",
                    "Panel::descriptor(opaque(keys), Kernel::KV_panel_bytes);",
                    "Panel::descriptor(opaque(keys), Kernel::KV_panel_bytes + 64);"),
        SourcePatch("the tile after the last one is stored", "backward/store_gradient.cuh",
                    "exists && 8 * (n + odd) < columns", "exists && 8 * (n + odd) <= columns"),
    ),
}  # fmt: skip
SUITE = MutantSuite(VICTIMS, mistakes=MISTAKES)


@pytest.mark.parametrize("name", ["mma_sync", "wgmma", "mma_sync_backward"])
def test_the_first_mistake_is_caught(name: str) -> None:
    assert SUITE.unnoticed_mistakes(name, slice(0, 1)) == set()
