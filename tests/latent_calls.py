"""Calls of attention over a latent cache with score and mask functions, and float64 results of the
functions themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

import flashsmith
from flashsmith import masks
from flashsmith.chooser.functions import CacheSizes, CallFunctions, bound_over_cache
from flashsmith.families import KernelConfig, Semantics, device_spec
from flashsmith.families import parse_kernel_name_into_config as parse_config
from flashsmith.runtime.kernel_choice import check_server
from flashsmith.runtime.latent_pass import LatentOptions, LatentTensors, check_latent_request
from flashsmith.runtime.libraries import LoadedKernel, loaded_kernels
from flashsmith.runtime.prepared_call import prepare
from ptxlab.interface import Observer

D, V_WIDTH, HEADS, PAGE, CAPACITY, SCALE = 320, 256, 6, 24, 480, 192**-0.5
PLAIN = parse_config("(FP16, 320:256, 32): latent_mma+stages_3+least_128+parts_4+lazy")
CODES = replace(PLAIN, cache=next(it for it in type(PLAIN.cache) if it.label == "e4m3"))
K_SCALE = 0.4
Function = Callable[..., Any]


@dataclass
class LatentCache:
    """Sequences with latent rows, and queries at the end of each. Appended rows are the queries'
    own. ``coded``: the cache has 8-bit floats and a scale."""

    lens: tuple[int, ...]
    queries: tuple[int, ...]
    seed: int = 0
    coded: bool = False

    def __post_init__(self) -> None:
        draw = self.draw = np.random.default_rng(self.seed)
        rows = draw.standard_normal((len(self.lens), CAPACITY, 1, D)).astype(np.float16)
        self.stored = rows.astype(ml_dtypes.float8_e4m3fn) if self.coded else rows
        self.q = [draw.standard_normal((n, HEADS, D)).astype(np.float16) for n in self.queries]

    def call(self, *, paged: bool, append: bool) -> dict[str, Any]:
        """The tensors of a call; what the cache does not hold yet is NaN."""
        cache = self.stored.copy()
        held = np.array(self.lens) - np.array(self.queries) * append
        cache[np.arange(CAPACITY) >= held[:, None]] = np.nan
        call: dict[str, Any] = {"cache_lens": held.astype(np.int32)}
        if paged:
            order = self.draw.permutation(len(self.lens) * CAPACITY // PAGE)
            cache = cache.reshape(-1, PAGE, 1, D)[order]
            call["page_table"] = np.argsort(order).astype(np.int32).reshape(len(self.lens), -1)
        call["k_cache"] = cache
        packed = len(set(self.queries)) > 1
        join = np.concatenate if packed else np.stack
        call["q"] = join(self.q)
        if packed:
            call["cu_seqlens_q"] = np.cumsum([0, *self.queries]).astype(np.int32)
        if append:
            ends = zip(self.stored, self.lens, self.queries, strict=True)
            new = join([rows[end - n : end] for rows, end, n in ends]).astype(np.float32)
            call["k"] = (new * self.factor).astype(np.float16)
        return call

    @property
    def factor(self) -> float:
        """What the stored rows are multiplied by."""
        return K_SCALE if self.coded else 1.0

    def split(self, o: np.ndarray) -> list[np.ndarray]:
        """The rows of each sequence."""
        return list(o) if o.ndim == 4 else np.split(o, np.cumsum(self.queries)[:-1])

    def expected(
        self, score: Function | None, mask: Function | None, *, causal: bool
    ) -> list[np.ndarray]:
        """The outputs of each sequence in float64, from the functions themselves."""
        found = []
        for b, (length, n) in enumerate(zip(self.lens, self.queries, strict=True)):
            rows, keys = length - n + np.arange(n)[:, None], np.arange(length)
            latent = self.stored[b, :length, 0].astype(float) * self.factor
            o = np.zeros((n, HEADS, V_WIDTH))
            for h in range(HEADS):
                s = self.q[b][:, h].astype(float) @ latent.T * SCALE
                s = s if score is None else score(s, b, h, rows, keys)
                seen = (keys <= rows) | (not causal)
                seen = seen if mask is None else seen & mask(b, h, rows, keys)
                s = np.where(seen, s, -np.inf)
                weights = np.exp(s - s.max(axis=1, keepdims=True, initial=-1e30))
                total = weights.sum(axis=1, keepdims=True)
                o[:, h] = weights @ latent[:, :V_WIDTH] / np.where(total > 0, total, 1)
            found.append(o)
        return found


def curved_in_documents(cache: LatentCache) -> tuple[Function, Function]:
    """A score that is not linear in the score before, in documents; of every second sequence a
    document begins at each key."""
    slopes = cache.draw.uniform(-0.1, 0.3, HEADS).astype(np.float32)
    ids = np.sort(cache.draw.integers(0, 4, (len(cache.lens), CAPACITY)), axis=1)
    ids[::2] = np.arange(CAPACITY)

    def curved(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + 0.1 * s * s - slopes[h] * (q - k) * (q - k) / 512

    return curved, masks.documents(ids.astype(np.int32))


def run(cache: LatentCache, *, paged: bool, append: bool, **asked: Any) -> list[np.ndarray]:
    """The outputs of each sequence, from attention_with_cache()."""
    asked = {"v_width": V_WIDTH, "scale": SCALE, "emulate": True, **asked}
    if cache.coded:
        asked["k_scale"] = K_SCALE
    call = cache.call(paged=paged, append=append)
    return cache.split(flashsmith.attention_with_cache(**call, **asked))


@dataclass(frozen=True)
class LatentEmulation:
    """A kernel of a config for calls with functions, on a small GPU. ``scale_as_tensor``: the
    cache's scale is in a tensor."""

    config: KernelConfig
    score: Function | None
    mask: Function | None
    causal: bool = True
    packed: bool = False
    scale_as_tensor: bool = False

    @property
    def options(self) -> LatentOptions:
        functions = CallFunctions(self.score, None, self.mask)
        limits = self.causal, (None, None)
        bound, causal, window = bound_over_cache(functions, limits, CacheSizes())
        number = K_SCALE if self.config.cache and not self.scale_as_tensor else None
        return LatentOptions(
            *(V_WIDTH, causal, window, SCALE, None, "invariant", False, bound, number)
        )

    @property
    def semantics(self) -> Semantics:
        options = self.options
        mask = "causal" if options.causal else "none"
        program = options.program.program
        return Semantics(mask, packed=self.packed, uneven=True, program=program)

    @property
    def kernel(self) -> LoadedKernel:
        return loaded_kernels.get(self.config, 80, self.semantics)

    def wrong(
        self,
        cache: LatentCache,
        *,
        paged: bool = True,
        append: bool = True,
        observers: Sequence[Observer] = (),
        changed: LoadedKernel | None = None,
    ) -> str:
        """What is wrong with the outputs, which are NaN before; '' if nothing is."""
        call = cache.call(paged=paged, append=append)
        if self.scale_as_tensor:
            call["k_scale"] = np.array(K_SCALE, np.float32)
        request = check_latent_request(LatentTensors(**call), self.options)
        device = replace(device_spec(80), sm_count=4)
        check_server(self.config, request.problem, device)
        kernel = changed or self.kernel
        result = prepare(request, device, lambda: kernel, poisoned=True).run(observers, None)
        findings = [it for one in observers for it in getattr(one, "findings", ())]
        if findings:
            return str(findings[0])
        expected = cache.expected(self.score, self.mask, causal=self.causal)
        found = zip(cache.split(result.outputs["o"]), expected, strict=True)
        for i, (got, want) in enumerate(found):
            error = np.abs(got - want).max(initial=0.0)
            if not error <= 3e-3:
                return f"o of sequence {i}: an error of {error}"
        return ""
