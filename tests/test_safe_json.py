"""Files that others wrote: whatever they hold, they are read, or refused with one reason."""

from __future__ import annotations

import json
import math
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from flashsmith.safe_json import (
    MOST_DIGITS,
    MOST_LEVELS,
    UnusableTextError,
    parse_json,
    read_json,
    read_text,
    whole_number,
)


@pytest.mark.parametrize(
    ("text", "reason", "place"),
    [
        ("", "not JSON", ", line 1, column 1"),
        ("{", "not JSON", ", line 1, column 2"),
        ('{"a": 1,\n "b": }', "not JSON", ", line 2, column 7"),
        ("[1] [2]", "not JSON", ", line 1, column 5"),
        ('["\x1b[31m"]', "not JSON", ", line 1, column 3"),
        ("[" * 100_000, "nested more than 64 levels", ""),
        ("[" * 100_000 + "]" * 100_000, "nested more than 64 levels", ""),
        ("[" * (MOST_LEVELS + 1) + "]" * (MOST_LEVELS + 1), "nested more than 64 levels", ""),
        ('{"a":' * 500 + "1" + "}" * 500, "nested more than 64 levels", ""),
        ("[" + "7" * 5000 + "]", "a number of 5,000 digits", ""),
        ("-" + "7" * (MOST_DIGITS + 1), "a number of 302 digits", ""),
        ('{"a": 1, "b": 2, "a": 3}', "the name 'a' stands twice", ""),
        (r'{"\u001b[31m": 1, "\u001b[31m": 2}', r"the name '\x1b[31m' stands twice", ""),
        (r'["\ud800"]', "lone surrogate", ""),
        (r'{"\uDFFF": 1}', "lone surrogate", ""),
        ('["\udc80"]', "lone surrogate", ""),
    ],
)
def test_json_that_is_refused(text: str, reason: str, place: str) -> None:
    with pytest.raises(UnusableTextError) as caught:
        parse_json(text)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.place == place


@pytest.mark.parametrize(
    "value",
    [
        None, 3, -0.5, "text", [], {}, {"a": [1, {"b": None}]}, 10**MOST_DIGITS - 1,
        "\U0001f600 and \x1b[31m", "Ελλάς", [math.inf],
    ],
)  # fmt: skip
def test_other_json_is_read_as_it_is(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    for ascii_only in (True, False):
        path.write_text(json.dumps(value, ensure_ascii=ascii_only), encoding="utf-8")
        assert read_json(path) == value
    assert math.isnan(parse_json("NaN"))
    levels = "[" * MOST_LEVELS + "]" * MOST_LEVELS
    assert json.dumps(parse_json(levels)) == levels


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


KINDS = {
    "nothing": (lambda path: None, "No such file"),
    "a folder": (Path.mkdir, "Is a directory"),
    "a pipe": (make_fifo, "it is a pipe"),
    "a socket": (make_socket, "No such device|it is a socket"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "it is a device"),
    "a loop": (lambda path: path.symlink_to(path), "symbolic links"),
    "dangling": (lambda path: path.symlink_to(path.parent / "gone"), "No such file"),
    "no text": (lambda path: path.write_bytes(b"ok\n\xff\xfe"), "not UTF-8 text"),
    "too large": (lambda path: path.write_bytes(b"x" * 101), "more than 100 bytes"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_of_text(kind: str, tmp_path: Path) -> None:
    make, reason = KINDS[kind]
    make(tmp_path / "file")
    with pytest.raises(UnusableTextError, match=reason):
        read_text(tmp_path / "file", most_bytes=100)


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "\ud800"])
def test_what_is_no_path(path: str) -> None:
    with pytest.raises(UnusableTextError):
        read_text(path)


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("needs an ordinary user: root may write everywhere")
    path = tmp_path / "file"
    path.touch(0o000)
    with pytest.raises(UnusableTextError, match="Permission denied"):
        read_text(path)


def test_the_line_of_a_byte_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"one\ntwo\n\xc3\x28")
    with pytest.raises(UnusableTextError) as caught:
        read_text(tmp_path / "file")
    assert caught.value.place == ", line 3"


def test_a_mark_of_the_byte_order_is_no_text_and_a_symlink_is_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbfok")
    (tmp_path / "link").symlink_to("file")
    assert read_text(tmp_path / "link", most_bytes=5) == "ok"


def test_whole_numbers() -> None:
    assert [whole_number(text) for text in ("0", "007", "9" * 18)] == [0, 7, 10**18 - 1]
    for text in ("", "-1", "+1", " 1", "1_0", "1.0", "١٢", "²", "9" * 19, "1" * 5000):
        assert whole_number(text) is None
