"""`flashsmith build` for a problem, and for semantics."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashsmith.configs import Semantics

CONFIG = "(FP16, 32, 64, 32, 4): async+swizzled+load_0_2_2_tiles"


def flashsmith(*arguments: str, cache: Path, **environment: str) -> Any:
    import os

    return subprocess.run(
        [sys.executable, "-m", "flashsmith", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "FLASHSMITH_CACHE_DIR": str(cache), **environment},
    )


def test_what_is_built_for_a_problem_is_what_attention_uses(tmp_path: Path) -> None:
    text = "b1 s70:90 h4:2 d24 fp16 causal"
    done = flashsmith("build", "--for", text, "--arch", "80", "--json", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    (library,) = json.loads(done.stdout)
    assert library["semantics"] == str(Semantics("causal", uneven=True))
    code = (
        "import numpy as np, flashsmith\n"
        "q = np.zeros((1, 70, 4, 24), np.float16); k = np.zeros((1, 90, 2, 24), np.float16)\n"
        "print(flashsmith.attention(q, k, k, causal=True).shape)\n"
    )
    import os

    used = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "FLASHSMITH_CACHE_DIR": str(tmp_path), "FLASHSMITH_JIT": "0"},
    )
    assert used.returncode == 0, used.stderr
    assert used.stdout.strip() == str(np.zeros((1, 70, 4, 24)).shape)


def test_several_problems_of_one_kernel_are_one_library(tmp_path: Path) -> None:
    problems = ("b1 s70 h4 d32 fp16", "b2 s80 h4 d32 fp16 uneven", "b1 s70 h4 d32 fp16")
    arguments = [word for text in problems for word in ("--for", text)]
    done = flashsmith("build", *arguments, "--arch", "80", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 config for sm_80, uneven, in") == 1


def test_a_set_is_built_for_semantics(tmp_path: Path) -> None:
    words = "uneven+causal"
    done = flashsmith("build", "-k", CONFIG, "--semantics", words, "--json", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["semantics"] == "causal+uneven"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--for", "b1 s64 h1"), "d, dtype missing"),
        (("--for", "b1 s64 h1 d59 fp16"), "d=59"),
        (("--for", "b1 s64 h1 d64 fp16", "-k", CONFIG), "--for: says itself which kernels"),
        (("--for", "b1 s64 h1 d64 fp16", "--semantics", "causal"), "--for: says itself"),
        (("-k", CONFIG, "--semantics", "backwards"), "semantics='backwards'"),
    ],
)
def test_bad_arguments_build_nothing(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = flashsmith("build", *arguments, cache=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert not list(tmp_path.rglob("*.so"))
