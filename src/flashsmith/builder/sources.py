"""The C++ sources of a library: their names, their hash, and the copies that are compiled."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from flashsmith import bundle
from flashsmith.families import family_named
from flashsmith.system_errors import is_from_system

EQUIVALENT_SOURCES = Path(__file__).with_name("equivalent_sources.json")

_SUFFIXES = (".cu", ".cuh", ".cc", ".h")
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
# Host code that only packaged libraries have.
PACKAGED_SOURCE = "packaged/older_libraries.cc"
# The only header of the host code that is included directly by generated code.
_ASKED = "host/kernel_library.h"


def package_sources() -> Path:
    """The folder with the CUDA C++ sources of this package."""
    return Path(__file__).parents[1] / "csrc"


class Sources:
    """Source files and everything that they include, as they are on disk now.

    The name of a file is the path by which it is included. The name begins with a folder inside
    ``csrc``, or with the name of one of ``folders``, which may be anywhere.
    """

    def __init__(self, csrc: Path, roots: Iterable[str], folders: Iterable[Path] = ()) -> None:
        self._csrc, self._folders = csrc, {folder.name: folder for folder in folders}
        texts: dict[str, bytes] = {}
        waiting = list(roots)
        while waiting:
            name = waiting.pop()
            text = None if name in texts else self._read(name)
            if text is None:
                continue  # The compiler will report the missing file
            texts[name] = text
            waiting += _includes(name, text)
        self.texts = dict(sorted(texts.items()))

    def path(self, name: str) -> Path:
        """The path of the file ``name`` on disk."""
        folder, _, rest = name.partition("/")
        return self._folders.get(folder, self._csrc / folder) / rest

    @property
    def roots(self) -> list[Path]:
        """The folders to which the names of files are relative."""
        return [self._csrc, *(folder.parent for folder in self._folders.values())]

    @property
    def host_files(self) -> list[str]:
        """The names of the files that g++ compiles into every library."""
        return [name for name in self.texts if name.endswith(".cc")]

    def hash(self, root: str | None = None) -> str:
        """A hash of the names and contents of all files, or of ``root`` and everything that it
        includes."""
        names = self.texts.keys() if root is None else self._included(root)
        total = hashlib.sha256()
        for name, text in self.texts.items():
            if name in names:
                total.update(f"{name}\0{len(text)}\0".encode())
                total.update(text)
        return total.hexdigest()[:32]

    def copy_to(self, target: Path, *, packaged: bool = False) -> None:
        """Copies the files to ``target``, from which they are then included.

        Each copy names its original in a #line directive. So the errors of the compiler and the
        line table of the machine code refer to the original. For a ``packaged`` library, originals
        are named without their folder, so that the bytes do not depend on the folder.
        """
        for name, text in self.texts.items():
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            original = name if packaged else self.path(name)
            path.write_bytes(f'#line 1 "{original}"\n'.encode() + text)

    def _included(self, root: str) -> set[str]:
        """The names of ``root`` and of everything that it includes."""
        found, waiting = set[str](), [root]
        while waiting:
            name = waiting.pop()
            if name in self.texts and name not in found:
                found.add(name)
                waiting += _includes(name, self.texts[name])
        return found

    def _read(self, name: str) -> bytes | None:
        if name.startswith(("/", "../")):
            return None
        try:
            return self.path(name).read_bytes()
        except (OSError, ValueError) as error:
            if not is_from_system(error):
                raise
            return None


def _includes(name: str, text: bytes) -> Iterator[str]:
    """The names of the files to which an include directive may refer, taken relative to the folder
    of the including file and relative to ``csrc``."""
    for found in _INCLUDE.findall(text):
        included = found.decode(errors="replace")
        yield posixpath.normpath(f"{posixpath.dirname(name)}/{included}")
        yield posixpath.normpath(included)


def family_sources(family: str, csrc: Path | None = None) -> Sources:
    """The sources of the libraries of a family: kernels, planning code, host code and everything
    that they include.

    ``csrc`` replaces the folder in this package.
    """
    csrc = csrc or package_sources()
    found = family_named(family)
    is_ours = found.csrc.parent == package_sources()
    cpp, own = found.cpp, csrc / found.csrc.name if is_ours else found.csrc
    host = [
        f"{folder.name}/{path.name}"
        for folder in (csrc / "host", own)
        for path in folder.glob("*.cc")
    ]
    roots = (*host, _ASKED, cpp.config_header, cpp.kernel_header, cpp.plan_header)
    return Sources(csrc, roots, folders=[own])


def source_hash(family: str, csrc: Path | None = None) -> str:
    """The hash of a family's current sources; libraries built from other sources are not used."""
    if csrc is None and bundle.is_copy():
        return bundle.SOURCES.get(family, "")
    return family_sources(family, csrc).hash()


def packaged_sources_hash(csrc: Path | None = None) -> str:
    """The hash of the host code that only packaged libraries have."""
    return Sources(csrc or package_sources(), [PACKAGED_SOURCE]).hash()


def tree_hash(csrc: Path | None = None) -> str:
    """A hash of the sources of all families, which identifies a version of the package."""
    csrc = csrc or package_sources()
    files = (path.relative_to(csrc).as_posix() for path in csrc.rglob("*"))
    return Sources(csrc, (name for name in files if name.endswith(_SUFFIXES))).hash()


def equivalent_sources() -> dict[str, dict[str, str]]:
    """For each family, maps hashes of older sources to hashes of newer sources that compile to the
    same kernels.

    tools/ci/same_ptx.py compares the kernels and then records these hashes.
    """
    found: dict[str, dict[str, str]] = json.loads(EQUIVALENT_SOURCES.read_text())
    return found
