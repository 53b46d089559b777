"""`flashsmith bench`: what its options mean, where its rows go, its exit status."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from flashsmith.benchmark import bench as bench_module
from flashsmith.benchmark import timing
from flashsmith.benchmark.bench import BenchPlan
from flashsmith.benchmark.environment import Environment
from flashsmith.benchmark.measurement import Measurement, problem_columns
from flashsmith.benchmark.measurement_files import COLUMNS, read_rows
from flashsmith.benchmark.peers import PEERS
from flashsmith.benchmark.problems import default_problem
from flashsmith.cli import main
from flashsmith.cli.benchmarks import bench as command
from flashsmith.families import DType, Problem, get_kernel_configs
from flashsmith.runtime import driver

CFG = "(FP16, 64, 64, 64, 4): async+swizzled+load_0_0_0_tiles"
HERE = Environment("Pretended", 90, "1.2", "13.0", "", "0.1.0", "abc", "3.11")


@pytest.fixture(autouse=True)
def _no_selection(monkeypatch) -> None:
    monkeypatch.delenv("KERNELS", raising=False)


class Bench:
    """Takes the place of the measuring; ``plan`` is what was asked for."""

    plan: BenchPlan

    def __init__(self) -> None:
        self.verdicts = {"ours": "pass", "cudnn": "absent"}
        self.error: Exception | None = None

    def run(self, plan: BenchPlan, device: Any, *, write: Any, **_: Any) -> list[Measurement]:
        self.plan = plan
        rows = [
            Measurement(
                implementation=name,
                kind="ours" if name == "ours" else "peer",
                family="",
                config="",
                **problem_columns(plan.problems[0]),
                verdict=verdict,
                ms=1.5 if verdict == "pass" else None,
            )
            for name, verdict in self.verdicts.items()
        ]
        for row in rows:
            write(row)
        if self.error:
            raise self.error
        return rows


@pytest.fixture
def bench(monkeypatch) -> Bench:
    found = Bench()
    monkeypatch.setattr(bench_module, "run_bench", found.run)
    monkeypatch.setattr(timing, "CudaEvents", object)
    monkeypatch.setattr(timing.Environment, "collect", lambda: HERE)
    monkeypatch.setattr("flashsmith.runtime.query_gpu", lambda ordinal: None)
    return found


def start(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["flashsmith", "bench", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    code = stopped.value.code
    return int(code or 0)


def test_without_options_attention_meets_every_peer(bench: Bench, monkeypatch) -> None:
    assert start(monkeypatch) == 0
    assert bench.plan.ours
    assert bench.plan.configs == ()
    assert [peer.name for peer in bench.plan.peers] == list(PEERS)
    sizes = [(p.batch, p.seq_q, p.heads_q, p.d, p.dtype.name) for p in bench.plan.problems]
    assert sizes == [
        (batch, seq, 16, 128, dtype)
        for dtype in ("FP16", "BF16")
        for seq, batch in ((512, 16), (1024, 16), (2048, 16), (4096, 16), (8192, 8), (16384, 4))
    ]
    assert {str(problem.semantics) for problem in bench.plan.problems} == {"plain"}


def test_the_help_names_every_peer() -> None:
    _, option = get_args(get_type_hints(command, include_extras=True)["peers"])
    assert option.help == f"{', '.join(PEERS)}, separated by commas, or all, or none."


@pytest.mark.parametrize(
    ("d", "seq", "heads", "batch"),
    [
        (64, 4097, 32, 8),
        (96, 512, 16, 16),
        (256, 16384, 8, 4),
        (128, 32768, 16, 2),
        (8, 65536, 16, 1),
    ],
)
def test_the_default_shapes(d: int, seq: int, heads: int, batch: int) -> None:
    problem = default_problem(d, seq, DType.BF16)
    assert (problem.heads_q, problem.heads_k, problem.batch) == (heads, heads, batch)


@pytest.mark.parametrize(
    ("options", "problems"),
    [
        ("--d_heads 64 --seq_lens 512 --dtypes fp16", ["b16 s512 h32 d64 fp16"]),
        ("--d-heads 64 --seq-lens=512 --dtypes fp16", ["b16 s512 h32 d64 fp16"]),
        ("--seq_lens 512,511 --dtypes bf16 --causal",
         ["b16 s512 h16 d128 bf16 causal", "b16 s511 h16 d128 bf16 causal"]),
        ("--seq_lens 512 --dtypes fp16 --both",
         ["b16 s512 h16 d128 fp16", "b16 s512 h16 d128 fp16 causal"]),
        ("--seq_lens 512 --dtypes fp16 --gqa 4", ["b16 s512 h16:4 d128 fp16"]),
        ("--seq_lens 512 --dtypes fp16 --gqa 32:8", ["b16 s512 h32:8 d128 fp16"]),
        ("--seq_lens 512 --dtypes fp16 --packed", ["b16 s512 h16 d128 fp16 packed uneven"]),
        ("--problems|b2 s7 h3 d96 bf16;b1 s8 h1 d64 fp16|--problems|b1 s9 h1 d64 fp16",
         ["b2 s7 h3 d96 bf16", "b1 s8 h1 d64 fp16", "b1 s9 h1 d64 fp16"]),
    ],
)  # fmt: skip
def test_options_make_problems(bench: Bench, monkeypatch, options: str, problems: list) -> None:
    words = options.split("|") if "|" in options else options.split()
    assert start(monkeypatch, *words) == 0
    assert [str(problem) for problem in bench.plan.problems] == problems
    assert [Problem.parse(text) for text in problems] == list(bench.plan.problems)


@pytest.mark.parametrize(
    ("options", "configs", "ours"),
    [
        (["--kernels", "prog"], get_kernel_configs("prog"), False),
        (["--kernels", "ours;prog"], get_kernel_configs("prog"), True),
        (["-k", f"{CFG}; ours; {CFG}"], get_kernel_configs(CFG), True),
        (["--kernels", "ours"], [], True),
    ],
)
def test_kernels(bench: Bench, monkeypatch, options: list, configs: list, ours: bool) -> None:
    assert start(monkeypatch, *options) == 0
    assert list(bench.plan.configs) == list(dict.fromkeys(configs))
    assert bench.plan.ours == ours
    if configs:
        assert {p.d for p in bench.plan.problems} == {cfg.d_head for cfg in configs}
        assert {p.dtype for p in bench.plan.problems} == {cfg.dtype for cfg in configs}


def test_kernels_from_the_environment(bench: Bench, monkeypatch) -> None:
    monkeypatch.setenv("KERNELS", CFG)
    assert start(monkeypatch) == 0
    assert [str(cfg) for cfg in bench.plan.configs] == [CFG]
    assert {p.d for p in bench.plan.problems} == {64}
    assert not bench.plan.ours


def test_the_protocol(bench: Bench, monkeypatch) -> None:
    assert start(monkeypatch) == 0
    assert bench.plan.protocol == timing.INTERLEAVED
    assert start(monkeypatch, "--protocol", "one-by-one") == 0
    assert bench.plan.protocol == timing.ONE_BY_ONE
    assert start(monkeypatch, "--runs", "7", "--num_warmups", "2", "--peers", "fa2,cudnn") == 0
    assert bench.plan.protocol.launches(0.001) == (2, 7)
    assert [peer.name for peer in bench.plan.peers] == ["fa2", "cudnn"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--seq_lens", "512,x"], "seq_lens='512,x'"),
        (["--seq_lens", "0"], "seq_lens='0'"),
        (["--d_heads", ","], "d_heads=','"),
        (["--dtypes", "fp32"], "fp32"),
        (["--gqa", "3"], "heads_q=16: must be a multiple of heads_k=3"),
        (["--gqa", "8:x"], "gqa='8:x'"),
        (["--peers", "fa5"], "peers='fa5'"),
        (["--runs", "0"], "runs=0"),
        (["--csv", "rows.txt"], "csv='rows.txt': give a file that ends in .csv"),
        (["--csv", "-", "--json", "-"], "standard output takes one of them"),
        (["--kernels", "prog", "--d_heads", "64"], "none of the 7 serves"),
        (["--problems", "s512"], "problem='s512'"),
        (["--csv", "/dev/null/rows.csv"], "csv='/dev/null/rows.csv': cannot be written"),
        (["--json", "/dev/null/rows.json"], "json='/dev/null/rows.json': cannot be written"),
        (["--parquet", "/dev/null/rows.parquet"], "parquet='/dev/null/rows.parquet': cannot be"),
    ],
)
def test_what_makes_no_sense_is_refused(monkeypatch, capsys, options: list, named: str) -> None:
    """Before anybody asks for a GPU."""
    assert start(monkeypatch, *options) == 2
    assert named in capsys.readouterr().err


def test_an_error_of_the_system_is_a_message(bench: Bench, monkeypatch, capsys) -> None:
    bench.error = OSError(28, "No space left on device")
    assert start(monkeypatch) == 2
    assert capsys.readouterr().err == "flashsmith: [Errno 28] No space left on device\n"


def test_a_negative_seed_is_refused(bench: Bench, monkeypatch, capsys) -> None:
    assert start(monkeypatch, "--seed", "-1") == 2
    assert "Traceback" not in capsys.readouterr().err


def test_without_a_gpu_it_says_what_there_is_instead(monkeypatch, capsys) -> None:
    monkeypatch.setattr(driver, "gpu_count", lambda: 0)
    assert start(monkeypatch, "--csv", "unwritten.csv") == 2
    assert "timing needs an NVIDIA GPU" in capsys.readouterr().err
    assert not Path("unwritten.csv").exists()


def test_rows_go_into_files(bench: Bench, monkeypatch, tmp_path: Path, capsys) -> None:
    files = {kind: tmp_path / f"rows.{kind}" for kind in ("csv", "json")}
    options = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    assert start(monkeypatch, *options) == 0
    assert "| ours " in capsys.readouterr().out
    for path in files.values():
        assert [row.implementation for row in read_rows(path)] == ["ours", "cudnn"]
    # Another run's rows come behind them in the one, and in their place in the other.
    assert start(monkeypatch, *options) == 0
    assert [len(read_rows(path)) for path in files.values()] == [4, 2]


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_rows_take_the_tables_place(bench: Bench, monkeypatch, capsys, kind: str) -> None:
    assert start(monkeypatch, f"--{kind}", "-") == 0
    text = capsys.readouterr().out
    found = json.loads(text) if kind == "json" else list(csv.DictReader(io.StringIO(text)))
    assert [row["contender"] for row in found] == ["ours", "cudnn"]
    assert tuple(found[0]) == COLUMNS


def test_a_run_that_breaks_off_leaves_its_rows(bench: Bench, monkeypatch, tmp_path: Path) -> None:
    from flashsmith.errors import LaunchError

    bench.error = LaunchError("gone")
    path = tmp_path / "rows.json"
    assert start(monkeypatch, "--json", str(path)) == 2
    assert len(read_rows(path)) == 2


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        ({"ours": "pass", "fa2": "absent"}, 0),
        ({"ours": "pass", "fa2": "fail"}, 1),
        ({"ours": "fail"}, 1),
        ({"ours": "error", "fa2": "pass"}, 1),
    ],
)
def test_what_is_wrong_fails_the_command_and_an_absent_peer_does_not(
    bench: Bench, monkeypatch, verdicts: dict, status: int
) -> None:
    bench.verdicts = verdicts
    assert start(monkeypatch) == status


@pytest.mark.gpu
def test_on_a_gpu_everybody_is_proven_and_timed(monkeypatch, tmp_path: Path, capsys) -> None:
    path = tmp_path / "rows.csv"
    status = start(
        monkeypatch, "--kernels", f"ours;{CFG}", "--peers", "fa2,cudnn", "--csv", str(path),
        "--problems", "b2 s512 h4 d64 fp16", "--problems", "b2 s300 h4:2 d64 fp16 causal",
        "--problems", "b2 s256 h4 d64 fp16 packed",
    )  # fmt: skip
    assert status == 0, capsys.readouterr().out
    rows = read_rows(path)
    ours = [row for row in rows if row.kind == "ours"]
    assert len(ours) == 6
    for row in ours:
        assert row.verdict == "pass"
        assert row.ms is not None
        assert row.ms > 0
        assert row.registers
        assert row.gpu
        assert row.driver
    assert len(rows) == 12
