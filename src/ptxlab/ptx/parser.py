"""Parses PTX text to a syntax tree.

The parser handles only structure; the translator gives opcodes their meaning. Registers and labels
that inline assembly declares within ``{ ... }`` are renamed, so that every name is unique in its
entry.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ptxlab.errors import EmulatorError
from ptxlab.ptx.declarations import parse_variable
from ptxlab.ptx.entry_parser import EntryParser, Head
from ptxlab.ptx.syntax import Entry, Variable


@dataclass(eq=False)
class ParsedModule:
    """A PTX module. Entries are parsed at their first use."""

    text: str
    version: str
    target: str
    variables: tuple[Variable, ...]
    files: dict[int, str]
    entry_heads: dict[str, Head]
    #: The heads of the device functions whose bodies are in the module.
    function_heads: dict[str, Head]
    _entries: dict[str, Entry] = field(default_factory=dict, repr=False)
    _functions: dict[str, Entry] = field(default_factory=dict, repr=False)

    @property
    def arch(self) -> int:
        """The compute capability of the target, such as 90 for sm_90a; 0 if there is no target."""
        return int("".join(filter(str.isdigit, self.target)) or 0)

    @property
    def entry_names(self) -> tuple[str, ...]:
        """Mangled names of all entries, in text order."""
        return tuple(self.entry_heads)

    def entry(self, name: str) -> Entry:
        """Parses an entry. For an unknown name, the EmulatorError lists the names that exist."""
        if name not in self._entries:
            if name not in self.entry_heads:
                known = ", ".join(self.entry_heads) or "none"
                raise EmulatorError(f"entry {name!r} is not in this PTX; its entries: {known}")
            self._entries[name] = EntryParser(self.entry_heads[name], self.files).parse()
        return self._entries[name]

    def function(self, name: str) -> Entry:
        """Parses a device function, which is one of ``function_heads``."""
        if name not in self._functions:
            self._functions[name] = EntryParser(self.function_heads[name], self.files).parse()
        return self._functions[name]


_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.S)
_TOP = re.compile(
    r"\.version\s+(?P<version>\S+)"
    r"|\.target\s+(?P<target>[^\n]+)"
    r"|\.address_size\s+\d+"
    r'|\.file\s+(?P<file>\d+)\s+"(?P<path>[^"]*)"[^\n]*'
    r"|(?P<section>\.section\s+[^{]*\{)"
    r"|(?:\.(?:visible|weak|extern)\s+)*\.entry\s+(?P<entry>[\w$]+)\s*"
    r"|(?P<func>(?:\.(?:visible|weak|extern)\s+)*\.func\b)"
    r"|(?P<variable>(?:\.(?:visible|weak|extern|common)\s+)*\.(?:shared|global|const)\b[^;]*;)"
    r"|(?P<other>\.pragma[^;]*;|\.alias[^;]*;)"
)


def parse(text: str) -> ParsedModule:
    """Parses a PTX module. The EmulatorError names the line that cannot be parsed."""
    clean = _COMMENT.sub(_blank_comment, text)
    module = ParsedModule(text, "", "", (), {}, {}, {})
    variables: list[Variable] = []
    line_starts = [0] + [m.end() for m in re.finditer("\n", clean)]
    position = _skip_blank(clean, 0)
    while position < len(clean):
        match = _TOP.match(clean, position)
        if not match:
            line = clean.count("\n", 0, position) + 1
            raise EmulatorError(f"PTX line {line}: cannot read {clean[position : position + 60]!r}")
        position = match.end()
        if match["version"]:
            module.version = match["version"]
        elif match["target"]:
            module.target = match["target"].split(",")[0].strip()
        elif match["file"]:
            module.files[int(match["file"])] = match["path"]
        elif match["section"]:
            position = clean.index("}", position) + 1
        elif match["variable"]:
            variables.append(parse_variable(match["variable"].rstrip(";")))
        elif match["func"]:
            function, position = _function_head(clean, position, line_starts)
            if function is not None:
                module.function_heads[function.name] = function
        elif match["entry"]:
            head = _entry_head(match["entry"], clean, position, line_starts)
            module.entry_heads[head.name] = head
            position = head.body_end + 1
        position = _skip_blank(clean, position)
    module.variables = tuple(variables)
    return module


def _blank_comment(match: re.Match[str]) -> str:
    found = match.group(0)
    if found[0] == '"':
        return found
    return re.sub(r"[^\n]", " ", found) if "\n" in found else " " * len(found)


_BLANK = re.compile(r"\s*")


def _skip_blank(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    return match.end() if match else position


def _matching_brace(text: str, position: int) -> int:
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, position):
        depth += 1 if match.group(0) == "{" else -1
        if depth == 0:
            return match.start()
    line = text.count("\n", 0, position) + 1
    raise EmulatorError(f"PTX line {line}: this brace is never closed")


_FUNCTION = re.compile(
    r"\s*(?P<results>\([^)]*\))?\s*(?P<name>[\w$]+)\s*(?P<parameters>\([^)]*\))?[^{;]*(?P<end>[{;])"
)


def _function_head(clean: str, position: int, line_starts: list[int]) -> tuple[Head | None, int]:
    """Returns the head of a device function, or None if it has no body, and the position after
    it."""
    match = _FUNCTION.match(clean, position)
    if match is None:
        line = clean.count("\n", 0, position) + 1
        raise EmulatorError(f"PTX line {line}: cannot read {clean[position : position + 60]!r}")
    if match["end"] == ";":
        return None, match.end()
    brace = match.end() - 1
    end = _matching_brace(clean, brace)
    texts = match["name"], (match["parameters"] or "")[1:-1], ""
    results = (match["results"] or "")[1:-1]
    return Head(*texts, brace + 1, end, clean, line_starts, results), end + 1


def _entry_head(name: str, clean: str, position: int, line_starts: list[int]) -> Head:
    parameters = ""
    if clean.startswith("(", position):
        close = clean.index(")", position)
        parameters = clean[position + 1 : close]
        position = close + 1
    brace = clean.index("{", position)
    end = _matching_brace(clean, brace)
    return Head(name, parameters, clean[position:brace], brace + 1, end, clean, line_starts)
