"""The attention backend FLASHSMITH of vLLM 0.26 to 0.33: `vllm serve MODEL --attention-backend
FLASHSMITH`, or FLASHSMITH_MLA for models with latent attention.

vLLM finds ``register`` through the entry point group `vllm.general_plugins`, in every process.
"""

from __future__ import annotations

import logging

_logger = logging.getLogger("flashsmith")


def register() -> None:
    """Registers the backend with the installed vLLM. Never raises an exception: if the registration
    fails, logs one line that says why."""
    try:
        from flashsmith.integrations.vllm.releases import register_backend

        problem = register_backend()
    except Exception as error:  # a plugin must not stop the engine
        problem = f"{type(error).__name__}: {error}"
    if problem:
        _logger.warning("flashsmith: no attention backend for this vLLM: %s", problem)
