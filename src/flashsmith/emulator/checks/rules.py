"""Instructions used against their own rules, as the emulator met them."""

from __future__ import annotations

from flashsmith.emulator.checks.check import Check
from flashsmith.emulator.interface import Misuse


class Rules(Check):
    """Kinds of findings: ``mbarrier-...``, ``wgmma-...``, ``bulk-...``, ``setmaxnreg``.

    The emulator itself notices these; without this check they end the launch with an error.
    """

    handles_misuse = True

    def misuse(self, event: Misuse) -> None:
        """One broken rule."""
        who = f"{self.name(int(event.threads[0]))}: " if event.threads.size else ""
        self.report(event.kind, event.site, who + event.message, event.threads, event.address)
