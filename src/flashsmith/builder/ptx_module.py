"""Splits the PTX of a shard into one file per kernel.

Each file is a complete module: the prelude, one entry, and those source files to which the ``.loc``
lines of the entry refer. In a shard, source files, labels and debug strings are numbered
consecutively. Here they are renumbered, and paths are made relative. Then the PTX of a kernel
depends only on the kernel's config and the sources, except for a few ``.loc`` lines. It does not
depend on the other kernels in the shard, on the build folder, or on the place where the package is
installed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_ENTRY = re.compile(r"(?:\.visible |\.weak )?\.entry ([\w$.]+)")
_FILE = re.compile(r'\s*\.file\s+(\d+) "(.*)"')
_STRING_LABEL = re.compile(r"\$L__info_string(\d+):")
_SOURCE_NUMBER = re.compile(r"(\.loc\s+|inlined_at )(\d+)")
_STRING_NUMBER = re.compile(r"\$L__info_string(\d+)")
_LABEL = re.compile(r"\$L__BB\d+_")
# The namespace in which nvcc puts the static functions of a shard, such as those in the headers of
# CUDA.
_SHARD_NAMESPACE = re.compile(r"\d+_INTERNAL_[0-9a-f]{8}_\d+_shard_\d+_cu_[0-9a-f]{8}")
_STRING_BYTES_PER_LINE = 40


@dataclass
class _Module:
    """The parts of a shard's PTX, each in source order."""

    prelude: list[str] = field(default_factory=list)
    entries: dict[str, list[str]] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)
    strings: dict[int, str] = field(default_factory=dict)


def split_ptx(text: str, roots: Sequence[Path]) -> dict[str, str]:
    """Splits ``text`` into one module for each entry; the keys are mangled names.

    If a source path is below one of ``roots``, it becomes relative to this folder. Raises
    ValueError if ``text`` ends in the middle of an entry.
    """
    module = _parse(text)
    return {name: _module_of(lines, module, roots) for name, lines in module.entries.items()}


def _parse(text: str) -> _Module:
    module = _Module()
    lines = iter(_anonymous(text).splitlines())
    for line in lines:
        entry = _ENTRY.match(line)
        file = _FILE.match(line)
        if entry:
            module.entries[entry[1]] = _block(line, lines)
        elif file:
            module.files[int(file[1])] = file[2]
        elif ".section" in line and ".debug_str" in line:
            _parse_strings(_block(line, lines), module)
        elif not line.lstrip().startswith("// .globl"):
            module.prelude.append(line)
    return module


def _block(first: str, lines: Iterator[str]) -> list[str]:
    """Returns ``first`` and the lines after it, up to the brace that closes its body."""
    block, depth, opened = [first], first.count("{") - first.count("}"), "{" in first
    while not opened or depth > 0:
        line = next(lines, None)
        if line is None:
            raise ValueError(f"the PTX ends within {first.strip()[:60]!r}")
        block.append(line)
        opened = opened or "{" in line
        depth += line.count("{") - line.count("}")
    return block


def _anonymous(text: str) -> str:
    return _SHARD_NAMESPACE.sub("9_INTERNAL", text)


def _parse_strings(block: list[str], module: _Module) -> None:
    number = 0
    for line in block:
        label = _STRING_LABEL.match(line)
        if label:
            number = int(label[1])
            module.strings[number] = ""
        elif line.startswith(".b8"):
            characters = bytes(int(byte) for byte in line.removeprefix(".b8").split(","))
            module.strings[number] += characters.decode("latin-1")


def _string_lines(string: str) -> list[str]:
    values = list(map(str, _anonymous(string).encode("latin-1")))
    starts = range(0, len(values), _STRING_BYTES_PER_LINE)
    return [f".b8 {','.join(values[i : i + _STRING_BYTES_PER_LINE])}" for i in starts]


class _Renumbering:
    """Assigns new numbers in the order in which the old numbers first appear."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.new: dict[int, int] = {}

    def __getitem__(self, old: str) -> int:
        return self.new.setdefault(int(old), self.first + len(self.new))


def _module_of(entry: list[str], module: _Module, roots: Sequence[Path]) -> str:
    files, strings = _Renumbering(first=1), _Renumbering(first=0)

    def renumbered(line: str) -> str:
        if "\t.loc" in line:
            line = _SOURCE_NUMBER.sub(lambda m: f"{m[1]}{files[m[2]]}", line)
            return _STRING_NUMBER.sub(lambda m: f"$L__info_string{strings[m[1]]}", line)
        return _LABEL.sub("$L__BB0_", line) if "$L__BB" in line else line

    parts = module.prelude + [renumbered(line) for line in entry]
    for old, new in files.new.items():
        parts.append(f'\t.file\t{new} "{_relative(module.files[old], roots)}"')
    if strings.new:
        parts += ["\t.section\t.debug_str", "\t{"]
        for old, new in strings.new.items():
            parts += [f"$L__info_string{new}:", *_string_lines(module.strings[old])]
        parts.append("\t}")
    return "\n".join(parts) + "\n"


def _relative(path: str, roots: Sequence[Path]) -> str:
    normal = os.path.normpath(path)
    for root in roots:
        prefix = os.path.normpath(root) + os.sep
        if normal.startswith(prefix):
            return normal[len(prefix) :]
    return normal
