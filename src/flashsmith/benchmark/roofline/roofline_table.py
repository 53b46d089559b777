"""A roofline on the console."""

from __future__ import annotations

from rich.console import Console

from flashsmith.benchmark.roofline.ceilings import Ceiling, Roofline
from flashsmith.benchmark.table import Column, print_table, print_text

_COLUMNS = (
    Column("ceiling"),
    Column("what", prose=True),
    Column("rate", right=True),
    Column("unit"),
    Column("per SM\nand clock", right=True),
    Column("MHz", right=True),
    Column("W", right=True),
    Column("spread\n%", right=True),
    Column("error", right=True),
    Column("note", prose=True),
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
    """What a ceiling is, in words; its own name for one that this version does not know."""
    name, _, dtype = key.rpartition("_")
    if dtype in ("fp16", "bf16"):
        return f"{_WHAT.get(name, name)}, {dtype}"
    return _WHAT.get(key, key)


def print_roofline(console: Console, roofline: Roofline) -> None:
    """The ceilings as a table, and what they were measured on."""
    print_table(console, _COLUMNS, [_row(ceiling) for ceiling in roofline.ceilings])
    environment = roofline.environment
    facts = [f"{roofline.gpu} (sm_{roofline.arch}, {roofline.sm_count} SMs)"]
    for name in ("driver", "torch", "flashsmith", "revision"):
        if environment.get(name):
            facts.append(f"{name} {environment[name]}")
    print_text(console, f"{', '.join(facts)}; {roofline.time}")


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
