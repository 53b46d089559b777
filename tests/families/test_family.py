"""The registry of families: what may be registered, and what is said where it may not."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from flashsmith.errors import ArgumentError, ConfigParseError
from flashsmith.families import (
    FAMILIES,
    DType,
    Family,
    FlashForwardKernelConfig,
    KernelConfig,
    check_legal,
    families,
    family,
    family_named,
    parse_kernel_name_into_config,
    register_family,
)
from flashsmith.families.cpp import CppNames
from flashsmith.families.family import ConfigSet
from flashsmith.families.knob import knob


@dataclass(frozen=True, order=True)
class AbacusConfig(KernelConfig):
    FAMILY: ClassVar[str] = "abacus"
    OLDEST_ARCH: ClassVar[int] = 80
    SHAPE: ClassVar[tuple[str, ...]] = ("dtype", "d_head")
    LEADING_WORD: ClassVar[str] = "beads"

    dtype: DType = knob("element type", values=tuple(DType))
    d_head: int = knob("head dimension", values=(64,))
    rods: int = knob("rods", values=(1, 2), word="rods", default=1)

    @property
    def n_threads(self) -> int:
        return 32

    def smem_bytes(self, elem_size: int = 2) -> int:
        return 0


class Abacus(Family):
    config_class = AbacusConfig
    title = "abacus"
    cpp = CppNames(
        config_header="abacus/config.cuh",
        kernel_header="abacus/kernel.cuh",
        kernel="abacus_kernel",
        static_config="StaticAbacus",
        function="abacus_kernel_fn",
        plan_header="abacus/plan.h",
    )


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    folder = tmp_path / "abacus"
    folder.mkdir()
    return folder


def test_a_registered_family_is_found_by_name_and_by_config(csrc: Path) -> None:
    registered = register_family(Abacus(), csrc)
    assert family_named("abacus") is registered is AbacusConfig.family
    assert registered in families("forward")
    assert registered not in families("backward")
    cfg = parse_kernel_name_into_config("(BF16, 64): beads+rods_2")
    assert cfg == AbacusConfig(DType.BF16, 64, rods=2)
    assert str(cfg) == "(BF16, 64): beads+rods_2"
    demangled = "void k<Static<flashsmith::AbacusConfig{(flashsmith::DType)15, 64, 2}>>()"
    assert parse_kernel_name_into_config(demangled) == cfg


def test_a_family_answers_as_one_without_special_traits(csrc: Path) -> None:
    cfg, one = AbacusConfig(DType.FP16, 64), register_family(Abacus(), csrc)
    assert (one.sets, one.kernels_to_build(), one.shipped()) == ({}, (), ())
    assert (one.neighbours(cfg), one.search_space(DType.FP16, 64, masked=False)) == ([], ())
    assert (one.intensity(cfg), one.loop_tiles(cfg), one.dividing_tiles(cfg)) == (None, None, {})
    assert one.knob_values == {"dtype": tuple(DType), "d_head": (64,), "rods": (1, 2)}
    assert cfg.fills_tiles(100, 3, 64)
    assert not cfg.fills_tiles(100, 3, 56)


def test_registering_again_replaces_the_family(csrc: Path) -> None:
    register_family(Abacus(), csrc)
    second = register_family(Abacus(), csrc)
    assert AbacusConfig.family is second


def with_class(**changes: Any) -> Family:
    made = Abacus()
    made.config_class = dataclass(frozen=True, order=True)(
        type("AbacusConfig", (AbacusConfig,), changes)
    )
    return made


@pytest.mark.parametrize("name", ["", "Abacus", "aba-cus", "../abacus", 3, None])
def test_a_name_that_is_none(name: object, csrc: Path) -> None:
    with pytest.raises(ArgumentError, match="give a name of small letters, digits and underscores"):
        register_family(with_class(FAMILY=name), csrc)


def test_a_family_without_a_config_class(csrc: Path) -> None:
    with pytest.raises(ArgumentError, match="family: its config_class None has FAMILY=None"):
        register_family(Family(), csrc)


def test_a_config_without_a_head_dimension(csrc: Path) -> None:
    @dataclass(frozen=True, order=True)
    class Bare(KernelConfig):
        FAMILY: ClassVar[str] = "abacus"
        OLDEST_ARCH: ClassVar[int] = 80

        dtype: DType = knob("element type", values=tuple(DType))

    bare = Abacus()
    bare.config_class = Bare
    with pytest.raises(ArgumentError, match="family: Bare has no d_head; every config has both"):
        register_family(bare, csrc)


def test_a_config_that_does_not_say_what_a_cta_takes(csrc: Path) -> None:
    @dataclass(frozen=True, order=True)
    class Silent(KernelConfig):
        FAMILY: ClassVar[str] = "abacus"
        OLDEST_ARCH: ClassVar[int] = 80
        SHAPE: ClassVar[tuple[str, ...]] = ("dtype", "d_head")
        LEADING_WORD: ClassVar[str] = "beads"

        dtype: DType = knob("element type", values=tuple(DType))
        d_head: int = knob("head dimension", values=(64,))

    silent = Abacus()
    silent.config_class = Silent
    with pytest.raises(ArgumentError, match="Silent does not define n_threads and smem_bytes"):
        register_family(silent, csrc)


def test_a_config_whose_family_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests of this file register it.
    monkeypatch.delattr(AbacusConfig, "family", raising=False)
    with pytest.raises(ArgumentError, match="AbacusConfig belongs to no registered family; reg"):
        check_legal(AbacusConfig(DType.FP16, 64))


def test_a_name_that_is_taken() -> None:
    class Usurper(Family):
        config_class = FlashForwardKernelConfig

    with pytest.raises(ArgumentError, match="'mma_sync' is registered already, as MmaSyncFamily"):
        register_family(Usurper())
    assert type(FAMILIES["mma_sync"]) is not Usurper


def test_sources_that_are_not_there(tmp_path: Path, csrc: Path) -> None:
    (tmp_path / "other").mkdir()
    for folder in (None, tmp_path / "nowhere" / "abacus", tmp_path / "other", str(csrc)):
        with pytest.raises(ArgumentError, match=r"csrc=.*is called 'abacus'"):
            register_family(Abacus(), folder)  # type: ignore[arg-type]
    assert "abacus" not in FAMILIES


def test_no_names_for_its_kernels_and_no_operation(csrc: Path) -> None:
    nameless, lost = Abacus(), Abacus()
    nameless.cpp = None  # type: ignore[assignment]
    with pytest.raises(ArgumentError, match="'abacus' has no cpp; set it to a Cpp"):
        register_family(nameless, csrc)
    lost.operation = "counting"
    with pytest.raises(ArgumentError, match="operation='counting': no such operation is regist"):
        register_family(lost, csrc)
    assert "abacus" not in FAMILIES


def test_a_set_that_is_another_s(csrc: Path) -> None:
    class Greedy(Abacus):
        sets: ClassVar[dict[str, ConfigSet]] = {"tune": ConfigSet("mine", list)}

    with pytest.raises(ArgumentError, match="offers the sets tune, which are taken"):
        register_family(Greedy(), csrc)


@dataclass(frozen=True, order=True)
class Unsaid(AbacusConfig):
    frames: int = knob("frames", values=(1, 2), default=1)


@dataclass(frozen=True, order=True)
class Plain(AbacusConfig):
    frames: int = 1


@dataclass(frozen=True, order=True)
class Doubled(AbacusConfig):
    frames: int = knob("frames", values=(1, 2), word="frame", default=1)
    framed: bool = knob("has a frame", word="frame", default=False)


@dataclass(frozen=True, order=True)
class Copying(AbacusConfig):
    tma: bool = knob("beads come by TMA", word="tma", default=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config_class": Unsaid}, "no short form of Unsaid has frames, so that two configs"),
        ({"config_class": Doubled}, "several knobs of Doubled have the word 'frame'; give each a"),
        ({"config_class": Plain}, r"frames of Plain is not declared with knob\(\)"),
        ({"config_class": Copying}, "Copying has the feature 'tma', which marks .* of wgmma"),
        ({"__name__": "WgmmaForwardKernelConfig"}, "WgmmaForwardKernelConfig, like that of wg"),
        ({"LEADING_WORD": "async"}, "LEADING_WORD='async' of AbacusConfig is a feature of mma_sy"),
        ({"LEADING_WORD": "load_0_2_2_tiles"}, "is a feature of mma_sync; choose another word"),
        ({"LEADING_WORD": "stages_2"}, "LEADING_WORD='stages_2' of AbacusConfig is a feature of"),
        ({"LEADING_WORD": ""}, "AbacusConfig has neither LEADING_WORD nor SHAPE_SUFFIX"),
        ({"SHAPE_SUFFIX": "wg"}, "SHAPE_SUFFIX='wg' of AbacusConfig is that of wgmma too"),
        ({"OLDEST_ARCH": None}, "AbacusConfig has OLDEST_ARCH=None; give the first compute cap"),
        ({"OLDEST_ARCH": 150}, "OLDEST_ARCH=150; give .* at most 120, the newest known GPU's"),
        ({"FAMILY": "common"}, "'common' is a folder of C\\+\\+ that every family may include"),
        ({"FAMILY": "host"}, "'host' is a folder of C"),
        ({"FAMILY": "roofline"}, "'roofline' is a folder of C"),
        ({"space_key": "hopper"}, "space_key='hopper' of 'abacus' is taken; choose another"),
        ({"space_key": "tune"}, "space_key='tune' of 'abacus' is taken"),
        ({"space_key": "both"}, "space_key='both' of 'abacus' is taken"),
        ({"space_key": "known"}, "space_key='known' of 'abacus' is taken"),
        ({"sets": {"all": ConfigSet("mine", list)}}, "offers the sets all, which are taken"),
        ({"sets": {"both": ConfigSet("mine", list)}}, "offers the sets both, which are taken"),
        ({"sets": {"64, 64": ConfigSet("mine", list)}}, "'abacus' offers '64, 64'; a key of a set"),
    ],
)  # fmt: skip
def test_what_could_be_taken_for_something_else(
    changes: dict[str, Any], message: str, csrc: Path
) -> None:
    of_family = changes.keys() & {"config_class", "sets", "space_key"}
    made = with_class(**{key: changes[key] for key in changes.keys() - of_family})
    made.config_class.__name__ = changes.get("__name__", "AbacusConfig")
    for key in of_family:
        setattr(made, key, changes[key])
    with pytest.raises(ArgumentError, match=message):
        register_family(made, csrc)
    assert not FAMILIES.keys() & {"abacus", "common", "host", "roofline"}


def test_a_family_that_registers_again_does_no_harm(csrc: Path) -> None:
    for name in ("mma_sync", "wgmma"):
        assert register_family(FAMILIES[name]) is FAMILIES[name]


@pytest.mark.parametrize("given", [Abacus, "abacus", None])
def test_what_is_no_family(given: Any, csrc: Path) -> None:
    with pytest.raises(ArgumentError, match="give an object of a class derived from Family, not"):
        register_family(given, csrc)


def test_an_unregistered_name() -> None:
    with pytest.raises(
        ArgumentError, match=r"family='abacus': known are mma_sync, mma_sync_backward, .*wgmma"
    ):
        family_named("abacus")


PACKAGE = """
from pathlib import Path

