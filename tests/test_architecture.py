"""The shape of the package: who may import whom, what an import costs, what an install carries."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from flashsmith.families import FAMILIES

# Every import points to a folder further left.
ORDER = (
    ("printable", "system_errors", "bundle", "paused_collection"),
    ("errors", "safe_json"),
    ("env", "host", "pluralize", "did_you_mean", "time_left", "shipped"),
    ("semantics",),
    ("tracing",),
    ("masks", "scores"),
    ("operations",),
    ("families",),
    ("configs",),
    ("builder",),
    ("runtime",),
    ("verify",),
    ("chooser",),
    ("benchmark",),
    ("tuning",),
    ("integrations",),
    ("parallel",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}

# Beyond the order: a narrower rule for the parts that must stand alone.
MAY_IMPORT = {
    "printable": set(),
    "system_errors": set(),
    "bundle": set(),
    "paused_collection": set(),
    "errors": {"printable"},
    "safe_json": {"printable", "system_errors"},
    "env": {"bundle", "printable", "errors", "safe_json"},
    "host": {"errors"},
    "semantics": {"printable", "errors", "did_you_mean"},
    "tracing": {"printable", "errors", "pluralize", "semantics"},
    "masks": {"printable", "errors", "semantics", "tracing"},
    "scores": {"printable", "errors", "semantics", "tracing"},
    "operations": {"printable", "errors", "safe_json", "did_you_mean", "semantics"},
    "shipped": set(),
    "families": {
        "bundle",
        "printable",
        "errors",
        "safe_json",
        "env",
        "did_you_mean",
        "semantics",
        "operations",
    },
    "configs": {"families"},
}

SOURCE = Path(__file__).parents[1] / "src" / "flashsmith"
CSRC = SOURCE / "csrc"
MODULES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
PTXLAB = SOURCE.parent / "ptxlab"
PTXLAB_MODULES = sorted(path.relative_to(PTXLAB).as_posix() for path in PTXLAB.rglob("*.py"))


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


def imported_names(
    tree: ast.AST, module: str, at_import_only: bool = False, package: str = "flashsmith"
) -> set[str]:
    """Dotted names of everything a module imports, relative imports resolved."""
    nodes = _outside_functions(tree) if at_import_only else ast.walk(tree)
    folders = [package, *Path(module).parts[:-1]]
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = folders[: len(folders) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{stem}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def parse(module: str) -> ast.Module:
    return ast.parse((SOURCE / module).read_text(encoding="utf-8"))


@pytest.mark.parametrize("here", sorted(set(map(part_of, MODULES)) - {"__init__"}))
def test_imports_point_left(here: str) -> None:
    assert here in RANK, "a new part: give it a place in ORDER and docs/architecture.md"
    for module in (name for name in MODULES if part_of(name) == here):
        for name in imported_names(parse(module), module):
            check_import(name, module, here)


def check_import(name: str, module: str, here: str) -> None:
    steps = name.split(".")
    if steps[0] != "flashsmith" or len(steps) == 1 or steps[1] in (here, "__version__"):
        return
    if steps[1] not in RANK:
        assert here == "cli", f"{module} imports {name}, which may come from anywhere"
        return
    assert RANK[steps[1]] < RANK[here], f"{module} imports {name}, which stands to its right"
    if here in MAY_IMPORT:
        assert steps[1] in MAY_IMPORT[here], f"{module} must not need {name}"


def test_only_the_command_imports_the_demos() -> None:
    importers = {
        module
        for module in MODULES
        if any(
            name.startswith("flashsmith_demos") for name in imported_names(parse(module), module)
        )
    }
    assert importers == {"cli/demo.py"}


# Within ptxlab: every import of its parts points to one of these, or into the own folder.
PTXLAB_MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "ptx": {"errors"},
    "interface": {"ptx"},
    "machine": {"errors", "interface"},
    "translate": {"errors", "ptx", "interface", "machine"},
    "execute": {"errors", "ptx", "interface", "machine", "translate"},
    "checks": {"interface"},
    "arguments": {"errors", "ptx", "machine"},
    "module": {"errors", "ptx", "interface", "machine", "execute", "checks", "arguments"},
    "__init__": {"errors", "interface", "module"},
}


@pytest.mark.parametrize("module", PTXLAB_MODULES)
def test_parts_of_ptxlab_build_on_each_other_in_one_direction(module: str) -> None:
    here = part_of(module)
    tree = ast.parse((PTXLAB / module).read_text(encoding="utf-8"))
    for name in imported_names(tree, module, package="ptxlab"):
        package, *steps = name.split(".")
        assert package in {"ptxlab", "numpy", "__future__"} | set(sys.stdlib_module_names), module
        if package == "ptxlab" and steps[0] != here:
            assert steps[0] in PTXLAB_MAY_IMPORT[here], f"{module} must not need {name}"


def test_one_module_imports_ptxlab() -> None:
    importing = {
        module
        for module in MODULES
        if any(name.split(".")[0] == "ptxlab" for name in imported_names(parse(module), module))
    }
    assert importing == {"runtime/emulation.py"}


def test_the_tests_of_ptxlab_take_of_flashsmith_only_the_way_to_nvcc() -> None:
    """What is about flashsmith's kernels, broken or not, is in tests/mutants."""
    for path in (Path(__file__).parent / "ptxlab").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {name for name in imported_names(tree, path.name) if "flashsmith" in name}
        assert imported <= {"flashsmith.builder.toolchain.find_toolchain"}, path


