"""A family whose sources lie outside the package, with two kernels a config."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from stand_in_sources import CONFIGS, write_sources

from flashsmith.builder.kernel_cache import Cache
from flashsmith.builder.library_build import build_from
from flashsmith.builder.sources import family_sources, source_hash

KERNELS = {"main": "flash_forward_kernel", "merge": "merge_parts"}
MERGE = """
namespace flashsmith {
template <class Kernel>
__global__ void merge_parts(const ForwardKernelArgs args) {
    args.row_max[threadIdx.x] = twice(args.row_max[threadIdx.x]) + Kernel::CFG.B_c;
}
}  // namespace flashsmith
"""


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what families share; the family's own lies elsewhere."""
    folder = write_sources(tmp_path / "csrc")
    elsewhere = shutil.move(folder / "mma_sync", tmp_path / "elsewhere" / "mma_sync")
    with open(Path(elsewhere) / "forward_kernel.cuh", "a") as header:
        header.write(MERGE)
    family = CONFIGS[0].family
    monkeypatch.setattr(family, "csrc", Path(elsewhere))
    monkeypatch.setattr(family, "kernel_templates", lambda cfg: KERNELS)
    return folder


def test_its_sources_are_found_by_its_name(csrc: Path, tmp_path: Path) -> None:
    names = family_sources("mma_sync", csrc).texts
    assert {"mma_sync/plan.cc", "mma_sync/forward_kernel.cuh", "common/twice.cuh"} <= names.keys()
    before = source_hash("mma_sync", csrc)
    with open(tmp_path / "elsewhere" / "mma_sync" / "plan.h", "a") as header:
        header.write("// changed\n")
    assert source_hash("mma_sync", csrc) != before


def test_a_config_has_the_ptx_of_both_kernels(cache: Cache, csrc: Path) -> None:
    built = build_from(csrc, CONFIGS, jobs=1)
    opened = cache.open(built.path.name)
    assert opened is not None
    for cfg in CONFIGS:
        entry = opened.entry(cfg)
        assert entry == built.entry(cfg)
        (merge,) = entry.beside
        assert merge.role == "merge"
        assert entry.ptx_entries == (entry.ptx_entry, merge.ptx_entry)
        assert "flash_forward_kernel" in entry.ptx_entry
        assert "merge_parts" in merge.ptx_entry
        assert merge.registers > 0
        assert merge.code_bytes > 0
        texts = {entry.ptx_entry: opened.ptx(cfg), **opened.ptx_beside(cfg)}
        for name, text in texts.items():
            assert re.findall(r"^\.visible \.entry (\w+)\(", text, re.MULTILINE) == [name]
            files = re.findall(r'\.file\s+\d+ "(.*)"', text)
            assert "mma_sync/forward_kernel.cuh" in files
            assert set(files) <= {"common/twice.cuh", "mma_sync/forward_kernel.cuh"}
