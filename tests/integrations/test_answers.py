"""What integrations say about a call beforehand agrees with what the chooser then finds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

from flashsmith.chooser.choice import choose_config  # noqa: E402
from flashsmith.chooser.decode import CHOOSERS  # noqa: E402
from flashsmith.errors import ArgumentError  # noqa: E402
from flashsmith.families import DeviceSpec, Problem, device_spec  # noqa: E402
from flashsmith.integrations import pytorch_state  # noqa: E402
from flashsmith.integrations.layer_kernels import (  # noqa: E402
    cache_problem,
    direct_problem,
    unserved_head,
)
from flashsmith.integrations.sdpa_problem import SdpaProblem, TensorFacts, why_not  # noqa: E402
from flashsmith.operations import BACKWARD, DECODE, DEFAULT  # noqa: E402
from flashsmith.semantics.cache_format import CacheFormat  # noqa: E402
from flashsmith.semantics.compiled import Semantics  # noqa: E402
from flashsmith.semantics.signature import check_mask  # noqa: E402

DEVICES = tuple(map(device_spec, ("A100", "L4", "H100")))
WIDTHS = (8, 72, 80, 128, 192, 256, 264, 512)
MASKS = {"causal": (None, None), "window": (64, None)}


def is_found(choose: Any, problem: Problem, device: DeviceSpec, **how: Any) -> bool:
    try:
        choose(problem, device, **how)
    except ArgumentError:
        return False
    return True


@pytest.mark.parametrize("device", DEVICES, ids=lambda it: it.name)
@pytest.mark.parametrize("bits", ["free", "canonical"])
def test_heads_of_engines(device: DeviceSpec, bits: str) -> None:
    grid = itertools.product(WIDTHS, MASKS.values(), (0.0, 30.0), (torch.float16, torch.bfloat16))
    for d, window, softcap, dtype in grid:
        layer = {"heads": 8, "kv_heads": 2, "d": d, "dtype": dtype, "softcap": softcap}
        layer |= {"mask": check_mask(True, window), "bits": bits}
        direct = replace(direct_problem(**layer), batch=4, seq_q=64, seq_k=64)
        said = unserved_head(d, device, canonical=bits != "free", operation=DEFAULT)
        assert is_found(choose_config, direct, device) == (not said), (layer, said)
        said = unserved_head(d, device, canonical=bits != "free", operation=DECODE.name)
        for cache in ("", "e4m3", "e5m2"):
            known = CacheFormat.parse(cache) or CacheFormat.PLAIN
            over = cache_problem(**layer, page=16, keys=4096, cache=known)
            over = replace(over, batch=4)
            choose = CHOOSERS["free" if bits == "free" else "invariant"]
            assert is_found(choose, over, device) == (not said), (layer, cache, said)


PAIRS = ((64, 128), (192, 128), (256, 32), (256, 264), (512, 256))


@pytest.mark.parametrize("device", DEVICES, ids=lambda it: it.name)
@pytest.mark.parametrize("deterministic", [False, True])
def test_calls_of_pytorch(
    device: DeviceSpec, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytorch_state, "query_gpu", lambda ordinal: device)
    torch.use_deterministic_algorithms(deterministic)
    try:
        for (d, d_v), mask, dtype in itertools.product(
            (*((d, d) for d in (*WIDTHS, 520)), *PAIRS), MASKS, ("float16", "bfloat16")
        ):
            for with_gradients in (False, True):
                said = said_of(d, d_v, dtype, with_gradients)
                sizes = 2, 256, 256, 8, 2, d, dtype
                forward = Problem(*sizes, Semantics(mask), d_v=d_v)
                found = is_found(choose_config, forward, device)
                if with_gradients:
                    of = Problem(*sizes, Semantics(mask), BACKWARD.name, d_v=d_v)
                    found &= is_found(choose_config, of, device, deterministic=deterministic)
                assert found == (said is None), (d, d_v, mask, dtype, with_gradients, said)
    finally:
        torch.use_deterministic_algorithms(False)


def said_of(d: int, d_v: int, dtype: str, with_gradients: bool) -> Any:
    """The reason of sdpa() and of transformers' attention function."""
    facts = []
    for heads, columns in ((8, d), (2, d), (2, d_v)):
        strides = heads * 256 * columns, 256 * columns, columns, 1
        facts.append(TensorFacts((2, heads, 256, columns), strides, dtype, "cuda:0"))
    q, k, v = facts
    gpu = torch.device("cuda", 0)
    return why_not(SdpaProblem(q, k, v, enable_gqa=True)) or pytorch_state.why_not_on(
        gpu, None, d, with_gradients=with_gradients
    )


@pytest.mark.parametrize("device", DEVICES, ids=lambda it: it.name)
def test_calls_over_caches(device: DeviceSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch_state, "query_gpu", lambda ordinal: device)
    for d in WIDTHS:
        gpu = torch.device("cuda", 0)
        said = pytorch_state.why_not_on(gpu, None, d, with_gradients=False, over_cache=True)
        problem = Problem(4, 1, 4096, 8, 2, d, "bf16", Semantics("causal"), DECODE.name)
        assert is_found(CHOOSERS["invariant"], problem, device) == (said is None), (d, said)
