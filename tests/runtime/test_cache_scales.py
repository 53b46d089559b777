"""attention_with_cache() and write_slots() over caches of 8-bit floats, and their scales."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import shared_kernels
import torch

import flashsmith
from flashsmith.errors import ArgumentError
from flashsmith.runtime.emulation import exact_mma

E4M3 = torch.float8_e4m3fn
for _cache in ("", "cache_e4m3"):
    shared_kernels.want_chosen(f"b2 s1:64 h4:2 d64 fp16 decode causal {_cache}".strip())


def tensors(dtype: Any = E4M3) -> dict[str, Any]:
    torch.manual_seed(0)
    caches = (torch.randn(2, 64, 2, 64) * 20 for _ in range(2))
    k_cache, v_cache = (cache.to(dtype) for cache in caches)
    return {
        "q": torch.randn(2, 1, 4, 64).half(),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "cache_lens": torch.tensor([63, 5], dtype=torch.int32),
    }


def attend(call: dict[str, Any], **more: Any) -> Any:
    with exact_mma():
        return flashsmith.attention_with_cache(**{**call, **more})


def test_bits_are_those_of_the_converted_cache() -> None:
    call = tensors()
    converted = {name: call[name].half() for name in ("k_cache", "v_cache")}
    o = attend(call, scale=0.01)
    assert torch.equal(o, attend({**call, **converted}, scale=0.01))
    # A scale of the keys is one of the scores.
    assert torch.equal(o, attend(call, scale=0.04, k_scale=0.25))
    halved = attend(call, scale=0.01, v_scale=torch.tensor([0.5]))
    assert torch.equal(halved, attend(call, scale=0.01, v_scale=0.5))
    torch.testing.assert_close(halved, o / 2, rtol=1e-3, atol=1e-6)


def test_numpys_arrays() -> None:
    call = tensors()
    arrays = {name: it.numpy() for name, it in call.items() if it.dtype is not E4M3}
    for name in ("k_cache", "v_cache"):
        arrays[name] = call[name].view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    scales = {"k_scale": np.array([0.5, 2.0], np.float32), "v_scale": np.float32(0.3)}
    found = attend(arrays, scale=0.01, **scales)
    scales = {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor(0.3)}
    assert np.array_equal(found, attend(call, scale=0.01, **scales).numpy())


def test_a_step_writes_what_write_slots_writes() -> None:
    call = tensors()
    k, v = (torch.randn(2, 1, 2, 64).half() * 9 for _ in range(2))
    scales = {"k_scale": torch.tensor([0.1, 0.01]), "v_scale": 0.3}
    written = {name: call[name].clone() for name in ("k_cache", "v_cache")}
    slots = torch.tensor([63, 64 + 5])
    flashsmith.write_slots(k[:, 0], v[:, 0], *written.values(), slots, **scales)
    o = attend(call, k=k, v=v, **scales)
    for name, cache in written.items():
        assert torch.equal(cache.view(torch.uint8), call[name].view(torch.uint8))
    new = (k[:, 0].float() / scales["k_scale"][:, None]).clamp(-448, 448).to(E4M3)
    assert torch.equal(written["k_cache"][[0, 1], [63, 5]].float(), new.float())
    assert (new.float().abs() == 448).any()
    lens = call["cache_lens"] + 1
    assert torch.equal(o, attend({**call, **written}, cache_lens=lens, **scales))


def test_rows_of_16_bits_are_divided_too() -> None:
    k = torch.randn(3, 2, 64).half()
    caches = torch.zeros(2, 1, 8, 2, 64).half()
    flashsmith.write_slots(k, k, *caches, torch.tensor([2, 0, 7]), v_scale=torch.tensor([3.0, 0.7]))
    assert torch.equal(caches[0, 0, [2, 0, 7]], k)
    quotients = (k.float() / torch.tensor([3.0, 0.7])[:, None]).half()
    assert torch.equal(caches[1, 0, [2, 0, 7]], quotients)


def test_the_ops_of_traced_calls_take_scales() -> None:
    from flashsmith.integrations.torch_decode import decode_by_op

    call = tensors()
    scales = {"k_scale": 0.25, "v_scale": torch.tensor([0.5, 2.0])}
    with exact_mma():
        found = decode_by_op(**call, scale=0.04, **scales)
    assert torch.equal(found, attend(call, scale=0.04, **scales))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_scale": 0.0}, "k_scale=0.0: give a finite number above 0"),
        ({"v_scale": float("nan")}, "v_scale=nan: give a finite number above 0"),
        ({"k_scale": True}, "k_scale=True: give a finite number above 0"),
        ({"k_scale": 1e30}, r"k_scale=1e\+30: times scale it is"),
        ({"k_scale": torch.ones(3)}, r"k_scale: shape \(3,\); must be \(\), \(1,\) or \(2,\)"),
        ({"k_scale": torch.ones(2).half()}, "k_scale: dtype torch.float16; must be float32"),
        (
            {"v_cache": torch.zeros(2, 64, 2, 64).half()},
            "v_cache: dtype float16; must be k_cache's",
        ),
    ],
)
def test_other_calls_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        flashsmith.attention_with_cache(**{**tensors(), **change})


def test_rows_must_be_copied_by_16_bytes() -> None:
    call = {name: it[..., :40] if it.ndim > 1 else it for name, it in tensors().items()}
    with pytest.raises(ArgumentError, match="k_cache: float8_e4m3fn with d_head 40; must"):
        flashsmith.attention_with_cache(**call)


def test_a_config_of_another_cache_is_refused() -> None:
    config = flashsmith.choose("b2 s1:64 h4:2 d64 fp16 decode causal").config
    with pytest.raises(ArgumentError, match="is for a cache that is plain, and this call"):
        flashsmith.attention_with_cache(**tensors(), config=config)