FOLDERS = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))
# What a path is made with, and what finds a file or a module by its name.
PATH_CALLS = {"Path", "files", "get_data", "import_module", "join", "joinpath", "open"}
_ANY_FOLDER = "|".join(FOLDERS)
_NAMED_FOLDER = re.compile(rf"(?:^|/)({_ANY_FOLDER})/\w|\bflashsmith\.({_ANY_FOLDER})\b")


def _name_of(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]


def named_folders(tree: ast.AST) -> set[str]:
    """Folders of the package that a module's strings name: as a path or a step of one, or dotted.

    Docstrings do not count, nor words that only are a folder's name.
    """
    prose, steps = set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            prose.add(node.value)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            steps += [node.left, node.right]
        elif isinstance(node, ast.Call) and _name_of(node.func) in PATH_CALLS:
            steps += node.args
    texts = {
        node: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose
    }
    found = {step for node in steps if node in texts for step in texts[node].split("/")}
    for text in texts.values():
        found.update(folder for match in _NAMED_FOLDER.findall(text) for folder in match)
    return found & set(FOLDERS)


def test_data_and_modules_named_by_strings_stand_left_too() -> None:
    wrong = {
        module: right
        for module in MODULES
        # The package's own __init__ is where a name on the left gets its home on the right.
        if module != "__init__.py"
        if (here := RANK[part_of(module)])
        if (right := [name for name in named_folders(parse(module)) if RANK[name] > here])
    }
    assert not wrong


@pytest.mark.parametrize(
    "code",
    [
        'TABLES = Path(__file__).parents[1] / "chooser" / "tables"',
        'TABLES = files("flashsmith") / "chooser/tables"',
        'TABLES = files("flashsmith.chooser") / "tables"',
        'TABLES = os.path.join(HERE, "..", "chooser", "tables")',
        'TABLES = pkgutil.get_data("flashsmith", "chooser/tables/h200.json")',
        'TABLES = f"{HERE}/../chooser/tables/{gpu}.json"',
        'shipped = import_module("flashsmith.chooser.shipped")',
    ],
)
def test_a_string_that_names_a_folder_is_seen(code: str) -> None:
    assert named_folders(ast.parse(code)) == {"chooser"}


@pytest.mark.parametrize(
    "code",
    [
        '"""Reads chooser/tables/h200.json."""',
        'print("chooser", "the chooser", "a chooser/table split")',
        'TABLES = Path(__file__).parent / "tables"',
    ],
)
def test_words_are_no_folders(code: str) -> None:
    assert not named_folders(ast.parse(code))


# Folders of csrc that families share, each with those whose files its own may include besides. The
# family folders are all others: each may include these, and no other family's.
CSRC_SHARED: dict[str, set[str]] = {
    "common": set(),
    "host": {"common"},
    "sm90": {"common", "host"},
    "sm90_forward": {"common", "host", "sm90"},
    "backward": {"common", "host"},
    "mla": {"common", "host"},
}
CSRC_MAY_INCLUDE: dict[str, set[str]] = {
    **CSRC_SHARED,
    **{family: set(CSRC_SHARED) for family in FAMILIES},
    # With separate_dq, its passes have the kernel of that family, too.
    "wgmma_backward": {*CSRC_SHARED, "wgmma_dq"},
    "roofline": {"common", "sm90"},
    "packaged": set(),
}


