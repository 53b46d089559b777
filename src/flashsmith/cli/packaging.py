"""`flashsmith wheel` and `flashsmith hub`: compiled kernels for installations without a
compiler."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.table import make_console
from flashsmith.cli.command import App
from flashsmith.errors import ArgumentError
from flashsmith.families import DType, KernelConfig, Semantics
from flashsmith.families.device import architecture_number
from flashsmith.families.head_dims import HeadDims, HeadPair
from flashsmith.pluralize import pluralize
from flashsmith.printable import quoted
from flashsmith.safe_json import whole_number

if TYPE_CHECKING:
    from flashsmith.builder import BuildEvent, KernelLibrary
    from flashsmith.chooser.package_scope import PackageScope

app = App()

_MB = 1e6


_Archs = Annotated[
    list[str],
    typer.Option("--for", metavar="ARCH", help="sm_80, 90, ...: the GPUs. May be repeated."),
]
_Cpu = Annotated[
    str | None,
    typer.Option("--cpu", help="x86_64 or aarch64. Default: this machine's processor."),
]
_Only = Annotated[
    str | None,
    typer.Option(
        "--only",
        metavar="WORDS",
        help="Only kernels of these dtypes, d_heads and kinds of calls: 'bf16 d128', or 'd128 "
        "decode'. d192:128 stands for kernels whose v has 128 columns.",
    ),
]
_All = Annotated[
    bool,
    typer.Option("--all", help="Also kernels for combinations of rare properties."),
]
_Ptx = Annotated[
    bool,
    typer.Option("--ptx", help="Also the PTX, so that the emulator needs no compiler either."),
]
_Jobs = Annotated[
    int | None,
    typer.Option("--jobs", "-j", help="Compilers in parallel. Default: FLASHSMITH_JOBS."),
]


@app.command("wheel")
def build_wheels(
    archs: _Archs,
    folder: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where to write the wheels.")
    ] = Path("dist"),
    cpu: _Cpu = None,
    only: _Only = None,
    everything: _All = False,
    ptx: _Ptx = False,
    jobs: _Jobs = None,
) -> None:
    """Write wheels with compiled kernels for GPUs; installations with them need no compiler.

    A wheel has the fastest measured kernels and the kernels that the cost model chooses. If it
    would be larger than 100 MB, there is one for each operation. Compiled libraries are kept in the
    kernel cache, so an interrupted command continues where it stopped.
    """
    wanted = _Wanted.of(archs, cpu, only, everything, jobs)
    with ProgressReporter() as reporter:
        from flashsmith.builder.package_wheel import write_wheels

        for arch in wanted.archs:
            start = time.monotonic()
            libraries = _build(arch, wanted, reporter)
            for path in write_wheels(libraries, arch, wanted.cpu, folder, ptx=ptx):
                _print(f"{path}: {path.stat().st_size / _MB:.1f} MB")
            _print(_summary(libraries, start))


@app.command("hub")
def write_hub(
    archs: _Archs,
    folder: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where to write build/.")
    ] = Path("hub"),
    cpu: _Cpu = None,
    only: _Only = None,
    everything: _All = False,
    ptx: _Ptx = False,
    jobs: _Jobs = None,
) -> None:
    """Write a folder of the kernels hub: the compiled kernels of a wheel and the Python that calls
    them, for an environment without flashsmith.

    The package kernels loads it: kernels.get_local_kernel(Path("hub")).
    """
    wanted = _Wanted.of(archs, cpu, only, everything, jobs)
    start = time.monotonic()
    with ProgressReporter() as reporter:
        from flashsmith.integrations.hub_folder import write_hub_folder

        libraries = {arch: _build(arch, wanted, reporter) for arch in wanted.archs}
        path = write_hub_folder(libraries, wanted.cpu, folder, ptx=ptx)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    _print(f"{path}: {size / _MB:.1f} MB")
    _print(_summary([library for found in libraries.values() for library in found], start))


class _Wanted(NamedTuple):
    """The options that both commands have; ``cpu`` and ``jobs`` have their defaults filled in."""

    archs: list[int]
    cpu: str
    only: _Restriction
    jobs: int

    @classmethod
    def of(
        cls, archs: list[str], cpu: str | None, only: str | None, everything: bool, jobs: int | None
    ) -> _Wanted:
        from flashsmith import env
        from flashsmith.builder.toolchain import known_cpu

        numbers = list(dict.fromkeys(map(_architecture, archs)))
        jobs = env.jobs() if jobs is None else jobs
        return cls(numbers, known_cpu(cpu), _restriction(only, everything), jobs)


def _print(line: str) -> None:
    make_console().print(line, soft_wrap=True)


def _summary(libraries: Sequence[KernelLibrary], start: float) -> str:
    from flashsmith.builder.system_libraries import newest_needs

    needs = newest_needs(library.so_path.read_bytes() for library in libraries)
    return (
        f"{pluralize(sum(map(len, libraries)), 'kernel')} in "
        f"{pluralize(len(libraries), 'library', 'libraries')}, in "
        f"{time.monotonic() - start:.0f} s; needs {needs}"
    )


def _build(arch: int, wanted: _Wanted, reporter: ProgressReporter) -> list[KernelLibrary]:
    """The libraries of a package. If some kernels compile to slow code, attention() uses other
    kernels in their place, so these are built too."""
    from flashsmith.builder import note_slow
    from flashsmith.chooser.package_contents import package_contents
    from flashsmith.chooser.package_scope import left_out

    def searched(done: int, total: int) -> None:
        reporter.step("choosing kernels", done, total)

    libraries: list[KernelLibrary] = []
    built: set[tuple[Semantics, KernelConfig]] = set()
    while True:
        found = package_contents(arch, **wanted.only._asdict(), searched=searched)
        missing = {
            semantics: [config for config in configs if (semantics, config) not in built]
            for semantics, configs in found.kernels.items()
        }
        reporter.say(
            f"sm_{arch}: {pluralize(sum(map(len, missing.values())), 'kernel')} for "
            f"{found.problems:,} examined problems"
            + ("" if wanted.only.scope.everything else f"; {left_out()} (--all adds them)")
        )
        made = _compile(missing, arch, wanted.cpu, wanted.jobs, reporter)
        libraries += made
        built |= {(one.manifest.semantics, config) for one in made for config in one.configs}
        if not [kernel for library in made for kernel in note_slow(library)]:
            return libraries


def _compile(
    kernels: Mapping[Semantics, Sequence[KernelConfig]],
    arch: int,
    cpu: str,
    jobs: int,
    reporter: ProgressReporter,
) -> list[KernelLibrary]:
    from flashsmith.builder.package_build import build_package, package_seconds

    total = sum(map(len, kernels.values()))
    if total:
        reporter.expect("compiling", [package_seconds(kernels, jobs) / total] * total)

    def report(built: int, event: BuildEvent) -> None:
        if event.stage in ("warn", "wait"):
            reporter.build(event)
        elif event.stage == "compile":
            reporter.step("compiling kernels", min(built, total - 1), total)

    return build_package(kernels, arch=arch, cpu=cpu, jobs=jobs, progress=report)


def _architecture(text: str) -> int:
    number = architecture_number(text)
    if number is None:
        raise ArgumentError(f"--for={quoted(text)}: give an architecture, such as sm_90")
    return number


class _Restriction(NamedTuple):
    """The kernels to which ``--only`` and ``--all`` restrict a wheel.

    If ``d_heads`` is None, all head dimensions are included. What ``--only`` names does not count
    as rare.
    """

    d_heads: tuple[HeadDims, ...] | None
    dtypes: tuple[DType, ...]
    kinds: tuple[str, ...]
    scope: PackageScope


def _restriction(text: str | None, everything: bool) -> _Restriction:
    from flashsmith.chooser.package_contents import KINDS, words_of
    from flashsmith.chooser.package_scope import PackageScope

    d_heads: list[HeadDims] = []
    dtypes, others = [], []
    for word in (text or "").split():
        if re.fullmatch(r"d\d+(:\d+)?", word, re.ASCII):
            widths = [whole_number(it) or 0 for it in word[1:].split(":")]
            d_heads.append(HeadPair(*widths) if len(widths) > 1 else widths[0])
        elif word.upper() in DType.__members__:
            dtypes.append(DType[word.upper()])
        elif any(word in words_of(kind) for kind in KINDS):
            others.append(word)
        else:
            known = ", ".join(sorted({word for kind in KINDS for word in words_of(kind)}))
            raise ArgumentError(
                f"--only={quoted(text)}: {quoted(word)} is no dtype, d_head or kind of call; give "
                f"words such as 'bf16 d128'; kinds of calls have the words {known}"
            )
    kinds = tuple(kind for kind in KINDS if set(others) <= words_of(kind))
    if not kinds:
        raise ArgumentError(f"--only={quoted(text)}: no kind of call has all of these words")
    scope = PackageScope(everything, frozenset((text or "").lower().split()))
    return _Restriction(tuple(d_heads) or None, tuple(dtypes) or tuple(DType), kinds, scope)
