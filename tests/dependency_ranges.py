"""The package's requirements, as pyproject.toml has them, and their lower ends."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


def requirements(*extras: str) -> Iterator[Requirement]:
    """What the package and these extras of it require directly."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = list(project["dependencies"])
    for extra in extras:
        texts += project["optional-dependencies"][extra]
    return (one for one in map(Requirement, texts) if one.name != "flashsmith")


def lowest(*extras: str) -> list[str]:
    """Pins to the lowest release of each range, or to its patches if the range names no patch."""
    pins = []
    for one in requirements(*extras):
        floor = re.search(r">=([\d.]+)", str(one.specifier))
        if floor is not None:
            numbers = floor[1].split(".")
            exact = floor[1] if len(numbers) > 2 else ".".join([*numbers, "0"][:2]) + ".*"
            # There is no NumPy 1 for Python 3.13.
            marker = "; python_version < '3.13'" if one.name == "numpy" else ""
            pins.append(f"{one.name}=={exact}{marker}")
    return pins
