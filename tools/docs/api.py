#!/usr/bin/env python3
"""Writes docs/api.md: every public name of flashsmith, with its signature and docstring.

Usage: python tools/docs/api.py [--out docs/api.md]

The sources are parsed and not imported, so that the page is the same with every Python version and
without PyTorch. A test compares docs/api.md with this script's output.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"
WIDTH = 88

# The page's order: the most used names come first.
GROUPS = {
    "Attention": (
        "attention",
        "backward",
        "merge_attention",
        "attention_with_cache",
        "Gradients",
        "sdpa",
        "flash_attn_func",
        "flash_attn_varlen_func",
        "flash_attn_with_kvcache",
    ),
    "One kernel": ("forward", "forward_timed", "plan_forward"),
    "Configs": (
        "parse_kernel_name_into_config",
        "get_kernel_configs",
        "FlashForwardKernelConfig",
        "WgmmaForwardKernelConfig",
        "FlashBackwardKernelConfig",
        "WgmmaBackwardKernelConfig",
        "WgmmaDqKernelConfig",
        "FlashDecodeKernelConfig",
        "DType",
        "Semantics",
    ),
    "Choosing": ("choose", "Problem", "DeviceSpec", "device_spec"),
}
HEAD = """# API reference

`tools/docs/api.py` generates this page from the docstrings of every name in `flashsmith.__all__`.
To change it, edit those and run the script again. Errors are classes of `flashsmith.errors`, all of
them `FlashsmithError` ([what to do about each](troubleshooting.md)). The page of
[attention()](attention.md#shapes) lists the tensors that are accepted.

"""


@dataclass(frozen=True)
class Definition:
    """A function or class, its module and that module's text."""

    node: ast.FunctionDef | ast.ClassDef
    module: str
    source: str

    def text(self, node: ast.AST) -> str:
        """The source text of a part of the definition, on one line."""
        return " ".join((ast.get_source_segment(self.source, node) or "").split())


def public_names(module: str = "flashsmith") -> list[str]:
    """A module's __all__, without importing it."""
    for node in _parse(_path(module)).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise LookupError(f"{module} has no __all__")


def find(module: str, name: str) -> Definition:
    """The definition of a module's name, following imports between modules.

    Raises LookupError if there is none.
    """
    path = _path(module)
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            if any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list):
                continue  # for type checkers; the documented definition follows
            return Definition(node, module, path.read_text(encoding="utf-8"))
    return find(*_imported(module, name))


def constant(module: str, name: str) -> str:
    """The source text of a module's constant. Raises LookupError if there is none."""
    for node in _parse(_path(module)).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id == name and value is not None:
            return ast.unparse(value)
    return constant(*_imported(module, name))


def _imported(module: str, name: str) -> tuple[str, str]:
    """The module and name that a name is imported from. Raises LookupError if there is none."""
    for node in ast.walk(_parse(_path(module))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return node.module, alias.name
    raise LookupError(f"{module} neither defines nor imports {name}")


def page() -> str:
    """The whole document. Raises LookupError if a public name is in none of the groups."""
    shown = {name for names in GROUPS.values() for name in names} | {"__version__"}
    if missing := shown ^ set(public_names()):
        raise LookupError(f"GROUPS and flashsmith.__all__ differ by {', '.join(sorted(missing))}")
    parts = [HEAD]
    for group, names in GROUPS.items():
        listed = " ·\n  ".join(f"[{name}](#{name.lower()})" for name in names)
        parts.append(f"- {group}: {listed}\n")
    for group, names in GROUPS.items():
        parts.append(f"\n## {group}\n")
        parts += [section(name, find("flashsmith", name)) for name in names]
    parts.append(
        "\n## The version\n\n`flashsmith.__version__` is the installed version, a `str`.\n"
    )
    return "".join(parts)


def section(name: str, definition: Definition) -> str:
    """The section of one name: signature, description, and a class's methods."""
    node = definition.node
    if isinstance(node, ast.FunctionDef):
        return f"\n### {name}\n\n{_block(signature(definition))}\n{_described(node)}"
    fields = [_field(definition, part) for part in node.body if _is_field(part)]
    # A config's methods belong to its family and are not a stable interface.
    members = "" if name.endswith("Config") else "\n".join(_members(definition))
    text = f"\n### {name}\n\n{_block(_wrapped(f'class {name}', fields, ''))}\n{_described(node)}"
    return f"{text}\n{members}\n" if members else text


def signature(definition: Definition) -> str:
    """A function's signature as in the sources, with one argument per line if it is too long."""
    node = definition.node
    assert isinstance(node, ast.FunctionDef)
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    parts = [_argument(definition, *pair) for pair in zip(plain, defaults, strict=True)]
    if arguments.vararg:
        parts.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        parts.append("*")
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parts += [_argument(definition, *pair) for pair in keywords]
    if arguments.kwarg:
        parts.append(f"**{arguments.kwarg.arg}")
    parts = [part for part in parts if part not in ("self", "cls")]
    returned = f" -> {definition.text(node.returns)}" if node.returns else ""
    return _wrapped(node.name, parts, returned)


def _argument(definition: Definition, argument: ast.arg, default: ast.expr | None) -> str:
    kind = f": {definition.text(argument.annotation)}" if argument.annotation else ""
    if default is None:
        return argument.arg + kind
    value = re.sub(
        r"(?<![.\w])_?[A-Z][A-Z_]+\b(?!\.)",
        lambda found: constant(definition.module, found[0]),
        definition.text(default),
    )
    space = " " if kind else ""
    return f"{argument.arg}{kind}{space}={space}{value}"


def _wrapped(name: str, parts: Sequence[str], end: str) -> str:
    line = f"{name}({', '.join(parts)}){end}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {_ended(part)}" for part in parts), f"){end}"])


