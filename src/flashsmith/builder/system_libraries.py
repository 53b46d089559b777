"""Makes packaged kernel libraries run with older system libraries, down to those of manylinux_2_28.

Compilers link against the glibc of their system, and its newest symbol versions do not exist on
older systems. So a packaged library is linked against small libraries that are made here. They
define the same functions with the symbol versions of older glibc. The dynamic linker finds these
versions in all later glibc too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashsmith.builder.processes import Command
from flashsmith.errors import CompileError

# The newest symbol versions that exist on every manylinux_2_28 system (PEP 600): glibc 2.28's, and
# the versions of GCC 8's libraries.
FLOORS: Mapping[str, tuple[int, ...]] = {
    "GLIBC": (2, 28),
    "GLIBCXX": (3, 4, 24),
    "CXXABI": (1, 3, 11),
    "GCC": (7, 0, 0),
}
PLATFORM = "manylinux_2_28"
# The libraries that a packaged library may need. libtvm_ffi is not among them, since no system has
# it: its functions come from the copy that tvm_ffi has loaded with RTLD_GLOBAL.
_LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
_NEEDED = {
    *("libc.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6"),
    *("libstdc++.so.6", "libgcc_s.so.1", *_LOADERS.values()),
}

# The first symbol version of glibc for each processor.
_FIRST_VERSION = {"x86_64": "GLIBC_2.2.5", "aarch64": "GLIBC_2.17"}
# The functions that the CUDA runtime calls and that glibc 2.34 moved to libc.so.6.
_MOVED: Mapping[str, tuple[str, ...]] = {
    "libdl.so.2": ("dlclose", "dlerror", "dlmopen", "dlopen", "dlsym", "dlvsym"),
    "libpthread.so.0": (
        *("pthread_condattr_setpshared", "pthread_create", "pthread_detach", "pthread_join"),
        *("pthread_getspecific", "pthread_setspecific", "pthread_key_create", "pthread_key_delete"),
        *("pthread_kill", "pthread_mutex_trylock", "pthread_mutexattr_destroy"),
        *("pthread_mutexattr_init", "pthread_mutexattr_setpshared", "pthread_mutexattr_settype"),
        *("pthread_once", "pthread_rwlock_destroy", "pthread_rwlock_init"),
        *("pthread_rwlock_rdlock", "pthread_rwlock_timedrdlock", "pthread_rwlock_timedwrlock"),
        *("pthread_rwlock_tryrdlock", "pthread_rwlock_trywrlock", "pthread_rwlock_unlock"),
        *("pthread_rwlock_wrlock", "pthread_rwlockattr_destroy", "pthread_rwlockattr_init"),
        *("pthread_rwlockattr_setpshared", "pthread_spin_destroy", "pthread_spin_init"),
        *("pthread_spin_lock", "pthread_spin_trylock", "pthread_spin_unlock"),
        *("sem_destroy", "sem_init", "sem_post", "sem_timedwait", "sem_trywait", "sem_wait"),
    ),
    "librt.so.1": ("shm_open", "shm_unlink"),
}
# Functions that were added to glibc after its first version for a processor, and the versions that
# added them.
_LATER_VERSIONS = {("x86_64", "dlmopen"): "GLIBC_2.3.4"}


# The functions of a library, keyed by their symbol version; '' stands for no version.
Versioned = Mapping[str, Sequence[str]]


def older_glibc(cpu: str) -> dict[str, Versioned]:
    """For each library, the functions that newer releases of glibc moved to another library, with
    their symbol versions in older releases."""
    made: dict[str, Versioned] = {}
    for library, functions in _MOVED.items():
        by_version: dict[str, list[str]] = {}
        for function in functions:
            version = _LATER_VERSIONS.get((cpu, function), _FIRST_VERSION[cpu])
            by_version.setdefault(version, []).append(function)
        made[library] = by_version
    return made


def library_stubs(
    libraries: Mapping[str, Versioned], gxx: Path, folder: Path, name: str
) -> dict[Command, Path]:
    """Returns the commands that build stub libraries, each with the path of its library. Stub
    libraries have no code; other libraries are only linked against them.

    The sources of the stubs are written to ``folder``, whose path is passed to compilers as
    ``name``.
    """
    made = {}
    for library, by_version in libraries.items():
        functions = [function for found in by_version.values() for function in found]
        text = "".join(f".globl {one}\n.type {one}, %function\n{one}:\n" for one in functions)
        (folder / f"{library}.s").write_text(f".text\n{text}")
        nodes = (f"{it} {{ global: {'; '.join(own)}; }};\n" for it, own in by_version.items())
        (folder / f"{library}.map").write_text("".join(nodes))
        arguments = (str(gxx), "-shared", "-nostdlib", f"-Wl,-soname,{library}")
        script = f"-Wl,--version-script={name}/{library}.map"
        output = ("-o", f"{name}/{library}", f"{name}/{library}.s")
        made[Command(library, (*arguments, script, *output))] = folder / library
    return made


def tvm_ffi_functions(library: bytes) -> list[str]:
    """The functions in the C interface of tvm-ffi that libtvm_ffi.so exports."""
    return sorted(name for name in _Elf(library).exports() if name.startswith("TVMFFI"))


@dataclass(frozen=True)
class SystemNeeds:
    """The parts of the system that a shared object needs: libraries, symbols with versions, and
    symbols without versions."""

    libraries: tuple[str, ...]
    symbols: Mapping[str, str]  # 'dlsym': 'GLIBC_2.2.5'
    unversioned: tuple[str, ...] = ()

    @property
    def newest(self) -> dict[str, str]:
        """For each kind of version, the newest one that is needed, such as {'GLIBC': '2.17'}."""
        found: dict[str, tuple[int, ...]] = {}
        for version in self.symbols.values():
            kind, numbers = _split(version)
            found[kind] = max(found.get(kind, numbers), numbers)
        return {kind: ".".join(map(str, numbers)) for kind, numbers in sorted(found.items())}

    def newer_than_floors(self) -> list[str]:
        """The needed symbol versions that a manylinux_2_28 system may lack, such as
        'dlsym@GLIBC_2.34'."""
        symbols = [
            f"{symbol}@{version}"
            for symbol, version in sorted(self.symbols.items())
            if _split(version)[1] > FLOORS.get(_split(version)[0], ())
        ]
        return symbols + [one for one in self.libraries if one not in _NEEDED]


def check_floors(shared_object: bytes, name: str, loaded: Iterable[str] = ()) -> SystemNeeds:
    """The needs of a shared object.

    Raises CompileError if a manylinux_2_28 system may lack something that the shared object needs,
    or if the shared object uses an unversioned symbol that is not in ``loaded``, the symbols loaded
    before it.
    """
    needs = system_needs(shared_object)
    if undefined := sorted({*needs.unversioned} - {*loaded}):
        raise CompileError(f"{name}: undefined: {', '.join(undefined)}; define or link them")
    newer = needs.newer_than_floors()
    if newer:
        raise CompileError(
            f"{name}: needs {', '.join(newer)}, which a {PLATFORM} system may lack; build the "
            "package with g++ 12 on a system with glibc 2.36, such as Debian 12"
        )
    return needs


def newest_needs(shared_objects: Iterable[bytes]) -> str:
    """The newest versions that the shared objects need together, such as 'GLIBC 2.17, GLIBCXX
    3.4.21'."""
    symbols: dict[str, str] = {}
    for number, data in enumerate(shared_objects):
        symbols |= {f"{number} {name}": it for name, it in system_needs(data).symbols.items()}
    return ", ".join(f"{kind} {it}" for kind, it in SystemNeeds((), symbols).newest.items())


