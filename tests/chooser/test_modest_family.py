"""A family of attention kernels with no cost model: it is offered, and harms no other choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from grids.proof_grid import covering_cases, proof_grid
from winner_samples import BIG, H200, TUNED, ranked, tuned_table

from flashsmith.chooser import choose, choose_config, forget_choices
from flashsmith.chooser.candidates import candidates
from flashsmith.chooser.winners import WinnersTable
from flashsmith.errors import ArgumentError, SelectionError
from flashsmith.families import (
    FAMILIES,
    DeviceSpec,
    DType,
    Family,
    KernelConfig,
    Problem,
    compiled_d_head,
    device_spec,
    parse_kernel_name_into_config,
    register_family,
)
from flashsmith.families.cpp import CppNames
from flashsmith.families.knob import knob
from flashsmith.operations import OPERATIONS
from flashsmith.tuning import space
from flashsmith.tuning.space import search_space

A100 = device_spec("A100")
EMPTY = WinnersTable()


@dataclass(frozen=True, order=True)
class ModestConfig(KernelConfig):
    FAMILY: ClassVar[str] = "modest"
    OLDEST_ARCH: ClassVar[int] = 80
    SHAPE: ClassVar[tuple[str, ...]] = ("dtype", "d_head")
    LEADING_WORD: ClassVar[str] = "modest"

    dtype: DType = knob("element type", values=tuple(DType))
    d_head: int = knob("head dimension", values=(64, 104, 1024))

    @property
    def n_threads(self) -> int:
        return 128

    def smem_bytes(self, elem_size: int = 2) -> int:
        return 0


class Modest(Family):
    config_class = ModestConfig
    title = "modest"
    space_key = "modest"
    cpp = CppNames(
        config_header="modest/config.cuh",
        kernel_header="modest/kernel.cuh",
        kernel="modest_kernel",
        static_config="StaticModest",
        function="modest_kernel_fn",
        plan_header="modest/plan.h",
    )

    def search_space(self, dtype: DType, d_head: int, masked: bool) -> Sequence[ModestConfig]:
        return [ModestConfig(dtype, d_head)] if d_head in (64, 104) else []


@pytest.fixture
def csrc(tmp_path: Path) -> Iterator[Path]:
    before = dict(FAMILIES)
    folder = tmp_path / "modest"
    folder.mkdir()
    yield folder
    FAMILIES.clear()
    FAMILIES.update(before)
    forget_choices()


@pytest.fixture
def modest(csrc: Path) -> Family:
    registered = register_family(Modest(), csrc)
    forget_choices()
    return registered


# --- a table that knows more families than this installation ------------------------------------


def test_the_best_of_a_family_that_is_not_here_is_of_other_sources() -> None:
    table = WinnersTable()
    figures = [
        ranked("(FP16, 128): martian", 1.0, family="martian", time="2026-11-21T03:00:00+00:00"),
        ranked(BIG, 5.7),
    ]
    figures[0].environment["csrc"] = "0123456789ab"  # type: ignore[index]
    table.add(Problem.parse(TUNED), H200, figures)
    answer = choose(TUNED, H200, table=table)
    assert (answer.evidence, str(answer.config)) == ("table", BIG)
    said = "(csrc 0123456789ab) than those here (none of martian)"
    assert any(said in note for note in answer.notes)
    assert any(said in note for note in table.remarks())
    assert any("martian" in text for text in table.validate())


def test_its_sources_count_once_it_is_here(csrc: Path) -> None:
    from flashsmith.chooser.winners import staleness

    assert staleness.sources_here("modest") == ""
    for name in ("config.cuh", "kernel.cuh", "plan.h"):
        (csrc / name).write_text("// nothing\n")
    register_family(Modest(), csrc)
    assert len(staleness.sources_here("modest")) == staleness.DIGITS


# --- choosing -----------------------------------------------------------------------------------


def test_its_head_dimensions_take_no_problem_from_those_with_a_model(modest: Family) -> None:
    assert compiled_d_head(104) == 128
    assert choose("b2 s512 h4 d104 fp16", A100, table=EMPTY).config.d_head == 128
    with pytest.raises(
        ArgumentError, match="d=1024: kernels exist for multiples of 8 from 8 to 512"
    ):
        choose("b2 s512 h4 d1024 fp16", A100, table=EMPTY)


def test_a_head_dimension_that_has_candidates_elsewhere_only(
    csrc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Modest, "has_cost_model", True)
    register_family(Modest(), csrc)
    assert compiled_d_head(104) == 104
    assert choose("b2 s512 h4 d104 fp16", A100, table=EMPTY).config.d_head == 128
    with pytest.raises(ArgumentError, match="no kernel of d_head 1024 is offered for A100"):
        choose("b2 s512 h4 d1024 fp16", A100, table=EMPTY)


def test_asked_for_it_alone_its_space_is_offered(modest: Family) -> None:
    problem = Problem.parse("b2 s512 h4 d64 fp16")
    assert choose_config(problem, A100, "modest") == ModestConfig(DType.FP16, 64)


def test_among_what_is_built_it_comes_after_what_can_be_estimated(modest: Family) -> None:
    plain = ModestConfig(DType.FP16, 64)
    estimated: Any = parse_kernel_name_into_config("(FP16, 64, 64, 64, 4): load_0_2_2_tiles")
    problem = Problem.parse("b2 s512 h4 d64 fp16")
    assert choose_config(problem, A100, None, (plain,)) == plain
    assert choose_config(problem, A100, None, (plain, estimated)) == estimated


def test_why_it_was_passed_over(modest: Family) -> None:
    for table, text in ((EMPTY, "b2 s512 h4 d64 fp16"), (tuned_table(), TUNED)):
        answer = choose(text, H200, table=table)
        assert answer.passed_over["modest"] == "has no cost model and was not measured"


def test_a_measured_one_of_it_is_weighed(modest: Family) -> None:
    table, problem = WinnersTable(), Problem.parse("b2 s512 h4 d64 fp16")
    modest_name = str(ModestConfig(DType.FP16, 64))
    table.add(problem, H200, [ranked(modest_name, 0.01, str(problem), family="modest")])
    assert str(choose(problem, H200, table=table).config) == modest_name


def test_candidates_follow_the_registry(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offered(self: Family, dtype: DType, d_head: int, device: DeviceSpec, masked: bool) -> Any:
        return [ModestConfig(dtype, d_head)]

    before = candidates(DType.FP16, 64, A100)
    monkeypatch.setattr(Modest, "has_cost_model", True)
    monkeypatch.setattr(Modest, "candidates", offered)
    register_family(Modest(), csrc)
    assert set(candidates(DType.FP16, 64, A100)) - set(before) == {ModestConfig(DType.FP16, 64)}


# --- tuning and proving -------------------------------------------------------------------------


@pytest.mark.parametrize("device", [A100, H200], ids=lambda device: device.name)
def test_a_sweep_of_all_families_takes_its_space(modest: Family, device: DeviceSpec) -> None:
    runs = {"modest", "mma_sync"} | ({"wgmma"} if device is H200 else set())
    for d, found in ((64, runs), (128, runs - {"modest"}), (112, runs - {"modest"})):
        tried = search_space(Problem.parse(f"b2 s512 h4 d{d} fp16"), device)
        assert {cfg.FAMILY for cfg in tried} == found


def test_no_sweep_takes_a_family_that_cannot_run_there() -> None:
    tried = search_space(Problem.parse("b2 s512 h4 d64 fp16"), A100, "both")
    assert {cfg.FAMILY for cfg in tried} == {"mma_sync"}


def test_the_space_of_another_operation(modest: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modest, "operation", "counting")
    sorting = replace(OPERATIONS["forward"], name="sorting")
    monkeypatch.setitem(OPERATIONS, "sorting", sorting)
    asked = replace(Problem.parse("b2 s512 h4 d64 fp16"), operation="sorting")
    monkeypatch.setattr(space, "d_head_for", lambda problem: 64)
    with pytest.raises(SelectionError, match=r"compute counting, and .* operation sorting"):
        search_space(asked, A100, "modest")


def test_a_grid_without_kernels_to_prove(modest: Family) -> None:
    case = next(iter(proof_grid("modest")))
    for kernels in (lambda: case.config, lambda: covering_cases("modest")):
        with pytest.raises(
            ArgumentError, match="family='modest': it has no proof_configs for FP16"
        ):
            kernels()
