"""attention() where PyTorch traces: its custom ops, torch.compile and torch.export."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import replace
from typing import Any

import pytest
import shared_kernels

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

from torch._dynamo.eval_frame import _debug_get_cache_entry_list  # noqa: E402

import flashsmith  # noqa: E402
from flashsmith.errors import ArgumentError  # noqa: E402
from flashsmith.families import (  # noqa: E402
    KernelConfig,
    Semantics,
    parse_kernel_name_into_config,
)
from flashsmith.integrations import traceable  # noqa: E402
from flashsmith.runtime.launch_counter import count_launches  # noqa: E402

CONFIG = parse_kernel_name_into_config(
    "(FP16, 32, 64, 64, 4): async+eager+swizzled+load_0_0_0_tiles+opt_softmax"
)
UNEVEN = Semantics(uneven=True)
EVERYTHING = Semantics("window", softcap=True, uneven=True)
CHOSEN = flashsmith.choose("b1 s20:33 h4:2 d32 fp16 uneven", 80).config
shared_kernels.want([CONFIG, replace(CONFIG, swizzled=False), CHOSEN], UNEVEN)
shared_kernels.want([CHOSEN], Semantics("causal", uneven=True))
shared_kernels.want([CONFIG, CHOSEN], EVERYTHING)
shared_kernels.want_chosen("b1 s50:33 h4:2 d32 fp16 window uneven")


def drawn(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).half()


def dense(length_q: int = 20, length_k: int = 33, batch: int = 1) -> tuple[Any, Any, Any]:
    q = drawn(batch, length_q, 4, 32)
    return q, drawn(batch, length_k, 2, 32, seed=1), drawn(batch, length_k, 2, 32, seed=2)


def packed() -> tuple[Any, ...]:
    """The op's tensors: q, k, v, no sinks, cu_seqlens_q, cu_seqlens_k."""
    starts = torch.tensor([0, 5, 5, 18], dtype=torch.int32)
    return *(drawn(18, 2, 32, seed=seed) for seed in range(3)), None, starts, starts


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def ops() -> Any:
    importlib.import_module("flashsmith.integrations.torch_ops")
    return torch.ops.flashsmith


