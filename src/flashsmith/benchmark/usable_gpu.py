"""Whether a GPU still serves this process after something on it failed."""

from __future__ import annotations

from flashsmith.benchmark.timing import Clock
from flashsmith.errors import LaunchError


def require_usable_gpu(clock: Clock, culprit: str) -> None:
    """Raises LaunchError, naming `culprit`, when what failed has taken the GPU with it: every
    launch of this process would fail from then on, whatever the kernel."""
    try:
        with clock.running():
            clock.synchronize()
    except LaunchError as error:
        raise LaunchError(
            f"{culprit} left the GPU unusable to this process ({error}); leave it out and start "
            "again"
        ) from None
