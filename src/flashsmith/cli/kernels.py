"""`flashsmith run`, `explain`, `configs` and `env`: the kernels, and what is known of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from flashsmith import env
from flashsmith.benchmark.progress import Narrator
from flashsmith.benchmark.table import Column, make_console, print_table
from flashsmith.benchmark.target import choose_target
from flashsmith.cli.options import FAILED, Arch, Json, Kernels, print_json, selected
from flashsmith.configs import (
    get_kernel_configs,
    kernel_set_sizes,
    parse_kernel_name_into_config,
)
from flashsmith.counted import counted

app = typer.Typer()


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
    seed: Annotated[int, typer.Option(min=0, help="Of the random inputs.")] = 0,
    as_json: Json = False,
) -> None:
    """Build kernels, run and prove each, and say what each costs and does; on a GPU time them too.

    Without --kernels and KERNELS: prog, the seven steps of the ladder.
    """
    with Narrator() as narrator:
        narrator.say("looking up kernels and compiler")
        configs = selected(kernels, default="prog")
        target = choose_target(arch, emulate, configs)
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
        print_json(report.to_json())
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
    target = choose_target(arch, configs=[cfg])
    with Narrator() as narrator:
        narrator.say(f"looking at {cfg}")
        from flashsmith.benchmark.explain import explain
        from flashsmith.benchmark.explanation_text import print_explanation

        explanation = explain(cfg, target, narrator)
    if as_json:
        print_json(explanation.to_json())
    else:
        print_explanation(make_console(), explanation)
    if not explanation.ok:
        raise typer.Exit(FAILED)


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
            print_json(sizes)
        else:
            print_sets(make_console(), sizes)
        return
    configs = get_kernel_configs(kernels)
    target = choose_target(arch, configs=configs)
    facts = config_facts(configs, target, cache_entries())
    if as_json:
        print_json(facts)
        return
    console = make_console()
    print_configs(console, facts)
    console.print(
        f"{counted(len(facts), 'config')}; legal, CTAs per SM and built are for {target.arch}"
    )


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
        print_json(facts)
        return
    print_table(
        make_console(),
        [
            Column("variable"),
            Column("now"),
            Column("default", prose=True),
            Column("meaning", prose=True),
        ],
        [(f["name"], f["value"] or "", f["default"], f["meaning"]) for f in facts],
    )
