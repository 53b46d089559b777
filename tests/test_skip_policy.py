"""The suite's own rules, in tests/conftest.py, tried on small suites."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

SUITE = """
import pytest

def test_plain():
    pass

@pytest.mark.full
def test_of_the_grid():
    pass

@pytest.mark.gpu
def test_on_the_device():
    raise AssertionError("must not run without a GPU")
"""

MARKERS = """
[pytest]
markers =
    full: x
    gpu: x
    torch: x
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    conftest = Path(__file__).with_name("conftest.py").read_text()
    pytester.makeconftest(conftest.replace('CDLL("libcuda.so.1")', 'CDLL("no-such-driver.so")'))
    pytester.makeini(MARKERS)
    shutil.copy(Path(__file__).with_name("shards.py"), pytester.path)
    monkeypatch.setenv("CI", "true")
    # Loading them takes longer than the suite.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return pytester


def run(suite: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return suite.runpytest_subprocess("-p", "no:cacheprovider", *arguments)


def test_a_plain_run_leaves_the_full_grid_out(suite: pytest.Pytester) -> None:
    suite.makepyfile(SUITE)
    result = run(suite)
    assert result.ret == 0
    result.assert_outcomes(passed=1, skipped=1, deselected=1)


def test_the_full_run_is_everything(suite: pytest.Pytester) -> None:
    suite.makepyfile(SUITE)
    run(suite, "-m", "full").assert_outcomes(passed=2, skipped=1)


def test_another_mark_still_leaves_the_full_grid_out(suite: pytest.Pytester) -> None:
    suite.makepyfile(SUITE)
    run(suite, "-m", "not gpu").assert_outcomes(passed=1, deselected=2)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_an_unlisted_skip_fails_the_run_in_ci(suite: pytest.Pytester, workers: str) -> None:
    suite.makepyfile("import pytest\ndef test_it():\n    pytest.skip('no mood')\n")
    result = run(suite, "-p", "xdist", "-n", workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*skips that CI does not accept*", "1 x no mood"])


@pytest.mark.parametrize("workers", ["0", "2"])
def test_an_unlisted_skip_of_a_whole_file_fails_the_run_in_ci(
    suite: pytest.Pytester, workers: str
) -> None:
    suite.makepyfile(
        test_good="def test_it():\n    pass\n",
        test_gone="import pytest\npytest.skip('not today', allow_module_level=True)\n",
    )
    result = run(suite, "-p", "xdist", "-n", workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["* x not today"])


@pytest.mark.parametrize("package", ["PyTorch", "transformers", "JAX", "psutil", "onnx", "CuPy"])
def test_a_missing_package_is_no_reason_to_skip_in_ci(suite: pytest.Pytester, package: str) -> None:
    if package == "JAX" and sys.version_info < (3, 11):
        return  # which cannot be installed there
    reason = f"needs {package}: it is not installed"
    suite.makepyfile(f"import pytest\ndef test_it():\n    pytest.skip({reason!r})\n")
    result = run(suite)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["pip install '.[[]test-all]'*", f"1 x {reason}"])


def test_an_unlisted_skip_is_accepted_outside_ci(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI")
    suite.makepyfile("import pytest\ndef test_it():\n    pytest.skip('no mood')\n")
    assert run(suite).ret == 0
