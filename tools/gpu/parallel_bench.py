#!/usr/bin/env python3
"""Proves flashsmith.parallel on the GPUs of this machine, and times it against PyTorch's
context_parallel.

    python tools/gpu/parallel_bench.py rows.jsonl                        # two GPUs, over NCCL
    python tools/gpu/parallel_bench.py rows.jsonl --gpus 4 --seqs 32768,131072 --steps speed
    python tools/gpu/parallel_bench.py rows.jsonl --steps speed --seqs 8192,4x8192 --schedules auto

The dtype is bf16; the defaults are heads 32:8 and d 128. Steps:

- build: the kernels of the steps that follow, as many at a time as the machine has cores.
- transfers: messages of 8 MiB between all ranks through the memory that they share, each compared.
  If they share none, their keys go by the group's backend, and this step only says so.
- proof: each schedule and mask on 4096 tokens. This step gives the largest errors of o, dq, dk and
  dv against float64, relative to the errors of attention() on one GPU. It also checks that repeated
  calls give the same bits.
- bits: o and lse of allgather and ulysses with bits='canonical', bitwise equal to one GPU's.
- speed: causal batches, launched alternately by several implementations. They are attention() of
  the whole sequences on one GPU, each schedule, and PyTorch's context_parallel with flashsmith's
  kernels and with cuDNN (with grouped and with repeated heads of K and V). Each is first compared
  with float64 on one head of K of the last sequence.

Rows have the form of benchmarks/h200/parallel.jsonl.gz: what ('transfers', 'correct', 'bits',
'alone', 'call', 'peer', 'wrong', 'absent'), milliseconds as medians of rounds, and the milliseconds
of each round. They also have the microseconds for which a call keeps the host, and each GPU's clock
in MHz and power in W after the rounds. A context_parallel with an error above three times that of
attention() gets a row 'wrong' and no time. The exit status is 1 for such a row, if a message came
wrong, if our error is above 1.1 times one kernel's error, or if bits differ.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashsmith
from flashsmith import parallel
from flashsmith.benchmark.records import for_json
from flashsmith.chooser import build_for
from flashsmith.errors import FlashsmithError
from flashsmith.families import Problem
from flashsmith.parallel.group import Group
from flashsmith.parallel.rank_memory import Place, RankMemory, RowShape
from flashsmith.runtime import query_gpu
from flashsmith.verify.tolerance import why_over

# These transfers work on all machines; multicast needs rights that some machines do not grant.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
SCHEDULES = ("zigzag", "allgather", "ulysses")
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "sinks": {"causal": True, "sinks": True},
    "window": {"window": (1000, 0)},
    "packed": {"causal": True, "packed": True},
}
MOST_OVER_ONE_KERNEL = 1.1
TIMEOUT = 600.0
STEPS = ("build", "transfers", "proof", "bits", "speed")
# How many transfers are compared, how many are timed, and the bytes of a message.
TRANSFERS, TIMED, MESSAGE = 100, 100, 8 << 20
OUTPUTS = ("o", "dq", "dk", "dv")
# How many scores a float64 reference computes at once.
SCORES = 1 << 27
Row = dict[str, Any]


def drawn(seq: int, device: torch.device, options: Any, batch: int = 1) -> dict[str, Any]:
    """Random tensors with whole sequences, the same on every rank."""
    heads_q, heads_k = options.heads
    generator = torch.Generator(device).manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    heads = {"q": heads_q, "k": heads_k, "v": heads_k, "do": heads_q}
    found = {name: normal(batch, seq, h, options.d).bfloat16() for name, h in heads.items()}
    return {**found, "sinks": normal(heads_q)}


def exactly(whole: Mapping[str, Any], causal: bool, window: Any, sinks: Any) -> list[Any]:
    """o, dq, dk and dv of dense tensors in float64, computed head by head in blocks of rows."""
    q, k, v, do = (whole[name][0].double() for name in ("q", "k", "v", "do"))
    group, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
    o, dq, dk, dv = (torch.zeros_like(it) for it in (q, q, k, v))
    keys = torch.arange(len(k), device=q.device)
    for head in range(q.shape[1]):
        place = head // group
        for rows in torch.arange(len(q), device=q.device).split(max(1, SCORES // len(k))):
            some_q, some_do, its_k, its_v = q[rows, head], do[rows, head], k[:, place], v[:, place]
            behind = rows[:, None] - keys
            hidden = behind < 0 if causal or window else torch.zeros_like(behind, dtype=torch.bool)
            if window:
                hidden |= behind > window[0]
            scores = (some_q @ its_k.T * scale).masked_fill_(hidden, -torch.inf)
            if sinks is not None:
                column = sinks[head].double().expand(len(rows), 1)
                scores = torch.cat([scores, column], 1)
            weights = scores.softmax(1)[:, : len(k)]
            o[rows, head] = found = weights @ its_v
            dscores = some_do @ its_v.T - (some_do * found).sum(1, keepdim=True)
            dscores *= scale * weights
            dq[rows, head] = dscores @ its_k
            dk[:, place] += dscores.T @ some_q
            dv[:, place] += weights.T @ some_do
    return [o[None], dq[None], dk[None], dv[None]]


def with_gradients(attend: Callable[..., Any], tensors: Sequence[Any], do: Any) -> list[Any]:
    """Calls ``attend`` and returns o, dq, dk and dv."""
    leaves = [it.detach().clone().requires_grad_() for it in tensors]
    o = attend(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def offsets_of(seq: int, device: torch.device) -> torch.Tensor:
    """The offsets of three sequences: the middle one is empty, and each of the others is half of
    ``seq``."""
    lengths = [seq // 2, 0, seq - seq // 2]
    return torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)


class Bench:
    """The benchmark on one rank, which also writes rows."""

    def __init__(self, rank: int, ranks: int, path: Path, options: Any) -> None:
        self.rank, self.ranks, self._path, self.options = rank, ranks, path, options
        self.on_gpu = options.device == "cuda"
        self.device = torch.device(options.device, rank if self.on_gpu else None)
        self.mesh = dist.device_mesh.init_device_mesh(options.device, (ranks,))
        self.peers: Sequence[Any] = options.peers

    def say(self, row: Row) -> None:
        if self.rank == 0:
            line = json.dumps(for_json(row))
            with self._path.open("a") as file:
                file.write(line + "\n")
            print(line, flush=True)

    # --- transfers --------------------------------------------------------------------------------

    def transfer(self) -> None:
        """Sends messages to all other ranks, as the causal allgather sends keys."""
        group = Group(None)
        group.same(1)()  # The ranks connect
        peers = group.peers("transfers", self.device, self.ranks * MESSAGE)
        row: Row = {"what": "transfers", "shared": peers is not None, "bytes": MESSAGE}
        if peers is not None:
            drawn = [self._message(rank) for rank in range(self.ranks)]
            wrong = 0
            for turn in range(TRANSFERS):
                expected = [it + turn for it in drawn]
                wrong += not torch.equal(self._sent(peers, expected), torch.stack(expected))
            self._synchronize()
            dist.barrier()
            began = time.perf_counter()
            for _ in range(TIMED):
                self._sent(peers, drawn)
            kept = time.perf_counter() - began
            self._synchronize()
            us = [1e6 * it / TIMED for it in (time.perf_counter() - began, kept)]
            row |= {"wrong": wrong, "of": TRANSFERS, "us": us[0], "host_us": us[1], "ok": not wrong}
        self.say(row)

    def _message(self, rank: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(rank)
        return torch.randint(
            256, (MESSAGE,), generator=generator, dtype=torch.uint8, device=self.device
        )

    def _sent(self, peers: RankMemory, messages: Sequence[torch.Tensor]) -> torch.Tensor:
        """What came from all ranks, if each sends its message."""
        slot, mine = peers.begin(), messages[self.rank]
        found: torch.Tensor = peers.view(
            slot, "messages", lambda tensor: tensor(0, (self.ranks, MESSAGE), torch.uint8)
        )
        others = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        # In two rows, since so batches are sent.
        rows = RowShape(MESSAGE // 2, 2, MESSAGE // 2, MESSAGE // 2)
        place = Place(mine.data_ptr(), self.rank * MESSAGE, rows)
        waits = peers.send(slot, [[(it, [place]) for it in others]], [others])
        peers.put(slot, [place])
        for wait in waits:
            wait()
        return found

    # --- proofs -----------------------------------------------------------------------------------

    def prove(self) -> None:
        seq = self.options.proof_seq
        whole = drawn(seq, self.device, self.options)
        for case in self.options.masks:
            asked = dict(MASKS[case])
            sinks = whole["sinks"] if asked.pop("sinks", False) else None
            packed = asked.pop("packed", False)
            cu = offsets_of(seq, self.device) if packed else None
            single, right = self._references(whole, asked, sinks, cu)
            least = [float((a - b).abs().max()) for a, b in zip(single, right, strict=True)]
            for schedule in SCHEDULES:
                calls = [self._gathered(schedule, whole, asked, sinks, cu) for _ in range(2)]
                self._compared(
                    {"case": case, "schedule": schedule, "seq": seq}, calls, right, least
                )

    def _references(
        self, whole: Mapping[str, Any], asked: Mapping[str, Any], sinks: Any, cu: Any
    ) -> tuple[list[Any], list[Any]]:
        """The outputs of one kernel, and those in float64."""
        causal, window = asked.get("causal", False), asked.get("window")
        places = [slice(0, whole["q"].shape[1])]
        if cu is not None:
            ends = cu.tolist()
            places = [slice(*it) for it in pairwise(ends) if it[0] < it[1]]
        found: tuple[list[Any], list[Any]] = [], []
        for place in places:
            part = {name: it[:, place] for name, it in whole.items() if name != "sinks"}

            def attend(q: Any, k: Any, v: Any) -> Any:
                return flashsmith.attention(
                    q, k, v, sinks=sinks, deterministic=True, **self.options.kernels, **asked
                )

            found[0].append(with_gradients(attend, [part[it] for it in "qkv"], part["do"]))
            found[1].append(exactly(part, causal, window, sinks))
        single, right = ([torch.cat(it, 1) for it in zip(*each, strict=True)] for each in found)
        return single, right

    def _gathered(
        self, schedule: str, whole: Mapping[str, Any], asked: Mapping[str, Any], sinks: Any, cu: Any
    ) -> list[Any]:
        """o, dq, dk and dv, gathered from all ranks."""
        its: dict[str, Any] = {} if cu is None else {"cu_seqlens": cu}
        rows = {
            name: whole[name] if cu is None else whole[name][0] for name in ("q", "k", "v", "do")
        }
        q, k, v, do = (parallel.shard(it, **its) for it in rows.values())
        offsets = {} if cu is None else {"cu_seqlens_q": cu, "cu_seqlens_k": cu}

        def attend(*tensors: Any) -> Any:
            q, k, v = tensors
            return parallel.attention(
                q, k, v, schedule=schedule, sinks=sinks, deterministic=True,
                **offsets, **self.options.kernels, **asked,
            )  # fmt: skip

        found = [parallel.unshard(it, **its) for it in with_gradients(attend, (q, k, v), do)]
        return found if cu is None else [it[None] for it in found]

    def _compared(
        self, row: Row, calls: Sequence[Sequence[Any]], right: Sequence[Any], least: Sequence[float]
    ) -> None:
        errors = [float((a - b).abs().max()) for a, b in zip(calls[0], right, strict=True)]
        ratios = [a / b for a, b in zip(errors, least, strict=True)]
        same = all(torch.equal(a, b) for a, b in zip(*calls, strict=True))
        self.say(
            {
                "what": "correct", **row, "errors": errors, "single": list(least),
                "ratios": ratios, "worst": max(ratios), "repeatable": same,
                "ok": same and max(ratios) <= MOST_OVER_ONE_KERNEL,
            }
        )  # fmt: skip

    def compare_bits(self) -> None:
        """Whether canonical results of all ranks are bitwise those of one GPU."""
        seq = self.options.proof_seq
        whole = drawn(seq, self.device, self.options)
        qkv = [whole[name] for name in "qkv"]
        how = {"causal": True, "bits": "canonical", "return_lse": True, **self.options.kernels}
        single = flashsmith.attention(*qkv, **how)
        for schedule in ("allgather", "ulysses"):
            o, lse = parallel.attention(*map(parallel.shard, qkv), schedule=schedule, **how)
            found = parallel.unshard(o), parallel.unshard(lse, dim=2)
            equal = [torch.equal(a, b) for a, b in zip(found, single, strict=True)]
            self.say(
                {"what": "bits", "schedule": schedule, "seq": seq, "o": equal[0], "lse": equal[1],
                 "ok": all(equal)}
            )  # fmt: skip

    # --- speed ------------------------------------------------------------------------------------

    def time(self) -> None:
        for batch, seq in self.options.sizes:
            whole = drawn(seq, self.device, self.options, batch)
            right = exactly(last_group(whole), True, None, None)
            for direction in self.options.directions:
                self._time({"batch": batch, "seq": seq, "direction": direction}, whole, right)

    def _time(self, row: Row, whole: Mapping[str, Any], right: Any) -> None:
        direction = row["direction"]
        alone = Alone().prepared(self, whole, direction)
        single = self._errors(alone, right)
        proven: list[Any] = [alone]
        beside = self.options.beside
        for module in ("", beside) if beside else ("",):
            for made in (Sharded(it, module) for it in self.options.schedules):
                one = made.prepared(self, whole, direction)
                errors = self._errors(one, right)
                worst = max(errors[name] / single[name] for name in single)
                if worst <= MOST_OVER_ONE_KERNEL:
                    proven.append(one)
                else:
                    self.say({"what": "wrong", "name": made.name, **row, "errors": errors,
                              "single": single, "worst": worst, "ok": False})  # fmt: skip
        proven += [
            one for peer in self.peers if (one := self._proven(peer, whole, row, right, single))
        ]
        self._say_times(row, self._in_turns(proven), self._kept(proven))

    def _proven(
        self, peer: Any, whole: Mapping[str, Any], row: Row, right: Any, single: Mapping[str, float]
    ) -> Any:
        """The call of a peer.

        If the peer is wrong or fails, writes a row 'wrong' or 'absent', and returns None.
        """
        try:
            one = peer.prepared(self, whole, row["direction"])
            errors = self._errors(one, right)
        except RuntimeError as error:  # NotImplementedError is a RuntimeError too
            why = (str(error).splitlines() or [type(error).__name__])[0][:200]
            self.say({"what": "absent", "name": peer.name, **row, "why": why})
            return None
        if why := "; ".join(why_over(errors, single)):
            self.say({"what": "wrong", "name": peer.name, **row, "errors": errors,
                      "single": single, "why": why, "ok": False})  # fmt: skip
            return None
        return one

    def _errors(self, one: Any, right: Sequence[Any]) -> dict[str, float]:
        """The largest errors of an implementation's outputs on any rank; infinite if there is a
        NaN.

        All ranks get the same result, so that they time the same calls.
        """
        found = one.output()
        names = OUTPUTS[: len(found)]
        errors = torch.stack(
            [(a.double() - b).abs().max() for a, b in zip(found, right, strict=False)]
        ).nan_to_num(nan=torch.inf)
        dist.all_reduce(errors, dist.ReduceOp.MAX)
        return dict(zip(names, errors.tolist(), strict=True))

    def _in_turns(self, implementations: Sequence[Any]) -> dict[str, list[float]]:
        """For each implementation, its milliseconds in each round; in a round, implementations
        alternate."""
        counts = {}
        for one in implementations:
            with one.entered() as call:
                call()
                self._once(call, 1)
                counts[one.name] = max(1, int(self.options.measure_ms / self._once(call, 1)))
        times: dict[str, list[float]] = {one.name: [] for one in implementations}
        for _ in range(self.options.rounds):
            for one in implementations:
                with one.entered() as call:
                    call()
                    times[one.name].append(self._once(call, counts[one.name]))
        return times

    def _kept(self, implementations: Sequence[Any]) -> dict[str, float]:
        """For each implementation, the microseconds for which a call keeps the host of the slowest
        rank, as the median of calls that begin when the GPUs are idle."""
        found = {}
        for one in implementations:
            with one.entered() as call:
                found[one.name] = statistics.median(self._host_us(call) for _ in range(9))
        return found

    def _host_us(self, call: Callable[[], Any]) -> float:
        self._synchronize()
        dist.barrier()
        self._synchronize()
        began = time.perf_counter()
        call()
        us = torch.tensor([1e6 * (time.perf_counter() - began)], device=self.device)
        dist.all_reduce(us, dist.ReduceOp.MAX)
        return float(us)

    def _say_times(
        self, row: Row, times: Mapping[str, list[float]], kept: Mapping[str, float]
    ) -> None:
        ms = {name: statistics.median(found) for name, found in times.items()}
        state = gpu_state() if self.on_gpu and self.rank == 0 else []
        for name, found in times.items():
            timed: Row = {
                **row, "ms": ms[name], "rounds": found, "host_us": kept[name], "gpus": state,
            }  # fmt: skip
            if name == Alone.name:
                self.say({"what": "alone", **timed})
            elif name.rpartition(" ")[2] in self.options.schedules:
                # Efficiencies are ratios of times in the same round, in which implementations
                # alternate.
                by_round = [
                    one / (self.ranks * it)
                    for one, it in zip(times[Alone.name], found, strict=True)
                ]
                self.say(
                    {"what": "call", "schedule": name, "ranks": self.ranks,
                     "efficiency": statistics.median(by_round),
                     "efficiencies": [min(by_round), max(by_round)], **timed}
                )  # fmt: skip
            else:
                over = {
                    f"times_{it}": ms[name] / ms[it] for it in self.options.schedules if it in ms
                }
                self.say({"what": "peer", "name": name, **timed, **over})

    def _once(self, call: Callable[[], Any], count: int) -> float:
        """The milliseconds of a call on the slowest rank."""
        self._synchronize()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(count):
            call()
        self._synchronize()
        ms = torch.tensor([1e3 * (time.perf_counter() - began) / count], device=self.device)
        dist.all_reduce(ms, dist.ReduceOp.MAX)
        return float(ms)

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def gpu_state() -> list[list[float]]:
    """The SM clock in MHz and the power in W of each GPU, as nvidia-smi gives them."""
    asked = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout
        return [[float(it) for it in line.split(",")] for line in said.splitlines()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


# --- implementations ------------------------------------------------------------------------------


def last_group(whole: Mapping[str, Any]) -> dict[str, Any]:
    """The last sequence's last head of K and V, and the query heads that share it."""
    group = whole["q"].shape[2] // whole["k"].shape[2]
    heads = {"q": group, "do": group, "k": 1, "v": 1}
    return {name: whole[name][-1:, :, -count:] for name, count in heads.items()}


