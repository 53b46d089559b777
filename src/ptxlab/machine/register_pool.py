"""Executes setmaxnreg, and tracks how many registers each warp of a CTA holds."""

from __future__ import annotations

import numpy as np

from ptxlab.interface import Site
from ptxlab.machine.geometry import WARP
from ptxlab.machine.group import Group
from ptxlab.machine.protocols import Reports

_REGISTERS = 65536
_MOST_PER_THREAD = 255
_LEAST, _MOST, _STEP = 24, 256, 8


class RegisterPool:
    """For every CTA of a wave, the number of registers per thread that each warp holds.

    The compiler gives a kernel with setmaxnreg as many registers as its launch bounds allow.
    Additional registers must come from warps that have given registers back.
    """

    def __init__(self, wave: Reports) -> None:
        self.wave = wave
        self.held: np.ndarray | None = None
        self.at_launch = 0
        self.times: np.ndarray | None = None
        self.last: Site | None = None
        self.raised: Site | None = None

    def begin(self, directives: dict[str, tuple[int, ...]]) -> None:
        """Stores the launch bounds."""
        bounds = directives.get("reqntid") or directives.get("maxntid") or ()
        threads = int(np.prod(bounds)) if bounds else self.wave.geometry.threads_per_cta
        ctas = max(1, *directives.get("minnctapersm", (1,)))
        fair = _REGISTERS // (max(threads, 1) * ctas) // _STEP * _STEP
        self.at_launch = min([fair, _MOST_PER_THREAD, *directives.get("maxnreg", ())])

    def set(self, group: Group, site: Site, count: int, *, more: bool) -> None:
        """Executes setmaxnreg.inc or .dec for all threads of a group."""
        if count % _STEP or not _LEAST <= count <= _MOST:
            self._misuse(
                site,
                group,
                f"{count} registers; give a multiple of {_STEP} from {_LEAST} to {_MOST}",
            )
        geometry = self.wave.geometry
        warps = -(-geometry.threads_per_cta // WARP)
        if self.held is None:
            self.held = np.full((geometry.ctas, warps), self.at_launch, np.int64)
            self.times = np.zeros_like(self.held)
        tids = group.index % geometry.threads_per_cta
        held = self.held[group.cta, tids // WARP]
        if (held > count if more else held < count).any():
            self._misuse(
                site, group,
                f"{'raises' if more else 'lowers'} to {count} the registers of a warp that holds "
                f"{int(held.max() if more else held.min())}",
            )  # fmt: skip
        self.held[group.cta, tids // WARP] = count
        assert self.times is not None
        np.add.at(self.times, (group.cta, tids // WARP), 1)
        self.last = site
        if more:
            self.raised = site

    def end(self) -> None:
        """At the end, checks that all warps of a warpgroup agreed and that all requested registers
        existed."""
        if self.held is None or self.times is None or self.last is None:
            return
        warps = self.held.shape[1] // 4 * 4
        done = np.stack([self.held, self.times])
        by_warpgroup = done[:, :, :warps].reshape(2, -1, 4)
        if (by_warpgroup != by_warpgroup[:, :, :1]).any() or self.times[:, warps:].any():
            no_threads = np.zeros(0, np.int64)
            self.wave.misuse(
                "setmaxnreg", self.last, no_threads, "setmaxnreg by part of a warpgroup"
            )
        if self.raised is None:
            return
        wanted = self.held.sum(axis=1) * WARP
        pool = self.at_launch * self.held.shape[1] * WARP
        if (wanted > pool).any():
            cta = int(np.argmax(wanted))
            self.wave.misuse(
                "setmaxnreg",
                self.raised,
                np.zeros(0, np.int64),
                f"CTA {cta + self.wave.geometry.first_cta} requests {int(wanted[cta])} registers "
                f"of the {pool} it was launched with; the increase would wait forever",
            )

    def _misuse(self, site: Site, group: Group, what: str) -> None:
        self.wave.misuse("setmaxnreg", site, group.threads, f"setmaxnreg: {what}")
