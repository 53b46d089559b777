"""Folders of the kernels hub: what they hold, and how the package kernels and transformers load
them where flashsmith is not installed."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import shared_kernels

kernels = pytest.importorskip("kernels", reason="needs kernels: it is not installed")

from kernels._rust import Digest, DigestAlgorithm, Metadata  # noqa: E402
from kernels.variants import _resolve_variant_for_system, get_variants_local  # noqa: E402
from packaging.version import Version  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import flashsmith  # noqa: E402
from flashsmith.builder import library_for  # noqa: E402
from flashsmith.builder.package_build import build_package  # noqa: E402
from flashsmith.chooser import choose  # noqa: E402
from flashsmith.cli import app  # noqa: E402
from flashsmith.errors import ArgumentError  # noqa: E402
from flashsmith.families import Semantics, get_kernel_configs  # noqa: E402
from flashsmith.host import this_cpu  # noqa: E402
from flashsmith.integrations.hub_copy import copied_modules, relative_imports  # noqa: E402
from flashsmith.integrations.hub_folder import write_hub_folder  # noqa: E402

ARCH = 80
CALLS = Path(__file__).with_name("hub_calls.py")
# What hub_calls.py calls.
PROBLEMS = (
    "b2 s13 h2:1 d64 fp16 causal",
    "b2 s13 h2:1 d64 fp16 causal packed",
    "b2 s13 h2:1 d64 fp16 decode causal",
    "b2 s13 h2:1 d64 fp16 backward causal",
)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list:
    wanted: dict[Semantics, list] = {}
    for words in PROBLEMS:
        choice = choose(words, ARCH)
        semantics = choice.problem.required_semantics(choice.config)
        wanted.setdefault(semantics, []).append(choice.config)
    cache = shared_kernels.with_host_code(tmp_path_factory.mktemp("libraries") / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHSMITH_CACHE_DIR", str(cache))
        made = build_package(wanted, arch=ARCH)
    shared_kernels.keep_host_code(cache)
    return made


@pytest.fixture(scope="module")
def hub(libraries: list, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the hub, with PTX, so that its kernels run in the emulator."""
    folder = tmp_path_factory.mktemp("hub")
    write_hub_folder({ARCH: libraries}, this_cpu(), folder, ptx=True)
    return folder


def variant_of(folder: Path) -> Path:
    (variant,) = (folder / "build").iterdir()
    return variant


def metadata_of(folder: Path) -> Metadata:
    return Metadata.read_from_file(variant_of(folder) / "metadata.json")


# --- loaded --------------------------------------------------------------------------------------


def run_calls(hub: Path, tmp_path: Path, *arguments: str) -> None:
    environment = {
        **os.environ,
        "PATH": str(tmp_path),  # no compiler
        "HOME": str(tmp_path),
        "FLASHSMITH_CACHE_DIR": str(tmp_path / "cache"),
    }
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-P", str(CALLS), str(hub), *arguments],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.stdout.endswith("ok\n"), done.stdout + done.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.torch
def test_kernels_loads_it_offline_and_calls_are_right(hub: Path, tmp_path: Path) -> None:
    run_calls(hub, tmp_path)


@pytest.mark.full
@pytest.mark.torch
def test_a_model_of_transformers_generates_with_it(hub: Path, tmp_path: Path) -> None:
    run_calls(hub, tmp_path, "generate")


@pytest.mark.torch
def test_it_runs_beside_an_installed_flashsmith(hub: Path) -> None:
    """Its operators, kernels and errors are its own."""
    import numpy as np

    kernel = kernels.get_local_kernel(variant_of(hub))
    q = np.random.default_rng(1).standard_normal((2, 13, 2, 64)).astype(np.float16)
    ours = flashsmith.attention(q, q, q, causal=True)
    assert np.array_equal(kernel.attention(q, q, q, causal=True), ours)
    assert kernel.attention is not flashsmith.attention
    assert kernel.__version__ == flashsmith.__version__
    bundle = sys.modules[f"{kernel.__name__}.bundle"]
    assert bundle.OPERATORS == kernel.__name__ != flashsmith.bundle.OPERATORS
    assert kernel.errors.ArgumentError is not ArgumentError
    with pytest.raises(kernel.errors.ArgumentError, match=r"dropout_p=0\.5"):
        kernel.flash_attn_func(q, q, q, dropout_p=0.5)


def test_without_ptx_the_emulator_says_so(libraries: list, tmp_path: Path) -> None:
    import numpy as np

    kernel = kernels.get_local_kernel(write_hub_folder({ARCH: libraries}, this_cpu(), tmp_path))
    q = np.zeros((2, 13, 2, 64), np.float16)
    with pytest.raises(Exception, match=r"no PTX.* never compiled .*hub --ptx"):
        kernel.attention(q, q, q, causal=True)


# --- its layout ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda", "tvm_ffi", "cpu", "accepted"),
    [
        ("13.0", "0.1", this_cpu(), True),
        ("13.2", "0.1", this_cpu(), True),
        ("12.8", "0.1", this_cpu(), False),
        ("13.0", "0.2", this_cpu(), False),
        ("13.0", "0.1", "riscv64", False),
    ],
)
def test_it_is_for_one_cuda_tvm_ffi_and_processor(
    hub: Path, cuda: str, tvm_ffi: str, cpu: str, accepted: bool
) -> None:
    """The name of its only folder says so, to the resolver of the package kernels."""
    (variant,) = get_variants_local(hub / "build")
    assert variant.variant_str == f"tvm-ffi01-cu130-{this_cpu()}-linux"
    found, _ = _resolve_variant_for_system(
        variants=[variant],
        selected_backend=kernels.backends.CUDA(version=Version(cuda)),
        cpu=cpu,
        os="linux",
        torch_version=Version("2.13"),
        torch_cxx11_abi=True,
        tvm_ffi_version=Version(tvm_ffi),
    )
    assert bool(found) == accepted


