"""tools/ci/count_house.py: its figures of a small package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FILES = {
    "src/flashsmith/__init__.py": "from flashsmith.a import FlashForwardKernelConfig\n",
    "src/flashsmith/a.py": 'def f():\n    from flashsmith.b import c\n\n\nNAME = "wgmma"\n',
    "src/flashsmith/b/c.py": "import flashsmith.a\n",
    "src/flashsmith/b/a.py": '"""Of wgmma."""\n',
    "src/flashsmith/families/wgmma/config.py": 'NAME = "wgmma"\n',
    "src/flashsmith/csrc/wgmma/kernel.cuh": "int a;\nint b;\n",
    "src/flashsmith/csrc/README": "no code\n",
    "tests/test_a.py": "\n\n\n",
}


def test_the_figures_of_a_small_package(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    load_tool: Callable[[str], ModuleType],
) -> None:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    tool = load_tool("ci/count_house.py")
    found = tool.figures(tmp_path)
    assert found == {
        "Python files under src": 5,
        "Python lines under src": 9,
        "median lines of a file": 1,
        "module names used more than once": 1,
        "files that name a family": 1,
        "places that name a family": 1,
        "files in import cycles": 2,
        "lines of CUDA C++": 2,
        "lines of tests": 3,
    }
    monkeypatch.setattr("sys.argv", ["count_house.py", "--base-tree", str(tmp_path)])
    tool.main()
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["base", "now"]
    assert [row.split()[-2] for row in rows] == [str(value) for value in found.values()]
