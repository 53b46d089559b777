"""Prints the bill of materials for the files of a release, as CycloneDX 1.6.

    python tools/ci/bill_of_materials.py FOLDER

Each wheel and source distribution in the folder is a component with its checksum and license. It
depends on the packages that its metadata requires. Wheels of kernels also contain NVIDIA's CUDA
runtime, and were made by the compilers that are named in their manifests.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from datetime import datetime, timezone
from email.message import Message
from email.parser import BytesParser
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement


def metadata_of(path: Path) -> Message:
    """The metadata of a wheel or a source distribution."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            (name,) = [it for it in archive.namelist() if it.endswith(".dist-info/METADATA")]
            return BytesParser().parsebytes(archive.read(name))
    with tarfile.open(path) as archive:
        name = min((it for it in archive.getnames() if it.endswith("/PKG-INFO")), key=len)
        file = archive.extractfile(name)
        assert file is not None
        return BytesParser().parse(file)


def component(path: Path) -> dict[str, Any]:
    """A file of the release, as a component."""
    found = metadata_of(path)
    name = str(found["Name"])
    return {
        "type": "library",
        "bom-ref": path.name,
        "name": name,
        "version": str(found["Version"]),
        "purl": f"pkg:pypi/{name.lower()}@{found['Version']}?file_name={path.name}",
        "licenses": [{"expression": str(found["License-Expression"])}],
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}],
        **({"components": parts} if (parts := list(contained(path))) else {}),
    }


def contained(path: Path) -> Iterator[dict[str, Any]]:
    """What the libraries in a wheel of kernels contain, and what they were made with."""
    made_by: set[tuple[str, str]] = set()
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith("/manifest.json"):
                    facts = json.loads(archive.read(name).decode().partition("\n")[2])
                    made_by |= {("nvcc", facts["nvcc_version"]), ("g++", facts["gxx_version"])}
    if made_by:
        yield {
            "type": "library",
            "name": "nvidia-cuda-runtime",
            "version": version("nvidia-cuda-runtime"),
            "description": "libcudart_static.a, linked into each library",
        }
    for compiler, number in sorted(made_by):
        yield {"type": "application", "name": compiler, "version": number, "scope": "excluded"}


def requirements(path: Path) -> Iterator[Requirement]:
    """What the metadata of a file requires, without extras."""
    for text in metadata_of(path).get_all("Requires-Dist") or []:
        one = Requirement(text)
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            yield one


def bill(folder: Path) -> dict[str, Any]:
    """The bill of materials for the wheels and source distributions in a folder."""
    files = sorted([*folder.glob("*.whl"), *folder.glob("flashsmith*.tar.gz")])
    needed = {str(one): one for path in files for one in requirements(path)}
    date = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), timezone.utc)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"timestamp": date.strftime("%Y-%m-%dT%H:%M:%SZ")},
        "components": [
            *map(component, files),
            *(
                {
                    "type": "library",
                    "bom-ref": text,
                    "name": one.name,
                    "version": str(one.specifier),
                }
                for text, one in sorted(needed.items())
            ),
        ],
        "dependencies": [
            {"ref": path.name, "dependsOn": sorted(map(str, requirements(path)))} for path in files
        ],
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(json.dumps(bill(Path(sys.argv[1])), indent=1))
