"""`flashsmith roofline`: what this GPU can do, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashsmith.benchmark.progress import Narrator
from flashsmith.benchmark.table import make_console
from flashsmith.cli.options import FAILED, Json, print_json
from flashsmith.errors import ArgumentError

app = typer.Typer()


@app.command("roofline")
def roofline(
    show: Annotated[
        bool, typer.Option("--show", help="Print what was measured before; needs no GPU.")
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --show: another GPU's than this machine's first."),
    ] = None,
    ms: Annotated[
        float, typer.Option(help="How long one timed launch takes, in milliseconds.")
    ] = 50.0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Also write the JSON there."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure this GPU's own ceilings and store them: products, exponentials, L2 and DRAM.

    About fifteen seconds. Exit status 1 when a microbenchmark's output is wrong.
    """
    from flashsmith.benchmark.roofline import load_roofline, save_roofline, stored_rooflines
    from flashsmith.benchmark.roofline.roofline_table import print_roofline

    if show:
        found = load_roofline(gpu)
        if found is None:
            known = ", ".join(repr(one.gpu) for one in stored_rooflines()) or "none"
            raise ArgumentError(
                f"gpu={gpu!r}: nothing was measured of it here; measured are: {known}. "
                "On the GPU's machine, run 'flashsmith roofline'"
            )
    elif gpu is not None:
        raise ArgumentError(f"gpu={gpu!r}: goes with --show; this machine's first GPU is measured")
    else:
        from flashsmith.benchmark.roofline.measuring import measure_roofline

        with Narrator() as narrator:
            found = measure_roofline(ms, narrator.step)
            narrator.say(f"stored in {save_roofline(found)}")
    if output is not None:
        save_roofline(found, output)
    if as_json:
        print_json(found.to_json())
    else:
        print_roofline(make_console(), found)
    if not found.ok:
        raise typer.Exit(FAILED)
