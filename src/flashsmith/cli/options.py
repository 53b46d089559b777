"""Parts that several commands share: options, exit statuses, config selection and JSON output."""

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

# The possible values of KERNELS, as described in the CLI's help.
KERNEL_KEYS = (
    "prog, prog-all, tune, space, cover, all, hopper, backward, hopper-backward, hopper-dq, "
    "decode, latent, latent-mma, 'B_r,B_c', a set of your own, or short forms separated by ';'"
)
Kernels = Annotated[
    str | None,
    typer.Option(
        "--kernels",
        "-k",
        metavar="KEY",
        help=f"{KERNEL_KEYS}. Default: the environment variable KERNELS.",
    ),
]
Arch = Annotated[
    str | None,
    typer.Option(
        "--arch",
        metavar="ARCH",
        help="sm_80, 90, A100, ... Default: the GPU's own; without a GPU sm_80, or sm_90 for "
        "wgmma.",
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
    typer.Option("--jsonl", metavar="FILE", help="Like --csv, but as JSON Lines."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
SeqLens = Annotated[
    str | None,
    typer.Option("--seq_lens", "--seq-lens", help="Sequence lengths. Default: 512,1024,...,16384."),
]
Causal = Annotated[bool, typer.Option("--causal", help="Causal instead of full attention.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the random inputs.")]


def import_from_here() -> None:
    """Allows a command to import functions from the current folder, which are given as
    'module:function'."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # at the end, so that it hides no installed module


def print_json(value: Any) -> None:
    """Prints a value as JSON on standard output; infinities and NaN become words."""
    print(_json(value, indent=2))


def print_json_line(value: Any) -> None:
    """Prints a value as one line of JSON and flushes, for programs that read line by line."""
    print(_json(value), flush=True)


def _json(value: Any, indent: int | None = None) -> str:
    # json.dumps() escapes everything except printable ASCII and one control character, DEL.
    text = json.dumps(for_json(value), indent=indent, allow_nan=False)
    return text.replace("\x7f", r"\u007f")


def print_lines(text: str) -> None:
    """Prints lines on standard output, with control characters escaped."""
    print(printable(text, lines=True))


def print_path(path: Path) -> None:
    """Prints a path on standard output: unchanged for another program, escaped on a terminal."""
    if sys.stdout.isatty():
        print_lines(str(path))
    else:
        typer.echo(os.fsencode(path) + b"\n", nl=False)


def selected(kernels: str | None, default: str) -> list[KernelConfig]:
    """The configs that `kernels` selects, or else the environment variable KERNELS, or else
    `default`."""
    if kernels is None and env.KERNELS.raw() is None:
        kernels = default
    return get_kernel_configs(kernels)
