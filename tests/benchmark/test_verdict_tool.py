"""tools/benchmark/verdict.py and tools/gpu/verdict.sh on made-up rows, and the sets of cells."""

from __future__ import annotations

import csv
import json
import math
import os
import stat
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from flashsmith.benchmark.measurement import Measurement, problem_columns
from flashsmith.benchmark.measurement_files import write_rows
from flashsmith.benchmark.problems import PROBLEM_SETS, named_problems
from flashsmith.errors import ArgumentError
from flashsmith.families import DType, Problem

ROOT = Path(__file__).parents[2]
KNOWN = "b16 s4096 h16 d128 fp16"  # FA3 / cuDNN 631 / 572 = 1.103, best / cuDNN 1.10
GRADIENTS = "b16 s4096 h16 d128 bf16 backward causal"
UNKNOWN = "b1 s4096 h32:8 d128 bf16 causal"


@pytest.fixture
def tool(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("benchmark/verdict.py")


def rows(problem: str, protocol: str = "interleaved", **tflops: float | None) -> list[Measurement]:
    """A cell's rows: implementations with their TFLOP/s, None for one that was wrong."""
    return [
        Measurement(
            implementation=name,
            kind="ours" if name == "ours" else "peer",
            family="wgmma" if name == "ours" else "",
            config="(a config)" if name == "ours" else "",
            **problem_columns(Problem.parse(problem)),
            verdict="fail" if rate is None else "pass",
            tflops=rate,
            protocol=protocol,
            gpu="NVIDIA H200",
        )
        for name, rate in tflops.items()
    ]


def written(folder: Path, *rounds: list[Measurement]) -> list[str]:
    paths = [folder / f"round-{number}.csv" for number in range(len(rounds))]
    for path, found in zip(paths, rounds, strict=True):
        write_rows(path, found)
    return list(map(str, paths))


def cells(tool: ModuleType, folder: Path, *rounds: list[Measurement]) -> list:
    found = [tool.read_round(Path(path)) for path in written(folder, *rounds)]
    return tool.make_cells(found, tool.read_best(tool.BEST))


@pytest.mark.parametrize(
    ("count", "left_out"), [(1, None), (5, None), (6, 0), (8, 0), (9, 1), (15, 3), (21, 5)]
)
def test_the_interval_is_of_order_statistics(
    tool: ModuleType, count: int, left_out: int | None
) -> None:
    """The textbook's ranks: of 15 values the 4th and the 12th."""
    shares = [1 + number / 100 for number in range(count)]
    pooled = tool.PooledFigure.of(shares[::-1])
    place = left_out or 0
    assert pooled.certain == (left_out is not None)
    assert (pooled.low, pooled.high) == (shares[place], shares[-1 - place])
    assert pooled.low <= pooled.median <= pooled.high


def test_shares_are_taken_within_a_round(tool: ModuleType, tmp_path: Path) -> None:
    """The clock halves in every other round: the shares do not change."""
    rounds = [
        rows(KNOWN, ours=600 / slow, cudnn=500 / slow, fa2=300 / slow, flash_attn_4=550 / slow)
        for slow in (1, 2, 1, 2, 1, 2)
    ]
    (cell,) = cells(tool, tmp_path, *rounds)
    assert cell.over("cudnn") == tool.PooledFigure(1.2, 1.2, 1.2, True)
    assert cell.over("fa2").median == 2.0
    assert cell.over_peers.median == pytest.approx(600 / 550)
    # FA3 is not there: cuDNN times its ratio stands in; with FA4 in the round for it alone.
    assert cell.over_other_day.median == pytest.approx(600 / (500 * 631 / 572))
    assert cell.over_best.median == pytest.approx(600 / (500 * 631 / 572))


def test_what_was_measured_needs_no_ratio(tool: ModuleType, tmp_path: Path) -> None:
    (without_4,) = cells(tool, tmp_path, rows(KNOWN, ours=600, cudnn=500))
    assert without_4.over_other_day.median == pytest.approx(600 / (500 * 1.10))
    both = rows(KNOWN, ours=600, cudnn=500, flash_attn_3=560, flash_attn_4=550)
    (with_both,) = cells(tool, tmp_path, both)
    assert with_both.over_other_day is None
    assert with_both.over_best.median == pytest.approx(600 / 560)
    (unknown,) = cells(tool, tmp_path, rows(UNKNOWN, ours=600, cudnn=500, fa2=510))
    assert unknown.over_other_day is None
    assert unknown.over_best.median == pytest.approx(600 / 510)


def test_revisions_are_pooled_where_their_kernels_were_compared(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = [
        [replace(row, revision=revision) for row in rows(KNOWN, ours=600, cudnn=500)]
        for revision in ("csrc a", "csrc b")
    ]
    paths = written(tmp_path, *rounds)
    assert tool.main(paths) == 2
    assert "rounds of revision csrc a and csrc b are not pooled" in capsys.readouterr().err
    assert tool.main([*paths, "--same-code"]) == 0
    assert "(csrc a and csrc b); interleaved, 2 round(s)" in capsys.readouterr().out
    # Not where another kernel was chosen.
    rounds[1][0] = replace(rounds[1][0], config="(another)")
    assert tool.main([*written(tmp_path, *rounds), "--same-code"]) == 2


def test_rounds_of_one_packed_file_are_those_of_many(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = [
        rows(KNOWN, ours=o, cudnn=500, flash_attn_4=580) + rows(UNKNOWN, ours=o, cudnn=600)
        for o in (600, 610, 590, 605, 595, 601)
    ]
    paths, packed = written(tmp_path, *rounds), tmp_path / "all.csv.gz"
    assert tool.main([*paths, "--pack", str(packed)]) == 0
    of_many = capsys.readouterr().out
    assert "6 round(s)" in of_many
    assert list(tool.read_packed(packed)) == [f"round-{number}" for number in range(6)]
    assert tool.main([str(packed)]) == 0
    assert capsys.readouterr().out == of_many
    with pytest.raises(SystemExit):
        tool.main([str(packed), "--pack", str(packed)])
    # A round that lacks a cell of the others is named.
    write_rows(paths[2], rounds[2][:3])
    assert tool.main([*paths, "--pack", str(packed)]) == 1
    capsys.readouterr()
    assert tool.main([str(packed)]) == 1
    assert "round-2: ours on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ours", "cudnn", "fa4", "verdict"),
    [
        ((600,) * 6, 500, 580, "ahead"),  # by 3.4% in turns, by 8.8% beside FA3's ratio
        ((600,) * 6, 530, 580, "level"),  # 2.6% beside the ratio: no claim finer than 3%
        ((560,) * 6, 515, 550, "level"),  # 1.4% behind by the ratio: none either
        ((540,) * 6, 515, 530, "behind"),  # 4.9% behind by the ratio
        ((600, 600, 600, 600, 600, 570), 500, 580, "level"),  # one of six rounds says otherwise
        ((570,) * 6, 480, 580, "behind"),  # in turns any margin counts that all rounds show
    ],
)
def test_what_is_claimed(
    tool: ModuleType,
    tmp_path: Path,
    ours: tuple[float, ...],
    cudnn: float,
    fa4: float,
    verdict: str,
) -> None:
    rounds = [rows(KNOWN, ours=o, cudnn=cudnn, flash_attn_4=fa4) for o in ours]
    (cell,) = cells(tool, tmp_path, *rounds)
    assert cell.verdict == verdict


def test_few_rounds_and_implementations_one_after_the_other_claim_nothing(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [rows(KNOWN, ours=900, cudnn=500)] * 5
    assert tool.main(written(tmp_path, *few)) == 0
    said = capsys.readouterr().out
    assert "Fewer than six rounds" in said
    assert "nothing claimed" in said
    in_order = [rows(KNOWN, "one_by_one", ours=900, cudnn=500)] * 6
    assert tool.main(written(tmp_path, *in_order)) == 0
    said = capsys.readouterr().out
    assert "were not interleaved: nothing is claimed" in said
    assert "nothing claimed." in said


def test_the_table(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours is 660 to 710 in six rounds; the median 685, over cuDNN 1.37."""
    rounds = [
        rows(KNOWN, ours=660 + 10 * number, cudnn=500, fa2=300)
        + rows(UNKNOWN, ours=600, cudnn=500, fa2=300)
        for number in range(6)
    ]
    assert tool.main(written(tmp_path, *rounds)) == 0
    said = capsys.readouterr().out
    assert (
        "| 16 | 4096 | 685 | 500 | 300 | 1.370 (1.320 to 1.420) | 1.245 (1.200 to 1.291) | 6 | "
        "ahead | (a config) |" in said
    )
    assert "| 1 | 4096 | 600 | 500 | 300 | 1.200 | 6 | ahead | (a config) |" in said
    assert (
        "ours / best: geometric mean 1.245 (1.200 to 1.291) over 1 cells, least 1.245 (1.200 to "
        f"1.291) ({KNOWN}); 1 ahead, 0 level, 0 behind." in said
    )
    assert "ours / cuDNN: geometric mean 1.282 over 2 cells, least 1.200" in said
    assert "NVIDIA H200" in said
    assert "interleaved, 6 round(s)" in said


def test_what_is_wrong_or_missing_is_said(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = [
        rows(KNOWN, ours=550, cudnn=500) + rows(UNKNOWN, ours=None, cudnn=490),
        rows(KNOWN, ours=560, cudnn=500),
    ]
    assert tool.main(written(tmp_path, *rounds)) == 1
    out, err = capsys.readouterr()
    assert "| 555 | 500 |" in out
    assert f"round-0.csv: ours on '{UNKNOWN}': fail" in err
    assert f"round-1.csv: ours on '{UNKNOWN}' was not measured" in err
    twice = rows(KNOWN, ours=550, cudnn=500) * 2
    assert tool.main(written(tmp_path, twice)) == 2
    assert "a file is one round" in capsys.readouterr().err


def test_a_wrong_peer_is_said(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rows(KNOWN, ours=600, cudnn=500, fa2=None)
    assert tool.main(written(tmp_path, found)) == 1
    assert f"round-0.csv: fa2 on '{KNOWN}': fail" in capsys.readouterr().err


def test_a_wrong_or_absent_peer_takes_no_part(tool: ModuleType, tmp_path: Path) -> None:
    found = rows(KNOWN, ours=600, cudnn=500, fa2=None)
    found += [replace(rows(KNOWN, flash_attn_4=None)[0], verdict="absent", note="not installed")]
    (cell,) = cells(tool, tmp_path, found)
    assert cell.over("fa2") is None
    assert cell.over_other_day.median == pytest.approx(600 / 550)
    (alone,) = cells(tool, tmp_path, rows(UNKNOWN, ours=600))
    assert alone.over_best is None
    assert "no peer was measured" in tool.report([alone], 1)


@pytest.mark.parametrize("column", ["gpu", "revision", "protocol"])
def test_rounds_of_other_settings_are_not_pooled(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], column: str
) -> None:
    other = [replace(row, **{column: "other"}) for row in rows(KNOWN, ours=550, cudnn=500)]
    paths = written(tmp_path, rows(KNOWN, ours=550, cudnn=500), other)
    assert tool.main(paths) == 2
    assert f"rounds of {column} " in capsys.readouterr().err


def test_a_cell_that_lacks_a_round_keeps_no_others_mean(tool: ModuleType, tmp_path: Path) -> None:
    """The mean's spread is of rounds that have every cell; without any, of none."""
    second = UNKNOWN
    rounds = [rows(KNOWN, ours=550, cudnn=500, flash_attn_3=500, flash_attn_4=500)] * 6
    rounds[0] = rounds[0] + rows(second, ours=600, cudnn=500)
    found = cells(tool, tmp_path, *rounds)
    assert [len(cell.rounds) for cell in found] == [6, 1]
    assert "geometric mean 1.100 over 1 cells" in tool.report(found, 6)


def test_the_public_cells_are_those_whose_best_is_known(tool: ModuleType) -> None:
    assert set(tool.read_best(tool.BEST)) == set(named_problems("public,backward"))


def test_the_best_gradients_are_of_a_cells_two_dtypes(tool: ModuleType) -> None:
    """The geometric mean of what either row of another day has for best over cuDNN."""
    with tool.BEST[1].open() as file:
        read = {Problem.parse(row["problem"]): row for row in csv.DictReader(file)}

    def ratio(problem: Problem) -> float:
        row = read[problem]
        return max(int(row[name]) for name in ("fa3", "fa4", "cudnn")) / int(row["cudnn"])

    for problem, row in read.items():
        both = [ratio(replace(problem, dtype=dtype)) for dtype in DType]
        assert float(row["best_over_cudnn"]) == pytest.approx(math.prod(both) ** 0.5, abs=6e-4)
    mean = statistics.geometric_mean(float(row["best_over_cudnn"]) for row in read.values())
    assert mean == pytest.approx(1.173, abs=1.5e-3)


def test_gradients_stand_beside_the_best_of_another_day_whoever_is_there(
    tool: ModuleType, tmp_path: Path
) -> None:
    rounds = [
        rows(GRADIENTS, ours=ours, cudnn=500, flash_attn_3=560, flash_attn_4=550)
        for ours in (600, 620, 610)
    ]
    found = cells(tool, tmp_path, *rounds)
    assert found[0].over_other_day.median == pytest.approx(610 / (500 * 1.158))
    said = tool.report(found, 3)
    assert "ours / best, by another day's ratio: geometric mean 1.054 over 1 cells" in said
    assert "TFLOP/s of 10 (backward) b h s_q s_k d, halved when causal" in said


def test_the_verdicts_cells() -> None:
    sizes = {name: len(named_problems(name)) for name in PROBLEM_SETS}
    assert sizes["verdict"] == 136
    assert sizes["public"] == sizes["canonical"] == 28
    assert sizes["backward"] == 24
    assert (sizes["decode"], sizes["decode_wide"], sizes["latent_decode"]) == (22, 10, 12)
    assert {p.page for p in named_problems("decode")} == {0, 16}
    assert set(named_problems("public")) < set(named_problems("verdict"))
    assert named_problems("main,main") == named_problems("main")
    with pytest.raises(ArgumentError, match=r"cells='nonsense': nonsense: allowed are main, heads"):
        named_problems("nonsense")


def test_json_rows_serve_as_well(tool: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "round.json"
    write_rows(path, [replace(row, note="x") for row in rows(KNOWN, ours=550, cudnn=500)])
    assert json.loads(path.read_text())
    assert tool.main([str(path)]) == 0


# --- the script, with a stand-in for the benchmark -----------------------------------------------

STAND_IN = """#!/bin/sh
# bench: notes its arguments and copies rows; anything else is Python's.
if [ "$1 $2 $3" = "-m flashsmith bench" ]; then
    echo "$@" >> "$NOTES"
    [ "$(wc -l < "$NOTES")" = "$FAILS_AT" ] && { echo "the GPU fell off"; exit 3; }
    while [ "$1" != --csv ]; do shift; done
    exec cp "$ROWS" "$2"
fi
exec "$REAL_PYTHON" "$@"
"""


@pytest.fixture
def verdict_sh(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(STAND_IN)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    measured = tmp_path / "rows.csv"
    write_rows(measured, rows(KNOWN, ours=600, cudnn=500, fa2=300, flash_attn_4=560))

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(ROOT / "tools" / "gpu" / "verdict.sh"), *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            env={
                **os.environ,
                "PATH": f"{python.parent}:{os.environ['PATH']}",
                "NOTES": str(tmp_path / "notes"),
                "ROWS": str(measured),
                "REAL_PYTHON": sys.executable,
                "FAILS_AT": "",
                **variables,
            },
        )

    return run


def test_the_script_pools_the_rounds_of_all_runs(
    verdict_sh: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = verdict_sh(str(out), "0", ROUNDS="2")
    assert first.returncode == 0, first.stderr
    assert "interleaved, 2 round(s)" in first.stdout
    # A run that is done again replaces its own rounds; one that fails keeps those before it.
    last = verdict_sh(str(out), "1", ROUNDS="3", FAILS_AT="4")
    assert last.returncode == 3
    assert "the GPU fell off" in last.stderr
    assert "interleaved, 3 round(s)" in last.stdout
    assert (out / "verdict-public.md").read_text() == last.stdout
    assert {path.name for path in out.glob("*.csv")} == {
        "verdict-public-0-0.csv",
        "verdict-public-0-1.csv",
        "verdict-public-1-0.csv",
    }
    calls = (tmp_path / "notes").read_text().splitlines()
    assert all("--protocol interleaved" in call for call in calls)
    assert all("--peers fa2,cudnn,flash_attn_4" in call for call in calls)
    assert [call.split("--rotation ")[1].split()[0] for call in calls] == ["0", "1", "1", "2"]


def test_the_script_says_how_it_is_used(
    verdict_sh: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    for arguments in ((), (str(tmp_path),), (str(tmp_path), "first")):
        done = verdict_sh(*arguments)
        assert done.returncode != 0
        assert "usage: tools/gpu/verdict.sh OUT RUN [SETS]" in done.stderr
