"""flashsmith[compiler] installs together with serving engines: its ranges hold what they pin.

What engines pin is recorded in tools/ci/engine_pins.json. The tests that are marked full ask pip.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from built_wheel import build_wheel
from dependency_ranges import ROOT, lowest, requirements
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ENGINES: dict[str, Any] = json.loads((ROOT / "tools/ci/engine_pins.json").read_text())["engines"]
EACH_ENGINE = pytest.mark.parametrize("engine", ENGINES)
# vLLM 0.20 to 0.25 pin the first, 0.26 the second, 0.33 and SGLang the third.
PINNED = ("0.1.9", "0.1.10", "0.1.11")


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("ci/engine_pins.py")


def conflicts(needed: Requirement, found: dict[str, Any]) -> list[str]:
    """Who, of those that were resolved, does not agree with a requirement."""
    name = canonicalize_name(needed.name)
    version = found["resolved"][name]
    limits = found["limits"].get(name, {}) | {"flashsmith": str(needed.specifier)}
    return [who for who, text in limits.items() if version not in SpecifierSet(text)]


@EACH_ENGINE
def test_our_ranges_hold_what_engines_install(engine: str) -> None:
    for needed in requirements("cli", "compiler"):
        assert conflicts(needed, ENGINES[engine]) == [], needed


@EACH_ENGINE
def test_a_floor_above_an_engines_pin_is_noticed(engine: str) -> None:
    found = ENGINES[engine]
    assert conflicts(Requirement("apache-tvm-ffi>=0.1.15,<0.2"), found) == ["flashsmith"]
    assert conflicts(Requirement("cuda-toolkit==13.1.*"), found) == ["flashsmith"]
    pinned = found | {"resolved": found["resolved"] | {"apache-tvm-ffi": "0.1.15"}}
    name, _, version = engine.partition("==")
    assert f"{name} {version}" in conflicts(Requirement("apache-tvm-ffi>=0.1.15"), pinned)


def test_the_record_has_both_ends_of_each_engines_range() -> None:
    assert set(ENGINES) == {"vllm==0.33.0", "vllm==0.26.0", "sglang==0.5.23", "sglang==0.5.16"}
    pins = {engine.partition("==")[0]: set[str]() for engine in ENGINES}
    for engine, found in ENGINES.items():
        by_engine = found["limits"]["apache-tvm-ffi"][engine.replace("==", " ")]
        pins[engine.partition("==")[0]].add(by_engine.removeprefix("=="))
    assert pins == {"vllm": {"0.1.10", "0.1.11"}, "sglang": {"0.1.11"}}


def test_every_release_that_engines_pin_is_in_the_range() -> None:
    (ours,) = (one for one in requirements() if one.name == "apache-tvm-ffi")
    assert str(ours.specifier) == "<0.2,>=0.1.9"
    assert all(version in ours.specifier for version in PINNED)


@EACH_ENGINE
def test_the_model_extra_fits_where_the_documents_say_so(engine: str) -> None:
    """The extra 'models' wants a newer transformers than SGLang 0.5.16 pins."""
    found = ENGINES[engine]
    apart = [one.name for one in requirements("models") if one.name in ("torch", "transformers")]
    assert sorted(apart) == ["torch", "transformers"]
    refused = [
        one.name
        for one in requirements("models")
        if one.name in apart and "flashsmith" in conflicts(one, found)
    ]
    assert refused == (["transformers"] if engine == "sglang==0.5.16" else [])


def test_the_documents_name_the_releases_that_are_recorded() -> None:
    text = (ROOT / "docs/deployment.md").read_text(encoding="utf-8")
    section = " ".join(text.partition("## With vLLM and SGLang")[2].partition("\n## ")[0].split())
    named = re.findall(r"(vLLM|SGLang) ([\d.]+) and ([\d.]+\d)", section)
    releases = {f"{name.lower()}=={version}" for name, *both in named for version in both}
    assert releases == set(ENGINES)


@pytest.mark.parametrize("text", ["vllm", "vllm>=0.33", "VLLM==0.33.0", "vllm==0.33.0 torch"])
def test_only_a_release_is_recorded(
    tool: ModuleType, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["engine_pins.py", text])
    monkeypatch.delattr(tool, "resolve")
    with pytest.raises(SystemExit, match="2"):
        tool.main()
    assert f"{text!r} names no release; give one such as vllm==0.33.0" in capsys.readouterr().err


def distribution(name: str, version: str, *requires: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "version": version, "requires_dist": list(requires)}}


def test_the_record_has_the_limits_in_force(tool: ModuleType) -> None:
    """Requirements behind a marker or an extra that nothing asks for do not count."""
    report = [
        distribution(
            "flashsmith", "1", "Num_Py>=1", 'cuda-toolkit[nvcc]==3.*; extra == "compiler"'
        ),
        distribution("cuda-toolkit", "3.1", 'nvcc>=3; extra == "nvcc"', 'cufft; extra == "cufft"'),
        distribution("nvcc", "3.1"),
        distribution("num-py", "2"),
        distribution("vllm", "5", "torch[fast]==7", "num.py<3", "nvcc; python_version < '3'"),
        distribution(
            "torch", "7", "num-py!=1.5", 'nvcc<4; extra == "fast"', 'num-py<9; extra == "x"'
        ),
        distribution("transformers", "8", "num-py>=0.1"),
    ]
    assert tool.record("vllm==5", tool.Solution({"install": report})) == {
        "resolved": {
            "cuda-toolkit": "3.1",
            "num-py": "2",
            "nvcc": "3.1",
            "torch": "7",
            "transformers": "8",
        },
        "limits": {
            "num-py": {"torch 7": "!=1.5", "vllm 5": "<3"},
            "nvcc": {"torch 7": "<4"},
            "torch": {"vllm 5": "==7"},
        },
    }


# --- with pip -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A requirement of the extra 'compiler' of this checkout's wheel."""
    return f"flashsmith[compiler] @ {build_wheel(tmp_path_factory.mktemp('wheel')).as_uri()}"


