"""vLLM's scheduler drives a layer through whole generations, in the emulator."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.envs
from vllm.utils import torch_utils
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec
from vllm_driver import LAYER, VOCABULARY, Checked, Engine, Layer, config_of, prompts

from flashsmith.integrations.vllm.backend import FlashsmithBackend
from flashsmith.runtime import libraries

# bf16 rounds outputs of about 2 to 8 bits.
TOLERANCE = 0.02


def generate(
    folder: Path,
    layer: Layer,
    *,
    blocks: int = 48,
    count: int = 5,
    shared: int = 40,
    new_tokens: int = 5,
    **sizes: Any,
) -> Checked:
    dtype = str(layer.dtype).removeprefix("torch.")
    engine = Engine(config_of(folder, dtype=dtype, **sizes), layer, blocks)
    for number, prompt in enumerate(prompts(3, count, shared, 50)):
        engine.add(f"request {number}", prompt, new_tokens)
    return engine.run()


@pytest.mark.parametrize(
    "layer",
    [
        Layer(),
        Layer(layout="HND", dtype=torch.float16),
        Layer(window=20, sinks=True),
        Layer(d=128, softcap=3.0, heads=8),
        pytest.param(Layer(d=512, heads=8, kv_heads=1), marks=pytest.mark.full),
    ],
    ids=lambda layer: f"d{layer.d} {layer.layout} {layer.window} {layer.softcap}",
)
def test_mixed_batches_and_prefix_hits(layer: Layer, tmp_path: Path) -> None:
    checked = generate(tmp_path, layer)
    assert checked.mixed > 2
    assert checked.prefix_hits > 2
    assert checked.largest_error < TOLERANCE


def test_attention_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine makes a request of each chunk, so that there are more than the scheduler has, and
    frees the blocks of earlier chunks."""
    # No memory is pinned without a GPU.
    monkeypatch.setattr(torch_utils, "PIN_MEMORY", False, raising=False)
    engine = Engine(config_of(tmp_path, tokens=64, requests=4), Layer(chunk=32), 32)
    built: list[Any] = []
    monkeypatch.setattr(type(libraries.loaded_kernels), "_build", lambda _, key: built.append(key))
    for number, prompt in enumerate(prompts(3, 7, 20, 90)):
        engine.add(f"request {number}", prompt, 6)
    checked = engine.run()
    assert checked.mixed > 0
    assert checked.prefix_hits > 0
    assert checked.largest_error < TOLERANCE
    assert built == []


@pytest.mark.parametrize("cache", ["fp8", "fp8_e5m2"])
def test_caches_of_8_bit_floats(cache: str, tmp_path: Path) -> None:
    checked = generate(tmp_path, Layer(cache=cache))
    assert checked.mixed > 2
    assert checked.largest_error < TOLERANCE


def test_preempted_requests_resume(tmp_path: Path) -> None:
    """Too few blocks for all requests: the engine takes blocks away and computes again."""
    checked = generate(tmp_path, Layer(), blocks=13, shared=0, count=6, new_tokens=30)
    assert checked.preempted > 0
    assert checked.largest_error < TOLERANCE


def test_large_blocks(tmp_path: Path) -> None:
    checked = generate(tmp_path, Layer(), blocks=12, block=64, shared=70)
    assert checked.prefix_hits > 0
    assert checked.largest_error < TOLERANCE


