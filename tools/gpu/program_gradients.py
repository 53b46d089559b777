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

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from program_cases import CHECKED, FUNCTIONS, Case, DrawnProblem, Kind, as_numpy, on_gpu
from program_races import GPU, OURS, Race, TimedCase, build, check, parsed, time_races, wanted_cases

from flashsmith.chooser.choice import choose_config
from flashsmith.families import DeviceSpec, DType, Semantics, device_spec
from flashsmith.runtime import ForwardOptions, query_gpu, run_backward, run_call
from flashsmith.semantics.signature import BackwardOptions
from flashsmith.verify.attention_semantics import offsets
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


def kernels(device: DeviceSpec) -> Iterator[tuple[Any, Semantics]]:
    """The kernels of all checked kinds and timed cases, with what they are timed against."""
    for one in checked_kinds():
        yield one.config(device), one.kind.problem(*CHECKED).semantics
    for case in timed_cases():
        problem = case.kind.problem(*case.sizes)
        for it in (problem.of_operation("backward", ""), problem):
            yield choose_config(it, device), problem.semantics
        plain = case.without_function().of_operation("backward", "")
        config = choose_config(plain, device)
        yield config, plain.required_semantics(config)


def check_one(one: Checked, draw: np.random.Generator) -> str:
    """What is wrong in one drawn problem; '' if nothing is."""
    import torch

    drawn = DrawnProblem(one.kind, draw, ("q", "k", "v", "do"))
    attention = drawn.attention()
    host = {name: as_numpy(it) for name, it in drawn.tensors.items()}
    logits = None if drawn.sinks is None else as_numpy(drawn.sinks)
    exact = references_of(attention, host["q"], host["k"], host["v"], logits, on_gpu=True)
    host |= {"o": exact.o.astype(host["q"].dtype), "lse": exact.lse.astype(np.float32)}
    if logits is not None:
        host["sinks"] = logits
    expected = compute_gradients(
        host, attention, _sequences(drawn), exact.o, exact.lse, on_gpu=True
    )
    asked = BackwardOptions(
        ForwardOptions(**drawn.options, **drawn.packing, sinks=drawn.sinks, program=drawn.bound),
        deterministic=one.deterministic,
    )
    q, k, v, do = drawn.tensors.values()
    given = do, q, k, v, drawn.of_dtype(host["o"]), on_gpu(host["lse"])
    config = one.config(query_gpu(0))
    found, again = (run_backward(config, given, asked, False) for _ in range(2))
    names = [name for name, it in found._asdict().items() if it is not None]
    outputs = {name: as_numpy(getattr(found, name)) for name in names}
    compared = compare_gradients(one.kind.dtype, outputs, expected.only(names))
    reasons = list(map(str, compared.reasons))
    repeatable = names if one.deterministic else [name for name in names if name != "dq"]
    reasons += [
        f"{name}: a second call has other bits"
        for name in repeatable
        if not torch.equal(getattr(found, name).nan_to_num(), getattr(again, name).nan_to_num())
    ]
    what = f"{drawn} deterministic={one.deterministic}"
    return f"{what}: {'; '.join(reasons)}" if reasons else ""


def _sequences(drawn: DrawnProblem) -> list[Rows]:
    if drawn.lens is None:
        both = slice(0, drawn.shape.seq_q), slice(0, drawn.shape.seq_k)
        return [Rows(batch, *both) for batch in range(drawn.shape.batch)]
    starts = (itertools.pairwise(offsets(it).tolist()) for it in drawn.lens)
    return [Rows(None, slice(*q), slice(*k)) for q, k in zip(*starts, strict=True)]


class BackwardCase(TimedCase):
    """A case's contenders for the backward pass."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, ("q", "k", "v", "do"))

    def ours(self, *, function: bool = True) -> Callable[[], Any]:
        *qkv, do = self.tensors.values()
        given: dict[str, Any] = {"causal": self.is_causal}
        if function:
            given["program"] = self.functions.bound()
        else:
            given = self.plain_options
            if self.case.plain == "packed":
                *qkv, do = (it[0] for it in self.tensors.values())
        options = ForwardOptions(**given, return_lse=True)
        o, lse = run_call(choose_config, (*qkv, None), options, False, "out")
        asked = BackwardOptions(options, needs=(True, True, True, False))
        return lambda: run_backward(choose_config, (do, *qkv, o, lse), asked, False)[:3]

    def flex(self, backend: str) -> Callable[[], Any]:
        import torch

        *qkv, do = (it.transpose(1, 2) for it in self.tensors.values())
        own = [it.detach().requires_grad_() for it in qkv]
        o = self.flex_attention(backend)(*own)

        def launch() -> Any:
            found = torch.autograd.grad(o, own, do, retain_graph=True)
            return tuple(it.transpose(1, 2) for it in found)

        return launch

    def why_wrong(self, found: Any, *, with_function: bool) -> str:
        """Compares the gradients of the first key head with autograd in float64."""
        import torch

        if found[0].dim() == 3:  # packed
            found = tuple(it[None] for it in found)
        all_q, all_k, all_v, all_do = self.tensors.values()
        rows = torch.arange(self.case.seq, device=all_q.device)
        own_k, own_v = (it[0, :, 0].double().requires_grad_() for it in (all_k, all_v))
        all_dq, total_dk, total_dv = [], 0, 0
        for h in range(self.group):
            own_q = all_q[0, :, h].double().requires_grad_()
            scores = own_q @ own_k.T * self.case.kind.d**-0.5
            scores = self.changed(scores, 0, h, rows, with_function=with_function)
            o = torch.softmax(scores, -1) @ own_v
            dq, dk, dv = torch.autograd.grad(o, (own_q, own_k, own_v), all_do[0, :, h].double())
            all_dq.append(dq)
            total_dk, total_dv = total_dk + dk, total_dv + dv
        exact = torch.stack(all_dq, 1), total_dk, total_dv
        ours = found[0][0, :, : self.group], found[1][0, :, 0], found[2][0, :, 0]
        errors = [
            float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True)
        ]
        return "" if max(errors) < 1e-2 else f"relative L2 errors {errors}"

    def contenders(self, *, peer: bool) -> Race:
        made = {OURS: (self.ours(), True), "plain": (self.ours(function=False), False)}
        if peer:
            made |= self.peers(self.flex)
        return self.race(10, made, self.why_wrong)


def main() -> int:
    args = parsed(__doc__ or "", others=False)
    if args.command == "build":
        device = device_spec(GPU)
        return build(kernels(device), device, args.jobs)
    if args.command == "check":
        return check(checked_kinds(), check_one, args.problems, args.seed)
    cases = wanted_cases(timed_cases(), args.only, args.rows)
    races = (BackwardCase(it).contenders(peer=args.peer) for it in cases)
    return time_races(args.rows, races, args.rounds)


if __name__ == "__main__":
    sys.exit(main())
