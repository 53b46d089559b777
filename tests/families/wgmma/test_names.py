"""Short forms and demangled kernel names of the wgmma family, back to configs."""

from __future__ import annotations

import re
import subprocess
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hopper_samples import SHIPPED, any_config, random_configs
from hypothesis import given

from flashsmith.errors import ArgumentError, ConfigParseError
from flashsmith.families import (
    HOPPER_KNOB_VALUES,
    DType,
    PingPong,
    Schedule,
    TileOrder,
    WgmmaForwardKernelConfig,
    get_hopper_configs,
    parse_kernel_name_into_config,
)
from flashsmith.families.knob import enumeration

CSRC = Path(__file__).parents[3] / "src" / "flashsmith" / "csrc"
KNOBS = list(HOPPER_KNOB_VALUES)
FLAGS = [knob for knob, values in HOPPER_KNOB_VALUES.items() if isinstance(values[0], bool)]
KERNEL = "void flashsmith::hopper_forward_kernel<flashsmith::StaticHopperKernelConfig<{}> >({})"
STRUCT = "flashsmith::WgmmaForwardKernelConfig"
SHORT = "(FP16, 128, 192, 128, 3wg): tma+stages_2+q_buffers_2+regs_32_160"

ENUMERATIONS = {
    knob.name: kind for knob in fields(WgmmaForwardKernelConfig) if (kind := enumeration(knob))
}


def demangled(values: str, struct: str = STRUCT) -> str:
    return KERNEL.format(f"{struct}{{{values}}}", "flashsmith::HopperForwardKernelArgs")


def cxxfilt_words(cfg: WgmmaForwardKernelConfig) -> list[str]:
    """The fields as c++filt prints them: enumerations with their type, flags as words."""
    words = list(map(str, cfg.to_ints()))
    for knob, kind in {"dtype": DType, **ENUMERATIONS}.items():
        place = KNOBS.index(knob)
        words[place] = f"(flashsmith::{kind.__name__}){words[place]}"
    for knob in FLAGS:
        words[KNOBS.index(knob)] = "true" if getattr(cfg, knob) else "false"
    return words


def ncu_words(cfg: WgmmaForwardKernelConfig) -> list[str]:
    """The same as Nsight Compute prints them: every one with its type, flags as numbers."""
    kinds = {"dtype": "DType", **{knob: kind.__name__ for knob, kind in ENUMERATIONS.items()}}
    kinds |= dict.fromkeys(FLAGS, "bool")
    pairs = zip(KNOBS, cfg.to_ints(), strict=True)
    return [f"({kinds.get(knob, 'int')}){value}" for knob, value in pairs]


@given(any_config)
def test_every_demangled_form_gives_its_config_back(cfg: WgmmaForwardKernelConfig) -> None:
    words = cxxfilt_words(cfg)
    assert parse_kernel_name_into_config(demangled(", ".join(words))) == cfg
    assert parse_kernel_name_into_config(demangled(",".join(map(str, cfg.to_ints())))) == cfg
    last = max(place for place, value in enumerate(cfg.to_ints()) if value)
    assert parse_kernel_name_into_config(demangled(", ".join(words[: last + 1]))) == cfg
    profiler = demangled(", ".join(ncu_words(cfg)), struct="WgmmaForwardKernelConfig")
    assert parse_kernel_name_into_config(profiler) == cfg


@given(any_config)
def test_two_configs_never_share_a_name(cfg: WgmmaForwardKernelConfig) -> None:
    other = replace(cfg, kv_stages=cfg.kv_stages % 1000 + 1)
    assert cfg.short_form() != other.short_form()
    assert cfg.kernel_name() != other.kernel_name()
    assert re.fullmatch(r"[a-z0-9_]+", cfg.kernel_name())


def test_names_of_many_configs_are_all_different() -> None:
    configs = set(random_configs(4000, seed=7))
    assert len({cfg.kernel_name() for cfg in configs}) == len(configs)
    assert len({cfg.short_form() for cfg in configs}) == len(configs)


def test_the_short_form_in_words() -> None:
    assert str(SHIPPED) == f"{SHORT}+pingpong_gemm+dynamic+rescale_8"
    cfg = WgmmaForwardKernelConfig(DType.BF16, 64, 128, 96, 2, overlap=True, separate_O=True)
    expected = "tma+stages_2+q_buffers_1+regs_24_240+overlap+separate_O"
    assert cfg.short_form(include_tup=False) == expected
    assert cfg.short_form(include_d_head=False) == f"(BF16, 128, 96, 2wg): {expected}"


