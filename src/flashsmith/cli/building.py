"""`flashsmith build`: kernels compiled ahead of time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.table import make_console
from flashsmith.cli.command import App
from flashsmith.cli.options import Json, Kernels, print_json, selected
from flashsmith.counted import counted
from flashsmith.errors import ArgumentError
from flashsmith.families import (
    DeviceSpec,
    KernelConfig,
    Semantics,
    by_family,
    check_legal,
    device_spec,
)
from flashsmith.families.device import architecture_number
from flashsmith.families.gpu_names import same_gpu

if TYPE_CHECKING:
    from flashsmith.builder import KernelLibrary
    from flashsmith.runtime.target import Target

app = App()


@app.command("build")
def build_kernels(
    kernels: Kernels = None,
    arch: Annotated[
        str | None,
        typer.Option(
            "--arch",
            "--device",
            metavar="GPU",
            help="sm_80, 90, A100, or as nvidia-smi prints it. Without it: the GPU's own, or sm_80 "
            "where there is no GPU.",
        ),
    ] = None,
    semantics: Annotated[
        str,
        typer.Option(
            metavar="WORDS",
            help="What the set's kernels compute: plain, or causal or window, softcap, packed, "
            "partial and uneven, joined by '+'.",
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
    any_length: Annotated[
        bool,
        typer.Option(
            "--any-length",
            help="With --for, and problems without batch and lengths ('h32:8 d128 bf16 causal'): "
            "what attention() chooses for any of them, for whole tiles and uneven lengths, and "
            "where it says packed, for packed sequences too.",
        ),
    ] = False,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="With --for: the kernels of deterministic=True, the same bits in every run.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Compile kernels ahead of time, unless they are in the cache.

    Without --for, --kernels and KERNELS: everything in get_kernels_to_build(). Kernels of two
    families become two libraries.
    """
    if problems and (kernels is not None or semantics != "plain"):
        raise ArgumentError("--for: says itself which kernels; leave out --kernels and --semantics")
    if any_length and not problems:
        raise ArgumentError("--any-length: goes with --for 'h32:8 d128 bf16 causal'; give both")
    if deterministic and not problems:
        raise ArgumentError("--deterministic: goes with --for 'b16 s4096 h16 d128 bf16 backward'")
    with ProgressReporter() as reporter:
        reporter.say("looking up what is to be built")
        from flashsmith.runtime.target import choose_target

        target = choose_target(arch)
        from flashsmith.benchmark.inventory import library_facts, print_library

        start = time.monotonic()
        if problems:
            build = _build_for_any_length if any_length else _build_for
            libraries = build(problems, _named_device(arch, target), deterministic, reporter)
        else:
            configs = selected(kernels, default="all")
            libraries = _build_sets(configs, target, Semantics.parse(semantics), reporter)
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
    configs: list[KernelConfig], target: Target, semantics: Semantics, reporter: ProgressReporter
) -> list[KernelLibrary]:
    """A library of the configs of each family. Nothing is compiled if one of them is illegal."""
    from flashsmith.builder import build

    for cfg in configs:
        check_legal(cfg, target.device)
    return [
        build(group, arch=target.device.arch, semantics=semantics, progress=reporter.build)
        for group in by_family(configs)
    ]


def _named_device(arch: str | None, target: Target) -> DeviceSpec:
    """The very GPU that was named, whose choices another of its architecture would not make; else
    the target's."""
    if arch is None or architecture_number(arch) is not None or same_gpu(arch, target.device.name):
        return target.device
    return device_spec(arch)


def _build_for(
    texts: list[str], device: DeviceSpec, deterministic: bool, reporter: ProgressReporter
) -> list[KernelLibrary]:
    """The libraries that attention() will use for the problems, each once."""
    from flashsmith.chooser import build_for
    from flashsmith.chooser.any_length import parse_with_lengths

    parsed = [parse_with_lengths(text) for text in texts]
    return _each_once(
        library
        for problem in parsed
        for library in build_for(
            problem, device=device, deterministic=deterministic, progress=reporter.build
        )
    )


def _build_for_any_length(
    texts: list[str], device: DeviceSpec, deterministic: bool, reporter: ProgressReporter
) -> list[KernelLibrary]:
    """The same for problems of any batch and length; says first how many kernels that are."""
    from flashsmith.chooser.any_length import (
        build_for_any_length,
        choose_for_any_length,
        parse_any_length,
    )

    def searched(done: int, total: int) -> None:
        reporter.step("choosing kernels", done, total)

    parsed = [parse_any_length(text) for text in texts]
    found = [
        choose_for_any_length(problem, device, searched=searched, deterministic=deterministic)
        for problem in parsed
    ]
    for one in found:
        reporter.say(str(one))
    return _each_once(
        library for one in found for library in build_for_any_length(one, progress=reporter.build)
    )


def _each_once(libraries: Iterable[KernelLibrary]) -> list[KernelLibrary]:
    return list({library.path: library for library in libraries}.values())
