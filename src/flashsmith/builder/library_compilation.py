"""Compiles one library: runs the compilers and reads their output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flashsmith.builder.cubin import kernel_code_bytes
from flashsmith.builder.demangle import demangle
from flashsmith.builder.generate import GeneratedSources, generate_kernel_instantiations
from flashsmith.builder.kernel_cache import Cache
from flashsmith.builder.library import SHARED_OBJECT
from flashsmith.builder.library_spec import LibrarySpec
from flashsmith.builder.manifest import AdditionalKernel, KernelEntry
from flashsmith.builder.processes import Command, Finished, run_all
from flashsmith.builder.ptx_module import split_ptx
from flashsmith.builder.ptxas_report import (
    ResourceReport,
    nameless_warnings,
    parse_ptxas_report,
)
from flashsmith.builder.sources import PACKAGED_SOURCE, Sources, family_sources, source_hash
from flashsmith.builder.system_libraries import (
    check_floors,
    library_stubs,
    older_glibc,
    tvm_ffi_functions,
)
from flashsmith.builder.toolchain import TARGETS
from flashsmith.errors import CompileError
from flashsmith.families import KernelConfig, parse_kernel_name_into_config
from flashsmith.host import this_cpu

# The library exports only the functions that the bindings use.
_EXPORTS = "{ global: __tvm_ffi_*; flashsmith_*; local: *; };\n"
# The number of configs per shard. Each run of nvcc takes about a second in addition to compiling.
# With this number, that second matters little, and progress is still visible.
_CONFIGS_PER_SHARD = 10

# Estimated seconds on one core: for g++ to compile one host source file, and for linking.
_GXX_SECONDS = 2.0
LINK_SECONDS = 0.2


@dataclass(frozen=True)
class _HostObject:
    """An object file of host code that is linked into several libraries, so that it is compiled
    once and kept in the cache."""

    name: str
    command: Command
    path: Path


class _Shard(NamedTuple):
    """The results of compiling one shard. The keys are mangled names of kernels.

    ``names`` maps (config, role) to the mangled name.
    """

    modules: dict[str, str]
    reports: dict[str, ResourceReport]
    code_bytes: dict[str, int]
    nameless: dict[str, tuple[str, ...]]
    names: dict[KernelConfig, dict[str, str]]


def _object_name(source: str) -> str:
    """The name of the object file compiled from a source such as 'mma_sync/plan.cc'.

    The name includes the folder, since two folders may have files of the same name.
    """
    return source.removesuffix(".cc").replace("/", "_")


class Compilation:
    """Compiles ``spec`` in ``folder``: intermediate files go to build/, the result to library/.

    The compilers run in ``folder`` with relative paths, and read copies of the sources in csrc/.
    """

    def __init__(self, spec: LibrarySpec, folder: Path, jobs: int) -> None:
        self.spec = spec
        self.jobs = jobs
        self.folder = folder
        self.build = folder / "build"
        self.library = folder / "library"
        self.csrc = folder / "csrc"
        (self.library / "ptx").mkdir(parents=True)
        self.build.mkdir()
        self._originals = family_sources(spec.family, spec.csrc)
        self._originals.copy_to(self.csrc, packaged=spec.packaged)
        self._new_objects: list[_HostObject] = []
        if spec.packaged:
            Sources(spec.csrc, [PACKAGED_SOURCE]).copy_to(self.csrc, packaged=True)
        self.sources: GeneratedSources = generate_kernel_instantiations(
            spec.configs,
            self.library / "sources",
            semantics=spec.semantics,
            n_shards=self._n_shards(),
        )

    def _n_shards(self) -> int:
        if self.spec.packaged:
            # With one config per shard, the driver decompresses only the kernel that is used, and
            # the objects do not depend on the number of jobs.
            return len(self.spec.configs)
        shards = max(-(-len(self.spec.configs) // _CONFIGS_PER_SHARD), self.jobs)
        return -(-shards // self.jobs) * self.jobs

    def is_current(self) -> bool:
        """Whether the sources that were compiled are still the sources of the spec: none has
        changed since the compilation began."""
        spec = self.spec
        now = source_hash(spec.family, spec.csrc)
        return self._originals.hash() == spec.source_hash == now

    # ---- compiling ----

    def compile(
        self,
        cache: Cache,
        compiled: Callable[[KernelEntry], None],
        *,
        begin: Callable[[list[float]], None] = lambda estimates: None,
        host_compiled: Callable[[Finished, float], None] = lambda done, estimate: None,
    ) -> list[KernelEntry]:
        """Compiles everything that is not in the cache.

        ``begin`` is called first, with the estimated seconds (on one core) for each host source
        file. ``compiled`` is called with each kernel of a shard when the shard is done.
        ``host_compiled`` is called for each host source file that is done, with the result and the
        estimate.
        """
        entries: list[KernelEntry] = []
        shards = {self._shard_command(i): i for i in range(len(self.sources.shards))}
        missing = [o for o in self._host_objects() if not self._reuse(cache, o)]
        host = [*(o.command for o in missing), self._map_command()]
        begin([_GXX_SECONDS] * len(host))

        def finished(done: Finished) -> None:
            if done.command in shards:
                for entry in self._kernels(shards[done.command], done):
                    entries.append(entry)
                    compiled(entry)
            else:
                host_compiled(done, _GXX_SECONDS)

        run_all([*shards, *host], cwd=self.folder, jobs=self.jobs, finished=finished)
        self._new_objects = missing
        return sorted(entries, key=lambda entry: entry.config.to_ints())

    def publish_host_objects(self, cache: Cache) -> None:
        """Puts the host code that was compiled here into the cache.

        May be called only after ``is_current`` has found that the sources did not change.
        """
        for o in self._new_objects:
            cache.publish_object(o.name, o.path)

    def _shard_command(self, index: int) -> Command:
        keep = self.build / f"keep_{index}"
        keep.mkdir()
        flags = (*self.spec.kernel_flags(), "--keep", "--keep-dir", self._name(keep))
        if self.spec.packaged:
            # Without this, static functions and the module have random names.
            flags = (*flags, f"-frandom-seed={self.spec.key()}-{index}")
        return self._nvcc(f"shard_{index}", self.sources.shards[index], flags)

    def _host_objects(self) -> list[_HostObject]:
        made = []
        for name in self._originals.host_files:
            # The hash covers only this file and what it includes, because families share all host
            # code except their planning code.
            key = self.spec.object_key(self._originals.hash(name))
            command = self._gxx(_object_name(name), self.csrc / name)
            path = self._object(command.name)
            made.append(_HostObject(f"{key}-{command.name}", command, path))
        if self.spec.packaged:
            key = self.spec.object_key(Sources(self.spec.csrc, [PACKAGED_SOURCE]).hash())
            command = self._gxx(_object_name(PACKAGED_SOURCE), self.csrc / PACKAGED_SOURCE)
            made.append(_HostObject(f"{key}-{command.name}", command, self._object(command.name)))
        return made

    def _map_command(self) -> Command:
        return self._gxx("kernel_library", self.sources.library)

    def _reuse(self, cache: Cache, wanted: _HostObject) -> bool:
        content = cache.object(wanted.name)
        if content is None:
            return False
        wanted.path.write_bytes(content)
        return True

    def _object(self, name: str) -> Path:
        return self.build / f"{name}.o"

    def _name(self, path: Path) -> str:
        """The relative path by which a file in the folder is passed to compilers."""
        return path.relative_to(self.folder).as_posix()

    def _compile(self, source: Path, name: str) -> tuple[str, ...]:
        include, made = f"-I{self._name(self.csrc)}", self._name(self._object(name))
        return (include, "-c", self._name(source), "-o", made)

    def _nvcc(self, name: str, source: Path, flags: tuple[str, ...]) -> Command:
        tools = self.spec.toolchain
        compiler: tuple[str, ...] = (str(tools.nvcc), f"-ccbin={tools.gxx}")
        if tools.crosses and (tools.nvcc.parents[1] / "targets").is_dir():
            # The headers of CUDA do not depend on the processor, and those for the other processor
            # may be missing.
            compiler = (*compiler, f"--target-directory={TARGETS[this_cpu()]}")
        return Command(name, (*compiler, *flags, *self._compile(source, name)))

    def _gxx(self, name: str, source: Path) -> Command:
        tools = self.spec.toolchain
        arguments = [str(tools.gxx), *self.spec.host_flags()]
        for number, folder in enumerate(tools.include_dirs):
            arguments += ["-isystem", str(folder)]
            if self.spec.packaged:  # Some error messages contain a header's path
                arguments.append(f"-ffile-prefix-map={folder}=include_{number}")
        if self.spec.packaged:
            arguments.append(f"-frandom-seed={name}")
        return Command(name, (*arguments, *self._compile(source, name)))

    # ---- the compiled kernels ----

    def _kernels(self, index: int, done: Finished) -> list[KernelEntry]:
        """Makes the entries for the kernels of a shard, and writes their PTX to the library."""
        try:
            shard = self._read_shard(index, done.output)
        except (ValueError, FileNotFoundError) as error:
            raise CompileError(
                f"shard_{index}: the output of {self.spec.toolchain.nvcc} "
                f"({self.spec.toolchain.nvcc_version}) was not understood: {error}"
            ) from error
        ptx_bytes = sum(map(len, shard.modules.values()))
        ptxas_seconds = sum(shard.reports[name].ptxas_seconds for name in shard.modules)
        shared_seconds = max(0.0, done.seconds - ptxas_seconds)
        entries = []
        for cfg, names in shard.names.items():
            (_, main), *others = names.items()
            share = sum(len(shard.modules[name]) for name in names.values()) / ptx_bytes
            seconds = sum(shard.reports[name].ptxas_seconds for name in names.values())
            entries.append(
                KernelEntry(
                    config=cfg,
                    short_form=cfg.short_form(),
                    compile_seconds=round(seconds + share * shared_seconds, 3),
                    beside=tuple(
                        AdditionalKernel(role=role, **self._compiled(cfg, role, shard, name))
                        for role, name in others
                    ),
                    **self._compiled(cfg, "", shard, main),
                )
            )
        return entries

    def _read_shard(self, index: int, output: str) -> _Shard:
        """Reads what the compiler wrote for a shard.

        Raises ValueError or FileNotFoundError if something is missing or has an unknown form.
        """
        keep = self.build / f"keep_{index}"
        ptx = (keep / f"shard_{index}.ptx").read_text()
        modules = split_ptx(ptx, self._source_roots())
        reports = parse_ptxas_report(output)
        code_bytes = kernel_code_bytes((keep / f"shard_{index}.cubin").read_bytes())
        by_kernel = {self._kernel_of(name): name for name in modules}
        names: dict[KernelConfig, dict[str, str]] = {}
        for cfg in self.sources.shard_configs[index]:
            for role, template in cfg.family.templates_for(cfg, self.spec.semantics).items():
                name = by_kernel.get((cfg, template))
                if name is None:
                    raise ValueError(f"no kernel for {cfg} ({template}) in {sorted(modules)}")
                names.setdefault(cfg, {})[role] = name
        unknown = [name for name in modules if name not in reports or name not in code_bytes]
        if unknown:
            raise ValueError(f"no report on {unknown[0]}")
        return _Shard(modules, reports, code_bytes, self._nameless(modules, output), names)

    def _compiled(self, cfg: KernelConfig, role: str, shard: _Shard, name: str) -> dict[str, Any]:
        """Collects the facts about one compiled kernel, and writes its PTX to the library."""
        ptx_file = f"ptx/{cfg.kernel_name()}{role and '_' + role}.ptx"
        (self.library / ptx_file).write_text(shard.modules[name])
        facts = asdict(shard.reports[name])
        del facts["ptxas_seconds"]
        facts["warnings"] += shard.nameless.get(name, ())
        return {
            "ptx_entry": name,
            "ptx_file": ptx_file,
            "ptx_bytes": len(shard.modules[name]),
            "code_bytes": shard.code_bytes[name],
            **facts,
        }

    @staticmethod
    def _kernel_of(name: str) -> tuple[KernelConfig, str]:
        """Returns the config of a kernel, and the name of the template that the kernel
        instantiates."""
        readable = demangle(name)
        template = readable.partition("<")[0].rpartition("::")[2]
        return parse_kernel_name_into_config(readable), template

    def _nameless(self, modules: dict[str, str], output: str) -> dict[str, tuple[str, ...]]:
        """Those ptxas warnings that name no kernel, keyed by the kernel that causes them.

        To find that kernel, each kernel of the shard is assembled separately.
        """
        warnings = nameless_warnings(output)
        if not warnings or len(modules) == 1:
            return dict.fromkeys(modules, warnings)
        names = {self._alone(i, text): name for i, (name, text) in enumerate(modules.items())}
        found: dict[str, tuple[str, ...]] = {}

        def finished(done: Finished) -> None:
            found[names[done.command]] = nameless_warnings(done.output)

        run_all(list(names), cwd=self.folder, jobs=self.jobs, finished=finished)
        return found

    def _alone(self, number: int, ptx: str) -> Command:
        """The command that assembles one module; only its messages are used."""
        source = self.build / f"alone_{number}.ptx"
        source.write_text(ptx)
        ptxas = self.spec.toolchain.nvcc.parent / "ptxas"
        flags = (f"-arch={self.spec.target}", "-v", "-lineinfo")
        name = self._name(source)
        return Command(source.stem, (str(ptxas), *flags, name, "-o", f"{name}.cubin"))

    def _source_roots(self) -> list[Path]:
        tools = self.spec.toolchain
        # The nvcc of a system toolkit finds its headers in targets/, not in include/.
        own = tools.nvcc.parent.parent / "targets" / TARGETS[this_cpu()] / "include"
        folders = (*self._originals.roots, self.csrc, self.library / "sources")
        folders = (*folders, *tools.include_dirs, own)
        return [root for folder in folders for root in (folder, folder.resolve())]

    # ---- linking ----

    def link(self) -> None:
        """Links library.so. The functions of libtvm_ffi come from the copy that Python has loaded.

        An undefined symbol is an error here, not only when the library is loaded.

        Raises CompileError also if a packaged library would need system libraries that are too new.
        """
        tools = self.spec.toolchain
        tvm_ffi = (f"-L{tools.tvm_ffi_lib_dir}", "-ltvm_ffi")
        system: tuple[str, ...] = (*tvm_ffi, "-lrt", "-ldl", "-lpthread")
        if self.spec.packaged:
            system = self._packaged_system()
        exports = self.build / "exports.map"
        exports.write_text(_EXPORTS)
        names = [path.stem for path in self.sources.shards]
        names += ["kernel_library"]
        names += map(_object_name, self._originals.host_files)
        names += [_object_name(PACKAGED_SOURCE)] if self.spec.packaged else []
        command = Command(
            "link",
            (
                str(tools.gxx),
                "-shared",
                *(self._name(self._object(name)) for name in names),
                f"-L{tools.cuda_lib_dir}",
                "-lcudart_static",
                *system,
                "-Wl,-Bsymbolic",
                *self.spec.link_flags(),
                f"-Wl,--version-script={self._name(exports)}",
                "-o",
                self._name(self.library / SHARED_OBJECT),
            ),
        )
        run_all([command], cwd=self.folder, jobs=1, finished=lambda done: None)
        if self.spec.packaged:
            shared_object = self.library / SHARED_OBJECT
            tvm_ffi_library = (tools.tvm_ffi_lib_dir / "libtvm_ffi.so").read_bytes()
            loaded = tvm_ffi_functions(tvm_ffi_library)
            check_floors(shared_object.read_bytes(), shared_object.name, loaded)

    def _packaged_system(self) -> tuple[str, ...]:
        """Builds stub libraries of an older glibc, against which a packaged library is linked so
        that it also runs on older systems; returns their paths."""
        tools, folder = self.spec.toolchain, self.build / "system"
        folder.mkdir()
        made = library_stubs(older_glibc(tools.cpu), tools.gxx, folder, self._name(folder))
        run_all(list(made), cwd=self.folder, jobs=self.jobs, finished=lambda done: None)
        return tuple(map(self._name, made.values()))
