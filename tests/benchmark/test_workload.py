"""Workloads: what implementations get, and that a wrong output is seen wherever it is looked at."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import shared_kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_ins import HostMemory

from flashsmith.benchmark import implementations
from flashsmith.benchmark import workload as workload_module
from flashsmith.benchmark.implementations import (
    OURS,
    OURS_FREE,
    attention_implementation,
    kernel_implementation,
)
from flashsmith.benchmark.tensor_memory import TorchMemory
from flashsmith.benchmark.workload import (
    BackwardWorkload,
    DecodeWorkload,
    LatentDecodeWorkload,
    Workload,
    row_blocks,
    workload_of,
)
from flashsmith.errors import ArgumentError
from flashsmith.families import Problem, parse_kernel_name_into_config
from flashsmith.operations import BACKWARD, DECODE, Call
from flashsmith.operations.latent_decode import LATENT_DECODE
from flashsmith.runtime.arguments import check_request
from flashsmith.runtime.request import check_operation
from flashsmith.semantics.signature import ForwardOptions
from flashsmith.verify import compute_references, engine, forward_reference, reference_of
from flashsmith.verify.proof_inputs import default_scale
from flashsmith.verify.tolerance import MIN_OUTPUTS, OutputErrors

# What other tests have, too.
CFG = parse_kernel_name_into_config(
    "(FP16, 64, 64, 32, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax"
)
EMULATED = [
    "b1 s64 h2 d64 fp16",
    "b2 s63 h2:1 d64 fp16 causal",
    "b2 s40 h2 d64 fp16 packed",
    "b2 s64 h2 d64 fp16 window softcap",
    "b2 s40 h2 d64 fp16 partial",
]
for _text in EMULATED:
    shared_kernels.want([CFG], Problem.parse(_text).required_semantics(CFG))


def workload(text: str, **options) -> Workload:
    return Workload(Problem.parse(text), memory=HostMemory(), **options)


def right_answer(w: Workload) -> np.ndarray:
    lens = {}
    if w.packed:
        p = w.problem
        lens = {"lens_q": (p.seq_q,) * p.batch, "lens_k": (p.seq_k,) * p.batch}
    scale = default_scale(w.problem.d)
    if w.problem.window is not None:
        lens["window"] = w.problem.window
    found = compute_references(
        w.q, w.k, w.v, scale, causal=w.causal, softcap=w.problem.softcap, **lens
    )
    return found.same_precision


PROBLEMS = [
    "b2 s96 h4 d32 fp16",
    "b2 s96 h4:2 d32 bf16 causal",
    "b3 s40:70 h2 d16 fp16 causal",
    "b3 s70:40 h2 d16 fp16 causal",
    "b3 s50 h4:1 d16 bf16 causal packed",
    "b2 s33:65 h2 d16 fp16 packed",
    "b2 s96 h2 d32 fp16 window",
    "b2 s40:70 h2 d16 bf16 window softcap",
    "b2 s50 h2 d16 fp16 window softcap packed",
    "b2 s64 h2 d16 fp16 softcap",
]


ON_GPU = [False, pytest.param(True, marks=pytest.mark.torch)]


def judge_few(monkeypatch: pytest.MonkeyPatch, scores: int) -> None:
    """Wherever the references are computed."""
    for name in ("SCORES_ON_HOST", "SCORES_ON_GPU"):
        monkeypatch.setattr(workload_module, name, scores)


@pytest.mark.parametrize("text", PROBLEMS)
@pytest.mark.parametrize("scores", [1 << 23, 600])
@pytest.mark.parametrize("on_gpu", ON_GPU, ids=["numpy", "torch"])
def test_the_right_answer_passes(text: str, scores: int, on_gpu: bool, monkeypatch) -> None:
    """Judged on all rows, and on a few of them; the host passes for PyTorch's GPU."""
    monkeypatch.setattr(workload_module, "gpu_engine_pays", lambda scores: on_gpu)
    monkeypatch.setattr(engine, "GPU", "cpu")
    judge_few(monkeypatch, scores)
    w = workload(text)
    verdict = w.check(right_answer(w))
    assert verdict.ok, verdict.reasons
    p = w.problem
    whole = 2 * p.seq_q * p.d
    assert verdict.outputs == whole if scores > 600 else verdict.outputs < whole


