"""The host code of a kernel library, linked against a CUDA that is not there (pretended_cuda.cc).

It holds as many configs as one likes, since no kernel is compiled, and computes whatever semantics
it is told to.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forward_calls import ForwardCall, unplaced_call

from flashsmith.builder import find_toolchain
from flashsmith.families import DeviceSpec, KernelConfig, Problem, Semantics, device_spec
from flashsmith.runtime.launch_plan import LaunchPlan, plan_from_library
from flashsmith.runtime.libraries import LibraryFunctions

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "src" / "flashsmith" / "csrc"
H200 = device_spec("H200")

_LIBRARY = """\
#include "host/kernel_library.h"
#include "mma_sync/plan.h"
#include "wgmma/plan.h"
#include "two_steps.h"
namespace flashsmith {{
static Semantics the_semantics{{}};
template <class Config>
LibraryConfig config(const Config& config, std::vector<int64_t> numbers, uintptr_t kernel) {{
    return {{numbers,
            {{reinterpret_cast<const void*>(kernel)}},
            [config](NumberReader& numbers, Tensors tensors, const DeviceSpec& device) {{
                return plan_forward(config, numbers, tensors, device, the_semantics);
            }}}};
}}
const KernelLibrary& kernel_library() {{
    static const KernelLibrary library = {{
        .configs = {{
{entries}
            {{{{}},
             {{reinterpret_cast<const void*>(0x2000), reinterpret_cast<const void*>(0x2001)}},
             [](NumberReader& numbers, Tensors, const DeviceSpec&) {{
                 return plan_two_steps(numbers);
             }}}},
        }},
        .semantics = {{}},
        .n_tensors = 11,
        .n_required = 4,
    }};
    return library;
}}
}}
extern "C" void pretended_semantics(bool hides_earlier, bool hides_later, bool takes_limits,
                                    bool changes_scores, bool packed, bool uneven, bool partial) {{
    flashsmith::the_semantics = {{hides_earlier,  hides_later, takes_limits, changes_scores,
                                 packed,         uneven,      partial}};
}}
"""


class Launch(ctypes.Structure):
    """What pretended_cuda.cc notes of a launch."""

    _fields_ = (
        ("kernel", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("device", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("smem_bytes", ctypes.c_uint32),
        ("memory_bytes", ctypes.c_uint64),
        ("arguments", ctypes.c_uint8 * 4096),
    )


@dataclass(frozen=True)
class TensorMap:
    """A tensor map as the pretended driver encodes it."""

    address: int
    swizzle_bytes: int
    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]

    @classmethod
    def read(cls, arguments: bytes, offset: int) -> TensorMap:
        """The map at `offset` of a launch's arguments."""
        words = [
            int.from_bytes(arguments[offset + 8 * i : offset + 8 * i + 8], "little")
            for i in range(16)
        ]
        swizzle, rank = words[1] >> 16 & 0xFFFF, words[1] >> 48
        sizes, strides, box = words[2:], words[2 + rank :], words[1 + 2 * rank :]
        return cls(
            words[0], swizzle, tuple(sizes[:rank]), tuple(strides[: rank - 1]), tuple(box[:rank])
        )


