"""`flashsmith choose` and `flashsmith winners`: which kernel is used for a problem, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashsmith.benchmark.table import make_console, print_text
from flashsmith.cli.command import App
from flashsmith.cli.options import FAILED, Json, print_json, print_lines, print_path
from flashsmith.pluralize import pluralize

if TYPE_CHECKING:
    from flashsmith.chooser.winners import WinnersTable

app = App()
winners = App(
    no_args_is_help=True, help="The table of winners: the fastest measured configs, for each GPU."
)
app.add_typer(winners, name="winners")

GpuOption = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help="Only winners of this GPU, such as H200."),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="Only winners of this dtype: fp16 or bf16.")
]
Head = Annotated[
    int | None, typer.Option("--d", metavar="D_HEAD", help="Only winners of this d_head.")
]


@app.command("choose")
def choose_kernels(
    problems: Annotated[
        list[str], typer.Argument(help="Problems such as 'b16 s4096 h32:8 d128 bf16 causal'.")
    ],
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            "--arch",
            metavar="GPU",
            help="H200, A100, sm_90, or a name as nvidia-smi prints it. Default: this machine's "
            "GPU, or the A100.",
        ),
    ] = None,
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="Only kernels that give the same bits in every run."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show which kernel attention() uses for a problem, why, and what other kernels would cost."""
    from flashsmith.chooser import choose

    choices = [choose(problem, device, deterministic=deterministic) for problem in problems]
    if as_json:
        print_json([choice.to_json() for choice in choices])
        return
    console = make_console()
    for number, choice in enumerate(choices):
        if number:
            console.print()
        print_text(console, str(choice), indent=14)


@winners.command("show")
def show_winners(
    file: Annotated[
        Path | None, typer.Argument(help="A table to show, instead of the one in use.")
    ] = None,
    gpu: GpuOption = None,
    dtype: Dtype = None,
    d_head: Head = None,
    ranks: Annotated[int, typer.Option(min=1, help="How many configs to show per problem.")] = 1,
    as_json: Json = False,
) -> None:
    """List the winners in use: your own, and for all other problems the shipped ones."""
    from flashsmith.chooser.winners import WinnersTable
    from flashsmith.cli.winners_listing import print_winners, winner_facts

    own = WinnersTable() if file else WinnersTable.user()
    table = WinnersTable.load(file) if file else WinnersTable.merged()
    facts = winner_facts(table.select(gpu, dtype, d_head), own, ranks)
    if as_json:
        print_json(facts)
        return
    console = make_console()
    if facts:
        print_winners(console, facts)
    else:
        console.print("no winners: `flashsmith tune` measures them")
    _print_notes(table)


@winners.command("merge")
def merge_winners(
    files: Annotated[list[Path], typer.Argument(help="Tables whose winners to merge.")],
    into: Annotated[
        Path | None,
        typer.Option("--into", metavar="FILE", help="The table to write, instead of your own."),
    ] = None,
    prefer: Annotated[
        str,
        typer.Option(
            help="Which entry to keep if both tables have a problem: newer keeps the later "
            "measurement, faster the faster one."
        ),
    ] = "newer",
) -> None:
    """Merge the winners in other tables into your own.

    Entries that cannot be used are listed and left out; the exit status is then 1.
    """
    from flashsmith.benchmark.measurement_files import require_writable
    from flashsmith.chooser.winners import WinnersTable, require_user_table_path, update_table

    if into is not None:
        require_writable("into", into)
    tables = [WinnersTable.load(file) for file in files]
    path = into or require_user_table_path()
    counts: list[int] = []

    def take_over(mine: WinnersTable) -> None:
        counts.extend(mine.merge(table, prefer) for table in tables)

    merged = update_table(path, take_over)
    for file, table, taken in zip(files, tables, counts, strict=True):
        print_lines(f"{file}: {taken} of {len(table)} entries taken over")
        _print_notes(table)
    print_lines(f"{path}: {_entries(merged)}")
    if any(table.ignored for table in tables):
        raise typer.Exit(FAILED)


@winners.command("export")
def export_winners(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")
    ],
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="NAME", help="The GPU of the winners, such as H200.")
    ],
    dtype: Dtype = None,
    d_head: Head = None,
) -> None:
    """Write one GPU's winners to a file, to use on another machine or to ship."""
    from flashsmith.benchmark.measurement_files import require_writable
    from flashsmith.chooser.winners import WinnersTable
    from flashsmith.errors import ArgumentError

    require_writable("output", output)
    table = WinnersTable.merged()
    chosen = table.select(gpu, dtype, d_head)
    if not len(chosen):
        known = ", ".join(sorted({entry.key.gpu for entry in table})) or "none at all"
        raise ArgumentError(f"gpu={gpu!r}: no winners of this GPU; there are winners of {known}")
    chosen.save(output)
    print_lines(f"{output}: {_entries(chosen)}")


@winners.command("validate")
def validate_winners(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Tables to check. Default: the shipped ones and your own."),
    ] = None,
) -> None:
    """Check tables: their form, configs, legality, order and figures.

    Exit status 1 if a table is wrong.

    Entries measured with other CUDA sources are reported, but are not wrong.
    """
    from flashsmith.chooser.winners import WinnersTable

    named = [(str(file), WinnersTable.load(file)) for file in files or ()]
    if not named:
        named = [("shipped", WinnersTable.shipped()), ("yours", WinnersTable.user())]
    wrong = 0
    for name, table in named:
        problems = table.validate()
        wrong += len(problems)
        for problem in problems:
            print_lines(f"{name}: {problem}")
        for remark in table.remarks():
            print_lines(f"{name}: note: {remark}")
        print_lines(f"{name}: {_entries(table)}, {pluralize(len(problems), 'problem')}")
    if wrong:
        raise typer.Exit(FAILED)


@winners.command("path")
def show_table_path() -> None:
    """Print the path of your own table, which may not exist yet."""
    from flashsmith.chooser.winners import require_user_table_path

    print_path(require_user_table_path())


def _entries(table: WinnersTable) -> str:
    return pluralize(len(table), "entry", "entries")


def _print_notes(table: WinnersTable) -> None:
    for note in table.notes:
        print_lines(f"note: {note}")