def last_rows(o: np.ndarray) -> np.ndarray:
    return o[-1:] if o.ndim == 3 else o[-1, -1:]


@pytest.mark.parametrize("text", PROBLEMS)
@pytest.mark.parametrize(
    "damage",
    [
        lambda o: o.reshape(-1, *o.shape[-2:])[0, 0].fill(3.0),
        lambda o: last_rows(o)[:, -1].fill(3.0),
        lambda o: last_rows(o)[:, -1].fill(np.nan),
        lambda o: np.multiply(o, 1.02, out=o),
    ],
)
def test_a_wrong_output_is_seen(text: str, damage: Callable, monkeypatch) -> None:
    judge_few(monkeypatch, 600)
    w = workload(text)
    o = right_answer(w)
    damage(o)
    assert not w.check(o).ok


@pytest.mark.parametrize("text", PROBLEMS)
def test_no_head_may_hold_what_is_not_finite(text: str) -> None:
    """Of the first sequence the last head is not compared, and of the last the first."""
    w = workload(text)
    last = w.problem.batch - 1, w.problem.heads_q - 1
    for sequence, head, value in ((0, last[1], np.nan), (last[0], 0, -np.inf)):
        o = right_answer(w)
        at = (sequence * w.problem.seq_q,) if w.packed else (sequence, 0)
        o[(*at, head)][3] = value
        verdict = w.check(o)
        assert verdict.reasons == ("1 outputs are NaN or infinite",)
        assert verdict.max_error < verdict.bound


def test_rows_between_those_that_are_compared_must_be_finite() -> None:
    w = workload("b1 s96 h1 d32 fp16")
    o = right_answer(w)
    assert w.check(o, scores=960).outputs == 3 * 3 * 32
    o[0, 10, 0, 0] = np.nan
    assert w.check(o, scores=960).reasons == ("1 outputs are NaN or infinite",)


def test_a_head_that_a_kernel_leaves_out_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    w = workload("b1 s64 h3 d64 fp16")

    def lazy(q, k, v, *, out, causal) -> None:
        out[:, :, ::2] = right_answer(w)[:, :, ::2]

    monkeypatch.setattr(implementations, "attention", lazy)
    implementation = attention_implementation(CFG, w)
    w.o[:] = right_answer(w)
    assert w.check(w.o).ok
    assert w.check(implementation.output()).reasons == ("4096 outputs are NaN or infinite",)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_pytorch_counts_where_the_tensor_is(dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
    memory = TorchMemory()
    tensor = torch.full(
        (2, 5, 3, 8), 7e4 if dtype != "float16" else 6e4, dtype=getattr(torch, dtype)
    )
    assert memory.nonfinite(tensor) == 0
    tensor[1, 2, 1, 3], tensor[0, 0, 0, 0] = torch.nan, -torch.inf
    assert memory.nonfinite(tensor) == memory.nonfinite(tensor.transpose(1, 2)) == 2


def test_how_much_is_judged_can_be_said_for_each_output(monkeypatch) -> None:
    made = []
    right = forward_reference.references_of

    def counted(attention, q, *others, **options):
        made.append(q.shape[1])
        return right(attention, q, *others, **options)

    monkeypatch.setattr(forward_reference, "references_of", counted)
    w = workload("b2 s96 h4 d32 fp16 causal")
    o = right_answer(w)
    made.clear()
    few, more = w.check(o, scores=960), w.check(o)
    assert few.ok
    assert more.ok
    assert few.outputs == 2 * 3 * 3 * 32
    assert more.outputs == 2 * 96 * 32
    again = w.check(o, scores=960)
    assert again == few
    # References are made once for each.
    assert made == [3] * 6 + [96] * 2


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 5000))
def test_sampled_rows_are_few_and_reach_both_ends(seq_q: int, seq_k: int, scores: int) -> None:
    blocks = row_blocks(seq_q, seq_k, scores)
    assert blocks[0].start == 0
    assert blocks[-1].stop == seq_q
    rows = [row for block in blocks for row in range(block.start, block.stop)]
    assert len(rows) == len(set(rows))
    assert len(rows) == seq_q or len(rows) * seq_k <= max(scores, 3 * seq_k)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 3))
