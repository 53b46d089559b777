"""A kernel library's manifest: what is in it, how it was made, and the checksum of every file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from flashsmith.configs import (
    KernelConfig,
    Semantics,
    parse_kernel_name_into_config,
)

MANIFEST_NAME = "manifest.json"
# Raised whenever the layout of a library changes: older libraries are then built anew.
FORMAT = 2


@dataclass(frozen=True)
class KernelEntry:
    """One kernel of a library, as compiled.

    ``registers`` and the stack and spill bytes are per thread, as ptxas reports them.
    ``compile_seconds`` is this kernel's own time in ptxas plus a share of the rest of its shard's
    wall time (front end, optimiser, host code), in proportion to ``ptx_bytes``. ``ptx_bytes`` is
    the size of ``ptx_file``, ``code_bytes`` that of the machine code. ``warnings`` are ptxas's, as
    'C7510: its words', each once.
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

    @property
    def spills(self) -> bool:
        """Whether the compiler ran out of registers and put some in memory."""
        return self.spill_store_bytes > 0 or self.spill_load_bytes > 0

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON takes them."""
        # The short form stands for the config, so a manifest never holds two spellings of it.
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "config"}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> KernelEntry:
        """What to_json wrote. Raises ConfigParseError, KeyError or TypeError for anything else."""
        warnings = tuple(data["warnings"])
        config = parse_kernel_name_into_config(data["short_form"])
        return cls(config=config, **{**data, "warnings": warnings})


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of one published file."""

    size: int  # bytes
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """The record of a file as it is now."""
        return cls.of_bytes(path.read_bytes())

    @classmethod
    def of_bytes(cls, data: bytes) -> FileRecord:
        """The record of a file with this content."""
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class Manifest:
    """Everything known about a library without opening it."""

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
        data["semantics"] = asdict(self.semantics)
        data["kernels"] = [kernel.to_json() for kernel in self.kernels]
        data["files"] = {name: asdict(record) for name, record in self.files.items()}
        body = json.dumps(data, indent=1)
        return json.dumps({"sha256": _digest(body)}) + "\n" + body + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises ValueError when ``text`` is damaged or of another format."""
        head, _, body = text.partition("\n")
        body = body.removesuffix("\n")
        try:
            if json.loads(head) != {"sha256": _digest(body)}:
                raise ValueError("its checksum does not match")
            data = json.loads(body)
            if data.pop("format") != FORMAT:
                raise ValueError("it has another format")
            data["semantics"] = Semantics(**data["semantics"])
            data["flags"] = tuple(data["flags"])
            data["kernels"] = tuple(map(KernelEntry.from_json, data["kernels"]))
            data["files"] = {name: FileRecord(**record) for name, record in data["files"].items()}
            return cls(**data)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"it lacks or misspells a field: {error}") from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
