"""Measurements over caches with scales decide among kernels of the same bits, and only for caches
of their format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from winner_samples import H200, ranked

from flashsmith.chooser import choose, forget_choices
from flashsmith.chooser.decode import CHOOSERS
from flashsmith.chooser.winners import RankedConfig, WinnersTable, record_winners
from flashsmith.families import Problem, parse_kernel_name_into_config
from flashsmith.tracing import trace

SIZES = "b64 s1:8192 h32:8 d128 bf16 decode"
E4M3, E5M2 = Problem.parse(f"{SIZES} cache_e4m3"), Problem.parse(f"{SIZES} cache_e5m2")
PLAIN = replace(E4M3, cache="")
LATENT = Problem.parse("b32 s1:8192 h16:1 d576:512 bf16 latent_decode causal cache_e4m3")


def figures(problem: Problem, *texts: str) -> list[RankedConfig]:
    """The times of these configs, fastest first."""
    return [
        ranked(text, ms, str(problem), parse_kernel_name_into_config(text).FAMILY)
        for ms, text in enumerate(texts, start=1)
    ]


def with_times(problem: Problem, *texts: str) -> WinnersTable:
    """The shipped table with an entry of these configs, fastest first."""
    table = WinnersTable.shipped()
    table.add(problem, H200, figures(problem, *texts))
    return table


def of_stages(problem: Problem, stages: int, **knobs: int) -> str:
    chosen = choose(problem, H200, table=WinnersTable.shipped()).config
    return str(replace(chosen, stages=stages, **knobs))


@pytest.mark.parametrize("problem", [E4M3, LATENT], ids=["keys and values", "latent"])
def test_the_fastest_of_the_same_bits_is_chosen(problem: Problem) -> None:
    other_bits = {"min_keys": 256 if problem is E4M3 else 128}
    fastest, wanted, slower = (
        of_stages(problem, 3, **other_bits), of_stages(problem, 3), of_stages(problem, 2),
    )  # fmt: skip
    assert choose(problem, H200).config.stages > 3
    table = with_times(problem, fastest, wanted, slower)
    choice = choose(problem, H200, table=table)
    found = str(choice.config)
    # Latent caches of a format have a choice of their own; others have the plain cache's bits.
    assert found == (wanted if problem is E4M3 else fastest)
    assert ("of the kernels with its bits the fastest" in choice.why) == (problem is E4M3)


@pytest.mark.parametrize("problem", [PLAIN, E5M2, replace(LATENT, cache="")], ids=str)
def test_caches_of_other_formats_are_chosen_as_before(problem: Problem) -> None:
    measured = LATENT if problem.operation == LATENT.operation else E4M3
    table = with_times(measured, of_stages(measured, 2))
    assert choose(problem, H200, table=table).config == choose(problem, H200).config


def test_configs_of_another_format_are_reported() -> None:
    table = with_times(E4M3, of_stages(E4M3, 2), of_stages(E5M2, 2))
    (said,) = (it for it in table.validate() if "is for a cache of another format" in it)
    assert of_stages(E5M2, 2) in said


def test_calls_use_measurements_of_sizes_nearby(own_table: Path) -> None:
    wanted = of_stages(E4M3, 3)
    before = CHOOSERS["invariant"](E4M3, H200)
    record_winners(E4M3, H200, figures(E4M3, wanted), own_table)
    forget_choices()
    for batch in (1, 64):
        chosen = CHOOSERS["invariant"](replace(E4M3, batch=batch), H200)
        assert str(chosen) == wanted
    assert chosen.family.have_same_order(chosen, before, H200.arch)
    # Sequences of many queries need kernels that the measured config has not.
    many = CHOOSERS["invariant"](replace(E4M3, seq_q=300), H200)
    assert many.chunk_rows


@pytest.mark.parametrize("split", CHOOSERS)
@pytest.mark.parametrize("cache", ["cache_e4m3", "cache_scaled"])
def test_calls_with_functions_have_no_entries_and_are_chosen(split: str, cache: str) -> None:
    plain = Problem.parse(f"{SIZES} {cache}")
    doubled = trace(lambda score, b, h, q_idx, kv_idx: score * 2, None).program
    semantics = replace(plain.semantics, uneven=True, program=doubled)
    problem = replace(plain, semantics=semantics)
    chosen = CHOOSERS[split](problem, H200)
    assert chosen.family.cache_of(chosen) == plain.cache


@pytest.mark.parametrize("knobs", [{"B_r": 32}, {"chunk_rows": 64}], ids=str)
def test_tiles_of_other_rows_may_divide_keys_otherwise(knobs: dict[str, int]) -> None:
    """All tiles of a sequence share its parts, so that their number changes the bits."""
    chosen = choose(E4M3, H200).config
    other = replace(chosen, **knobs)
    assert not chosen.family.have_same_order(chosen, other, H200.arch)
    assert other not in chosen.family.neighbours(chosen)


def test_no_kernel_is_listed_twice() -> None:
    problem = Problem.parse("b4 s1:8192 h32:8 d128 bf16 decode causal canonical cache_e4m3")
    table = with_times(problem, of_stages(problem, 2))
    found = choose(problem, H200, table=table)
    listed = [found.config, *(one.config for one in found.runners_up)]
    assert len(listed) == len(set(listed))
