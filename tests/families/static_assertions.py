"""What the device compiler says of static configs that the kernels' assumptions do not hold for."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from flashsmith.builder import find_toolchain
from flashsmith.builder.library_spec import kernel_flags
from flashsmith.builder.sources import package_sources


def failed_assertions(
    folder: Path, family: str, arch: int, header: str, configs: Iterable[str]
) -> set[str]:
    """The texts of the assertions that fail for static configs, given as C++ types, in one go."""
    tools, source = find_toolchain(), folder / "configs.cu"
    instances = "".join(f"template struct Check<{config}>;\n" for config in configs)
    source.write_text(
        f'#include "{header}"\nnamespace flashsmith {{\ntemplate <class Kernel>\n'
        f"struct Check {{ static_assert(Kernel::valid_config()); }};\n{instances}}}\n"
    )
    flags = [flag for flag in kernel_flags(family, arch) if flag != "-lineinfo"]
    includes = [f"-I{path}" for path in (package_sources(), *tools.include_dirs)]
    target = next(flag for flag in flags if flag.startswith("-gencode")).partition(",")[0]
    command = [
        *(str(tools.nvcc), f"-ccbin={tools.gxx}", "-std=c++20", "-ptx"),
        *(target.replace("-gencode=", "-"), *(flag for flag in flags if flag.startswith("-D"))),
        *(*includes, str(source), "-o", str(folder / "configs.ptx")),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    return set(re.findall(r'static assertion failed with "([^"]*)"', done.stderr + done.stdout))
