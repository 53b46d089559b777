"""vLLM finds the backend, takes it by name, and says why where it cannot serve."""

from __future__ import annotations

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

from flashsmith.integrations import vllm as plugin
from flashsmith.integrations.vllm import releases
from flashsmith.integrations.vllm.backend import FlashsmithBackend

DECODER = AttentionSelectorConfig(
    head_size=128,
    dtype=torch.bfloat16,
    kv_cache_dtype="auto",
    block_size=16,
    attn_type=AttentionType.DECODER,
)


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
        Unserved({"attn_type": AttentionType.ENCODER_DECODER}, "attention type"),
        Unserved({}, "compute capability not supported", (7, 5)),
        Unserved({}, "compute capability not supported", (12, 0)),
    ],
    ids=lambda case: case.reason,
)
def test_what_is_not_served_is_refused_with_the_reason(case: Unserved, cuda: Any) -> None:
    with pytest.raises(ValueError, match=case.reason):
        cuda(case.capability, DECODER._replace(**case.change))


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


@pytest.mark.parametrize("change", [{"alibi_slopes": [0.5] * 8}, {"attn_type": "encoder_decoder"}])
def test_a_layer_refuses_what_no_answer_covers(change: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="flashsmith: "):
        FlashsmithBackend.get_impl_cls()(8, 64, 0.125, 2, **change)