def test_what_a_demangler_dropped_is_zero() -> None:
    """Nobody's turn, one tile a CTA, heads in their order: zeros, of which the last are dropped."""
    cfg = WgmmaForwardKernelConfig(DType.BF16, 64, 64, 96, 1, overlap=True)
    assert (cfg.pingpong, cfg.schedule, cfg.tile_order) == (
        PingPong.NONE,
        Schedule.ONE_TILE,
        TileOrder.BY_HEAD,
    )
    words = cxxfilt_words(cfg)
    assert cfg.to_ints()[-1] == 0
    last = max(place for place, value in enumerate(cfg.to_ints()) if value)
    assert parse_kernel_name_into_config(demangled(", ".join(words[: last + 1]))) == cfg


def test_names_of_members_are_read_too() -> None:
    cfg = replace(SHIPPED, tile_order=TileOrder.LONGEST_FIRST)
    words = cxxfilt_words(cfg)
    for knob in ENUMERATIONS:
        words[KNOBS.index(knob)] = getattr(cfg, knob).name.lower()
    assert parse_kernel_name_into_config(demangled(", ".join(words))) == cfg


def test_features_come_in_any_order_and_with_any_blanks() -> None:
    text = (
        " ( fp16,128 ,192,128, 3wg ):rescale_8 + dynamic+regs_32_160+pingpong_gemm+q_buffers_2"
        "+stages_2+tma "
    )
    assert parse_kernel_name_into_config(text) == SHIPPED


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("(FP16, 192, 128, 3wg): tma+regs_32_160", "4 entries"),
        ("(FP16, 128, 192, 128, 3, 3wg): tma+regs_32_160", "6 entries"),
        ("(FP32, 128, 192, 128, 3wg): tma+regs_32_160", "dtype='FP32'"),
        ("(FP16, x, 192, 128, 3wg): tma+regs_32_160", "d_head is 'x'"),
        ("(FP16, 128, 192, 0, 3wg): tma+regs_32_160", "B_c=0"),
        ("(FP16, 128, 192, 128, 0wg): tma+regs_32_160", "n_warpgroups=0"),
        ("(FP16, 128, 192, 128, 99999999999wg): tma+regs_32_160", "n_warpgroups=99999999999"),
        ("(FP16, 128, 192, 128, 3wg): tma+stages_2", "registers are missing; add regs_N_N"),
        ("(FP16, 128, 192, 128, 3wg):", "unknown feature ''"),
        (f"{SHORT}+", "unknown feature ''"),
        (f"{SHORT}+async", "unknown feature 'async'"),
        (f"{SHORT}+pingpong", "unknown feature 'pingpong'"),
        (f"{SHORT}+pingpong_both", "unknown feature 'pingpong_both'"),
        (f"{SHORT}+overlap_2", "unknown feature 'overlap_2'; did you mean 'overlap'?"),
        (f"{SHORT}+stages", "unknown feature 'stages'"),
        (f"{SHORT}+rescale_-1", "not a kernel name"),
        (f"{SHORT}+overlap+overlap", "'overlap' is repeated"),
        (f"{SHORT}+tma", "'tma' is repeated"),
        (f"{SHORT}+stages_3", "'stages_3' is repeated or contradicts another"),
        (f"{SHORT}+regs_24_240", "'regs_24_240' is repeated or contradicts"),
        (f"{SHORT}+dynamic+static_persistent", "'static_persistent' is repeated or contra"),
        (f"{SHORT}+pingpong_gemm+pingpong_exp", "'pingpong_exp' is repeated or contradict"),
        (f"{SHORT}+stages_0", "is repeated"),
        ("(FP16, 128, 192, 128, 3wg): tma+stages_0+regs_32_160", "kv_stages=0"),
        (f"| {SHORT} | {SHORT} |", "more than one config"),
        (demangled("5, 128, 192, 128, 3" + ", 1" * 30), "values for the"),
        (demangled("6, 128, 192, 128, 3, 2, 1, 24, 240, 0, 0, 1"), "dtype='6'"),
        (demangled("5, 128, 192, 128, 3, 2, 1, 24, 240, 2, 0, 1"), "overlap is '2'"),
        (demangled("5, 128, 192, 128, 3, 2, 1, 24, 240, 0, 3, 1"), "pingpong=3"),
        (demangled("5, 128, 192, 128, 3, 2, 1, 24, 240, 0, both, 1"), "pingpong is 'both'"),
        (
            demangled("5, 128, 192, 128, 3, 2, 1, 24, -1"),
            "'-1' is not a value of consumer_registers",
        ),
        (demangled("5, 128, 192, 128"), "n_warpgroups=0"),
        (demangled(""), "'' is not a value of dtype"),
    ],
)
def test_a_text_that_cannot_be_parsed_gets_a_reason(text: str, problem: str) -> None:
    with pytest.raises(ConfigParseError, match=re.escape(problem)) as caught:
        parse_kernel_name_into_config(text)
    assert repr(text) in str(caught.value)


