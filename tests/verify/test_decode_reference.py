"""DecodeReference against a model that walks the operation's tensors one key at a time."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from flashsmith.errors import ArgumentError
from flashsmith.families import Problem, get_kernel_configs
from flashsmith.operations.operation import Call
from flashsmith.verify import decode_reference
from flashsmith.verify.decode_inputs import draw_decode_inputs, laid_out
from flashsmith.verify.decode_reference import DecodeReference
from flashsmith.verify.operation_reference import ProofCase

REFERENCE = DecodeReference()


def modelled(case: ProofCase) -> dict[str, np.ndarray]:
    """The outputs of a case, in fp32, rounded at the end."""
    problem, options = case.problem, case.options
    inputs = {name: array.copy() for name, array in case.inputs.items()}
    group, d = problem.heads_q // problem.heads_k, problem.d
    scale = options.get("scale", d**-0.5)
    q = inputs["q"].reshape(-1, problem.heads_q, d)
    new = {x: inputs[x].reshape(-1, problem.heads_k, d) for x in "kv" if x in inputs}
    o = np.full(q.shape, np.nan, q.dtype)
    lse = np.full((problem.heads_q, len(q)), np.nan, np.float32)
    starts = inputs.get("cu_seqlens_q", np.arange(problem.batch + 1) * problem.seq_q)

    def slot(sequence: int, key: int) -> tuple[int, int]:
        if not problem.page:
            return sequence, key
        return inputs["page_table"][sequence, key // problem.page], key % problem.page

    def turned(x: np.ndarray, position: int) -> np.ndarray:
        if "cos" not in inputs:
            return x
        c, s = (inputs[name][position].astype(np.float32) for name in ("cos", "sin"))
        found = x.copy()
        for i in range(len(c)):
            a, b = (2 * i, 2 * i + 1) if options["rotary"] == "interleaved" else (i, i + len(c))
            one, other = x[:, a].astype(np.float32), x[:, b].astype(np.float32)
            found[:, a] = one * c[i] - other * s[i]
            found[:, b] = other * c[i] + one * s[i]
        return found

    for sequence in range(problem.batch):
        length = int(inputs["cache_lens"][sequence])
        position = length + int(inputs["kv_offset"][sequence] if "kv_offset" in inputs else 0)
        rows = range(starts[sequence], starts[sequence + 1])
        for step, row in enumerate(rows):
            for name, tensor in new.items():
                appended = turned(tensor[row], position + step) if name == "k" else tensor[row]
                inputs[f"{name}_cache"][slot(sequence, length + step)] = appended
        total = length + len(rows) * bool(new)
        for step, row in enumerate(rows):
            mask = problem.semantics.mask
            query = turned(q[row], position + step * (mask != "none")).astype(np.float32)
            at = total - len(rows) + step
            left, right = options.get("left"), options.get("right")
            right = 0 if mask == "causal" else right
            first = 0 if left is None else max(0, at - left)
            end = total if right is None else min(total, at + right + 1)
            seen = [slot(sequence, key) for key in range(first, end)]
            for head in range(problem.heads_q):
                scores = np.array(
                    [inputs["k_cache"][it][head // group].astype(np.float32) @ query[head]
                     for it in seen], np.float64) * scale  # fmt: skip
                if options.get("softcap"):
                    scores = options["softcap"] * np.tanh(scores / options["softcap"])
                sinks = inputs["sinks"][head : head + 1] if "sinks" in inputs else []
                with np.errstate(divide="ignore"):
                    lse[head, row] = np.log(np.exp([*scores, *sinks]).sum())
                weights = np.exp(scores - lse[head, row]) if seen else scores
                values = [inputs["v_cache"][it][head // group].astype(np.float64) for it in seen]
                o[row, head] = sum(
                    (w * v for w, v in zip(weights, values, strict=True)), np.zeros(d)
                )
    if not problem.semantics.packed:
        lse = np.moveaxis(lse.reshape(problem.heads_q, problem.batch, problem.seq_q), 0, 1)
    found = {"o": o.reshape(inputs["q"].shape), "lse": lse}
    return found | {name: inputs[name] for name in ("k_cache", "v_cache") if new}


class _Config:
    """What a case needs of a config."""

    d_head_v = 64

    def fills_tiles(self, seq_q: int, seq_k: int, d: int) -> bool:
        return True


def case_of(text: str, seed: int = 0, **asked: Any) -> ProofCase:
    problem = Problem.parse(text)
    options = REFERENCE.options(problem, seed=seed, **asked)
    config: Any = _Config()
    return REFERENCE.case(config, problem, kind="random", seed=seed, options=options)


CASES = {
    "dense": case_of("b4 s1:40 h4:2 d64 fp16 decode", lens_k=(40, 0, 1, 17), capacity=5),
    "causal, pages, append": case_of(
        "b4 s3:50 h6:2 d64 fp16 decode causal page16", append=True, rotary="halves"
    ),
    "none, append, interleaved": case_of(
        "b3 s2:33 h2:1 d64 bf16 decode page1", 1, append=True, rotary="interleaved",
        rotary_half=9, rotary_dtype="float32", sinks=True,
    ),
    "a rolling cache": case_of(
        "b3 s2:40 h2:1 d64 fp16 decode window", window=(9, 0), append=True, rotary="halves",
        dropped=70,
    ),
    "window, softcap, packed": case_of(
        "b3 s5:49 h4:1 d64 fp16 decode window softcap packed page24", 2, window=(7, 0), sinks=True,
        append=True, capacity=2,
    ),
    "rows without keys": case_of("b2 s8:5 h4:2 d64 fp16 decode causal", 3, lens_k=(5, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_model_of_the_operation_is_right(name: str) -> None:
    case = CASES[name]
    verdict = REFERENCE.compare(case.problem.dtype, case, modelled(case))
    assert verdict.reasons == ()
    expected = REFERENCE.expected(case.problem, case.inputs, case.options)
    assert {name: it.shape for name, it in expected.exact.items()} == {
        name: it.shape for name, it in modelled(case).items()
    }


def test_a_row_without_keys_is_0_with_lse_of_minus_infinity() -> None:
    case = CASES["rows without keys"]
    outputs = modelled(case)
    assert (outputs["o"][0, :3] == 0).all()
    assert (outputs["lse"][0, :, :3] == -np.inf).all()
    outputs["o"][0, 1] = np.nan
    assert not REFERENCE.compare(case.problem.dtype, case, outputs).ok


@pytest.mark.parametrize(
    ("name", "output", "message"),
    [
        ("dense", "o", "NaN or inf differ"),
        ("dense", "lse", "LSE wrong in 1 rows"),
        ("causal, pages, append", "k_cache", "k_cache: 1 elements differ"),
        ("causal, pages, append", "v_cache", "v_cache: 1 elements differ"),
    ],
)
def test_one_wrong_element_is_found(name: str, output: str, message: str) -> None:
    case = CASES[name]
    outputs = modelled(case)
    at = np.unravel_index(np.argmin(~np.isfinite(outputs[output])), outputs[output].shape)
    if output == "o":
        outputs[output][at] = np.nan
    else:
        bits = outputs[output].view(np.uint16 if output != "lse" else np.uint32)
        bits[at] ^= 1 if output != "lse" else 1 << 20
    verdict = REFERENCE.compare(case.problem.dtype, case, outputs)
    assert any(message in reason for reason in verdict.reasons)


def test_a_slot_that_a_neighbour_must_not_touch_is_watched() -> None:
    case = CASES["causal, pages, append"]
    outputs = modelled(case)
    untouched = np.argwhere(np.isnan(outputs["k_cache"].astype(np.float32)))[0]
    outputs["k_cache"][tuple(untouched)] = 0
    assert not REFERENCE.compare(case.problem.dtype, case, outputs).ok


def test_what_no_sequence_holds_is_nan_and_pages_are_shared_and_shuffled() -> None:
    lens = (100, 80, 33, 0)
    case = case_of("b4 s1:100 h2:1 d64 fp16 decode page16", 5, lens_k=lens)
    table, cache = case.inputs["page_table"], case.inputs["k_cache"]
    used = [table[i, : -(-keys // 16)].tolist() for i, keys in enumerate(lens)]
    assert used[0][0] == used[1][0]  # one beginning
    assert used[0] != sorted(used[0])
    held = np.zeros(cache.shape[:2], bool)
    for i, keys in enumerate(lens):
        for key in range(keys):
            held[used[i][key // 16], key % 16] = True
    numbers = cache.astype(np.float32)
    assert np.isfinite(numbers[held]).all()
    assert np.isnan(numbers[~held]).all()
    assert (~held.any(1)).sum() >= 3
    blocks = len(cache)
    assert all(not 0 <= it < blocks for i, row in enumerate(table) for it in row[len(used[i]) :])


def test_drawn_lengths_are_those_where_kernels_go_wrong() -> None:
    problem = Problem.parse("b64 s1:512 h2 d64 fp16 decode page24")
    lens = REFERENCE.options(problem)["lens_k"]
    assert max(lens) == 512
    assert {0, 1} <= set(lens)
    assert {23, 24, 25} & set(lens)
    assert {step + more for step in (64, 128, 256, 384) for more in (-1, 0, 1)} & set(lens)
    appended = REFERENCE.options(Problem.parse("b64 s5:512 h2 d64 fp16 decode"), append=True)
    assert min(appended["lens_k"]) == 5


@pytest.mark.parametrize("layout", ["dense", "interleaved", "heads first"])
def test_layouts_hold_the_same_numbers_in_memory_of_their_own(layout: str) -> None:
    inputs = CASES["dense"].inputs
    k, v = laid_out(inputs["k_cache"], inputs["v_cache"], layout)
    np.testing.assert_array_equal(k, inputs["k_cache"])
    np.testing.assert_array_equal(v, inputs["v_cache"])
    assert not np.shares_memory(k, inputs["k_cache"])
    assert k.flags.c_contiguous == (layout == "dense")
    assert not np.shares_memory(k, v)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"rotary": "halves"}, "rotary='halves': needs appended keys; add append=True"),
        ({"rotary": "both"}, "rotary='both': allowed are ''"),
        ({"layout": "odd"}, "layout='odd': allowed are 'dense'"),
        ({"causal": True}, "causal=True: the mask of"),
        ({"lens_k": (1, 0), "append": True}, "shorter than what is appended"),
        ({"split": "some"}, "split='some': give 'invariant'"),
        ({"dropped": -1}, "dropped=-1: give how many keys a cache has dropped, from 0"),
        ({"lens_k": (1,)}, "give both for each sequence"),
    ],
)
def test_options_that_make_no_call_are_errors(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        REFERENCE.options(Problem.parse("b2 s1:40 h4:2 d64 fp16 decode"), **asked)


def test_numbers_can_be_computed_for_every_case() -> None:
    for case in CASES.values():
        operation = case.problem.computed
        options = {**operation.options, **REFERENCE.call_options(case.problem, case.options)}
        strides = {
            name: tuple(step // array.itemsize for step in array.strides)
            for name, array in case.inputs.items()
        }
        sizes = {"blocks": len(case.inputs["k_cache"]), "slots": case.inputs["k_cache"].shape[1]}
        if case.problem.page:
            sizes["most_pages"] = case.inputs["page_table"].shape[1]
        assert operation.numbers(Call(case.problem, strides | {"o": strides["q"]}, sizes, options))


@pytest.mark.parametrize("name", ["k_cache", "k"])
def test_heads_first_gives_k_and_v_strides_of_their_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three, V's the smaller ones, and the same values."""
    seen: dict[str, np.ndarray] = {}
    monkeypatch.setattr(
        decode_reference, "run_operation", lambda cfg, problem, tensors, **how: seen.update(tensors)
    )
    problem = Problem.parse("b3 s2:40 h4:2 d64 fp16 decode")
    cfg = get_kernel_configs("decode")[0]
    options = {"append": True, "layout": "heads first"}
    case = REFERENCE.case(cfg, problem, kind="random", seed=0, options=options)
    REFERENCE.run(cfg, case, lambda array: array)
    k, v = seen[name], seen[name.replace("k", "v", 1)]
    assert all(of_v < of_k for of_v, of_k in zip(v.strides[:3], k.strides[:3], strict=True))
    np.testing.assert_array_equal(k.view(np.uint16), case.inputs[name].view(np.uint16))
    np.testing.assert_array_equal(
        v.view(np.uint16), case.inputs[name.replace("k", "v", 1)].view(np.uint16)
    )


