"""The operation latent_decode: its tensors' shapes, FLOP and bytes."""

from __future__ import annotations

import pytest

from flashsmith.errors import ArgumentError
from flashsmith.families import Problem
from flashsmith.operations.latent_decode import LATENT_DECODE
from flashsmith.operations.operation import Call

PAGED = Problem.parse("b2 s3:100 h16:1 d576:512 bf16 latent_decode causal page64")


def test_shapes_in_measurements_are_of_caches_that_the_keys_just_fit_into() -> None:
    shapes = {
        it.name: LATENT_DECODE.shape(it, PAGED)
        for it in LATENT_DECODE.tensors
        if it.is_required(PAGED)
    }
    assert shapes == {
        "q": (2, 3, 16, 576),
        "k_cache": (4, 64, 1, 576),
        "cache_lens": (2,),
        "o": (2, 3, 16, 512),
        "page_table": (2, 2),
    }


def test_flop_and_bytes_count_a_row_of_the_cache_once() -> None:
    one = Problem.parse("b2 s1:100 h16:1 d576:512 bf16 latent_decode causal")
    assert one.attn_flop() == 2 * 2 * 16 * 100 * (576 + 512)
    assert LATENT_DECODE.bytes(one) == 2 * (2 * (16 * (576 + 512) + 100 * 576) + 4)
    of_8_bits = Problem.parse(f"{one} cache_e5m2")
    assert LATENT_DECODE.bytes(one) - LATENT_DECODE.bytes(of_8_bits) == 2 * 100 * 576
    # Query i of 3 sees 98 + i keys.
    assert PAGED.attn_flop() == 2 * 2 * 16 * (98 + 99 + 100) * (576 + 512)


@pytest.mark.parametrize(
    ("problem", "sizes", "words"),
    [
        (PAGED, {"blocks": 4, "slots": 16, "most_pages": 8}, "k_cache: 16 slots per page"),
        (
            Problem.parse("b2 s3:100 h16:1 d576:512 bf16 latent_decode"),
            {"blocks": 3, "slots": 100},
            "k_cache: 3 sequences, but q has 2",
        ),
        (
            Problem.parse("b2 s3:100 h16:1 d576:512 bf16 latent_decode cache_scaled"),
            {"blocks": 2, "slots": 100, "k_scales": 16},
            "k_scale: 16 scales, and a latent cache has one head; give one",
        ),
    ],
)
def test_caches_that_do_not_fit_the_problem_are_refused(
    problem: Problem, sizes: dict[str, int], words: str
) -> None:
    strides = dict.fromkeys(("q", "k_cache", "o"), (1, 1, 1, 1))
    with pytest.raises(ArgumentError, match=words):
        LATENT_DECODE.numbers(Call(problem, strides, sizes, dict(LATENT_DECODE.options)))


@pytest.mark.parametrize("word", ["softcap", "partial", "canonical", "only_dq"])
def test_problems_have_no_other_words(word: str) -> None:
    with pytest.raises(ArgumentError):
        Problem.parse(f"b2 s3:100 h16:1 d576:512 bf16 latent_decode {word}")
