"""Rooflines as data: stored, read back, shown, and kernels placed below them."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from rooflines import ROOFLINE

from flashsmith.benchmark.roofline import (
    Ceiling,
    Roofline,
    bounds,
    intensity,
    load_roofline,
    read_roofline,
    roofline_path,
    save_roofline,
    stored_rooflines,
)
from flashsmith.errors import ArgumentError
from flashsmith.families import DType, Problem, get_hopper_configs
from flashsmith.families import parse_kernel_name_into_config as parse

ROWS_16 = parse("(FP16, 128, 64, 64, 4): async+load_0_2_2_tiles")
ROWS_32 = parse("(FP16, 128, 128, 64, 4): async+load_2_2_2_tiles")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


def test_what_was_stored_is_found_by_the_gpus_name(home) -> None:
    assert load_roofline(ROOFLINE.gpu) is None
    path = save_roofline(ROOFLINE)
    assert path == home / "flashsmith" / "roofline" / "nvidia-test-9000.json"
    assert load_roofline(ROOFLINE.gpu) == ROOFLINE
    assert stored_rooflines() == [ROOFLINE]
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_this_machines_gpu_is_meant_where_no_name_is_given(monkeypatch) -> None:
    from flashsmith.benchmark.roofline import roofline as store
    from flashsmith.families import device_spec

    save_roofline(ROOFLINE)
    monkeypatch.setattr(store, "gpu_count", lambda: 0)
    assert load_roofline() is None
    monkeypatch.setattr(store, "gpu_count", lambda: 1)
    monkeypatch.setattr(
        store, "query_gpu", lambda _: replace(device_spec("H200"), name=ROOFLINE.gpu)
    )
    assert load_roofline() == ROOFLINE


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "cannot be read"),
        ("[]", "not what 'flashsmith roofline' wrote"),
        ('{"schema": 2}', "schema 2 is not this version's"),
        (
            '{"schema": 1, "ceilings": [{"key": "exp2", "unit": "furlongs"}]}',
            "unit='furlongs': allowed are",
        ),
        ('{"schema": 1, "ceilings": []}', "not what 'flashsmith roofline' wrote: 'gpu' is missing"),
    ],
)
def test_a_damaged_file_is_named(text: str, named: str) -> None:
    path = roofline_path(ROOFLINE.gpu)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ArgumentError, match=named):
        load_roofline(ROOFLINE.gpu)


def test_fields_of_a_later_version_are_passed_over() -> None:
    value = json.loads(json.dumps(ROOFLINE.to_json()))
    value["ceilings"][0]["colour"] = "red"
    assert Roofline.from_json(value) == ROOFLINE


def test_a_folder_that_cannot_be_written_is_named(home) -> None:
    (home / "flashsmith").write_text("in the way")
    with pytest.raises(ArgumentError, match="cannot be written"):
        save_roofline(ROOFLINE)


def test_a_roofline_is_not_written_through_a_link_beside_it(home) -> None:
    path = home / "my.json"
    path.with_name(f".my.json.{os.getpid()}").symlink_to(home / "target")
    save_roofline(ROOFLINE, path)
    assert read_roofline(path) == ROOFLINE
    assert not (home / "target").exists()


def test_a_file_elsewhere_can_be_read(home) -> None:
    save_roofline(ROOFLINE, home / "deep" / "my.json")
    assert read_roofline(home / "deep" / "my.json") == ROOFLINE
    assert stored_rooflines() == []


def test_without_a_home_the_error_says_so(monkeypatch) -> None:
    import platformdirs

    def no_home(*_, **__):
        raise RuntimeError

    monkeypatch.setattr(platformdirs, "user_data_path", no_home)
    with pytest.raises(ArgumentError, match="set HOME"):
        roofline_path("anything")


def test_rates() -> None:
    assert ROOFLINE.rate("l2_read") == 8.0
    assert ROOFLINE.per_second("exp2") == 4e12
    assert ROOFLINE.rate("matmul_fp16") is None
    assert ROOFLINE.per_second("matmul_fp16") is None
    assert ROOFLINE.rate("no such thing") is None
    assert ROOFLINE.ok
    wrong = Ceiling("exp2", "Gop/s", wrong=True, note="its output is wrong")
    assert not replace(ROOFLINE, ceilings=(wrong,)).ok


def test_intensities_by_hand() -> None:
    # One head of 128 queries and 256 keys: q and o 32 KiB each, k and v 64 KiB each.
    own = intensity(Problem.parse("s128:256 d128 fp16"), ROWS_16)
    flop = 4 * 128 * 256 * 128
    assert own.dram == flop / (2 * 32768 + 2 * 65536)
    # Two CTAs of 64 rows read all of k and v.
    assert own.l2 == flop / (2 * 32768 + 2 * 2 * 65536)
    assert own.exp2 == 512


def test_causal_halves_both_the_work_and_what_is_read_of_k_and_v() -> None:
    full, causal = (
        intensity(Problem.parse(f"s8192 d128 fp16 {word}"), ROWS_16) for word in ("plain", "causal")
    )
    assert causal.dram == full.dram / 2
    assert causal.l2 == pytest.approx(full.l2, rel=0.02)


def test_heads_that_share_keys_read_them_anew_from_l2_only() -> None:
    alone, shared = (
        intensity(Problem.parse(f"s4096 h{heads} d128 fp16"), ROWS_16) for heads in ("8", "8:1")
    )
    assert shared.l2 == alone.l2
    assert shared.dram > 1.7 * alone.dram


def test_twice_the_rows_a_cta_read_half_as_much() -> None:
    problem = Problem.parse("s8192 d128 fp16")
    assert intensity(problem, ROWS_32).l2 == pytest.approx(
        2 * intensity(problem, ROWS_16).l2, rel=0.02
    )


def test_bounds_are_those_of_the_config_tightest_first() -> None:
    problem = Problem.parse("b4 s4096 h16 d128 fp16")
    found = bounds(ROOFLINE, problem, ROWS_16)
    assert [bound.ceiling for bound in found][:3] == [
        "mma_shared_16_rows_fp16",
        "l2_read",
        "mma_registers_fp16",
    ]
    by_key = {bound.ceiling: bound.tflops for bound in found}
    assert by_key["mma_shared_16_rows_fp16"] == 400
    assert by_key["exp2"] == 4000e9 * 512 / 1e12
    assert set(by_key) == {
        "mma_shared_16_rows_fp16",
        "mma_registers_fp16",
        "exp2",
        "l2_read",
        "dram_read",
    }
    assert bounds(ROOFLINE, problem, ROWS_32)[0].ceiling == "mma_shared_32_rows_fp16"


def test_wgmma_kernels_are_bounded_by_their_own_instructions() -> None:
    (cfg, *_) = get_hopper_configs([DType.FP16])
    problem = Problem.parse("s4096 d128 fp16")
    keys = {bound.ceiling for bound in bounds(ROOFLINE, problem, cfg)}
    assert keys == {"wgmma_n256_fp16", "exp2", "l2_read", "dram_read"}
    assert intensity(problem, cfg).l2 > intensity(problem, ROWS_16).l2


def test_a_window_reads_its_keys_only() -> None:
    window, full = (Problem.parse(f"s16384 d128 fp16 {mask}") for mask in ("window", ""))
    assert intensity(window, ROWS_32).l2 < intensity(full, ROWS_32).l2
    assert intensity(window, ROWS_32).l2 > 0.3 * intensity(full, ROWS_32).l2
