"""Latent attention (MLA) under SGLang's pools and batches, and its choice of a layer for a step."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_driver import DEVICE, VOCABULARY, Engine, Layer, Request, prompts, server

from flashsmith.integrations.sglang.latent_backend import FlashsmithLatentBackend
from flashsmith.runtime import libraries

TOLERANCE = 0.02
HEADS, RANK, ROPE = 4, 256, 64
D, D_V = 192, 128  # of the projected keys and values
SCALE = D**-0.5
MLA = {"attention_arch": AttentionArch.MLA, "kv_lora_rank": RANK}


class LatentEngine(Engine):
    """One layer, which is two layers of the engine's kind: of absorbed queries, and of prompts."""

    def __init__(self, **options: Any) -> None:
        changes = MLA | options.pop("changes", {})
        super().__init__((Layer(heads=HEADS, kv_heads=1, d=D),), changes=changes, **options)
        generator = torch.Generator().manual_seed(7)

        def table(heads: int, d: int) -> Any:
            return torch.randn(VOCABULARY, heads, d, generator=generator)

        self.absorbed, self.latent = table(HEADS, RANK + ROPE), table(1, RANK + ROPE)
        self.projected = [table(HEADS, D), table(HEADS, D), table(HEADS, D_V)]
        self.direct = 0

    def _pool(self, slots: int, window_pool: int) -> Any:
        return MLATokenToKVPool(
            slots,
            page_size=self.page,
            dtype=self.cache,
            kv_lora_rank=RANK,
            qk_rope_head_dim=ROPE,
            layer_num=1,
            device=DEVICE,
            enable_memory_saver=False,
        )

    def _modules(self) -> Any:
        absorbed = RadixAttention(HEADS, RANK + ROPE, SCALE, 1, 0, v_head_dim=RANK)
        projected = RadixAttention(HEADS, D, SCALE, HEADS, 0, v_head_dim=D_V)
        return torch.nn.ModuleList([absorbed, projected])

    def _forward(self, running: list[Request], counts: list[int], decodes: bool) -> None:
        parts = [
            (request, range(request.computed, request.computed + count))
            for request, count in zip(running, counts, strict=True)
        ]
        batch = self._batch(parts, decodes)
        padding = self._prepare(batch, decodes)
        absorbed, projected = self.modules
        rows = self._of(self.latent, parts, padding)
        # As the engine chooses for a backend that it does not know: 'triton' does the same.
        if not decodes and not sum(batch.extend_prefix_lens_cpu):
            self.direct += 1
            location = KVWriteLoc(batch.out_cache_loc)
            self.pool.set_kv_buffer(absorbed, location, rows, rows[..., :RANK])
            q, k, v = (self._of(it, parts, padding) for it in self.projected)
            output = self.backend.forward(
                q.flatten(1), k, v, projected, batch, save_kv_cache=False
            ).view(-1, HEADS, D_V)
            tables = self.projected
        else:
            q = self._of(self.absorbed, parts, padding)
            output = self.backend.forward(
                q.flatten(1), rows, rows[..., :RANK], absorbed, batch
            ).view(-1, HEADS, RANK)
            latent = self.latent.expand(-1, HEADS, -1)
            tables = [self.absorbed, latent, latent[..., :RANK]]
        for part, found in zip(parts, output.split([*counts, padding])[:-1], strict=True):
            self._compare(tables, *part, found)

    def _of(self, table: Any, parts: list[Any], padding: int) -> Any:
        rows = [self._row(table, *part) for part in parts]
        return torch.cat([*rows, torch.zeros(padding, *table.shape[1:], dtype=self.dtype)])

    def _row(self, table: Any, request: Request, positions: range) -> Any:
        tokens = torch.tensor([request.tokens[p] for p in positions])
        turned = torch.cos(torch.tensor(positions)[:, None, None] * 0.37)
        return (table[tokens] * (1 + 0.5 * turned)).to(self.dtype)

    def _compare(self, tables: Any, request: Request, positions: range, found: Any) -> None:
        q = self._row(tables[0], request, positions).double()
        k, v = (self._row(it, request, range(positions.stop)).double() for it in tables[1:])
        scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
        later = torch.arange(positions.stop) > torch.tensor(positions)[:, None]
        weights = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
        expected = torch.einsum("hqk,khd->qhd", weights, v)
        error = (found.double() - expected).abs().max().item()
        self.checked.largest_error = max(self.checked.largest_error, error)


@pytest.mark.parametrize(
    ("page", "graphs"), [(1, False), (16, True)], ids=["page 1", "page 16, graphs"]
)
def test_prompts_chunks_and_decodes(
    page: int, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server():
        engine = LatentEngine(page=page, graphs=graphs)
        assert isinstance(engine.backend, FlashsmithLatentBackend)
        built: list[Any] = []
        monkeypatch.setattr(
            type(libraries.loaded_kernels), "_build", lambda _, key: built.append(key)
        )
        checked = engine.run(prompts(3, 5, 20, 60), 4)
    assert engine.direct > 0
    assert checked.mixed > 0
    assert checked.prefix_hits > 0
    assert checked.graphs > 0 if graphs else checked.graphs == 0
    assert checked.largest_error < TOLERANCE
    assert built == []


def test_the_engine_gives_unknown_backends_these_two_layers() -> None:
    handlers = import_module("sglang.srt.models.deepseek_common.attention_backend_handler")
    registry = handlers.AttentionBackendRegistry
    assert registry.get_handler("flashsmith") is registry.get_handler("triton")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cache": torch.float8_e4m3fn}, "kv_cache_dtype torch.float8_e4m3fn with latent"),
        ({"deterministic": True}, "deterministic inference with latent attention"),
        (
            {"changes": {"spec_algorithm": SpeculativeAlgorithm.from_string("EAGLE")}},
            "speculative decoding with latent attention",
        ),
    ],
    ids=["fp8", "deterministic", "drafts"],
)
def test_what_is_not_served_is_refused(options: dict[str, Any], reason: str) -> None:
    deterministic = options.pop("deterministic", False)
    with (
        server(deterministic=deterministic),
        pytest.raises(NotImplementedError, match=f"flashsmith: {reason}.* is not served"),
    ):
        LatentEngine(**options)


def test_other_latent_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROPE", 32)
    with server(), pytest.raises(NotImplementedError, match="latent rows of 288:256"):
        LatentEngine()
