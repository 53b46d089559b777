"""The `flashsmith` command: reads arguments, calls one function of the package, prints."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from typing import Annotated, Any

import typer

from flashsmith import env
from flashsmith.benchmark.table import Column, make_console, print_table
from flashsmith.errors import FlashsmithError
from flashsmith.host import require_supported_host

VERDICT_FAILED = 1
USER_ERROR = 2

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Flash-attention kernels as configs: generate, compile, prove and measure them, "
    "on a GPU or with none.",
)

Kernels = Annotated[
    str | None,
    typer.Option(
        "--kernels",
        "-k",
        metavar="KEY",
        help="prog, prog-all, tune, cover, all, 'B_r,B_c', a set of yours, or short forms "
        "separated by ';'. Without it: the environment variable KERNELS.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"flashsmith {importlib.metadata.version('flashsmith')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Flash-attention kernels as configs."""


@app.command("env")
def show_environment(as_json: Json = False) -> None:
    """Every environment variable flashsmith reads, its value now and its default."""
    if as_json:
        _print_json(
            [
                {
                    "name": variable.name,
                    "value": variable.raw(),
                    "default": variable.default,
                    "meaning": variable.meaning,
                }
                for variable in env.VARIABLES
            ]
        )
        return
    print_table(
        make_console(),
        [Column("variable"), Column("now"), Column("default"), Column("meaning")],
        [
            (variable.name, variable.raw() or "", variable.default, variable.meaning)
            for variable in env.VARIABLES
        ],
    )


def main() -> None:
    """Entry point: a deliberate error becomes one message on stderr and exit status 2."""
    try:
        require_supported_host()
        app()
    except FlashsmithError as error:
        make_console(sys.stderr).print(f"flashsmith: {error}", style="red", markup=False)
        raise SystemExit(USER_ERROR) from None
