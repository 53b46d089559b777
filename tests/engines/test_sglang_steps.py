"""SGLang's pools and batches drive layers through whole generations, in the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang_driver import DEVICE, Checked, Engine, Layer, module_of, prompts, server

from flashsmith.runtime import libraries

# bf16 rounds outputs of about 2 to 8 bits.
TOLERANCE = 0.02


@pytest.fixture(autouse=True)
def published() -> Iterator[None]:
    with server():
        yield


def generate(*layers: Layer, count: int = 4, shared: int = 24, **sizes: Any) -> Checked:
    engine = Engine(layers, **sizes)
    return engine.run(prompts(3, count, shared, 30), 4, together=3)


class HybridEngine(Engine):
    """A model, such as Qwen 3 Next, in which only layers 3 and 7 have attention and keys."""

    numbers = 3, 7

    def _pool(self, slots: int, window_pool: int) -> Any:
        layer = self.layers[0]
        sizes = slots, self.cache, self.page, layer.kv_heads, layer.d, [*self.numbers]
        return HybridLinearKVPool(*sizes, DEVICE, mamba_pool=SimpleNamespace())

    def _modules(self) -> Any:
        return torch.nn.ModuleList(map(module_of, self.layers, self.numbers))


def test_layers_beside_linear_ones() -> None:
    engine = HybridEngine((Layer(), Layer()), page=16, graphs=True)
    checked = engine.run(prompts(3, 4, 20, 60), 4)
    assert checked.mixed > 0
    assert checked.graphs > 0
    assert checked.largest_error < TOLERANCE


@pytest.mark.parametrize(
    ("layer", "page", "dtype"),
    [
        (Layer(), 1, torch.bfloat16),
        (Layer(), 16, torch.float16),
        (Layer(window=20, sinks=True), 16, torch.bfloat16),
        (Layer(d=128, softcap=3.0, heads=8), 1, torch.bfloat16),
        (Layer(d=256, window=9), 64, torch.bfloat16),
    ],
    ids=lambda it: f"d{it.d}-{it.window}" if isinstance(it, Layer) else str(it),
)
def test_mixed_batches_and_prefix_hits(layer: Layer, page: int, dtype: Any) -> None:
    checked = generate(layer, page=page, dtype=dtype, shared=max(24, page + 1))
    assert checked.mixed > 0
    assert checked.prefix_hits > 0
    assert checked.largest_error < TOLERANCE


def parameter(number: float) -> Any:
    return torch.nn.Parameter(torch.tensor(number), requires_grad=False)


@pytest.mark.parametrize(
    ("layer", "page", "cache", "scales"),
    [
        (Layer(), 1, torch.float8_e4m3fn, None),
        (Layer(d=80, window=20), 16, torch.float8_e5m2, (parameter(0.5), parameter(0.7))),
        # Most of the quotients are beyond the largest number.
        (Layer(d=128, softcap=3.0), 16, torch.float8_e4m3fn, (0.003, parameter(0.002))),
    ],
    ids=["e4m3", "e5m2-parameters", "e4m3-saturated"],
)  # fmt: skip
def test_caches_of_8_bit_floats(layer: Layer, page: int, cache: Any, scales: Any) -> None:
    checked = generate(layer, page=page, cache=cache, scales=scales, graphs=True)
    assert checked.mixed > 0
    assert checked.graphs > 2
    assert checked.prefix_hits > 0
    assert checked.largest_error < TOLERANCE


def test_8_bit_floats_in_both_pools() -> None:
    checked = generate(
        Layer(), Layer(window=20), window_pool=400, cache=torch.float8_e4m3fn, scales=(0.5, 0.25)
    )
    assert checked.freed > 20
    assert checked.largest_error < TOLERANCE


def test_keys_and_values_of_the_model_stay_as_they_are() -> None:
    """The engine's pools divide them by the scales in place."""
    engine = Engine((Layer(),), cache=torch.float8_e4m3fn, scales=(0.5, 0.25))
    engine.run({"request": [*range(40)]}, 1, chunk=100)
    batch = decode_batch(engine)
    engine.backend.init_forward_metadata(batch)
    q = torch.ones(1, 4 * 64, dtype=torch.bfloat16)
    k = torch.randn(1, 2, 64, generator=torch.manual_seed(1)).bfloat16()
    before = k.clone()
    engine.backend.forward(q, k, k, engine.modules[0], batch)
    assert torch.equal(k, before)


