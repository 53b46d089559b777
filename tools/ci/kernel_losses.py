#!/usr/bin/env python3
"""Compiles all kernels that the chooser may choose, and records those that the compiler makes slow.

    python tools/ci/kernel_losses.py                                   # counts unrecorded kernels
    python tools/ci/kernel_losses.py --record --minutes 60             # compiles as many as it can
    python tools/ci/kernel_losses.py --record --family mma_sync_decode --jobs 16

Chosen are kernels for every operation, dtype, d_head and semantics, on the GPUs that have tables,
for a grid of sizes and heads. Those of families that must not spill are compiled. Kernels that
spill, or whose wgmma is serialised, are added to chooser/spills.json. The chooser may then choose
other kernels, which are compiled too.

The compiled kernels and their sources are recorded in compiled_kernels.json next to this file.
As long as the sources of a family compile to the same kernels, tests/chooser/test_kernel_losses.py
uses this record. Run this after kernels, tables or the cost model have changed. It needs a compiler
but no GPU, and continues where it has stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from flashsmith import env
from flashsmith.builder import KernelEntry, build
from flashsmith.builder.slow_kernels import slow_kernels, slowing_warnings
from flashsmith.builder.sources import equivalent_sources, source_hash
from flashsmith.chooser import forget_choices
from flashsmith.chooser.backward import CHOOSERS as BACKWARD_CHOOSERS
from flashsmith.chooser.decode import CHOOSERS as DECODE_CHOOSERS
from flashsmith.chooser.spills import KNOWN, forget_known
from flashsmith.families import (
    SUPPORTED_D_HEADS,
    DType,
    KernelConfig,
    Problem,
    Semantics,
    by_family,
    device_spec,
)
from flashsmith.semantics.sizes import GRADIENT_WORDS

COMPILED = Path(__file__).with_name("compiled_kernels.json")
GPUS = ("H200", "H100", "A100", "L40S")
# With more kernels per library, a stop would lose more; with fewer, host code would take longer
# than kernels.
_PER_LIBRARY = 12

_BATCHES = (1, 8, 64)
_HEADS = ((8, 8), (32, 8), (16, 1))
_LENGTHS = (1, 16, 128, 512, 1024, 4096, 16384, 131072)
# These numbers of queries are tried with every number of keys; other numbers only with as many
# keys.
_QUERIES = (1, 128)
# The grid over a KV cache; calls with few queries differ most.
_BATCHES_OF_DECODE = (1, 5, 16, 64, 256)
_HEADS_OF_DECODE = ((8, 8), (32, 8), (32, 2), (16, 1))
_QUERIES_OF_DECODE = (1, 2, 4, 8, 16, 128)
_MASKS = ("none", "causal", "window")


class Group(NamedTuple):
    """Problems whose kernels are similar, so that one test checks all of them."""

    gpu: str
    operation: str
    dtype: DType
    d_head: int
    mask: str
    softcap: bool
    kind: str  # One of dense, packed and partial

    def __str__(self) -> str:
        words = (self.operation, self.dtype.name.lower(), f"d{self.d_head}", self.mask, self.kind)
        return "-".join((self.gpu, *words, *["softcap"] * self.softcap))


class Kernel(NamedTuple):
    """A config, with the architecture and semantics for which it is compiled."""

    config: KernelConfig
    arch: int
    semantics: Semantics

    @property
    def digest(self) -> str:
        """The name of the kernel in the record."""
        text = f"{self.config} sm_{self.arch} {self.semantics}"
        return hashlib.sha256(text.encode()).hexdigest()[:10]


def groups() -> list[Group]:
    """All groups in which a kernel that must not spill is chosen."""
    found = []
    for gpu, (operation, kinds) in product(
        GPUS,
        {
            "forward": ("dense", "packed", "partial", "packed_partial"),
            "backward": ("dense", "packed"),
            "decode": ("dense", "packed"),
        }.items(),
    ):
        if operation != "decode" and device_spec(gpu).arch != 90:
            continue  # Kernels of mma.sync may spill
        rest = product(DType, SUPPORTED_D_HEADS, _MASKS, (False, True), kinds)
        found += [Group(gpu, operation, *one) for one in rest]
    return found


def chosen_kernels(group: Group) -> list[Kernel]:
    """The kernels chosen for the problems of a group, if they must not spill."""
    device = device_spec(group.gpu)
    found: dict[Kernel, None] = {}
    for problem in _problems(group):
        for choose in _choosers(group.operation):
            config = choose(problem, device)
            if config.family.must_not_spill:
                found[Kernel(config, device.arch, problem.required_semantics(config))] = None
    return list(found)


def _choosers(operation: str) -> Iterable[Any]:
    return {"decode": DECODE_CHOOSERS}.get(operation, BACKWARD_CHOOSERS).values()


def _problems(group: Group) -> Iterator[Problem]:
    packed, partial_ = "packed" in group.kind, "partial" in group.kind
    semantics = Semantics(group.mask, group.softcap, packed, packed or partial_, partial_)
    words = ("", *GRADIENT_WORDS) if group.operation == "backward" else ("",)
    # For uneven problems, lengths are one token longer, unless the semantics are uneven in any
    # case.
    longer = (0,) if semantics.uneven else (0, 1)
    pairs = [(q, k) for q in _LENGTHS for k in (_LENGTHS if q in _QUERIES else (q,))]
    batches, heads = _BATCHES, _HEADS
    if group.operation == "decode":
        pairs = [(q, k) for q in _QUERIES_OF_DECODE for k in _LENGTHS if q <= k]
        batches, heads = _BATCHES_OF_DECODE, _HEADS_OF_DECODE
    for batch, of, (seq_q, seq_k), more, word in product(batches, heads, pairs, longer, words):
        sizes = batch, seq_q + more, seq_k + more, *of, group.d_head
        yield Problem(*sizes, group.dtype, semantics, group.operation, 0, word)


# --- the record ----------------------------------------------------------------------------------


class Record:
    """The kernels that have been compiled, by the sources of their families."""

    def __init__(self, path: Path = COMPILED) -> None:
        self.path = path
        data = json.loads(path.read_text()) if path.exists() else {}
        self._by_family: dict[str, dict[str, Any]] = data

    def knows(self, kernel: Kernel) -> bool:
        """Whether a kernel was compiled from these sources or from equivalent ones."""
        known = self._by_family.get(kernel.config.FAMILY)
        return known is not None and kernel.digest in known["kernels"] and _is_current(known)

    def add(self, kernels: Iterable[Kernel]) -> None:
        """Adds kernels that have just been compiled, and saves the record."""
        for kernel in kernels:
            family = kernel.config.FAMILY
            known = self._by_family.get(family)
            if known is None or not _is_current(known):
                known = {"family": family, "sources": source_hash(family), "kernels": []}
                self._by_family[family] = known
            known["kernels"] = sorted({*known["kernels"], kernel.digest})
        self.path.write_text(json.dumps(self._by_family, indent=0, sort_keys=True) + "\n")


def _is_current(known: dict[str, Any]) -> bool:
    family, then = known["family"], known["sources"]
    return source_hash(family) in (then, equivalent_sources().get(then, {}).get(family))


def compiled(
    kernels: Iterable[Kernel], jobs: int | None = None
) -> list[tuple[Kernel, KernelEntry]]:
    """The compiler's reports on kernels, which must all have the same architecture and
    semantics."""
    wanted = list(kernels)
    reports = []
    for group in by_family(kernel.config for kernel in wanted):
        first = wanted[0]
        library = build(group, arch=first.arch, semantics=first.semantics, jobs=jobs)
        for config in group:
            entry = library.entry(config)
            reports.append((Kernel(config, first.arch, first.semantics), entry))
    return reports


def unrecorded_losses(reports: Iterable[tuple[Kernel, KernelEntry]]) -> list[dict[str, Any]]:
    """The lines for these kernels that are not in chooser/spills.json yet."""
    known = {
        (one["arch"], one["semantics"], one["config"]) for one in json.loads(KNOWN.read_text())
    }
    lines = []
    for kernel, entry in reports:
        key = kernel.arch, str(kernel.semantics), str(kernel.config)
        if slow_kernels([entry]) and key not in known:
            worst = entry.most_spilling
            line = dict(zip(("arch", "semantics", "config"), key, strict=True))
            sizes = {"stored": worst.spill_store_bytes, "loaded": worst.spill_load_bytes}
            untimed = {"instead": None, "ratio": 0, "timed": False}
            serialised = {"serialised": True} if slowing_warnings(entry) else {}
            lines.append(line | sizes | untimed | serialised)
    return lines


def record_losses(lines: list[dict[str, Any]]) -> None:
    """Adds lines to chooser/spills.json, sorted as it is, and makes the chooser read it again."""
    if not lines:
        return
    everything = json.loads(KNOWN.read_text()) + lines
    everything.sort(key=lambda one: (one["arch"], one["config"], one["semantics"]))
    KNOWN.write_text("[\n" + ",\n".join(map(json.dumps, everything)) + "\n]\n")
    forget_known()
    forget_choices()


# --- the command ---------------------------------------------------------------------------------


def missing(record: Record, family: str | None) -> dict[tuple[int, Semantics, str], list[Kernel]]:
    """The kernels that are not recorded, by architecture, semantics and family."""
    found: dict[tuple[int, Semantics, str], dict[Kernel, None]] = {}
    for group in groups():
        for kernel in chosen_kernels(group):
            if family in (None, kernel.config.FAMILY) and not record.knows(kernel):
                key = kernel.arch, kernel.semantics, kernel.config.FAMILY
                found.setdefault(key, {})[kernel] = None
    return {key: list(kernels) for key, kernels in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="compile what is not recorded")
    parser.add_argument("--family", help="only kernels of this family")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this time")
    parser.add_argument("--jobs", type=int, default=env.jobs(), help="compilers at once")
    asked = parser.parse_args()
    end, record = time.monotonic() + 60 * asked.minutes, Record()
    # When a choice is slow, the chooser takes another kernel; so this is repeated until there is no
    # new kernel.
    while lacking := missing(record, asked.family):
        print(f"{sum(map(len, lacking.values()))} kernels are not recorded", flush=True)
        if not asked.record:
            return
        for (arch, semantics, family), kernels in lacking.items():
            each = _PER_LIBRARY * asked.jobs
            for first in range(0, len(kernels), each):
                if time.monotonic() > end:
                    return
                now = kernels[first : first + each]
                with tempfile.TemporaryDirectory() as folder:
                    os.environ["FLASHSMITH_CACHE_DIR"] = folder
                    reports = compiled(now, asked.jobs)
                lines = unrecorded_losses(reports)
                record_losses(lines)
                record.add(now)
                print(f"sm_{arch} {family} {semantics}: {len(now)}, {len(lines)} slow", flush=True)
    print("all are recorded")


if __name__ == "__main__":
    main()
