"""Options given as tensors: a scale, a softcap, a window, and sinks of 16 bits, in every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import shared_kernels

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

import flashsmith  # noqa: E402
from flashsmith.errors import ArgumentError  # noqa: E402
from flashsmith.families import DType, FlashForwardKernelConfig, Semantics  # noqa: E402
from flashsmith.families import parse_kernel_name_into_config as parse  # noqa: E402
from flashsmith.runtime.frameworks import base, framework_of  # noqa: E402

# What other tests have, too.
CFG = FlashForwardKernelConfig(
    DType.FP16, 64, 64, 32, 4, True, True, True, 2, 2, 2, optimized_softmax=True
)
REPEATABLE = parse("(FP16, 64, 64, 64, 4): backward")
DECODE = parse("(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_2")
WINDOW = Semantics("window", softcap=True, packed=True, uneven=True)
for _config in (CFG, REPEATABLE):
    shared_kernels.want([_config], WINDOW)
shared_kernels.want([DECODE], Semantics("causal"))

Q, K, V = (
    torch.randn(40, 2, 64, generator=torch.Generator().manual_seed(seed)).half()
    for seed in range(3)
)
STARTS = torch.tensor([0, 17, 40], dtype=torch.int32)
PACKED = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_q": 23, "max_seqlen_k": 23}
SINKS = torch.tensor([0.5, -1.0])
PLAIN = {"scale": 0.125, "softcap": 4.0, "window": (5, 3), "sinks": SINKS}
CACHE = {
    "cache_lens": torch.tensor([9, 20], dtype=torch.int32),
    "scale": 0.125,
    "sinks": SINKS,
}


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    for config in (CFG, REPEATABLE):
        shared_kernels.load([config], WINDOW)
    shared_kernels.load([DECODE], Semantics("causal"))


def attend(**options: Any) -> Any:
    return flashsmith.attention(
        *(Q, K, V), **PACKED, config=CFG, backward_config=REPEATABLE, emulate=True, **options
    )


def differentiate(**options: Any) -> Any:
    o, lse = attend(**PLAIN, return_lse=True)
    return flashsmith.backward(
        *(Q, Q, K, V, o, lse), **PACKED, config=REPEATABLE, emulate=True, **options
    )


def decode(**options: Any) -> Any:
    caches = K[:40].reshape(2, 20, 2, 64), V[:40].reshape(2, 20, 2, 64)
    return flashsmith.attention_with_cache(
        Q[:2, None], *caches, **{**CACHE, **options}, config=DECODE, emulate=True
    )


def in_numpy(**options: Any) -> Any:
    given = {name: it.numpy() if isinstance(it, torch.Tensor) else it for name, it in
             {**PACKED, **options}.items()}  # fmt: skip
    tensors = (it.numpy() for it in (Q, K, V))
    return torch.from_numpy(flashsmith.attention(*tensors, **given, config=CFG, emulate=True))


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "attention": (attend, PLAIN),
    "forward": (
        lambda **options: flashsmith.forward(CFG, Q, K, V, **PACKED, emulate=True, **options),
        PLAIN,
    ),
    "attention in NumPy": (in_numpy, PLAIN),
    "backward": (differentiate, PLAIN),
    "attention_with_cache": (decode, {"scale": 0.125, "sinks": SINKS}),
}


def assert_same(found: Any, expected: Any) -> None:
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for one, other in pairs:
        assert torch.equal(one, other.to(one.dtype))


@pytest.mark.parametrize("call", CALLS)
def test_tensors_mean_what_their_numbers_do(call: str) -> None:
    run, plain = CALLS[call]
    expected = run(**plain)
    others = {
        "scale": [
            torch.tensor(0.125), torch.tensor(0.125, dtype=torch.bfloat16), np.float32(0.125),
            np.array(0.125), torch.tensor(0.125, dtype=torch.float64),
        ],
        "softcap": [torch.tensor(4.0), torch.tensor(4), np.array(4.0)],
        "window": [
            torch.tensor([5, 3]), torch.tensor([5, 3], dtype=torch.int32), np.array([5, 3]),
            tuple(torch.tensor([5, 3])), (np.int64(5), np.int64(3)), [5, 3],
        ],
        "sinks": [SINKS.half(), SINKS.bfloat16()],
    }  # fmt: skip
    for name in plain:
        for value in others[name]:
            if call == "attention in NumPy" and getattr(value, "dtype", None) is torch.bfloat16:
                continue
            assert_same(run(**{**plain, name: value}), expected)


def test_a_changed_tensor_is_read_again() -> None:
    """Nothing remembers a tensor for its number."""
    scale, window = torch.tensor(0.125), torch.tensor([5, 3])
    first = attend(**{**PLAIN, "scale": scale, "window": window})
    scale.fill_(0.5)
    window.copy_(torch.tensor([2, 1]))
    second = attend(**{**PLAIN, "scale": scale, "window": window})
    assert not torch.equal(first, second)
    assert torch.equal(second, attend(**{**PLAIN, "scale": 0.5, "window": (2, 1)}))
    scale.fill_(0.125)
    first = decode(scale=scale)
    scale.fill_(0.5)
    assert torch.equal(decode(scale=scale), decode(scale=0.5))
    assert not torch.equal(first, decode(scale=scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_sinks_has_their_dtype(dtype: Any) -> None:
    wanted = SINKS.clone().requires_grad_()
    attend(**{**PLAIN, "sinks": wanted}).float().square().sum().backward()
    sinks = SINKS.to(dtype).requires_grad_()
    o = attend(**{**PLAIN, "sinks": sinks})
    o.float().square().sum().backward()
    assert sinks.grad.dtype == dtype
    assert torch.equal(sinks.grad, wanted.grad.to(dtype))
    found = differentiate(**{**PLAIN, "sinks": SINKS.to(dtype)})
    assert found.dsinks.dtype == dtype
    assert torch.equal(found.dsinks, differentiate(**PLAIN).dsinks.to(dtype))
    kept = differentiate(**{**PLAIN, "sinks": SINKS.to(dtype)}, grad_dtype="float32")
    assert kept.dsinks.dtype == torch.float32


def test_parts_are_merged_with_sinks_of_16_bits() -> None:
    parts = [attend(**{**PLAIN, "sinks": None}, partial=True) for _ in range(2)]
    outs, lses = zip(*parts, strict=True)
    expected = flashsmith.merge_attention(outs, lses, SINKS, emulate=True)
    for dtype in (torch.float16, torch.bfloat16):
        found = flashsmith.merge_attention(outs, lses, SINKS.to(dtype), emulate=True)
        assert_same(found, expected)
    one = attend(**{**PLAIN, "sinks": None, "scale": torch.tensor(0.125)}, partial=True)
    assert_same(one, parts[0])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"scale": torch.tensor([0.1])}, r"scale=tensor\(\[0\.1000\]\): give a finite number"),
        ({"scale": torch.tensor(True)}, "scale=True: give a finite number"),
        ({"scale": torch.tensor(-1.0)}, r"scale=-1\.0: give a finite number"),
        ({"scale": torch.tensor(0.1, requires_grad=True)}, "scale: requires grad, but gets no"),
        ({"scale": torch.tensor(0.1, device="meta")}, "scale: lives on device meta"),
        ({"window": torch.tensor([1, 2, 3])}, r"window=tensor\(\[1, 2, 3\]\): give a pair"),
        ({"window": torch.tensor([1.0, 2.0])}, r"window=\(1\.0, 2\.0\): 1\.0 is not a limit"),
        (
            {"window": torch.tensor([-1, 2])},
            r"window=\(-1, 2\): -1 is not a limit; .* None for none",
        ),
        ({"sinks": SINKS.double()}, "sinks: dtype torch.float64; must be float32"),
        ({"sinks": SINKS.half()[:1]}, r"sinks: shape \(1,\); must be \(n_heads of q,\)"),
    ],
)
def test_other_tensors_are_refused_by_name(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        attend(**option)


@pytest.mark.parametrize("name", ["scale", "window"])
def test_a_number_on_a_device_is_not_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    framework = framework_of(torch.Tensor)
    assert framework is not None
    view = type(framework).view
    value = torch.tensor(0.1) if name == "scale" else torch.tensor([1, 2])

    def on_a_gpu(self: Any, argument: str, tensor: Any) -> Any:
        found = view(self, argument, tensor)
        return found._replace(device=base.Device("cuda", 0)) if tensor is value else found

    monkeypatch.setattr(type(framework), "view", on_a_gpu)
    with pytest.raises(ArgumentError, match=f"{name}: is a tensor on .* would wait for the device"):
        attend(**{name: value})


def test_traced_calls_take_numbers_and_sinks_of_any_dtype() -> None:
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    assert torch.equal(compiled(**{**PLAIN, "sinks": SINKS.half()}), attend(**PLAIN))
    for name, value in (("scale", torch.tensor(0.1)), ("window", torch.tensor([1, 2]))):
        with pytest.raises(Exception, match=f"{name}: is a tensor, whose numbers are not known"):
            torch.compile(attend, backend="eager", fullgraph=True)(**{name: value})