def _ended(part: str) -> str:
    return part if "  # " in part else f"{part},"


def _is_field(node: ast.stmt) -> bool:
    """Whether a class's statement is a field that callers may set or a member of an enum."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return "ClassVar" not in ast.unparse(node.annotation) and not node.target.id.startswith("_")
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)


def _field(definition: Definition, node: ast.stmt) -> str:
    """A field's name, type, default and, if it declares one, meaning."""
    call = getattr(node, "value", None)
    if not (isinstance(node, ast.AnnAssign) and isinstance(call, ast.Call)):
        return definition.text(node)
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    text = f"{definition.text(node.target)}: {definition.text(node.annotation)}"
    if "default" in given:
        text += f" = {definition.text(given['default'])}"
    elif "default_factory" in given:
        text += f" = {definition.text(given['default_factory'])}()"
    inside = ast.walk(given["metadata"]) if "metadata" in given else ()
    words = (part.value for part in inside if isinstance(part, ast.Constant))
    meaning = next((word for word in words if isinstance(word, str) and " " in word), "")
    return f"{text},  # {meaning}" if meaning else text


def _members(definition: Definition) -> Iterator[str]:
    assert isinstance(definition.node, ast.ClassDef)
    for node in definition.node.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        doc = ast.get_docstring(node)
        if doc is None:
            continue
        decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
        shown = signature(Definition(node, definition.module, definition.source))
        if "property" in decorators or "cached_property" in decorators:
            shown = node.name
        doc = doc.partition("\n\n")[0]
        yield f"- `{' '.join(shown.split())}`: {' '.join(_markdown(doc).split())}"


def _described(node: ast.FunctionDef | ast.ClassDef) -> str:
    fields = []
    if isinstance(node, ast.ClassDef):
        annotated = (part for part in node.body if isinstance(part, ast.AnnAssign))
        fields = [ast.unparse(part.target) for part in annotated]
    return _markdown(ast.get_docstring(node) or "", fields)


def _markdown(doc: str, fields: Sequence[str] = ()) -> str:
    """A docstring as Markdown; its sections and its lines about fields become lists."""
    doc = re.sub(r"``([^`]+)``", r"`\1`", doc)
    out: list[str] = []
    section = ""
    for line in doc.splitlines():
        heading = re.fullmatch(r"(Args|Returns|Raises):", line)
        if heading:
            section = heading[1]
            out += [f"**{section}**", ""]
        elif section and line.startswith("    "):
            text = line[4:]
            if section == "Returns" or text.startswith(" "):
                out.append(f"  {text.strip()}" if section != "Returns" else text.strip())
            else:
                out.append(_item(text))
        elif fields and re.match(rf"({'|'.join(fields)})\b[\w, ]*:", line):
            if out and out[-1] and not out[-1].startswith(("- ", "  ")):
                out.append("")
            out.append(_item(line))
        else:
            in_list = bool(fields) and bool(out) and out[-1].startswith(("- ", "  "))
            out.append(f"  {line}" if in_list and line else line)
    return "\n".join(out).rstrip() + "\n"


def _item(text: str) -> str:
    names, colon, rest = text.partition(":")
    if not colon or not re.fullmatch(r"[\w, ]+", names):
        return f"- {text}"
    return "- " + ", ".join(f"`{name.strip()}`" for name in names.split(",")) + colon + rest


def _block(text: str) -> str:
    return f"```text\n{text}\n```\n"


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _path(module: str) -> Path:
    base = SOURCES.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "api.md")
    parser.parse_args().out.write_text(page(), encoding="utf-8")
