#!/usr/bin/env python3
"""Gradients of score and mask functions on the GPU: right on random problems, and how fast.

    python tools/gpu/program_gradients.py build             # needs no GPU
    python tools/gpu/program_gradients.py check --problems 200 --seed 1
    python tools/gpu/program_gradients.py time rows.csv --rounds 7 --peer

The modes are those of programs.py, for backward passes. `check` also compares the bits of two calls
where the kernel's order is fixed. `time` first compares all gradients of the first heads with
autograd in float64; TFLOP/s count visible pairs and five products.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from programs import (
    CHECKED,
    DOCUMENTS,
    FUNCTIONS,
    GPU,
    ROUND,
    Case,
    Functions,
    Kind,
    Shape,
    _numpy,
    drawn_lengths,
)

from flashsmith.benchmark.rounds import AlternatingRounds, Contender, PooledFigure
from flashsmith.builder import library_for
from flashsmith.chooser.choice import choose_config
from flashsmith.families import DeviceSpec, DType, Problem, Semantics, device_spec
from flashsmith.runtime import ForwardOptions, query_gpu, run_backward, run_call
from flashsmith.semantics.signature import BackwardOptions
from flashsmith.verify.attention_semantics import Attention, offsets
from flashsmith.verify.gradient_tolerance import compare_gradients
from flashsmith.verify.gradients import Rows, compute_gradients
from flashsmith.verify.reference import references_of


@dataclass(frozen=True)
class Checked:
    """A kind of problem, and whether its gradients must be repeatable."""

    kind: Kind
    deterministic: bool

    def config(self, device: DeviceSpec) -> Any:
        problem = self.kind.problem(*CHECKED).of_operation("backward", "")
        return choose_config(problem, device, deterministic=self.deterministic)


def checked_kinds() -> list[Checked]:
    masks = itertools.cycle(("none", "causal", "window"))
    packed = itertools.cycle((False, False, True, False))
    dims = itertools.cycle((64, 128, 256, 128, 64))
    dtypes = itertools.cycle((DType.BF16, DType.FP16, DType.BF16))
    repeatable = itertools.cycle((False, False, True))
    return [
        Checked(
            Kind(name, next(dims), next(dtypes), next(masks), next(packed), name == "table"),
            next(repeatable),
        )
        for _ in range(2)
        for name in FUNCTIONS
    ]


def timed_cases() -> list[Case]:
    cases = [
        Case(f"{name} {mask} d{d}", Kind(name, d, mask=mask), 2, 4096, 16, 16, plain)
        for name, mask, d, plain in (
            ("alibi", "causal", 128, "plain"),
            ("alibi", "none", 128, "plain"),
            ("squared", "causal", 128, "plain"),
            ("softcap", "causal", 128, "softcap"),
            ("alibi", "causal", 64, "plain"),
        )
    ]
    kind = Kind("documents", 128, mask="causal")
    return [*cases, Case("documents causal 32k", kind, 1, 32768, 32, 8, "packed")]


def without_function(case: Case) -> Problem:
    """The backward problem that a case is timed against."""
    semantics = Semantics(case.kind.mask, case.plain == "softcap")
    sizes = case.batch, case.seq, case.seq, case.heads, case.heads_k
    if case.plain == "packed":
        semantics = replace(semantics, packed=True, uneven=True)
        sizes = DOCUMENTS, *sizes[1:]
    return Problem(*sizes, case.kind.d, case.kind.dtype, semantics).of_operation("backward", "")


def build(device: DeviceSpec, jobs: int) -> int:
    wanted = []
    for one in checked_kinds():
        wanted.append((one.config(device), one.kind.problem(*CHECKED).semantics))
    for case in timed_cases():
        problem = case.kind.problem(case.batch, case.seq, case.seq, case.heads, case.heads_k)
        config = choose_config(problem.of_operation("backward", ""), device)
        wanted += [(config, problem.semantics), (choose_config(problem, device), problem.semantics)]
        plain = without_function(case)
        config = choose_config(plain, device)
        wanted.append((config, plain.required_semantics(config)))
    unique = list(dict.fromkeys(wanted))

    def built(one: tuple[Any, Semantics]) -> str:
        config, semantics = one
        entry = library_for([config], arch=device.arch, semantics=semantics).entry(config)
        return (
            f"{config.short_form()} [{semantics}]: {entry.registers} registers, "
            f"{entry.spill_bytes} bytes spilled"
        )

    with ThreadPoolExecutor(jobs) as pool:
        for number, said in enumerate(pool.map(built, unique)):
            print(f"{number + 1} of {len(unique)}: {said}", flush=True)
    return 0


# --- correctness ---------------------------------------------------------------------------------


def check_one(one: Checked, draw: np.random.Generator) -> str:
    """What is wrong in one drawn problem; '' if nothing is."""
    import torch

    def tensor(array: np.ndarray) -> Any:
        return torch.from_numpy(array).cuda()

    kind = one.kind
    heads_k = int(draw.choice([1, 2, 3]))
    heads = int(draw.choice([1, 2, 4])) * heads_k
    d = kind.d - int(draw.choice([0, 8, 16]))
    lens: tuple[list[int], list[int]] | None = None
    if kind.packed:
        count = int(draw.integers(1, 6))
        lens = drawn_lengths(draw, count), drawn_lengths(draw, count)
        lens[0][0], lens[1][0] = max(lens[0][0], 1), max(lens[1][0], 1)
        shape = Shape(count, heads, max(lens[0]), max(lens[1]))
        rows: tuple[Any, Any] = (sum(lens[0]),), (sum(lens[1]),)
    else:
        seq_q, seq_k = (max(1, drawn_lengths(draw, 1)[0]) for _ in range(2))
        shape = Shape(int(draw.integers(1, 4)), heads, seq_q, seq_k)
        rows = (shape.batch, seq_q), (shape.batch, seq_k)
    bound = FUNCTIONS[kind.function](shape, draw, tensor).bound()
    dtype = torch.bfloat16 if kind.dtype is DType.BF16 else torch.float16
    shapes = (*rows[0], heads, d), *2 * [(*rows[1], heads_k, d)], (*rows[0], heads, d)
    q, k, v, do = (tensor(draw.standard_normal(it).astype(np.float32)).to(dtype) for it in shapes)
    sinks = tensor(draw.standard_normal(heads).astype(np.float32)) if draw.random() < 0.3 else None
    window = (int(draw.integers(0, 300)), int(draw.integers(0, 50)))
    options: dict[str, Any] = {
        "causal": kind.mask == "causal",
        "window": window if kind.mask == "window" else (None, None),
        "softcap": 20.0 if kind.softcap else 0.0,
    }
    packed: dict[str, Any] = {}
    if lens is not None:
        packed = {
            f"cu_seqlens_{x}": tensor(offsets(tuple(n))) for x, n in zip("qk", lens, strict=True)
        }
        packed |= {f"max_seqlen_{x}": max(n) for x, n in zip("qk", lens, strict=True)}
    attention = Attention(
        d**-0.5,
        **options,
        lens_q=None if lens is None else tuple(lens[0]),
        lens_k=None if lens is None else tuple(lens[1]),
        program=bound._replace(tensors=tuple(map(_numpy, bound.tensors))),
    )
    host = dict(zip(("q", "k", "v", "do"), map(_numpy, (q, k, v, do)), strict=True))
    logits = None if sinks is None else _numpy(sinks)
    exact = references_of(attention, host["q"], host["k"], host["v"], logits, on_gpu=True)
    host |= {"o": exact.o.astype(host["q"].dtype), "lse": exact.lse.astype(np.float32)}
    if logits is not None:
        host["sinks"] = logits
    sequences = _sequences(shape, lens)
    expected = compute_gradients(host, attention, sequences, exact.o, exact.lse, on_gpu=True)
    o = tensor(host["o"].astype(np.float32)).to(dtype)
    asked = BackwardOptions(
        ForwardOptions(**options, **packed, sinks=sinks, program=bound),
        deterministic=one.deterministic,
    )
    given = do, q, k, v, o, tensor(host["lse"])
    config = one.config(query_gpu(0))
    found, again = (run_backward(config, given, asked, False) for _ in range(2))
    names = [name for name, it in found._asdict().items() if it is not None]
    outputs = {name: _numpy(getattr(found, name)) for name in names}
    compared = compare_gradients(kind.dtype, outputs, expected.only(names))
    reasons = list(map(str, compared.reasons))
    repeatable = names if one.deterministic else [name for name in names if name != "dq"]
    reasons += [
        f"{name}: a second call has other bits"
        for name in repeatable
        if not torch.equal(getattr(found, name).nan_to_num(), getattr(again, name).nan_to_num())
    ]
    where = f"{one} {shape} heads_k={heads_k} d={d} {options} {lens}"
    return f"{where}: {'; '.join(reasons)}" if reasons else ""


def _sequences(shape: Shape, lens: tuple[list[int], list[int]] | None) -> list[Rows]:
    if lens is None:
        both = slice(0, shape.seq_q), slice(0, shape.seq_k)
        return [Rows(batch, *both) for batch in range(shape.batch)]
    starts = (itertools.pairwise(offsets(tuple(it)).tolist()) for it in lens)
    return [Rows(None, slice(*q), slice(*k)) for q, k in zip(*starts, strict=True)]


def check(problems: int, seed: int) -> int:
    kinds, wrong = checked_kinds(), 0
    for number in range(problems):
        said = check_one(kinds[number % len(kinds)], np.random.default_rng((seed, number)))
        if said:
            wrong += 1
            print(f"WRONG {number}: {said}", flush=True)
    print(f"{problems} problems of {len(kinds)} kinds of kernels, {wrong} wrong", flush=True)
    return int(wrong > 0)


# --- speed ---------------------------------------------------------------------------------------


class Timed:
    """A case's tensors on the GPU, its functions, and its contenders."""

    def __init__(self, case: Case) -> None:
        import torch

        self.case, draw = case, np.random.default_rng(7)
        torch.manual_seed(7)
        dtype = torch.bfloat16 if case.kind.dtype is DType.BF16 else torch.float16
        self.q, self.k, self.v, self.do = (
            torch.randn(case.batch, case.seq, heads, case.kind.d, dtype=dtype, device="cuda")
            for heads in (case.heads, case.heads_k, case.heads_k, case.heads)
        )
        shape = Shape(case.batch, case.heads, case.seq, case.seq)
        self.lengths: list[int] = []
        if case.kind.function == "documents":
            cuts = np.sort(draw.choice(np.arange(1, case.seq), DOCUMENTS - 1, replace=False))
            self.lengths = np.diff([0, *cuts, case.seq]).tolist()
            owner = np.repeat(np.arange(DOCUMENTS, dtype=np.int32), self.lengths)[None]
            doc = torch.from_numpy(owner).cuda()
            self.functions = Functions(mask=lambda b, h, q, k: doc[b, q] == doc[b, k])
        else:
            make = FUNCTIONS[case.kind.function]
            self.functions = make(shape, draw, lambda it: torch.from_numpy(it).cuda())

    def ours(self, *, function: bool = True) -> Callable[[], Any]:
        import torch

        case = self.case
        given: dict[str, Any] = {"causal": case.kind.mask == "causal"}
        tensors = self.do, self.q, self.k, self.v
        if function:
            given["program"] = self.functions.bound()
        elif case.plain == "packed":
            cu = torch.from_numpy(offsets(tuple(self.lengths))).cuda()
            longest = max(self.lengths)
            given |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
            given |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
            tensors = tuple(it[0] for it in tensors)
        else:
            given["softcap"] = 30.0 if case.plain == "softcap" else 0.0
        do, *qkv = tensors
        options = ForwardOptions(**given, return_lse=True)
        o, lse = run_call(choose_config, (*qkv, None), options, False, "out")
        asked = BackwardOptions(options, needs=(True, True, True, False))
        return lambda: run_backward(choose_config, (do, *qkv, o, lse), asked, False)[:3]

    def flex(self) -> Callable[[], Any]:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        causal, mask, seq = self.case.kind.mask == "causal", self.functions.mask, self.case.seq

        def sees(b: Any, h: Any, q: Any, k: Any) -> Any:
            seen = q >= k
            return seen if mask is None else seen & mask(b, h, q, k)

        mask_mod, block_mask = sees if causal else mask, None
        if mask_mod is not None:
            made = torch.compile(create_block_mask)
            block_mask = made(mask_mod, None, None, seq, seq, device="cuda")
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, mode="max-autotune-no-cudagraphs", dynamic=False)
        own = [it.transpose(1, 2).detach().requires_grad_() for it in (self.q, self.k, self.v)]
        o = compiled(
            *own,
            score_mod=self.functions.score,
            block_mask=block_mask,
            enable_gqa=self.case.heads != self.case.heads_k,
        )
        do = self.do.transpose(1, 2)

        def launch() -> Any:
            found = torch.autograd.grad(o, own, do, retain_graph=True)
            return tuple(it.transpose(1, 2) for it in found)

        return launch

    def why_wrong(self, found: Any, *, function: bool = True) -> str:
        """Compares the gradients of the first key head with autograd in float64."""
        import torch

        case, group = self.case, self.case.heads // self.case.heads_k
        if found[0].dim() == 3:  # packed
            found = tuple(it[None] for it in found)
        at = torch.arange(case.seq, device="cuda")
        q, k = at[:, None], at[None]
        own_k, own_v = (it[0, :, 0].double().requires_grad_() for it in (self.k, self.v))
        expected = [[], 0, 0]
        for h in range(group):
            own_q = self.q[0, :, h].double().requires_grad_()
            scores = own_q @ own_k.T * case.kind.d**-0.5
            where = torch.tensor(0, device="cuda"), torch.tensor(h, device="cuda"), q, k
            if function and self.functions.score is not None:
                scores = self.functions.score(scores, *where)
            elif case.plain == "softcap":
                scores = 30.0 * torch.tanh(scores / 30.0)
            seen = k <= q if case.kind.mask == "causal" else torch.ones_like(k <= q)
            if self.functions.mask is not None:
                seen = seen & self.functions.mask(*where)
            o = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ own_v
            dq, dk, dv = torch.autograd.grad(o, (own_q, own_k, own_v), self.do[0, :, h].double())
            expected[0].append(dq)
            expected[1], expected[2] = expected[1] + dk, expected[2] + dv
        exact = torch.stack(expected[0], 1), expected[1], expected[2]
        ours = found[0][0, :, :group], found[1][0, :, 0], found[2][0, :, 0]
        errors = [
            float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True)
        ]
        return "" if max(errors) < 1e-2 else f"relative L2 errors {errors}"

    def contenders(self, *, peer: bool) -> list[Contender]:
        made = {"function": (self.ours(), True), "plain": (self.ours(function=False), False)}
        if peer:
            made["FlexAttention"] = self.flex(), True

        def checked(launch: Callable[[], Any], function: bool) -> Callable[[], str]:
            return lambda: self.why_wrong(launch(), function=function)

        return [Contender(name, it, checked(it, of)) for name, (it, of) in made.items()]

    def flop(self) -> int:
        case = self.case
        lengths = self.lengths or [case.seq] * case.batch
        causal = case.kind.mask == "causal"
        pairs = sum(n * (n + 1) // 2 if causal else n * n for n in lengths)
        return 10 * case.kind.d * case.heads * pairs


def time_all(path: Path, rounds: int, *, peer: bool, only: str) -> int:
    wrong = 0
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("case", "contender", "round", "ms", "tflops"))
        for case in timed_cases():
            if only not in case.name:
                continue
            timed = Timed(case)
            alternating = AlternatingRounds(timed.contenders(peer=peer))
            for name, why in alternating.wrong.items():
                wrong += 1
                print(f"WRONG {case.name}: {name}: {why}", flush=True)
            times: dict[str, list[float]] = defaultdict(list)
            for number in range(rounds):
                for name, samples in alternating.round(ROUND).items():
                    ms = samples.median_ms
                    times[name].append(ms)
                    tflops = timed.flop() / ms / 1e9
                    rows.writerow((case.name, name, number, f"{ms:.6f}", f"{tflops:.1f}"))
            file.flush()
            _say(case, times, timed.flop())
    return int(wrong > 0)


