"""Values of FlashInfer's tests of attention (tests/attention): batch decode and prefill over paged
and ragged keys, single prefill, sliding windows, caps of logits and sinks.

Its masks of own choice, rotation inside attention, ALiBi, fp8, fp4 and d of 512 are left out.
"""

from __future__ import annotations

from peer_suites.case import PeerCase, PeerTest

_BOOLS = (False, True)
_BOTH = ("fp16", "bf16")


def _has_as_many_keys(case: PeerCase) -> bool:
    return not case.causal or case.lengths[0] <= case.lengths[1]


def _windows(*lefts: int) -> list[tuple[str, tuple[int, int] | None]]:
    return [("left", (left, 0)) if left >= 0 else ("", None) for left in lefts]


def _pairs(queries: tuple[int, ...], keys: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(q, k) for q in queries for k in keys]


FLASHINFER = [
    PeerTest("flashinfer", "batch_decode", "cache", {
        "dtype": ["fp16"], "heads": [(4, 4), (32, 4)], "batch": [12, 17, 128],
        "d": [128, 256], "page": [1, 8, 16], "packed_queries": _BOOLS,
        "lengths": _pairs((1,), (54, 97, 512, 2048, 16384)),
    }, 100),
    PeerTest("flashinfer", "multi_token_decode", "cache", {
        "dtype": ["fp16"], "heads": [(8, 2), (16, 2), (32, 8), (64, 8)], "batch": [4, 8],
        "d": [128], "page": [16], "causal": [True], "lengths": _pairs((2, 3), (512,)),
    }, 16),
    PeerTest("flashinfer", "tensor_cores_decode", "cache", {
        "dtype": ["fp16"], "heads": [(4, 4), (16, 4), (32, 4), (8, 8), (64, 8)], "batch": [12, 17],
        "d": [64, 128, 256], "page": [1, 8, 16], "lengths": _pairs((1,), (54, 97, 128, 512, 999)),
    }, 60),
    PeerTest("flashinfer", "batch_prefill_paged", "cache", {
        "dtype": ["fp16"], "heads": [(4, 4), (32, 4)], "batch": [12, 17, 128],
        "d": [64, 128, 256], "page": [1, 5, 16], "causal": _BOOLS, "packed_queries": [True],
        "lengths": _pairs((37, 17, 127, 577), (54, 97, 512, 2048)),
    }, 140, _has_as_many_keys),
    PeerTest("flashinfer", "batch_prefill_ragged", "packed", {
        "dtype": ["fp16"], "heads": [(4, 4), (32, 4)], "batch": [12, 17, 128],
        "d": [64, 128, 256], "causal": _BOOLS, "unequal": ["full"],
        "lengths": _pairs((37, 17, 127, 577), (54, 97, 512, 2048)),
    }, 90, _has_as_many_keys),
    PeerTest("flashinfer", "single_prefill", "dense", {
        "dtype": ["fp16"], "heads": [(h, k) for h in (1, 4, 8) for k in (1, 4, 8) if h % k == 0],
        "batch": [1], "d": [64, 128, 256], "causal": _BOOLS, "softcap": [0.0, 30.0],
        "lengths": [(n, n) for n in (11, 99, 1763, 9999)],
    }, 80),
    PeerTest("flashinfer", "paged_prefill_hopper", "cache", {
        "dtype": ["fp16"], "heads": [(h, k) for h in (1, 4, 8) for k in (1, 4, 8) if h % k == 0],
        "batch": [1, 4, 8, 16], "d": [64, 128, 256], "causal": _BOOLS, "softcap": [0.0, 30.0],
        "page": [1, 16], "packed_queries": [True],
        "lengths": [(n, n) for n in (11, 12, 99, 1763)],
    }, 90),
    PeerTest("flashinfer", "decode_window", "cache", {
        "dtype": ["fp16"], "heads": [(4, 1), (4, 4), (8, 4), (8, 1)], "batch": [1, 3, 13, 32],
        "d": [64, 128, 256], "page": [1, 16], "causal": [True],
        ("local", "window"): _windows(3, 13, 23, 33, 37, 43, 533),
        "lengths": _pairs((1,), (1, 3, 19, 99, 199, 1177, 1999)),
    }, 90),
    PeerTest("flashinfer", "prefill_window", "dense", {
        "dtype": ["fp16"], "heads": [(4, 1), (4, 4), (8, 4), (8, 1)], "batch": [1],
        "d": [64, 128, 256], "causal": [True], ("local", "window"): _windows(43, 233),
        "lengths": [(n, n) for n in (99, 199, 1999)],
    }, 40),
    PeerTest("flashinfer", "paged_prefill_window", "cache", {
        "dtype": ["fp16"], "heads": [(4, 1), (4, 4), (8, 4), (8, 8)], "batch": [12, 17, 30],
        "d": [64, 128, 256], "page": [1, 16], "causal": [True], "packed_queries": [True],
        ("local", "window"): _windows(13, 33, 111),
        "lengths": _pairs((1, 37, 47), (54, 397, 1177)),
    }, 80),
    PeerTest("flashinfer", "logits_cap", "dense", {
        "dtype": ["fp16"], "heads": [(4, 4), (8, 8), (32, 32)], "batch": [1], "d": [128, 256],
        "softcap": [1.0, 30.0, 50.0],
        "lengths": _pairs((1, 17, 81, 987), (1, 17, 81, 987, 31111)),
    }, 80),
    PeerTest("flashinfer", "sinks", "cache", {
        "dtype": _BOTH, "heads": [(32, 8), (32, 32)], "batch": [1, 4, 16], "d": [64],
        ("local", "window"): _windows(-1, 128), "causal": _BOOLS, "sinks": [True],
        "page": [0, 1, 16], "packed_queries": _BOOLS,
        "lengths": [(1, 1), (4, 4), (16, 16), (128, 128), (128, 384), (256, 768), (1, 33)],
    }, 100),
]  # fmt: skip
