"""Small Hopper kernels with their inputs, launches and expected outputs, for emulator and GPU.

The kernels stand in ``hopper/*.cu``. Everything here is plain data: who runs a probe gives the
arrays addresses of its own and encodes the tensor maps.
"""

from __future__ import annotations

import struct
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
from ptx_programs import HALF, ElementType, MapSpec, aligned

from flashsmith.builder.toolchain import find_toolchain
from ptxlab.execute import emulate
from ptxlab.interface import EmulationResult, Observer
from ptxlab.machine.memory import GlobalMemory

SOURCES = Path(__file__).parent / "hopper"
ARCH = "90a"
_TILE = 64 * 64 * 2
_MAP_BYTES, _MAPS = 128, 3

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Map:
    """A tensor map of the probe's argument number ``place`` over a named array."""

    place: int
    array: str
    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    kind: ElementType = HALF

    def at(self, address: int) -> MapSpec:
        """The specification, with the array at an address."""
        return MapSpec(
            _MAP_BYTES * self.place, address, self.kind, self.sizes, self.strides_bytes, self.box,
            self.swizzle,
        )  # fmt: skip


@dataclass(frozen=True)
class Probe:
    """One launch. ``result`` computes the output from the inputs in float64.

    The output array is called ``output``; ``input`` is the pointer argument, where there is one.
    """

    name: str
    source: str
    entry: str
    threads: int
    smem_bytes: int
    shapes: Mapping[str, tuple[int, ...]]
    output: tuple[tuple[int, ...], type]
    maps: tuple[Map, ...]
    result: Callable[[Mapping[str, np.ndarray]], np.ndarray]
    steps: int = 1
    cluster: int = 1

    def __str__(self) -> str:
        return self.name

    def inputs(self) -> dict[str, np.ndarray]:
        """Seeded float16 inputs at addresses that are multiples of 16."""
        rng, arrays = np.random.default_rng(len(self.name)), {}
        for name, shape in self.shapes.items():
            arrays[name] = aligned(shape, np.float16)
            arrays[name][...] = rng.standard_normal(shape)
        return arrays

    def blank(self) -> np.ndarray:
        """An output full of NaN."""
        array = aligned(*self.output)
        array[...] = np.nan
        return array

    def arguments(self, addresses: Mapping[str, int]) -> bytes:
        """The kernel's argument, with room for the tensor maps."""
        tail = struct.pack("<QQi", addresses.get("input", 0), addresses["output"], self.steps)
        # The structure is aligned to 64 bytes, so its size is, too.
        return bytes(_MAP_BYTES * _MAPS) + tail.ljust(64, b"\0")

    def specs(self, addresses: Mapping[str, int]) -> list[MapSpec]:
        """The tensor maps, for arrays at these addresses."""
        return [known.at(addresses[known.array]) for known in self.maps]

    def error(self, output: np.ndarray, inputs: Arrays) -> float:
        """Relative L2 distance from the expected output."""
        want = self.result({name: array.astype(np.float64) for name, array in inputs.items()})
        got = output.astype(np.float64)
        return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def _panels(place: int, array: str, span: int, rows: int = 64) -> Map:
    """A rows x 64 tile as panels of ``span`` bytes (16 without a swizzle)."""
    columns = (span or 16) // 2
    count = 64 // columns
    strides = (128, 2 * columns)
    return Map(place, array, (columns, rows, count), strides, (columns, 64, count), span)


def _steps(place: int, array: str, rows: int, steps: int, box_rows: int) -> Map:
    """A rows x (64 steps) matrix, one box a step."""
    return Map(place, array, (64, rows, steps), (128 * steps, 128), (64, box_rows, 1), 128)


