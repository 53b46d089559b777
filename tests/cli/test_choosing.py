"""`flashsmith choose` and `flashsmith winners`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from flashsmith.chooser import choose, forget_choices
from flashsmith.chooser.winners import RankedConfig, WinnersTable, storage
from flashsmith.cli import app
from flashsmith.errors import FlashsmithError
from flashsmith.families import Problem, device_spec, parse_kernel_name_into_config

PROBLEM = "b16 s4096 h16 d128 fp16 causal"
CONFIG = "(FP16, 128, 128, 64, 4): async+eager+swizzled+load_2_2_2_tiles"


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's table, which is not there yet, and a package that ships none."""
    path = tmp_path / "own.json"
    monkeypatch.setenv("FLASHSMITH_TABLE", str(path))
    monkeypatch.setattr(storage, "SHIPPED_FOLDER", tmp_path / "nothing")
    forget_choices()
    return path


def run(*words: str, status: int = 0) -> str:
    result: Result = CliRunner().invoke(app, list(words))
    if isinstance(result.exception, FlashsmithError):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.output


def write(path: Path, ms: float = 3.0, gpu: str = "H200", problem: str = PROBLEM) -> Path:
    table = WinnersTable()
    tflops = Problem.parse(problem).attn_flop() / ms / 1e9
    figure = RankedConfig("mma_sync", CONFIG, ms, tflops, {"time": "2026-11-21T00:00:00+00:00"})
    table.add(Problem.parse(problem), device_spec(gpu), [figure])
    table.save(path)
    return path


def test_a_choice_is_printed_for_every_problem() -> None:
    texts = (PROBLEM, "b1 s1:9000 h8 d64 bf16")
    blocks = run("choose", *texts, "--device", "H200").strip().split("\n\n")
    assert blocks == [str(choose(text, "H200")) for text in texts]


def test_choices_as_json_parse_back() -> None:
    (facts,) = json.loads(run("choose", PROBLEM, "--arch", "sm_86", "--json"))
    assert facts == json.loads(json.dumps(choose(PROBLEM, "sm_86").to_json()))
    assert parse_kernel_name_into_config(facts["config"]).d_head == 128
    assert facts["device"] == "A10"


def test_the_users_winner_is_chosen_and_shown(own: Path) -> None:
    write(own, ms=3.25)
    forget_choices()
    (facts,) = json.loads(run("choose", PROBLEM, "--device", "H200", "--json"))
    assert (facts["config"], facts["ms"], facts["evidence"]) == (CONFIG, 3.25, "table")
    shown = run("winners", "show")
    for cell in (PROBLEM, CONFIG, "H200", "3.25", "2026-11-21", "yours"):
        assert cell in shown


def test_show_filters_and_ranks(own: Path, tmp_path: Path) -> None:
    def shown(*words: str) -> list[dict[str, Any]]:
        return list(json.loads(run("winners", "show", *words, "--json")))

    write(own)
    assert len(shown("--gpu", "nvidia h200", "--dtype", "fp16", "--d", "128")) == 1
    assert shown("--gpu", "A100") == shown("--dtype", "bf16") == shown("--d", "64") == []
    other = write(tmp_path / "a100.json", gpu="A100")
    assert [fact["gpu"] for fact in shown(str(other), "--ranks", "3")] == ["A100"]
    assert "no winners" in run("winners", "show", "--gpu", "A100")


def test_merging_into_the_users_table(own: Path, tmp_path: Path) -> None:
    slow, fast = write(tmp_path / "slow.json", 4.0), write(tmp_path / "fast.json", 3.0)
    assert f"{fast}: 1 of 1 entries taken over" in run("winners", "merge", str(fast))
    told = run("winners", "merge", str(slow), "--prefer", "faster")
    assert f"{slow}: 0 of 1 entries taken over\n{own}: 1 entry" in told
    assert [entry.best.ms for entry in WinnersTable.load(own)] == [3.0]
    run("winners", "merge", str(slow))
    assert [entry.best.ms for entry in WinnersTable.load(own)] == [4.0]
    elsewhere = tmp_path / "both.json"
    run("winners", "merge", str(slow), str(write(tmp_path / "a.json", gpu="A100")), "--into",
        str(elsewhere))  # fmt: skip
    assert len(WinnersTable.load(elsewhere)) == 2


def test_exporting_one_gpu(own: Path, tmp_path: Path) -> None:
    both = WinnersTable.load(write(own))
    both.merge(WinnersTable.load(write(tmp_path / "a.json", gpu="A100")))
    both.save(own)
    out = tmp_path / "h200.json"
    assert "1 entry\n" in run("winners", "export", "--gpu", "NVIDIA H200", "-o", str(out))
    assert [entry.key.gpu for entry in WinnersTable.load(out)] == ["H200"]
    with pytest.raises(
        FlashsmithError, match="gpu='L4': no winners of this GPU; there are winners of A100"
    ):
        run("winners", "export", "--gpu", "L4", "-o", str(out))


def test_validating(own: Path, tmp_path: Path) -> None:
    assert "yours: 1 entry, 0 problems" in (write(own), run("winners", "validate"))[1]
    data = json.loads(own.read_text())
    data["entries"][0]["ranked"][0]["config"] = CONFIG.replace("128, 64, 4)", "48, 64, 4)")
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(data))
    told = run("winners", "validate", str(bad), status=1)
    assert "is illegal: B_r must be" in told
    assert f"{bad}: 1 entry, " in told


def test_other_sources_are_noted_and_not_wrong(own: Path) -> None:
    write(own)
    own.write_text(own.read_text().replace('"time"', '"csrc": "0123456789ab", "time"'))
    told = run("winners", "validate")
    assert "yours: note: 1 entry was measured with other CUDA sources (csrc 0123456789ab)" in told
    assert "yours: 1 entry, 0 problems" in told


def test_of_several_versions_each_familys_entries_are_counted(own: Path, tmp_path: Path) -> None:
    """A table grows over many versions: a list of their hashes says nothing."""
    table = WinnersTable.load(write(own))
    for size, csrc in ((2048, "1" * 12), (8192, "2" * 12), (16384, "2" * 12)):
        path = write(tmp_path / "one.json", problem=f"b4 s{size} h16 d128 fp16")
        path.write_text(path.read_text().replace('"time"', f'"csrc": "{csrc}", "time"'))
        table.merge(WinnersTable.load(path))
    table.save(own)
    told = run("winners", "validate")
    said = "3 of 4 entries were measured with other CUDA sources than those here and"
    assert f"yours: note: {said}" in told
    assert ": mma_sync 3 (2 versions); most changes leave" in told
    assert "yours: 4 entries, 0 problems" in told


def test_the_path(own: Path) -> None:
    assert run("winners", "path").strip() == str(own)


@pytest.mark.parametrize(
    "words",
    [
        ("choose", "b1"),
        ("choose", PROBLEM, "--device", "abacus"),
        ("choose", "s64 d300 fp16"),
        ("winners", "show", "/nowhere.json"),
        ("winners", "merge", "/nowhere.json"),
        ("winners", "validate", "/nowhere.json"),
    ],
)
def test_mistakes_are_flashsmiths_own_errors(words: tuple[str, ...]) -> None:
    with pytest.raises(FlashsmithError):
        run(*words)
