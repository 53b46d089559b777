#!/usr/bin/env python3
"""Records which versions of the packages in flashsmith[compiler] are allowed by serving engines.

    python tools/ci/engine_pins.py                  # resolve the recorded releases again
    python tools/ci/engine_pins.py vllm==0.34.0     # resolve and record other releases instead

pip resolves each release together with flashsmith[compiler] of this checkout; nothing is installed.
This takes one to two minutes per release and needs a package index. If pip finds no solution, its
message is shown and nothing is recorded.

The record is engine_pins.json next to this file. For each release, it has the versions that pip has
chosen, and the ranges of versions that other packages require. tests/test_engine_pins.py compares
the record with pyproject.toml.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("engine_pins.json")
# flashsmith works with these packages, but does not install them; the documentation should name the
# versions that engines pin.
_BESIDE = ("torch", "transformers")


class Solution:
    """The packages that pip would install, by canonical name."""

    def __init__(self, report: dict[str, Any]) -> None:
        self.metadata: dict[str, dict[str, Any]] = {
            canonicalize_name(one["metadata"]["name"]): one["metadata"] for one in report["install"]
        }

    def version(self, name: str) -> str:
        """The version of a package that pip has chosen."""
        return str(self.metadata[name]["version"])

    def requirements(
        self, name: str, extras: Sequence[str] = ()
    ) -> Iterator[tuple[str, Requirement]]:
        """All requirements below a package with extras that are in force; each follows the package
        that states it."""
        waiting, seen = [(name, "")] + [(name, extra) for extra in extras], set[tuple[str, str]]()
        while waiting:
            owner, extra = waiting.pop()
            if (owner, extra) in seen:
                continue
            seen.add((owner, extra))
            for needed in map(Requirement, self.metadata[owner].get("requires_dist", ())):
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    yield owner, needed
                    found = canonicalize_name(needed.name)
                    waiting += [(found, wanted) for wanted in ("", *needed.extras)]


def resolve(*requirements: str, constraints: Sequence[str] = ()) -> Solution:
    """The packages that pip would install into an empty environment of this Python.

    Raises CalledProcessError, with the message of pip in its ``stderr``, if there is no solution.
    """
    with TemporaryDirectory() as folder:
        report, limits = Path(folder) / "report.json", Path(folder) / "constraints.txt"
        limits.write_text("".join(f"{one}\n" for one in constraints))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        options = ["--report", str(report), "--constraint", str(limits)]
        subprocess.run([*pip, *options, *requirements], check=True, capture_output=True, text=True)
        return Solution(json.loads(report.read_text()))


def record(engine: str, solution: Solution) -> dict[str, Any]:
    """The record of an engine such as 'vllm==0.33.0'."""
    below = list(solution.requirements("flashsmith", ("compiler",)))
    # cuda-toolkit is a list of other packages, to which those of the compiler belong.
    ours = {
        canonicalize_name(needed.name)
        for owner, needed in below
        if owner in ("flashsmith", "cuda-toolkit")
    } - {"flashsmith"}
    limited: dict[str, dict[str, set[str]]] = {}
    for owner, needed in solution.requirements(Requirement(engine).name):
        name = canonicalize_name(needed.name)
        if name in ours | {*_BESIDE} and needed.specifier:
            limits = limited.setdefault(name, {}).setdefault(owner, set())
            limits |= {*map(str, needed.specifier)}
    return {
        "resolved": {name: solution.version(name) for name in sorted({*ours, *_BESIDE})},
        "limits": {
            name: {
                f"{owner} {solution.version(owner)}": ",".join(sorted(limits))
                for owner, limits in sorted(limited[name].items())
            }
            for name in sorted(limited)
        },
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", nargs="*", help="a release such as vllm==0.33.0")
    engines = parser.parse_args().engine or list(json.loads(RECORD.read_text())["engines"])
    for engine in engines:
        if not re.fullmatch(r"[a-z]+==[\w.]+", engine):
            parser.error(f"engine: {engine!r} names no release; give one such as vllm==0.33.0")
    recorded: dict[str, Any] = {}
    for engine in engines:
        print(f"resolving {engine} with flashsmith[compiler]", flush=True)
        try:
            recorded[engine] = record(engine, resolve(engine, f"{ROOT}[compiler]"))
        except subprocess.CalledProcessError as error:
            sys.exit(
                f"pip found no solution for {engine} with flashsmith[compiler]:\n{error.stderr}"
            )
    written = {"python": platform.python_version(), "engines": recorded}
    RECORD.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
