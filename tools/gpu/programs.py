#!/usr/bin/env python3
"""Score and mask functions on the GPU: right on random problems, and how fast.

    python tools/gpu/programs.py build             # compiles what the others need; needs no GPU
    python tools/gpu/programs.py check --problems 400 --seed 1
    python tools/gpu/programs.py time rows.csv --rounds 7 --peer

`check` draws problems (lengths, heads, packed sequences, sinks, functions) for a fixed set of
kernels and compares with float64. The exit status is 1 if one is wrong.

`time` times functions of each case alternately with the same attention without a function, with
built-in forms, and with --peer with FlexAttention, compiled with max-autotune. All outputs are
first compared, on drawn rows, with the caller's function computed eagerly in float64. There is a
row for each case, contender and round. TFLOP/s count visible pairs.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from flashsmith.benchmark.rounds import AlternatingRounds, Contender, PooledFigure
from flashsmith.benchmark.timing import Protocol
from flashsmith.builder import library_for
from flashsmith.chooser.choice import choose, choose_config
from flashsmith.families import DeviceSpec, DType, Problem, Semantics, device_spec
from flashsmith.runtime import ForwardOptions, query_gpu, run_call
from flashsmith.tracing import BoundProgram, trace
from flashsmith.verify.attention_semantics import Attention, offsets
from flashsmith.verify.reference import references_of
from flashsmith.verify.tolerance import compare

ROUND = Protocol(num_warmups=2, runs=10, warmup_ms=0.0, measure_ms=20.0, num_estimates=1)
GPU = "H200"
# The sizes that `check` takes each kind's config from.
CHECKED = 2, 4096, 4096, 16, 4
Function = Callable[..., Any]


# --- functions -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Functions:
    """A score and a mask function of FlexAttention's form; None for none."""

    score: Function | None = None
    mask: Function | None = None

    def bound(self) -> BoundProgram:
        return trace(self.score, self.mask)


@dataclass(frozen=True)
class Shape:
    """The sizes that functions capture tensors for."""

    batch: int
    heads: int
    seq_q: int
    seq_k: int


Tensor = Callable[[np.ndarray], Any]  # puts an array where the call's tensors are
Make = Callable[[Shape, np.random.Generator, Tensor], Functions]


def alibi(shape: Shape, draw: np.random.Generator, tensor: Tensor) -> Functions:
    slopes = tensor((2.0 ** (-8 * np.arange(1, shape.heads + 1) / shape.heads)).astype(np.float32))
    return Functions(lambda score, b, h, q, k: score + slopes[h] * (k - q))


def squared(shape: Shape, draw: np.random.Generator, tensor: Tensor) -> Functions:
    strength = float(draw.uniform(1e-7, 1e-5))
    return Functions(lambda score, b, h, q, k: score - strength * ((q - k) * (q - k)))


def softcap(shape: Shape, draw: np.random.Generator, tensor: Tensor) -> Functions:
    import torch

    cap = 30.0
    return Functions(lambda score, b, h, q, k: cap * torch.tanh(score / cap))


def table(shape: Shape, draw: np.random.Generator, tensor: Tensor) -> Functions:
    """A bias by head and relative position."""
    reach = max(shape.seq_q, shape.seq_k)
    bias = tensor(draw.standard_normal((shape.heads, 2 * reach)).astype(np.float32))
    return Functions(lambda score, b, h, q, k: score + bias[h, k - q + reach])


def documents(shape: Shape, draw: np.random.Generator, tensor: Tensor) -> Functions:
    length = max(shape.seq_q, shape.seq_k)
    doc = tensor(np.sort(draw.integers(0, 8, (shape.batch, length)), axis=1).astype(np.int32))
    return Functions(mask=lambda b, h, q, k: doc[b, q] == doc[b, k])


def window_and_global(shape: Shape, draw: np.random.Generator, tensor: Tensor) -> Functions:
    width, first = int(draw.integers(1, 500)), int(draw.integers(0, 100))
    return Functions(mask=lambda b, h, q, k: ((q - k < width) & (k - q < width)) | (k < first))


