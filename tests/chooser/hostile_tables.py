"""Tables of winners that are none: about a hundred by hand, and any number by chance.

Each is a function that makes something at a path; none is a table without a flaw.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from winner_samples import BIG, tuned_table

Make = Callable[[Path], object]

ESCAPE = "\x1b[31mred\x07\r\x9b2J"
# What a value of JSON may be replaced by, whatever it was.
VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "zero": 0,
    "minus one": -1,
    "a fraction": 0.5,
    "a huge whole number": 10**290,
    "a huge number": 1.7e308,
    "a tiny number": 5e-324,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "no text": "",
    "a word": "word",
    "spaces": " " * 20_000,
    "long": "x" * 50_000,
    "escapes": ESCAPE,
    "bidirectional": "\u202eabc\u2066",
    "NUL": "\0",
    "other digits": "٩٠",
    "an empty list": [],
    "a list": [1, "a", None],
    "an empty object": {},
    "an object": {"a": [{}]},
    "a nest": [[[[[[[[]]]]]]]],
}
# Where it is put in a good table.
PLACES: tuple[tuple[Any, ...], ...] = (
    ("schema",), ("environments",), ("entries",), ("entries", 0), ("environments", "ENV"),
    ("environments", "ENV", "time"), ("environments", "ENV", "csrc"),
    ("environments", "ENV", "revision"),
    *(
        ("entries", 0, name)
        for name in (
            "gpu", "arch", "dtype", "d_head", "semantics", "seq_q", "seq_k", "batch_heads",
            "problem", "ranked",
        )
    ),
    ("entries", 0, "ranked", 0),
    *(
        ("entries", 0, "ranked", 0, name)
        for name in ("family", "config", "ms", "tflops", "environment")
    ),
)  # fmt: skip


def good() -> dict[str, Any]:
    """A table's JSON; its only environment is called ENV."""
    data = tuned_table().to_json()
    (name,) = data["environments"]
    text = json.dumps(data).replace(f'"{name}"', '"ENV"')
    found: dict[str, Any] = json.loads(text)
    return found


def put(data: Any, place: tuple[Any, ...], value: Any) -> Any:
    """The same with ``value`` at a place; whatever is not there to hold it stays."""
    data = copy.deepcopy(data)
    inner = data
    with contextlib.suppress(TypeError, KeyError, IndexError):
        for step in place[:-1]:
            inner = inner[step]
        inner[place[-1]] = value
    return data


def text_of(data: Any) -> Make:
    return lambda path: path.write_text(json.dumps(data))


def raw(content: str | bytes) -> Make:
    content = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return lambda path: path.write_bytes(content)


def changed(*changes: tuple[tuple[Any, ...], Any]) -> Make:
    data = good()
    for place, value in changes:
        data = put(data, place, value)
    return text_of(data)


def at_entry(name: str, value: Any) -> Make:
    return changed((("entries", 0, name), value))


def at_first(name: str, value: Any) -> Make:
    return changed((("entries", 0, "ranked", 0, name), value))


GOOD_TEXT = json.dumps(good())


def edited(old: str, new: str) -> Make:
    assert old in GOOD_TEXT
    return raw(GOOD_TEXT.replace(old, new, 1))


FIRST: tuple[Any, ...] = ("entries", 0, "ranked", 0)


