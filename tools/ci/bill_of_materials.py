"""Prints the bill of materials for the files of a release, as CycloneDX 1.6.

    python tools/ci/bill_of_materials.py FOLDER

Each wheel, source distribution and packed folder of the kernels hub (hub-*.tar.gz) is a component
with its checksum and license. It depends on the packages that its metadata requires. Those with
kernels also contain NVIDIA's CUDA runtime and were made by the compilers that their manifests name.
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


def texts_of(path: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    """The files of an archive whose paths end with one of ``names``, by path."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return {it: archive.read(it) for it in archive.namelist() if it.endswith(names)}
    found = {}
    with tarfile.open(path) as packed:
        for member in packed:
            file = packed.extractfile(member) if member.name.endswith(names) else None
            if file is not None:
                found[member.name] = file.read()
    return found


def metadata_of(path: Path) -> Message:
    """The metadata of a wheel, a source distribution or a packed folder of the hub."""
    if is_of_the_hub(path):
        return metadata_of_hub(path)
    texts = texts_of(path, (".dist-info/METADATA",) if path.suffix == ".whl" else ("/PKG-INFO",))
    return BytesParser().parsebytes(texts[min(texts, key=len)])


def is_of_the_hub(path: Path) -> bool:
    """Whether a file is a packed folder of the kernels hub."""
    return path.name.startswith("hub-")


def metadata_of_hub(path: Path) -> Message:
    """The metadata of a packed folder of the hub, in the form of a wheel's."""
    texts = texts_of(path, ("/metadata.json", "/kernels.json"))
    hub = json.loads(next(text for name, text in texts.items() if name.endswith("/metadata.json")))
    index = next(text for name, text in texts.items() if name.endswith("/kernels.json"))
    kernels = json.loads(index.decode().partition("\n")[2])
    found = Message()
    found["Name"] = path.name.removesuffix(".tar.gz").replace("hub-", f"{hub['name']}-hub-")
    found["Version"] = kernels["version"]
    found["License-Expression"] = hub["license"]
    found["Requires-Dist"] = f"apache-tvm-ffi=={kernels['tvm_ffi']}.*"
    found["Requires-Dist"] = "numpy"
    return found


def component(path: Path) -> dict[str, Any]:
    """A file of the release, as a component."""
    found = metadata_of(path)
    name = str(found["Name"])
    kind = "generic" if is_of_the_hub(path) else "pypi"
    return {
        "type": "library",
        "bom-ref": path.name,
        "name": name,
        "version": str(found["Version"]),
        "purl": f"pkg:{kind}/{name.lower()}@{found['Version']}?file_name={path.name}",
        "licenses": [{"expression": str(found["License-Expression"])}],
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}],
        **({"components": parts} if (parts := list(contained(path))) else {}),
    }


def contained(path: Path) -> Iterator[dict[str, Any]]:
    """What compiled libraries contain, and what made them."""
    made_by: set[tuple[str, str]] = set()
    for text in texts_of(path, ("/manifest.json",)).values():
        facts = json.loads(text.decode().partition("\n")[2])
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
    """The bill of materials of a folder's files."""
    patterns = ("*.whl", "flashsmith*.tar.gz", "hub-*.tar.gz")
    files = sorted(path for pattern in patterns for path in folder.glob(pattern))
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
