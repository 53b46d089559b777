"""Which kernels a package holds: those of the tables, and a few that serve the grid."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashsmith.chooser import choose, choose_config
from flashsmith.chooser.batch_invariant import adapt_to_queries, without_batch
from flashsmith.chooser.decode import CHOOSERS
from flashsmith.chooser.package_contents import (
    HEADS,
    KINDS,
    SIZES,
    package_contents,
    words_of,
)
from flashsmith.chooser.winners import WinnersTable
from flashsmith.errors import ArgumentError
from flashsmith.families import DType, Problem, device_spec
from flashsmith.families.head_dims import HeadPair

H200 = device_spec("H200")
PAIR = HeadPair(192, 128)
ONE = {"d_heads": (128,), "dtypes": (DType.BF16,)}


def test_it_has_what_the_tables_rank_first() -> None:
    found = package_contents(90, kinds=("causal",), **ONE)
    count = 0
    for entry in WinnersTable.shipped():
        problem = entry.problem
        # The sizes and the GPU of the measurement itself, of this kind.
        if (problem.kind, problem.d, problem.dtype, entry.key.gpu) != (
            *("causal", 128, DType.BF16, "H200"),
        ):
            continue
        chosen = choose(problem, H200)
        assert chosen.config in found.kernels[problem.required_semantics(chosen.config)], problem
        count += 1
    assert count > 5


def test_for_each_problem_of_the_grid_one_kernel_is_as_fast_as_the_best() -> None:
    found = package_contents(90, kinds=("window packed",), **ONE)
    (semantics,) = found.kernels
    held = found.kernels[semantics]
    for heads_q, heads_k in HEADS:
        for batch, seq_q, seq_k in SIZES:
            words = f"b{batch} s{seq_q}:{seq_k} h{heads_q}:{heads_k} d128 bf16 window packed"
            problem = Problem.parse(words)
            best = choose_config(problem, H200)
            assert choose_config(problem, H200, among=(*held, best), tolerance=0.02) in held
    assert len(held) < len(SIZES)


def test_over_a_cache_it_has_the_kernel_itself() -> None:
    found = package_contents(80, d_heads=(64,), dtypes=(DType.BF16,), kinds=("decode causal",))
    for words in ("b64 s1:8192", "b1 s64:1000", "b1 s1024:65536"):
        problem = Problem.parse(f"{words} h32:8 d64 bf16 decode causal")
        config = CHOOSERS["invariant"](problem, device_spec(80))
        assert config in found.kernels[problem.required_semantics(config)]
        chosen = choose_config(without_batch(problem), device_spec(80))
        assert config == adapt_to_queries(chosen, problem, device_spec(80))


@pytest.mark.parametrize("arch", [80, 90])
def test_it_has_the_kernels_over_latent_caches(arch: int) -> None:
    found = package_contents(arch, dtypes=(DType.BF16,), kinds=("latent_decode causal packed",))
    device = H200 if arch == 90 else device_spec(80)
    for heads, widths in ((16, "576:512"), (128, "576:512"), (64, "320:256")):
        words = f"b64 s1:8192 h{heads}:1 d{widths} bf16 latent_decode causal packed"
        problem = Problem.parse(words)
        config = CHOOSERS["invariant"](problem, device)
        assert config in found.kernels[problem.required_semantics(config)]
    every = {config.head_dims for configs in found.kernels.values() for config in configs}
    assert every == {HeadPair(576, 512), HeadPair(320, 256)}


@pytest.mark.parametrize("kind", ["causal packed", "backward causal packed", "decode causal"])
def test_it_has_the_widths_of_models_whose_v_has_another_d(kind: str) -> None:
    found = package_contents(90, d_heads=(PAIR,), dtypes=(DType.BF16,), kinds=(kind,))
    problem = Problem.parse(f"b4 s1024:4096 h16 d192:128 bf16 {kind}")
    every = {config for configs in found.kernels.values() for config in configs}
    assert {it.head_dims for it in every} == {PAIR}
    if "decode" in kind:
        best = CHOOSERS["invariant"](problem, H200)
        assert best.chunk_warpgroups
        assert best in every
    else:
        best = choose_config(problem, H200)
        assert choose_config(problem, H200, among=(*every, best), tolerance=0.02) in every
    everything = package_contents(90, dtypes=(DType.BF16,), kinds=(kind,))
    for semantics, configs in found.kernels.items():
        assert set(configs) <= set(everything.kernels[semantics])


def test_both_repeatable_and_other_gradients_are_there() -> None:
    found = package_contents(90, kinds=("backward causal",), **ONE)
    every = {config for configs in found.kernels.values() for config in configs}
    assert {config.family.is_deterministic(config) for config in every} == {True, False}


def test_the_users_own_table_has_no_influence(monkeypatch: pytest.MonkeyPatch) -> None:
    found = package_contents(90, kinds=("causal",), **ONE)
    monkeypatch.setattr(WinnersTable, "merged", classmethod(lambda cls: cls()))
    assert package_contents(90, kinds=("causal",), **ONE) == found


def test_every_kind_is_a_problem_and_every_operation_has_one() -> None:
    assert {Problem.parse(f"s1 d64 fp16 {kind}").operation for kind in KINDS} == {
        *("forward", "backward", "decode", "latent_decode", "merge", "write_slots")
    }
    assert words_of("causal packed") == {"causal", "packed", "forward"}


def test_a_whole_tile_kernel_comes_with_that_for_uneven_lengths() -> None:
    found = package_contents(80, d_heads=(64,), dtypes=(DType.BF16,), kinds=("causal",))
    assert len(found.kernels) == 2
    for semantics, configs in found.kernels.items():
        uneven = found.kernels[replace(semantics, uneven=True)]
        assert set(configs) <= set(uneven)
    assert len(found) == sum(map(len, found.kernels.values())) > 1


def test_a_d_head_without_kernels_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="512"):
        package_contents(80, d_heads=(512,), kinds=("causal",))
