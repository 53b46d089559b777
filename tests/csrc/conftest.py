"""The pretended library that the tests of the host code share, built once."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hopper_plans import CONFIGS
from pretended_library import PretendedLibrary, build_pretended_library


@pytest.fixture(scope="session")
def built_library(tmp_path_factory: pytest.TempPathFactory) -> PretendedLibrary:
    return build_pretended_library(tmp_path_factory.mktemp("pretended"), CONFIGS)


@pytest.fixture
def library(built_library: PretendedLibrary) -> PretendedLibrary:
    """With one GPU on which nothing was done yet."""
    built_library.reset()
    return built_library


@pytest.fixture
def fresh_library(
    built_library: PretendedLibrary, tmp_path: Path
) -> Callable[[], PretendedLibrary]:
    """Makes another one, with nothing remembered from earlier tests."""

    def make() -> PretendedLibrary:
        copy = tmp_path / "library.so"
        shutil.copy(built_library.path, copy)
        fresh = PretendedLibrary(copy, CONFIGS)
        fresh.reset()
        return fresh

    return make
