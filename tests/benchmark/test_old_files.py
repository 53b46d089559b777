"""Files of every kind that an older version wrote are read, and continued where they grow."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from flashsmith.benchmark.measurement import Measurement, Proof
from flashsmith.benchmark.measurement_files import GrowingFile, read_rows
from flashsmith.benchmark.ncu import ProfileRowFile
from flashsmith.benchmark.report import read_results
from flashsmith.benchmark.roofline import read_roofline
from flashsmith.benchmark.timing import Samples
from flashsmith.builder.manifest import Manifest
from flashsmith.chooser.winners import WinnersTable
from flashsmith.chooser.winners.staleness import sources_here
from flashsmith.errors import ArgumentError
from flashsmith.tuning.journal import Journal

OLD = Path(__file__).parent / "old_files"
H200 = "NVIDIA H200"


@pytest.mark.parametrize("name", ["bench.csv", "bench.json", "bench.parquet"])
def test_rows_of_bench(name: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="needs pyarrow: it is not installed")
    first = read_rows(OLD / name)[0]
    assert (first.implementation, first.kind, first.verdict) == ("ours", "ours", "pass")
    assert str(first.problem) == "b16 s512 h16 d128 fp16"
    assert (first.gpu, first.registers, first.protocol) == (H200, 128, "one_by_one")
    assert first.ms is not None
    assert 0.01 < first.ms < 1
    assert read_results([OLD / name]).rows[0] == first


def test_the_ranking_of_a_sweep() -> None:
    *timed, last = read_rows(OLD / "tune-ranking.csv")
    assert timed[0].protocol == "final"
    assert timed[0].tflops is not None
    assert last.ms is None
    assert last.verdict in ("absent", "error")


def test_the_finals_of_a_sweep() -> None:
    assert [row.protocol for row in read_rows(OLD / "tune-finals.csv")] == ["final"] * 2


@pytest.mark.parametrize("name", ["run.json", "factory-run.json"])
def test_the_json_of_run(name: str) -> None:
    rows = read_results([OLD / name]).rows
    assert [row.config.partition(":")[0] for row in rows] == ["(FP16, 128, 64, 64, 4)"] * 2
    assert all(row.verdict == "pass" and row.tflops and row.registers for row in rows)
    assert str(rows[0].problem) == "b16 s4096 h16 d128 fp16"


def test_the_json_of_progression() -> None:
    (ablation,) = read_results([OLD / "progression.json"]).ablations
    assert [step.registers for step in ablation.steps] == [170, 174]
    assert ablation.steps[0].conflicts["ldmatrix"] == 8
    assert ablation.steps[1].time is not None
    assert ablation.steps[1].time.ms == 8


def test_the_csv_of_ncu() -> None:
    (row,) = read_results([OLD / "ncu.csv"]).profiles
    assert isinstance(row, Measurement)
    assert (row.gpu, row.registers, row.tensor_pct) == (H200, 255, 59.99)
    assert row.wavefronts == row.emulated_wavefronts == 204472320


def test_the_speed_of_semantics() -> None:
    rows = read_results([OLD / "semantics-speed.csv"]).rows
    assert len(rows) == 3
    assert all(row.tflops for row in rows)


def test_a_roofline() -> None:
    (roofline,) = read_results([OLD / "roofline.json"]).rooflines
    assert roofline == read_roofline(OLD / "roofline.json")
    assert (roofline.gpu, roofline.sm_count) == ("NVIDIA Test 9000", 100)
    first, second, *_ = roofline.ceilings
    assert (first.rate, first.note) == (None, "PyTorch is not installed")
    assert (second.key, second.rate, second.wrong) == ("mma_registers_fp16", 600.0, False)


def test_a_sweeps_journal(tmp_path: Path) -> None:
    """As if it were of today's sources; of others its records do not count."""
    written = (OLD / "journal.jsonl").read_text()
    (of_then,) = set(re.findall(r'"mma_sync": "(\w+)"', written))
    path = tmp_path / "journal.jsonl"
    path.write_text(written.replace(of_then, sources_here("mma_sync")))
    journal = Journal(path, "here")
    journal.close()
    assert (journal.foreign, journal.damaged) == (0, 0)
    compiled, proven, timed, failed = journal.records
    assert compiled.facts is not None
    assert (compiled.facts.registers, compiled.facts.spill_bytes) == (255, 12)
    assert proven.proof == Proof("pass", "", 1e-4, 1e-3, 1e-4)
    assert timed.samples == (Samples((1.0, 2.0), 1500.0),)
    assert failed.failure == ("hang", "not done after 2 s")
    assert {str(record.problem) for record in journal.records[1:]} == {
        "b2 s512:900 h4:2 d64 fp16 causal"
    }
    rewritten = Journal(tmp_path / "again.jsonl", "here")
    rewritten.add("here", journal.records)
    rewritten.close()
    assert (tmp_path / "again.jsonl").read_text() == path.read_text()


def test_a_librarys_manifest() -> None:
    written = (OLD / "manifest.json").read_text()
    manifest = Manifest.from_json(written)
    assert (manifest.key, manifest.arch, manifest.family) == ("f" * 32, 80, "mma_sync")
    assert str(manifest.kernels[0].config) == "(FP16, 128, 64, 64, 4): async+load_0_0_0_tiles"
    # Libraries are found by what is in them, and checksums are of these bytes.
    assert manifest.to_json() == written


def test_a_table_of_winners(tmp_path: Path) -> None:
    table = WinnersTable.load(OLD / "winners.json")
    assert (table.notes, len(table)) == ([], 3)
    assert {entry.key.gpu for entry in table} == {"H100", "H200"}
    table.save(tmp_path / "winners.json")
    assert (tmp_path / "winners.json").read_bytes() == (OLD / "winners.json").read_bytes()


def test_a_csv_of_bench_is_continued(tmp_path: Path) -> None:
    path = shutil.copy(OLD / "bench.csv", tmp_path / "rows.csv")
    rows = read_rows(path)
    with GrowingFile(path) as file:
        file.write(rows[0])
    assert read_rows(path) == [*rows, rows[0]]


def test_a_csv_of_ncu_is_continued(tmp_path: Path) -> None:
    path = shutil.copy(OLD / "ncu.csv", tmp_path / "profile.csv")
    with ProfileRowFile(path) as ledger:
        (row,) = ledger.rows
        ledger.write(row)
    with ProfileRowFile(path) as ledger:
        assert ledger.rows == [row, row]


def test_a_csv_that_lacks_columns_is_refused_in_a_line(tmp_path: Path) -> None:
    lines = (OLD / "bench.csv").read_text().splitlines()
    assert lines[0].endswith(",python,time")
    path = tmp_path / "rows.csv"
    path.write_text(lines[0].removesuffix(",time") + "\n")
    with pytest.raises(ArgumentError, match=r"^csv: .*rows\.csv has other columns .*another file$"):
        GrowingFile(path)
