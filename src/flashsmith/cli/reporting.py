"""`flashsmith progression` and `flashsmith report`: measurements as tables, charts and a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.table import make_console
from flashsmith.cli.command import App
from flashsmith.cli.options import (
    FAILED,
    Arch,
    Csv,
    Json,
    Jsonl,
    Kernels,
    Seed,
    print_json,
    selected,
)
from flashsmith.errors import ArgumentError
from flashsmith.pluralize import pluralize

app = App()


@app.command("progression")
def progression(
    kernels: Kernels = None,
    arch: Arch = None,
    seq: Annotated[int, typer.Option(min=1, help="Sequence length that is timed on a GPU.")] = 4096,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Do not use the GPU, and report no times.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the ablation into FILE, a .png or .svg."),
    ] = None,
    seed: Seed = 0,
    csv: Csv = None,
    jsonl: Jsonl = None,
    as_json: Json = False,
) -> None:
    """Run an ablation: time each step, compare it with FlashAttention-2, and show what changed.

    Instructions and bank conflicts come from the emulator, registers and spills from the compiler,
    and times from a GPU. Without --kernels and KERNELS, this runs prog, which has seven steps of
    one optimisation each.
    """
    from flashsmith.benchmark.measurement_files import MeasurementFiles
    from flashsmith.benchmark.progression_plot import check_picture_path

    if plot is not None:
        check_picture_path(plot)
    with ProgressReporter() as reporter, MeasurementFiles(csv, jsonl=jsonl) as files:
        reporter.say("looking up kernels and compiler")
        configs = selected(kernels, default="prog")
        from flashsmith.runtime.target import choose_target

        target = choose_target(arch, emulate, configs)
        from flashsmith.benchmark.progression import run_ablation

        ablation = run_ablation(
            configs,
            target,
            seq=seq,
            seed=seed,
            reporter=reporter,
            write=files.write if csv or jsonl else None,
        )
    if plot is not None:
        from flashsmith.benchmark.progression_plot import draw_ablation, save_picture

        save_picture(draw_ablation(ablation), plot)
    if as_json:
        print_json(ablation.to_json())
    elif not files.takes_stdout:
        from flashsmith.benchmark.progression_table import print_ablation

        print_ablation(make_console(), ablation)
    if not ablation.ok:
        raise typer.Exit(FAILED)


@app.command("report")
def report(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULTS...", help="Files that other commands wrote.")
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FILE", help="The page, an .html file.")
    ] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "flashsmith report",
) -> None:
    """Write measurements as one self-contained HTML page, and its charts as SVG files next to it.

    Reads what `bench`, `tune`, `progression`, `roofline`, `ncu` and `run --json` wrote; the kind of
    a file is recognised by its content.
    """
    from flashsmith.benchmark.measurement_files import require_writable
    from flashsmith.benchmark.report import (
        PASSED_OVER,
        make_page,
        read_results,
        with_stored_rooflines,
        write_page,
    )

    if out.suffix.lower() not in (".html", ".htm"):
        raise ArgumentError(
            f"out={str(out)!r}: give a file that ends in .html, such as report.html"
        )
    require_writable("out", out)
    with ProgressReporter() as reporter:
        found = with_stored_rooflines(read_results(results))
        for source in found.sources:
            if PASSED_OVER in source.what:
                reporter.say(f"{source.path}: {source.what}")
        if len(found.versions) > 1:
            reporter.say(
                f"rows of {len(found.versions)} versions: the latest measurement of each problem "
                "counts; the page lists all versions"
            )
        reporter.say(f"writing the page of {pluralize(len(found.rows), 'row')}")
        written = write_page(make_page(found, title), out)
    make_console().print(
        f"{out}, {out.stat().st_size / 1e6:.1f} MB, and {len(written) - 1} charts next to it",
        markup=False,
        soft_wrap=True,
    )
