"""Values of the tests of FlashAttention 2, 3 and 4 (tests/test_flash_attn.py,
hopper/test_flash_attn.py, tests/cute/test_flash_attn.py and test_flash_attn_varlen.py).

Left out are dropout and ALiBi, which are refused, fp8, qv, and the backward pass.
"""

from __future__ import annotations

from peer_suites.case import PeerCase, PeerTest

_BOOLS = (False, True)
_BOTH = ("fp16", "bf16")
_MASKS = [(False, ""), (True, ""), (False, "both"), (True, "both")]
_CAUSAL_OR_LOCAL = [(False, ""), (True, ""), (False, "both")]
_FA2_D = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
_FA2_HEADS = [(6, 6), (6, 1), (6, 2)]
_FA2_LENGTHS = [
    (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024),
    (1023, 1024), (1024, 1023), (2048, 2048),
]  # fmt: skip
_FA2_CAUSAL_LENGTHS = [
    (1, 239), (3, 799), (127, 512), (127, 513), (113, 203), (128, 217), (113, 211), (108, 256),
    (256, 512), (1023, 1024), (239, 1), (799, 3), (512, 127), (513, 127), (203, 113), (217, 128),
    (211, 113), (256, 108), (512, 256), (1024, 1023),
]  # fmt: skip
_CACHE_LENGTHS = [
    (1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000),
    (128, 128),
]  # fmt: skip
_ROTARIES = [(0.0, False), (0.5, False), (0.5, True), (1.0, False), (1.0, True)]


def _is_cache_case(case: PeerCase) -> bool:
    """Rotation is of what is appended, and that fits."""
    return not (case.rotary and not case.append) and not (
        case.append and case.lengths[0] > case.lengths[1]
    )


def _is_fa2_cache_case(case: PeerCase) -> bool:
    return _is_cache_case(case) and not (case.page and (case.leftpad or case.batch_idx))


def _is_fa3_cache_case(case: PeerCase) -> bool:
    return _is_cache_case(case) and not (case.page and case.lengths[1] % case.page)


FLASH_ATTENTION_2 = [
    PeerTest("fa2", "qkvpacked", "dense", {
        "dtype": _BOTH, "heads": [(9, 9)], "batch": [4], "d": _FA2_D,
        ("causal", "local"): _MASKS,
        "lengths": [(n, n) for n in (97, 128, 200, 384, 768, 1024, 1025, 2048)],
    }, 80),
    PeerTest("fa2", "varlen_qkvpacked", "packed", {
        "dtype": _BOTH, "heads": [(6, 6)], "batch": [5], "d": _FA2_D,
        ("causal", "local"): _MASKS,
        "lengths": [(n, n) for n in (97, 128, 200, 257, 384, 512, 768, 1025, 2048)],
    }, 80),
    PeerTest("fa2", "output", "dense", {
        "dtype": _BOTH, "heads": _FA2_HEADS, "batch": [4], "d": _FA2_D,
        ("causal", "local"): _MASKS, "softcap": [0.0, 50.0], "lengths": _FA2_LENGTHS,
    }, 180),
    PeerTest("fa2", "varlen_output", "packed", {
        "dtype": _BOTH, "heads": _FA2_HEADS, "batch": [4], "d": _FA2_D,
        ("causal", "local"): _MASKS, "softcap": [0.0, 50.0], "lengths": [(1, 147), *_FA2_LENGTHS],
    }, 220),
    PeerTest("fa2", "causal", "dense", {
        "dtype": _BOTH, "heads": [(9, 9)], "batch": [8], "d": _FA2_D, "causal": [True],
        "local": ["", "both"], "lengths": _FA2_CAUSAL_LENGTHS,
    }, 120),
    PeerTest("fa2", "varlen_causal", "packed", {
        "dtype": _BOTH, "heads": [(9, 9)], "batch": [8], "d": _FA2_D, "causal": [True],
        "local": ["", "both"], "page": [0, 256, 512], "lengths": _FA2_CAUSAL_LENGTHS,
    }, 160),
    PeerTest("fa2", "splitkv", "dense", {
        "dtype": _BOTH, "heads": [(12, 12)], "batch": [1], "d": _FA2_D,
        ("causal", "local"): _MASKS,
        "lengths": [
            (3, 1024), (1, 339), (64, 800), (3, 799), (64, 2048), (16, 20000), (16, 100000),
            (128, 128), (256, 256), (1024, 3), (339, 1), (800, 64), (799, 3), (2048, 64),
        ],
    }, 100),
    PeerTest("fa2", "kvcache", "cache", {
        "dtype": ["fp16"], "heads": [(6, 6), (6, 1), (6, 3)], "batch": [2],
        "d": [32, 59, 64, 80, 128, 256], ("causal", "local"): _MASKS,
        "append": ["", "as many", "others"], ("rotary", "interleaved"): _ROTARIES,
        "page": [0, 256], "leftpad": _BOOLS, "splits": [1, 0],
        "lengths": [*_CACHE_LENGTHS, (1, 131072), (16, 131072)],
    }, 360, _is_fa2_cache_case),
]  # fmt: skip

