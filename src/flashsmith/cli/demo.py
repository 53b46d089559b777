"""`flashsmith demo`: real models that run on flashsmith's kernels, from the package
flashsmith_demos."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.table import make_console
from flashsmith.cli.command import App
from flashsmith.cli.options import FAILED, Json, print_json

if TYPE_CHECKING:
    from rich.console import Console

app = App(no_args_is_help=True, help="Real models on flashsmith's kernels.")


@app.callback()
def demo() -> None:
    """Real models on flashsmith's kernels."""


@app.command("minilm")
def demo_minilm(
    file: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A file of sentences, one per line, to use instead of the built-in ones.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sentences per forward pass.")] = 4,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Use the emulator even if there is a GPU.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Embed sentences twice, with PyTorch's attention and with flashsmith's, and compare.

    The model is all-MiniLM-L6-v2, from a package that the extra 'models' installs. Exit status 1 if
    the embeddings differ or flashsmith did not compute every layer.
    """
    with ProgressReporter() as reporter:
        reporter.say("loading the model")
        from flashsmith_demos.minilm import (
            SENTENCES,
            check_dependencies,
            embed_twice,
            read_sentences,
        )
        from flashsmith_demos.minilm_text import print_minilm

        check_dependencies()
        sentences = SENTENCES if file is None else read_sentences(file)
        report = embed_twice(sentences, batch=batch, emulate=emulate, progress=reporter.build)
    _show(report, print_minilm, as_json)


@app.command("train")
def demo_train(
    steps: Annotated[
        int | None, typer.Option(help="Steps of each training. Default: 300, or 5 in the emulator.")
    ] = None,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Use the emulator even if there is a GPU.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a small transformer twice, with PyTorch's attention and with flashsmith's, and compare.

    It learns associative recall: which value belongs to which key, from pairs listed before. In the
    emulator, a tiny transformer trains for a few steps. Exit status 1 if the losses differ or
    flashsmith did not compute every layer, forward and backward.
    """
    with ProgressReporter() as reporter:
        from flashsmith_demos.recall import check_dependencies, train_twice
        from flashsmith_demos.recall_text import print_recall

        check_dependencies()
        report = train_twice(steps=steps, emulate=emulate, progress=reporter.build)
    _show(report, print_recall, as_json)


@app.command("generate")
def demo_generate(
    answers: Annotated[int, typer.Option(min=1, help="Answers per sequence.")] = 8,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Use the emulator even if there is a GPU.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Generate with a small language model twice, and compare the results token for token.

    One run uses PyTorch's attention, the other flashsmith's, from a paged cache. The model comes
    with flashsmith and knows associative recall: which value belongs to which key, from pairs
    listed before. Exit status 1 if a token differs or flashsmith did not compute every layer.
    """
    with ProgressReporter() as reporter:
        from flashsmith_demos.generation import generate_twice
        from flashsmith_demos.generation_text import print_generation

        report = generate_twice(answers=answers, emulate=emulate, progress=reporter.build)
    _show(report, print_generation, as_json)


def _show(report: Any, print_report: Callable[[Console, Any], None], as_json: bool) -> None:
    """Prints the report of a demo; the exit status is 1 if one of its results is wrong."""
    if as_json:
        print_json(report.to_json())
    else:
        print_report(make_console(), report)
    if not report.ok:
        raise typer.Exit(FAILED)