def wrong_includes(csrc: Path, allowed: Mapping[str, set[str]]) -> list[str]:
    """What C++ files include of folders that theirs may not include, or that are not allowed at
    all; an include is of the file's own folder or, as the compiler is told, of ``csrc``."""
    wrong = []
    for path in sorted(csrc.rglob("*")):
        if not path.is_file():
            continue
        name, here = path.relative_to(csrc).as_posix(), path.parent.relative_to(csrc).as_posix()
        if here not in allowed:
            wrong.append(f"{name}: a new folder; give it a place in CSRC_MAY_INCLUDE")
            continue
        text = path.read_text(encoding="utf-8")
        for included in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE):
            found = next((at for at in (path.parent, csrc) if (at / included).is_file()), None)
            if found is None:
                wrong.append(f"{name} includes {included}, which is not there")
                continue
            there = (found / included).resolve().parent.relative_to(csrc.resolve()).as_posix()
            if there not in {here, *allowed[here]}:
                wrong.append(f"{name} includes {included}, which is of {there}")
    return wrong


def test_cuda_sources_include_what_they_may() -> None:
    assert not wrong_includes(CSRC, CSRC_MAY_INCLUDE)


def test_an_include_of_the_wrong_folder_is_seen(tmp_path: Path) -> None:
    allowed = {"common": set[str](), "decode": {"common", "forward"}, "forward": {"common"}}
    sources = {
        "common/layout.cuh": '#include <cuda.h>\n#include "masks.cuh"\n',
        "common/masks.cuh": "",
        "decode/kernel.cuh": '#include "../forward/kernel.cuh"\n#include "common/masks.cuh"\n',
        "forward/kernel.cuh": '#include "../common/layout.cuh"\n',
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert wrong_includes(tmp_path, allowed) == []
    (tmp_path / "common" / "masks.cuh").write_text('  #  include "forward/kernel.cuh"\n')
    (tmp_path / "forward" / "kernel.cuh").write_text('#include "../decode/kernel.cuh"\n')
    (tmp_path / "decode" / "kernel.cuh").write_text('#include "gone.cuh"\n')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "new.cu").write_text("")
    assert wrong_includes(tmp_path, allowed) == [
        "common/masks.cuh includes forward/kernel.cuh, which is of forward",
        "decode/kernel.cuh includes gone.cuh, which is not there",
        "forward/kernel.cuh includes ../decode/kernel.cuh, which is of decode",
        "other/new.cu: a new folder; give it a place in CSRC_MAY_INCLUDE",
    ]


def import_graph(trees: Mapping[str, ast.AST]) -> dict[str, set[str]]:
    """Modules that each module imports anywhere: in functions and for type checkers too.

    What an import of a module runs of the packages above it does not count.
    """
    homes = {}
    for module in trees:
        steps = ["flashsmith", *Path(module).with_suffix("").parts]
        homes[".".join(steps[:-1] if steps[-1] == "__init__" else steps)] = module
    graph = {}
    for module, tree in trees.items():
        names = imported_names(tree, module)
        found = {homes.get(name) or homes.get(name.rpartition(".")[0]) for name in names}
        graph[module] = {home for home in found if home is not None}
    return graph


