"""Detects a process that was forked after CUDA was initialised, and so cannot use the GPU.

Such a process gets a clear error in place of CUDA's.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from flashsmith.errors import LaunchError

_cuda_used = False
_inherited_cuda = False
_users: list[Callable[[], bool]] = []


def note_cuda_use() -> None:
    """Records that this process has initialised CUDA, so its forked children cannot use it."""
    global _cuda_used
    _cuda_used = True


def register_cuda_user(has_used_cuda: Callable[[], bool]) -> None:
    """Registers a function that is called before each fork; the function must not import
    anything."""
    _users.append(has_used_cuda)


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
    if any(has_used_cuda() for has_used_cuda in _users):
        _cuda_used = True


def _in_child() -> None:
    global _inherited_cuda
    _inherited_cuda = _inherited_cuda or _cuda_used


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
