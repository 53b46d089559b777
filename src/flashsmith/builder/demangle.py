"""Demangles the names of kernels with the demangler of the C++ runtime."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from flashsmith.errors import ToolchainError
from flashsmith.system_errors import is_from_system


@lru_cache(maxsize=1)
def _runtime() -> tuple[Any, Any]:
    try:
        demangler = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError) as error:
        if not is_from_system(error):
            raise
        raise ToolchainError(
            f"libstdc++.so.6: cannot be loaded ({error}); install g++ or libstdc++6"
        ) from error
    demangler.restype = ctypes.c_void_p
    demangler.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    free = ctypes.CDLL(None).free
    free.restype = None
    free.argtypes = [ctypes.c_void_p]
    return demangler, free


def demangle(symbol: str) -> str:
    """Demangles ``symbol``. Raises ValueError if ``symbol`` is not a mangled name."""
    demangler, free = _runtime()
    status = ctypes.c_int()
    pointer = demangler(symbol.encode(), None, None, ctypes.byref(status))
    if not pointer:
        raise ValueError(f"{symbol!r} is not a mangled C++ name (status {status.value})")
    try:
        return ctypes.string_at(pointer).decode()
    finally:
        free(pointer)