def _say(case: Case, times: dict[str, list[float]], flop: int) -> None:
    ours = times.get("function", [])
    for name, ms in times.items():
        share = ""
        if ours and name != "function":
            ratio = PooledFigure.of([other / own for own, other in zip(ours, ms, strict=True)])
            share = f"  function is {ratio:.3f} times as fast"
        median = statistics.median(ms)
        print(f"{case.name:24} {name:14} {median:.4f} ms {flop / median / 1e9:6.1f}{share}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="compile what the other commands need")
    building.add_argument("--jobs", type=int, default=2, help="libraries compiled at a time")
    checked = commands.add_parser("check", help="compare random problems with float64")
    checked.add_argument("--problems", type=int, default=200)
    checked.add_argument("--seed", type=int, default=0)
    timed = commands.add_parser("time", help="time cases alternately")
    timed.add_argument("rows", type=Path, help="the CSV file to write")
    timed.add_argument("--rounds", type=int, default=7)
    timed.add_argument("--peer", action="store_true", help="with FlexAttention, max-autotune")
    timed.add_argument("--only", default="", help="only cases whose name contains this")
    args = parser.parse_args()
    if args.command == "build":
        return build(device_spec(GPU), args.jobs)
    if args.command == "check":
        return check(args.problems, args.seed)
    return time_all(args.rows, args.rounds, peer=args.peer, only=args.only)


if __name__ == "__main__":
    sys.exit(main())
