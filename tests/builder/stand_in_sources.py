"""A csrc in miniature, and an nvcc that replays the recorded output of the real one for it.

The kernel is one line, so a build takes a second, and a tenth of that if nvcc is replayed. g++ and
the linker are always real. Tests of failures around the compiler use these sources. Tests of what
the compiler produces use the sources of the package.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from flashsmith.builder import processes
from flashsmith.builder.kernel_cache import Cache
from flashsmith.builder.library_compilation import Compilation
from flashsmith.builder.library_spec import LibrarySpec
from flashsmith.builder.sources import source_hash
from flashsmith.builder.toolchain import Toolchain
from flashsmith.families import FlashForwardKernelConfig, Semantics, parse_kernel_name_into_config

CONFIGS: tuple[FlashForwardKernelConfig, ...] = (
    parse_kernel_name_into_config("(FP16, 128, 64, 64, 4): async+load_0_0_0_tiles"),
    parse_kernel_name_into_config("(BF16, 128, 128, 64, 4): async+swizzled+load_2_2_2_tiles"),
)

_REAL_CSRC = Path(__file__).parents[2] / "src" / "flashsmith" / "csrc"

_FILES = {
    "mma_sync/forward_kernel.cuh": """\
#pragma once
#include "common/twice.cuh"
#include "mma_sync/flash_attention.cuh"
namespace flashsmith {
template <FlashForwardKernelConfig C, Semantics S = Semantics{}>
struct StaticForwardKernelConfig {
    static constexpr FlashForwardKernelConfig CFG = C;
};
extern __shared__ float shared_memory[];
template <class Kernel>
__global__ void flash_forward_kernel(const ForwardKernelArgs args) {
    for (int i = 0; i < args.seq_q; ++i) shared_memory[i] = args.lse[i];
    __syncthreads();
    args.lse[threadIdx.x] = twice(shared_memory[threadIdx.x ^ 1]) * Kernel::CFG.B_r;
}
}  // namespace flashsmith
""",
    "common/twice.cuh": """\
#pragma once
__device__ inline float twice(float x) {
    return x * 2;
}
""",
    "mma_sync/plan.cc": """\
#include "mma_sync/plan.h"
flashsmith::Plan flashsmith::plan_forward(const FlashForwardKernelConfig&, NumberReader&, Tensors,
                                          const DeviceSpec&, const Semantics&) {
    return {};
}
""",
    "host/launcher.cc": """\
#include <cuda_runtime_api.h>
#include "host/launcher.h"
int device_count() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}
""",
    "host/launcher.h": """\
#pragma once
int device_count();
""",
    "host/bindings.cc": """\
#include "host/kernel_library.h"
#include "host/launcher.h"
extern "C" __attribute__((visibility("default"))) int __tvm_ffi_kernel_count() {
    return flashsmith::kernel_library().configs.size();
}
extern "C" __attribute__((visibility("default"))) int __tvm_ffi_semantics_checksum() {
    return flashsmith::kernel_library().semantics[0];
}
extern "C" __attribute__((visibility("default"))) int __tvm_ffi_device_count() {
    return device_count();
}
""",
}

# What of the package's own sources the miniature has.
_COPIED = (
    "common/constants.cuh",
    "common/types.cuh",
    "common/forward_args.cuh",
    "common/program_args.cuh",
    "host/kernel_library.h",
    "host/plan.h",
    "mma_sync/flash_attention.cuh",
    "mma_sync/plan.h",
)

_PLAYER = """\
#!/bin/sh
# Plays back what the real nvcc said and made for the same sources.
recorded=$(dirname "$0")/../recorded
case "$1" in
    --version | --list-gpu-code) cat "$recorded/$1"; exit ;;
esac
while [ $# -gt 0 ]; do
    case "$1" in
        --keep-dir) keep=$2; shift ;;
        -o) out=$2; shift ;;
        -c) source=$2; shift ;;
    esac
    shift
done
name=$(basename "$source" .cu)
echo "$name" >> "$recorded/calls"
sleep "$(cat "$recorded/seconds")"
if [ -n "$keep" ]; then
    cp "$recorded/$name.ptx" "$recorded/$name.cubin" "$keep" || exit 1
fi
cp "$recorded/$name.o" "$out" || exit 1
cat "$recorded/$name.log"
"""


def write_sources(folder: Path) -> Path:
    """The miniature csrc, in ``folder``."""
    folder.mkdir(parents=True)
    for part in ("host", "common", "mma_sync"):
        (folder / part).mkdir()
    for name in _COPIED:
        shutil.copy(_REAL_CSRC / name, folder / name)
    for name, text in _FILES.items():
        (folder / name).write_text(text)
    return folder


def record_compiler(home: Path, csrc: Path, toolchain: Toolchain) -> Path:
    """A CUDA_HOME whose nvcc replays compiling CONFIGS from ``csrc`` as a single shard."""
    spec = LibrarySpec(CONFIGS, 80, Semantics(), csrc, source_hash("mma_sync", csrc), toolchain)
    cache = Cache(home / "cache")
    recorded = home / "recorded"
    with cache.building(spec.key(), lambda seconds: None), cache.temporary_folder() as temporary:
        compilation = Compilation(spec, temporary, jobs=1)
        with pytest.MonkeyPatch.context() as patch:
            said = _overhear(patch)
            compilation.compile(cache, lambda entry: None)
        shutil.copytree(compilation.build, recorded, ignore=shutil.ignore_patterns("*.ii"))
        for name, words in said.items():
            (recorded / f"{name}.log").write_text(words)
        for kept in (recorded / "keep_0").glob("shard_0.*"):
            if kept.suffix in (".ptx", ".cubin"):
                shutil.move(kept, recorded)
    (recorded / "--version").write_text("Cuda compilation tools, release 13.0, V13.0.88\n")
    (recorded / "--list-gpu-code").write_text("sm_80\nsm_90\n")
    (recorded / "seconds").write_text("0.02")
    (recorded / "calls").touch()
    write_compiler(home / "bin" / "nvcc", _PLAYER)
    os.symlink(toolchain.include_dirs[0], home / "include")
    os.symlink(toolchain.cuda_lib_dir, home / "lib")
    return home


def _overhear(patch: pytest.MonkeyPatch) -> dict[str, str]:
    """What each compiler says from now on, by the name of what it makes."""
    said: dict[str, str] = {}

    def run_all(commands, *, finished, **options):
        def record(done):
            said[done.command.name] = done.output
            finished(done)

        processes.run_all(commands, finished=record, **options)

    patch.setattr("flashsmith.builder.library_compilation.run_all", run_all)
    return said


def copy_home(original: Path, copy: Path) -> Path:
    """A recorded CUDA_HOME of one's own, to count calls in or to break."""
    shutil.copytree(original, copy, symlinks=True, ignore=shutil.ignore_patterns("cache"))
    (copy / "recorded" / "calls").write_text("")
    return copy


def write_compiler(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def calls(home: Path) -> list[str]:
    """Names of what the played-back nvcc compiled, in order."""
    return (home / "recorded" / "calls").read_text().split()
