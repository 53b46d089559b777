"""The wheel of this checkout, and a place where nothing else of the checkout is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Besides src/: the metadata, and what setup.py makes the description with.
BUILT_FROM = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE", "tools/docs/links.py")


def build_wheel(folder: Path) -> Path:
    """Builds the wheel in ``folder``, from a copy: setuptools leaves a build folder behind."""
    source, wheels = folder / "source", folder / "wheels"
    # The links of src/ are followed.
    shutil.copytree(ROOT / "src", source / "src")
    (source / "tools" / "docs").mkdir(parents=True)
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(wheels)]
    subprocess.run([*pip, str(source)], check=True, timeout=300)
    (wheel,) = wheels.iterdir()
    return wheel


def install_wheel(wheel: Path, folder: Path) -> Path:
    """Installs ``wheel`` alone into a new environment, which borrows every other package of this
    one; returns the environment's folder of programs."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Behind the environment's own packages. What is installed here as editable stays out: .pth
    # files of a borrowed folder are not read.
    borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    options = ["--quiet", "--no-deps", "--ignore-installed", str(wheel)]
    subprocess.run([*pip, *options], check=True, timeout=300)
    return folder / "bin"
