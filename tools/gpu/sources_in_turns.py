#!/usr/bin/env python3
"""The kernels of two versions of csrc, launched in turns: did a change of the sources cost time?

    python tools/gpu/sources_in_turns.py rows.csv --base OLD/csrc
    python tools/gpu/sources_in_turns.py rows.csv --base OLD/csrc --softcap     # the same, capped
    python tools/gpu/sources_in_turns.py rows.csv --base OLD/csrc --family mma_sync
    python tools/gpu/sources_in_turns.py rows.csv --base OLD/csrc --build-only  # needs no GPU

A pair is a config and its semantics that rank first in a forward entry of the shipped table, on the
first problem where they do. Libraries are kept in the cache; any there of the same sources will do,
so that one machine may build and another time. Each round is a measurement of its own (base and new
launched in turns, L2 flushed); outputs of both are checked in the same run, and a pair of which one
is wrong has no times. A pair below --again gets twenty rounds more, and its pooled figure counts. A
CSV row a round; at the end registers and spills that changed, each pair's ratio (base's time over
new's: above 1 is faster now) with the interval of its rounds, and the geometric mean. The exit
status is 1 when an output is wrong, or the mean is below --least.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashsmith.benchmark.environment import Environment
from flashsmith.benchmark.implementations import KernelImplementation
from flashsmith.benchmark.timing import Protocol
from flashsmith.benchmark.turns import Contender, Pooled, Turns
from flashsmith.benchmark.workload import Workload
from flashsmith.builder import KernelLibrary
from flashsmith.builder.kernel_cache import Cache
from flashsmith.builder.library_build import build_from
from flashsmith.builder.sources import package_sources, source_hash, tree_hash
from flashsmith.builder.user_cache import cache_dir
from flashsmith.chooser.choice import choose_config
from flashsmith.chooser.winners import WinnersTable
from flashsmith.families import (
    FAMILIES,
    KernelConfig,
    Problem,
    Semantics,
    device_spec,
    parse_kernel_name_into_config,
)
from flashsmith.operations import FORWARD
from flashsmith.runtime import query_gpu
from flashsmith.runtime.arguments import check_request
from flashsmith.runtime.libraries import LoadedKernel, load_library
from flashsmith.runtime.prepared_call import prepare
from flashsmith.semantics.signature import ForwardOptions

ARCH = 90
BASE, NEW = "base", "new"
ROUND = Protocol(num_warmups=2, runs=12, warmup_ms=0.0, measure_ms=20.0)
MORE_ROUNDS = 20


@dataclass(frozen=True)
class Pair:
    """A kernel, and a problem that it serves."""

    config: KernelConfig
    problem: Problem

    @property
    def semantics(self) -> Semantics:
        return self.problem.required_semantics(self.config)


def first_ranked(softcap: bool, family: str | None) -> list[Pair]:
    """Every config with the semantics in which a forward entry of the shipped table ranks it first,
    or of a family what would serve the entries' problems on their GPU if there were no other."""
    found: dict[tuple[KernelConfig, Semantics], Pair] = {}
    for entry in WinnersTable.shipped():
        problem = entry.problem
        if problem.operation != FORWARD.name:
            continue
        if softcap:
            problem = replace(problem, semantics=replace(problem.semantics, softcap=True))
        config = parse_kernel_name_into_config(entry.best.config)
        if family is not None:
            config = choose_config(problem, device_spec(entry.key.gpu), family)
        pair = Pair(config, problem)
        found.setdefault((pair.config, pair.semantics), pair)
    return list(found.values())


def library_of(csrc: Path, configs: set[KernelConfig], semantics: Semantics) -> KernelLibrary:
    """A library of these sources that holds the configs: from the cache, or built."""
    (family,) = {config.FAMILY for config in configs}
    cache, sources = Cache(cache_dir()), source_hash(family, csrc)
    for manifest in cache.manifests():
        held = {kernel.config for kernel in manifest.kernels}
        alike = manifest.source_hash == sources and manifest.arch == ARCH
        if alike and manifest.semantics == semantics and configs <= held:
            library = cache.open(manifest.key)
            if library is not None:
                return library
    return build_from(csrc, configs, arch=ARCH, semantics=semantics)


def kernels_of(csrc: Path, pairs: list[Pair], load: bool) -> dict[Any, Any]:
    """By config and semantics: the compiler's reports, or the loaded kernels."""
    wanted: dict[Semantics, set[KernelConfig]] = {}
    for pair in pairs:
        wanted.setdefault(pair.semantics, set()).add(pair.config)
    found: dict[Any, Any] = {}
    for semantics, configs in wanted.items():
        library = library_of(csrc, configs, semantics)
        print(f"{csrc}: {len(library)} kernels, {semantics}", flush=True)
        kernels = load_library(library) if load else {c: library.entry(c) for c in configs}
        found |= {(config, semantics): kernels[config] for config in configs}
    return found