def test_contents_are_random_and_equal_for_equal_seeds(seed: int) -> None:
    one, other = (workload("b2 s64 h2 d32 fp16", seed=seed) for _ in range(2))
    for name in "qkv":
        assert np.array_equal(getattr(one, name), getattr(other, name))
    assert not np.array_equal(one.k, one.v)
    assert not np.array_equal(one.q, workload("b2 s64 h2 d32 fp16", seed=seed + 1).q)


@pytest.mark.parametrize("words", ["window", "softcap", "window softcap"])
def test_a_window_and_a_cap_show_in_the_output(words: str) -> None:
    w = workload(f"b1 s96 h2 d32 fp16 {words}")
    plain = workload("b1 s96 h2 d32 fp16")
    assert not w.check(right_answer(plain)).ok
    assert w.options["causal"] is False
    assert ("window" in w.options, "softcap" in w.options) == ("window" in words, "soft" in words)


def test_an_empty_problem_is_refused() -> None:
    with pytest.raises(ArgumentError, match="nothing to compute"):
        workload("b0 s64 h1 d64 fp16")


@pytest.mark.parametrize("text", EMULATED)
def test_a_kernel_is_launched_on_the_workload_and_judged_there(text: str) -> None:
    """In the emulator, which runs host tensors."""
    w = workload(text)
    implementation = kernel_implementation(CFG, w)
    assert implementation.name == str(CFG)
    assert w.check(implementation.output()).ok
    before = w.o.copy()
    w.memory.poison(w.o)
    implementation.launch()
    assert np.array_equal(w.o, before)


def test_what_a_kernel_leaves_out_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    w = workload("b1 s64 h2 d64 fp16")

    def lazy(q, k, v, *, out, causal) -> None:
        out[:, :32] = right_answer(w)[:, :32]

    monkeypatch.setattr(implementations, "attention", lazy)
    implementation = attention_implementation(CFG, w)
    assert implementation.name == OURS
    w.o[:] = right_answer(w)
    assert w.check(w.o).ok
    assert not w.check(implementation.output()).ok


@pytest.mark.gpu
@pytest.mark.torch
@pytest.mark.parametrize("text", ["b2 s300 h4:2 d64 bf16 causal", "b2 s256 h4 d64 fp16 packed"])
def test_on_a_gpu_both_places_judge_alike(text: str) -> None:
    from flashsmith.benchmark.tensor_memory import DriverMemory
    from flashsmith.families import FlashForwardKernelConfig

    problem = Problem.parse(text)
    cfg = FlashForwardKernelConfig(
        problem.dtype, 64, 64, 64, 4, True, True, True, 0, 2, 2, True, True
    )
    for memory in (TorchMemory(), DriverMemory()):
        w = Workload(problem, memory=memory)
        assert w.check(kernel_implementation(cfg, w).output()).ok
        memory.poison(w.o)
        assert not w.check(w.o).ok


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ArgumentError, match="seed=-1"):
        Workload(Problem.parse("s64 d64 fp16"), seed=-1, memory=HostMemory())


# --- gradients ------------------------------------------------------------------------------------


def reference_attention(q, k, v, *, return_lse: bool, causal: bool, window=(None, None),
                        softcap=0.0, cu_seqlens_q=None, cu_seqlens_k=None, **lengths):  # fmt: skip
    lens = {}
    if cu_seqlens_q is not None:
        lens = {"lens_q": tuple(np.diff(cu_seqlens_q)), "lens_k": tuple(np.diff(cu_seqlens_k))}
    scale = default_scale(q.shape[-1])
    found = compute_references(
        q, k, v, scale, causal=causal, window=window, softcap=softcap, **lens
    )
    return found.o.astype(q.dtype), found.lse.astype(np.float32)


@pytest.mark.parametrize(
    "text",
    [
        "b2 s96:64 h4:2 d32 bf16",
        "b2 s64 h2 d64 fp16 causal softcap",
        "b2 s64:96 h2 d64 fp16 window",
        "b2 s40 h2 d64 fp16 causal packed",
    ],
)
def test_its_tensors_and_options_make_the_request_of_forward(text: str) -> None:
    """So that a kernel that is not among those built can be launched as any other."""
    w = workload(text)
    asked = check_operation(w.problem, w.tensors, options=w.call_options)
    of_forward = check_request((w.q, w.k, w.v, w.o), ForwardOptions(**w.options))
    both = asked, of_forward
    problems = [one.problem.required_semantics(CFG) for one in both]
    addresses = [{name: view.address for name, view in one.views.items()} for one in both]
    strides = [{name: view.strides for name, view in one.views.items()} for one in both]
    numbers = [
        w.problem.computed.numbers(Call(w.problem, of_one, one.sizes, one.options))
        for one, of_one in zip(both, strides, strict=True)
    ]
    assert problems[0] == problems[1]
    assert addresses[0] == addresses[1]
    assert numbers[0] == pytest.approx(numbers[1])
    assert list(asked.wanted) == list(of_forward.wanted) == []


