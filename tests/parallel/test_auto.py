"""schedule='auto': which schedule a call's shapes and options mean."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

from flashsmith.parallel.causal_allgather import PREFIXES  # noqa: E402
from flashsmith.parallel.group_call import GroupCall  # noqa: E402
from flashsmith.parallel.layout import CAUSAL, FULL, Layout, Limits  # noqa: E402
from flashsmith.parallel.schedules import MOST_GATHERED, SCHEDULES, schedule_named  # noqa: E402

ZIGZAG, ALLGATHER = SCHEDULES["zigzag"], SCHEDULES["allgather"]


def chosen(length: int, mask: Limits = CAUSAL, *, keys: int | None = None, **options: Any) -> Any:
    """By two ranks, with 8 heads of k and d = 128: 4 KiB of K and V a position."""
    layouts = [Layout((it,), 2) for it in (length, length if keys is None else keys)]
    given: dict[str, Any] = {"packed": False, "return_row_max": False, **options}
    call = GroupCall(
        group=SimpleNamespace(rank=0, size=2),
        q_layout=layouts[0],
        k_layout=layouts[1],
        limits=mask,
        options={},
        config=None,
        backward_config=None,
        deterministic=False,
        has_gradients=False,
        return_lse=False,
        shape=(1, layouts[0].rows(0), 32, 128),
        d_v=128,
        confirm=lambda: None,
        **given,
    )
    return schedule_named("auto", call, 8)


def test_auto_goes_by_shapes_and_masks() -> None:
    longest = MOST_GATHERED // 4096
    assert chosen(longest) is PREFIXES
    assert chosen(longest + 4) is ZIGZAG
    assert chosen(longest, FULL) is ZIGZAG
    assert chosen(longest, packed=True) is ZIGZAG
    assert chosen(longest, Limits(7, 0)) is ALLGATHER
    assert chosen(longest, keys=longest + 4) is ALLGATHER
    assert chosen(longest - 2) is ALLGATHER
    assert chosen(longest, return_row_max=True) is PREFIXES
    assert chosen(longest + 4, return_row_max=True) is PREFIXES