@pytest.mark.parametrize("page", [1, 16])
def test_decode_graphs_with_padding(page: int) -> None:
    """Tensors stay where they were captured, and a batch is padded to a captured size."""
    checked = generate(Layer(), page=page, graphs=True)
    assert checked.graphs > 2
    assert checked.largest_error < TOLERANCE


@pytest.mark.parametrize("page", [1, 16])
def test_layers_with_a_window_have_a_pool_of_their_own(page: int) -> None:
    checked = generate(Layer(), Layer(window=20), page=page, window_pool=400, graphs=True)
    assert checked.freed > 20
    assert checked.graphs > 2
    assert checked.largest_error < TOLERANCE


def test_caches_with_heads_before_tokens() -> None:
    for cache in (torch.bfloat16, torch.float8_e4m3fn):
        with envs.SGLANG_USE_HND_KVCACHE.override(True):
            engine = Engine((Layer(),), page=16, slots=640, cache=cache)
        assert engine.pool.k_buffer[0].shape == (41, 2, 16, 64)
        assert engine.run(prompts(3, 2, 20, 30), 2).largest_error < TOLERANCE


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn])
def test_deterministic_inference_gives_canonical_bits(cache: Any) -> None:
    """A row has the same bits alone and in a batch, in one step and in chunks, in any pages."""
    texts = prompts(3, 3, 24, 30)
    with server(deterministic=True):
        engine = Engine((Layer(),), cache=cache)
        assert (engine.backend.bits, engine.backend.split) == ("canonical", "invariant")
        together = engine.run(texts, 4, chunk=20).outputs
        apart: dict[Any, Any] = {}
        for name, text in texts.items():
            apart |= (
                Engine((Layer(),), page=16, cache=cache).run({name: text}, 4, chunk=100).outputs
            )
    assert len(together) > 80
    assert [it for it in together if not torch.equal(together[it], apart[it])] == []


def test_nothing_is_built_after_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine((Layer(), Layer(window=20)), graphs=True)
    built: list[Any] = []
    monkeypatch.setattr(type(libraries.loaded_kernels), "_build", lambda _, key: built.append(key))
    engine.run(prompts(4, 3, 10, 60), 3)
    assert built == []


@pytest.mark.parametrize("window", [None, 9])
def test_an_encoder_sees_all_keys(window: int | None) -> None:
    layer = Layer(attn_type=AttentionType.ENCODER_ONLY, window=window)
    engine = Engine((layer,))
    checked = engine.run({"short": [1, 2, 3], "long": [*range(60)]}, 0, chunk=100)
    assert checked.steps == 1
    assert checked.largest_error < TOLERANCE


# --- single calls --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Engine:
    with server():
        engine = Engine((Layer(),))
        engine.run({"request": [*range(40)]}, 1, chunk=100)
        return engine


def decode_batch(engine: Engine, **fields: Any) -> Any:
    """A decode over the first 41 keys of the last request, whose slots the radix cache holds."""
    request = engine._start("again", [*range(40), 0], 1)
    engine.rows.free_slots.append(request.row)  # for the next call
    row = torch.tensor([request.row])
    lens = torch.tensor([len(request.slots)])
    batch = {
        "forward_mode": ForwardMode.DECODE,
        "batch_size": 1,
        "req_pool_indices": row,
        "seq_lens": lens,
        "seq_lens_cpu": lens,
        "out_cache_loc": request.slots[-1:],
        "mha_return_lse": False,
        "out_cache_loc_is_physical": True,
    }
    return SimpleNamespace(**batch | fields)


def test_a_layer_can_read_what_another_has_written(engine: Engine) -> None:
    """Layers that share a cache bring no keys; others are told that theirs are written already."""
    batch = decode_batch(engine)
    engine.backend.init_forward_metadata(batch)
    q = torch.ones(1, 4 * 64, dtype=torch.bfloat16)
    nothing = engine.backend.forward(q, None, None, engine.modules[0], batch)
    k = torch.full((1, 2, 64), torch.nan, dtype=torch.bfloat16)
    unsaved = engine.backend.forward(q, k, k, engine.modules[0], batch, save_kv_cache=False)
    assert nothing.isfinite().all()
    assert torch.equal(nothing, unsaved)


