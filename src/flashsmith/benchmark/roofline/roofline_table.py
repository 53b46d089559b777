"""Prints a roofline as a table, and reads it from such a table."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rich.console import Console

from flashsmith.benchmark.roofline.roofline import SCALE, Ceiling, Roofline
from flashsmith.benchmark.table import make_columns, print_table, print_text
from flashsmith.errors import ArgumentError

_COLUMNS = make_columns(
    "ceiling | what~ | rate> | unit | per SM\nand clock> | MHz> | W> | spread\n%> | error> | note~"
)

_WHAT = {
    "matmul": "cuBLAS, 8192^3, through PyTorch",
    "mma_registers": "mma.sync m16n8k16, operands in registers",
    "mma_shared_16_rows": "mma.sync fed by ldmatrix, 16 rows a warp",
    "mma_shared_32_rows": "mma.sync fed by ldmatrix, 32 rows a warp",
    "wgmma_n128": "wgmma m64n128k16, both operands in shared memory",
    "wgmma_n256": "wgmma m64n256k16, both operands in shared memory",
    "exp2": "ex2.approx",
    "l2_read": "L2, read",
    "dram_read": "DRAM, read",
}


def describe(key: str) -> str:
    """What a ceiling measures, in words; the key itself if the ceiling is unknown."""
    name, _, dtype = key.rpartition("_")
    if dtype in ("fp16", "bf16"):
        return f"{_WHAT.get(name, name)}, {dtype}"
    return _WHAT.get(key, key)


def print_roofline(console: Console, roofline: Roofline) -> None:
    """Prints the ceilings as a table, then the GPU and the environment."""
    print_table(console, _COLUMNS, [_row(ceiling) for ceiling in roofline.ceilings])
    environment = roofline.environment
    facts = [f"{roofline.gpu} (sm_{roofline.arch}, {roofline.sm_count} SMs)"]
    for name in ("driver", "torch", "flashsmith", "revision"):
        if environment.get(name):
            facts.append(f"{name} {environment[name]}")
    print_text(console, f"{', '.join(facts)}; {roofline.time}")


# The heading of the first column, by which parse_roofline() recognises the table.
_KEY = _COLUMNS[0].heading
_MEASURED_ON = re.compile(
    r"(?P<gpu>\S.*) \(sm_(?P<arch>\d{1,9}), (?P<sms>\d{1,9}) SMs\)(?P<rest>.*); (?P<time>\S+)",
    re.ASCII,
)
# Only this many characters are searched, because the search takes quadratic time. print_roofline()
# prints far fewer below the table.
_MOST_BELOW = 4000


def parse_roofline(text: str) -> Roofline | None:
    """Reads the roofline, in the printed precision, from the output that print_roofline() writes
    when not on a terminal; returns None for any other text."""
    lines = text.splitlines()
    below = " ".join(line for line in lines if line[:1] != "|")
    measured = _MEASURED_ON.search(below[:_MOST_BELOW])
    facts: dict[str, dict[str, str]] = {}
    headings: list[str] = []
    for line in lines:
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells[:1] == [_KEY]:
            headings = cells
        elif cells and len(cells) == len(headings) and cells[0] and not set(cells[0]) <= set("-:"):
            facts.setdefault(cells[0], {}).update(zip(headings, cells, strict=True))
    if measured is None or not facts:
        return None
    try:
        found = Roofline(
            gpu=measured["gpu"],
            arch=int(measured["arch"]),
            sm_count=int(measured["sms"]),
            time=measured["time"],
            environment=dict(
                part.split(" ", 1) for part in measured["rest"].split(", ")[1:] if " " in part
            ),
            ceilings=tuple(_parsed(key, cells) for key, cells in facts.items()),
        )
        # This makes the same checks as for a JSON file.
        return Roofline.from_json(found.to_json())
    except (KeyError, ValueError, ArgumentError):
        return None


def _parsed(key: str, found: Mapping[str, str]) -> Ceiling:
    def figure(heading: str, scale: float = 1.0) -> float | None:
        text = found.get(heading, "")
        return float(text) * scale if text else None

    if found["unit"] not in SCALE:
        raise ValueError(found["unit"])
    error, noted = found.get("error", ""), found.get("note", "")
    return Ceiling(
        key=key,
        unit=found["unit"],
        rate=figure("rate"),
        spread=figure("spread %", 0.01),
        sm_clock_mhz=figure("MHz"),
        power_w=figure("W"),
        per_sm_clock=figure("per SM and clock"),
        error=0.0 if error == "exact" else float(error) if error else None,
        wrong=noted.startswith("WRONG: "),
        note=noted.removeprefix("WRONG: "),
    )


def _row(ceiling: Ceiling) -> tuple[str, ...]:
    return (
        ceiling.key,
        describe(ceiling.key),
        _number(ceiling.rate, 2 if ceiling.unit == "TB/s" else 0),
        ceiling.unit,
        _number(ceiling.per_sm_clock, 1 if (ceiling.per_sm_clock or 0) < 1000 else 0),
        _number(ceiling.sm_clock_mhz, 0),
        _number(ceiling.power_w, 0),
        _number(100 * ceiling.spread if ceiling.spread is not None else None, 1),
        f"{ceiling.error:.1e}" if ceiling.error else "" if ceiling.error is None else "exact",
        f"WRONG: {ceiling.note}" if ceiling.wrong else ceiling.note,
    )


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
