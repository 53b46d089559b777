#!/usr/bin/env python3
"""Random calls of attention(), its gradients, and attention_with_cache(), compared with float64.

    python tools/gpu/random_calls.py build --problems 500       # compiles what check needs, no GPU
    python tools/gpu/random_calls.py check rows.csv --problems 500 --processes 8
    python tools/gpu/random_calls.py check rows.csv --problems 50 --longest 80    # in the emulator
    python tools/gpu/random_calls.py check rows.csv --functions --problems 4000 --processes 12

Problem i is a call of kind i, modulo the number of kinds: a kind is what kernels are compiled for,
such as widths, a mask, a function, and the format of the cache. Lengths, heads, scales, pages and
values are drawn. Outputs and unused rows of caches are NaN before the call. Each call is made
twice, and must give the same bits except for gradients that promise less. `--only` selects kinds
whose names contain one of some words. `--functions` leaves only kinds with score and mask
functions, and computes all problems of a kind with the config for its typical one, so that few
kernels serve any number of problems. A row is written for each problem; the exit status is 1 if
one is wrong, and 2 if --seconds passed before all were done.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from dense_reference import Meaning, Place, Result, attention
from pretended_gpu import pretended_gpu
from program_cases import FUNCTIONS, Functions, Shape

import flashsmith
from flashsmith.builder import library_for
from flashsmith.errors import FlashsmithError
from flashsmith.integrations.captured_by_kernels import ScoreSums

COLUMNS = ("number", "kind", "drawn", "ok", "seconds", "reasons")
# The relative error of rounding to a dtype, times two.
ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
LATENT, VALUES = 576, 512
FP8 = ("float8_e4m3fn", "float8_e5m2")


# --- kinds ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """What kernels are compiled for.

    ``call`` is 'forward', 'parts', 'gradients', 'cache' or 'latent'. ``scattered`` means packed
    sequences, or pages of a cache. ``cache`` is the cache's dtype if it is not q's.
    """

    call: str
    dtype: str
    d: int
    d_v: int
    mask: str = "full"
    function: str = ""
    cache: str = ""
    scattered: bool = False
    sinks: bool = False
    softcap: bool = False
    bits: str = "free"

    def __str__(self) -> str:
        width = f"d{self.d}" if self.d == self.d_v else f"d{self.d}:{self.d_v}"
        words = [self.call, self.dtype, width, self.mask, self.function, self.cache]
        words += [it.name for it in fields(self) if getattr(self, it.name) is True]
        words += [self.bits] * (self.bits != "free")
        return " ".join(filter(None, words))


WIDTHS = (
    (128, 128), (192, 128), (64, 64), (128, 64), (64, 128), (256, 128), (256, 256), (96, 96),
    (72, 72), (80, 80),
)  # fmt: skip
DTYPES = ("bfloat16", "float16")
MASKS = ("causal", "full", "window")


def kinds() -> list[Kind]:
    """All kinds; what is not varied systematically takes turns."""
    found = []
    for turn, (d, d_v) in enumerate((*WIDTHS, *WIDTHS)):
        for call in ("forward", "gradients"):
            one = Kind(call, DTYPES[turn // len(WIDTHS)], d, d_v, MASKS[turn % 3])
            more = {"scattered": turn % 2 == 1, "sinks": turn % 4 == 2, "softcap": turn % 5 == 3}
            found.append(replace(one, **more))
    for turn, name in enumerate((*FUNCTIONS, "bias")):
        d = (128, 64, 256)[turn % 3]
        for call in ("forward", "gradients", "cache"):
            one = Kind(call, DTYPES[turn % 2], d, d, MASKS[turn % 3], name)
            found.append(replace(one, scattered=turn % 3 == 2 and name != "bias"))
    for turn, name in enumerate((*FP8, *FP8, "", "", "", "")):
        d = (128, 64, 256, 128)[turn % 4]
        one = Kind("cache", DTYPES[turn % 2], d, d, MASKS[turn % 3], cache=name)
        found.append(replace(one, scattered=turn % 2 == 1, sinks=turn == 3, softcap=turn == 2))
    for turn in range(4):
        one = Kind("cache", DTYPES[turn % 2], (128, 64)[turn // 2], (128, 64)[turn // 2], "causal")
        cache = (FP8[0], "", FP8[1], "")[turn]
        found.append(replace(one, cache=cache, scattered=turn % 2 == 0, bits="canonical"))
    for turn, name in enumerate(("", FP8[0], "")):
        one = Kind("cache", DTYPES[turn % 2], 512, 512, MASKS[turn % 3], cache=name)
        found.append(replace(one, scattered=turn > 0))
    # As many scores as masks, and one canonical kernel.
    for turn, name in enumerate(("squared", "documents", "alibi_in_documents", "table")):
        d = (128, 64, 128, 256)[turn]
        one = Kind("cache", DTYPES[turn % 2], d, d, MASKS[turn % 3], name, FP8[turn // 2])
        more = {"scattered": turn % 2 == 1, "softcap": turn == 0}
        found.append(replace(one, **more, bits="canonical" if turn == 2 else "free"))
    for turn, name in enumerate(("table", "documents", "alibi_in_documents", "block_table")):
        d = (128, 64, 128, 256)[turn]
        one = Kind("parts", DTYPES[turn % 2], d, d, "full", name, scattered=turn % 2 == 1)
        found.append(one)
    for turn in range(4):
        one = Kind("latent", DTYPES[turn // 2], LATENT, VALUES, "causal")
        found.append(replace(one, scattered=turn % 2 == 1))
    return found


# --- a problem -----------------------------------------------------------------------------------


class Problem:
    """A drawn call: its tensors, its keywords, and the same in float64.

    ``longest`` is the greatest length. ``filled`` is False if only shapes count. ``configs`` are
    keywords of the call, and ``typical`` means that its sizes are not drawn.
    """

    def __init__(
        self, kind: Kind, number: int, seed: int, device: str, longest: int, *, filled: bool = True,
        configs: Mapping[str, Any] | None = None, typical: bool = False,
    ) -> None:  # fmt: skip
        self.kind, self.device, self.filled = kind, device, filled
        self.configs, self.typical = configs or {}, typical
        self.draw = draw = np.random.default_rng((seed, number))
        self.dtype = getattr(torch, kind.dtype)
        self.generator = torch.Generator(device).manual_seed(int(draw.integers(2**31)))
        self.heads_k = 1 if kind.call == "latent" else int(draw.choice([1, 2, 4]))
        groups = [16, 64, 128] if kind.call == "latent" else [1, 2, 4, 8]
        self.heads = self.heads_k * int(draw.choice(groups))
        self.batch = int(draw.integers(1, 4))
        if typical:
            self.heads_k, self.heads, self.batch = (1, 64, 2) if groups[0] > 1 else (4, 16, 2)
        self.over_cache = kind.call in ("cache", "latent")
        self.lens_k = [self._length(longest) for _ in range(self.batch)]
        self.lens_q = [self._length(longest) for _ in range(self.batch)]
        if self.over_cache:
            most = int(draw.choice([1, 1, 3, min(70, longest)]))
            self.lens_q = [int(draw.integers(1, most + 1)) for _ in range(self.batch)]
        if not kind.scattered and not self.over_cache:
            self.lens_q, self.lens_k = ([it[0]] * self.batch for it in (self.lens_q, self.lens_k))
        elif self.over_cache:
            self.lens_q = [self.lens_q[0]] * self.batch
            self.lens_k = [n + self.lens_q[0] for n in self.lens_k]
        self.capacity = max(self.lens_k) + int(draw.integers(0, 200))
        self.scale = float(draw.uniform(0.5, 2.0)) * kind.d**-0.5
        self.window = (None, None)
        if kind.mask == "window":
            left, right = (int(it) for it in draw.integers(0, max(2, longest // 4), 2))
            self.window = (left, 0 if self.over_cache else right)
        self.functions, self.bias = self._functions()
        self.sinks = self.normal(self.heads, dtype=torch.float32) if kind.sinks else None

    def __str__(self) -> str:
        lens = f"q{self.lens_q} k{self.lens_k}"
        return f"{lens} h{self.heads}:{self.heads_k} window{self.window} scale {self.scale:.4f}"

    def _length(self, longest: int) -> int:
        """A length, often next to a multiple of a tile's."""
        if self.typical:
            return longest
        if self.draw.random() < 0.5:
            return int(self.draw.integers(1, longest + 1))
        near = 64 * int(self.draw.integers(0, longest // 64 + 1)) + int(self.draw.integers(-1, 2))
        return min(max(near, 1), longest)

    def _functions(self) -> tuple[Functions, torch.Tensor | None]:
        name = self.kind.function
        longest = self.capacity if self.over_cache else max(self.lens_k)
        if name == "bias":
            shape = (1, self.heads, max(self.lens_q), longest)
            return Functions(), self.normal(*shape, dtype=self.dtype)
        if not name:
            return Functions(), None
        rows = longest if self.over_cache else max(self.lens_q)
        shape = Shape(self.batch, self.heads, rows, longest)
        return FUNCTIONS[name](shape, self.draw, self._placed), None

    def _placed(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def normal(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Random values; of an 8-bit dtype such that it holds them."""
        if not self.filled:
            return torch.zeros((), dtype=torch.uint8, device=self.device).expand(shape).to(dtype)
        drawn = torch.randn(shape, generator=self.generator, device=self.device)
        return drawn.to(dtype)

    @cached_property
    def options(self) -> dict[str, Any]:
        """The keywords that say what is computed."""
        kind = self.kind
        return {
            "causal": kind.mask == "causal",
            "window": self.window,
            "softcap": 20.0 if kind.softcap else 0.0,
            "scale": self.scale,
            "sinks": self.sinks,
            "score_mod": self.functions.score,
            "mask_mod": self.functions.mask,
            "bias": self.bias,
            "bits": kind.bits,
            **self.configs,
        }

    def meaning(self, factor: torch.Tensor | float = 1.0, bias: Any = None) -> Meaning:
        """The options for the reference; ``factor`` multiplies the scale of each head."""
        ones = torch.ones(self.heads, dtype=torch.float64, device=self.device)
        kept = {name: self.options[name] for name in ("causal", "window", "softcap", "sinks")}
        return Meaning(
            self.scale * factor * ones,
            **kept,
            score=self.functions.score,
            mask=self.functions.mask,
            bias=self.bias if bias is None else bias,
        )


def captured_by(function: Callable[..., Any] | None) -> list[torch.Tensor]:
    """The tensors of floats that a function refers to, or a value of flashsmith.scores holds."""
    closed_over = [it.cell_contents for it in getattr(function, "__closure__", None) or ()]
    held = [*closed_over, *getattr(function, "parts", ())]
    return [it for it in held if isinstance(it, torch.Tensor) and it.is_floating_point()]


def starts(lens: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(lens).tolist()]


def compared(problem: Problem, o: Any, lse: Any, wanted: Result) -> list[str]:
    """What is wrong with outputs (queries, heads, d) and LSEs (heads, queries) of a sequence."""
    ulp = ULP[problem.kind.dtype]
    reasons = []
    error = (o.double() - wanted.o.detach()).abs()
    bound = 2 * ulp * wanted.magnitude + ulp * wanted.o.detach().abs() + 1e-6
    # `not` instead of the opposite comparison also finds NaN.
    if o.numel() and not bool((error <= bound).all()):
        reasons.append(f"o: error up to {float((error / bound).max()):.3g} of the bound")
    exact = wanted.lse.detach()
    same = (lse == -torch.inf) == (exact == -torch.inf)
    finite = exact.masked_fill(exact == -torch.inf, 0)
    close = (lse.double().masked_fill(lse == -torch.inf, 0) - finite).abs() <= 1e-4 * (
        1 + finite.abs()
    )
    if not bool((same & close).all()):
        reasons.append("lse")
    return reasons


# --- forward and gradients -----------------------------------------------------------------------


class Call(Problem):
    """attention(), and its gradients."""

    def run(self) -> list[str]:
        """Calls, compares, and returns what is wrong."""
        kind = self.kind
        tensors = self._tensors()
        keywords = self.options | {"return_lse": True}
        if kind.scattered:
            keywords |= self._packing()
        if kind.call == "gradients":
            return self._gradients(tensors, keywords)
        if kind.call == "parts":
            return self._parts(tensors, keywords)
        reasons: list[str] = []
        out = None
        for _ in range(2):
            shape = (*tensors[0].shape[:-1], kind.d_v)
            out, before = torch.full(shape, torch.nan, dtype=self.dtype, device=self.device), out
            _, lse = flashsmith.attention(*tensors, **keywords, out=out)
        if not self.filled:
            return []
        if not torch.equal(out, before):
            reasons.append("a second call has other bits")
        return reasons + self._against(tensors, out, lse)

    def _parts(self, tensors: list[torch.Tensor], keywords: dict[str, Any]) -> list[str]:
        """The keys of each sequence in two parts at a drawn row, merged."""
        cuts = [int(self.draw.integers(0, n + 1)) for n in self.lens_k]
        first = starts(self.lens_k)[:-1] if self.kind.scattered else [0] * self.batch

        def vector(numbers: Sequence[int]) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=self.device)

        begins = vector(first), vector([a + n for a, n in zip(first, cuts, strict=True)])
        counts = vector(cuts), vector([n - m for n, m in zip(self.lens_k, cuts, strict=True)])
        shape = (*tensors[0].shape[:-1], self.kind.d_v)
        parts = []
        for begin, count in zip(begins, counts, strict=True):
            out = torch.full(shape, torch.nan, device=self.device)
            part = {"partial": True, "k_begin": begin, "seqused_k": count, "out": out}
            parts.append(flashsmith.attention(*tensors, **keywords, **part))
        outs, lses = map(list, zip(*parts, strict=True))
        out, lse = flashsmith.merge_attention(outs, lses, dtype=self.dtype)
        return self._against(tensors, out, lse) if self.filled else []

    def _against(self, tensors: list[torch.Tensor], out: Any, lse: Any) -> list[str]:
        reasons = []
        for place, q, k, v, o, stats in self._sequences(tensors, out, lse):
            wanted = attention(q.double(), k.double(), v.double(), self.meaning(), place)
            reasons += compared(self, o, stats, wanted)
        return reasons

    def _tensors(self) -> list[torch.Tensor]:
        kind, heads_k = self.kind, self.heads_k
        rows = [(self.batch, lens[0]) for lens in (self.lens_q, self.lens_k)]
        if kind.scattered:
            rows = [(sum(lens),) for lens in (self.lens_q, self.lens_k)]
        shapes = (
            (*rows[0], self.heads, kind.d),
            (*rows[1], heads_k, kind.d),
            (*rows[1], heads_k, kind.d_v),
        )
        return [self.normal(*shape, dtype=self.dtype) for shape in shapes]

    def _packing(self) -> dict[str, Any]:
        cu = [
            torch.tensor(starts(lens), dtype=torch.int32, device=self.device)
            for lens in (self.lens_q, self.lens_k)
        ]
        most = {"max_seqlen_q": max(self.lens_q), "max_seqlen_k": max(self.lens_k)}
        return {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1], **most}

    def _sequences(self, tensors: Any, o: Any, lse: Any) -> Iterator[tuple[Any, ...]]:
        """For each sequence its place, and its rows of the tensors, of o and of the LSE."""
        at_q, at_k = starts(self.lens_q), starts(self.lens_k)
        q, k, v = tensors
        for i in range(self.batch):
            place = Place(i, self.lens_k[i], 0)
            if self.kind.scattered:
                rows, keys = slice(at_q[i], at_q[i + 1]), slice(at_k[i], at_k[i + 1])
                yield place, q[rows], k[keys], v[keys], o[rows], lse[:, rows]
            else:
                yield place, q[i], k[i], v[i], o[i], lse[i]

    def _gradients(self, tensors: list[torch.Tensor], keywords: dict[str, Any]) -> list[str]:
        given = [name for name in ("sinks", "bias") if self.options[name] is not None]
        captured = captured_by(self.functions.score)
        names = ["q", "k", "v", *given, *(f"captured{i}" for i in range(len(captured)))]
        inputs = [*tensors, *(self.options[name] for name in given), *captured]
        for it in inputs:
            it.requires_grad_()
        o, lse = flashsmith.attention(*tensors, **keywords)
        do, dlse = (self.normal(*it.shape, dtype=it.dtype) for it in (o, lse))
        dlse = dlse.masked_fill(lse.detach() == -torch.inf, 0.0)
        found = torch.autograd.grad((o, lse), inputs, (do, dlse))
        if not self.filled:
            return []
        # The reference calls the same function, which reads the same captured tensors.
        own = inputs[: 3 + len(given)]
        exact = [*(it.detach().double().requires_grad_() for it in own), *captured]
        extra = dict(zip(given, exact[3:], strict=False))
        meaning = replace(self.meaning(bias=extra.get("bias")), sinks=extra.get("sinks"))
        reasons, parts = [], []
        pairs = zip(
            self._sequences(exact[:3], o, lse), self._sequences(exact[:3], do, dlse), strict=True
        )
        for (place, q, k, v, own_o, own_lse), (*_, own_do, own_dlse) in pairs:
            wanted = attention(q, k, v, meaning, place)
            reasons += compared(self, own_o.detach(), own_lse.detach(), wanted)
            shown = wanted.lse.masked_fill(wanted.lse == -torch.inf, 0)
            parts.append((wanted.o * own_do).sum() + (shown * own_dlse).sum())
        expected = torch.autograd.grad(sum(parts), exact)
        return reasons + self._differences(names, found, expected)

    def _differences(self, names: list[str], found: Any, expected: Any) -> list[str]:
        reasons = []
        for name, one, other in zip(names, found, expected, strict=True):
            size = float(other.norm())
            relative = float((one.double() - other).norm()) / (size or 1.0)
            if not relative <= 4 * ULP[self.kind.dtype] + 1e-6 / (size or 1.0):
                reasons.append(f"d{name}: relative error {relative:.3g}")
        return reasons


# --- caches --------------------------------------------------------------------------------------


class CacheCall(Problem):
    """attention_with_cache()."""

    @cached_property
    def scales(self) -> dict[str, Any]:
        """k_scale and v_scale, as numbers or per head."""
        kind = self.kind
        if kind.call == "latent" or (kind.function and not kind.cache):
            return {}
        if not kind.cache and self.draw.random() < 0.5:
            return {}
        if self.draw.random() < 0.5:
            return {name: float(self.draw.uniform(0.5, 2)) for name in ("k_scale", "v_scale")}
        drawn = self.draw.uniform(0.5, 2, (2, self.heads_k)).astype(np.float32)
        return {
            name: self._placed(it) for name, it in zip(("k_scale", "v_scale"), drawn, strict=True)
        }

    def factor(self, name: str, heads: int) -> torch.Tensor:
        """The scale of each of ``heads`` heads, as float64."""
        scale = self.scales.get(name, 1.0)
        given = torch.as_tensor(scale, dtype=torch.float32, device=self.device).double().reshape(-1)
        return given.repeat_interleave(heads // len(given))

    def run(self) -> list[str]:
        kind, n = self.kind, self.lens_q[0]
        format_ = getattr(torch, kind.cache or kind.dtype)
        q = self.normal(self.batch, n, self.heads, kind.d, dtype=self.dtype)
        widths = (kind.d,) if kind.call == "latent" else (kind.d, kind.d_v)
        appends = bool(self.draw.random() < 0.5)
        page = int(self.draw.choice([16, 64, 128])) if kind.call == "cache" else 64
        room = -(-self.capacity // page) * page
        held = [n_k - n * appends for n_k in self.lens_k]
        dense = [self._cache(room, held, width, format_) for width in widths]
        new = [
            self.normal(self.batch, n, self.heads_k, width, dtype=self.dtype) for width in widths
        ]
        keywords = self.options | self.scales | {"return_lse": True}
        lens = torch.tensor(held, dtype=torch.int32, device=self.device)
        caches = dense
        if kind.scattered:
            caches, keywords["page_table"] = self._paged(dense, page)
        if appends:
            keywords |= dict(zip(("k", "v"), new, strict=False))
        if kind.call == "latent":
            keywords["v_width"] = kind.d_v
        keywords = {name: value for name, value in keywords.items() if value is not None}
        out = lse = None
        for _ in range(2):
            shape = (self.batch, n, self.heads, kind.d_v)
            out, before = torch.full(shape, torch.nan, dtype=self.dtype, device=self.device), out
            _, lse = flashsmith.attention_with_cache(
                q, *caches, cache_lens=lens, out=out, **keywords
            )
        if not self.filled:
            return []
        reasons = [] if torch.equal(out, before) else ["a second call has other bits"]
        if appends:
            dense = self._appended(dense, new, held, format_)
        return reasons + self._against(q, dense, out, lse)

    def _cache(self, room: int, held: list[int], width: int, format_: torch.dtype) -> torch.Tensor:
        """A dense cache with NaN where it holds nothing."""
        cache = self.normal(self.batch, room, self.heads_k, width, dtype=torch.float32)
        if self.filled:
            for row, length in zip(cache, held, strict=True):
                row[length:] = torch.nan
        return cache.to(format_)

    def _paged(self, dense: list[torch.Tensor], page: int) -> tuple[list[torch.Tensor], Any]:
        """The same caches in pages of random order."""
        batch, room, heads, _ = dense[0].shape
        count = batch * room // page
        order = torch.from_numpy(self.draw.permutation(count)).to(self.device)
        pages = []
        for cache in dense:
            bytes_ = cache.reshape(count, page, heads, -1).view(torch.uint8)
            shuffled = torch.empty_like(bytes_)
            shuffled[order] = bytes_
            pages.append(shuffled.view(cache.dtype))
        return pages, order.reshape(batch, -1).int()

    def _appended(self, dense: Any, new: Any, held: list[int], format_: torch.dtype) -> Any:
        """Dense caches with the new rows, divided by their scales and rounded."""
        caches = [it.clone() for it in dense]
        largest = torch.finfo(format_).max
        for cache, rows, name in zip(caches, new, ("k_scale", "v_scale"), strict=False):
            divided = rows.float() / self.factor(name, self.heads_k).float()[:, None]
            if self.kind.cache:
                divided = divided.clamp(-largest, largest)
            for i, length in enumerate(held):
                cache[i, length : length + rows.shape[1]] = divided[i].to(format_)
        return caches

    def _against(self, q: Any, dense: Any, out: Any, lse: Any) -> list[str]:
        reasons = []
        meaning = self.meaning(self.factor("k_scale", self.heads))
        if self.kind.function == "bias":
            meaning = replace(meaning, bias=self.bias)
        values = dense[0][..., :VALUES] if self.kind.call == "latent" else dense[1]
        of_values = self.factor("v_scale", self.heads_k)[:, None]
        for i, length in enumerate(self.lens_k):
            place = Place(i, length, length - self.lens_q[i])
            keys, own = dense[0][i, :length].double(), values[i, :length].double() * of_values
            wanted = attention(q[i].double(), keys, own, meaning, place)
            reasons += compared(self, out[i], lse[i], wanted)
        return reasons


CLASSES: dict[str, Callable[..., Any]] = {
    "forward": Call,
    "parts": Call,
    "gradients": Call,
    "cache": CacheCall,
    "latent": CacheCall,
}


# --- commands ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """Problems of one kind, for one process."""

    kind: Kind
    numbers: tuple[int, ...]
    seed: int
    longest: int
    device: str
    configs: Mapping[str, Any] | None = None

    def problem(self, number: int, **how: Any) -> Problem:
        made: Problem = CLASSES[self.kind.call](
            *(self.kind, number, self.seed, self.device, self.longest), configs=self.configs, **how
        )
        return made


def rows_of(task: Task) -> list[dict[str, Any]]:
    return [checked(task, number) for number in task.numbers]


def checked(task: Task, number: int) -> dict[str, Any]:
    """The row of a problem; an error of the call is what is wrong with it."""
    begun = time.perf_counter()
    problem = task.problem(number)
    try:
        reasons = problem.run()
    except FlashsmithError as error:
        reasons = [f"{type(error).__name__}: {error}"]
    seconds = round(time.perf_counter() - begun, 3)
    values = (number, task.kind, problem, not reasons, seconds, "; ".join(reasons))
    return dict(zip(COLUMNS, map(str, values), strict=True))


def drawn_from(options: argparse.Namespace) -> list[Kind]:
    """The kinds that problems are drawn from in turn."""
    return [it for it in kinds() if it.function or not options.functions]


def selected(options: argparse.Namespace) -> list[tuple[int, Kind]]:
    """The kinds of which a name contains one of the words, with their numbers."""
    words = options.only.split(",")
    found = enumerate(drawn_from(options))
    return [(i, it) for i, it in found if any(word in str(it) for word in words)]


def tasks(options: argparse.Namespace, device: str, at_once: int) -> list[Task]:
    every = len(drawn_from(options))
    some = []
    for index, kind in selected(options):
        is_typical = options.functions and (options.command == "build" or device == "cuda")
        configs = typical_configs(kind, options) if is_typical else None
        numbers = range(index, options.problems, every)
        for first in range(0, len(numbers), at_once):
            part = tuple(numbers[first : first + at_once])
            some.append(Task(kind, part, options.seed, options.longest, device, configs))
    return some


# The keyword that gives the config of each operation.
_KEYWORDS = {"forward": "config", "decode": "config", "backward": "backward_config"}


def typical_configs(kind: Kind, options: argparse.Namespace) -> dict[str, Any]:
    """The keywords with the configs that serve a kind's typical problem on an H200."""
    with pretended_gpu() as gpu:
        one = Task(kind, (0,), options.seed, options.longest, "cpu").problem(
            0, filled=False, typical=True
        )
        one.run()
        used = [config for config, _, _ in gpu.kernels]
    families = ((it, it.family.operation) for it in used)
    return {_KEYWORDS[name]: it for it, name in families if name in _KEYWORDS}


def build(options: argparse.Namespace) -> int:
    """Compiles the kernels of the problems for an H200; prints those that spill registers."""
    wanted_tasks = tasks(options, "cpu", 1)
    with pretended_gpu() as gpu, patch.object(ScoreSums, "serves", staticmethod(_serves)):
        for task in wanted_tasks:
            for number in task.numbers:
                try:
                    task.problem(number, filled=False).run()
                except FlashsmithError as error:
                    print(f"{task.kind}: {error}")
        wanted = list(gpu.kernels)

    def built(key: Any) -> str:
        config, arch, semantics = key
        entry = library_for([config], arch=arch, semantics=semantics).entry(config)
        spills = sum(it.spill_bytes for it in (entry, *entry.beside))
        return f"{config.short_form()} [{semantics}]: {spills} bytes spilled"

    with ThreadPoolExecutor(options.jobs) as pool:
        for number, line in enumerate(pool.map(built, wanted)):
            print(f"{number + 1} of {len(wanted)}: {line}", flush=True)
    return 0


def _serves(saved: Any, emulate: bool) -> bool:
    """ScoreSums.serves() for tensors of a pretended GPU."""
    return _really_serves(saved, True)


_really_serves = ScoreSums.serves


def check(options: argparse.Namespace) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    work = tasks(options, device, 8)
    missing, wrong = sum(len(it.numbers) for it in work), 0
    deadline = time.monotonic() + options.seconds
    pool = (
        multiprocessing.get_context("spawn").Pool(options.processes)
        if options.processes > 1
        else None
    )
    with options.rows.open("w", newline="") as file, pool or nullcontext():
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        done = pool.imap_unordered(rows_of, work) if pool else map(rows_of, work)
        try:
            for _ in work:
                rows = done.next(deadline - time.monotonic()) if pool else next(done)
                writer.writerows(rows)
                file.flush()
                missing -= len(rows)
                for row in rows:
                    if row["ok"] != "True":
                        wrong += 1
                        print(
                            f"WRONG {row['number']} {row['kind']}: {row['drawn']}: {row['reasons']}"
                        )
                if time.monotonic() > deadline:
                    break
        except multiprocessing.TimeoutError:
            pass
    print(f"{wrong} wrong, {missing} not done, of {len(selected(options))} kinds", flush=True)
    return 1 if wrong else 2 if missing else 0


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="compile what check needs, for an H200")
    building.add_argument("--jobs", type=int, default=2, help="libraries compiled at a time")
    checking = commands.add_parser("check", help="compare with float64")
    checking.add_argument("rows", type=Path, help="the CSV file to write")
    checking.add_argument("--processes", type=int, default=1)
    checking.add_argument("--seconds", type=float, default=3600.0, help="when to stop")
    for command in (building, checking):
        command.add_argument("--problems", type=int, default=500)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--longest", type=int, default=1500, help="the greatest length")
        command.add_argument("--only", default="", help="words of kinds, joined by commas")
        command.add_argument(
            "--functions", action="store_true", help="only score and mask functions, few kernels"
        )
    return parser.parse_args(arguments)


def main() -> int:
    options = parsed()
    return build(options) if options.command == "build" else check(options)


if __name__ == "__main__":
    sys.exit(main())
