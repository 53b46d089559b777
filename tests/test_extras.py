"""A bare install runs what is built; what an extra brings is named where it is missing."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from built_wheel import build_wheel
from documents import DOCUMENTS

import flashsmith
from flashsmith.builder import cache_path, library_for
from flashsmith.builder.cache_folder import MARKER
from flashsmith.families.device import KNOWN_DEVICES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "flashsmith"
# What the extra 'cli' brings.
CLI = ("jinja2", "rich", "typer")
# What attention() may reach.
RUNTIME = (
    *(SOURCE / name for name in ("families", "builder", "runtime", "chooser")),
    ROOT / "src" / "ptxlab",
)


def run_python(code: str, without: tuple[str, ...] = CLI) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` where importing the packages ``without`` fails."""
    prepare = f"import sys; sys.modules.update(dict.fromkeys({without!r}))\n"
    return subprocess.run(
        [sys.executable, "-c", prepare + code], capture_output=True, text=True, timeout=300
    )


def roots_of_imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("folder", RUNTIME, ids=lambda folder: folder.name)
def test_the_runtime_imports_nothing_of_the_command(folder: Path) -> None:
    for path in folder.rglob("*.py"):
        assert not roots_of_imports(path) & set(CLI), path


SERVE = """
import os
import numpy as np
import flashsmith
from flashsmith.builder import toolchain

# No compiler: neither pip's nor one on PATH.
toolchain._pip_nvcc = lambda: None
os.environ["PATH"] = "/nowhere"
os.environ.pop("CUDA_HOME", None)

assert flashsmith.choose("b2 s128 h4 d64 fp16 causal", "H200").ms > 0
q = k = v = np.ones((1, 64, 1, 64), np.float16)
assert (flashsmith.attention(q, k, v) == 1).all()
other = flashsmith.parse_kernel_name_into_config("(FP16, 64, 128, 64, 8): load_0_0_2_tiles")
os.environ["FLASHSMITH_CACHE_DIR"] = {empty!r}
try:
    flashsmith.forward(other, *[np.ones((1, 128, 1, 64), np.float16)] * 3)
except flashsmith.errors.ToolchainError as error:
    print(error)
"""


def test_a_server_needs_neither_the_command_nor_a_compiler(tmp_path: Path) -> None:
    library_for([flashsmith.choose("b1 s64 h1 d64 fp16", 80).config])
    done = run_python(SERVE.format(empty=str(tmp_path)))
    assert done.returncode == 0, done.stderr
    assert "the extra 'compiler' brings one" in done.stdout
    assert "pip install '.[compiler]'" in done.stdout


BUILD = """
from flashsmith.builder import build
from flashsmith.families import parse_kernel_name_into_config

stages = []
build(
    [parse_kernel_name_into_config("(FP16, 64, 64, 32, 4): load_0_0_0_tiles")],
    progress=lambda event: stages.append(event.stage),
)
print(*stages)
"""


@pytest.mark.full
def test_a_build_needs_nothing_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "cache"))
    done = run_python(BUILD)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "done"
    assert "compile" in done.stdout


# Jinja2 is asked for where the report is written: tests/benchmark/report/test_page.py.
@pytest.mark.parametrize("missing", ["rich", "typer"])
def test_the_command_without_its_packages_is_one_line(missing: str) -> None:
    done = run_python("from flashsmith.__main__ import main; main()", (missing,))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"the command needs {missing}" in done.stderr
    assert "'cli'" in done.stderr
    assert "pip install '.[cli]'" in done.stderr


VERIFY = """
from flashsmith.builder import toolchain
from flashsmith.__main__ import main

toolchain._pip_nvcc = lambda: None
sys.argv = ["flashsmith", *{words!r}]
main()
"""


