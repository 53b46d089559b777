"""Reports the size and structure of the package: lines, files, names that occur repeatedly, masks,
import cycles.

    python tools/ci/count_house.py [--base-tree DIR]

Prints the figures for this checkout and, with --base-tree, for another one.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
FAMILIES = {
    *("mma_sync", "wgmma", "mma_sync_backward", "wgmma_backward", "wgmma_dq", "mma_sync_decode"),
    *("wgmma_mla", "mma_sync_mla"),
}
CONFIG_CLASSES = {
    f"{which}{direction}KernelConfig"
    for which in ("Flash", "Hopper")
    for direction in ("Forward", "Backward")
} | {
    *("FlashDecodeKernelConfig", "WgmmaDqKernelConfig"),
    *("WgmmaMlaKernelConfig", "MmaSyncMlaKernelConfig"),
}
# Files that belong to one family, in the current and in the former layout, and public re-exports.
OF_A_FAMILY = (*(f"families/{name}/" for name in FAMILIES), "configs/hopper/")
RE_EXPORTS = ("__init__.py", "families/__init__.py", "configs/__init__.py")
CUDA = {".cu", ".cuh", ".cc", ".h"}
# A line that depends on the kind of mask or on a softcap.
MASK_BRANCH = re.compile(r"MaskKind::|mask (==|!=|in)|if .*softcap|kSoftcap")
# Files that translate another library's masks.
MASK_FACADES = ("integrations/transformers_masks.py",)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--base-tree", type=Path, help="a checkout to compare with")
    options = parser.parse_args()
    trees = [ROOT] if options.base_tree is None else [options.base_tree, ROOT]
    found = [figures(tree) for tree in trees]
    heads = ["base", "now"][-len(trees) :]
    print(" " * 40 + "".join(f"{head:>10}" for head in heads))
    for name in dict.fromkeys(chain.from_iterable(reversed(found))):
        values = "".join(f"{one.get(name, 0):>10,}" for one in found)
        print(f"{name:<40}{values}")


def figures(tree: Path) -> dict[str, int]:
    """The figures for a checkout, by name."""
    source = tree / "src" / "flashsmith"
    modules = {path.relative_to(source).as_posix(): path for path in source.rglob("*.py")}
    parsed = {name: ast.parse(path.read_text()) for name, path in modules.items()}
    lengths = {name: lines(path) for name, path in modules.items()}
    # The folders of families have files of the same names on purpose, so each of these names counts
    # once.
    shared = {re.sub(r"^families/\w+/", "families/*/", name) for name in modules}
    bases = Counter(Path(name).name for name in shared if Path(name).name != "__init__.py")
    named = {
        name: count
        for name, tree_of in parsed.items()
        if not name.startswith(OF_A_FAMILY) and name not in RE_EXPORTS
        if (count := sum(1 for _ in family_names(tree_of)))
    }
    return {
        "Python files of flashsmith": len(modules),
        "Python lines of flashsmith": sum(lengths.values()),
        "Python lines of ptxlab": sum(
            lines(path) for path in (tree / "src" / "ptxlab").rglob("*.py")
        ),
        "median lines of a file": int(median(lengths.values())),
        "module names used more than once": sum(count > 1 for count in bases.values()),
        "files that name a family": len(named),
        "places that name a family": sum(named.values()),
        "files in import cycles": files_in_cycles(parsed),
        "functions of more than 60 lines": sum(map(long_functions, parsed.values())),
        "class names in two files or more": sum(
            count > 1
            for count in Counter(chain.from_iterable(map(class_names, parsed.values()))).values()
        ),
        "lines that branch on a mask or a softcap": sum(
            len(found) for found in mask_branches(source).values()
        ),
        "files that branch on a mask or a softcap": len(mask_branches(source)),
        "lines of CUDA C++": sum(
            lines(path) for path in (source / "csrc").rglob("*") if path.suffix in CUDA
        ),
        "lines of tests": sum(lines(path) for path in (tree / "tests").rglob("*.py")),
        **{
            f"lines of {part}/": sum(
                length for name, length in lengths.items() if name.startswith(f"{part}/")
            )
            for part in sorted({name.partition("/")[0] for name in lengths if "/" in name})
        },
    }


def mask_branches(source: Path) -> dict[str, list[str]]:
    """By file, the lines of Python and CUDA C++ that branch on a mask or a softcap.

    Files in which they belong are left out: semantics/ and those in MASK_FACADES.
    """
    found = {}
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if path.suffix not in CUDA | {".py"} or name.startswith("semantics/"):
            continue
        matching = [line for line in path.read_text().splitlines() if MASK_BRANCH.search(line)]
        if matching and name not in MASK_FACADES:
            found[name] = matching
    return found


def long_functions(tree: ast.AST) -> int:
    """How many functions of a module have more than 60 lines."""
    return sum(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= 60
        for node in ast.walk(tree)
    )


def class_names(tree: ast.Module) -> set[str]:
    """The classes that a module defines at its top level."""
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def lines(path: Path) -> int:
    """Lines of a text file."""
    return len(path.read_text().splitlines())


def family_names(tree: ast.AST) -> Iterator[str]:
    """Each mention of a family in a module: its name as a string literal, or the name of its config
    class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in FAMILIES:
            yield node.value
        elif isinstance(node, ast.Name) and node.id in CONFIG_CLASSES:
            yield node.id
        elif isinstance(node, ast.Attribute) and node.attr in CONFIG_CLASSES:
            yield node.attr


def files_in_cycles(parsed: dict[str, ast.Module]) -> int:
    """How many modules are in import cycles. Imports inside functions count too."""
    names = {module_name(path): path for path in parsed}
    graph = {name: imports(parsed[path], name, path, set(names)) for name, path in names.items()}
    return sum(
        any(name in reachable(graph, target) for target in targets)
        for name, targets in graph.items()
    )


def module_name(path: str) -> str:
    """The dotted name of a module, from its path below src/flashsmith."""
    parts = ["flashsmith", *Path(path).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module, name: str, path: str, known: set[str]) -> set[str]:
    """Those of the `known` modules that a module imports.

    `from package import name` counts as an import of the package only if it has no module with this
    name.
    """
    package = name.split(".") if path.endswith("__init__.py") else name.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            inner = [f"{stem}.{alias.name}" for alias in node.names]
            found |= {each if each in known else stem for each in inner}
    return found & known - {name}


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """All modules that can be reached from `start`, and `start` itself."""
    seen, left = {start}, [start]
    while left:
        for target in graph[left.pop()] - seen:
            seen.add(target)
            left.append(target)
    return seen


if __name__ == "__main__":
    main()
