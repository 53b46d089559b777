"""A call over a cache like one before skips the checks and launches what a checked one launches;
one that must be refused is refused all the same. No GPU: host tensors pass for one's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from inspect import Parameter, signature
from typing import Any

import pytest

from flashsmith.errors import ArgumentError, LaunchError
from flashsmith.families import parse_kernel_name_into_config
from flashsmith.runtime import (
    cached_calls,
    count_launches,
    decode_pass,
    forget_cached_launches,
)
from flashsmith.runtime.cached_calls import CachedCall
from flashsmith.runtime.decode_pass import DecodeOptions, DecodeTensors

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")

from cached_calls import (  # noqa: E402
    GROWN,
    ODD,
    Mistakes,
    check_mistake_stays_one,
    check_signatures_differ,
    events,
    half,
    offsets,
    refuse_checks,
    run_while_others_forget,
)
from pretended_gpu import Launch, PretendedGpu, pretended_gpu  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from flashsmith import attention_with_cache, chooser  # noqa: E402
from flashsmith.chooser import decode  # noqa: E402
from flashsmith.integrations import torch_decode  # noqa: E402
from flashsmith.operations.cache_scales import SCALE_OPTIONS  # noqa: E402
from flashsmith.runtime.frameworks.torch import TorchTensors  # noqa: E402

pytestmark = pytest.mark.torch

CFG = parse_kernel_name_into_config("(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_2")
ORDER = (
    *("q", "k_cache", "v_cache", "cache_lens", "o", "lse", "page_table", "k", "v", "cos", "sin"),
    *("sinks", "cu_seqlens_q", "kv_offset", "k_scale", "v_scale"),
)
LENS = [100, 0]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedGpu]:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("a tensor of the device was read")

    monkeypatch.setattr(TorchTensors, "as_numpy", refuse)
    monkeypatch.setattr(TorchTensors, "longest_steps", refuse)
    with pretended_gpu() as pretended:
        yield pretended


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After calling it, a call that goes through the checks fails."""
    return lambda: refuse_checks(monkeypatch, decode_pass)


def dense(**options: Any) -> dict[str, Any]:
    return {
        "q": half(2, 1, 4, 64),
        "k_cache": half(2, 128, 2, 64),
        "v_cache": half(2, 128, 2, 64),
        "cache_lens": torch.tensor(LENS, dtype=torch.int32),
        **options,
    }


def paged(**options: Any) -> dict[str, Any]:
    table = torch.zeros(2, 8, dtype=torch.int32)
    caches = {name: half(10, 16, 2, 64) for name in ("k_cache", "v_cache")}
    return dense(**{**caches, "page_table": table, **options})


def appending(**options: Any) -> dict[str, Any]:
    return {"k": half(2, 1, 2, 64), "v": half(2, 1, 2, 64), **options}


def interleaved() -> dict[str, Any]:
    both = half(2, 2, 128, 2, 64)
    return dense(**appending(k_cache=both[:, 0], v_cache=both[:, 1]))


def codes(**options: Any) -> dict[str, Any]:
    caches = {name: half(2, 128, 2, 64).to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    return dense(**caches, **options)


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "dense": dense,
    "paged": paged,
    "with its LSE": lambda: dense(return_lse=True),
    "an output of one's own": lambda: dense(out=half(2, 1, 4, 64), return_lse=True),
    "not causal": lambda: dense(causal=False),
    "window, capped and scaled": lambda: dense(window=(5, None), softcap=20.0, scale=0.5),
    "sinks": lambda: dense(sinks=torch.zeros(4)),
    "dropped keys": lambda: dense(window=(5, 0), kv_offset=torch.tensor([7, 0], dtype=torch.int32)),
    "a free split": lambda: dense(split="free"),
    "a config": lambda: dense(config=CFG),
    "appending": lambda: paged(**appending()),
    "appending to halves of one tensor": interleaved,
    "rotary": lambda: dense(**appending(cos=half(128, 32), sin=half(128, 32))),
    "rotary in fp32": lambda: dense(
        **appending(cos=torch.zeros(128, 8), sin=torch.zeros(128, 8), rotary_interleaved=True)
    ),
    "heads outside": lambda: dense(k_cache=half(2, 2, 128, 64).transpose(1, 2)),
    "packed, everything": lambda: paged(
        q=half(7, 4, 64), k=half(7, 2, 64), v=half(7, 2, 64), cos=half(128, 32), sin=half(128, 32),
        sinks=torch.zeros(4), cu_seqlens_q=offsets(2, 5), max_seqlen_q=5, out=half(7, 4, 64),
        return_lse=True,
    ),
    "8-bit floats": codes,
    "8-bit floats and scales": lambda: codes(k_scale=torch.ones(2), v_scale=0.5, **appending()),
    "a scale of all heads": lambda: dense(v_scale=torch.ones(())),
    "packed, of unknown lengths": lambda: dense(q=half(7, 4, 64), cu_seqlens_q=offsets(2, 5)),
}  # fmt: skip