def test_a_servers_image_verifies_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has neither the command's packages nor a compiler."""
    library = library_for([flashsmith.choose("b1 s64 h1 d64 fp16", 80).config])
    image = tmp_path / cache_path().name / library.path.parent.name / library.path.name
    shutil.copytree(library.path, image)
    shutil.copy(cache_path() / MARKER, tmp_path / cache_path().name)
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    verify = VERIFY.format(words=["cache", "verify"])
    done = run_python(verify)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 library, 0 damaged\n", "")

    (damaged,) = image.glob("*.so")
    damaged.chmod(0o644)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    done = run_python(verify)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.endswith("1 library, 1 damaged\n")

    version = run_python(VERIFY.format(words=["-V"]))
    assert version.stdout == f"flashsmith {flashsmith.__version__}\n"
    other = run_python(VERIFY.format(words=["cache", "list"]))
    assert other.returncode == 2
    assert "'flashsmith cache verify'" in other.stderr


def test_a_module_of_our_own_that_is_missing_is_no_missing_package() -> None:
    done = run_python("from flashsmith.__main__ import main; main()", ("flashsmith.cli",))
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~; ]", one)[0] for one in requirements}


def test_what_the_extras_hold() -> None:
    base, extras = names(project()["dependencies"]), project()["optional-dependencies"]
    assert base == {
        *("apache-tvm-ffi", "cuda-pathfinder", "ml_dtypes", "msgspec", "numpy", "platformdirs")
    }
    assert names(extras["cli"]) == set(CLI)
    nvcc = "cuda-toolkit[nvcc,nvvm,crt,cudart,cccl]"
    assert names(extras["compiler"]) == {"flashsmith[cli]", nvcc}
    for extra in ("test", "models", "bench"):
        assert "flashsmith[compiler]" in extras[extra]


def test_each_known_architecture_has_an_extra_with_its_compiled_kernels() -> None:
    """They are of this very version, as the wheels themselves want."""
    extras, version = project()["optional-dependencies"], project()["version"]
    archs = {device.arch for device in KNOWN_DEVICES}
    found = {name: pinned for name, pinned in extras.items() if re.fullmatch(r"sm\d+", name)}
    assert found == {f"sm{it}": [f"flashsmith-kernels-sm{it}=={version}"] for it in archs}


def test_the_command_is_the_one_that_names_its_extra() -> None:
    assert project()["scripts"] == {"flashsmith": "flashsmith.__main__:main"}


def test_advice_works_from_a_checkout() -> None:
    """No package index has the name, and an extra that advice names exists."""
    texts = [*SOURCE.rglob("*.py"), *DOCUMENTS]
    extras = project()["optional-dependencies"]
    for path in texts:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pip install '?flashsmith\b", text), path
        named = re.findall(r"install_extra\(['\"]([\w-]+)['\"]\)", text)
        named += re.findall(r"pip install [^\n`]*\.\[([\w,-]+)\]", text)
        for extra in ",".join(named).split(",") if named else []:
            assert extra in extras, path


@pytest.mark.full
def test_a_wheel_is_for_linux_on_x86_64_and_has_every_file(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    assert re.fullmatch(r"flashsmith-[\d.]+-py3-none-linux_x86_64\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as packed:
        held = {Path(name) for name in packed.namelist()}
    # CUDA sources, tables, the report's templates: whatever modules read stands beside them.
    files = {
        path
        for package in ("flashsmith", "ptxlab")
        for path in (ROOT / "src" / package).rglob("*")
        if path.is_file() and path.suffix not in (".md", ".pyc")
    }
    assert {path.relative_to(ROOT / "src") for path in files} <= held


@pytest.mark.full
def test_the_suite_is_collected_without_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the README's test command: modules that need PyTorch are skipped, no errors."""
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", str(ROOT / "tests")]
    monkeypatch.setenv("CI", "false")  # which would refuse the skips
    found = run_python(f"import pytest; sys.exit(pytest.main({options!r}))", ("torch",))
    assert found.returncode == 0, found.stdout[-3000:]
