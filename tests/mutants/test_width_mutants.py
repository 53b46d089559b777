"""Mistakes with the widths of kernels whose v has another d than q and k. All must be caught.

The default run takes one mistake of three families; ``-m full`` takes all.
"""

from __future__ import annotations

import pytest
import shared_kernels
from backward_cases import Asked
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
_ASKED_DQ = ("b1 s70:150 h3 d120:56 causal", "b1 s70:150 h3 d64:64 causal")
VICTIMS["wgmma_dq"] = OperationVictim(
    config("(FP16, 128:64, 64, 64, 1): tma_dq+k_stages_1+v_stages_2+regs_24_240"),
    CAUSAL,
    (
        *(Asked(f"{text} only_dq", "nonfinite") for text in _ASKED_DQ),
        Asked(f"{_ASKED_DQ[0]} only_dq"),
    ),
)
# The gradient of q by the kernel of the other family.
VICTIMS["separate dq"] = OperationVictim(
    config(
        "(FP16, 64, 64, 64, 1): tma_backward+q_stages_1+do_stages_1+ds_stages_1+regs_24_240"
        "+scores_together+separate_dq"
    ),
    CAUSAL,
    (Asked("b1 s150:200 h2:1 d64 causal"),),
)
VICTIMS["decode"] = OperationVictim(CACHED, CAUSAL, ASKED_OVER_CACHE)
shared_kernels.want([VICTIMS["mma_sync"].config], CAUSAL)
shared_kernels.want([CACHED], CAUSAL)
shared_kernels.want([VICTIMS["wgmma_dq"].config], CAUSAL)

_MMA = "mma_sync/forward_kernel.cuh"
_DQ, _DQ_PRODUCER = "wgmma_dq/static_kernel_configuration.cuh", "wgmma_dq/producer.cuh"
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
    "wgmma_dq": (
        SourcePatch("dP has the columns of q", _DQ, "d_v_steps = (d_head_v + 15) / 16;",
                    "d_v_steps = (d_head + 15) / 16;"),
        SourcePatch("do has Q's panels", _DQ_PRODUCER,
                    "load_queries<Kernel::V_panels>(&args.d_o, Kernel::do_offset, "
                    "Kernel::do_barrier);\n        load_keys<Kernel::V_panels>(V,",
                    "load_queries<Kernel::n_panels>(&args.d_o, Kernel::do_offset, "
                    "Kernel::do_barrier);\n        load_keys<Kernel::V_panels>(V,"),
        SourcePatch("V has K's panels", _DQ_PRODUCER,
                    "load_keys<Kernel::V_panels>(V, &args.v, block);\n#pragma",
                    "load_keys<Kernel::n_panels>(V, &args.v, block);\n#pragma"),
        SourcePatch("stages of V are as long as K's", "wgmma_dq/consumer.cuh",
                    "Kernel::V_tile_bytes>", "Kernel::K_tile_bytes>"),
        SourcePatch("dq has the columns of v", "wgmma_dq/consumer.cuh",
                    "d_of_qk<Kernel>(args)", "d_of_v<Kernel>(args)"),
    ),
    "separate dq": (
        SourcePatch("the main kernel adds dq to sums", "wgmma_backward/config.cuh",
                    "config.without_dq |= separate_dq;", ";"),
        SourcePatch("dq's kernel has smaller tiles than its plan", "wgmma_backward/config.cuh",
                    ".B_c = is_narrow ? 128 : 64,", ".B_c = 64,"),
        SourcePatch("dq's kernel has no mask",
                    "wgmma_backward/static_kernel_configuration.cuh",
                    "StaticHopperDqKernelConfig<CFG_.of_dq_kernel(), SEMANTICS_>",
                    "StaticHopperDqKernelConfig<CFG_.of_dq_kernel()>"),
        SourcePatch("blocks of queries begin with the first of all", "wgmma_dq/query_block.cuh",
                    "n_blocks - 1 - place : place) * Kernel::B_r", "0 : place) * Kernel::B_r"),
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


@pytest.mark.parametrize("name", ["mma_sync", "decode", "wgmma_dq"])
def test_the_first_mistake_is_caught(name: str) -> None:
    assert SUITE.unnoticed_mistakes(name, slice(0, 1)) == set()
