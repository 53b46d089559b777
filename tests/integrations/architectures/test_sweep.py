"""All architectures of transformers on flashsmith's attention, against eager and sdpa.

The kernels are replaced by exact ones, so that whole models take milliseconds, and what is tested
is all that lies between a model and the kernels. `python tools/docs/architectures.py --record`
records what becomes of each, and docs/log/architectures.md says it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
transformers = pytest.importorskip("transformers", reason="needs transformers: it is not installed")
pytestmark = pytest.mark.torch

sys.path.insert(0, str(Path(__file__).parent))

import padded_attention  # noqa: E402
import records  # noqa: E402
from builders import Architecture, architectures  # noqa: E402
from outcomes import NOT_RUN, SERVED, WRONG, sweep, texts  # noqa: E402
from scenarios import SCENARIOS  # noqa: E402

RECORDED = records.read()
SAME_VERSION = RECORDED.transformers == transformers.__version__


@cache
def known() -> dict[str, Architecture]:
    return {it.name: it for it in architectures()}


@pytest.mark.full
@pytest.mark.parametrize("name", RECORDED.outcomes)
def test_nothing_is_wrong(name: str) -> None:
    """Nor other than recorded, in the version that the records are of."""
    if name not in known():
        assert not SAME_VERSION
        return
    outcomes = texts(sweep(known()[name]))
    assert not {it for it in outcomes.items() if records.kind(it[1]) == WRONG}
    expected = records.by_kind(RECORDED.outcomes[name])
    if SAME_VERSION and NOT_RUN not in expected.values():
        assert records.by_kind(outcomes) == expected


@pytest.mark.full
def test_all_architectures_are_recorded() -> None:
    if SAME_VERSION:
        assert known().keys() == RECORDED.outcomes.keys()


def test_none_is_recorded_as_wrong() -> None:
    kinds = {name: records.by_kind(it).values() for name, it in RECORDED.outcomes.items()}
    assert not [name for name, found in kinds.items() if WRONG in found]


def test_a_causal_model_that_sees_the_future_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(length_q: int, length_k: int, *_: object) -> object:
        return torch.ones(length_q, length_k, dtype=torch.bool)

    llama = Architecture("llama", "llama", "LlamaForCausalLM", "decoder")
    assert set(sweep(llama)) == set(SCENARIOS) - {"decoder-right"}
    monkeypatch.setattr(padded_attention, "visible", everything)
    assert {it.kind for it in sweep(llama).values()} == {WRONG}


def test_masks_of_chunks_are_served() -> None:
    """As mask tensors: transformers makes no compact masks of chunks."""
    llama4 = Architecture("llama4_text", "llama4_text", "Llama4ForCausalLM", "decoder")
    found = sweep(llama4, ["plain", "left", "dynamic"])
    assert {it.kind for it in found.values()} == {SERVED}


def test_the_page_says_what_is_recorded(load_tool: Callable[[str], ModuleType]) -> None:
    tool = load_tool("docs/architectures.py")
    assert tool.rewritten(tool.PAGE.read_text()) == tool.PAGE.read_text(), (
        "docs/log/architectures.md is out of date: python tools/docs/architectures.py"
    )
