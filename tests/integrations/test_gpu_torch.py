"""PyTorch on a GPU: graphs, streams, threads, several GPUs, compiled models, whole models."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.torch]

from cuda_graphs import captured  # noqa: E402

import flashsmith  # noqa: E402
from flashsmith.errors import ArgumentError, FlashsmithError  # noqa: E402
from flashsmith.integrations.sdpa import pytorch_sdpa  # noqa: E402
from flashsmith.runtime.launch_counter import count_launches  # noqa: E402

BATCH, LENGTH, HEADS, D = 2, 300, 4, 64


def drawn(seed: int = 0, device: str = "cuda:0", dtype: Any = torch.float16) -> list[Any]:
    generator = torch.Generator(device).manual_seed(seed)
    return [
        torch.randn(
            (BATCH, LENGTH, HEADS, D), generator=generator, device=device, dtype=torch.float32
        ).to(dtype)
        for _ in range(3)
    ]


def expected(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
    tensors = [tensor.float().transpose(1, 2) for tensor in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return pytorch_sdpa(*tensors, **arguments).transpose(1, 2)


def assert_right(output: Any, tensors: list[Any], **arguments: Any) -> None:
    tolerance = 2e-3 if output.dtype is torch.float16 else 1.6e-2
    torch.testing.assert_close(
        output.float(), expected(*tensors, **arguments), atol=tolerance, rtol=tolerance
    )


def packed() -> tuple[list[Any], Any]:
    starts = torch.tensor([0, 100, 100, 257, 600], dtype=torch.int32, device="cuda")
    return [tensor.reshape(-1, HEADS, D) for tensor in drawn()], starts


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sdpa_is_pytorchs(dtype: Any) -> None:
    tensors = drawn(dtype=dtype)
    heads_first = [tensor.transpose(1, 2) for tensor in tensors]
    for arguments in ({}, {"is_causal": True}, {"scale": 0.2}):
        output = flashsmith.sdpa(*heads_first, **arguments, strict=True).transpose(1, 2)
        assert_right(output, tensors, **arguments)


@pytest.mark.parametrize("kind", ["slopes", "distances", "bias"])
def test_gradients_of_captured_tensors(kind: str) -> None:
    """Kernels sum them: with the same bits in every run, and those of PyTorch's attention."""
    q, k, v = (x.requires_grad_() for x in drawn())
    shape = {"slopes": (HEADS,), "distances": (2 * LENGTH,), "bias": (1, HEADS, LENGTH, LENGTH)}
    table = torch.randn(shape[kind], device="cuda", requires_grad=True)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if kind == "slopes":
            return s + table[h] * (j - i) / 64
        return s + (table[j - i + LENGTH] if kind == "distances" else table[0, h, i, j])

    do = torch.randn_like(q)

    def ours() -> Any:
        o = flashsmith.attention(q, k, v, score_mod=score, deterministic=True)
        return torch.autograd.grad(o, table, do)[0]

    at = torch.arange(LENGTH, device="cuda")
    heads = torch.arange(HEADS, device="cuda")[:, None, None]
    bias = score(0.0, 0, heads, at[:, None], at)
    heads_first = [x.float().transpose(1, 2) for x in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        theirs = pytorch_sdpa(*heads_first, attn_mask=bias).transpose(1, 2)
    (reference,) = torch.autograd.grad(theirs, table, do.float())
    found = ours()
    size = reference.abs().max().item()
    torch.testing.assert_close(found, reference, rtol=1e-2, atol=2e-3 * size)
    assert torch.equal(found, ours())


class TestGraphs:
    def test_captured_and_replayed(self) -> None:
        tensors = drawn()
        graph, output = captured(
            lambda: flashsmith.attention(*tensors, causal=True, return_lse=True)
        )
        for seed in (1, 2):
            for tensor, value in zip(tensors, drawn(seed), strict=True):
                tensor.copy_(value)
            with count_launches() as launches:
                graph.replay()
            torch.cuda.synchronize()
            assert launches.total == 0
            assert_right(output[0], tensors, is_causal=True)
            eager = flashsmith.attention(*tensors, causal=True, return_lse=True)
            assert torch.equal(output[0], eager[0])
            assert torch.equal(output[1], eager[1])

    def test_packed_sequences_may_change_between_replays(self) -> None:
        tensors, starts = packed()

        def call() -> Any:
            return flashsmith.attention(
                *tensors,
                causal=True,
                cu_seqlens_q=starts,
                cu_seqlens_k=starts,
                max_seqlen_q=400,
                max_seqlen_k=400,
            )

        graph, output = captured(call)
        for offsets in ([0, 100, 100, 257, 600], [0, 1, 200, 600, 600]):
            starts.copy_(torch.tensor(offsets, dtype=torch.int32))
            graph.replay()
            assert torch.equal(output, call())

    def test_a_missing_longest_is_an_error(self) -> None:
        tensors, starts = packed()
        with (
            pytest.raises(ArgumentError, match="max_seqlen_q: missing during CUDA graph capture"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            flashsmith.attention(*tensors, cu_seqlens_q=starts, cu_seqlens_k=starts)
        torch.cuda.synchronize()
        assert_right(flashsmith.attention(*drawn()), drawn())

    def test_nothing_is_built(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path))
        config = flashsmith.parse_kernel_name_into_config("(FP16, 64, 64, 32, 4): load_0_0_0_tiles")
        qkv = drawn()
        with (
            pytest.raises(FlashsmithError, match="captur"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            flashsmith.attention(*qkv, config=config)
        assert not list(tmp_path.rglob("*.so"))

    def test_a_model_compiled_to_graphs(self) -> None:
        """mode='reduce-overhead' captures what the compiler made, our op in the middle."""
        layer = torch.nn.Linear(D, D, device="cuda", dtype=torch.float16)

        def model(q: Any, k: Any, v: Any) -> Any:
            return layer(flashsmith.attention(layer(q), k, v, causal=True))

        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        with torch.no_grad():
            for seed in range(4):
                tensors = drawn(seed)
                torch.compiler.cudagraph_mark_step_begin()
                output = compiled(*tensors).clone()
                torch.testing.assert_close(output, model(*tensors), atol=5e-3, rtol=5e-3)


class TestStreams:
    def test_work_on_several_streams(self) -> None:
        inputs = [drawn(seed) for seed in range(4)]
        torch.cuda.synchronize()
        outputs = []
        for tensors in inputs:
            with torch.cuda.stream(torch.cuda.Stream()):
                outputs.append([flashsmith.attention(*tensors, causal=True) for _ in range(20)])
        torch.cuda.synchronize()
        for tensors, several in zip(inputs, outputs, strict=True):
            assert_right(several[0], tensors, is_causal=True)
            assert all(torch.equal(output, several[0]) for output in several)

    def test_a_compiled_call_uses_the_callers_stream(self) -> None:
        compiled = torch.compile(flashsmith.attention, fullgraph=True)
        ready = drawn()
        tensors = [torch.zeros_like(tensor) for tensor in ready]
        compiled(*tensors)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000_000)  # a second: hosts may be busy
            for tensor, value in zip(tensors, ready, strict=True):
                tensor.copy_(value)
            output = compiled(*tensors)
        assert not side.query(), "the call waited for the GPU"
        side.synchronize()
        assert_right(output, ready)


def test_threads() -> None:
    outputs: dict[int, Any] = {}

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            tensors = drawn(index)
            for _ in range(20):
                output = flashsmith.sdpa(
                    *(tensor.transpose(1, 2) for tensor in tensors), is_causal=index % 2 == 0
                )
            torch.cuda.current_stream().synchronize()
            outputs[index] = output.transpose(1, 2)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    with count_launches() as launches:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert launches.gpu == 8 * 20
    for index in range(8):
        assert_right(outputs[index], drawn(index), is_causal=index % 2 == 0)


class TestSeveralGpus:
    @pytest.fixture(autouse=True)
    def two(self) -> None:
        if torch.cuda.device_count() < 2:
            pytest.skip("needs 2 NVIDIA GPUs")

    def test_each_call_runs_where_its_tensors_are(self) -> None:
        for device in ("cuda:1", "cuda:0", "cuda:1"):
            tensors = drawn(device=device)
            output = flashsmith.attention(*tensors, causal=True)
            assert str(output.device) == device
            assert torch.cuda.current_device() == 0
            assert_right(output, tensors, is_causal=True)

    def test_compiled(self) -> None:
        compiled = torch.compile(flashsmith.attention, fullgraph=True)
        for device in ("cuda:1", "cuda:0"):
            tensors = drawn(device=device)
            assert_right(compiled(*tensors), tensors)

    def test_a_graph_on_the_second(self) -> None:
        tensors = drawn(device="cuda:1")
        with torch.cuda.device(1):
            graph, output = captured(lambda: flashsmith.attention(*tensors))
            output.zero_()
            graph.replay()
            torch.cuda.synchronize()
        assert_right(output, tensors)

    def test_sinks_elsewhere_are_refused(self) -> None:
        sinks = torch.zeros(HEADS, device="cuda:1")
        with pytest.raises(ArgumentError, match="sinks: lives on cuda:1 and q on cuda:0"):
            flashsmith.attention(*drawn(), sinks=sinks)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_by_inductor(dynamic: bool) -> None:
    def model(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.gelu(flashsmith.attention(2 * q, k, v, window=(50, 0))) + q

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for length in (300, 128, 77):
        tensors = [tensor[:, :length] for tensor in drawn()]
        torch.testing.assert_close(compiled(*tensors), model(*tensors), atol=2e-3, rtol=2e-3)


def test_flash_attention_names() -> None:
    tensors, starts = packed()
    output, lse, probabilities = flashsmith.flash_attn_varlen_func(
        *tensors, starts, starts, 343, 343, causal=True, return_attn_probs=True
    )
    assert probabilities is None
    assert lse.shape == (HEADS, 600)
    for first, last in ((0, 100), (100, 257), (257, 600)):
        one = [tensor[None, first:last] for tensor in tensors]
        assert_right(output[None, first:last], one, is_causal=True)
        assert_right(flashsmith.flash_attn_func(*one, causal=True), one, is_causal=True)


def test_a_whole_model_in_half_precision(tmp_path: Any) -> None:
    """Greedy generation of a random model with left padding: eager attention and ours agree."""
    transformers = pytest.importorskip(
        "transformers", reason="needs transformers: it is not installed"
    )
    from flashsmith.integrations import transformers as ours

    ours.register(strict=True)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).eval().to("cuda", torch.float16)
    tokens = torch.randint(3, 128, (3, 90), device="cuda")
    mask = torch.ones_like(tokens)
    mask[1, :40] = 0
    mask[2, :7] = 0
    with torch.no_grad():
        model.set_attn_implementation("eager")
        reference = model(tokens, attention_mask=mask).logits
        model.set_attn_implementation("flashsmith")
        with count_launches() as launches:
            output = model(tokens, attention_mask=mask).logits
        assert launches.gpu == 4
        torch.testing.assert_close(
            output[mask.bool()], reference[mask.bool()], atol=1e-2, rtol=1e-2
        )
        with count_launches() as launches:
            model.generate(tokens, attention_mask=mask, max_new_tokens=8, do_sample=False)
        assert launches.gpu == 4 * 8
