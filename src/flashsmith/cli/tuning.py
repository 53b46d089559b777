"""`flashsmith tune`: searches for the fastest kernels."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from flashsmith import env
from flashsmith.benchmark.table import make_console
from flashsmith.cli.command import App, Command
from flashsmith.cli.options import FAILED, Arch, Json, print_json, print_json_line
from flashsmith.errors import ArgumentError
from flashsmith.families import DEFAULT_DEVICE, FAMILIES, DeviceSpec, device_spec

if TYPE_CHECKING:
    from flashsmith.families import Problem
    from flashsmith.tuning.executor import Executor
    from flashsmith.tuning.race import Race
    from flashsmith.tuning.sweep import Settings
    from flashsmith.tuning.tune import SweepResult

INTERRUPTED = 130
# The keys of the families' search spaces, each with a description of its kernels.
_SPACES = ", ".join(f"{it.space_key} ({it.title})" for it in FAMILIES.values() if it.space_key)

Space = Annotated[
    str | None,
    typer.Option(
        "--space",
        metavar="KEY",
        help=f"Which configs: {_SPACES}, both (hopper and the best of space), known (the best "
        "few of the shipped tables), tune, prog-all, cover, a set of your own, or short forms "
        "separated by ';'. Default: the environment variable KERNELS, else both on sm_90 and "
        "space elsewhere.",
    ),
]
Problems = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|PROBLEMS",
        help="'b16 s4096 h16 d128 fp16; ...', sets as in bench --cells ('main; packed'), or a "
        "file with one problem per line. Default: d 64, 96, 128 and 256, both dtypes, full and "
        "causal, lengths from 512 to 16384.",
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Time for all problems together: 90s, 10m, 1h, or none. Default: 10m, for "
        "--contribute 2h.",
    ),
]
Refine = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="How often to try the neighbours of each problem's best config. Default: once for "
        "the spaces of families and both, else never.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option("--resume/--fresh", help="Continue from the results in --out, or discard them."),
]
Out = Annotated[
    Path, typer.Option(metavar="FOLDER", help="Folder for the journal and the ranking.")
]
Table = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The table of winners to add to. Default: your own."),
]
Contribute = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Measure what a table for everybody needs, and write the .zip to send.",
    ),
]
Gpu = Annotated[int | None, typer.Option(metavar="N", help="The GPU to measure on. Default: 0.")]
Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="[ADDRESS]",
        help="Measure on all GPUs of the Ray cluster at HOST:PORT. Without an address: the "
        "cluster that this machine is in, else this machine.",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Parallel compilers. Default: FLASHSMITH_JOBS minus one; on a cluster, its cores "
        "minus one for each GPU.",
    ),
]
MaxSpill = Annotated[
    int,
    typer.Option(
        metavar="BYTES", help="Spilled bytes allowed per thread; wgmma kernels may not spill."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List what would be tried. Needs no GPU.")]
BuildOnly = Annotated[
    bool,
    typer.Option("--build-only", help="Compile everything but time nothing. Needs no GPU."),
]

app = App()


class _AddressOrNone(Command):
    """Makes the address after --cluster optional, which Typer cannot do."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Adds the address 'auto' to a --cluster that has none, then calls Typer's method."""
        return super().parse_args(
            ctx,
            [
                f"{arg}=auto" if arg == "--cluster" and following[:1] in ("", "-") else arg
                for arg, following in zip(args, [*args[1:], ""], strict=False)
            ],
        )


