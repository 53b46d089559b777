"""Hand-written PTX programs and how to run them: no compiler is needed."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ptxlab.execute import emulate
from ptxlab.interface import EmulationResult, Observer
from ptxlab.machine.memory import GlobalMemory

HEADER = '.version 9.0\n.target sm_80\n.address_size 64\n.file 1 "program.cu"\n'
REGISTERS = ".reg .pred %p<8>; .reg .b32 %r<64>; .reg .f32 %f<32>; .reg .b64 %rd<16>;\n"
#: %rd1, %rd2, ... = the pointer parameters; %r0 = the flat thread number; %rd0 = 4 * %r0.
PROLOGUE = """
mov.u32 %r60, %tid.x; mov.u32 %r61, %ctaid.x; mov.u32 %r62, %ntid.x;
mad.lo.s32 %r0, %r61, %r62, %r60;
mul.wide.u32 %rd0, %r0, 4;
"""


def program(body: str, pointers: int = 1, declarations: str = "", module: str = "") -> str:
    """A module with the entry ``main`` around ``body``."""
    parameters = ", ".join(f".param .u64 p{i}" for i in range(pointers))
    loads = "".join(f"ld.param.u64 %rd{i + 1}, [p{i}];\n" for i in range(pointers))
    return (
        f"{HEADER}{module}.visible .entry main({parameters})\n"
        f"{{\n{REGISTERS}{declarations}{loads}{PROLOGUE}{body}\n}}\n"
    )


def map_program(
    body: str, maps: int, pointers: int = 1, declarations: str = "", cluster: str = ""
) -> str:
    """The same for sm_90a with one argument: tensor maps (128 bytes each), then the pointers.

    %rd11, %rd12, ... = the maps' addresses.
    """
    size = 128 * maps + 8 * pointers
    loads = "".join(
        f"ld.param.u64 %rd{i + 1}, [args+{128 * maps + 8 * i}];\n" for i in range(pointers)
    )
    loads += "mov.b64 %rd10, args;\ncvta.param.u64 %rd10, %rd10;\n"
    loads += "".join(f"add.s64 %rd{11 + i}, %rd10, {128 * i};\n" for i in range(maps))
    head = HEADER.replace("sm_80", "sm_90a")
    return (
        f"{head}.visible .entry main(.param .align 64 .b8 args[{size}]){cluster}\n"
        f"{{\n{REGISTERS}{declarations}{loads}{PROLOGUE}{body}\n}}\n"
    )


@dataclass(frozen=True)
class ElementType:
    """The element type of a tensor map, as far as the emulator wants to know it."""

    element_size: int


HALF = ElementType(2)


@dataclass(frozen=True)
class MapSpec:
    """A tensor map over an array, dimensions innermost first."""

    argument_offset: int
    address: int
    element_type: ElementType
    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int


def map_of(array: np.ndarray, box: Sequence[int], swizzle: int = 0, place: int = 0) -> MapSpec:
    """The map over a whole array of 2- or 4-byte elements, the last axis innermost."""
    strides, kind = tuple(array.strides[::-1][1:]), ElementType(array.itemsize)
    return MapSpec(
        128 * place, array.ctypes.data, kind, array.shape[::-1], strides, tuple(box), swizzle
    )


def aligned(shape: Sequence[int], dtype: object = np.uint16) -> np.ndarray:
    """Zeros at an address that is a multiple of 16."""
    kind = np.dtype(dtype)  # type: ignore[call-overload]
    size = int(np.prod(shape)) * kind.itemsize
    raw = np.zeros(size + 16, np.uint8)
    begin = -raw.ctypes.data % 16
    return raw[begin : begin + size].view(kind).reshape(shape)


#: Store %r1 as this thread's word of the first tensor.
STORE_R1 = "add.s64 %rd8, %rd1, %rd0; st.global.u32 [%rd8], %r1;\n"


def run(
    text: str,
    tensors: Sequence[tuple[np.ndarray, bool]],
    *,
    ctas: int = 1,
    threads: int = 32,
    smem_bytes: int = 0,
    observers: Sequence[Observer] = (),
    fuse: bool = True,
    loop_limit: int = 100_000,
    seed: int | None = None,
    maps: Sequence[MapSpec] = (),
    cluster: int = 1,
    sm_count: int | None = None,
    programmatic: bool = False,
    exact_mma: bool = False,
) -> EmulationResult:
    """Launch ``main`` on (array, writable) tensors."""
    memory = GlobalMemory()
    pointers = [
        memory.register(f"tensor {i}", array, writable=writable)
        for i, (array, writable) in enumerate(tensors)
    ]
    return emulate(
        text,
        "main",
        grid=(ctas, 1, 1),
        block=(threads, 1, 1),
        smem_bytes=smem_bytes,
        argument_bytes=bytes(128 * len(maps)) + struct.pack(f"<{len(pointers)}Q", *pointers),
        memory=memory,
        observers=observers,
        fuse=fuse,
        loop_limit=loop_limit,
        seed=seed,
        tensor_maps=maps,
        cluster=(cluster, 1, 1),
        sm_count=sm_count,
        programmatic=programmatic,
        exact_mma=exact_mma,
    )


def words_of(body: str, *, ctas: int = 1, threads: int = 32, **options: object) -> list[int]:
    """Run a program that leaves %r1 behind and return every thread's."""
    out = np.full(ctas * threads, 0xDEADBEEF, np.uint32)
    declarations = str(options.pop("declarations", ""))
    module = str(options.pop("module", ""))
    text = program(body + STORE_R1 + "ret;", 1, declarations, module)
    run(text, [(out, True)], ctas=ctas, threads=threads, **options)  # type: ignore[arg-type]
    return out.tolist()
