"""The covering array: every pair of knob values that can meet does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from itertools import combinations, product

import pytest
from plain_run import full_except

from flashsmith.families import (
    DEFAULT_DEVICE,
    KNOB_VALUES,
    RULES,
    SUPPORTED_D_HEADS,
    FlashForwardKernelConfig,
    Rule,
    get_cover_configs,
    is_legal,
    parse_kernel_name_into_config,
)

# The canonical order has configs of its own, legal on GPUs with its tiles, and so have v of another
# width: the cover has none. Tiles of d_head 72 and 80 are those of 96.
D_HEADS = tuple(d_head for d_head in SUPPORTED_D_HEADS if d_head not in (72, 80))
KNOB_VALUES = KNOB_VALUES | {"d_head": D_HEADS, "canonical": (0,), "d_v": (0,)}
KNOBS = tuple(KNOB_VALUES)
READ = {knob for rule in RULES for knob in rule.knobs}


def pairs_in(configs: Iterable[FlashForwardKernelConfig]) -> set[tuple[object, ...]]:
    return {
        (first, getattr(cfg, first), second, getattr(cfg, second))
        for cfg in configs
        for first, second in combinations(KNOBS, 2)
    }


# Two groups of knobs with no rule between them but through the two that both hold.
SHARED = ("d_head", "B_c")
LOADS = {name for name in KNOBS if name.endswith("_K_tiles")} | {"mma_double_buffer_loads"}
GROUPS = (tuple(sorted(LOADS | set(SHARED))), tuple(sorted(READ - LOADS)))


def legal_choices(group: tuple[str, ...], d_head: int) -> list[dict[str, object]]:
    """All values of the group's knobs, at one d_head, that break none of the rules over them.

    Knob by knob: a rule is asked as soon as all its knobs have values, so that nothing that it
    forbids is continued."""
    all_values = KNOB_VALUES | {"d_head": (d_head,)}
    base = {knob: values[0] for knob, values in all_values.items()}
    choices: list[dict[str, object]] = [{}]
    for place, knob in enumerate(group, 1):
        known = set(group[:place])
        rules = [rule for rule in RULES if knob in rule.knobs and set(rule.knobs) <= known]

        def is_allowed(choice: dict[str, object], rules: list[Rule] = rules) -> bool:
            # Values are those of the knobs: checks of their types would take most of the time.
            cfg = object.__new__(FlashForwardKernelConfig)
            vars(cfg).update(base | choice)
            return all(rule.predicate(cfg, DEFAULT_DEVICE) for rule in rules)

        longer = ({**choice, knob: value} for choice in choices for value in all_values[knob])
        choices = [choice for choice in longer if is_allowed(choice)]
    return choices


def possible_pairs(d_head: int) -> set[tuple[object, ...]]:
    """Of a d_head, by brute force over each group; knobs that no rule reads are free to meet
    anything."""
    assert all(any(set(rule.knobs) <= set(group) for group in GROUPS) for rule in RULES)
    by_shared: list[dict[tuple[object, ...], list[dict[str, object]]]] = []
    for group in GROUPS:
        found: dict[tuple[object, ...], list[dict[str, object]]] = {}
        for choice in legal_choices(group, d_head):
            found.setdefault(tuple(choice[knob] for knob in SHARED), []).append(choice)
        by_shared.append(found)
    items: set[frozenset[tuple[str, object]]] = set()
    for shared in set(by_shared[0]) & set(by_shared[1]):
        seen = [set().union(*(choice.items() for choice in group[shared])) for group in by_shared]
        items |= {frozenset(pair) for pair in product(*seen)}
        for group in by_shared:
            for choice in group[shared]:
                items |= set(map(frozenset, combinations(choice.items(), 2)))
    used = set().union(*items)
    free = {(knob, value) for knob in set(KNOBS) - READ for value in KNOB_VALUES[knob]}
    items |= {frozenset(pair) for pair in product(free, used | free)}
    place = KNOBS.index
    return {
        (*first, *second)
        for pair in items
        if len({knob for knob, _ in pair}) == 2
        for first, second in [sorted(pair, key=lambda item: place(item[0]))]
    }


@pytest.mark.parametrize("d_head", full_except(D_HEADS, 64))
def test_cover_holds_every_pair_that_a_legal_config_holds(d_head: int) -> None:
    possible = possible_pairs(d_head)
    found = pairs_in(get_cover_configs())
    assert possible <= found
    assert {pair for pair in found if ("d_head", d_head) in (pair[:2], pair[2:])} <= possible


def test_cover_is_legal_small_sorted_and_without_idle_members() -> None:
    configs = get_cover_configs()
    assert all(map(is_legal, configs))
    assert configs == sorted(set(configs))
    # No array can be smaller than its largest table of pairs: d_head's 6 values with 5 of B_c, or
    # with 5 load counts less the four that 16 (32, 96 and 192) and 8 (96) tiles do not divide.
    assert 30 <= len(configs) <= 64
    for idle in configs:
        others = [cfg for cfg in configs if cfg != idle]
        assert pairs_in(others) != pairs_in(configs), f"{idle} adds nothing"


def test_cover_shows_what_tune_leaves_out() -> None:
    configs = get_cover_configs()
    assert {cfg.dtype.name for cfg in configs} == {"FP16", "BF16"}
    assert any(not cfg.async_copy for cfg in configs)
    assert any(cfg.eager_load_blocks and not cfg.async_copy for cfg in configs)
    assert any(cfg.n_warps == 8 for cfg in configs)
    assert {cfg.d_head for cfg in configs} == set(D_HEADS)
    assert {0, 2, 4, 8} <= {count for cfg in configs for count in cfg.load_counts}


def test_cover_is_the_same_in_every_process() -> None:
    code = "from flashsmith.families import *; print(*get_cover_configs(), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "12345"},
    )
    listed = [parse_kernel_name_into_config(line) for line in done.stdout.splitlines()]
    assert listed == get_cover_configs()


def test_a_caller_may_change_the_list_it_gets() -> None:
    get_cover_configs().clear()
    assert get_cover_configs()
