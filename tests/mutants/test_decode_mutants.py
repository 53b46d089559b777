"""Mutants of the kernels of attention over a cache: of their PTX, of their sources, and of their
plans. All must be detected, except those with a proof that they change nothing.

The default run has wrong plans and a few mutants of synchronisation. ``-m full`` has the whole
sample: every mutant of synchronisation, some of each other operator, and every mistake in the
sources.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import shared_kernels
from decode_mistakes import MISTAKES, AskedDecode
from guessed_lengths import GUESS, asked_by_loads, guessing, wrong_in_warp
from hopper_mutant_runs import Noticed
from mutant_suite import (  # noqa: F401 - the tests are tests of this file
    Equivalent,
    MutantSuite,
    test_exceptions_name_mutants,
    test_mistakes_are_caught,
    test_mistakes_are_in_the_sources,
    test_mutants_are_caught,
    test_the_kernels_themselves_are_right,
    test_wrong_plans_are_caught,
)
from mutants import operators
from operation_victims import (
    ChangedPlan,
    OperationVictim,
    SourcePatch,
    patched_modules,
    void_mistakes,
)

from flashsmith.builder.sources import package_sources
from flashsmith.families import Problem, Semantics, device_spec
from flashsmith.families import parse_kernel_name_into_config as config
from flashsmith.runtime.emulation import run_in_emulator
from flashsmith.runtime.launch_plan import Launch
from flashsmith.runtime.operation_run import prepare_operation
from ptxlab.checks import all_checks
from ptxlab.interface import Finding


def _turned(pairs: int, d: int, dtype: str | None = None, page: int = 7) -> AskedDecode:
    """A few keys, and rows whose loops over pairs and elements run all that is unrolled."""
    return AskedDecode(
        f"b2 s3:20 h4:2 d{d} window softcap packed page{page}",
        options={
            "append": True,
            "rotary": "halves" if dtype else "interleaved",
            "rotary_half": pairs,
            "rotary_dtype": dtype,
            "window": (9, 0),
            "lens_q": (3, 2),
            "lens_k": (20, 11),
        },
    )


# Keys behind the longest sequence, so that caches are too large for their sequences to be one run
# each.
LONG = 2100

#: Sequences that have keys, of so many: of a hundred some of a lane's every first, second and
#: further ones, and more of these than of those four behind each; of 32 those whose lanes no step
#: of a sum over the warp adds up alone. Without one of them runs are shorter, and with all twice
#: longer: where runs follow from a share of equal sequences, or, below, from how many CTAs take
#: them.
_HAVING = {
    100: (0, 1, 2, 3, 20, 32, 33, 34, 52, 64, 65, 80, 97),
    32: (13, 15, 22, 23, 31),
}
_HAVING_BY_CTAS = {100: (1, 20, 34, 64, 97), 32: _HAVING[32]}


def _split(
    sizes: str,
    inputs: str = "random",
    options: Mapping[str, Any] | None = None,
    sm_count: int | None = None,
) -> AskedDecode:
    """Of small caches that would be read whole: with more room."""
    return AskedDecode(sizes, inputs, {"capacity": LONG, **(options or {})}, sm_count=sm_count)


def _sparse(
    batch: int,
    mask: str = "causal",
    keys: int = 500,
    having: Mapping[int, tuple[int, ...]] = _HAVING,
) -> AskedDecode:
    """So few sequences with keys that without any of them, or with it twice, runs are shorter or
    longer."""
    return AskedDecode(
        f"b{batch} s1:{keys} h{200 // batch // 2 * 2}:1 d40 {mask}",
        options={
            "capacity": LONG,
            "lens_k": tuple(keys * (i in having[batch]) for i in range(batch)),
        },
        sm_count=2,
    )


def _sparse_packed(batch: int) -> AskedDecode:
    """The same of packed queries. Sequences without queries would make runs longer."""
    having = _HAVING[batch]
    without = {i + 1 for i in having}.difference(having)
    return AskedDecode(
        f"b{batch} s1:1500 h{200 // batch // 2 * 2}:1 d40 window softcap packed page24",
        options={
            "window": (1500, 0),
            "capacity": LONG // 24,
            "lens_q": tuple(int(i not in without) for i in range(batch)),
            "lens_k": tuple(500 * (i in having) + 1500 * (i in without) for i in range(batch)),
        },
        sm_count=2,
    )


def _one_of(
    batch: int, keys: int, inputs: str = "random", sm_count: int | None = None, **options: Any
) -> AskedDecode:
    """Sequences of which one has keys."""
    lens_k = tuple(keys * (i == batch - 10) for i in range(batch))
    return AskedDecode(
        f"b{batch} s1:{keys} h2:1 d40 causal",
        inputs,
        options={"lens_k": lens_k, **options},
        sm_count=sm_count,
    )


def _direct(
    lens_k: Sequence[int],
    sm_count: int,
    heads: str = "h1",
    inputs: str = "random",
    **options: Any,
) -> AskedDecode:
    """Packed sequences of a query, all of whose keys are seen."""
    return AskedDecode(
        f"b{len(lens_k)} s1:{max(lens_k)} {heads} d248 window packed",
        inputs,
        options={
            "window": (max(lens_k), 0),
            "lens_q": (1,) * len(lens_k),
            "lens_k": tuple(lens_k),
            **options,
        },
        sm_count=sm_count,
    )


def _arriving(sizes: str, inputs: str = "random", **options: Any) -> AskedDecode:
    """In a cache with room for more keys than clusters merge."""
    return AskedDecode(sizes, inputs, {"capacity": 8208, **options})


class GuessingVictim(OperationVictim):
    """A victim of whose kernels those that guess do so wrongly, and load what they prefetch."""

    __hash__ = OperationVictim.__hash__
    #: Whether they guess pages wrongly, and lengths as they are.
    right_lengths = False
    guesses: ClassVar[tuple[str, ...]] = ()

    def run(
        self, modules: Mapping[str, str] | None = None, plan: ChangedPlan | None = None
    ) -> Noticed:
        every = {**self.kernel.modules, **(modules or {})}
        spoiled = {
            entry: asked_by_loads(guessing(ptx, *self.guesses, right_lengths=self.right_lengths))
            for entry, ptx in every.items()
            if len(GUESS.findall(ptx)) > self.right_lengths
        }
        return super().run({**every, **spoiled}, plan)


class PagesGuessingVictim(GuessingVictim):
    """The same, of pages alone: of the loads of a warp every other one is right."""

    __hash__ = OperationVictim.__hash__
    right_lengths = True
    guesses = (wrong_in_warp(1), wrong_in_warp(3))


VICTIMS = {
    "dense": OperationVictim(
        config("(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_4"),
        Semantics("causal", uneven=True),
        (
            _split("b3 s2:460 h24:4 d40 causal", options={"sinks": True, "lens_k": (65, 460, 0)}),
            # Two row tiles; of sequences that are one run each, too.
            _split("b2 s9:330 h12:4 d56 causal", options={"layout": "heads first"}),
            AskedDecode("b2 s9:330 h12:4 d56 causal", options={"capacity": 60}),
            _split("b3 s2:400 h24:4 d40 causal", "nonfinite"),
            _split("b3 s1:40 h36:4 d40 causal", options={"lens_k": (40, 0, 3)}),
            # More sequences than a warp looks through at once.
            _split("b35 s9:70 h4:2 d40 causal"),
            # Sequences of one tile that are one run each, whose first keys are prefetched. Some
            # CTAs have two of them.
            AskedDecode(
                "b3 s1:150 h36:4 d40 causal",
                options={"sinks": True, "lens_k": (150, 0, 130), "layout": "heads first"},
                sm_count=2,
            ),
            # Runs of two parts, and of all four with states in shared and in global memory, the
            # last with two levels of them in shared memory.
            _split("b4 s1:460 h24:4 d40 causal", options={"lens_k": (460,) * 4}),
            _split("b12 s1:460 h24:4 d40 causal", options={"lens_k": (460,) * 12}),
            _split("b13 s1:460 h8:4 d40 causal", options={"lens_k": (460,) * 13}),
            # Rows of two runs, more than the CTAs that look for them.
            _split("b12 s1:460 h24:4 d40 causal", options={"lens_k": (20, 460, *(20,) * 10)}),
            # Rows that see no key, beside keys whose values are not finite.
            _split("b2 s9:70 h4:2 d40 causal", "nonfinite", {"lens_k": (3, 70)}),
            # Runs of several parts: weights beside a wrong maximum are infinite.
            _split("b4 s1:460 h24:4 d40 causal", "far_scores", {"lens_k": (460,) * 4}),
            _split("b4 s1:460 h24:4 d40 causal", "large_scores", {"lens_k": (460,) * 4}),
            _sparse(100),
            _sparse(32),
        ),
        sm_count=5,
    ),
    "parts": OperationVictim(
        config("(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_4+rounds_2"),
        Semantics("causal", uneven=True),
        (
            # One sequence's rows, that CTAs look for: runs for each warp of the merge.
            _one_of(80, 5370, sinks=True),
            # Weights beside a wrong maximum are infinite.
            _one_of(80, 3600, "far_scores"),
            _one_of(80, 3600, "large_scores"),
            # The same of a row that few CTAs look for.
            _one_of(110, 2600, sm_count=10),
            # A CTA merges two of them.
            _split(
                "b7 s1:1020 h16:1 d40 causal",
                options={"lens_k": (0, 0, 1020, 0, 0, 1000, 0)},
                sm_count=4,
            ),
            # Rows of two runs, each a warp's.
            _split(
                "b12 s1:460 h24:4 d40 causal",
                options={"lens_k": (20, 460, *(20,) * 10)},
                sm_count=5,
            ),
            # Runs of two parts that CTAs take as a counter says.
            _sparse(100, keys=300, having=_HAVING_BY_CTAS),
            _sparse(32, keys=300, having=_HAVING_BY_CTAS),
            # CTAs come to the last of them in another order than they began.
            AskedDecode(
                "b40 s1:300 h2:1 d40 causal",
                options={"capacity": LONG, "lens_k": (300, *(0,) * 39)},
                sm_count=1,
                schedule_seed=1,
            ),
        ),
        sm_count=60,
    ),
    # Rows of so many columns that few of them are enough outputs: each has a CTA.
    "direct": OperationVictim(
        config("(BF16, 256, 16, 32, 2): decode+stages_4+least_64+parts_4+rounds_2"),
        Semantics("window", packed=True, uneven=True),
        (
            # Runs for each warp of the merge, of CTAs that warm up.
            _direct((2300,), 36, "h18:2", sinks=True),
            # Weights beside a wrong maximum are infinite.
            _direct((1800,), 36, "h18:2", "far_scores"),
            _direct((1800,), 36, "h18:2", "large_scores"),
            # Runs of several parts that CTAs take as a counter says, beside sequences without
            # queries: with those runs would be longer.
            _direct(
                [800 * (i in _HAVING[32] or 25 <= i < 30) for i in range(32)],
                16,
                lens_q=tuple(int(not 25 <= i < 30) for i in range(32)),
            ),
            # A row that the decode kernel stores, while the merge's CTA warms up.
            _direct((300, 40), 72, "h18:2"),
        ),
        sm_count=36,
        arch=90,
    ),
    "paged": OperationVictim(
        config("(BF16, 64, 16, 64, 4): decode+stages_3+least_64+parts_4"),
        Semantics("window", softcap=True, packed=True, uneven=True),
        (
            AskedDecode(
                "b4 s3:520 h24:8 d40 window softcap packed page24",
                options={
                    "append": True,
                    "rotary": "halves",
                    "rotary_half": 16,
                    "rotary_dtype": "float32",
                    "window": (450, 0),
                    "sinks": True,
                    "lens_q": (3, 1, 2, 3),
                    "lens_k": (520, 64, 2, 131),
                },
                seed=3,
            ),
            AskedDecode(
                "b3 s5:260 h16:8 d64 window softcap packed page7",
                options={
                    "append": True,
                    "rotary": "interleaved",
                    "window": (150, 1),
                    "lens_q": (5, 2, 4),
                    "lens_k": (260, 129, 4),
                    "layout": "heads first",
                },
                seed=6,
            ),
            # More items by turns than CTAs, of the last sequences too.
            AskedDecode(
                "b35 s9:70 h4:2 d40 window softcap packed page7",
                options={"window": (55, 0)},
                sm_count=1,
            ),
            # Pages that hold all of a warp's keys of a step, and a bad number among them.
            AskedDecode(
                "b3 s2:330 h16:8 d64 window softcap packed page48",
                options={
                    "append": True,
                    "window": (150, 1),
                    "lens_k": (330, 129, 60),
                    "layout": "heads first",
                },
                seed=6,
            ),
            AskedDecode(
                "b2 s1:200 h8:4 d40 window softcap packed page16", options={"window": (110, 0)}
            ),
            # Keys in front of a window would be what follows the last key, in its page.
            AskedDecode(
                "b2 s1:106 h8:4 d40 window softcap packed page8",
                options={"window": (1, 0), "lens_k": (106, 50)},
            ),
            # The last sequence's runs are merged.
            AskedDecode(
                "b2 s5:520 h12:4 d40 window softcap packed page24",
                options={"window": (450, 0), "lens_k": (5, 520), "capacity": LONG // 24},
            ),
            # A window that begins in the last page, in whose rest keys in front of it would be.
            AskedDecode(
                "b4 s1:222 h28:4 d40 window softcap packed page24",
                options={"window": (3, 0), "lens_q": (1,) * 4, "lens_k": (222,) * 4},
            ),
            _sparse_packed(100),
            _sparse_packed(32),
        ),
        sm_count=5,
    ),
    "chunks": OperationVictim(
        config("(BF16, 64, 16, 64, 4): decode+stages_3+least_64+parts_4+chunks_64"),
        Semantics("window", softcap=True, packed=True, uneven=True),
        (
            # Two tiles of rows, one of them with two parts, beside tokens that are split too.
            AskedDecode(
                "b4 s40:1100 h8:4 d40 window softcap packed page24",
                options={
                    "window": (900, 0),
                    "sinks": True,
                    "lens_q": (40, 1, 30, 21),
                    "lens_k": (1100, 400, 700, 900),
                },
                seed=3,
            ),
            # A window that begins at a stage's edge within a warp's rows.
            AskedDecode(
                "b2 s100:700 h2:2 d64 window softcap packed page7",
                options={
                    "window": (500, 9),
                    "lens_q": (40, 100),
                    "lens_k": (650, 700),
                    "layout": "heads first",
                },
                seed=6,
            ),
            # States by sequence, not by query.
            AskedDecode(
                "b3 s300:600 h4:2 d64 window softcap packed page7",
                options={
                    "append": True,
                    "window": (580, 9),
                    "lens_q": (20, 300, 20),
                    "lens_k": (600, 350, 590),
                },
                seed=6,
            ),
            AskedDecode(
                "b35 s9:70 h16:2 d40 window softcap packed page7", options={"window": (55, 0)}
            ),
        ),
        sm_count=9,
    ),
    "kept": OperationVictim(
        config("(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_4"),
        Semantics("causal", uneven=True),
        # Runs of four parts, half of a sequence's, with states in global memory.
        (_split("b8 s1:460 h24:4 d40 causal", "nonfinite", {"lens_k": (460, 130) * 4}),),
        sm_count=9,
    ),
    "full": OperationVictim(
        config("(FP16, 64, 16, 64, 4): decode+stages_2+least_64+parts_4+full"),
        Semantics("window", uneven=True),
        (
            # Runs of eight parts, whose states are in registers, in shared and in global memory.
            _split(
                "b14 s1:1000 h16:1 d40 window",
                options={
                    "sinks": True,
                    "window": (990, 0),
                    "lens_k": (1000, 65, 1000, 0, 460, 130, 1000, 700) + (1000,) * 6,
                },
            ),
            # More runs than CTAs. Parts of the last sequences are of two blocks of keys.
            _split(
                "b24 s1:1100 h8:1 d40 window",
                options={
                    "window": (1090, 0),
                    "lens_k": (65, 460, 130, 0) * 5 + (1100,) * 4,
                },
            ),
            # Few rows, whose states are kept one place after another.
            _split(
                "b14 s1:1000 h8:1 d40 window",
                options={"window": (990, 0), "lens_k": (1000,) * 14},
            ),
            # Rows that see no key of the first of two parts, or of the second.
            _split(
                "b4 s9:196 h4:2 d40 window",
                "far_scores",
                {"window": (128, 0), "lens_k": (196,) * 4},
            ),
            _split("b6 s3:330 h10:2 d56 window", "far_scores", {"window": (320, 0)}),
            # Rows that see no key at all, beside keys whose values are not finite.
            # Of sequences of several tiles that are one run each.
            AskedDecode(
                "b8 s80:70 h1 d40 window", "nonfinite", {"window": (70, 0), "lens_k": (70,) * 8}
            ),
            _split(
                "b4 s1:460 h64:4 d56 window",
                options={"window": (400, 0), "lens_k": (460,) * 4},
            ),
            _sparse(100, "window"),
            _sparse(32, "window"),
        ),
        sm_count=5,
    ),
    "cluster": OperationVictim(
        config("(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_4+cluster_8"),
        Semantics("causal", uneven=True),
        (
            # More heads than clusters fit: their sequences are one run each.
            AskedDecode("b2 s1:300 h4 d56 causal", "far_scores", {"lens_k": (300, 130)}),
            # More sequences than do: runs of up to eight parts, whose states are in shared and in
            # global memory, and CTAs with more than one. Some parts are of two blocks of keys.
            AskedDecode(
                "b14 s1:600 h16:1 d40 causal",
                options={
                    "lens_k": (460, 1, 460, 0, 460, 130, 460, 600, 1, 460, 0, 600, 130, 600),
                    "capacity": LONG,
                },
                sm_count=2,
            ),
            _sparse(100),
            _sparse(32),
            # Clusters.
            AskedDecode(
                "b4 s1:130 h27:3 d40 causal",
                options={"lens_k": (130, 65, 0, 130), "layout": "heads first"},
            ),
            # Columns that CTAs share unevenly.
            AskedDecode("b2 s3:130 h15:5 d56 causal", options={"sinks": True, "lens_k": (130, 65)}),
            # CTAs without a column of a row, whose runs have two parts; and a launch before.
            AskedDecode(
                "b2 s1:300 h4 d56 causal",
                "far_scores",
                {"append": True, "lens_k": (300, 130)},
                sm_count=330,
            ),
        ),
        sm_count=64,
        arch=90,
    ),
    "own": OperationVictim(
        config("(FP16, 96, 32, 64, 2): decode+stages_2+least_64+parts_8+own_rows"),
        Semantics("window", uneven=True),
        (
            # Runs of eight parts, whose states are in registers, in shared and in global memory.
            _split(
                "b6 s1:500 h32:1 d72 window",
                options={
                    "sinks": True,
                    "window": (490, 0),
                    "lens_k": (500, 65, 500, 0, 460, 500),
                },
            ),
            # Tiles without some of their rows, and rows without keys of a part.
            _split("b6 s3:330 h16:2 d72 window", "far_scores", {"window": (320, 0)}),
            _split(
                "b3 s9:196 h6:2 d72 window",
                "far_scores",
                {"window": (128, 0), "lens_k": (196,) * 3},
            ),
            # Rows that see no key at all, beside keys whose values are not finite.
            AskedDecode(
                "b3 s80:70 h1 d72 window", "nonfinite", {"window": (70, 0), "lens_k": (70,) * 3}
            ),
            # Of rows that are not there a run would keep states behind the workspace.
            _split(
                "b4 s1:190 h15:5 d72 window",
                options={"window": (180, 0), "lens_k": (190,) * 4, "layout": "heads first"},
            ),
            # Several runs of a sequence, which are merged.
            _split(
                "b40 s1:900 h2:1 d72 window",
                options={"window": (880, 0), "lens_k": (*(0,) * 30, 900, *(0,) * 9)},
            ),
            # Two tiles, and warps without rows.
            _split(
                "b2 s3:900 h36:2 d72 window",
                options={"sinks": True, "window": (880, 0), "lens_k": (900, 400)},
            ),
            _sparse(100, "window"),
            _sparse(32, "window"),
        ),
        sm_count=2,
    ),
    "own_cluster": OperationVictim(
        config("(FP16, 64, 32, 32, 2): decode+stages_2+least_64+parts_4+cluster_8+own_rows"),
        Semantics("causal", uneven=True),
        (
            AskedDecode("b2 s1:300 h32:1 d56 causal", "far_scores", {"lens_k": (300, 130)}),
            AskedDecode(
                "b4 s1:300 h60:3 d40 causal",
                options={"lens_k": (300, 65, 0, 130), "layout": "heads first"},
            ),
            AskedDecode(
                "b3 s5:130 h12:4 d40 causal", options={"sinks": True, "lens_k": (130, 0, 65)}
            ),
            _sparse(100),
            _sparse(32),
        ),
        sm_count=64,
        arch=90,
    ),
    # A sequence's few parts, whose states arrive at the merge; and more, which it waits for. Rows
    # of so many columns as above, that few are enough.
    "arriving": OperationVictim(
        config("(BF16, 256, 16, 32, 2): decode+stages_2+least_64+parts_2+cluster_8"),
        Semantics("causal", uneven=True),
        (
            _arriving("b1 s1:1000 h18:2 d248 causal", sinks=True),
            _arriving("b1 s1:300 h18:2 d248 causal", "far_scores"),
            _arriving("b1 s2:190 h10:2 d248 causal", "large_scores"),
            _arriving("b1 s1:400 h18:2 d248 causal", "nonfinite"),
            _arriving("b1 s1:40 h18:2 d248 causal"),
            # A run more than arrive, and eight and more for each warp of the merge.
            _arriving("b1 s1:1030 h18:2 d248 causal", "far_scores"),
            _arriving("b1 s1:2300 h18:2 d248 causal", "far_scores"),
        ),
        sm_count=40,
        arch=90,
    ),
    # CTAs that ask for keys and find their runs before they may begin, by lengths that are wrong:
    # of several sequences, of one whose states arrive, and in clusters.
    "guessing": GuessingVictim(
        config("(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_4+early+cluster_8"),
        Semantics("causal", uneven=True),
        (
            _split("b5 s1:460 h20:4 d40 causal", options={"lens_k": (65, 460, 0, 131, 300)}),
            _split(
                "b4 s1:460 h24:4 d56 causal",
                options={"lens_k": (460, 1, 64, 460), "layout": "heads first"},
            ),
            # Without the last keys the last CTAs would have no run.
            AskedDecode(
                "b1 s1:1030 h36:2 d56 causal",
                options={"sinks": True, "capacity": 8208},
                sm_count=40,
            ),
            AskedDecode("b2 s1:230 h30:2 d40 causal", options={"lens_k": (230, 65)}, sm_count=64),
            _sparse(32),
        ),
        sm_count=5,
        arch=90,
    ),
    "guessing_pages": GuessingVictim(
        config("(BF16, 256, 16, 32, 2): decode+stages_3+least_64+parts_4+early+cluster_8"),
        Semantics("causal", uneven=True),
        (
            # More columns than are there, up to the end of the last page.
            _split(
                "b5 s1:460 h20:4 d136 causal page24",
                options={"lens_k": (65, 460, 0, 131, 300), "capacity": LONG // 24},
            ),
            AskedDecode(
                "b3 s1:130 h20:2 d248 causal page7",
                options={"lens_k": (130, 65, 0), "layout": "heads first"},
                sm_count=64,
            ),
        ),
        sm_count=5,
        arch=90,
    ),
    # Steps of a warp in one page and not, in clusters and in runs of which a CTA has several.
    "guessing_tables": PagesGuessingVictim(
        config("(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_4+early+cluster_8"),
        Semantics("causal", uneven=True),
        (
            *(
                _split(
                    f"b5 s1:460 h20:4 d56 causal page{page}",
                    options={"lens_k": (65, 460, 0, 131, 300), "capacity": LONG // page},
                )
                for page in (16, 24)
            ),
            *(
                AskedDecode(
                    f"b2 s1:230 h30:2 d40 causal page{page}",
                    options={"lens_k": (230, 65)},
                    sm_count=64,
                )
                for page in (7, 32)
            ),
        ),
        sm_count=5,
        arch=90,
    ),
    "append": OperationVictim(
        config("(BF16, 256, 16, 32, 2): decode+stages_2+least_64+parts_4"),
        Semantics("window", softcap=True, packed=True, uneven=True),
        (
            _turned(96, 256, "float32"),
            _turned(128, 256),
            _turned(128, 256, "float32"),
            _turned(96, 256),
            _turned(8, 248),
            AskedDecode(
                "b3 s2:40 h8:4 d256 window softcap packed page16",
                options={"append": True, "window": (30, 0), "layout": "heads first"},
            ),
        ),
        sm_count=5,
    ),
}
shared_kernels.want([VICTIMS["dense"].config], VICTIMS["dense"].semantics)

OPERATORS = operators(128)
#: Kernels of each victim, and into how many tests their mutants are cut.
PARTS = {
    "dense": {"main": 4},
    "parts": {"merge_rows": 2},
    "direct": {"merge": 2},
    "paged": {"paged": 4},
    "chunks": {"paged_chunk": 2},
    "append": {"append": 2},
    "cluster": {"main": 2},
    "full": {"main": 2},
    "own": {"main": 1},
    "own_cluster": {"main": 1},
}
#: Plans that change nothing, and why.
HARMLESS_PLANS = {
    "half of main": "The CTAs that there are take all parts, one after another.",
    "half of paged": "The CTAs that there are take all parts, one after another.",
    "half of merge_rows": "The CTAs that there are merge all rows, one after another.",
    "append first": "It is first.",
    "main first": "It is first.",
}
HARMLESS_PLANS_OF = {
    "chunks": {
        "paged_chunk first": "It is first.",
        "half of paged_chunk": "The CTAs that there are take all tiles, one after another.",
        "paged first": "Neither of the two kernels reads or writes what is the other's.",
    },
    "guessing_pages": {"paged first": "It is first."},
    "guessing_tables": {"paged first": "It is first."},
}

EQUIVALENT = (
    *(
        Equivalent(
            ("drop shared load",),
            (name,),
            role,
            "first = x.x, before = x.y, share = x.z, index = x.w;",
            "With a share of 0 a CTA asks no counter: runs come by turns, with the same bits.",
            place=0,
        )
        for name, role in (
            *(("dense", "main"), ("full", "main"), ("cluster", "main"), ("paged", "paged")),
        )
    ),
    *(
        Equivalent(
            ("shuffle nothing",),
            names,
            role,
            "s.keys = __shfl_sync(kWholeWarp, own.keys, i);\n"
            "s.begin = __shfl_sync(kWholeWarp, own.begin, i);\n"
            "s.chunk",
            "Without a window every sequence's first part begins at 0.",
        )
        for role, names in (("main", ("dense", "cluster")), ("merge_rows", ("parts",)))
    ),
    # The keys of a sequence and of its parts: what merges their states reads neither.
    *(
        Equivalent(
            ("shuffle nothing",), ("parts",), "merge_rows", source, "The merge does not read it."
        )
        for source in (
            "batch = cursor.first + i;\ns.keys = __shfl_sync(kWholeWarp, own.keys, i);\ns.begin",
            "s.begin = __shfl_sync(kWholeWarp, own.begin, i);\n"
            "s.chunk = __shfl_sync(kWholeWarp, own.chunk, i);\n"
            "s.parts",
        )
    ),
    # The number of runs: CTAs of clusters alone read it.
    *(
        Equivalent(
            ("shuffle nothing",),
            (name,),
            role,
            "s.run_levels = __shfl_sync(kWholeWarp, own.run_levels, i);\n"
            "s.runs = __shfl_sync(kWholeWarp, own.runs, i);\n"
            "if constexpr (Kernel::SEMANTICS.packed)",
            proof,
            place,
        )
        for name, role, proof, place in (
            ("dense", "main", "This kernel has no clusters.", None),
            ("full", "main", "This kernel has no clusters.", None),
            ("paged", "paged", "This kernel has no clusters.", None),
            ("cluster", "main", "Of a CTA's second search. A cluster's CTAs search once.", -1),
        )
    ),
    Equivalent(
        ("drop barrier",),
        ("cluster", "own_cluster"),
        "main",
        "__syncthreads();\ncluster_wait();\n}",
        "A CTA without a run pushes nothing, and reads what others push when its mbarrier says "
        "that all is there. It has arrived; whether it waits, too, concerns a tool alone.",
    ),
    Equivalent(
        ("drop barrier",),
        ("cluster", "own_cluster"),
        "main",
        "}\n__syncwarp();\ncluster_arrive();\nif constexpr",
        "It orders no access: what thread 0 has initialised its fence and its own arrival publish. "
        "It has the lanes meet for the aligned arrival, as they do behind every branch in the "
        "emulator.",
    ),
)
# Of warps with rows of their own what is not as in the kernels beside them: copies, what they keep
# in global memory, and barriers.
_OF_OWN_ROWS = {
    "own": (
        *("drop copy", "copy to next chunk", "copy to next row", "copy from next chunk"),
        *("drop global load", "load global next chunk", "drop commit"),
    ),
    "own_cluster": ("drop barrier",),
}
# Of chunks two of each operator, but no shuffles: what finds items and pages is that of "paged".
SUITE = MutantSuite(
    VICTIMS,
    PARTS,
    MISTAKES,
    EQUIVALENT,
    lambda name, role: tuple(
        it
        for it in OPERATORS
        if it.name in _OF_OWN_ROWS.get(name, (it.name,))
        and (name != "chunks" or it.name != "shuffle nothing")
    ),
    {**dict.fromkeys(VICTIMS, 3), "chunks": 2},
    harmless_plans=HARMLESS_PLANS,
    harmless_plans_of=HARMLESS_PLANS_OF,
)


def test_a_merge_that_is_not_there_or_too_early_is_missed() -> None:
    plans = SUITE.plans("dense")
    wrong = {change: plans[change] for change in ("without merge_rows", "merge_rows first")}
    assert SUITE.unnoticed_plans("dense", wrong) == set()


_PREFETCHES = SourcePatch(
    "V's first keys are asked for by K's strides",
    "mma_sync_decode/split.cuh",
    "prefetch_line<kBytes>(args.v_cache, args.v_cache_strides, block, head",
    "prefetch_line<kBytes>(args.v_cache, args.k_cache_strides, block, head",
)


@pytest.mark.full
@pytest.mark.parametrize("wrong", [False, True], ids=["the kernel", "a mistake"])
def test_first_keys_are_asked_for_where_they_are(wrong: bool) -> None:
    victim = replace(
        VICTIMS["dense"],
        asked=tuple(
            AskedDecode("b3 s1:150 h36:4 d40 causal", options={"layout": layout})
            for layout in ("dense", "heads first")
        ),
    )
    entry = victim.roles["main"]
    modules = patched_modules(victim, _PREFETCHES) if wrong else victim.kernel.modules
    noticed = victim.run({entry: asked_by_loads(modules[entry])})
    assert noticed.kinds == ({"out-of-bounds"} if wrong else set())
    assert not noticed.wrong


@pytest.mark.full
def test_there_are_enough() -> None:
    assert len(SUITE.whole_sample()) >= 200
    assert sum(map(len, MISTAKES.values())) >= 70
    assert set(MISTAKES) <= set(VICTIMS)


# Stores a word, and lets the next launch begin before it has.
_WRITES_A_WORD = """.version 8.0
.target sm_90
.address_size 64
.visible .entry writes_a_word(.param .u64 to, .param .u32 word)
{
	.reg .b64 %to;
	.reg .b32 %word;
	griddepcontrol.launch_dependents;
	ld.param.u64 %to, [to];
	ld.param.u32 %word, [word];
	st.relaxed.gpu.global.u32 [%to], %word;
	ret;
}
"""
_WAITS = """        wait_for_launch_before();
"""
_COMPARED = """        if (lengths.are_guessed) length = *own_length;
"""
_PART = "mma_sync_decode/part_kernel.cuh"


def _between(first: str, last: str) -> str:
    """The text of the kernel's source from one place to the end of another."""
    text = (package_sources() / _PART).read_text()
    return text[text.index(first) : text.index(last) + len(last)]


