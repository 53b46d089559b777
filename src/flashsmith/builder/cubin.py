"""Finds the machine code of kernels in a cubin, by its ELF section headers."""

from __future__ import annotations

import struct

_TEXT = b".text."


def kernel_code_bytes(cubin: bytes) -> dict[str, int]:
    """The size in bytes of each kernel's machine code in a 64-bit cubin, by mangled name.

    Raises ValueError if ``cubin`` is not a valid 64-bit cubin.
    """
    return {name: len(code) for name, code in kernel_code(cubin).items()}


def kernel_code(cubin: bytes) -> dict[str, bytes]:
    """The machine code of each kernel in a 64-bit cubin, by mangled name.

    Raises ValueError if ``cubin`` is not a valid 64-bit cubin.
    """
    try:
        return _text_sections(cubin)
    except (struct.error, IndexError) as error:
        raise ValueError(f"cubin of {len(cubin)} bytes is truncated or malformed") from error


def _text_sections(cubin: bytes) -> dict[str, bytes]:
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"not a 64-bit ELF file: it begins with {cubin[:5]!r}")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    found = {}
    for name_offset, _type, _flags, _address, offset, size in headers:
        start = names + name_offset
        name = cubin[start : cubin.index(b"\0", start)]
        if name.startswith(_TEXT):
            if offset + size > len(cubin):
                raise IndexError(offset + size)
            found[name[len(_TEXT) :].decode()] = cubin[offset : offset + size]
    return found
