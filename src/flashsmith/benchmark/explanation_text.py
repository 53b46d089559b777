"""An explanation as text: sections with small tables, for terminals and pipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from rich.console import Console
from rich.text import Text

from flashsmith.benchmark.explain import Explanation
from flashsmith.benchmark.table import make_columns, print_table, print_text
from flashsmith.families.order import order_name


def print_explanation(console: Console, explanation: Explanation) -> None:
    """Prints an explanation, with the most general parts first."""
    cfg = explanation.config
    print_text(console, str(cfg), style="bold")
    print_text(console, f"on {explanation.target}")
    _rules(console, explanation)
    _knobs(console, explanation)
    _order(console, explanation)
    _shared_memory(console, explanation)
    _compiler(console, explanation)
    _occupancy(console, explanation)
    _intensity(console, explanation)
    _instructions(console, explanation)
    _conflicts(console, explanation)


def _section(console: Console, title: str) -> None:
    console.print()
    print_text(console, title, style="bold")


def _rules(console: Console, explanation: Explanation) -> None:
    verdict = "legal" if explanation.legal else "ILLEGAL"
    _section(console, f"Rules: {verdict}")
    print_table(
        console,
        make_columns("holds | rule | here~ | what it requires~"),
        [
            (
                Text("yes", "green") if rule.holds else Text("NO", "bold red"),
                rule.name,
                rule.values,
                rule.reason,
            )
            for rule in explanation.rules
        ],
    )
    if explanation.nearest:
        console.print("nearest legal configs:")
        for cfg in explanation.nearest:
            print_text(console, f"  {cfg}", indent=4)


def _knobs(console: Console, explanation: Explanation) -> None:
    _section(console, "Knobs")
    print_table(
        console,
        make_columns("knob | value | what it does~ | where in csrc/"),
        [(k.knob, k.value, k.effect, k.where) for k in explanation.knobs],
    )


def _order(console: Console, explanation: Explanation) -> None:
    order = explanation.order
    if order is None:
        return
    _section(console, f"Order of operations on a row: {order_name(explanation.config)}")
    rows = [(field.name.replace("_", " "), getattr(order, field.name)) for field in fields(order)]
    print_table(console, make_columns("operation | how~"), rows)


def _shared_memory(console: Console, explanation: Explanation) -> None:
    _section(console, f"Shared memory: {explanation.config.smem_bytes():,} bytes per CTA")
    print_table(
        console,
        make_columns("tile | from> | to> | rows x columns>"),
        [
            (
                region.tile,
                f"{region.begin:,}",
                f"{region.end:,}",
                f"{region.rows} x {region.columns}" if region.rows else "",
            )
            for region in explanation.smem
        ],
    )


def _compiler(console: Console, explanation: Explanation) -> None:
    kernel = explanation.kernel
    if kernel is None:
        return
    cfg = kernel.config
    _section(console, "Compiler")
    lines = [
        f"registers per thread  {cfg.family.registers_in_words(cfg, kernel.registers)}",
        "spilled bytes         "
        f"{kernel.spill_store_bytes} stored, {kernel.spill_load_bytes} loaded",
        f"stack bytes           {kernel.stack_bytes}",
        f"machine code          {kernel.code_bytes:,} bytes",
        f"compile time          {kernel.compile_seconds:.1f} s of nvcc",
        *(f"ptxas warns           {warning}" for warning in kernel.warnings),
    ]
    for one in kernel.beside:
        lines += [
            f"also launches         {one.role}: {one.registers} registers, spilled bytes "
            f"{one.spill_store_bytes} stored, {one.spill_load_bytes} loaded",
            *(f"ptxas warns           {one.role}: {warning}" for warning in one.warnings),
        ]
    print_text(console, "\n".join(lines), indent=22)


def _occupancy(console: Console, explanation: Explanation) -> None:
    found = explanation.occupancy
    if found is None:
        return
    _section(console, f"Occupancy: {found.ctas_per_sm} CTAs, {found.warps_per_sm} warps per SM")
    print_table(
        console,
        make_columns("resource | room for CTAs> | "),
        [
            (name, str(ctas), "limits" if name in found.limited_by else "")
            for name, ctas in found.limits.items()
        ],
    )


def _intensity(console: Console, explanation: Explanation) -> None:
    found = explanation.intensity
    if found is None:
        return
    _section(console, "Arithmetic intensity, FLOP per byte")
    console.print(
        f"from shared memory  {found.shared:.1f}\nfrom global memory  {found.global_memory:.1f}",
        markup=False,
    )


def _instructions(console: Console, explanation: Explanation) -> None:
    static, facts, verdict = explanation.static_mix, explanation.facts, explanation.verdict
    if static is None or facts is None or facts.instructions is None or verdict is None:
        return
    dynamic = facts.instructions
    _section(console, f"Instructions: in the PTX, and executed by all warps on {verdict.problem}")
    print_table(
        console,
        make_columns("class | PTX> | > | executed> | >"),
        [
            (
                name,
                f"{static.get(name, 0):,}",
                _share(static, name),
                f"{dynamic.get(name, 0):,}",
                _share(dynamic, name),
            )
            for name in sorted({*static, *dynamic}, key=lambda name: -dynamic.get(name, 0))
        ],
    )


def _share(mix: Mapping[str, int], name: str) -> str:
    return f"{mix.get(name, 0) / sum(mix.values()):.1%}"


def _conflicts(console: Console, explanation: Explanation) -> None:
    facts, verdict = explanation.facts, explanation.verdict
    if facts is None or verdict is None:
        return
    _section(console, "Bank-conflict factors (1.0: none)")
    print_table(
        console,
        make_columns("access | factor>"),
        [
            (use, "-" if factor is None else f"{factor:.2f}")
            for use, factor in facts.conflicts.items()
        ],
    )
    console.print()
    print_text(console, f"Proof: {verdict}")
