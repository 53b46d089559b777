"""Finds and builds the kernels that a serving engine can need, before the engine captures graphs.

A step's sizes are rounded up to powers of two. A layer therefore needs only a few kernels, all of
which are known when the engine starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from flashsmith.chooser.choice import choose_config
from flashsmith.chooser.decode import CHOOSERS
from flashsmith.families import DeviceSpec, KernelConfig, Problem, d_head_for, families
from flashsmith.families.device import device_spec
from flashsmith.families.legality import D_STEP
from flashsmith.operations import DEFAULT
from flashsmith.operations.decode import DECODE, FREE
from flashsmith.operations.latent_decode import LATENT_DECODE
from flashsmith.operations.merge import MERGE
from flashsmith.operations.write_slots import WRITE_SLOTS
from flashsmith.runtime.driver import query_gpu
from flashsmith.runtime.fallback_kernels import fallback_kernels
from flashsmith.runtime.kernel_choice import AS_FAST, DEFAULT_EMULATED_ARCH, Chooser
from flashsmith.runtime.libraries import Key, loaded_kernels
from flashsmith.runtime.tensors import DTYPES
from flashsmith.semantics.cache_format import CacheFormat
from flashsmith.semantics.compiled import Semantics
from flashsmith.semantics.dtype import DType, dtype_name
from flashsmith.semantics.signature import MaskLimits

_ROOMIEST = device_spec(90)


@dataclass
class LayerKernels:
    """The kernels of a layer's attention, over its cache or over a step's own keys.

    ``problem``: the layer's problem, of which the batch and the number of queries are ignored.
    ``split``: as in ``attention_with_cache``; used only for problems over a cache.
    """

    problem: Problem
    split: str
    device: DeviceSpec
    _configs: dict[tuple[int, int], KernelConfig] = field(default_factory=dict)

    def config_for(self, requests: int, queries: int) -> KernelConfig:
        """Returns the config for a step of ``requests`` requests, each of at most ``queries``
        tokens."""
        config = self._configs.get((requests, queries))
        if config is None:
            rounded = _power_of_two(requests), _power_of_two(queries)
            config = self._configs.get(rounded)
            if config is None:
                config = _chosen(self.problem, self.split, self.device, *rounded)
            self._configs[requests, queries] = config
        return config

    def load(self, most_requests: int, most_tokens: int) -> set[Key]:
        """Loads all kernels that a step can need, and returns their keys.

        Kernels are built if necessary and allowed. Otherwise another kernel, which is already
        built, serves from now on, as for calls without ``config``. Raises KernelNotBuiltError if
        there is none.
        """
        found: set[Key] = set()
        for sizes in itertools.product(_powers_to(most_requests), _powers_to(most_tokens)):
            problem = _sized(self.problem, *sizes)
            config = _load(problem, self.split, self.device, self.config_for(*sizes))
            self._configs[sizes] = config
            found.add((config, self.device.arch, problem.required_semantics(config)))
        return found


class _Step(NamedTuple):
    """A step whose sizes are known before its tensors exist. TMA can copy the tensors of all
    engines."""

    problem: Problem
    suits_tma: bool = True
    deterministic: bool = False


def unserved_head(
    d: int, device: DeviceSpec | None, *, canonical: bool = False, operation: str = DECODE.name
) -> str:
    """Returns why heads of dimension ``d`` cannot be served on a GPU, or '' if they can. If
    ``device`` is None, the limits of sm_90 apply, which are the largest.

    ``operation``: 'decode' for attention over caches, 'forward' for attention to a step's own keys.
    """
    limits = device or _ROOMIEST
    over = "over caches" if operation == DECODE.name else "of a step's own keys"
    where = "" if device is None else f" on {device.name}"
    configs: list[KernelConfig] = []
    for family in families(operation):
        d_head = next((known for known in family.knob_values["d_head"] if d <= known), None)
        if d_head is not None:
            configs += family.candidates(DType.FP16, d_head, limits, masked=True)
    if not configs:
        return f"head_size {d}{where} not supported: no kernel {over} fits"
    if canonical and all(it.family.canonical(it, limits) is None for it in configs):
        return (
            f"head_size {d} with batch invariance{where} not supported: no kernel {over} has "
            "canonical bits"
        )
    return ""


def cache_problem(
    *,
    heads: int,
    kv_heads: int,
    d: int,
    dtype: Any,
    mask: MaskLimits,
    softcap: float,
    page: int,
    keys: int,
    bits: str,
    cache: CacheFormat = CacheFormat.PLAIN,
) -> Problem:
    """Returns the problem of a layer whose cache has pages of ``page`` tokens and room for ``keys``
    keys per request. ``dtype`` is the framework's dtype of the queries; ``bits`` is as in
    ``attention_with_cache``."""
    semantics = Semantics(mask.kind, softcap > 0, packed=True, uneven=True)
    return Problem(
        *(1, 1, keys, heads, kv_heads, d),
        *(DTYPES[dtype_name(dtype) or ""], semantics, DECODE.name, page, "", mask.window_keys),
        *("" if bits == FREE else bits, cache.label),
    )


def latent_problem(
    *,
    heads: int,
    d: int,
    v_width: int,
    dtype: Any,
    page: int,
    keys: int,
    cache: CacheFormat = CacheFormat.PLAIN,
) -> Problem:
    """Returns the problem of a layer over latent rows of d columns, whose first v_width are values.
    Other arguments are as for ``cache_problem``."""
    return Problem(
        *(1, 1, keys, heads, 1, d, DTYPES[dtype_name(dtype) or ""]),
        Semantics("causal", packed=True, uneven=True),
        operation=LATENT_DECODE.name,
        page=page,
        cache=cache.label,
        d_v=v_width,
    )


def direct_problem(
    *,
    heads: int,
    kv_heads: int,
    d: int,
    dtype: Any,
    mask: MaskLimits,
    softcap: float,
    bits: str,
    d_v: int = 0,
) -> Problem:
    """Returns the problem of ``attention`` over a step's own keys. ``dtype`` is a framework's
    dtype, and ``bits`` is as in ``attention``. Values have ``d_v`` columns; 0 means d."""
    semantics = Semantics(mask.kind, softcap > 0, packed=True, uneven=True)
    return Problem(
        *(1, 1, 1, heads, kv_heads, d, DTYPES[dtype_name(dtype) or ""], semantics, DEFAULT),
        window_keys=mask.window_keys,
        bits="" if bits == FREE else bits,
        d_v=d_v,
    )


def build_kernels(
    layers: list[LayerKernels],
    most_requests: int,
    most_tokens: int,
    *,
    with_writes: bool = True,
    with_merges: bool = False,
) -> int:
    """Builds and loads all kernels that the layers can need, and returns their number. If no
    kernels may be built, or no compiler is installed, layers use the kernels that already exist.

    ``with_writes`` says whether the engine also writes its caches with ``write_slots``,
    ``with_merges`` whether it merges the layers' outputs with ``merge_attention``. If several
    processes start together, one builds each kernel and the others wait for it. Raises the
    builder's errors.
    """
    found: set[Key] = set()
    for layer in layers:
        found |= layer.load(most_requests, most_tokens)
        p = layer.problem
        others = []
        if with_writes and p.operation == DECODE.name:
            sizes = 1, 1, 1, p.heads_k, p.heads_k, p.d, p.dtype, Semantics()
            others.append(Problem(*sizes, WRITE_SLOTS.name, cache=p.cache))
        if with_merges:
            semantics = Semantics(packed=True, uneven=True)
            heads, d = merged_sizes(p.heads_q, p.d)
            others.append(Problem(1, 1, 1, heads, heads, d, p.dtype, semantics, MERGE.name))
        for one in others:
            (family, *_) = families(one.operation)
            (config, *_) = family.proof_configs(one.dtype, d_head_for(one))
            config = family.adapt_to_queries(config, one, layer.device)
            key = config, layer.device.arch, one.required_semantics(config)
            if key not in found:
                loaded_kernels.get(*key)
            found.add(key)
    return len(found)


def merged_sizes(heads: int, d: int) -> tuple[int, int]:
    """Returns the number and the d of the heads in a merge of ``heads`` heads of d elements. If no
    merge kernel is wide enough, the heads are merged in equal pieces."""
    widest = max(it for family in families(MERGE.name) for it in family.knob_values["d_head"])
    most = d // D_STEP
    count = next(it for it in range(1, most + 1) if most % it == 0 and d // it <= widest)
    return heads * count, d // count


def device_of(kind: str, ordinal: int) -> DeviceSpec:
    """Returns the spec of the GPU, or for host tensors the spec of the GPU that is emulated."""
    return query_gpu(ordinal) if kind == "cuda" else device_spec(DEFAULT_EMULATED_ARCH)


@lru_cache(maxsize=4096)
def _chosen(
    problem: Problem, split: str, device: DeviceSpec, requests: int, queries: int
) -> KernelConfig:
    """Chooses the config for a step. The choice is cached, so that all layers of one kind share one
    search."""
    config: KernelConfig = _chooser(problem, split)(_sized(problem, requests, queries), device)
    return config


def _load(problem: Problem, split: str, device: DeviceSpec, wanted: KernelConfig) -> KernelConfig:
    """Loads the kernel ``wanted`` for a step, or a substitute. Returns the loaded kernel's
    config."""
    choose = _chooser(problem, split)

    def pick(configs: tuple[KernelConfig, ...]) -> KernelConfig:
        config: KernelConfig = choose(problem, device, among=configs)
        return config

    def is_as_fast(other: KernelConfig) -> bool:
        pair = other, wanted
        return bool(choose(problem, device, among=pair, tolerance=AS_FAST) == other)

    key = wanted, device.arch, problem.required_semantics(wanted)
    return fallback_kernels.kernel_or_other(
        loaded_kernels, key, _Step(problem), device, pick, lambda: True, is_as_fast
    ).config


def _chooser(problem: Problem, split: str) -> Chooser:
    return choose_config if problem.operation == DEFAULT else CHOOSERS[split]


def _sized(problem: Problem, requests: int, queries: int) -> Problem:
    return replace(problem, batch=requests, seq_q=queries, seq_k=max(problem.seq_k, queries))


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def _powers_to(most: int) -> Iterator[int]:
    """Yields the powers of two from 1 to the first that is at least ``most``."""
    power = 1
    while power < 2 * most:
        yield power
        power *= 2
