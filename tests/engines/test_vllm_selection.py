"""vLLM finds the backend, takes it by name, and says why where it cannot serve."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import vllm.plugins
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from flashsmith.errors import ArgumentError
from flashsmith.families import device_spec
from flashsmith.integrations import vllm as plugin
from flashsmith.integrations.layer_kernels import LayerKernels
from flashsmith.integrations.vllm import impl, releases
from flashsmith.integrations.vllm.backend import FlashsmithBackend

DECODER = AttentionSelectorConfig(
    head_size=128,
    dtype=torch.bfloat16,
    kv_cache_dtype="auto",
    block_size=16,
    attn_type=AttentionType.DECODER,
)


SAYS_RANKS = "use_dcp" in AttentionSelectorConfig._fields


class Unserved(NamedTuple):
    change: dict[str, Any]
    reason: str
    capability: tuple[int, int] = (9, 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The engine's platform of NVIDIA GPUs; there is none here, so tests say which. Importing it
    loads the engine's compiled operators, which need a GPU's PyTorch and are not called."""
    for name in ("_C", "_C_stable_libtorch"):
        monkeypatch.setitem(sys.modules, f"vllm.{name}", ModuleType(f"vllm.{name}"))
    from vllm.platforms import cuda as platform

    def select(capability: tuple[int, int], config: AttentionSelectorConfig) -> str:
        monkeypatch.setattr(
            platform.CudaPlatformBase,
            "get_device_capability",
            classmethod(lambda *_: DeviceCapability(*capability)),
        )
        backend = AttentionBackendEnum[releases.backend_name()]
        path: str = platform.CudaPlatformBase.get_attn_backend_cls(backend, config)
        return path

    vllm.plugins.load_general_plugins()
    return select


def test_plugins_register_it_once() -> None:
    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()
    plugin.register()
    backend = AttentionBackendEnum[releases.backend_name()]
    assert backend.get_class() is FlashsmithBackend
    assert FlashsmithBackend.get_name() == backend.name
    own_names = hasattr(AttentionBackendEnum, "register")
    assert backend.name == ("FLASHSMITH" if own_names else "CUSTOM")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0)])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"head_size": 64, "dtype": torch.float16},
        {"head_size": 256, "block_size": None},
        {"has_sink": True, "has_sliding_window": True},
        {"use_batch_invariant": True},
        {"attn_type": AttentionType.ENCODER_ONLY},
        {"attn_type": AttentionType.ENCODER_DECODER},
        {"kv_cache_dtype": "bfloat16", "block_size": 256},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e5m2", "head_size": 80},
    ],
)
def test_what_is_served_is_taken(
    change: dict[str, Any], capability: tuple[int, int], cuda: Any
) -> None:
    path = cuda(capability, DECODER._replace(**change))
    assert path == "flashsmith.integrations.vllm.backend.FlashsmithBackend"


@pytest.mark.parametrize(
    "case",
    [
        Unserved({"head_size": 520}, "head_size not supported"),
        Unserved({"head_size": 512}, "head_size 512 on L4 not supported", (8, 9)),
        Unserved(
            {"head_size": 512, "attn_type": AttentionType.ENCODER_ONLY},
            "head_size 512 on A100 not supported: no kernel of a step's own keys fits",
            (8, 0),
        ),
        Unserved({"head_size": 100}, "head_size not supported"),
        Unserved({"dtype": torch.float32}, "dtype not supported"),
        Unserved({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype not supported"),
        Unserved(
            {"kv_cache_dtype": "fp8", "head_size": 72}, "kv_cache_dtype fp8 with head_size 72"
        ),
        Unserved({"kv_cache_dtype": "float16"}, "kv_cache_dtype float16 with queries of"),
        Unserved({"block_size": 8}, "block_size not supported"),
        Unserved({"use_mla": True}, "MLA not supported"),
        Unserved({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        Unserved({}, "compute capability not supported", (7, 5)),
        Unserved({}, "compute capability not supported", (12, 0)),
    ],
    ids=lambda case: case.reason,
)
def test_what_is_not_served_is_refused_with_the_reason(case: Unserved, cuda: Any) -> None:
    with pytest.raises(ValueError, match=case.reason):
        cuda(case.capability, DECODER._replace(**case.change))


# Older releases do not say that a cache is distributed; there a layer refuses it.
if SAYS_RANKS:

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"head_size": 512}, ""),
            ({"kv_cache_dtype": "fp8"}, ""),
            ({"has_sliding_window": True}, "a window over a cache that is distributed"),
            (
                {"attn_type": AttentionType.ENCODER_DECODER},
                "cross attention over a cache that is distributed",
            ),
        ],
        ids=["d", "dtype", "window", "cross"],
    )
    def test_what_ranks_together_serve(change: dict[str, Any], reason: str, cuda: Any) -> None:
        asked = DECODER._replace(use_dcp=True, **change)
        if not reason:
            assert cuda((9, 0), asked)
            return
        with pytest.raises(ValueError, match=reason):
            cuda((9, 0), asked)


