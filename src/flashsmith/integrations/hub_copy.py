"""A copy of the package's Python modules that runs under any name, together with an installed
flashsmith.

The copy contains the requested modules, everything that they import, and the emulator. Imports
within the package become relative. The copy has the folder structure of flashsmith, with ptxlab as
an additional folder.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

_SOURCE = Path(__file__).parents[2]
_PACKAGES = {"flashsmith": (), "ptxlab": ("ptxlab",)}


def copied_modules(wanted: Iterable[str]) -> dict[str, str]:
    """Maps paths in the copy to the modules' source text: those ``wanted``, and all they import.

    The package's own __init__.py is left out.
    """
    found: dict[str, str] = {}
    seen: set[str] = set()
    waiting = list(wanted)
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        parent = module.rpartition(".")[0]
        waiting += [parent] if parent else []
        if module == "flashsmith":
            continue
        path = _file_of(module)
        assert path is not None, module
        text = path.read_text(encoding="utf-8")
        found[_path_in_copy(module)] = relative_imports(text, module)
        waiting += _imports(ast.parse(text))
    return dict(sorted(found.items()))


def copied_data() -> dict[str, bytes]:
    """Maps paths in the copy to the data files that its modules read."""
    root = _SOURCE / "flashsmith"
    paths = [*root.glob("builder/*.json"), *root.glob("chooser/**/*.json")]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(paths)}


def relative_imports(text: str, module: str) -> str:
    """Returns a module's source text with its imports from flashsmith and ptxlab made relative.

    Raises ValueError for 'import flashsmith', which has no relative form.
    """
    # The leading dots of a relative import count from the package that contains the module.
    own = _in_copy(module)
    package = own if _is_package(module) else own[:-1]
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for name in (alias.name for alias in node.names):
                if name.partition(".")[0] in _PACKAGES:
                    raise ValueError(f"{module}: 'import {name}' has no relative form")
        elif isinstance(node, ast.ImportFrom) and _is_ours(node):
            assert node.module is not None
            target = "." * (len(package) + 1) + ".".join(_in_copy(node.module))
            line = lines[node.lineno - 1]
            lines[node.lineno - 1] = line.replace(f"from {node.module} ", f"from {target} ", 1)
    return "".join(lines)


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yields the modules of flashsmith and ptxlab that a module imports anywhere in its source
    text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_ours(node):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if _file_of(whole) else str(node.module)


def _is_ours(node: ast.ImportFrom) -> bool:
    return node.level == 0 and (node.module or "").partition(".")[0] in _PACKAGES


def _in_copy(module: str) -> tuple[str, ...]:
    """Returns the path of a module in the copy, as names of packages starting at the copy's
    root."""
    package, *names = module.split(".")
    return (*_PACKAGES[package], *names)


def _path_in_copy(module: str) -> str:
    names = "/".join(_in_copy(module))
    return f"{names}/__init__.py" if _is_package(module) else f"{names}.py"


def _is_package(module: str) -> bool:
    path = _file_of(module)
    return path is not None and path.name == "__init__.py"


@lru_cache(maxsize=4096)
def _file_of(module: str) -> Path | None:
    """Returns the file of a module of flashsmith or ptxlab; None if there is no such module."""
    path = _SOURCE.joinpath(*module.split("."))
    files = path / "__init__.py", path.with_name(f"{path.name}.py")
    return next((file for file in files if file.is_file()), None)
