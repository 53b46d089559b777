"""Hides the differences between the supported releases of vLLM, 0.26 to 0.33."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

NAME, LATENT_NAME = "FLASHSMITH", "FLASHSMITH_MLA"
_BACKEND = "flashsmith.integrations.vllm.backend.FlashsmithBackend"
_LATENT_BACKEND = "flashsmith.integrations.vllm.latent_backend.FlashsmithLatentBackend"
_OLDEST, _NEWEST = (0, 26), (0, 33)


def register_backend() -> str:
    """Registers the backends, once per process. Returns '', or the reason why they could not be
    registered.

    Releases before 0.32 accept no new names: there the backend is called CUSTOM, unless another
    package has taken that name, and latent attention is not served.
    """
    if problem := unsupported(_installed()):
        return problem
    from vllm.v1.attention.backends import registry

    backends = registry.AttentionBackendEnum
    if NAME in backends.__members__:
        return ""
    if hasattr(backends, "register"):
        registry.register_backend(NAME, _BACKEND)
        registry.register_backend(LATENT_NAME, _LATENT_BACKEND)
        return ""
    if backends.CUSTOM.is_overridden():
        taken = backends.CUSTOM.get_path()
        return "" if taken == _BACKEND else f"its one free name, CUSTOM, is taken by {taken}"
    registry.register_backend(backends.CUSTOM, _BACKEND)
    return ""


def backend_name() -> str:
    """Returns the name under which the backend is registered, for `--attention-backend`."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return NAME if NAME in AttentionBackendEnum.__members__ else "CUSTOM"


def unsupported(release: str) -> str:
    """Returns why a release of vLLM is not supported, or ''. Development builds of supported
    releases count as supported, and so do builds whose version is unknown."""
    found = re.match(r"(\d+)\.(\d+)", release)
    minor = (int(found[1]), int(found[2])) if found else _NEWEST
    if _OLDEST <= minor <= _NEWEST or minor == (0, 0) or (minor == (0, 1) and "dev" in release):
        return ""
    supported = " to ".join(f"{major}.{minor}" for major, minor in (_OLDEST, _NEWEST))
    return f"vllm {release} is installed and {supported} are supported; install one of them"


def _installed() -> str:
    try:
        return version("vllm")
    except PackageNotFoundError:
        return ""


# --- decode context parallelism ------------------------------------------------------------------


def ranks_of_cache(kv_cache_spec: Any) -> tuple[int, int]:
    """Returns the number of ranks over which a cache is distributed, and this rank; (1, 0) if it is
    not distributed."""
    from vllm.distributed.parallel_state import get_dcp_group

    # Older releases have no such field: in these, every cache is distributed over the ranks.
    if not getattr(kv_cache_spec, "dcp_sharded", True):
        return 1, 0
    try:
        group = get_dcp_group()
    except AssertionError:  # the engine's groups are not initialised
        return 1, 0
    return group.world_size, group.rank_in_group


def dcp_combine() -> Any:
    """Returns the collective that merges the ranks' outputs and LSEs, as the engine's config
    selects it."""
    from vllm.config import get_current_vllm_config_or_none

    try:
        from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs, dcp_a2a_lse_reduce
    except ImportError:  # before 0.29
        from vllm.v1.attention.ops.common import cp_lse_ag_out_rs
        from vllm.v1.attention.ops.dcp_alltoall import dcp_a2a_lse_reduce

    config = get_current_vllm_config_or_none()
    is_a2a = config is not None and config.parallel_config.dcp_comm_backend == "a2a"
    return dcp_a2a_lse_reduce if is_a2a else cp_lse_ag_out_rs


class CacheLayouts:
    """The methods by which releases before 0.29 query a backend for the cache's shape and memory
    order. Later releases accept any layout if the backend lacks these methods."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Returns the cache's shape: (blocks, heads, tokens of a block, K and V)."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Returns the memory order of the dimensions of get_kv_cache_shape(). The layer dimension,
        if included, comes first in that shape."""
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        tokens_first = get_kv_cache_layout() == "NHD"
        if include_num_layers_dimension:
            return (1, 0, 3, 2, 4) if tokens_first else (1, 2, 0, 3, 4)
        return (0, 2, 1, 3) if tokens_first else (0, 1, 2, 3)
