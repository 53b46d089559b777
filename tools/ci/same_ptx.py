#!/usr/bin/env python3
"""Whether two trees compile to the same kernels: the proof of a change that only moves code.

    python tools/ci/same_ptx.py --base-tree ../before                  # cover, and all that ships
    python tools/ci/same_ptx.py --base-tree ../before --set prog       # one set, plain, for sm_80
    python tools/ci/same_ptx.py --base-tree ../before --set tune --arch sm_90 --semantics causal

Each tree builds the kernels with its own generator and sources, into a cache of its own. Their PTX
is compared without line information and comments, and with registers, labels and symbols named in
the order in which they come. Where the text differs, numbers of machine instructions, registers and
spilled bytes stand beside it. What ships is each distinct config and semantics that ranks first in
an entry of a shipped table, for the architecture of its GPU.

The exit status is 1 when a kernel differs, or only one tree has it.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from flashsmith.chooser.winners import WinnersTable
from flashsmith.families import (
    KernelConfig,
    Semantics,
    get_kernel_configs,
    parse_kernel_name_into_config,
)

TREE = Path(__file__).resolve().parents[2]
SHOWN_LINES = 6
# A machine instruction, from sm_70 on.
INSTRUCTION_BYTES = 16

_LINE_INFORMATION = re.compile(r"\s*\.(loc|file|section|b8|b32|b64)\b.*")
_DEBUG_LABEL = re.compile(r"\$L__info_string\d+:?")
_COMMENT = re.compile(r"//.*")
_NAMES = re.compile(r"%[a-z]+\d+|\$L__[\w]+|\b_Z\w+")


@dataclass(frozen=True, order=True)
class Job:
    """Kernels that one command builds."""

    arch: str
    semantics: str
    short_forms: tuple[str, ...]


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel: its canonical text, and what the compiler said of it."""

    text: tuple[str, ...]
    instructions: int
    registers: int
    spilled_bytes: int

    def figures(self) -> str:
        return (
            f"{self.instructions} instructions, {self.registers} registers, "
            f"{self.spilled_bytes} bytes spilled"
        )


Key = tuple[int, str, str]  # arch, semantics, short form


def canonical(ptx: str) -> tuple[str, ...]:
    """The lines of a kernel that say what it does, whatever its parts are called."""
    names: dict[str, str] = {}

    def renamed(match: re.Match[str]) -> str:
        name = match[0]
        kind = re.match(r"%[a-z]+|\$L|_Z", name)
        assert kind
        return names.setdefault(name, f"{kind[0]}{len(names)}")

    lines = []
    for line in ptx.splitlines():
        if _LINE_INFORMATION.fullmatch(line) or _DEBUG_LABEL.fullmatch(line.strip()):
            continue
        # How many registers are declared follows from those that are used.
        text = " ".join(_COMMENT.sub("", line).split())
        if text and not text.startswith(".reg "):
            lines.append(_NAMES.sub(renamed, text))
    return tuple(lines)


def shipped_jobs() -> list[Job]:
    """What the shipped tables rank first."""
    found: dict[tuple[str, str], set[KernelConfig]] = {}
    for entry in WinnersTable.shipped():
        config = parse_kernel_name_into_config(entry.best.config)
        semantics = entry.problem.required_semantics(config)
        found.setdefault((f"sm_{entry.key.arch}", str(semantics)), set()).add(config)
    return [Job(*where, tuple(map(str, sorted(configs)))) for where, configs in found.items()]


def set_job(name: str, arch: str, semantics: str) -> Job:
    """A set of configs, or a list of short forms, by its key."""
    return Job(arch, str(Semantics.parse(semantics)), tuple(map(str, get_kernel_configs(name))))


def build(tree: Path, jobs: Iterable[Job], cache: Path) -> None:
    """Has a tree build the jobs' kernels, by its own command, into a cache."""
    environment = os.environ | {
        "PYTHONPATH": str(tree / "src"),
        "FLASHSMITH_CACHE_DIR": str(cache),
    }
    for number, job in enumerate(jobs):
        listed = cache.parent / f"{cache.name}-{number}.txt"
        listed.write_text("\n".join(job.short_forms) + "\n")
        command = [sys.executable, "-m", "flashsmith", "build", "--kernels", str(listed)]
        command += ["--arch", job.arch, "--semantics", job.semantics]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{tree}: building {job.semantics} for {job.arch}: {done.stderr}")


def kernels_in(cache: Path) -> Iterator[tuple[Key, Kernel]]:
    """What lies in a cache, whatever its layout: by manifest."""
    for manifest in sorted(cache.rglob("manifest.json")):
        data: dict[str, Any] = json.loads(manifest.read_text().partition("\n")[2])
        semantics = str(Semantics(**data["semantics"]))
        for kernel in data["kernels"]:
            yield (
                (data["arch"], semantics, kernel["short_form"]),
                Kernel(
                    canonical((manifest.parent / kernel["ptx_file"]).read_text()),
                    kernel["code_bytes"] // INSTRUCTION_BYTES,
                    kernel["registers"],
                    kernel["spill_store_bytes"] + kernel["spill_load_bytes"],
                ),
            )


def differences(base: dict[Key, Kernel], new: dict[Key, Kernel]) -> Iterator[str]:
    """A paragraph for each kernel that is not the same in both."""
    for key in sorted(base.keys() | new.keys()):
        named = f"{key[2]} [{key[1]}] for sm_{key[0]}"
        before, now = base.get(key), new.get(key)
        if before is None or now is None:
            yield f"{named}: only in {'the new' if before is None else 'the base'} tree"
        elif before.text != now.text:
            changed = difflib.unified_diff(before.text, now.text, n=0, lineterm="")
            lines = [line for line in changed if not line.startswith(("---", "+++", "@@"))]
            shown = "".join(f"\n    {line}" for line in islice(lines, SHOWN_LINES))
            yield (
                f"{named}: {len(lines)} lines differ\n  base: {before.figures()}\n"
                f"  new:  {now.figures()}{shown}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base-tree", type=Path, required=True, help="the other checkout")
    parser.add_argument("--set", help="a key of KERNELS, instead of cover and what ships")
    parser.add_argument("--arch", default="sm_80", help="with --set")
    parser.add_argument("--semantics", default="plain", help="with --set")
    options = parser.parse_args()
    base_tree = options.base_tree.resolve()
    if not (base_tree / "src" / "flashsmith").is_dir():
        parser.error(f"--base-tree {options.base_tree}: holds no src/flashsmith")
    if options.set:
        jobs = [set_job(options.set, options.arch, options.semantics)]
    else:
        jobs = [set_job("cover", "sm_80", "plain"), *shipped_jobs()]
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for name, tree in (("base", base_tree), ("new", TREE)):
            cache = Path(folder) / name
            cache.mkdir()
            build(tree, jobs, cache)
            found[name] = dict(kernels_in(cache))
    told = list(differences(found["base"], found["new"]))
    for paragraph in told:
        print(paragraph)
    kernels = len(found["base"].keys() | found["new"].keys())
    print(f"{kernels} kernels, {kernels - len(told)} the same, {len(told)} not")
    return 1 if told or not kernels else 0


if __name__ == "__main__":
    sys.exit(main())