@app.command("tune", cls=_AddressOrNone)
def tune_kernels(
    space: Space = None,
    problems: Problems = None,
    budget: Budget = None,
    refine: Refine = None,
    resume: Resume = True,
    out: Out = (Path("profiles/tune")),
    table: Table = None,
    contribute: Contribute = None,
    device: Gpu = None,
    cluster: Cluster = None,
    jobs: Jobs = None,
    max_spill: MaxSpill = 256,
    dry_run: DryRun = False,
    build_only: BuildOnly = False,
    arch: Arch = None,
    as_json: Json = False,
) -> None:
    """Find the fastest kernel for each problem, and enter it in the table of winners.

    After Ctrl-C, the same command continues where it stopped. --arch is for --dry-run and
    --build-only. Exit status 1 if a problem has no kernel that works, or the file to send is not
    complete.
    """
    _check_combinations(arch, device, cluster, dry_run, build_only)
    _check_numbers(max_spill, refine, jobs)
    # Everything that needs no GPU is checked before a GPU is looked for.
    request = _requested(space, problems, budget, refine, jobs, max_spill, table, contribute)
    ordinal = device or 0
    if dry_run or build_only:
        _preview(request, arch, ordinal, build_only, as_json)
        return
    lines = cluster is not None and as_json
    tuned = _measure(request, cluster, ordinal, jobs, out, not resume, table, lines)
    _report(tuned, out, contribute, as_json, lines)


def _check_combinations(
    arch: str | None, device: int | None, cluster: str | None, dry_run: bool, build_only: bool
) -> None:
    """Raises ArgumentError if options are given that exclude each other."""
    if arch is not None and not (dry_run or build_only):
        raise ArgumentError(
            f"arch={arch!r}: only with --dry-run or --build-only; else the GPU determines it"
        )
    if arch is not None and device is not None:
        raise ArgumentError(
            f"arch={arch!r}: not with --device {device}, a GPU that determines it; give one of them"
        )
    if cluster is not None and (dry_run or build_only or device is not None):
        other = "--dry-run" if dry_run else "--build-only" if build_only else "--device"
        raise ArgumentError(
            f"cluster={cluster!r}: not with {other}; a cluster measures on all its GPUs, and "
            "compiles for each"
        )


def _check_numbers(max_spill: int, refine: int | None, jobs: int | None) -> None:
    """Raises ArgumentError for a number that is too small."""
    if max_spill < 0:
        raise ArgumentError(f"max_spill={max_spill}: give 0 or more bytes")
    if refine is not None and refine < 0:
        raise ArgumentError(f"refine={refine}: give 0 or more")
    if jobs is not None and jobs < 1:
        raise ArgumentError(f"jobs={jobs}: give at least 1")


class _Request(NamedTuple):
    """The parts of a tuning request that do not depend on the GPU.

    space: the key of the search space; None means the default space of the GPU.
    problems: None means the default problems.
    refine: how often neighbours are tried; None means once if ``space`` is the key of a space,
        otherwise never.
    """

    space: str | None
    problems: list[Problem] | None
    refine: int | None
    settings: Settings

    def races_on(self, spec: DeviceSpec) -> list[Race]:
        """The races on a GPU."""
        from flashsmith.tuning.space import default_space, space_keys
        from flashsmith.tuning.tune import plan_races

        key = self.space or default_space(spec)
        times = int(key in space_keys()) if self.refine is None else self.refine
        return plan_races(self.problems, spec, key, replace(self.settings, refinements=times))


def _requested(
    space: str | None,
    problems: str | None,
    budget: str | None,
    refine: int | None,
    jobs: int | None,
    max_spill: int,
    table: Path | None,
    contribute: Path | None,
) -> _Request:
    """The request that the options describe. Raises ArgumentError if something is invalid, or a
    file cannot be written."""
    from flashsmith.benchmark.measurement_files import require_writable
    from flashsmith.tuning.contribution import BUDGET, check_contribution, contributed_problems
    from flashsmith.tuning.space import check_space
    from flashsmith.tuning.sweep import Settings
    from flashsmith.tuning.sweep_problems import read_problems
    from flashsmith.tuning.tune import parse_budget

    if table is not None:
        require_writable("table", table)
    if contribute is not None and problems is not None:
        raise ArgumentError(
            f"problems={problems!r}: not with --contribute, which measures what a table needs; "
            "leave one of them out"
        )
    seconds = parse_budget(budget or ("10m" if contribute is None else BUDGET))
    if contribute is not None:
        require_writable("contribute", contribute)
        check_contribution(contribute)
    asked = space or env.KERNELS.raw()
    if asked:
        check_space(asked)
    listed = None if problems is None else read_problems(problems)
    if contribute is not None:
        listed = contributed_problems()
    # One core is left free for timing.
    processes = jobs or max(1, env.jobs() - 1)
    return _Request(
        asked, listed, refine, Settings(budget=seconds, max_spill=max_spill, jobs=processes)
    )


