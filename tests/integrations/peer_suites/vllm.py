"""Values of vLLM's test of FlashAttention over pages (tests/kernels/attention/test_flash_attn.py),
whose requests are (queries, keys) each; fp8 is left out."""

from __future__ import annotations

from peer_suites.case import PeerTest

_PREFILLS = ((1, 1328), (5, 18), (129, 463))
_DECODES = ((1, 523), (1, 37), (1, 2011))

VLLM = [
    PeerTest("vllm", "varlen_with_paged_kv", "packed", {
        "dtype": ["bf16"], "heads": [(4, 4), (8, 2)], "batch": [1], "d": [40, 72, 80, 128, 256],
        ("local", "window"): [("", None), ("left", (255, 0))], "softcap": [0.0, 50.0],
        "causal": [True], "page": [16], "used": [True], "unequal": ["full"],
        "lengths": [*_PREFILLS, *_DECODES],
    }, 240),
]  # fmt: skip
