#!/usr/bin/env python3
"""Checks whether two checkouts compile to the same kernels. If so, a change has only moved code.

    python tools/ci/same_ptx.py --base-tree ../before

With other options:

    --base-tree ../before --set prog       # one set, plain, for sm_80
    --base-tree ../before --set tune --arch sm_90 --semantics causal
    --base-tree ../before --write-base before.json
    --base before.json     # the same, without compiling the base again
    --base before.json --new tools/ci/base_ptx.json --record

Each checkout builds the kernels with its own generator and sources, in its own cache. The default
is the set 'cover' and all shipped kernels, which are the configs that rank first in an entry of a
shipped table, for the semantics and the architecture of that entry. Two kernels are the same if one
of these is equal:

- the canonical PTX: without line information and comments, and with registers, labels and symbols
  numbered in the order in which they appear.
- the machine code, byte for byte, if ptxas assembles the kernel alone. Nothing has to be left out
  of it, because branches are relative and names are stored elsewhere.

If both differ, the machine instructions, registers, spilled bytes and CTAs per SM of the kernel are
printed, and which of them got worse. Registers count in units of 8, in which a GPU allocates them.
A change that merges code may change kernels; --no-worse accepts those that are not worse.

A file from --write-base has, for each kernel, the hashes of the canonical PTX and of the machine
code, and its figures; also the version of the compiler, and the hash of the sources. With such a
file, lines that differ are not printed, and the same compiler must be used. If it has no hashes of
machine code, only PTX is compared. --new takes such a file for this checkout, if its sources have
not changed since.

--record (without --set) records the sources of both checkouts as equivalent, for each family whose
kernels are all the same. Figures that were measured with the kernels of the base then stay valid.
Kernels that are not in a file, because they did not ship at that time, are ignored.

The exit status is 1 if a kernel differs (with --no-worse: is worse), or if only one checkout has
it.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from flashsmith.builder.cubin import kernel_code
from flashsmith.builder.sources import EQUIVALENT_SOURCES, equivalent_sources, source_hash
from flashsmith.builder.toolchain import find_toolchain
from flashsmith.chooser.winners import WinnersTable
from flashsmith.families import (
    KernelConfig,
    Semantics,
    device_spec,
    get_kernel_configs,
    parse_kernel_name_into_config,
)

TREE = Path(__file__).resolve().parents[2]
SHOWN_LINES = 6
# The bytes of a machine instruction, from sm_70 on.
INSTRUCTION_BYTES = 16
# A GPU allocates registers per thread in this unit.
REGISTER_STEP = 8

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
    """A compiled kernel: the hash of its canonical PTX, and the figures from the compiler."""

    digest: str
    instructions: int
    registers: int
    spilled_bytes: int
    code: str = ""  # The hash of the machine code; empty until it is needed
    # Empty if the kernel was read from a file.
    text: tuple[str, ...] = ()
    ptx: str = ""

    def statistics(self) -> tuple[int, int, int]:
        return self.instructions, self.registers, self.spilled_bytes

    def figures(self, ctas: int | None = None) -> str:
        fits = "" if ctas is None else f", {ctas} CTAs an SM"
        return (
            f"{self.instructions} instructions, {self.registers} registers, "
            f"{self.spilled_bytes} bytes spilled{fits}"
        )

    def with_code(self) -> Kernel:
        """This kernel with the hash of its machine code, if the PTX is known."""
        return self if self.code or not self.ptx else replace(self, code=code_digest(self.ptx))


def code_digest(ptx: str) -> str:
    """The hash of the machine code of a kernel which ptxas assembles alone."""
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    if target is None:
        raise SystemExit(f"PTX without a target: it begins with {ptx[:60]!r}")
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        ptxas = find_toolchain().nvcc.parent / "ptxas"
        command = [str(ptxas), "-O3", f"-arch={target[1]}", str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"ptxas of a kernel for {target[1]}: {done.stderr}")
        return code_hash(made.read_bytes())


def code_hash(cubin: bytes) -> str:
    """One hash of the machine code of all kernels in a cubin, without their names."""
    codes = sorted(kernel_code(cubin).values())
    return hashlib.sha256(b"".join(codes)).hexdigest()[:32]


def with_codes(kernels: Mapping[Key, Kernel]) -> dict[Key, Kernel]:
    """All kernels with the hashes of their machine code."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(kernels, pool.map(Kernel.with_code, kernels.values()), strict=True))


Key = tuple[int, str, str]  # (architecture, semantics, short form)


