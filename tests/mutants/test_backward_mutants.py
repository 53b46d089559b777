"""Mutants of the backward pass: of its kernels' PTX, of their sources, and of their plans. All must
be detected, except those with a proof that they change nothing.

The default run has wrong plans and a few mutants of synchronisation. ``-m full`` has the whole
sample: every mutant of synchronisation, some of each other operator, and every mistake in the
sources.
"""

from __future__ import annotations

import pytest
import shared_kernels
from backward_cases import Asked
from backward_mistakes import MISTAKES
from mutant_suite import (  # noqa: F401 - the tests are tests of this file
    Equivalent,
    MutantSuite,
    test_exceptions_name_mutants,
    test_mistakes_are_caught,
    test_mistakes_are_in_the_sources,
    test_mutants_are_caught,
    test_the_kernels_themselves_are_right,
)
from mutants import Operator, operators
from mutants_hopper import SUM_OPERATORS, hopper_operators
from operation_victims import OperationVictim

from flashsmith.families import Semantics
from flashsmith.families import parse_kernel_name_into_config as config

_STATISTICS = {"dlse": True, "sinks": True}
_LENGTHS = {"lens_q": (70, 0, 13, 20), "lens_k": (30, 12, 0, 90), "spare": 6}
_NEAR = {"left": 9, "right": 9}
_NARROW = _NEAR | _LENGTHS
_WIDE = {"left": 70, "right": 40, "lens_q": (200, 7), "lens_k": (160, 7), "softcap": 200.0}
_CUT = "b2 s192:150 h1 d64 window softcap packed"
_PACKED = "b4 s70:90 h4:2 d64 window softcap packed"
_LONG = "b1 s1750:1750 h1 d8 window softcap packed"
_LONGEST = {"left": 9, "right": 9, "lens_q": (1750,), "lens_k": (1750,)}