class PretendedLibrary:
    """A loaded library of ``configs``; ``cuda`` has what pretended_cuda.cc lets a test say."""

    def __init__(self, path: Path, configs: Sequence[KernelConfig]) -> None:
        import tvm_ffi

        self.path = path
        module = tvm_ffi.load_module(str(path))
        names = LibraryFunctions.__dataclass_fields__
        self.functions = LibraryFunctions(*(module.get_function(name) for name in names))
        self.cuda = ctypes.CDLL(str(path))
        self.cuda.pretended_launch.restype = ctypes.POINTER(Launch)
        self.cuda.pretended_memory_bytes.restype = ctypes.c_longlong
        for name in ("capture", "join", "instantiate"):
            getattr(self.cuda, f"pretended_{name}").argtypes = [ctypes.c_uint64] * 2
        for name in ("end_capture", "destroy"):
            getattr(self.cuda, f"pretended_{name}").argtypes = [ctypes.c_uint64]
        listed = [tuple(map(int, ints)) for ints in self.functions.configs()]
        self.two_steps = len(configs)  # the index of the config of two_steps.h
        self.index = {cfg: listed.index(cfg.to_ints()) for cfg in configs}

    def reset(self, devices: int = 1) -> None:
        """As if the process had just begun."""
        self.cuda.pretended_reset(devices)

    def leave_context(self) -> None:
        """Has this thread be one that has not called CUDA yet."""
        self.cuda.pretended_leave_context()

    def count(self, name: str) -> int:
        """How often a function of CUDA's was called since the reset."""
        return int(self.cuda.pretended_count(name.encode()))

    def fail(self, name: str, status: int) -> None:
        """Has the next call of a function of CUDA's return `status`."""
        self.cuda.pretended_fail(name.encode(), status)

    def delay(self, name: str, milliseconds: int) -> None:
        """Has every call of a function of CUDA's take so long, until the reset: others overtake."""
        self.cuda.pretended_delay(name.encode(), milliseconds)

    def launches(self) -> list[Launch]:
        """What was launched since the reset."""
        return [
            self.cuda.pretended_launch(i).contents for i in range(self.cuda.pretended_launches())
        ]

    def last_launch(self) -> Launch:
        """The last of them."""
        last: Launch = self.cuda.pretended_launch(self.cuda.pretended_launches() - 1).contents
        return last

    def compute(self, semantics: Semantics) -> None:
        """What the kernels are for from now on."""
        self.cuda.pretended_semantics(*semantics.cpp_fields().values())

    def plan(self, cfg: KernelConfig, call: ForwardCall) -> LaunchPlan:
        """The launch that a call becomes. Raises ValueError as the library does."""
        described = self.functions.plan(self.index[cfg], *call.library_arguments())
        return plan_from_library(["a_kernel"], described)

    def plan_problem(
        self, cfg: KernelConfig, problem: Problem, device: DeviceSpec = H200
    ) -> LaunchPlan:
        """The launch for dense tensors of a problem that are nowhere yet."""
        self.compute(problem.required_semantics(cfg))
        return self.plan(cfg, unplaced_call(problem, 0.125, device))

    def prepare(
        self, cfg: KernelConfig, call: ForwardCall, ordinal: int = 0
    ) -> Callable[..., float | None]:
        """A function of a stream and addresses that launches the call."""
        launch, block_bytes = self.functions.prepare(
            self.index[cfg], *call.library_arguments(), ordinal, False
        )
        assert block_bytes == 0
        return launch  # type: ignore[no-any-return]


def build_pretended_library(folder: Path, configs: Sequence[KernelConfig]) -> PretendedLibrary:
    """Compiles and loads it; half a minute of one core's time."""
    tools = find_toolchain()
    entries = "\n".join(
        f"            config({cfg.to_cpp_struct()}, {{{', '.join(map(str, cfg.to_ints()))}}}, {i}),"
        for i, cfg in enumerate(configs, start=0x1000)
    )
    (folder / "library.cc").write_text(_LIBRARY.format(entries=entries))
    ours = [folder / "library.cc", HERE / "pretended_cuda.cc"]
    sources = [
        *CSRC.glob("host/*.cc"),
        *(CSRC / f"{family}/plan.cc" for family in ("mma_sync", "wgmma")),
        *ours,
    ]
    includes = [f"-I{CSRC}", f"-I{HERE}", *(f"-isystem{path}" for path in tools.include_dirs)]
    flags = ["-std=c++20", "-O1", "-fPIC", "-x", "c++", *includes]

    def compile_one(source: Path) -> Path:
        made = folder / f"{source.parent.name}_{source.stem}.o"
        subprocess.run([tools.gxx, *flags, "-c", source, "-o", made], check=True)
        return made

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    path = folder / "library.so"
    libraries = [f"-L{tools.tvm_ffi_lib_dir}", "-ltvm_ffi", "-Wl,-Bsymbolic", "-Wl,-z,defs"]
    subprocess.run([tools.gxx, "-shared", *objects, *libraries, "-o", path], check=True)
    return PretendedLibrary(path, configs)


def replaced(call: ForwardCall, **changes: Any) -> ForwardCall:
    """The call with other strides or addresses: q=(address, batch, row, head) and so on."""
    names = ("q", "k", "v", "o")
    tensors = tuple(changes.pop(name, old) for name, old in zip(names, call.tensors, strict=True))
    return call._replace(tensors=tensors, **changes)  # type: ignore[arg-type]
