"""`flashsmith bits`: shows whether two kernels compute the same bits for a row, or else which
operation differs."""

from __future__ import annotations

from typing import Annotated

import typer

from flashsmith.benchmark.table import make_console, print_text
from flashsmith.cli.command import App
from flashsmith.cli.options import FAILED, Json, print_json

app = App()
_TEXT = "A short form, or a problem, which stands for the config that attention() takes for it."


@app.command("bits")
def compare_bits(
    first: Annotated[str, typer.Argument(metavar="A", help=_TEXT)],
    second: Annotated[
        str, typer.Argument(metavar="B", help="The other one, given in the same way.")
    ],
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            "--arch",
            metavar="GPU",
            help="H200, A100, sm_90, or a name as nvidia-smi prints it. Default: the first GPU "
            "that the configs run on; for two problems, this machine's GPU, or the A100.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show whether two kernels compute a row in the same order, or else the first operation that
    differs.

    Exit status 1 if an operation differs.
    """
    from flashsmith.chooser.orders import compare_orders

    comparison = compare_orders(first, second, device)
    if as_json:
        print_json(comparison.to_json())
    else:
        print_text(make_console(), str(comparison), indent=3)
    if comparison.difference is not None:
        raise typer.Exit(FAILED)