VICTIMS = {
    "atomics": OperationVictim(
        config("(FP16, 64, 32, 64, 4): backward+columns_2+stages_2+dq_atomics"),
        Semantics("causal", uneven=True),
        (
            Asked("b2 s50:70 h4:2 d64 causal", options=_STATISTICS),
            # Loops of their own, which are much of the kernel.
            Asked("b1 s100:70 h2:1 d64 causal", options={"unneeded": ("dk",)}),
            Asked(
                "b1 s100:70 h2:1 d64 causal",
                options={"unneeded": ("dv",)},
                spoiled="unseeing queries",
            ),
            Asked("b2 s100:40 h2:1 d40 causal", "nonfinite", _STATISTICS),
            Asked("b1 s70:150 h1 d64 causal", "far_scores"),
            Asked("b1 s70:150 h1 d64 causal", "lost_keys"),
            Asked("b1 s100:40 h1 d64 causal", spoiled="unseeing queries"),
            Asked("b1 s100:40 h1 d64 causal", spoiled="last key"),
            Asked("b1 s70:70 h1 d64 causal", spoiled="last value"),
            Asked("b1 s70:70 h1 d64 causal", options={"scale": 2.0}, spoiled="low scores"),
            Asked("b1 s100:40 h1 d64 causal", options=_STATISTICS, spoiled="no sink"),
            Asked("b1 s770:770 h1 d8 causal", options=_STATISTICS, spoiled="no do"),
            Asked("b1 s70:100 h1 d64 causal", options={"grad_dtype": "float32"}),
        ),
    ),
    "unmasked": OperationVictim(
        config("(FP16, 64, 32, 64, 4): backward+columns_2+stages_2+dq_atomics"),
        Semantics(uneven=True),
        (
            Asked("b2 s50:70 h2:1 d64", options=_STATISTICS),
            Asked("b1 s70:70 h1 d64", options={"scale": 2.0}, spoiled="low scores"),
        ),
    ),
    "wgmma": OperationVictim(
        config(
            "(FP16, 64, 64, 128, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_1+regs_24_240"
            "+late_dq"
        ),
        Semantics("causal", uneven=True),
        (
            Asked("b1 s130:140 h2:1 d64 causal", options=_STATISTICS),
            Asked("b1 s40:50 h4:2 d64 causal", options=_STATISTICS),
            Asked("b1 s100:40 h2:1 d64 causal", spoiled="unseeing queries"),
            Asked("b1 s230:40 h2:1 d64 causal", options=_STATISTICS),
            Asked("b1 s100:40 h1 d64 causal", spoiled="last key"),
            Asked("b1 s70:70 h1 d64 causal", spoiled="last value"),
            Asked("b1 s70:100 h1 d64 causal", options={"grad_dtype": "float32"}),
            *(Asked("b1 s200:200 h2:1 d64 causal", schedule_seed=seed) for seed in range(4)),
        ),
    ),
    # A persistent one, in the order of those that ship, whose dq leaves by TMA before dk.
    "bulk": OperationVictim(
        config(
            "(FP16, 64, 64, 128, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_40_232"
            "+scores_together+lagged_dq+pingpong+persistent+sums_under_dk+wide_stores+bulk_sums"
        ),
        Semantics("causal", uneven=True),
        (
            Asked("b1 s70:140 h1 d56 causal", options=_STATISTICS),
            # One step for each block of keys.
            Asked("b1 s40:150 h2 d64 causal"),
            Asked("b1 s100:40 h2:1 d64 causal", spoiled="unseeing queries"),
            Asked("b1 s130:300 h2:1 d56 causal", options=_STATISTICS),
            *(Asked("b1 s200:330 h1 d64 causal", schedule_seed=seed) for seed in range(3)),
        ),
        sm_count=2,
    ),
    "unseen keys": OperationVictim(
        config(
            "(FP16, 64, 64, 128, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_40_232"
            "+scores_together+lagged_dq+pingpong+persistent+sums_under_dk+wide_stores"
        ),
        Semantics("window", uneven=True),
        (
            Asked("b1 s70:600 h2:1 d64 window", options={"left": 150, "right": 0}),
            *(
                Asked("b1 s40:600 h4:2 d64 window", options=_NEAR, schedule_seed=n)
                for n in range(3)
            ),
        ),
        sm_count=1,
    ),
    "split": OperationVictim(
        config(
            "(FP16, 192, 64, 64, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_24_240"
            "+split_roles+wide_stores+early_rows"
        ),
        Semantics("causal", uneven=True),
        (
            Asked("b1 s200:100 h2:1 d192 causal", options=_STATISTICS),
            *(Asked("b1 s200:70 h1 d192 causal", schedule_seed=seed) for seed in range(3)),
        ),
    ),
    "ordered": OperationVictim(
        config(
            "(FP16, 64, 64, 128, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_24_240"
            "+scores_ahead+early_exp+lagged_dq+pingpong+ordered_dq"
        ),
        Semantics("causal", uneven=True),
        (
            Asked("b1 s60:250 h1 d64 causal"),
            Asked("b1 s300:300 h2:1 d64 causal", schedule_seed=4),
            Asked("b1 s300:300 h2:1 d64 causal", schedule_seed=5),
        ),
        sm_count=2,
    ),
    # One stage of V, two of K: a step's dq beside the next step's scores.
    "dq alone": OperationVictim(
        config("(FP16, 64, 128, 64, 2): tma_dq+k_stages_2+v_stages_1+regs_24_240+late_dq+pingpong"),
        Semantics("causal", uneven=True),
        (
            Asked("b1 s200:330 h1 d64 causal only_dq", options=_STATISTICS),
            Asked("b1 s100:40 h2:1 d64 causal only_dq", spoiled="unseeing queries"),
            Asked("b1 s100:40 h1 d64 causal only_dq", spoiled="last key"),
            *(Asked("b1 s200:330 h1 d64 causal only_dq", schedule_seed=s) for s in range(3)),
            # Steps of an odd number, and one step with a warpgroup that lags: turns that are lost.
            Asked("b1 s200:270 h1 d64 causal only_dq", schedule_seed=0),
            Asked("b1 s70:40 h1 d64 causal only_dq", schedule_seed=10),
            Asked("b2 s130:192 h4:2 d64 causal only_dq", options=_STATISTICS),
        ),
    ),
    # do has fewer places than Q: only its own release keeps a step's statistics from the next ones.
    "one place of do": OperationVictim(
        config(
            "(FP16, 64, 64, 128, 2): tma_backward+q_stages_2+do_stages_1+ds_stages_1+regs_24_240"
        ),
        Semantics(),
        (Asked("b1 s192:128 h1 d64"),),
    ),
    "one place of do beside two scores": OperationVictim(
        config(
            "(FP16, 64, 64, 128, 2): tma_backward+q_stages_2+do_stages_1+ds_stages_1+regs_24_240"
            "+scores_together"
        ),
        Semantics(),
        (Asked("b1 s192:128 h1 d64"),),
    ),
    "two kernels": OperationVictim(
        config("(BF16, 64, 32, 32, 4): backward+columns_2"),
        Semantics("window", softcap=True, packed=True, uneven=True),
        (
            Asked(_PACKED, options=_STATISTICS | _NARROW),
            Asked(_PACKED, options=_NARROW | {"unneeded": ("dk",)}),
            Asked(_PACKED, options=_NARROW | {"unneeded": ("dv",)}),
            Asked(_CUT, options=_WIDE),
            Asked(_CUT, options={"scale": 2.0} | _WIDE, spoiled="low scores"),
            Asked(_PACKED, "nonfinite", _STATISTICS | _NARROW),
            Asked(_PACKED, "neighbours", _NARROW),
            Asked(_PACKED, options=_NARROW, spoiled="unseeing queries"),
            Asked(_PACKED, options=_NARROW, spoiled="last key"),
            Asked(_PACKED, options=_NARROW, spoiled="last value"),
            Asked(_LONG, options=_STATISTICS | _LONGEST, spoiled="no do"),
            Asked(_PACKED, options={"grad_dtype": "float32"} | _NARROW),
        ),
    ),
}

