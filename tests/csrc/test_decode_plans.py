"""Plans of decode calls: over a grid of problems and GPUs those that were recorded, and by the
costs of the call's GPU."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import shared_kernels
from decode_plans import CONFIGS, FILE, GPUS, as_text, hashes, plans_of

from flashsmith.errors import LaunchError
from flashsmith.families import FAMILIES, Semantics, parse_kernel_name_into_config
from flashsmith.families.mma_sync_decode import cost

CONFIG: Any = parse_kernel_name_into_config(CONFIGS[0])
shared_kernels.want(map(parse_kernel_name_into_config, CONFIGS), Semantics())


def test_plans_are_as_recorded() -> None:
    recorded, found = json.loads(FILE.read_text()), hashes()
    assert len(recorded) == 81
    changed = [name for name in recorded if found[name] != recorded[name]]
    assert not changed


def plans() -> dict[str, str]:
    """By GPU, of a call of 160 tiles."""
    shared_kernels.load([CONFIG], Semantics())
    return dict(zip(GPUS, map(as_text, plans_of(CONFIG, 20, 4096, 8, 32)), strict=True))


def test_a_call_is_planned_by_the_costs_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    before = plans()
    dear = replace(cost.RUN_COSTS["H200"], merge_bytes=1e12)
    monkeypatch.setitem(cost.RUN_COSTS, "H100", dear)
    found = plans()
    assert {gpu for gpu in GPUS if found[gpu] != before[gpu]} == {"H100"}
    monkeypatch.delitem(cost.RUN_COSTS, "H100")
    assert plans() == before


def test_costs_of_another_length_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = plans()
    family = type(FAMILIES["mma_sync_decode"])
    monkeypatch.setattr(family, "plan_costs", lambda self, gpu: (1.0, 2.0))
    with pytest.raises(LaunchError, match=r"plan_costs of the family .*: gives 2 numbers"):
        plans()
    monkeypatch.undo()
    assert plans() == before


def test_names_of_one_gpu_have_the_same_costs() -> None:
    assert cost.plan_costs("NVIDIA H200") == cost.plan_costs("H200") == cost.plan_costs("sm_90")


def test_the_tool_that_fits_the_costs_decides_as_plans_do(
    load_tool: Callable[[str], ModuleType],
) -> None:
    """tools/benchmark/decode_run_costs.py has the rule once more: the numbers of runs of small
    calls and of large ones, and the size where they change."""
    tool = load_tool("benchmark/decode_run_costs.py")
    shared_kernels.load([CONFIG], Semantics())
    changing = set()
    for batch, heads_k in product((5, 20, 33, 40, 64, 100, 160), (2, 8)):
        plan = plans_of(CONFIG, batch, 65536, heads_k, 4 * heads_k)[GPUS.index("H200")]
        slots = plans_of(CONFIG, 512, 65536, 8, 32)[GPUS.index("H200")].grid[0]
        tiles = tool.EqualTiles(
            tiles=batch * heads_k,
            rows=4,
            slots=slots,
            unit_bytes=CONFIG.B_c * CONFIG.d_head * 4,
            min_units=1,
            most_parts=132 * CONFIG.parts_per_sm // heads_k // 8 * 8,
        )
        costs = cost.RUN_COSTS["H200"]
        small = large = tiles.best_runs(costs, 1.0)
        units, from_large = 1.25, 0.0
        while units < 1024 * 1.25:
            best = tiles.best_runs(costs, units)
            if tiles.cost(costs, large, units) > 1.004 * tiles.cost(costs, best, units):
                small, large, from_large = large, best, units
            units *= 1.25
        # Where DecodeKernelArgs has them (config.cuh).
        argument = bytes(plan.launches[0].argument_bytes)
        shares = [abs(share) for share in struct.unpack_from("2f", argument, 60)]
        runs = [
            round((1.999 if of == 1 and 2 * tiles.tiles > slots else 1.25) / share / batch)
            for of, share in zip((small, large), shares, strict=True)
        ]
        assert runs == [small, large], (batch, heads_k)
        assert struct.unpack_from("f", argument, 168)[0] == pytest.approx(from_large * batch)
        changing.add((small, large))
    assert len(changing) > 3
