"""Writes the wheel of a kernel package.

The bytes of the wheel depend only on the libraries and on SOURCE_DATE_EPOCH.
"""

from __future__ import annotations

import base64
import csv
import datetime
import hashlib
import importlib.metadata
import io
import lzma
import stat
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from flashsmith import env
from flashsmith.builder.kernel_package import (
    INDEX_NAME,
    NAMESPACE,
    PackageIndex,
    PackedLibrary,
    package_folder,
)
from flashsmith.builder.library import PACKED_SUFFIX, SHARED_OBJECT, KernelLibrary
from flashsmith.builder.library_spec import package_version
from flashsmith.builder.manifest import MANIFEST_NAME, FileRecord, KernelEntry, Manifest
from flashsmith.builder.safe_files import any_owner, read_below, written_beside
from flashsmith.builder.system_libraries import PLATFORM
from flashsmith.builder.toolchain import tvm_ffi_abi
from flashsmith.errors import ArgumentError

_LICENSES = ("LICENSE", "NOTICE")
# The oldest time that can be recorded in a zip archive.
_FIRST_TIME = datetime.datetime(1980, 1, 1, tzinfo=datetime.timezone.utc)
# The settings are given explicitly, since the defaults may change.
_XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]


def wheel_name(arch: int, cpu: str) -> str:
    """The file name of the wheel for an architecture and a processor."""
    package = f"{NAMESPACE}_{package_folder(arch)}-{package_version()}"
    return f"{package}-py3-none-{PLATFORM}_{cpu}.whl"


def write_wheel(
    libraries: Sequence[KernelLibrary], arch: int, cpu: str, folder: Path, *, ptx: bool = False
) -> Path:
    """Writes a wheel to ``folder`` with these libraries, which must have been built as packaged.

    ``ptx``: whether it contains PTX, with which the emulator needs no compiler.

    Raises ArgumentError if there is no library, OSError if the folder cannot be written.
    """
    if not libraries:
        raise ArgumentError("libraries: none; a package needs at least one")
    libraries = sorted(libraries, key=lambda library: library.manifest.key)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / wheel_name(arch, cpu)
    with written_beside(path) as unfinished, zipfile.ZipFile(unfinished, "w") as archive:
        _write_archive(archive, libraries, arch, cpu, ptx)
    path.chmod(0o644)
    return path


def _write_archive(
    archive: zipfile.ZipFile, libraries: Sequence[KernelLibrary], arch: int, cpu: str, ptx: bool
) -> None:
    records: list[tuple[str, str, str]] = []

    def add(name: str, data: bytes) -> None:
        info = zipfile.ZipInfo(name, _time().timetuple()[:6])
        info.compress_type = zipfile.ZIP_DEFLATED
        info.create_system = 3  # This stands for Unix, and is the same on every system
        info.external_attr = (stat.S_IFREG | 0o644) << 16
        archive.writestr(info, data, compresslevel=9)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        records.append((name, f"sha256={digest}", str(len(data))))

    package = f"{NAMESPACE}/{package_folder(arch)}"
    packed = []
    for library in libraries:
        files = dict(_files(library, ptx))
        manifest = _manifest(library.manifest, files).to_json().encode()
        files[MANIFEST_NAME] = manifest
        for name, data in sorted(files.items()):
            add(f"{package}/{library.manifest.key}/{name}", data)
        packed.append(_described(library.manifest, manifest))
    add(f"{package}/{INDEX_NAME}", _index(libraries, packed, arch, cpu).to_json().encode())
    info = f"{NAMESPACE}_{package_folder(arch)}-{package_version()}.dist-info"
    for name, data in sorted(_metadata(arch, cpu).items()):
        add(f"{info}/{name}", data)
    rows = io.StringIO()
    csv.writer(rows, lineterminator="\n").writerows([*records, (f"{info}/RECORD", "", "")])
    add(f"{info}/RECORD", rows.getvalue().encode())


