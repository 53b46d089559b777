"""No library outlives a change of its sources, whichever folder of csrc they lie in."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from stand_in_sources import CONFIGS, write_sources

from flashsmith.builder.find import find_library_from
from flashsmith.builder.library_build import build_from
from flashsmith.builder.recipe import package_sources, source_hash

# Programs of their own, compiled anew whenever they run.
NOT_IN_LIBRARIES = "roofline"


def library_files(csrc: Path) -> list[Path]:
    """Every file below csrc that a kernel library may be made of."""
    files = (path for path in csrc.rglob("*") if path.is_file())
    return sorted(path for path in files if path.relative_to(csrc).parts[0] != NOT_IN_LIBRARIES)


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    """A copy of the package's sources."""
    return Path(shutil.copytree(package_sources(), tmp_path / "csrc"))


def test_a_change_of_any_file_is_noticed(csrc: Path) -> None:
    before = source_hash(csrc)
    assert before == source_hash(package_sources())
    files = library_files(csrc)
    assert {path.parent.name for path in files} == {"host", "common", "mma_sync", "wgmma"}
    for path in files:
        text = path.read_bytes()
        path.write_bytes(text + b"\n")
        assert source_hash(csrc) != before, path
        path.write_bytes(text)
    assert source_hash(csrc) == before


@pytest.mark.parametrize("folder", ["host", "wgmma"])
def test_files_that_come_go_or_move_are_noticed(csrc: Path, folder: str) -> None:
    hashes = {source_hash(csrc)}
    new = csrc / folder / "a_new_one.cuh"
    new.write_text("")
    hashes.add(source_hash(csrc))
    new = new.rename(new.with_name("another_name.cuh"))
    hashes.add(source_hash(csrc))
    new = new.rename(csrc / "common" / new.name)
    hashes.add(source_hash(csrc))
    assert len(hashes) == 4
    new.unlink()
    assert source_hash(csrc) in hashes


def test_what_is_not_noticed_is_not_included() -> None:
    csrc = package_sources()
    known = set(library_files(csrc))
    for path in known:
        for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
            assert csrc / name in known, f"{path} includes {name}"


@pytest.mark.parametrize("folder", ["host", "wgmma"])
def test_a_library_of_other_sources_is_not_found_and_not_reused(
    cache_root: Path, cuda_home: Path, tmp_path: Path, folder: str
) -> None:
    csrc = write_sources(tmp_path / "csrc")
    (csrc / "wgmma").mkdir(exist_ok=True)
    changed = csrc / folder / "later.cuh"
    changed.write_text("// one\n")
    first = build_from(csrc, CONFIGS, jobs=1)
    assert find_library_from(csrc, CONFIGS, arch=80) is not None
    changed.write_text("// two\n")
    assert find_library_from(csrc, CONFIGS, arch=80) is None
    assert build_from(csrc, CONFIGS, jobs=1).path != first.path
