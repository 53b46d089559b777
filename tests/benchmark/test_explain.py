"""The parts of an explanation that are arithmetic: against figures worked out by hand."""

from __future__ import annotations

import io
import re
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from flashsmith.benchmark import explanation_text
from flashsmith.benchmark.explain import explain, knob_effects
from flashsmith.benchmark.kernel_facts import occupancy
from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.table import make_console
from flashsmith.builder.manifest import AdditionalKernel, KernelEntry
from flashsmith.builder.sources import family_sources
from flashsmith.errors import EmulatorError
from flashsmith.families import (
    FAMILIES,
    FlashForwardKernelConfig,
    KernelConfig,
    Problem,
    device_spec,
    get_kernel_configs,
)
from flashsmith.families import parse_kernel_name_into_config as parse
from flashsmith.families.mma_sync.describe import intensity, smem_map
from flashsmith.runtime.target import choose_target

STREAMED = parse("(FP16, 128, 64, 64, 4): async+eager+swizzled+load_2_2_2_tiles")
KEPT = parse("(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles")


def test_shared_memory_is_mapped_without_gaps() -> None:
    q, k, v = smem_map(parse("(BF16, 64, 128, 32, 4): load_0_0_0_tiles"))
    assert (q.tile, q.begin, q.end, q.rows, q.columns) == ("Q, then O", 0, 16384, 128, 64)
    assert (k.begin, k.end, k.rows) == (16384, 20480, 32)
    assert (v.begin, v.end, v.rows) == (20480, 24576, 32)


@pytest.mark.parametrize("cfg", get_kernel_configs("cover"), ids=str)
def test_the_map_ends_where_shared_memory_ends(cfg: FlashForwardKernelConfig) -> None:
    assert smem_map(cfg)[-1].end == cfg.smem_bytes()


def test_registers_limit_the_occupancy() -> None:
    # 168 registers x 128 threads = 21,504 of 65,536: three CTAs. Shared memory: 167,936 // 50,176.
    found = occupancy(KEPT, device_spec("A100"), registers=168)
    assert found.limits == {"shared memory": 3, "threads": 16, "CTAs": 32, "registers": 3}
    assert (found.ctas_per_sm, found.warps_per_sm) == (3, 12)
    assert found.limited_by == ("shared memory", "registers")
    assert occupancy(KEPT, device_spec("A100"), registers=169).limited_by == ("registers",)


def test_the_devices_own_limits_count() -> None:
    # An SM of an A10 runs 1,536 threads and 16 CTAs, not 2,048 and 32.
    found = occupancy(KEPT, device_spec("A10"), registers=168)
    assert found.limits == {"shared memory": 2, "threads": 12, "CTAs": 16, "registers": 3}
    small = parse("(FP16, 32, 128, 32, 8): load_2_2_2_tiles")
    assert occupancy(small, device_spec("A10"), registers=32).ctas_per_sm == 6
    assert occupancy(small, device_spec("A10"), registers=32).limited_by == ("threads",)


def test_intensity() -> None:
    # A step: 4 * 64 * 64 * 128 FLOP. K and V: 16,384 bytes each, once per warp or once per CTA.
    flop = 4 * 64 * 64 * 128
    assert intensity(KEPT).shared == flop / (4 * 2 * 16384)
    assert intensity(STREAMED).shared == flop / (4 * 2 * 16384 + 16384)
    assert intensity(KEPT).global_memory == flop / (2 * 16384)


@pytest.mark.parametrize("cfg", get_kernel_configs("cover"), ids=str)
def test_every_knob_is_explained_and_has_a_place(cfg: FlashForwardKernelConfig) -> None:
    effects = knob_effects(cfg)
    assert [effect.knob for effect in effects] == [knob.name for knob in fields(cfg)]
    for effect in effects:
        assert effect.effect
        assert effect.where


def test_a_knob_is_explained_by_its_value() -> None:
    streamed = {effect.knob: effect for effect in knob_effects(STREAMED)}
    kept = {effect.knob: effect for effect in knob_effects(KEPT)}
    assert "16 of 128 columns" in streamed["K_mma_load_K_tiles"].effect
    assert "16 of 64 keys" in streamed["V_mma_load_K_tiles"].effect
    assert "stay in registers" in kept["Q_mma_load_K_tiles"].effect
    assert kept["swizzled"].value == "on"