def _split(version: str) -> tuple[str, tuple[int, ...]]:
    kind, _, numbers = version.rpartition("_")
    parts = numbers.split(".")
    # A version that is not a number, such as GLIBC_PRIVATE, counts as newer than all others.
    return kind, tuple(map(int, parts)) if all(map(str.isdigit, parts)) else (1 << 30,)


def system_needs(shared_object: bytes) -> SystemNeeds:
    """The system requirements of a 64-bit little-endian ELF file.

    Raises ValueError if the file is not of this kind.
    """
    try:
        return _Elf(shared_object).needs()
    except (struct.error, IndexError, KeyError) as error:
        size = len(shared_object)
        raise ValueError(f"shared object of {size} bytes is truncated or malformed") from error


# A symbol's binding: it may stay undefined.
_WEAK = 2


class _Elf:
    """The sections of an ELF file that dynamic linking uses."""

    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"not a 64-bit little-endian ELF file: it begins with {data[:6]!r}")
        self.data = data
        (table,) = struct.unpack_from("<Q", data, 0x28)
        size, count, names = struct.unpack_from("<HHH", data, 0x3A)
        headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
        offset = headers[names][4]
        self.sections = {self._text(offset + one[0]): (one[4], one[5]) for one in headers}

    def _text(self, offset: int) -> str:
        return self.data[offset : self.data.index(b"\0", offset)].decode()

    def needs(self) -> SystemNeeds:
        strings = self.sections[".dynstr"][0]
        libraries = [
            self._text(strings + value) for tag, value in self._table(".dynamic", "<qQ") if tag == 1
        ]
        versions = dict(self._versions(strings))
        symbols, unversioned = {}, []
        numbers = [one[0] for one in self._table(".gnu.version", "<H")]
        entries = self._table(".dynsym", "<IBBHQQ")
        for (name, info, _, section, _, _), number in zip(entries, numbers, strict=True):
            if section == 0 and number & 0x7FFF in versions:
                symbols[self._text(strings + name)] = versions[number & 0x7FFF]
            elif section == 0 and name and info >> 4 != _WEAK:
                unversioned.append(self._text(strings + name))
        return SystemNeeds(tuple(libraries), symbols, tuple(unversioned))

    def exports(self) -> list[str]:
        """The names of all symbols that the file exports."""
        strings = self.sections[".dynstr"][0]
        entries = self._table(".dynsym", "<IBBHQQ")
        return [self._text(strings + one[0]) for one in entries if one[3] != 0 and one[0] != 0]

    def _table(self, section: str, layout: str) -> Iterator[tuple[int, ...]]:
        offset, size = self.sections[section]
        return struct.iter_unpack(layout, self.data[offset : offset + size])

    def _versions(self, strings: int) -> Iterator[tuple[int, str]]:
        """The versions that are needed, each with its number in .gnu.version."""
        if ".gnu.version_r" not in self.sections:
            return
        at = self.sections[".gnu.version_r"][0]
        while True:
            _, count, _, first, following = struct.unpack_from("<HHIII", self.data, at)
            entry = at + first
            for _ in range(count):
                _, _, number, name, step = struct.unpack_from("<IHHII", self.data, entry)
                yield number & 0x7FFF, self._text(strings + name)
                entry += step
            if following == 0:
                return
            at += following