def test_an_unknown_feature_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigParseError, match="unknown feature 'fast'; known are tma,") as caught:
        parse_kernel_name_into_config(f"{SHORT}+fast")
    for word in ("stages_N", "regs_N_N", "overlap", "pingpong_gemm", "dynamic", "longest_first"):
        assert f" {word}," in str(caught.value)


@pytest.mark.parametrize("text", [SHORT.replace("(FP16", "(FP16, 64"), SHORT.replace("3wg", "4x")])
def test_a_mistake_is_answered_with_an_example_of_the_family(text: str) -> None:
    with pytest.raises(ConfigParseError) as caught:
        parse_kernel_name_into_config(text)
    assert "wg): tma+" in str(caught.value).split("Write a short form such as")[1]


@pytest.mark.parametrize(
    ("knob", "value", "words"),
    [
        ("B_r", 0, "B_r=0: allowed is 1 to"),
        ("kv_stages", 2**31, "kv_stages=2147483648: allowed is 1 to 2147483647"),
        ("rescale_threshold", -1, "rescale_threshold=-1: allowed is 0 to"),
        ("q_buffers", True, "q_buffers=True: give a whole number"),
        ("q_buffers", 1.5, "q_buffers=1.5: give a whole number"),
        ("overlap", 2, "overlap=2: allowed are True and False"),
        ("pingpong", 3, r"pingpong=3: allowed are NONE \(0\), GEMM \(1\), EXP \(2\)"),
        ("schedule", True, "schedule=True: allowed are ONE_TILE"),
        ("dtype", "fp8", "dtype='fp8': allowed are FP16"),
    ],
)
def test_a_value_that_no_config_has(knob: str, value: object, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        replace(SHIPPED, **{knob: value})  # type: ignore[arg-type]


def test_numbers_stand_for_members_and_flags() -> None:
    cfg = WgmmaForwardKernelConfig(*SHIPPED.to_ints())
    assert cfg == SHIPPED
    assert isinstance(cfg.pingpong, PingPong)
    assert cfg.overlap is False
    assert [type(getattr(cfg, knob.name)) for knob in fields(cfg)] == [
        type(getattr(SHIPPED, knob.name)) for knob in fields(cfg)
    ]


def test_the_names_that_gxx_and_cxxfilt_make_are_parsed(tmp_path: Path) -> None:
    near = {
        replace(cfg, **{knob: value})  # type: ignore[arg-type]
        for cfg in get_hopper_configs()[:3]
        for knob, values in HOPPER_KNOB_VALUES.items()
        for value in values[:4]
    }
    instances = "\n".join(
        f"template void hopper_forward_kernel<StaticHopperKernelConfig<{cfg.to_cpp_struct()}>>"
        "(const HopperForwardKernelArgs);"
        for cfg in near
    )
    source, library = tmp_path / "kernels.cc", tmp_path / "kernels.o"
    source.write_text(
        '#include "sm90_forward/config.cuh"\nnamespace flashsmith {\n'
        "template <WgmmaForwardKernelConfig CFG> struct StaticHopperKernelConfig {};\n"
        "template <typename Kernel> void hopper_forward_kernel(const HopperForwardKernelArgs) {}\n"
        f"{instances}\n}}\n"
    )
    compile_command = ["g++", "-std=c++20", f"-I{CSRC}", "-c", str(source), "-o", str(library)]
    subprocess.run(compile_command, check=True)
    symbols = subprocess.run(["nm", str(library)], check=True, capture_output=True, text=True)
    names = subprocess.run(
        ["c++filt"], input=symbols.stdout, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    kernels = [name for name in names if "hopper_forward_kernel" in name]
    assert set(map(parse_kernel_name_into_config, kernels)) == near
    assert len(kernels) == len(near)
