"""Properties of gradients that hold bit by bit, and the mistakes that others have made, each with
its test."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import shared_kernels
from backward_cases import Asked
from test_far_offsets import far_on_host

import flashsmith
from flashsmith.families import DType, KernelConfig, Problem, Semantics
from flashsmith.families import parse_kernel_name_into_config as parse
from flashsmith.runtime.libraries import loaded_kernels
from flashsmith.runtime.operation_run import prepare_operation
from flashsmith.verify import reference_of
from ptxlab.checks import all_checks

TESTS = Path(__file__).parents[1]

# Kernels that tests/csrc/test_backward.py and tests/csrc/test_wgmma_backward.py have, too.
REPEATABLE = parse("(FP16, 64, 64, 64, 4): backward")
FREE = parse("(FP16, 64, 64, 64, 4): backward+stages_2+dq_atomics")
SHARING = parse("(BF16, 96, 32, 64, 4): backward+columns_2+stages_2")
HOPPER = parse(
    "(FP16, 64, 64, 128, 2): tma_backward+q_stages_2+do_stages_2+ds_stages_3+regs_24_240"
    "+scores_ahead+lagged_dq+pingpong+sums_under_dk+wide_stores"
)
PERSISTENT = parse(
    "(BF16, 64, 64, 192, 3): tma_backward+q_stages_3+do_stages_2+ds_stages_2+regs_32_160"
    "+scores_together+early_exp+lagged_dq+persistent"
)
CAUSAL, PACKED = Semantics("causal", uneven=True), Semantics("causal", packed=True, uneven=True)
EVERY = [REPEATABLE, FREE, HOPPER]
for _cfg in (*EVERY, SHARING, PERSISTENT):
    shared_kernels.want([_cfg], CAUSAL)


def drawn(cfg: KernelConfig, text: str, **options: Any) -> dict[str, Any]:
    """Tensors of a call of backward(), by name."""
    problem = Problem.parse(f"{text} {cfg.dtype.name.lower()} backward")
    reference = reference_of(problem.computed)
    asked = reference.options(problem, **options)
    case = reference.case(cfg, problem, kind="random", seed=3, options=asked)
    return dict(case.inputs)


def gradients(cfg: KernelConfig, inputs: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What backward() returns, by name."""
    tensors = dict(inputs)
    first = [tensors.pop(name) for name in ("do", "q", "k", "v", "o", "lse")]
    found = flashsmith.backward(*first, **tensors, **options, config=cfg, emulate=True)
    return {name: array for name, array in found._asdict().items() if array is not None}


# ---- bit by bit ----


@pytest.mark.parametrize(("cfg", "power"), [(SHARING, -20), (PERSISTENT, 11)], ids=str)
def test_linear_in_do(cfg: KernelConfig, power: int) -> None:
    """Powers of two pass through everything that rounds; of fp16 some would leave its range."""
    inputs = drawn(cfg, f"b1 s50:90 h2:1 d{cfg.d_head} causal", sinks=True, dlse=True)
    scaled = dict(inputs)
    for name in ("do", "dlse"):
        scaled[name] = inputs[name] * inputs[name].dtype.type(2.0**power)
    once, found = (gradients(cfg, given, causal=True) for given in (inputs, scaled))
    assert set(found) == {"dq", "dk", "dv", "dsinks"}
    for name, gradient in found.items():
        expected = once[name].astype(np.float64) * 2.0**power
        np.testing.assert_array_equal(gradient.astype(np.float64), expected)


@pytest.mark.parametrize("cfg", EVERY, ids=str)
def test_grouped_heads_are_sums(cfg: KernelConfig) -> None:
    """dq has the bits that it has with a copy of k and v for each head; dk and dv are the copies'
    gradients, added in fp32."""
    inputs = drawn(cfg, f"b1 s40:70 h4:2 d{cfg.d_head} causal")
    copies = inputs | {name: np.repeat(inputs[name], 2, axis=2) for name in "kv"}
    grouped, single = (
        gradients(cfg, given, causal=True, grad_dtype="float32") for given in (inputs, copies)
    )
    np.testing.assert_array_equal(grouped["dq"], single["dq"])
    for name in ("dk", "dv"):
        pairs = single[name].astype(np.float64)
        expected = pairs[:, :, 0::2] + pairs[:, :, 1::2]
        size = np.abs(pairs[:, :, 0::2]) + np.abs(pairs[:, :, 1::2])
        assert (np.abs(grouped[name] - expected) <= 1e-5 * (size + size.max())).all()


