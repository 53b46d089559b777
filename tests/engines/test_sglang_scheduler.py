"""SGLang's own scheduling drives layers through whole generations, in the emulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sglang.srt.mem_cache import allocation
from sglang.srt.runtime_context import get_context
from sglang_driver import Layer, prompts, server
from sglang_scheduler import ScheduledEngine

TOLERANCE = 0.02


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Slots are written into the engine's table by its loop for machines without Triton.
    monkeypatch.setattr(allocation, "support_triton", lambda backend: False)
    with server(), get_context().override_server_args(page_size=1):
        yield


@pytest.mark.parametrize("layer", [Layer(), Layer(window=20, softcap=3.0)], ids=["plain", "window"])
def test_chunked_prompts_and_prefix_hits(layer: Layer) -> None:
    engine = ScheduledEngine((layer,))
    checked = engine.serve(prompts(3, 5, 24, 40), 4)
    assert engine.chunks > 0
    assert checked.prefix_hits > 0
    assert len({name for _, name, _ in checked.outputs}) == 5
    assert checked.largest_error < TOLERANCE


def test_retracted_requests_resume() -> None:
    """The cache is full while two requests run: the engine takes one's slots back, and computes it
    again later."""
    engine = ScheduledEngine((Layer(),), slots=110)
    engine.full_after = 3
    texts = {f"request {it}": [(it * 31 + token) % 97 for token in range(25)] for it in range(2)}
    checked = engine.serve(texts, 20, chunk=1000)
    assert engine.retracted > 0
    assert len(checked.outputs) == 2 * 44
    assert checked.largest_error < TOLERANCE
