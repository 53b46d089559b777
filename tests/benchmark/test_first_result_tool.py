"""tools/gpu/first_result.py: the processes it starts, in turns, and what it refuses."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

# In place of a GPU's process. The figures are in its name, and {extra} is what else it does.
PROCESS = """
import json, os, sys
begin, kind = float(sys.argv[1]), sys.argv[2]
assert os.environ["PATH"] == "/nonexistent" and "FLASHSMITH_JIT" not in os.environ
assert begin > 1e9
ours = kind == "flashsmith"
facts = {"torch_s": 2.0, "import_s": 0.1 * ours, "call_s": 0.2, "total_s": 2.2 + 0.1 * ours}
EXTRA
print(json.dumps({**facts, "library": "/site/k", "version": "/site/f"}))
"""


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("FLASHSMITH_JIT", "1")
    tool = load_tool("gpu/first_result.py")
    monkeypatch.setattr(tool, "PROCESS", PROCESS.replace("EXTRA", ""))
    return tool


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "module.py").write_text("x = 1\n")
    return folder


def test_kinds_take_turns_and_medians_are_compared(
    tool: ModuleType, site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool.measure(site, 3, tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    kinds = [(row["round"], row["kind"]) for row in rows]
    turns = [("0", "flashsmith"), ("0", "pytorch"), ("1", "pytorch"), ("1", "flashsmith")]
    assert kinds == [*turns, ("2", "flashsmith"), ("2", "pytorch")]
    assert {row["total_s"] for row in rows if row["kind"] == "flashsmith"} == {"2.3000"}
    printed = capsys.readouterr().out
    assert (
        "first result: +0.100 s against scaled_dot_product_attention(); 0.300 s beyond" in printed
    )
    assert list(site.rglob("*.pyc"))  # as pip leaves an installed package


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("raise SystemExit('wrong result')", "wrong result"),
        ("print('flashsmith: compiling', file=sys.stderr)", "flashsmith: compiling"),
        ("os.chmod(SITE, 0o755); open(SITE + '/new', 'w').close()", "written: .*new"),
    ],
)
def test_what_must_not_happen_ends_it(
    tool: ModuleType, site: Path, monkeypatch: pytest.MonkeyPatch, extra: str, message: str
) -> None:
    process = PROCESS.replace("EXTRA", extra.replace("SITE", json.dumps(os.fspath(site))))
    monkeypatch.setattr(tool, "PROCESS", process)
    with pytest.raises(SystemExit, match=message):
        tool.measure(site, 1, None)
