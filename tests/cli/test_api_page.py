"""docs/api.md is what tools/docs/api.py writes, and that is what the package offers."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import flashsmith

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("docs/api.py")


def test_the_page_is_fresh(tool: ModuleType) -> None:
    written = (ROOT / "docs" / "api.md").read_text()
    assert written == tool.page(), "docs/api.md is out of date: python tools/docs/api.py"


def test_the_page_has_every_public_name(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tool.public_names() == flashsmith.__all__
    headings = set(re.findall(r"^### (\w+)$", tool.page(), re.MULTILINE))
    assert headings == set(flashsmith.__all__) - {"__version__"}
    monkeypatch.setattr(tool, "public_names", lambda: [*flashsmith.__all__, "renamed"])
    with pytest.raises(LookupError, match="renamed"):
        tool.page()


@pytest.mark.parametrize("name", [name for name in flashsmith.__all__ if name != "__version__"])
def test_signatures_and_texts_are_those_of_the_code(tool: ModuleType, name: str) -> None:
    """Those of sdpa() only where PyTorch is installed, which it needs to be imported."""
    if name == "sdpa" and importlib.util.find_spec("torch") is None:
        pytest.skip("needs PyTorch: it is not installed")
    found, value = tool.find("flashsmith", name), getattr(flashsmith, name)
    assert ast.get_docstring(found.node) == inspect.getdoc(value)
    if inspect.isclass(value):
        return
    (shown,) = ast.parse(f"def {tool.signature(found)}: ...").body
    assert isinstance(shown, ast.FunctionDef)
    real = inspect.signature(value).parameters.values()
    args = shown.args
    names = [arg.arg for arg in (*args.args, args.vararg, *args.kwonlyargs, args.kwarg) if arg]
    assert names == [parameter.name for parameter in real]
    defaults = [ast.unparse(node) for node in (*args.defaults, *args.kw_defaults) if node]
    expected = [p.default for p in real if p.default is not p.empty]
    for text, default in zip(defaults, expected, strict=True):
        assert text in (repr(default), getattr(default, "__name__", ""))
