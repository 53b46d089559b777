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
    "src/flashsmith/b/d.py": "class A:\n    if mask == 1:\n        f(a)\n",
    "src/flashsmith/e.py": "class A: ...\n\n\ndef long():\n" + "    f()\n" * 60,
    "src/flashsmith/semantics/f.py": "a = 1 if softcap else 2\n",
    "src/flashsmith/integrations/transformers_masks.py": "a = mask in b\n",
    "src/flashsmith/families/wgmma/config.py": 'NAME = "wgmma"\n',
    "src/flashsmith/csrc/wgmma/kernel.cuh": "int a;\nif constexpr (MaskKind::causal) b;\n",
    "src/flashsmith/csrc/README": "no code\n",
    "src/ptxlab/interface.py": "from ptxlab.ptx import Instruction\n",
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
        "Python files of flashsmith": 9,
        "Python lines of flashsmith": 78,
        "Python lines of ptxlab": 1,
        "median lines of a file": 1,
        "module names used more than once": 1,
        "files that name a family": 1,
        "places that name a family": 1,
        "files in import cycles": 2,
        "functions of more than 60 lines": 1,
        "class names in two files or more": 1,
        "lines that branch on a mask or a softcap": 2,
        "files that branch on a mask or a softcap": 2,
        "lines of CUDA C++": 2,
        "lines of tests": 3,
        "lines of b/": 5,
        "lines of families/": 1,
        "lines of integrations/": 1,
        "lines of semantics/": 1,
    }
    monkeypatch.setattr("sys.argv", ["count_house.py", "--base-tree", str(tmp_path)])
    tool.main()
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["base", "now"]
    base = {row[:40].strip(): row.split()[-2] for row in rows}
    assert base.items() >= {name: str(value) for name, value in found.items()}.items()
    # Folders that the base lacks are shown, too.
    assert (base["lines of runtime/"], base["lines of b/"]) == ("0", "5")


def test_nothing_outside_semantics_knows_which_masks_there_are(
    load_tool: Callable[[str], ModuleType],
) -> None:
    """What a mask and a score are is read from their values, in Python and in CUDA C++."""
    tool = load_tool("ci/count_house.py")
    assert tool.mask_branches(tool.ROOT / "src" / "flashsmith") == {}
