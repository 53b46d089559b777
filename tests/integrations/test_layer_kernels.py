"""The kernels of an engine's layers where nothing may be built: what is built serves instead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from flashsmith.errors import KernelNotBuiltError

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")

from flashsmith.chooser.package_contents import (  # noqa: E402
    DECODE_KINDS,
    WRITE_KINDS,
    package_contents,
)
from flashsmith.chooser.package_scope import PackageScope  # noqa: E402
from flashsmith.families import DType, Semantics, device_spec  # noqa: E402
from flashsmith.families.device import DeviceSpec  # noqa: E402
from flashsmith.integrations import layer_kernels  # noqa: E402
from flashsmith.integrations.layer_kernels import (  # noqa: E402
    LayerKernels,
    build_kernels,
    cache_problem,
)
from flashsmith.operations.decode import FREE, INVARIANT  # noqa: E402
from flashsmith.runtime import fallback_kernels  # noqa: E402
from flashsmith.runtime.fallback_kernels import FallbackKernels  # noqa: E402
from flashsmith.semantics.cache_format import CacheFormat  # noqa: E402
from flashsmith.semantics.signature import check_mask  # noqa: E402

H200 = device_spec("H200")
REQUESTS, TOKENS = 64, 512
Kernels = set[tuple[Any, Semantics]]


def layer(device: DeviceSpec = H200, **changes: Any) -> LayerKernels:
    """A layer of a Llama over pages of 16 keys."""
    sizes = {"heads": 32, "kv_heads": 8, "d": 128, "dtype": torch.bfloat16, "softcap": 0.0}
    window = changes.pop("window", (None, None))
    sizes |= {"page": 16, "keys": 8192, "bits": "free", "mask": check_mask(True, window)}
    problem = cache_problem(**(sizes | changes))
    return LayerKernels(problem, FREE if problem.bits == "" else INVARIANT, device)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kernels], list[Any]]:
    """Lets only these kernels be there. Returns the list of those that are loaded from then on."""

    def make(kernels: Kernels) -> list[Any]:
        loaded: list[Any] = []

        def get(config: Any, arch: int, semantics: Semantics, *_: Any) -> Any:
            if (config, semantics) not in kernels:
                raise KernelNotBuiltError(f"config {config} is not built for sm_{arch}, and so.\n")
            loaded.append((config, semantics))
            return SimpleNamespace(config=config, semantics=semantics)

        monkeypatch.setattr(layer_kernels, "loaded_kernels", SimpleNamespace(get=get))
        monkeypatch.setattr(layer_kernels, "fallback_kernels", FallbackKernels())
        monkeypatch.setattr(fallback_kernels, "built_kernels", lambda *, arch: tuple(kernels))
        monkeypatch.setenv("FLASHSMITH_JIT", "0")
        return loaded

    return make


def needed_by(of: LayerKernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The kernels that a layer wants if all may be built."""
    found: Kernels = set()

    def get(config: Any, arch: int, semantics: Semantics, *_: Any) -> Any:
        found.add((config, semantics))
        return SimpleNamespace(config=config, semantics=semantics)

    with monkeypatch.context() as patch:
        patch.setattr(layer_kernels, "loaded_kernels", SimpleNamespace(get=get))
        assert build_kernels([of], REQUESTS, TOKENS) == len(found)
    return found


def test_steps_of_all_sizes_take_what_is_built(
    built: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    needed = needed_by(layer(), monkeypatch)
    writes = {it for it in needed if it[1] == Semantics()}
    attention = sorted(needed - writes, key=str)
    assert writes
    assert len(attention) > 1
    kept = attention[0]
    loaded = built({kept, *writes})
    one = layer()
    with caplog.at_level(logging.INFO, "flashsmith"):
        assert build_kernels([one], REQUESTS, TOKENS) == 1 + len(writes)
    assert set(loaded) == {kept, *writes}
    # Also for sizes between those that were looked up.
    for requests, queries in ((1, 1), (3, 1), (64, 1), (5, 300), (1, 512)):
        assert one.config_for(requests, queries) == kept[0]
    others = {config for config, _ in attention[1:]}
    assert len(caplog.records) == len(others)
    assert all(f"{kept[0]} [" in record.getMessage() for record in caplog.records)


def test_an_engine_starts_only_with_kernels_for_all_it_does(
    built: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = needed_by(layer(), monkeypatch)
    writes = {it for it in needed if it[1] == Semantics()}
    for kernels in (writes, needed - writes, set()):
        built(kernels)
        with pytest.raises(KernelNotBuiltError, match="is not built for sm_90"):
            build_kernels([layer()], REQUESTS, TOKENS)
    # A kernel without a window is none for a layer that has one.
    built(needed)
    with pytest.raises(KernelNotBuiltError):
        build_kernels([layer(window=(127, 0))], REQUESTS, TOKENS)


@cache
def packaged(everything: bool) -> Kernels:
    """The kernels of a package for bf16 and d 128 that serve steps over caches."""
    kinds = [kind for kind in DECODE_KINDS if "packed" in kind]
    contents = package_contents(
        90,
        d_heads=(128,),
        dtypes=(DType.BF16,),
        kinds=(*kinds, *WRITE_KINDS),
        scope=PackageScope(everything=everything),
    )
    return {(config, it) for it, configs in contents.kernels.items() for config in configs}


E4M3, E5M2 = {"cache": CacheFormat.E4M3}, {"cache": CacheFormat.E5M2}
UNMASKED = {"mask": check_mask(False, (None, None))}
LAYERS: tuple[dict[str, Any], ...] = (
    {},
    {"window": (127, 0)},
    {"softcap": 50.0},
    {"softcap": 50.0, "window": (4095, 0)},
    {"bits": "canonical"},
    {"bits": "canonical", "window": (127, 0)},
    {"heads": 28, "kv_heads": 4, "keys": 40960},
    {"d": 120},
    UNMASKED,
    E4M3,
    {**E4M3, "window": (127, 0)},
    {**E4M3, **UNMASKED},
)
RARE_LAYERS: tuple[dict[str, Any], ...] = (
    {**E4M3, "softcap": 50.0, "window": (4095, 0), "d": 112},
    {**E4M3, "bits": "canonical"},
    E5M2,
    {**E5M2, "softcap": 50.0},
    {**E5M2, "bits": "canonical", "window": (127, 0)},
    {**UNMASKED, "softcap": 50.0},
    {**UNMASKED, "bits": "canonical"},
)


def words(changes: dict[str, Any]) -> str:
    return " ".join(map(str, changes.values())) or "plain"


@pytest.mark.parametrize("changes", RARE_LAYERS, ids=words)
def test_rare_layers_need_a_package_with_everything(changes: dict[str, Any], built: Any) -> None:
    built(packaged(everything=False))
    with pytest.raises(KernelNotBuiltError, match="is not built for sm_90"):
        build_kernels([layer(**changes)], REQUESTS, TOKENS)
    built(packaged(everything=True))
    assert build_kernels([layer(**changes)], REQUESTS, TOKENS)


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("changes", LAYERS, ids=words)
def test_an_installed_package_serves_engines(
    changes: dict[str, Any], everything: bool, built: Any
) -> None:
    """Every layer starts with what a package has, and with canonical bits stays canonical."""
    built(packaged(everything))
    one = layer(**changes)
    build_kernels([one], REQUESTS, TOKENS)
    sizes = [(requests, queries) for requests in (1, 7, 64) for queries in (1, 4, 512)]
    found: set[Any] = {one.config_for(*it) for it in sizes}
    if one.problem.bits:
        assert {config.canonical for config in found} == {1}
