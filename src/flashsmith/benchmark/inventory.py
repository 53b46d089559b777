"""What there is: the configs of a set, the kernels of a library, the libraries of the cache.

Facts are plain dictionaries, ready for JSON; the tables show a part of them.
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
    """A table of kernel_set_sizes()."""
    columns = make_columns("key | configs> | what it is~")
    rows = [
        (key, "cannot be loaded" if n is None else str(n), _meaning(key))
        for key, n in sizes.items()
    ]
    print_table(console, columns, rows)


def _meaning(key: str) -> str:
    if "," in key:
        B_r, B_c = key.split(",")
        return f"of tune, those with B_r {B_r} and B_c {B_c}"
    offered = config_sets().get(key)
    return offered.meaning if offered else "a set of an installed package"


def config_facts(
    configs: Iterable[KernelConfig], target: Target, cached: Iterable[CacheEntry]
) -> list[dict[str, Any]]:
    """What is known of each config before it runs; `cached` says which are built (plain)."""
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
    """A table of config_facts()."""
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
    """Where a library is, and the compiler's report on each of its kernels."""
    manifest = library.manifest
    return {
        "path": str(library.path),
        "arch": f"sm_{manifest.arch}",
        "semantics": str(manifest.semantics),
        "build_seconds": manifest.build_seconds,
        "kernels": [kernel.to_json() for kernel in manifest.kernels],
    }


def print_library(console: Console, library: KernelLibrary, target: Target) -> None:
    """A table of a library's kernels."""
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
    """What is known of one library in the cache; its configs too, unless it is damaged.

    `current` says whether it would be used: is_current(), None of a damaged one.
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
    """A table of the cache's libraries."""
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
    return "ok" if is_current(entry.manifest) else "outdated: of other sources or versions"
