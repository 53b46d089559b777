"""What is explained of wgmma configs, against figures worked out by hand."""

from __future__ import annotations

import io
import itertools
from dataclasses import fields, replace

import pytest

from flashsmith.benchmark.explain import explain, knob_effects
from flashsmith.benchmark.explanation_text import print_explanation
from flashsmith.benchmark.kernel_facts import CONFLICT_KINDS, conflict_factors, occupancy
from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.table import make_console
from flashsmith.benchmark.tasks import whole_tiles
from flashsmith.families import (
    PingPong,
    Schedule,
    TileOrder,
    WgmmaForwardKernelConfig,
    device_spec,
    get_hopper_configs,
    nearest_legal,
)
from flashsmith.families import parse_kernel_name_into_config as parse
from flashsmith.families.config import is_flag
from flashsmith.families.wgmma.describe import intensity, smem_map
from flashsmith.runtime.target import choose_target
from ptxlab.checks import BankConflicts
from ptxlab.checks.bank_conflicts import Wavefronts

SHIPPED = parse(
    "(FP16, 128, 192, 128, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_gemm+dynamic"
    "+rescale_8"
)
TWO = parse("(BF16, 128, 128, 160, 2wg): tma+stages_2+q_buffers_1+regs_24_240+separate_O")
FLAGS = [knob.name for knob in fields(WgmmaForwardKernelConfig) if is_flag(knob)]
H200 = device_spec("H200")
TARGET = choose_target("sm_90", emulate=True)


def test_shared_memory_is_mapped_without_gaps() -> None:
    regions = smem_map(TWO)
    assert [(r.tile, r.begin, r.end, r.rows) for r in regions] == [
        ("Q", 0, 32_768, 128),
        ("O", 32_768, 65_536, 128),
        ("K 1 of 2", 65_536, 106_496, 160),
        ("K 2 of 2", 106_496, 147_456, 160),
        ("V 1 of 2", 147_456, 188_416, 160),
        ("V 2 of 2", 188_416, 229_376, 160),
        ("barriers, tile info", 229_376, 230_400, 0),
    ]
    names = [region.tile for region in smem_map(SHIPPED)]
    assert names[:2] == ["Q, then O 1 of 2", "Q, then O 2 of 2"]


@pytest.mark.parametrize("cfg", [*get_hopper_configs(), TWO], ids=str)
def test_the_map_ends_where_shared_memory_ends(cfg: WgmmaForwardKernelConfig) -> None:
    regions = smem_map(cfg)
    assert regions[-1].end == cfg.smem_bytes()
    for before, after in itertools.pairwise(regions):
        assert before.end == after.begin


def test_registers_and_shared_memory_leave_room_for_one_cta() -> None:
    found = occupancy(SHIPPED, H200, registers=128)
    assert found.limits == {"shared memory": 1, "threads": 4, "CTAs": 32, "registers": 1}
    assert (found.ctas_per_sm, found.warps_per_sm) == (1, 16)


def test_intensity() -> None:
    """A step of three warpgroups: each reads K, V and its own 64 rows of Q."""
    flop = 4 * 192 * 128 * 128
    tile = 128 * 128 * 2
    assert intensity(SHIPPED).shared == flop / (3 * 2 * tile + 192 * 128 * 2) == 51.2
    assert intensity(SHIPPED).global_memory == flop / (2 * tile) == 192


@pytest.mark.parametrize("cfg", [*get_hopper_configs(), TWO], ids=str)
def test_every_knob_is_explained(cfg: WgmmaForwardKernelConfig) -> None:
    effects = knob_effects(cfg)
    assert [effect.knob for effect in effects] == [knob.name for knob in fields(cfg)]
    assert all(effect.effect for effect in effects)


def test_every_knob_has_words_of_its_own() -> None:
    assert all(knob.metadata["effect"] for knob in fields(WgmmaForwardKernelConfig))