BOTH = ("atomics", "two kernels")
for _name in BOTH:
    shared_kernels.want([VICTIMS[_name].config], VICTIMS[_name].semantics)

OPERATORS = (*operators(128), *SUM_OPERATORS)
# Which products add to what was there is a matter of their number in a loop: MISTAKES has those
# that are wrong. The leading offset leads to a second panel of columns, which d 64 does not have.
_ELSEWHERE = ("always accumulate", "never accumulate", "B's leading offset")
HOPPER_OPERATORS = tuple(known for known in hopper_operators() if known.name not in _ELSEWHERE)
#: Of each other operator.
#: All of wgmma_dq, a short kernel.
SAMPLED = {"atomics": 3, "two kernels": 3, "wgmma": 1, "bulk": 1, "dq alone": 100}
#: Kernels of each victim, and into how many tests their mutants are cut.
PARTS = {
    "atomics": {"main": 3, "finish": 1, "prepare": 1, "sinks": 1},
    "two kernels": {"main": 3, "queries": 3, "prepare": 1, "gaps": 1, "sinks": 1},
    "wgmma": {"main": 5, "finish": 1},
    "bulk": {"main": 5},
    "dq alone": {"main": 3},
}
_CLEARED_IN_VAIN = (
    "A row that the kernel takes for one of a gap is written again by the kernels behind it. And "
    "none of a gap is taken for a sequence's: a sequence claims as many rows as the longest has at "
    "most, from its own first, from row 0 or from a later one's first; the next gap lies behind."
)
_DV_IS_WAITED_FOR = (
    "The next wait is for dv, too, before anybody touches it or P. do is given back before it is "
    "read, but the producer waits first for the place of Q of the same step, with as many stages, "
    "which is given back behind all products. MISTAKES has it with fewer places of do."
)
_NEVER_BLOCKS = (
    "The producer's first wait for a place, apart from its loop. It never blocks: it waits for the "
    "phase before the barrier's first, and the first ends when consumers release the place, which "
    "this thread fills behind the wait."
)
_NO_UNSEEN_KEYS = (
    "Of a block of keys that no query sees. With a causal mask the last query sees all keys: "
    "MISTAKES has what is wrong there with a window."
)
EQUIVALENT = (
    Equivalent(
        ("drop wait", "weaken wait"),
        BOTH,
        "main",
        "run_steps<false>(steps);\ncp_async_wait<0>();\n__syncthreads();",
        "Behind the last step nothing is under way: what was committed last is an empty group.",
    ),
    Equivalent(
        ("drop barrier",),
        ("two kernels",),
        "main",
        "cp_async_wait<0>();\n__syncthreads();\n}",
        "With one stage the last step ended with a barrier, and no thread has read a tile since.",
    ),
    Equivalent(
        ("drop shared store", "store shared next chunk"),
        BOTH,
        "main",
        "store_shared_16B(Q_tile(at.stage()) + place, uint4{0, 0, 0, 0});",
        "Of a loop that the compiler unrolls four times: a thread clears two chunks of a tile at "
        "most, and the copies for more never run. Of those that run mutants are caught.",
    ),
    Equivalent(
        ("drop global load", "load global next chunk"),
        ("two kernels",),
        "gaps",
        "const int begin = min(max(cu_seqlens[batch], 0), total);",
        _CLEARED_IN_VAIN,
    ),
    Equivalent(
        ("drop global load", "load global next chunk"),
        ("two kernels",),
        "gaps",
        "const int end = min(max(cu_seqlens[batch + 1], begin), total);",
        _CLEARED_IN_VAIN,
    ),
    *(
        Equivalent(
            ("drop global store", "store global next chunk"),
            ("atomics",),
            "prepare",
            "args.dq_sums + (statistic + row) * Kernel::dq_sum_columns + column,",
            "A lane clears two chunks of a row of d 64; the loop is laid out for one to three and "
            "then four at a time, and the stores from the third on never run.",
            place=place,
        )
        for place in range(2, 7)
    ),
    Equivalent(
        ("drop fence",),
        ("wgmma",),
        "main",
        "wgmma_fence(scores);",
        "All but the first, which is missed, come behind another product's fence, dP's behind dv's "
        "and the next S's behind dk's, and in between no thread touches a register of theirs.",
    ),
    Equivalent(
        ("drop fence",),
        ("bulk",),
        "main",
        "wgmma_fence(scores);",
        "All but the first, which is missed, come behind another product's fence, dP's behind S's "
        "and S's behind the last step's dv's, and in between no thread touches a register of "
        "theirs.",
    ),
    Equivalent(
        ("drop fence",),
        ("bulk",),
        "main",
        "wgmma_fence(gradient, a);",
        "dk's comes behind dv's of the same step, and dS was rounded before that. dv's are missed.",
    ),
    Equivalent(
        ("drop fence",),
        ("bulk",),
        "main",
        "wgmma_fence(dq);",
        "It comes behind dv's, and dq was read before that. In between it becomes 0, which the "
        "product is told to ignore.",
    ),
    Equivalent(
        ("drop barrier",),
        ("bulk",),
        "main",
        "tma_store_fence();\n__syncwarp();\nif (lane == 0)\nc.order.arrive();",
        "Behind dS's stores the warpgroup has met to take its turn, so that the fence of the lane "
        "that arrives is behind every lane's stores.",
    ),
    Equivalent(
        ("do not wait",),
        ("bulk",),
        "main",
        "while (!mbarrier_try_wait(barrier, parity)) {",
        "The wait for dS's place in the first step of a block of keys. K of this block was asked "
        "for when every warp had given back the last one's, behind all of its products.",
        place=5,
    ),
    Equivalent(
        ("do not wait",),
        ("bulk",),
        "main",
        "while (!mbarrier_try_wait(barrier, parity)) {",
        "The wait for dS of the step before, from the second step on. It comes behind a turn that "
        "the other warpgroup gave when it had committed that dS, and begun its next scores.",
        place=10,
    ),
    Equivalent(
        ("do not wait",),
        ("bulk",),
        "main",
        "while (!mbarrier_try_wait(barrier, parity)) {",
        "The producer's wait for K's place. It has waited for it with the block's number.",
        place=15,
    ),
    # Of a block's first step, and of the others.
    *(
        Equivalent(
            ("do not wait",),
            ("bulk",),
            "main",
            "while (!mbarrier_try_wait(barrier, parity)) {",
            "The producer's wait for a place of do. It has waited for the place of Q of the same "
            "step, with as many stages, and every warp releases do of a step before that step's Q.",
            place=place,
        )
        for place in (16, 19)
    ),
    Equivalent(
        ("do not wait",),
        ("bulk",),
        "main",
        "while (!mbarrier_try_wait(barrier, parity)) {",
        "The producer's wait for V's place. It has waited for K's, which a warp releases behind V.",
        place=17,
    ),
    Equivalent(
        ("do not wait",),
        ("bulk",),
        "main",
        "while (!mbarrier_try_wait(barrier, parity)) {",
        _NO_UNSEEN_KEYS,
        place=20,
    ),
    Equivalent(
        ("drop arrival",),
        ("bulk",),
        "main",
        "send_number(number);\nmbarrier_arrive(K.full());\nK.state.advance();",
        _NO_UNSEEN_KEYS,
    ),
    Equivalent(
        ("drop wait", "weaken wait"),
        ("bulk",),
        "main",
        "wgmma_wait<kBeside ? 2 : 1>(c.dv, c.P);\nc.d_o.consumer_release(c.warp, c.lane);",
        _DV_IS_WAITED_FOR,
    ),
    # dv's, in the first step and in the others.
    *(
        Equivalent(
            ("drop commit",),
            ("bulk",),
            "main",
            "run(gradient, a[step], b + Panel::row_step(step), 1);\nwgmma_commit();",
            "The product joins the next one's group, and no wait is for it alone. "
            + _DV_IS_WAITED_FOR,
            place=place,
        )
        for place in (2, 6)
    ),
    Equivalent(
        ("wait for reads",),
        ("bulk",),
        "main",
        "cp.async.bulk.wait_group 0;",
        "Nobody reads the sums before the next kernel, and a kernel's end waits for its writes.",
    ),
    Equivalent(
        ("drop fence",),
        ("wgmma",),
        "main",
        "wgmma_fence(dq);",
        "It comes behind the fence of S or dk, and dq was read before that.",
    ),
    Equivalent(
        ("drop commit",),
        ("wgmma",),
        "main",
        "run(gradient, a[step], b + Panel::row_step(step), 1);\nwgmma_commit();",
        "The product joins the next one's group, and every wait for either is a wait for both.",
    ),
    Equivalent(
        ("drop wait", "weaken wait"),
        ("wgmma",),
        "main",
        "c.compute_dq();\nwgmma_wait<0>(c.dk, c.dS);",
        "Behind the last step dq's sums have waited for all products.",
    ),
    Equivalent(
        ("do not wait",),
        ("wgmma",),
        "main",
        "while (!mbarrier_try_wait(barrier, parity)) {",
        "The producer's wait for a place of do. It has waited for the place of Q of the same step, "
        "with as many stages, and every warp releases do of a step before that step's Q.",
        place=-1,
    ),
    # Of Q, K, do and V.
    *(
        Equivalent(
            ("do not wait",),
            ("wgmma",),
            "main",
            "while (!mbarrier_try_wait(barrier, parity)) {",
            _NEVER_BLOCKS,
            place=place,
        )
        for place in range(-6, -2)
    ),
    # Of K and V.
    *(
        Equivalent(
            ("do not wait",),
            ("dq alone",),
            "main",
            "while (!mbarrier_try_wait(barrier, parity)) {",
            _NEVER_BLOCKS,
            place=place,
        )
        for place in (6, 7)
    ),
    Equivalent(
        ("wait for the next barrier",),
        ("dq alone",),
        "main",
        "while (!mbarrier_try_wait(barrier, parity)) {",
        "The producer's first wait for K's place. The next barrier is full of the other place, "
        "whose first phase this thread has not begun either. " + _NEVER_BLOCKS,
        place=6,
    ),
    *(
        Equivalent(
            ("drop fence",),
            ("dq alone",),
            "main",
            source,
            "It comes behind the fence of the same step's S, and in between no thread touches a "
            "register of its product: dP was read and dS rounded before. S's are missed, and that "
            "of the last dq.",
            place=place,
        )
        for place, source in (
            (2, "wgmma_fence(scores);"),
            (4, "wgmma_fence(dq, dS);"),
            (5, "wgmma_fence(scores);"),
        )
    ),
    Equivalent(
        ("another barrier",),
        ("dq alone",),
        "main",
        "if (warpgroup == kWarpgroups - 1)\n"
        "named_barrier_arrive(kFirstBarrier, 2 * kWarpgroupThreads);",
        "It admits the second warpgroup in place of the first. Turns are an order for speed's "
        "sake: the ring is the same from there on, and in the end nobody waits for what is left.",
    ),
    Equivalent(
        ("drop barrier",),
        ("wgmma",),
        "main",
        "compute_dS(D);\n__syncwarp();\nd_o.consumer_release(warp, lane);",
        "Before the producer waits for a place of do it has waited for the place of Q of the same "
        "step, with as many stages, and a warp releases that Q behind the commit of dS, whose "
        "__syncwarp all lanes reach when they have read D. Behind the last step nobody waits for "
        "the place. MISTAKES has it with fewer places of do.",
    ),
    Equivalent(
        ("drop arrival",),
        ("wgmma",),
        "main",
        "FS_DEVICE void consumer_release(int warp, int lane) {",
        "Behind the last step: nobody waits for this place of do any more.",
        place=-3,
    ),
    Equivalent(
        ("drop arrival",),
        ("wgmma",),
        "main",
        "const uint32_t empty = barriers().empty(read.stage());\n"
        "if (lane == 0) mbarrier_arrive(empty);",
        "Behind the last step: nobody waits for this place of dS any more.",
        place=-1,
    ),
    Equivalent(
        ("another barrier",),
        ("wgmma", "bulk", "dq alone"),
        "main",
        "__syncthreads();",
        "All threads meet at the other number, which only consumers use, later.",
    ),
    Equivalent(
        ("another barrier",),
        ("wgmma",),
        "main",
        "named_barrier_wait(kRowsBarrier, Kernel::consumer_threads);",
        "All consumers meet at the other number, and nobody else uses it.",
    ),
)
#: Mistakes that change nothing, and why.
HARMLESS = {
    "a sequence's last row is in a gap": "gaps runs first: what it clears in vain is written again "
    "by the kernels behind it, which write every row of every sequence.",
    "the last sums are only read": "Nobody reads the sums before the next kernel, and a kernel's "
    "end waits for its writes.",
}


