"""tools/gpu/programs.py and program_gradients.py: their kernels, their rows, and what they refuse.

With the mark full, both run in the emulator on small problems.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_ins import PretendedClock

from flashsmith.benchmark.rounds import Contender
from flashsmith.families import device_spec

H200 = device_spec("H200")
_MASKS = ("none", "causal")


@pytest.fixture
def tools(load_tool: Callable[[str], ModuleType]) -> dict[str, ModuleType]:
    names = ("program_cases", "program_races", "programs", "program_gradients")
    return {name: load_tool(f"gpu/{name}.py") for name in names}


@pytest.mark.torch
def test_every_kind_and_case_has_a_kernel(tools: dict[str, ModuleType]) -> None:
    forward, backward = tools["programs"], tools["program_gradients"]
    for tool, kernels, operations in (
        (forward, forward.kernels(H200, others=True), {"forward"}),
        (backward, backward.kernels(H200), {"forward", "backward"}),
    ):
        found = list(kernels)
        assert {config.family.operation for config, _ in found} == operations
        programs = {semantics.program for _, semantics in found} - {""}
        assert len(programs) == len(tool.FUNCTIONS)
        assert {kind.function for kind in map(_kind, tool.checked_kinds())} == set(tool.FUNCTIONS)


def _kind(checked: Any) -> Any:
    return getattr(checked, "kind", checked)


def test_rows_of_races_and_a_wrong_contender(
    tools: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    races, clock = tools["program_races"], PretendedClock()

    def contender(name: str, ms: float, why: str = "") -> Contender:
        return Contender(name, lambda: clock.work(name, ms), lambda: why)

    every = [
        races.Race("a", 4 * 10**9, [contender("function", 2.0), contender("plain", 1.0)]),
        races.Race("b", 10**9, [contender("function", 1.0, "NaN"), contender("plain", 0.5)]),
    ]
    path = tmp_path / "rows.csv"
    assert races.time_races(path, every, 3, clock) == 1
    rows = list(csv.DictReader(path.open()))
    assert [(row["case"], row["contender"], row["round"]) for row in rows] == [
        *(("a", name, str(n)) for n in range(3) for name in _in_turn(n)),
        *(("b", "plain", str(n)) for n in range(3)),
    ]
    assert {row["tflops"] for row in rows if row["case"] == "a"} == {"2.0", "4.0"}
    printed = capsys.readouterr().out
    assert "WRONG b: function: NaN" in printed
    assert "function is 0.500 times as fast" in printed
    cases = [SimpleNamespace(name=name) for name in ("a", "b", "c", "cd", "d")]
    assert [it.name for it in races.wanted_cases(cases, "b,c", path)] == ["c", "cd"]
    assert [it.name for it in races.wanted_cases(cases, "b", tmp_path / "new.csv")] == ["b"]
    assert races.time_races(path, every[:1], 1, clock) == 0
    assert len(path.read_text().splitlines()) == 1 + 9 + 2, "a run continues the file"


@pytest.mark.torch
def test_a_peer_that_does_not_run_is_left_out(
    tools: dict[str, ModuleType],
    on_the_host: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    races, cases, clock = tools["program_races"], tools["program_cases"], PretendedClock()
    timed = races.TimedCase(cases.Case("a", cases.Kind("alibi", 64), 1, 128, 2, 1, "plain"), ("q",))
    made: list[str] = []

    def flex(backend: str) -> Callable[[], Any]:
        if backend == "FLASH":
            raise RuntimeError("no flash-attn-4")
        made.append(backend)
        return lambda: clock.work("flex", 2.0)

    def ours() -> Any:
        return clock.work("function", 1.0)

    launches = {"function": (ours, True), **timed.peers(flex)}
    race = timed.race(4, launches, lambda found, *, with_function: "")
    path = tmp_path / "rows.csv"
    assert races.time_races(path, [race], 2, clock) == 0
    names = {row["contender"] for row in csv.DictReader(path.open())}
    assert names == {"function", "FlexAttention"}
    assert made == ["TRITON"], "a peer is made once"
    printed = capsys.readouterr().out
    assert "a: FA4 flex: does not run: RuntimeError: no flash-attn-4" in printed
    with pytest.raises(RuntimeError, match="no flash-attn-4"):
        timed.race(4, {"function": (lambda: flex("FLASH"), True)}, str).contenders[0].why_wrong()


def _in_turn(number: int) -> list[str]:
    names = ["function", "plain"]
    return names[::-1] if number % 2 else names


def test_checks_count_what_is_wrong(
    tools: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    check = tools["program_races"].check
    drawn: list[float] = []

    def check_one(kind: str, draw: np.random.Generator) -> str:
        drawn.append(draw.random())
        return "NaN" if kind == "b" else ""

    assert check(["a", "b"], check_one, 3, 7) == 1
    assert "WRONG 1: NaN\n3 problems of 2 kinds of kernels, 1 wrong" in capsys.readouterr().out
    assert len(set(drawn)) == 3
    assert check(["a"], check_one, 1, 7) == 0
    assert drawn[3] == drawn[0], "a problem is that of its seed and number"


@pytest.fixture
def on_the_host(tools: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Host tensors, so that the emulator computes, and short sequences."""
    import torch

    def draw_lengths(draw: np.random.Generator, count: int) -> list[int]:
        return [int(it) for it in draw.integers(0, 80, count)]

    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(torch, "randn", partial(_randn_on_the_host, torch.randn))
    monkeypatch.setattr(tools["program_cases"], "_drawn_lengths", draw_lengths)
    for tool in (tools["programs"], tools["program_gradients"]):
        monkeypatch.setattr(tool, "query_gpu", lambda ordinal: H200)
        for name in ("references_of", "compute_gradients"):
            if hasattr(tool, name):
                monkeypatch.setattr(tool, name, partial(_without_gpu, getattr(tool, name)))