@pytest.mark.parametrize(
    ("tensors", "keywords"),
    [
        (dense(), {}),
        (dense(), {"causal": True, "scale": 0.3}),
        ((*dense(), torch.zeros(4)), {"window_left": 4, "window_right": 2, "softcap": 20.0}),
        (dense(), {"config": str(CONFIG)}),
        (packed(), {}),
        (packed(), {"max_seqlen_q": 13, "max_seqlen_k": 13}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_opcheck(tensors: Any, keywords: dict[str, Any]) -> None:
    torch.library.opcheck(ops().attention.default, tensors, keywords)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("row_max", [False, True])
def test_opcheck_of_statistics(lse: bool, row_max: bool) -> None:
    op = ops().attention_with_statistics.default
    asked = {"return_lse": lse, "return_row_max": row_max}
    torch.library.opcheck(op, dense(), asked)
    torch.library.opcheck(op, packed(), asked)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compiled_in_one_graph(backend: str) -> None:
    def model(q: Any, k: Any, v: Any) -> Any:
        return flashsmith.attention(2 * q, k, v, causal=True) + 1

    q, k, v = dense()
    expected = model(q, k, v)
    with count_launches() as launches:
        output = torch.compile(model, fullgraph=True, backend=backend)(q, k, v)
    assert launches.emulator == 1
    torch.testing.assert_close(output, expected)


def test_compiled_with_everything() -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])

    def model(q: Any, k: Any, v: Any, out: Any) -> Any:
        return flashsmith.attention(
            q,
            k,
            v,
            window=(9, 3),
            softcap=15.0,
            scale=0.2,
            sinks=sinks,
            out=out,
            return_lse=True,
            return_row_max=True,
            config=CONFIG,
        )

    q, k, v = dense()
    expected = model(q, k, v, torch.empty_like(q))
    out = torch.empty_like(q)
    output = torch.compile(model, fullgraph=True, backend="aot_eager")(q, k, v, out)
    for ours, theirs in zip(output, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(out, expected[0])


def test_a_config_is_an_argument_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one given later is not mistaken for the first."""
    used: list[KernelConfig] = []
    torch_ops = importlib.import_module("flashsmith.integrations.torch_ops")
    right = torch_ops.run_call

    def noting(config: KernelConfig, *arguments: Any) -> Any:
        used.append(config)
        return right(config, *arguments)

    def model(q: Any, k: Any, v: Any, config: KernelConfig) -> Any:
        return flashsmith.attention(q, k, v, config=config)

    monkeypatch.setattr(torch_ops, "run_call", noting)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    configs = [CONFIG, replace(CONFIG, swizzled=False), CONFIG]
    for config in configs:
        compiled(*dense(), config)
    assert used == configs


@pytest.mark.parametrize("asked", ["return_lse", "return_row_max"])
def test_one_statistic(asked: str) -> None:
    def model(q: Any, k: Any, v: Any) -> Any:
        return flashsmith.attention(q, k, v, **{asked: True})

    tensors = dense()
    output, statistic = torch.compile(model, fullgraph=True, backend="aot_eager")(*tensors)
    expected = model(*tensors)
    assert torch.equal(output, expected[0])
    assert torch.equal(statistic, expected[1])


def test_lengths_may_be_symbols() -> None:
    def model(q: Any, k: Any, v: Any) -> Any:
        return flashsmith.attention(q, k, v, causal=True).sum(-1)

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for length_q, length_k in ((20, 33), (7, 50), (64, 64)):
        tensors = dense(length_q, length_k)
        torch.testing.assert_close(compiled(*tensors), model(*tensors))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_sdpa_is_compiled_too() -> None:
    def model(q: Any, k: Any, v: Any) -> Any:
        return flashsmith.sdpa(q, k, v, is_causal=True, enable_gqa=True, emulate=True)

    tensors = [tensor.transpose(1, 2) for tensor in dense(50, 33)]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with count_launches() as launches, warnings.catch_warnings():
        warnings.simplefilter("error")
        output = compiled(*tensors)
    assert launches.total == 1
    assert torch.equal(output, model(*tensors))
    wide = [tensor.float() for tensor in tensors]
    with pytest.warns(UserWarning, match="query: dtype float32"):
        output = compiled(*wide)
    torch.testing.assert_close(output, model(*wide))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(32, 32, dtype=torch.float16)

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return flashsmith.attention(self.project(q), k, v, window=(8, 0))


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool, tmp_path: Any) -> None:
    layer, tensors = Layer(), dense()
    length = torch.export.Dim("length", min=2, max=512)
    with torch.no_grad():
        program = torch.export.export(
            layer, tensors, strict=strict, dynamic_shapes=({1: length}, None, None)
        )
        targets = [node.target for node in program.graph.nodes]
        assert ops().attention.default in targets
        torch.export.save(program, tmp_path / "layer.pt2")
        loaded = torch.export.load(tmp_path / "layer.pt2").module()
        for length_q in (20, 41):
            q, k, v = dense(length_q)
            torch.testing.assert_close(loaded(q, k, v), layer(q, k, v))


def test_tracing_does_not_walk_the_loaded_modules() -> None:
    """Dynamo goes through every dictionary that it meets, and another thread may be importing."""

    def asks(x: Any) -> Any:
        return x + 1 if traceable.is_tracing() else x

    assert torch.compile(asks, fullgraph=True, backend="eager")(torch.zeros(1)).item() == 1
    (entry,) = _debug_get_cache_entry_list(asks.__code__)
    guards = str(entry.guard_manager)
    assert "_torch" in guards
    assert "modules" not in guards


def test_eager_calls_bypass_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the op was used")

    for module, name in (
        ("traced_attention", "attention_by_op"),
        ("differentiable_calls", "differentiable_attention"),
    ):
        used = importlib.import_module(f"flashsmith.integrations.{module}")
        monkeypatch.setattr(used, name, refuse)
    with torch.profiler.profile() as profile:
        flashsmith.attention(*dense())
    assert not [event for event in profile.events() if event.name.startswith("flashsmith::")]


def test_a_window_that_is_no_pair_is_refused_while_tracing() -> None:
    compiled = torch.compile(flashsmith.attention, fullgraph=True, backend="aot_eager")
    for window in (5, (1, 2, 3), None):
        with pytest.raises(Exception, match=r"window=.*: give a pair"):
            compiled(*dense(), window=window)


def test_a_bad_argument_is_named_by_the_op_too() -> None:
    q, k, v = dense()
    with pytest.raises(flashsmith.errors.ArgumentError, match="scale=-1"):
        ops().attention(q, k, v, scale=-1.0)


FORWARD = "(FP16, 64, 64, 32, 4): async+eager+load_2_2_2_tiles"
BACKWARD = "(FP16, 64, 64, 64, 4): backward"


@pytest.mark.parametrize(
    ("op", "tensors", "keywords", "named"),
    [
        ("attention", 3, {"config": BACKWARD}, "config"),
        ("attention_with_statistics", 3, {"config": BACKWARD}, "config"),
        ("attention_with_statistics", 3, {"backward_config": FORWARD}, "backward_config"),
        ("attention_backward", 5, {"config": FORWARD, "needs": [True] * 4}, "config"),
    ],
)
@pytest.mark.parametrize("grown", [False, True])
def test_a_config_of_the_other_direction_is_named_as_it_was_given(
    op: str, tensors: int, keywords: dict[str, Any], named: str, grown: bool
) -> None:
    q = torch.zeros(1, 8, 1, 64, dtype=torch.float16, requires_grad=grown)
    given = [q] * tensors + [torch.zeros(1, 1, 8)] * (tensors == 5)
    with pytest.raises(ArgumentError, match=rf"^{named}: got .*KernelConfig"):
        getattr(torch.ops.flashsmith, op)(*given, **keywords)
