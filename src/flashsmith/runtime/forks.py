"""A process forked after CUDA was initialised cannot use the GPU: said before it fails oddly."""

from __future__ import annotations

import os
import sys

from flashsmith.errors import LaunchError

_cuda_used = False
_inherited_cuda = False


def note_cuda_use() -> None:
    """Records that this process has initialised CUDA: its children cannot use it."""
    global _cuda_used
    _cuda_used = True


def check_not_forked() -> None:
    """Raises LaunchError in a child of a process that had initialised CUDA before forking."""
    if _inherited_cuda:
        raise LaunchError(
            "this process was forked after CUDA had been initialised in its parent, and CUDA does "
            "not survive a fork; start workers with multiprocessing's 'spawn' or 'forkserver' "
            "method, or fork before the first GPU call"
        )


def _before_fork() -> None:
    global _cuda_used
    # Only if it is there already, and all of it: forking must not import anything.
    is_initialized = getattr(sys.modules.get("torch.cuda"), "is_initialized", None)
    if is_initialized is not None and is_initialized():
        _cuda_used = True


def _in_child() -> None:
    global _inherited_cuda
    _inherited_cuda = _inherited_cuda or _cuda_used


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