@dataclass(frozen=True)
class Compiled:
    """The kernels of a checkout, the compiler, and for each family the hash of its sources."""

    nvcc_version: str
    sources: dict[str, str]
    kernels: dict[Key, Kernel]

    def write(self, path: Path) -> None:
        """Writes a JSON file with a line for each kernel."""
        lines = [
            json.dumps(
                [*key, kernel.digest, *kernel.statistics(), *([kernel.code] * bool(kernel.code))]
            )
            for key, kernel in sorted(self.kernels.items())
        ]
        kernels = ",\n".join(lines)
        path.write_text(
            f'{{"nvcc": {json.dumps(self.nvcc_version)}, "sources": {json.dumps(self.sources)}, '
            f'"kernels": [\n{kernels}\n]}}\n'
        )

    @classmethod
    def read(cls, path: Path) -> Compiled:
        data = json.loads(path.read_text())
        kernels = {
            (arch, semantics, form): Kernel(digest, *statistics)
            for arch, semantics, form, digest, *statistics in data["kernels"]
        }
        return cls(data["nvcc"], data["sources"], kernels)


def canonical(ptx: str) -> tuple[str, ...]:
    """The lines of a kernel in canonical form, which does not depend on names."""
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
    """The kernels that rank first in the shipped tables."""
    found: dict[tuple[str, str, str], set[KernelConfig]] = {}
    for entry in WinnersTable.shipped():
        config = parse_kernel_name_into_config(entry.best.config)
        semantics = entry.problem.required_semantics(config)
        where = f"sm_{entry.key.arch}", str(semantics), config.FAMILY
        found.setdefault(where, set()).add(config)
    return [
        Job(arch, semantics, tuple(map(str, sorted(configs))))
        for (arch, semantics, _), configs in found.items()
    ]


def set_job(name: str, arch: str, semantics: str) -> Job:
    """A job that builds a named set of configs, or a list of short forms, for one architecture."""
    return Job(arch, str(Semantics.parse(semantics)), tuple(map(str, get_kernel_configs(name))))


def build(tree: Path, jobs: Iterable[Job], cache: Path) -> None:
    """Builds the kernels of the jobs to a cache, with the command of the checkout itself."""
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


def compiled_in(cache: Path) -> Compiled:
    """The kernels in a cache of any layout, which are found by their manifests."""
    versions, sources, kernels = set(), {}, {}
    for manifest in sorted(cache.rglob("manifest.json")):
        data: dict[str, Any] = json.loads(manifest.read_text().partition("\n")[2])
        versions.add(data["nvcc_version"])
        sources[data["family"]] = data["source_hash"]
        semantics = str(Semantics(**data["semantics"]))
        for kernel in data["kernels"]:
            ptx = (manifest.parent / kernel["ptx_file"]).read_text()
            text = canonical(ptx)
            kernels[data["arch"], semantics, kernel["short_form"]] = Kernel(
                hashlib.sha256("\n".join(text).encode()).hexdigest()[:32],
                kernel["code_bytes"] // INSTRUCTION_BYTES,
                kernel["registers"],
                kernel["spill_store_bytes"] + kernel["spill_load_bytes"],
                text=text,
                ptx=ptx,
            )
    return Compiled(" and ".join(sorted(versions)), sources, kernels)


