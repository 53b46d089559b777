"""Mistakes with the widths of kernels whose v has another d than q and k. All must be caught.

The default run takes one mistake; ``-m full`` takes all of both families.
"""

from __future__ import annotations

import pytest
import shared_kernels
from mutant_suite import MutantSuite
from operation_victims import AskedForward, OperationVictim, SourcePatch

from flashsmith.families import Semantics
from flashsmith.families import parse_kernel_name_into_config as config

CAUSAL = Semantics("causal", uneven=True)
# The gaps between the rows of 'nonfinite' inputs are NaN, and each tensor's has another width.
ASKED = (
    AskedForward("b1 s70:100 h3 d120:56 causal", "nonfinite"),
    AskedForward("b1 s70:100 h3 d120:56 causal"),
    AskedForward("b1 s70:100 h3 d64:64 causal", "nonfinite"),
    AskedForward("b1 s70:100 h3 d56:64 causal", "nonfinite"),
)
VICTIMS = {
    "mma_sync": OperationVictim(
        config(
            "(FP16, 128:64, 64, 32, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax+stages_2"
        ),
        CAUSAL,
        ASKED,
    ),
    "wgmma": OperationVictim(
        config("(FP16, 128:64, 64, 32, 1wg): tma+stages_2+q_buffers_1+regs_24_240+direct_O"),
        CAUSAL,
        ASKED,
    ),
}
shared_kernels.want([VICTIMS["mma_sync"].config], CAUSAL)

_MMA = "mma_sync/forward_kernel.cuh"
_KEYS = "K_rows - block * Kernel::B_c, "
MISTAKES = {
    "mma_sync": (
        SourcePatch("V's columns are K's", _MMA, f"{_KEYS}d_of_v<Kernel>(args));",
                    f"{_KEYS}d_of_qk<Kernel>(args));"),
        SourcePatch("K's columns are V's", _MMA, f"{_KEYS}d_of_qk<Kernel>(args));",
                    f"{_KEYS}d_of_v<Kernel>(args));"),
        SourcePatch("O's columns are Q's", _MMA, "TileExtent{Q_rows, d_of_v<Kernel>(args)",
                    "TileExtent{Q_rows, d_of_qk<Kernel>(args)"),
        SourcePatch("a stage has no V", "mma_sync/static_kernel_configuration.cuh",
                    "KLayout::kBytes + (CFG.d_v > 0 ? VLayout::kBytes : 0);", "KLayout::kBytes;"),
    ),
    "wgmma": (
        SourcePatch("stages of V are as long as K's", "sm90_forward/consumer.cuh",
                    "Kernel::V_tile_bytes,", "Kernel::K_tile_bytes,"),
        SourcePatch("V has K's panels", "wgmma/producer.cuh",
                    "Pipeline::kBytes / Kernel::KV_panel_bytes", "Kernel::n_panels"),
    ),
}  # fmt: skip
SUITE = MutantSuite(VICTIMS, {}, MISTAKES, (), lambda name, role: (), {})


def test_mistakes_are_in_the_sources() -> None:
    """A change of the kernels' source has not made them void."""
    assert SUITE.void_mistakes() == []


def test_the_first_mistake_is_caught() -> None:
    assert SUITE.unnoticed_mistakes("mma_sync", slice(0, 1)) == set()


@pytest.mark.full
@pytest.mark.parametrize("name", VICTIMS)
def test_the_kernels_themselves_are_right(name: str) -> None:
    """Their every problem: else all mistakes were caught."""
    assert not VICTIMS[name].run().caught


@pytest.mark.full
@pytest.mark.parametrize(("name", "chosen"), SUITE.mistake_params())
def test_mistakes_are_caught(name: str, chosen: slice) -> None:
    assert SUITE.unnoticed_mistakes(name, chosen) == set()
