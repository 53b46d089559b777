"""A kernel library that was built with one release of tvm-ffi runs with the others of its ABI.

Serving engines pin a release each; libraries that an image brings must not be built again there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shared_kernels
from built_wheel import build_wheel, install_wheel
from dependency_ranges import lowest

from flashsmith.builder import find_library, library_lookup
from flashsmith.builder.library_spec import LibrarySpec
from flashsmith.builder.sources import package_sources
from flashsmith.builder.toolchain import Toolchain, find_toolchain, tvm_ffi_abi
from flashsmith.families import Semantics, parse_kernel_name_into_config

CONFIG = parse_kernel_name_into_config("(FP16, 64, 64, 32, 4): load_0_0_0_tiles")
shared_kernels.want([CONFIG])
FLOOR, PINNED = "0.1.9", ("0.1.10", "0.1.11")


@pytest.mark.parametrize(
    ("version", "abi"),
    [("0.1.9", "0.1"), ("0.1.15.post2", "0.1"), ("0.2.0rc1", "0.2"), ("1.0", "1.0")],
)
def test_the_abi_is_in_the_first_two_numbers(version: str, abi: str) -> None:
    assert tvm_ffi_abi(version) == abi


def spec(toolchain: Toolchain, version: str) -> LibrarySpec:
    tools = replace(toolchain, tvm_ffi_version=version)
    return LibrarySpec((CONFIG,), 80, Semantics(), package_sources(), "0" * 64, tools)


def test_releases_of_one_abi_share_libraries_and_host_code() -> None:
    toolchain = find_toolchain()
    keys = {
        version: (spec(toolchain, version).key(), spec(toolchain, version).object_key("0"))
        for version in (FLOOR, "0.1.15.post2", "0.2.0")
    }
    assert keys[FLOOR] == keys["0.1.15.post2"]
    assert not {*keys[FLOOR]} & {*keys["0.2.0"]}


def test_a_cached_library_is_found_under_each_release_of_its_abi(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = shared_kernels.load([CONFIG])
    for version in (FLOOR, *PINNED, "0.1.15.post2"):
        monkeypatch.setattr(library_lookup, "tvm_ffi_version", lambda version=version: version)
        assert find_library(CONFIG) is not None
        assert library_lookup.is_current(library.manifest)
    monkeypatch.setattr(library_lookup, "tvm_ffi_version", lambda: "0.2.0")
    assert find_library(CONFIG) is None
    assert not library_lookup.is_current(library.manifest)


# --- separate environments ------------------------------------------------------------------------

# Plans, launches in the emulator, and has both errors cross from the library into Python.
CALL = f"""
import importlib.metadata, json, sys
import numpy as np
import tvm_ffi
import flashsmith
from flashsmith import DType, Problem, device_spec
from flashsmith.builder import find_library
from flashsmith.errors import LaunchError
from flashsmith.runtime.prepared_call import unplaced_call
from flashsmith.runtime.libraries import load_library

assert tvm_ffi.__file__.startswith(sys.prefix), tvm_ffi.__file__
assert flashsmith.__file__.startswith(sys.prefix), flashsmith.__file__
config = flashsmith.parse_kernel_name_into_config({str(CONFIG)!r})
random = np.random.default_rng(0)
q, k, v = (random.standard_normal((1, 64, 2, 64)).astype(np.float16) for _ in range(3))
o = flashsmith.forward(config, q, k, v)
scores = np.einsum("bqhd,bkhd->bhqk", q, k, dtype=np.float64) / 8
weights = np.exp(scores - scores.max(-1, keepdims=True))
expected = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)
problem = Problem(1, 64, 64, 2, 2, 64, DType.FP16)
plan = flashsmith.plan_forward(config, problem, device_spec("A100"))
library = find_library(config)
kernel = load_library(library)[config]
refusals = []
try:
    kernel.functions.plan()
except ValueError as error:
    refusals.append(str(error))
call = unplaced_call(problem, device_spec("A100"), 0.125)
try:
    kernel.prepare(call, 4095)(0, *call.addresses)