def of_last_group(found: Sequence[Any], heads_k: int) -> list[Any]:
    """The last sequence's last group of o, dq, dk and dv with all heads.

    If K and V were repeated, dk and dv are summed over the group.
    """
    found = [it[-1:] for it in found]
    group = found[0].shape[2] // heads_k
    dkv = [it.unflatten(2, (heads_k, -1))[:, :, -1:].double().sum(3) for it in found[2:]]
    return [*(it[:, :, -group:] for it in found[:2]), *dkv]


def called(
    attend: Callable[..., Any], tensors: Sequence[Any], do: Any, direction: str
) -> Callable[[], list[Any]]:
    """A function that returns o and, with the backward pass, also dq, dk and dv."""
    leaves = [it.detach().requires_grad_(direction == "both") for it in tensors]

    def call() -> list[Any]:
        o = attend(*leaves)
        if direction == "forward":
            return [o]
        return [o.detach(), *torch.autograd.grad(o, leaves, do)]

    return call


class Alone:
    """attention() of whole sequences on one GPU."""

    name = "alone"

    def prepared(self, bench: Bench, whole: Mapping[str, Any], direction: str) -> Alone:
        def attend(q: Any, k: Any, v: Any) -> Any:
            return flashsmith.attention(q, k, v, causal=True, **bench.options.kernels)

        self._heads_k = bench.options.heads[1]
        self._call = called(attend, [whole[name] for name in "qkv"], whole["do"], direction)
        return self

    @contextlib.contextmanager
    def entered(self) -> Iterator[Callable[[], list[Any]]]:
        yield self._call

    def output(self) -> list[Any]:
        return of_last_group(self._call(), self._heads_k)


