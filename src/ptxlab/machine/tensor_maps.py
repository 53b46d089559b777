"""Tensor maps: the box of a tensor that a bulk copy moves, and the layout of the box in shared
memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ptxlab.errors import ArgumentError, EmulatorError
from ptxlab.machine.layouts import PIECE, swizzled
from ptxlab.machine.memory import GlobalMemory

_MOST_IN_A_BOX = 256


class ElementType(Protocol):
    """The element type of a tensor; only the element's size in bytes matters."""

    @property
    def element_size(self) -> int: ...


class TensorMapSpec(Protocol):
    """The parameters of a tensor map that has not been encoded yet.

    Dimensions are listed from the innermost, which has stride 1.

    ``argument_offset`` is the position of the map in the kernel's arguments, in bytes.
    ``strides_bytes`` has no entry for the innermost dimension. ``swizzle_bytes`` is 0, 32, 64 or
    128.
    """

    @property
    def argument_offset(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def element_type(self) -> ElementType: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def strides_bytes(self) -> tuple[int, ...]: ...
    @property
    def box(self) -> tuple[int, ...]: ...
    @property
    def swizzle_bytes(self) -> int: ...


@dataclass(frozen=True)
class Clip:
    """The part of a box that lies inside the tensor. Dimensions are listed from the innermost."""

    begins: tuple[int, ...]
    counts: tuple[int, ...]
    #: The position in the box at which this part begins.
    skipped: tuple[int, ...]

    @property
    def empty(self) -> bool:
        """Whether no element of the box is inside the tensor."""
        return min(self.counts) <= 0


class TensorMap:
    """A tensor map whose description has been checked, with the memory that it describes.

    The map may describe more than the registered memory, since only elements inside boxes are
    accessed. But the map's first address must be in registered memory: otherwise a GPU faults, even
    if no box contains that address. Addresses wrap at 2^64.
    """

    def __init__(self, spec: TensorMapSpec, memory: GlobalMemory) -> None:
        _check(spec)
        if memory.find(spec.address, spec.address + 1, write=False) is None:
            raise EmulatorError(
                f"tensor map at argument offset {spec.argument_offset} begins at global address "
                f"{spec.address:#x}, outside every tensor"
            )
        self.memory = memory
        self.sizes, self.box, self.swizzle = spec.sizes, spec.box, spec.swizzle_bytes
        self.address, self.element = spec.address, spec.element_type.element_size
        self.strides = (self.element, *spec.strides_bytes)

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.sizes)

    @property
    def box_bytes(self) -> int:
        """The bytes of a box in shared memory. Elements of the box that lie outside the tensor are
        included."""
        return math.prod(self.box) * self.element

    def clip(self, coordinates: Sequence[int]) -> Clip:
        """Returns the part of the box at ``coordinates`` that is inside the tensor."""
        begins = [max(c, 0) for c in coordinates]
        ends = [min(c + b, n) for c, b, n in zip(coordinates, self.box, self.sizes, strict=True)]
        return Clip(
            tuple(begins),
            tuple(end - begin for begin, end in zip(begins, ends, strict=True)),
            tuple(begin - c for begin, c in zip(begins, coordinates, strict=True)),
        )

    def pieces(self, address: int) -> np.ndarray:
        """Returns the shared addresses of the 16-byte pieces of a box that begins at ``address``,
        in the order of the box."""
        plain = np.arange(address, address + self.box_bytes, PIECE, dtype=np.int64)
        return swizzled(plain, self.swizzle)

    def read(self, coordinates: Sequence[int]) -> np.ndarray:
        """Returns the bytes of a box. Elements that are outside the tensor or not readable are
        zero."""
        box: np.ndarray = np.zeros(self.box[::-1], f"u{self.element}")
        clip = self.clip(coordinates)
        addresses, size = self.rows(coordinates)
        if addresses.size:
            good = self.memory.inside(addresses, size, write=False)
            rows = np.zeros((addresses.size, size // self.element), box.dtype)
            if good.any():
                elements = self._elements(addresses[good], size)
                rows[good] = self.memory.load(elements, self.element).reshape(good.sum(), -1)
            part = box[_slices(clip.skipped, clip.counts)]
            part[...] = rows.reshape(part.shape)
        return box.reshape(-1).view(np.uint8)

    def write(self, coordinates: Sequence[int], data: np.ndarray, *, add: bool) -> None:
        """Writes the bytes of a box into the tensor, or adds them as fp32 numbers.

        Elements that are outside the tensor or in read-only memory are dropped. If rows have the
        same addresses, they are written in the order of the box.
        """
        if add and self.element != np.dtype(np.float32).itemsize:
            raise EmulatorError(f"fp32 sums through a map of elements of {self.element} bytes")
        clip = self.clip(coordinates)
        addresses, size = self.rows(coordinates)
        if addresses.size:
            box = data.view(f"u{self.element}").reshape(self.box[::-1])
            good = self.memory.inside(addresses, size, write=True)
            rows = box[_slices(clip.skipped, clip.counts)].reshape(addresses.size, -1)
            if good.any():
                elements = self._elements(addresses[good], size)
                values = rows[good].reshape(-1)
                if add:
                    old = self.memory.load(elements, self.element)
                    values = old.view(np.float32) + values.view(np.float32)
                    values = values.view(box.dtype)
                self.memory.store(elements, self.element, values)

    def _elements(self, rows: np.ndarray, size: int) -> np.ndarray:
        """Returns the addresses of all elements of the given rows, which have ``size`` bytes
        each."""
        steps = np.arange(0, size, self.element, dtype=np.int64)
        return (rows[:, None] + steps).reshape(-1)

    def rows(self, coordinates: Sequence[int]) -> tuple[np.ndarray, int]:
        """Returns the rows in global memory that a box covers: (addresses, bytes per row)."""
        clip = self.clip(coordinates)
        if clip.empty:
            return np.zeros(0, np.int64), 0
        addresses = np.array([self.address + clip.begins[0] * self.element], np.int64)
        for dimension in range(1, self.rank):
            steps = clip.begins[dimension] + np.arange(clip.counts[dimension], dtype=np.int64)
            addresses = (steps[:, None] * self.strides[dimension] + addresses).reshape(-1)
        return addresses, clip.counts[0] * self.element


def _slices(begins: Sequence[int], counts: Sequence[int]) -> tuple[slice, ...]:
    pairs = list(zip(begins, counts, strict=True))[::-1]
    return tuple(slice(begin, begin + count) for begin, count in pairs)


def _check(spec: TensorMapSpec) -> None:
    """Raises ArgumentError for parameters that cuTensorMapEncodeTiled rejects or that the emulator
    does not support."""
    rank, inner = len(spec.sizes), spec.box[0] * spec.element_type.element_size
    strides = getattr(spec, "element_strides", ()) or (1,) * rank
    wrong = ""
    if not 1 <= rank <= 5 or len(spec.box) != rank or len(spec.strides_bytes) != rank - 1:
        wrong = f"sizes={spec.sizes}, strides_bytes={spec.strides_bytes}, box={spec.box} disagree"
    elif min(spec.sizes) < 1:
        wrong = f"sizes={spec.sizes}: give at least 1"
    elif spec.address % 16 or any(stride % 16 for stride in spec.strides_bytes):
        wrong = f"address and strides_bytes={spec.strides_bytes} must be multiples of 16"
    elif not all(1 <= extent <= _MOST_IN_A_BOX for extent in spec.box):
        wrong = f"box={spec.box}: extents go from 1 to {_MOST_IN_A_BOX}"
    elif inner % PIECE:
        wrong = f"box={spec.box}: its rows have {inner} bytes, which is not a multiple of 16"
    elif spec.swizzle_bytes and inner != spec.swizzle_bytes:
        wrong = f"box={spec.box}: rows of {inner} bytes with a {spec.swizzle_bytes}-byte swizzle"
    elif any(stride != 1 for stride in strides):
        wrong = f"element_strides={strides}: only strides of 1 are emulated"
    if wrong:
        raise ArgumentError(f"tensor map at argument offset {spec.argument_offset}: {wrong}")
