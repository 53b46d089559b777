"""Head dimensions of v that are not those of q and k: in problems, configs and the choice."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import product

import pytest

from flashsmith.errors import ArgumentError
from flashsmith.families import (
    MMA_SYNC,
    MMA_SYNC_DECODE,
    WGMMA,
    DType,
    Problem,
    d_head_for,
    device_spec,
    is_legal,
    nearest_legal,
    parse_kernel_name_into_config,
)
from flashsmith.families.canonical import canonical_tile
from flashsmith.families.family import Family
from flashsmith.families.head_dims import PAIRS, HeadPair
from flashsmith.operations import BACKWARD, DECODE, FORWARD

PAIR = Problem.parse("b2 s128:512 h16:4 d192:128 bf16 causal")
SHORT_FORMS = (
    "(BF16, 192:128, 128, 64, 8): async+eager+swizzled+load_2_2_2_tiles",
    "(FP16, 256:256, 128, 80, 2wg): tma+stages_2+q_buffers_1+regs_24_240+overlap+direct_O",
)


def test_texts_of_problems_have_both_widths_only_if_they_differ() -> None:
    assert (PAIR.d, PAIR.d_v) == (192, 128)
    assert str(PAIR) == "b2 s128:512 h16:4 d192:128 bf16 causal"
    assert Problem.parse(str(PAIR)) == PAIR
    equal = Problem.parse("s128 d64:64 fp16")
    assert str(equal) == "b1 s128 h1 d64 fp16"
    assert equal == Problem(1, 128, 128, 1, 1, 64, DType.FP16)
    assert equal.d_v == 64


def test_d_v_follows_d_unless_it_was_given() -> None:
    equal = Problem.parse("s128 d64 fp16")
    for problem in (equal, pickle.loads(pickle.dumps(equal)), replace(equal, batch=2)):
        assert (problem.d, problem.d_v) == (64, 64)
        wider = replace(problem, d=128)
        assert (wider.d, wider.d_v) == (128, 128)
        assert (replace(wider, d=72).d_v, replace(wider, d_v=72).d_v) == (72, 72)
    assert replace(PAIR, d=64).d_v == 128
    assert Problem(1, 128, 128, 1, 1, 64, DType.FP16, d_v=128) == replace(equal, d_v=128)


@pytest.mark.parametrize(
    "text",
    [
        "(BF16, 256:256, 128, 128, 2wg): tma+stages_2+q_buffers_1+regs_24_240+direct_O",
        "(FP16, 256:256, 256, 64, 4): async+eager+swizzled+load_2_2_2_tiles",
        "(FP16, 256, 256, 64, 4): async+eager+swizzled+load_2_2_2_tiles",
        "(FP16, 192:128, 32, 128, 4): decode+stages_8+least_128+parts_2",
    ],
)
def test_suggestions_keep_both_widths(text: str) -> None:
    illegal = parse_kernel_name_into_config(text)
    suggested = nearest_legal(illegal, illegal.family.roomiest_device)
    assert suggested
    assert {it.head_dims for it in suggested} == {illegal.head_dims}


def test_suggestions_for_widths_without_kernels_have_others() -> None:
    illegal = parse_kernel_name_into_config("(FP16, 128:96, 64, 64, 4): load_2_2_2_tiles")
    assert {it.head_dims for it in nearest_legal(illegal)} <= {128, *PAIRS}


def test_tensors_have_the_widths_of_what_they_are() -> None:
    shapes = {it.name: FORWARD.shape(it, PAIR) for it in FORWARD.tensors[:4]}
    assert shapes == {
        "q": (2, 128, 16, 192),
        "k": (2, 512, 4, 192),
        "v": (2, 512, 4, 128),
        "o": (2, 128, 16, 128),
    }
    backward = PAIR.of_operation("backward")
    widths = {it.name: BACKWARD.shape(it, backward)[-1] for it in BACKWARD.tensors[:9]}
    wide = dict.fromkeys(("q", "k", "dq", "dk"), 192)
    assert widths == wide | dict.fromkeys(("do", "v", "o", "dv"), 128) | {"lse": 128}
    decode = Problem.parse("b2 s3:512 h16:4 d192:128 bf16 decode page16")
    shapes = {it.name: DECODE.shape(it, decode) for it in DECODE.tensors}
    assert (shapes["k_cache"], shapes["v_cache"]) == ((64, 16, 4, 192), (64, 16, 4, 128))
    assert (shapes["k"], shapes["v"]) == ((2, 3, 4, 192), (2, 3, 4, 128))
    assert shapes["o"] == (2, 3, 16, 128)


@pytest.mark.parametrize(
    ("word", "columns"),
    [("", 3 * 192 + 2 * 128), ("only_dq", 2 * 192 + 128), ("no_dq", 2 * 192 + 2 * 128)],
)
def test_flop_count_each_gemm_with_its_width(word: str, columns: int) -> None:
    pairs = 2 * 16 * 128 * 512
    assert PAIR.attn_flop() == pairs * (192 + 128)
    assert PAIR.of_operation("backward", word).attn_flop() == pairs * columns


def test_operations_without_d_v_refuse_it() -> None:
    with pytest.raises(ArgumentError, match=r"^d_v=128: merge computes v of q's and k's"):
        Problem.parse("s128 d192:128 fp16 merge")


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("family", [WGMMA, MMA_SYNC, MMA_SYNC_DECODE], ids=lambda it: it.name)
def test_every_candidate_has_a_canonical_counterpart(family: Family, pair: HeadPair) -> None:
    """Its tile is that of each call which the pair serves."""
    served = [it for it in product(range(8, 257, 8), repeat=2) if it[0] != it[1]]
    mine = [
        it
        for it in served
        if d_head_for(Problem(1, 1, 1, 1, 1, it[0], DType.FP16, d_v=it[1])) == pair
    ]
    for gpu in ("H200", "A100"):
        device = device_spec(gpu)
        if not family.runs_on(device):
            continue
        for cfg in family.candidates(DType.BF16, pair, device, True):
            canonical = family.canonical(cfg, device)
            assert canonical is not None, cfg
            assert (canonical.canonical, canonical.head_dims) == (1, pair)
            assert {canonical_tile(d, device.arch, d_v) for d, d_v in mine} == {canonical.B_c}


@pytest.mark.parametrize("text", SHORT_FORMS)
def test_short_forms_name_both_widths(text: str) -> None:
    cfg = parse_kernel_name_into_config(text)
    assert str(cfg) == text
    assert cfg.head_dims == HeadPair(cfg.d_head, cfg.d_head_v)
    one_width = replace(cfg, d_v=0)  # type: ignore[call-arg]
    assert str(one_width) == text.replace(f"{cfg.head_dims}", f"{cfg.d_head}")
    assert one_width.head_dims == one_width.d_head_v == cfg.d_head
    assert cfg.kernel_name() != one_width.kernel_name()


@pytest.mark.parametrize(
    ("widths", "pair"),
    [
        ("192:128", (192, 128)),
        ("128:64", (128, 64)),
        ("96:72", (192, 128)),
        ("8:16", (64, 128)),
        ("72:64", (128, 64)),
        ("200:104", (256, 128)),
        ("64:256", (256, 256)),
        ("248:256", (256, 256)),
    ],
)
def test_the_pair_with_the_fewest_columns_is_chosen(widths: str, pair: tuple[int, int]) -> None:
    assert d_head_for(Problem.parse(f"s128 d{widths} fp16")) == pair


@pytest.mark.parametrize("widths", ["264:128", "128:264", "64:60", "60:64"])
def test_widths_without_kernels_are_refused(widths: str) -> None:
    d, d_v = widths.split(":")
    with pytest.raises(ArgumentError, match=rf"^d={d}, d_v={d_v}: forward has kernels of the pair"):
        d_head_for(Problem.parse(f"s128 d{widths} fp16"))


@pytest.mark.parametrize("operation", ["", "decode", "backward"])
@pytest.mark.parametrize(("d", "advice"), [(320, "one width"), (520, "such widths")])
def test_one_width_is_advised_where_kernels_have_it(operation: str, d: int, advice: str) -> None:
    with pytest.raises(ArgumentError, match=f"pad q, k and v with zeros to {advice}"):
        d_head_for(Problem.parse(f"s128 d{d}:256 fp16 {operation}"))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_families_offer_each_pair(pair: HeadPair) -> None:
    oldest = device_spec("RTX 4090")
    for family, device in (
        *((WGMMA, device_spec("H200")), (MMA_SYNC, oldest), (MMA_SYNC_DECODE, oldest)),
    ):
        for dtype in DType:
            offered = (
                *family.candidates(dtype, pair, device, True),
                *family.search_space(dtype, pair, True),
            )
            assert offered
            assert {it.head_dims for it in offered} == {pair}
        proven = family.proof_configs(DType.BF16, pair)
        assert all(is_legal(it, family.roomiest_device) for it in proven)
        assert {it.head_dims for it in proven} == {pair}


def test_a_kernel_of_a_pair_needs_whole_tiles_of_both_widths() -> None:
    cfg = parse_kernel_name_into_config(SHORT_FORMS[0])
    whole = Problem.parse("s128 d192:128 bf16")
    assert not whole.required_semantics(cfg).uneven
    assert Problem.parse("s128 d192:64 bf16").required_semantics(cfg).uneven