def circles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Sets of modules that all reach each other; a module by itself is none."""
    reached = {}
    for module in graph:
        seen: set[str] = set()
        pending = [module]
        while pending:
            new = graph[pending.pop()] - seen
            seen |= new
            pending += new
        reached[module] = seen
    found = {frozenset(m for m in seen if a in reached[m]) for a, seen in reached.items()}
    return {circle for circle in found if len(circle) > 1}


def test_no_modules_import_each_other() -> None:
    found = circles(import_graph({module: parse(module) for module in MODULES}))
    assert not found, f"modules that import each other: {[sorted(circle) for circle in found]}"


def test_a_circle_is_found_wherever_its_imports_stand() -> None:
    texts = {
        "__init__.py": "from flashsmith.a import one",
        "a.py": "def f():\n    from flashsmith.b.c import two",
        "b/__init__.py": "from . import d",
        "b/c.py": "if TYPE_CHECKING:\n    from . import d",
        "b/d.py": "import flashsmith.a\nimport os",
        "e.py": "from flashsmith import a\nfrom flashsmith.b import d, three",
    }
    graph = import_graph({module: ast.parse(text) for module, text in texts.items()})
    assert circles(graph) == {frozenset({"a.py", "b/c.py", "b/d.py"})}
    assert graph["e.py"] == {"a.py", "b/d.py", "b/__init__.py"}


FRAMEWORKS = {"torch", "cupy", "jax"}


def frameworks_known_to(tree: ast.AST, module: str) -> set[str]:
    """Frameworks that a module imports, if only when it is called, or tells by their names."""
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    roots = {name.split(".")[0] for name in imported_names(tree, module)}
    return (roots | {text for text in texts if isinstance(text, str)}) & FRAMEWORKS


def test_only_the_adapters_know_a_framework_in_the_runtime() -> None:
    known = {
        module: frameworks_known_to(parse(module), module)
        for module in MODULES
        if part_of(module) == "runtime"
    }
    adapters = {f"runtime/frameworks/{name}.py": {name} for name in FRAMEWORKS}
    assert {module: names for module, names in known.items() if names} == adapters


def test_torch_is_never_imported_with_a_module() -> None:
    for module in MODULES:
        if part_of(module) not in ("integrations", "parallel"):
            roots = {name.split(".")[0] for name in imported_names(parse(module), module, True)}
            assert "torch" not in roots, module


@pytest.mark.parametrize(
    "module", [name for name in MODULES if part_of(name) in ("operations", "families")]
)
def test_operations_and_families_need_the_standard_library_only(module: str) -> None:
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
    expected = {path.relative_to(CSRC) for path in CSRC.rglob("*") if path.is_file()}
    assert {Path("mma_sync/forward_kernel.cuh"), Path("host/bindings.cc")} <= expected
    assert {
        path.relative_to(installed / "csrc") for path in installed.rglob("csrc/*/*")
    } >= expected
    assert (installed / "py.typed").is_file()


def test_the_installed_wheel_is_for_this_platform_and_any_python() -> None:
    text = importlib.metadata.distribution("flashsmith").read_text("WHEEL")
    assert text is not None
    assert "Tag: py3-none-linux_x86_64" in text, "an older installation: reinstall it"


# --- families -------------------------------------------------------------------------------------

# May name a family: public re-exports, and where 'wgmma' is the instruction.
MAY_NAME_A_FAMILY = (
    "__init__.py",
    "families/__init__.py",
    "benchmark/roofline/",
)
FAMILY_NAMES = frozenset(FAMILIES)
CONFIG_CLASSES = frozenset(family.config_class.__name__ for family in FAMILIES.values())
HOUSE = [
    module
    for module in MODULES
    if not module.startswith(tuple(f"families/{name}/" for name in FAMILY_NAMES))
    and not module.startswith(MAY_NAME_A_FAMILY[2:])
    and module not in MAY_NAME_A_FAMILY
]


def named_families(tree: ast.AST, module: str) -> set[str]:
    """What of a module names one family: literals of names, config classes, imports from a folder.

    Prose may: a docstring or a message that mentions a family is no literal of its name.
    """
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in FAMILY_NAMES:
            found.add(node.value)
        elif isinstance(node, ast.Name) and node.id in CONFIG_CLASSES:
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and node.attr in CONFIG_CLASSES:
            found.add(node.attr)
    folders = tuple(f"flashsmith.families.{name}" for name in FAMILY_NAMES)
    for name in imported_names(tree, module):
        if name.startswith(folders) or name.split(".")[-1] in CONFIG_CLASSES:
            found.add(name)
    return found


def test_no_module_outside_a_family_names_one() -> None:
    for module in HOUSE:
        found = named_families(parse(module), module)
        assert not found, f"{module} names {sorted(found)}: ask cfg.family instead"


@pytest.mark.parametrize(
    "text",
    [
        'if cfg.FAMILY == "wgmma": pass',
        "isinstance(cfg, WgmmaForwardKernelConfig)",
        "isinstance(cfg, configs.FlashForwardKernelConfig)",
        "from flashsmith.families.mma_sync.rules import RULES",
        "from flashsmith.families import FlashForwardKernelConfig as Config",
        'TABLE = {"mma_sync": 0.1}',
    ],
)
def test_a_family_that_is_named_is_seen(text: str) -> None:
    assert named_families(ast.parse(text), "runtime/planted.py")
    assert not named_families(ast.parse('"""Of wgmma kernels."""'), "runtime/planted.py")


def test_every_family_has_the_same_files() -> None:
    files = {
        name: {path.name for path in (SOURCE / "families" / name).glob("*.py")}
        for name in FAMILY_NAMES
    }
    wanted = {"config.py", "rules.py", "sets.py", "search_space.py", "cost.py", "describe.py"}
    assert files == {name: {"__init__.py", *wanted} for name in FAMILY_NAMES}