from flashsmith.families import families, register_family
from flashsmith.operations.registry import known_operation
from test_family import Abacus


def register():
    register_family(Abacus(), Path(__file__).parent / "csrc" / "abacus")


def curious():
    known = [family.name for family in families()]
    assert known_operation("counting") is None and "mma_sync" in known
    register()


def broken():
    raise OSError("no such abacus")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a package with an entry point where Python finds it."""
    monkeypatch.setattr(family, "_installed_are_loaded", False)
    monkeypatch.setattr(family, "_failures", [])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "test_family", sys.modules[__name__])
    monkeypatch.delitem(sys.modules, "abacus_kernels", raising=False)

    def install(function: str) -> None:
        info = tmp_path / "abacus_kernels-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: abacus-kernels\nVersion: 1\n")
        (info / "entry_points.txt").write_text(
            f"[flashsmith.families]\nabacus = abacus_kernels:{function}\n"
        )
        (tmp_path / "abacus_kernels.py").write_text(PACKAGE)
        (tmp_path / "csrc" / "abacus").mkdir(parents=True)

    return install


def test_the_families_of_installed_packages(install: Any) -> None:
    install("register")
    assert str(parse_kernel_name_into_config("(FP16, 64): beads")) == "(FP16, 64): beads"
    assert "abacus" in {one.name for one in families()}


def test_an_installed_family_that_lists_the_families(install: Any) -> None:
    install("curious")
    assert "abacus" in {one.name for one in families()}


def test_an_installed_family_that_fails(install: Any, caplog: pytest.LogCaptureFixture) -> None:
    install("broken")
    failure = r"'abacus' \(abacus_kernels:broken\) failed to register: OSError: no such abacus"
    assert {one.name for one in families()} >= {"mma_sync", "wgmma"}
    for _ in range(2):  # not once and never again
        with pytest.raises(ArgumentError, match=f"family='abacus': known are .*{failure}"):
            family_named("abacus")
        with pytest.raises(ConfigParseError, match=failure):
            parse_kernel_name_into_config("(FP16, 64): beads")
    (warning,) = caplog.records
    assert (warning.name, warning.levelname) == ("flashsmith", "WARNING")
    assert re.search(failure, warning.getMessage())
