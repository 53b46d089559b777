#!/usr/bin/env python3
"""Score and mask functions on the GPU: right on random problems, and how fast.

    python tools/gpu/programs.py build             # compiles what the others need; needs no GPU
    python tools/gpu/programs.py check --problems 400 --seed 1
    python tools/gpu/programs.py time rows.csv --rounds 7 --peer

`check` draws problems (lengths, heads, packed sequences, sinks, functions) for a fixed set of
kernels and compares with float64. The exit status is 1 if one is wrong.

`time` times functions of each case alternately with the same attention without a function, with
built-in forms, and with --peer with FlexAttention: with Triton's kernels, max-autotune, and with
those of flash-attn-4, if it is installed. A peer that does not run is named and left out. All
outputs are first compared, on drawn rows, with the caller's function computed eagerly in float64.
There is a row for each case, contender and round. A run that was cut off continues with the cases
that the file lacks. TFLOP/s count visible pairs.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from program_cases import CHECKED, FUNCTIONS, Case, DrawnProblem, Kind, as_numpy
from program_races import GPU, OURS, Race, TimedCase, build, check, parsed, time_races, wanted_cases

from flashsmith.chooser.choice import choose, choose_config
from flashsmith.families import DeviceSpec, DType, Semantics, device_spec
from flashsmith.runtime import ForwardOptions, query_gpu, run_call
from flashsmith.verify.reference import references_of
from flashsmith.verify.tolerance import compare


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


def timed_cases() -> list[Case]:
    cases = []
    for d, heads, mask in itertools.product((128, 64), (16,), ("none", "causal")):
        for name in ("alibi", "squared", "table"):
            kind = Kind(name, d, mask=mask)
            cases.append(Case(f"{name} {mask} d{d}", kind, 2, 4096, heads, heads, "plain"))
        kind = Kind("softcap", d, mask=mask)
        cases.append(Case(f"softcap {mask} d{d}", kind, 2, 4096, heads, heads, "softcap"))
    for mask in ("none", "causal"):
        cases.append(Case(f"t5 {mask} d128", Kind("t5", 128, mask=mask), 2, 4096, 16, 16, "plain"))
    kind = Kind("documents", 128, mask="causal")
    cases.append(Case("documents causal 32k", kind, 1, 32768, 32, 8, "packed"))
    kind = Kind("alibi", 256)
    cases.append(Case("alibi none d256", kind, 2, 4096, 8, 8, "plain"))
    return cases


def other_configs(case: Case, device: DeviceSpec) -> list[Any]:
    """The configs that were not chosen for a case, the most promising first."""
    return [it.config for it in choose(case.kind.problem(*case.sizes), device).runners_up[:3]]


def kernels(device: DeviceSpec, *, others: bool) -> Iterator[tuple[Any, Semantics]]:
    """The kernels of all checked kinds and timed cases, with what they are timed against."""
    for kind in checked_kinds():
        yield kind.config(device), kind.problem(*CHECKED).semantics
    for case in timed_cases():
        problem = case.kind.problem(*case.sizes)
        yield choose_config(problem, device), problem.semantics
        if others:
            yield from ((it, problem.semantics) for it in other_configs(case, device))
        plain = case.without_function()
        config = choose_config(plain, device)
        yield config, plain.required_semantics(config)


def check_one(kind: Kind, draw: np.random.Generator) -> str:
    """What is wrong in one drawn problem; '' if nothing is."""
    import torch

    drawn = DrawnProblem(kind, draw, ("q", "k", "v"))
    q, k, v = drawn.tensors.values()
    asked = ForwardOptions(
        **drawn.options,
        **drawn.packing,
        sinks=drawn.sinks,
        return_lse=True,
        return_row_max=True,
        program=drawn.bound,
    )
    out = torch.full_like(q, torch.nan)
    config = kind.config(query_gpu(0))
    o, lse, row_max = run_call(config, (q, k, v, out), asked, False, "out")
    again, *_ = run_call(config, (q, k, v, None), asked, False, "out")
    attention = drawn.attention()
    logits = None if drawn.sinks is None else as_numpy(drawn.sinks)
    expected = references_of(attention, *map(as_numpy, (q, k, v)), logits, on_gpu=True)
    found = compare(
        kind.dtype,
        as_numpy(o),
        as_numpy(lse),
        expected,
        row_max=as_numpy(row_max),
        lens_q=attention.lens_q,
    )
    reasons = list(map(str, found.reasons))
    if not torch.equal(o.nan_to_num(), again.nan_to_num()):
        reasons.append("a second call has other bits")
    return f"{drawn}: {'; '.join(reasons)}" if reasons else ""


class ForwardCase(TimedCase):
    """A case's contenders for the forward pass."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, ("q", "k", "v"))

    def ours(self, config: Any = choose_config) -> Callable[[], Any]:
        options = ForwardOptions(causal=self.is_causal, program=self.functions.bound())
        tensors = *self.tensors.values(), None
        return lambda: run_call(config, tensors, options, False, "out")

    def plain(self) -> Callable[[], Any]:
        options, tensors = ForwardOptions(**self.plain_options), self.tensors.values()
        if self.case.plain != "packed":
            return lambda: run_call(choose_config, (*tensors, None), options, False, "out")
        flat = (*(it[0] for it in tensors), None)
        return lambda: run_call(choose_config, flat, options, False, "out")[None]

    def flex(self, backend: str) -> Callable[[], Any]:
        compiled = self.flex_attention(backend)
        q, k, v = (it.transpose(1, 2) for it in self.tensors.values())
        return lambda: compiled(q, k, v).transpose(1, 2)

    def why_wrong(self, found: Any, *, with_function: bool) -> str:
        """Compares 64 drawn rows of all heads with the function computed eagerly in float64."""
        import torch

        case, (all_q, all_k, all_v) = self.case, self.tensors.values()
        rows = torch.from_numpy(np.random.default_rng(1).choice(case.seq, 64, replace=False))
        rows, worst = rows.to(all_q.device), 0.0
        for b, h in itertools.product(range(case.batch), range(case.heads)):
            q, k, v = all_q[b, rows, h], all_k[b, :, h // self.group], all_v[b, :, h // self.group]
            scores = q.double() @ k.double().T * case.kind.d**-0.5
            scores = self.changed(scores, b, h, rows, with_function=with_function)
            expected = torch.softmax(scores, -1) @ v.double()
            error = (found[b, rows, h].double() - expected).norm() / expected.norm()
            worst = max(worst, float(error))
        return "" if worst < 6e-3 else f"relative L2 error {worst:.2e}"

    def contenders(self, *, peer: bool, others: bool) -> Race:
        made = {OURS: (self.ours(), True), "plain": (self.plain(), False)}
        if others:
            for config in other_configs(self.case, query_gpu(0)):
                made[str(config)] = self.ours(config), True
        if peer:
            made |= self.peers(self.flex)
        return self.race(4, made, self.why_wrong)


def main() -> int:
    args = parsed(__doc__ or "", others=True)
    if args.command == "build":
        device = device_spec(GPU)
        return build(kernels(device, others=args.others), device, args.jobs)
    if args.command == "check":
        return check(checked_kinds(), check_one, args.problems, args.seed)
    cases = wanted_cases(timed_cases(), args.only, args.rows)
    races = (ForwardCase(it).contenders(peer=args.peer, others=args.others) for it in cases)
    return time_races(args.rows, races, args.rounds)


if __name__ == "__main__":
    sys.exit(main())