class Sharded:
    """parallel.attention() with one schedule, of flashsmith.parallel or another module."""

    def __init__(self, schedule: str, module: str = "") -> None:
        self.name, self._schedule = f"{module} {schedule}".strip(), schedule
        self._module: Any = importlib.import_module(module) if module else parallel

    def prepared(self, bench: Bench, whole: Mapping[str, Any], direction: str) -> Sharded:
        def attend(q: Any, k: Any, v: Any) -> Any:
            return self._module.attention(
                q, k, v, schedule=self._schedule, causal=True, **bench.options.kernels
            )

        self._heads_k = bench.options.heads[1]
        q, k, v, do = (parallel.shard(whole[name]) for name in ("q", "k", "v", "do"))
        self._call = called(attend, (q, k, v), do, direction)
        return self

    @contextlib.contextmanager
    def entered(self) -> Iterator[Callable[[], list[Any]]]:
        yield self._call

    def output(self) -> list[Any]:
        return of_last_group([parallel.unshard(it) for it in self._call()], self._heads_k)


class ContextParallel:
    """PyTorch's context_parallel with the kernels of a backend; it rotates K and V by all-gather or
    all-to-all."""

    def __init__(self, backend: str, rotate: str, *, gqa: bool) -> None:
        self.name = f"context_parallel {backend} {rotate} {'gqa' if gqa else 'repeated'}"
        self._backend, self._rotate, self._gqa = backend, rotate, gqa

    def prepared(self, bench: Bench, whole: Mapping[str, Any], direction: str) -> ContextParallel:
        self._mesh, self._heads_k, self._direction = bench.mesh, bench.options.heads[1], direction
        repeats = 1 if self._gqa else bench.options.heads[0] // self._heads_k
        self._whole = [
            it.repeat_interleave(repeats if name in "kv" else 1, 2).transpose(1, 2)
            for name, it in ((name, whole[name]) for name in ("q", "k", "v", "do"))
        ]
        return self

    @contextlib.contextmanager
    def entered(self) -> Iterator[Callable[[], list[Any]]]:
        """Enters context_parallel, which replaces scaled_dot_product_attention.

        So this function must be looked up in each call.
        """
        from torch.distributed.tensor import experimental
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        set_rotate_method(self._rotate)
        buffers = [it.contiguous() for it in self._whole]
        ours = self._backend == "flashsmith"
        kind = SDPBackend.FLASH_ATTENTION if ours else SDPBackend.CUDNN_ATTENTION

        def attend(q: Any, k: Any, v: Any) -> Any:
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=self._gqa
            )

        with (
            flashsmith_in_pytorch() if ours else contextlib.nullcontext(),
            sdpa_kernel(kind),
            experimental.context_parallel(
                self._mesh,
                buffers=buffers,
                buffer_seq_dims=[2] * 4,
                no_restore_buffers=set(buffers),
            ),
        ):
            yield called(attend, buffers[:3], buffers[3], self._direction)

    def output(self) -> list[Any]:
        from torch.distributed.tensor.experimental import _attention

        with self.entered() as call:
            found = [it.detach() for it in call()]
        found = _attention.context_parallel_unshard(self._mesh, found, [2] * len(found))
        return of_last_group([it.transpose(1, 2) for it in found], self._heads_k)