def places(call: dict[str, Any], outputs: Any) -> tuple[int, ...]:
    """The addresses that a launch must be given."""
    o, lse = outputs if isinstance(outputs, tuple) else (outputs, None)
    found = ((call | {"o": o, "lse": lse}).get(name) for name in ORDER)
    # A scale may be a number, which is no address.
    return tuple(it.data_ptr() if isinstance(it, torch.Tensor) else 0 for it in found)


def facts(outputs: Any) -> list[Any]:
    found = outputs if isinstance(outputs, tuple) else (outputs,)
    return [(t.shape, t.stride(), t.dtype) for t in found]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_like_one_before_launches_the_same_elsewhere_and_reads_nothing(
    name: str, gpu: PretendedGpu, unchecked: Callable[[], None]
) -> None:
    # There is no plan of the lengths on the host that the next step could overwrite (vllm#23737).
    first, second = CALLS[name](), CALLS[name]()
    checked = attention_with_cache(**first)
    unchecked()
    outputs = attention_with_cache(**second)
    assert facts(outputs) == facts(checked)
    assert [launch.addresses for launch in gpu.launches] == [
        places(first, checked),
        places(second, outputs),
    ]
    assert gpu.launches[0].prepared is gpu.launches[1].prepared
    written = {"out"} | ({"k_cache", "v_cache"} if "k" in second else set())
    for call in (first, second):
        versions = {name: it._version for name, it in call.items() if torch.is_tensor(it)}
        assert all((version > 0) == (name in written) for name, version in versions.items())


def test_small_workspaces_are_kept_on_the_default_stream(gpu: PretendedGpu) -> None:
    """As gradients' are; each call on another stream has its own."""
    seen: list[int] = []
    gpu.launcher = lambda stream, *at: seen.append(at[-1])

    def blocks(of_size: int, stream: int) -> tuple[list[int], list[Any]]:
        gpu.block_bytes, gpu.stream = of_size, stream
        forget_cached_launches()
        gpu.kernels.clear()
        outputs = [attention_with_cache(**dense()) for _ in range(4)]
        return seen[-3:], outputs  # the first one is checked

    small, outputs = blocks(4096, 0)
    assert len(set(small)) == 1
    assert {output.data_ptr() for output in outputs}.isdisjoint(small)
    assert blocks(8192, 0)[0] == small
    elsewhere = blocks(4096, 7)[0] + blocks(cached_calls.KEPT_BYTES + 4, 0)[0]
    assert set(elsewhere).isdisjoint(small)


def test_different_calls_have_different_signatures(gpu: PretendedGpu) -> None:
    check_signatures_differ(gpu, attention_with_cache, CALLS.values())


def test_lengths_that_are_not_known_bound_the_grid_by_all_rows(gpu: PretendedGpu) -> None:
    for name in ("packed, everything", "packed, of unknown lengths"):
        attention_with_cache(**CALLS[name]())
    # batch and seq_q, the operation's first numbers.
    assert [launch.prepared[5:7] for launch in gpu.launches] == [(2, 5), (2, 7)]


