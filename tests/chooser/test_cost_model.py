"""The cost model against what was measured, and in its limits."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from flashsmith.chooser.candidates import candidates
from flashsmith.chooser.cost_model import estimate
from flashsmith.chooser.cost_model import schedule as schedule_module
from flashsmith.errors import ArgumentError
from flashsmith.families import (
    WGMMA,
    DeviceSpec,
    DqMode,
    DType,
    Family,
    Problem,
    device_spec,
    is_legal,
    parse_kernel_name_into_config,
)
from flashsmith.families.config import RESERVED_SMEM_PER_CTA
from flashsmith.families.mma_sync.cost import (
    estimated_registers,
    estimated_spill_bytes,
    resident_ctas,
)

ROWS = Path(__file__).parents[2] / "benchmarks" / "h200"
H200 = device_spec("H200")
BIG = parse_kernel_name_into_config(
    "(FP16, 128, 128, 64, 4): async+eager+swizzled+load_2_2_2_tiles+buffer"
)
SMALL = replace(BIG, B_r=64)


@cache
def timings() -> list[dict[str, Any]]:
    found = []
    for path in sorted(ROWS.glob("factory-run-*.json")):
        report = json.loads(path.read_text())
        size = report["timed"]
        for kernel in report["kernels"]:
            cfg = parse_kernel_name_into_config(kernel["config"])
            problem = Problem(
                size["batch"],
                size["seq"],
                size["seq"],
                size["heads"],
                size["heads"],
                cfg.d_head,
                cfg.dtype,
            )
            found.append(
                {
                    "set": path.stem.removeprefix("factory-run-"),
                    "config": cfg,
                    "registers": kernel["registers"],
                    "spilled": kernel["spill_store_bytes"],
                    "ms": kernel["timing"]["ms"],
                    "estimate": estimate(cfg, problem, H200).ms,
                }
            )
    return found


def ranks(values: list[float]) -> np.ndarray:
    array = np.asarray(values)
    return np.array([(array < v).sum() + ((array == v).sum() - 1) / 2 for v in array])


def spearman(rows: list[dict[str, Any]]) -> float:
    one, other = (ranks([row[name] for row in rows]) for name in ("estimate", "ms"))
    return float(np.corrcoef(one, other)[0, 1])


def test_the_order_is_that_of_the_measurements() -> None:
    rows = timings()
    assert len(rows) == 173
    assert spearman(rows) > 0.95
    for name, least in (("tune", 0.85), ("prog-all", 0.94), ("cover", 0.98), ("prog", 0.85)):
        assert spearman([row for row in rows if row["set"] == name]) > least, name


def test_times_are_a_tenth_off_at_most_as_a_rule() -> None:
    errors = [math.log(row["estimate"] / row["ms"]) for row in timings()]
    assert np.sqrt(np.mean(np.square(errors))) < 0.07


@pytest.mark.parametrize("dtype", DType)
def test_the_best_on_paper_is_among_the_best_measured(dtype: DType) -> None:
    rows = [row for row in timings() if (row["set"], row["config"].dtype) == ("tune", dtype)]
    picked = min(rows, key=lambda row: row["estimate"])
    assert picked["ms"] < 1.06 * min(row["ms"] for row in rows)


def test_lengths_masks_and_heads_it_was_not_fitted_to() -> None:
    """The kernels of that day's attention(), from 1024 to 16384, full, causal and packed."""
    configs = {
        "128": "(FP16, 128, 128, 64, 4): async+eager+swizzled+load_2_2_2_tiles+buffer",
        "64": "(FP16, 64, 128, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax",
    }
    words = {"full": "", "causal": "causal", "gqa": "causal", "packed": "causal packed"}
    checked = 0
    for row in csv.DictReader((ROWS / "semantics-speed.csv").open()):
        if row["contender"] != "attention()" or row["kind"] not in words:
            continue
        sizes = "b{batch} s{seq} h{heads}:{heads_k} d{d}".format_map(row)
        dtype = "fp16" if row["dtype"] == "float16" else "bf16"
        problem = Problem.parse(f"{sizes} {dtype} {words[row['kind']]}")
        cfg = replace(parse_kernel_name_into_config(configs[row["d"]]), dtype=problem.dtype)
        assert estimate(cfg, problem, H200).ms == pytest.approx(float(row["ms"]), rel=0.08), row
        checked += 1
    assert checked == 80