def block_table(shape: Shape, draw: np.random.Generator, tensor: Tensor) -> Functions:
    """Random visible blocks of 128 x 128 by head; some rows of blocks see nothing."""
    rows, columns = (-(-n // 128) or 1 for n in (shape.seq_q, shape.seq_k))
    seen = draw.random((shape.heads, rows, columns)) < draw.choice([0.1, 0.5, 0.9])
    seen[:, rows // 2] = False
    visible = tensor(seen)
    return Functions(mask=lambda b, h, q, k: visible[h, q // 128, k // 128])


def alibi_in_documents(shape: Shape, draw: np.random.Generator, tensor: Tensor) -> Functions:
    one, other = alibi(shape, draw, tensor), documents(shape, draw, tensor)
    return Functions(one.score, other.mask)


FUNCTIONS: dict[str, Make] = {
    it.__name__: it
    for it in (
        *(alibi, squared, softcap, table, documents, window_and_global, block_table),
        alibi_in_documents,
    )
}


# --- kernels -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """What a kernel is compiled for."""

    function: str
    d: int
    dtype: DType = DType.BF16
    mask: str = "none"
    packed: bool = False
    softcap: bool = False
    family: str | None = None

    def config(self, device: DeviceSpec) -> Any:
        """The config whose kernel `check` uses for all problems of this kind."""
        return choose_config(self.problem(*CHECKED), device, self.family)

    def problem(self, *sizes: int) -> Problem:
        """The problem of these sizes: batch, seq_q, seq_k, heads_q and heads_k."""
        shape = Shape(1, sizes[3], 128, 128)
        program = FUNCTIONS[self.function](shape, np.random.default_rng(0), _host).bound().program
        semantics = Semantics(self.mask, self.softcap, self.packed, True, False, program)
        return Problem(*sizes, self.d, self.dtype, semantics)


def _host(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array)


def checked_kinds() -> list[Kind]:
    """The kinds that `check` draws from: every function, each with a few of the others' values."""
    masks = itertools.cycle(("none", "causal", "none", "window"))
    packed = itertools.cycle((False, False, True))
    dims = itertools.cycle((64, 128, 256, 128))
    dtypes = itertools.cycle((DType.BF16, DType.FP16, DType.BF16))
    kinds = [
        Kind(
            *(name, next(dims), next(dtypes), next(masks), next(packed), name == "table"),
            family="mma_sync" if turn == 3 else None,
        )
        for turn in range(4)
        for name in FUNCTIONS
    ]
    return list(dict.fromkeys(kinds))


@dataclass(frozen=True)
class Case:
    """Sizes at which functions are timed, and what else is timed."""

    name: str
    kind: Kind
    batch: int
    seq: int
    heads: int
    heads_k: int
    plain: str = ""  # the contender without a function: 'plain', 'softcap' or 'packed'


def timed_cases() -> list[Case]:
    cases = []
    for d, heads, mask in itertools.product((128, 64), (16,), ("none", "causal")):
        for name in ("alibi", "squared", "table"):
            kind = Kind(name, d, mask=mask)
            cases.append(Case(f"{name} {mask} d{d}", kind, 2, 4096, heads, heads, "plain"))
        kind = Kind("softcap", d, mask=mask)
        cases.append(Case(f"softcap {mask} d{d}", kind, 2, 4096, heads, heads, "softcap"))
    kind = Kind("documents", 128, mask="causal")
    cases.append(Case("documents causal 32k", kind, 1, 32768, 32, 8, "packed"))
    kind = Kind("alibi", 256)
    cases.append(Case("alibi none d256", kind, 2, 4096, 8, 8, "plain"))
    return cases


def other_configs(case: Case, device: DeviceSpec) -> list[Any]:
    """The configs that were not chosen for a case, the most promising first."""
    sizes = case.batch, case.seq, case.seq, case.heads, case.heads_k
    return [it.config for it in choose(case.kind.problem(*sizes), device).runners_up[:3]]


def kernels(device: DeviceSpec, *, others: bool) -> Iterator[tuple[Any, Semantics]]:
    """The kernels of all checked kinds and timed cases, with what they are timed against."""
    for kind in checked_kinds():
        yield kind.config(device), kind.problem(*CHECKED).semantics
    for case in timed_cases():
        sizes = case.batch, case.seq, case.seq, case.heads, case.heads_k
        problem = case.kind.problem(*sizes)
        yield choose_config(problem, device), problem.semantics
        if others:
            yield from ((it, problem.semantics) for it in other_configs(case, device))
        without = Semantics(case.kind.mask, case.plain == "softcap")
        if case.plain == "packed":
            without = replace(without, packed=True, uneven=True)
            sizes = DOCUMENTS, case.seq, case.seq, case.heads, case.heads_k
        plain = Problem(*sizes, case.kind.d, case.kind.dtype, without)
        config = choose_config(plain, device)
        yield config, plain.required_semantics(config)


def build(device: DeviceSpec, jobs: int, *, others: bool) -> int:
    wanted = list(dict.fromkeys(kernels(device, others=others)))

    def built(one: tuple[Any, Semantics]) -> str:
        config, semantics = one
        entry = library_for([config], arch=device.arch, semantics=semantics).entry(config)
        figures = ", ".join(
            f"{it.registers} registers, {it.spill_bytes} bytes spilled"
            for it in (entry, *entry.beside)
        )
        return f"{config.short_form()} [{semantics}]: {figures}"

    with ThreadPoolExecutor(jobs) as pool:
        for number, said in enumerate(pool.map(built, wanted)):
            print(f"{number + 1} of {len(wanted)}: {said}", flush=True)
    return 0


# --- correctness ---------------------------------------------------------------------------------


def drawn_lengths(draw: np.random.Generator, count: int) -> list[int]:
    longest = int(draw.choice([1, 64, 130, 500, 1500]))
    return [int(it) for it in draw.integers(0, longest + 1, count)]


def check_one(kind: Kind, draw: np.random.Generator) -> str:
    """What is wrong in one drawn problem; '' if nothing is."""
    import torch

    def tensor(array: np.ndarray) -> Any:
        return torch.from_numpy(array).cuda()

    group, heads_k = int(draw.choice([1, 2, 4, 6])), int(draw.choice([1, 2, 3]))
    heads = group * heads_k
    d = kind.d - int(draw.choice([0, 8, 16]))
    lens_q = lens_k = None
    if kind.packed:
        count = int(draw.integers(1, 6))
        lens_q, lens_k = drawn_lengths(draw, count), drawn_lengths(draw, count)
        lens_q[0], lens_k[0] = max(lens_q[0], 1), max(lens_k[0], 1)
        shape = Shape(count, heads, max(lens_q), max(lens_k))
        rows = (sum(lens_q),), (sum(lens_k),)
    else:
        batch = int(draw.integers(1, 4))
        seq_q, seq_k = (max(1, drawn_lengths(draw, 1)[0]) for _ in range(2))
        shape = Shape(batch, heads, seq_q, seq_k)
        rows = (batch, seq_q), (batch, seq_k)
    bound = FUNCTIONS[kind.function](shape, draw, tensor).bound()
    dtype = torch.bfloat16 if kind.dtype is DType.BF16 else torch.float16
    q, k, v = (
        tensor(draw.standard_normal(it).astype(np.float32)).to(dtype)
        for it in ((*rows[0], heads, d), (*rows[1], heads_k, d), (*rows[1], heads_k, d))
    )
    sinks = tensor(draw.standard_normal(heads).astype(np.float32)) if draw.random() < 0.3 else None
    window = (int(draw.integers(0, 300)), int(draw.integers(0, 50)))
    options: dict[str, Any] = {
        "causal": kind.mask == "causal",
        "window": window if kind.mask == "window" else (None, None),
        "softcap": 20.0 if kind.softcap else 0.0,
    }
    packed: dict[str, Any] = {}
    if lens_q is not None and lens_k is not None:
        packed = {
            "cu_seqlens_q": tensor(offsets(tuple(lens_q))),
            "cu_seqlens_k": tensor(offsets(tuple(lens_k))),
            "max_seqlen_q": max(lens_q),
            "max_seqlen_k": max(lens_k),
        }
    asked = ForwardOptions(
        **options, **packed, sinks=sinks, return_lse=True, return_row_max=True, program=bound
    )
    out = torch.full_like(q, torch.nan)
    config = kind.config(query_gpu(0))
    o, lse, row_max = run_call(config, (q, k, v, out), asked, False, "out")
    again, *_ = run_call(config, (q, k, v, None), asked, False, "out")
    host = [_numpy(it) for it in (q, k, v, o)]
    of_host = bound._replace(tensors=tuple(map(_numpy, bound.tensors)))
    attention = Attention(
        d**-0.5,
        **options,
        lens_q=None if lens_q is None else tuple(lens_q),
        lens_k=None if lens_k is None else tuple(lens_k),
        program=of_host,
    )
    logits = None if sinks is None else _numpy(sinks)
    expected = references_of(attention, *host[:3], logits, on_gpu=True)
    found = compare(
        kind.dtype,
        host[3],
        _numpy(lse),
        expected,
        row_max=_numpy(row_max),
        lens_q=attention.lens_q,
    )
    reasons = list(map(str, found.reasons))
    if not torch.equal(o.nan_to_num(), again.nan_to_num()):
        reasons.append("a second call has other bits")
    where = f"{kind} {shape} heads_k={heads_k} d={d} {options} {lens_q}:{lens_k}"
    return f"{where}: {'; '.join(reasons)}" if reasons else ""


def _numpy(tensor: Any) -> np.ndarray:
    import ml_dtypes
    import torch

    host = tensor.detach().cpu()
    if host.dtype is torch.bfloat16:
        bits: np.ndarray = host.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return bits
    array: np.ndarray = host.numpy()
    return array


def check(problems: int, seed: int) -> int:
    kinds, wrong = checked_kinds(), 0
    for number in range(problems):
        draw = np.random.default_rng((seed, number))
        said = check_one(kinds[number % len(kinds)], draw)
        if said:
            wrong += 1
            print(f"WRONG {number}: {said}", flush=True)
    print(f"{problems} problems of {len(kinds)} kinds of kernels, {wrong} wrong", flush=True)
    return int(wrong > 0)


# --- speed ---------------------------------------------------------------------------------------

DOCUMENTS = 8


@dataclass
class Timed:
    """A case's tensors on the GPU, its functions, and its contenders."""

    case: Case
    peer: bool
    others: bool
    q: Any = field(init=False)
    k: Any = field(init=False)
    v: Any = field(init=False)
    functions: Functions = field(init=False)
    lengths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        import torch

        case, draw = self.case, np.random.default_rng(7)
        torch.manual_seed(7)
        dtype = torch.bfloat16 if case.kind.dtype is DType.BF16 else torch.float16
        self.q, self.k, self.v = (
            torch.randn(case.batch, case.seq, heads, case.kind.d, dtype=dtype, device="cuda")
            for heads in (case.heads, case.heads_k, case.heads_k)
        )
        shape = Shape(case.batch, case.heads, case.seq, case.seq)
        if case.kind.function == "documents":
            cuts = np.sort(draw.choice(np.arange(1, case.seq), DOCUMENTS - 1, replace=False))
            self.lengths = np.diff([0, *cuts, case.seq]).tolist()
            owner = np.repeat(np.arange(DOCUMENTS, dtype=np.int32), self.lengths)[None]
            doc = torch.from_numpy(owner).cuda()
            self.functions = Functions(mask=lambda b, h, q, k: doc[b, q] == doc[b, k])
        else:
            self.lengths = []
            make = FUNCTIONS[case.kind.function]
            self.functions = make(shape, draw, lambda it: torch.from_numpy(it).cuda())

    # --- contenders ---

    def ours(self, config: Any = choose_config) -> Callable[[], Any]:
        causal = self.case.kind.mask == "causal"
        options = ForwardOptions(causal=causal, program=self.functions.bound())
        tensors = self.q, self.k, self.v, None
        return lambda: run_call(config, tensors, options, False, "out")

    def plain(self) -> Callable[[], Any]:
        import torch

        case = self.case
        causal = case.kind.mask == "causal"
        if case.plain != "packed":
            options = ForwardOptions(
                causal=causal, softcap=30.0 if case.plain == "softcap" else 0.0
            )
            return lambda: run_call(
                choose_config, (self.q, self.k, self.v, None), options, False, "out"
            )
        cu = torch.from_numpy(offsets(tuple(self.lengths))).cuda()
        longest = max(self.lengths)
        options = ForwardOptions(
            causal=causal,
            cu_seqlens_q=cu,
            cu_seqlens_k=cu,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
        )
        flat = (*(it[0] for it in (self.q, self.k, self.v)), None)
        return lambda: run_call(choose_config, flat, options, False, "out")[None]

    def flex(self) -> Callable[[], Any]:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        causal, mask = self.case.kind.mask == "causal", self.functions.mask

        def sees(b: Any, h: Any, q: Any, k: Any) -> Any:
            seen = q >= k
            return seen if mask is None else seen & mask(b, h, q, k)

        mask_mod = sees if causal else mask
        block_mask = None
        if mask_mod is not None:
            seq = self.case.seq
            made = torch.compile(create_block_mask)
            block_mask = made(mask_mod, None, None, seq, seq, device="cuda")
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, mode="max-autotune-no-cudagraphs", dynamic=False)
        q, k, v = (it.transpose(1, 2) for it in (self.q, self.k, self.v))
        return lambda: compiled(
            *(q, k, v),
            score_mod=self.functions.score,
            block_mask=block_mask,
            enable_gqa=self.case.heads != self.case.heads_k,
        ).transpose(1, 2)

    # --- reference ---

    def why_wrong(self, found: Any, *, with_function: bool = True) -> str:
        """Compares 64 drawn rows of all heads with the function computed eagerly in float64."""
        import torch

        case, group = self.case, self.case.heads // self.case.heads_k
        rows = torch.from_numpy(np.random.default_rng(1).choice(case.seq, 64, replace=False)).cuda()
        keys = torch.arange(case.seq, device="cuda")
        worst = 0.0
        for b, h in itertools.product(range(case.batch), range(case.heads)):
            q, k, v = self.q[b, rows, h], self.k[b, :, h // group], self.v[b, :, h // group]
            scores = q.double() @ k.double().T * case.kind.d**-0.5
            at = (torch.tensor(b, device="cuda"), torch.tensor(h, device="cuda"))
            at = (*at, rows[:, None], keys[None])
            if case.plain == "softcap" and not with_function:
                scores = 30.0 * torch.tanh(scores / 30.0)
            if with_function and self.functions.score is not None:
                scores = self.functions.score(scores, *at)
            seen = torch.ones_like(scores, dtype=torch.bool)
            if case.kind.mask == "causal":
                seen &= keys[None] <= rows[:, None]
            if self.functions.mask is not None:
                seen &= self.functions.mask(*at)
            weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
            expected = weights @ v.double()
            error = (found[b, rows, h].double() - expected).norm() / expected.norm()
            worst = max(worst, float(error))
        return "" if worst < 6e-3 else f"relative L2 error {worst:.2e}"

    def contenders(self) -> list[Contender]:
        made = {"function": (self.ours(), True), "plain": (self.plain(), False)}
        if self.others:
            for config in other_configs(self.case, query_gpu(0)):
                made[str(config)] = self.ours(config), True
        if self.peer:
            made["FlexAttention"] = self.flex(), True
        return [
            Contender(name, launch, self._checked(launch, with_function=with_function))
            for name, (launch, with_function) in made.items()
        ]

    def _checked(self, launch: Callable[[], Any], *, with_function: bool) -> Callable[[], str]:
        return lambda: self.why_wrong(launch(), with_function=with_function)

    def pairs(self) -> int:
        """Visible pairs of one head of the whole batch."""
        case = self.case
        lengths = self.lengths or [case.seq] * case.batch
        if case.kind.mask == "causal":
            return sum(n * (n + 1) // 2 for n in lengths)
        return sum(n * n for n in lengths)


def time_all(path: Path, rounds: int, *, peer: bool, others: bool, only: str) -> int:
    wrong = 0
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("case", "contender", "round", "ms", "tflops"))
        for case in timed_cases():
            if not any(it in case.name for it in only.split(",")):
                continue
            timed = Timed(case, peer, others)
            flop = 4 * case.kind.d * case.heads * timed.pairs()
            alternating = AlternatingRounds(timed.contenders())
            for name, why in alternating.wrong.items():
                wrong += 1
                print(f"WRONG {case.name}: {name}: {why}", flush=True)
            times: dict[str, list[float]] = defaultdict(list)
            for number in range(rounds):
                for name, samples in alternating.round(ROUND).items():
                    ms = samples.median_ms
                    times[name].append(ms)
                    rows.writerow((case.name, name, number, f"{ms:.6f}", f"{flop / ms / 1e9:.1f}"))
            file.flush()
            _say(case, times, flop)
    return int(wrong > 0)


def _say(case: Case, times: dict[str, list[float]], flop: int) -> None:
    ours = times.get("function")
    for name, ms in times.items():
        share = ""
        if ours and name != "function":
            ratio = PooledFigure.of([other / own for own, other in zip(ours, ms, strict=True)])
            share = f"  function is {ratio:.3f} times as fast"
        median = statistics.median(ms)
        print(f"{case.name:22} {name:13} {median:.4f} ms {flop / median / 1e9:6.1f}{share}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="compile what the other commands need")
    building.add_argument("--jobs", type=int, default=2, help="libraries compiled at a time")
    building.add_argument("--others", action="store_true", help="also for time --others")
    checked = commands.add_parser("check", help="compare random problems with float64")
    checked.add_argument("--problems", type=int, default=300)
    checked.add_argument("--seed", type=int, default=0)
    timed = commands.add_parser("time", help="time cases alternately")
    timed.add_argument("rows", type=Path, help="the CSV file to write")
    timed.add_argument("--rounds", type=int, default=7)
    timed.add_argument("--peer", action="store_true", help="with FlexAttention, max-autotune")
    timed.add_argument("--others", action="store_true", help="with up to three other configs")
    timed.add_argument(
        "--only", default="", help="only cases whose names contain one of these, joined by commas"
    )
    args = parser.parse_args()
    if args.command == "build":
        return build(device_spec(GPU), args.jobs, others=args.others)
    if args.command == "check":
        return check(args.problems, args.seed)
    return time_all(args.rows, args.rounds, peer=args.peer, others=args.others, only=args.only)


if __name__ == "__main__":
    sys.exit(main())
