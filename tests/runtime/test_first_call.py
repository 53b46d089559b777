"""What a process's first call leaves out: modules that it does not need, records of tables that
cannot matter, and collections of garbage."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from flashsmith.builder import library_for
from flashsmith.chooser import choose
from flashsmith.chooser.choice import _relevant_winners
from flashsmith.chooser.winners import WinnersTable
from flashsmith.families import device_spec
from flashsmith.paused_collection import paused_collection

H200 = device_spec("H200")
CALL = """
import sys

import torch
import flashsmith
import flashsmith.integrations.sdpa

q = torch.ones(1, 64, 1, 64, dtype=torch.float16, requires_grad=True)
assert flashsmith.attention(q, q, q).requires_grad
flashsmith.sdpa(*[q.detach().transpose(1, 2)] * 3, emulate=True)
found = {"torch._dynamo", "flashsmith.builder.library_build"} & {*sys.modules}
assert not found, found
"""


@pytest.mark.torch
def test_a_first_call_imports_neither_a_tracer_nor_the_builder() -> None:
    """torch._dynamo takes a second, and tracers import it themselves."""
    for words in ("b1 s64 h1 d64 fp16", "b1 s64 h1 d64 fp16 backward"):
        choice = choose(words, 80)
        semantics = choice.problem.required_semantics(choice.config)
        configs = {choice.config, *([choice.repeatable.config] if choice.repeatable else [])}
        for config in configs:
            library_for([config], semantics=semantics)
    done = subprocess.run(
        [sys.executable, "-P", "-c", CALL], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_records_that_are_left_out_change_no_choice() -> None:
    whole = WinnersTable.merged()
    for d_head in (64, 128, 256):
        table = _relevant_winners(90, d_head)
        assert 0 < len(table) < len(whole)
        assert {entry.key.d_head for entry in table if entry.key.arch == 90} >= {d_head}
        for words in ("causal", "decode causal", "backward", "window packed", "canonical"):
            for size in ("b1 s4096 h16", "b8 s1000 h32:8"):
                problem = f"{size} d{d_head} bf16 {words}"
                one, other = (choose(problem, H200, table=it) for it in (table, whole))
                assert one == other, problem
    # Which architectures are known is known, too, where none of a d_head was measured.
    assert {entry.key.arch for entry in _relevant_winners(90, 72)} == {
        entry.key.arch for entry in whole
    }


def test_collection_is_paused_and_goes_on() -> None:
    assert gc.isenabled()
    with paused_collection():
        assert not gc.isenabled()
        with paused_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="inside"), paused_collection():
        raise ValueError("inside")
    assert gc.isenabled()
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()  # as the caller left it
    finally:
        gc.enable()
