"""The operation decode: its tensors, numbers, FLOP and bytes, and pages in problems' texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashsmith.chooser.winners.key import kind_class, parse_class
from flashsmith.errors import ArgumentError
from flashsmith.families import Problem
from flashsmith.operations import DECODE, OPERATIONS, Call, operation, parse_kind
from flashsmith.semantics import UNLIMITED

DENSE = Problem.parse("b2 s3:128 h8:2 d64 fp16 decode")
PAGED = Problem.parse("b2 s3:100 h8:2 d64 bf16 decode causal packed page16")


def test_a_problem_with_pages_says_so_in_its_text_alone() -> None:
    problem = Problem.parse("b8 s1:8192 h32:8 d128 bf16 decode page16")
    assert (problem.page, problem.computed) == (16, DECODE)
    assert str(problem) == "b8 s1:8192 h32:8 d128 bf16 decode page16"
    assert problem.kind == "decode+page16"
    assert parse_kind(problem.kind) == (problem.semantics, "decode", 16, "", 0, "", "")
    assert Problem.parse(str(PAGED)) == PAGED
    assert PAGED.kind == "decode+causal+packed+uneven+page16"
    assert DENSE.page == 0
    assert "page" not in str(DENSE)


def test_kernels_of_the_table_do_not_depend_on_the_page() -> None:
    assert kind_class(PAGED) == "decode+causal+packed"
    with pytest.raises(ArgumentError, match="not for one page size"):
        parse_class("decode+page16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s1:8 d64 fp16 page16", "page=16: forward has no pages; leave it out"),
        ("s1:8 d64 fp16 decode page0", "page='page0': give one whole number, at least 1"),
        ("s1:8 d64 fp16 decode page4 page8", r"page='page4\+page8': give one"),
        ("s1:8 d64 fp16 decode page" + "9" * 40, "page='page9.*: give one whole number"),
    ],
)
def test_a_page_must_be_one_whole_number_of_an_operation_with_pages(
    text: str, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        Problem.parse(text)


def test_only_operations_over_caches_have_pages() -> None:
    assert [name for name, it in OPERATIONS.items() if it.has_pages] == ["decode", "latent_decode"]
    assert operation("decode") is DECODE


def test_shapes_in_measurements_are_of_caches_that_the_keys_just_fit_into() -> None:
    dense = {t.name: DECODE.shape(t, DENSE) for t in DECODE.tensors if t.is_required(DENSE)}
    assert dense == {
        "q": (2, 3, 8, 64),
        "k_cache": (2, 128, 2, 64),
        "v_cache": (2, 128, 2, 64),
        "cache_lens": (2,),
        "o": (2, 3, 8, 64),
    }
    paged = {t.name: DECODE.shape(t, PAGED) for t in DECODE.tensors}
    assert paged["k_cache"] == paged["v_cache"] == (14, 16, 2, 64)
    assert paged["page_table"] == (2, 7)
    assert paged["q"] == paged["o"] == (6, 8, 64)
    assert paged["k"] == paged["v"] == (6, 2, 64)
    assert paged["cos"] == paged["sin"] == (100, 32)
    assert paged["lse"] == (8, 6)


@pytest.mark.parametrize(
    ("words", "scores", "keys"),
    [
        ("b1 s1:8192", 8192, 8192),
        ("b1 s1:8192 causal", 8192, 8192),
        ("b1 s4:8192 causal", 4 * 8192 - 6, 8192),
        ("b1 s8:5 causal", 15, 5),
        ("b1 s1:8192 window", 1025, 1025),
        ("b1 s4:8192 window", 4 * 1025, 1028),
    ],
)
def test_work_is_that_of_the_keys_that_are_seen(words: str, scores: int, keys: int) -> None:
    problem = Problem.parse(f"{words} h8:2 d64 fp16 decode")
    assert problem.attn_flop() == 4 * 8 * 64 * scores
    rows = 2 * problem.seq_q * 8 + 2 * keys * 2
    assert DECODE.bytes(problem) == rows * 64 * 2 + 4
    paged = Problem.parse(f"{problem} page16")
    assert paged.attn_flop() == problem.attn_flop()
    assert DECODE.bytes(paged) == DECODE.bytes(problem) + 4 * -(-keys // 16)


def _call(problem: Problem, extra: dict[str, tuple[int, ...]], **options: Any) -> Call:
    rows = 1 if problem.semantics.packed else 2
    strides = {
        "q": (1536, 512, 64, 1)[-rows - 2 :],
        "k_cache": (8192, 128, 64, 1),
        "v_cache": (9216, 256, 72, 1),
        "cache_lens": (1,),
        "o": (1600, 520, 64, 1)[-rows - 2 :],
        **extra,
    }
    sizes = {"blocks": problem.batch, "slots": 128}
    if problem.page:
        sizes = {"blocks": 30, "slots": 16, "most_pages": 9, "positions": 200, "rotary_half": 16}
        sizes["total_q"] = 5
    return Call(problem, strides, sizes, {**DECODE.options, **options})


def test_numbers_of_a_dense_call() -> None:
    assert DECODE.numbers(_call(DENSE, {})) == (
        *(2, 3, 128, 8, 2, 64, 64, 0, 2, 128, 0, 0, 0),
        *(1536, 512, 64, 8192, 128, 64, 9216, 256, 72, 1600, 520, 64, *[0] * 6),
        *(0, 0, 0, 0, 0),
        *(64**-0.5, 0.0, UNLIMITED, UNLIMITED, 0, 0, 0),
        *(1.0, 1.0, 0, 0),
    )


def test_numbers_of_a_paged_call_with_everything() -> None:
    extra = {
        "page_table": (12, 1),
        "k": (128, 64, 1),
        "v": (136, 68, 1),
        "cos": (20, 1),
        "sin": (24, 1),
        "lse": (5, 1),
    }
    options = {"rotary_interleaved": True, "rotary_dtype": "float32", "split": "free"}
    options |= {"k_scale_value": 0.5, "v_scale_value": 2.0}
    asked = _call(PAGED, extra, scale=0.5, **options)
    asked = asked._replace(sizes={**asked.sizes, "k_scales": 1, "v_scales": 2})
    assert DECODE.numbers(asked) == (
        *(2, 3, 144, 8, 2, 64, 64, 5, 30, 16, 9, 200, 16),
        *(0, 512, 64, 8192, 128, 64, 9216, 256, 72, 0, 520, 64, 0, 128, 64, 0, 136, 68),
        *(12, 20, 24, 0, 5),
        *(0.5, 0.0, UNLIMITED, 0, 1, 1, 1),
        *(0.5, 2.0, 0, 1),
    )


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["k"], {}, "v: missing, and k is given"),
        (["v"], {}, "k: missing, and v is given"),
        (["k", "v", "cos"], {}, "sin: missing, and cos is given"),
        (["cos", "sin"], {}, "k: missing, and cos is given"),
        ([], {"split": "any"}, "split='any': give 'invariant'"),
        ([], {"rotary_dtype": "int32"}, "rotary_dtype='int32': give 'float32'"),
        ([], {"left": 3}, "left=3, right=None: give the limits of a window"),
    ],
)
def test_tensors_and_options_that_do_not_fit_each_other_are_errors(
    names: list[str], options: dict[str, Any], message: str
) -> None:
    call = _call(DENSE, dict.fromkeys(names, (128, 64, 64, 1)), **options)
    with pytest.raises(ArgumentError, match=message):
        DECODE.numbers(call)


def test_caches_must_be_as_the_problem_says() -> None:
    call = _call(DENSE, {})
    with pytest.raises(ArgumentError, match="k_cache: 3 sequences, but q has 2"):
        DECODE.numbers(call._replace(sizes={"blocks": 3, "slots": 128}))
    paged = _call(PAGED, {"page_table": (12, 1)})
    with pytest.raises(ArgumentError, match=r"k_cache: 8 slots per page, but .* has 16;"):
        DECODE.numbers(paged._replace(sizes={**paged.sizes, "slots": 8}))
    with pytest.raises(ArgumentError, match="cos: 33 pairs per row exceed d / 2, with d=64"):
        DECODE.numbers(paged._replace(sizes={**paged.sizes, "rotary_half": 33}))


def test_a_call_that_appends_nothing_only_reads_the_caches() -> None:
    caches = [tensor for tensor in DECODE.outputs if tensor.name.endswith("_cache")]
    assert len(caches) == 2
    for tensor in caches:
        assert not tensor.is_written(("q", "k_cache", "v_cache"))
        assert tensor.is_written(("q", "k_cache", "v_cache", "k", "v"))


def test_a_cache_format_is_a_word_and_halves_the_bytes() -> None:
    plain = Problem.parse("b8 s1:8192 h32:8 d128 bf16 decode page16")
    problem = Problem.parse(f"{plain} cache_e4m3")
    assert problem == replace(plain, cache="e4m3")
    assert Problem.parse(str(problem)) == problem
    assert kind_class(problem) == "decode+cache_e4m3"
    assert parse_class("decode+cache_e4m3").cache == "e4m3"
    (cache,) = (it for it in DECODE.tensors if it.name == "k_cache")
    assert cache.dtype_of(problem) == "float8_e4m3fn"
    assert cache.dtype_of(replace(plain, cache="scaled")) == "bfloat16"
    keys = 2 * 8 * 8192 * 8 * 128
    assert DECODE.bytes(plain) - DECODE.bytes(problem) == keys


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s1:8 d64 fp16 cache_e4m3", "cache='e4m3': forward has no KV cache; leave it out"),
        ("s1:8 d64 fp16 decode cache_e4m3 cache_e5m2", r"cache='cache_e4m3\+cache_e5m2': give"),
        ("s1:8 d64 fp16 decode cache_e4m2", "unknown word 'cache_e4m2'; did you mean 'cache_e"),
    ],
)
def test_other_cache_formats_are_refused(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Problem.parse(text)
    with pytest.raises(
        ArgumentError, match="cache='fp8': allowed are '', 'scaled', 'e4m3', 'e5m2'"
    ):
        replace(DENSE, cache="fp8")


def test_scales_are_one_or_one_for_each_head() -> None:
    asked = _call(DENSE, {})
    with pytest.raises(ArgumentError, match="v_scale: 3 scales, and the cache has 2 heads"):
        DECODE.numbers(asked._replace(sizes={**asked.sizes, "v_scales": 3}))
