#!/usr/bin/env python3
"""Writes docs/api.md: every public name, with its signature and docstring, and the error classes.

Usage: python tools/docs/api.py [--out docs/api.md]

The sources are parsed and not imported, so that the page is the same with every Python version and
without PyTorch. A test compares docs/api.md with this script's output.
"""

from __future__ import annotations

import argparse
import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"
WIDTH = 88

_MASKS = (
    *("MaskValue", "causal", "window", "documents", "prefix_lm", "prefix_tree", "chunks"),
    *("window_and_global", "image_blocks", "intervals", "blocks"),
)
_SCORES = ("ScoreValue", "alibi", "relative", "t5", "squared_distance", "softcap", "bias")
# The page's order: the most used names come first. Names begin with `flashsmith.`.
GROUPS = {
    "Calls": (
        "attention",
        "backward",
        "merge_attention",
        "attention_with_cache",
        "write_slots",
        "Gradients",
        "sdpa",
        "flex_attention",
        "flash_attn_func",
        "flash_attn_varlen_func",
        "flash_attn_with_kvcache",
    ),
    "Masks and scores": (
        "explain",
        *(f"masks.{name}" for name in _MASKS),
        *(f"scores.{name}" for name in _SCORES),
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
    "Several GPUs": (
        "parallel.attention",
        "parallel.shard",
        "parallel.unshard",
        "parallel.positions",
        "parallel.problems",
    ),
    "Frameworks and counters": (
        "integrations.transformers.register",
        "integrations.flash_registry.register",
        "integrations.page_tables.from_flashinfer",
        "integrations.fallbacks.fallback_count",
        "runtime.count_launches",
    ),
}
# Every name of these modules' __all__ is on the page.
MODULES = ("flashsmith", "flashsmith.masks", "flashsmith.parallel", "flashsmith.scores")
# Explanations of arguments of this many words or more are not repeated.
LONG = 11
# The members of these classes that calls and choices need; other members are for builds and
# measurements.
MEMBERS = {
    "Semantics": ("parse",),
    "Problem": ("of_operation", "parse"),
}
HEAD = """# API reference

<!-- Written by tools/docs/api.py from the docstrings: edit those, then run it. -->

Every public function and class of `flashsmith`. [Shapes](attention.md#shapes) lists the tensors
that are accepted, and [environment variables](environment.md) what changes defaults.

"""
NOTES = {
    "Configs": """
Configs compare field by field. Their classes raise `ArgumentError` for a field that has the wrong
type or is out of range.
"""
}
ERRORS = """
## Errors

Classes of `flashsmith.errors`. Each is a `FlashsmithError` and also the class in parentheses.
[Troubleshooting](troubleshooting.md) says what to do.

"""


@dataclass(frozen=True)
class Definition:
    """A function or class, with its module and the text of that module."""

    node: ast.FunctionDef | ast.ClassDef
    module: str
    source: str

    def text(self, node: ast.AST) -> str:
        """The source text of a part of the definition, on one line."""
        return " ".join((ast.get_source_segment(self.source, node) or "").split())


def public_names(module: str = "flashsmith") -> list[str]:
    """The names in a module's __all__, which is read without importing the module."""
    for node in _parse(_path(module)).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise LookupError(f"{module} has no __all__")


def find(module: str, name: str) -> Definition:
    """The definition of a name in a module; imports from other modules are followed.

    Raises LookupError if there is none.
    """
    path = _path(module)
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            if any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list):
                continue  # For type checkers; the definition with the documentation follows
            return Definition(node, module, path.read_text(encoding="utf-8"))
    return find(*_imported(module, name))


def constant(module: str, name: str) -> str:
    """The text of a constant in a module. Raises LookupError if there is none."""
    for node in _parse(_path(module)).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id == name and value is not None:
            if isinstance(value, ast.Call):  # Mask("none"); callers write "none"
                value = value.args[0]
            return ast.unparse(value).replace("'", '"')
    return constant(*_imported(module, name))