@contextlib.contextmanager
def flashsmith_in_pytorch() -> Iterator[None]:
    """Makes PyTorch use flashsmith as its implementation of flash attention."""
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    from flashsmith.integrations import flash_registry

    flash_registry.register()
    activate_flash_attention_impl("flashsmith")
    try:
        yield
    finally:
        restore_flash_attention_impl()


PEERS = (
    ContextParallel("cudnn", "allgather", gqa=True),
    ContextParallel("cudnn", "allgather", gqa=False),
    ContextParallel("cudnn", "alltoall", gqa=False),
    ContextParallel("flashsmith", "allgather", gqa=False),
)


# --- kernels --------------------------------------------------------------------------------------


def planned(options: Any) -> list[tuple[Problem, bool]]:
    """The problems of the steps on one GPU and on each rank; whether they are deterministic."""
    heads_q, heads_k = options.heads
    shape, seq = f"h{heads_q}:{heads_k} d{options.d} bf16", options.proof_seq
    found: dict[tuple[Problem, bool], None] = {}

    def plan(text: str, schedules: Sequence[str], deterministic: bool, **asked: Any) -> None:
        for ranks, schedule in ((1, "auto"), *((options.gpus, it) for it in schedules)):
            for one in parallel.problems(text, ranks=ranks, schedule=schedule, **asked):
                found[one, deterministic] = None

    if "speed" in options.steps:
        both = "both" in options.directions
        for batch, length in options.sizes:
            text = f"b{batch} s{length} {shape} causal"
            plan(text, options.schedules, False, gradients=both)
    for case in options.masks if "proof" in options.steps else ():
        mask = MASKS[case]
        asked = {"sinks": mask.get("sinks", False), "gradients": True}
        if "window" in mask:
            asked["window"] = mask["window"]
        words = [shape, *(it for it in ("causal", "window", "packed") if it in mask)]
        size = f"b2 s{seq // 2}" if "packed" in mask else f"b1 s{seq}"
        plan(" ".join([size, *words]), SCHEDULES, True, **asked)
    if "bits" in options.steps:
        plan(f"b1 s{seq} {shape} causal canonical", ("allgather", "ulysses"), False)
    return list(found)


