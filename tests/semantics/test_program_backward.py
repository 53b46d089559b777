"""Gradients with score and mask functions, proven in the emulator with all checks on."""

from __future__ import annotations

import numpy as np
import pytest
from plain_run import full_after, full_except
from program_calls import PROGRAMS, Call
from program_gradients import draw_gradients, run_drawn, wrong_gradients

from flashsmith.families import KernelConfig, parse_kernel_name_into_config

# wgmma_backward with one block of keys after another, with three warpgroups that take turns to
# compute dq, with dq in a fixed order, and with wide heads in both ways; wgmma_dq; and both ways to
# sum dq in mma_sync_backward.
PERSISTENT, THREE, ORDERED, WIDE, WIDE_ORDERED, DQ, ATOMICS, TWO_KERNELS = (
    parse_kernel_name_into_config(text)
    for text in (
        "(FP16, 64, 64, 128, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_40_232"
        "+scores_together+lagged_dq+pingpong+persistent+sums_under_dk+early_rows",
        "(FP16, 64, 64, 192, 3): tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_32_160"
        "+scores_together+lagged_dq+persistent",
        "(BF16, 64, 64, 128, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_40_232"
        "+scores_together+lagged_dq+pingpong+persistent+sums_under_dk+ordered_dq+early_rows",
        "(BF16, 256, 64, 64, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_24_240"
        "+split_roles+wide_stores+early_rows",
        "(BF16, 256, 64, 64, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_2+regs_40_232"
        "+split_roles+ordered_dq+wide_stores+early_rows",
        "(FP16, 64, 128, 128, 2): tma_dq+k_stages_3+v_stages_3+regs_24_240+late_dq+pingpong",
        "(FP16, 64, 32, 128, 4): backward+stages_2+dq_atomics",
        "(BF16, 64, 64, 64, 4): backward+columns_2+stages_2",
    )
)
LENS = {"lens_q": (70, 0, 1, 200), "lens_k": (75, 9, 0, 190)}
CALLS = {
    "dense": Call(),
    "window": Call(window=(40, 7), seq_q=90),
    "softcap": Call(softcap=1.5, seq_q=90, batch=1),
    "packed": Call(**LENS),
    "packed causal": Call(**LENS, causal=True),
    "no keys": Call(seq_q=10, seq_k=0),
    "many heads": Call(batch=1, seq_q=70, seq_k=330, heads_q=6, heads_k=1, d=64),
    "wide": Call(batch=1, d=232, causal=True),
    # Some rows see no key because of causality, others because of the program.
    "unattended": Call(batch=1, seq_q=150, seq_k=140, heads_q=2, heads_k=1, causal=True),
}


def prove(cfg: KernelConfig, name: str, call: Call, **how: object) -> None:
    made = PROGRAMS[name](call, np.random.default_rng(3))
    assert wrong_gradients(cfg, call, made, sm_count=3, **how) == ""


@pytest.mark.parametrize("name", full_except(PROGRAMS, "everything"))
def test_every_program(name: str) -> None:
    prove(PERSISTENT, name, CALLS["dense"])


KINDS_OF_CALLS = [it for it in CALLS if it not in ("dense", "no keys", "wide")]


@pytest.mark.parametrize("name", full_except(KINDS_OF_CALLS, "packed causal"))
def test_every_kind_of_call(name: str) -> None:
    prove(PERSISTENT, "alibi_in_documents", CALLS[name], sinks=True, dlse=True)


@pytest.mark.parametrize("name", full_after(1, ["documents", "widths"]))
def test_warpgroups_in_turns(name: str) -> None:
    prove(THREE, name, CALLS["many heads"])


@pytest.mark.parametrize("name", full_after(1, ["alibi_in_documents", "capped"]))
def test_dq_in_a_fixed_order(name: str) -> None:
    prove(ORDERED, name, CALLS["many heads"])


@pytest.mark.parametrize("name", full_after(1, ["alibi_in_documents", "capped"]))
def test_wide_heads(name: str) -> None:
    prove(WIDE, name, CALLS["wide"])


@pytest.mark.parametrize("name", full_after(1, ["alibi_in_documents", "capped", "blocks"]))
def test_dq_alone(name: str) -> None:
    prove(DQ, name, CALLS["packed"], needs=(True, False, False, False))


