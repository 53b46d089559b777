"""Kernels compute what the specification says, to the last bit: docs/bits.md, and oracle.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import oracle
import pytest
import shared_kernels
from bit_inputs import KINDS
from bit_kernels import Kernels
from oracle import CHUNK
from plain_run import full_after
from sequence import Sequence

from flashsmith.families import DType, KernelConfig

HOPPER, AMPERE = Kernels(DType.FP16, 64), Kernels(DType.FP16, 64, 80)
INFINITE = float("inf")

#: Of one to three chunks; some rows see no key.
CAUSAL = (
    Sequence(70, 130),
    Sequence(40, 20, sinks=(1.0, -INFINITE), group=2),
    Sequence(3, CHUNK + 6, heads_k=2, group=2, sinks=(0.3, -INFINITE, 3e38, INFINITE)),
    Sequence(2, 2 * CHUNK + 252),
    *(Sequence(3, CHUNK + 176, kind=kind) for kind in KINDS if kind != "random"),
    Sequence(70, 140, kind="fading"),
)
#: Rows of a packed batch whose windows begin in the middle of a chunk, and of a tile.
WINDOW = (
    Sequence(9, CHUNK + 266, group=3, window=(270, 0), softcap=3.0, sinks=(0.5,), packed=True),
    Sequence(70, 90, window=(5, 0), softcap=30.0, packed=True),
    Sequence(3, CHUNK + 76, window=(CHUNK + 26, 0), softcap=0.7, packed=True, kind="outliers"),
)
FORWARD = (
    *((cfg, CAUSAL) for cfg in (HOPPER.wgmma, AMPERE.mma_sync)),
    (HOPPER.mma_sync_of_groups, WINDOW),
)
MORE_FORWARD = (
    *((cfg, CAUSAL) for cfg in (HOPPER.wgmma_in_turns, HOPPER.mma_sync)),
    (HOPPER.wgmma, WINDOW),
)
DECODE = ((HOPPER.decode, CAUSAL), (HOPPER.decode, WINDOW))
MORE_DECODE = ((AMPERE.decode, CAUSAL),)


def _arch(cfg: KernelConfig) -> int:
    return 80 if cfg in (AMPERE.mma_sync, AMPERE.decode) else 90


for _cfg, _sequences in FORWARD:
    shared_kernels.want([_cfg], _sequences[0].semantics, _arch(_cfg))
for _cfg, _sequences in DECODE:
    shared_kernels.want([_cfg], _sequences[0].semantics_of_cache(_cfg), _arch(_cfg))


def _name(value: object) -> str | None:
    return str(value) if isinstance(value, KernelConfig) else None


@pytest.mark.parametrize(
    ("cfg", "sequences"), full_after(len(FORWARD), FORWARD + MORE_FORWARD), ids=_name
)
def test_forward(cfg: KernelConfig, sequences: tuple[Sequence, ...]) -> None:
    for sequence in sequences:
        sequence = replace(sequence, arch=_arch(cfg))
        assert sequence.differing(sequence.forward(cfg)) == 0, sequence


@pytest.mark.parametrize(
    ("cfg", "sequences"), full_after(len(DECODE), DECODE + MORE_DECODE), ids=_name
)
def test_decode(cfg: KernelConfig, sequences: tuple[Sequence, ...]) -> None:
    for sequence in sequences:
        sequence = replace(sequence, arch=_arch(cfg))
        rows = slice(max(0, sequence.queries - sequence.keys), sequence.queries)
        assert sequence.differing(sequence.cached(cfg, rows), rows) == 0, sequence


def test_the_oracle_is_attention() -> None:
    """Within what 16 bits allow of exact arithmetic."""
    keys, left = CHUNK + 76, CHUNK + 36
    sequence = Sequence(5, keys, group=2, window=(left, 0), softcap=2.0, sinks=(0.5, -1.0))
    q, k, v = (x.astype(np.float64) for x in sequence.tensors)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k.repeat(2, 2)) / 8
    scores = 2 * np.tanh(scores / 2)
    apart = np.arange(keys) - np.arange(keys - 5, keys)[:, None]
    weights = np.exp(np.where((apart <= 0) & (apart >= -left), scores, -np.inf))
    sums = weights.sum(-1) + np.exp([0.5, -1.0])[None, :, None]
    o = np.einsum("bhqk,bkhd->bqhd", weights / sums[..., None], v.repeat(2, 2))
    np.testing.assert_allclose(sequence.expected[0].astype(np.float64), o, atol=2e-4)
    np.testing.assert_allclose(sequence.expected[1], np.log(sums), atol=1e-5)


def test_inputs_reach_what_they_are_for() -> None:
    """Rows that are -0 before the last addition, and a chunk whose sum is 0 beside a maximum."""
    fading, lost = Sequence(3, CHUNK + 176, kind="fading"), Sequence(3, CHUNK + 176, kind="lost")
    with np.errstate(all="ignore"):
        _, total, o = _rows(fading)._merged()
        product = o * (np.float32(1) / total)[:, None]
        assert (np.signbit(product) & (product == 0)).all()
        offset, total, _ = _rows(lost)._chunk(slice(0, CHUNK))
        assert (offset > _rows(lost)._chunk(slice(CHUNK, CHUNK + 176))[0]).all()
        assert (total == 0).all()
    assert not np.signbit(fading.expected[0].astype(np.float32)).any()


def _rows(sequence: Sequence) -> oracle.Rows:
    q, k, v = (x[0, :, 0] for x in sequence.tensors)
    return oracle.Rows(q, k, v, np.full((len(q), len(k)), True), 0.125)
