"""Files of results with something wrong: cells and values replaced, bytes damaged, at random."""

from __future__ import annotations

import contextlib
import copy
import csv
import io
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ablations import TIMED
from sample_rows import HOSTILE, PROFILED, ROOFLINE, bench_rows, search_rows, wrong_row

from flashsmith.benchmark.measurement_files import rows_as_csv, rows_as_json
from flashsmith.benchmark.ncu import write_profile

RAW = Path(__file__).parents[3] / "benchmarks" / "h200"
ESCAPE = "\x1b[31mred\x07\r\x9b2J"
MATH = r"$\frac{1}{$ and $x^$ \$ $$"
# What a cell of a CSV file may be replaced by.
TEXTS: tuple[str, ...] = (
    "", " ", "nan", "NaN", "inf", "-inf", "Infinity", "0", "-1", "1e999", "-1e-320", "1e18",
    "1e300", "9" * 18, "9" * 400, "9" * 5000, "1.5", "1_000", "0x10", "١٢", "²", "True", "None",
    "null", "[]", "pass", "fail", "error", "absent", "ours", "peer", "fa2", "plain",
    "causal+packed", "fp8", "rung ²", "rung " + "9" * 5000, "word", HOSTILE, ESCAPE, MATH, "$",
    "\u202e", "日本語 \U0001f600",
    "a\nb", "a\r\nb", '"', "x" * 500, "x" * 50_000, "x" * 200_000,
    "(FP16, 128, 128, 64, 4): " + " " * 20_000,
    "\0", "</script>", "=1+1",
)  # fmt: skip
# And a value of JSON.
VALUES: tuple[Any, ...] = (
    *TEXTS, None, True, False, 0, -1, 1, 0.5, 1e300, 5e-324, 10**17, 10**290, float("nan"),
    float("inf"), float("-inf"), [], [1], [[]], {}, {"a": 1}, {"ms": "x"}, [None], ["x"] * 300,
    [{}] * 300, {str(n): n for n in range(300)},
)  # fmt: skip


def good_files() -> dict[str, str]:
    """By name, the text of a sound file of every kind."""
    rows = [*bench_rows()[:8], wrong_row(), *search_rows()[:12]]
    tables, profile = io.StringIO(), io.StringIO()
    rows_as_csv(rows, tables)
    write_profile([PROFILED, PROFILED], profile)
    run = json.loads((RAW / "factory-run-prog.json").read_text())
    run["kernels"] = run["kernels"][:2]
    speed = (RAW / "semantics-speed.csv").read_text().splitlines(keepends=True)
    return {
        "rows.csv": tables.getvalue(),
        "rows.json": json.dumps(rows_as_json(rows)),
        "ablation.json": json.dumps(TIMED.to_json()),
        "roofline.json": json.dumps({**ROOFLINE.to_json(), "environment": asdict(PROFILED)}),
        "run.json": json.dumps(run),
        "profile.csv": profile.getvalue(),
        "speed.csv": "".join(speed[:6]),
    }


def damaged(name: str, text: str, draw: random.Random) -> bytes:
    """A sound file's text with one to three places damaged."""
    for _ in range(draw.randint(1, 3)):
        text = (_damaged_cell if name.endswith(".csv") else _damaged_value)(text, draw)
    return _damaged_bytes(text.encode("utf-8", "surrogatepass"), draw)


def _damaged_cell(text: str, draw: random.Random) -> str:
    rows = []
    with contextlib.suppress(csv.Error):  # what the damage before it has made
        rows = list(csv.reader(io.StringIO(text, newline="")))
    if not rows:
        return text
    line = draw.randrange(len(rows)) if draw.random() < 0.9 else 0
    row = rows[line]
    kind = draw.randrange(12)
    if not row or kind == 0:
        rows.insert(line, [] if draw.random() < 0.5 else [draw.choice(TEXTS)])
    elif kind == 1:
        del row[draw.randrange(len(row)) :]
    elif kind == 2:
        row += row
    elif kind == 3:
        rows.insert(line, list(row))
    elif kind == 4:  # a column goes, as in a file of an earlier version
        at = draw.randrange(len(row))
        rows = [cells[:at] + cells[at + 1 :] for cells in rows]
    else:
        row[draw.randrange(len(row))] = draw.choice(TEXTS)
    written = io.StringIO()
    try:
        csv.writer(written, lineterminator=draw.choice(("\n", "\n", "\r\n"))).writerows(rows)
    except csv.Error:  # Python 3.10 writes some damaged cells only with an escape character
        return text
    return written.getvalue()


def _damaged_value(text: str, draw: random.Random) -> str:
    try:
        data = copy.deepcopy(json.loads(text))
    except (ValueError, RecursionError):
        return text
    holder, inner, step = None, data, None
    while isinstance(inner, (dict, list)) and inner and (holder is None or draw.random() < 0.75):
        holder = inner
        step = draw.choice(list(inner)) if isinstance(inner, dict) else draw.randrange(len(inner))
        inner = inner[step]
    if holder is None:
        return json.dumps(draw.choice(VALUES))
    kind = draw.randrange(8)
    if kind == 0:
        del holder[step]
    elif kind == 1 and isinstance(holder, dict):
        holder[draw.choice((ESCAPE, HOSTILE, MATH, "", "x" * 5000, "schema", "kind"))] = inner
    elif kind == 2 and isinstance(holder, list):
        holder += holder[: draw.choice((1, 50))]
    elif kind == 3:
        return json.dumps(data).replace(json.dumps(inner), draw.choice(_RAW), 1)
    else:
        holder[step] = draw.choice(VALUES)
    return json.dumps(data)


# No value, but the text of one.
_RAW = (
    "9" * 5000,
    "-" + "9" * 400,
    r'"\ud800"',
    "[" * 3000 + "]" * 3000,
    "1e9999",
    "NaN",
    "",
    '{"a":1,"a":2}',
)


def _damaged_bytes(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(content) + 1)
    kind = draw.randrange(16)
    pieces = {0: b"\0", 1: b"\xff\xfe", 2: b'"', 3: b"\xed\xa0\x80", 4: b"\x1b[2J", 5: b"\r"}
    if kind in pieces:
        return content[:at] + pieces[kind] + content[at:]
    if kind == 6:
        return content[:at]
    if kind == 7:
        return b"\xef\xbb\xbf" + content
    with contextlib.suppress(UnicodeDecodeError):
        if kind == 8:
            return content.decode().encode("utf-16")
    return content
