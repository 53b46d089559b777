"""A kernel package in miniature, as tests build and install it: two kernels for sm_80."""

from __future__ import annotations

import zipfile
from pathlib import Path

from flashsmith.builder.package_build import build_package
from flashsmith.builder.package_wheel import write_wheels
from flashsmith.chooser import choose
from flashsmith.families import Semantics
from flashsmith.host import this_cpu

ARCH = 80
# Host tensors of these problems run on the package's kernels, in the emulator.
PROBLEMS = ("b1 s64 h1 d64 fp16", "b1 s64 h1 d64 fp16 causal")


def contents() -> dict[Semantics, list]:
    """The package's kernels."""
    found: dict[Semantics, list] = {}
    for words in PROBLEMS:
        choice = choose(words, ARCH)
        semantics = choice.problem.required_semantics(choice.config)
        found.setdefault(semantics, []).append(choice.config)
    return found


def build_wheel(
    folder: Path, *, jobs: int | None = None, csrc: Path | None = None, ptx: bool = True
) -> Path:
    """Builds the package's wheel in ``folder``."""
    libraries = build_package(contents(), arch=ARCH, jobs=jobs, csrc=csrc)
    (wheel,) = write_wheels(libraries, ARCH, this_cpu(), folder, ptx=ptx)
    return wheel


def unpack(wheel: Path, folder: Path) -> Path:
    """Installs a wheel in ``folder``, as pip would; returns the package's folder."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder / "flashsmith_kernels" / f"sm{ARCH}"