def _imported(module: str, name: str) -> tuple[str, str]:
    """The module and the name from which a name is imported.

    Raises LookupError if there is none.
    """
    for node in ast.walk(_parse(_path(module))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return node.module, alias.name
    raise LookupError(f"{module} neither defines nor imports {name}")


def page() -> str:
    """The whole document. Raises LookupError if a public name is not in any group."""
    shown = {f"flashsmith.{name}" for names in GROUPS.values() for name in names}
    for module in MODULES:
        public = {f"{module}.{name}" for name in public_names(module)} - {"flashsmith.__version__"}
        if missing := public ^ {name for name in shown if name.rpartition(".")[0] == module}:
            names = ", ".join(sorted(missing))
            raise LookupError(f"GROUPS and {module}.__all__ differ by {names}")
    parts, known = [HEAD], dict[str, str]()
    headings = (*GROUPS, "Errors")
    parts += [f"- [{group}](#{group.lower().replace(' ', '-')})\n" for group in headings]
    for group, names in GROUPS.items():
        parts.append(f"\n## {group}\n{NOTES.get(group, '')}")
        parts += [_without_repeats(name, section(name, defined(name)), known) for name in names]
    parts += [ERRORS, *errors()]
    parts.append("\n## The version\n\n`flashsmith.__version__` is the installed version.\n")
    return "".join(parts)


def _without_repeats(name: str, text: str, known: dict[str, str]) -> str:
    """A section in which arguments are listed on one line if an earlier section has exactly the
    same explanations.

    ``known`` maps these explanations to sections; those of this section are added.
    """
    before, mark, rest = text.partition("**Args**\n\n")
    listed, end, after = rest.partition("\n\n")
    items: list[str] = []
    repeats: dict[str, list[str]] = {}
    for item in re.split(r"^- ", listed, flags=re.MULTILINE)[1:]:
        words = " ".join(item.split())
        if len(words.split()) >= LONG and words in known:
            repeats.setdefault(known[words], []).append(words.partition(":")[0])
        else:
            items.append(item.rstrip())
            known[words] = name
    for section, names in repeats.items():
        line = f"{', '.join(names)}: as for [{section}](#{_anchor(section)})."
        items.append("\n".join(textwrap.wrap(line, 113, subsequent_indent="  ")))
    return before + mark + "\n".join(f"- {item}" for item in items) + end + after


def _anchor(name: str) -> str:
    return name.lower().replace(".", "")


def defined(name: str) -> Definition:
    """The definition of a name that is on the page. Raises LookupError if there is none."""
    module, _, last = f"flashsmith.{name}".rpartition(".")
    return find(module, last)


def errors() -> Iterator[str]:
    """One line for each error class: its name, the other class from which it derives, and what it
    means."""
    for node in _parse(_path("flashsmith.errors")).body:
        if isinstance(node, ast.ClassDef) and node.name != "FlashsmithError":
            *_, base = (ast.unparse(base) for base in node.bases)
            meaning = " ".join((ast.get_docstring(node) or "").split())
            yield f"- `{node.name}` ({base}): {meaning}\n"


def section(name: str, definition: Definition) -> str:
    """The section for a name: signature, description and, for a class, methods."""
    node = definition.node
    if isinstance(node, ast.FunctionDef):
        path = f"flashsmith.{name}".rpartition(".")[0] + "." if "." in name else ""
        return f"\n### {name}\n\n{_block(signature(definition, path))}\n{_described(node)}"
    fields = [_field(definition, part) for part in node.body if _is_field(part)]
    # The methods of a config belong to its family, and are not a stable interface.
    members = "" if name.endswith("Config") else "\n".join(_members(definition))
    members = f"**Members**\n\n{members}" if members else ""
    described = _described(node)
    if name.endswith("Config"):
        described = described.partition("\n**Raises**\n")[0]  # NOTES explains the errors
    text = f"\n### {name}\n\n{_block(_wrapped(f'class {name}', fields, ''))}\n{described}"
    return f"{text}\n{members}\n" if members else text


def signature(definition: Definition, path: str = "", annotated: bool = True) -> str:
    """The signature of a function; if it is too long, each argument is on a line.

    ``path`` comes before the name. Without ``annotated``, the signature has no types and is on one
    line.
    """
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
    if not annotated:
        return f"{node.name}({', '.join(part.partition(':')[0] for part in parts)})"
    kind = definition.text(node.returns) if node.returns else "Any"
    returned = "" if kind == "Any" else f" -> {kind}"
    if any(ast.unparse(decorator) == "contextmanager" for decorator in node.decorator_list):
        returned = returned.replace("Iterator[", "AbstractContextManager[")
    return _wrapped(path + node.name, parts, returned)


def _argument(definition: Definition, argument: ast.arg, default: ast.expr | None) -> str:
    kind = definition.text(argument.annotation) if argument.annotation else "Any"
    value = None if default is None else _value(definition, default)
    return _declared(argument.arg, kind, value)


def _declared(name: str, kind: str, default: str | None) -> str:
    """An argument or field with its type and default, in the form of Python's own documentation."""
    if default is not None:
        return f"{name}={default}"
    return name if kind == "Any" else f"{name}: {kind}"


def _value(definition: Definition, node: ast.expr) -> str:
    """The text of a default; names of constants are replaced by their values."""
    return re.sub(
        r"(?<![.\w])_?[A-Z][A-Z_]+\b(?!\.)",
        lambda found: constant(definition.module, found[0]),
        ast.unparse(node).replace("'", '"'),
    )


def _wrapped(name: str, parts: Sequence[str], end: str) -> str:
    line = f"{name}({', '.join(parts)}){end}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {_ended(part)}" for part in parts), f"){end}"])