def test_lengths_may_be_known_on_the_device_alone(engine: Engine) -> None:
    q = torch.ones(1, 4 * 64, dtype=torch.bfloat16)
    outputs = []
    for fields in ({}, {"seq_lens_cpu": None}):
        batch = decode_batch(engine, **fields)
        engine.backend.init_forward_metadata(batch)
        outputs.append(engine.backend.forward(q, None, None, engine.modules[0], batch))
    assert torch.equal(*outputs)


def test_rows_beyond_the_step_are_left_alone(engine: Engine) -> None:
    batch = decode_batch(engine)
    engine.backend.init_forward_metadata(batch)
    q = torch.ones(1, 4 * 64, dtype=torch.bfloat16)
    one = engine.backend.forward(q, None, None, engine.modules[0], batch)
    more = engine.backend.forward(q.expand(3, -1), None, None, engine.modules[0], batch)
    assert more.shape == (3, 4 * 64)
    assert torch.equal(one[0], more[0])


@pytest.mark.parametrize("option", ["q_rope", "return_lse", "score_mod"])
def test_an_option_that_is_not_served_is_named(option: str, engine: Engine) -> None:
    batch = decode_batch(engine)
    engine.backend.init_forward_metadata(batch)
    q = torch.ones(1, 4 * 64, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match=f"{option} of layer 0 not served"):
        engine.backend.forward(q, None, None, engine.modules[0], batch, **{option: True})


def test_graphs_of_prefills_are_refused(engine: Engine) -> None:
    batch = decode_batch(engine, forward_mode=ForwardMode.EXTEND)
    with pytest.raises(NotImplementedError, match="whole-forward graphs of prefills"):
        engine.backend.init_forward_metadata_out_graph(batch)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_encoder_decoder": True}, "cross attention"),
        ({"is_local_attention_model": True}, "attention in chunks of the context"),
        ({"kv_cache_dtype": torch.float16}, r"kv_cache_dtype torch.float16 \(auto\) with"),
        (
            {"kv_cache_dtype": torch.float8_e4m3fn, "kv_cache_dtype_str": "mxfp8"},
            r"kv_cache_dtype torch.float8_e4m3fn \(mxfp8\) with",
        ),
        ({"dtype": torch.float32, "kv_cache_dtype": torch.float32}, "kv_cache_dtype torch.float32"),
        (
            {"dtype": torch.float32, "kv_cache_dtype": torch.float8_e5m2},
            "float8_e5m2 .* with a model of torch.float32",
        ),
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
def test_a_server_that_is_not_served_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=f"flashsmith: .*{reason}.*choose another"):
        Engine((Layer(),), changes=changes)


def test_rows_of_8_bit_floats_are_multiples_of_16() -> None:
    with pytest.raises(NotImplementedError, match=r"d 72 \(layer 0\) .* multiple of 16"):
        Engine((Layer(d=72),), cache=torch.float8_e4m3fn)


def test_context_parallelism_is_refused() -> None:
    with (
        get_parallel().override(attn_dcp_size=2),
        pytest.raises(NotImplementedError, match="context parallelism not served"),
    ):
        Engine((Layer(),))


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("is_cross_attention", True, "cross attention"),
        ("v_head_dim", 32, "values of d 32 with keys of d 64"),
        ("head_dim", 520, "d 520"),
        ("xai_temperature_len", 8, "a temperature by position"),
    ],
)
def test_a_layer_that_is_not_served_is_refused(
    field: str, value: Any, reason: str, engine: Engine
) -> None:
    layer = Engine((Layer(),)).modules[0]
    setattr(layer, field, value)
    with pytest.raises(NotImplementedError, match=rf"flashsmith: {reason} \(layer 0\)"):
        engine.backend.forward(torch.ones(1, 256), None, None, layer, decode_batch(engine))


def test_the_driver_notices_a_wrong_layer() -> None:
    engine = Engine((Layer(),))
    wrong = Engine((Layer(window=5),))
    engine.backend._layers = {engine.modules[0]: wrong.backend._layers[wrong.modules[0]]}
    assert engine.run({"request": [*range(40)]}, 1).largest_error > TOLERANCE
