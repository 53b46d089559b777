"""Fixtures of the builder's tests: a cache of one's own, sources in miniature, a quick compiler."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import stand_in_sources

from flashsmith.builder import find_toolchain
from flashsmith.builder.kernel_cache import Cache
from flashsmith.builder.library_build import build_from


@pytest.fixture
def cache_root(tmp_path, monkeypatch) -> Path:
    """An empty cache folder that the builder uses in this test."""
    root = tmp_path / "cache"
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(root))
    return root


@pytest.fixture
def cache(cache_root) -> Cache:
    return Cache(cache_root)


@pytest.fixture(scope="session")
def toolchain():
    return find_toolchain()


@pytest.fixture(scope="session")
def tiny_csrc(tmp_path_factory) -> Path:
    """Sources whose kernel is one line; not to be changed."""
    return stand_in_sources.write_sources(tmp_path_factory.mktemp("tiny") / "csrc")


@pytest.fixture(scope="session")
def recorded_home(tmp_path_factory, tiny_csrc, toolchain) -> Path:
    home = tmp_path_factory.mktemp("recorded") / "cuda"
    home.mkdir()
    return stand_in_sources.record_compiler(home, tiny_csrc, toolchain)


@pytest.fixture(scope="session")
def host_code(tmp_path_factory, recorded_home, tiny_csrc) -> Path:
    """A cache folder with the compiled host code of tiny_csrc: most of what a build there takes."""
    folder = tmp_path_factory.mktemp("host_code")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_HOME", str(recorded_home))
        patch.setenv("FLASHSMITH_CACHE_DIR", str(folder))
        build_from(tiny_csrc, stand_in_sources.CONFIGS, jobs=1)
    return folder


@pytest.fixture
def cuda_home(tmp_path, recorded_home, monkeypatch) -> Path:
    """A CUDA_HOME of this test's own whose nvcc plays back the compilation of tiny_csrc."""
    home = stand_in_sources.copy_home(recorded_home, tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(home))
    return home
