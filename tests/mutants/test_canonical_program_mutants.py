"""Mistakes in canonical kernels of score and mask functions: all must be caught, by bits that are
not those of another family's kernel."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
from function_calls import KERNELS, QUERIES, Functions, cached, forward, semantics, tensors
from operation_victims import OperationVictim, SourcePatch, patched_modules, void_mistakes
from oracle import CHUNK
from sequence import differing

from flashsmith.errors import EmulatorError
from flashsmith.families import KernelConfig
from flashsmith.runtime.libraries import loaded_kernels

COUNT, LENGTHS = 7, ((330, False), (CHUNK + 330, True))
_LOOPS, _CONSUMER = "mma_sync/main_loops.cuh", "sm90_forward/consumer.cuh"
_PRODUCER, _RUN = "wgmma/producer.cuh", "mma_sync_decode/canonical_run.cuh"
_TILE = "mma_sync_decode/program_tile.cuh"

#: The kernel, and a mistake in it.
MISTAKES = (
    ("mma_sync", SourcePatch("chunks of positions", _LOOPS,
                             "b.block_at(position) / kChunkBlocks", "position / kChunkBlocks")),
    ("mma_sync", SourcePatch("the last chunk alone", _LOOPS,
                             "Kernel::has_lists ? merges :", "Kernel::has_lists ? false :")),
    ("wgmma", SourcePatch("one chunk", _CONSUMER, "if (chunk_at(middle) == chunk)", "if (true)")),
    ("wgmma", SourcePatch("the entry of the block before", _CONSUMER,
                          "read_entry();\n        start_QK_gemm();\n        finish_QK_gemm<0, true>"
                          "();\n        output.drain();",
                          "start_QK_gemm();\n        finish_QK_gemm<0, true>();\n"
                          "        output.drain();")),
    ("wgmma", SourcePatch("a block twice", _PRODUCER, "i + 2 < end ? entries[i + 2]",
                          "i + 2 < end ? entries[i + 1]")),
    ("decode", SourcePatch("hidden elements", _RUN, "hide_by_program<SEMANTICS>(scores, at...);",
                           "")),
    ("decode", SourcePatch("positions of the next key", _RUN, "this->with_program(\n"
                           "                key, [&](const auto&... at) { change",
                           "this->with_program(\n"
                           "                key + 1, [&](const auto&... at) { change")),
    ("decode", SourcePatch("scores of the step behind", _RUN, "multiply_keys(next_step, next,",
                           "multiply_keys(step + 1, next,")),
    ("decode", SourcePatch("the steps that follow", _RUN, "start_step(copied, ",
                           "start_step(step + kStages - 1, ")),
    ("decode", SourcePatch("steps of each warp's own keys", _TILE,
                           "kSharesStages = Kernel::shares_stages || Kernel::canonical",
                           "kSharesStages = Kernel::shares_stages")),
)  # fmt: skip


@cache
def expected(name: str) -> list[Any]:
    """The rows from a kernel that is not changed, of another family."""
    other = KERNELS.wgmma if name == "mma_sync" else KERNELS.mma_sync
    found = [_rows(other, *it) for it in LENGTHS]
    if name != "decode":
        return found
    return [(o[:, -COUNT:], lse[..., -COUNT:]) for o, lse in found]


def _rows(cfg: KernelConfig, keys: int, omits_chunk: bool) -> Any:
    functions, (q, k, v) = Functions.draw(keys, omits_chunk=omits_chunk), tensors(keys)
    if cfg == KERNELS.decode:
        return cached(functions, q[:, QUERIES - COUNT :], k, v)
    return forward(cfg, functions, q, k, v)


def test_mistakes_are_in_the_sources() -> None:
    assert void_mistakes((it for _, it in MISTAKES)) == []


@pytest.mark.full
@pytest.mark.parametrize(("name", "mistake"), MISTAKES, ids=str)
def test_mistakes(name: str, mistake: SourcePatch) -> None:
    cfg = getattr(KERNELS, name)
    wanted = expected(name)
    victim = OperationVictim(cfg, semantics(), (), arch=90)
    changed = replace(victim.kernel)
    changed.__dict__["modules"] = {**victim.kernel.modules, **patched_modules(victim, mistake)}
    with patch.dict(
        loaded_kernels.kernels, {(victim.config, victim.arch, victim.semantics): changed}
    ):
        try:
            found = [_rows(cfg, *it) for it in LENGTHS]
        except EmulatorError:
            return
    assert any(
        differing(got, want)
        for ours, theirs in zip(found, wanted, strict=True)
        for got, want in zip(ours, theirs, strict=True)
    )