@pytest.mark.full
@pytest.mark.parametrize("cfg", EVERY, ids=str)
def test_packed_sequences_have_the_bits_of_dense_ones(cfg: KernelConfig) -> None:
    shared_kernels.load([cfg], PACKED)
    lengths = ((40, 70), (1, 3), (75, 20))
    dense = []
    for seq_q, seq_k in lengths:
        text = f"b1 s{seq_q}:{seq_k} h2:1 d{cfg.d_head} causal {cfg.dtype.name.lower()} backward"
        problem = Problem.parse(text)
        dense.append(reference_of(problem.computed).draw(problem, "random", seq_q))
    packed: dict[str, Any] = {
        name: np.concatenate([given[name][0] for given in dense]) for name in dense[0]
        if name != "lse"
    }  # fmt: skip
    packed["lse"] = np.concatenate([given["lse"][0] for given in dense], axis=-1)
    for side, name in enumerate(("cu_seqlens_q", "cu_seqlens_k")):
        packed[name] = np.cumsum([0, *(pair[side] for pair in lengths)]).astype(np.int32)
    found = gradients(cfg, packed, causal=True)
    repeatable = cfg.family.is_deterministic(cfg)
    for name in ("dk", "dv", *(["dq"] if repeatable else [])):
        parts = [gradients(cfg, given, causal=True)[name][0] for given in dense]
        np.testing.assert_array_equal(found[name], np.concatenate(parts))


# ---- what others got wrong ----


@pytest.mark.full
@pytest.mark.parametrize("cfg", EVERY, ids=str)
def test_keys_that_are_not_there_have_no_part(cfg: KernelConfig) -> None:
    """All scores lie far below 0, where those of keys behind the last are 0: exp of their
    difference to lse is infinite."""
    for sizes in ("b1 s70:70 h1", "b1 s130:200 h1", "b1 s64:65 h1"):
        asked = Asked(f"{sizes} d{cfg.d_head}", options={"scale": 2.0}, spoiled="low scores")
        shared_kernels.load([cfg], asked.problem(cfg).required_semantics(cfg))
        assert not asked.reasons(cfg, all_checks())


@pytest.mark.parametrize("cfg", EVERY, ids=str)
def test_nothing_to_see(cfg: KernelConfig) -> None:
    """No query leaves zeros in dk and dv, no key leaves them in dq; a sink then has all of P."""
    inputs = drawn(cfg, f"b1 s20:30 h2:1 d{cfg.d_head} causal", sinks=True, dlse=True)
    queries = {name: inputs[name][:, :0] for name in ("do", "q", "o")}
    statistics = {name: inputs[name][..., :0] for name in ("lse", "dlse")}
    found = gradients(cfg, inputs | queries | statistics, causal=True)
    assert found["dk"].shape == inputs["k"].shape
    assert not any(array.any() for array in found.values())
    keys = {name: inputs[name][:, :0] for name in "kv"}
    sinks = np.broadcast_to(inputs["sinks"][None, :, None], inputs["lse"].shape)
    empty = {"o": np.zeros_like(inputs["o"]), "lse": sinks.astype(np.float32)}
    found = gradients(cfg, inputs | keys | empty, causal=True)
    assert found["dq"].shape == inputs["q"].shape
    assert not found["dq"].any()
    np.testing.assert_allclose(found["dsinks"], inputs["dlse"].sum((0, 2)), rtol=1e-5, atol=1e-5)


def _expanded(do: np.ndarray) -> np.ndarray:
    return np.broadcast_to(do[:1, :1, :1], do.shape)


def _of_one_number(do: np.ndarray) -> np.ndarray:
    return np.broadcast_to(do[:1, :1, :1, :1], do.shape)


