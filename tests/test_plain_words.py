"""README, pages, docstrings, comments and messages are in plain English, and pages are short.

The logs keep the words of their day.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documents import DOCUMENTS, LOGS, PAGES, README, ROOT, name_of
from plain_words import (
    LONGEST,
    cuda_prose,
    faults,
    markdown_prose,
    python_messages,
    python_prose,
)

LESSONS = ROOT / "docs" / "log" / "lessons.md"
SOURCES = [ROOT / "src", ROOT / "examples", ROOT / "tools"]
CHECKED = [*(path for path in DOCUMENTS if path not in LOGS), LESSONS]


@pytest.mark.parametrize("path", CHECKED, ids=name_of)
def test_a_page_is_in_plain_words(path: Path) -> None:
    found = [
        fault
        for paragraph in markdown_prose(path.read_text(encoding="utf-8"))
        for fault in faults(paragraph)
    ]
    assert not found, "\n".join(found)


def sources(*patterns: str) -> list[Path]:
    return sorted(
        path
        for folder in SOURCES
        for pattern in patterns
        for path in folder.rglob(pattern)
        if "__pycache__" not in path.parts
    )


PYTHON = sources("*.py")
CUDA = sources("*.cu", "*.cuh", "*.cc", "*.h")


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_a_module_is_in_plain_words(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = [fault for part in python_prose(text) for fault in faults(part)]
    # A message may be a table or a program, which has no sentences.
    found += [
        fault
        for part in python_messages(text)
        for fault in faults(part)
        if "words in a sentence" not in fault
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", CUDA, ids=name_of)
def test_comments_of_kernels_are_in_plain_words(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = [fault for part in cuda_prose(text) for fault in faults(part)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "Whoever calls it waits.",
        "Keys that are seen by a row.",
        "It takes 3 µs beside cuDNN.",
        "JAX lends no streams.",
        "It is measured anew, lest it be wrong.",
        "Asking for the id ends a capture.",
        "Keys seen from the last row.",
        "It works by lending a stream.",
        "It needs mending.",
        "The order is what the host was told, or asked for, by turns.",
        " ".join(["word"] * (LONGEST + 1)) + ".",
    ],
)
def test_dialect_is_found(text: str) -> None:
    assert [*faults(text)]


def test_plain_words_pass() -> None:
    assert not [
        *faults("The kernel reads K twice. Besides, it is besieged: a sentence of ten words.")
    ]
    page = "Text.\n\n```bash\nlest anew\n```\n\n| a | b `told` |\n|---|---|\n\n[x](beside.md)"
    assert not [fault for part in markdown_prose(page) for fault in faults(part)]
    page = "- one\n- two beside three\n\n| a | told |"
    assert len([fault for part in markdown_prose(page) for fault in faults(part)]) == 2


def test_docstrings_and_comments_are_taken_from_sources() -> None:
    source = '''"""Of the module."""

STEPS = "lest"  # Each step
# Two lines
# of a comment.


def f():
    """What f does.

    Args:
        x: a number
    """
'''
    assert [*python_prose(source)] == [
        "Of the module.",
        "What f does.",
        "Args:\n    x: a number",
        "Each step",
        "Two lines of a comment.",
    ]


def test_messages_are_taken_from_sources() -> None:
    source = '''"""Whoever reads this."""

NAME = "a_name"
raise ValueError(
    f"d={d}: what you have told it "
    "is not allowed"
)
'''
    assert [*python_messages(source)] == ["d=value: what you have told it is not allowed"]


def test_comments_are_taken_from_kernels() -> None:
    source = """// Two lines
// of a comment.
const int a = 1;  // of a line
asm("// not this");
"""
    assert [*cuda_prose(source)] == ["Two lines of a comment.", "of a line"]


def words(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").split())


def test_the_pages_are_short() -> None:
    """The pages of users have at most 1,500 words, the results 6,400, all pages 50,000."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    user_pages = navigation.partition("nav:")[2].partition("- Internals:")[0]
    names = set(re.findall(r"([\w-]+\.md)$", user_pages, re.MULTILINE))
    assert len(names) > 15
    for path in PAGES:
        if path.name in names - {"results.md", "api.md"}:
            assert words(path) <= 1500, path
    assert words(ROOT / "docs" / "results.md") <= 6400
    assert words(README) <= 900
    assert sum(map(words, PAGES)) <= 50_000


def test_the_changelog_is_short() -> None:
    """Some 300 words a version: what users must know of it."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for version in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        assert len(version.split()) <= 350, version.splitlines()[0]