def test_registers_are_estimated_well_enough_to_count_ctas() -> None:
    for row in timings():
        cfg, guess = row["config"], min(255.0, estimated_registers(row["config"]))
        assert abs(guess - row["registers"]) < 40, cfg
        if row["spilled"] > 100:
            assert estimated_spill_bytes(cfg) > 0, cfg
        if not row["spilled"]:
            assert estimated_spill_bytes(cfg) == 0, cfg
    same = [
        resident_ctas(row["config"], H200, estimated_registers(row["config"]))
        == resident_ctas(row["config"], H200, row["registers"])
        for row in timings()
    ]
    assert sum(same) / len(same) > 0.9


def test_a_compilers_report_stands_before_the_estimate() -> None:
    problem = Problem.parse("b16 s4096 h16 d128 fp16")
    lean = estimate(SMALL, problem, H200, registers=128, spill_bytes=0)
    fat = estimate(SMALL, problem, H200, registers=250, spill_bytes=0)
    assert (lean.resident, fat.resident) == (4, 2)
    assert estimate(SMALL, problem, H200, registers=128, spill_bytes=400).ms > 1.3 * lean.ms


# --- the wgmma family ----------------------------------------------------------------------------


def wgmma_timings() -> list[tuple[Any, Problem, float]]:
    """Config, problem, TFLOP/s of the first run; without the order for masks where there is none,
    which no candidate has."""
    rows = csv.DictReader((ROWS / "hopper-first-run.csv").open())
    found = [
        (parse_kernel_name_into_config(row["config"]), Problem.parse(row["problem"]), row["tflops"])
        for row in rows
        if row["config"]
    ]
    return [
        (cfg, problem, float(tflops))
        for cfg, problem, tflops in found
        if problem.semantics.mask == "causal" or "longest_first" not in str(cfg)
    ]


def test_wgmma_times_are_within_a_tenth_of_the_measured() -> None:
    errors = [
        math.log(problem.attn_flop() / estimate(cfg, problem, H200).ms / 1e9 / tflops)
        for cfg, problem, tflops in wgmma_timings()
    ]
    assert len(errors) == 32
    assert np.sqrt(np.mean(np.square(errors))) < 0.04
    assert max(map(abs, errors)) < 0.1


@pytest.mark.parametrize("length", [512, 1024, 4096, 16384])
def test_of_the_wgmma_candidates_one_near_the_measured_best_is_taken(length: int) -> None:
    rows = [row for row in wgmma_timings() if row[1].seq_q == length]
    for problem in dict.fromkeys(row[1] for row in rows):
        tflops = {cfg: rate for cfg, p, rate in rows if p == problem}
        masked = problem.semantics.mask == "causal"
        weighed = candidates(problem.dtype, 128, H200, masked)
        best = min(weighed, key=lambda cfg: estimate(cfg, problem, H200).ms)
        assert tflops[best] > 0.94 * max(tflops.values()), problem


def test_one_warpgroup_wins_where_there_are_few_rows_and_three_where_there_are_many() -> None:
    three = WGMMA.candidates(DType.FP16, 128, H200, masked=False)[0]
    one = replace(
        three, B_r=64, n_warpgroups=1, pingpong=0, overlap=True,
        producer_registers=24, consumer_registers=240,
    )  # fmt: skip
    for text, faster, slower in (
        ("b1 s512 h16 d128 fp16", one, three),
        ("b16 s4096 h16 d128 fp16", three, one),
    ):
        assert ms(faster, text) < 0.8 * ms(slower, text)


def test_ctas_that_share_an_sm_take_turns_at_it() -> None:
    cfg = WGMMA.candidates(DType.FP16, 64, H200, masked=False)[0]
    one = replace(
        cfg, B_r=64, n_warpgroups=1, B_c=96, pingpong=0, overlap=True,
        producer_registers=24, consumer_registers=136,
    )  # fmt: skip
    many, few = "b16 s4096 h32 d64 fp16", "b1 s512 h16 d64 fp16"
    three = replace(one, ctas_per_sm=3)
    assert estimate(three, Problem.parse(many), H200).resident == 3
    assert ms(three, many) < 0.6 * ms(one, many)
    assert ms(three, few) == pytest.approx(ms(one, few), rel=0.01)
    assert ms(replace(one, exp2_fma_share=25), many) <= ms(one, many)


def test_wgmma_kernels_run_on_hopper_only() -> None:
    cfg = WGMMA.candidates(DType.FP16, 128, H200, masked=False)[0]
    guess = estimate(cfg, Problem.parse("s64 d128 fp16"), device_spec("A100"))
    assert (guess.ms, guess.resident) == (math.inf, 0)
    assert WGMMA.candidates(DType.FP16, 128, device_spec("B200"), masked=False) == ()


# --- the backward pass ---------------------------------------------------------------------------


