"""`flashsmith bench`: the speed of kernels, compared with other implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.table import make_console
from flashsmith.cli.command import App
from flashsmith.cli.options import FAILED, KERNEL_KEYS, Causal, Seed, SeqLens

if TYPE_CHECKING:
    from flashsmith.benchmark.bench import BenchPlan
    from flashsmith.benchmark.measurement_files import MeasurementFiles
    from flashsmith.families import Problem

KernelsOrOurs = Annotated[
    str | None,
    typer.Option(
        "--kernels",
        "-k",
        metavar="KEY",
        help=f"{KERNEL_KEYS}; 'ours', alone or with others, is attention() without a config. "
        "Default: the environment variable KERNELS, else ours.",
    ),
]
DHeads = Annotated[
    str | None,
    typer.Option(
        "--d_heads", "--d-heads", help="Head dimensions. Default: 128, or the kernels' own."
    ),
]
Dtypes = Annotated[
    str | None, typer.Option(help="Dtypes. Default: fp16,bf16, or the kernels' dtypes.")
]
Both = Annotated[bool, typer.Option("--both", help="Both full and causal attention.")]
Gqa = Annotated[
    str | None,
    typer.Option(
        metavar="HEADS",
        help="Heads of k and v, such as 8, or heads of q and of k and v, such as 32:8.",
    ),
]
Packed = Annotated[bool, typer.Option("--packed", help="Pack sequences of equal length.")]
Problems = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PROBLEM",
        help="A problem such as 'b16 s4096 h32:8 d128 bf16 causal', instead of the shape "
        "options above. Repeat the option for more problems, or separate them by ';'.",
    ),
]
Cells = Annotated[
    str | None,
    typer.Option(
        metavar="SETS",
        help="Named sets of problems, separated by commas, instead of the shape options: main, "
        "heads, grouped, packed, unseen, verdict (all of the former), public, canonical, "
        "backward, decode, decode_wide, latent_decode.",
    ),
]
Peers = Annotated[
    str,
    typer.Option(
        help="fa2, cudnn, mem_efficient, flex, flex_flash, flash_attn_2, flash_attn_3, "
        "flash_attn_4, cudnn_frontend, flashinfer, flashinfer_cuda_cores, flashinfer_xqa, "
        "separated by commas, or all, or none."
    ),
]
NumWarmups = Annotated[
    int | None,
    typer.Option(
        "--num_warmups",
        "--num-warmups",
        help="Untimed launches. Default: as many as take 25 ms.",
    ),
]
Runs = Annotated[int | None, typer.Option(help="Timed launches. Default: as the protocol sets.")]
ProtocolName = Annotated[
    str,
    typer.Option(
        help="interleaved: implementations alternate; one_by_one: each finishes "
        "before the next, like do_bench."
    ),
]
Rotation = Annotated[
    int,
    typer.Option(min=0, help="Index of the implementation of each problem that is measured first."),
]
CsvFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Append rows as they are measured; '-' prints them instead."),
]
JsonFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Write the rows; '-' prints them instead."),
]
ParquetFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write the rows; needs pyarrow.")
]
JsonlFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Append rows as JSON Lines, as they are measured."),
]

app = App()


@app.command("bench")
def bench(
    kernels: KernelsOrOurs = None,
    d_heads: DHeads = None,
    seq_lens: SeqLens = None,
    dtypes: Dtypes = None,
    causal: Causal = False,
    both: Both = False,
    gqa: Gqa = None,
    packed: Packed = False,
    problems: Problems = None,
    cells: Cells = None,
    peers: Peers = "all",
    num_warmups: NumWarmups = None,
    runs: Runs = None,
    protocol: ProtocolName = "interleaved",
    rotation: Rotation = 0,
    seed: Seed = 0,
    csv: CsvFile = None,
    json: JsonFile = None,
    parquet: ParquetFile = None,
    jsonl: JsonlFile = None,
) -> None:
    """Prove kernels and peers on the same tensors, then time them together. Needs a GPU.

    The default shapes have 16 heads (32 for d 64, 8 for d 256). The batch is 16 up to seq 4096, 8
    up to 8192 and 4 up to 16384. Exit status 1 if a kernel of flashsmith is wrong or cannot run, or
    if a peer is wrong.
    """
    from flashsmith.benchmark.bench import BenchPlan, select_implementations
    from flashsmith.benchmark.measurement_files import MeasurementFiles
    from flashsmith.benchmark.peers import get_peers
    from flashsmith.benchmark.problems import make_shapes
    from flashsmith.benchmark.timing import Protocol

    configs, with_ours = select_implementations(kernels)
    shapes = make_shapes(
        configs,
        d_heads=d_heads,
        seq_lens=seq_lens,
        dtypes=dtypes,
        causal=causal,
        both=both,
        gqa=gqa,
        packed=packed,
    )
    plan = BenchPlan(
        problems=_named(problems, cells) or shapes.problems(),
        configs=configs,
        ours=with_ours,
        peers=get_peers(peers),
        protocol=Protocol.named(protocol.replace("-", "_"), num_warmups, runs),
        seed=seed,
        rotation=rotation,
    )
    plan.check()
    _measure(plan, MeasurementFiles(csv, json, parquet, jsonl))


def _named(problems: Sequence[str] | None, cells: str | None) -> tuple[Problem, ...]:
    """The problems that were given directly and the problems of the named sets, without
    duplicates."""
    from flashsmith.benchmark.problems import named_problems, parse_problems

    named = parse_problems(problems) if problems else ()
    named += named_problems(cells) if cells else ()
    return tuple(dict.fromkeys(named))


def _measure(plan: BenchPlan, files: MeasurementFiles) -> None:
    """Runs a plan, writes its rows to the files and prints them."""
    from flashsmith.benchmark.bench import run_bench
    from flashsmith.benchmark.bench_table import print_rows
    from flashsmith.benchmark.timing import CudaEvents
    from flashsmith.runtime import query_gpu

    clock = CudaEvents()
    with ProgressReporter() as reporter, files:
        rows = run_bench(plan, query_gpu(0), clock=clock, reporter=reporter, write=files.write)
    if not files.takes_stdout:
        print_rows(make_console(), rows)
    if any(row.is_failure for row in rows):
        raise typer.Exit(FAILED)
