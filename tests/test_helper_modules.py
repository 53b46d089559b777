"""Helpers of tests: tests import them by their names alone, from folders that stay on sys.path."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path


def test_every_helper_module_has_a_name_of_its_own() -> None:
    found: dict[str, list[Path]] = defaultdict(list)
    tests = Path(__file__).parent
    for path in tests.rglob("*.py"):
        if not path.name.startswith(("test_", "__init__", "conftest")):
            found[path.name].append(path.relative_to(tests))
    assert len(found) > 50
    assert not {name: paths for name, paths in found.items() if len(paths) > 1}
