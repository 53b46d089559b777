#!/usr/bin/env python3
"""Compares public names and signatures with tools/ci/public_api.json, or records them.

Usage: python tools/ci/public_api.py [--record [--breaking]]

The list contains the names in ``__all__`` and former names, with parameters, fields and methods. It
also has error classes, commands with their options, and environment variables.

--record adds new entries. Changes that break callers need --breaking as well; docs/stability.md
says when they are allowed. The exit status is 1 if the list differs from the code.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import typer

from flashsmith import errors
from flashsmith.cli import app
from flashsmith.env import VARIABLES
from flashsmith.families.earlier_names import EARLIER

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_suffix(".json")
# Modules with an __all__ that users import from, and single documented functions.
MODULES = (
    *("flashsmith", "flashsmith.masks", "flashsmith.parallel", "flashsmith.scores"),
    "ptxlab",
)
FUNCTIONS = (
    "flashsmith.integrations.transformers.register",
    "flashsmith.integrations.flash_registry.register",
    "flashsmith.integrations.page_tables.from_flashinfer",
    "flashsmith.integrations.fallbacks.fallback_count",
    "flashsmith.runtime.count_launches",
)
# Marks of parameters: without a default, and keyword-only.
REQUIRED = "required"
KEYWORD = "keyword"

Api = dict[str, dict[str, list[str]]]


def _pages() -> ModuleType:
    """tools/docs/api.py, which finds definitions without importing them."""
    path = ROOT / "tools" / "docs" / "api.py"
    spec = importlib.util.spec_from_file_location("api_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def current() -> Api:
    """The public names and signatures in the code."""
    pages = _pages()
    python: dict[str, list[str]] = {}
    for module in MODULES:
        for name in pages.public_names(module):
            if name != "__version__":
                python |= _described(f"{module}.{name}", pages.find(module, name).node)
    for name, renamed in EARLIER.items():
        python |= _described(f"flashsmith.{name}", pages.find(renamed.module, renamed.name).node)
    for path in FUNCTIONS:
        module, _, name = path.rpartition(".")
        python |= _described(path, pages.find(module, name).node)
    return {
        "python": python,
        "errors": {
            name: [base.__name__ for base in value.__mro__[1:-1]]
            for name, value in vars(errors).items()
            if isinstance(value, type) and issubclass(value, (Exception, Warning))
        },
        "commands": dict(_commands("flashsmith", typer.main.get_command(app))),
        "variables": {variable.name: [] for variable in VARIABLES},
    }


def _described(path: str, node: ast.FunctionDef | ast.ClassDef) -> dict[str, list[str]]:
    """The parameters of a function; for a class, its fields, and each public method separately."""
    if isinstance(node, ast.FunctionDef):
        return {path: _parameters(node)}
    fields, methods = [], {}
    # The methods of a config are left out, because they belong to its family and change with its
    # kernels.
    is_config = node.name.endswith("Config")
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            name = part.target.id
        elif isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name):
            name = part.targets[0].id
        elif isinstance(part, ast.FunctionDef):
            if not part.name.startswith("_") and not is_config:
                methods[f"{path}.{part.name}"] = _parameters(part)
            continue
        else:
            continue
        if not name.startswith("_"):
            fields.append(name)
    return {path: fields, **methods}


def _parameters(node: ast.FunctionDef) -> list[str]:
    """The parameters, each as 'name: position or keyword: default'."""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    found = [
        f"{argument.arg}: {index}: {_default(value)}"
        for index, (argument, value) in enumerate(zip(plain, defaults, strict=True))
        if argument.arg not in ("self", "cls")
    ]
    if arguments.vararg:
        found.append(f"*{arguments.vararg.arg}: {KEYWORD}: ...")
    found += [
        f"{argument.arg}: {KEYWORD}: {_default(value)}"
        for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        found.append(f"**{arguments.kwarg.arg}: {KEYWORD}: ...")
    return found


def _default(value: ast.expr | None) -> str:
    return REQUIRED if value is None else ast.unparse(value)


def _commands(name: str, command: click.Command) -> Iterator[tuple[str, list[str]]]:
    """A command and its subcommands, each with its options."""
    options = (option for part in command.params for option in (*part.opts, *part.secondary_opts))
    yield name, sorted(options)
    for word, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _commands(f"{name} {word}", inner)


def breaks(recorded: Api, now: Api) -> list[str]:
    """What has changed so that callers of the recorded names would break."""
    found = []
    for part, entries in recorded.items():
        for name, listed in entries.items():
            if name not in now.get(part, {}):
                found.append(f"{name} is gone")
                continue
            present = now[part][name]
            found += [
                f"{name}: {entry!r} is gone"
                for entry in listed
                if entry not in present and not _is_now_optional(entry, present)
            ]
            if part == "python":
                found += [
                    f"{name}: {entry!r} is new and has no default"
                    for entry in present
                    if entry.endswith(f": {REQUIRED}") and entry not in listed
                ]
    return found


def _is_now_optional(entry: str, present: list[str]) -> bool:
    """Whether an argument that had to be given has a default now, which breaks no caller."""
    place, required = entry.rpartition(": ")[::2]
    return required == REQUIRED and any(it.startswith(f"{place}: ") for it in present)


def main(arguments: list[str] | None = None) -> int:
    """Compares the public names with the record, or records them. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--record", action="store_true", help="write the list")
    parser.add_argument("--breaking", action="store_true", help="also record breaking changes")
    given = parser.parse_args(arguments)
    recorded = json.loads(LIST.read_text(encoding="utf-8")) if LIST.exists() else {}
    now = current()
    broken = breaks(recorded, now)
    for line in broken:
        print(line)
    if given.record and (given.breaking or not broken):
        LIST.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return 0
    if broken:
        print("This breaks callers; docs/stability.md explains when and how that is allowed.")
    elif now != recorded:
        print("New public names: run python tools/ci/public_api.py --record")
    return int(now != recorded)


if __name__ == "__main__":
    sys.exit(main())
