"""The shape of the package: who may import whom, what an import costs, what an install carries."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Every import points to a folder further left; `emulator` stands beside `builder`.
ORDER = (
    ("printable",),
    ("errors", "untrusted"),
    ("env", "host", "counted", "did_you_mean", "time_left"),
    ("families",),
    ("configs",),
    ("codegen",),
    ("builder", "emulator"),
    ("runtime",),
    ("verify",),
    ("chooser",),
    ("benchmark",),
    ("tuning",),
    ("integrations",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}

# Beyond the order: a narrower rule for the parts that must stand alone.
MAY_IMPORT = {
    "printable": set(),
    "errors": {"printable"},
    "untrusted": {"printable"},
    "env": {"printable", "errors", "untrusted"},
    "host": {"errors"},
    "families": {"printable", "errors", "untrusted", "env", "did_you_mean"},
    "configs": {"families"},
    "emulator": {"errors", "env", "families"},
}

SOURCE = Path(__file__).parents[1] / "src" / "flashsmith"
MODULES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


def part_of(module: str) -> str:
    """The folder, or the file right under the package, that a module belongs to."""
    return Path(module).parts[0].removesuffix(".py")


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement that runs when the module is imported; TYPE_CHECKING blocks do not."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _outside_functions(child)


def imported_names(tree: ast.AST, module: str, at_import_only: bool = False) -> set[str]:
    """Dotted names of everything a module imports, relative imports resolved."""
    nodes = _outside_functions(tree) if at_import_only else ast.walk(tree)
    package = ["flashsmith", *Path(module).parts[:-1]]
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{stem}.{alias.name}" for alias in node.names}
    return names


def parse(module: str) -> ast.Module:
    return ast.parse((SOURCE / module).read_text(encoding="utf-8"))


@pytest.mark.parametrize("module", [name for name in MODULES if name != "__init__.py"])
def test_imports_point_left(module: str) -> None:
    here = part_of(module)
    assert here in RANK, f"{module}: a new part; give it a place in ORDER and docs/architecture.md"
    for name in imported_names(parse(module), module):
        steps = name.split(".")
        if steps[0] != "flashsmith" or len(steps) == 1 or steps[1] in (here, "__version__"):
            continue
        if steps[1] not in RANK:
            assert here == "cli", f"{module} imports {name}, which may come from anywhere"
            continue
        assert RANK[steps[1]] < RANK[here], f"{module} imports {name}, which stands to its right"
        if here in MAY_IMPORT:
            assert steps[1] in MAY_IMPORT[here], f"{module} must not need {name}"


@pytest.mark.parametrize("module", MODULES)
def test_torch_is_never_imported_with_a_module(module: str) -> None:
    if part_of(module) == "integrations":
        return
    roots = {name.split(".")[0] for name in imported_names(parse(module), module, True)}
    assert "torch" not in roots


@pytest.mark.parametrize("module", [name for name in MODULES if part_of(name) == "families"])
def test_families_need_the_standard_library_only(module: str) -> None:
    roots = {name.split(".")[0] for name in imported_names(parse(module), module)}
    assert roots <= {"flashsmith", "__future__"} | set(sys.stdlib_module_names)


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


IMPORT_COST = """
import sys, time
begin = time.process_time()
import {module}
print(time.process_time() - begin)
"""


def test_import_takes_under_a_fifth_of_a_second() -> None:
    # Processor time, best of five: what the import itself costs, however busy the machine is.
    seconds = min(float(run_python(IMPORT_COST.format(module="flashsmith"))) for _ in range(5))
    assert seconds < 0.2


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("flashsmith", ("torch", "numpy", "tvm_ffi")),
        ("flashsmith.families", ("torch", "numpy", "tvm_ffi", "rich")),
        ("flashsmith.cli", ("torch", "numpy", "tvm_ffi")),
    ],
)
def test_an_import_stays_light(module: str, absent: tuple[str, ...]) -> None:
    loaded = run_python(f"import sys, {module}; print(*sys.modules)").split()
    assert not set(absent) & set(loaded)


def test_the_installed_package_carries_every_cuda_source() -> None:
    spec = importlib.util.find_spec("flashsmith")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    expected = {path.name for path in (SOURCE / "csrc").iterdir() if path.is_file()}
    assert {"forward_kernel.cuh", "flash_attention.cu", "bindings.cc"} <= expected
    assert {path.name for path in (installed / "csrc").iterdir()} >= expected
    assert (installed / "py.typed").is_file()


def test_the_installed_wheel_is_for_this_platform_and_any_python() -> None:
    text = importlib.metadata.distribution("flashsmith").read_text("WHEEL")
    assert text is not None
    assert "Tag: py3-none-linux_x86_64" in text, "an older installation: install it anew"
