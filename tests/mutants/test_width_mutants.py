"""Mistakes with the widths of kernels whose v has another d than q and k. All must be caught.

The default run takes one mistake of two families; ``-m full`` takes all.
"""

from __future__ import annotations

import pytest
import shared_kernels
from decode_mistakes import AskedDecode
from mutant_suite import (  # noqa: F401 - the tests are tests of this file
    MutantSuite,
    test_mistakes_are_caught,
    test_mistakes_are_in_the_sources,
    test_the_kernels_themselves_are_right,
)
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
# Over a cache; 'heads first' has NaN between rows, too.
_CACHED = {"append": True, "layout": "heads first"}
ASKED_OVER_CACHE = (
    AskedDecode("b2 s2:300 h4:2 d120:56 causal", options=_CACHED),
    AskedDecode(
        "b2 s2:300 h4:2 d120:56 causal page24",
        options={**_CACHED, "rotary": "halves", "rotary_half": 30},
    ),
    AskedDecode("b1 s1:900 h4:1 d128:48 causal", options={"lens_k": (900,), **_CACHED}),
    AskedDecode("b2 s40:200 h4:2 d120:56 causal", options={"layout": "heads first"}),
)
CACHED = config("(FP16, 128:64, 16, 64, 4): decode+stages_3+least_128+parts_2+chunks_64")
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
VICTIMS["decode"] = OperationVictim(CACHED, CAUSAL, ASKED_OVER_CACHE)
shared_kernels.want([VICTIMS["mma_sync"].config], CAUSAL)
shared_kernels.want([CACHED], CAUSAL)

_MMA = "mma_sync/forward_kernel.cuh"
_APPEND, _COPIES = "mma_sync_decode/append_kernel.cuh", "mma_sync_decode/run_copies.cuh"
_STATE, _SPLIT = "mma_sync_decode/row_state.cuh", "mma_sync_decode/split.cuh"
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
    "decode": (
        SourcePatch("appended values have K's columns", _APPEND,
                    "kOfValues ? d_of_v<Kernel>(args)", "kOfValues ? d_of_qk<Kernel>(args)"),
        SourcePatch("appended keys have V's columns", _APPEND,
                    ": d_of_qk<Kernel>(args));", ": d_of_v<Kernel>(args));"),
        SourcePatch("values are cut as keys", _COPIES,
                    "(!kCutsValues || element < d_of_v<Kernel>(args))",
                    "(!kCutsKeys || element < d_of_qk<Kernel>(args))"),
        SourcePatch("keys are cut as values", _COPIES,
                    "(!kCutsKeys || element < d_of_qk<Kernel>(args));",
                    "(!kCutsKeys || element < d_of_v<Kernel>(args));"),
        SourcePatch("values of a page are cut as keys", _COPIES,
                    "v_first + kPanelElements * p < d_of_v<Kernel>(args)",
                    "v_first + kPanelElements * p < d_of_qk<Kernel>(args)"),
        SourcePatch("values have K's panels", _COPIES, "if (p < ValuesLayout::kWidePanels)",
                    "if (p < KeysLayout::kWidePanels)"),
        SourcePatch("keys have V's panels", _COPIES, "if (p < KeysLayout::kWidePanels)",
                    "if (p < ValuesLayout::kWidePanels)"),
        SourcePatch("queries are cut as values", _COPIES,
                    "chunk * kChunkElements < d_of_qk<Kernel>(args)",
                    "chunk * kChunkElements < d_of_v<Kernel>(args)"),
        SourcePatch("o has the columns of q", _STATE, "if (column < d_of_v<Kernel>(args))",
                    "if (column < d_of_qk<Kernel>(args))"),
        SourcePatch("values begin where keys of their width end", _COPIES,
                    "return K_tile(stage) + KeysLayout::kBytes;",
                    "return K_tile(stage) + ValuesLayout::kBytes;"),
        SourcePatch("the width of v is q's", _STATE, "args.d >> 16", "args.d & 0xffff"),
        SourcePatch("parts' states are as wide as keys", _SPLIT,
                    "(first + int64_t{part} * rows + row) * Kernel::d_v;",
                    "(first + int64_t{part} * rows + row) * Kernel::d_head;"),
    ),
}  # fmt: skip
SUITE = MutantSuite(VICTIMS, mistakes=MISTAKES)


@pytest.mark.parametrize("name", ["mma_sync", "decode"])
def test_the_first_mistake_is_caught(name: str) -> None:
    assert SUITE.unnoticed_mistakes(name, slice(0, 1)) == set()