def test_the_metadata_is_what_the_hub_reads(hub: Path) -> None:
    metadata = metadata_of(hub)
    assert re.fullmatch(r"_flashsmith_cuda_[0-9a-f]{12}", metadata.id)
    assert (metadata.name.python_name, metadata.version) == ("flashsmith", 1)
    assert metadata.license == "Apache-2.0 AND LicenseRef-NVIDIA-CUDA-Toolkit-EULA"
    assert metadata.python_depends == ["tvm-ffi"]
    assert metadata.backend.archs == ["8.0"]
    assert str(metadata.kernels_minver) == "0.17.0"
    variant = variant_of(hub)
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    (variant / "a new file").touch()
    try:
        with pytest.raises(Exception, match="a new file"):
            metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    finally:
        (variant / "a new file").unlink()


def test_kernels_of_hopper_are_for_hopper_alone(tmp_path: Path) -> None:
    (config,) = get_kernel_configs("hopper")[:1]
    library = library_for([config], arch=90)
    write_hub_folder({90: [library]}, this_cpu(), tmp_path)
    assert metadata_of(tmp_path).backend.archs == ["9.0a"]


def test_all_its_imports_are_its_own_or_required(hub: Path) -> None:
    """Within it, imports are relative and end at a file. Others are of Python's library, of what
    the metadata and the docs require, or of frameworks whose tensors a caller has."""
    required = {"tvm_ffi", "numpy"}
    frameworks = {"torch", "jax", "cupy", "typing_extensions"}
    optional = {"ml_dtypes", "platformdirs", "cuda"}  # for NumPy's bf16, and what copies never do
    variant = variant_of(hub)
    for path in variant.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                assert base.is_dir() or base.with_name(f"{base.name}.py").is_file(), path
                continue
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            for root in {name.partition(".")[0] for name in names}:
                known = root in sys.stdlib_module_names or root in required | frameworks | optional
                assert known, (path, root)


def test_imports_become_relative() -> None:
    text = "from flashsmith.env import x\nfrom flashsmith import bundle\nfrom ptxlab.ptx import p\n"
    assert relative_imports(text, "flashsmith.runtime.driver") == (
        "from ..env import x\nfrom .. import bundle\nfrom ..ptxlab.ptx import p\n"
    )
    assert relative_imports(text, "flashsmith.builder") == (
        "from ..env import x\nfrom .. import bundle\nfrom ..ptxlab.ptx import p\n"
    )
    assert relative_imports("from ptxlab.ptx import p\n", "ptxlab.checks.races") == (
        "from ...ptxlab.ptx import p\n"
    )
    with pytest.raises(ValueError, match="'import flashsmith' has no relative form"):
        relative_imports("import flashsmith\n", "flashsmith.env")


def test_a_copy_has_nothing_of_the_command_or_the_compiler_s_sources(hub: Path) -> None:
    names = set(copied_modules(["flashsmith.integrations.flash_attn"]))
    rooms = {name.partition("/")[0] for name in names}
    assert not rooms & {"cli", "benchmark", "tuning", "verify", "parallel"}
    assert "ptxlab" in rooms
    assert not [path for path in variant_of(hub).rglob("*") if path.suffix in (".cu", ".cuh")]


def test_the_same_libraries_give_the_same_bytes(libraries: list, hub: Path, tmp_path: Path) -> None:
    write_hub_folder({ARCH: libraries}, this_cpu(), tmp_path, ptx=True)
    names = [path.relative_to(hub) for path in hub.rglob("*") if "__pycache__" not in path.parts]
    for name in names:
        if (hub / name).is_file():
            assert (hub / name).read_bytes() == (tmp_path / name).read_bytes(), name
    write_hub_folder({ARCH: libraries}, this_cpu(), tmp_path)  # replaces it
    assert metadata_of(tmp_path).id != metadata_of(hub).id
    assert not list(variant_of(tmp_path).rglob("*.xz"))


def test_what_is_not_the_hub_s_is_not_replaced(libraries: list, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="libraries: none"):
        write_hub_folder({ARCH: []}, this_cpu(), tmp_path)
    taken = tmp_path / "build" / f"tvm-ffi01-cu130-{this_cpu()}-linux"
    taken.mkdir(parents=True)
    (taken / "mine").touch()
    with pytest.raises(ArgumentError, match=r"is no folder of the hub; name another place"):
        write_hub_folder({ARCH: libraries}, this_cpu(), tmp_path)
    assert [path.name for path in taken.iterdir()] == ["mine"]


def test_the_command_writes_a_folder_for_several_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [
        "--for",
        "sm_80",
        "--for",
        "86",
        "--only",
        "bf16 d128 merge packed",
        "-o",
        str(tmp_path),
    ]
    done = CliRunner().invoke(app, ["hub", *options])
    assert done.exit_code == 0, done.output
    assert re.search(r"\d kernels in \d libraries, in \d+ s; needs .*GLIBC 2", done.output), (
        done.output
    )
    assert metadata_of(tmp_path).backend.archs == ["8.0", "8.6"]
    indices = variant_of(tmp_path).glob("kernels/*/kernels.json")
    assert sorted(path.parent.name for path in indices) == ["sm80", "sm86"]
    metadata = json.loads((variant_of(tmp_path) / "metadata.json").read_text())
    assert metadata["backend"]["type"] == "cuda"
