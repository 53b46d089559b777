"""A package that brings a family: registered for a test in this process, installed for others."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
# The package lies here, and the stand-ins for a GPU beside.
sys.path[:0] = [str(HERE), str(HERE.parent / "benchmark"), str(HERE.parent / "tuning")]


@pytest.fixture
def first_row() -> Iterator[ModuleType]:
    """The package, registered as by its import and forgotten after the test."""
    from flashsmith.builder import kernel_cache
    from flashsmith.families import FAMILIES
    from flashsmith.operations import OPERATIONS

    before = dict(FAMILIES), dict(OPERATIONS)
    package = importlib.import_module("first_row")
    package.register()
    yield package
    for registry, known in zip((FAMILIES, OPERATIONS), before, strict=True):
        registry.clear()
        registry.update({name: it for name, it in known.items() if name != "first_row"})
    # No process but this has seen its libraries and then not known the family.
    kernel_cache._parsed.cache_clear()


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """Environment variables of a process for which the package is installed, as pip does it."""
    import os

    facts = tmp_path / "site" / "first_row-0.1.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: first-row\nVersion: 0.1\n")
    (facts / "entry_points.txt").write_text(
        "[flashsmith.families]\nfirst_row = first_row:register\n"
    )
    source = HERE.parents[1] / "src"
    path = os.pathsep.join(map(str, (source, HERE, facts.parent)))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "120"}