def backward_timings(name: str) -> list[tuple[Any, Problem, float]]:
    """Config, problem and milliseconds of a family's first run, of configs that are legal: some
    were not yet refused for their spills then."""
    rows = [
        (
            parse_kernel_name_into_config(row["config"]),
            Problem.parse(row["problem"]),
            float(row["ms"]),
        )
        for row in csv.DictReader((ROWS / f"{name}-backward.csv").open())
        if row["config"]
    ]
    return [row for row in rows if is_legal(row[0], H200) and not has_fewer_ctas(row[0])]


def has_fewer_ctas(cfg: Any) -> bool:
    """Whether an SM holds fewer of its CTAs than when mma-sync-backward.csv was measured: with
    atomics they have had one tile more of dS since."""
    if getattr(cfg, "dq", None) != DqMode.ATOMICS:
        return False
    now = cfg.keys_smem_bytes()
    ctas = [
        H200.max_smem_per_sm // (smem + RESERVED_SMEM_PER_CTA)
        for smem in (now, now - cfg.B_r * cfg.B_c * cfg.dtype.element_size)
    ]
    return ctas[0] < ctas[1]


def over_fa2_timings() -> list[tuple[Any, Problem, float]]:
    """The kernels of mma_sync_backward with today's loop, in 24 cells."""
    return [
        (
            parse_kernel_name_into_config(row["config"]),
            Problem.parse(
                f"b{row['batch']} s{row['seq_q']} h{row['heads_q']} d{row['d']} {row['dtype']} "
                + row["semantics"].replace("+", " ")
            ),
            float(row["ms"]),
        )
        for row in csv.DictReader((ROWS / "mma-sync-over-fa2.csv").open())
        if row["config"]
    ]


@pytest.mark.parametrize(
    ("name", "count", "usual", "most"),
    [
        ("mma-sync", 176, 0.085, 0.17),
        ("wgmma", 79, 0.045, 0.1),
        ("over FA2", 24, 0.08, 0.15),
    ],
)
def test_times_of_gradients_are_near_the_measured(
    name: str, count: int, usual: float, most: float
) -> None:
    rows = over_fa2_timings() if name == "over FA2" else backward_timings(name)
    errors = [math.log(estimate(cfg, problem, H200).ms / ms) for cfg, problem, ms in rows]
    assert len(errors) == count
    assert np.sqrt(np.mean(np.square(errors))) < usual
    assert max(map(abs, errors)) < most


@pytest.mark.parametrize("name", ["mma-sync", "wgmma"])
def test_the_best_on_paper_gives_gradients_nearly_as_fast_as_the_best(name: str) -> None:
    rows = backward_timings(name)
    for problem in dict.fromkeys(row[1] for row in rows):
        ms = {cfg: took for cfg, p, took in rows if p == problem}
        picked = min(ms, key=lambda cfg: estimate(cfg, problem, H200).ms)
        assert ms[picked] < 1.03 * min(ms.values()), problem


KEYS = parse_kernel_name_into_config("(FP16, 128, 64, 128, 8): backward+columns_2+dq_atomics")