_OF_LENGTHS = ("compared before", "only others wait", "allowed before")


def _of_lengths(mistake: str) -> SourcePatch:
    old = _between(_WAITS, _COMPARED)
    new = _COMPARED + old.removesuffix(_COMPARED)
    if mistake == "only others wait":
        new = old.replace(_WAITS, f"if (!lengths.are_guessed) {{ {_WAITS} }}")
    if mistake == "allowed before":
        new = f"allow_next_launch();\n{old}"
    return SourcePatch(mistake, _PART, old, new)


@pytest.mark.full
@pytest.mark.parametrize(("keys", "capacity"), [(300, 504), (504, 504), (300, 8208), (1500, 8208)])
@pytest.mark.parametrize("mistake", ["none", *_OF_LENGTHS])
def test_lengths_count_as_the_launch_before_leaves_them(
    mistake: str, keys: int, capacity: int
) -> None:
    """Read once more behind the wait, which is there whether lengths were guessed or not; and by a
    merge, of a larger cache, that begins when all others have waited."""
    victim = VICTIMS["guessing"]
    modules = victim.kernel.modules
    if mistake != "none":
        modules = patched_modules(victim, _of_lengths(mistake))
    o, expected, findings = _behind_a_writer(victim, modules, keys, capacity, "cache_lens")
    # Where clusters merge no launch follows that could begin too early.
    is_harmless = mistake == "none" or (mistake == "allowed before" and capacity == 504)
    assert bool(findings) != is_harmless, findings
    if mistake == "none":
        np.testing.assert_array_equal(o, expected)


