"""Speculative decoding: the draft model, which SGLang's factory gives backends of its own."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import plugins
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative import draft_utils
from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_driver import VOCABULARY, Engine, Layer, Request, prompts, server
from test_sglang_selection import parse

TOLERANCE = 0.02
DRAFTS = 4  # the tokens that the target model verifies
STEPS = DRAFTS - 1  # of them are the draft model's
DRAFT_MODEL = {
    "spec_algorithm": SpeculativeAlgorithm.from_string("EAGLE"),
    "is_draft_worker": True,
    "draft_attention_backend": "flashsmith",
}


def drafting(**settings: Any) -> Any:
    """The settings of a server whose draft model has this package's backend, and ``settings``."""
    names = {"speculative_draft_attention_backend": "flashsmith"} | settings
    return server(drafts=DRAFTS, **names)


def factory_of(runner: Any) -> Any:
    """The engine's factory for a draft model, after the engine has applied the plugins' hooks."""
    plugins._plugins_loaded = False
    plugins.load_plugins()
    factory = draft_utils.DraftBackendFactory
    known = {"server_args": runner.server_args, "draft_model_runner": runner}
    known |= {"topk": 1, "speculative_num_steps": STEPS}
    return factory(
        **{name: it for name, it in known.items() if name in signature(factory).parameters}
    )


class Drafter(Engine):
    """A draft model between the target's verifications, as the engine's worker runs it."""

    def __init__(self, layers: tuple[Layer, ...], **options: Any) -> None:
        changes = DRAFT_MODEL | options.pop("changes", {})
        super().__init__(layers, changes=changes, **options)
        factory = factory_of(self.runner)
        self.steps = factory.create_decode_backend()
        self.backend = factory.create_draft_extend_backend()
        if self.graphs:
            self.steps.init_cuda_graph_state(self.rows.size, self.rows.size)

    def draft(self, texts: dict[str, list[int]], rounds: int) -> None:
        requests = [self._start(name, text, rounds * DRAFTS + 1) for name, text in texts.items()]
        graphs, self.graphs = self.graphs, False  # prompts have none
        self._step(requests, 1000)
        for number in range(rounds):
            for request in requests:
                del request.tokens[request.computed :]
                request.tokens += [(7 * number + 5 * it) % VOCABULARY for it in range(DRAFTS)]
                self._make_room(request, len(request.tokens))
            self._decode(requests, graphs)
            self._extend(requests)
            for at, request in enumerate(requests):
                # The target keeps some; the keys of the others are written over.
                request.computed += 1 + (number + at) % DRAFTS

    def _decode(self, requests: list[Request], graphs: bool) -> None:
        """All steps of a round: their metadata is made before the first one."""
        slots = [it.slots[it.computed : it.computed + STEPS] for it in requests]
        batch = self._round(requests, ForwardMode.DECODE, 0, torch.cat(slots))
        if graphs:
            batch = self._padded(batch)
            self.steps.init_forward_metadata_out_graph(batch, in_capture=True)
            captured = [it.forward_metadata for it in self.steps.attn_backends]
            self.steps.init_forward_metadata_out_graph(batch)
            self.steps.init_forward_metadata_in_graph(batch)
            for backend, step in zip(self.steps.attn_backends, captured, strict=True):
                backend.forward_metadata = step  # what a graph has captured is what it reads
            self.checked.graphs += 1
        else:
            self.steps.init_forward_metadata(batch)
        places = per_step_draft_out_cache_loc(batch.out_cache_loc, batch.batch_size, 1, STEPS)
        assert len(self.steps.attn_backends) == STEPS - 1
        for step, backend in enumerate(self.steps.attn_backends):
            batch.out_cache_loc = places[step]
            parts = [(it, range(it.computed + step, it.computed + step + 1)) for it in requests]
            self._run(backend, batch, parts, batch.batch_size - len(parts))
            self.checked.steps += 1

    def _extend(self, requests: list[Request]) -> None:
        """The draft model gets the keys of all verified tokens, with the target's hidden states."""
        parts = [(it, range(it.computed, it.computed + DRAFTS)) for it in requests]
        slots = torch.cat([it.slots[at.start : at.stop] for it, at in parts])
        batch = self._round(requests, ForwardMode.DRAFT_EXTEND_V2, DRAFTS, slots)
        counts = [DRAFTS] * len(requests)
        batch.extend_seq_lens_cpu, batch.extend_seq_lens = counts, torch.tensor(counts).int()
        self.backend.init_forward_metadata(batch)
        self._run(self.backend, batch, parts, 0)
        self.checked.steps += 1

    def _round(self, requests: list[Request], mode: ForwardMode, more: int, slots: Any) -> Any:
        lens = torch.tensor([request.computed + more for request in requests])
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(requests),
            input_ids=torch.zeros(len(requests)).long(),
            req_pool_indices=torch.tensor([request.row for request in requests]),
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
            seq_lens_sum=int(lens.sum()),
            out_cache_loc=slots,
            positions=lens.clone(),
            spec_info=SimpleNamespace(ragged_verify_layout=None),
        )
        self._plan(batch)
        return batch

    def _padded(self, batch: Any) -> Any:
        """The batch with a graph's number of requests, of which some are in the unused row."""
        more = self.rows.size - batch.batch_size
        batch.batch_size = self.rows.size
        batch.seq_lens = torch.cat([batch.seq_lens, torch.ones(more).long()])
        batch.seq_lens_cpu = batch.seq_lens.clone()
        batch.req_pool_indices = torch.cat([batch.req_pool_indices, torch.zeros(more).long()])
        batch.out_cache_loc = torch.cat([batch.out_cache_loc, torch.zeros(more * STEPS).long()])
        return batch


