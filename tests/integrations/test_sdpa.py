"""sdpa() against PyTorch's scaled_dot_product_attention: the same meaning, on our kernels."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import shared_kernels

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

from flashsmith import sdpa  # noqa: E402
from flashsmith.errors import ArgumentError  # noqa: E402
from flashsmith.integrations.fallbacks import (  # noqa: E402
    FallbackWarning,
    fallback_count,
    forget_warnings,
)
from flashsmith.integrations.sdpa import pytorch_sdpa  # noqa: E402
from flashsmith.runtime.launch_counter import count_launches  # noqa: E402

shared_kernels.want_chosen(
    "b2 s64 h3 d64 fp16",
    "b2 s64 h3 d64 bf16",
    "b2 s40 h3 d32 fp16 causal uneven",
    "b2 s40 h3 d32 bf16 causal uneven",
    "b1 s30 h2 d32 fp16 causal uneven",
    "b1 s75:30 h2 d32 fp16 window uneven",
    "b2 s20:33 h4:2 d32 fp16 uneven",
    "b2 s20:33 h4:1 d40 fp16 uneven",
    "b1 s20 h2 d32 fp16 uneven",
    "b1 s20 h2 d32 bf16 uneven",
    "b1 s20 h2 d32 fp16 packed uneven",
)


def drawn(*shape: int, dtype: Any = torch.float16, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def assert_same(output: Any, q: Any, k: Any, v: Any, **arguments: Any) -> None:
    expected = pytorch_sdpa(q.float(), k.float(), v.float(), **arguments)
    assert output.dtype == q.dtype
    assert output.shape == expected.shape
    tolerance = 2e-3 if q.dtype is torch.float16 else 1.6e-2
    torch.testing.assert_close(output.float(), expected, atol=tolerance, rtol=tolerance)


SERVED: tuple[tuple[Any, Any, dict[str, Any]], ...] = (
    ((2, 3, 64, 64), (2, 3, 64, 64), {}),
    ((2, 3, 40, 32), (2, 3, 40, 32), {"is_causal": True}),
    ((1, 2, 30, 32), (1, 2, 75, 32), {"is_causal": True}),
    ((1, 2, 75, 32), (1, 2, 30, 32), {"is_causal": True}),
    ((1, 2, 1, 32), (1, 2, 75, 32), {"is_causal": True}),
    ((2, 4, 20, 32), (2, 2, 33, 32), {"enable_gqa": True, "scale": 0.3}),
    ((2, 4, 20, 40), (1, 1, 33, 40), {}),
    ((3, 20, 32), (3, 33, 32), {}),
    ((20, 32), (33, 32), {"is_causal": True}),
)


@pytest.mark.parametrize(
    ("q", "kv", "arguments", "dtype"),
    [
        *((*served, torch.float16) for served in SERVED),
        # What the arguments mean does not depend on the dtype.
        *((*served, torch.bfloat16) for served in SERVED[:2]),
    ],
)
def test_served(q: Any, kv: Any, arguments: dict[str, Any], dtype: Any) -> None:
    query, key, value = drawn(*q, dtype=dtype), drawn(*kv, dtype=dtype), drawn(*kv, dtype=dtype)
    value = value.flip(-2)
    before = fallback_count()
    with count_launches() as launches, warnings.catch_warnings():
        warnings.simplefilter("error")
        output = sdpa(query, key, value, **arguments, strict=True, emulate=True)
    assert launches.emulator == 1
    assert fallback_count() == before
    assert_same(output, query, key, value, **arguments)


def test_the_output_is_laid_out_as_pytorchs() -> None:
    q = drawn(2, 3, 20, 32)
    assert sdpa(q, q, q, emulate=True).stride() == (20 * 3 * 32, 32, 3 * 32, 1)


def test_heads_and_lengths_may_be_swapped_in_memory() -> None:
    q, k, v = (drawn(2, 20, 3, 32, seed=seed).transpose(1, 2) for seed in range(3))
    assert_same(sdpa(q, k, v, strict=True, emulate=True), q, k, v)


MASK = torch.ones(20, 20).tril().bool()


class _Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            {"attn_mask": MASK.half().requires_grad_()},
            "attn_mask: a mask tensor that requires grad",
        ),
        ({"attn_mask": MASK.half().as_subclass(_Subclass)}, "attn_mask: a _Subclass"),
        ({"scale": -0.5}, "scale: -0.5"),
    ],
)
def test_not_served_by_its_arguments(arguments: dict[str, Any], reason: str) -> None:
    q = drawn(1, 2, 20, 32)
    with pytest.raises(ArgumentError, match=reason), count_launches() as launches:
        sdpa(q, q, q, **arguments, strict=True)
    with pytest.warns(FallbackWarning, match=reason):
        output = sdpa(q, q, q, **arguments)
    assert launches.total == 0
    assert torch.equal(output, pytorch_sdpa(q, q, q, **arguments))


def test_dropout_is_left_to_pytorch() -> None:
    q = drawn(1, 2, 20, 32)
    with pytest.warns(FallbackWarning, match=r"dropout_p: 0\.5"):
        output = sdpa(q, q, torch.ones_like(q), dropout_p=0.5)
    assert output.std() > 0.01


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ([drawn(1, 2, 20, 32, dtype=torch.float32)] * 3, "query: dtype float32"),
        ([drawn(1, 2, 20, 59)] * 3, "query: d 59"),
        ([drawn(1, 2, 20, 520)] * 3, "query: d 520"),
        ([drawn(2, 1, 2, 20, 32)] * 3, "query: shape"),
        ([drawn(1, 2, 32, 20).transpose(2, 3)] * 3, "query: stride 20 of the last"),
        ([drawn(1, 2, 20, 36)[..., 2:34]] * 3, "query: address"),
        ([drawn(1, 2, 20, 36)[..., :32]] * 3, "query: stride 36"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_not_served_by_its_tensors(tensors: list[Any], reason: str) -> None:
    with pytest.raises(ArgumentError, match=f"{reason}.*strict=False leaves"):
        sdpa(*tensors, strict=True)
    with pytest.warns(FallbackWarning, match=reason):
        output = sdpa(*tensors)
    assert torch.equal(output, pytorch_sdpa(*tensors))


def test_what_pytorch_refuses_it_refuses_itself() -> None:
    q, k = drawn(1, 3, 20, 32), drawn(1, 2, 20, 32)
    with pytest.warns(FallbackWarning, match="key: 2 heads"), pytest.raises(RuntimeError):
        sdpa(q, k, k)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"query": None}, "query: no tensor, but NoneType"),
        ({"value": [1.0]}, "value: no tensor, but list"),
        ({"attn_mask": 0.1}, "attn_mask: no tensor, but float"),
        ({"is_causal": "False"}, "is_causal: 'False'; must be"),
        ({"enable_gqa": None}, "enable_gqa: None; must be"),
        ({"scale": "0.1"}, "scale: no number, but str"),
        ({"scale": np.array(0.3)}, "scale: no number, but ndarray"),
        ({"scale": torch.tensor([0.3])}, "scale: no number, but Tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_types(change: dict[str, Any], reason: str, autocast: bool) -> None:
    """PyTorch's error names the argument; under strict, ours does."""
    q = drawn(1, 2, 20, 32)
    call = {"query": q, "key": q, "value": q, "emulate": True, **change}
    (name,) = change
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        with pytest.raises(ArgumentError, match=reason):
            sdpa(**call, strict=True)
        with (
            pytest.warns(FallbackWarning, match=reason),
            pytest.raises(TypeError, match=f"argument '{name}'"),
        ):
            sdpa(**call)