_PAGES_READ = """            begin_launch();
            if constexpr (kPaged)
                if (lengths.are_guessed) copies.pages.read_again(copies.first_step < copies.steps);
"""
_OF_PAGES = ("compared before", "guessed without the order")


def _of_pages(mistake: str) -> SourcePatch:
    if mistake == "guessed without the order":
        return SourcePatch(
            mistake,
            "mma_sync_decode/run_copies.cuh",
            "guesses ? load_relaxed(pages.places[i])",
            "guesses ? load_global_4B(pages.places[i])",
        )
    first, *rest = _PAGES_READ.splitlines(keepends=True)
    return SourcePatch(mistake, _PART, _PAGES_READ, "".join((*rest, first)))


def test_mistakes_of_single_tests_are_in_the_sources() -> None:
    made = [_PREFETCHES, *map(_of_lengths, _OF_LENGTHS), *map(_of_pages, _OF_PAGES)]
    assert void_mistakes(made) == []


@pytest.mark.full
@pytest.mark.parametrize("capacity", [504, 8208])
@pytest.mark.parametrize("page", [16, 24])
@pytest.mark.parametrize("mistake", ["none", *_OF_PAGES])
def test_pages_count_as_the_launch_before_leaves_them(
    mistake: str, page: int, capacity: int
) -> None:
    """Read once more behind the wait; and before it by loads that may see either."""
    victim = VICTIMS["guessing_tables"]
    modules = victim.kernel.modules
    if mistake != "none":
        modules = patched_modules(victim, _of_pages(mistake))
    o, expected, findings = _behind_a_writer(
        victim, modules, 300, capacity, "page_table", page=page
    )
    assert bool(findings) != (mistake == "none"), findings
    if mistake == "none":
        np.testing.assert_array_equal(o, expected)