@pytest.fixture
def backward(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], BackwardWorkload]:
    """Workloads of backward problems on the host, without a forward kernel."""
    monkeypatch.setattr(workload_module, "attention", reference_attention)

    def make(text: str) -> BackwardWorkload:
        made = workload_of(Problem.parse(f"{text} backward"), 3, HostMemory())
        assert isinstance(made, BackwardWorkload)
        return made

    return make


def right_gradients(w: BackwardWorkload) -> dict[str, np.ndarray]:
    """The rounded reference of the whole problem, by the operation's own reference."""
    p, reference = w.problem, reference_of(BACKWARD)
    lens = {}
    inputs = {name: getattr(w, name) for name in ("do", "q", "k", "v", "o", "lse")}
    if w.packed:
        lens = {"lens_q": (p.seq_q,) * p.batch, "lens_k": (p.seq_k,) * p.batch}
    return reference.expected(p, inputs, reference.options(p, **lens)).rounded


@pytest.mark.parametrize("text", PROBLEMS)
def test_right_gradients_pass_and_wrong_ones_do_not(text: str, backward: Callable) -> None:
    w = backward(text)
    right = right_gradients(w)
    assert set(w.output) == set(right) == {"dq", "dk", "dv"}
    verdict = w.check(right)
    assert verdict.ok, verdict.reasons
    for name in right:
        for place in ((0,) * right[name].ndim, (-1,) * right[name].ndim):
            wrong = {**right, name: right[name].copy()}
            wrong[name][place] += 1.0
            assert not w.check(wrong).ok, (name, place)
        # The first sequence's last head is not compared.
        wrong = {**right, name: right[name].copy()}
        wrong[name][(0,) * (wrong[name].ndim - 2)][-1, 0] = np.nan
        if w.problem.heads_k > 1:
            assert w.check(wrong).reasons == ("1 outputs are NaN or infinite",)
        assert not w.check(wrong).ok
    w.poison()
    assert not w.check(w.output).ok


def test_a_backward_kernel_gets_what_it_reads(backward: Callable, monkeypatch) -> None:
    given = {}

    def prepare(cfg, problem, tensors, *, options):
        given.update(tensors, **options)
        return SimpleNamespace(run=lambda: None)

    monkeypatch.setattr(workload_module, "prepare_operation", prepare)
    w = backward("b2 s50 h2 d16 fp16 window softcap packed")
    w.call(CFG)
    assert given["dq"] is w.output["dq"]
    assert given["cu_seqlens_k"] is w.cu_seqlens_k
    assert (given["left"], given["right"], given["softcap"]) == (25, 0, 30.0)
    given.clear()
    dense = backward("b2 s96 h4:2 d32 bf16 causal")
    dense.call(CFG)
    names = {"do", "q", "k", "v", "o", "lse", "dq", "dk", "dv", "left", "right", "softcap"}
    assert set(given) == names


@pytest.mark.parametrize("text", PROBLEMS[:4])
def test_gradients_of_a_peer_are_measured_by_ours(text: str, backward: Callable) -> None:
    w = backward(text)
    right = right_gradients(w)
    ours = w.check(right)
    assert set(ours.errors) == set(right)
    assert w.check(right, ours=ours).ok
    for name in right:
        for factor, is_right in ((2.9, True), (3.1, False)):
            errors = dict(ours.errors)
            errors[name] = OutputErrors(*(error / factor for error in errors[name]))
            verdict = w.check(right, ours=replace(ours, errors=errors))
            assert verdict.ok == is_right, (name, factor, verdict.reasons)
            assert all(reason.startswith(f"{name}: ") for reason in verdict.reasons)


# --- over a cache --------------------------------------------------------------------------------