def _preview(
    request: _Request, arch: str | None, ordinal: int, build_only: bool, as_json: bool
) -> None:
    """Lists what would be tried; with `build_only`, compiles it first."""
    from flashsmith.runtime import gpu_count
    from flashsmith.tuning.gpu_runner import NvccCompiler
    from flashsmith.tuning.race import states_of
    from flashsmith.tuning.ranking import plan_summary, print_plan
    from flashsmith.tuning.sweep_progress import SweepProgress
    from flashsmith.tuning.trial import Trials
    from flashsmith.tuning.tune import build_ahead, check_gpu

    if arch is not None:
        spec = device_spec(arch)
    else:
        spec = check_gpu(ordinal) if gpu_count() else DEFAULT_DEVICE
    races = request.races_on(spec)
    if build_only:
        with SweepProgress(quiet=as_json) as progress:
            states = build_ahead(races, NvccCompiler(spec), spec, request.settings, progress)
    else:
        states = states_of(races, Trials(spec))
    if as_json:
        print_json(plan_summary(states))
    else:
        print_plan(make_console(), states)


def _measure(
    request: _Request,
    cluster: str | None,
    ordinal: int,
    jobs: int | None,
    out: Path,
    fresh: bool,
    table: Path | None,
    lines: bool,
) -> SweepResult:
    """Runs the races on a GPU or a cluster. `lines`: whether progress is printed as lines of
    JSON."""
    from flashsmith.tuning.cluster import connect
    from flashsmith.tuning.executor import LOCAL_GPU, LocalExecutor, WorkerGpu
    from flashsmith.tuning.gpu_runner import first_gpu_runner, gpu_runner
    from flashsmith.tuning.race import DEFAULT_HALVING
    from flashsmith.tuning.sweep_progress import SweepProgress
    from flashsmith.tuning.tune import check_gpu, fleets_of, tune_fleets

    with SweepProgress(events=print_json_line if lines else None) as progress:
        if cluster is None:
            runner = gpu_runner(check_gpu(ordinal), ordinal, DEFAULT_HALVING)
            executor: Executor = LocalExecutor.of(runner)
            found = [(WorkerGpu(LOCAL_GPU, runner.origin), runner)]
        else:
            joined = connect(cluster, partial(first_gpu_runner, DEFAULT_HALVING))
            executor, found = joined.executor, list(joined.gpus)
            settings = replace(request.settings, jobs=jobs or joined.jobs)
            request = request._replace(settings=settings)
            for note in joined.notes:
                progress.say(note)
            for gpu, runner in found:
                progress.say(f"{gpu.name}: {runner.device.name}")
                progress.emit("gpu", name=gpu.name, gpu=runner.device.name)
        with closing(executor):
            fleets = fleets_of(found, request.races_on)
            return tune_fleets(
                fleets, executor, request.settings, out, progress, fresh=fresh, table=table
            )


def _report(
    tuned: SweepResult, out: Path, contribute: Path | None, as_json: bool, lines: bool
) -> None:
    """Prints the ranking, and writes the file to send.

    Raises typer.Exit if the sweep was interrupted, or if a problem has no winner or the file to
    send is not complete.
    """
    from flashsmith.tuning.contribution import write_contribution
    from flashsmith.tuning.ranking import print_ranking, summary

    console = make_console()
    if as_json and not lines:
        print_json(summary(tuned.races))
    elif not as_json:
        print_ranking(console, tuned.races, tuned.gpus)
        console.print(f"every kernel: {out / 'ranking.csv'}", soft_wrap=True)
    missing = None if contribute is None else write_contribution(contribute, out, tuned)
    if missing is not None and not as_json:
        for line in missing:
            console.print(f"missing: {line}", soft_wrap=True)
        state = "not complete yet" if missing else "complete"
        console.print(f"the file to send: {contribute}, {state}", soft_wrap=True)
    if tuned.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not tuned.ok or missing:
        raise typer.Exit(FAILED)
