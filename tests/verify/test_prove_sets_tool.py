"""tools/gpu/prove_sets.py: which proofs it asks for, and the rows of those. No GPU: the proof and
the build are stand-ins."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from flashsmith.errors import LaunchError
from flashsmith.families import get_kernel_configs


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_tool("gpu/prove_sets.py")
    monkeypatch.setattr(module, "build", lambda configs, seqs, masks: None)
    return module


def run(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, prove: Any, *options: str
) -> tuple[int, list[dict[str, str]]]:
    monkeypatch.setattr(tool, "prove", prove)
    monkeypatch.setattr(sys, "argv", ["prove_sets.py", str(folder / "rows.csv"), *options])
    status = tool.main()
    with (folder / "rows.csv").open(newline="") as file:
        return status, list(csv.DictReader(file))


def right(config: Any, **call: Any) -> Any:
    return SimpleNamespace(ok=True, max_error=1e-4, bound=2e-4, rel_l2=3e-4, lse_error=0.0)


def test_every_config_mask_and_length(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ("--kernels", "hopper", "--seqs", "128", "384", "--masks", "none", "causal", "--lazy")
    status, rows = run(tool, monkeypatch, tmp_path, right, *options)
    assert status == 0
    asked = {(row["config"], row["seq"], row["causal"], row["row_max"]) for row in rows}
    configs = {str(config) for config in get_kernel_configs("hopper")}
    assert len(rows) == len(asked) == len(configs) * 2 * 2 * 2
    assert {config for config, *_ in asked} == configs


def test_wrong_and_failed_kernels_are_rows(
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    configs = get_kernel_configs("hopper")

    def prove(config: Any, **call: Any) -> Any:
        if config == configs[1]:
            raise LaunchError("cudaErrorIllegalAddress")
        verdict = right(config)
        verdict.ok = config != configs[0]
        return verdict

    status, rows = run(tool, monkeypatch, tmp_path, prove, "--kernels", "hopper", "--seqs", "128")
    assert status == 1
    assert [row["ok"] for row in rows] == ["False", "False", *["True"] * (len(configs) - 2)]
    assert "cudaErrorIllegalAddress" in capsys.readouterr().err
