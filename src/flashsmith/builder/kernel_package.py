"""Installed kernel packages: wheels with kernels that were compiled elsewhere, one wheel per GPU
architecture.

    flashsmith_kernels/sm90/     in a folder of installed packages; flashsmith never writes there
        kernels.json the package's contents, target and sources
        <key>/                   manifest.json, library.so, perhaps ptx/*.ptx.xz
    flashsmith_kernels/sm90_decode/   a part of a package that is too large for one wheel

The namespace ``flashsmith_kernels`` has no code, so importing it runs nothing. A package is used
only if it was made for the installed version of flashsmith, its sources, this machine's type of
processor and the ABI of the installed tvm-ffi. Otherwise, a warning says why it is not used, and
kernels are compiled as usual. The checksum of each file is verified before the file is used. The
owners of files are not checked: a user who can write there can also change Python's own modules.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from flashsmith import bundle
from flashsmith.builder.library import KernelLibrary
from flashsmith.builder.library_spec import kernel_flags, package_version
from flashsmith.builder.manifest import MANIFEST_NAME, FileRecord, Manifest
from flashsmith.builder.safe_files import any_owner, read_below
from flashsmith.builder.sources import source_hash
from flashsmith.builder.toolchain import tvm_ffi_abi, tvm_ffi_version
from flashsmith.families import KernelConfig, Semantics, family_named
from flashsmith.host import this_cpu
from flashsmith.safe_json import parse_json
from flashsmith.system_errors import is_from_system

_log = logging.getLogger("flashsmith")

NAMESPACE = "flashsmith_kernels"
INDEX_NAME = "kernels.json"
# This number is increased when the index or the layout of the folder changes, so that older
# packages are not used.
PACKAGE_FORMAT = 1
_MOST_BYTES = 2**26


def package_folder(arch: int, part: str = "") -> str:
    """The name of the folder, inside the namespace, that contains the package of an architecture or
    one part of the package."""
    return f"sm{arch}_{part}" if part else f"sm{arch}"


@dataclass(frozen=True)
class PackedLibrary:
    """One library of a package.

    ``kernels`` has the fields of each config as numbers, which are faster to read than short forms.
    ``manifest`` is the SHA-256 of the library's manifest.
    """

    key: str
    family: str
    semantics: Semantics
    manifest: str
    kernels: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PackageIndex:
    """The contents, the target and the sources of a package.

    ``sources`` maps families to the hashes of their sources. ``tvm_ffi`` is the ABI, such as '0.1'.
    """

    version: str
    arch: int
    cpu: str
    tvm_ffi: str
    sources: Mapping[str, str]
    libraries: tuple[PackedLibrary, ...]

    def to_json(self) -> str:
        """The index as a string, whose first line is the checksum of the rest."""
        data = {**asdict(self), "format": PACKAGE_FORMAT}
        body = json.dumps(data, sort_keys=True, separators=(",", ":")) + "\n"
        return json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest()}) + "\n" + body

    @classmethod
    def from_json(cls, text: str) -> PackageIndex:
        """Parses JSON text that to_json wrote.

        Raises ValueError if the JSON text is damaged or has another format.
        """
        head, _, body = text.partition("\n")
        try:
            if parse_json(head) != {"sha256": hashlib.sha256(body.encode()).hexdigest()}:
                raise ValueError("its checksum does not match")
            data: dict[str, Any] = parse_json(body)
            if data.pop("format") != PACKAGE_FORMAT:
                raise ValueError("it has another format")
            data["libraries"] = tuple(_packed(one) for one in data["libraries"])
            return cls(**data)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"it lacks or misspells a field: {error}") from error


def _packed(data: dict[str, Any]) -> PackedLibrary:
    semantics, kernels = Semantics(**data["semantics"]), tuple(map(tuple, data["kernels"]))
    return PackedLibrary(**data | {"semantics": semantics, "kernels": kernels})


@dataclass
class PackagePart:
    """An installed package that this version of flashsmith can use, or a part of one."""

    folder: Path
    index: PackageIndex
    # The libraries with damaged files.
    damaged: set[str] = field(default_factory=set)
    _stale: dict[str, bool] = field(default_factory=dict)

    def find(self, wanted: Iterable[KernelConfig], semantics: Semantics) -> KernelLibrary | None:
        """Finds a library that contains all ``wanted`` configs and verifies its files; returns None
        if there is no such library."""
        named = {(cfg.FAMILY, cfg.to_ints()) for cfg in wanted}
        for library in self._by_semantics.get(semantics, ()):
            if named <= self._named[library.key] and self._is_usable(library):
                found = self._open(library)
                if found is not None:
                    return found
        return None

    @cached_property
    def kernels(self) -> tuple[tuple[KernelConfig, Semantics], ...]:
        """All kernels of the package, each with its semantics."""
        return tuple(
            (family_named(library.family).config_class(*numbers), library.semantics)
            for library in self.index.libraries
            if self._is_usable(library)
            for numbers in library.kernels
        )

    def forget(self, library: KernelLibrary) -> None:
        """Stops this process from using a library that cannot be loaded."""
        self.damaged.add(library.manifest.key)
        self.__dict__.pop("kernels", None)

    @cached_property
    def _by_semantics(self) -> dict[Semantics, list[PackedLibrary]]:
        found: dict[Semantics, list[PackedLibrary]] = {}
        for library in self.index.libraries:
            found.setdefault(library.semantics, []).append(library)
        return found

    @cached_property
    def _named(self) -> dict[str, set[tuple[str, tuple[int, ...]]]]:
        """For each library, by its key: the kernels that it contains, as pairs of the family and
        the config's numbers."""
        return {one.key: {(one.family, it) for it in one.kernels} for one in self.index.libraries}

    def _is_usable(self, library: PackedLibrary) -> bool:
        if library.key in self.damaged:
            return False
        family = library.family
        if family not in self._stale:
            self._stale[family] = source_hash(family) != self.index.sources.get(family)
            if self._stale[family]:
                _log.warning(
                    "flashsmith: the kernels of the family %s in %s were made from other sources "
                    "and are not used",
                    *(family, self.folder),
                )
        return not self._stale[family]

    def _open(self, library: PackedLibrary) -> KernelLibrary | None:
        try:
            return KernelLibrary(self.folder / library.key, self._verified(library), None)
        except (OSError, ValueError) as error:
            if not is_from_system(error):
                raise
            self.damaged.add(library.key)
            _log.warning(
                "flashsmith: the installed kernels in %s are damaged and not used: %s; install the "
                "package again",
                *(self.folder / library.key, error),
            )
            return None

    def _verified(self, library: PackedLibrary) -> Manifest:
        """Returns the manifest of a library after verifying the checksums of the library's
        files."""
        folder = self.folder / library.key
        text = read_below(folder, MANIFEST_NAME, most=_MOST_BYTES, check=any_owner)
        if FileRecord.of_bytes(text).sha256 != library.manifest:
            raise ValueError(f"{MANIFEST_NAME}: its checksum does not match")
        manifest = Manifest.from_json(text.decode())
        if manifest.flags != kernel_flags(library.family, self.index.arch, packaged=True):
            raise ValueError("it was compiled with other flags")
        for name, record in manifest.files.items():
            if FileRecord.of(folder, name) != record:
                raise ValueError(f"{name}: its checksum does not match")
        return manifest


