"""What several commands share: options, exit statuses, selecting configs, printing JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from flashsmith import env
from flashsmith.benchmark.records import for_json
from flashsmith.families import KernelConfig, get_kernel_configs
from flashsmith.printable import printable

FAILED = 1
ERROR = 2

Kernels = Annotated[
    str | None,
    typer.Option(
        "--kernels",
        "-k",
        metavar="KEY",
        help="prog, prog-all, tune, space, cover, all, hopper, backward, hopper-backward, "
        "hopper-dq, decode, 'B_r,B_c', a set of yours, or short forms separated by ';'. Without "
        "it: the environment variable KERNELS.",
    ),
]
Arch = Annotated[
    str | None,
    typer.Option(
        "--arch",
        metavar="ARCH",
        help="sm_80, 90, A100, ... Without it: the GPU's own; where there is no GPU sm_80, or "
        "sm_90 for wgmma.",
    ),
]
Csv = Annotated[
    str | None,
    typer.Option(
        "--csv", metavar="FILE", help="Also append a row for each kernel, as it is measured."
    ),
]
Jsonl = Annotated[
    str | None,
    typer.Option("--jsonl", metavar="FILE", help="The same as JSON Lines."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def print_json(value: Any) -> None:
    """A table's facts on standard output, as JSON; infinities and NaN, which it lacks, as words."""
    print(_json(value, indent=2))


def print_json_line(value: Any) -> None:
    """The same in one line, at once: for what is read as it comes."""
    print(_json(value), flush=True)


def _json(value: Any, indent: int | None = None) -> str:
    # ASCII and escaped, but for the one control character that JSON leaves as it is.
    text = json.dumps(for_json(value), indent=indent, allow_nan=False)
    return text.replace("\x7f", r"\u007f")


def print_lines(text: str) -> None:
    """Lines on standard output, control characters escaped."""
    print(printable(text, lines=True))


def print_path(path: Path) -> None:
    """A path on standard output: as it is for another program, escaped for a terminal."""
    if sys.stdout.isatty():
        print_lines(str(path))
    else:
        typer.echo(os.fsencode(path) + b"\n", nl=False)


def selected(kernels: str | None, default: str) -> list[KernelConfig]:
    """The configs of `kernels`, else of env KERNELS, else of `default`."""
    if kernels is None and env.KERNELS.raw() is None:
        kernels = default
    return get_kernel_configs(kernels)
