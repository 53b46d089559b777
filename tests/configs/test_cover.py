"""The covering array: every pair of knob values that can meet does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from itertools import combinations, product

import pytest

from flashsmith.configs import (
    KNOB_VALUES,
    RULES,
    SUPPORTED_D_HEADS,
    FlashForwardKernelConfig,
    get_cover_configs,
    is_legal,
    parse_kernel_name_into_config,
)

KNOBS = tuple(KNOB_VALUES)
READ = {knob for rule in RULES for knob in rule.knobs}


def pairs_in(configs: Iterable[FlashForwardKernelConfig]) -> set[tuple[object, ...]]:
    return {
        (first, getattr(cfg, first), second, getattr(cfg, second))
        for cfg in configs
        for first, second in combinations(KNOBS, 2)
    }


def possible_pairs() -> set[tuple[object, ...]]:
    """By brute force over the knobs that rules read; the others are free to meet anything."""
    domains = [values if knob in READ else values[:1] for knob, values in KNOB_VALUES.items()]
    legal = [cfg for v in product(*domains) if is_legal(cfg := FlashForwardKernelConfig(*v))]
    pairs = {pair for pair in pairs_in(legal) if {pair[0], pair[2]} <= READ}
    used = {knob: {getattr(cfg, knob) for cfg in legal} for knob in READ}
    for first, second in combinations(KNOBS, 2):
        if not {first, second} <= READ:
            values = (used.get(knob, KNOB_VALUES[knob]) for knob in (first, second))
            pairs |= {(first, here, second, there) for here, there in product(*values)}
    return pairs


def test_cover_holds_every_pair_that_a_legal_config_holds() -> None:
    assert pairs_in(get_cover_configs()) == possible_pairs()


@pytest.mark.full
def test_the_possible_pairs_are_those_of_the_whole_space() -> None:
    everything = (FlashForwardKernelConfig(*values) for values in product(*KNOB_VALUES.values()))
    assert pairs_in(filter(is_legal, everything)) == possible_pairs()


def test_cover_is_legal_small_sorted_and_without_idle_members() -> None:
    configs = get_cover_configs()
    assert all(map(is_legal, configs))
    assert configs == sorted(set(configs))
    # No array can be smaller than its largest table of pairs: d_head's 6 values with 5 load counts,
    # less the four that 16 (32, 96 and 192) and 8 (96) tiles do not divide.
    assert 26 <= len(configs) <= 40
    for idle in configs:
        others = [cfg for cfg in configs if cfg != idle]
        assert pairs_in(others) != pairs_in(configs), f"{idle} adds nothing"


def test_cover_shows_what_tune_leaves_out() -> None:
    configs = get_cover_configs()
    assert {cfg.dtype.name for cfg in configs} == {"FP16", "BF16"}
    assert any(not cfg.async_copy for cfg in configs)
    assert any(cfg.eager_load_blocks and not cfg.async_copy for cfg in configs)
    assert any(cfg.n_warps == 8 for cfg in configs)
    assert {cfg.d_head for cfg in configs} == set(SUPPORTED_D_HEADS)
    assert {0, 2, 4, 8} <= {count for cfg in configs for count in cfg.load_counts}


def test_cover_is_the_same_in_every_process() -> None:
    code = "from flashsmith.configs import *; print(*get_cover_configs(), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "12345"},
    )
    listed = [parse_kernel_name_into_config(line) for line in done.stdout.splitlines()]
    assert listed == get_cover_configs()


def test_a_caller_may_change_the_list_it_gets() -> None:
    get_cover_configs().clear()
    assert get_cover_configs()