@dataclass(frozen=True)
class KernelPackage:
    """An installed package, with its parts; most packages have one part."""

    parts: tuple[PackagePart, ...]

    def find(self, wanted: Iterable[KernelConfig], semantics: Semantics) -> KernelLibrary | None:
        """Finds a library that contains all ``wanted`` configs and verifies its files; returns None
        if no part has such a library."""
        configs = tuple(wanted)
        found = (part.find(configs, semantics) for part in self.parts)
        return next((library for library in found if library is not None), None)

    @property
    def kernels(self) -> tuple[tuple[KernelConfig, Semantics], ...]:
        """Every kernel of the package."""
        return tuple(kernel for part in self.parts for kernel in part.kernels)

    def forget(self, library: KernelLibrary) -> None:
        """Stops this process from using a library that cannot be loaded."""
        for part in self.parts:
            if part.folder == library.path.parent:
                part.forget(library)


def installed_package(arch: int) -> KernelPackage | None:
    """Returns the installed kernel package for an architecture; None if no usable package is
    installed."""
    return _installed(arch)


@lru_cache(maxsize=16)
def _installed(arch: int) -> KernelPackage | None:
    parts: dict[str, PackagePart] = {}
    for parent in _folders():
        for folder in _part_folders(parent, arch):
            if folder.name in parts:
                continue
            try:
                index = _read_index(folder)
                _check(index, arch)
            except (OSError, ValueError) as error:
                if not is_from_system(error):
                    raise
                _log.warning(
                    "flashsmith: the installed kernels in %s are not used: %s", folder, error
                )
                continue
            parts[folder.name] = PackagePart(folder, index)
    return KernelPackage(tuple(parts.values())) if parts else None


def _part_folders(parent: Path, arch: int) -> list[Path]:
    """The folders with the parts of the package for an architecture, the main part first."""
    whole = package_folder(arch)
    try:
        names = sorted(os.listdir(parent))
    except OSError:
        return []
    ours = [name for name in names if name == whole or name.startswith(f"{whole}_")]
    return [parent / name for name in ours if (parent / name / INDEX_NAME).is_file()]


def forget_packages() -> None:
    """Makes the next call of installed_package() search for packages again."""
    _installed.cache_clear()


def _folders() -> list[Path]:
    """The folders of the namespace, found without importing anything. A self-contained copy of
    flashsmith has exactly one such folder, and uses no kernels from elsewhere."""
    if bundle.is_copy():
        return [bundle.KERNELS]
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(NAMESPACE)
    except (ImportError, ValueError):
        return []
    return [Path(one) for one in (spec and spec.submodule_search_locations) or ()]


def _read_index(folder: Path) -> PackageIndex:
    text = read_below(folder, INDEX_NAME, most=_MOST_BYTES, check=any_owner)
    return PackageIndex.from_json(text.decode())


def _check(index: PackageIndex, arch: int) -> None:
    """Raises ValueError unless the package was made for this installation and machine."""
    for what, made_for, here in (
        ("flashsmith", index.version, package_version()),
        ("sm", str(index.arch), str(arch)),
        ("the processor", index.cpu, this_cpu()),
        ("tvm-ffi", index.tvm_ffi, tvm_ffi_abi(tvm_ffi_version())),
    ):
        if made_for != here:
            raise ValueError(f"they are for {what} {made_for}, and here it is {here}")
