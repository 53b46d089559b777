"""Mistakes in how kernels over a latent cache call score and mask functions: in coordinates, in the
order of the steps, and in scales. All must be caught."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from latent_calls import CODES, PLAIN, LatentCache, LatentEmulation, curved_in_documents
from operation_victims import SourcePatch, StopAtFinding, patched_modules, void_mistakes

from flashsmith.errors import EmulatorError
from flashsmith.families import KernelConfig
from flashsmith.runtime.libraries import LoadedKernel
from ptxlab.checks import all_checks


class Victim:
    """A config's kernel of curved scores in documents: over packed sequences of which one has more
    rows than a tile, or over 8-bit floats whose scale is in a tensor."""

    def __init__(self, cfg: KernelConfig, *, as_tensor: bool) -> None:
        queries, self.lens = (5, 1, 0, 4), (470, 150, 0, 37)
        self.cache = LatentCache(self.lens, queries, seed=3, coded=cfg == CODES)
        score, mask = curved_in_documents(self.cache)
        self.emulation = LatentEmulation(cfg, score, mask, packed=True, scale_as_tensor=as_tensor)
        self.config, self.arch = cfg, 80
        self.semantics = self.emulation.semantics

    def says(self, changed: LoadedKernel | None = None) -> str:
        """What is wrong with a changed kernel's outputs, or what the emulator found."""
        checks = all_checks()
        watching = [*checks, StopAtFinding(checks)]
        try:
            return self.emulation.wrong(self.cache, observers=watching, changed=changed)
        except EmulatorError as stopped:
            return str(stopped)


@cache
def victim(name: str) -> Victim:
    made: dict[str, tuple[KernelConfig, bool]] = {"plain": (PLAIN, False), "scales": (CODES, True)}
    config, as_tensor = made[name]
    return Victim(config, as_tensor=as_tensor)


_PART = "mma_sync_mla/part.cuh"
MISTAKES: dict[str, tuple[SourcePatch, ...]] = {
    "plain": (
        SourcePatch("keys of the first block", _PART,
                    "return tile.head(lanes_row(r)); }, block * Kernel::B_c);",
                    "return tile.head(lanes_row(r)); }, 0);"),
        SourcePatch("rows instead of queries", _PART, "return tile.token(lanes_row(r)); },",
                    "return lanes_row(r); },"),
        SourcePatch("the head of the lane's first row", _PART,
                    "return tile.head(lanes_row(r)); }, block",
                    "return tile.head(lanes_row(0)); }, block"),
        SourcePatch("the first sequence's tensors", _PART,
                    "ProgramSequence{tile.batch, tile.q_count, tile.k_count}",
                    "ProgramSequence{0, tile.q_count, tile.k_count}"),
        SourcePatch("the capacity as length", _PART,
                    "ProgramSequence{tile.batch, tile.q_count, tile.k_count}",
                    "ProgramSequence{tile.batch, tile.q_count, tile.args.capacity}"),
        SourcePatch("the longest sequence's queries", _PART,
                    "ProgramSequence{tile.batch, tile.q_count, tile.k_count}",
                    "ProgramSequence{tile.batch, tile.args.seq_q, tile.k_count}"),
        SourcePatch("scores as they were", _PART,
                    "[&](const auto&... at) { change_by_program<SEMANTICS>(S, at...); }",
                    "[&](const auto&...) {}"),
        SourcePatch("nothing is hidden", _PART,
                    "[&](const auto&... at) { hide_by_program<SEMANTICS>(S, at...); }",
                    "[&](const auto&...) {}"),
    ),
    "scales": (
        SourcePatch("the scale of no cache", _PART,
                    "scaled.scale = __fmul_rn(scaled.scale, row_scale(args));", ";"),
        SourcePatch("the scale once more behind the function", _PART,
                    "softmax(SEMANTICS.program_scores ? args.scale_log2",
                    "softmax(false ? args.scale_log2"),
    ),
}  # fmt: skip


@cache
def _is_right(name: str) -> str:
    return victim(name).says()


# One mistake is enough for a plain run.
QUICK = ("rows instead of queries",)


def test_mistakes_are_in_the_sources() -> None:
    assert void_mistakes(it for mistakes in MISTAKES.values() for it in mistakes) == []


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        pytest.param(
            *(name, it), id=f"{name}: {it}", marks=[] if it.name in QUICK else [pytest.mark.full]
        )
        for name, mistakes in MISTAKES.items()
        for it in mistakes
    ],
)
def test_mistakes_in_the_sources_are_caught(name: str, mistake: SourcePatch) -> None:
    own = victim(name)
    changed = replace(own.emulation.kernel)
    changed.__dict__["modules"] = patched_modules(own, mistake)  # type: ignore[arg-type]
    assert _is_right(name) == ""
    assert own.says(changed) != ""
