"""Puts Debian's Python for aarch64, and the packages that flashsmith requires, into a folder, to be
run by qemu-user.

    python tools/ci/aarch64_python.py FOLDER

FOLDER/system is what `qemu-aarch64 -L` takes, with usr/bin/python3; FOLDER/site has the packages.
It needs Debian's apt-get and dpkg-deb and an index of Python packages, but no root; the list of
packages of the system does not change.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
SYSTEM = (
    *("python3-minimal", "libpython3-stdlib", "libc6", "libstdc++6", "libgcc-s1", "zlib1g"),
    *("libexpat1", "libffi8", "libbz2-1.0", "liblzma5", "libuuid1"),
)
TESTS = ("pytest", "pytest-timeout", "hypothesis")


def install_system(folder: Path) -> None:
    """Unpacks the packages of Debian."""
    for name in ("lists/partial", "cache/archives/partial", "debs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    options = [
        *("-o", "APT::Architecture=arm64", "-o", "APT::Architectures=arm64"),
        *("-o", f"Dir::State::Lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"),
        *("-o", "APT::Sandbox::User=root", "-qq"),
    ]
    subprocess.run(["apt-get", *options, "update"], check=True)
    found = [*SYSTEM, *_dependencies(options)]
    debs = folder / "debs"
    subprocess.run(["apt-get", *options, "download", *found], cwd=debs, check=True)
    for deb in sorted(debs.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(deb), str(folder / "system")], check=True)


def _dependencies(options: list[str]) -> list[str]:
    """The packages of the minor version of Python, such as python3.11-minimal."""
    shown = subprocess.run(
        ["apt-cache", *options, "depends", "python3-minimal", "libpython3-stdlib"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    named = {line.split()[-1] for line in shown.splitlines() if "Depends:" in line}
    versioned = sorted(name for name in named if "python3." in name)
    (minimal,) = [name for name in versioned if name.endswith("-minimal")]
    return [*versioned, f"lib{minimal}"]


def python_version(folder: Path) -> str:
    """The minor version of the unpacked Python, such as '3.11'."""
    (found,) = (folder / "system" / "usr" / "bin").glob("python3.[0-9]*[0-9]")
    return found.name.removeprefix("python")


def install_packages(folder: Path) -> None:
    """Installs what flashsmith requires, and what its tests require."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    platforms = [f"--platform={it}_aarch64" for it in ("manylinux_2_28", "manylinux_2_17")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary=:all:"]
    where = ["--target", str(folder / "site"), "--python-version", python_version(folder)]
    wanted = [*project["dependencies"], *TESTS]
    legacy = "--platform=manylinux2014_aarch64"
    subprocess.run([*pip, *platforms, legacy, *where, *wanted], check=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    target = Path(sys.argv[1]).absolute()
    install_system(target)
    install_packages(target)
