"""The `flashsmith` command: reads arguments, calls the package and prints the results.

Exit status 0 means success. Exit status 1 means that a kernel failed its proof or the cache is
damaged, and 2 means an error.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import flashsmith
from flashsmith import env
from flashsmith.benchmark.table import make_console, print_text
from flashsmith.cli import (
    benchmarks,
    bits,
    building,
    cache,
    choosing,
    demo,
    kernels,
    packaging,
    profiling,
    reporting,
    tuning,
)
from flashsmith.cli.command import App
from flashsmith.cli.options import ERROR
from flashsmith.errors import FlashsmithError
from flashsmith.host import require_supported_host

# Commands import the builder, the emulator and NumPy only when they need them, so that `--help`,
# `--version` and mistyped options respond at once.

app = App(
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Flash-attention kernels as configs: generate, compile, prove and measure them, with or "
    "without a GPU.",
)
for commands in (
    *(kernels, building, packaging, benchmarks),
    *(reporting, choosing, bits, profiling, tuning),
):
    app.add_typer(commands.app)
app.add_typer(cache.app, name="cache")
app.add_typer(demo.app, name="demo")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"flashsmith {flashsmith.__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "-V", "--version", callback=_show_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Flash-attention kernels as configs."""
    # Environment variables with invalid switches, numbers or orders are errors even in commands
    # that do not use these variables. Paths and KERNELS are checked when they are used. `env`
    # prints all variables before it checks them.
    if context.invoked_subcommand != "env":
        env.check_values()


def main() -> None:
    """Entry point.

    If a FlashsmithError or OSError occurs, prints its message on standard error and exits with
    status 2.
    """
    try:
        require_supported_host()
        app(prog_name="flashsmith")
    except (FlashsmithError, OSError) as error:
        print_text(make_console(sys.stderr), f"flashsmith: {error}", style="red")
        raise SystemExit(ERROR) from None