def _transposed(do: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(do.swapaxes(1, 2)).swapaxes(1, 2)


def _column_first(do: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(do, 3, 0)).transpose(1, 2, 3, 0)


@pytest.mark.parametrize("cfg", EVERY, ids=str)
def test_do_of_any_strides(cfg: KernelConfig) -> None:
    """That of ``o.sum().backward()`` has strides of 0."""
    inputs = drawn(cfg, f"b2 s30:40 h2:1 d{cfg.d_head} causal")
    for change in (_expanded, _of_one_number, _transposed, _column_first):
        do = change(inputs["do"])
        found = gradients(cfg, inputs | {"do": do}, causal=True)
        dense = gradients(cfg, inputs | {"do": np.ascontiguousarray(do)}, causal=True)
        for name, gradient in found.items():
            np.testing.assert_array_equal(gradient, dense[name], err_msg=change.__name__)


@pytest.mark.parametrize("cfg", EVERY, ids=str)
def test_no_dimension_of_a_grid_has_a_low_limit(cfg: KernelConfig) -> None:
    """A grid's y and z end at 65,535: with 70,000 sequences all CTAs lie along x."""
    batch = 70_000
    dtype = ml_dtypes.bfloat16 if cfg.dtype is DType.BF16 else np.float16
    many: dict[str, Any] = {
        name: np.zeros((batch, 1, 1, cfg.d_head), dtype) for name in ("do", "q", "k", "v", "o")
    }
    many["lse"] = np.zeros((batch, 1, 1), np.float32)
    problem = Problem.parse(
        f"b{batch} s1 h1 d{cfg.d_head} causal {cfg.dtype.name.lower()} backward"
    )
    shared_kernels.load([cfg], CAUSAL)
    prepared = prepare_operation(cfg, problem, many, emulate=True)
    assert prepared.kernel is not None
    plan = prepared.kernel.plan(prepared.call)
    assert all(launch.grid[0] >= batch and launch.grid[1:] == (1, 1) for launch in plan.launched)


@pytest.mark.parametrize("name", ["do", "q", "k", "v", "o"])
def test_offsets_beyond_32_bits(name: str) -> None:
    inputs = drawn(FREE, "b1 s20:30 h2:1 d64 causal")
    near = gradients(FREE, inputs, causal=True)
    far = gradients(FREE, inputs | {name: far_on_host(inputs[name], 1)}, causal=True)
    for gradient, expected in zip(far.values(), near.values(), strict=True):
        np.testing.assert_array_equal(gradient, expected)


@pytest.mark.parametrize("cfg", EVERY, ids=str)
def test_launches_do_not_overlap(cfg: KernelConfig) -> None:
    """No kernel begins before those that it needs have ended: nothing is to be waited for."""
    shared_kernels.load([cfg], CAUSAL)
    modules = loaded_kernels.get(cfg, cfg.OLDEST_ARCH, CAUSAL).modules
    assert len(modules) == 5
    assert not any("griddepcontrol" in module for module in modules.values())


# ---- the list ----

_HERE = "semantics/test_backward_properties.py::"
_KERNELS = ("csrc/test_backward.py::", "csrc/test_wgmma_backward.py::")
_MUTANTS = "mutants/test_backward_mutants.py::test_mistakes_are_caught"
_AUTOGRAD = "integrations/test_autograd.py::"


def _in_both(*names: str) -> list[str]:
    return [folder + name for folder in _KERNELS for name in names]


#: Mistakes that implementations of the backward pass have had, and the tests that would show them.
MISTAKES = {
    "P of keys that are not there is infinite (NaN in dq where lse is low)": [
        _HERE + "test_keys_that_are_not_there_have_no_part",
        _MUTANTS,
    ],
    "statistics of rows that are not there hold anything": [
        *_in_both("test_causal_and_uneven", "test_packed_windows_with_a_softcap"),
        _MUTANTS,
    ],
    "lse of -inf, rows without keys": [
        *_in_both("test_causal_and_uneven", "test_hard_inputs"),
        _KERNELS[0] + "test_rows_without_keys_may_hold_anything",
        _MUTANTS,
    ],
    "sequences of no rows": [
        _HERE + "test_nothing_to_see",
        *_in_both("test_packed_windows_with_a_softcap"),
    ],
    "garbage in gradients of rows that no sequence has": [
        *_in_both("test_packed_windows_with_a_softcap"),
        _KERNELS[0] + "test_rows_behind_the_longest_length_have_gradients_of_0",
        "mutants/test_backward_mutants.py::test_wrong_plans_are_caught",
    ],
    "the flag for determinism is dropped, sums ordered by time": [
        _KERNELS[0] + "test_only_atomics_depend_on_the_schedule",
        _AUTOGRAD + "test_repeatable_as_asked_at_the_forward_call",
        _AUTOGRAD + "test_a_free_kernel_is_refused_at_the_forward_call",
    ],
    "wait_group.read where sums must be in memory": [
        "ptxlab/test_bulk_copies.py::test_sums_may_be_read_behind_a_full_wait",
        "ptxlab/test_hopper_mutants.py::test_mutants_are_caught",
    ],
    "a dependent launch does not wait": [_HERE + "test_launches_do_not_overlap"],
    "do with strides of 0, or transposed": [_HERE + "test_do_of_any_strides"],
    "limits of grids and of 32-bit offsets": [
        _HERE + "test_no_dimension_of_a_grid_has_a_low_limit",
        _HERE + "test_offsets_beyond_32_bits",
    ],
    "sinks: the gradient of lse left out, no keys": [_HERE + "test_nothing_to_see", _MUTANTS],
    "lse silently without a gradient": [_AUTOGRAD + "test_through_the_log_sum_exp_alone"],
    "a second derivative that is silently wrong": [
        _AUTOGRAD + "test_what_the_kernels_cannot_is_an_error"
    ],
    "operators that a compiler gets wrong": [
        _AUTOGRAD + "test_opcheck",
        _AUTOGRAD + "test_compiled",
    ],
    "parts of the keys: merged statistics, gradients that are not rounded": [
        *_in_both("test_causal_and_uneven")
    ],
    "heads that share keys": [_HERE + "test_grouped_heads_are_sums", _MUTANTS],
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_has_a_test(mistake: str) -> None:
    for test in MISTAKES[mistake]:
        file, _, name = test.partition("::")
        body = ast.parse((TESTS / file).read_text()).body
        own = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        imported = {
            it.name for node in body if isinstance(node, ast.ImportFrom) for it in node.names
        }
        assert name in own | imported, test