def test_a_knob_is_explained_by_its_value() -> None:
    def words(**changes: object) -> dict[str, str]:
        effects = knob_effects(replace(SHIPPED, **changes))  # type: ignore[arg-type]
        return {effect.knob: effect.effect for effect in effects}

    changes: list[tuple[str, object]] = [
        *(("pingpong", turn) for turn in PingPong),
        *(("schedule", how) for how in Schedule),
        *(("tile_order", order) for order in TileOrder),
        *((flag, not getattr(SHIPPED, flag)) for flag in FLAGS),
        *(("kv_stages", 1), ("q_buffers", 1), ("rescale_threshold", 0), ("B_c", 96)),
        *(("ctas_per_sm", 2), ("exp2_fma_share", 10)),
    ]
    for knob, value in changes:
        as_shipped = value == getattr(SHIPPED, knob)
        assert (words(**{knob: value})[knob] == words()[knob]) is as_shipped, knob
    values = {effect.knob: effect.value for effect in knob_effects(SHIPPED)}
    assert (values["pingpong"], values["overlap"], values["B_r"]) == ("GEMM", "off", "192")


def test_a_knob_is_explained_by_what_it_works_with() -> None:
    def words(knob: str, **changes: object) -> str:
        effect = WgmmaForwardKernelConfig.__dataclass_fields__[knob].metadata["effect"]
        return effect(replace(SHIPPED, **changes))  # type: ignore[arg-type]

    section = words("section_mib", section_mib=8, tile_order=TileOrder.LONGEST_FIRST)
    assert "8 MiB" in section
    assert words("section_mib") != section
    assert words("early_exp") != words("early_exp", overlap=True)
    assert words("separate_O") != words("separate_O", direct_O=True)
    # What Q's only place waits for.
    for_O = words("q_buffers", q_buffers=1)
    for_product = words("q_buffers", q_buffers=1, direct_O=True)
    assert for_O != for_product == words("q_buffers", q_buffers=1, separate_O=True)


def test_conflicts_are_of_what_warps_store() -> None:
    """Notices of tiles are read and written 16 bytes at a time, and are no copies."""
    measured = BankConflicts()
    measured.by_kind = {
        "stmatrix": Wavefronts(8, 12),
        "st.shared.16B": Wavefronts(4, 40),
        "ld.shared.16B": Wavefronts(4, 40),
    }
    expected: dict[str, float | None] = dict.fromkeys(CONFLICT_KINDS)
    assert conflict_factors(measured, SHIPPED) == expected | {"O st": 1.5}


def test_a_run_asks_for_whole_tiles_of_keys_only() -> None:
    assert whole_tiles(256, SHIPPED) == 256
    assert whole_tiles(256, TWO) == 320
    assert whole_tiles(320, parse("(FP16, 128, 64, 96, 4): async+load_0_0_0_tiles")) == 384


def test_an_illegal_config_is_explained_with_a_way_out() -> None:
    cfg = replace(TWO, B_c=176)
    explanation = explain(cfg, TARGET, ProgressReporter(quiet=True))
    assert not explanation.legal
    assert not explanation.ok
    assert explanation.nearest == tuple(nearest_legal(cfg, TARGET.device))
    out = io.StringIO()
    print_explanation(make_console(out), explanation)
    assert "Rules: ILLEGAL" in out.getvalue()
    assert f"246784 of 232448 bytes on {TARGET.device.name}" in out.getvalue()
    assert f"nearest legal configs:\n  {explanation.nearest[0]}\n" in out.getvalue()


def test_a_shipped_config_is_explained_from_its_build_and_a_run() -> None:
    explanation = explain(SHIPPED, TARGET, ProgressReporter(quiet=True))
    assert explanation.ok
    assert explanation.kernel is not None
    assert explanation.static_mix is not None
    facts = explanation.facts
    assert facts is not None
    assert facts.instructions is not None
    # Q K^T and P V of two blocks by twelve warps, 8 steps each.
    assert facts.instructions["mma"] == 12 * 2 * 2 * 8
    assert facts.instructions["TMA"] > 0
    assert facts.conflicts["O st"] == 1.0
    out = io.StringIO()
    print_explanation(make_console(out), explanation)
    text = out.getvalue()
    assert "128 at launch, then 32 per producer and 160 per consumer thread" in text
    assert "ptxas warns" not in text
    assert "Proof: " in text
    facts = explanation.to_json()
    assert facts["kernel"]["warnings"] == ()
    assert facts["smem"][-1]["tile"] == "barriers, tile info"
