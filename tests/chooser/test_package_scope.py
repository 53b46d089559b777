"""Which rare combinations of properties a package leaves out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashsmith.chooser.package_contents import (
    DECODE_KINDS,
    KINDS,
    package_contents,
    widths_of,
    words_of,
)
from flashsmith.chooser.package_scope import STANDARD, PackageScope
from flashsmith.errors import ArgumentError
from flashsmith.families import DType, Problem, Semantics
from flashsmith.families.head_dims import HeadDims, HeadPair

BF16, FP16 = DType.BF16, DType.FP16
EVERYTHING = PackageScope(everything=True)


@pytest.mark.parametrize(
    ("kind", "dtype", "d", "included"),
    [
        ("causal", BF16, 128, True),
        ("backward causal packed", FP16, 256, True),
        ("causal softcap", BF16, HeadPair(192, 128), True),
        ("causal softcap", FP16, 128, False),
        ("causal softcap", BF16, 96, False),
        ("causal", BF16, 96, True),
        ("causal", FP16, 96, False),
        ("causal", BF16, 72, False),
        ("causal", BF16, HeadPair(64, 128), False),
        ("causal", BF16, HeadPair(256, 256), True),
        ("decode causal canonical", BF16, 64, True),
        ("decode causal packed cache_e4m3", BF16, 128, True),
        ("decode causal packed cache_e4m3", FP16, 128, False),
        ("decode causal packed canonical cache_e4m3", BF16, 128, False),
        ("decode causal packed cache_e5m2", BF16, 128, False),
        ("write_slots cache_e5m2", BF16, 128, False),
        ("latent_decode causal packed cache_e4m3", BF16, HeadPair(576, 512), True),
        ("causal packed partial", BF16, 128, True),
        ("packed canonical", BF16, 128, False),
        ("decode softcap packed", BF16, 128, False),
    ],
)
def test_one_rare_property_is_included_and_two_are_not(
    kind: str, dtype: DType, d: HeadDims, included: bool
) -> None:
    assert STANDARD.includes(kind, dtype, d) == included
    assert EVERYTHING.includes(kind, dtype, d)
    named = {*words_of(kind), dtype.name.lower(), f"d{d}"}
    assert PackageScope(named=named).includes(kind, dtype, d)


def test_every_word_of_a_kind_and_both_dtypes_are_included_with_some_other_property() -> None:
    kinds = [kind for kind in KINDS if STANDARD.includes(kind, BF16, 128)]
    every = {word for kind in KINDS for word in words_of(kind)}
    assert every - {word for kind in kinds for word in words_of(kind)} == {"cache_e5m2"}
    for dtype in DType:
        assert STANDARD.includes("causal", dtype, 128)
        assert STANDARD.includes("backward causal", dtype, 128)
        assert STANDARD.includes("decode causal packed", dtype, 128)


@pytest.mark.parametrize("operation", ["forward", "backward", "decode"])
def test_calls_of_a_width_that_is_left_out_fit_a_wider_kernel(operation: str) -> None:
    kind = operation.replace("forward", "") + " causal"
    widths = widths_of(90, operation)
    held = [d for d in widths if STANDARD.includes(kind, BF16, d)]
    for d in set(widths) - set(held):
        wider = [
            other
            for other in held
            if (isinstance(d, int) and isinstance(other, int) and d < other)
            or (isinstance(d, HeadPair) and isinstance(other, HeadPair) and max(d) <= min(other))
        ]
        assert wider, d


def test_a_rare_kernel_is_for_any_lengths_and_is_that_of_everything() -> None:
    rare = package_contents(90, d_heads=(128,), dtypes=(BF16,), kinds=("causal softcap",))
    every = package_contents(
        90, d_heads=(128,), dtypes=(BF16,), kinds=("causal softcap",), scope=EVERYTHING
    )
    uneven = Semantics("causal", softcap=True, uneven=True)
    assert rare.kernels == {uneven: every.kernels[uneven]}
    assert set(every.kernels[replace(uneven, uneven=False)]) <= set(rare.kernels[uneven])
    named = PackageScope(named={"softcap"})
    whole = package_contents(
        90, d_heads=(128,), dtypes=(BF16,), kinds=("causal softcap",), scope=named
    )
    assert whole == every


@pytest.mark.parametrize("operation", ["latent_decode", "merge", "write_slots"])
def test_kernels_that_are_few_are_all_there(operation: str) -> None:
    """Latent kernels have no variant for uneven lengths."""
    d = HeadPair(320, 256) if operation == "latent_decode" else 96
    every, standard = (
        package_contents(90, d_heads=(d,), dtypes=(BF16,), kinds=(operation,), scope=scope)
        for scope in (EVERYTHING, STANDARD)
    )
    assert standard == every


def test_what_is_left_out_alone_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="apart from rare combinations"):
        package_contents(90, d_heads=(128,), kinds=("decode causal cache_e5m2",))


@pytest.mark.full
def test_a_package_is_of_a_size_that_can_be_built() -> None:
    """Beyond 1,500 kernels, building them takes one core more than three hours."""
    found = package_contents(90)
    assert 200 < len(found) <= 1500
    held = {(config.FAMILY, it) for it, configs in found.kernels.items() for config in configs}
    for kind in KINDS:
        if STANDARD.includes(kind, BF16, 128) and kind not in DECODE_KINDS:
            semantics = Problem.parse(f"s1 d64 bf16 {kind}").semantics
            assert replace(semantics, uneven=True) in {
                replace(it, uneven=True) for _, it in held
            }, kind
