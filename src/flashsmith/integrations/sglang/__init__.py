"""The attention backend flashsmith of SGLang 0.5.16 to 0.5.23: `sglang serve --model-path MODEL
--attention-backend flashsmith`.

SGLang finds ``register`` through the entry point group `sglang.srt.plugins`, in every process.
"""

from __future__ import annotations

import logging

_logger = logging.getLogger("flashsmith")


def register() -> None:
    """Registers the backend with the installed SGLang. Never raises an exception: if the
    registration fails, logs one line that says why."""
    try:
        from flashsmith.integrations.sglang.releases import register_backend

        problem = register_backend()
    except Exception as error:  # a plugin must not stop the engine
        problem = f"{type(error).__name__}: {error}"
    if problem:
        _logger.warning("flashsmith: no attention backend for this SGLang: %s", problem)