def test_batch_invariance_gives_canonical_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row has the same bits alone and in a batch, in one step and in chunks."""
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True)
    together = generate(tmp_path, Layer(), tokens=48).outputs
    apart: dict[str, dict[int, Any]] = {}
    for number, prompt in enumerate(prompts(3, 5, 40, 50)):
        engine = Engine(config_of(tmp_path, tokens=256), Layer(), 48)
        assert engine.impl.bits == "canonical"
        engine.add(f"request {number}", prompt, 5)
        apart |= engine.run().outputs
    # Rows that hit the prefix cache were not computed again.
    rows = [(name, row) for name in together for row in together[name]]
    assert len(rows) > 150
    assert [it for it in rows if not torch.equal(together[it[0]][it[1]], apart[it[0]][it[1]])] == []


def test_nothing_is_built_after_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(config_of(tmp_path), Layer(), 48)
    built: list[Any] = []
    monkeypatch.setattr(type(libraries.loaded_kernels), "_build", lambda _, key: built.append(key))
    for number, prompt in enumerate(prompts(4, 5, 30, 60)):
        engine.add(f"request {number}", prompt, 4)
    engine.run()
    assert built == []


# --- calls that no scheduler makes ---------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(config_of(tmp_path_factory.mktemp("model")), Layer(), 8)


def test_a_profiling_run_gives_zeros(engine: Engine) -> None:
    output = torch.full((5, 4, 64), torch.nan).bfloat16()
    returned = engine.impl.forward(SimpleNamespace(), *(output,) * 3, None, None, output)
    assert returned is output
    assert not output.any()


def test_a_fused_quantised_output_is_refused(engine: Engine) -> None:
    with pytest.raises(NotImplementedError, match="not quantised"):
        engine.impl.forward(
            SimpleNamespace(), *(torch.zeros(1),) * 4, None, torch.zeros(1), torch.ones(1)
        )


def test_a_block_table_can_be_exchanged(engine: Engine) -> None:
    """Layers of other cache groups share a step's metadata."""
    step = CommonAttentionMetadata(
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        query_start_loc_cpu=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([1], dtype=torch.int32),
        num_reqs=1,
        num_actual_tokens=1,
        max_query_len=1,
        max_seq_len=1,
        block_table_tensor=torch.zeros(1, 16, dtype=torch.int32),
        slot_mapping=torch.zeros(1, dtype=torch.int64),
    )
    first = engine.builder.build(0, step)
    table, slots = torch.ones(1, 16, dtype=torch.int32), torch.ones(1, dtype=torch.int64)
    other = engine.builder.update_block_table(first, table, slots)
    assert (other.block_table, other.slot_mapping) == (table, slots)
    assert first.block_table is step.block_table_tensor


@pytest.mark.parametrize("bits", ["free", "canonical"])
@pytest.mark.parametrize("window", [None, 9])
def test_an_encoder_sees_all_keys(
    window: int | None, bits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", bits == "canonical")
    config = config_of(tmp_path, dtype="float16", tokens=512, requests=12)
    impl = FlashsmithBackend.get_impl_cls()(
        *(4, 64, 0.125, 2, None, window), attn_type="encoder_only"
    )
    config.compilation_config.static_forward_context[LAYER] = SimpleNamespace(impl=impl)
    spec = EncoderOnlyAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float16
    )
    builder = FlashsmithBackend.get_builder_cls()(spec, [LAYER], config, torch.device("cpu"))
    built: list[Any] = []
    monkeypatch.setattr(type(libraries.loaded_kernels), "_build", lambda _, key: built.append(key))
    for lengths in ([20, 27], [1], [3] * 12, [200, 1, 70]):
        error = error_of_an_encoder(impl, builder, lengths, window)
        assert error < TOLERANCE, lengths
    assert built == []


def error_of_an_encoder(impl: Any, builder: Any, lengths: list[int], window: int | None) -> float:
    """The largest difference from float64 of a step of whole sequences."""
    torch.manual_seed(0)
    rows = sum(lengths)
    q = torch.randn(rows + 3, 4, 64).half()
    k, v = torch.randn(2, rows + 3, 2, 64).half()
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    step = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(lengths),
        num_actual_tokens=rows,
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
        block_table_tensor=torch.zeros(len(lengths), 1, dtype=torch.int32),
        slot_mapping=torch.full((rows,), -1),
        causal=False,
    )
    output = torch.full((rows + 3, 4, 64), torch.nan).half()
    impl.do_kv_cache_update(SimpleNamespace(), k, v, torch.empty(0), step.slot_mapping)
    impl.forward(SimpleNamespace(), q, k, v, torch.empty(0), builder.build(0, step), output)
    assert output[rows:].isnan().all()
    largest = 0.0
    for first, end in itertools.pairwise(starts):
        part = slice(first, end)
        keys, values = (it[part].double().repeat_interleave(2, dim=1) for it in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[part].double(), keys) * 0.125
        at = torch.arange(end - first)
        if window is not None:
            scores.masked_fill_((at[:, None] - at).abs() >= window, -torch.inf)
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values)
        largest = max(largest, (output[part].double() - expected).abs().max().item())
    return largest


def test_the_driver_notices_a_wrong_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(config_of(tmp_path), Layer(), 48)
    monkeypatch.setattr(engine.impl, "scale", 0.2)
    engine.add("request", [3] * 20 + [*range(VOCABULARY)], 2)
    assert engine.run().largest_error > TOLERANCE
    assert LAYER in engine.config.compilation_config.static_forward_context
