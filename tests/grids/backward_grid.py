"""The grid of backward problems that every release is proven on, and a small cover of it.

Lengths, masks, batches and head dimensions are multiplied out; everything else is drawn for each
problem, by its own seed, so that all pairs occur many times.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations, product
from typing import Any

from flashsmith.errors import ArgumentError
from flashsmith.families import DType, KernelConfig, Problem, Semantics, family_named
from flashsmith.operations import BACKWARD
from flashsmith.verify.attention_semantics import Window, unequal_lens
from flashsmith.verify.backward_reference import BackwardReference
from grids.proof_grid import BATCHES, HEADS, PACKED_SEQUENCES, Pair, cover

D = (32, 40, 64, 96, 128, 160, 192, 224, 256)
# In a smaller part of the grid: d of vision models, and of kernels of sm_90 alone.
FEWER_D = (72, 80, 264, 512)
LENGTHS = (
    (1, 1), (3, 3), (1, 239), (3, 799), (64, 128), (113, 203), (127, 129), (128, 217), (108, 256),
    (239, 1), (511, 1), (3, 513), (256, 512), (512, 256), (799, 3), (1023, 1024), (1024, 1023),
    (2048, 2048),
)  # fmt: skip
# For packed sequences these are the longest; the others are shorter.
PACKED_LENGTHS = ((113, 203), (512, 256), (77, 300))
# 'diagonal': every row sees one key, where dq and dk are 0.
MASKS = ("none", "causal", "random", "left", "right", "diagonal")
SOFTCAPS = (0.0, 30.0)
SCALES = (None, 0.3)
# Gradients that are left out, as for frozen parameters.
UNNEEDED: tuple[tuple[str, ...], ...] = (
    (), (), (), ("dk", "dv"), ("dq",), ("dsinks",), ("dv",), ("dk",),
)  # fmt: skip
MORE_KEYS = (0, 0, 0, 77)
# Rows behind the last packed sequence, and how many rows of the longest do not count.
SPARE = (0, 0, 9)
CUTS = (0, 0, 5)
_LONG = 1000
_FLAGS = ("sinks", "dlse", "fp32_gradients", "deterministic")
_DRAWN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_FLAGS, (False, True)),
    "heads": tuple(HEADS),
    "scale": SCALES,
    "unneeded": UNNEEDED,
    "more_keys": MORE_KEYS,
    "spare": SPARE,
    "cut": CUTS,
}


@dataclass(frozen=True)
class BackwardCase:
    """One problem of the grid for a kernel of one family ('': for none). ``mask``, ``heads`` and
    ``batch`` name a kind; the case itself seeds what is random, so equal cases are equal problems.
    ``spare`` and ``cut`` are of packed ones."""

    dtype: DType
    d: int
    lengths: tuple[int, int]
    mask: str
    softcap: float
    batch: str
    heads: str = "mha"
    sinks: bool = False
    dlse: bool = False
    fp32_gradients: bool = False
    deterministic: bool = False
    scale: float | None = None
    unneeded: tuple[str, ...] = ()
    more_keys: int = 0
    spare: int = 0
    cut: int = 0
    inputs: str = "random"
    few_heads: bool = False
    family: str = ""

    def __str__(self) -> str:
        said = [
            self.family, self.dtype.name.lower(), f"d{self.d}", "s{}:{}".format(*self.lengths),
            self.batch, self.heads, f"mask {self.mask}",
            f"softcap {self.softcap:g}" * (self.softcap > 0),
            *(name * getattr(self, name) for name in _FLAGS),
            f"scale {self.scale}" * (self.scale is not None),
            f"without {'+'.join(self.unneeded)}" * bool(self.unneeded),
            *(f"{name} {getattr(self, name)}" * bool(getattr(self, name))
              for name in ("more_keys", "spare", "cut")),
            f"{self.inputs} inputs" * (self.inputs != "random"),
            "few heads" * self.few_heads,
        ]  # fmt: skip
        return ", ".join(word for word in said if word)

    @cached_property
    def seed(self) -> int:
        """Of the lengths, the window and the inputs."""
        return zlib.crc32(str(self).encode())

    @cached_property
    def problem(self) -> Problem:
        """The problem, its semantics those of the lengths alone."""
        packed = self.batch != "dense"
        mask = self.mask if self.mask in ("none", "causal") else "window"
        seq_q, seq_k = self.lengths
        if packed:
            seq_q, seq_k = max(1, seq_q - self.cut), max(1, seq_k - self.cut)
        batch = 1 if min(self.lengths) >= _LONG else 2
        if packed:
            batch = PACKED_SEQUENCES + 2 * (self.batch == "zero lengths")
        heads, heads_k = (_FEW_HEADS if self.few_heads else HEADS)[self.heads]
        semantics = Semantics(mask, self.softcap > 0, packed, uneven=packed)
        sizes = batch, seq_q, seq_k, heads, heads_k, self.d
        gradients = self.config.family.gradients_of(self.config) if self.family else ""
        return Problem(*sizes, self.dtype, semantics, BACKWARD.name, gradients=gradients)

    def options(self) -> dict[str, Any]:
        """What the problem's text leaves open, as BackwardReference takes it."""
        draw, packed = random.Random(self.seed), self.problem.semantics.packed
        said: dict[str, Any] = {
            "window": _window(self.mask, self.lengths[1], draw),
            "softcap": self.softcap or None,
            "scale": self.scale,
            "sinks": self.sinks,
            "dlse": self.dlse,
            "more_keys": self.more_keys,
            "unneeded": self.unneeded,
            "grad_dtype": "float32" if self.fp32_gradients else None,
            "deterministic": self.deterministic,
        }
        if packed:
            empty = 2 * (self.batch == "zero lengths")
            lens = [(longest,) * PACKED_SEQUENCES for longest in self.lengths]
            if self.batch != "full lengths":
                lens = [unequal_lens(PACKED_SEQUENCES, n, draw, empty) for n in self.lengths]
            said |= {"lens_q": lens[0], "lens_k": lens[1], "spare": self.spare}
        return BackwardReference().options(self.problem, seed=self.seed, **said)

    @cached_property
    def config(self) -> KernelConfig:
        """The kernel to prove.

        Raises ArgumentError where the family has none.
        """
        found = _proof_configs(self.family, self.dtype, self.d, self.deterministic)
        if not found:
            words = "deterministic " * self.deterministic
            raise ArgumentError(
                f"family={self.family!r}: it has no {words}proof_configs for {self.dtype.name} and "
                f"d {self.d}; give it some, or name a config and take prove()"
            )
        config: KernelConfig = found[self.seed // 2 % len(found)]
        return config

    @property
    def semantics(self) -> Semantics:
        """The semantics that the config's kernel must be compiled for."""
        return self.problem.required_semantics(self.config)

    def keywords(self) -> dict[str, Any]:
        """The keywords of ``prove``, besides the config and where to run."""
        return {
            "problem": self.problem, "options": self.options(), "inputs": self.inputs,
            "seed": self.seed,
        }  # fmt: skip


def _proof_configs(family: str, dtype: DType, d: int, deterministic: bool) -> list[KernelConfig]:
    its = family_named(family)
    found = its.proof_configs(dtype, d)
    return [cfg for cfg in found if its.is_deterministic(cfg) or not deterministic]


@cache
def _has_deterministic(family: str, dtype: DType, d: int) -> bool:
    return not family or bool(_proof_configs(family, dtype, d, True))


@cache
def _served_d(family: str) -> tuple[int, ...]:
    """The head dimensions that a family's kernels are proven for; all for no family."""
    served = [d for d in D if not family or _proof_configs(family, DType.FP16, d, False)]
    return tuple(served)


@cache
def _fewer_d(family: str) -> tuple[int, ...]:
    """Those of FEWER_D that a family's kernels are proven for."""
    if not family or family_named(family).operation != BACKWARD.name:
        return ()
    most = 256 if family_named(family).config_class.OLDEST_ARCH < 90 else max(FEWER_D)
    known = (d for d in FEWER_D if d <= most)
    return tuple(d for d in known if _proof_configs(family, DType.FP16, d, False))


def _window(mask: str, seq_k: int, draw: random.Random) -> Window | None:
    left, right = draw.randrange(seq_k + 1), draw.randrange(seq_k + 1)
    windows = {
        "random": (left, right), "left": (left, None), "right": (None, right or 1),
        "diagonal": (0, 0),
    }  # fmt: skip
    return windows.get(mask)


def backward_grid(family: str = "") -> Iterator[BackwardCase]:
    """Every problem of the grid, 6,264 of all D, for the kernels of a family; each has its own, of
    the d that it serves, deterministic ones where some of its kernels are. A family also has those
    of FEWER_D that it serves."""
    served = _served_d(family)
    for dtype, d, batch in product(DType, served, BATCHES):
        for lengths in LENGTHS if batch == "dense" else PACKED_LENGTHS:
            for mask, softcap in product(MASKS, SOFTCAPS):
                yield _filled(BackwardCase(dtype, d, lengths, mask, softcap, batch, family=family))
    for dtype, d, batch, kind in product(
        DType, served, ("dense", "random lengths", "zero lengths"), BackwardReference.kinds[1:]
    ):
        draw = random.Random(f"{dtype.name} {d} {batch} {kind}")
        lengths = draw.choice(QUICK_LENGTHS if batch == "dense" else PACKED_LENGTHS)
        mask, softcap = draw.choice(MASKS), draw.choice(SOFTCAPS)
        case = BackwardCase(dtype, d, lengths, mask, softcap, batch, inputs=kind, family=family)
        yield _filled(case)
    for dtype, d, batch, mask in product(DType, _fewer_d(family), BATCHES, MASKS):
        draw = random.Random(f"{dtype.name} {d} {batch} {mask}")
        for lengths in LENGTHS[::2] if batch == "dense" else PACKED_LENGTHS:
            softcap, kind = draw.choice(SOFTCAPS), draw.choice(BackwardReference.kinds)
            case = BackwardCase(dtype, d, lengths, mask, softcap, batch, inputs=kind, family=family)
            yield _filled(case)


def _filled(case: BackwardCase) -> BackwardCase:
    """The case with all that the grid does not multiply out, drawn by its own seed."""
    return _possible(case, random.Random(case.seed))


def _possible(case: BackwardCase, draw: random.Random) -> BackwardCase:
    drawn = {name: draw.choice(choices) for name, choices in _DRAWN.items()}
    if case.batch == "dense":
        drawn["spare"] = drawn["cut"] = 0
    if not drawn["sinks"] and drawn["unneeded"] == ("dsinks",):
        drawn["unneeded"] = ()
    # Those that a kernel computes are needed.
    if case.family and family_named(case.family).gradients_of(case.config):
        drawn["unneeded"] = tuple(name for name in drawn["unneeded"] if name == "dsinks")
    if not _has_deterministic(case.family, case.dtype, case.d):
        drawn["deterministic"] = False
    return replace(case, **drawn)


# The part of the grid for the emulator, and for models of kernels: fewer heads and short sequences.
_FEW_HEADS = {"mha": (1, 1), "gqa": (4, 2), "mqa": (3, 1)}
QUICK_LENGTHS = tuple(pair for pair in LENGTHS if pair[0] * pair[1] <= 128 * 256)
_QUICK_PACKED_LENGTHS = ((1, 1), (3, 3), (1, 239), (64, 128), (127, 129), (239, 1))
_FACTORS: dict[str, tuple[Any, ...]] = {
    "dtype": tuple(DType),
    "d": D,
    "lengths": QUICK_LENGTHS,
    "mask": MASKS,
    "softcap": SOFTCAPS,
    "batch": BATCHES,
    "inputs": BackwardReference.kinds,
}
_POOL = 4_000


def case_pairs(case: BackwardCase) -> list[Pair]:
    """All pairs of two factors with the values they have in ``case``."""
    factors = [(name, getattr(case, name)) for name in (*_FACTORS, *_DRAWN)]
    return list(combinations(factors, 2))


def covering_backward_cases(family: str = "") -> list[BackwardCase]:
    """Few cases that contain every possible pair of factors; the same on every machine."""
    draw = random.Random(1)
    pool = [random_case(draw, family) for _ in range(_POOL)]
    pairs = [case_pairs(case) for case in pool]
    return cover(pool, pairs, (lambda it: (it.config, it.semantics)) if family else None)


def random_case(draw: random.Random, family: str = "") -> BackwardCase:
    """A case of the emulator's part: one of the largest, packed or of a large d, takes it long."""
    served = _served_d(family)
    values = {name: draw.choice(choices) for name, choices in (_FACTORS | {"d": served}).items()}
    if values["batch"] != "dense":
        values["lengths"] = draw.choice(_QUICK_PACKED_LENGTHS)
        values["d"] = draw.choice(served[:5])
    return _possible(BackwardCase(**values, few_heads=True, family=family), draw)