@pytest.mark.parametrize("sizes", ["s4096", "s1000:3000", "s3000:1000", "s128:4096", "s4096:100"])
def test_steps_of_a_causal_block_of_keys(sizes: str) -> None:
    """By a count of what each block of keys is seen by, in whole steps."""
    p = Problem.parse(f"b1 {sizes} h1 d128 fp16 causal backward")
    work = KEYS.family.tile_work(KEYS, H200, None, None)
    blocks, beyond = -(-p.seq_k // work.rows), p.seq_k - p.seq_q
    # The first query that sees a key of the block.
    begins = (max(0, block * work.rows - beyond) for block in range(blocks))
    counted = sum(-(-max(0, p.seq_q - begin) // work.keys) for begin in begins)
    steps = schedule_module._causal_steps_of_keys(work, p, blocks, -(-p.seq_q // work.keys))
    assert steps == pytest.approx(counted, rel=0.05, abs=2)


def test_gradients_of_masked_grouped_and_repeatable_problems() -> None:
    text = "b16 s8192 h16 d128 fp16 backward"
    full, causal, window = (ms(KEYS, f"{text} {mask}") for mask in ("", "causal", "window"))
    assert 0.48 < causal / full < 0.58
    assert 1 / 8 < window / full < 1 / 4
    assert ms(KEYS, text.replace("h16", "h16:4")) == pytest.approx(full, rel=0.1)
    # 7 products in place of 5, but no sums in memory.
    repeatable = replace(KEYS, dq=0)
    assert 1.1 < ms(repeatable, text) / full < 1.5
    # D and LSE are of every row, however short the rest.
    assert ms(KEYS, "b1 s64 h1 d128 fp16 backward") > 0.01
    assert ms(KEYS, "b0 s64 h1 d128 fp16 backward") == 0


# --- waves ---------------------------------------------------------------------------------------


def ms(cfg: Any, text: str, device: DeviceSpec = H200) -> float:
    return estimate(cfg, Problem.parse(text), device).ms


def test_one_cta_beyond_a_wave_takes_another_one() -> None:
    """264 CTAs of 128 rows are what the H200's 132 SMs hold at a time, two each."""
    full, over = (ms(BIG, f"b1 s{128 * n}:4096 h1 d128 fp16") for n in (264, 265))
    twice = ms(BIG, f"b1 s{128 * 528}:4096 h1 d128 fp16")
    assert 1.4 * full < over < twice
    assert estimate(BIG, Problem.parse(f"b1 s{128 * 264} h1 d128 fp16"), H200).waves == 1.0


def test_an_sm_to_itself_is_faster_than_half_an_sm() -> None:
    alone, shared = (ms(BIG, f"b1 s{128 * n}:4096 h1 d128 fp16") for n in (132, 264))
    assert 0.5 * shared < alone < 0.9 * shared
    assert ms(BIG, "b1 s128:4096 h1 d128 fp16") == alone


def test_large_tiles_lose_where_they_leave_sms_idle() -> None:
    assert ms(BIG, "b16 s4096 h16 d128 fp16") < ms(SMALL, "b16 s4096 h16 d128 fp16")
    assert ms(SMALL, "b1 s512 h16 d128 fp16") < ms(BIG, "b1 s512 h16 d128 fp16")


def test_causal_takes_about_half_where_there_are_many_ctas() -> None:
    full, causal = (ms(BIG, f"b16 s8192 h16 d128 fp16 {mask}") for mask in ("", "causal"))
    assert 0.48 < causal / full < 0.56
    alone, masked = (ms(BIG, f"b1 s8192 h1 d128 fp16 {mask}") for mask in ("", "causal"))
    assert masked == pytest.approx(alone, rel=0.01)


def test_bottom_right_causal_counts_the_keys_that_are_seen() -> None:
    tail = ms(BIG, "b16 s1024:8192 h16 d128 fp16 causal")
    assert tail > 0.9 * ms(BIG, "b16 s1024:8192 h16 d128 fp16")
    blind = ms(BIG, "b16 s8192:1024 h16 d128 fp16 causal")
    assert blind < 0.2 * ms(BIG, "b16 s8192:1024 h16 d128 fp16")


def test_a_window_takes_as_long_as_its_keys() -> None:
    full, window, causal = (
        ms(BIG, f"b16 s16384 h16 d128 fp16 {mask}") for mask in ("", "window", "causal")
    )
    assert 1 / 16 < window / full < 1 / 11
    assert ms(BIG, "b16 s512 h16 d128 fp16 window") <= ms(BIG, "b16 s512 h16 d128 fp16")
    assert window < causal


@pytest.mark.parametrize("text", ["b0 s64 d128 fp16", "s0:64 d128 fp16"])
def test_no_work_takes_no_time(text: str) -> None:
    assert estimate(BIG, Problem.parse(f"{text} causal"), H200).ms == 0


def test_no_keys_and_very_long_problems() -> None:
    assert 0 < ms(BIG, "s64:0 d128 fp16 causal") <= ms(BIG, "s64:64 d128 fp16")
    assert ms(BIG, "b1 s10000000 h1 d128 fp16 causal") > 1e4


def test_a_kernel_that_does_not_fit_never_ends() -> None:
    tiny = replace(H200, max_smem_per_sm=8192)
    guess = estimate(BIG, Problem.parse("s64 d128 fp16"), tiny)
    assert (guess.ms, guess.resident) == (math.inf, 0)


def test_consumer_cards_multiply_at_half_the_rate() -> None:
    text = "b16 s4096 h16 d128 fp16"
    rtx, server = (device_spec(name) for name in ("RTX 3090", "A10"))
    alike = replace(server, sm_count=rtx.sm_count)
    assert ms(SMALL, text, rtx) > 1.4 * ms(SMALL, text, alike)


def test_families_without_a_model() -> None:
    class OtherConfig:
        FAMILY: ClassVar[str] = "abacus"

    class Other(Family):
        config_class = OtherConfig

    cfg = SimpleNamespace(family=Other())
    assert not cfg.family.has_cost_model
    with pytest.raises(ArgumentError, match="no cost model for the family 'abacus'"):
        estimate(cfg, Problem.parse("s64 d128 fp16"), H200)
