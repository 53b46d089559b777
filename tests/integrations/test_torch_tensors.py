"""PyTorch's less plain tensors: on meta, nested, distributed, with the negative bit, traced by
TorchScript; and lengths that are tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import shared_kernels

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

from torch.nn.functional import scaled_dot_product_attention as pytorch_sdpa  # noqa: E402

import flashsmith  # noqa: E402
import flashsmith.integrations.sdpa as sdpa_module  # noqa: E402
from flashsmith import attention, flash_attn_varlen_func, sdpa  # noqa: E402
from flashsmith.errors import ArgumentError  # noqa: E402
from flashsmith.families import Semantics  # noqa: E402
from flashsmith.families import parse_kernel_name_into_config as parse  # noqa: E402
from flashsmith.integrations.fallbacks import FallbackWarning  # noqa: E402
from flashsmith.runtime import frameworks  # noqa: E402

# What other tests of this folder have, too.
CFG = parse("(FP16, 64, 64, 32, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax")
REPEATABLE = parse("(FP16, 64, 64, 64, 4): backward")
DECODE = parse("(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_2")
CALL: dict[str, Any] = {"causal": True, "config": CFG}
for cfg in (CFG, REPEATABLE):
    shared_kernels.want([cfg], Semantics("causal", uneven=True))
    shared_kernels.want([cfg], Semantics("window", softcap=True, packed=True, uneven=True))
shared_kernels.want([DECODE], Semantics("causal"))
shared_kernels.want_chosen("b1 s20 h2 d32 fp16 uneven", "b1 s20 h2 d32 fp16 packed uneven")


def drawn(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def qkv(rows: int = 20, heads: int = 2, d: int = 64) -> tuple[Any, Any, Any]:
    q, k, v = (drawn(1, rows, heads, d, seed=seed) for seed in range(3))
    return q, k, v


class TestMeta:
    """What PyTorch computes the shapes of models with."""

    def test_pytorch_computes_it(self) -> None:
        q = torch.empty(1, 2, 8, 64, dtype=torch.float16, device="meta", requires_grad=True)
        with pytest.warns(FallbackWarning, match="query: on meta"):
            o = sdpa(q, q, q, emulate=True)
        assert (o.shape, o.device.type) == (q.shape, "meta")
        o.sum().backward()
        assert q.grad.shape == q.shape

    def test_under_autocast_of_another_device(self) -> None:
        q = torch.empty(1, 2, 8, 64, dtype=torch.float16, device="meta")
        with torch.autocast("cpu", torch.bfloat16), pytest.warns(FallbackWarning):
            assert sdpa(q, q, q).shape == q.shape

    def test_strict(self) -> None:
        q = torch.empty(1, 2, 8, 64, dtype=torch.float16, device="meta")
        with pytest.raises(ArgumentError, match="query: on meta; the kernels run on cuda"):
            sdpa(q, q, q, strict=True)
        with pytest.raises(
            ArgumentError, match="q: lives on device meta; allowed are cpu and cuda"
        ):
            attention(q, q, q)


class TestNested:
    def nested(self, layout: Any) -> Any:
        """(2, heads, lengths, d), as sdpa() takes it."""
        parts = [drawn(rows, 2, 32, seed=rows) for rows in (5, 9)]
        if layout is torch.strided:  # PyTorch's own function takes contiguous ones only
            return torch.nested.nested_tensor([it.transpose(0, 1).contiguous() for it in parts])
        return torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)

    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
    def test_pytorch_computes_it(self, layout: Any) -> None:
        q = self.nested(layout)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype")
            with pytest.warns(FallbackWarning, match="query: a nested tensor"):
                o = sdpa(q, q, q, emulate=True)
        for ours, theirs in zip(o.unbind(), pytorch_sdpa(q, q, q).unbind(), strict=True):
            torch.testing.assert_close(ours, theirs)
        with pytest.raises(ArgumentError, match="query: a nested tensor; the kernels take plain"):
            sdpa(q, q, q, strict=True)
        with pytest.raises(ArgumentError, match=r"q: is a nested tensor; give its values, packed"):
            attention(q, q, q)

    def test_its_values_and_offsets_are_a_packed_batch(self) -> None:
        heads_first = self.nested(torch.jagged)
        q = heads_first.transpose(1, 2)
        starts = q.offsets().int()
        o = attention(q.values(), q.values(), q.values(), cu_seqlens_q=starts, cu_seqlens_k=starts)
        expected = pytorch_sdpa(heads_first, heads_first, heads_first).transpose(1, 2)
        torch.testing.assert_close(o, expected.values(), atol=2e-3, rtol=2e-3)


class TestNegativeBit:
    """Tensors whose memory has the values with the other sign, as .imag of a conjugate has."""

    def test_forward(self) -> None:
        q, k, v = qkv()
        attention(q, k, v, **CALL)  # whose launch may be repeated
        for place in range(3):
            plain = [-it if i == place else it for i, it in enumerate((q, k, v))]
            bit = [torch._neg_view(it) if i == place else it for i, it in enumerate((q, k, v))]
            for _ in range(2):
                assert torch.equal(attention(*bit, **CALL), attention(*plain, **CALL))
        with pytest.raises(ArgumentError, match="out: is read-only"):
            attention(q, k, v, out=torch._neg_view(torch.empty_like(q)), **CALL)

    def test_gradients(self) -> None:
        def gradients(flip: Callable[[Any], Any]) -> list[Any]:
            q, k, v = (it.requires_grad_() for it in qkv())
            o = attention(flip(q), k, flip(v), backward_config=REPEATABLE, **CALL)
            return [o.detach(), *torch.autograd.grad(o, (q, k, v), flip(drawn(*o.shape, seed=3)))]

        for _ in range(2):
            for ours, theirs in zip(gradients(torch._neg_view), gradients(torch.neg), strict=True):
                assert torch.equal(ours, theirs)

    def test_backward(self) -> None:
        q, k, v = qkv()
        o, lse = attention(q, k, v, return_lse=True, **CALL)
        for _ in range(2):
            for flip in (torch.neg, torch._neg_view):
                found = flashsmith.backward(
                    flip(q), k, flip(k), v, o, flip(lse), causal=True, config=REPEATABLE
                )
                if flip is torch.neg:
                    expected = found
            for ours, theirs in zip(found[:3], expected[:3], strict=True):
                assert torch.equal(ours, theirs)

    def test_over_a_cache(self) -> None:
        q, k, v = drawn(2, 1, 2, 64), drawn(2, 70, 1, 64, seed=1), drawn(2, 70, 1, 64, seed=2)
        call = {"cache_lens": torch.tensor([5, 69], dtype=torch.int32), "config": DECODE}
        flashsmith.attention_with_cache(q, k, v, **call)
        flip = torch._neg_view
        for _ in range(2):
            ours = flashsmith.attention_with_cache(flip(q), k, flip(v), **call)
            assert torch.equal(ours, flashsmith.attention_with_cache(-q, k, -v, **call))
        new = {"k": drawn(2, 1, 1, 64), "v": drawn(2, 1, 1, 64)}
        with pytest.raises(ArgumentError, match="v_cache: is read-only"):
            flashsmith.attention_with_cache(q, k, flip(v), **call, **new)

    def test_merged_parts(self) -> None:
        o, lse = drawn(1, 5, 2, 64).float(), torch.zeros(1, 2, 5)
        flashsmith.merge_attention([o, o], [lse, lse])
        ours, _ = flashsmith.merge_attention([o, torch._neg_view(o)], [lse, lse])
        assert not ours.any()

    def test_sdpa(self) -> None:
        q, k, v = (it.transpose(1, 2) for it in qkv(d=32))
        ours = sdpa(torch._neg_view(q), k, v, emulate=True)
        assert torch.equal(ours, sdpa(-q, k, v, emulate=True))


class TestDTensor:
    @pytest.fixture(scope="class")
    @classmethod
    def mesh(cls) -> Iterator[Any]:
        distributed = torch.distributed
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        yield distributed.init_device_mesh("cpu", (1,))
        distributed.destroy_process_group()

    def sharded(self, mesh: Any, tensor: Any) -> Any:
        from torch.distributed.tensor import Shard, distribute_tensor

        return distribute_tensor(tensor, mesh, [Shard(2)])

    @pytest.mark.parametrize("requires_grad", [False, True])
    def test_the_error_names_it(self, mesh: Any, requires_grad: bool) -> None:
        q, k, v = qkv()
        for name, place in (("q", 0), ("k", 1), ("v", 2)):
            tensors = [q, k, v]
            tensors[place] = self.sharded(mesh, tensors[place]).requires_grad_(requires_grad)
            with pytest.raises(ArgumentError, match=rf"{name}: is a DTensor, .*\.local_map, "):
                attention(*tensors, **CALL)

    def test_other_functions(self, mesh: Any) -> None:
        q = self.sharded(mesh, drawn(1, 8, 2, 64))
        lens = torch.tensor([3], dtype=torch.int32)
        calls: dict[str, Callable[[], Any]] = {
            "q: ": lambda: flashsmith.flash_attn_func(q, q, q),
            "q: is": lambda: flashsmith.attention_with_cache(q, q, q, cache_lens=lens),
            "(do|q): ": lambda: flashsmith.backward(q, q, q, q, q, q),
            r"outs\[0\]: ": lambda: flashsmith.merge_attention([q.float()], [q.float()]),
            "q: is a": lambda: torch.compile(attention, backend="eager")(q, q, q),
        }
        for name, call in calls.items():
            with pytest.raises(ArgumentError, match=f"{name}.*DTensor"):
                call()

    def test_sdpa_leaves_it_to_pytorch(self, mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        q = self.sharded(mesh, drawn(1, 8, 2, 64)).transpose(1, 2)
        # What PyTorch's own function does with them takes it a minute on a CPU.
        monkeypatch.setattr(sdpa_module, "pytorch_sdpa", lambda query, *_, **__: query)
        with pytest.warns(FallbackWarning, match="query: a DTensor"):
            assert sdpa(q, q, q, emulate=True) is q

    def test_local_map(self, mesh: Any) -> None:
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.experimental import local_map

        whole = qkv()
        tensors = [self.sharded(mesh, it).requires_grad_() for it in whole]
        local = local_map(
            lambda q, k, v: attention(q, k, v, backward_config=REPEATABLE, **CALL),
            out_placements=[Shard(2)],
            in_placements=([Shard(2)],) * 3,
            device_mesh=mesh,
        )
        o = local(*tensors)
        assert torch.equal(o.full_tensor(), attention(*whole, **CALL))
        o.sum().backward()
        assert tensors[1].grad.shape == whole[1].shape


class TestLengthsThatAreTensors:
    """cu_seqlens.diff().max() is one, for a kernel that wants a number."""

    STARTS = torch.tensor([0, 5, 18], dtype=torch.int32)

    @pytest.mark.parametrize(
        "longest",
        [torch.tensor(13), torch.tensor(13, dtype=torch.int32), np.int64(13), np.int32(13), 13],
        ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
    )
    @pytest.mark.parametrize("requires_grad", [False, True])
    def test_compiled(self, longest: Any, requires_grad: bool) -> None:
        q = drawn(18, 2, 64).requires_grad_(requires_grad)
        torch._dynamo.reset()

        def varlen(q: Any, starts: Any, longest: Any) -> Any:
            return attention(
                *(q, q, q),
                window=(4, 2),
                softcap=20.0,
                cu_seqlens_q=starts,
                cu_seqlens_k=starts,
                max_seqlen_q=longest,
                max_seqlen_k=longest,
                config=CFG,
                backward_config=REPEATABLE,
            )

        o = torch.compile(varlen, fullgraph=True, backend="aot_eager")(q, self.STARTS, longest)
        assert torch.equal(o, varlen(q, self.STARTS, 13))

    def test_computed_in_the_graph(self) -> None:
        q = drawn(18, 2, 32)
        torch._dynamo.reset()

        def varlen(q: Any, starts: Any) -> Any:
            longest = starts.diff().max()
            return flash_attn_varlen_func(q, q, q, starts, starts, longest, longest)

        o = torch.compile(varlen, fullgraph=True, backend="aot_eager")(q, self.STARTS)
        assert torch.equal(o, varlen(q, self.STARTS))


@pytest.mark.parametrize("window", [(-1, -1), [-1, -1]])
def test_the_first_call_of_a_process_is_compiled(
    window: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds no types that earlier calls have looked up."""
    q = drawn(1, 20, 2, 32)

    def layer(q: Any) -> Any:
        return flashsmith.flash_attn_func(q, q, q, window_size=window)

    torch._dynamo.reset()
    monkeypatch.setattr(frameworks, "_by_type", {})
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(q)
    assert torch.equal(found, layer(q))