_FA3_LENGTHS = [
    (1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128),
    (128, 217), (113, 211), (108, 256), (256, 512), (384, 256), (640, 128), (512, 256),
    (1024, 1024), (1023, 1024), (1024, 1023), (4096, 4096), (4224, 4224),
]  # fmt: skip
_FA3_VARLEN_LENGTHS = [
    (1, 1), (1, 3), (2, 1), (511, 1), (3, 513), (64, 128), (128, 128), (256, 256), (113, 203),
    (128, 217), (113, 211), (108, 256), (256, 512), (307, 256), (640, 128), (512, 256),
    (1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048), (4096, 4096),
]  # fmt: skip

FLASH_ATTENTION_3 = [
    PeerTest("fa3", "output", "dense", {
        "dtype": _BOTH, "heads": _FA2_HEADS, "batch": [9], "d": [64, 96, 128, 192, 256],
        ("causal", "local"): _MASKS, "softcap": [0.0, 15.0], "lengths": _FA3_LENGTHS,
    }, 160),
    PeerTest("fa3", "varlen_output", "packed", {
        "dtype": _BOTH, "heads": _FA2_HEADS, "batch": [9], "d": [64, 96, 128, 192, 256],
        ("causal", "local"): _MASKS, "softcap": [0.0, 15.0], "used": _BOOLS,
        "unequal": ["near", "third", "full"], "lengths": _FA3_VARLEN_LENGTHS,
    }, 240),
    PeerTest("fa3", "kvcache", "cache", {
        "dtype": ["bf16"], "heads": [(6, 6), (6, 1), (6, 3)], "batch": [5], "d": [128],
        ("causal", "local"): _CAUSAL_OR_LOCAL, "append": ["", "as many", "others"],
        ("rotary", "interleaved"): _ROTARIES, "page": [0, 1, 4, 128], "leftpad": _BOOLS,
        "batch_idx": _BOOLS, "packed_queries": _BOOLS, "splits": [1, 3, 0],
        "lengths": [*_CACHE_LENGTHS, (256, 512), (2048, 3577)],
    }, 400, _is_fa3_cache_case),
]  # fmt: skip

_FA4_MASKS = [(False, ""), (True, ""), *((False, it) for it in ("both", "before", "after"))]
_FA4_VARLEN_MASKS = [(False, ""), (True, ""), *((False, it) for it in ("both", "right", "left"))]

FLASH_ATTENTION_4 = [
    PeerTest("fa4", "output", "dense", {
        "dtype": ["bf16"], "heads": [(6, 6), (6, 1), (6, 3)], "batch": [9],
        "d": [64, 96, 128, 192, 256], ("causal", "local"): _FA4_MASKS, "softcap": [0.0, 15.0],
        "sinks": _BOOLS,
        "lengths": [(3, 3), (64, 32), (64, 1), (255, 256), *_FA3_LENGTHS],
    }, 200),
    PeerTest("fa4", "varlen_output", "packed", {
        "dtype": ["bf16"], "heads": [(6, 6), (6, 1), (6, 3)], "batch": [49],
        "d": [64, 128, 192, 256], ("causal", "local"): _FA4_VARLEN_MASKS, "softcap": [0.0, 15.0],
        "unequal": ["near", "third", "full"], "used": _BOOLS,
        "lengths": [(64, 1), (255, 256), *_FA3_VARLEN_LENGTHS],
    }, 160),
    PeerTest("fa4", "kvcache", "cache", {
        "dtype": ["bf16"], "heads": [(6, 6), (6, 1), (6, 3)], "batch": [5], "d": [64, 128],
        ("causal", "local"): _CAUSAL_OR_LOCAL, "sinks": _BOOLS, "page": [0, 1, 4, 128],
        "packed_queries": _BOOLS, "lengths": _CACHE_LENGTHS[:8],
    }, 120, _is_fa3_cache_case),
    PeerTest("fa4", "varlen", "packed", {
        "dtype": _BOTH, "heads": [(h, k) for h in (1, 4, 6) for k in {h, 1, max(1, h // 2)}],
        "batch": [1, 7, 20], "d": [64, 128, 256], "causal": _BOOLS, "scale": [None, 0.1],
        "unequal": ["any"], "lengths": [(8, 8), (64, 64), (2048, 2048)],
    }, 80),
]  # fmt: skip
