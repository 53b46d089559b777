"""l2_group_mib: how many heads of a problem are planned to run side by side."""

from __future__ import annotations

import pytest
from hopper_plans import GROUPED, MMA_SYNC, problem
from pretended_library import PretendedLibrary

from flashsmith.families import KernelConfig

# Of ForwardKernelArgs' last integer, bytes: behind 9 addresses, 14 strides and 12 integers.
HEADS_PER_GROUP = 9 * 8 + 14 * 8 + 12 * 4


def heads_per_group(library: PretendedLibrary, cfg: KernelConfig, text: str) -> int:
    arguments = library.plan_problem(cfg, problem(text)).argument_bytes
    return int.from_bytes(arguments[HEADS_PER_GROUP : HEADS_PER_GROUP + 4], "little")


@pytest.mark.parametrize(
    ("text", "heads"),
    [
        # K and V of one head take 2 x 4,096 x 256 bytes: 8 of them 16 MiB.
        ("b4 s4096 h16 d128 fp16", 8),
        ("b1 s2048 h40 d128 fp16", 16),
        ("b1 s4096 h36:12 d128 fp16", 24),
        # A part of a head's K and V is no less, and d counts, not d_head.
        ("b1 s128:5000 h40 d128 fp16", 6),
        ("b1 s4096 h40 d64 fp16", 16),
        # No more heads than there are.
        ("b2 s1024 h8 d128 fp16", 16),
        ("b3 s64:0 h2 d128 fp16", 6),
        # Heads that are larger than a group, each by itself, with all that share its keys.
        ("b1 s64:1048576 h6 d128 fp16", 1),
        ("b1 s64:1048576 h6:2 d128 fp16", 3),
    ],
)
def test_as_many_heads_as_fit(library: PretendedLibrary, text: str, heads: int) -> None:
    assert heads_per_group(library, GROUPED, text) == heads
    assert heads_per_group(library, MMA_SYNC, text) == 1


@pytest.mark.parametrize("heads", [1, 7, 8, 9, 300])
def test_groups_leave_the_grid_as_it_is(library: PretendedLibrary, heads: int) -> None:
    """The last group's blocks too are as many as its heads have."""
    text = f"b1 s128:4096 h{heads} d128 fp16"
    assert library.plan_problem(GROUPED, problem(text)).grid == (2 * heads, 1, 1)
