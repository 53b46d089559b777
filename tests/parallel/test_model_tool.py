"""tools/gpu/parallel_model.py: more GPUs predicted from parts measured on two."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Load = Callable[[str], ModuleType]
# 1 MiB takes 0.1 ms, and a transfer half of the GPU.
LINK = [{"what": "link", "bytes": n << 20, "ms": n / 10} for n in (1, 2, 4, 64)]


def rows(seq: int, direction: str, kernels: float, block: int) -> list[dict]:
    messages = block / (10 << 20) * (4 if direction == "both" else 1)
    at = {"seq": seq, "direction": direction}
    return [
        {"what": "alone", "ms": 2 * kernels, **at},
        {"what": "parts", "ranks": 2, "compute": kernels, "both": kernels + messages / 2, **at},
        *(
            {"what": "compute", "ranks": p, "rank": r, "ms": kernels * 2 / p - r / 8,
             "bytes": block * 2 // p, **at}
            for p in (2, 4)
            for r in (0, 1)
        ),
    ]  # fmt: skip


def test_it_predicts_what_was_measured_on_two_and_then_more(load_tool: Load) -> None:
    tool = load_tool("gpu/parallel_model.py")
    model = tool.Model(
        [*LINK, *rows(8192, "forward", 1.0, 1 << 20), *rows(8192, "both", 4.0, 1 << 20)]
    )
    assert model.share() == pytest.approx(0.5)
    assert model.message(3 << 20) == pytest.approx(0.3)
    found = {(it.direction, it.ranks): it for it in model.predictions()}
    assert found["forward", 2].ms == pytest.approx(found["forward", 2].measured)
    assert found["both", 2].ms == pytest.approx(4 + 0.2)
    # Four ranks: 0.5 ms of kernels beside three messages of half the size.
    assert found["forward", 4].ms == pytest.approx(0.5 + 0.5 * 3 * 0.05)
    assert found["forward", 4].efficiency == pytest.approx(2 / (4 * 0.575))
    assert found["forward", 4].measured is None


def test_a_call_takes_as_long_as_its_messages(load_tool: Load) -> None:
    tool = load_tool("gpu/parallel_model.py")
    model = tool.Model([*LINK, *rows(8192, "forward", 0.3, 40 << 20)])
    four = model.predictions()[1]
    assert four.ms == pytest.approx(3 * 2.0)


def test_gathered_keys_are_waited_for(load_tool: Load) -> None:
    """Half of K and V beside nothing; and in the backward pass all, and half of the gradients."""
    some = [{"schedule": "allgather", **row} for row in rows(8192, "forward", 1.0, 4 << 20)]
    more = [{"schedule": "allgather", **row} for row in rows(8192, "both", 4.0, 4 << 20)]
    zigzag = rows(8192, "forward", 7.0, 1 << 20)
    for row in (*some, *more):
        if row["what"] == "parts":
            row["both"] = 1.3 if row["direction"] == "forward" else 5.3
    model = load_tool("gpu/parallel_model.py").Model([*LINK, *zigzag, *some, *more], "allgather")
    assert model.transfers(8192, "forward", 2) == pytest.approx((0.2, 0.2))
    assert model.transfers(8192, "both", 2) == pytest.approx((1.0, 0.6))
    found = {(it.direction, it.ranks): it for it in model.predictions()}
    # By the other call of two: (5.3 - 4.0 - 1.0) / 0.6, and (1.3 - 1.0 - 0.2) / 0.2 of transfers.
    assert found["forward", 2].ms == pytest.approx(0.2 + 1.0 + 0.5 * 0.2)
    assert found["both", 2].ms == pytest.approx(1.0 + 4.0 + 0.5 * 0.6)
    assert found["forward", 4].ms == pytest.approx(0.3 + 0.5 + 0.5 * 0.3)


def test_a_call_takes_as_long_as_the_host_is_kept(load_tool: Load) -> None:
    short, long = rows(8192, "forward", 1.0, 1 << 20), rows(32768, "forward", 4.0, 1 << 20)
    for row in (*short, *long):
        if row["what"] == "parts":
            row["both"] = 2.0 if row["seq"] == 8192 else 4.05
    kept = [
        {"what": "kept", "us": 2000.0, "seq": it, "direction": "forward"} for it in (8192, 32768)
    ]
    model = load_tool("gpu/parallel_model.py").Model([*LINK, *short, *long, *kept])
    # The short call says nothing about the share.
    assert model.share() == pytest.approx(0.5)
    found = {(it.seq, it.ranks): it.ms for it in model.predictions()}
    assert found[8192, 2] == found[8192, 4] == pytest.approx(2.0)
    assert found[32768, 4] == pytest.approx(2.0 + 0.5 * 3 * 0.05)


def test_a_schedule_may_have_its_own_link(load_tool: Load) -> None:
    some = [{"schedule": "allgather", **row} for row in rows(8192, "forward", 1.0, 4 << 20)]
    own = [
        {"what": "link", "schedule": "allgather", "bytes": n << 20, "ms": n / 40} for n in (1, 64)
    ]
    tool = load_tool("gpu/parallel_model.py")
    assert tool.Model([*LINK, *own, *some], "allgather").message(4 << 20) == pytest.approx(0.1)
    assert tool.Model([*LINK, *own, *rows(8192, "forward", 1.0, 4 << 20)]).message(
        4 << 20
    ) == pytest.approx(0.4)


def test_it_prints_a_table(
    load_tool: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    all_rows = [*LINK, *rows(8192, "forward", 1.0, 1 << 20), *rows(32768, "forward", 9.0, 4 << 20)]
    path.write_text("\n".join(map(json.dumps, all_rows)))
    load_tool("gpu/parallel_model.py").main([str(path)])
    printed = capsys.readouterr().out
    assert "zigzag: transfers take 0.50 of a GPU while they last" in printed
    assert "| 8192 | forward | 2 | 1.050 | 1.050 |" in printed


def test_rows_that_are_missing_are_named(load_tool: Load) -> None:
    tool = load_tool("gpu/parallel_model.py")
    with pytest.raises(SystemExit, match="missing: link, alone, compute; measure them"):
        tool.Model([])
    one, *_ = some = rows(8192, "forward", 1.0, 1 << 20)
    with pytest.raises(SystemExit, match="missing: compute of 8192 on 2"):
        tool.Model([*LINK, *some[:2], {**some[-1], "ranks": 4}])
    with pytest.raises(SystemExit, match=r"missing: alone of \[8192, 'forward'\]"):
        tool.Model([*LINK, *some[1:], {**one, "seq": 7}])