@pytest.mark.parametrize("graphs", [False, True], ids=lambda it: "graphs" if it else "eager")
@pytest.mark.parametrize(
    ("options", "layer"),
    [
        ({}, Layer()),
        ({"page": 16}, Layer(window=9)),
        ({"page": 16, "cache": torch.float8_e4m3fn, "scales": (0.02, 0.03)}, Layer()),
    ],
    ids=["page 1", "window", "fp8"],
)
def test_a_draft_model_extends_chains(options: dict[str, Any], layer: Layer, graphs: bool) -> None:
    with drafting():
        engine = Drafter((layer,), graphs=graphs, **options)
        engine.draft(prompts(5, 3, 10, 40), 4)
    assert engine.checked.steps == 1 + 4 * STEPS
    assert engine.checked.graphs == (4 if graphs else 0)
    assert engine.checked.largest_error < TOLERANCE


def test_a_chain_of_one_token_needs_no_decode_step() -> None:
    with drafting():
        engine = Engine((Layer(),), changes=DRAFT_MODEL)
        factory = factory_of(engine.runner)
        factory.speculative_num_steps = 1
        assert factory.create_decode_backend() is None


def test_the_factory_still_knows_the_engines_backends_only() -> None:
    with drafting(speculative_draft_attention_backend="torch_native"):
        engine = Engine(
            (Layer(),), changes=DRAFT_MODEL | {"draft_attention_backend": "torch_native"}
        )
        with pytest.raises(ValueError, match=r"EAGLE is not supported .*torch_native"):
            factory_of(engine.runner).create_decode_backend()


def test_the_server_takes_it_for_the_draft_model(tmp_path: Path) -> None:
    args = parse(tmp_path, "--speculative-draft-attention-backend", "flashsmith")
    assert args.speculative_draft_attention_backend == "flashsmith"


@pytest.mark.parametrize(
    ("settings", "options", "reason"),
    [
        ({"enable_multi_layer_eagle": True}, {}, "a draft model with a layer for each step"),
        ({"speculative_draft_window_size": 9}, {}, "speculative_draft_window_size for a draft"),
        ({}, {"window_pool": 400, "page": 16}, "layers with a window have a pool of their own"),
    ],
    ids=["layers", "window", "two pools"],
)
def test_other_draft_models_are_refused(
    settings: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    layers = (Layer(), Layer(window=20)) if options else (Layer(),)
    with (
        drafting(**settings),
        pytest.raises(
            NotImplementedError, match=f"{reason}.* set --speculative-draft-attention-backend"
        ),
    ):
        Engine(layers, changes=DRAFT_MODEL, **options)


def test_the_draft_models_own_window_is_served() -> None:
    with drafting(speculative_draft_window_size=9):
        assert Drafter((Layer(window=9),)).backend.forward_metadata is None