def implementation(name: str, kernel: LoadedKernel, workload: Workload) -> KernelImplementation:
    tensors = (workload.q, workload.k, workload.v, workload.o)
    request = check_request(
        tensors, ForwardOptions(**workload.options), check_contents=True, output="o"
    )
    prepared = prepare(request, query_gpu(0), lambda: kernel)

    return KernelImplementation(name, kernel.config, workload, prepared.run)


def measured(pair: Pair, kernels: dict[str, dict[Any, Any]]) -> Callable[[], dict[str, Any]]:
    """A function that measures one more round of a pair; its row."""
    workload = Workload(pair.problem)
    both = [
        implementation(name, kernels[name][pair.config, pair.semantics], workload)
        for name in (BASE, NEW)
    ]
    turns = Turns([Contender.of(one) for one in both])

    def one_round() -> dict[str, Any]:
        times: dict[str, float] = {}
        if not turns.wrong:
            times = {name: it.median_ms for name, it in turns.round(ROUND).items()}
        return {
            "problem": str(pair.problem),
            "semantics": str(pair.semantics),
            "config": str(pair.config),
            "base_ms": f"{times[BASE]:.5f}" if times else "",
            "new_ms": f"{times[NEW]:.5f}" if times else "",
            "ratio": f"{times[BASE] / times[NEW]:.5f}" if times else "",
            "base_right": BASE not in turns.wrong,
            "new_right": NEW not in turns.wrong,
        }

    return one_round


def is_right(row: dict[str, Any]) -> bool:
    return bool(row["base_right"] and row["new_right"])


def pooled(rows: list[dict[str, Any]]) -> Pooled:
    """The ratio of a pair's rounds."""
    return Pooled.of([float(row["ratio"]) for row in rows])


def changed_resources(reports: dict[str, dict[Any, Any]]) -> Iterator[str]:
    for key, new in reports[NEW].items():
        base = reports[BASE][key]
        for name in ("registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes"):
            before, now = getattr(base, name), getattr(new, name)
            if before != now:
                yield f"{name} {before} -> {now}: {key[0]} [{key[1]}]"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", help="where the rows go; overwritten")
    parser.add_argument("--base", type=Path, required=True, help="the other folder csrc")
    parser.add_argument("--new", type=Path, default=package_sources(), help="instead of ours")
    parser.add_argument("--only", default="", help="pairs whose problem or config match a regex")
    parser.add_argument("--softcap", action="store_true", help="the same kernels, capped")
    forward = [name for name, one in FAMILIES.items() if one.operation == FORWARD.name]
    parser.add_argument("--family", choices=forward, help="kernels of this family only")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--again", type=float, default=0.98, help="below: twenty rounds more")
    parser.add_argument("--least", type=float, default=0.0, help="allowed geometric mean")
    parser.add_argument("--build-only", action="store_true")
    options = parser.parse_args()
    sources = {BASE: options.base.resolve(), NEW: options.new.resolve()}
    for name, csrc in sources.items():
        if not (csrc / "common" / "forward_args.cuh").is_file():
            parser.error(f"--{name} {csrc}: holds no common/forward_args.cuh; give a folder csrc")
    pairs = [
        pair
        for pair in first_ranked(options.softcap, options.family)
        if re.search(options.only, f"{pair.problem} {pair.config}")
    ]
    if not pairs:
        parser.error(f"--only {options.only!r}: no pair matches")
    reports = {name: kernels_of(csrc, pairs, load=False) for name, csrc in sources.items()}
    for line in changed_resources(reports):
        print(line, flush=True)
    if options.build_only:
        return 0
    kernels = {name: kernels_of(csrc, pairs, load=True) for name, csrc in sources.items()}
    hashes = {name: tree_hash(csrc)[:12] for name, csrc in sources.items()}
    print(f"{Environment.collect(0).gpu}: {hashes}", flush=True)
    figures, wrong = [], 0
    with open(options.csv, "w", newline="") as file:
        writer = None
        for pair in pairs:
            one_round = measured(pair, kernels)
            rows: list[dict[str, Any]] = []
            while len(rows) < options.rounds or (
                pooled(rows).median < options.again and len(rows) < options.rounds + MORE_ROUNDS
            ):
                rows.append(one_round() | {"base_csrc": hashes[BASE], "csrc": hashes[NEW]})
                writer = writer or csv.DictWriter(file, list(rows[0]))
                if file.tell() == 0:
                    writer.writeheader()
                writer.writerow(rows[-1])
                if not is_right(rows[-1]):
                    break
            file.flush()
            if not is_right(rows[-1]):
                wrong += 1
                print("WRONG", pair.problem, pair.config, flush=True)
                continue
            found = pooled(rows)
            figures.append(found.median)
            print(f"{found:.4f}, {len(rows)} rounds:", pair.problem, pair.config, flush=True)
    if not figures:
        return 1
    mean = statistics.geometric_mean(figures)
    print(f"geometric mean {mean:.4f} over {len(figures)} pairs, least {min(figures):.4f}")
    return 1 if wrong or mean < options.least else 0


if __name__ == "__main__":
    sys.exit(main())
