#!/usr/bin/env python3
"""flashsmith.parallel on the GPUs of this machine: proofs, speed, PyTorch's context_parallel, and
ranks that get lost.

    python tools/gpu/parallel_bench.py rows.jsonl                        # two GPUs, over NCCL
    python tools/gpu/parallel_bench.py rows.jsonl --gpus 4 --seqs 32768,131072 --steps speed

bf16, and unless it is said heads 32:8 and d 128. Steps:

    proof  each schedule and mask on 4096 tokens: the largest errors of o, dq, dk and dv beside
           float64 over those of attention() on one GPU, and whether a call repeats its bits; the
           errors of context_parallel with flashsmith's kernels
    speed  a causal batch of 1 in turns: attention() of the whole sequence on one GPU, each
           schedule, and context_parallel with cuDNN, K and V as grouped heads and repeated
    lost   the seconds until the others are over or have a GroupError, after a rank has ended
           between calls, and after one was killed at work

Rows are those of benchmarks/h200/parallel.jsonl.gz: what ('correct', 'alone', 'call', 'peer',
'lost'), milliseconds as medians of rounds. The exit status is 1 where an error is above 1.1 times
one kernel's, bits differ, or a process outlives the group's timeout by more than ten seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashsmith
from flashsmith import parallel
from flashsmith.errors import FlashsmithError

# Transfers by what all machines have: multicast needs rights that not all grant.
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
TIMEOUT, LOST_TIMEOUT, PATIENCE = 600.0, 20.0, 10.0
STEPS = ("proof", "speed", "lost")
Row = dict[str, Any]


def drawn(seq: int, device: torch.device, options: Any) -> dict[str, Any]:
    """The whole tensors, the same on every rank."""
    heads_q, heads_k = options.heads
    generator = torch.Generator(device).manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    heads = {"q": heads_q, "k": heads_k, "v": heads_k, "do": heads_q}
    found = {name: normal(1, seq, h, options.d).bfloat16() for name, h in heads.items()}
    return {**found, "sinks": normal(heads_q)}


def exactly(whole: Mapping[str, Any], causal: bool, window: Any, sinks: Any) -> list[Any]:
    """o, dq, dk and dv of dense tensors in float64, a head at a time."""
    q, k, v, do = (whole[name][0].double() for name in ("q", "k", "v", "do"))
    group = q.shape[1] // k.shape[1]
    o, dq, dk, dv = (torch.zeros_like(it) for it in (q, q, k, v))
    behind = torch.arange(len(q), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
    hidden = behind < 0 if causal or window else torch.zeros_like(behind, dtype=torch.bool)
    if window:
        hidden = hidden | (behind > window[0])
    for head in range(q.shape[1]):
        leaves = [it[:, n].clone().requires_grad_() for it, n in
                  ((q, head), (k, head // group), (v, head // group))]  # fmt: skip
        scores = (leaves[0] @ leaves[1].T * q.shape[2] ** -0.5).masked_fill(hidden, -torch.inf)
        if sinks is not None:
            column = sinks[head].double().expand(len(q), 1)
            scores = torch.cat([scores, column], 1)
        weights = scores.softmax(1)[:, : len(k)]
        found = weights @ leaves[2]
        grads = torch.autograd.grad(found, leaves, do[:, head])
        o[:, head], dq[:, head] = found.detach(), grads[0]
        dk[:, head // group] += grads[1]
        dv[:, head // group] += grads[2]
    return [o[None], dq[None], dk[None], dv[None]]


def with_gradients(attend: Callable[..., Any], tensors: Sequence[Any], do: Any) -> list[Any]:
    """o, dq, dk and dv."""
    leaves = [it.detach().clone().requires_grad_() for it in tensors]
    o = attend(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def offsets_of(seq: int, device: torch.device) -> torch.Tensor:
    """Three sequences, whose lengths eight ranks divide twice over where they divide seq."""
    lengths = [seq // 2, 0, seq - seq // 2]
    return torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)


class Bench:
    """A rank, and where its rows go."""

    def __init__(self, rank: int, ranks: int, path: Path, options: Any) -> None:
        self.rank, self.ranks, self._path, self.options = rank, ranks, path, options
        self.on_gpu = options.device == "cuda"
        self.device = torch.device(options.device, rank if self.on_gpu else None)
        self.mesh = dist.device_mesh.init_device_mesh(options.device, (ranks,))

    def say(self, row: Row) -> None:
        if self.rank == 0:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)

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
        if self.on_gpu:
            self._prove_context_parallel(whole)

    def _references(
        self, whole: Mapping[str, Any], asked: Mapping[str, Any], sinks: Any, cu: Any
    ) -> tuple[list[Any], list[Any]]:
        """Of one kernel, and in float64."""
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
        """o, dq, dk and dv of all ranks."""
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

    def _prove_context_parallel(self, whole: Mapping[str, Any]) -> None:
        """A causal call of PyTorch's, with our kernels: its parts are of 16 bits, so that its
        errors are only shown."""
        from torch.distributed.tensor.experimental._attention import context_parallel_unshard

        right = exactly(whole, True, None, None)
        with self._ring("flashsmith", "allgather", whole, gqa=False) as (leaves, do):
            q, k, v = leaves
            o = scaled_dot_product_attention(q, k, v, is_causal=True)
            found = [o.detach(), *torch.autograd.grad(o, leaves, do)]
        whole_rows = context_parallel_unshard(self.mesh, found, [2] * 4)
        o, dq, dk, dv = (it.transpose(1, 2).double() for it in whole_rows)
        dk, dv = (it.unflatten(2, (self.options.heads[1], -1)).sum(3) for it in (dk, dv))
        errors = [float((a - b).abs().max()) for a, b in zip((o, dq, dk, dv), right, strict=True)]
        self.say({"what": "peer correct", "name": "context_parallel flashsmith", "errors": errors})

    # --- speed ------------------------------------------------------------------------------------

    def time(self) -> None:
        for seq in self.options.seqs:
            whole = drawn(seq, self.device, self.options)
            shards = [parallel.shard(whole[name]) for name in ("q", "k", "v", "do")]
            for direction in ("forward", "both"):
                with contextlib.ExitStack() as stack:
                    self._time(seq, direction, self._calls(whole, shards, direction, stack))

    def _calls(
        self, whole: Mapping[str, Any], shards: Sequence[Any], direction: str, stack: Any
    ) -> dict[str, Callable[[], Any]]:
        kernels = self.options.kernels

        def of(attend: Callable[..., Any], tensors: Sequence[Any], do: Any) -> Callable[[], Any]:
            leaves = [it.detach().requires_grad_(direction == "both") for it in tensors]

            def call() -> None:
                o = attend(*leaves)
                if direction == "both":
                    torch.autograd.grad(o, leaves, do)

            return call

        calls = {
            "alone": of(
                lambda *it: flashsmith.attention(*it, causal=True, **kernels),
                [whole[name] for name in "qkv"], whole["do"],
            )
        }  # fmt: skip
        for schedule in SCHEDULES:
            calls[schedule] = of(
                lambda *it, schedule=schedule: parallel.attention(
                    *it, schedule=schedule, causal=True, **kernels
                ),
                shards[:3], shards[3],
            )  # fmt: skip
        return calls

    def _time(self, seq: int, direction: str, calls: Mapping[str, Callable[[], Any]]) -> None:
        times: dict[str, list[float]] = {name: [] for name in calls}
        whole = drawn(seq, self.device, self.options) if self.on_gpu else {}
        rings = [("cudnn", "allgather", True), ("cudnn", "allgather", False),
                 ("cudnn", "alltoall", False), ("flashsmith", "allgather", False)]  # fmt: skip
        for name, call in calls.items():
            call()
            self._once(call, 1)
            count = max(1, int(self.options.measure_ms / self._once(call, 1)))
            times[name].append(count)
        counts = {name: int(found.pop()) for name, found in times.items()}
        for _ in range(self.options.rounds):
            for name, call in calls.items():
                times[name].append(self._once(call, counts[name]))
            for backend, rotate, gqa in rings if self.on_gpu else ():
                name = f"context_parallel {backend} {rotate} {'gqa' if gqa else 'repeated'}"
                ring_ms = 0.0
                try:
                    ring_ms = self._ring_time(backend, rotate, gqa, whole, direction, counts)
                except (RuntimeError, NotImplementedError) as error:
                    print(f"{name}: {error}"[:200], flush=True)
                if ring_ms:
                    times.setdefault(name, []).append(ring_ms)
        ms = {name: statistics.median(found) for name, found in times.items()}
        for name, found in times.items():
            row: Row = {"seq": seq, "direction": direction, "ms": ms[name], "rounds": found}
            if name == "alone":
                self.say({"what": "alone", **row})
            elif name in SCHEDULES:
                efficiency = ms["alone"] / (self.ranks * ms[name])
                self.say(
                    {"what": "call", "schedule": name, "ranks": self.ranks,
                     "efficiency": efficiency, **row}
                )  # fmt: skip
            else:
                over = {f"times_{it}": ms[name] / ms[it] for it in ("zigzag", "allgather")}
                self.say({"what": "peer", "name": name, **row, **over})

    def _once(self, call: Callable[[], Any], count: int) -> float:
        """Milliseconds of a call, those of the slowest rank."""
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

    @contextlib.contextmanager
    def _ring(
        self, backend: str, rotate: str, whole: Mapping[str, Any], *, gqa: bool
    ) -> Iterator[tuple[list[Any], Any]]:
        """Inside of PyTorch's context_parallel: leaves of q, k and v, and do, of this rank."""
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method
        from torch.nn.attention import (
            activate_flash_attention_impl,
            restore_flash_attention_impl,
        )

        from flashsmith.integrations import flash_registry

        set_rotate_method(rotate)
        heads_q, heads_k = self.options.heads
        repeats = 1 if gqa else heads_q // heads_k
        buffers = [
            whole[name].repeat_interleave(1 if name in ("q", "do") else repeats, 2)
            .transpose(1, 2).contiguous()
            for name in ("q", "k", "v", "do")
        ]  # fmt: skip
        kind = SDPBackend.CUDNN_ATTENTION if backend == "cudnn" else SDPBackend.FLASH_ATTENTION
        if backend == "flashsmith":
            flash_registry.register()
            activate_flash_attention_impl("flashsmith")
        try:
            with sdpa_kernel(kind), context_parallel(
                self.mesh, buffers=buffers, buffer_seq_dims=[2] * 4,
                no_restore_buffers=set(buffers),
            ):  # fmt: skip
                yield [it.requires_grad_() for it in buffers[:3]], buffers[3]
        finally:
            if backend == "flashsmith":
                restore_flash_attention_impl()

    def _ring_time(
        self, backend: str, rotate: str, gqa: bool, whole: Mapping[str, Any], direction: str,
        counts: Mapping[str, int],
    ) -> float:  # fmt: skip
        with self._ring(backend, rotate, whole, gqa=gqa) as (leaves, do):
            q, k, v = leaves

            def call() -> None:
                with torch.set_grad_enabled(direction == "both"):
                    o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
                if direction == "both":
                    torch.autograd.grad(o, leaves, do)

            call()
            return self._once(call, counts["zigzag"])


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
    if "proof" in options.steps:
        bench.prove()
    if "speed" in options.steps:
        bench.time()
    dist.barrier()
    dist.destroy_process_group()


