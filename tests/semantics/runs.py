"""Small problems for one semantics, and runs of them in the emulator or on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from built_kernels import built

from flashsmith.families import KernelConfig, Semantics
from flashsmith.runtime import ForwardResult, query_gpu, run_forward
from flashsmith.runtime.frameworks.device_array import DeviceArray
from flashsmith.verify import Inputs, InputSpec, make_inputs
from flashsmith.verify.attention_semantics import Lens, offsets
from flashsmith.verify.proof_inputs import default_scale

LENS_Q, LENS_K = (37, 0, 130, 45), (50, 20, 70, 0)
HEADS, HEADS_K = 4, 2


def options_for(semantics: Semantics) -> dict[str, Any]:
    """forward() keywords that want these semantics."""
    window = (40, 9) if semantics.mask == "window" else (None, None)
    softcap = 20.0 if semantics.softcap else 0.0
    return {"causal": semantics.mask == "causal", "window": window, "softcap": softcap}


@dataclass(frozen=True)
class Run:
    """One problem for one kernel: dense, batch 3, or packed."""

    config: KernelConfig
    semantics: Semantics
    inputs: Inputs
    lens_q: Lens | None
    lens_k: Lens | None

    def __call__(self, on_gpu: bool = False, **changes: Any) -> dict[str, np.ndarray]:
        """Runs it; o, lse and row_max on the host."""
        place = DeviceArray.from_host if on_gpu else np.array
        result = self.raw(place, **changes)
        outputs = {"o": result.o, "lse": result.lse, "row_max": result.row_max}
        return {name: x.to_host() if on_gpu else x for name, x in outputs.items()}

    def raw(self, place: Any = np.array, **changes: Any) -> ForwardResult:
        """The same, with everything that the runtime returns; ``changes`` are keywords' values."""
        assert self.inputs.sinks is not None
        call = options_for(self.semantics) | {"sinks": place(self.inputs.sinks)}
        if self.lens_q is not None and self.lens_k is not None:
            call |= {
                "cu_seqlens_q": place(offsets(self.lens_q)),
                "cu_seqlens_k": place(offsets(self.lens_k)),
            }
        if place is np.array:
            call["emulate"] = True
        tensors = (place(self.inputs.q), place(self.inputs.k), place(self.inputs.v))
        call |= {"return_lse": True, "return_row_max": True, "poisoned": True}
        return run_forward(self.config, *tensors, **call | changes)

    def filled(self, keep: int, value: float) -> Run:
        """The same with every sequence's q, k and v but ``keep``'s full of ``value``."""
        arrays = {name: np.array(getattr(self.inputs, name)) for name in ("q", "k", "v")}
        for name, array in arrays.items():
            others = np.ones(array.shape[0], bool)
            others[self.rows(keep, name)] = False
            array[others] = value
        return replace(self, inputs=replace(self.inputs, **arrays))

    def alone(self, sequence: int) -> Run:
        """One sequence of it as a problem of its own."""
        arrays = {
            name: np.array(getattr(self.inputs, name)[self.rows(sequence, name)])
            for name in ("q", "k", "v")
        }
        lens = {}
        if self.lens_q is not None and self.lens_k is not None:
            lens = {"lens_q": (self.lens_q[sequence],), "lens_k": (self.lens_k[sequence],)}
        return replace(self, inputs=replace(self.inputs, **arrays), **lens)

    def rows(self, sequence: int, name: str) -> slice:
        """Where a sequence lies along the first dimension of q, k or v: batch, or packed rows."""
        lens = self.lens_q if name == "q" else self.lens_k
        if lens is None:
            return slice(sequence, sequence + 1)
        begin, end = offsets(lens)[sequence : sequence + 2].tolist()
        return slice(begin, end)

    def part(self, outputs: dict[str, np.ndarray], sequence: int) -> dict[str, bytes]:
        """One sequence's share of the outputs, bit by bit."""
        rows = self.rows(sequence, "q")
        statistics = (slice(None), rows) if self.lens_q is not None else rows
        return {
            name: array[rows if name == "o" else statistics].tobytes()
            for name, array in outputs.items()
        }


def run_for(semantics: Semantics, on_gpu: bool = False, config: Any = None, seed: int = 5) -> Run:
    """A small problem with grouped heads and sinks for a kernel of these semantics."""
    if config is None:
        configs = built(semantics, query_gpu(0).arch if on_gpu else 80)
        config = min(configs, key=lambda known: known.d_head)
    d = config.d_head - 8 if semantics.uneven else config.d_head
    seq_q, seq_k = (75, 90) if semantics.uneven else (config.B_r, 2 * config.B_c)
    lens_q, lens_k = (LENS_Q, LENS_K) if semantics.packed else (None, None)
    spec = InputSpec(
        "random", config.dtype, 3, seq_q, seq_k, HEADS, d, default_scale(d), seed,
        heads_k=HEADS_K, lens_q=lens_q, lens_k=lens_k, sinks=True,
    )  # fmt: skip
    return Run(config, semantics, make_inputs(spec), lens_q, lens_k)


def keywords(run: Run, place: Callable[[np.ndarray], Any] = np.array) -> dict[str, Any]:
    """Everything but the tensors, where ``place`` puts it, for a call of run_forward()."""
    call = options_for(run.semantics) | {"sinks": place(run.inputs.sinks)}
    if run.lens_q is not None and run.lens_k is not None:
        for side, lens in (("q", run.lens_q), ("k", run.lens_k)):
            cu_seqlens = np.cumsum([0, *lens], dtype=np.int32)
            call |= {f"cu_seqlens_{side}": place(cu_seqlens), f"max_seqlen_{side}": max(lens)}
    return call if place is not np.array else call | {"emulate": True}
