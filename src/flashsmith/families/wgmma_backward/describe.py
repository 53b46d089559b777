"""Describes the kernels of the wgmma_backward family, for `flashsmith explain`."""

from __future__ import annotations

from typing import Any

from flashsmith.families.family import Intensity, SmemRegion, smem_regions
from flashsmith.families.head_dims import tile_columns


def smem_map(cfg: Any) -> tuple[SmemRegion, ...]:
    """The layout of a CTA's dynamic shared memory."""
    d, d_v = tile_columns(cfg.columns), tile_columns(cfg.v_columns)
    tiles = [
        ("K", 1, cfg.B_c, d),
        ("V", 1, cfg.B_c, d_v),
        ("Q", cfg.q_stages, cfg.B_r, d),
        ("do", cfg.do_stages, cfg.B_r, d_v),
    ]
    scores = ["dS"] * cfg.sums_dq + ["P"] * cfg.split_roles
    scores += ["K and dS of the other CTA"] * cfg.shared_dq
    scores += ["S and dP of the other CTA"] * cfg.cta_pair + ["dq"] * cfg.bulk_sums
    return smem_regions(cfg, tiles, rest=", ".join([*scores, "statistics", "barriers"]))


def intensity(cfg: Any) -> Intensity:
    """The FLOP per byte of the loop over queries; the work outside the loop does not count.

    A step of a CTA does 2 B_r B_c (3 d + 2 d_v) FLOP or, without dq, 2 B_r B_c (2 d + 2 d_v). With
    separate_dq, only the main kernel counts, which does not compute dq. A CTA of a pair has half of
    d and d_v. Q and do are read from global memory once per CTA, and with multicast once per two
    CTAs. From shared memory, each warpgroup
    reads its keys of K and V once, and Q and do twice. For its part of dQ, it also reads dS and K.
    With split roles, a warpgroup reads only K or V, and Q and do once; in a pair it also reads the
    other CTA's S or dP.
    """
    both = cfg.columns + cfg.v_columns
    flop = 2 * cfg.B_r * cfg.B_c * (2 * both + (cfg.columns if cfg.sums_dq else 0))
    element, warpgroups = cfg.dtype.element_size, cfg.n_warpgroups
    columns = both / 2 if cfg.split_roles else both
    scores = (64 + cfg.B_r) * columns
    gradients = cfg.B_r * columns
    dq = cfg.B_c * (64 + cfg.dq_columns) if cfg.sums_dq else 0
    if cfg.shared_dq:
        dq = 2 * cfg.B_c * (64 + cfg.dq_columns // 2)
    peer = 4 * cfg.cta_pair * cfg.B_r * cfg.B_c  # S or dP of the other CTA, in fp32
    return Intensity(
        shared=flop / (warpgroups * ((scores + gradients + dq) * element + peer)),
        global_memory=flop / (cfg.B_r * both * element / (2 if cfg.multicast else 1)),
    )


# --- the effects of knob values ------------------------------------------------------------------

ORDERS = {
    "DV_FIRST": "S, then dv and dP, then dk and dq: a step waits for each of them",
    "LATE_DQ": "a step's dq is computed in the next step and overlaps its exponentials",
    "SCORES_TOGETHER": "S and dP together, then dv, dk and dq: P takes no extra registers",
    "SCORES_AHEAD": "the next step's S comes before dk and dq, which overlap its exponentials",
}


def of_dq(cfg: Any, effect: str) -> str:
    """Returns `effect`, the description of a knob that concerns dq, or says that the knob has no
    effect because the main kernel computes no dq."""
    if cfg.separate_dq:
        return "nothing: another kernel computes dq"
    return "nothing: there is no dq" if cfg.without_dq else effect


def order(cfg: Any) -> str:
    if not cfg.sums_dq:
        together = "S or dP, then dv or dk" if cfg.split_roles else "S and dP together, then dv, dk"
        return f"{together}; no dq"
    if cfg.split_roles:
        return "S or dP, then dv or dk; each with half of the previous step's dq"
    return ORDERS[cfg.order.name]


SUMS = {
    "BESIDE_SCORES": "during the next step's first GEMM, and stays in registers until then",
    "SUMS_AT_ONCE": "as soon as its GEMM is done",
    "SUMS_UNDER_DK": "during dk's GEMM, which follows dq's",
}


def sums(cfg: Any) -> str:
    if not cfg.sums_dq:
        return of_dq(cfg, "")
    if cfg.split_roles:
        if cfg.shared_dq:
            return "dq is added during dv's or dk's GEMM"
        return "dq is added in halves, each during another GEMM"
    if cfg.takes_turns:
        return "dq is added as soon as it is done, by the warpgroup that computed it"
    return f"dq is added {SUMS[cfg.dq_sums.name]}"


def early(cfg: Any) -> str:
    if cfg.early_exp:
        return "a step's exponentials end before the wait for the concurrent GEMM"
    if cfg.order.name == "DV_FIRST":
        return "nothing: no GEMM overlaps the exponentials"
    return "the compiler may delay exponentials until the concurrent GEMM has finished"


def roles(cfg: Any) -> str:
    if cfg.split_roles:
        return "the first warpgroup passes P on to the second, which computes dS from it"
    return "a warpgroup computes dk and dv of its own keys"