def losing(rank: int, ranks: int, folder: str, options: Any, at_work: bool) -> None:
    """The last rank ends after some calls, or is at work until it is killed; the others call on."""
    joined(rank, ranks, folder, options, LOST_TIMEOUT)
    device = torch.device(options.device, rank if options.device == "cuda" else None)
    whole = drawn(options.lost_seq, device, options)
    shards = [parallel.shard(whole[name]) for name in "qkv"]
    said = "no error"
    for number in range(1 << 30):
        try:
            parallel.attention(*shards, causal=True, **options.kernels)
            if device.type == "cuda":
                torch.cuda.synchronize()
        except FlashsmithError as error:
            said = f"{type(error).__name__}: {error}"
            break
        if number == 2:
            Path(folder, f"works-{rank}").touch()
        if number == 4 and rank == ranks - 1 and not at_work:
            break
    if rank < ranks - 1:
        Path(folder, f"said-{rank}").write_text(said)
    os._exit(0)


def measure_lost(ranks: int, path: Path, options: Any) -> None:
    for at_work in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            running = mp.start_processes(
                losing, (ranks, folder, options, at_work), nprocs=ranks, join=False,
                start_method="spawn",
            )  # fmt: skip
            *others, last = running.processes
            while at_work and last.is_alive() and not Path(folder, f"works-{ranks - 1}").exists():
                time.sleep(0.01)
            if at_work:
                last.kill()
            last.join(TIMEOUT)
            began = time.monotonic()
            for process in others:
                process.join(max(0.0, began + LOST_TIMEOUT + PATIENCE - time.monotonic()))
            seconds = time.monotonic() - began
            said = Path(folder, "said-0")
            row = {
                "what": "lost", "of": "killed at work" if at_work else "ended between calls",
                "seconds": seconds, "timeout": LOST_TIMEOUT,
                "said": said.read_text() if said.exists() else "",
                "ok": not any(process.is_alive() for process in others),
            }  # fmt: skip
            for process in running.processes:
                process.kill()
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", type=Path, help="JSON lines; new ones go to its end")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--heads", default="32:8")
    parser.add_argument("--d", type=int, default=128)
    parser.add_argument("--seqs", default="8192,32768,131072")
    parser.add_argument("--proof-seq", type=int, default=4096)
    parser.add_argument("--lost-seq", type=int, default=8192)
    parser.add_argument("--masks", default=",".join(MASKS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--measure-ms", type=float, default=100.0)
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="cpu: processes of gloo, in the emulator")  # fmt: skip
    options = parser.parse_args(arguments)
    options.heads = tuple(int(it) for it in options.heads.split(":"))
    options.seqs = [int(it) for it in options.seqs.split(",")]
    options.masks, options.steps = options.masks.split(","), options.steps.split(",")
    options.kernels = {"emulate": True} if options.device == "cpu" else {}
    if options.device == "cuda" and torch.cuda.device_count() < options.gpus:
        parser.error(f"--gpus {options.gpus}: there are {torch.cuda.device_count()} here")
    os.environ.update(NO_MULTICAST)
    before = options.rows.read_text().count("\n") if options.rows.exists() else 0
    if {"proof", "speed"} & set(options.steps):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(
                measuring, (options.gpus, folder, options.rows, options), nprocs=options.gpus,
                start_method="spawn",
            )  # fmt: skip
    if "lost" in options.steps:
        measure_lost(options.gpus, options.rows, options)
    new = [json.loads(line) for line in options.rows.read_text().splitlines()[before:]]
    return 0 if all(row.get("ok", True) for row in new) else 1


if __name__ == "__main__":
    sys.exit(main())
