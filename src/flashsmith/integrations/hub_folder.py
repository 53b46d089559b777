"""Writes a folder of the kernels hub: compiled kernels, and the Python that calls them.

    build/tvm-ffi01-cu130-x86_64-linux/     the folder that the package kernels loads, by its name
        metadata.json                       its name, version, requirements, GPUs and checksums
        __init__.py                         FlashAttention's functions and attention()
        kernels/sm90/                       as in an installed package of kernels
        builder/, runtime/, ptxlab/, ...    a copy of flashsmith that compiles nothing

Nothing in the folder needs an installed flashsmith. The folder requires tvm-ffi, NumPy and, for
PyTorch's tensors, PyTorch. Its bytes depend only on the libraries, on the package and on
SOURCE_DATE_EPOCH.
"""

from __future__ import annotations

import base64
import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from flashsmith.builder.kernel_package import package_folder
from flashsmith.builder.library import KernelLibrary
from flashsmith.builder.library_spec import machine_target, package_version
from flashsmith.builder.manifest import Manifest
from flashsmith.builder.package_files import (
    LICENSE_EXPRESSION,
    LICENSES,
    license_text,
    package_files,
)
from flashsmith.builder.toolchain import tvm_ffi_abi
from flashsmith.errors import ArgumentError
from flashsmith.integrations.hub_copy import copied_data, copied_modules

METADATA_NAME = "metadata.json"
NAME = "flashsmith"
# The hub's version number of the interface, which is increased when a change breaks callers.
INTERFACE = 1
# The oldest release of the package kernels that supports variants for tvm-ffi.
_OLDEST_KERNELS = "0.17.0"

_INIT = f'''\
"""Flash-attention kernels of flashsmith, compiled for NVIDIA GPUs.

{METADATA_NAME} names the GPUs. PyTorch's tensors are differentiated.
"""

from .bundle import VERSION as __version__
from .integrations.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from .integrations.traceable import attention, attention_with_cache, merge_attention

__all__ = [
    "__version__",
    "attention",
    "attention_with_cache",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "merge_attention",
]
'''
_MODULES = (
    "flashsmith.bundle",
    "flashsmith.integrations.flash_attn",
    "flashsmith.integrations.traceable",
)


def variant_name(manifest: Manifest, cpu: str) -> str:
    """Returns the hub's name for the variant with a library's versions of tvm-ffi and CUDA, such
    as 'tvm-ffi01-cu130-x86_64-linux'."""
    tvm_ffi = tvm_ffi_abi(manifest.tvm_ffi_version).replace(".", "")
    cuda = "".join(manifest.nvcc_version.split(".")[:2])
    return f"tvm-ffi{tvm_ffi}-cu{cuda}-{cpu}-linux"


def write_hub_folder(
    libraries: Mapping[int, Sequence[KernelLibrary]],
    cpu: str,
    folder: Path,
    *,
    ptx: bool = False,
) -> Path:
    """Writes build/<variant> in ``folder``, with the libraries of each architecture, and returns
    the variant's folder. The libraries must have been built as packaged libraries for the processor
    ``cpu``. With ``ptx``, the folder also has the kernels' PTX, so that the emulator can run them.
    An older folder of the same name is replaced.

    Raises ArgumentError if there is no library, or if a folder of that name exists that is not a
    folder of the hub.
    """
    every = [library for found in libraries.values() for library in found]
    if not every:
        raise ArgumentError("libraries: none; a folder of the hub needs at least one")
    files = {name: text.encode() for name, text in copied_modules(_MODULES).items()}
    files |= copied_data()
    files |= {name: license_text(name) for name in LICENSES}
    files["__init__.py"] = _INIT.encode()
    for arch, found in libraries.items():
        package = package_files(found, arch, cpu, ptx=ptx)
        files |= {f"kernels/{package_folder(arch)}/{name}": data for name, data in package.items()}
    manifests = [library.manifest for library in every]
    identifier = f"_{NAME}_cuda_{_content_hash(files)}"
    files["bundle.py"] = _bundle(files["bundle.py"].decode(), identifier, manifests).encode()
    files[METADATA_NAME] = _metadata(identifier, manifests, files).encode()
    return _publish(files, folder / "build" / variant_name(manifests[0], cpu))


def _content_hash(files: Mapping[str, bytes]) -> str:
    total = hashlib.sha256()
    for name, data in sorted(files.items()):
        total.update(f"{name}\0{len(data)}\0".encode() + data)
    return total.hexdigest()[:12]


def _bundle(text: str, operators: str, manifests: Sequence[Manifest]) -> str:
    """Returns the source text of the copy's bundle.py, with the values that apply to the copy."""
    sources = {one.family: one.source_hash for one in manifests}
    for before, now in (
        ("VERSION: str | None = None", f"VERSION: str | None = {package_version()!r}"),
        ('OPERATORS = "flashsmith"', f"OPERATORS = {operators!r}"),
        (
            "SOURCES: dict[str, str] = {}",
            f"SOURCES: dict[str, str] = {dict(sorted(sources.items()))!r}",
        ),
    ):
        assert text.count(before) == 1, before
        text = text.replace(before, now)
    return text


def _metadata(identifier: str, manifests: Sequence[Manifest], files: Mapping[str, bytes]) -> str:
    targets = {machine_target(one.family, one.arch).removeprefix("sm_") for one in manifests}
    digests = {
        name: base64.b64encode(hashlib.sha256(data).digest()).decode()
        for name, data in sorted(files.items())
    }
    data = {
        "id": identifier,
        "name": NAME,
        "version": INTERFACE,
        "license": LICENSE_EXPRESSION,
        "kernels-minver": _OLDEST_KERNELS,
        "python-depends": ["tvm-ffi"],
        "backend": {"type": "cuda", "archs": sorted(map(_capability, targets))},
        "digest": {"algorithm": "sha256", "files": digests},
    }
    return json.dumps(data, indent=2) + "\n"


def _capability(target: str) -> str:
    """Returns a target's compute capability: '90a' is 9.0a."""
    digits = target.rstrip("af")
    return f"{digits[:-1]}.{digits[-1]}{target[len(digits) :]}"


def _publish(files: Mapping[str, bytes], folder: Path) -> Path:
    """Writes the files next to ``folder`` and renames them, so that an interrupted write leaves no
    folder that looks complete."""
    if folder.exists() and not (folder / METADATA_NAME).is_file():
        raise ArgumentError(f"{folder}: exists, and is no folder of the hub; name another place")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as unfinished:
        new = Path(unfinished, "new")
        for name, data in files.items():
            path = new / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        if folder.exists():
            folder.rename(Path(unfinished, "old"))
        new.rename(folder)
    return folder
