"""Kernels that may be chosen compile without spills and serialised wgmma, or are recorded as slow.

tools/ci/kernel_losses.py compiles these kernels, and records which ones it compiled and which are
slow. The test here compiles a few kernels of its record again, different ones each day. It ignores
kernels that the tool has not compiled yet, since compiling them takes many cores for hours. If one
of them is slow, the call that builds it chooses another kernel.
"""

from __future__ import annotations

import datetime
import json
from types import ModuleType
from typing import Any

import pytest

from flashsmith.builder import KernelEntry
from flashsmith.chooser import decode
from flashsmith.chooser.spills import KNOWN
from flashsmith.families import DType, Problem, Semantics, device_spec

# Kernels of a group that are compiled in a run, some 6 s each.
A_RUN = 2
H200 = device_spec("H200")
# What once died of the compiler's report on its paged kernel.
SPILLING = "(BF16, 128, 32, 32, 2): decode+stages_3+least_256+parts_2+early+cluster_8+own_rows"


@pytest.fixture
def tool(load_tool: Any) -> ModuleType:
    return load_tool("ci/kernel_losses.py")


def test_what_died_of_a_spill_is_recorded(tool: ModuleType) -> None:
    lines = {(one["semantics"], one["config"]): one for one in json.loads(KNOWN.read_text())}
    assert lines["plain", SPILLING]["stored"] == 44
    group = tool.Group("H200", "decode", DType.BF16, 128, "none", False, "dense")
    kernels = tool.chosen_kernels(group)
    problem = Problem.parse("b5 s4:4096 h32:2 d128 bf16 decode")
    chosen = decode.CHOOSERS["free"](problem, H200)
    assert chosen in [kernel.config for kernel in kernels]


def test_a_record_is_of_the_sources_it_was_made_with(
    tool: ModuleType, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tool.Group("H200", "backward", DType.BF16, 128, "causal", False, "dense")
    first, second, *_ = tool.chosen_kernels(group)
    record = tool.Record(tmp_path / "record.json")
    record.add([first])
    again = tool.Record(tmp_path / "record.json")
    assert again.knows(first)
    assert not again.knows(second)
    monkeypatch.setattr(tool, "source_hash", lambda family: "another")
    assert not again.knows(first)
    again.add([second])
    assert again.knows(second)
    assert not again.knows(first)


def test_a_slow_kernel_that_is_not_recorded_is_found(tool: ModuleType) -> None:
    group = tool.Group("H200", "forward", DType.FP16, 128, "none", False, "dense")
    kernel = tool.chosen_kernels(group)[0]._replace(semantics=Semantics("window"))
    sizes = (128, 0, 12, 4, 0, 1.0, 10, 10)
    entry = KernelEntry(kernel.config, str(kernel.config), "_Z1k", "ptx/k.ptx", *sizes)
    (line,) = tool.unrecorded_losses([(kernel, entry)])
    assert (line["stored"], line["loaded"], line["instead"]) == (12, 4, None)
    assert not tool.unrecorded_losses([(kernel, entry.__class__.from_json(well(entry)))])


def well(entry: KernelEntry) -> dict[str, Any]:
    return entry.to_json() | {"spill_store_bytes": 0, "spill_load_bytes": 0}


# What was compiled whole: the calls that once got a serialised kernel, or died of a spill.
RECORDED = [
    ("forward", "none", "partial"),
    ("forward", "causal", "partial"),
    ("decode", "none", "dense"),
]


@pytest.mark.full
@pytest.mark.parametrize(("operation", "mask", "kind"), RECORDED)
def test_recorded_kernels_are_as_recorded(
    tool: ModuleType, operation: str, mask: str, kind: str
) -> None:
    record, day = tool.Record(), datetime.date.today().toordinal()
    group = tool.Group("H200", operation, DType.BF16, 128, mask, False, kind)
    known = [kernel for kernel in tool.chosen_kernels(group) if record.knows(kernel)]
    assert known
    first = day * A_RUN % len(known)
    for kernel in known[first : first + A_RUN]:
        assert tool.unrecorded_losses(tool.compiled([kernel])) == []
