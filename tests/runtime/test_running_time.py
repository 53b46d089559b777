"""The estimate before a run: its order of magnitude, and what it grows with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashsmith.families import Problem, get_hopper_configs, parse_kernel_name_into_config
from flashsmith.runtime.running_time import estimate_seconds

CONFIG = parse_kernel_name_into_config(
    "(FP16, 128, 64, 64, 4): async+eager+swizzled+load_2_2_2_tiles"
)


def seconds(batch: int, seq_q: int, seq_k: int, heads: int, d: int = 128) -> float:
    config = replace(CONFIG, d_head=d)
    return estimate_seconds(config, Problem(batch, seq_q, seq_k, heads, heads, d, CONFIG.dtype))


def test_orders_of_magnitude() -> None:
    assert seconds(1, 128, 128, 1) < 0.5
    assert 1 < seconds(1, 1024, 1024, 16) < 10
    assert seconds(8, 4096, 4096, 16) > 60


@pytest.mark.parametrize(
    "larger", [(2, 512, 512, 2), (1, 1024, 512, 2), (1, 512, 1024, 2), (1, 512, 512, 4)]
)
def test_every_dimension_counts(larger: tuple[int, int, int, int]) -> None:
    base = seconds(1, 512, 512, 2)
    assert 1.3 * base < seconds(*larger) < 2.1 * base


def test_a_wgmma_kernel_is_translated_longer() -> None:
    """They are some five times as long in PTX; short problems take little else."""
    wgmma = get_hopper_configs()[0]
    problem = Problem(1, 96, 96, 1, 1, wgmma.d_head, wgmma.dtype)
    assert 0.2 < estimate_seconds(wgmma, problem) < 0.6


def test_wider_heads_take_longer() -> None:
    assert seconds(1, 512, 512, 2, d=64) < seconds(1, 512, 512, 2, d=128)


def test_a_backward_pass_takes_longer_than_its_forward_pass() -> None:
    backward = parse_kernel_name_into_config("(FP16, 128, 64, 64, 8): backward+columns_2")
    for seq in (1024, 4096):
        problem = Problem(1, seq, seq, 16, 16, 128, CONFIG.dtype)
        forward = estimate_seconds(CONFIG, problem)
        seconds = estimate_seconds(backward, replace(problem, operation="backward"))
        assert forward < seconds < 4 * forward
