"""The files of a kernel package: libraries, their manifests and an index. They depend only on the
libraries and on SOURCE_DATE_EPOCH."""

from __future__ import annotations

import datetime
import importlib.metadata
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import replace

from flashsmith import env
from flashsmith.builder.kernel_package import INDEX_NAME, PackageIndex, PackedLibrary
from flashsmith.builder.library import PACKED_SUFFIX, SHARED_OBJECT, KernelLibrary
from flashsmith.builder.library_spec import package_version
from flashsmith.builder.manifest import MANIFEST_NAME, FileRecord, KernelEntry, Manifest
from flashsmith.builder.safe_files import any_owner, read_below
from flashsmith.builder.toolchain import tvm_ffi_abi
from flashsmith.errors import ArgumentError

LICENSES = ("LICENSE", "NOTICE")
# The libraries contain NVIDIA's CUDA runtime.
LICENSE_EXPRESSION = "Apache-2.0 AND LicenseRef-NVIDIA-CUDA-Toolkit-EULA"
# The oldest time that a zip archive can record.
_FIRST_TIME = datetime.datetime(1980, 1, 1, tzinfo=datetime.timezone.utc)
# The settings of the compression filter are given explicitly, since their defaults may change.
_XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]


def package_files(
    libraries: Sequence[KernelLibrary], arch: int, cpu: str, *, ptx: bool
) -> dict[str, bytes]:
    """Returns the contents of the files of a package with these libraries, keyed by their paths in
    the folder of the package."""
    found: dict[str, bytes] = {}
    packed = []
    for library in sorted(libraries, key=lambda library: library.manifest.key):
        files = dict(_files(library, ptx))
        manifest = _manifest(library.manifest, files).to_json().encode()
        files[MANIFEST_NAME] = manifest
        found |= {f"{library.manifest.key}/{name}": files[name] for name in sorted(files)}
        packed.append(_described(library.manifest, manifest))
    found[INDEX_NAME] = _index(libraries, packed, arch, cpu).to_json().encode()
    return found


def _files(library: KernelLibrary, ptx: bool) -> Iterator[tuple[str, bytes]]:
    """Yields the files of a library as they are in the package: sources are left out, and PTX is
    compressed."""
    for name in library.manifest.files:
        data = read_below(library.path, name, check=any_owner)
        if name == SHARED_OBJECT:
            yield name, data
        elif ptx and name.endswith(".ptx"):
            packed = lzma.compress(data, check=lzma.CHECK_CRC32, filters=_XZ)
            yield name + PACKED_SUFFIX, packed


def _manifest(manifest: Manifest, files: dict[str, bytes]) -> Manifest:
    """Returns the manifest without times and durations, which differ from build to build."""
    return replace(
        manifest,
        created=date_of_files().isoformat(timespec="seconds"),
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


def license_text(name: str) -> bytes:
    """The text of a license file of the installed flashsmith."""
    for file in importlib.metadata.files("flashsmith") or []:
        if file.name == name and "licenses" in file.parts:
            return file.read_binary()
    raise ArgumentError(
        f"{name}: not among the files of the installed flashsmith; install it again"
    )


def date_of_files() -> datetime.datetime:
    """SOURCE_DATE_EPOCH, or the oldest time that a zip archive can record."""
    wanted = datetime.datetime.fromtimestamp(env.source_date_epoch(), datetime.timezone.utc)
    return max(wanted, _FIRST_TIME)
