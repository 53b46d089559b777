"""Keys: GPUs by any spelling, buckets, semantics classes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashsmith.chooser.winners import (
    RankedConfig,
    WinnerKey,
    WinnersTable,
    bucket,
    kind_class,
)
from flashsmith.chooser.winners.key import parse_class
from flashsmith.errors import ArgumentError
from flashsmith.families import Problem, Semantics, device_spec
from flashsmith.families.gpu_names import gpu_name, same_gpu

H200 = device_spec("H200")


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA GH200 144G HBM3e", "GH200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell"),
        ("NVIDIA H200 MIG 1g.18gb", "H200 MIG 1g.18gb"),
        ("H100 MIG 3g", "H100 MIG 3g"),
        ("H200", "H200"),
        ("NVIDIA", "NVIDIA"),
    ],
)
def test_a_gpu_goes_by_its_model(driver: str, name: str) -> None:
    assert gpu_name(driver) == name
    assert same_gpu(driver, name.lower())


def test_what_changes_the_speed_is_another_gpu() -> None:
    assert not same_gpu("NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3")
    assert not same_gpu("NVIDIA H200 MIG 1g.18gb", "NVIDIA H200")
    max_q = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
    assert not same_gpu(max_q, "NVIDIA RTX PRO 6000 Blackwell Workstation Edition")


@pytest.mark.parametrize(
    ("size", "nearest"),
    [
        (0, 1),
        (1, 1),
        (3, 4),
        (512, 512),
        (1448, 1024),
        (1449, 2048),
        (1536, 2048),
        (3000, 4096),
        (10000, 8192),
    ],
)
def test_buckets_are_the_nearest_powers_of_two(size: int, nearest: int) -> None:
    assert bucket(size) == nearest


def test_the_key_of_a_problem() -> None:
    problem = Problem.parse("b3 s3000:10000 h32:8 d120 bf16 causal packed")
    key = WinnerKey.of(problem, replace(H200, name="NVIDIA H200"))
    assert key == WinnerKey("H200", 90, "bf16", 128, "causal+packed", 4096, 8192, 128)
    assert str(key) == "H200 sm_90 bf16 d128 causal+packed s4096:8192 bh128"


def test_over_a_cache_the_heads_of_a_group_are_rows() -> None:
    """Else the entries of 32 heads over 8 and over 1, whose tiles differ, would share a place."""
    grouped, alone = (Problem.parse(f"b4 s2:8192 h32:{k} d128 bf16 decode") for k in (8, 1))
    assert str(WinnerKey.of(grouped, H200)) == "H200 sm_90 bf16 d128 decode s8:8192 bh32"
    assert str(WinnerKey.of(alone, H200)) == "H200 sm_90 bf16 d128 decode s64:8192 bh4"
    table = WinnersTable()
    for problem, config in ((grouped, "grouped"), (alone, "alone")):
        table.add(problem, H200, [RankedConfig("mma_sync_decode", config, 1.0, 1.0)])
    assert [found.entry.best.config for found in table.lookup(alone, H200)] == ["alone", "grouped"]
    assert table.lookup(grouped, H200)[0].entry.best.config == "grouped"


def test_over_a_latent_cache_all_heads_are_rows() -> None:
    text = "b32 s1:8192 h{}:1 d576:512 bf16 latent_decode causal page64"
    few, many = (Problem.parse(text.format(heads)) for heads in (16, 128))
    sizes = "H200 sm_90 bf16 d576:512 latent_decode+causal s{}:8192 bh32"
    assert [str(WinnerKey.of(it, H200)) for it in (few, many)] == [
        sizes.format(16),
        sizes.format(128),
    ]


def test_uneven_is_no_class_of_its_own() -> None:
    even, uneven = (Problem.parse(f"b1 s100 h1 d64 fp16{words}") for words in ("", " uneven"))
    assert WinnerKey.of(even, H200) == WinnerKey.of(uneven, H200)
    for mask in ("none", "causal", "window"):
        for packed in (False, True):
            for softcap in (False, True):
                semantics = Semantics(mask, softcap, packed, uneven=packed)
                assert parse_class(kind_class(replace(even, semantics=semantics))) == (
                    semantics,
                    "forward",
                    0,
                    "",
                    0,
                    "",
                    "",
                )


def test_a_d_without_kernels_has_no_key() -> None:
    with pytest.raises(ArgumentError, match="d=300"):
        WinnerKey.of(Problem.parse("s64 d300 fp16"), H200)


@pytest.mark.parametrize(
    ("field", "value"), [("seq_q", 3000), ("arch", "90"), ("gpu", 5), ("batch_heads", True)]
)
def test_a_key_of_other_types_or_sizes(field: str, value: object) -> None:
    key = WinnerKey("H200", 90, "bf16", 128, "plain", 4096, 4096, 128)
    with pytest.raises(ValueError, match=field):
        replace(key, **{field: value})  # type: ignore[arg-type]
