#!/usr/bin/env python3
"""Runs the emulator's Hopper probes on the GPU too, and compares the outputs.

    python tools/gpu/hopper_probes.py

There are two sets: wgmma on images of shared memory in all layouts (PTX); and small kernels with
bulk copies, mbarriers, clusters, named barriers and sums in global memory (CUDA). The output has
one line per probe. The exit status is 1 if the outputs of a probe differ: for products by more than
1e-5 (relative L2), with float16 intermediates by more than 1e-3, and for sums at all.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "ptxlab"))

from hopper_probes import Probe, compiled, probes, ptx_of, run_emulated
from ptx_programs import MapSpec, aligned, run
from wgmma_programs import shifted_body, tiles_body, whole_program
from wgmma_tiles import SPANS, Tile, accumulators

from flashsmith.runtime.driver import call, current_gpu

# Codes of the CUDA driver API (cuda.h).
_KINDS = {2: 6, 4: 7}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_MAX_DYNAMIC_SHARED = 8
_ALIGNMENT = 64


class DeviceArrays:
    """Copies of host arrays on the GPU."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays, self.addresses = arrays, {}
        for name, array in arrays.items():
            pointer = ctypes.c_uint64()
            call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(array.nbytes))
            self.addresses[name] = pointer.value
            call("cuMemcpyHtoD_v2", pointer, _host(array), ctypes.c_size_t(array.nbytes))

    def fetch(self, name: str) -> None:
        """Copies an array from the GPU to the host array."""
        array = self.arrays[name]
        pointer = ctypes.c_uint64(self.addresses[name])
        call("cuMemcpyDtoH_v2", _host(array), pointer, ctypes.c_size_t(array.nbytes))

    def free(self) -> None:
        """Frees the memory."""
        for address in self.addresses.values():
            call("cuMemFree_v2", ctypes.c_uint64(address))


def _host(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _encoder() -> ctypes._CFuncPtr:
    """The driver's cuTensorMapEncodeTiled."""
    entry, status = ctypes.c_void_p(), ctypes.c_int()
    call(
        "cuGetProcAddress_v2", b"cuTensorMapEncodeTiled", ctypes.byref(entry), 12000,
        ctypes.c_uint64(0), ctypes.byref(status),
    )  # fmt: skip
    pointers = [ctypes.c_void_p] * 4
    tail = [ctypes.c_int] * 4
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, *pointers,
        *tail,
    )  # fmt: skip
    return kind(entry.value)


def _encode(encoder: ctypes._CFuncPtr, spec: MapSpec, target: int) -> None:
    rank = len(spec.sizes)
    sizes = (ctypes.c_uint64 * rank)(*spec.sizes)
    strides = (ctypes.c_uint64 * max(rank - 1, 1))(*spec.strides_bytes)
    box = (ctypes.c_uint32 * rank)(*spec.box)
    ones = (ctypes.c_uint32 * rank)(*[1] * rank)
    status = encoder(
        target, _KINDS[spec.element_type.element_size], rank, spec.address,
        ctypes.addressof(sizes), ctypes.addressof(strides),
        ctypes.addressof(box), ctypes.addressof(ones), 0, _SWIZZLES[spec.swizzle_bytes], 0, 0,
    )  # fmt: skip
    if status:
        raise SystemExit(f"cuTensorMapEncodeTiled: CUDA error {status} for {spec}")


