"""The microbenchmarks' CUDA sources, compiled for one GPU: seconds, so nothing is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from flashsmith import env
from flashsmith.builder import find_toolchain
from flashsmith.builder.processes import Command, Finished, run_all
from flashsmith.builder.ptxas_report import ResourceReport, parse_ptxas_report
from flashsmith.builder.scratch import require_plain, scratch_folder
from flashsmith.builder.sources import Sources, package_sources
from flashsmith.errors import CompileError

# Its instructions exist under this target's name only.
_TARGETS = {"wgmma": {90: "90a"}}

Kind = Literal["cubin", "ptx"]


def target_of(source: str, arch: int) -> str:
    """The compiler's name for the architecture, '90' or '90a', that a source needs."""
    return _TARGETS.get(source, {}).get(arch, str(arch))


def compile_sources(sources: Sequence[str], arch: int, kind: Kind = "cubin") -> dict[str, bytes]:
    """The images of csrc/roofline/<source>.cu for sm_<arch>, by source.

    Raises ToolchainError, CompileError with the compiler's words, and CompileError when a kernel
    spills: a ceiling measured through spills would be none.
    """
    toolchain = find_toolchain()
    toolchain.check_arch(arch)
    csrc = package_sources()
    require_plain("csrc", csrc)
    reports: dict[str, str] = {}

    def finished(done: Finished) -> None:
        reports[done.command.name] = done.output

    with scratch_folder() as scratch:
        names = [f"roofline/{source}.cu" for source in sources]
        Sources(csrc, names).copy_to(scratch / "csrc")
        commands = [
            Command(
                source,
                (
                    str(toolchain.nvcc),
                    f"-ccbin={toolchain.gxx}",
                    *("-O3", "-std=c++20", f"-{kind}", "-Xptxas=-v", "-Icsrc"),
                    _gencode(target_of(source, arch), kind),
                    f"csrc/roofline/{source}.cu",
                    *("-o", f"{source}.{kind}"),
                ),
            )
            for source in sources
        ]
        run_all(commands, cwd=scratch, jobs=env.jobs(), finished=finished)
        images = {source: (scratch / f"{source}.{kind}").read_bytes() for source in sources}
    if kind == "cubin":
        for source in sources:
            _check_no_spills(source, parse_ptxas_report(reports[source]))
    return images


def _gencode(target: str, kind: Kind) -> str:
    code = f"sm_{target}" if kind == "cubin" else f"compute_{target}"
    return f"-gencode=arch=compute_{target},code={code}"


def _check_no_spills(source: str, reports: dict[str, ResourceReport]) -> None:
    for name, report in reports.items():
        spilled = report.spill_store_bytes + report.spill_load_bytes
        if spilled or report.stack_bytes:
            raise CompileError(
                f"{source}.cu: {name} spills {spilled} bytes and has a stack of "
                f"{report.stack_bytes} a thread; it would not measure what it is for"
            )
