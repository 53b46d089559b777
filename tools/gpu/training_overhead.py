#!/usr/bin/env python3
"""Measures how long the host takes for a forward pass and autograd.grad, against PyTorch with
cuDNN.

Prints and writes a JSON object with microseconds.

    python tools/gpu/training_overhead.py times.json --limit-ratio 1.2
    python tools/gpu/training_overhead.py times.json --pretend    # no GPU: launches do nothing

Contenders alternate in short bursts, each followed by a synchronisation, so that none waits for
space in the launch queue. With --limit-ratio, the exit status is 1 if our time divided by that of
cuDNN is larger. On a GPU, every output is compared with float64 first. A contender with a wrong
output gets no time, and the exit status is 1.

PyTorch computes gradients on a GPU in a separate thread for this GPU. Rows "in a thread" use such a
thread without a GPU; most of their time is for waking it. "bare" is an autograd.Function in Python
that allocates and saves as much as ours, and does nothing else. "spread" is the 10th and 90th
percentile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pretended_gpu import pretended_gpu
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashsmith
from flashsmith.verify.tolerance import why_over

# How many calls a burst has; and how many of them are not counted at its beginning, when the GPU is
# idle and caches are cold.
BURST, COLD = 12, 2
WARM_UP = 5
BATCH, SEQ, HEADS, D = 1, 128, 2, 128


# The largest error relative to the largest output; the unit roundoff of bf16 is 2^-9.
MOST_ERROR = 2.0**-6
# The bytes of workspaces that a kernel needs for the problem below: fp32 sums of dq and two
# statistics.
BLOCK_BYTES = 4 * (128 * 2 * 128 + 2 * 2 * 128)


class Bare(torch.autograd.Function):
    """An autograd.Function that does nothing, which shows what gradients cost in Python at
    least."""

    @staticmethod
    def forward(q: Any, k: Any, v: Any) -> Any:
        return torch.empty_like(q), q.new_empty(BATCH, HEADS, SEQ, dtype=torch.float32)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> Any:
        q, k, v, _o, _lse = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class Elsewhere:
    """Runs functions in another thread and waits for their results; the thread sleeps in
    between."""

    def __init__(self) -> None:
        self._go, self._done = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._done.acquire()
        self._job: Any = None
        threading.Thread(target=self._work, daemon=True).start()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._job = function, arguments
        self._go.release()
        self._done.acquire()
        return self._job

    def _work(self) -> None:
        while True:
            self._go.acquire()
            function, arguments = self._job
            self._job = function(*arguments)
            del function, arguments
            self._done.release()


def drawn(device: str) -> list[Any]:
    """q, k, v and do of a problem so small that kernels finish before the next call launches."""
    shape = (BATCH, SEQ, HEADS, D)
    return [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4)]


def contenders(tensors: Sequence[Any]) -> dict[str, Callable[[], Any]]:
    """Calls which return o, or dq, dk and dv."""
    q, k, v, do = tensors
    device = q.device.type
    o, lse = flashsmith.attention(q, k, v, causal=True, return_lse=True)
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    theirs = [leaf.detach().transpose(1, 2).contiguous().requires_grad_() for leaf in leaves]
    their_do = do.transpose(1, 2).contiguous()
    ours = partial(flashsmith.attention, causal=True)
    sdpa = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    bare = super(torch.autograd.Function, Bare).apply  # Without the binding of arguments
    grad, elsewhere = torch.autograd.grad, Elsewhere()
    in_a_thread: dict[str, Callable[[], Any]] = {
        "both, in a thread": lambda: elsewhere(grad, ours(*leaves), leaves, do),
        "bare both, in a thread": lambda: elsewhere(grad, bare(*leaves)[0], leaves, do),
    }
    return {
        "forward, no gradients": partial(ours, q, k, v),
        "forward": partial(ours, *leaves),
        "backward()": partial(flashsmith.backward, do, q, k, v, o, lse, causal=True),
        "both": lambda: grad(ours(*leaves), leaves, do),
        "both, repeatable": lambda: grad(ours(*leaves, deterministic=True), leaves, do),
        "bare both": lambda: grad(bare(*leaves)[0], leaves, do),
        "cuDNN forward": lambda: sdpa(*theirs),
        "cuDNN both": lambda: grad(sdpa(*theirs), theirs, their_do),
        **(in_a_thread if device == "cpu" else {}),
    }


def exactly(tensors: Sequence[Any]) -> list[Any]:
    """o, dq, dk and dv in float64."""
    q, k, v, do = (it.double().transpose(1, 2) for it in tensors)
    leaves = [it.requires_grad_() for it in (q, k, v)]
    hidden = torch.ones(SEQ, SEQ, dtype=torch.bool, device=q.device).triu(1)
    scores = (leaves[0] @ leaves[1].transpose(2, 3) * D**-0.5).masked_fill(hidden, -torch.inf)
    o = scores.softmax(3) @ leaves[2]
    return [it.transpose(1, 2) for it in (o.detach(), *torch.autograd.grad(o, leaves, do))]


def wrong(runs: dict[str, Callable[[], Any]], tensors: Sequence[Any]) -> dict[str, str]:
    """The contenders with wrong outputs, and why; they are compared with attention() and float64.

    "bare" computes nothing and is never wrong.
    """
    names, right = ("o", "dq", "dk", "dv"), exactly(tensors)

    def errors(name: str) -> dict[str, float]:
        found = runs[name]()
        if isinstance(found, torch.Tensor):
            found = (found,)
        outputs = names[:1] if len(found) == 1 else names[1:]
        if name.startswith("cuDNN"):
            found = [it.transpose(1, 2) for it in found]
        return {
            output: float((it.double() - right[names.index(output)]).abs().max())
            for output, it in zip(outputs, found, strict=False)
        }

    ours = errors("forward") | errors("both")
    scale = dict(zip(names, (float(it.abs().max()) for it in right), strict=True))
    why = {
        name: f"{output}: error {error:.3g}"
        for name in ("forward", "both")
        for output, error in errors(name).items()
        if not error <= MOST_ERROR * scale[output]
    }
    for name in runs:
        if "bare" not in name and name not in why:
            theirs = errors(name)
            if said := "; ".join(why_over(theirs, {output: ours[output] for output in theirs})):
                why[name] = said
    return why


def measure(runs: dict[str, Callable[[], Any]], turns: int, wait: Callable[[], None]) -> Any:
    """The median microseconds of each contender, and our time divided by that of cuDNN if there are
    both."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-WARM_UP, turns):
        for name, run in runs.items():
            for call in range(BURST):
                start = time.perf_counter_ns()
                run()
                spent = (time.perf_counter_ns() - start) / 1000
                if turn >= 0 and call >= COLD:
                    times[name].append(spent)
            wait()
    medians = {name: round(statistics.median(spent), 2) for name, spent in times.items()}
    spread = {
        name: [round(tenths[0], 2), round(tenths[-1], 2)]
        for name, tenths in ((it, statistics.quantiles(times[it], n=10)) for it in times)
    }
    both = [medians.get(name) for name in ("both", "cuDNN both")]
    ratio = {"ratio": round(both[0] / both[1], 3)} if all(both) else {}
    return medians | ratio | {"spread": spread}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the JSON file to write")
    parser.add_argument("--pretend", action="store_true", help="on the host; launches do nothing")
    parser.add_argument("--turns", type=int, default=60, help="timed bursts of each")
    parser.add_argument("--limit-ratio", type=float, default=float("inf"), help="fail above this")
    options = parser.parse_args()
    if options.pretend:
        torch.set_num_threads(1)  # More threads would only delay the peer
        with pretended_gpu() as pretended:
            import tvm_ffi

            pretended.launcher = tvm_ffi.get_global_func("testing.nop")
            pretended.block_bytes = BLOCK_BYTES
            found = measure(contenders(drawn("cpu")), options.turns, lambda: None)
        found |= {"gpu": "pretended", "peer": "PyTorch on the host"}
    else:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            tensors = drawn("cuda")
            runs = contenders(tensors)
            bad = wrong(runs, tensors)
            right = {name: run for name, run in runs.items() if name not in bad}
            found = measure(right, options.turns, torch.cuda.synchronize)
        found |= {"gpu": torch.cuda.get_device_name(), "peer": "cuDNN"}
        found |= {"wrong": bad} if bad else {}
    found["torch"] = torch.__version__
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return int("wrong" in found or found["ratio"] > options.limit_ratio)


if __name__ == "__main__":
    sys.exit(main())