def launch(
    image: bytes,
    entry: str,
    argument: bytes,
    specs: Sequence[MapSpec],
    *,
    ctas: int,
    threads: int,
    smem_bytes: int,
) -> None:
    """Loads a cubin or PTX, launches the entry with one structure as its argument, and waits."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), image)
    call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
    if smem_bytes:
        call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, smem_bytes)
    storage = ctypes.create_string_buffer(len(argument) + _ALIGNMENT)
    begin = -(-ctypes.addressof(storage) // _ALIGNMENT) * _ALIGNMENT
    ctypes.memmove(begin, argument, len(argument))
    encoder = _encoder() if specs else None
    for spec in specs:
        assert encoder is not None
        _encode(encoder, spec, begin + spec.argument_offset)
    pointers = (ctypes.c_void_p * 1)(begin)
    call("cuLaunchKernel", function, ctas, 1, 1, threads, 1, 1, smem_bytes, None, pointers, None)
    call("cuCtxSynchronize")
    call("cuModuleUnload", module)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """The relative L2 distance; NaN if a value is NaN."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def kernel_distances(probe: Probe) -> tuple[float, float]:
    """The relative L2 distances (GPU to emulator, GPU to float64)."""
    emulated = run_emulated(probe, ptx_of(probe))
    inputs, output = probe.inputs(), probe.blank()
    device = DeviceArrays({**inputs, "output": output})
    launch(
        compiled(probe.source, "cubin"), probe.entry, probe.arguments(device.addresses),
        probe.specs(device.addresses), ctas=probe.cluster, threads=probe.threads,
        smem_bytes=probe.smem_bytes,
    )  # fmt: skip
    device.fetch("output")
    device.free()
    return distance(output, emulated.output), probe.error(output, inputs)


Layout = tuple[str, tuple[str, np.ndarray, np.ndarray]]


def layouts() -> Iterator[Layout]:
    """For each layout: (name, (body, image of shared memory, expected product))."""
    for span in SPANS:
        for n in (8, 64, 128, 256):
            b = Tile(n, 64, True, span)
            yield f"K-major n {n} swizzle {span}", tiles_body(Tile(64, 64, True, span), b, "f16")
            b = Tile(n, 32, False, span)
            yield (
                f"MN-major B n {n} swizzle {span}",
                tiles_body(Tile(64, 32, True, 64), b, "bf16"),
            )
        a = Tile(64, 48, False, span)
        yield f"MN-major A swizzle {span}", tiles_body(a, Tile(16, 48, True, 32), "f16")
    yield "base offset 3", shifted_body()


def layout_distances(body: str, image: np.ndarray, want: np.ndarray) -> tuple[float, float]:
    """The relative L2 distances (GPU to emulator, GPU to float64)."""
    text = whole_program(body, image.size)
    source = aligned(image.shape, np.uint8)
    source[:] = image
    shape = (want.shape[1] // 2, 128)
    emulated, output = aligned(shape, np.float32), aligned(shape, np.float32)
    run(text, [(source, False), (emulated, True)], threads=128)
    device = DeviceArrays({"source": source, "output": output})
    argument = struct.pack("<QQ", device.addresses["source"], device.addresses["output"])
    launch(text.encode() + b"\0", "main", argument, (), ctas=1, threads=128, smem_bytes=0)
    device.fetch("output")
    device.free()
    return distance(output, emulated), distance(output, accumulators(want))


def main() -> int:
    """Runs all probes. Returns 1 if the outputs of one differ."""
    begin, wrong = time.time(), 0
    with current_gpu(0):
        rows: list[tuple[str, float, tuple[float, float]]] = []
        for name, parts in layouts():
            rows.append((name, 1e-5, layout_distances(*parts)))
            wrong += _show(*rows[-1])
        for probe in probes():
            bound = 1e-3 if probe.name in ("drained", "turns") else 1e-5
            # Sums of integers are exact in any order.
            bound = 0.0 if probe.name.endswith("sums") else bound
            rows.append((probe.name, bound, kernel_distances(probe)))
            wrong += _show(*rows[-1])
    print(f"{len(rows)} probes, {wrong} disagree, {time.time() - begin:.0f} s")
    return 1 if wrong else 0


def _show(name: str, bound: float, distances: tuple[float, float]) -> bool:
    wrong = not distances[0] <= bound
    verdict = "DISAGREES" if wrong else "ok"
    print(f"{name:32} to emulator {distances[0]:.1e}  to float64 {distances[1]:.1e}  {verdict}",
          flush=True)  # fmt: skip
    return wrong


if __name__ == "__main__":
    sys.exit(main())