def _files(library: KernelLibrary, ptx: bool) -> Iterator[tuple[str, bytes]]:
    """The files of a library that are in the package: no sources, and PTX is compressed."""
    for name in library.manifest.files:
        data = read_below(library.path, name, check=any_owner)
        if name == SHARED_OBJECT:
            yield name, data
        elif ptx and name.endswith(".ptx"):
            packed = lzma.compress(data, check=lzma.CHECK_CRC32, filters=_XZ)
            yield name + PACKED_SUFFIX, packed


def _manifest(manifest: Manifest, files: dict[str, bytes]) -> Manifest:
    """The manifest without what differs between builds, which is times and durations."""
    return replace(
        manifest,
        created=_time().isoformat(timespec="seconds"),
        build_seconds=0.0,
        kernels=tuple(map(_packed_entry, manifest.kernels)),
        files={name: FileRecord.of_bytes(data) for name, data in sorted(files.items())},
    )


def _packed_entry(entry: KernelEntry) -> KernelEntry:
    return replace(
        entry,
        compile_seconds=0.0,
        ptx_file=entry.ptx_file + PACKED_SUFFIX,
        beside=tuple(replace(one, ptx_file=one.ptx_file + PACKED_SUFFIX) for one in entry.beside),
    )


def _described(manifest: Manifest, text: bytes) -> PackedLibrary:
    numbers = tuple(tuple(map(int, kernel.config.to_ints())) for kernel in manifest.kernels)
    digest = FileRecord.of_bytes(text).sha256
    return PackedLibrary(manifest.key, manifest.family, manifest.semantics, digest, numbers)


def _index(
    libraries: Sequence[KernelLibrary], packed: Sequence[PackedLibrary], arch: int, cpu: str
) -> PackageIndex:
    manifests = [library.manifest for library in libraries]
    return PackageIndex(
        version=package_version(),
        arch=arch,
        cpu=cpu,
        tvm_ffi=tvm_ffi_abi(manifests[0].tvm_ffi_version),
        sources={one.family: one.source_hash for one in manifests},
        libraries=tuple(packed),
    )


def _metadata(arch: int, cpu: str) -> dict[str, bytes]:
    """The files in the .dist-info folder, except RECORD."""
    version = package_version()
    licenses = "".join(f"License-File: {name}\n" for name in _LICENSES)
    metadata = f"""\
Metadata-Version: 2.4
Name: {NAMESPACE.replace("_", "-")}-{package_folder(arch)}
Version: {version}
Summary: Compiled kernels of flashsmith for NVIDIA GPUs of the architecture sm_{arch}
License-Expression: Apache-2.0 AND LicenseRef-NVIDIA-CUDA-Toolkit-EULA
{licenses}Requires-Python: >=3.10
Requires-Dist: flashsmith=={version}
Description-Content-Type: text/markdown

Flash-attention kernels of [flashsmith](https://pypi.org/project/flashsmith/), compiled for NVIDIA
GPUs of the architecture sm_{arch}. With this package installed, flashsmith needs no compiler. The
libraries contain NVIDIA's CUDA runtime, which NVIDIA's license for the CUDA Toolkit covers.
"""
    wheel = f"""\
Wheel-Version: 1.0
Generator: flashsmith {version}
Root-Is-Purelib: false
Tag: py3-none-{PLATFORM}_{cpu}
"""
    files = {"METADATA": metadata.encode(), "WHEEL": wheel.encode()}
    return files | {f"licenses/{name}": _license(name) for name in _LICENSES}


def _license(name: str) -> bytes:
    """The text of a license file in the installed flashsmith."""
    for file in importlib.metadata.files("flashsmith") or []:
        if file.name == name and "licenses" in file.parts:
            return file.read_binary()
    raise ArgumentError(
        f"{name}: not among the files of the installed flashsmith; install it again"
    )


def _time() -> datetime.datetime:
    """SOURCE_DATE_EPOCH, or the oldest time that can be recorded in a zip archive."""
    wanted = datetime.datetime.fromtimestamp(env.source_date_epoch(), datetime.timezone.utc)
    return max(wanted, _FIRST_TIME)
