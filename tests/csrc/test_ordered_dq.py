"""wgmma_backward with ordered_dq in the emulator: dq has the same bits under every schedule and for
every number of resident CTAs, and what goes wrong in the order is found."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shared_kernels
from test_wgmma_backward import AHEAD, HALVES, ROWS, SPLIT_HALVES, TURNS, WIDE

from flashsmith.builder.library_build import build_from
from flashsmith.builder.sources import package_sources
from flashsmith.errors import EmulatorError
from flashsmith.families import DType, Problem, Semantics, WgmmaBackwardKernelConfig, device_spec
from flashsmith.families.wgmma_backward.sets import shared_configs
from flashsmith.runtime.libraries import load_library, loaded_kernels
from flashsmith.verify import reference_of
from ptxlab.checks import all_checks

ORDERED = replace(AHEAD, ordered_dq=True)
# Pairs of CTAs, each with half of dQ's columns: one and a half panels, and two.
PAIRS_OF_HALVES, PAIRS_OF_PANELS = (shared_configs(DType.BF16, d)[1] for d in (192, 256))
SHARED = [PAIRS_OF_HALVES, replace(PAIRS_OF_PANELS, multicast=True)]
#: By rows, by turns of three persistent warpgroups, by columns in persistent CTAs, ...
OTHERS = [replace(cfg, ordered_dq=True) for cfg in (ROWS, TURNS, WIDE, HALVES, SPLIT_HALVES)]
OTHERS += SHARED
CAUSAL = Semantics("causal", uneven=True)
shared_kernels.want([ORDERED, PAIRS_OF_HALVES], CAUSAL)


def outcome(
    cfg: WgmmaBackwardKernelConfig,
    text: str,
    *,
    sm_count: int = 2,
    schedule_seed: int | None = None,
    **options: Any,
) -> tuple[bytes, tuple[str, ...], set[str]]:
    """The bits of dq, why gradients are wrong, and the kinds of findings.

    dq is fp32: rounded, other sums would mostly show the same bits.
    """
    problem = Problem.parse(f"{text} d{cfg.d_head} {cfg.dtype.name.lower()} backward")
    shared_kernels.load([cfg], problem.required_semantics(cfg))
    reference = reference_of(problem.computed)
    said = reference.options(problem, grad_dtype="float32", **options)
    case = reference.case(cfg, problem, kind="random", seed=1, options=said)
    checks = all_checks(cfg.family.is_deterministic(cfg))
    result = reference.run(
        cfg,
        case,
        lambda array: array,
        emulate=True,
        arch=replace(device_spec("H200"), sm_count=sm_count),
        observers=checks,
        schedule_seed=schedule_seed,
    )
    reasons = reference.compare(cfg, case, result.outputs).reasons
    kinds = {finding.kind for check in checks for finding in check.findings}
    return np.asarray(result.outputs["dq"]).tobytes(), reasons, kinds


def assert_repeatable(
    cfg: WgmmaBackwardKernelConfig, text: str, runs: list[tuple[int, int | None]], **options: Any
) -> None:
    """The same right bits with each (number of SMs, seed of the schedule)."""
    found = set()
    for sm_count, seed in runs:
        bits, reasons, kinds = outcome(cfg, text, sm_count=sm_count, schedule_seed=seed, **options)
        assert not reasons, (sm_count, seed)
        assert not kinds, (sm_count, seed)
        found.add(bits)
    assert len(found) == 1


def test_the_same_bits_under_every_schedule() -> None:
    """One CTA at a time, and many: nobody waits for a CTA that comes later."""
    assert ORDERED.family.is_deterministic(ORDERED)
    assert not AHEAD.family.is_deterministic(AHEAD)
    assert_repeatable(ORDERED, "b1 s100:300 h2:1 causal", [(1, None), (132, 5)])


def test_pairs_of_ctas_add_in_order() -> None:
    """Three pairs of blocks of keys, the last with one block: all add to the last queries, two to
    the first ones."""
    assert PAIRS_OF_HALVES.family.is_deterministic(PAIRS_OF_HALVES)
    runs: list[tuple[int, int | None]] = [(2, None), (132, 5)]
    assert_repeatable(PAIRS_OF_HALVES, "b1 s130:300 h1 causal", runs)


@pytest.mark.full
def test_without_the_order_bits_differ() -> None:
    """Or the tests here showed nothing."""
    found = {
        outcome(AHEAD, "b1 s100:300 h2:1 causal", sm_count=132, schedule_seed=seed)[0]
        for seed in (None, 4, 5, 6)
    }
    assert len(found) > 1


PROBLEMS: dict[str, dict[str, Any]] = {
    "b1 s300:300 h2:1 causal": {},
    "b1 s128:384 h1": {},
    "b2 s200:75 h1 causal": {"dlse": True},
    "b1 s75:500 h1 causal": {"sinks": True},
    "b1 s300:450 h2 window": {"left": 130, "right": 0},
    "b1 s450:300 h1 window": {"left": 70, "right": 140},
    "b3 s260:330 h2:1 causal packed": {"lens_q": (260, 0, 60), "lens_k": (330, 70, 200)},
    "b2 s200:400 h1 window softcap packed": {
        "lens_q": (200, 150), "lens_k": (400, 90), "left": 100, "right": 40,
    },
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("text", PROBLEMS)
@pytest.mark.parametrize("cfg", [ORDERED, *OTHERS], ids=str)
def test_every_mask_and_way_to_share_dq(cfg: WgmmaBackwardKernelConfig, text: str) -> None:
    """Rows without keys, keys that no row sees, sequences of any lengths."""
    runs: list[tuple[int, int | None]] = [(1, 2), (3, 1), (132, None)]
    assert_repeatable(cfg, text, runs, **PROBLEMS[text])


@contextmanager
def in_small_groups(
    cfg: WgmmaBackwardKernelConfig, semantics: Semantics, folder: Path
) -> Iterator[None]:
    """Groups of one head, or two where a head is one block of keys: all but the last go from the
    diagonal, for which problems of today's groups have 256 blocks of keys and more."""
    csrc = Path(shutil.copytree(package_sources(), folder / "csrc"))
    file = csrc / "wgmma_backward" / "key_block.cuh"
    constant = "kResidentCtas = Kernel::CFG.shared_dq ? 64 : 128;"
    assert file.read_text().count(constant) == 1
    file.write_text(file.read_text().replace(constant, "kResidentCtas = 1;"))
    library = build_from(csrc, [cfg], arch=90, semantics=semantics)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(loaded_kernels.kernels, (cfg, 90, semantics), load_library(library)[cfg])
        yield


