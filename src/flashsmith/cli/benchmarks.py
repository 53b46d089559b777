"""`flashsmith bench`: the speed of kernels, compared with other implementations."""

from __future__ import annotations

from typing import Annotated

import typer

from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.table import make_console
from flashsmith.cli.command import App
from flashsmith.cli.options import FAILED

app = App()


@app.command("bench")
def bench(
    kernels: Annotated[
        str | None,
        typer.Option(
            "--kernels",
            "-k",
            metavar="KEY",
            help="prog, prog-all, tune, space, cover, all, hopper, backward, hopper-backward, "
            "hopper-dq, decode, latent, latent-mma, 'B_r,B_c', a set of your own, or short forms "
            "separated by ';'; 'ours', alone or with others, is attention() without a config. "
            "Default: the environment variable KERNELS, else ours.",
        ),
    ] = None,
    d_heads: Annotated[
        str | None,
        typer.Option(
            "--d_heads", "--d-heads", help="Head dimensions. Default: 128, or the kernels' own."
        ),
    ] = None,
    seq_lens: Annotated[
        str | None,
        typer.Option(
            "--seq_lens", "--seq-lens", help="Sequence lengths. Default: 512,1024,...,16384."
        ),
    ] = None,
    dtypes: Annotated[
        str | None, typer.Option(help="Dtypes. Default: fp16,bf16, or the kernels' dtypes.")
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="Causal instead of full attention.")
    ] = False,
    both: Annotated[bool, typer.Option("--both", help="Both full and causal attention.")] = False,
    gqa: Annotated[
        str | None,
        typer.Option(
            metavar="HEADS",
            help="Heads of k and v, such as 8, or heads of q and of k and v, such as 32:8.",
        ),
    ] = None,
    packed: Annotated[
        bool, typer.Option("--packed", help="Pack sequences of equal length.")
    ] = False,
    problems: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROBLEM",
            help="A problem such as 'b16 s4096 h32:8 d128 bf16 causal', instead of the shape "
            "options above. Repeat the option for more problems, or separate them by ';'.",
        ),
    ] = None,
    cells: Annotated[
        str | None,
        typer.Option(
            metavar="SETS",
            help="Named sets of problems, separated by commas, instead of the shape options: main, "
            "heads, grouped, packed, unseen, verdict (all of the former), public, canonical, "
            "backward, decode, decode_wide, latent_decode.",
        ),
    ] = None,
    peers: Annotated[
        str,
        typer.Option(
            help="fa2, cudnn, mem_efficient, flex, flex_flash, flash_attn_2, flash_attn_3, "
            "flash_attn_4, cudnn_frontend, flashinfer, flashinfer_cuda_cores, flashinfer_xqa, "
            "separated by commas, or all, or none."
        ),
    ] = "all",
    num_warmups: Annotated[
        int | None,
        typer.Option(
            "--num_warmups",
            "--num-warmups",
            help="Untimed launches. Default: as many as take 25 ms.",
        ),
    ] = None,
    runs: Annotated[
        int | None, typer.Option(help="Timed launches. Default: as the protocol sets.")
    ] = None,
    protocol: Annotated[
        str,
        typer.Option(
            help="interleaved: implementations alternate; one_by_one: each finishes "
            "before the next, like do_bench."
        ),
    ] = "interleaved",
    rotation: Annotated[
        int,
        typer.Option(
            min=0, help="Index of the implementation of each problem that is measured first."
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random inputs.")] = 0,
    csv: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Append rows as they are measured; '-' prints them instead."
        ),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the rows; '-' prints them instead."),
    ] = None,
    parquet: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the rows; needs pyarrow.")
    ] = None,
    jsonl: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Append rows as JSON Lines, as they are measured."),
    ] = None,
) -> None:
    """Prove kernels and peers on the same tensors, then time them together. Needs a GPU.

    The default shapes have 16 heads (32 for d 64, 8 for d 256). The batch is 16 up to seq 4096, 8
    up to 8192 and 4 up to 16384. Exit status 1 if a kernel of flashsmith is wrong or cannot run, or
    if a peer is wrong.
    """
    from flashsmith.benchmark.bench import BenchPlan, run_bench, select_implementations
    from flashsmith.benchmark.bench_table import print_rows
    from flashsmith.benchmark.measurement_files import MeasurementFiles
    from flashsmith.benchmark.peers import get_peers
    from flashsmith.benchmark.problems import make_shapes, named_problems, parse_problems
    from flashsmith.benchmark.timing import CudaEvents, Protocol
    from flashsmith.runtime import query_gpu

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
    named = parse_problems(problems) if problems else ()
    named += named_problems(cells) if cells else ()
    plan = BenchPlan(
        problems=tuple(dict.fromkeys(named)) or shapes.problems(),
        configs=configs,
        ours=with_ours,
        peers=get_peers(peers),
        protocol=Protocol.named(protocol.replace("-", "_"), num_warmups, runs),
        seed=seed,
        rotation=rotation,
    )
    plan.check()
    files = MeasurementFiles(csv, json, parquet, jsonl)
    clock = CudaEvents()
    with ProgressReporter() as reporter, files:
        rows = run_bench(plan, query_gpu(0), clock=clock, reporter=reporter, write=files.write)
    if not files.takes_stdout:
        print_rows(make_console(), rows)
    if any(row.is_failure for row in rows):
        raise typer.Exit(FAILED)
