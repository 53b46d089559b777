"""Makes this folder's helper modules importable by its tests; a pretended GPU for peers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flashsmith.benchmark import cudnn_peers, flashinfer_peers, flex_peers, peers

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def torch_is_there(monkeypatch) -> None:
    """Peers find a GPU."""
    for module in (peers, flex_peers, flashinfer_peers, cudnn_peers):
        monkeypatch.setattr(module, "torch_absence", lambda: None)