@pytest.mark.parametrize(
    ("d_head", "places"),
    [
        (64, ["c xor (r mod 8)"]),
        (32, ["c xor (r / 2 mod 4)"]),
        (96, ["(r mod 8)", "(r / 2 mod 4)"]),
    ],
)
def test_the_swizzle_is_that_of_the_panels(d_head: int, places: list[str]) -> None:
    cfg = parse(f"(FP16, {d_head}, 64, 64, 4): swizzled+load_2_2_2_tiles")
    (effect,) = (known.effect for known in knob_effects(cfg) if known.knob == "swizzled")
    for place in ("(r mod 8)", "(r / 2 mod 4)"):
        assert (place in effect) == any(place in told for told in places)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_places_exist_in_the_sources(family: str) -> None:
    """Each knob's name in csrc stands in its family's sources, or in what these include."""
    sources = "\n".join(text.decode() for text in family_sources(family).texts.values())
    for declared in fields(FAMILIES[family].config_class):
        for name in declared.metadata["where"].split("::"):
            assert re.search(rf"\b{name}\b", sources), f"{declared.name}: no {name} in csrc"


def test_what_the_compiler_said_of_a_kernel_beside_the_main_one_is_shown() -> None:
    beside = AdditionalKernel(
        "combine", "_Z1c", "ptx/c.ptx", 40, 0, 8, 12, 0, 10, 10, ("C1: slow",)
    )
    sizes = (168, 0, 0, 0, 0, 1.0, 10, 10)
    kernel = KernelEntry(KEPT, str(KEPT), "_Z1k", "ptx/k.ptx", *sizes, (), (beside,))
    out = io.StringIO()
    explanation_text._compiler(make_console(out), SimpleNamespace(kernel=kernel))  # type: ignore[arg-type]
    shown = " ".join(out.getvalue().split())
    assert "combine: 40 registers, spilled bytes 8 stored, 12 loaded" in shown
    assert "ptxas warns combine: C1: slow" in shown


def counted(cfg: KernelConfig, device: str, monkeypatch: pytest.MonkeyPatch) -> Problem:
    """The problem whose instructions explain() counts."""
    from flashsmith.benchmark import explain as module

    asked = []

    class Library:
        def entry(self, cfg) -> None: ...

    def prove(cfg, problem, **options):
        asked.append(problem)
        raise EmulatorError("not today")

    monkeypatch.setattr(module, "library_for", lambda *_, **__: Library())
    monkeypatch.setattr(module, "prove", prove)
    with pytest.raises(EmulatorError, match="not today"):
        explain(cfg, choose_target(device, emulate=True), ProgressReporter(quiet=True))
    (problem,) = asked
    return problem


@pytest.mark.parametrize("tiles", ["64, 96, 4", "128, 48, 4", "64, 64, 4", "128, 32, 8"])
def test_the_plain_kernel_is_counted_whatever_its_tiles(tiles: str, monkeypatch) -> None:
    cfg = parse(f"(FP16, 128, {tiles}): async+swizzled+load_2_2_2_tiles")
    problem = counted(cfg, "sm_80", monkeypatch)
    assert cfg.fills_tiles(problem.seq_q, problem.seq_k, cfg.d_head)
    assert problem.seq_k == 2 * cfg.B_c


def test_a_cluster_is_counted_with_the_rows_that_it_serves(monkeypatch) -> None:
    alone = parse("(FP16, 64, 16, 128, 4): decode+stages_2+least_128+parts_1+canonical_1")
    assert counted(alone, "sm_90", monkeypatch).seq_q == 128
    assert counted(replace(alone, chunk_cluster=4), "sm_90", monkeypatch).seq_q == 8


def test_the_map_of_a_cluster_has_its_columns_of_v() -> None:
    alone = parse("(BF16, 128, 16, 128, 4): decode+stages_2+least_128+parts_1+canonical_1")
    cfg = replace(alone, chunk_cluster=8)
    regions = cfg.family.smem_map(cfg)
    assert [a.end for a in regions[:-1]] == [b.begin for b in regions[1:]]
    assert regions[-1].end == cfg.smem_bytes()
    # As in ChunkClusterLayout: Q, eight tiles of 32 keys, and 16 columns of 1,024 keys, whose two
    # groups of eight are 64 bytes apart from the next.
    values = [one for one in regions if one.tile.startswith("V")]
    assert [(one.begin, one.end - one.begin) for one in values] == [
        (4096 + 8 * 8192, 2 * (16384 + 64)),
        (4096 + 8 * 8192 + 32896, 2 * (16384 + 64)),
    ]
    assert {(one.rows, one.columns) for one in values} == {(1024, 16)}
