"""Reading result files: each kind by its content, and errors that name the file and the place."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from ablations import TIMED
from sample_rows import PROFILED, ROOFLINE, bench_rows

from flashsmith.benchmark.measurement_files import write_rows
from flashsmith.benchmark.ncu import write_profile
from flashsmith.benchmark.report import make_page, read_results, with_stored_rooflines
from flashsmith.benchmark.report.results import Results
from flashsmith.benchmark.roofline import save_roofline
from flashsmith.benchmark.roofline.roofline_table import print_roofline
from flashsmith.benchmark.table import make_console
from flashsmith.errors import ArgumentError

ROOT = Path(__file__).parents[3]
RAW = ROOT / "benchmarks" / "h200"
SHIPPED = ROOT / "src" / "flashsmith" / "chooser" / "tables" / "h200.json"
ENDINGS = [".csv", ".json", *([".parquet"] if importlib.util.find_spec("pyarrow") else [])]


def read(*paths: Path) -> Results:
    return read_results(paths)


def written(path: Path, value: object) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.mark.parametrize("ending", ENDINGS)
def test_rows_of_a_benchmark(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"rows{ending}"
    write_rows(path, bench_rows())
    results = read(path)
    assert results.rows == tuple(bench_rows())
    assert [(s.path, s.what, s.count) for s in results.sources] == [(path, "benchmark rows", 24)]


def test_an_ablation(tmp_path: Path) -> None:
    assert read(written(tmp_path / "l.json", TIMED.to_json())).ablations == (TIMED,)


def test_a_roofline(tmp_path: Path) -> None:
    assert read(written(tmp_path / "r.json", ROOFLINE.to_json())).rooflines == (ROOFLINE,)


def test_profiled_kernels(tmp_path: Path) -> None:
    with (tmp_path / "ncu.csv").open("w") as file:
        write_profile([PROFILED], file)
    assert read(tmp_path / "ncu.csv").profiles == (PROFILED,)


def test_several_files_are_one_result(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.csv", bench_rows()[:3])
    write_rows(tmp_path / "b.json", bench_rows()[3:])
    ablation = written(tmp_path / "l.json", TIMED.to_json())
    results = read(tmp_path / "a.csv", ablation, tmp_path / "b.json")
    assert results.rows == tuple(bench_rows())
    assert [source.path.name for source in results.sources] == ["a.csv", "l.json", "b.json"]


def test_rows_that_are_in_two_files_count_once(tmp_path: Path) -> None:
    rows = [replace(row, max_error=math.nan) for row in bench_rows()]
    write_rows(tmp_path / "ranking.csv", rows[:5])
    write_rows(tmp_path / "ranking.json", rows)
    results = read(tmp_path / "ranking.csv", tmp_path / "ranking.json")
    assert len(results.rows) == 24
    assert [source.what for source in results.sources] == [
        "benchmark rows",
        "benchmark rows, 5 of them also in earlier files",
    ]


def test_rows_of_one_file_are_all_kept(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.csv", bench_rows()[:1] * 2)
    assert len(read(tmp_path / "a.csv").rows) == 2


def test_a_table_of_winners_is_passed_over(tmp_path: Path) -> None:
    write_rows(tmp_path / "ranking.csv", bench_rows())
    results = read(tmp_path / "ranking.csv", SHIPPED)
    assert results.rows == tuple(bench_rows())
    assert results.sources[1].what == "a table of winners, which is not a measurement: passed over"


# --- older files ---------------------------------------------------------------------------------


def test_the_speed_of_semantics_as_it_was_first_measured() -> None:
    rows = read(RAW / "semantics-speed.csv").rows
    assert len(rows) == 200
    first, second = rows[:2]
    assert (first.implementation, first.kind, second.implementation, second.kind) == (
        "ours", "ours", "fa2", "peer",
    )  # fmt: skip
    assert first.tflops == pytest.approx(339.6, abs=0.1)
    flop = first.problem.attn_flop()
    assert first.tflops == pytest.approx(flop / first.ms / 1e9)
    packed = next(row for row in rows if row.semantics == "causal+packed")
    assert packed.tflops == pytest.approx(packed.problem.attn_flop() / packed.ms / 1e9)


def test_the_kernels_of_a_run() -> None:
    rows = read(RAW / "factory-run-prog.json").rows
    assert len(rows) == 7
    assert rows[1].registers == 174
    assert rows[1].tflops == pytest.approx(245.7, abs=0.1)
    assert {row.gpu for row in rows} == {"NVIDIA H200"}


def test_a_run_without_a_gpu_has_its_failures_and_no_rates(tmp_path: Path) -> None:
    value = json.loads((RAW / "factory-run-prog.json").read_text())
    value |= {"backend": "emulator", "timed": None, "device": "A100"}
    for kernel in value["kernels"]:
        kernel["timing"] = None
    value["kernels"][2] |= {"verdict": "FAIL", "problems": ["o is NaN"]}
    (row,) = read(written(tmp_path / "run.json", value)).rows
    assert (row.verdict, row.note, row.gpu, row.ms) == ("fail", "o is NaN", "", None)


def test_a_runs_spread_and_an_error_that_is_no_number_are_kept(tmp_path: Path) -> None:
    value = json.loads((RAW / "factory-run-prog.json").read_text())
    first, second = value["kernels"][:2]
    first |= {"verdict": "FAIL", "max_error": "inf"}
    second["timing"]["spread"] = 0.02
    rows = read(written(tmp_path / "run.json", value)).rows
    assert rows[0].max_error == math.inf
    assert [row.spread for row in rows[:3]] == [None, 0.02, None]


# --- errors --------------------------------------------------------------------------------------


def test_files_of_other_kinds_are_passed_over_beside_results(tmp_path: Path) -> None:
    """`report *.csv *.json` in a folder that also holds other tables; alone they are refused."""
    write_rows(tmp_path / "rows.csv", bench_rows())
    other = written(tmp_path / "best-public.csv", "problem,fa2\nb16,286\n")
    listed = written(tmp_path / "list.json", "{}")
    lines = written(tmp_path / "lines.jsonl", '{"what": "times", "ms": 1}\n')
    results = read(other, tmp_path / "rows.csv", listed, lines)
    assert results.rows == tuple(bench_rows())
    passed_over = "passed over: not a result of flashsmith"
    assert [s.what for s in results.sources] == [
        *(passed_over, "benchmark rows", passed_over, passed_over)
    ]
    with pytest.raises(ArgumentError, match=r"best-public\.csv, line 1: these columns"):
        read(other, listed)
    with pytest.raises(ArgumentError, match=r"lines\.jsonl, row 1: these fields .*: what, ms;"):
        read(lines)


def test_a_damaged_file_is_refused_beside_results(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.csv", bench_rows())
    with pytest.raises(ArgumentError, match=r"a\.json, line 1"):
        read(tmp_path / "rows.csv", written(tmp_path / "a.json", "[{"))


def test_compressed_rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.csv", bench_rows())
    packed = tmp_path / "rows.csv.gz"
    packed.write_bytes(gzip.compress((tmp_path / "rows.csv").read_bytes()))
    results = read(packed)
    assert results.rows == tuple(bench_rows())
    assert [source.path for source in results.sources] == [packed]


@pytest.mark.parametrize(
    "content", [b"plain", gzip.compress(b"x" * 10_000)[:20]], ids=["plain", "cut"]
)
def test_what_does_not_decompress_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.csv.gz").write_bytes(content)
    with pytest.raises(ArgumentError, match=r"rows\.csv\.gz: cannot be decompressed"):
        read(tmp_path / "rows.csv.gz")


def test_an_error_in_a_compressed_file_names_it(tmp_path: Path) -> None:
    packed = tmp_path / "a.csv.gz"
    packed.write_bytes(gzip.compress(b"x,y\n"))
    with pytest.raises(ArgumentError, match=rf"^{re.escape(str(packed))}, line 1: these columns"):
        read(packed)


@pytest.mark.parametrize("columns", ["400", "80"])
def test_a_printed_roofline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    """`flashsmith roofline > roofline.txt`, whatever the width of the page."""
    monkeypatch.setenv("COLUMNS", columns)
    out = io.StringIO()
    environment = {"driver": "580.159.04", "torch": "2.11.0+cu130", "revision": "csrc 4582d41e43a1"}
    print_roofline(make_console(out), replace(ROOFLINE, environment=environment))
    (found,) = read(written(tmp_path / "roofline.txt", out.getvalue())).rooflines
    assert (found.gpu, found.arch, found.sm_count) == ("NVIDIA H200", 90, 132)
    assert (found.time, found.environment) == (ROOFLINE.time, environment)
    assert [(c.key, c.unit, c.rate) for c in found.ceilings] == [
        (c.key, c.unit, c.rate) for c in ROOFLINE.ceilings
    ]


def test_everything_of_a_measurement_is_read_as_it_lies_in_its_folder() -> None:
    """The commands of the documents, in benchmarks/h200, once failed at the first odd table."""
    paths = [path for ending in ("csv", "json", "csv.gz") for path in RAW.glob(f"*.{ending}")]
    results = read(*sorted(paths), RAW / "roofline.txt")
    assert {source.path for source in results.sources} >= set(paths)
    assert len(results.rows) > 1000
    (roofline,) = (it for it in results.rooflines if it.time == "2026-11-21T03:49:43+00:00")
    assert roofline.rate("mma_registers_fp16") == 619
    assert len(results.versions) > 2
    assert len(make_page(results).html) < 5e6


def test_the_page_of_a_whole_sweep_is_one_that_a_browser_opens() -> None:
    """7,475 rows once made a page of 36 MB."""
    html = make_page(read(RAW / "tune-ranking.csv.gz")).html
    assert len(html) < 1e6
    assert "slower configs are left out; the files have them" in html


HEADER = "kind,dtype,d,seq,batch,heads,heads_k,contender,ms,tflops,relative_l2,right\n"
GOOD = "full,float16,128,1024,16,16,16,FA2,0.4,340.0,0.0002,True\n"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "x,y\n1,2\n", r"a\.csv, line 1: these columns do not belong to a result: x, y"),
        ("a.csv", "", r"a\.csv: is empty; results are rows"),
        ("a.csv", HEADER + GOOD + GOOD.replace("340.0", "fast"), r"a\.csv, line 3: .*fast"),
        ("a.csv", HEADER + GOOD + "full,float16\n", r"a\.csv, line 3"),
        ("a.csv", HEADER + GOOD.replace("float16", "int8"), r"a\.csv, line 2: .*int8"),
        (
            "a.json",
            '{\n "kind": ,\n}',
            r"a\.json, line 2, column 10: cannot be read: it is not JSON",
        ),
        ("a.json", "{}", r"a\.json: is JSON, but not a result"),
        ("a.json", "3", r"a\.json: is JSON, but not a result"),
        ("a.json", '[{"contender": "ours"}]', r"a\.json, row 1: lacks kind"),
        ("a.json", '{"kind": "flashsmith progression", "schema": 99}', r"a\.json: .*schema=99"),
        ("a.json", '{"ceilings": [], "schema": 99}', r"a\.json: .*99"),
        ("a.json", '{"kernels": [{}], "backend": "gpu", "timed": {}}', r"a\.json: kernel 1"),
        ("a.txt", "hello", r"a\.txt: the ending must be \.csv, \.json, \.parquet"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    with pytest.raises(ArgumentError, match=said):
        read(written(tmp_path / name, text))


def test_a_row_with_a_bad_value_is_named(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.csv", bench_rows()[:2])
    text = (tmp_path / "rows.csv").read_text()
    written(tmp_path / "rows.csv", text.replace(",1024,", ",long,", 1))
    with pytest.raises(ArgumentError, match=r"rows\.csv, row 1: .*'long'"):
        read(tmp_path / "rows.csv")


def test_a_file_of_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArgumentError, match=r"a\.csv, line 1: cannot be read"):
        read(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("name", "message"), [("nothing.csv", "there is no such file"), (".", "is a folder")]
)
def test_what_is_no_file_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=f": {message}; give result files"):
        read(tmp_path / name)


PRINTED = "| ceiling | rate | unit |\n| l2_read | 9.5 | TB/s |\n\nH200 (sm_90, 132 SMs); now\n"


def test_damage_to_a_printed_roofline_is_no_roofline(tmp_path: Path) -> None:
    assert len(read(written(tmp_path / "right.txt", PRINTED)).rooflines) == 1
    for part, damage in (
        ("9.5", "nan"),
        ("9.5", "inf"),
        ("9.5", "0"),
        ("9.5", "nine"),
        ("TB/s", "miles"),
        ("90", "9" * 5000),
        ("132", "\u0663\u0663"),
        ("H200", "x (sm_90, " * 100_000),  # must not take its square in time
    ):
        path = written(tmp_path / "roofline.txt", PRINTED.replace(part, damage))
        with pytest.raises(ArgumentError, match=r"roofline\.txt: the ending must be"):
            read(path)


# --- stored rooflines ----------------------------------------------------------------------------


def test_the_rooflines_of_the_rows_gpus_are_found(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    results = Results(rows=tuple(bench_rows()))
    assert with_stored_rooflines(results).rooflines == ()
    save_roofline(ROOFLINE)
    assert with_stored_rooflines(results).rooflines == (ROOFLINE,)
    # One that was given wins.
    given = Results(rows=results.rows, rooflines=(ROOFLINE,))
    assert with_stored_rooflines(given).rooflines == (ROOFLINE,)


def test_a_stored_roofline_that_is_damaged_is_no_absent_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = save_roofline(ROOFLINE)
    path.write_text("{")
    with pytest.raises(ArgumentError, match=f"{path.name}, line 1, column 2 cannot be read"):
        with_stored_rooflines(Results(rows=tuple(bench_rows())))
    path.write_text('{"schema": 99}')
    with pytest.raises(ArgumentError, match=f"{path.name}: .*schema 99"):
        with_stored_rooflines(Results(rows=tuple(bench_rows())))


def test_without_a_home_there_are_none(monkeypatch) -> None:
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    results = Results(rows=tuple(bench_rows()))
    assert with_stored_rooflines(results) == results
