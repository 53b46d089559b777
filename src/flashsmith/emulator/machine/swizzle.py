"""How Hopper's bulk copies and tensor cores permute 16-byte pieces of shared memory."""

from __future__ import annotations

import numpy as np

from flashsmith.errors import EmulatorError

#: Bits of a piece's address that are exchanged, by the bytes of the pattern's rows. The patterns
#: repeat every 1024, 512 and 256 bytes.
_BITS = {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}


def swizzled(addresses: np.ndarray, span: int) -> np.ndarray:
    """Where the pieces at plain addresses (bytes) lie when rows of ``span`` bytes are swizzled.

    Bits 4 and up of an address are xor-ed with bits 7 and up: one for 32 bytes, two for 64, three
    for 128. ``span`` 0 swizzles nothing. Addresses are those within the CTA's shared memory.
    """
    if span not in _BITS:
        raise EmulatorError(f"a swizzle of {span} bytes does not exist")
    return addresses ^ ((addresses >> 3) & _BITS[span])
