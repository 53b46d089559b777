"""Packages for aarch64: cross-compiled, and called by that processor's Python under qemu-user."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import packaged_kernels
import pytest

from flashsmith.builder import find_toolchain
from flashsmith.builder.package_build import build_package
from flashsmith.builder.package_wheel import write_wheels
from flashsmith.builder.system_libraries import system_needs
from flashsmith.builder.toolchain import known_cpu
from flashsmith.errors import ArgumentError, ToolchainError

ROOT = Path(__file__).parents[2]
QEMU = "qemu-aarch64"
NEEDS = "needs qemu-user and g++-aarch64-linux-gnu: apt-get install both"
# Pure Python of the package and of its tests, which need no compiler.
CORE = ("tests/families/test_config_parsing.py",)

crosses = pytest.mark.skipif(
    not (shutil.which(QEMU) and shutil.which("aarch64-linux-gnu-g++")), reason=NEEDS
)


def test_another_processor_is_refused() -> None:
    with pytest.raises(ArgumentError, match="cpu='riscv64': allowed are x86_64 and aarch64"):
        known_cpu("riscv64")


def test_what_is_missing_for_another_processor_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashsmith.builder.toolchain.this_cpu", lambda: "x86_64")
    monkeypatch.delenv("FLASHSMITH_CROSS_CUDA", raising=False)
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if "aarch64" in name else which(name))
    with pytest.raises(ToolchainError, match="apt-get install g\\+\\+-aarch64-linux-gnu"):
        find_toolchain("aarch64")
    monkeypatch.setattr(
        shutil, "which", lambda name: which(name.removeprefix("aarch64-linux-gnu-"))
    )
    monkeypatch.setenv("FLASHSMITH_CROSS_CUDA", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"manylinux_2_17_aarch64 .*FLASHSMITH_CROSS_CUDA"):
        find_toolchain("aarch64")
    runtime = tmp_path / "nvidia" / "cu13" / "lib" / "libcudart_static.a"
    runtime.parent.mkdir(parents=True)
    runtime.touch()
    found = find_toolchain("aarch64")
    assert found.cuda_lib_dir == runtime.parent
    assert found.identity()[-1] == "aarch64"
    assert found.crosses


@pytest.mark.full
@pytest.mark.timeout(2400)
@crosses
def test_an_arm64_python_calls_installed_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its libraries' host code plans the calls; the emulator runs their PTX."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    platform = ["--platform", "manylinux_2_17_aarch64", "--target", str(tmp_path / "cuda")]
    subprocess.run([*pip, *platform, "nvidia-cuda-runtime==13.0.*"], check=True, timeout=300)
    monkeypatch.setenv("FLASHSMITH_CROSS_CUDA", str(tmp_path / "cuda"))
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "cache"))
    libraries = build_package(packaged_kernels.contents(), arch=80, cpu="aarch64")
    needs = system_needs(libraries[0].so_path.read_bytes())
    assert needs.symbols["dlsym"] == "GLIBC_2.17"
    (wheel,) = write_wheels(libraries, 80, "aarch64", tmp_path / "dist", ptx=True)
    assert wheel.name.endswith("manylinux_2_28_aarch64.whl")
    packaged_kernels.unpack(wheel, tmp_path / "site")

    machine = tmp_path / "machine"
    tool = [sys.executable, str(ROOT / "tools" / "ci" / "aarch64_python.py"), str(machine)]
    subprocess.run(tool, check=True, timeout=900)
    facts = Path(str(importlib.metadata.distribution("flashsmith").locate_file("")))
    for info in facts.glob("flashsmith-*.dist-info"):
        shutil.copytree(info, machine / "site" / info.name)
    system = machine / "system"
    python = [QEMU, "-L", str(system), str(system / "usr" / "bin" / "python3")]
    paths = (ROOT / "src", machine / "site", tmp_path / "site")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": str(tmp_path),
    }
    qemu = shutil.which(QEMU) or ""
    call = [qemu, *python[1:], str(ROOT / "tests" / "builder" / "bare_call.py")]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=800)
    assert done.stdout.startswith("ok "), done.stdout + done.stderr
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not gxx"]
    tests += ["-o", "addopts=--import-mode=importlib"]
    done = subprocess.run(
        [qemu, *python[1:], *tests, *CORE],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
