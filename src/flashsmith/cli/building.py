"""`flashsmith build`: kernels compiled ahead of time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from flashsmith.benchmark.progress import Narrator
from flashsmith.benchmark.table import make_console
from flashsmith.benchmark.target import Target, choose_target
from flashsmith.cli.options import Arch, Json, Kernels, print_json, selected
from flashsmith.configs import KernelConfig, Problem, Semantics, by_family, check_legal
from flashsmith.counted import counted
from flashsmith.errors import ArgumentError

if TYPE_CHECKING:
    from flashsmith.builder import KernelLibrary

app = typer.Typer()


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

    Without --for, --kernels and KERNELS: everything in get_kernels_to_build(). Kernels of two
    families become two libraries.
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
            configs = selected(kernels, default="all")
            libraries = _build_sets(configs, target, Semantics.parse(semantics), narrator)
        seconds = time.monotonic() - start
    if as_json:
        facts = [library_facts(library) for library in libraries]
        print_json(facts if problems or len(facts) > 1 else facts[0])
        return
    console = make_console()
    for library in libraries:
        print_library(console, library, target)
        computed = library.manifest.semantics
        console.print(
            f"{counted(len(library), 'config')} for {target.arch}, {computed}, in {seconds:.1f} s: "
            f"{library.path}",
            soft_wrap=True,
        )


def _build_sets(
    configs: list[KernelConfig], target: Target, semantics: Semantics, narrator: Narrator
) -> list[KernelLibrary]:
    """A library of the configs of each family. Nothing is compiled if one of them is illegal."""
    from flashsmith.builder import build

    for cfg in configs:
        check_legal(cfg, target.device)
    return [
        build(group, arch=target.device.arch, semantics=semantics, progress=narrator.build)
        for group in by_family(configs)
    ]


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
