"""Latent attention (MLA) under SGLang's pools and batches, and its choice of a layer for a step."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool
from sglang_driver import DEVICE, VOCABULARY, Engine, Layer, Parts, Request, prompts, server
from test_sglang_draft_models import STEPS, Drafter, drafting
from test_sglang_drafts import DRAFTS, EAGLE, Verifier

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
        self.direct = self.absorbing = 0  # steps

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

    def _run(self, backend: Any, batch: Any, parts: Parts, padding: int) -> None:
        absorbed, projected = self.modules
        rows = self._of(self.latent, parts, padding)
        prefixes = batch.extend_prefix_lens_cpu
        # As the engine chooses for a backend that it does not know: 'triton' does the same.
        if prefixes is not None and not sum(prefixes):
            self.direct += 1
            location = KVWriteLoc(batch.out_cache_loc)
            self.pool.set_kv_buffer(absorbed, location, rows, rows[..., :RANK])
            q, k, v = (self._of(it, parts, padding) for it in self.projected)
            output = backend.forward(
                q.flatten(1), k, v, projected, batch, save_kv_cache=False
            ).view(-1, HEADS, D_V)
            tables, stored = self.projected, self.dtype
        else:
            self.absorbing += 1
            q = self._of(self.absorbed, parts, padding)
            output = backend.forward(q.flatten(1), rows, rows[..., :RANK], absorbed, batch).view(
                -1, HEADS, RANK
            )
            latent = self.latent.expand(-1, HEADS, -1)
            tables, stored = [self.absorbed, latent, latent[..., :RANK]], self.cache
        sizes = [len(at) for _, at in parts]
        for part, found in zip(parts, output.split([*sizes, padding])[:-1], strict=True):
            self._compare(tables, stored, *part, found)

    def _of(self, table: Any, parts: list[Any], padding: int) -> Any:
        rows = [self._row(table, *part) for part in parts]
        return torch.cat([*rows, torch.zeros(padding, *table.shape[1:], dtype=self.dtype)])

    def _row(self, table: Any, request: Request, positions: range) -> Any:
        tokens = torch.tensor([request.tokens[p] for p in positions])
        turned = torch.cos(torch.tensor(positions)[:, None, None] * 0.37)
        return (table[tokens] * (1 + 0.5 * turned)).to(self.dtype)

    def _compare(
        self, tables: Any, stored: Any, request: Request, positions: range, found: Any
    ) -> None:
        """``stored``: the dtype in which the step reads keys."""
        q = self._row(tables[0], request, positions).double()
        keys = range(positions.stop)
        k, v = (self._row(it, request, keys).to(stored).double() for it in tables[1:])
        scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
        later = torch.arange(positions.stop) > torch.tensor(positions)[:, None]
        weights = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
        expected = torch.einsum("hqk,khd->qhd", weights, v)
        error = (found.double() - expected).abs().max().item()
        self.checked.largest_error = max(self.checked.largest_error, error)


@pytest.mark.parametrize(
    ("page", "graphs", "cache"),
    [
        (1, False, None),
        (16, True, None),
        (16, True, torch.float8_e4m3fn),
        pytest.param(1, False, torch.float8_e5m2, marks=pytest.mark.full),
    ],
    ids=["page 1", "page 16, graphs", "e4m3", "e5m2"],
)
def test_prompts_chunks_and_decodes(
    page: int, graphs: bool, cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server():
        engine = LatentEngine(page=page, graphs=graphs, cache=cache)
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


class LatentVerifier(LatentEngine, Verifier):
    """Verifies drafts."""


class LatentDrafter(LatentEngine, Drafter):
    """A draft model, such as DeepSeek's."""


@pytest.mark.parametrize("graphs", [False, True], ids=lambda it: "graphs" if it else "eager")
def test_drafts_are_verified(graphs: bool) -> None:
    with server(drafts=DRAFTS):
        engine = LatentVerifier(page=16, graphs=graphs, changes={"spec_algorithm": EAGLE})
        engine.verify(prompts(5, 3, 10, 40), 4)
    assert engine.absorbing == 4
    assert engine.checked.graphs == (4 if graphs else 0)
    assert engine.checked.largest_error < TOLERANCE


@pytest.mark.parametrize("graphs", [False, True], ids=lambda it: "graphs" if it else "eager")
def test_a_draft_model_extends_chains(graphs: bool) -> None:
    with drafting():
        engine = LatentDrafter(page=16, graphs=graphs)
        engine.draft(prompts(5, 3, 10, 40), 4)
    assert isinstance(engine.backend, FlashsmithLatentBackend)
    assert engine.absorbing == 4 * STEPS
    assert engine.checked.graphs == (4 if graphs else 0)
    assert engine.checked.largest_error < TOLERANCE


def test_the_engine_gives_unknown_backends_these_two_layers() -> None:
    handlers = import_module("sglang.srt.models.deepseek_common.attention_backend_handler")
    registry = handlers.AttentionBackendRegistry
    assert registry.get_handler("flashsmith") is registry.get_handler("triton")


def test_deterministic_inference_is_refused() -> None:
    reason = "flashsmith: deterministic inference with latent attention .* is not served"
    with server(deterministic=True), pytest.raises(NotImplementedError, match=reason):
        LatentEngine()


def test_other_latent_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROPE", 32)
    with server(), pytest.raises(NotImplementedError, match="latent rows of 288:256"):
        LatentEngine()