def _ended(part: str) -> str:
    return part if "  # " in part else f"{part},"


def _is_field(node: ast.stmt) -> bool:
    """Whether a statement in a class is a field that callers may set, or a member of an enum."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return "ClassVar" not in ast.unparse(node.annotation) and not node.target.id.startswith("_")
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)


def _field(definition: Definition, node: ast.stmt) -> str:
    """The name, type and default of a field, and its meaning if the declaration gives one."""
    if not isinstance(node, ast.AnnAssign):
        return definition.text(node)
    given, default = {}, None
    if isinstance(node.value, ast.Call):
        given = _keywords(definition.module, node.value)
        if "default" in given:
            default = _value(definition, given["default"])
        elif "default_factory" in given:
            default = f"{ast.unparse(given['default_factory'])}()"
    elif node.value is not None:
        default = _value(definition, node.value)
    text = _declared(definition.text(node.target), definition.text(node.annotation), default)
    inside = ast.walk(given["metadata"]) if "metadata" in given else ()
    words = (part.value for part in inside if isinstance(part, ast.Constant))
    meaning = next((word for word in words if isinstance(word, str) and " " in word), "")
    return f"{text},  # {meaning}" if meaning else text


def _keywords(module: str, call: ast.Call) -> dict[str | None, ast.expr]:
    """The keywords in the declaration of a field, and those of field() in the function that it
    calls."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    name = ast.unparse(call.func)
    if "default" in given or name in ("field", "knob"):
        return given
    inner = find(module, name)
    returned = (part.value for part in ast.walk(inner.node) if isinstance(part, ast.Return))
    for value in returned:
        if isinstance(value, ast.Call):
            return _keywords(inner.module, value) | given
    return given


def _members(definition: Definition) -> Iterator[str]:
    assert isinstance(definition.node, ast.ClassDef)
    for node in definition.node.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        if node.name not in MEMBERS.get(definition.node.name, (node.name,)):
            continue
        doc = ast.get_docstring(node)
        if doc is None:
            continue
        decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
        shown = signature(Definition(node, definition.module, definition.source), annotated=False)
        if "property" in decorators or "cached_property" in decorators:
            shown = node.name
        doc = doc.partition("\n\n")[0]
        yield f"- `{shown}`: {' '.join(_markdown(doc).split())}"


def _described(node: ast.FunctionDef | ast.ClassDef) -> str:
    fields = []
    if isinstance(node, ast.ClassDef):
        annotated = (part for part in node.body if isinstance(part, ast.AnnAssign))
        fields = [ast.unparse(part.target) for part in annotated]
    return _markdown(ast.get_docstring(node) or "", fields)


def _markdown(doc: str, fields: Sequence[str] = ()) -> str:
    """A docstring as Markdown. Its sections and its lines about fields become lists."""
    doc = re.sub(r"``([^`]+)``", r"`\1`", doc)
    # If several arguments share an explanation, their names may be on two lines.
    doc = re.sub(r"^(    \w[\w, ]*,)\n +([\w, ]+:)", r"\1 \2", doc, flags=re.MULTILINE)
    out: list[str] = []
    section = ""
    for line in doc.splitlines():
        heading = re.fullmatch(r"(Args|Returns|Raises):", line)
        if heading:
            section = heading[1]
            out += [f"**{section}**", ""]
        elif section and line.startswith("    "):
            text = line[4:]
            ended = out[-1] == "" or out[-1].endswith(".")
            if section == "Returns" or text.startswith(" ") or not (ended or _names(text)):
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


def _names(text: str) -> list[str]:
    """The arguments or errors that a line of a docstring explains; [] if the line only continues an
    explanation."""
    names = text.partition(":")[0] if ":" in text else ""
    return re.split(", *", names) if re.fullmatch(r"\w+(, *\w+)*", names) else []


def _item(text: str) -> str:
    names = _names(text)
    if not names:
        return f"- {text}"
    line = "- " + ", ".join(f"`{name}`" for name in names) + ":" + text.partition(":")[2]
    return "\n".join(textwrap.wrap(line, 115, subsequent_indent="  ", break_long_words=False))


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