except LaunchError as error:
    refusals.append(str(error))
print(json.dumps(dict(
    installed=importlib.metadata.version("apache-tvm-ffi"),
    built_with=library.manifest.tvm_ffi_version,
    key=library.manifest.key,
    error=float(abs(o - expected).max()),
    o=o.tobytes().hex(),
    plan=repr(plan),
    refusals=refusals,
)))
"""


class Environment:
    """A virtual environment with this checkout's wheel and packages of its own, such as a release
    of tvm-ffi; every other package is borrowed."""

    def __init__(self, wheel: Path, folder: Path, *requirements: str) -> None:
        self.python = install_wheel(wheel, folder) / "python"
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet"]
        options = ["--no-deps", "--ignore-installed", *requirements]
        subprocess.run([*pip, *options], check=True, timeout=300)

    def call(self, cache: Path, *, may_build: bool) -> dict[str, Any]:
        """What CALL prints with the libraries of a cache."""
        environment = os.environ | {
            "FLASHSMITH_CACHE_DIR": str(cache),
            "FLASHSMITH_JIT": "1" if may_build else "0",
            "CUDA_VISIBLE_DEVICES": "",
            # Old releases of cuda-pathfinder do not search borrowed folders.
            "CUDA_HOME": str(find_toolchain().nvcc.parents[1]),
        }
        done = subprocess.run(
            [str(self.python), "-P" if sys.version_info >= (3, 11) else "-s", "-c", CALL],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Environment]:
    """One for each release that engines pin, and one with the newest that the range holds. The one
    with the floor has the floors of all other ranges, too."""
    folder = tmp_path_factory.mktemp("releases")
    wheel = build_wheel(folder)
    requirements = {version: [f"apache-tvm-ffi=={version}"] for version in PINNED}
    requirements |= {FLOOR: lowest("cli"), "newest": ["apache-tvm-ffi<0.2"]}
    return {
        release: Environment(wheel, folder / release, *texts)
        for release, texts in requirements.items()
    }


@pytest.mark.full
@pytest.mark.parametrize("builder", [FLOOR, "newest"])
def test_a_library_of_one_release_runs_with_the_others(
    environments: dict[str, Environment], builder: str, tmp_path: Path
) -> None:
    built = environments[builder].call(tmp_path, may_build=True)
    assert built["built_with"] == built["installed"]
    assert built["error"] < 2e-3
    too_few, launch = built["refusals"]
    assert "fewer arguments than the call takes" in too_few
    assert "on GPU 4095: " in launch
    assert "cudaError" in launch
    installed = {built["installed"]}
    for release in environments.keys() - {builder}:
        loaded = environments[release].call(tmp_path, may_build=False)
        installed.add(loaded["installed"])
        assert loaded == built | {"installed": loaded["installed"]}
    assert len(installed) == len(environments)
    assert installed > {FLOOR, *PINNED}


@pytest.mark.full
def test_the_command_runs_with_the_floors_of_all_ranges(
    environments: dict[str, Environment], tmp_path: Path
) -> None:
    command = [str(environments[FLOOR].python), "-m", "flashsmith", "cache", "list"]
    variables = os.environ | {"FLASHSMITH_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "0 libraries" in done.stdout


@pytest.mark.full
def test_the_floors_find_the_compiler_that_pip_installs(
    environments: dict[str, Environment], tmp_path: Path
) -> None:
    """cuda-pathfinder 1.5.0 does not know the folder of CUDA 13's wheels, nor 1.3.0 the search."""
    python = environments[FLOOR].python
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    nvcc = packages / "nvidia" / "cu13" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    program = "from flashsmith.builder import toolchain; print(toolchain._pip_nvcc())"
    command = [str(python), "-c", program]
    variables = os.environ | {"PATH": "/nowhere"}
    variables.pop("CUDA_HOME", None)
    found = subprocess.run(
        command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert found.stdout == f"{nvcc}\n", found.stderr
