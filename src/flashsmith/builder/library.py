"""KernelLibrary: a set of compiled kernels that was published and verified."""

from __future__ import annotations

import lzma
from pathlib import Path

from flashsmith.builder.locks import HeldLock
from flashsmith.builder.manifest import FileRecord, KernelEntry, Manifest
from flashsmith.errors import CacheError, KernelNotBuiltError
from flashsmith.families import KernelConfig, Semantics
from flashsmith.pluralize import pluralize
from flashsmith.system_errors import is_from_system

SHARED_OBJECT = "library.so"
# The suffix of PTX files in an installed package, which are compressed.
PACKED_SUFFIX = ".xz"


class KernelLibrary:
    """A shared object, with the PTX of its kernels and the compiler's report on them.

    As long as this object exists, no process evicts the library from the cache. ``in_use`` is the
    lock that prevents eviction; it is None for a library of an installed package.
    """

    def __init__(self, path: Path, manifest: Manifest, in_use: HeldLock | None) -> None:
        self.path = path
        self.manifest = manifest
        self._in_use = in_use
        self._entries = {kernel.config: kernel for kernel in manifest.kernels}

    def __repr__(self) -> str:
        made_for = f"{self.manifest.semantics}, sm_{self.manifest.arch}"
        return f"KernelLibrary({str(self.path)!r}, {pluralize(len(self), 'config')}, {made_for})"

    def __contains__(self, cfg: object) -> bool:
        return cfg in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_installed(self) -> bool:
        """Whether the library belongs to an installed package, not to the cache."""
        return self._in_use is None

    @property
    def has_ptx(self) -> bool:
        """Whether the library has the PTX of its kernels; a library of an installed package may
        lack it."""
        return self.manifest.kernels[0].ptx_file in self.manifest.files

    @property
    def so_path(self) -> Path:
        """The path of the shared object."""
        return self.path / SHARED_OBJECT

    @property
    def configs(self) -> tuple[KernelConfig, ...]:
        """The configs of the library, sorted."""
        return tuple(self._entries)

    @property
    def spilling(self) -> tuple[KernelEntry, ...]:
        """The entries of those configs of which at least one kernel spills registers."""
        return tuple(kernel for kernel in self.manifest.kernels if kernel.spills)

    def entry(self, cfg: KernelConfig) -> KernelEntry:
        """The entry of a config in the manifest.

        Raises KernelNotBuiltError if the library does not contain the config.
        """
        try:
            return self._entries[cfg]
        except KeyError:
            arch, semantics = self.manifest.arch, self.manifest.semantics
            raise KernelNotBuiltError(
                f"config: {cfg} is not among the {pluralize(len(self), 'config')} of the library "
                f"{self.path}; build it with: flashsmith build --kernels '{cfg}' --arch sm_{arch}"
                + ("" if semantics == Semantics() else f" --semantics {semantics}")
            ) from None

    def ptx(self, cfg: KernelConfig) -> str:
        """The PTX of the main kernel of a config.

        Raises KernelNotBuiltError if the library does not contain the config, and CacheError if the
        file was damaged after the library was opened.
        """
        return self._text(self.entry(cfg).ptx_file)

    def ptx_beside(self, cfg: KernelConfig) -> dict[str, str]:
        """The PTX of the additional kernels of a config, by entry name."""
        return {one.ptx_entry: self._text(one.ptx_file) for one in self.entry(cfg).beside}

    def _text(self, name: str) -> str:
        try:
            data = (self.path / name).read_bytes()
        except OSError as error:
            if not is_from_system(error):
                raise
            raise self._damaged(name, str(error)) from error
        if FileRecord.of_bytes(data) != self.manifest.files[name]:
            raise self._damaged(name, "its checksum does not match")
        return (lzma.decompress(data) if name.endswith(PACKED_SUFFIX) else data).decode()

    def _damaged(self, name: str, why: str) -> CacheError:
        return CacheError(
            f"{self.path / name}: damaged since the library was opened ({why}); "
            "start again and it will be rebuilt"
        )
