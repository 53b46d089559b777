"""What the processes of these tests run: calls of flashsmith.parallel, and calls that must fail.

Each rank runs all scripts in order and writes what they return, or their errors, into a file.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import mmap
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flashsmith import parallel
from flashsmith.errors import FlashsmithError
from flashsmith.families import DType, FlashForwardKernelConfig, Problem
from flashsmith.families import parse_kernel_name_into_config as parse
from flashsmith.families.canonical import CHUNK
from flashsmith.parallel import allgather, causal_allgather, rank_memory
from flashsmith.parallel import group as group_module
from flashsmith.parallel.group import Group, Message
from flashsmith.parallel.rank_memory import HERE, Word
from flashsmith.runtime import backward_pass, forward_pass

# What other tests have, too.
CFG = FlashForwardKernelConfig(
    DType.FP16, 64, 64, 32, 4, True, True, True, 2, 2, 2, optimized_softmax=True
)
REPEATABLE = parse("(FP16, 64, 64, 64, 4): backward")
KERNELS = {"config": CFG, "backward_config": REPEATABLE, "deterministic": True}
# For v with another d than q and k.
CFG_OF_PAIR = parse(
    "(FP16, 64:128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax"
)
REPEATABLE_OF_PAIR = parse("(FP16, 64:128, 64, 64, 4): backward+columns_2")
KERNELS_OF_PAIR = {
    "config": CFG_OF_PAIR,
    "backward_config": REPEATABLE_OF_PAIR,
    "deterministic": True,
}
TIMEOUT = 300.0


@dataclass(frozen=True)
class Case:
    """A problem of attention over a group. Lengths are of packed sequences, or, where ``batch``
    is not 0, of the one that each of a dense batch has."""

    schedule: str
    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...] = ()
    batch: int = 0
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    sinks: bool = False
    dlse: bool = False
    heads_q: int = 4
    heads_k: int = 2
    d: int = 64
    d_v: int = 64

    @property
    def keys(self) -> tuple[int, ...]:
        return self.lens_k or self.lens_q

    @property
    def kernels(self) -> dict[str, Any]:
        return KERNELS if self.d == self.d_v else KERNELS_OF_PAIR

    @property
    def semantics(self) -> dict[str, Any]:
        return {"causal": self.causal, "window": self.window, "softcap": self.softcap}

    def offsets(self) -> tuple[Any, Any]:
        return tuple(
            None
            if self.batch
            else torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            for lens in (self.lens_q, self.keys)
        )

    def draw(self) -> dict[str, Any]:
        """The whole tensors, the same on every rank."""
        generator = torch.Generator().manual_seed(7)

        def normal(rows: int, heads: int, d: int) -> Any:
            shape = (*([self.batch] if self.batch else []), rows, heads, d)
            return torch.randn(shape, generator=generator).half()

        queries, keys = sum(self.lens_q), sum(self.keys)
        found = {
            "q": normal(queries, self.heads_q, self.d),
            "k": normal(keys, self.heads_k, self.d),
            "v": normal(keys, self.heads_k, self.d_v),
            "do": normal(queries, self.heads_q, self.d_v),
        }
        if self.sinks:
            found["sinks"] = torch.randn(self.heads_q, generator=generator)
        if self.dlse:
            shape = (*([self.batch] if self.batch else []), self.heads_q, queries)
            found["dlse"] = torch.randn(shape, generator=generator)
        return found


def run_case(case: Case, group: Any = None, **keywords: Any) -> dict[str, Any]:
    """The whole results and gradients, from every rank's shards."""
    whole, (cu_q, cu_k) = case.draw(), case.offsets()
    of_q, of_k = ({"cu_seqlens": cu, "group": group} for cu in (cu_q, cu_k))
    q, k, v = (
        parallel.shard(whole[name], **its).requires_grad_()
        for name, its in (("q", of_q), ("k", of_k), ("v", of_k))
    )
    sinks = whole["sinks"].clone().requires_grad_() if case.sinks else None
    has_row_max = case.schedule in ("allgather", "ulysses")
    o, lse, *row_max = parallel.attention(
        *(q, k, v),
        schedule=case.schedule,
        group=group,
        sinks=sinks,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        return_lse=True,
        return_row_max=has_row_max,
        **{**case.kernels, **case.semantics, **keywords},
    )
    rows = {**of_q, "dim": -1}
    loss = (o * parallel.shard(whole["do"], **of_q)).float().sum()
    if case.dlse:
        loss = loss + (lse * parallel.shard(whole["dlse"], **rows)).sum()
    loss.backward()
    found = {
        "o": parallel.unshard(o, **of_q),
        "dq": parallel.unshard(q.grad, **of_q),
        "dk": parallel.unshard(k.grad, **of_k),
        "dv": parallel.unshard(v.grad, **of_k),
        "lse": parallel.unshard(lse, **rows),
    }
    if has_row_max:
        found["row_max"] = parallel.unshard(row_max[0], **rows)
    if sinks is not None:
        dist.all_reduce(sinks.grad, group=group)
        found["dsinks"] = sinks.grad
    return found