def operators_of(name: str, role: str) -> tuple[Operator, ...]:
    hopper = VICTIMS[name].arch == 90 and role == "main"
    return HOPPER_OPERATORS if hopper else OPERATORS


SUITE = MutantSuite(VICTIMS, PARTS, MISTAKES, EQUIVALENT, operators_of, SAMPLED, HARMLESS)


PLANS = ["half of dq_sums", "without finish", "finish first", "queries first", "half of D"]


@pytest.mark.parametrize(
    ("name", "every"),
    [*((name, False) for name in BOTH)]
    + [pytest.param(name, True, marks=pytest.mark.full) for name in (*BOTH, "wgmma")],
)
def test_wrong_plans_are_caught(name: str, every: bool) -> None:
    changed = SUITE.plans(name)
    assert len(changed) >= 13
    chosen = {change: plan for change, plan in changed.items() if every or change in PLANS}
    assert not SUITE.unnoticed_plans(name, chosen)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
def test_what_synchronises_is_missed(every: bool) -> None:
    of_operator = {
        operator: [it for it in SUITE.sample("atomics", "main") if it.operator == operator]
        for operator in ("drop barrier", "drop wait")
    }
    assert sum(map(len, of_operator.values())) >= 6
    chosen = [it for group in of_operator.values() for it in (group if every else group[:1])]
    alive = SUITE.survivors("atomics", "main", chosen)
    assert alive == SUITE.uncaught("atomics", "main", chosen)


@pytest.mark.full
def test_there_are_enough() -> None:
    sampled = SUITE.whole_sample()
    assert len(sampled) >= 300
    assert {mutant.operator for mutant in sampled} >= {operator.name for operator in OPERATORS}
    assert sum(map(len, MISTAKES.values())) >= 60
