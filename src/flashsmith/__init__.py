"""flashsmith: flash-attention kernels as Python configs, run on a GPU or in an emulator.

Names load on first use, so that `import flashsmith` is quick and imports no framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flashsmith.paused_collection import paused_collection

if TYPE_CHECKING:
    from flashsmith import masks as masks
    from flashsmith import parallel as parallel
    from flashsmith import scores as scores
    from flashsmith.chooser.attention import attention
    from flashsmith.chooser.backward import backward
    from flashsmith.chooser.choice import choose
    from flashsmith.chooser.decode import attention_with_cache
    from flashsmith.chooser.explain_functions import explain
    from flashsmith.chooser.merge import merge_attention
    from flashsmith.chooser.write_slots import write_slots
    from flashsmith.families import (
        DeviceSpec,
        DType,
        FlashBackwardKernelConfig,
        FlashDecodeKernelConfig,
        FlashForwardKernelConfig,
        Problem,
        Semantics,
        WgmmaBackwardKernelConfig,
        WgmmaDqKernelConfig,
        WgmmaForwardKernelConfig,
        device_spec,
        get_kernel_configs,
        parse_kernel_name_into_config,
    )
    from flashsmith.integrations.flash_attn import (
        flash_attn_func,
        flash_attn_varlen_func,
        flash_attn_with_kvcache,
    )
    from flashsmith.integrations.flex_attention import flex_attention
    from flashsmith.integrations.sdpa import sdpa
    from flashsmith.runtime import Gradients, forward, forward_timed, plan_forward

    __version__: str

_HOME = {
    "DType": "flashsmith.families",
    "DeviceSpec": "flashsmith.families",
    "FlashBackwardKernelConfig": "flashsmith.families",
    "FlashDecodeKernelConfig": "flashsmith.families",
    "FlashForwardKernelConfig": "flashsmith.families",
    "Gradients": "flashsmith.runtime",
    "WgmmaBackwardKernelConfig": "flashsmith.families",
    "WgmmaDqKernelConfig": "flashsmith.families",
    "WgmmaForwardKernelConfig": "flashsmith.families",
    "Problem": "flashsmith.families",
    "Semantics": "flashsmith.families",
    "device_spec": "flashsmith.families",
    "get_kernel_configs": "flashsmith.families",
    "parse_kernel_name_into_config": "flashsmith.families",
    "attention": "flashsmith.integrations.traceable",
    "attention_with_cache": "flashsmith.integrations.traceable",
    "backward": "flashsmith.integrations.traceable",
    "choose": "flashsmith.chooser.choice",
    "explain": "flashsmith.chooser.explain_functions",
    "flash_attn_func": "flashsmith.integrations.flash_attn",
    "flash_attn_varlen_func": "flashsmith.integrations.flash_attn",
    "flash_attn_with_kvcache": "flashsmith.integrations.flash_attn",
    "flex_attention": "flashsmith.integrations.flex_attention",
    "forward": "flashsmith.runtime",
    "merge_attention": "flashsmith.integrations.traceable",
    "forward_timed": "flashsmith.runtime",
    "plan_forward": "flashsmith.runtime",
    "sdpa": "flashsmith.integrations.sdpa",
    "write_slots": "flashsmith.integrations.traceable",
}

__all__ = [
    "DType",
    "DeviceSpec",
    "FlashBackwardKernelConfig",
    "FlashDecodeKernelConfig",
    "FlashForwardKernelConfig",
    "Gradients",
    "Problem",
    "Semantics",
    "WgmmaBackwardKernelConfig",
    "WgmmaDqKernelConfig",
    "WgmmaForwardKernelConfig",
    "__version__",
    "attention",
    "attention_with_cache",
    "backward",
    "choose",
    "device_spec",
    "explain",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "forward",
    "forward_timed",
    "get_kernel_configs",
    "merge_attention",
    "parse_kernel_name_into_config",
    "plan_forward",
    "sdpa",
    "write_slots",
]


def _loaded(name: str) -> Any:
    if name == "__version__":
        value: Any = import_module("importlib.metadata").version("flashsmith")
    elif name in ("masks", "parallel", "scores"):
        value = import_module(f"flashsmith.{name}")
    elif name in _HOME:
        with paused_collection():
            value = getattr(import_module(_HOME[name]), name)
    elif not name[:1].isupper():
        # For example a module: an import statement looks for it here first. All earlier names are
        # names of classes.
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        # Not kept as an attribute, so that every use warns.
        return import_module("flashsmith.families.earlier_names").getter("flashsmith")(name)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # type checkers would accept any attribute of a module with __getattr__
    __getattr__ = _loaded


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