def compiled_from(tree: Path, jobs: Iterable[Job]) -> Compiled:
    """The kernels that a checkout compiles for the jobs."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        cache.mkdir()
        build(tree, jobs, cache)
        return compiled_in(cache)


def recorded(
    known: Mapping[str, Mapping[str, str]], base: Mapping[str, str], new: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """The equivalent sources of each family.

    The sources of the base are added as equivalent to the new ones.

    Other sources that were equivalent to those of the base are then equivalent to the new ones too.
    """
    found = {older: dict(to) for older, to in known.items()}
    for family, older in base.items():
        alike = {older, known.get(older, {}).get(family, older)}
        alike.update(one for one, to in known.items() if to.get(family) in alike)
        for one in alike - {new[family]}:
            found.setdefault(one, {})[family] = new[family]
    return dict(sorted(found.items()))


def is_same(before: Kernel, now: Kernel) -> bool:
    """Whether two kernels have the same canonical PTX or the same machine code."""
    if before.digest == now.digest:
        return True
    codes = before.with_code().code, now.with_code().code
    return bool(codes[0]) and codes[0] == codes[1] and before.statistics() == now.statistics()


def ctas_per_sm(key: Key, kernel: Kernel) -> int:
    """How many CTAs of a kernel an SM of its architecture can hold."""
    arch, _, form = key
    config = parse_kernel_name_into_config(form)
    return config.num_ctas_per_sm(device_spec(arch).max_smem_per_sm, kernel.registers)


def what_is_worse(key: Key, before: Kernel, now: Kernel) -> list[str]:
    """The figures that are worse than before."""

    def steps(kernel: Kernel) -> int:
        return -(-kernel.registers // REGISTER_STEP)

    more = {
        "instructions": now.instructions > before.instructions,
        "registers": steps(now) > steps(before),
        "spilled bytes": now.spilled_bytes > before.spilled_bytes,
        "CTAs an SM": ctas_per_sm(key, now) < ctas_per_sm(key, before),
    }
    return [name for name, worse in more.items() if worse]


@dataclass(frozen=True)
class Difference:
    """A kernel that is not the same in both checkouts."""

    text: str
    is_worse: bool  # Or only one checkout has the kernel


def unchanged_families(base: Compiled, new: Compiled) -> dict[str, int]:
    """The families whose kernels are all the same in both checkouts, each with their number."""
    counts: Counter[str] = Counter()
    changed = set()
    for key in base.kernels.keys() & new.kernels.keys():
        family = parse_kernel_name_into_config(key[2]).FAMILY
        counts[family] += 1
        if not is_same(base.kernels[key], new.kernels[key]):
            changed.add(family)
    return {family: count for family, count in sorted(counts.items()) if family not in changed}


def read_new(path: Path) -> Compiled:
    """Reads the kernels of this checkout from a file.

    Exits if the file was made from other sources.
    """
    found = Compiled.read(path)
    for family, older in found.sources.items():
        if older != source_hash(family):
            raise SystemExit(f"--new {path}: made from other sources of {family} than this tree's")
    return found


def differences(base: dict[Key, Kernel], new: dict[Key, Kernel]) -> Iterator[Difference]:
    """The kernels that differ between the two checkouts."""
    for key in sorted(base.keys() | new.keys()):
        named = f"{key[2]} [{key[1]}] for sm_{key[0]}"
        before, now = base.get(key), new.get(key)
        if before is None or now is None:
            tree = "the new" if before is None else "the base"
            yield Difference(f"{named}: only in {tree} tree", is_worse=True)
        elif not is_same(before, now):
            count, shown = "some", ""
            if before.text:
                changed = difflib.unified_diff(before.text, now.text, n=0, lineterm="")
                lines = [line for line in changed if not line.startswith(("---", "+++", "@@"))]
                count = str(len(lines))
                shown = "".join(f"\n    {line}" for line in islice(lines, SHOWN_LINES))
            worse = what_is_worse(key, before, now)
            yield Difference(
                f"{named}: {count} lines differ, {'worse: ' if worse else 'no worse'}"
                f"{', '.join(worse)}\n"
                f"  base: {before.figures(ctas_per_sm(key, before))}\n"
                f"  new:  {now.figures(ctas_per_sm(key, now))}{shown}",
                is_worse=bool(worse),
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    base_options = parser.add_mutually_exclusive_group(required=True)
    base_options.add_argument("--base-tree", type=Path, help="the other checkout")
    base_options.add_argument("--base", type=Path, help="a file that --write-base wrote of it")
    parser.add_argument("--write-base", type=Path, help="only record the base tree")
    parser.add_argument("--new", type=Path, help="a file that --write-base wrote of this tree")
    parser.add_argument("--set", help="a key of KERNELS, instead of cover and shipped kernels")
    parser.add_argument("--arch", default="sm_80", help="with --set")
    parser.add_argument("--semantics", default="plain", help="with --set")
    parser.add_argument(
        "--no-worse", action="store_true", help="accept different kernels that are not worse"
    )
    parser.add_argument("--record", action="store_true", help="record equivalent sources")
    options = parser.parse_args()
    if options.record and options.set:
        parser.error("--record: needs cover and all shipped kernels; leave --set out")
    if options.base_tree and not (options.base_tree / "src" / "flashsmith").is_dir():
        parser.error(f"--base-tree {options.base_tree}: holds no src/flashsmith")
    if options.write_base and not options.base_tree:
        parser.error("--write-base: give the tree to compile with --base-tree")
    if options.set:
        jobs = [set_job(options.set, options.arch, options.semantics)]
    else:
        jobs = [set_job("cover", "sm_80", "plain"), *shipped_jobs()]
    if options.base:
        base = Compiled.read(options.base)
    else:
        base = compiled_from(options.base_tree.resolve(), jobs)
    if options.write_base:
        base = replace(base, kernels=with_codes(base.kernels))
        base.write(options.write_base)
        print(f"{len(base.kernels)} kernels of nvcc {base.nvcc_version}: {options.write_base}")
        return 0 if base.kernels else 1
    new = read_new(options.new) if options.new else compiled_from(TREE, jobs)
    if new.kernels and base.kernels and new.nvcc_version != base.nvcc_version:
        raise SystemExit(
            f"the base was compiled with nvcc {base.nvcc_version}, this tree with "
            f"{new.nvcc_version}: compile both with one"
        )
    found = list(differences(base.kernels, new.kernels))
    for difference in found:
        print(difference.text)
    kernels = len(base.kernels.keys() | new.kernels.keys())
    print(f"{kernels} kernels, {kernels - len(found)} the same, {len(found)} not")
    refused = [one for one in found if one.is_worse or not options.no_worse]
    if options.record:
        same = unchanged_families(base, new)
        sources = {family: base.sources[family] for family in same}
        equivalent = recorded(equivalent_sources(), sources, new.sources)
        EQUIVALENT_SOURCES.write_text(json.dumps(equivalent, indent=1) + "\n")
        listed = ", ".join(f"{family} ({count} kernels)" for family, count in same.items())
        print(f"equivalent sources recorded: {listed or 'of no family'}")
    return 1 if refused or not kernels else 0


if __name__ == "__main__":
    sys.exit(main())
