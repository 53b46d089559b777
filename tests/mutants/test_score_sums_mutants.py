"""Mistakes in the sources of sums of score gradients: all must be caught."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
from operation_victims import OperationVictim, SourcePatch, patched_modules, void_mistakes
from score_sums_calls import CONFIG, drawn_for, wrong_sums

from flashsmith.errors import EmulatorError
from flashsmith.families import Semantics
from flashsmith.runtime.libraries import loaded_kernels

ARCH = CONFIG.OLDEST_ARCH
DENSE, INFINITE = ("dense", "alibi_in_documents"), ("dense", "minus_infinity")
_KERNEL = "score_sums/kernel.cuh"

#: Name, old and new text, and the call, axis and sizes of batch and heads that show it.
MISTAKES = (
    ("another diagonal", "shift = thread - (kTile - 1);", "shift = thread - kTile;",
     DENSE, "distances", ()),
    ("the strip after", "first.k - first.q + tiles(args.seq_q) - 1,",
     "first.k - first.q + tiles(args.seq_q) - 2,", DENSE, "distances", ()),
    ("rows of the tile before", "!is_head || at.q != loaded.q;", "!is_head;", DENSE, "keys", ()),
    ("keys of the tile before", "!is_head || at.k != loaded.k;", "!is_head;", DENSE, "rows", ()),
    ("tiles of the head before", "at.batch == loaded.batch && at.head == loaded.head;",
     "at.batch == loaded.batch;", DENSE, "elements", (2, 1)),
    ("the first head only", "args.to.heads == 1 && ++at.head < args.heads_q",
     "false", DENSE, "elements", (2, 1)),
    ("the first sequence only", "args.to.batch == 1 ? at.batch + 1 : args.batch;", "args.batch;",
     DENSE, "elements", (1, 4)),
    ("columns as rows", "by_rows ? place(thread, i) : place(i, thread)",
     "by_rows ? place(i, thread) : place(thread, i)", DENSE, "rows", ()),
    ("the slope left out", "P * (dP - D[r]) * slope;", "P * (dP - D[r]);", DENSE, "rows", ()),
    ("an infinite slope multiplied", "return P == 0.0f ? 0.0f : P *", "return P *",
     INFINITE, "keys", ()),
    ("hidden elements", "program.hide(dP, query_of_lane, key_of_lane);", "", DENSE, "rows", ()),
    ("keys past the end", "Kernel::masked && visible.needs_mask(at.k)", "false",
     INFINITE, "rows", ()),
    ("tiles overwritten while they are read",
     "__syncthreads();  // all warps have read the previous tiles\n        if",
     "if", DENSE, "rows", ()),
    ("sums in tiles that are read",
     "__syncthreads();  // all warps have read the tiles\n        store",
     "store", DENSE, "rows", ()),
    ("the statistics of other rows", "row + 16 * warp + lane / 4;", "row + 16 * warp + lane % 4;",
     DENSE, "rows", ()),
)  # fmt: skip


def said(
    case: tuple[str, str], axis: str, sizes: tuple[int, ...], mistake: SourcePatch | None
) -> str:
    """What is wrong with the sums of kernels that have the mistake."""
    sinks = case is DENSE
    _, made, _ = drawn_for(*case, sinks)
    victim = OperationVictim(CONFIG, Semantics(uneven=True, program=made.program), ())
    changed = replace(victim.kernel)
    if mistake is not None:
        changed.__dict__["modules"] = patched_modules(victim, mistake)
    key = victim.config, victim.arch, victim.semantics
    shape = (*sizes, 150, 201) if sizes else ()
    with patch.dict(loaded_kernels.kernels, {key: changed}):
        try:
            return wrong_sums(*case, axis, shape, sinks=sinks, arch=ARCH)
        except EmulatorError as stopped:
            return str(stopped)


def test_mistakes_are_in_the_sources() -> None:
    assert (
        void_mistakes((SourcePatch(name, _KERNEL, old, new) for name, old, new, *_ in MISTAKES))
        == []
    )


@pytest.mark.full
@pytest.mark.parametrize("mistake", MISTAKES, ids=[it[0] for it in MISTAKES])
def test_mistakes(mistake: tuple[str, str, str, tuple[str, str], str, tuple[int, ...]]) -> None:
    name, old, new, case, axis, sizes = mistake
    assert said(case, axis, sizes, None) == ""
    assert said(case, axis, sizes, SourcePatch(name, _KERNEL, old, new)) != ""