@pytest.mark.parametrize(
    ("cfg", "name"),
    [
        pytest.param(cfg, name, id=f"{name}-{how}", marks=[pytest.mark.full] * (name != plain))
        for cfg, how, plain in (
            (ATOMICS, "atomics", "everything"),
            (TWO_KERNELS, "two_kernels", ""),
        )
        for name in ("alibi_in_documents", "capped", "everything")
    ],
)
def test_mma_sync(cfg: KernelConfig, name: str) -> None:
    prove(cfg, name, CALLS["packed causal"], arch=80)


def test_rows_without_keys() -> None:
    prove(PERSISTENT, "scattered", CALLS["no keys"])


@pytest.mark.parametrize(
    "cfg",
    full_after(1, (DQ, TWO_KERNELS, ORDERED, WIDE_ORDERED)),
)
def test_bits_are_the_same_in_every_schedule(cfg: KernelConfig) -> None:
    """With deterministic=True, and blocks that lists leave out."""
    call = CALLS["unattended"]
    made = PROGRAMS["everything"](call, np.random.default_rng(3))
    drawn = draw_gradients(cfg, call, made)
    needs = (True, cfg is not DQ, cfg is not DQ, False)
    first, *others = (
        run_drawn(
            *(cfg, drawn),
            needs=needs,
            checks=False,
            sm_count=3,
            deterministic=True,
            schedule_seed=seed,
        ).outputs
        for seed in (None, 1, 2)
    )
    for other in others:
        for name, expected in first.items():
            np.testing.assert_array_equal(other[name], expected, err_msg=name)


UNATTENDED = [
    *((cfg, "everything") for cfg in (PERSISTENT, DQ, TWO_KERNELS)),
    *((cfg, "everything") for cfg in (ORDERED, WIDE, WIDE_ORDERED, ATOMICS)),
    *((PERSISTENT, name) for name in ("alibi_in_documents", "minus_infinity")),
]
QUICK = [(PERSISTENT, "everything", True), (DQ, "everything", False)]
OF_FULL = [
    (cfg, name, sinks)
    for cfg, name in UNATTENDED
    for sinks in (False, True)
    # A score of -inf beside a sink hides nothing.
    if (cfg, name, sinks) not in QUICK and not (sinks and name == "minus_infinity")
]


@pytest.mark.parametrize(("cfg", "name", "sinks"), full_after(len(QUICK), [*QUICK, *OF_FULL]))
def test_rows_that_see_no_key_may_be_nan(cfg: KernelConfig, name: str, sinks: bool) -> None:
    """Nothing of such rows gets into the gradients of others: they have the same bits."""
    call = CALLS["unattended"]
    made = PROGRAMS[name](call, np.random.default_rng(3))
    drawn = draw_gradients(cfg, call, made, sinks=sinks, dlse=True)
    unattended = ~drawn.inputs["o"].any(-1)
    assert 0 < unattended.sum() < unattended.size / 2
    needs = (True, cfg is not DQ, cfg is not DQ, True)

    def run(value: float) -> dict[str, np.ndarray]:
        inputs = {it: x.copy() for it, x in drawn.inputs.items()}
        for it in ("do", "q"):
            inputs[it][unattended] = value
        result = run_drawn(cfg, drawn._replace(inputs=inputs), needs=needs, sm_count=3)
        assert not result.emulation.findings
        return dict(result.outputs)

    clean, tainted = run(0.0), run(np.nan)
    for it, expected in clean.items():
        np.testing.assert_array_equal(tainted[it], expected, err_msg=it)
    assert not tainted["dq"][unattended].any()


@pytest.mark.parametrize("cfg", full_after(3, (PERSISTENT, TWO_KERNELS, DQ, WIDE, ATOMICS)))
def test_rows_that_see_no_key_have_no_gradient_whatever_keys_hold(cfg: KernelConfig) -> None:
    call = CALLS["unattended"]
    made = PROGRAMS["everything"](call, np.random.default_rng(3))
    drawn = draw_gradients(cfg, call, made, sinks=True)
    unattended = ~drawn.inputs["o"].any(-1)
    inputs = {**drawn.inputs, "k": np.full_like(drawn.inputs["k"], np.nan)}
    needs = (True, cfg is not DQ, cfg is not DQ, False)
    result = run_drawn(cfg, drawn._replace(inputs=inputs), needs=needs, sm_count=3)
    assert not result.outputs["dq"][unattended].any()
    assert np.isnan(result.outputs["dq"][~unattended].astype(np.float32)).all()
