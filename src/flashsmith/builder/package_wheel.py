"""Writes the wheels of a kernel package: one, or several if one would be too large for a package
index. Their bytes depend only on the libraries and on SOURCE_DATE_EPOCH."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import stat
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from flashsmith.builder.kernel_package import NAMESPACE, package_folder
from flashsmith.builder.library import KernelLibrary
from flashsmith.builder.library_spec import package_version
from flashsmith.builder.package_files import (
    LICENSE_EXPRESSION,
    LICENSES,
    date_of_files,
    license_text,
    package_files,
)
from flashsmith.builder.safe_files import written_beside
from flashsmith.builder.system_libraries import PLATFORM
from flashsmith.errors import ArgumentError
from flashsmith.families import family_named
from flashsmith.operations import DEFAULT

# The usual limit of package indexes on the size of a file, in bytes.
MOST_BYTES = 100_000_000
# The number of bytes that a part needs in addition to the files of its libraries: for the index,
# metadata and licenses.
_OTHER_FILES = 200_000


def wheel_name(arch: int, cpu: str, part: str = "") -> str:
    """The file name of the wheel for an architecture and a processor, or of the wheel that has one
    ``part`` of the package."""
    package = f"{NAMESPACE}_{package_folder(arch, part)}-{package_version()}"
    return f"{package}-py3-none-{PLATFORM}_{cpu}.whl"


def write_wheels(
    libraries: Sequence[KernelLibrary],
    arch: int,
    cpu: str,
    folder: Path,
    *,
    ptx: bool = False,
    most_bytes: int = MOST_BYTES,
) -> list[Path]:
    """Writes the wheel with these libraries, which must have been built as packaged libraries, into
    ``folder``. With ``ptx`` the wheel also has the kernels' PTX, so that the emulator can run them
    without a compiler.

    If the wheel would be larger than ``most_bytes``, each operation gets its own wheel. The first
    wheel requires the others, so that installing it installs all of them.

    Raises ArgumentError when there is no library or one alone is too large, and OSError when the
    folder cannot be written.
    """
    if not libraries:
        raise ArgumentError("libraries: none; a package needs at least one")
    folder.mkdir(parents=True, exist_ok=True)
    path = _write_wheel(libraries, arch, cpu, folder, ptx=ptx)
    if path.stat().st_size <= most_bytes:
        return [path]
    parts = _parts(libraries, _sizes(path), most_bytes - _OTHER_FILES)
    path.unlink()
    others = [name for name in parts if name]
    return [
        _write_wheel(
            parts[name], arch, cpu, folder, ptx=ptx, part=name, others=() if name else others
        )
        for name in parts
    ]


def _sizes(wheel: Path) -> Counter[str]:
    """The compressed size in bytes of each library in a wheel, by the library's key."""
    found: Counter[str] = Counter()
    with zipfile.ZipFile(wheel) as archive:
        for file in archive.infolist():
            match Path(file.filename).parts:
                case (_, _, key, _, *_):  # namespace, package, library, its files
                    found[key] += file.compress_size
    return found


def _parts(
    libraries: Sequence[KernelLibrary], sizes: Mapping[str, int], most_bytes: int
) -> dict[str, list[KernelLibrary]]:
    """Returns the libraries of each part, keyed by the name of the part. The first part, whose name
    is '', serves attention(). The other parts are named after their operations, with a number if an
    operation needs several parts."""
    groups: dict[str, list[KernelLibrary]] = {}
    for library in sorted(libraries, key=lambda library: library.manifest.key):
        operation = family_named(library.manifest.family).operation
        groups.setdefault(operation, []).append(library)
    parts: dict[str, list[KernelLibrary]] = {}
    for operation in sorted(groups, key=lambda name: (name != DEFAULT, name)):
        for number, chunk in enumerate(_chunks(groups[operation], sizes, most_bytes), start=1):
            name = operation if number == 1 else f"{operation}{number}"
            parts[name if parts else ""] = chunk
    return parts


def _chunks(
    libraries: Sequence[KernelLibrary], sizes: Mapping[str, int], most_bytes: int
) -> Iterator[list[KernelLibrary]]:
    """Yields the libraries in their order, divided into chunks of at most ``most_bytes`` bytes."""
    chunk: list[KernelLibrary] = []
    taken = 0
    for library in libraries:
        size = sizes[library.manifest.key]
        if size > most_bytes:
            raise ArgumentError(
                f"{library.path}: takes {size / 1e6:.1f} MB, and a wheel may have "
                f"{most_bytes / 1e6:.1f} MB of libraries; build fewer kernels (--only)"
            )
        if chunk and taken + size > most_bytes:
            yield chunk
            chunk, taken = [], 0
        chunk.append(library)
        taken += size
    yield chunk


def _write_wheel(
    libraries: Sequence[KernelLibrary],
    arch: int,
    cpu: str,
    folder: Path,
    *,
    ptx: bool,
    part: str = "",
    others: Sequence[str] = (),
) -> Path:
    """Writes one wheel, which requires the wheels of the parts ``others`` of the same package."""
    path = folder / wheel_name(arch, cpu, part)
    package = package_folder(arch, part)
    info = f"{NAMESPACE}_{package}-{package_version()}.dist-info"
    files = {
        f"{NAMESPACE}/{package}/{name}": data
        for name, data in package_files(libraries, arch, cpu, ptx=ptx).items()
    }
    metadata = sorted(_metadata(arch, cpu, part, others).items())
    files |= {f"{info}/{name}": data for name, data in metadata}
    with written_beside(path) as unfinished, zipfile.ZipFile(unfinished, "w") as archive:
        _write_archive(archive, files, info)
    path.chmod(0o644)
    return path


def _write_archive(archive: zipfile.ZipFile, files: Mapping[str, bytes], info: str) -> None:
    records: list[tuple[str, str, str]] = []

    def add(name: str, data: bytes) -> None:
        entry = zipfile.ZipInfo(name, date_of_files().timetuple()[:6])
        entry.compress_type = zipfile.ZIP_DEFLATED
        entry.create_system = 3  # Unix, on every system
        entry.external_attr = (stat.S_IFREG | 0o644) << 16
        archive.writestr(entry, data, compresslevel=9)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        records.append((name, f"sha256={digest}", str(len(data))))

    for name, data in files.items():
        add(name, data)
    rows = io.StringIO()
    csv.writer(rows, lineterminator="\n").writerows([*records, (f"{info}/RECORD", "", "")])
    add(f"{info}/RECORD", rows.getvalue().encode())


def _metadata(arch: int, cpu: str, part: str, others: Sequence[str]) -> dict[str, bytes]:
    """The files of the .dist-info folder, without RECORD."""
    version = package_version()
    licenses = "".join(f"License-File: {name}\n" for name in LICENSES)
    needs = ["flashsmith", *(_distribution(arch, other) for other in others)]
    required = "".join(f"Requires-Dist: {name}=={version}\n" for name in needs)
    which = f" ({part})" if part else ""
    metadata = f"""\
Metadata-Version: 2.4
Name: {_distribution(arch, part)}
Version: {version}
Summary: Compiled kernels of flashsmith for NVIDIA GPUs of the architecture sm_{arch}{which}
License-Expression: {LICENSE_EXPRESSION}
{licenses}Requires-Python: >=3.10
{required}Description-Content-Type: text/markdown

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
    return files | {f"licenses/{name}": license_text(name) for name in LICENSES}


def _distribution(arch: int, part: str) -> str:
    return f"{NAMESPACE}-{package_folder(arch, part)}".replace("_", "-")