def _without_gpu(function: Callable[..., Any], *given: Any, on_gpu: bool) -> Any:
    return function(*given)


def _randn_on_the_host(randn: Callable[..., Any], *sizes: int, dtype: Any, device: str) -> Any:
    return randn(*sizes, dtype=dtype)


@pytest.mark.full
@pytest.mark.torch
@pytest.mark.parametrize("name", ["programs", "program_gradients"])
def test_drawn_problems_are_right(
    tools: dict[str, ModuleType], on_the_host: None, name: str
) -> None:
    tool = tools[name]
    for packed in (False, True):
        kinds = (it for it in tool.checked_kinds() if _kind(it).d == 64)
        kind = next(it for it in kinds if _kind(it).packed == packed)
        assert tool.check_one(kind, np.random.default_rng(3)) == ""


@pytest.mark.full
@pytest.mark.torch
@pytest.mark.parametrize("name", ["programs", "program_gradients"])
@pytest.mark.parametrize(("function", "plain"), [("softcap", "softcap"), ("documents", "packed")])
def test_contenders_are_right_and_a_wrong_output_shows(
    tools: dict[str, ModuleType], on_the_host: None, name: str, function: str, plain: str
) -> None:
    cases = tools["program_cases"]
    kind = cases.Kind(function, 64, mask="causal")
    case = cases.Case(function, kind, 1, 128, 2, 1, plain)
    if name == "programs":
        timed = tools[name].ForwardCase(case)
        race = timed.contenders(peer=False, others=False)
    else:
        timed = tools[name].BackwardCase(case)
        race = timed.contenders(peer=False)
    assert {one.name: one.why_wrong() for one in race.contenders} == {"function": "", "plain": ""}
    found = race.contenders[0].launch()
    bad = found * 1.1 if name == "programs" else tuple(it * 1.1 for it in found)
    assert "relative L2 error" in timed.why_wrong(bad, with_function=True)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("name", ["programs", "program_gradients"])
@pytest.mark.parametrize(
    ("function", "mask", "plain"),
    [
        *((function, mask, "plain") for function in ("alibi", "table") for mask in _MASKS),
        ("squared", "causal", "plain"),
        ("t5", "none", "plain"),
        ("softcap", "causal", "softcap"),
        ("documents", "causal", "packed"),
    ],
)
def test_flex_attention_is_given_the_same_functions(
    tools: dict[str, ModuleType],
    on_the_host: None,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    function: str,
    mask: str,
    plain: str,
) -> None:
    """Uncompiled, on the CPU, which has no other backend for gradients than PyTorch's own."""
    import torch
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    cases, tool = tools["program_cases"], tools[name]
    case = cases.Case(function, cases.Kind(function, 64, mask=mask), 1, 160, 4, 2, plain)
    timed = (tool.ForwardCase if name == "programs" else tool.BackwardCase)(case)
    found = timed.flex("TRITON")()
    assert timed.why_wrong(found, with_function=True) == ""
    assert timed.why_wrong(found, with_function=False) or plain != "plain"