def _behind_a_writer(
    victim: OperationVictim,
    modules: Mapping[str, str],
    keys: int,
    capacity: int,
    name: str,
    page: int = 0,
) -> tuple[np.ndarray, np.ndarray, Sequence[Finding]]:
    """A call behind a launch that lets it begin and writes the first length, or the first page's
    number: o, what it is to be, and findings."""
    problem = Problem.parse(f"b1 s1:{capacity} h6:2 d56 fp16 decode causal")
    shape = (1, capacity, 2, 56)
    if page:
        problem = replace(problem, page=page)
        shape = (-(-capacity // page), page, 2, 56)
    rng = np.random.default_rng(0)
    cache, q = (rng.standard_normal(it).astype(np.float16) for it in (shape, (1, 1, 6, 56)))
    tensors = {"q": q, "k_cache": cache, "v_cache": cache.copy()}
    tensors["cache_lens"] = np.array([keys], np.int32)
    if page:
        tensors["page_table"] = rng.permutation(shape[0]).astype(np.int32)[None]
    device = replace(device_spec("H200"), sm_count=40)
    made = prepare_operation(
        victim.config, problem, tensors, emulate=True, poisoned=True, arch=device
    )
    made.run()
    expected = made.outputs["o"].copy()
    made.outputs["o"].fill(np.nan)
    late = tensors[name]
    value = int(late.flat[0])
    late.flat[0] = 65 if name == "cache_lens" else (value + 1) % shape[0]
    assert made.kernel is not None
    plan = made.kernel.plan(made.call)
    argument_bytes = struct.pack("<Qi", late.ctypes.data, value)
    writes = Launch("writes_a_word", False, (1, 1, 1), (1, 1, 1), (1, 1, 1), 0, argument_bytes)
    inputs = {name: view.source for name, view in made.views.items() if name not in made.outputs}
    written = {name: made.outputs[name] for name in made.outputs} | {name: late}
    found = run_in_emulator(
        {**modules, "writes_a_word": _WRITES_A_WORD},
        replace(plan, launches=(writes, *plan.launches)),
        readable={name: it for name, it in inputs.items() if name not in written},
        writable=written,
        observers=all_checks(),
        sm_count=40,
    )
    return made.outputs["o"], expected, found.findings
