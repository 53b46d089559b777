"""`flashsmith tune --contribute`: the file to send, and what it lacks."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import sweep_fakes as fakes
from sweep_fakes import World
from typer.testing import CliRunner

from flashsmith.chooser.winners import WinnersTable
from flashsmith.cli import app
from flashsmith.errors import ArgumentError
from flashsmith.families import Problem
from flashsmith.tuning import contribution, gpu_runner
from flashsmith.tuning import tune as tune_module
from flashsmith.tuning.contribution import check_contribution, contributed_problems
from flashsmith.tuning.space import default_space
from flashsmith.tuning.sweep import Settings

SMALL = [
    Problem.parse(f"b4 s1024 h16 d{d} {dtype}{mask}")
    for d in (64, 128)
    for dtype in ("fp16", "bf16")
    for mask in ("", " causal")
]


def contribute(path: Path, problems: list[Problem], monkeypatch: pytest.MonkeyPatch) -> str:
    """The command's output, on a GPU and with kernels that are fakes."""
    monkeypatch.setenv("FLASHSMITH_TABLE", str(path.parent / "own.json"))
    monkeypatch.setattr(contribution, "contributed_problems", lambda: problems)
    monkeypatch.setattr(tune_module, "check_gpu", lambda ordinal: fakes.DEVICE)
    monkeypatch.setattr(gpu_runner, "gpu_runner", lambda *_: fakes.fake_runner(World({})))
    arguments = ["tune", "--contribute", str(path), "--out", str(path.parent / "out")]
    done = CliRunner().invoke(app, [*arguments, "--space", "tune", "--budget", "none"])
    assert done.exit_code == (1 if "missing:" in done.output else 0), done.output
    return done.output


def test_a_complete_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "h200.zip"
    printed = contribute(path, SMALL, monkeypatch)
    assert f"the file to send: {path}, complete" in printed.replace("\n", " ")
    with zipfile.ZipFile(path) as file:
        assert sorted(file.namelist()) == ["missing.txt", "ranking.csv", "winners.json"]
        assert file.read("missing.txt") == b""
        assert file.read("ranking.csv").count(b"\n") > len(SMALL)
        (tmp_path / "sent.json").write_bytes(file.read("winners.json"))
    sent = WinnersTable.load(tmp_path / "sent.json")
    assert {entry.problem for entry in sent} == set(SMALL)
    assert sent.validate() == []
    # The same command again continues, and replaces its file.
    assert "complete" in contribute(path, SMALL, monkeypatch)
    assert [it.name for it in tmp_path.glob("*.zip*")] == ["h200.zip"]


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "h200.zip"
    printed = contribute(path, SMALL[1:], monkeypatch).replace("\n", " ")
    assert "missing: d 64, fp16, full: no problem had a final; run again to continue" in printed
    assert printed.count("missing: ") == 1
    assert "not complete yet" in printed
    with zipfile.ZipFile(path) as file:
        assert file.read("missing.txt").startswith(b"d 64, fp16, full: ")


def test_the_problems_have_what_a_table_needs() -> None:
    problems = contributed_problems()
    kinds = {(it.d, it.dtype.name, it.semantics.causal) for it in problems}
    assert kinds >= {
        (d, dtype, causal)
        for d in (64, 128)
        for dtype in ("FP16", "BF16")
        for causal in (False, True)
    }
    assert any(it.semantics.packed for it in problems)
    assert {it.d for it in problems} == {64, 96, 128, 256}
    races = tune_module.plan_races(problems, fakes.DEVICE, default_space(fakes.DEVICE), Settings())
    assert len(races) == len(problems)


def test_other_peoples_files_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "thesis.zip"
    path.write_bytes(b"PK")
    with pytest.raises(ArgumentError, match="exists, and is no contribution; name another file"):
        check_contribution(path)
    with pytest.raises(ArgumentError, match=r"contribute='.*\.json': name a \.zip file"):
        check_contribution(tmp_path / "a100.json")


def test_problems_of_ones_own_are_refused(tmp_path: Path) -> None:
    arguments = ["tune", "--contribute", str(tmp_path / "a.zip"), "--problems", "main"]
    done = CliRunner().invoke(app, arguments)
    assert str(done.exception).startswith("problems='main': not with --contribute")
