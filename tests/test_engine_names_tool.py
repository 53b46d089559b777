"""tools/ci/engine_names.py finds what a release of an engine lacks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "ci" / "engine_names.py"


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType]) -> Any:
    return load_tool("ci/engine_names.py")


def write_release(tool: Any, engine: str, folder: Path, *, without: str = "") -> None:
    """A package with the newest names that the integration takes, but for one."""
    lines: dict[str, list[str]] = {}
    for choices in tool.taken(engine):
        for module, name in choices[0]:
            lines.setdefault(module, []).append(f"{name} = 0")
    for (module, name), members in tool.MEMBERS.items():
        if module.split(".")[0] == engine:
            kept = [f"    {it} = 0" for it in members if it != without]
            lines.setdefault(module, []).extend([f"class {name}:", *kept])
    for module, found in lines.items():
        path = folder.joinpath(*module.split("."))
        path.mkdir(parents=True, exist_ok=True)
        kept = [line for line in found if line != f"{without} = 0"]
        (path / "__init__.py").write_text("\n".join(kept))


def run(engine: str, folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(TOOL), engine, str(folder)], capture_output=True, text=True
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_release_with_all_names(engine: str, tool: Any, tmp_path: Path) -> None:
    write_release(tool, engine, tmp_path)
    assert run(engine, tmp_path) == (0, f"{tmp_path}: has all names\n")


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("vllm", "AttentionMetadataBuilder"),
        ("vllm", "get_dcp_local_seq_lens"),
        ("vllm", "block_table_tensor"),
        ("sglang", "register_attention_backend"),
        ("sglang", "is_target_verify"),
    ],
)
def test_a_name_that_is_missing(engine: str, name: str, tool: Any, tmp_path: Path) -> None:
    write_release(tool, engine, tmp_path, without=name)
    status, output = run(engine, tmp_path)
    assert status == 1
    assert f"has no {name}" in output


def test_either_of_two_places_will_do(tool: Any, tmp_path: Path) -> None:
    """An import in `try` may fail if the handler's succeeds."""
    write_release(tool, "vllm", tmp_path)
    ops = tmp_path / "vllm" / "v1" / "attention" / "ops"
    (ops / "dcp" / "__init__.py").unlink()
    assert run("vllm", tmp_path)[0] == 1
    (ops / "common.py").write_text("cp_lse_ag_out_rs = 0")
    (ops / "dcp_alltoall.py").write_text("dcp_a2a_lse_reduce = 0")
    assert run("vllm", tmp_path)[0] == 0
