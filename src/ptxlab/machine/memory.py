"""The memories of an emulated launch: guarded ranges of host memory, and arrays for shared and
local memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptxlab.errors import ArgumentError, EmulatorError
from ptxlab.interface import GlobalMemoryView, MemoryRange

#: The dtype through which memory is accessed, by the bytes of an access. complex128 is the only
#: 16-byte dtype of NumPy that ``take`` moves as one unit; it is never used for arithmetic.
WORDS: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
    16: np.dtype(np.complex128),
}

#: Generic addresses of shared and local memory lie in windows above all host addresses.
SHARED_WINDOW = 0x71 << 56
LOCAL_WINDOW = 0x72 << 56
_WINDOWS = {SHARED_WINDOW >> 56: "shared", LOCAL_WINDOW >> 56: "local"}


@dataclass(eq=False)
class _HostRange:
    public: MemoryRange
    owner: np.ndarray
    views: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)

    def view(self, size: int) -> tuple[int, np.ndarray]:
        """Returns the aligned part of the range, as elements of ``size`` bytes: (address of element
        0, elements)."""
        if size not in self.views:
            begin = -(-self.public.begin // size) * size
            count = max(0, (self.public.end - begin) // size)
            raw = (ctypes.c_uint8 * (count * size)).from_address(begin)
            self.views[size] = (begin, np.ctypeslib.as_array(raw).view(WORDS[size]))
        return self.views[size]


def byte_range(array: np.ndarray) -> tuple[int, int]:
    """Returns the half-open range of host addresses that contains all elements of an array."""
    begin = end = array.ctypes.data
    if array.size == 0:
        return begin, begin
    for extent, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            begin += (extent - 1) * stride
        else:
            end += (extent - 1) * stride
    return begin, end + array.itemsize


class GlobalMemory(GlobalMemoryView):
    """Global memory: guarded ranges of host memory, at the arrays' real host addresses.

    Therefore kernel arguments are real pointers. Nothing outside the registered ranges is accessed,
    and read-only ranges are never written. Ranges may overlap (for example if q, k and v are packed
    in one tensor). An access is valid if one range contains all of it.
    """

    def __init__(self) -> None:
        self._ranges: list[_HostRange] = []

    def register(self, name: str, array: np.ndarray, *, writable: bool) -> int:
        """Registers an array, which may be strided, and keeps it alive. Returns its address."""
        if not isinstance(array, np.ndarray):
            raise ArgumentError(f"{name}: expected a NumPy array, got {type(array).__name__}")
        if writable and not array.flags.writeable:
            raise ArgumentError(f"{name}: the array is read-only; give a writable one")
        begin, end = byte_range(array)
        self._ranges.append(_HostRange(MemoryRange(name, begin, end, writable), array))
        self._ranges.sort(key=lambda known: known.public.begin)
        return array.ctypes.data

    def extended(self) -> GlobalMemory:
        """Returns a copy with the same ranges. Ranges that are added to the copy later are not
        added to this object."""
        other = GlobalMemory()
        other._ranges = list(self._ranges)
        return other

    def ranges(self) -> Sequence[MemoryRange]:
        """Returns the registered ranges, ordered by address."""
        return [known.public for known in self._ranges]

    def inside(self, addresses: np.ndarray, sizes: Any, *, write: bool) -> np.ndarray:
        """Returns, for each access, whether one range contains all of it and allows it."""
        good = np.zeros(np.shape(addresses), np.bool_)
        for known in self._ranges:
            if known.public.writable or not write:
                ends = addresses + sizes
                good |= (addresses >= known.public.begin) & (ends <= known.public.end)
        return good

    def check(self, addresses: np.ndarray, size: int, *, write: bool) -> None:
        """Raises EmulatorError if no range contains and allows an access of ``size`` bytes."""
        bad = addresses[~self.inside(addresses, size, write=write)]
        if bad.size:
            raise self._refusal(int(bad[0]), size, write)

    def find(self, lowest: int, highest: int, *, write: bool) -> _HostRange | None:
        """Returns a range that contains all of ``[lowest, highest)`` and allows the access, or
        None."""
        for known in self._ranges:
            public = known.public
            if public.begin <= lowest and highest <= public.end and (public.writable or not write):
                return known
        return None

    def load(self, addresses: Any, size: int) -> Any:
        """Reads words of ``size`` bytes at int64 addresses (an array or a scalar)."""
        found = self._common(addresses, size, write=False)
        if found is not None:
            view, cells = found
            return view[cells]
        out = np.zeros(addresses.shape, WORDS[size])
        for known, mask in self._parts(addresses, size, write=False):
            begin, view = known.view(size)
            out[mask] = view[(addresses[mask] - begin) // size]
        return out

    def store(self, addresses: Any, size: int, values: Any) -> None:
        """Writes words of ``size`` bytes.

        If two threads write to one address, the thread with the higher index wins.
        """
        found = self._common(addresses, size, write=True)
        if found is not None:
            view, cells = found
            view[cells] = values
            return
        for known, mask in self._parts(addresses, size, write=True):
            begin, view = known.view(size)
            view[(addresses[mask] - begin) // size] = values[mask] if np.ndim(values) else values

    def _common(self, addresses: Any, size: int, *, write: bool) -> tuple[np.ndarray, Any] | None:
        """Returns (words, cells) if one range contains all accesses, otherwise None."""
        scalar = np.ndim(addresses) == 0
        first = int(addresses) if scalar else int(addresses[0])
        known = self.find(first, first + size, write=write)
        if known is None:
            if scalar:
                raise self._refusal(first, size, write)
            return None
        begin, view = known.view(size)
        relative = addresses - begin
        # The OR of the offsets is at least as large as each offset. It is negative if any offset is
        # negative, and its low bits are 0 only if all offsets' low bits are. So a single pass over
        # the offsets checks both range and alignment.
        bits = int(relative) if scalar else int(np.bitwise_or.reduce(relative))
        if bits & (size - 1):
            bad = next(int(a) for a in np.atleast_1d(addresses) if int(a) & (size - 1))
            raise EmulatorError(f"misaligned access: {size} bytes at global address {bad:#x}")
        inside = 0 <= bits <= (len(view) - 1) * size
        if not inside and (bits < 0 or int(relative.max()) > (len(view) - 1) * size):
            return None
        return view, relative >> (size.bit_length() - 1)

    def _parts(
        self, addresses: np.ndarray, size: int, *, write: bool
    ) -> list[tuple[_HostRange, np.ndarray]]:
        """Groups accesses by the range that contains them. Every access must lie in some range."""
        rest, parts = np.ones(addresses.shape, np.bool_), []
        for known in self._ranges:
            public = known.public
            mask = rest & (addresses >= public.begin) & (addresses + size <= public.end)
            if mask.any() and (public.writable or not write):
                parts.append((known, mask))
                rest &= ~mask
        if rest.any():
            raise self._refusal(int(addresses[rest][0]), size, write)
        return parts

    def _refusal(self, address: int, size: int, write: bool) -> EmulatorError:
        for public in self.ranges():
            if public.begin <= address and address + size <= public.end:
                return EmulatorError(
                    f"write of {size} bytes to {public.name}, which is an input, "
                    f"at byte {address - public.begin}"
                )
        return EmulatorError(
            f"{'write' if write else 'read'} of {size} bytes at global address {address:#x}, "
            f"outside every tensor{self._nearest(address)}"
        )

    def place(self, address: int) -> str:
        """Describes a global address in a phrase that can follow "the word at"."""
        for public in self.ranges():
            if public.begin <= address < public.end:
                where = f"byte {address - public.begin} of {public.name}"
                return f"global address {address:#x}, {where},"
        return f"global address {address:#x}"

    def _nearest(self, address: int) -> str:
        distances = [
            (max(public.begin - address, address - public.end, 0), public)
            for public in self.ranges()
        ]
        if not distances:
            return " (no tensor is registered)"
        distance, public = min(distances, key=lambda item: item[0])
        side = "before" if address < public.begin else "after the end of"
        return f"; {distance} bytes {side} {public.name}"


class BankedMemory:
    """Memory divided into equal parts, one per CTA (shared memory) or per thread (local memory).

    It is filled with 0xFF, which makes every float a NaN, so that reads of unwritten memory show in
    the results.
    """

    def __init__(self, name: str, parts: int, size: int) -> None:
        self.name, self.parts, self.size = name, parts, size
        self.pitch = -(-max(size, 1) // 16) * 16
        raw = np.full(parts * self.pitch, 0xFF, np.uint8)
        # NumPy does not guarantee that allocations are aligned to 16 bytes, which the views need.
        if raw.ctypes.data % 16:
            aligned = np.full(parts * self.pitch + 16, 0xFF, np.uint8)
            begin = -aligned.ctypes.data % 16
            raw = aligned[begin : begin + parts * self.pitch]
        self.views = {width: raw.view(word) for width, word in WORDS.items()}

    def inside(self, addresses: np.ndarray, sizes: Any) -> np.ndarray:
        """Returns, for each access, whether it lies within one part."""
        return (addresses >= 0) & (addresses + sizes <= self.size)

    def check(self, addresses: Any, size: int, align: int) -> None:
        """Raises EmulatorError if an access leaves its part or is not aligned."""
        scalar = np.ndim(addresses) == 0
        bits = int(addresses) if scalar else int(np.bitwise_or.reduce(addresses))
        if bits >= 0 and bits + size <= self.size and not bits & (align - 1):
            return
        flat = np.atleast_1d(addresses)
        bad = flat[~self.inside(flat, size)]
        if bad.size:
            raise EmulatorError(
                f"access of {size} bytes at {self.name} address {int(bad[0])}, outside its "
                f"{self.size} bytes"
            )
        bad = flat[flat & (align - 1) != 0]
        if bad.size:
            raise EmulatorError(
                f"misaligned access: {size} bytes at {self.name} address {int(bad[0])}"
            )


def generic_space(addresses: Any) -> str:
    """Returns the state space of generic addresses.

    All addresses of one instruction must be in the same space.
    """
    tops = {int(top) for top in np.unique(np.atleast_1d(addresses) >> 56)}
    spaces = {_WINDOWS.get(top, "global") for top in tops}
    if len(spaces) > 1:
        raise EmulatorError("one generic access reaches several state spaces")
    return spaces.pop()
