"""Hides the differences between the supported releases of SGLang, 0.5.16 to 0.5.23."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

NAME = "flashsmith"
_BACKEND = "flashsmith.integrations.sglang.backend"
_LATENT_BACKEND = "flashsmith.integrations.sglang.latent_backend"
_DRAFT_FACTORY = "flashsmith.integrations.sglang.draft_factory"
_OLDEST, _NEWEST = (0, 5, 16), (0, 5, 23)


def register_backend() -> str:
    """Registers the backend, once per process. Returns '', or the reason why the backend could not
    be registered.

    An entry in the list of deterministic choices makes the backend usable with
    `--enable-deterministic-inference`; an entry in the third list keeps the radix cache in that
    mode.
    """
    if problem := unsupported(_installed()):
        return problem
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    for choices, add in (
        (server_args.ATTENTION_BACKEND_CHOICES, server_args.add_attention_backend_choices),
        (
            server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
            server_args.add_deterministic_attention_backend_choices,
        ),
        (
            server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
            server_args.add_radix_supported_deterministic_attention_backend_choices,
        ),
    ):
        if NAME not in choices:
            add([NAME])
    register_attention_backend(NAME)(create_backend)
    _register_draft_backends()
    return ""


@cache
def _register_draft_backends() -> None:
    """Replaces the engine's factory of backends for draft models, which knows only a fixed set of
    names, by a factory that also knows this backend. The engine makes the replacement after all
    plugins are registered."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    target = f"{DraftBackendFactory.__module__}.{DraftBackendFactory.__qualname__}"
    factory = import_module(_DRAFT_FACTORY).DraftFactory
    HookRegistry.register(target, factory, HookType.REPLACE)


def create_backend(model_runner: Any, **options: Any) -> Any:
    """Returns the backend for a model; which backend it is depends on what the model's caches
    hold."""
    from sglang.srt.configs.model_config import AttentionArch

    if model_runner.model_config.attention_arch == AttentionArch.MLA:
        return import_module(_LATENT_BACKEND).FlashsmithLatentBackend(model_runner, **options)
    return import_module(_BACKEND).FlashsmithBackend(model_runner, **options)


def unsupported(release: str) -> str:
    """Returns why a release of SGLang is not supported, or ''. Development builds of supported
    releases count as supported, and so do builds whose version is unknown."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", release)
    number = (int(found[1]), int(found[2]), int(found[3])) if found else _NEWEST
    if _OLDEST <= number <= _NEWEST or number == (0, 0, 0):
        return ""
    supported = " to ".join(".".join(map(str, it)) for it in (_OLDEST, _NEWEST))
    return f"sglang {release} is installed and {supported} are supported; install one of them"


def _installed() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return ""


# --- the server's settings -----------------------------------------------------------------------


def is_deterministic(model_runner: Any) -> bool:
    """Whether the server was started with --enable-deterministic-inference."""
    try:
        from sglang.srt.runtime_context import get_exec
    except ImportError:  # releases that do not group the settings yet
        return bool(model_runner.server_args.enable_deterministic_inference)
    return bool(get_exec().deterministic.enable_deterministic_inference)


def cache_name(model_runner: Any) -> str:
    """Returns the server's name for the element type of its caches, such as 'fp8_e4m3' or
    'auto'."""
    name = getattr(model_runner, "kv_cache_dtype_str", None)
    return str(name or model_runner.server_args.kv_cache_dtype)


def most_tokens(model_runner: Any) -> int:
    """Returns the largest number of tokens of one request in a step."""
    try:
        from sglang.srt.runtime_context import get_schedule
    except ImportError:
        chunk = model_runner.server_args.chunked_prefill_size
    else:
        chunk = get_schedule().chunked_prefill_size
    context = int(model_runner.model_config.context_len)
    return min(chunk, context) if chunk and chunk > 0 else context


def speculative_settings(model_runner: Any) -> Any:
    """Returns the object that has the server's settings of speculative decoding."""
    try:
        from sglang.srt.runtime_context import get_spec
    except ImportError:
        return model_runner.server_args
    return get_spec()


def draft_settings(model_runner: Any) -> tuple[int, int]:
    """Returns a draft's number of branches at each token, and the draft's length in tokens."""
    settings = speculative_settings(model_runner)
    return settings.speculative_eagle_topk or 0, settings.speculative_num_draft_tokens or 0


# --- where a step's keys and values go -----------------------------------------------------------


def window_slots(model_runner: Any, forward_batch: Any) -> Any:
    """Returns the slots of the step's tokens in the pool that serves layers with a window."""
    try:
        from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind
    except ImportError:  # releases whose steps do not plan their slots yet
        pool = model_runner.token_to_kv_pool
        return pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)
    translator = model_runner.kv_index_translator
    return translator.write_ids(forward_batch, IdSpaceKind.SLIDING_WINDOW)


def write_location(forward_batch: Any, window: Any) -> Any:
    """Returns the location argument for set_kv_buffer of the pools: the step's slots, together with
    the step's slots in the pool of layers with a window."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    if hasattr(KVWriteLoc, "for_batch"):
        return KVWriteLoc.for_batch(forward_batch, swa_loc=window)
    return KVWriteLoc(forward_batch.out_cache_loc, window)


def written_slots(location: Any, in_window_pool: bool) -> Any:
    """Returns the slots of a location, in the pool of layers with a window or in the other pool."""
    if in_window_pool:
        return location.swa_loc
    return location.loc if location.full_loc is None else location.full_loc
