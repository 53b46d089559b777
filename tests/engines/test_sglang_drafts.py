"""Speculative decoding: the target model verifies drafts that are chains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_driver import VOCABULARY, Engine, Layer, Request, prompts, server

TOLERANCE = 0.02
DRAFTS = 4
EAGLE = SpeculativeAlgorithm.from_string("EAGLE")


class Verifier(Engine):
    """After a prompt, each step verifies a draft of tokens, of which some are kept."""

    def verify(self, texts: dict[str, list[int]], steps: int) -> None:
        requests = [self._start(name, text, steps * DRAFTS + 1) for name, text in texts.items()]
        self._step(requests, 1000)
        for step in range(steps):
            for request in requests:
                self._draft(request, step)
            self._verify(requests)
            for number, request in enumerate(requests):
                # The engine keeps the draft's first tokens, and writes over the keys of the others.
                request.computed += 1 + (step + number) % DRAFTS
                del request.tokens[request.computed + 1 :]
                if len(request.tokens) == request.computed:
                    request.tokens.append(step)

    def _draft(self, request: Request, step: int) -> None:
        first = request.tokens[request.computed]
        request.tokens += [(first * 5 + step + it) % VOCABULARY for it in range(1, DRAFTS)]
        self._make_room(request, len(request.tokens))

    def _verify(self, requests: list[Request]) -> None:
        parts = [(it, range(it.computed, it.computed + DRAFTS)) for it in requests]
        lens = torch.tensor([at.start for _, at in parts])
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(parts),
            input_ids=torch.tensor([request.tokens[p] for request, at in parts for p in at]),
            req_pool_indices=torch.tensor([request.row for request, _ in parts]),
            # The lengths from before the draft.
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
            seq_lens_sum=int(lens.sum()),
            out_cache_loc=torch.cat([it.slots[at.start : at.stop] for it, at in parts]),
            positions=torch.tensor([p for _, at in parts for p in at]),
            spec_info=SimpleNamespace(topk=1, draft_token_num=DRAFTS, ragged_verify_layout=None),
        )
        self._plan(batch)
        padding = DRAFTS * self._prepare(batch, self.graphs)
        # A graph's padding has one slot for each request, and needs one for each token.
        missing = DRAFTS * len(parts) + padding - len(batch.out_cache_loc)
        batch.out_cache_loc = torch.cat([batch.out_cache_loc, torch.zeros(missing).long()])
        self._run(self.backend, batch, parts, padding)
        self.checked.steps += 1


@pytest.mark.parametrize("graphs", [False, True], ids=lambda it: "graphs" if it else "eager")
@pytest.mark.parametrize(
    ("layers", "page", "window_pool"),
    [((Layer(),), 1, 0), ((Layer(window=9),), 16, 0), ((Layer(), Layer(window=20)), 16, 400)],
    ids=["page 1", "window", "two pools"],
)
def test_chains_of_drafts_are_verified(
    layers: tuple[Layer, ...], page: int, window_pool: int, graphs: bool
) -> None:
    with server(drafts=DRAFTS):
        engine = Verifier(
            layers,
            page=page,
            window_pool=window_pool,
            graphs=graphs,
            changes={"spec_algorithm": EAGLE},
        )
        engine.verify(prompts(5, 3, 10, 40), 4)
    assert engine.checked.steps == 5
    assert engine.checked.graphs == (4 if graphs else 0)
    assert engine.checked.largest_error < TOLERANCE


def test_deterministic_inference_verifies_with_the_bits_of_decode() -> None:
    """A row of a draft has the bits of the decode step that it replaces."""
    with server(deterministic=True, drafts=DRAFTS):
        engine = Verifier((Layer(),), changes={"spec_algorithm": EAGLE})
        engine.verify({"request": [*range(20)]}, 1)
        drafted = engine.checked.outputs
    with server(deterministic=True):
        first = 20
        tokens = [*range(20), (7 * 20 + 19) % VOCABULARY]
        tokens += [(tokens[-1] * 5 + it) % VOCABULARY for it in range(1, DRAFTS)]
        alone = Engine((Layer(),)).run({"request": tokens}, 0, chunk=1).outputs
    rows = [(0, "request", first + it) for it in range(DRAFTS)]
    assert all(torch.equal(drafted[row], alone[row]) for row in rows)


@pytest.mark.parametrize(
    ("changes", "topk", "reason"),
    [
        ({}, 4, "trees of drafts .speculative_eagle_topk=4; 1 gives chains"),
        ({"spec_algorithm": SpeculativeAlgorithm.from_string("NGRAM")}, 1, "decoding by NGRAM"),
    ],
    ids=["trees", "ngram"],
)
def test_what_is_not_a_chain_is_refused(changes: dict[str, Any], topk: int, reason: str) -> None:
    with (
        server(drafts=DRAFTS, topk=topk),
        pytest.raises(NotImplementedError, match=f"flashsmith: .*{reason}"),
    ):
        Engine((Layer(),), changes={"spec_algorithm": EAGLE} | changes)


def test_drafts_of_several_lengths_are_refused() -> None:
    with server(drafts=DRAFTS):
        engine = Verifier((Layer(),), changes={"spec_algorithm": EAGLE})
        batch = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY,
            spec_info=SimpleNamespace(ragged_verify_layout=object()),
            seq_lens=torch.tensor([3]),
        )
        with pytest.raises(NotImplementedError, match="drafts of several lengths"):
            engine.backend.init_forward_metadata(batch)