def _files() -> dict[str, Make]:
    """What is no file of JSON."""
    return {
        "empty": raw(""),
        "a NUL": raw("\0"),
        "binary": raw(bytes(range(256)) * 40),
        "a library": raw(b"\x7fELF\x02\x01\x01" + bytes(2000)),
        "UTF-16": raw(GOOD_TEXT.encode("utf-16")),
        "Latin-1": raw(GOOD_TEXT.replace("H200", "H\xfc").encode("latin-1")),
        "an encoded surrogate": raw(GOOD_TEXT.replace("H200", "\ud800")),
        "truncated": raw(GOOD_TEXT[: len(GOOD_TEXT) // 2]),
        "a byte short": raw(GOOD_TEXT[:-1]),
        "twice": raw(GOOD_TEXT * 2),
        "with comments": raw("// mine\n" + GOOD_TEXT),
        "single quotes": raw(GOOD_TEXT.replace('"', "'")),
        "Python": raw(str(good())),
        "HTML": raw("<html><body>404</body></html>"),
        "deep lists": raw("[" * 100_000),
        "closed deep lists": raw("[" * 100_000 + "]" * 100_000),
        "deep objects": raw('{"schema":' * 50_000 + "1" + "}" * 50_000),
        "a deep entry": edited('"H200"', "[" * 900 + "]" * 900),
        "a deep environment": edited('"ENV": {', '"ENV": {"x": ' + 99 * "[" + 99 * "]" + ", "),
        "5,000 digits": edited('"arch": 90', '"arch": ' + "9" * 5000),
        "minus 5,000 digits": edited('"seq_q": 4096', '"seq_q": -' + "4" * 5000),
        "a fraction of 5,000 digits": edited('"ms": 5.7', '"ms": 5.' + "7" * 5000),
        "an exponent of 5,000 digits": edited('"ms": 5.7', '"ms": 1e' + "7" * 5000),
        "a lone surrogate": edited('"H200"', r'"\ud800"'),
        "a lone surrogate as a name": raw(GOOD_TEXT.replace('"ENV"', r'"\udfff"')),
        "schema twice": raw('{"schema": 1, ' + GOOD_TEXT[1:]),
        "ms twice": edited('"ms": 5.7', '"ms": 5.7, "ms": 1'),
        "a folder": lambda path: path.mkdir(),
        "a pipe": lambda path: os.mkfifo(path),
        "a device": lambda path: path.symlink_to("/dev/zero"),
        "nothing there": lambda path: path.symlink_to("/dev/null"),
        "a loop": lambda path: path.symlink_to(path),
        "a link to nowhere": lambda path: path.symlink_to(path.parent / "gone.json"),
        "a process's file": lambda path: path.symlink_to("/proc/self/environ"),
    }  # fmt: skip


def _tables() -> dict[str, Make]:
    """JSON whose parts do not belong together."""
    many = [dict(good()["entries"][0], gpu=ESCAPE)] * 300
    ranked = good()["entries"][0]["ranked"]
    return {
        "null": raw("null"),
        "a number": raw("1"),
        "a text": raw('"table"'),
        "a list": raw("[1, 2]"),
        "an empty object": raw("{}"),
        "no entries": raw('{"schema": 1}'),
        "no schema": raw('{"entries": []}'),
        "schema 0": changed((("schema",), 0)),
        "schema 2": changed((("schema",), 2)),
        "schema 1.0": changed((("schema",), 1.0)),
        "schema '1'": changed((("schema",), "1")),
        "entries by name": changed((("entries",), {"a": good()["entries"][0]})),
        "entries as a text": changed((("entries",), "entries")),
        "environments as a list": changed((("environments",), [["ENV", {}]])),
        "environments as a text": changed((("environments",), "ENV")),
        "no environments": changed((("environments",), {})),
        "300 entries of a hostile GPU": changed((("entries",), many)),
        "no bucket": at_entry("seq_q", 3000),
        "a negative size": at_entry("seq_q", -4096),
        "a size of 300 digits": at_entry("batch_heads", 2**990),
        "an architecture of 300 digits": at_entry("arch", 10**299),
        "uneven twice": at_entry("semantics", "packed+uneven+uneven"),
        "two masks": at_entry("semantics", "causal+window"),
        "a problem of 5,000 digits": at_entry("problem", f"b1 s{'9' * 5000} h1 d128 fp16"),
        "an immense problem": at_entry("problem", "b9 s9 h9 d128 fp16".replace("9", "9" * 18)),
        "an empty problem": at_entry("problem", "b0 s0 h1 d128 fp16"),
        "a problem without heads": at_entry("problem", "b1 s1 h0 d128 fp16"),
        "a problem of no d_head": at_entry("problem", "b1 s1 h1 d7777 fp16"),
        "other digits in the problem": at_entry("problem", "b1 s١٢ h1 d128 fp16"),
        "1,200 configs": at_entry("ranked", ranked * 400),
        "a config of spaces": at_first("config", "(FP16, 128, 64, 64, 4):" + " " * 20_000 + "!"),
        "a config of brackets": at_first("config", "(" * 20_000),
        "a config of 5,000 digits": at_first("config", f"(FP16, {'9' * 5000}, 64, 64, 4): async"),
        "a config with an escape": at_first("config", BIG + ESCAPE),
        "a config of no warps": at_first("config", BIG.replace(", 4)", ", 0)")),
        "an illegal config": at_first("config", BIG.replace("64, 4)", "2147483647, 1)")),
        "a config of another d_head": at_first("config", BIG.replace("FP16, 128", "FP16, 64")),
        "a config of another family": at_first("family", "wgmma"),
        "ms as a text": at_first("ms", "5.7"),
        "ms as a list": at_first("ms", [5.7]),
        "times beyond all": changed(((*FIRST, "ms"), 1e300), ((*FIRST, "tflops"), 1e-300)),
        "a time that is an object": changed((("environments", "ENV", "time"), {"a": 1})),
        "a time with escapes": changed((("environments", "ENV", "time"), ESCAPE)),
        "a hostile revision": changed((("environments", "ENV", "revision"), "csrc " + ESCAPE)),
    }  # fmt: skip


# Texts for FLASHSMITH_TABLE; {} stands for a folder that may be written.
HOSTILE_PATHS = (
    "/", ".", "{}", "{}/", "{}/..", "~nobody-of-that-name/winners.json", "{}/" + "x" * 300,
    "{}/" + "x/" * 3000, "/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", "/etc/passwd/x",
    "{}/\x1b[31mred\x07.json", "{}/line\nfeed.json", "{}/\udcff.json",
)  # fmt: skip
HOSTILE_TABLES: dict[str, Make] = _files() | _tables()
# Every kind of value at every place: too many for every run.
REPLACED_TABLES: dict[str, Make] = {
    f"{what} at {'.'.join(map(str, place))}": changed((place, value))
    for place in PLACES
    for what, value in VALUES.items()
}


def random_table(draw: random.Random) -> str:
    """A good table's text with a few values or characters replaced at random."""
    data = good()
    for _ in range(draw.randint(1, 4)):
        data = put(data, draw.choice(PLACES), draw.choice(list(VALUES.values())))
    text = json.dumps(data)
    for _ in range(draw.choice((0, 0, 1, 3))):
        at = draw.randrange(len(text))
        text = text[:at] + draw.choice('{}[]",:0-9eE.\\\x00\x1bu') + text[at + draw.randint(0, 2) :]
    return text
