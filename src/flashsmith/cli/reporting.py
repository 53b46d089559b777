"""`flashsmith progression` and `report`: what measurements say, as tables, pictures and a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashsmith.benchmark.progress import Narrator
from flashsmith.benchmark.table import make_console
from flashsmith.benchmark.target import choose_target
from flashsmith.cli.options import FAILED, Arch, Json, Kernels, print_json, selected

app = typer.Typer()


@app.command("progression")
def progression(
    kernels: Kernels = None,
    arch: Arch = None,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Leave the GPU alone: no times.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the ladder into FILE, a .png or .svg."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    as_json: Json = False,
) -> None:
    """The ladder: each step's time and share of FlashAttention-2, and what it changed.

    Instructions and bank conflicts come from the emulator, registers and spills from the compiler;
    times need a GPU. Without --kernels and KERNELS: prog, seven steps of one optimisation each.
    """
    from flashsmith.benchmark.charts import check_picture_path

    if plot is not None:
        check_picture_path(plot)
    with Narrator() as narrator:
        narrator.say("looking up kernels and compiler")
        configs = selected(kernels, default="prog")
        target = choose_target(arch, emulate)
        from flashsmith.benchmark.progression.climb import climb

        ladder = climb(configs, target, timer=None, environment={}, seed=seed, narrator=narrator)
    if plot is not None:
        from flashsmith.benchmark.charts import LIGHT, save_chart
        from flashsmith.benchmark.progression.plot import draw_ladder

        save_chart(draw_ladder(ladder, LIGHT), plot)
    if as_json:
        print_json(ladder.to_json())
    else:
        from flashsmith.benchmark.progression.table import print_ladder

        print_ladder(make_console(), ladder)
    if not ladder.ok:
        raise typer.Exit(FAILED)
