"""`flashsmith build`: compiles kernels ahead of time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.table import make_console
from flashsmith.cli.command import App
from flashsmith.cli.options import Json, Kernels, import_from_here, print_json, selected
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
from flashsmith.pluralize import pluralize
from flashsmith.printable import quoted
from flashsmith.safe_json import whole_number

if TYPE_CHECKING:
    from flashsmith.builder import BuildEvent, KernelEntry, KernelLibrary
    from flashsmith.chooser.prebuild import AnyLength
    from flashsmith.runtime.target import Target

TargetGpu = Annotated[
    str | None,
    typer.Option(
        "--arch",
        "--device",
        metavar="GPU",
        help="sm_80, 90, A100, or a name as nvidia-smi prints it. Default: this machine's GPU, "
        "or sm_80 if there is none.",
    ),
]
SemanticsWords = Annotated[
    str,
    typer.Option(
        metavar="WORDS",
        help="What the set's kernels compute: plain, or causal or window, softcap, packed, "
        "partial and uneven, joined by '+'.",
    ),
]
Problems = Annotated[
    list[str] | None,
    typer.Option(
        "--for",
        metavar="PROBLEM",
        help="Build what attention() will use for a problem such as 'b16 s4096 h32:8 d128 bf16 "
        "causal', or with score=alibi or mask=documents&causal, instead of a set. May be given "
        "several times.",
    ),
]
Model = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="CONFIG",
        help="Build what a transformers model's attention needs for any batch and length, and "
        "over a KV cache, instead of problems. CONFIG is the model's config.json, or its "
        "folder.",
    ),
]
Gradients = Annotated[
    bool,
    typer.Option(
        "--gradients", help="With --model or --ranks: also build the kernels for training."
    ),
]
Ranks = Annotated[
    str | None,
    typer.Option(
        "--ranks",
        metavar="COUNTS",
        help="With --for: build what each rank of flashsmith.parallel.attention computes, for "
        "2 ranks, or for 2,4,8 ranks. Needs PyTorch.",
    ),
]
Schedule = Annotated[
    str,
    typer.Option("--schedule", help="With --ranks: auto, zigzag, allgather or ulysses."),
]
ForAnyLength = Annotated[
    bool,
    typer.Option(
        "--any-length",
        help="With --for and problems without batch and lengths ('h32:8 d128 bf16 causal'): "
        "build a few kernels that serve all sizes within 2% of the best. They serve whole "
        "tiles and uneven lengths, and packed sequences if the problem is packed.",
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="With --for: build the kernels for deterministic=True, which give the same bits "
        "in every run.",
    ),
]

app = App()


@app.command("build")
def build_kernels(
    kernels: Kernels = None,
    arch: TargetGpu = None,
    semantics: SemanticsWords = "plain",
    problems: Problems = None,
    model: Model = None,
    gradients: Gradients = False,
    ranks: Ranks = None,
    schedule: Schedule = "auto",
    any_length: ForAnyLength = False,
    deterministic: Deterministic = False,
    as_json: Json = False,
) -> None:
    """Compile kernels ahead of time, unless the cache already has them.

    Without --for, --model, --kernels and KERNELS, this builds everything that
    get_kernels_to_build() lists. Each family of kernels gets its own library.
    """
    _check_selection(problems, model, is_set_named=kernels is not None or semantics != "plain")
    _check_goes_with(problems, model, any_length, gradients, deterministic, ranks)
    _check_ranks(problems, ranks, any_length, schedule)
    with ProgressReporter() as reporter:
        reporter.say("looking up what to build")
        from flashsmith.runtime.target import choose_target

        target = choose_target(arch)
        work = _Work(reporter)
        if problems or model:
            by_length = _build_for_model if model else _build_for_any_length
            build = by_length if any_length or model else _build_for
            texts = _problems_of(model, gradients, reporter) if model else problems or []
            if ranks:
                texts = _problems_of_ranks(texts, _counts(ranks), schedule, gradients, reporter)
            libraries = build(texts, _named_device(arch, target), deterministic, work)
        else:
            configs = selected(kernels, default="all")
            libraries = _build_sets(configs, target, Semantics.parse(semantics), work)
    if as_json:
        from flashsmith.benchmark.listings import library_facts

        facts = [library_facts(library) for library in libraries]
        print_json(facts if problems or model or len(facts) > 1 else facts[0])
    else:
        _print_libraries(libraries, target, work)


def _check_selection(problems: list[str] | None, model: Path | None, *, is_set_named: bool) -> None:
    """Raises ArgumentError if options select the kernels twice."""
    if problems and is_set_named:
        raise ArgumentError(
            "--for: already selects the kernels; leave out --kernels and --semantics"
        )
    if model and (problems or is_set_named):
        raise ArgumentError("--model: already selects the kernels; leave out --for and --kernels")


def _check_goes_with(
    problems: list[str] | None,
    model: Path | None,
    any_length: bool,
    gradients: bool,
    deterministic: bool,
    ranks: str | None,
) -> None:
    """Raises ArgumentError for an option that is given without the one it belongs to."""
    if any_length and not problems:
        raise ArgumentError("--any-length: goes with --for 'h32:8 d128 bf16 causal'; give both")
    if gradients and not (model or ranks):
        raise ArgumentError(
            "--gradients: goes with --model or --ranks; with --for name 'backward' problems"
        )
    if deterministic and not problems and not gradients:
        raise ArgumentError(
            "--deterministic: goes with --for 'b16 s4096 h16 d128 bf16 backward', or --gradients"
        )


def _check_ranks(
    problems: list[str] | None, ranks: str | None, any_length: bool, schedule: str
) -> None:
    """Raises ArgumentError if --ranks or --schedule cannot be combined with the other options."""
    from flashsmith.chooser.function_problems import has_functions

    if ranks and (not problems or any_length):
        raise ArgumentError(
            "--ranks: goes with --for 'b1 s131072 h32:8 d128 bf16 causal'; give both, without "
            "--any-length"
        )
    if ranks and any(map(has_functions, problems or ())):
        raise ArgumentError(
            "--ranks: given with a score or mask function, which sharded attention does not take; "
            "leave one out"
        )
    if schedule != "auto" and not ranks:
        raise ArgumentError("--schedule: goes with --ranks; give both")


def _print_libraries(libraries: Sequence[KernelLibrary], target: Target, work: _Work) -> None:
    """Prints the kernels of each library, and what was compiled."""
    from flashsmith.benchmark.listings import print_library

    console = make_console()
    for library in libraries:
        print_library(console, library, target)
        made_for = f"{target.arch}, {library.manifest.semantics}"
        console.print(
            f"{pluralize(len(library), 'config')} for {made_for}, {work.of_library(library)}: "
            f"{library.path}",
            soft_wrap=True,
        )
    if len(libraries) > 1:
        console.print(work.summary(libraries))


class _Work:
    """Reports progress, and records which kernels were compiled and how long this took."""

    def __init__(self, reporter: ProgressReporter) -> None:
        self.reporter = reporter
        self._start = time.monotonic()
        self._compiled: set[KernelEntry] = set()

    def build(self, event: BuildEvent) -> None:
        """Records and reports an event of a build."""
        if event.stage == "compile" and event.entry is not None:
            self._compiled.add(event.entry)
        self.reporter.build(event)

    def of_library(self, library: KernelLibrary) -> str:
        """The time that building a library took, or a remark that the library was built already."""
        if self._compiled.isdisjoint(library.manifest.kernels):
            return "built already"
        return f"in {library.manifest.build_seconds:.1f} s"

    def summary(self, libraries: Sequence[KernelLibrary]) -> str:
        """How many kernels were compiled, how many were built before, and how long this took."""
        kernels = sum(map(len, libraries))
        compiled = sum(
            kernel in self._compiled for library in libraries for kernel in library.manifest.kernels
        )
        done = f"{pluralize(compiled, 'kernel')} compiled" if compiled else "nothing to compile"
        there = f", {kernels - compiled} built already" if compiled < kernels else ""
        return f"{done}{there}, in {time.monotonic() - self._start:.1f} s"


def _problems_of(model: Path, gradients: bool, reporter: ProgressReporter) -> list[str]:
    """The attention problems of a model.

    Reports the problems and the assumptions.
    """
    from flashsmith.integrations.model_config import read_model

    found = read_model(model, gradients=gradients)
    for text in found.problems:
        reporter.say(f"{found.name}: {text}")
    for note in found.notes:
        reporter.say(f"{found.name}: note: {note}")
    return list(found.problems)


def _counts(text: str) -> list[int]:
    """Parses the numbers of ranks in a string such as '2,4,8'."""
    counts = [whole_number(word.strip()) for word in text.split(",")]
    if not all(counts):
        raise ArgumentError(f"--ranks={quoted(text)}: give numbers of ranks, such as 2 or 2,4,8")
    return [count for count in counts if count]


def _problems_of_ranks(
    texts: Sequence[str],
    counts: Sequence[int],
    schedule: str,
    gradients: bool,
    reporter: ProgressReporter,
) -> list[str]:
    """The problems that each rank computes if the given problems are divided among several ranks.

    Reports how many there are.
    """
    try:
        from flashsmith.parallel import problems as problems_of_ranks
    except ModuleNotFoundError as error:
        raise ArgumentError(f"--ranks: needs PyTorch ({error}); install it") from None

    found: dict[str, None] = {}
    for text in texts:
        for count in counts:
            made = problems_of_ranks(text, ranks=count, schedule=schedule, gradients=gradients)
            found.update(dict.fromkeys(map(str, made)))
            reporter.say(f"{text} on {pluralize(count, 'rank')}: {pluralize(len(made), 'problem')}")
    return list(found)


def _build_sets(
    configs: list[KernelConfig], target: Target, semantics: Semantics, work: _Work
) -> list[KernelLibrary]:
    """Builds one library per family. Compiles nothing if one of the configs is illegal."""
    from flashsmith.builder import build

    for cfg in configs:
        check_legal(cfg, target.device)
    return [
        build(group, arch=target.device.arch, semantics=semantics, progress=work.build)
        for group in by_family(configs)
    ]


def _named_device(arch: str | None, target: Target) -> DeviceSpec:
    """The GPU that ``arch`` names.

    If ``arch`` names only an architecture or nothing, the GPU of ``target``.

    The GPU matters because different GPUs of one architecture may use different kernels.
    """
    if arch is None or architecture_number(arch) is not None or same_gpu(arch, target.device.name):
        return target.device
    return device_spec(arch)


def _build_for(
    texts: list[str], device: DeviceSpec, deterministic: bool, work: _Work
) -> list[KernelLibrary]:
    """Builds the libraries that attention() will use for the problems; returns them without
    duplicates."""
    from flashsmith.chooser import build_for
    from flashsmith.chooser.function_problems import has_functions, parse_with_functions
    from flashsmith.chooser.prebuild import parse_with_lengths

    if any(map(has_functions, texts)):
        import_from_here()
    parsed = [parse_with_functions(text, parse_with_lengths).problem for text in texts]
    return _each_once(
        library
        for problem in parsed
        for library in build_for(
            problem, device=device, deterministic=deterministic, progress=work.build
        )
    )


def _build_for_any_length(
    texts: list[str],
    device: DeviceSpec,
    deterministic: bool,
    work: _Work,
    *,
    skips_unserved: bool = False,
) -> list[KernelLibrary]:
    """Builds libraries for problems of any batch and length.

    Reports the chosen kernels before it builds.
    ``skips_unserved``: whether a problem without a kernel is only reported and skipped. If no
        problem has a kernel, this is always an error.
    """
    from flashsmith.chooser.function_problems import ANY_SIZES, has_functions, parse_with_functions
    from flashsmith.chooser.prebuild import (
        build_for_any_length,
        choose_for_any_length,
        parse_any_length,
    )

    def searched(done: int, total: int) -> None:
        work.reporter.step("choosing kernels", done, total)

    if any(map(has_functions, texts)):
        import_from_here()
    parsed = [parse_with_functions(text, parse_any_length, ANY_SIZES).problem for text in texts]
    found: list[AnyLength] = []
    refused: ArgumentError | None = None
    for text, problem in zip(texts, parsed, strict=True):
        try:
            found.append(
                choose_for_any_length(
                    problem, device, searched=searched, deterministic=deterministic
                )
            )
        except ArgumentError as error:
            if not skips_unserved:
                raise
            work.reporter.say(f"note: {text}: left out: {error}")
            refused = error
    if refused is not None and not found:
        raise refused
    for one in found:
        work.reporter.say(str(one))
    return _each_once(
        library for one in found for library in build_for_any_length(one, progress=work.build)
    )


# A layer of transformers for which there is no kernel is left to PyTorch.
_build_for_model = partial(_build_for_any_length, skips_unserved=True)


def _each_once(libraries: Iterable[KernelLibrary]) -> list[KernelLibrary]:
    return list({library.path: library for library in libraries}.values())