@pytest.mark.full
def test_from_the_diagonal(tmp_path: Path) -> None:
    """The last keys and the diagonal first, but in the last group of heads: right, and the same
    bits of dq under every schedule. A group's order is part of the bits, as it is said in docs."""
    text = "b1 s100:300 h2 causal"
    usual = outcome(ORDERED, text, sm_count=132)[0]
    with in_small_groups(ORDERED, CAUSAL, tmp_path):
        assert_repeatable(ORDERED, text, [(1, None), (132, 5)])
        assert outcome(ORDERED, text, sm_count=132)[0] != usual


@pytest.mark.full
@pytest.mark.parametrize(
    ("cfg", "text"),
    [
        (cfg, text)
        for number, cfg in enumerate([ORDERED, *OTHERS])
        for text in [*PROBLEMS, *PROBLEMS][number : number + 8 : 4]
    ],
    ids=str,
)
def test_every_mask_from_the_diagonal(
    cfg: WgmmaBackwardKernelConfig, text: str, tmp_path: Path
) -> None:
    alone = re.sub(r" h(2:)?1( |$)", r" h2\2", text)
    problem = Problem.parse(f"{alone} d{cfg.d_head} {cfg.dtype.name.lower()} backward")
    with in_small_groups(cfg, problem.required_semantics(cfg), tmp_path):
        assert_repeatable(cfg, alone, [(1, 2), (3, 1), (132, None)], **PROBLEMS[text])


@pytest.mark.full
def test_groups_of_heads_without_an_order(tmp_path: Path) -> None:
    with in_small_groups(WIDE, CAUSAL, tmp_path):
        _, reasons, kinds = outcome(WIDE, "b2 s100:300 h4:2 causal")
    assert not reasons
    assert not kinds


def changed(cfg: WgmmaBackwardKernelConfig, change: Callable[[str], str]) -> dict[str, str]:
    """The PTX of its kernels, by entry, with a change of the main one's."""
    kernel = loaded_kernels.get(cfg, 90, CAUSAL)
    entry = kernel.entry.ptx_entry
    text = change(kernel.modules[entry])
    assert text != kernel.modules[entry]
    return {**kernel.modules, entry: text}


#: Changes of the kernel's PTX that leave the order of sums to chance, or to nobody.
MISTAKES: dict[str, tuple[str, str]] = {
    "no acquire": (r"ld\.acquire\.gpu\.global", "ld.relaxed.gpu.global"),
    "acquire in the CTA": (r"ld\.acquire\.gpu\.global", "ld.acquire.cta.global"),
    "no fence": (r"fence\.acq_rel\.gpu;", ""),
    "no wait": (r"(ld\.acquire\.gpu\.global\.u32 (%r\d+), .*)", r"\1\n mov.b32 \2, TURN;"),
    "turn not passed on": (r"st\.relaxed\.gpu\.global\.u32 .*;", ""),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, new = MISTAKES[name]
    text = "b1 s60:250 h1 causal"
    shared_kernels.load([ORDERED], CAUSAL)

    def change(ptx: str) -> str:
        if "TURN" not in new:
            return re.sub(pattern, new, ptx)
        # What the loop compares the counter with.
        loop = re.search(
            r"ld\.acquire[^;]* (%r\d+), .*?setp\.ne\S* [^,]*, (%r\d+), (%r\d+)", ptx, re.S
        )
        assert loop is not None
        loaded, *compared = loop.groups()
        turn = next(one for one in compared if one != loaded)
        return re.sub(pattern, new.replace("TURN", turn), ptx)

    kernel = replace(loaded_kernels.get(ORDERED, 90, CAUSAL))
    kernel.__dict__["modules"] = changed(ORDERED, change)
    monkeypatch.setitem(loaded_kernels.kernels, (ORDERED, 90, CAUSAL), kernel)
    if name == "turn not passed on":
        with pytest.raises(EmulatorError, match=r"deadlock: .*to change from 0"):
            outcome(ORDERED, text, sm_count=132)
    else:
        assert "race-waw" in outcome(ORDERED, text, sm_count=132)[2]
