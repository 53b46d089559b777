"""Short forms and demangled kernel names, back to configs."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from config_samples import LADDER_TOP, LaterConfig, any_config
from hopper_samples import any_config as any_hopper_config
from hypothesis import given
from hypothesis import strategies as st

from flashsmith.errors import ConfigParseError
from flashsmith.families import (
    DType,
    FlashForwardKernelConfig,
    KernelConfig,
    get_cover_configs,
    parse_kernel_name_into_config,
)

FAMILIES = [pytest.param(any_config, id="mma_sync"), pytest.param(any_hopper_config, id="wgmma")]
CSRC = Path(__file__).parents[2] / "src" / "flashsmith" / "csrc"
# Places of the fields that are on or off.
FLAGS = (5, 6, 7, 11, 12, 14, 15, 17)
KERNEL = "void flashsmith::flash_forward_kernel<flashsmith::StaticForwardKernelConfig<{}> >({})"


def demangled(values: str, struct: str = "flashsmith::FlashForwardKernelConfig") -> str:
    return KERNEL.format(f"{struct}{{{values}}}", "flashsmith::ForwardKernelArgs")


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_short_form_and_parse_are_inverses(
    family: st.SearchStrategy[KernelConfig], data: st.DataObject
) -> None:
    cfg = data.draw(family)
    assert parse_kernel_name_into_config(cfg.short_form()) == cfg


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_every_table_row_gives_its_config_back(
    family: st.SearchStrategy[KernelConfig], data: st.DataObject
) -> None:
    cfg = data.draw(family)
    assert parse_kernel_name_into_config(f"| {cfg} | pass | 2.7e-04 (of 1e-03) |") == cfg
    assert parse_kernel_name_into_config(f"│ 1 │ `{cfg}` │ pass │") == cfg


@given(any_config)
def test_every_demangled_form_gives_its_config_back(cfg: FlashForwardKernelConfig) -> None:
    ints = cfg.to_ints()
    words = [f"(flashsmith::DType){ints[0]}", *map(str, ints[1:])]
    for flag in FLAGS:
        words[flag] = "true" if ints[flag] else "false"
    assert parse_kernel_name_into_config(demangled(", ".join(words))) == cfg
    last = max(place for place, value in enumerate(ints) if value)
    assert parse_kernel_name_into_config(demangled(", ".join(words[: last + 1]))) == cfg
    typed = [f"(DType){ints[0]}", *(f"(int){value}" for value in ints[1:])]
    for flag in FLAGS:
        typed[flag] = f"(bool){ints[flag]}"
    profiler = demangled(", ".join(typed), struct="FlashForwardKernelConfig")
    assert parse_kernel_name_into_config(profiler) == cfg


@pytest.mark.parametrize(
    "values",
    [
        "(flashsmith::DType)5, 128, 64, 64, 4, true, true, true, 0, 2, 2, false, true",
        "(DType)5, 128, 64, 64, 4, true, true, true, 0, 2, 2, false, true",
        "(flashsmith::DType)5,128,64,64,4,1,1,1,0,2,2,0,1",
        "(DType)5, (int)128, (int)64, (int)64, (int)4, (bool)1, (bool)1, (bool)1, (int)0, "
        "(int)2, (int)2, (bool)0, (bool)1",
        "5, 128, 64, 64, 4, true, true, true, 0, 2, 2, false, true",
    ],
)
def test_spellings_of_demanglers(values: str) -> None:
    assert parse_kernel_name_into_config(demangled(values)) == LADDER_TOP


def test_what_a_demangler_dropped_is_zero() -> None:
    cfg = parse_kernel_name_into_config(demangled("(flashsmith::DType)15, 64, 128, 32, 8, true"))
    assert cfg == FlashForwardKernelConfig(DType.BF16, 64, 128, 32, 8, async_copy=True)


def test_features_come_in_any_order_and_with_any_blanks() -> None:
    text = " ( fp16,128 ,64,64,4 ):opt_softmax + load_0_2_2_tiles+swizzled+eager+async "
    assert parse_kernel_name_into_config(text) == LADDER_TOP


def test_a_name_that_contains_its_config_twice_is_one_config() -> None:
    name = demangled("(DType)5, 128, 64, 64, 4, true, true, true, 0, 2, 2, false, true")
    assert parse_kernel_name_into_config(f"{name} [clone of {name}]") == LADDER_TOP


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not a kernel name"),
        ("tune", "not a kernel name"),
        ("void other_kernel<float>(float*)", "not a kernel name"),
        ("(FP16, 64, 64, 4): load_0_0_0_tiles", "4 entries"),
        ("(FP16, 128, 64, 64, 4, 5): load_0_0_0_tiles", "6 entries"),
        ("(FP32, 128, 64, 64, 4): load_0_0_0_tiles", "dtype='FP32'"),
        ("(FP16, 128, 64, x, 4): load_0_0_0_tiles", "B_c is 'x'"),
        ("(FP16, 128, 64, ٤, 4): load_0_0_0_tiles", "B_c is"),
        ("(FP16, 128, 0, 64, 4): load_0_0_0_tiles", "B_r=0"),
        ("(FP16, 128, 64, 64, 99999999999): load_0_0_0_tiles", "n_warps=99999999999"),
        ("(FP16, 128, 64, 64, 4): async", "load counts are missing"),
        ("(FP16, 128, 64, 64, 4):", "unknown feature ''"),
        ("(FP16, 128, 64, 64, 4): async++load_0_0_0_tiles", "unknown feature ''"),
        ("(FP16, 128, 64, 64, 4): asynch+load_0_0_0_tiles", "unknown feature 'asynch'"),
        ("(FP16, 128, 64, 64, 4): async+load_0_0_tiles", "unknown feature 'load_0_0_tiles'"),
        ("(FP16, 128, 64, 64, 4): async_1+load_0_0_0_tiles", "unknown feature 'async_1'"),
        ("(FP16, 128, 64, 64, 4): async+async+load_0_0_0_tiles", "'async' is repeated"),
        ("(FP16, 128, 64, 64, 4): load_0_0_0_tiles+load_2_2_2_tiles", "is repeated"),
        ("(FP16, 128, 64, 64, 4): async load_0_0_0_tiles", "unknown feature"),
        (f"| {LADDER_TOP} | {LADDER_TOP} |", "more than one config"),
        (demangled("(DType)5, 128, 64, 64, 4" + ", 1" * 19), "24 values"),
        (demangled("(DType)6, 128, 64, 64, 4"), "dtype='6'"),
        (demangled("(DType)5, 128, 64, 64"), "n_warps=0"),
        (demangled("(DType)5, true, 64, 64, 4"), "d_head is 'true'"),
        (demangled("(DType)5, 128, 64, 64, 4, 2"), "async_copy is '2'"),
        (demangled("(DType)5, 128, 64, 64, 4, -1"), "'-1' is not a value of async_copy"),
        (demangled(""), "'' is not a value of dtype"),
        (demangled("(DType)5, 128, 64, 64, 4") + demangled("(DType)5, 128, 64, 64, 8"), "than one"),
    ],
)
def test_a_text_that_cannot_be_parsed_gets_a_reason(text: str, problem: str) -> None:
    with pytest.raises(ConfigParseError, match=re.escape(problem)) as caught:
        parse_kernel_name_into_config(text)
    assert repr(text) in str(caught.value)


def test_an_unknown_feature_is_answered_with_the_known_ones() -> None:
    known = (
        "known are async, eager, swizzled, load_Q_K_V_tiles, buffer, opt_softmax, stages_N, "
        "lazy_rescale, ping_pong, ctas_N, trim, l2_N, split_N"
    )
    with pytest.raises(ConfigParseError, match=known):
        parse_kernel_name_into_config("(FP16, 128, 64, 64, 4): fast+load_0_0_0_tiles")


def test_an_appended_knob_is_parsed_and_filled() -> None:
    later = replace(LaterConfig(*LADDER_TOP.to_ints()), tiles_ahead=3, fast=True)
    assert parse_kernel_name_into_config(str(later), LaterConfig) == later
    today = LaterConfig(*LADDER_TOP.to_ints())
    assert parse_kernel_name_into_config(str(LADDER_TOP), LaterConfig) == today
    old_name = "LaterConfig{(DType)5, 128, 64, 64, 4, true, true, true, 0, 2, 2, false, true}"
    assert parse_kernel_name_into_config(old_name, LaterConfig) == today


def test_the_names_that_gxx_and_cxxfilt_make_are_parsed(tmp_path: Path) -> None:
    configs = get_cover_configs()
    instances = "\n".join(
        f"template void flash_forward_kernel<StaticForwardKernelConfig<{cfg.to_cpp_struct()}>>"
        "(const ForwardKernelArgs);"
        for cfg in configs
    )
    source = tmp_path / "kernels.cc"
    source.write_text(
        '#include "mma_sync/flash_attention.cuh"\nnamespace flashsmith {\n'
        "template <FlashForwardKernelConfig CFG> struct StaticForwardKernelConfig {};\n"
        "template <typename Kernel> void flash_forward_kernel(const ForwardKernelArgs) {}\n"
        f"{instances}\n}}\n"
    )
    library = tmp_path / "kernels.o"
    compile_command = ["g++", "-std=c++20", f"-I{CSRC}", "-c", str(source), "-o", str(library)]
    subprocess.run(compile_command, check=True)
    symbols = subprocess.run(["nm", str(library)], check=True, capture_output=True, text=True)
    names = subprocess.run(
        ["c++filt"], input=symbols.stdout, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    kernels = [name for name in names if "flash_forward_kernel" in name]
    assert sorted(map(parse_kernel_name_into_config, kernels)) == configs
