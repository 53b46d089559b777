"""`flashsmith progression` and `flashsmith report`: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashsmith.benchmark.measurement_files import read_rows
from flashsmith.benchmark.report import read_results
from flashsmith.cli import app
from flashsmith.errors import ArgumentError

STEPS = (
    "(FP16, 128, 64, 64, 4): async+load_0_0_0_tiles; "
    "(FP16, 128, 64, 64, 4): async+swizzled+load_0_0_0_tiles"
)
RAW = Path(__file__).parents[2] / "benchmarks" / "h200"


def run(*words: str | Path):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_an_ablation_without_a_gpu_as_table_json_and_picture(tmp_path: Path) -> None:
    plot = tmp_path / "ablation.svg"
    words = ("progression", "--emulate", "--kernels", STEPS)
    table = run(*words, "--plot", plot)
    assert table.exit_code == 0
    assert "+ swizzled" in table.stdout
    assert "no times: a GPU is needed" in table.stdout
    assert "ldmatrix conflicts 8.0 -> 1.0" in table.stdout
    assert plot.read_text().startswith("<?xml")
    ablation = json.loads(run(*words, "--json").stdout)
    assert ablation["kind"] == "flashsmith progression"
    assert [step["time"] for step in ablation["steps"]] == [None, None]


@pytest.mark.parametrize("command", ["run", "progression"])
def test_the_measurements_of_kernels_go_to_files_that_grow(command: str, tmp_path: Path) -> None:
    jsonl, csv = tmp_path / "rows.jsonl", tmp_path / "rows.csv"
    for _ in range(2):
        run(command, "--emulate", "--kernels", STEPS, "--jsonl", jsonl, "--csv", csv)
    rows = read_rows(jsonl)
    assert [row.config for row in rows] == 2 * STEPS.split("; ")
    assert {(row.verdict, str(row.problem)) for row in rows} == {("pass", "b1 s256 h2 d128 fp16")}
    assert rows[0].conflicts is not None
    assert rows[0].conflicts["ldmatrix"] == 8.0
    assert [row.registers for row in read_rows(csv)] == [row.registers for row in rows]
    with pytest.raises(ArgumentError, match=r"jsonl='rows\.txt': give a file that ends in \.jsonl"):
        run(command, "--emulate", "--kernels", STEPS, "--jsonl", "rows.txt")


def test_a_bad_picture_is_refused_before_anything_is_built(monkeypatch) -> None:
    monkeypatch.setattr("flashsmith.cli.reporting.selected", lambda *_, **__: pytest.fail("began"))
    with pytest.raises(ArgumentError, match=r"plot='ablation\.gif'"):
        run("progression", "--plot", "ablation.gif")


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_built(
    monkeypatch, tmp_path: Path
) -> None:
    from flashsmith.benchmark import progression

    monkeypatch.setattr(progression, "run_ablation", lambda *_, **__: pytest.fail("ran"))
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match=r"plot='.*ablation\.png': cannot be written"):
        run("progression", "--emulate", "--plot", tmp_path / "file" / "ablation.png")


def test_a_report_of_measured_files(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    ablation = tmp_path / "ablation.json"
    ablation.write_text(run("progression", "--emulate", "--kernels", STEPS, "--json").stdout)
    files = (RAW / "attention-speed.csv", RAW / "factory-run-prog.json", ablation)
    result = run("report", *files, "-o", out, "--title", "<H200>")
    assert result.exit_code == 0
    page = out.read_text()
    assert "<title>&lt;H200&gt;</title>" in page
    charts = sorted(path.name for path in (tmp_path / "page-charts").iterdir())
    assert f"{out}, " in result.stdout
    assert f"{len(charts)} charts next to it" in result.stdout
    assert charts[0] == (
        "001-throughput-of-flashsmith-over-that-of-its-peers-forward-on-nvidia-h200.svg"
    )
    assert len(charts) > 20
    assert [f'<section id="{name}">' in page for name in ("ablation", "space")] == [True, True]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nothing.csv",), r"nothing\.csv: there is no such file"),
        ((RAW / "factory-sets.csv",), r"factory-sets\.csv, line 1"),
        ((RAW / "factory-run-prog.json", "-o", "page.pdf"), r"out='page\.pdf'"),
    ],
)
def test_what_cannot_be_reported_is_refused(words, said: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=said):
        run("report", *words)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path: Path) -> None:
    import sys

    from flashsmith.errors import DependencyError

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = tmp_path / "page.html"
    assert run("report", RAW / "factory-run-prog.json", "-o", page).exit_code == 0
    with pytest.raises(DependencyError, match=r"\.\[bench\]"):
        run("progression", "--plot", "ablation.png")


def test_the_documented_report_works_in_a_clone(tmp_path: Path) -> None:
    root = RAW.parents[1]
    lines = (root / "docs/command.md").read_text(encoding="utf-8").splitlines()
    (shown,) = (line for line in lines if line.startswith("flashsmith report "))
    words = shown.partition("#")[0].split()[1:]
    paths = [path for word in words[1:] for path in sorted(root.glob(word))]
    assert len(paths) > 20
    assert run(words[0], *paths, "-o", tmp_path / "report.html").exit_code == 0


def test_every_committed_file_of_two_gpus_is_read() -> None:
    """Logs that are no result are passed over, whichever of their lines look like rows."""
    endings = (".csv", ".json", ".csv.gz", ".jsonl.gz")
    paths = [path for path in sorted(RAW.parent.glob("h*00/*")) if path.name.endswith(endings)]
    results = read_results(paths)
    assert {row.gpu for row in results.compared} >= {"NVIDIA H200", "NVIDIA H100 80GB HBM3"}
