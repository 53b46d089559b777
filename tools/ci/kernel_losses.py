#!/usr/bin/env python3
"""Compiles all kernels that may be chosen, and records the ones that the compiler makes slow.

    python tools/ci/kernel_losses.py                                   # counts unrecorded kernels
    python tools/ci/kernel_losses.py --record --minutes 60             # compiles as many as it can
    python tools/ci/kernel_losses.py --record --family mma_sync_decode --jobs 16

Covers the choices for every operation, dtype, d_head and semantics on the GPUs that have tables,
over a grid of sizes and heads. It compiles the kernels of families that must not spill. Kernels
that spill, or whose wgmma is serialised, are added to chooser/spills.json. The chooser may then
take other kernels, which are compiled too.

The compiled kernels and their sources are recorded in compiled_kernels.json next to this file.
tests/chooser/test_kernel_losses.py relies on it as long as a family's sources compile to the same
kernels. Run this after a change of kernels, tables or the cost model. It needs a compiler but no
GPU, and continues where it stopped.
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
# A larger library delays the record of its kernels; in a smaller library, host code takes longer
# than kernels.
_PER_LIBRARY = 12

_BATCHES = (1, 8, 64)
_HEADS = ((8, 8), (32, 8), (16, 1))
_LENGTHS = (1, 16, 128, 512, 1024, 4096, 16384, 131072)
# These numbers of queries are tried with every number of keys, others with as many keys as queries.
_QUERIES = (1, 128)
# The grid over a KV cache, where calls with few queries differ most.
_BATCHES_OF_DECODE = (1, 5, 16, 64, 256)
_HEADS_OF_DECODE = ((8, 8), (32, 8), (32, 2), (16, 1))
_QUERIES_OF_DECODE = (1, 2, 4, 8, 16, 128)
_MASKS = ("none", "causal", "window")


class Group(NamedTuple):
    """Problems with similar kernels, which one test covers together."""

    gpu: str
    operation: str
    dtype: DType
    d_head: int
    mask: str
    softcap: bool
    kind: str  # dense, packed or partial

    def __str__(self) -> str:
        words = (self.operation, self.dtype.name.lower(), f"d{self.d_head}", self.mask, self.kind)
        return "-".join((self.gpu, *words, *["softcap"] * self.softcap))


class Kernel(NamedTuple):
    """A config, and the architecture and semantics that it is compiled for."""

    config: KernelConfig
    arch: int
    semantics: Semantics

    @property
    def digest(self) -> str:
        """The kernel's name in the record."""
        text = f"{self.config} sm_{self.arch} {self.semantics}"
        return hashlib.sha256(text.encode()).hexdigest()[:10]


def groups() -> list[Group]:
    """All groups with choices among kernels that must not spill."""
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
            continue  # mma.sync kernels may spill
        rest = product(DType, SUPPORTED_D_HEADS, _MASKS, (False, True), kinds)
        found += [Group(gpu, operation, *one) for one in rest]
    return found


def chosen_kernels(group: Group) -> list[Kernel]:
    """The chosen kernels of a group's problems that must not spill."""
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
    # Uneven problems are one token longer, unless the semantics are uneven already.
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
    """The compiled kernels, by the sources of their family."""

    def __init__(self, path: Path = COMPILED) -> None:
        self.path = path
        data = json.loads(path.read_text()) if path.exists() else {}
        self._by_family: dict[str, dict[str, Any]] = data

    def knows(self, kernel: Kernel) -> bool:
        """Whether a kernel was compiled from these sources or from equivalent sources."""
        known = self._by_family.get(kernel.config.FAMILY)
        return known is not None and kernel.digest in known["kernels"] and _is_current(known)

    def add(self, kernels: Iterable[Kernel]) -> None:
        """Adds kernels that were just compiled, and saves the record."""
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
    """The compiler's report on each kernel; all kernels have the same architecture and
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
    """The lines about these kernels that chooser/spills.json lacks."""
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
    """Adds lines to chooser/spills.json in its order and makes the chooser read it again."""
    if not lines:
        return
    everything = json.loads(KNOWN.read_text()) + lines
    everything.sort(key=lambda one: (one["arch"], one["config"], one["semantics"]))
    KNOWN.write_text("[\n" + ",\n".join(map(json.dumps, everything)) + "\n]\n")
    forget_known()
    forget_choices()


# --- the command ---------------------------------------------------------------------------------


def missing(record: Record, family: str | None) -> dict[tuple[int, Semantics, str], list[Kernel]]:
    """The unrecorded kernels, grouped by architecture, semantics and family."""
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
    # The chooser replaces a slow choice by another kernel, so this repeats until no kernel is new.
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