@pytest.mark.parametrize("words", ["", "causal packed page16"])
def test_a_measurement_has_all_keys_and_is_judged_by_its_own_expectation(words: str) -> None:
    problem = Problem.parse(f"b3 s2:40 h4:2 d64 fp16 decode {words}")
    inputs = REFERENCE.draw(problem, "random", 5)
    assert inputs["cache_lens"].tolist() == [40, 40, 40]
    options = REFERENCE.options(problem, seed=5)
    expected = REFERENCE.expected(problem, inputs, options).only({"o", "k_cache", "v_cache"})
    case = ProofCase(problem, {}, options, expected)
    outputs = {"o": expected.rounded["o"].copy(), "k_cache": inputs["k_cache"]}
    assert REFERENCE.compare(problem.dtype, case, outputs).ok
    outputs["o"].flat[7] = np.nan
    assert not REFERENCE.compare(problem.dtype, case, outputs).ok


@pytest.mark.parametrize("name", list(CASES))
def test_heads_may_be_computed_one_after_another(name: str, monkeypatch) -> None:
    """As for a long sequence; and the caches of the inputs stay as they were."""
    case = CASES[name]
    before = {name: array.copy() for name, array in case.inputs.items()}
    found = []
    for most in (1 << 24, 1):
        monkeypatch.setattr(decode_reference, "MOST_EXPANDED", most)
        found.append(decode_reference.expected_of(case.problem, case.inputs, case.options))
    whole, by_head = (one.references for one in found)
    assert np.allclose(whole.o, by_head.o, rtol=1e-12, atol=1e-12)
    assert np.allclose(whole.lse, by_head.lse, rtol=1e-12)
    assert np.allclose(whole.row_max, by_head.row_max, rtol=1e-12)
    same = (x.same_precision.astype(np.float32) for x in (whole, by_head))
    assert np.allclose(*same, rtol=1e-2, atol=1e-3)
    for name, array in case.inputs.items():
        assert array.tobytes() == before[name].tobytes()


def peak_of(batch: int) -> int:
    """Bytes that the references of so many sequences take at the most."""
    problem = Problem.parse(f"b{batch} s1:512 h4:2 d64 fp16 decode page16")
    options = REFERENCE.options(problem, lens_k=(512,) * batch)
    inputs = draw_decode_inputs(problem, "random", 0, options)
    tracemalloc.start()
    try:
        decode_reference.expected_of(problem, inputs, options)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_references_of_many_sequences_take_the_memory_of_one() -> None:
    assert peak_of(64) < 1.25 * peak_of(2)


def test_the_references_of_many_heads_take_the_memory_of_some(monkeypatch) -> None:
    whole = peak_of(1)
    monkeypatch.setattr(decode_reference, "MOST_EXPANDED", 512 * 64)
    assert peak_of(1) < 0.75 * whole
