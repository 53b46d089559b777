"""Shards of about equal expected cost."""

from __future__ import annotations

import random

import pytest

from flashsmith.builder.compile_time import balance, expected_cost
from flashsmith.families import get_autotuning_kernel_configs, get_kernel_progression_configs

TUNE = get_autotuning_kernel_configs()
PROGRESSION = get_kernel_progression_configs(all_block_sizes=True)


@pytest.mark.parametrize("n_shards", [1, 2, 3, 8])
@pytest.mark.parametrize("configs", [TUNE, PROGRESSION], ids=["tune", "prog-all"])
def test_shards_hold_every_config_once_and_weigh_about_the_same(configs, n_shards):
    shards = balance(configs, n_shards)
    assert sorted(cfg for shard in shards for cfg in shard) == sorted(configs)
    weights = [sum(map(expected_cost, shard)) for shard in shards]
    assert max(weights) - min(weights) <= max(map(expected_cost, configs))


def test_shards_do_not_depend_on_the_order_of_the_configs():
    shuffled = random.Random(0).sample(TUNE, len(TUNE))
    assert balance(shuffled, 4) == balance(TUNE, 4)


def test_no_shard_is_empty():
    shards = balance(TUNE[:3], 8)
    assert [len(shard) for shard in shards] == [1, 1, 1]


def test_larger_tiles_cost_more():
    by_size = sorted(PROGRESSION, key=lambda cfg: (cfg.rows_per_warp * cfg.B_c, cfg))
    assert expected_cost(by_size[-1]) > 1.5 * expected_cost(by_size[0])
