"""Driver calls with a stream, against functions that cuda.h declares."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flashsmith.builder import find_toolchain
from flashsmith.errors import LaunchError
from flashsmith.runtime import driver

SOURCE = Path(__file__).parent / "stream_driver.cc"
GPU, STREAM = 0, 77


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    made = tmp_path_factory.mktemp("driver") / "library.so"
    include = Path(find_toolchain().nvcc).parents[1] / "include"
    subprocess.run(["g++", "-shared", "-fPIC", f"-I{include}", SOURCE, "-o", made], check=True)
    return ctypes.CDLL(str(made))


@pytest.fixture(autouse=True)
def _loaded(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(driver, "_load", lambda: library)
    driver._function_on_stream.cache_clear()
    yield
    driver._function_on_stream.cache_clear()


def address_of(array: np.ndarray) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("longest", [2**31 - 1, 39, 23])
@pytest.mark.parametrize("rows", [0, 1, 2, 5])
def test_rows_are_copied_from_their_steps_to_theirs(
    rows: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one where a step is longer than the driver takes."""
    monkeypatch.setattr(driver, "_LONGEST_STEP", longest)
    source = np.random.default_rng(rows).integers(1, 256, (5, 24), np.uint8)
    to = np.zeros((5, 40), np.uint8)
    driver.copy_rows(address_of(to), 40, address_of(source), 24, 17, rows, GPU, STREAM)
    expected = np.zeros_like(to)
    expected[:rows, :17] = source[:rows, :17]
    np.testing.assert_array_equal(to, expected)


@pytest.mark.parametrize("value", [3, 2**31 + 5, 2**32 - 1, 2**32 + 3])
def test_a_word_is_waited_for_until_it_is_large_enough(value: int) -> None:
    word = np.zeros(1, np.uint32)
    at = address_of(word)
    driver.words([(at, value - 1)], [], GPU, STREAM)
    assert word[0] == (value - 1) % 2**32
    with pytest.raises(LaunchError, match="cuStreamBatchMemOp_v2: CUDA error 600: planted words"):
        driver.words([], [(at, value)], GPU, STREAM)
    for reached in (value, value + 1, value + 2**30):
        driver.words([(at, reached)], [], GPU, STREAM)
        driver.words([], [(at, value)], GPU, STREAM)


def test_several_words_are_written_before_others_are_waited_for() -> None:
    words = np.zeros(5, np.uint32)
    at = [address_of(words) + 4 * number for number in range(5)]
    driver.words([(at[0], 7), (at[3], 9)], [(at[3], 9), (at[0], 5)], GPU, STREAM)
    np.testing.assert_array_equal(words, [7, 0, 0, 9, 0])
    with pytest.raises(LaunchError, match="CUDA error 600"):
        driver.words([(at[1], 2)], [(at[0], 7), (at[4], 1)], GPU, STREAM)
    driver.words([], [], GPU, STREAM)
    assert words[1] == 2


def test_without_a_driver_the_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_load", lambda: None)
    with pytest.raises(LaunchError, match="cuMemcpyAsync: no NVIDIA driver or GPU"):
        driver.copy(0, 0, 1, GPU, STREAM)
