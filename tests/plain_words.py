"""Which words and sentences keep the project's texts from being plain English.

``faults(text)`` lists them for prose. ``markdown_prose(text)`` extracts the prose of a page,
``python_prose(text)`` the docstrings and comments of a module, ``python_messages(text)`` the texts
that a module shows its users, and ``cuda_prose(text)`` the comments of CUDA and C++.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterable, Iterator

# What is not said, and what is said instead.
WORDS = {
    r"whoever|whosoever": "anyone who, the user who",
    r"lest": "so that ... not",
    r"told|tells|hears": "set, given, reports",
    r"ask(ed|s|ing)? for": "requested, given",
    r"by turns|in turns?": "alternately, in rotation",
    r"anew": "again, from scratch",
    r"seen (by|of|from)": "visible to, used by",
    r"lends?|lent|lending": "provides, exposes",
    # As a comparison; as a place 'next to' says the same.
    r"beside": "compared with, next to, together with",
    r"mend(s|ed|ing)?": "fix",
    r"at the (least|most)": "at least, at most",
    r"thereof|therein|whence|hence": "of it, in it, from where, so",
    r"what there is": "the list of",
    r"so many|so manyth": "a number of, every n-th",
    r"of (one's|yours|ours) own|of one's choice": "your own, of your choice",
    r"is of no use": "is useless",
    r"by itself alone|likewise": "alone, also",
}
LONGEST = 45
SEVERAL = 4
_WORDS = [(re.compile(rf"\b({words})\b", re.IGNORECASE), advice) for words, advice in WORDS.items()]
_STRING = re.compile(r'"(?:\\.|[^"\\])*"')
_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)[.!?][)\"*\]]*(?:\s+|$)")


def sentences(text: str) -> Iterator[str]:
    """The sentences of a paragraph."""
    for part in _END.split(text):
        if part.strip():
            yield " ".join(part.split())


def faults(paragraph: str) -> Iterator[str]:
    """What is wrong with a paragraph of prose."""
    for pattern, advice in _WORDS:
        for found in pattern.finditer(paragraph):
            around = paragraph[max(0, found.start() - 40) : found.end() + 40]
            yield f"'{found[0]}' ({advice}): ...{' '.join(around.split())}..."
    for sentence in sentences(paragraph):
        if len(sentence.split()) > LONGEST:
            yield f"{len(sentence.split())} words in a sentence: {sentence[:90]}..."


def markdown_prose(text: str) -> Iterator[str]:
    """The paragraphs, list items and table cells of a page, without code and link targets."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]+`", "code", text)
    text = re.sub(r"\]\([^)\s]+\)", "]", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        if block.lstrip().startswith("|"):
            for line in block.splitlines():
                yield from (cell.strip() for cell in line.strip().strip("|").split("|"))
        else:
            yield block.strip()


def python_prose(text: str) -> Iterator[str]:
    """The paragraphs of a module's docstrings, then its comments.

    Examples, which are indented paragraphs, are left out.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            doc = inspect.cleandoc(ast.get_docstring(node) or "")
            yield from (part for part in doc.split("\n\n") if part and part[0] != " ")
    yield from _joined(
        (*token.start, token.line, token.string.lstrip("#! "))
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    )


def python_messages(text: str) -> Iterator[str]:
    """The string literals of a module that have several words, such as errors and helps.

    A value in an f-string counts as one word. Programs, which have lines that end in a semicolon,
    are left out.
    """
    tree = ast.parse(text)
    inner = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    documented = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if id(node) in inner or id(node) in documented:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else "value" for v in node.values)
            message = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            message = node.value
        else:
            continue
        if ";\n" not in message and len(re.findall(r"\b[a-z]+\b", message)) >= SEVERAL:
            yield message


def cuda_prose(text: str) -> Iterator[str]:
    """The comments of a CUDA or C++ file, without tables, whose lines are indented."""
    yield from _joined(
        (number, found.start(), line, found[1])
        for number, line in enumerate(text.splitlines())
        if (
            found := re.search(r"//+(?! {3})\s?(.*)$", _STRING.sub(lambda s: "_" * len(s[0]), line))
        )
    )


def _joined(lines: Iterable[tuple[int, int, str, str]]) -> Iterator[str]:
    """Comments from their lines: number, column, the whole line and the comment in it.

    A comment continues in the next line at the same column, if that line has no code.
    """
    comment: list[str] = []
    expected = -1, -1
    for number, column, line, text in lines:
        if ((number, column) != expected or line[:column].strip()) and comment:
            yield " ".join(comment)
            comment = []
        comment.append(text)
        expected = number + 1, column
    if comment:
        yield " ".join(comment)
