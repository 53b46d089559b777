"""No library outlives a change of its sources, and none is rebuilt for another family's."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from stand_in_sources import CONFIGS, write_sources

from flashsmith.builder.kernel_cache import Cache
from flashsmith.builder.library_build import build_from
from flashsmith.builder.library_lookup import find_library_from
from flashsmith.builder.sources import family_sources, package_sources, source_hash, tree_hash
from flashsmith.families import FAMILIES

SHARED = {"common", "host"}
# What some families share.
BORROWED = {
    "mma_sync_backward": {"backward"},
    "mma_sync_decode": {"sm90", "sm90_forward"},
    "score_sums": {"backward"},
    "wgmma": {"sm90", "sm90_forward"},
    "wgmma_backward": {"backward", "sm90", "wgmma_dq"},  # separate_dq
    "wgmma_dq": {"backward", "sm90"},
    "mma_sync_mla": {"mla"},
    "wgmma_mla": {"mla", "sm90", "sm90_forward"},
}


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    """A copy of the package's sources."""
    return Path(shutil.copytree(package_sources(), tmp_path / "csrc"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_change_of_any_file_it_is_made_of_is_noticed(csrc: Path, family: str) -> None:
    before = source_hash(family, csrc)
    assert before == source_hash(family)
    for name in family_sources(family, csrc).texts:
        text = (csrc / name).read_bytes()
        (csrc / name).write_bytes(text + b"\n")
        assert source_hash(family, csrc) != before, name
        (csrc / name).write_bytes(text)
    assert source_hash(family, csrc) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_made_of_its_own_folder_and_what_all_share(csrc: Path, family: str) -> None:
    names = set(family_sources(family, csrc).texts)
    assert {name.split("/")[0] for name in names} == {
        *(family, *SHARED),
        *BORROWED.get(family, ()),
    }
    own = {path.relative_to(csrc).as_posix() for path in (csrc / family).iterdir()}
    host = {path.relative_to(csrc).as_posix() for path in (csrc / "host").iterdir()}
    assert own | host <= names


@pytest.mark.parametrize("family", FAMILIES)
def test_a_change_in_another_family_is_none(csrc: Path, family: str) -> None:
    before = source_hash(family, csrc), tree_hash(csrc)
    for path in csrc.rglob("*.*"):
        if path.parent.name not in {family, *SHARED, *BORROWED.get(family, ())}:
            path.write_bytes(path.read_bytes() + b"\n")
    assert source_hash(family, csrc) == before[0]
    assert tree_hash(csrc) != before[1]


@pytest.mark.parametrize("folder", ["host", "wgmma"])
def test_host_code_that_comes_goes_or_moves_is_noticed(csrc: Path, folder: str) -> None:
    hashes = {source_hash("wgmma", csrc)}
    new = csrc / folder / "a_new_one.cc"
    new.write_text("")
    hashes.add(source_hash("wgmma", csrc))
    new = new.rename(new.with_name("another_name.cc"))
    hashes.add(source_hash("wgmma", csrc))
    assert len(hashes) == 3
    new.unlink()
    assert source_hash("wgmma", csrc) in hashes


def test_headers_count_once_they_are_included(csrc: Path) -> None:
    """From anywhere: beside the file that includes them, or by their folder."""
    before = source_hash("mma_sync", csrc)
    (csrc / "mma_sync" / "beside.cuh").write_text('#  include "common/by_folder.cuh"\n')
    (csrc / "common" / "by_folder.cuh").write_text("")
    assert source_hash("mma_sync", csrc) == before
    kernel = csrc / "mma_sync" / "gemm.cuh"
    kernel.write_text(f'#include "beside.cuh"\n{kernel.read_text()}')
    names = family_sources("mma_sync", csrc).texts
    assert {"mma_sync/beside.cuh", "common/by_folder.cuh"} <= names.keys()


def test_what_is_not_noticed_is_not_included() -> None:
    for family in FAMILIES:
        known = family_sources(family).texts
        for path, text in known.items():
            for name in re.findall(r'^#include "(.+)"', text.decode(), re.MULTILINE):
                assert name in known, f"{path} includes {name}"


def test_families_share_host_code() -> None:
    """It is compiled for the first of them alone."""
    hashes = {name: set[str]() for name in family_sources("mma_sync").host_files}
    del hashes["mma_sync/plan.cc"]
    assert len(hashes) >= 8
    for family in FAMILIES:
        sources = family_sources(family)
        for name, found in hashes.items():
            found.add(sources.hash(name))
    assert {len(found) for found in hashes.values()} == {1}
    assert len(set.union(*hashes.values())) == len(hashes)


def test_host_code_is_compiled_anew_where_its_own_sources_changed(
    cache: Cache, cuda_home: Path, tmp_path: Path
) -> None:
    csrc = write_sources(tmp_path / "csrc")
    files = {"host_bindings", "host_launcher", "mma_sync_plan"}

    def compiled() -> Counter[str]:
        build_from(csrc, CONFIGS, jobs=1)
        return Counter(path.name.split("-")[1] for path in cache.objects.iterdir())

    assert compiled() == dict.fromkeys(files, 1)
    for name, count in (
        ("common/twice.cuh", {}),  # the kernel's
        ("host/launcher.h", {"host_bindings": 2, "host_launcher": 2}),
        ("mma_sync/plan.cc", {"host_bindings": 2, "host_launcher": 2, "mma_sync_plan": 2}),
        ("host/plan.h", {"host_bindings": 3, "host_launcher": 2, "mma_sync_plan": 3}),
    ):
        with open(csrc / name, "a") as file:
            file.write("// two\n")
        assert compiled() == dict.fromkeys(files, 1) | count


@pytest.mark.parametrize("name", ["host/bindings.cc", "common/twice.cuh"])
def test_a_library_of_other_sources_is_not_found_and_not_reused(
    cache_root: Path, cuda_home: Path, tmp_path: Path, name: str
) -> None:
    csrc = write_sources(tmp_path / "csrc")
    changed = csrc / name
    first = build_from(csrc, CONFIGS, jobs=1)
    assert find_library_from(csrc, CONFIGS, arch=80) is not None
    changed.write_text(changed.read_text() + "// two\n")
    assert find_library_from(csrc, CONFIGS, arch=80) is None
    assert build_from(csrc, CONFIGS, jobs=1).path != first.path
