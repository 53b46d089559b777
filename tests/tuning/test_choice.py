"""The chooser knows d, lengths and the device; what it chooses is legal there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashsmith.builder import find_library
from flashsmith.configs import (
    KNOWN_DEVICES,
    SUPPORTED_D_HEADS,
    DeviceSpec,
    DType,
    Problem,
    Semantics,
    compiled_d_head,
    device_spec,
    is_legal,
)
from flashsmith.errors import ArgumentError
from flashsmith.tuning import build_for, choose_config

A100 = device_spec("A100")


def problem(seq_q: int, seq_k: int, d: int = 128, heads: int = 8) -> Problem:
    return Problem(4, seq_q, seq_k, heads, heads, d, DType.BF16)


@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda device: device.name)
@pytest.mark.parametrize("d", range(8, 264, 8))
def test_every_d_has_a_kernel_on_every_device(d: int, device: DeviceSpec) -> None:
    for lengths in ((0, 0), (1, 1), (1, 8192), (100, 20), (8192, 8192), (8192, 1)):
        config = choose_config(problem(*lengths, d), device)
        assert is_legal(config, device)
        assert config.d_head == compiled_d_head(d) in SUPPORTED_D_HEADS
        assert config.dtype is DType.BF16


@pytest.mark.parametrize("d", [264, 512])
def test_a_d_beyond_all_kernels(d: int) -> None:
    with pytest.raises(ArgumentError, match=f"^q: d={d}: kernels exist for multiples of 8 from 8"):
        choose_config(problem(128, 128, d), A100)


def test_large_blocks_only_where_every_sm_gets_one() -> None:
    assert choose_config(problem(512, 512), A100).B_r == 128
    assert choose_config(problem(384, 512), A100).B_r == 64
    assert choose_config(problem(384, 512, heads=16), A100).B_r == 128
    assert choose_config(problem(64, 512, heads=64), A100).B_r == 64


def test_few_keys_take_a_short_tile() -> None:
    assert [choose_config(problem(512, keys), A100).B_c for keys in (1, 32, 33)] == [32, 32, 64]


def test_heads_beyond_128_columns_get_8_warps() -> None:
    assert [choose_config(problem(512, 512, d), A100).n_warps for d in (128, 136)] == [4, 8]


def test_a_device_with_less_shared_memory_gets_smaller_tiles() -> None:
    small = replace(A100, max_smem_per_block=65536)
    assert (choose_config(problem(512, 512, 192), A100).B_r) == 128
    config = choose_config(problem(512, 512, 192), small)
    assert (config.B_r, config.B_c) == (64, 32)
    with pytest.raises(ArgumentError, match="device: A100 allows a CTA 1024 bytes"):
        choose_config(problem(512, 512, 192), replace(A100, max_smem_per_block=1024))


def test_what_is_built_ahead_is_what_is_chosen() -> None:
    wanted = Problem(2, 100, 100, 4, 4, 64, DType.FP16, Semantics("causal"))
    (library,) = build_for(wanted)
    config = choose_config(wanted, A100)
    assert config in library
    assert library.manifest.semantics == Semantics("causal", uneven=True)
    found = find_library(config, semantics=library.manifest.semantics)
    assert found is not None
    assert build_for(wanted)[0].path == found.path
