"""Which rows each tile of a wgmma kernel has: whole tiles, the last two of a head, and parts.

One tile a CTA, and O from registers, so that who wrote a row says which tile it was in.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import shared_kernels
from hopper_plans import wgmma_config
from plain_run import full_after

from flashsmith.families import (
    Schedule,
    Semantics,
    TileOrder,
    WgmmaForwardKernelConfig,
    device_spec,
)
from flashsmith.runtime import run_forward
from flashsmith.verify import prove
from flashsmith.verify.attention_semantics import offsets
from flashsmith.verify.proof_inputs import numpy_dtype
from ptxlab.interface import MemoryAccess, Observer

TWO = wgmma_config("(FP16, 64, 128, 32, 2wg): tma+stages_2+q_buffers_1+regs_32_232+direct_O")
THREE = wgmma_config("(FP16, 64, 192, 32, 3wg): tma+stages_2+q_buffers_1+regs_32_160+direct_O")
FOUR = wgmma_config(
    "(BF16, 64, 256, 32, 4wg): tma+stages_2+q_buffers_1+regs_32_112+pingpong_gemm+direct_O"
)
CONFIGS = (TWO, THREE, FOUR)
CLUSTERS = wgmma_config(
    "(FP16, 64, 192, 32, 3wg): tma+stages_2+q_buffers_1+regs_32_160+pingpong_gemm+cluster_2+dynamic"
)
LONG_HEAD = wgmma_config("(FP16, 128, 192, 32, 3wg): tma+stages_2+q_buffers_1+regs_32_160+direct_O")
UNEVEN = Semantics(uneven=True)
CAUSAL = Semantics(mask="causal", uneven=True)
PACKED = Semantics(packed=True, uneven=True)


# Of three warpgroups: the plain run compiles these ways for no other config.
IN_TURN = replace(THREE, schedule=Schedule.DYNAMIC)
LONGEST_FIRST = replace(IN_TURN, tile_order=TileOrder.LONGEST_FIRST)
shared_kernels.want([*CONFIGS, IN_TURN], UNEVEN)
shared_kernels.want([*CONFIGS, LONGEST_FIRST, LONG_HEAD, CLUSTERS], CAUSAL)
shared_kernels.want([THREE, IN_TURN], PACKED)
shared_kernels.want([THREE, IN_TURN], replace(CAUSAL, packed=True))
shared_kernels.want([LONGEST_FIRST], replace(UNEVEN, mask="window"))


class Writers(Observer):
    """By CTA, and by its warpgroups, the rows of o that they wrote, counted over all sequences and
    heads."""

    def __init__(self, cfg: WgmmaForwardKernelConfig, o: np.ndarray) -> None:
        super().__init__()
        self.threads = cfg.n_threads
        self.begins, self.row_bytes = o.ctypes.data, o.shape[-1] * o.itemsize
        self.ends = self.begins + o.nbytes
        self.rows: dict[int, set[int]] = {}
        self.warpgroups: dict[tuple[int, int], set[int]] = {}

    def memory(self, event: MemoryAccess) -> None:
        if event.space != "global" or event.kind != "write":
            return
        for thread, address in zip(event.threads, event.addresses, strict=True):
            if self.begins <= address < self.ends:
                cta, thread_of_cta = divmod(int(thread), self.threads)
                row = (int(address) - self.begins) // self.row_bytes
                self.rows.setdefault(cta, set()).add(row)
                # The first of a CTA's warpgroups copies.
                who = cta, thread_of_cta // 128 - 1
                self.warpgroups.setdefault(who, set()).add(row)


def writers(
    cfg: WgmmaForwardKernelConfig, lens: tuple[int, ...], sm_count: int, **options: Any
) -> Writers:
    """Who wrote which rows of one head."""
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((sum(lens), 1, cfg.d_head)).astype(numpy_dtype(cfg.dtype))
        for _ in "qkv"
    )
    if len(lens) == 1:
        q, k, v = (x[None] for x in (q, k, v))
    else:
        options |= {"cu_seqlens_q": offsets(lens), "cu_seqlens_k": offsets(lens)}
    o = np.empty_like(q)
    seen = Writers(cfg, o)
    device = replace(device_spec(90), sm_count=sm_count)
    run_forward(cfg, q, k, v, o, **options, emulate=True, arch=device, observers=[seen])
    return seen


def tiles(
    cfg: WgmmaForwardKernelConfig, lens: tuple[int, ...], sm_count: int, **options: Any
) -> list[tuple[int, int]]:
    """Of one head, the rows [first, end) of every tile that has any, in the order of the grid."""
    found = []
    for _, rows in sorted(writers(cfg, lens, sm_count, **options).rows.items()):
        assert rows == set(range(min(rows), max(rows) + 1))
        found.append((min(rows), max(rows) + 1))
    return found


def in_rows(*ends: int) -> list[tuple[int, int]]:
    return list(zip((0, *ends), ends, strict=False))


@pytest.mark.parametrize(
    ("cfg", "seq", "full", "causal"),
    [
        (TWO, 300, (128, 256, 300), (64, 192, 300)),
        (THREE, 100, (100,), (100,)),
        (THREE, 192, (192,), (192,)),
        (THREE, 200, (128, 200), (64, 200)),
        (THREE, 256, (128, 256), (64, 256)),
        (THREE, 257, (192, 257), (128, 257)),
        (THREE, 384, (192, 384), (192, 384)),
        (THREE, 440, (192, 320, 440), (64, 256, 440)),
        (FOUR, 256, (256,), (256,)),
        (FOUR, 260, (192, 260), (64, 260)),
        (FOUR, 330, (192, 330), (128, 330)),
        (FOUR, 400, (256, 400), (192, 400)),
        (FOUR, 570, (256, 448, 570), (64, 320, 570)),
    ],
)
def test_the_last_two_tiles_share_their_rows_or_the_first_is_short(
    cfg: WgmmaForwardKernelConfig, seq: int, full: tuple[int, ...], causal: tuple[int, ...]
) -> None:
    # As many SMs as tiles: no last round to split.
    assert tiles(cfg, (seq,), len(full)) == in_rows(*full)
    assert tiles(cfg, (seq,), 132, causal=True) == in_rows(*causal)


def test_under_a_mask_every_sequence_has_its_own_first() -> None:
    assert tiles(THREE, (256, 0, 70, 440), 12, causal=True) == in_rows(
        *(64, 256), 256 + 70, *(326 + end for end in (64, 256, 440))
    )


@pytest.mark.parametrize(
    ("cfg", "causal", "firsts"),
    [
        (THREE, False, {0: (0, 64, 128), 1: (192, 256), 2: (320, 384)}),
        (THREE, True, {0: (0,), 1: (192, 128, 64), 2: (384, 320, 256)}),
        (FOUR, True, {0: (128, 64, 0), 1: (384, 320, 256, 192)}),
        (LONG_HEAD, True, {0: (0,), 1: (64, 128, 192), 2: (256, 320, 384)}),
    ],
    ids=["full", "causal-three", "causal-four", "causal-d128"],
)
def test_the_first_warpgroup_has_the_last_rows_of_short_heads_under_a_mask(
    cfg: WgmmaForwardKernelConfig, causal: bool, firsts: dict[int, tuple[int, ...]]
) -> None:
    seen = writers(cfg, (440,), 3 if len(firsts) == 3 else 2, causal=causal).warpgroups
    assert {who: min(rows) for who, rows in seen.items()} == {
        (cta, warpgroup): first
        for cta, warpgroups in firsts.items()
        for warpgroup, first in enumerate(warpgroups)
    }


def test_every_sequence_has_its_own_last_two() -> None:
    assert tiles(THREE, (256, 0, 70, 440), 12) == in_rows(
        *(128, 256), 256 + 70, *(326 + end for end in (192, 320, 440))
    )


@pytest.mark.parametrize(
    ("cfg", "seq", "sm_count", "ends"),
    [
        (TWO, 256, 4, (64, 128, 192, 256)),
        (TWO, 300, 6, (64, 128, 192, 256, 300)),
        (TWO, 300, 5, (128, 256, 300)),  # six parts for five SMs
        (THREE, 100, 2, (64, 100)),
        (THREE, 256, 132, (64, 128, 192, 256)),
        (FOUR, 330, 132, (64, 128, 192, 256, 320, 330)),
        # Four tiles on three SMs: the last round is one.
        (THREE, 700, 3, (192, 384, 576, 640, 700)),
    ],
)
def test_tiles_of_a_round_that_few_sms_take_part_in_are_split(
    cfg: WgmmaForwardKernelConfig, seq: int, sm_count: int, ends: tuple[int, ...]
) -> None:
    assert tiles(cfg, (seq,), sm_count) == in_rows(*ends)


@pytest.mark.parametrize(
    ("cfg", "seq", "heads", "sm_count", "longs", "shorts"),
    [
        # One short tile a head, and a third of the SMs' number of heads.
        (TWO, 300, 3, 4, "0.0 0.1 0.2 1.0 1.1 1.2 2.0 2.1", "2.2"),
        (TWO, 300, 3, 8, "0.0 0.1 0.2 1.0 1.1 2.0 2.1", "1.2 2.2"),
        (THREE, 500, 2, 4, "0.0 0.1 0.2 1.0 1.1", "1.2"),
        # The last two share four or six warpgroups' rows.
        (THREE, 420, 3, 6, "0.0 0.1 0.2 1.0 2.0", "1.1 1.2 2.1 2.2"),
        (FOUR, 630, 2, 4, "0.0 0.1 0.2 1.0", "1.1 1.2"),
        # No tile is short, or all are.
        (THREE, 384, 3, 4, "0.0 0.1 1.0 1.1 2.0 2.1", ""),
        (TWO, 60, 3, 4, "0.0 1.0 2.0", ""),
        (THREE, 200, 2, 5, "0.0 0.1 1.0 1.1", ""),
    ],
)
def test_the_last_heads_short_tiles_come_last(
    cfg: WgmmaForwardKernelConfig, seq: int, heads: int, sm_count: int, longs: str, shorts: str
) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((1, seq, heads, 64)).astype(numpy_dtype(cfg.dtype)) for _ in "qkv"
    )
    o = np.empty_like(q)
    seen = Writers(cfg, o)
    device = replace(device_spec(90), sm_count=sm_count)
    run_forward(cfg, q, k, v, o, emulate=True, arch=device, observers=[seen])
    firsts: dict[int, list[int]] = {head: [] for head in range(heads)}
    names = []
    for _, rows in sorted(seen.rows.items()):
        (head,) = {row % heads for row in rows}
        names.append(f"{head}.{len(firsts[head])}")
        firsts[head].append(min(rows) // heads)
    assert " ".join(names) == f"{longs} {shorts}".strip()
    assert all(found == sorted(found) for found in firsts.values()), "a head's rows in their order"


@pytest.mark.parametrize(
    ("cfg", "sm_count"),
    full_after(1, sorted(product(CONFIGS, (1, 3, 132)), key=lambda case: case != (THREE, 3))),
)
def test_all_ways_are_right(cfg: WgmmaForwardKernelConfig, sm_count: int) -> None:
    one = replace(cfg, schedule=Schedule.DYNAMIC)
    longest_first = replace(one, tile_order=TileOrder.LONGEST_FIRST)
    options: dict[str, Any] = {"checks": True, "sm_count": sm_count, "row_max": False}
    for verdict in (
        prove(one, seq=330, seq_k=70, heads=2, heads_k=1, **options),
        prove(cfg, seq=450, seq_k=40, **options),
        prove(one, lens_q=(260, 0, 1, 70), lens_k=(40, 9, 0, 70), heads=2, **options),
        prove(longest_first, seq=450, seq_k=330, causal=True, **options),
        prove(longest_first, seq=450, seq_k=330, window=(90, 40), **options),
        prove(one, lens_q=(260, 0, 1, 70), lens_k=(290, 9, 0, 40), causal=True, **options),
    ):
        assert verdict.ok, str(verdict)


@pytest.mark.parametrize("cfg", CONFIGS, ids=["two", "three", "four"])
def test_parts_compute_the_same_bits(cfg: WgmmaForwardKernelConfig) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 300, 2, 64)).astype(numpy_dtype(cfg.dtype)) for _ in "qkv")
    outputs = [
        run_forward(cfg, q, k, v, emulate=True, arch=replace(device_spec(90), sm_count=n)).o
        for n in (1, 7, 132)
    ]
    assert all(output.tobytes() == outputs[0].tobytes() for output in outputs)


@pytest.mark.parametrize("sm_count", [2, 4])
def test_clusters_with_the_last_rows_first_are_right(sm_count: int) -> None:
    verdict = prove(CLUSTERS, seq=700, causal=True, checks=True, sm_count=sm_count, row_max=False)
    assert verdict.ok, str(verdict)