def test_a_scale_may_be_a_symbol() -> None:
    def layer(q: Any, scale: float) -> Any:
        return sdpa(q, q, q, scale=scale, emulate=True)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    q = drawn(1, 2, 20, 32)
    assert torch.equal(compiled(q, 0.25), layer(q, 0.25))


def test_one_warning_for_one_reason() -> None:
    q, before = drawn(1, 2, 20, 32, dtype=torch.float32), fallback_count()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            sdpa(q, q, q)
        sdpa(q.half(), q.half(), q.half(), dropout_p=1e-9)
    assert [warning.category for warning in caught] == [FallbackWarning] * 2
    assert [warning.filename for warning in caught] == [__file__] * 2
    assert fallback_count() == before + 4


def test_one_reason_does_not_silence_another() -> None:
    """Of one argument, too; and numbers make no other reason of one."""
    wide = drawn(1, 2, 20, 32, dtype=torch.float32)
    crooked = drawn(1, 2, 20, 36)[..., :32]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for q in (wide, crooked, drawn(1, 2, 20, 59), wide, crooked, drawn(1, 2, 21, 61)):
            sdpa(q, q, q)
    said = [str(warning.message) for warning in caught]
    assert [text.partition("query: ")[2].partition(";")[0] for text in said] == [
        "dtype float32",
        "stride 36",
        "d 59",
    ]


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keywords of every call that went to a kernel; PyTorch computes it in its place."""
    from flashsmith.integrations import sdpa as module

    seen: list[dict[str, Any]] = []

    def attention(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        seen.append(keywords)
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return pytorch_sdpa(*heads_first, is_causal=keywords["causal"]).transpose(1, 2)

    monkeypatch.setattr(module, "attention", attention)
    monkeypatch.delenv("FLASHSMITH_EMULATE", raising=False)
    return seen


def test_host_tensors_are_left_to_pytorch(kernel_calls: list[Any]) -> None:
    q = drawn(1, 2, 20, 32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert torch.equal(sdpa(q, q, q), pytorch_sdpa(q, q, q))
    (warning,) = caught
    assert warning.category is FallbackWarning
    for way in ("emulate=True", "FLASHSMITH_EMULATE=1"):
        assert way in str(warning.message)
    with pytest.raises(ArgumentError, match=r"query: on the host.*emulate=True.*EMULATE=1"):
        sdpa(q, q, q, strict=True)
    assert not kernel_calls


@pytest.mark.parametrize(
    ("variable", "emulate", "runs"),
    [
        (None, None, False),
        (None, True, True),
        ("0", None, False),
        ("0", True, True),
        ("1", None, True),
        ("1", False, False),
    ],
)
def test_the_emulator_runs_on_request(
    variable: str | None,
    emulate: bool | None,
    runs: bool,
    kernel_calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv("FLASHSMITH_EMULATE", variable)
    q = drawn(1, 2, 20, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        sdpa(q, q, q, emulate=emulate)
    # Whoever asks is not asked once more where it would take longer than a minute.
    assert [call["emulate"] for call in kernel_calls] == [True] * runs


def test_a_wrong_wish_for_the_emulator_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    q = drawn(1, 2, 20, 32)
    with pytest.raises(ArgumentError, match="emulate='yes': allowed are True, False and None"):
        sdpa(q, q, q, emulate="yes")  # type: ignore[arg-type]
    monkeypatch.setenv("FLASHSMITH_EMULATE", "yes")
    with pytest.raises(ArgumentError, match="FLASHSMITH_EMULATE='yes': allowed are 0 and 1"):
        sdpa(q, q, q)


def test_functions_called_by_name_run_in_the_emulator_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import flashsmith

    monkeypatch.setenv("FLASHSMITH_EMULATE", "0")
    q = drawn(1, 20, 2, 32)
    offsets = torch.tensor([0, 20], dtype=torch.int32)
    with count_launches() as launches:
        flashsmith.attention(q, q, q)
        flashsmith.flash_attn_func(q, q, q)
        flashsmith.flash_attn_varlen_func(*[q[0]] * 3, offsets, offsets, 20, 20)
    assert launches.emulator == 3


# --- what PyTorch is doing around a call ---------------------------------------------------------


def causal(q: Any, function: Any = sdpa, **arguments: Any) -> Any:
    return function(q, q, q, is_causal=True, **arguments)


def loss(q: Any, function: Any = sdpa, **arguments: Any) -> Any:
    return causal(q, function, **arguments).float().sum()


@pytest.mark.parametrize("compiled", [False, True])
def test_transforms_of_torch_func_are_left_to_pytorch(
    compiled: bool, kernel_calls: list[Any]
) -> None:
    q = drawn(3, 2, 20, 32)

    def wrapped(function: Any) -> Any:
        if not compiled:
            return function
        return torch.compile(function, fullgraph=True, backend="eager")

    cases = [(torch.vmap, causal), (lambda function: torch.vmap(torch.func.grad(function)), loss)]
    if compiled:
        cases.append((torch.func.grad, loss))
    for transform, function in cases:
        forget_warnings()
        with pytest.warns(FallbackWarning, match=r"query: inside a transform of torch\.func"):
            ours = wrapped(transform(partial(function, emulate=True)))(q)
        theirs = transform(partial(function, function=pytorch_sdpa))(q)
        torch.testing.assert_close(ours, theirs)
    assert not kernel_calls
    if not compiled:
        with pytest.raises(ArgumentError, match=r"inside a transform of torch\.func"):
            torch.vmap(partial(causal, strict=True, emulate=True))(q)


def test_forward_mode_differentiation_is_left_to_pytorch(kernel_calls: list[Any]) -> None:
    """Which refuses it, or computes it: no tangent is lost without a word."""
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        q = forward_ad.make_dual(drawn(1, 2, 20, 32), drawn(1, 2, 20, 32, seed=1))
        with pytest.raises(ArgumentError, match="query: forward-mode differentiation"):
            sdpa(q, q, q, strict=True, emulate=True)
    assert not kernel_calls


def test_jit_trace_records_pytorchs_function(kernel_calls: list[Any]) -> None:
    def traced_function(q: Any) -> Any:
        return causal(q, emulate=True)

    with pytest.warns(FallbackWarning, match=r"query: traced by torch\.jit\.trace"):
        traced = torch.jit.trace(traced_function, (drawn(1, 2, 20, 32),), check_trace=False)
    assert not kernel_calls
    for length in (20, 33):  # no size was recorded as a constant
        q = drawn(1, 2, length, 32)
        torch.testing.assert_close(traced(q), causal(q, pytorch_sdpa))


@pytest.mark.parametrize("compiled", [False, True])
def test_backends_that_are_switched_off_are_not_used(
    compiled: bool, kernel_calls: list[Any]
) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def under(backends: Any, q: Any, **arguments: Any) -> Any:
        with sdpa_kernel(backends):
            return causal(q, **arguments)

    run = torch.compile(under, fullgraph=True, backend="eager") if compiled else under
    q = drawn(1, 2, 20, 32)
    with pytest.warns(FallbackWarning, match="sdpa_kernel: PyTorch's flash attention is switched"):
        output = run(SDPBackend.MATH, q, emulate=True)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.equal(output, causal(q, pytorch_sdpa))
    assert not kernel_calls
    if not compiled:
        with pytest.raises(ArgumentError, match="sdpa_kernel: "):
            run(SDPBackend.MATH, q, strict=True, emulate=True)
        run([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], q, strict=True, emulate=True)
        assert len(kernel_calls) == 1


# --- GPUs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "untuned", "reason"),
    [
        (75, "1", "query: on cuda:0, an sm_75; the kernels need sm_80"),
        (80, "0", None),
        (90, "0", None),
        (100, "0", "query: on cuda:0, an sm_100; nothing was measured .*FLASHSMITH_UNTUNED=1"),
        (120, "0", "query: on cuda:0, an sm_120; nothing was measured .*FLASHSMITH_UNTUNED=1"),
        (100, "1", None),
    ],
)
def test_architectures(
    arch: int,
    untuned: str,
    reason: str | None,
    kernel_calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flashsmith.families import device_spec
    from flashsmith.integrations import pytorch_state
    from flashsmith.integrations import sdpa as module

    def as_on_a_gpu(device: Any, *arguments: Any, **keywords: Any) -> Any:
        return pytorch_state.why_not_on(torch.device("cuda", 0), *arguments, **keywords)

    device = replace(device_spec("H100"), arch=arch)
    monkeypatch.setattr(pytorch_state, "query_gpu", lambda ordinal: device)
    monkeypatch.setattr(module, "why_not_on", as_on_a_gpu)
    monkeypatch.setenv("FLASHSMITH_UNTUNED", untuned)
    q = drawn(1, 2, 20, 32)
    if reason is None:
        sdpa(q, q, q, strict=True)
        assert len(kernel_calls) == 1
        return
    with pytest.raises(ArgumentError, match=reason):
        sdpa(q, q, q, strict=True)
    with pytest.warns(FallbackWarning, match=reason):
        assert torch.equal(sdpa(q, q, q), pytorch_sdpa(q, q, q))
    assert not kernel_calls


def test_a_program_may_be_exported_for_a_gpu_that_is_not_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flashsmith.integrations import pytorch_state

    def query_gpu(ordinal: int) -> Any:
        raise ArgumentError(f"device: GPU {ordinal} does not exist")

    monkeypatch.setattr(pytorch_state, "query_gpu", query_gpu)
    assert pytorch_state.why_not_on(torch.device("cuda", 7), None, 512, with_gradients=True) is None


def test_in_the_place_of_pytorchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that calls torch.nn.functional's finds ours there, and a fallback does not come back."""
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    q = drawn(1, 2, 20, 32, dtype=torch.float32)
    with pytest.warns(FallbackWarning):
        output = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert torch.equal(output, pytorch_sdpa(q, q, q, is_causal=True))


