"""Prints tables of config sets, of kernel libraries and of the cache.

The facts are dictionaries that can be written as JSON; the tables show a part of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from flashsmith.benchmark.kernel_facts import KernelFacts
from flashsmith.benchmark.table import make_columns, print_table
from flashsmith.builder import CacheEntry, KernelLibrary, is_current
from flashsmith.families import KernelConfig, Semantics, is_legal
from flashsmith.families.kernel_sets import config_sets
from flashsmith.runtime.target import Target

MIB = 2**20


def print_sets(console: Console, sizes: Mapping[str, int | None]) -> None:
    """Prints the table of kernel_set_sizes()."""
    columns = make_columns("key | configs> | what it is~")
    rows = [
        (key, "cannot be loaded" if n is None else str(n), _meaning(key))
        for key, n in sizes.items()
    ]
    print_table(console, columns, rows)


def _meaning(key: str) -> str:
    if "," in key:
        B_r, B_c = key.split(",")
        return f"configs of 'tune' with B_r {B_r} and B_c {B_c}"
    offered = config_sets().get(key)
    return offered.meaning if offered else "a set of an installed package"


def config_facts(
    configs: Iterable[KernelConfig], target: Target, cached: Iterable[CacheEntry]
) -> list[dict[str, Any]]:
    """Returns the facts about each config that are known before it runs.

    ``cached`` are the libraries in the cache; 'built' says whether a cached library contains the
    config. Only current libraries for plain semantics and this architecture count.
    """
    built = {
        kernel.config
        for entry in cached
        if entry.manifest is not None
        and (entry.manifest.arch, entry.manifest.semantics) == (target.device.arch, Semantics())
        and is_current(entry.manifest)
        for kernel in entry.manifest.kernels
    }
    return [
        {
            "short_form": str(cfg),
            "kernel_name": cfg.kernel_name(),
            "knobs": asdict(cfg),
            "threads": cfg.n_threads,
            "smem_bytes": cfg.smem_bytes(),
            "ctas_per_sm_by_smem": cfg.num_ctas_per_sm(target.device.max_smem_per_sm),
            "legal": is_legal(cfg, target.device),
            "built": cfg in built,
        }
        for cfg in configs
    ]


def print_configs(console: Console, facts: Sequence[dict[str, Any]]) -> None:
    """Prints the table of config_facts()."""
    columns = make_columns("kernel | threads> | smem\nKiB> | CTAs/SM\nby smem> | legal | built")
    rows = [
        (
            fact["short_form"],
            str(fact["threads"]),
            f"{fact['smem_bytes'] / 1024:g}",
            str(fact["ctas_per_sm_by_smem"]),
            "yes" if fact["legal"] else "NO",
            "yes" if fact["built"] else "no",
        )
        for fact in facts
    ]
    print_table(console, columns, rows)


def library_facts(library: KernelLibrary) -> dict[str, Any]:
    """The path of a library and, for each of its kernels, the compiler's report."""
    manifest = library.manifest
    return {
        "path": str(library.path),
        "arch": f"sm_{manifest.arch}",
        "semantics": str(manifest.semantics),
        "build_seconds": manifest.build_seconds,
        "kernels": [kernel.to_json() for kernel in manifest.kernels],
    }


def print_library(console: Console, library: KernelLibrary, target: Target) -> None:
    """Prints a table of the kernels in a library."""
    columns = make_columns(
        "kernel | regs> | spilled\nbytes> | CTAs/SM> | code\nbytes> | nvcc\nseconds>"
    )
    facts = [KernelFacts.of(kernel, target.device) for kernel in library.manifest.kernels]
    rows = [
        (
            kernel.short_form,
            str(known.registers),
            str(known.spill_store_bytes),
            str(known.ctas_per_sm),
            f"{kernel.code_bytes:,}",
            f"{kernel.compile_seconds:.1f}",
        )
        for kernel, known in zip(library.manifest.kernels, facts, strict=True)
    ]
    print_table(console, columns, rows)


def entry_facts(entry: CacheEntry) -> dict[str, Any]:
    """The facts about one library in the cache.

    They include its configs unless the library is damaged.

    'current' says whether the library would be used, as is_current() finds. It is None for a
    damaged library.
    """
    manifest = entry.manifest
    return {
        "key": entry.key,
        "path": str(entry.path),
        "bytes": entry.bytes,
        "last_used": entry.last_used,
        "damage": entry.damage,
        "current": is_current(manifest) if manifest else None,
        "arch": f"sm_{manifest.arch}" if manifest else None,
        "semantics": str(manifest.semantics) if manifest else None,
        "created": manifest.created if manifest else None,
        "build_seconds": manifest.build_seconds if manifest else None,
        "configs": [kernel.short_form for kernel in manifest.kernels] if manifest else [],
    }


def print_entries(console: Console, entries: Sequence[CacheEntry]) -> None:
    """Prints a table of the libraries in the cache."""
    columns = make_columns("library | arch | semantics | configs> | MiB> | last used | state~")
    rows = [
        (
            entry.key[:12],
            f"sm_{entry.manifest.arch}" if entry.manifest else "?",
            str(entry.manifest.semantics) if entry.manifest else "?",
            str(len(entry.manifest.kernels)) if entry.manifest else "?",
            f"{entry.bytes / MIB:.1f}",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used)),
            _state(entry),
        )
        for entry in entries
    ]
    print_table(console, columns, rows)


def _state(entry: CacheEntry) -> str:
    if entry.manifest is None:
        return f"damaged: {entry.damage}"
    return "ok" if is_current(entry.manifest) else "outdated: built from other sources or versions"
