"""The generated pages on names and variables are fresh, and have what the package offers."""

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
import flashsmith.errors
from flashsmith import env

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("docs/api.py")


def test_the_page_is_fresh(tool: ModuleType) -> None:
    written = (ROOT / "docs" / "api.md").read_text()
    assert written == tool.page(), "docs/api.md is out of date: python tools/docs/api.py"


def test_the_page_of_variables_is_fresh(load_tool: Callable[[str], ModuleType]) -> None:
    page = load_tool("docs/environment.py").page()
    written = (ROOT / "docs" / "environment.md").read_text()
    assert written == page, "docs/environment.md is out of date: python tools/docs/environment.py"
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == [f"| `{variable.name}`" for variable in env.VARIABLES]
    assert {len(row) for row in rows} == {4}


def test_the_page_has_every_public_name(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tool.public_names() == flashsmith.__all__
    headings = set(re.findall(r"^### ([\w.]+)$", tool.page(), re.MULTILINE))
    assert {name for name in headings if "." not in name} == {*flashsmith.__all__} - {"__version__"}
    assert {f"parallel.{name}" for name in tool.public_names("flashsmith.parallel")} < headings
    monkeypatch.setattr(tool, "public_names", lambda module: [*flashsmith.__all__, "renamed"])
    with pytest.raises(LookupError, match="renamed"):
        tool.page()


def test_the_page_has_every_error_class(tool: ModuleType) -> None:
    shown = dict(re.findall(r"^- `(\w+Error)` \((\w+)\):", tool.page(), re.MULTILINE))
    for name, base in shown.items():
        assert base in [parent.__name__ for parent in getattr(flashsmith.errors, name).__bases__]
    classes = {name for name, value in vars(flashsmith.errors).items() if isinstance(value, type)}
    assert classes - {"FlashsmithError"} == set(shown)


def test_every_signature_is_valid_python(tool: ModuleType) -> None:
    """No argument or field without a default follows one with a default."""
    blocks = re.findall(r"^```text\n(.+?)\n```$", tool.page(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 35
    for block in blocks:
        ast.parse(re.sub(r"^(class )?(\w+\.)*", "def ", block) + ": ...")


def test_names_that_share_an_explanation_are_code_and_sentences_stay_whole(
    tool: ModuleType,
) -> None:
    doc = """What it does.

Args:
    a, b_c,
        d: as there.

Raises:
    ArgumentError: a is wrong, or
    b is. Or neither
    is known.
    The errors of others.
"""
    assert tool._markdown(doc).split("**Args**")[1].splitlines() == [
        "",
        "",
        "- `a`, `b_c`, `d`: as there.",
        "",
        "**Raises**",
        "",
        "- `ArgumentError`: a is wrong, or",
        "  b is. Or neither",
        "  is known.",
        "- The errors of others.",
    ]


def test_explanations_are_not_repeated(tool: ModuleType) -> None:
    known: dict[str, str] = {}
    long = " ".join(["word"] * tool.LONG)
    text = f"Text.\n\n**Args**\n\n- `a`, `b`: {long}\n- `c`: {long} more\n- `d`: short\n"
    assert tool._without_repeats("one", text, known) == text.rstrip()
    shown = tool._without_repeats("x.two", text.replace("more", "other"), known)
    assert shown.splitlines()[4:] == [
        f"- `c`: {long} other",
        "- `d`: short",
        "- `a`, `b`: as for [one](#one).",
    ]


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