@pytest.mark.parametrize(
    ("attn_type", "ranks", "advice"),
    [
        (AttentionType.ENCODER_ONLY, 1, "kernel of a step's own keys fits; choose another backend"),
        (AttentionType.DECODER, 2, "keys fits; set decode_context_parallel_size to 1"),
        (AttentionType.ENCODER_DECODER, 2, "cross attention over .*; set decode_context_parallel"),
    ],
)
def test_a_layer_refuses_a_d_that_its_gpu_has_no_kernel_for(
    attn_type: str, ranks: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(impl, "device_of", lambda *_: device_spec("A100"))
    layer = impl.FlashsmithImpl(8, 512, 0.125, 2, attn_type=attn_type)
    with pytest.raises(NotImplementedError, match=advice):
        layer.kernels(16, torch.bfloat16, 4096, torch.device("cpu"), True, ranks)


@pytest.mark.parametrize("device", ["A100", "A10", "H100"])
def test_what_is_taken_has_kernels(device: str, cuda: Any) -> None:
    """A layer of what the backend takes finds a kernel for each step, on each GPU."""
    gpu, kinds = device_spec(device), (AttentionType.DECODER, AttentionType.ENCODER_ONLY)
    plugin_path = "flashsmith.integrations.vllm.backend.FlashsmithBackend"
    grid = itertools.product((64, 72, 256, 264, 512), kinds, ("auto", "fp8"), (False, True))
    for d, kind, cache, windowed in grid:
        asked = {"head_size": d, "attn_type": kind, "has_sliding_window": windowed}
        config = DECODER._replace(**asked, kv_cache_dtype=cache)
        layer = impl.FlashsmithImpl(
            *(8, d, 0.125, 2), sliding_window=9 if windowed else None, attn_type=kind,
            kv_cache_dtype=cache,
        )  # fmt: skip
        is_encoder = kind != AttentionType.DECODER
        problem = (
            layer.direct_kernels(torch.bfloat16, torch.device("cpu"), False)
            if is_encoder
            else layer._over_cache(16, torch.bfloat16, 4096, torch.device("cpu"), True)
        ).problem
        kernels = LayerKernels(problem, layer.split, gpu)
        try:
            taken = cuda((gpu.arch // 10, gpu.arch % 10), config) == plugin_path
        except ValueError:
            taken = False
        try:
            found = bool(kernels.config_for(4, 64))
        except ArgumentError:
            found = False
        # Rows of 8-bit floats are copied by 16 bytes, which the chooser does not check.
        assert taken == (found and not (cache == "fp8" and d % 16)), (asked, cache, taken, found)


def test_a_taken_name_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    from vllm.v1.attention.backends.registry import register_backend

    AttentionBackendEnum.CUSTOM.clear_override()
    register_backend(AttentionBackendEnum.CUSTOM, "another.Backend")
    try:
        plugin.register()
        # Releases that know names of one's own need no CUSTOM.
        is_needed = not hasattr(AttentionBackendEnum, "register")
        assert ("CUSTOM, is taken by another.Backend" in caplog.text) == is_needed
        assert AttentionBackendEnum.CUSTOM.get_path() == "another.Backend"
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()
        plugin.register()


@pytest.mark.parametrize("change", [{"alibi_slopes": [0.5] * 8}, {"attn_type": "unknown"}])
def test_a_layer_refuses_what_no_answer_covers(change: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="flashsmith: "):
        FlashsmithBackend.get_impl_cls()(8, 64, 0.125, 2, **change)