def probes() -> list[Probe]:
    """Every probe."""
    found = []
    for span in (0, 32, 64, 128):
        found.append(Probe(
            f"tiles_{span}", "products.cu", f"tiles_{span}", 128, 2 * _TILE + 16,
            {"a": (64, 64), "b": (64, 64)}, ((64, 64), np.float32),
            (_panels(0, "a", span), _panels(1, "b", span)), lambda x: x["a"] @ x["b"].T,
        ))  # fmt: skip
        found.append(Probe(
            f"fragments_{span}", "products.cu", f"fragments_{span}", 128, _TILE + 16,
            {"input": (64, 64), "v": (64, 64)}, ((64, 64), np.float32),
            (_panels(0, "v", span),), lambda x: x["input"] @ x["v"],
        ))  # fmt: skip
    for steps in (1, 2, 5):
        found.append(Probe(
            f"ring_{steps}", "pipelines.cu", "ring", 384, 6 * _TILE + 64,
            {"a": (128, 64 * steps), "b": (64, 64 * steps)}, ((128, 64), np.float32),
            (_steps(0, "a", 128, steps, 128), _steps(1, "b", 64, steps, 64)),
            lambda x: x["a"] @ x["b"].T, steps,
        ))  # fmt: skip
    found.append(Probe(
        "multicast", "pipelines.cu", "multicast", 256, 4 * _TILE + 64,
        {"a": (128, 320), "b": (64, 320)}, ((128, 64), np.float32),
        (_steps(0, "a", 128, 5, 64), _steps(1, "b", 64, 5, 32)),
        lambda x: x["a"] @ x["b"].T, 5, cluster=2,
    ))  # fmt: skip
    # The last tile of the output hangs over its end.
    found.append(Probe(
        "drained", "pipelines.cu", "drained", 128, 3 * _TILE + 16,
        {"a": (192, 64), "b": (64, 64)}, ((150, 64), np.float16),
        (
            _panels(0, "a", 128, 192), _panels(1, "b", 128),
            Map(2, "output", (64, 150, 1), (128, 19200), (64, 64, 1), 128),
        ),
        lambda x: x["a"][:150] @ x["b"].T, 3,
    ))  # fmt: skip
    found.append(Probe(
        "turns", "pipelines.cu", "turns", 256, 4 * _TILE + 16,
        {"a": (128, 64), "b": (64, 64)}, ((128, 64), np.float32),
        (replace(_panels(0, "a", 128, 128), box=(64, 128, 1)), _panels(1, "b", 128)),
        _turns, 3,
    ))  # fmt: skip
    found.append(Probe(
        "sums", "sums.cu", "sums", 128, 64 * 64 * 4, {"input": (64, 64)}, ((64, 64), np.float32),
        (), lambda x: 13 * np.rint(16 * x["input"]) + 6, cluster=2,
    ))  # fmt: skip
    found.append(Probe(
        "box_sums", "sums.cu", "box_sums", 128, 64 * 64 * 4, {"input": (64, 64)},
        ((50, 64), np.float32), (Map(2, "output", (64, 50), (256,), (64, 16), 0, ElementType(4)),),
        _box_sums,
    ))  # fmt: skip
    return found


def _box_sums(x: Mapping[str, np.ndarray]) -> np.ndarray:
    # Four rows more at the top, and as many as the last box reaches below.
    sums = np.ones((62, 64))
    for box, rows in enumerate(np.split(np.rint(16 * x["input"]), 4)):
        sums[14 * box : 14 * box + 16] += rows
    return 2 * sums[4:54]


def _turns(x: Mapping[str, np.ndarray]) -> np.ndarray:
    halves = []
    for own in np.split(x["a"], 2):
        scores = own @ x["b"].T
        rounded = sum((scores * (s + 1)).astype(np.float16).astype(np.float64) for s in range(3))
        halves.append(rounded @ own.T)
    return np.concatenate(halves)


@cache
def compiled(source: str, form: str = "ptx") -> bytes:
    """PTX (or ``form="cubin"``) of a source, by the builder's compiler."""
    tools = find_toolchain()
    kind = f"code={'compute' if form == 'ptx' else 'sm'}_{ARCH}"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / form
        command = [
            str(tools.nvcc), "-std=c++20", "-O3", "-lineinfo",
            f"-gencode=arch=compute_{ARCH},{kind}", f"-{form}", "-o", str(out),
            *(f"-I{headers}" for headers in tools.include_dirs), str(SOURCES / source),
        ]  # fmt: skip
        subprocess.run(command, check=True, timeout=300)
        return out.read_bytes()


def ptx_of(probe: Probe) -> str:
    """A probe's PTX."""
    return compiled(probe.source).decode()


@dataclass
class Run:
    """What came of a probe in the emulator."""

    output: np.ndarray
    inputs: dict[str, np.ndarray]
    result: EmulationResult
    observers: Sequence[Observer] = field(default_factory=tuple)


def run_emulated(
    probe: Probe, ptx: str, *, observers: Sequence[Observer] = (), seed: int | None = None
) -> Run:
    """Execute a probe, or a variant of its PTX."""
    inputs, output = probe.inputs(), probe.blank()
    memory = GlobalMemory()
    addresses = {name: memory.register(name, a, writable=False) for name, a in inputs.items()}
    addresses["output"] = memory.register("output", output, writable=True)
    result = emulate(
        ptx,
        probe.entry,
        grid=(probe.cluster, 1, 1),
        block=(probe.threads, 1, 1),
        cluster=(probe.cluster, 1, 1),
        smem_bytes=probe.smem_bytes,
        argument_bytes=probe.arguments(addresses),
        memory=memory,
        tensor_maps=probe.specs(addresses),
        observers=observers,
        seed=seed,
        loop_limit=100_000,
    )
    return Run(output, inputs, result, observers)