def built(one: tuple[Problem, bool]) -> str:
    """Builds the kernels of a problem. Returns why it does not build, or ''."""
    try:
        build_for(one[0], device=query_gpu(0), deterministic=one[1])
    except FlashsmithError as error:
        return f"{one[0]}: {error}"
    return ""


def build(options: Any) -> None:
    began, wanted = time.monotonic(), planned(options)
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        failed = [why for why in pool.map(built, wanted) if why]
    # What does not build fails again in the step that needs it.
    print(f"built {len(wanted)} problems in {time.monotonic() - began:.0f} s", *failed, sep="\n")


# --- processes ------------------------------------------------------------------------------------


def joined(rank: int, ranks: int, folder: str, options: Any, timeout: float) -> None:
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if options.device == "cuda" else "gloo",
        store=dist.FileStore(os.path.join(folder, "store"), ranks),
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=timeout),
    )


def measuring(rank: int, ranks: int, folder: str, path: Path, options: Any) -> None:
    joined(rank, ranks, folder, options, TIMEOUT)
    bench = Bench(rank, ranks, path, options)
    if "transfers" in options.steps:
        bench.transfer()
    if "proof" in options.steps:
        bench.prove()
    if "bits" in options.steps:
        bench.compare_bits()
    if "speed" in options.steps:
        bench.time()
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", type=Path, help="JSON Lines file to append to")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--heads", default="32:8")
    parser.add_argument("--d", type=int, default=128)
    parser.add_argument("--seqs", default="8192,32768,131072",
                        help="rows of a sequence, or sequences x rows, such as 4x8192")  # fmt: skip
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="to time; also 'auto'")
    parser.add_argument("--directions", default="forward,both")
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--beside", default="",
                        help="another module, such as a copy of an older flashsmith.parallel in "
                        "this package, to time alternately")  # fmt: skip
    parser.add_argument("--proof-seq", type=int, default=4096)
    parser.add_argument("--masks", default=",".join(MASKS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--measure-ms", type=float, default=100.0)
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="cpu: gloo processes in the emulator")  # fmt: skip
    options = parser.parse_args(arguments)
    options.heads = tuple(int(it) for it in options.heads.split(":"))
    options.sizes = [
        tuple(int(part) for part in ("1x" * ("x" not in it) + it).split("x"))
        for it in options.seqs.split(",")
    ]
    options.schedules = options.schedules.split(",")
    options.directions = options.directions.split(",")
    options.masks, options.steps = options.masks.split(","), options.steps.split(",")
    options.kernels = {"emulate": True} if options.device == "cpu" else {}
    # PyTorch's context_parallel does not run on the host.
    options.peers = PEERS if options.device == "cuda" and not options.without_peers else ()
    if options.device == "cuda" and torch.cuda.device_count() < options.gpus:
        parser.error(f"--gpus {options.gpus}: there are {torch.cuda.device_count()} here")
    os.environ.update(NO_MULTICAST)
    if "build" in options.steps and options.device == "cuda":
        build(options)
    before = options.rows.read_text().count("\n") if options.rows.exists() else 0
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            measuring, (options.gpus, folder, options.rows, options), nprocs=options.gpus,
            start_method="spawn",
        )  # fmt: skip
    return status_of(options.rows, before)


def status_of(path: Path, before: int) -> int:
    """The exit status for all rows except the first ``before``."""
    new = [json.loads(line) for line in path.read_text().splitlines()[before:]]
    return 0 if all(row.get("ok", True) for row in new) else 1


if __name__ == "__main__":
    sys.exit(main())
