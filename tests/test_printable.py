"""What is printed of others' texts, and what every error of ours prints of them."""

from __future__ import annotations

import pickle

import pytest

from flashsmith import errors
from flashsmith.printable import printable, quoted

HOSTILE = "a\x1b[31mred\x07\r\x9b2J\x7f\u202eback\ud800\u2028line\nend"


def test_no_control_character_stays() -> None:
    shown = printable(HOSTILE)
    assert shown == r"a\x1b[31mred\x07\r\x9b2J\x7f\u202eback\ud800\u2028line\nend"
    assert printable(HOSTILE, lines=True) == shown.replace(r"\n", "\n")
    shown.encode()


@pytest.mark.parametrize("text", ["", "plain", "Ελλάς, 日本語, \U0001f600", "(FP16, 128): a+b"])
def test_what_is_printable_stays(text: str) -> None:
    assert printable(text) == text


def test_quotes_are_bounded() -> None:
    assert quoted("a\x1b") == r"'a\x1b'"
    assert quoted("x" * 20_000, most=5) == "'xxxxx'... (20,000 characters)"
    assert quoted([1] * 5000, most=5) == "[1, 1... (15,000 characters)"
    assert quoted((3, "a\x1b")) == r"(3, 'a\x1b')"


def test_no_value_is_beyond_quoting() -> None:
    class Unspeakable:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert quoted(Unspeakable()) == "<Unspeakable>"
    assert quoted(1 << 50_000) == "<int of 50,001 bits>"
    assert quoted([1 << 50_000]) == "<list>"


ERRORS = [
    error
    for error in vars(errors).values()
    if isinstance(error, type) and issubclass(error, errors.FlashsmithError)
]


@pytest.mark.parametrize("error", ERRORS)
def test_no_error_prints_a_control_character(error: type[errors.FlashsmithError]) -> None:
    assert len(ERRORS) > 10
    raised = error(HOSTILE)
    assert str(raised) == printable(HOSTILE, lines=True)
    assert str(pickle.loads(pickle.dumps(raised))) == str(raised)
