"""A kernel library's manifest: what is in it, how it was made, and the checksum of every file."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from flashsmith.builder.safe_files import Check, any_owner, read_below
from flashsmith.errors import ArgumentError
from flashsmith.families import (
    KernelConfig,
    Semantics,
    device_spec,
    family_named,
    parse_kernel_name_into_config,
)
from flashsmith.safe_json import parse_json

MANIFEST_NAME = "manifest.json"
# The files that a manifest may list.
LIBRARY_FILE = re.compile(r"library\.so|ptx/\w+\.ptx(?:\.xz)?|sources/\w+\.(?:cu|cuh|cc)", re.ASCII)
# Larger manifests are refused: a kernel takes about 400 bytes, and there are at most a few
# thousand kernels.
_MOST_BYTES = 2**26
# Increased whenever the layout of a library changes: older libraries are then rebuilt.
FORMAT = 3


@dataclass(frozen=True)
class AdditionalKernel:
    """An additional compiled kernel of a config; KernelEntry describes the fields.

    ``role`` is the family's name for the kernel.
    """

    role: str
    ptx_entry: str
    ptx_file: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_smem_bytes: int
    ptx_bytes: int
    code_bytes: int
    warnings: tuple[str, ...] = ()

    @property
    def spill_bytes(self) -> int:
        """Spill stores and loads together, per thread."""
        return self.spill_store_bytes + self.spill_load_bytes


@dataclass(frozen=True)
class KernelEntry:
    """One config of a library: its main kernel as compiled, and its additional kernels.

    The fields describe the main kernel, except for ``compile_seconds``, which covers all kernels.
    ``registers`` and the stack and spill bytes are per thread, as ptxas reports them.
    ``compile_seconds`` is the time in ptxas plus a share of the rest of the shard's wall time
    (front end, optimiser, host code), in proportion to the bytes of PTX. ``ptx_bytes`` is the size
    of ``ptx_file``, and ``code_bytes`` is the size of the machine code. ``warnings`` lists each of
    ptxas's warnings once, in the form 'C7510: message'.
    """

    config: KernelConfig
    short_form: str
    ptx_entry: str
    ptx_file: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_smem_bytes: int
    compile_seconds: float
    ptx_bytes: int
    code_bytes: int
    warnings: tuple[str, ...] = ()
    beside: tuple[AdditionalKernel, ...] = ()

    @property
    def ptx_entries(self) -> tuple[str, ...]:
        """The PTX entries of all kernels, the main one first; plans refer to them by index."""
        return tuple(kernel.ptx_entry for kernel in self.kernels)

    @property
    def spill_bytes(self) -> int:
        """Spill stores and loads of the main kernel together, per thread."""
        return self.spill_store_bytes + self.spill_load_bytes

    @property
    def kernels(self) -> tuple[KernelEntry | AdditionalKernel, ...]:
        """All kernels of the config, the main one first."""
        return (self, *self.beside)

    @property
    def most_registers(self) -> int:
        """Registers per thread of the kernel that uses the most registers."""
        return max(kernel.registers for kernel in self.kernels)

    @property
    def most_spilling(self) -> KernelEntry | AdditionalKernel:
        """The kernel that spills most; the main kernel if no kernel spills."""
        return max(self.kernels, key=lambda kernel: kernel.spill_bytes)

    @property
    def spills(self) -> bool:
        """Whether any kernel of the config spills registers."""
        return self.most_spilling.spill_bytes > 0

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        # The short form stands for the config, so a manifest never holds two spellings of it.
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "config"}
        return data | {"beside": [asdict(kernel) for kernel in self.beside]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> KernelEntry:
        """Reads what to_json wrote. Raises ValueError, KeyError or TypeError for anything else."""
        config = parse_kernel_name_into_config(data["short_form"])
        beside = tuple(
            _checked(AdditionalKernel(**kernel | {"warnings": tuple(kernel["warnings"])}))
            for kernel in data["beside"]
        )
        data = data | {"warnings": tuple(data["warnings"]), "beside": beside}
        return _checked(cls(config=config, **data))


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of one published file."""

    size: int  # bytes
    sha256: str

    @classmethod
    def of(cls, folder: Path, name: str, check: Check = any_owner) -> FileRecord:
        """The record of a file below ``folder`` as it is now; ``check`` is as in read_below."""
        return cls.of_bytes(read_below(folder, name, check=check))

    @classmethod
    def of_bytes(cls, data: bytes) -> FileRecord:
        """The record of a file with this content."""
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class Manifest:
    """All facts about a library that are available without loading it."""

    key: str
    family: str
    semantics: Semantics
    arch: int
    source_hash: str
    package_version: str
    nvcc_version: str
    gxx_version: str
    tvm_ffi_version: str
    flags: tuple[str, ...]
    created: str  # UTC, ISO 8601
    build_seconds: float
    kernels: tuple[KernelEntry, ...]
    files: dict[str, FileRecord]

    def to_json(self) -> str:
        """The manifest's text; its first line is the checksum of the rest."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["format"] = FORMAT
        data["semantics"] = self.semantics.to_json()
        data["kernels"] = [kernel.to_json() for kernel in self.kernels]
        data["files"] = {name: asdict(record) for name, record in self.files.items()}
        body = json.dumps(data, indent=1)
        return json.dumps({"sha256": _digest(body)}) + "\n" + body + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Reads what to_json wrote. Raises ValueError when the text is damaged or has another
        format."""
        head, _, body = text.partition("\n")
        body = body.removesuffix("\n")
        try:
            if parse_json(head) != {"sha256": _digest(body)}:
                raise ValueError("its checksum does not match")
            data = parse_json(body)
            if data.pop("format") != FORMAT:
                raise ValueError("it has another format")
            data["semantics"] = Semantics(**data["semantics"])
            data["flags"] = tuple(data["flags"])
            data["kernels"] = tuple(map(KernelEntry.from_json, data["kernels"]))
            records = data["files"].items()
            data["files"] = {name: _checked(FileRecord(**record)) for name, record in records}
            manifest = _checked(cls(**data))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"it lacks or misspells a field: {error}") from error
        manifest._check()
        return manifest

    @classmethod
    def read(cls, folder: Path, check: Check = any_owner) -> Manifest:
        """The manifest in a library's folder; ``check`` is as in read_below.

        Raises OSError, and ValueError when the manifest is damaged or belongs to another library.
        """
        text = read_below(folder, MANIFEST_NAME, most=_MOST_BYTES, check=check)
        manifest = cls.from_json(text.decode())
        if manifest.key != folder.name:
            raise ValueError(f"its manifest is that of {manifest.key}")
        return manifest

    def _check(self) -> None:
        """Raises ValueError unless the fields are consistent."""
        try:
            family_named(self.family)
        except ArgumentError as error:
            raise ValueError(f"it is of an unknown family: {error}") from error
        device_spec(self.arch)
        if not self.kernels:
            raise ValueError("it lists no kernel")
        ptx = {one.ptx_file for kernel in self.kernels for one in kernel.kernels}
        no_ptx = ptx.isdisjoint(self.files)  # as in an installed package
        for kernel in self.kernels:
            files = {one.ptx_file for one in kernel.kernels}
            listed = no_ptx or files <= self.files.keys()
            if self.family != kernel.config.FAMILY or not listed:
                raise ValueError(f"it lists a kernel that cannot be in it: {kernel.short_form}")
        for name in self.files:
            if not LIBRARY_FILE.fullmatch(name):
                raise ValueError(f"it lists a file that cannot be in it: {name!r}")


def _checked(record: Any) -> Any:
    """``record`` itself, if its fields have their declared types; otherwise raises ValueError.

    Numbers must also be finite and non-negative, and strings printable.
    """
    for name, kind in _kinds(record.__class__).items():
        value = getattr(record, name)
        if kind is int:
            right = type(value) is int and 0 <= value < 2**63
        elif kind is float:
            right = type(value) in (int, float) and 0 <= value < math.inf
        elif kind is str:
            right = isinstance(value, str) and value.isprintable()
        elif kind == tuple[str, ...]:
            right = all(isinstance(text, str) and text.isprintable() for text in value)
        else:
            right = True  # its elements were checked before
        if not right:
            raise ValueError(f"{name} has an invalid value: {str(value)[:40]!r}")
    return record


@cache
def _kinds(record: type) -> dict[str, Any]:
    return get_type_hints(record)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
