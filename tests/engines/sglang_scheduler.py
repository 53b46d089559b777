"""SGLang's requests, prefill policy and batches schedule our layers, in the order of its Scheduler:
finished prefills join the running batch, prefills come first, and a full cache retracts requests.

The Scheduler itself starts a worker of the model and talks to other processes. Its decisions are
made by the classes that are used here.
"""

from __future__ import annotations

import inspect
from array import array
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache import common
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_driver import VOCABULARY, Checked, Engine


class ScheduledEngine(Engine):
    """Which requests a step has, and where their keys go, is decided by the engine."""

    # After this many steps something else takes the slots that are left, but for three.
    full_after = 0

    def serve(self, prompts: dict[str, list[int]], new_tokens: int, chunk: int = 48) -> Checked:
        """Generates after each prompt, with at most ``chunk`` tokens of prompts in a step."""
        self.chunk, self.retracted, self.chunks = chunk, 0, 0
        self.waiting = [_request(*item, new_tokens) for item in prompts.items()]
        self.chunked: Any = None
        running, last = self._batch_of([]), None
        while True:
            batch, running = self._next(running, last)
            if batch is None:
                assert not self.waiting, "the engine schedules nothing"
                return self.checked
            self._attend(batch)
            self._commit(batch)
            if self.checked.steps == self.full_after:
                self.allocator.alloc(self.allocator.available_size() - 3)
            last = batch

    def _batch_of(self, requests: list[Any], **more: Any) -> Any:
        config = SimpleNamespace(**vars(self.runner.model_config), vocab_size=VOCABULARY)
        where = self.rows, self.allocator, self.tree
        return ScheduleBatch.init_new(
            requests, *where, config, False, self.runner.spec_algorithm, **more
        )

    def _next(self, running: Any, last: Any) -> tuple[Any, Any]:
        """The step's batch, None if all requests are finished, and the batch that decodes."""
        if self.chunked is not None:
            self._keep(self.chunked, chunked=True)
        if last is not None and last.forward_mode.is_extend():
            takes = inspect.signature(last.filter_batch).parameters
            excluded = "reqs_to_exclude" if "reqs_to_exclude" in takes else "chunked_req_to_exclude"
            last.filter_batch(**{excluded: [self.chunked] if self.chunked else []})
            if not last.is_empty() and last is not running:
                if running.is_empty():
                    running = last
                else:
                    running.merge_batch(last)
        running.filter_batch()
        prefill = self._prefill(running)
        if prefill is not None:
            return prefill, running
        if running.is_empty():
            return None, running
        if not running.check_decode_mem():
            takes = inspect.signature(running.retract_decode).parameters
            retracted, *_ = running.retract_decode(*[get_context().server_args] * len(takes))
            self.retracted += len(retracted)
            self.waiting = retracted + self.waiting
        running.prepare_for_decode()
        return running, running

    def _prefill(self, running: Any) -> Any:
        if not self.waiting and self.chunked is None:
            return None
        adder = PrefillAdder(
            *(self.page, self.tree, self.allocator, running, 0.3, 10_000, self.chunk),
            max_running_requests=self.rows.size,
        )
        if self.chunked is not None:
            self.chunked.init_next_round_input()
            self.chunked = adder.add_chunked_req(self.chunked)
        free = self.rows.available_size()
        for request in self.waiting[: max(0, free)]:
            request.init_next_round_input(self.tree)
            result = adder.add_one_req(
                request, has_chunked_req=self.chunked is not None, truncation_align_size=None
            )
            if result.name != "CONTINUE":
                break
        if not adder.can_run_list:
            return None
        self.waiting = [it for it in self.waiting if it not in adder.can_run_list]
        if adder.new_chunked_req is not None:
            self.chunked = adder.new_chunked_req
        if self.chunked is not None:
            self.chunks += 1
            self.chunked.inflight_middle_chunks += 1
        batch = self._batch_of(adder.can_run_list, chunked_req=self.chunked)
        batch.prepare_for_extend()
        return batch

    def _attend(self, batch: Any) -> None:
        self.checked.steps += 1
        step = self._step_of(batch)
        counts = step.extend_seq_lens_cpu or [1] * len(batch.reqs)
        parts = []
        for request, length, count in zip(batch.reqs, step.seq_lens.tolist(), counts, strict=True):
            tokens = [*request.origin_input_ids, *request.output_ids]
            parts.append(
                (SimpleNamespace(name=request.rid, tokens=tokens), range(length - count, length))
            )
        self.backend.init_forward_metadata(step)
        for number, layer in enumerate(self.layers):
            q, k, v = (
                torch.cat([self._values(number, which, *part) for part in parts])
                for which in range(3)
            )
            output = self.backend.forward(q.flatten(1), k, v, self.modules[number], step)
            for part, rows in zip(parts, output.view(q.shape).split(counts), strict=True):
                self._check(number, *part, rows)
            assert output.shape == (len(q), layer.heads * layer.d)

    def _step_of(self, batch: Any) -> Any:
        """As ForwardBatch.init_new, which imports a server."""
        extends: dict[str, Any] = {}
        counts = [1] * len(batch.reqs)
        if batch.forward_mode != ForwardMode.DECODE:
            counts, prefixes = list(batch.extend_lens), list(batch.prefix_lens)
            self.checked.prefix_hits += sum(it > 0 for it in prefixes)
            extends = {
                "extend_num_tokens": sum(counts),
                "extend_seq_lens": torch.tensor(counts, dtype=torch.int32),
                "extend_seq_lens_cpu": counts,
                "extend_prefix_lens": torch.tensor(prefixes),
                "extend_prefix_lens_cpu": prefixes,
            }
        ends = batch.seq_lens.tolist()
        at = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
        step = ForwardBatch(
            forward_mode=batch.forward_mode,
            batch_size=len(batch.reqs),
            input_ids=torch.zeros(sum(counts), dtype=torch.int64),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=batch.out_cache_loc,
            seq_lens_sum=sum(ends),
            seq_lens_cpu=batch.seq_lens_cpu,
            positions=torch.tensor([p for one in at for p in one]),
            **extends,
        )
        self._plan(step)
        return step

    def _commit(self, batch: Any) -> None:
        """What the engine does with a step's tokens."""
        tokens = []
        for request in batch.reqs:
            known = [*request.origin_input_ids, *request.output_ids]
            tokens.append((7 * len(known) + known[-1]) % VOCABULARY)
            if request.inflight_middle_chunks > 0:
                request.inflight_middle_chunks -= 1
                continue
            request.output_ids.append(tokens[-1])
            request.update_finish_state()
            if request.finished():
                takes = inspect.signature(common.release_kv_cache).parameters
                more = {"checkpoint": True} if "checkpoint" in takes else {}
                common.release_kv_cache(request, self.tree, **more)
            elif batch.forward_mode != ForwardMode.DECODE:
                self._keep(request)
        batch.input_ids = torch.tensor(tokens)

    def _keep(self, request: Any, **how: Any) -> None:
        """Puts a request's keys so far into the radix cache."""
        if hasattr(common, "checkpoint_kv_cache"):
            common.checkpoint_kv_cache(request, self.tree)
        else:
            common.maybe_cache_unfinished_req(request, self.tree, **how)


def _request(name: str, prompt: list[int], new_tokens: int) -> Any:
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    sampling.normalize(None)
    return Req(name, "", array("q", prompt), sampling, vocab_size=VOCABULARY)
