"""`flashsmith ncu` and `flashsmith roofline`: hardware counters, and the peak rates of the GPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.table import make_console
from flashsmith.cli.command import App
from flashsmith.cli.options import FAILED, Causal, Json, Kernels, SeqLens, print_json
from flashsmith.errors import ArgumentError, LaunchError, ProfilerError
from flashsmith.families import get_kernel_configs

if TYPE_CHECKING:
    from flashsmith.benchmark.ncu import ProfileRow

DHeads = Annotated[
    str | None,
    typer.Option("--d_heads", "--d-heads", help="Head dimensions. Default: the kernels' own."),
]
Dtypes = Annotated[str | None, typer.Option(help="Dtypes. Default: the kernels' dtypes.")]
Problems = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PROBLEM",
        help="A problem such as 'b8 s1:65536 h32:8 d128 bf16 decode', instead of the shape "
        "options above. Repeat the option for more problems, or separate them by ';'.",
    ),
]
Runs = Annotated[
    int, typer.Option(help="Launches of each kernel; the one with the median time counts.")
]
GrowingCsv = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Append the rows of one length after another. Kernels that FILE already has as "
        "right are not profiled again. '-' prints the rows instead.",
    ),
]
GrowingJsonl = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Like --csv, but as JSON Lines; replaces --csv."),
]

app = App()


@app.command("roofline")
def roofline(
    show: Annotated[
        bool, typer.Option("--show", help="Print stored measurements; needs no GPU.")
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With --show: the GPU to show, instead of this machine's first."
        ),
    ] = None,
    ms: Annotated[
        float, typer.Option(help="Duration of one timed launch, in milliseconds.")
    ] = 50.0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Also write the JSON to this file."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the peak rates of this GPU and store them: MMAs, exponentials, L2 and DRAM.

    This takes about fifteen seconds. Exit status 1 if a microbenchmark's output is wrong.
    """
    from flashsmith.benchmark.measurement_files import require_writable
    from flashsmith.benchmark.roofline import load_roofline, save_roofline, stored_rooflines
    from flashsmith.benchmark.roofline.roofline_table import print_roofline

    if output is not None:
        require_writable("output", output)
    if show:
        found = load_roofline(gpu)
        if found is None:
            known = ", ".join(repr(one.gpu) for one in stored_rooflines()) or "none"
            raise ArgumentError(
                f"gpu={gpu!r}: no measurements of it are stored here; stored are: {known}. "
                "On the GPU's machine, run 'flashsmith roofline'"
            )
    elif gpu is not None:
        raise ArgumentError(
            f"gpu={gpu!r}: goes with --show; without it, this machine's first GPU is measured"
        )
    else:
        from flashsmith.benchmark.roofline.measuring import measure_roofline

        with ProgressReporter() as reporter:
            found = measure_roofline(ms, reporter.step)
            reporter.say(f"stored in {save_roofline(found)}")
    if output is not None:
        save_roofline(found, output)
    if as_json:
        print_json(found.to_json())
    else:
        print_roofline(make_console(), found)
    if not found.ok:
        raise typer.Exit(FAILED)


@app.command("ncu")
def ncu(
    kernels: Kernels = None,
    seq_lens: SeqLens = None,
    d_heads: DHeads = None,
    dtypes: Dtypes = None,
    causal: Causal = False,
    problems: Problems = None,
    runs: Runs = 1,
    csv: GrowingCsv = None,
    jsonl: GrowingJsonl = None,
    as_json: Json = False,
) -> None:
    """Profile kernels with Nsight Compute: pipes, occupancy, shared memory, traffic, waits.

    Needs a GPU, and a selection by --kernels or KERNELS. The shapes are the same as in 'flashsmith
    bench'. Exit status 1 if a kernel is wrong or cannot run here, 2 if the profiler fails.
    """
    from flashsmith.benchmark.ncu import ProfilePlan, ProfileRowFile, run_profile, settled
    from flashsmith.benchmark.ncu.profiler import Profiler, find_ncu
    from flashsmith.benchmark.problems import make_shapes, parse_problems
    from flashsmith.runtime import gpu_count, query_gpu

    # The GPU is checked first: without one, no other error matters.
    if gpu_count() == 0:
        raise LaunchError(
            "ncu needs an NVIDIA GPU, and there is none here; 'flashsmith explain' counts "
            "instructions and bank conflicts in the emulator"
        )
    if jsonl is not None and (csv is not None or Path(jsonl).suffix != ".jsonl"):
        raise ArgumentError(f"jsonl={jsonl!r}: give a file that ends in .jsonl, and no --csv")
    grows = jsonl or (csv if csv != "-" else None)
    configs = tuple(dict.fromkeys(get_kernel_configs(kernels)))
    shapes = make_shapes(configs, d_heads=d_heads, seq_lens=seq_lens, dtypes=dtypes, causal=causal)
    plan = ProfilePlan(configs, parse_problems(problems or ()) or shapes.problems(), runs)
    plan.uses()
    executable = find_ncu()
    rows: list[ProfileRow] = []
    failure: ProfilerError | None = None
    with ExitStack() as stack:
        reporter = stack.enter_context(ProgressReporter())
        ledger = stack.enter_context(ProfileRowFile(grows)) if grows else None
        known = tuple(ledger.rows) if ledger else ()
        rows += settled(plan, query_gpu(0), known)

        def write(row: ProfileRow) -> None:
            rows.append(row)
            if ledger:
                ledger.write(row)

        try:
            run_profile(plan, Profiler(executable), query_gpu(0), known, write, reporter)
        except ProfilerError as error:
            failure = error
    _print_rows(rows, as_csv=csv == "-", as_json=as_json)
    if failure:
        raise failure
    if any(row.verdict != "pass" for row in rows):
        raise typer.Exit(FAILED)


def _print_rows(rows: Sequence[ProfileRow], *, as_csv: bool, as_json: bool) -> None:
    """Prints a profile as CSV, as JSON or as a table."""
    from flashsmith.benchmark.ncu import profile_as_json, write_profile
    from flashsmith.benchmark.ncu.profile_table import print_profile

    if as_csv:
        write_profile(rows, sys.stdout)
    elif as_json:
        print_json(profile_as_json(rows))
    elif rows:
        print_profile(make_console(), rows)