MISTAKES: Mistakes = {
    **{f"{name} that grows": {name: GROWN} for name in ("q", "k_cache", "v", "cos", "sinks")},
    **{f"an odd {name}": {name: ODD} for name in ("q", "k_cache", "v_cache", "k", "v")},
    **{f"no {name}": {name: None} for name in ("q", "k_cache", "v_cache", "cache_lens", "k")},
    "causal that is a number": {"causal": 1},
    "another split": {"split": "odd"},
    "lengths of 64 bits": {"cache_lens": torch.zeros(2, dtype=torch.int64)},
    "a table of one row": {"page_table": torch.zeros(1, 8, dtype=torch.int32)},
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_after_a_valid_call_is_still_one(name: str, gpu: PretendedGpu) -> None:
    def valid() -> dict[str, Any]:
        angles = {name: torch.zeros(128, 8) for name in ("cos", "sin")}
        return paged(**appending(**angles, sinks=torch.zeros(4), causal=True))

    check_mistake_stays_one(gpu, attention_with_cache, valid, MISTAKES[name])


@pytest.mark.parametrize("written", ["out", "k_cache", "v_cache"])
def test_what_is_written_must_not_lie_where_the_call_reads(written: str, gpu: PretendedGpu) -> None:
    """Though a call like it before had memory of its own for each."""
    call = dense(**appending(out=half(2, 1, 4, 64)))
    attention_with_cache(**call)
    memory = half(2 * 128 * 2 * 64)
    shape = call[written].shape
    call |= {written: memory[: shape.numel()].view(shape), "q": memory[:512].view(2, 1, 4, 64)}
    with pytest.raises(ArgumentError, match=f"{'o' if written == 'out' else written}.* shares"):
        attention_with_cache(**call)
    assert len(gpu.launches) == 1


def test_caches_that_are_written_must_not_share_memory(gpu: PretendedGpu) -> None:
    """But they may be halves of one tensor, wherever it is."""
    call = dense(**appending())
    attention_with_cache(**call)
    for v_cache in (call["k_cache"], half(2 * 128 * 2 * 64 + 8)[8:].view(2, 128, 2, 64)):
        memory = v_cache if v_cache is call["k_cache"] else v_cache._base[:-8].view_as(v_cache)
        with pytest.raises(ArgumentError, match="v_cache: shares memory with k_cache"):
            attention_with_cache(**{**call, "k_cache": memory, "v_cache": v_cache})
    attention_with_cache(**interleaved())
    both = interleaved()
    both["v_cache"] = both["k_cache"]
    with pytest.raises(ArgumentError, match="v_cache: shares memory with k_cache"):
        attention_with_cache(**both)
    assert len(gpu.launches) == 2


# --- calls with the same keywords, which need no signature ---------------------------------------


@pytest.fixture
def unsigned(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After calling it, a call fails that run_repeated does not serve."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("the call's keywords were bound")

    return lambda: monkeypatch.setattr(decode, "run_decode", refuse)


def test_defaults_of_keywords_are_those_of_the_function() -> None:
    # By which a call that leaves them out is found.
    keywords = [
        (name, parameter.default)
        for name, parameter in signature(chooser.attention_with_cache).parameters.items()
        if parameter.kind is Parameter.KEYWORD_ONLY
    ]
    required = {"cache_lens": Parameter.empty}
    of_tensors = dict.fromkeys(DecodeTensors._fields[3:]) | required
    others = DecodeOptions._field_defaults | {"config": None, "emulate": False}
    for name in ("program", *SCALE_OPTIONS):  # which only the runtime passes
        del others[name]
    functions = dict.fromkeys(("score_mod", "mask_mod", "mask", "bias", "v_width"))
    assert dict(keywords) == of_tensors | others | functions
    assert DecodeTensors._fields[:3] == ("q", "k_cache", "v_cache")


@pytest.mark.parametrize("name", CALLS)
def test_a_call_with_the_same_keywords_is_not_bound(
    name: str, gpu: PretendedGpu, unsigned: Callable[[], None]
) -> None:
    first, second = CALLS[name](), CALLS[name]()
    # In another order than the function's, and one of them without need.
    first, second = (
        dict(reversed({**call, "sin": call.get("sin")}.items())) for call in (first, second)
    )
    checked = attention_with_cache(first.pop("q"), **first)
    unsigned()
    outputs = attention_with_cache(q := second.pop("q"), **second)
    assert facts(outputs) == facts(checked)
    assert gpu.launches[1].addresses == places({"q": q, **second}, outputs)


VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "of all": dict,
    "full": lambda: {"causal": False},
    "free": lambda: {"split": "free"},
    "capped": lambda: {"softcap": 20.0},
    "a whole number": lambda: {"softcap": 20},
    "window": lambda: {"window": (1, 0)},
    "scaled": lambda: {"scale": 0.5},
    "its LSE": lambda: {"return_lse": True},
    "neighbouring pairs": lambda: {"rotary_interleaved": True},
    "config": lambda: {"config": CFG},
    "heads outside": lambda: {"k_cache": half(2, 2, 128, 64).transpose(1, 2)},
    "bf16": lambda: {
        name: tensor.bfloat16()
        for name, tensor in dense(**appending(out=half(2, 1, 4, 64))).items()
        if name != "cache_lens"
    },
    "no output": lambda: {"out": None},
    "sinks": lambda: {"sinks": torch.zeros(4)},
    "a scale": lambda: {"k_scale": 0.5},
    "another scale": lambda: {"k_scale": 0.25},
    "shorter": lambda: {"k_cache": half(2, 64, 2, 64), "v_cache": half(2, 64, 2, 64)},
}  # fmt: skip


def variant(name: str) -> dict[str, Any]:
    """A call whose keywords are those of all, in one order."""
    angles = {name: torch.zeros(128, 8) for name in ("cos", "sin")}
    call = dense(**appending(**angles, out=half(2, 1, 4, 64)))
    options = DecodeOptions()._asdict() | {"page_table": None, "sinks": None, "config": None}
    for name_of_option in ("program", *SCALE_OPTIONS):
        del options[name_of_option]
    options |= {"k_scale": None, "v_scale": None}
    call = {**call, **options}
    changed = VARIANTS[name]()
    assert changed.keys() <= call.keys()
    return call | changed


def without_addresses(launch: Launch) -> Any:
    """The config, semantics, device and the operation's numbers."""
    return launch.config, launch.semantics, launch.prepared[: 4 + 1 + launch.prepared[4]]


def test_calls_with_the_same_keywords_are_told_apart(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when there are more than are remembered: after each other call, each launches what it
    does alone."""
    alone = []
    for name in VARIANTS:
        forget_cached_launches()
        attention_with_cache(**variant(name))
        alone.append(gpu.launches.pop())
    for most in (1, 3, len(VARIANTS)):
        monkeypatch.setattr(cached_calls, "MOST_OF_SHAPE", most)
        forget_cached_launches()
        for _ in range(3):
            for name, expected in zip(VARIANTS, alone, strict=True):
                call = variant(name)
                outputs = attention_with_cache(**call)
                launch = gpu.launches.pop()
                assert launch.addresses == places(call, outputs)
                assert without_addresses(launch) == without_addresses(expected), name
        group = cached_calls.repeated[
            tuple(name for name in call if name not in DecodeTensors._fields[:3])
        ]
        assert max(map(len, group.by_shape.values())) <= most


def test_a_call_is_remembered_once(gpu: PretendedGpu) -> None:
    """Also where each needs the checks, so that it leaves the others their places."""
    others = [dense(**appending(return_lse=lse)) for lse in (False, True)]
    for call in others:
        attention_with_cache(**call)
    both = half(2, 2, 128, 2, 64)
    for i in range(2 * cached_calls.MOST_OF_SHAPE):
        halves = {"k_cache": both[:, i % 2], "v_cache": both[:, 1 - i % 2]}
        call = dense(**appending(return_lse=False, **halves))
        outputs = attention_with_cache(**call)
        assert gpu.launches[-1].addresses == places(call, outputs)
    (group,) = cached_calls.repeated.values()
    (of_shape,) = group.by_shape.values()
    assert len(of_shape) == len(others) + 1


def test_layouts_in_turn_are_all_remembered(
    gpu: PretendedGpu, unsigned: Callable[[], None]
) -> None:
    """As batches that grow and shrink from step to step."""
    calls = [
        dense(**{name: half(2, 64 * i, 2, 64) for name in ("k_cache", "v_cache")})
        for i in range(1, 33)
    ]
    for call in calls:
        attention_with_cache(**call)
    unsigned()
    for call in calls:
        outputs = attention_with_cache(**call)
        assert gpu.launches[-1].addresses == places(call, outputs)


def test_outputs_hold_what_pytorch_fills_memory_with(gpu: PretendedGpu) -> None:
    """In rows that belong to no sequence a repeated call leaves what a first one leaves."""
    call = CALLS["packed, of unknown lengths"]() | {"return_lse": True}
    kept = [attention_with_cache(**call) for _ in range(2)]
    try:
        torch.use_deterministic_algorithms(True)
        for _ in range(3):
            kept.append(attention_with_cache(**call))
            assert all(output.isnan().all() for output in kept[-1])
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_option_of_another_type_is_another_one(gpu: PretendedGpu) -> None:
    """Though equal: the checks judge it."""
    call = dense(causal=True, window=(1, 0), emulate=False)
    for _ in range(2):
        attention_with_cache(**call)
    for wrong in ({"causal": 1}, {"window": (True, 0)}, {"window": (1, 0.0)}, {"emulate": 0}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            attention_with_cache(**call | wrong)
    attention_with_cache(**call | {"window": (int("1"), 0)})
    assert len(gpu.launches) == 3


def test_a_tensor_that_required_grad_while_that_was_disabled(gpu: PretendedGpu) -> None:
    call = dense()
    call["k_cache"].requires_grad_()
    for _ in range(3):
        with torch.no_grad():
            attention_with_cache(**call)
        with pytest.raises(ArgumentError, match="k_cache: requires grad"):
            attention_with_cache(**call)
    call["k_cache"].requires_grad_(False)
    for _ in range(2):
        attention_with_cache(**call)
    call["k_cache"].requires_grad_()
    with pytest.raises(ArgumentError, match="k_cache: requires grad"):
        attention_with_cache(**call)
    assert len(gpu.launches) == 5


def test_one_tensor_for_keys_and_values_may_be_read(gpu: PretendedGpu) -> None:
    call = dense()
    call["v_cache"] = call["k_cache"]
    for _ in range(3):
        outputs = attention_with_cache(**call)
        assert gpu.launches[-1].addresses == places(call, outputs)


def test_a_tensor_that_is_changed_in_place_is_another(gpu: PretendedGpu) -> None:
    call = dense()
    for _ in range(2):
        attention_with_cache(**call)
    call["cache_lens"].resize_(3)
    with pytest.raises(ArgumentError, match="cache_lens: 3 lengths"):
        attention_with_cache(**call)
    call["cache_lens"].resize_(2)
    call["k_cache"].set_(half(2, 2, 128, 64).transpose(1, 2))
    outputs = attention_with_cache(**call)
    assert gpu.launches[-1].addresses == places(call, outputs)
    strides = [without_addresses(launch) for launch in gpu.launches]
    assert strides[0] == strides[1] != strides[2]


def test_what_looks_at_operations_sees_repeated_calls_too(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = dense()
    for _ in range(2):
        attention_with_cache(**call)

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, given: Any = (), named: Any = None
        ) -> Any:
            seen.append(str(op))
            return op(*given, **(named or {}))

    seen: list[str] = []
    with Seen():
        attention_with_cache(**call)
    assert "flashsmith.attention_with_cache.default" in seen
    by_op: list[Any] = []
    with monkeypatch.context() as patched, forward_ad.dual_level():
        patched.setattr(torch_decode, "decode_by_op", lambda q, *_, **__: by_op.append(q))
        dual = forward_ad.make_dual(call["q"], half(*call["q"].shape))
        attention_with_cache(**call | {"q": dual})
    assert by_op == [dual]
    with pytest.raises(ArgumentError, match="vmap"):
        torch.func.vmap(lambda q: attention_with_cache(**call | {"q": q}))(
            half(3, *call["q"].shape)
        )


def test_what_rests_on_a_choice_is_forgotten_with_it(
    gpu: PretendedGpu, unchecked: Callable[[], None]
) -> None:
    call = dense()
    attention_with_cache(**call)
    forget_cached_launches()
    unchecked()
    with pytest.raises(AssertionError, match="the call was checked"):
        attention_with_cache(**call)


def test_the_number_of_orders_is_bounded(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch, unsigned: Callable[[], None]
) -> None:
    monkeypatch.setattr(cached_calls, "MOST_GROUPS", 2)
    makers = [CALLS[name] for name in ("dense", "paged", "sinks")]
    for make in makers:
        attention_with_cache(**make())
    assert len(cached_calls.repeated) == 2
    unsigned()
    attention_with_cache(**makers[-1]())
    with pytest.raises(AssertionError, match="were bound"):
        attention_with_cache(**makers[0]())


def test_addresses_are_looked_at_once_and_their_number_is_bounded(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_calls, "_MOST_KNOWN", 3)
    looked_at: list[tuple[int, ...]] = []
    is_usable = CachedCall._is_usable

    def note(cached: CachedCall, at: tuple[int, ...]) -> bool:
        looked_at.append(at)
        assert len(cached._known) <= 3
        return is_usable(cached, at)

    monkeypatch.setattr(CachedCall, "_is_usable", note)
    calls = [dense() for _ in range(4)]
    attention_with_cache(**dense())
    for call in calls[:3] * 2:
        attention_with_cache(**call)
    assert len(looked_at) == 3
    for call in calls[::-1]:
        attention_with_cache(**call)
    assert len(looked_at) == 3 + 1 + 3


def test_a_refused_launch(gpu: PretendedGpu) -> None:
    def launch(*arguments: int) -> None:
        if refusing:
            raise RuntimeError("cudaLaunchKernel: cudaErrorNoWay: no way")

    gpu.launcher, refusing = launch, False
    call = dense()
    attention_with_cache(**call)
    refusing = True
    with count_launches() as counted, pytest.raises(LaunchError, match=r"b2 s1:128 .*: no way"):
        attention_with_cache(**call)
    assert counted.gpu == 0


def test_threads(gpu: PretendedGpu) -> None:
    """Each with lengths of its own, while another forgets what was prepared."""

    def work(capacity: int) -> None:
        caches = {name: half(2, capacity, 2, 64) for name in ("k_cache", "v_cache")}
        call = dense(**caches)
        for _ in range(100):
            launched.append((call, attention_with_cache(**call)))

    launched: list[tuple[dict[str, Any], Any]] = []
    run_while_others_forget(work, range(64, 513, 64))
    # Outputs are all alive, so each has an address of its own.
    expected = {places(call, outputs): call["k_cache"].shape[1] for call, outputs in launched}
    found = {launch.addresses: launch.prepared[7] for launch in gpu.launches}
    assert len(expected) == 800
    assert found == expected


@pytest.mark.parametrize(
    ("name", "most"), [("dense", 30), ("rotary", 31), ("packed, everything", 35)]
)
def test_a_call_like_one_before_does_little(name: str, most: int, gpu: PretendedGpu) -> None:
    """Counted, since time on a shared machine says nothing: a checked call enters hundreds."""
    call = CALLS[name]()
    assert events(lambda: attention_with_cache(**call)) > 10 * most  # the call is checked
    assert events(lambda: attention_with_cache(**call)) <= most


def test_one_tensor_for_both_caches_is_compared_as_one(gpu: PretendedGpu) -> None:
    """Values may be the keys. A tensor is no option, which is compared by value and kept."""
    first = dense()
    first["v_cache"] = first["k_cache"]
    attention_with_cache(**first, config=CFG)
    attention_with_cache(**first, config=CFG)
    kept = weakref.ref(first["k_cache"])
    del first
    assert kept() is None
    for given in ({}, {"v_cache": half(2, 128, 2, 64)}, {}):
        call = dense()
        call["v_cache"] = given.get("v_cache", call["k_cache"])
        for _ in range(2):
            attention_with_cache(**call, config=CFG)
            launched = gpu.launches[-1].addresses
            assert launched[1:3] == (call["k_cache"].data_ptr(), call["v_cache"].data_ptr())