CACHES = [
    "b3 s1:70 h4:2 d32 fp16 decode",
    "b2 s1:70 h8:2 d32 bf16 decode page16",
    "b2 s5:33 h4:1 d16 fp16 causal decode page8",
    "b2 s4:90 h4:2 d16 fp16 window decode",
    "b2 s3:40 h2 d16 bf16 causal softcap packed decode page1",
    "b2 s1:70 h4:2 d32 bf16 decode cache_e4m3",
]


def cache(text: str, seed: int = 0) -> DecodeWorkload:
    made = workload_of(Problem.parse(text), seed, HostMemory())
    assert isinstance(made, DecodeWorkload)
    return made


def right_over_cache(w: DecodeWorkload) -> np.ndarray:
    """By the operation's own reference, which reads the page table."""
    names = ("q", "k_cache", "v_cache", "cache_lens", "page_table", "cu_seqlens_q")
    inputs = {name: it for name in names if (it := getattr(w, name)) is not None}
    reference = reference_of(DECODE)
    lens_k = (w.problem.seq_k,) * w.problem.batch
    lens_q = (w.problem.seq_q,) * w.problem.batch if w.packed else None
    scales = {"k_scale_value": 1.0, "v_scale_value": 1.0} if w.problem.cache else {}
    options = reference.options(w.problem, lens_q=lens_q, lens_k=lens_k, **scales)
    return reference.expected(w.problem, inputs, options).rounded["o"]


def assert_notices_what_is_wrong(w: DecodeWorkload, right: np.ndarray) -> None:
    verdict = w.check(right)
    assert verdict.ok, verdict.reasons
    assert verdict.outputs == right.size
    for place in ((0,) * right.ndim, (-1,) * right.ndim):
        wrong = right.copy()
        wrong[place] += 1.0
        assert not w.check(wrong).ok, place
    w.poison()
    assert not w.check(w.output).ok


@pytest.mark.parametrize("text", CACHES)
def test_over_a_cache_the_right_answer_passes_and_wrong_ones_do_not(text: str) -> None:
    w = cache(text)
    right = right_over_cache(w)
    assert_notices_what_is_wrong(w, right)
    # Other pages, lengths or masks give something else.
    assert not w.check(right_over_cache(cache(text, seed=1))).ok


@pytest.mark.parametrize("text", CACHES[:3])
def test_the_output_of_a_peer_over_a_cache_is_measured_by_ours(text: str) -> None:
    w = cache(text)
    right = right_over_cache(w)
    ours = w.check(right)
    for factor, is_right in ((2.9, True), (3.1, False)):
        less = OutputErrors(*(error / factor for error in ours.errors["o"]))
        verdict = w.check(right, ours=replace(ours, errors={"o": less}))
        assert verdict.ok == is_right
        assert all("times ours" in reason for reason in verdict.reasons)
    right[(-1,) * right.ndim] = np.nan
    assert not w.check(right, ours=ours).ok


def test_of_a_large_cache_some_heads_are_judged_and_no_nan_is_overlooked(monkeypatch) -> None:
    monkeypatch.setattr(workload_module, "MOST_KEYS", 1)
    w = cache("b4 s1:20 h64:16 d64 fp16 decode page8")
    right = right_over_cache(w)
    verdict = w.check(right)
    assert verdict.ok
    assert verdict.outputs == MIN_OUTPUTS < right.size
    checked = w._expected_groups[0]
    assert (checked[0], checked[-1]) == ((0, 0), (3, 15))
    sequence, head = next(found for n in range(64) if (found := divmod(n, 16)) not in checked)
    right[sequence, 0, 4 * head, 3] = np.nan
    assert w.check(right).reasons == ("1 outputs are NaN or infinite",)


def test_references_of_a_large_cache_take_one_heads_memory(monkeypatch) -> None:
    """A verdict on any cache holds K and V of one head at a time, in both precisions."""
    monkeypatch.setattr(workload_module, "MOST_KEYS", 1)
    w = cache("b32 s1:512 h8 d64 fp16 decode")
    tracemalloc.start()
    try:
        assert len(w._expected_groups[0]) == MIN_OUTPUTS // 64
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 40 * (512 * 64 * 2) < w.k_cache.nbytes / 5


