"""DraftFactory: makes the backends of SGLang's draft models, and can also make this package's
backend.

SGLang's own factory knows a fixed set of names. Plugins may replace its classes.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import Any

from sglang.srt.speculative.draft_utils import DraftBackendFactory

from flashsmith.integrations.sglang.releases import NAME, create_backend

_DRAFTS = "flashsmith.integrations.sglang.drafts"


class DraftFactory(DraftBackendFactory):
    """The engine's factory, which also knows this package's backend."""

    _make: Callable[[], Any]

    def create_decode_backend(self) -> Any:
        self._make = lambda: import_module(_DRAFTS).FlashsmithDraftBackend(
            self.draft_model_runner, self.speculative_num_steps
        )
        return super().create_decode_backend()

    def create_draft_extend_backend(self) -> Any:
        self._make = lambda: create_backend(self.draft_model_runner)
        return super().create_draft_extend_backend()

    def _create_backend(
        self, backend_name: str, backend_map: dict[str, Any], *more: Any, **options: Any
    ) -> Any:
        create = super()._create_backend
        # From 0.5.18 on, the entries of the map also return the name that a backend gets.
        returns_names = "stamps_children" in signature(create).parameters
        known = {**backend_map, NAME: lambda: self._named() if returns_names else self._make()}
        return create(backend_name, known, *more, **options)

    def _named(self) -> tuple[str, Any]:
        return NAME, self._make()