class HostMemory:
    """In the place of a GPU's, for ranks on one host: files in memory, in which they also tell each
    other what has come. What a GPU would wait for, the host waits for."""

    waits, main = True, None

    def __init__(self, device: Any, rank: int, size: int, nbytes: int) -> None:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.truncate(nbytes + 16 * size)
        self.name, self._rank, self._nbytes = file.name.encode(), rank, nbytes
        self._of_ranks: list[Any] = []
        self._own = self._open(self.name)
        self.memory = self._own[:nbytes]
        self.copies = 0

    def _open(self, name: bytes) -> Any:
        with open(name.rstrip(b"\0"), "r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)

    def open(self, names: Any) -> None:
        self._of_ranks = [self._open(name) for name in names]

    def greet(self) -> None:
        for rank in range(len(self._of_ranks)):
            self.tell([Word(rank, HERE, 1)])

    def check_greetings(self) -> bool:
        return all(self._word(self._own, rank, HERE) == 1 for rank in range(len(self._of_ranks)))

    def leave(self) -> None:
        self._of_ranks.clear()

    def free(self) -> None:
        os.unlink(self.name)

    def begin(self) -> None: ...

    begin_sending = begin

    def keep(self, tensors: Any) -> None: ...

    def end_sending(self) -> Callable[[], None]:
        return lambda: None

    def put(self, first: int, places: Any) -> None:
        self.send(self._rank, first, places)

    def send(self, rank: int, first: int, places: Any) -> None:
        base = self._of_ranks[rank].data_ptr() + first
        for address, offset, rows in places:
            for row in range(rows.number):
                to = base + offset + row * rows.slot_step
                ctypes.memmove(to, address + row * rows.step, rows.width)
                self.copies += rank != self._rank

    def _word(self, memory: Any, rank: int, kind: int) -> Any:
        return memory[self._nbytes :].view(torch.int64)[2 * rank + kind]

    def tell(self, words: Sequence[Word], awaited: Sequence[Word] = ()) -> None:
        for rank, kind, value in words:
            self._word(self._of_ranks[rank], self._rank, kind).fill_(value)
        self.wait(awaited)

    def wait(self, words: Sequence[Word]) -> None:
        begin = time.monotonic()
        for rank, kind, value in words:
            while self.waits and self._word(self._own, rank, kind) < value:
                assert time.monotonic() - begin < 60, "a rank waits for another"
                time.sleep(0)


@contextlib.contextmanager
def host_memory(kind: type[HostMemory] = HostMemory) -> Iterator[list[HostMemory]]:
    """Ranks copy to each other's memory on the host; the memories that were made."""
    made: list[HostMemory] = []

    def make(*given: Any) -> HostMemory:
        made.append(kind(*given))
        return made[-1]

    step = rank_memory._STEP
    rank_memory.MEMORIES["cpu"], rank_memory._STEP = make, 1
    try:
        yield made
    finally:
        del rank_memory.MEMORIES["cpu"]
        rank_memory._STEP = step


def run_copied(case: Case) -> dict[str, Any]:
    """run_case where ranks copy to each other's memory, with slots that grow."""
    with host_memory() as made:
        group = dist.new_group()
        smaller = [parallel.shard(case.draw()[name][:1], group=group) for name in "qkv"]
        for _ in range(3):
            parallel.attention(
                *smaller, schedule="allgather", group=group, **{**case.kernels, **case.semantics}
            )
        found = run_case(case, group=group)
        assert len(made) == min(case.batch, 2)
        assert sum(it.copies for it in made) > 3
        return found


# --- calls that must fail, on every rank, or must not hang ---------------------------------------


def text_of(call: Callable[[], Any]) -> str:
    """The type and the text of the error that a call raises."""
    try:
        call()
    except FlashsmithError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def tensors(rows: int, heads_q: int = 4, heads_k: int = 2, d: int = 64) -> tuple[Any, Any, Any]:
    q = torch.zeros(1, rows, heads_q, d, dtype=torch.float16)
    k = torch.zeros(1, rows, heads_k, d, dtype=torch.float16)
    return q, k, k.clone()


def refused(rank: int) -> dict[str, str]:
    """The errors of calls that all ranks must refuse, whoever of them is wrong."""
    other, size = rank == 1, dist.get_world_size()
    half = torch.zeros(1, 4, 4, 64, dtype=torch.float16)
    offsets = torch.tensor([0, 40, 79], dtype=torch.int32)
    packed = tuple(it[0] for it in tensors(40 if rank else 39))
    twice = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    calls: dict[str, Callable[[], Any]] = {
        "unequal shards": lambda: parallel.attention(*tensors(17 if other else 16)),
        "unequal allgather": lambda: parallel.attention(
            *tensors(30 if other else 16), schedule="allgather"
        ),
        "zigzag": lambda: parallel.attention(*tensors(17), schedule="zigzag"),
        "zigzag packed": lambda: parallel.attention(*packed, schedule="zigzag", **twice),
        "ulysses": lambda: parallel.attention(
            *tensors(16, 3 * (size + 1), size + 1), schedule="ulysses"
        ),
        "long text": lambda: parallel.attention(*tensors(16), schedule=5000 * "\0é"),
        "row_max": lambda: parallel.attention(*tensors(16), schedule="zigzag", return_row_max=True),
        "device": lambda: parallel.attention(*(it.to("meta") for it in tensors(16))),
        "schedule": lambda: parallel.attention(*tensors(16), schedule="ring"),
        "one schedule": lambda: parallel.attention(
            *tensors(16), schedule="ulysses" if other else "zigzag"
        ),
        "one dtype": lambda: parallel.attention(
            *(it.bfloat16() if other else it for it in tensors(16))
        ),
        "one is no tensor": lambda: parallel.attention(*([1, 2, 3] if other else tensors(16))),
        "one window": lambda: parallel.attention(
            *tensors(16), window=(-1, None) if other else (1, None)
        ),
        "gradients": lambda: parallel.attention(
            *(it.requires_grad_(other) for it in tensors(16)), return_lse=True
        ),
        "heads": lambda: parallel.attention(*tensors(16, 5, 2)),
        "d": lambda: parallel.attention(*tensors(16, d=60)),
        "d_v": lambda: parallel.attention(*tensors(16)[:2], tensors(16, d=60)[2]),
        "rows of v": lambda: parallel.attention(*tensors(16)[:2], tensors(15)[2]),
        "one d_v": lambda: parallel.attention(
            *tensors(16)[:2], tensors(16, d=128 if other else 72)[2]
        ),
        "sinks": lambda: parallel.attention(*tensors(16), sinks=torch.zeros(3)),
        "max_seqlen": lambda: parallel.attention(*packed, max_seqlen_q=39, **twice),
        "strided": lambda: parallel.attention(half.transpose(1, 3), half, half),
        "unshard": lambda: parallel.unshard(torch.zeros(1, 5 if other else 3)),
        "other functions": lambda: (
            parallel.unshard(torch.zeros(1, 4)) if other else parallel.attention(*tensors(16))
        ),
        "no group": lambda: parallel.attention(*tensors(16), group="world"),
        "two dimensions": lambda: parallel.shard(
            torch.zeros(1, 4), group=dist.device_mesh.init_device_mesh("cpu", (1, size))
        ),
        "rows": lambda: parallel.shard(torch.zeros(4), dim=1),
        "length": lambda: parallel.positions(-1),
        "whole": lambda: parallel.shard(torch.zeros(4), cu_seqlens=offsets),
        "falling": lambda: parallel.positions(
            cu_seqlens=torch.tensor([0, 3, 1], dtype=torch.int32)
        ),
    }
    return {name: text_of(call) for name, call in calls.items()}


def who_holds_what(rank: int) -> dict[str, Any]:
    offsets = torch.tensor([0, 8, 8, 19], dtype=torch.int32)
    whole = torch.arange(19)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    shard = parallel.shard(whole, cu_seqlens=offsets, group=mesh)
    dense = torch.arange(22.0).view(1, 11, 2).requires_grad_()
    of_dense = parallel.shard(dense)
    of_dense.sum().backward()
    return {
        "positions": parallel.positions(cu_seqlens=offsets),
        "of one": parallel.positions(11),
        "rows": shard,
        "whole": parallel.unshard(shard, cu_seqlens=offsets, group=mesh),
        "dense": parallel.unshard(of_dense),
        "gradient": dense.grad,
        "empty": parallel.unshard(parallel.shard(torch.zeros(2, 0, 3))).shape,
    }


def without_gradients(rank: int) -> dict[str, Any]:
    """Repeated calls, by names of groups; out=; and compiled ones."""
    case = Case("zigzag", (80,), batch=1, causal=True)
    shards = [parallel.shard(case.draw()[name]) for name in "qkv"]
    keywords = {"causal": True, "config": CFG}
    o = parallel.attention(*shards, **keywords)
    out = torch.empty_like(o)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    parallel.attention(*shards, out=out, group=mesh, **keywords)

    @torch.compile(backend="eager")
    def doubled(q: Any, k: Any, v: Any) -> Any:
        return 2 * parallel.attention(q + 0, k, v, **keywords)

    try:
        torch.compile(parallel.attention, backend="eager", fullgraph=True)(*shards, **keywords)
        in_one_graph = "no error"
    except RuntimeError as error:
        in_one_graph = type(error).__name__
    alone = dist.new_group([rank], use_local_synchronization=True)
    whole = [case.draw()[name] for name in "qkv"]
    return {
        "o": o,
        "out": out,
        "compiled": doubled(*shards),
        "whole graph": in_one_graph,
        "alone": parallel.attention(*whole, group=alone, **keywords),
    }


def empty_shards(rank: int) -> dict[str, Any]:
    """Fewer rows than ranks, and none at all."""
    found = {}
    for schedule in ("allgather", "ulysses"):
        found[schedule] = run_case(Case(schedule, (1,), batch=1, causal=True))["dv"]
    found["none"] = run_case(Case("zigzag", (0,), batch=2))["dv"]
    return found


def without_a_host_backend(rank: int) -> Any:
    """What a group of NCCL does to agree: a group of gloo of its own, made once; here without a
    shared_words, as of several hosts."""
    carried, shared_words = Group._backend, Group._words_of_host
    Group._backend = lambda self, kind: None if kind == "cpu" else carried(self, kind)
    Group._words_of_host = lambda self: None
    try:
        group = dist.new_group(timeout=datetime.timedelta(seconds=33))
        said = [Group(group).agree(Message({"rank": rank})).said() for _ in range(2)]
        assert said[1] is said[0]
        made = Group(group)._of_host()
        assert made is not group
        timeout = str(made._get_backend(torch.device("cpu")).options._timeout)
        wrong = text_of(lambda: Group(group).check_device("q", torch.zeros(1)))
        return said, dist.get_backend(made), timeout, wrong
    finally:
        Group._backend, Group._words_of_host = carried, shared_words


def agreed_before(rank: int) -> dict[str, Any]:
    """Calls like one before, between calls in which another rank says something else."""
    shards = [torch.randn_like(it) for it in tensors(16)]
    exchanges, exchange = [], Group.exchange

    def counted(self: Group, mine: bytes) -> bytes:
        exchanges.append(len(mine))
        return exchange(self, mine)

    def call(**keywords: Any) -> Any:
        return parallel.attention(*shards, **{"causal": True, "config": CFG, **keywords})

    Group.exchange = counted
    try:
        found: dict[str, Any] = {"outputs": [call(), call()]}
        found["other"] = text_of(lambda: call(schedule="ulysses") if rank == 1 else call())
        found["outputs"].append(call())
        found["refused"] = text_of(lambda: call(softcap=-1.0) if rank == 1 else call())
        found["outputs"].append(call())
        exchanges.clear()
        found["outputs"].append(call())
        return {**found, "exchanges": exchanges}
    finally:
        Group.exchange = exchange


IDLE = Case("zigzag", (24, 0, 52), window=(0, 0), softcap=5.0)


def nothing_to_compute(rank: int) -> dict[str, Any]:
    """Of the other rank's keys nobody sees any; what hangs is an error after 20 seconds."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=20))
    return run_case(IDLE, group=group)


CANONICAL = {
    "auto": Case("auto", (16,), batch=1, causal=True, heads_q=2, heads_k=1),
    "window": Case("allgather", (8,), (CHUNK + 76,), batch=1, window=(20, 0), heads_q=2, heads_k=1),
    "ulysses": Case("ulysses", (16,), batch=1, causal=True),
}


def canonical(rank: int) -> dict[str, Any]:
    """Outputs and log-sum-exps of whole sequences, and the errors of what has no such bits."""
    found: dict[str, Any] = {}
    for name, case in CANONICAL.items():
        q, k, v = (parallel.shard(case.draw()[it]) for it in "qkv")
        o, lse = parallel.attention(
            *(q, k, v),
            schedule=case.schedule,
            bits="canonical",
            return_lse=True,
            **case.semantics,
        )
        found[name] = parallel.unshard(o), parallel.unshard(lse, dim=-1)
    zigzag = {"schedule": "zigzag", "causal": True}
    found["zigzag"] = text_of(lambda: parallel.attention(*tensors(16), **zigzag, bits="canonical"))
    os.environ["FLASHSMITH_BITS"] = "canonical"
    try:
        found["variable"] = text_of(lambda: parallel.attention(*tensors(16), **zigzag))
        free = {**zigzag, "bits": "free", "config": CFG}
        found["free"] = text_of(lambda: parallel.attention(*tensors(8), **free))
    finally:
        del os.environ["FLASHSMITH_BITS"]
    one = {"bits": "canonical" if rank else "free", "schedule": "allgather"}
    found["one"] = text_of(lambda: parallel.attention(*tensors(16), **one))
    return found


def transfers(rank: int) -> dict[str, int]:
    """How many more transfers a rank has made after a call of each schedule, forward and both."""
    found, group = {}, Group(None)
    for schedule in ("zigzag", "allgather", "ulysses"):
        case = Case(schedule, (40, 0), causal=True)
        for name, needs in (("forward", False), ("both", True)):
            before = group.transfers()
            shards = [
                parallel.shard(case.draw()[it], cu_seqlens=case.offsets()[0]).requires_grad_(needs)
                for it in "qkv"
            ]
            o = parallel.attention(
                *shards, schedule=schedule, cu_seqlens_q=case.offsets()[0],
                cu_seqlens_k=case.offsets()[0], **KERNELS, **case.semantics,
            )  # fmt: skip
            if needs:
                o.float().sum().backward()
            found[f"{schedule} {name}"] = group.transfers() - before
    return found


def bench_transfers(rank: int) -> list[dict[str, Any]]:
    """The rows of the benchmark's messages, with memory that the ranks share and without."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "gpu"))
    import parallel_bench as tool

    tool.MESSAGE, tool.TRANSFERS, tool.TIMED = 256, 5, 3
    options = argparse.Namespace(device="cpu", peers=())
    bench, rows = tool.Bench(rank, dist.get_world_size(), Path(), options), list[dict[str, Any]]()
    bench.say = rows.append
    bench.transfer()
    with host_memory():
        group_module._peers[dist.group.WORLD].pop("transfers")
        bench.transfer()
        group_module._peers[dist.group.WORLD].pop("transfers")
    return rows


class ForgetfulMemory(HostMemory):
    """Its host does not wait for others, as that of a GPU does not."""

    waits = False


def left_out(rank: int) -> list[str]:
    """One rank runs a backward pass alone, and then both make a call."""
    case = Case("allgather", (80,), batch=1, causal=True)
    with host_memory(ForgetfulMemory):
        group = dist.new_group()
        shards = [parallel.shard(case.draw()[it], group=group).requires_grad_() for it in "qkv"]

        def call() -> Any:
            return parallel.attention(
                *shards, schedule="allgather", group=group, causal=True, **KERNELS
            )

        call()
        o = call()
        if rank == 1:
            o.float().sum().backward()
        return [text_of(call)]


def late(rank: int) -> tuple[str, float]:
    """The last rank makes no call; the others are told within the group's timeout."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    parallel.unshard(torch.zeros(1, 4), group=group)  # has the group connect
    begin = time.monotonic()
    if rank == dist.get_world_size() - 1:
        time.sleep(4)
        return "", 0.0
    return text_of(lambda: parallel.unshard(torch.zeros(1, 4), group=group)), (
        time.monotonic() - begin
    )


def death(rank: int) -> tuple[str, float]:
    """The last rank ends; run as the last script."""
    if rank == dist.get_world_size() - 1:
        return "", 0.0
    begin = time.monotonic()
    time.sleep(0.5)
    return text_of(lambda: parallel.attention(*tensors(16))), time.monotonic() - begin


def record_problems() -> set[Problem]:
    """Has the problems of attention and of gradients added to a set, from now on."""
    computed: set[Problem] = set()
    check = forward_pass.check_server

    def recording(cfg: Any, problem: Problem, device: Any) -> Any:
        computed.add(problem)
        return check(cfg, problem, device)

    forward_pass.check_server = backward_pass.check_server = recording
    return computed


# --- processes -----------------------------------------------------------------------------------


MOST_KEPT = causal_allgather._MOST_KEPT


def one_rank(
    rank: int, ranks: int, folder: str, cases: Mapping[str, Case], scripts: tuple[str, ...]
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), ranks)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    # Small messages, so that K and V are gathered in several.
    allgather.SMALLEST_MESSAGE = 1
    found: dict[str, Any] = {}
    computed = record_problems()
    path = os.path.join(folder, f"{rank}.pt")
    for name, run in [
        *(
            (name, lambda case=case, run=run_copied if "copied" in name else run_case: run(case))
            for name, case in cases.items()
        ),
        *((name, lambda name=name: globals()[name](rank)) for name in scripts),
    ]:
        computed.clear()
        # Short sequences would always be kept for the backward pass.
        causal_allgather._MOST_KEPT = MOST_KEPT if "kept" in name else 0
        try:
            found[name] = run()
        except Exception:
            found[name] = traceback.format_exc()
        found[f"problems of {name}"] = sorted(map(str, computed))
        torch.save(found, path)
    # No farewell: the one that 'death' leaves alone could not say it.
    os._exit(0)


def run_ranks(
    ranks: int, folder: Path, cases: Mapping[str, Case], scripts: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """What every rank found, by rank."""
    running = mp.start_processes(
        one_rank, (ranks, str(folder), cases, scripts), nprocs=ranks, join=False
    )
    try:
        while not running.join(timeout=5):
            pass
    finally:
        for process in running.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
