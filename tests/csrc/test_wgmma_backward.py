"""The kernels of the wgmma_backward family in the emulator: right gradients, no finding, and the
same bits of dk, dv and dsinks under every schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import shared_kernels

from flashsmith.chooser.function_problems import parse_with_functions
from flashsmith.families import (
    DType,
    Problem,
    Semantics,
    WgmmaBackwardKernelConfig,
    device_spec,
    family_named,
    is_legal,
    parse_kernel_name_into_config,
)
from flashsmith.families.head_dims import HeadPair
from flashsmith.families.wgmma_backward.config import DqSums
from flashsmith.families.wgmma_backward.sets import (
    ordered_like,
    separate_configs,
    shared_configs,
    with_separate_dq,
    without_dq,
)
from flashsmith.verify import Verdict, reference_of
from flashsmith.verify import prove as prove_problem

FAMILY = family_named("wgmma_backward")


def config(text: str) -> WgmmaBackwardKernelConfig:
    found = parse_kernel_name_into_config(text)
    assert isinstance(found, WgmmaBackwardKernelConfig)
    return found


WIDE = config(
    "(BF16, 128, 64, 128, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_40_232"
    "+scores_together+lagged_dq+pingpong+persistent"
)
# By rows and by turns, where WIDE shares dQ by columns.
ROWS = config(
    "(FP16, 64, 128, 128, 2): "
    "tma_backward+q_stages_2+do_stages_2+ds_stages_1+regs_24_240+scores_together"
)
TURNS = config(
    "(BF16, 64, 64, 192, 3): tma_backward+q_stages_3+do_stages_2+ds_stages_2+regs_32_160"
    "+scores_together+early_exp+lagged_dq+persistent"
)
AHEAD = config(
    "(FP16, 64, 64, 128, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_24_240"
    "+scores_ahead+early_exp+lagged_dq+pingpong"
)
# Each of two warpgroups has one and a half of three panels of dQ's columns.
HALVES = config(
    "(BF16, 96, 64, 128, 2): "
    "tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_24_240+late_dq+early_exp"
)
# dq's sums at other times: at once, also without a lag, and under dk's product.
AT_ONCE = config(
    "(FP16, 64, 128, 128, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_24_240"
    "+scores_together+lagged_dq+sums_at_once+wide_stores+bulk_sums"
)
UNLAGGED = config(
    "(BF16, 64, 64, 128, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_1+regs_24_240"
    "+pingpong+sums_at_once+bulk_sums"
)
UNDER_DK = config(
    "(FP16, 64, 64, 128, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_3+regs_24_240"
    "+scores_ahead+lagged_dq+pingpong+sums_under_dk+wide_stores"
)
WIDE_UNDER_DK = replace(WIDE, dq_sums=DqSums.SUMS_UNDER_DK, wide_stores=True)
# Rows' statistics before the products: half of lse, all of it, and D too.
EARLY_ROWS = config(
    "(BF16, 64, 128, 128, 2): tma_backward+q_stages_3+do_stages_2+ds_stages_2+regs_24_240"
    "+scores_together+lagged_dq+pingpong+sums_under_dk+early_rows"
)
ALL_EARLY = [
    replace(WIDE_UNDER_DK, early_rows=True),
    replace(
        WIDE_UNDER_DK,
        persistent=False,
        producer_registers=24,
        consumer_registers=240,
        early_rows=True,
    ),
]
BULK = [replace(cfg, bulk_sums=True) for cfg in (WIDE_UNDER_DK, TURNS, HALVES)]
SPLIT = config(
    "(BF16, 256, 64, 64, 2): "
    "tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_24_240+split_roles"
)
SPLIT_HALVES = replace(SPLIT, dtype=DType.FP16, d_head=192, early_rows=True)
# dk and dv alone: in persistent CTAs of two warpgroups, and of wide heads.
KEYS = config(
    "(FP16, 64, 128, 128, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_1+regs_40_232"
    "+scores_together+persistent+without_dq"
)
KEYS_SPLIT = without_dq(SPLIT_HALVES)
MORE_KEYS = [without_dq(cfg) for cfg in (WIDE_UNDER_DK, TURNS, HALVES, SPLIT)]
# Two CTAs with half of the columns each.
PAIR = config(
    "(BF16, 512, 64, 64, 2): tma_backward+q_stages_2+do_stages_1+ds_stages_2+regs_40_232"
    "+split_roles+wide_stores+early_rows+cta_pair"
)
PAIRS = [PAIR, replace(PAIR, dtype=DType.FP16, q_stages=1, do_stages=2, wide_stores=False)]
KEYS_PAIR = without_dq(PAIR)
# dq in another launch, by a kernel whose tiles are larger than the main kernel's.
ALONE_SEPARATE = config(
    "(FP16, 64, 64, 64, 1): tma_backward+q_stages_1+do_stages_1+ds_stages_1+regs_24_240"
    "+scores_together+separate_dq"
)
SEPARATE = [
    cfg
    for d_head in (64, 128, 192, 256, HeadPair(192, 128))
    for cfg in separate_configs(DType.BF16, d_head)
]
# Two CTAs with neighbouring keys, each with half of dq's columns.
SHARED = [
    cfg for d_head in (192, 256, HeadPair(192, 128)) for cfg in shared_configs(DType.BF16, d_head)
]
SHARED += [replace(SHARED[0], dtype=DType.FP16, q_stages=1, ds_stages=3, early_rows=False)]
MULTICAST = shared_configs(DType.BF16, 192)[2]
ALONE = config("(FP16, 64, 64, 64, 1): tma_backward+q_stages_1+do_stages_1+ds_stages_1+regs_24_240")
BOTH = [WIDE, TURNS]
SPLITS = [SPLIT, SPLIT_HALVES]
WHOLE = [*BOTH, SPLIT_HALVES]
OF_FULL = [
    *(ROWS, AHEAD, HALVES, ALONE, UNLAGGED, KEYS, AT_ONCE, *BULK, EARLY_ROWS, *ALL_EARLY),
    *(SPLIT, UNDER_DK, KEYS_SPLIT, *MORE_KEYS, *PAIRS, KEYS_PAIR, *SHARED),
]
PLAIN, CAUSAL = Semantics(), Semantics("causal", uneven=True)
WINDOW = Semantics("window", softcap=True, packed=True, uneven=True)
shared_kernels.want(WHOLE, PLAIN)
shared_kernels.want([*BOTH, UNDER_DK, KEYS], CAUSAL)
shared_kernels.want([TURNS], WINDOW)
shared_kernels.want([ALONE_SEPARATE], CAUSAL)
shared_kernels.want([PAIR, SHARED[0], MULTICAST], CAUSAL)


def prove(cfg: WgmmaBackwardKernelConfig, text: str, **how: Any) -> Verdict:
    """The verdict on a problem; ``how`` are the reference's options or prove()'s."""
    word = cfg.family.gradients_of(cfg)
    width = f"{cfg.d_head}:{cfg.d_v}" if cfg.d_v else cfg.d_head
    d = "" if " d" in text else f" d{width}"
    problem = Problem.parse(f"{text}{d} {cfg.dtype.name.lower()} backward {word}")
    shared_kernels.load([cfg], problem.required_semantics(cfg))
    passed = {
        name: how.pop(name) for name in ("inputs", "seed", "schedule_seed", "checks") if name in how
    }
    options = reference_of(problem.computed).options(problem, **how)
    # Two SMs, so that persistent CTAs have several blocks of keys.
    return prove_problem(cfg, problem, options=options, sm_count=2, **passed)


def full(cfg: WgmmaBackwardKernelConfig, *rest: Any) -> Any:
    return pytest.param(cfg, *rest, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("cfg", "schedule_seed"),
    [
        *((cfg, 3) for cfg in WHOLE),
        *(full(cfg, None) for cfg in WHOLE),
        *(full(cfg, seed) for cfg in OF_FULL for seed in (None, 3)),
    ],
    ids=str,
)
def test_whole_tiles(cfg: WgmmaBackwardKernelConfig, schedule_seed: int | None) -> None:
    text = f"b1 s{2 * cfg.B_r}:{2 * cfg.B_c} h2:1"
    verdict = prove(cfg, text, checks=True, schedule_seed=schedule_seed)
    assert verdict.ok, str(verdict)


# With one stage of do the producer overwrites D as soon as the last warp has let go of it: a lane
# released it once while others still read.
ONE_STAGE = config(
    "(FP16, 64, 64, 128, 2): tma_backward+q_stages_2+do_stages_1+ds_stages_1+regs_24_240"
)


@pytest.mark.full
def test_statistics_are_read_before_their_stage_is_released() -> None:
    verdict = prove(ONE_STAGE, "b1 s256:256 h2:1", checks=True)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("inputs", ["random", pytest.param("nonfinite", marks=pytest.mark.full)])
def test_a_pair_of_ctas_has_half_of_the_columns_each(inputs: str) -> None:
    """Three blocks of queries, whose first rows see no key, and columns that end in the second
    half."""
    verdict = prove(PAIR, "b1 s130:70 h1 d456 causal", inputs=inputs, checks=True)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("inputs", ["nonfinite", pytest.param("random", marks=pytest.mark.full)])
def test_two_ctas_share_dq(inputs: str) -> None:
    """Rows that see no key, blocks of queries that only one of the CTAs sees, and a last pair with
    no second block."""
    verdict = prove(SHARED[0], "b1 s260:190 h1 d184 causal", inputs=inputs, checks=True)
    assert verdict.ok, str(verdict)


def test_two_ctas_copy_queries_to_both() -> None:
    """Three panels of Q and do, of which the first CTA copies two."""
    verdict = prove(MULTICAST, "b1 s260:190 h1 d184 causal", checks=True, schedule_seed=3)
    assert verdict.ok, str(verdict)


def test_tiles_of_a_cluster_are_whole() -> None:
    cfg, *_ = shared_configs(DType.BF16, 192)
    assert cfg.fills_tiles(64, 256, 192)
    assert not cfg.fills_tiles(64, 192, 192)
    assert FAMILY.for_gradients(cfg, "no_dq") == without_dq(cfg)
    assert is_legal(without_dq(cfg), device_spec("H200"))


@pytest.mark.parametrize("words", ["mask=documents&causal", "score=alibi", "softcap"])
def test_ctas_share_dq_of_plain_scores_only(words: str) -> None:
    cfg, ordered, multicast = shared_configs(DType.BF16, 256)
    semantics = parse_with_functions(f"b1 s256 h4 d256 bf16 backward {words}").problem.semantics
    # Two CTAs leave room for one stage of do; a CTA without shared_dq has two again.
    assert cfg.do_stages == 1
    alone = replace(SPLIT, wide_stores=True, early_rows=True)
    for shared, expected in ((cfg, alone), (ordered, ordered_like(cfg)), (multicast, alone)):
        adapted = FAMILY.adapt_to_registers(shared, semantics)
        assert FAMILY.adapt_to_program(adapted, semantics) == expected
    causal = Problem.parse("b1 s256 h4 d256 bf16 backward causal").semantics
    assert FAMILY.adapt_to_registers(cfg, causal) == cfg
    assert FAMILY.adapt_to_program(cfg, causal) == cfg


UNEVEN = {
    "longer keys": ("b1 s75:140 h2:1", {}),
    "rows without keys": ("b2 s140:70 h1", {"dlse": True, "sinks": True}),
    "one row": ("b1 s1:70 h2", {"dlse": True}),
    "one key": ("b1 s70:1 h2", {"sinks": True}),
    "merged statistics": ("b1 s100:75 h2", {"sinks": True, "dlse": True, "more_keys": 9}),
    "fp32 gradients": ("b1 s75:140 h2:1", {"grad_dtype": "float32"}),
}


@pytest.mark.parametrize(
    ("cfg", "case"),
    [
        *((TURNS, case) for case in UNEVEN),
        *((cfg, "rows without keys") for cfg in (WIDE, UNDER_DK, KEYS)),
        *(full(WIDE, case) for case in UNEVEN if case != "rows without keys"),
        *(
            full(cfg, case)
            for cfg in (
                *(HALVES, WIDE_UNDER_DK, AT_ONCE, *BULK, *ALL_EARLY, *SPLITS, *MORE_KEYS),
                *(*PAIRS, KEYS_PAIR, *SHARED),
            )
            for case in UNEVEN
        ),
    ],
    ids=str,
)
def test_causal_and_uneven(cfg: WgmmaBackwardKernelConfig, case: str) -> None:
    sizes, options = UNEVEN[case]
    verdict = prove(cfg, f"{sizes} causal", checks=True, **options)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize(
    "cfg",
    [TURNS, *map(full, [WIDE, *SPLITS, KEYS, KEYS_SPLIT, PAIR, ALONE_SEPARATE, *SHARED])],
    ids=str,
)
@pytest.mark.parametrize("inputs", ["nonfinite", "neighbours", "far_scores"])
def test_hard_inputs(cfg: WgmmaBackwardKernelConfig, inputs: str) -> None:
    for text in ("b2 s100:75 h2:1 causal", "b1 s70:150 h2 causal"):
        verdict = prove(cfg, text, inputs=inputs, checks=True)
        assert verdict.ok, str(verdict)


PACKED = {"lens_q": (70, 0, 13, 20), "lens_k": (30, 12, 0, 140), "spare": 6}


@pytest.mark.parametrize(
    ("cfg", "inputs", "limits"),
    [
        make(cfg, inputs, limits)
        for inputs, limits in (("random", (13, 5)), ("random", (None, 4)), ("neighbours", (9, 9)))
        for make, cfg in (
            (pytest.param, TURNS),
            *((full, cfg) for cfg in (WIDE, KEYS, *SPLITS, *MORE_KEYS, PAIR, KEYS_PAIR)),
            *((full, cfg) for cfg in (*SEPARATE, *SHARED)),
        )
    ],
    ids=str,
)
def test_packed_windows_with_a_softcap(
    cfg: WgmmaBackwardKernelConfig, inputs: str, limits: tuple[int | None, int | None]
) -> None:
    """Rows of no sequence hold NaN, and have gradients of 0."""
    verdict = prove(
        cfg,
        "b4 s70:140 h2:1 window softcap packed",
        inputs=inputs,
        checks=True,
        left=limits[0],
        right=limits[1],
        dlse=True,
        sinks=True,
        **PACKED,
    )
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize(
    ("cfg", "text"),
    [
        (ALONE_SEPARATE, "b2 s150:200 h2:1 causal"),
        *(full(cfg, "b1 s150:200 h2:1 causal") for cfg in (*SEPARATE, with_separate_dq(TURNS))),
        *(full(cfg, "b1 s256 h2:1") for cfg in SEPARATE),
    ],
    ids=str,
)
def test_dq_of_another_launch(cfg: WgmmaBackwardKernelConfig, text: str) -> None:
    widths = f" d{cfg.d_head}:{cfg.d_v}" if cfg.d_v else ""
    verdict = prove(cfg, text + widths, checks=True, dlse=True, sinks=True)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("cfg", [ALONE_SEPARATE, *SEPARATE], ids=str)
def test_a_kernel_of_dq_needs_no_order(cfg: WgmmaBackwardKernelConfig) -> None:
    assert FAMILY.is_deterministic(cfg)
    assert FAMILY.for_gradients(cfg, "no_dq") == replace(cfg, separate_dq=False, without_dq=True)
    # Tiles of both kernels.
    assert not cfg.fills_tiles(cfg.dq_kernel.B_r // 2, 384, cfg.d_head)
    assert cfg.fills_tiles(384, 384, cfg.d_head)
