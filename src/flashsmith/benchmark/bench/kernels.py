"""The kernels of a benchmark: built before any is timed, with the compiler's report on each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from flashsmith.builder import KernelEntry, KernelLibrary, Progress, find_library, library_for
from flashsmith.errors import IllegalConfigError
from flashsmith.families import DeviceSpec, KernelConfig, Problem, Semantics, by_family, check_legal

Use = tuple[KernelConfig, Problem]


class BuiltKernels:
    """What every kernel costs, by config and by what it was compiled for."""

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device
        self._libraries: dict[Semantics, list[KernelLibrary]] = defaultdict(list)

    def build(self, uses: Iterable[Use], progress: Progress) -> None:
        """Builds what is in no library yet, all kernels of the same semantics at once.

        A config that is illegal here is left out. Raises what building raises.
        """
        wanted: dict[Semantics, dict[KernelConfig, None]] = defaultdict(dict)
        for config, problem in uses:
            if self.illegality(config) is None:
                wanted[problem.required_semantics(config)][config] = None
        for semantics, configs in wanted.items():
            missing = [config for config in configs if not self._find(config, semantics)]
            for group in by_family(missing):
                built = library_for(
                    group, arch=self.device.arch, semantics=semantics, progress=progress
                )
                self._libraries[semantics].append(built)

    def illegality(self, config: KernelConfig) -> str | None:
        """Why there can be no such kernel on this device, None if there can."""
        try:
            check_legal(config, self.device)
        except IllegalConfigError as error:
            return str(error)
        return None

    def columns(self, config: KernelConfig, problem: Problem) -> dict[str, Any]:
        """BenchRow's columns that say what a kernel costs; only its name if it is not built."""
        columns: dict[str, Any] = {"family": config.FAMILY, "config": str(config)}
        entry = self._find(config, problem.required_semantics(config))
        if entry is None:
            return columns
        return columns | {
            "registers": entry.most_registers,
            "spill_bytes": entry.most_spilling.spill_bytes,
            "smem_bytes": config.smem_bytes(),
            "ctas_per_sm": config.num_ctas_per_sm(self.device.max_smem_per_sm, entry.registers),
        }

    def _find(self, config: KernelConfig, semantics: Semantics) -> KernelEntry | None:
        libraries = self._libraries[semantics]
        for library in libraries:
            if config in library:
                return library.entry(config)
        found = find_library(config, arch=self.device.arch, semantics=semantics)
        if found is None:
            return None
        libraries.append(found)
        return found.entry(config)
