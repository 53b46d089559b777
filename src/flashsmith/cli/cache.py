"""`flashsmith cache`: which libraries are built, and how much space they take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flashsmith import env
from flashsmith.benchmark.table import make_console
from flashsmith.cli.command import App
from flashsmith.cli.options import FAILED, Json, print_json, print_lines, print_path
from flashsmith.errors import ArgumentError
from flashsmith.pluralize import pluralize

if TYPE_CHECKING:
    from flashsmith.builder import RemovedLibraries

MIB = 2**20

app = App(invoke_without_command=True)


@app.callback()
def cache(context: typer.Context, as_json: Json = False) -> None:
    """The kernel cache. Without a subcommand, it is listed."""
    if context.invoked_subcommand is None:
        list_cache(as_json)


@app.command("list")
def list_cache(as_json: Json = False) -> None:
    """List every kernel library in the cache, most recently used first."""
    from flashsmith.benchmark.listings import entry_facts, print_entries
    from flashsmith.builder import cache_entries, cache_path

    entries = cache_entries()
    if as_json:
        print_json([entry_facts(entry) for entry in entries])
        return
    console = make_console()
    print_entries(console, entries)
    total = sum(entry.bytes for entry in entries) / MIB
    console.print(
        f"{_libraries(len(entries))}, {total:.1f} of at most {env.cache_limit_mib()} MiB, "
        f"in {cache_path()}",
        soft_wrap=True,
    )


@app.command("prune")
def prune_cache(
    limit_mib: Annotated[
        float | None,
        typer.Option(
            "--limit", metavar="MIB", help="The limit, instead of FLASHSMITH_CACHE_LIMIT."
        ),
    ] = None,
) -> None:
    """Remove the least recently used libraries until the cache is within its limit."""
    from flashsmith.builder import prune

    if limit_mib is not None and limit_mib < 0:
        raise ArgumentError(f"limit={limit_mib:g}: give 0 or more MiB")
    _report_removed(prune(limit_mib))


@app.command("clear")
def clear_cache() -> None:
    """Remove every library that no process uses."""
    from flashsmith.builder import clear

    _report_removed(clear())


def _libraries(number: int) -> str:
    return pluralize(number, "library", "libraries")


def _report_removed(removed: RemovedLibraries) -> None:
    kept = f"; {removed.in_use} in use were kept" if removed.in_use else ""
    print(f"removed {_libraries(removed.entries)}, {removed.bytes / MIB:.1f} MiB{kept}")


@app.command("verify")
def verify_cache() -> None:
    """Compare every file in the cache with its checksum; exit status 1 if one is damaged."""
    from flashsmith.builder import verify_in_words

    lines, all_well = verify_in_words()
    print_lines("\n".join(lines))
    if not all_well:
        raise typer.Exit(FAILED)


@app.command("path")
def show_cache_path() -> None:
    """Print the path of the cache's folder, which contains only flashsmith's files."""
    from flashsmith.builder import cache_path

    print_path(cache_path())