class TestVersions:
    """A kernel's write counts as a change of the tensor, as PyTorch's own writes do."""

    def test_a_gradient_from_an_overwritten_output_is_refused(self) -> None:
        q, k, v = qkv()
        weight = torch.ones((), dtype=torch.float16, requires_grad=True)
        out = torch.zeros_like(q)
        product = weight * out  # saves out
        attention(q, k, v, out=out, **CALL)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_every_given_output(self, mode: Any) -> None:
        q, k, v = qkv()
        outs = [torch.zeros_like(q) for _ in range(2)]
        with mode():
            attention(q, k, v, out=outs[0], **CALL)
            flashsmith.forward(CFG, q, k, v, outs[1], causal=True)
        assert [it._version for it in (*outs, q, k, v)] == [1, 1, 0, 0, 0]

    @pytest.mark.parametrize("appends", [False, True])
    def test_caches(self, appends: bool) -> None:
        q, k, v = qkv(rows=1)
        caches = [torch.zeros(1, 128, 2, 64, dtype=torch.float16) for _ in range(2)]
        lens, out = torch.tensor([5], dtype=torch.int32), torch.zeros_like(q)
        new = {"k": k, "v": v} if appends else {}
        flashsmith.attention_with_cache(q, *caches, cache_lens=lens, out=out, config=DECODE, **new)
        assert [it._version for it in caches] == [int(appends)] * 2
        assert (out._version, lens._version, k._version) == (1, 0, 0)

    def test_slots(self) -> None:
        k, v = drawn(3, 2, 64), drawn(3, 2, 64, seed=1)
        caches = [torch.zeros(4, 16, 2, 64, dtype=torch.float16) for _ in range(2)]
        flashsmith.write_slots(k, v, *caches, torch.tensor([3, 9, 40]))
        assert [it._version for it in (*caches, k, v)] == [1, 1, 0, 0]

    def test_an_output_made_inside_inference_mode(self) -> None:
        """It has no version."""
        q, k, v = qkv()
        with torch.inference_mode():
            out = torch.zeros_like(q)
        assert torch.equal(attention(q, k, v, out=out, **CALL), attention(q, k, v, **CALL))


class TestTorchScript:
    @pytest.mark.parametrize(
        "name",
        ["sdpa", "attention", "attention_with_cache", "backward", "merge_attention",
         "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"],
    )  # fmt: skip
    def test_script(self, name: str) -> None:
        with pytest.raises(RuntimeError, match=rf"flashsmith\.{name}\(\) .* use torch.compile or"):
            torch.jit.script(getattr(flashsmith, name))

    def test_script_of_a_module_that_calls_it(self) -> None:
        class Layer(torch.nn.Module):
            def forward(self, q):  # type: ignore
                return sdpa(q, q, q)

        with pytest.raises(RuntimeError, match=r"flashsmith\.sdpa\(\) launches its kernels from"):
            torch.jit.script(Layer())

    @pytest.mark.parametrize("requires_grad", [False, True])
    def test_trace(self, requires_grad: bool) -> None:
        q = drawn(1, 20, 2, 64).requires_grad_(requires_grad)
        with pytest.raises(ArgumentError, match=r"q: inside torch\.jit\.trace, which records no"):
            torch.jit.trace(lambda q: attention(q, q, q, **CALL), (q,))
