"""What the C++ side says of configs: their fields and figures, and which assumptions of the kernels
do not hold for them."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from flashsmith.builder import find_toolchain
from flashsmith.builder.library_spec import kernel_flags
from flashsmith.builder.sources import package_sources
from flashsmith.families import KernelConfig, device_spec, rule_bitmask

_TABLE = """
#include "{header}"
using Config = flashsmith::{struct};
{fields}
static_assert(has_all_fields(Config{{}}));
extern "C" void tabulate(const int* configs, int count, long long* out) {{
    for (int i = 0; i < count; ++i) {{
        const Config config = config_from(configs + i * kFields);
        const long long values[] = {{{values}}};
        for (const long long value : values) *out++ = value;
    }}
}}
"""


def fields_in_cpp(config_class: type[KernelConfig]) -> str:
    """C++ of kFields, config_from(ints) and has_all_fields(config). Designators must stand in the
    order of the members, and names for members be as many."""
    names = [knob.name for knob in fields(config_class)]
    members = ", ".join(
        f".{name} = static_cast<decltype(Config::{name})>(v[{place}])"
        for place, name in enumerate(names)
    )
    bound = ", ".join(f"m{place}" for place in range(len(names)))
    return (
        f"constexpr int kFields = {len(names)};\n"
        f"constexpr Config config_from(const int* v) {{ return {{{members}}}; }}\n"
        f"constexpr bool has_all_fields(const Config& config) {{\n"
        f"    [[maybe_unused]] const auto& [{bound}] = config;\n    return true;\n}}\n"
    )


def compiled(source: Path, library: Path, *include: Path) -> ctypes.CDLL:
    """The library of a C++ source that includes ours."""
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    includes = [f"-I{folder}" for folder in (*include, package_sources())]
    subprocess.run(["g++", *flags, *includes, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def packed(configs: Iterable[KernelConfig]) -> ctypes.Array[ctypes.c_int]:
    """The ints of configs one after the other, as config_from takes them."""
    ints = [value for cfg in configs for value in cfg.to_ints()]
    return (ctypes.c_int * len(ints))(*ints)


def figures_in_cpp(
    folder: Path, figures: Sequence[str], configs: Sequence[KernelConfig]
) -> list[tuple[int, ...]]:
    """What the C++ struct's functions of these names return for configs of one class."""
    config_class = type(configs[0])
    source = folder / "table.cc"
    source.write_text(
        _TABLE.format(
            header=config_class.family.cpp.config_header,
            struct=config_class.__name__,
            fields=fields_in_cpp(config_class),
            values=", ".join(f"(long long)config.{name}()" for name in figures),
        )
    )
    found = (ctypes.c_longlong * (len(figures) * len(configs)))()
    table = compiled(source, folder / "table.so")
    table.tabulate(packed(configs), len(configs), found)
    return list(zip(*[iter(found)] * len(figures), strict=True))


def check_assumptions(
    folder: Path, legal: KernelConfig, changes: Mapping[str, Mapping[str, Any]]
) -> None:
    """The device compiler refuses each change of a legal config, which breaks what the kernels take
    for granted, with a text that begins so; and says nothing of the legal one."""
    illegal = {text: replace(legal, **change) for text, change in changes.items()}
    device = device_spec(legal.OLDEST_ARCH)
    assert rule_bitmask(legal, device) == 0
    assert all(rule_bitmask(cfg, device) for cfg in illegal.values())
    said = _failed_assertions(folder, illegal.values())
    unsaid = [text for text in illegal if not any(one.startswith(text) for one in said)]
    assert not unsaid, f"none of {sorted(said)} begins with {unsaid}"
    assert _failed_assertions(folder, [legal]) == set()


def _failed_assertions(folder: Path, configs: Iterable[KernelConfig]) -> set[str]:
    """The texts of the assertions that fail for configs of one family, in one go."""
    configs = list(configs)
    family = configs[0].family
    tools, source = find_toolchain(), folder / "configs.cu"
    folder_of_kernels = {"wgmma": "sm90_forward"}.get(family.name, family.name)
    instances = "".join(
        f"template struct Check<{family.cpp.static_config}<{cfg.to_cpp_struct()}>>;\n"
        for cfg in configs
    )
    source.write_text(
        f'#include "{folder_of_kernels}/static_kernel_configuration.cuh"\nnamespace flashsmith {{\n'
        "template <class Kernel>\n"
        f"struct Check {{ static_assert(Kernel::valid_config()); }};\n{instances}}}\n"
    )
    flags = kernel_flags(family.name, family.config_class.OLDEST_ARCH)
    flags = [flag for flag in flags if flag != "-lineinfo"]
    includes = [f"-I{path}" for path in (package_sources(), *tools.include_dirs)]
    target = next(flag for flag in flags if flag.startswith("-gencode")).partition(",")[0]
    command = [
        *(str(tools.nvcc), f"-ccbin={tools.gxx}", "-std=c++20", "-ptx"),
        *(target.replace("-gencode=", "-"), *(flag for flag in flags if flag.startswith("-D"))),
        *(*includes, str(source), "-o", str(folder / "configs.ptx")),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    return set(re.findall(r'static assertion failed with "([^"]*)"', done.stderr + done.stdout))