@pytest.mark.full
@pytest.mark.parametrize("version", [*PINNED, "newest"])
def test_the_compiler_extra_resolves_with_each_tvm_ffi(
    tool: ModuleType, compiler: str, version: str
) -> None:
    pins = [] if version == "newest" else [f"apache-tvm-ffi=={version}"]
    found = tool.resolve(compiler, constraints=pins)
    chosen = found.version("apache-tvm-ffi")
    if version == "newest":
        assert chosen in SpecifierSet(">=0.1.15,<0.2")
    else:
        assert chosen == version
    assert found.version("nvidia-cuda-nvcc").startswith("13.0.")
    assert found.version("nvidia-nvvm").startswith("13.0.")


@pytest.mark.full
def test_the_compiler_extra_resolves_with_all_floors_at_once(
    tool: ModuleType, compiler: str
) -> None:
    pins = lowest("cli", "compiler")
    assert len(pins) == len(list(requirements("cli")))
    found = tool.resolve(compiler, constraints=pins)
    for pin in map(Requirement, pins):
        if pin.marker is None or pin.marker.evaluate():
            assert found.version(canonicalize_name(pin.name)) in pin.specifier


@pytest.mark.full
@EACH_ENGINE
def test_the_compiler_extra_resolves_within_an_engines_limits(
    tool: ModuleType, compiler: str, engine: str
) -> None:
    limits = ENGINES[engine]["limits"]
    needed = {canonicalize_name(one.name) for one in requirements("cli", "compiler")}
    pins = [f"{name}{text}" for name in limits for text in limits[name].values()]
    found = tool.resolve(compiler, constraints=pins)
    for name in needed & set(limits):
        assert all(found.version(name) in SpecifierSet(text) for text in limits[name].values())
