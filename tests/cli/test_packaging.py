"""The options of 'flashsmith wheel' that say which kernels are in a wheel. Nothing is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flashsmith.builder import package_build
from flashsmith.cli import app
from flashsmith.errors import ArgumentError
from flashsmith.families import Semantics


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the command up to the compilers; returns its words, and the kernels to be compiled."""

    def run(*options: str) -> tuple[str, dict[Semantics, Any]]:
        found: dict[Semantics, Any] = {}

        def build_package(kernels: dict[Semantics, Any], **rest: Any) -> Any:
            found.update(kernels)
            raise ArgumentError("here the compilers would start")

        monkeypatch.setattr(package_build, "build_package", build_package)
        done = CliRunner().invoke(app, ["wheel", "--for=80", "-o", str(tmp_path), *options])
        return done.output, found

    return run


def formats(kernels: dict[Semantics, Any]) -> set[str]:
    return {config.cache.label for configs in kernels.values() for config in configs}


def test_rare_kernels_are_left_out_unless_asked_for(planned: Any) -> None:
    words, kernels = planned("--only", "bf16 d64 write_slots")
    assert "sm_80: 4 kernels for" in words
    assert "without cache_e5m2, d72, " in words
    assert "(--all adds them)" in words
    assert formats(kernels) == {"", "e4m3"}
    words, kernels = planned("--only", "bf16 d64 write_slots", "--all")
    assert "sm_80: 6 kernels for" in words
    assert "without cache_e5m2" not in words
    assert formats(kernels) == {"", "e4m3", "e5m2"}


def test_what_is_named_is_not_left_out(planned: Any) -> None:
    _, kernels = planned("--only", "fp16 d72 causal softcap packed forward")
    assert {config.d_head for configs in kernels.values() for config in configs} == {72}
    _, kernels = planned("--only", "bf16 d64 write_slots cache_e5m2")
    assert formats(kernels) == {"e5m2"}
