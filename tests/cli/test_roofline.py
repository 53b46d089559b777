"""`flashsmith roofline`: shows what is stored, says what is missing."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from flashsmith.benchmark.roofline import Ceiling, Roofline, measuring, save_roofline
from flashsmith.cli import app
from flashsmith.errors import ArgumentError, LaunchError

ROOFLINE = Roofline(
    gpu="NVIDIA Test 9000",
    arch=90,
    sm_count=100,
    time="2026-01-02T03:04:05+00:00",
    environment={"driver": "580.1", "torch": ""},
    ceilings=(
        Ceiling("matmul_fp16", "TFLOP/s", note="PyTorch is not installed"),
        Ceiling("mma_registers_fp16", "TFLOP/s", 612.34, 50, 0.01, 1500, 650, 4082.3, 1e-6),
        Ceiling("l2_read", "TB/s", 8.125, error=0.0),
    ),
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


def run(*words: str):
    result = CliRunner().invoke(app, ["roofline", *words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_show_prints_what_is_stored() -> None:
    save_roofline(ROOFLINE)
    out = run("--show", "--gpu", ROOFLINE.gpu).stdout
    rows = {line.split("|")[1].strip(): line for line in out.splitlines() if line[:1] == "|"}
    cells = [cell.strip() for cell in rows["mma_registers_fp16"].split("|")[1:-1]]
    assert cells[1:] == [
        *("mma.sync m16n8k16, operands in registers, fp16", "612", "TFLOP/s", "4082"),
        *("1500", "650", "1.0", "1.0e-06", ""),
    ]
    assert "PyTorch is not installed" in rows["matmul_fp16"]
    assert "| 8.12 |" in rows["l2_read"]
    assert "exact" in rows["l2_read"]
    assert "NVIDIA Test 9000 (sm_90, 100 SMs), driver 580.1; 2026" in out


def test_json_is_what_is_stored(home) -> None:
    save_roofline(ROOFLINE)
    result = run("--show", "--gpu", ROOFLINE.gpu, "--json", "-o", str(home / "copy.json"))
    assert Roofline.from_json(json.loads(result.stdout)) == ROOFLINE
    assert Roofline.from_json(json.loads((home / "copy.json").read_text())) == ROOFLINE


def test_an_unknown_gpu_is_named_with_those_that_are_known() -> None:
    save_roofline(ROOFLINE)
    with pytest.raises(ArgumentError, match=r"gpu='A100': no measurements.*'NVIDIA Test 9000'"):
        run("--show", "--gpu", "A100")


def test_gpu_alone_is_refused() -> None:
    with pytest.raises(ArgumentError, match="goes with --show"):
        run("--gpu", "A100")


def test_measuring_stores_and_prints(monkeypatch, home) -> None:
    monkeypatch.setattr(measuring, "measure_roofline", lambda ms, progress: ROOFLINE)
    assert "612" in run().stdout
    assert (home / "flashsmith" / "roofline" / "nvidia-test-9000.json").exists()


def test_a_wrong_microbenchmark_fails_the_command(monkeypatch) -> None:
    bad = replace(ROOFLINE, ceilings=(Ceiling("exp2", "Gop/s", wrong=True, note="it lies"),))
    monkeypatch.setattr(measuring, "measure_roofline", lambda ms, progress: bad)
    result = run()
    assert result.exit_code == 1
    assert "WRONG: it lies" in result.stdout


def test_without_a_gpu_it_says_so(monkeypatch) -> None:
    monkeypatch.setattr(measuring.driver, "gpu_count", lambda: 0)
    with pytest.raises(LaunchError, match="NVIDIA GPU"):
        run()


def test_a_ceiling_of_another_version_is_shown_by_its_name() -> None:
    later = Ceiling("tmem_read_fp16", "TFLOP/s", 700.0), Ceiling("tmem_read", "TB/s", 9.0)
    save_roofline(replace(ROOFLINE, ceilings=later))
    out = run("--show", "--gpu", ROOFLINE.gpu).stdout
    assert "tmem_read, fp16 " in out
    assert "| tmem_read " in out


def test_what_json_lacks_comes_back_too() -> None:
    wrong = replace(ROOFLINE, ceilings=(Ceiling("l2_read", "TB/s", error=math.inf, wrong=True),))
    save_roofline(wrong)
    text = run("--show", "--gpu", ROOFLINE.gpu, "--json").stdout
    found = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert Roofline.from_json(found) == wrong