def test_a_kernel_over_a_cache_gets_what_it_reads(monkeypatch) -> None:
    given = {}

    def prepare(cfg, problem, tensors, *, options):
        given.update(tensors, **options)
        return SimpleNamespace(run=lambda: None)

    monkeypatch.setattr(workload_module, "prepare_operation", prepare)
    w = cache("b2 s4:90 h4:2 d16 fp16 window softcap packed decode page8")
    kernel = kernel_implementation(CFG, w)
    assert kernel.note == "prepared call"
    kernel.launch()
    names = {"q", "k_cache", "v_cache", "cache_lens", "o", "page_table", "cu_seqlens_q"}
    assert set(given) == names | {"left", "right", "softcap"}
    assert given["o"] is w.output
    assert (given["left"], given["right"], given["softcap"]) == (45, 0, 30.0)
    given.clear()
    cache("b2 s1:90 h4:2 d16 fp16 decode").call(CFG)
    assert set(given) == (names | {"left", "right", "softcap"}) - {"page_table", "cu_seqlens_q"}


@pytest.mark.parametrize(("name", "split"), [(OURS, "invariant"), (OURS_FREE, "free")])
def test_the_public_call_over_a_cache_gets_its_options(name: str, split: str, monkeypatch) -> None:
    given = {}

    def call(q, k_cache, v_cache, *, out, **options):
        given.update(options, out=out, k_cache=k_cache)

    monkeypatch.setattr(implementations, "attention_with_cache", call)
    w = cache("b2 s4:90 h4:2 d16 fp16 causal softcap packed decode page8")
    attention_implementation(CFG, w, name).launch()
    assert given.pop("out") is w.o
    assert given.pop("k_cache") is w.k_cache
    assert given.pop("cu_seqlens_q").tolist() == [0, 4, 8]
    assert given.pop("cache_lens").tolist() == [90, 90]
    assert sorted(given.pop("page_table").flatten()) == list(range(24))
    assert given == {"causal": True, "softcap": 30.0, "max_seqlen_q": 4, "split": split}


# --- over a latent cache --------------------------------------------------------------------------

LATENT = [
    "b3 s1:70 h8:1 d320:256 fp16 latent_decode causal",
    "b2 s3:70 h4:1 d320:256 bf16 latent_decode causal page16",
    "b2 s4:90 h4:1 d320:256 fp16 latent_decode window packed",
]


def right_over_latent(w: LatentDecodeWorkload) -> np.ndarray:
    """By the operation's own reference."""
    names = ("q", "k_cache", "cache_lens", "page_table", "cu_seqlens_q")
    inputs = {name: it for name in names if (it := getattr(w, name)) is not None}
    reference, p = reference_of(LATENT_DECODE), w.problem
    lens = {"lens_q": (p.seq_q,) * p.batch if w.packed else None, "lens_k": (p.seq_k,) * p.batch}
    return reference.expected(p, inputs, reference.options(p, **lens)).rounded["o"]


@pytest.mark.parametrize("text", LATENT)
def test_over_a_latent_cache_the_right_answer_passes_and_wrong_ones_do_not(text: str) -> None:
    w = workload_of(Problem.parse(text), 0, HostMemory())
    assert isinstance(w, LatentDecodeWorkload)
    right = right_over_latent(w)
    assert_notices_what_is_wrong(w, right)
    other = workload_of(Problem.parse(text), 1, HostMemory())
    assert not w.check(right_over_latent(other)).ok


def test_a_proof_over_a_latent_cache_takes_some_sequences_and_one_reference(monkeypatch) -> None:
    """However many configs are proven; tensors that only rotate between launches have none."""
    monkeypatch.setattr(workload_module, "SCORES_ON_HOST", 3 * 16 * 70)
    made, right = [], forward_reference.references_of

    def counted(attention, q, *others, **options):
        made.append(q.shape)
        return right(attention, q, *others, **options)

    w = workload_of(
        Problem.parse("b9 s1:70 h16:1 d320:256 fp16 latent_decode causal"), 0, HostMemory()
    )
    o = right_over_latent(w)
    monkeypatch.setattr(forward_reference, "references_of", counted)
    assert all(w.check(o).ok for _ in range(4))
    assert made == [(1, 1, 16, 320)] * 3
    checked = [sequence for sequence, _ in w._expected_groups[0]]
    assert checked == [0, 4, 8]
    o[1, 0, 3, 5] = np.nan
    assert w.check(o).reasons == ("1 outputs are NaN or infinite",)
