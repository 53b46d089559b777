"""Score and mask functions in the forward pass, proven in the emulator with all checks on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plain_run import full_after, full_except
from program_calls import PROGRAMS, TABLES, Call, wrong

from flashsmith.families import KernelConfig, parse_kernel_name_into_config

# Uneven lengths; lists by one, two and three warpgroups; both ways to store O; GEMMs that overlap
# the softmax, and GEMMs in turns.
TURNS, OVERLAP, DIRECT = CONFIGS = tuple(
    parse_kernel_name_into_config(text)
    for text in (
        "(FP16, 64, 192, 32, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_gemm+dynamic"
        "+longest_first+rescale_8",
        "(BF16, 64, 128, 48, 2wg): tma+stages_3+q_buffers_1+regs_24_240+overlap+pingpong_exp"
        "+static_persistent+separate_O",
        "(FP16, 64, 64, 64, 1wg): tma+stages_1+q_buffers_2+regs_24_240+direct_O",
    )
)
PACKED = Call(lens_q=(70, 0, 1, 200), lens_k=(75, 9, 0, 190))
# Neighbouring rows are heads of one query.
PACKS = parse_kernel_name_into_config(
    "(BF16, 64, 64, 48, 1wg): tma+stages_2+q_buffers_1+regs_24_240+pack_gqa"
)
# Distances of 0 to 200 either way.
TALL = Call(batch=1, seq_q=200, seq_k=150, heads_q=2, heads_k=1, d=8)
CALLS = {
    "dense": Call(),
    "causal": Call(causal=True),
    "window": Call(window=(40, 7), seq_q=90),
    "softcap": Call(softcap=1.5, seq_q=90, batch=1),
    "packed": PACKED,
    "packed causal": Call(lens_q=PACKED.lens_q, lens_k=PACKED.lens_k, causal=True),
    "packed part": replace(PACKED, ranges=((40, 75), (0, 0), (274, 0), (3, 190))),
    "no keys": Call(seq_q=10, seq_k=0),
    "many heads": Call(batch=1, seq_q=70, seq_k=330, heads_q=6, heads_k=1, d=64),
}


def prove(cfg: KernelConfig, name: str, call: Call, *, sinks: bool = False) -> None:
    made = PROGRAMS[name](call, np.random.default_rng(3))
    assert wrong(cfg, call, made, sinks=sinks, sm_count=3) == ""


@pytest.mark.parametrize("name", full_except(PROGRAMS, "everything"))
def test_every_program(name: str) -> None:
    prove(TURNS, name, CALLS["dense"])


KINDS_OF_CALLS = [it for it in CALLS if it not in ("dense", "no keys")]


@pytest.mark.parametrize("name", full_except(KINDS_OF_CALLS, "packed causal"))
def test_every_kind_of_call(name: str) -> None:
    prove(TURNS, "alibi_in_documents", CALLS[name])


@pytest.mark.parametrize(
    ("cfg", "name"),
    [
        pytest.param(cfg, name, id=f"{name}-{how}", marks=[pytest.mark.full] * (name != plain))
        for cfg, how, plain in (
            (OVERLAP, "overlap", "packed causal"),
            (DIRECT, "direct_O", "many heads"),
        )
        for name in ("packed causal", "many heads")
    ],
)
def test_every_way_to_walk_lists(cfg: KernelConfig, name: str) -> None:
    prove(cfg, "alibi_in_documents", CALLS[name], sinks=True)


# One stage, with trimmed masks, and with a ring.
MMA_SYNC = tuple(
    parse_kernel_name_into_config(text)
    for text in (
        "(FP16, 64, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax",
        "(FP16, 64, 64, 32, 4): load_4_4_2_tiles+opt_softmax+lazy_rescale+trim",
        "(FP16, 64, 128, 128, 4): async+eager+swizzled+load_2_2_4_tiles+opt_softmax+stages_2+trim"
        "+l2_16",
    )
)


@pytest.mark.parametrize(
    ("cfg", "name", "call"),
    [
        pytest.param(MMA_SYNC[0], "alibi_in_documents", "packed causal", marks=pytest.mark.full),
        (MMA_SYNC[1], "blocks", "dense"),
        pytest.param(MMA_SYNC[1], "capped", "softcap", marks=pytest.mark.full),
        pytest.param(MMA_SYNC[2], "alibi_in_documents", "many heads", marks=pytest.mark.full),
    ],
    ids=["one stage", "trim", "score", "ring"],
)
def test_the_mma_sync_family(cfg: KernelConfig, name: str, call: str) -> None:
    made = PROGRAMS[name](CALLS[call], np.random.default_rng(3))
    assert wrong(cfg, CALLS[call], made, arch=80) == ""


@pytest.mark.parametrize("name", full_except(TABLES, "near"))
def test_tables_along_keys(name: str) -> None:
    """Tiles inside the tables, beyond them, and across their ends."""
    made = TABLES[name](TALL, np.random.default_rng(3))
    assert wrong(TURNS, TALL, made, sm_count=3) == ""


@pytest.mark.parametrize(
    ("cfg", "arch", "name"),
    [
        pytest.param(
            cfg, arch, name, id=f"{name}-{how}", marks=[pytest.mark.full] * (name != plain)
        )
        for cfg, arch, how, plain in (
            (OVERLAP, 90, "overlap", ""),
            (PACKS, 90, "packs", "near"),
            (MMA_SYNC[1], 80, "mma", "from_the_end"),
        )
        for name in ("near", "from_the_end")
    ],
)
def test_tables_in_other_kernels(cfg: KernelConfig, arch: int, name: str) -> None:
    call = replace(TALL, causal=True, lens_q=(1, 150), lens_k=(9, 170))
    made = TABLES[name](call, np.random.default_rng(3))
    assert wrong(cfg, call, made, arch=arch) == ""


@pytest.mark.parametrize(
    ("cfg", "arch"), full_after(1, [(OVERLAP, 90), (MMA_SYNC[1], 80)]), ids=["90", "80"]
)
def test_parts_of_different_lengths(cfg: KernelConfig, arch: int) -> None:
    """Under a mask that does not depend on the sequence, whose lists do."""
    call = Call(ranges=((30, 60), (0, 201)), causal=True)
    made = PROGRAMS["scattered"](call, np.random.default_rng(3))
    assert wrong(cfg, call, made, arch=arch) == ""


def test_rows_without_keys() -> None:
    prove(TURNS, "scattered", CALLS["no keys"])


def test_new_values_need_no_new_kernel() -> None:
    """Other lengths, numbers and tensors give the same program."""
    made = [
        PROGRAMS[name](call, np.random.default_rng(seed)).program
        for seed, call in enumerate((CALLS["dense"], CALLS["packed"]))
        for name in ("squared", "blocks")
    ]
    assert made[:2] == made[2:]
    assert made[0] is made[2]
