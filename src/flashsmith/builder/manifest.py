"""The manifest of a kernel library: what it contains, how it was made, and the checksum of every
file."""

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
# The pattern of the names of files that a manifest may list.
LIBRARY_FILE = re.compile(r"library\.so|ptx/\w+\.ptx(?:\.xz)?|sources/\w+\.(?:cu|cuh|cc)", re.ASCII)
# The maximum size of a manifest. A kernel takes about 400 bytes, and there are at most some
# thousand kernels.
_MOST_BYTES = 2**26
# This number is increased when the layout of a library changes, so that older libraries are built
# again.
FORMAT = 3


@dataclass(frozen=True)
class AdditionalKernel:
    """A compiled kernel that a config has in addition to its main kernel.

    KernelEntry explains the fields other than ``role``.

    ``role`` is the name that the family gives to the kernel.
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
        """The sum of spill stores and loads, per thread."""
        return self.spill_store_bytes + self.spill_load_bytes


@dataclass(frozen=True)
class KernelEntry:
    """A config in a library: the facts about its compiled main kernel, and its additional kernels.

    All fields are about the main kernel, except ``compile_seconds``, which is for all kernels.
    ``registers`` and the bytes of stack and spills are per thread, as ptxas reports them.
    ``compile_seconds`` is the time in ptxas, plus a share of the shard's other wall time (front
    end, optimiser, host code) in proportion to the bytes of PTX. ``ptx_bytes`` is the size of
    ``ptx_file``, ``code_bytes`` the size of the machine code. ``warnings`` has each warning of
    ptxas once, in the form 'C7510: message'.
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
        """The names of all kernels in the PTX, the main kernel first.

        Plans refer to them by index.
        """
        return tuple(kernel.ptx_entry for kernel in self.kernels)

    @property
    def spill_bytes(self) -> int:
        """The sum of spill stores and loads of the main kernel, per thread."""
        return self.spill_store_bytes + self.spill_load_bytes

    @property
    def kernels(self) -> tuple[KernelEntry | AdditionalKernel, ...]:
        """All kernels of the config, the main kernel first."""
        return (self, *self.beside)

    @property
    def most_registers(self) -> int:
        """The number of registers per thread of the kernel that uses the most."""
        return max(kernel.registers for kernel in self.kernels)

    @property
    def most_spilling(self) -> KernelEntry | AdditionalKernel:
        """The kernel that spills most; if none spills, the main kernel."""
        return max(self.kernels, key=lambda kernel: kernel.spill_bytes)

    @property
    def spills(self) -> bool:
        """Whether any kernel of the config spills registers."""
        return self.most_spilling.spill_bytes > 0

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        # The config is stored only as its short form, so a manifest cannot contain it twice.
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "config"}
        return data | {"beside": [asdict(kernel) for kernel in self.beside]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> KernelEntry:
        """Reads the values that to_json wrote.

        Raises ValueError, KeyError or TypeError for anything else.
        """
        config = parse_kernel_name_into_config(data["short_form"])
        beside = tuple(
            _checked(AdditionalKernel(**kernel | {"warnings": tuple(kernel["warnings"])}))
            for kernel in data["beside"]
        )
        data = data | {"warnings": tuple(data["warnings"]), "beside": beside}
        return _checked(cls(config=config, **data))


@dataclass(frozen=True)
class FileRecord:
    """The size and the SHA-256 of a published file."""

    size: int  # bytes
    sha256: str

    @classmethod
    def of(cls, folder: Path, name: str, check: Check = any_owner) -> FileRecord:
        """The record of a file below ``folder`` as it is now; for ``check`` see read_below."""
        return cls.of_bytes(read_below(folder, name, check=check))

    @classmethod
    def of_bytes(cls, data: bytes) -> FileRecord:
        """The record of a file that contains ``data``."""
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class Manifest:
    """All facts about a library that are known without loading the library."""

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
    created: str  # Date and time in UTC, in ISO 8601 format
    build_seconds: float
    kernels: tuple[KernelEntry, ...]
    files: dict[str, FileRecord]

    def to_json(self) -> str:
        """The manifest as a string, whose first line is the checksum of the rest."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["format"] = FORMAT
        data["semantics"] = self.semantics.to_json()
        data["kernels"] = [kernel.to_json() for kernel in self.kernels]
        data["files"] = {name: asdict(record) for name, record in self.files.items()}
        body = json.dumps(data, indent=1)
        return json.dumps({"sha256": _digest(body)}) + "\n" + body + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parses JSON text that to_json wrote.

        Raises ValueError if the JSON text is damaged or has another format.
        """
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
        """Reads the manifest in the folder of a library; for ``check`` see read_below.

        Raises OSError; raises ValueError if the manifest is damaged or belongs to another library.
        """
        text = read_below(folder, MANIFEST_NAME, most=_MOST_BYTES, check=check)
        manifest = cls.from_json(text.decode())
        if manifest.key != folder.name:
            raise ValueError(f"its manifest is that of {manifest.key}")
        return manifest

    def _check(self) -> None:
        """Raises ValueError if the fields contradict each other."""
        try:
            family_named(self.family)
        except ArgumentError as error:
            raise ValueError(f"it is of an unknown family: {error}") from error
        device_spec(self.arch)
        if not self.kernels:
            raise ValueError("it lists no kernel")
        ptx = {one.ptx_file for kernel in self.kernels for one in kernel.kernels}
        no_ptx = ptx.isdisjoint(self.files)  # True in installed packages
        for kernel in self.kernels:
            files = {one.ptx_file for one in kernel.kernels}
            listed = no_ptx or files <= self.files.keys()
            if self.family != kernel.config.FAMILY or not listed:
                raise ValueError(f"it lists a kernel that cannot be in it: {kernel.short_form}")
        for name in self.files:
            if not LIBRARY_FILE.fullmatch(name):
                raise ValueError(f"it lists a file that cannot be in it: {name!r}")


def _checked(record: Any) -> Any:
    """Returns ``record`` if its fields have the declared types; raises ValueError otherwise.

    Numbers must be finite and not negative, and strings must be printable.
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
            right = True  # The elements were checked before
        if not right:
            raise ValueError(f"{name} has an invalid value: {str(value)[:40]!r}")
    return record


@cache
def _kinds(record: type) -> dict[str, Any]:
    return get_type_hints(record)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
