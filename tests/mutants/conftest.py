"""Makes this folder's helper modules, and those of the tests of ptxlab and of bits, importable by
its tests; gives the tests of mutant_suite.py the suite of the file that imports them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(_TESTS / "ptxlab"), str(_TESTS / "bits")]
pytest.register_assert_rewrite("mutant_suite")

from mutant_suite import MutantSuite  # noqa: E402


@pytest.fixture
def suite(request: pytest.FixtureRequest) -> MutantSuite:
    """That of the test's file."""
    return request.module.SUITE


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "suite" in metafunc.fixturenames:
        parameters = metafunc.module.SUITE.parameters_of(metafunc.function.__name__)
        if parameters is not None:
            metafunc.parametrize(*parameters)