def test_multihead_attention_in_eval_does_not_come_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/integrations.md says: its fast path is PyTorch's own kernel."""
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", partial(sdpa, emulate=True)
    )
    layer = torch.nn.MultiheadAttention(64, 2, batch_first=True, dtype=torch.float16).eval()
    x = drawn(1, 20, 64)
    before = fallback_count()
    for fast, launched in ((True, 0), (False, 1)):
        torch.backends.mha.set_fastpath_enabled(fast)
        try:
            with torch.no_grad(), count_launches() as launches:
                layer(x, x, x, need_weights=False)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        assert launches.total == launched
    assert fallback_count() == before


def test_autocast_means_what_it_means_to_pytorch() -> None:
    q, k, v = (drawn(1, 2, 20, 32, dtype=torch.float32, seed=seed) for seed in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = sdpa(q, k, v, strict=True, emulate=True)
        assert output.dtype is pytorch_sdpa(q, k, v).dtype is torch.bfloat16
    assert_same(output, q.bfloat16(), k.bfloat16(), v.bfloat16())


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashsmith.errors import KernelNotBuiltError
    from flashsmith.integrations import sdpa as module

    def attention(*_: Any, **__: Any) -> None:
        raise KernelNotBuiltError("build it")

    monkeypatch.setattr(module, "attention", attention)
    q = drawn(1, 2, 20, 32)
    with pytest.raises(KernelNotBuiltError):
        sdpa(q, q, q, emulate=True)


def test_a_function_that_replaced_pytorchs_before_the_first_call() -> None:
    """flashsmith.sdpa is imported when first used: what it leaves to PyTorch must not come back."""
    program = """
import torch, flashsmith
from torch.nn import functional
functional.scaled_dot_product_attention = lambda *args: flashsmith.sdpa(*args)
q = torch.ones(1, 1, 4, 8)
assert torch.equal(functional.scaled_dot_product_attention(q, q, q), q)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
