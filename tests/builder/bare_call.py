"""Run by test_kernel_package.py in a process of its own: calls of installed kernels, which must
compile nothing, write nothing and ask no network."""

from __future__ import annotations

import os
import sys

FORBIDDEN = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def watch(event: str, arguments: tuple[object, ...]) -> None:
    """Ends the process at the first event that a bare installation must not have."""
    if event in FORBIDDEN or (event in ("os.mkdir", "os.rename", "os.remove", "os.chmod")):
        print("forbidden:", event, arguments, flush=True)
        os._exit(3)
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
        print("forbidden: open for writing", arguments[0], flush=True)
        os._exit(3)


sys.dont_write_bytecode = True
sys.addaudithook(watch)

import numpy as np  # noqa: E402

import flashsmith  # noqa: E402
from flashsmith.runtime.libraries import loaded_kernels  # noqa: E402

assert "torch" not in sys.modules
random = np.random.default_rng(1)
q, k, v = (random.standard_normal((1, 64, 1, 64)).astype(np.float16) for _ in range(3))
for causal in (False, True):
    o = flashsmith.attention(q, k, v, causal=causal)
    scores = (q[0, :, 0].astype(float) @ k[0, :, 0].astype(float).T) / 8
    scores = np.where(np.tri(64, dtype=bool) | (not causal), scores, -np.inf)
    p = np.exp(scores - scores.max(1, keepdims=True))
    expected = p / p.sum(1, keepdims=True) @ v[0, :, 0].astype(float)
    assert abs(o[0, :, 0] - expected).max() < 2e-3
kernels = list(loaded_kernels.kernels.values())
assert len(kernels) == 2
assert all(kernel.library.is_installed for kernel in kernels)
# Up to the launch: the plan, and the entry that the library would launch on a GPU.
for kernel in kernels:
    assert kernel.entry.ptx_entry in kernel.ptx
print("ok", os.getuid(), sorted(str(kernel.library.path) for kernel in kernels))
