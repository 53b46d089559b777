"""Builds a kernel library that is not in the cache."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable
from pathlib import Path

from flashsmith import env
from flashsmith.builder.build_progress import BuildEvent, Progress, Stage, silent
from flashsmith.builder.compile_time import expected_seconds
from flashsmith.builder.generate import sorted_configs
from flashsmith.builder.kernel_cache import Cache
from flashsmith.builder.library import KernelLibrary
from flashsmith.builder.library_compilation import LINK_SECONDS, Compilation
from flashsmith.builder.library_spec import LibrarySpec, package_version
from flashsmith.builder.manifest import FileRecord, KernelEntry, Manifest
from flashsmith.builder.processes import Finished
from flashsmith.builder.scratch import require_plain, scratch_folder
from flashsmith.builder.slow_kernels import slowing_warnings
from flashsmith.builder.sources import family_sources, source_hash
from flashsmith.builder.toolchain import find_toolchain
from flashsmith.builder.user_cache import cache_dir
from flashsmith.errors import ArgumentError, CacheError, CompileError
from flashsmith.families import KernelConfig, Semantics, check_legal, device_spec
from flashsmith.pluralize import pluralize
from flashsmith.time_left import TimeLeft, format_seconds

# The maximum number of attempts at a build. If a source changes during an attempt, the key of the
# library becomes wrong, and a new attempt begins.
_ATTEMPTS = 3


def build_from(
    csrc: Path,
    configs: Iterable[KernelConfig],
    *,
    arch: int = 80,
    semantics: Semantics | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
    packaged: bool = False,
    cpu: str | None = None,
) -> KernelLibrary:
    """Does the same as library_lookup.build(), but compiles the C++ sources in ``csrc``.

    A ``packaged`` library is made for a wheel. ``cpu`` is the processor that will run the library,
    x86_64 or aarch64; it may differ from this machine's processor.
    """
    unique = _checked_configs(configs, arch)
    jobs = env.jobs() if jobs is None else jobs
    if jobs < 1:
        raise ArgumentError(f"jobs={jobs}: give at least 1")
    csrc = csrc.absolute()
    for folder in family_sources(unique[0].FAMILY, csrc).roots:
        require_plain("csrc", folder)
    toolchain = find_toolchain(cpu)
    toolchain.check_arch(arch)
    cache = Cache(cache_dir())
    for _ in range(_ATTEMPTS):
        sources = source_hash(unique[0].FAMILY, csrc)
        made_for = unique, arch, semantics or Semantics()
        spec = LibrarySpec(*made_for, csrc, sources, toolchain, packaged)
        library = _Build(spec, cache, jobs, progress or silent).run()
        if library is not None:
            return library
    raise CompileError(f"{csrc}: the sources changed during compilation; save them and build again")


def _checked_configs(configs: Iterable[KernelConfig], arch: int) -> tuple[KernelConfig, ...]:
    unique = tuple(sorted_configs(configs))
    device = device_spec(arch)
    for cfg in unique:
        check_legal(cfg, device)
    return unique


class _Build:
    """One build, from the specification to the published library."""

    def __init__(self, spec: LibrarySpec, cache: Cache, jobs: int, progress: Progress) -> None:
        self.spec = spec
        self.cache = cache
        self.jobs = jobs
        self.progress = progress
        # The limit is read first, so that an invalid value raises its error before anything is
        # built.
        self.limit_mib = env.cache_limit_mib()
        self.done, self.total = 0, len(spec.configs)
        # Estimated seconds of wall time: for the finished steps, and for the remaining steps.
        self.estimate_done = 0.0
        self.time_left = TimeLeft(0.0)

    def run(self) -> KernelLibrary | None:
        """Returns the library, or None if the sources changed during the build."""
        key = self.spec.key()
        library = self.cache.open(key)
        if library is None:
            with self.cache.building(key, self._waiting):
                # While this process waited, another one may have built the library.
                library = self.cache.open(key)
                if library is None:
                    return self._build()
        self.done = self.total = len(library)
        self._report("reuse", f"built already: {pluralize(len(library), 'config')}")
        return library

    def _build(self) -> KernelLibrary | None:
        start = time.monotonic()
        with scratch_folder() as scratch:
            compilation = Compilation(self.spec, scratch, self.jobs)
            kernels = compilation.compile(
                self.cache,
                self._compiled,
                begin=self._begin,
                host_compiled=self._host_compiled,
            )
            self._report("link", "linking")
            compilation.link()
            self._step(LINK_SECONDS)
            if not compilation.is_current():
                return None
            compilation.publish_host_objects(self.cache)
            self._report("publish", "publishing")
            seconds = time.monotonic() - start
            manifest = self._manifest(compilation.library, kernels, seconds)
            library = self.cache.publish(compilation.library, manifest)
        self._warn_of_spills(library)
        self._warn_of_losses(library)
        self._make_room()
        self._report(
            "done", f"{pluralize(len(library), 'config')} in {seconds:.1f} s: {library.path}"
        )
        return library

    def _begin(self, host_seconds: list[float]) -> None:
        """Reports what will be built and how long that may take, and begins to count steps."""
        configs = self.spec.configs
        work = sum(map(expected_seconds, configs)) + sum(host_seconds)
        self.time_left = TimeLeft(work / self.jobs + LINK_SECONDS)
        self.total = len(configs) + len(host_seconds) + 1
        compilers = f"{pluralize(self.jobs, 'compiler')} in parallel"
        kind = "" if self.spec.semantics == Semantics() else f"{self.spec.semantics} "
        about = format_seconds(self.time_left.total)
        self._report(
            "compile",
            f"{pluralize(len(configs), f'{kind}config')} for sm_{self.spec.arch}, {compilers}, "
            f"estimated to take about {about}",
        )

    def _manifest(self, folder: Path, kernels: list[KernelEntry], seconds: float) -> Manifest:
        spec = self.spec
        files = (path for path in sorted(folder.rglob("*")) if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in files]
        return Manifest(
            key=spec.key(),
            family=spec.family,
            semantics=spec.semantics,
            arch=spec.arch,
            source_hash=spec.source_hash,
            package_version=package_version(),
            nvcc_version=spec.toolchain.nvcc_version,
            gxx_version=spec.toolchain.gxx_version,
            tvm_ffi_version=spec.toolchain.tvm_ffi_version,
            flags=spec.kernel_flags(),
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            build_seconds=round(seconds, 2),
            kernels=tuple(kernels),
            files={name: FileRecord.of(folder, name) for name in names},
        )

    # ---- progress ----

    def _report(self, stage: Stage, message: str, entry: KernelEntry | None = None) -> None:
        left = self.time_left.after(self.estimate_done)
        self.progress(BuildEvent(stage, message, self.done, self.total, entry, left))

    def _step(self, seconds: float) -> None:
        """Counts a step as finished that was estimated to take ``seconds`` of wall time."""
        self.done += 1
        self.estimate_done += seconds

    def _waiting(self, seconds: float) -> None:
        self._report("wait", f"another process is building the same library ({seconds:.0f} s)")

    def _compiled(self, entry: KernelEntry) -> None:
        self._step(expected_seconds(entry.config) / self.jobs)
        self._report(
            "compile",
            f"{entry.short_form}  {entry.compile_seconds:.1f} s of nvcc, "
            f"{entry.code_bytes:,} bytes",
            entry,
        )

    def _host_compiled(self, done: Finished, seconds: float) -> None:
        self._step(seconds / self.jobs)
        self._report("host", f"host code: {done.command.name}  {done.seconds:.1f} s of g++")

    def _warn_of_spills(self, library: KernelLibrary) -> None:
        if library.spilling:
            worst = max(library.spilling, key=lambda kernel: kernel.most_spilling.spill_bytes)
            spilling = worst.most_spilling
            self._report(
                "warn",
                f"{len(library.spilling)} of {pluralize(len(library), 'config')} spill registers "
                f"to memory; {worst.short_form} spills most: {spilling.spill_store_bytes} bytes of "
                f"stores and {spilling.spill_load_bytes} bytes of loads per thread",
                worst,
            )

    def _warn_of_losses(self, library: KernelLibrary) -> None:
        slow = [(k, words) for k in library.manifest.kernels if (words := slowing_warnings(k))]
        if slow:
            kernel, words = slow[0]
            self._report(
                "warn",
                f"{len(slow)} of {pluralize(len(library), 'config')} are slow as compiled by "
                f"{self._compiler()}; first is {kernel.short_form}: {words[0]}",
                kernel,
            )

    def _compiler(self) -> str:
        return f"nvcc {self.spec.toolchain.nvcc_version}"

    def _make_room(self) -> None:
        try:
            self.cache.prune(self.limit_mib)
        except CacheError as error:
            self._report("warn", f"nothing was evicted: {error}")  # The library itself is complete
