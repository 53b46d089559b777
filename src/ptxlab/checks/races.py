"""Finds unordered accesses to the same memory by different threads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ptxlab.checks.access_history import (
    NO_ACTOR,
    AccessHistory,
    Conflict,
    Party,
)
from ptxlab.checks.barrier_order import BarrierOrder
from ptxlab.checks.check import Check
from ptxlab.checks.happens_before import HappensBefore
from ptxlab.checks.launch_order import Footprint, LaunchOrder
from ptxlab.checks.memory_order import (
    MemoryOrder,
    is_strong,
    is_strong_by_word,
    is_sum,
)
from ptxlab.checks.shadow import Ranges
from ptxlab.interface import (
    AsyncLanding,
    BarrierEvent,
    ClusterBarrierEvent,
    EngineAccess,
    EngineDone,
    GridAllow,
    GridWait,
    Launch,
    MbarrierEvent,
    MemoryAccess,
    MemoryFence,
    ProxyFence,
    Site,
    WarpSync,
)

_VERBS = {
    "RAW": ("reads", "written by"),
    "WAR": ("overwrites", "read by"),
    "WAW": ("overwrites", "written by"),
}


class Races(Check):
    """Kinds of findings: ``race-raw``, ``race-war``, ``race-waw``, in shared and global memory.

    More kinds:

    - ``proxy-fence``: an engine's access (wgmma, bulk copies) is ordered after a thread's write,
      but there is no proxy fence in between.
    - ``race-mbarrier``: a thread uses an mbarrier but is not ordered after its initialisation.
    - ``cluster-exit``: a thread uses shared memory of another CTA, which may have exited.
    - ``race-launch``: a programmatic launch reads what an earlier launch wrote, or writes what an
      earlier launch read or wrote, in a thread that is not ordered after ``griddepcontrol.wait``.

    Rules:

    - ldmatrix reads on behalf of all lanes of its warp, whichever lane gives the address.
    - A cp.async counts as two writes. When it is issued, it must be ordered after all earlier
      accesses to the memory. When the issuing thread has waited for the data, they count as a
      second write by this thread. In between, ``InFlight`` checks the memory.
    - An engine's access may happen at any time between its issue and the wait for it. So its issue
      must be ordered after all earlier accesses that conflict with it, and later accesses must be
      ordered after the wait.
    - A bulk store or reduction may write global memory at any time between its issue and
      ``wait_group``. ``wait_group.read`` orders only its reads of shared memory.
    - Global memory is checked only where it is writable. There, the only order between CTAs comes
      from words that one CTA releases and another acquires (MemoryOrder). Without this order, two
      CTAs may share data only if both read them, or access them by atomics or strong loads and
      stores (.relaxed, .volatile, ...).
    - A launch that does not execute ``griddepcontrol.wait`` may share memory with the directly
      preceding launch only by words that both access by strong 4-byte accesses. Earlier launches
      have finished if each CTA of the preceding launch waited before it allowed this launch to
      begin, by ``griddepcontrol.launch_dependents`` or by exiting.
    - ``orders_sums``: whether the kernel promises the same bits in every run. Unordered
      floating-point sums then count as a race too.
    """

    _order: HappensBefore
    _ranges: Ranges

    def __init__(self, orders_sums: bool = False) -> None:
        super().__init__()
        self._orders_sums = orders_sums
        self._launch_order = LaunchOrder()
        self._global: dict[int, AccessHistory] = {}
        self._entry, self._waited = "", False
        #: The CTAs in which some thread is ordered after the previous launch; and whether any
        #: thread allowed the next launch to begin although it was not ordered after the previous
        #: launch. A CTA also allows the next launch when it exits.
        self._have_waited, self._allowed_early = np.zeros(0, np.bool_), False

    def begin(self, launch: Launch) -> None:
        """Creates the access histories of writable global memory."""
        super().begin(launch)
        last = [
            Footprint(self._entry, self._ranges.ranges[k].begin, *history.footprint())
            for k, history in (self._global.items() if launch.programmatic else ())
        ]
        self._launch_order.next(
            last,
            waited=self._waited,
            allowed_behind=not self._allowed_early and bool(self._have_waited.all()),
            programmatic=launch.programmatic,
        )
        self._entry, self._waited, self._programmatic = launch.entry, False, launch.programmatic
        self._have_waited = np.zeros(launch.cta_count, np.bool_)
        self._allowed_early = False
        self._shared_bytes = launch.shared_bytes
        self._clusters = launch.clusters
        self._sites: dict[int, Site] = {}
        self._ranges = Ranges([r for r in launch.memory.ranges() if r.writable])
        self._global = {}
        self._remote: list[_Remote] = []
        self._memory_order = MemoryOrder()
        self.wave(0, launch.cta_count)

    def wave(self, first_cta: int, cta_count: int) -> None:
        """Begins new CTAs: their shared memory has no history, and their threads are not ordered
        after anything."""
        self._check_remote()
        for history in self._global.values():
            history.retire_engines(self._order)
        self._first_cta = first_cta
        self._order = HappensBefore(first_cta, cta_count, self._threads_per_cta, self._clusters)
        self._barrier_order = BarrierOrder(self._order, self._clusters)
        self._memory_order.wave(self._order)
        self._shared = AccessHistory(
            cta_count,
            self._shared_bytes,
            self._threads_per_cta,
            cluster_size=self._clusters.size,
        )

    def end(self) -> None:
        """Checks how CTAs of the last wave used other CTAs' shared memory."""
        self._check_remote()

    def barrier(self, event: BarrierEvent) -> None:
        """Orders the waiting threads after everything that all threads did before they arrived."""
        if event.kind == "release":
            self._order.release(event.threads, event.barrier, event.clock)
        elif "arrive" in event.site.mnemonic:
            self._order.arrive(event.threads, event.barrier, event.clock)

    def warp_sync(self, event: WarpSync) -> None:
        """Orders each of the synchronising threads after the earlier accesses of all the others."""
        self._order.synchronise_warps(event.threads, event.clock)

    def memory(self, event: MemoryAccess) -> None:
        """Checks and records one access."""
        if event.space == "shared":
            ctas = event.ctas
            if ctas is None:
                ctas = event.threads // self._threads_per_cta
            self._access(self._shared, ctas - self._first_cta, event, 0)
        elif event.space == "global":
            index = self._ranges.find(event.addresses, event.sizes)
            by_word = is_strong_by_word(event) and not (self._orders_sums and is_sum(event))
            for k in np.unique(index[index >= 0]):
                chosen = index == k
                begin = self._ranges.ranges[k].begin
                self._access(self._history(int(k)), 0, _part(event, chosen, begin), begin, by_word)
            self._memory_order.access(event)
            if self._programmatic:
                self._check_launches(event, by_word)

    def async_landing(self, event: AsyncLanding) -> None:
        """Records the copy's data as a write of the thread that issued the copy."""
        ctas = event.threads // self._threads_per_cta - self._first_cta
        touched = self._shared.locate(ctas, event.addresses, event.sizes)
        party = self._party(event.threads, event.clock, event.issued)
        for _ in self._shared.record_write(touched, party):
            # Two copies that write one cell were already reported when the second copy was issued.
            pass

    def mbarrier(self, event: MbarrierEvent) -> None:
        """Lets arriving threads publish their clocks. Threads that observe the end of a phase
        acquire these clocks.
        """
        for kind, unseen, other in self._barrier_order.mbarrier(event):
            words = "with no barrier" if kind == "race-mbarrier" else "with no proxy fence"
            self.report(
                kind,
                event.site,
                f"{self.name(int(unseen[0]))} uses the mbarrier at shared address {event.address}, "
                f"initialised by {self.name(other)} {words} between",
                unseen,
                event.address,
            )
        if event.kind == "arrive":
            self._note_remote(event.site, event.threads, event.ctas, event.clock)

    def cluster_barrier(self, event: ClusterBarrierEvent) -> None:
        """Lets arriving threads of a cluster publish their clocks. Threads that pass the barrier
        acquire these clocks."""
        self._barrier_order.cluster_barrier(event)

    def memory_fence(self, event: MemoryFence) -> None:
        """Records that the threads acquire the releases that they have read, and that their later
        writes release."""
        self._memory_order.fence(event)

    def grid_wait(self, event: GridWait) -> None:
        """Orders threads after the previous launch."""
        self._waited = True
        self._order.acquire_launch(event.threads)
        self._have_waited[event.threads // self._threads_per_cta] = True

    def grid_allow(self, event: GridAllow) -> None:
        """Records whether the threads that allow the next launch to begin are ordered after the
        previous launch."""
        after = self._order.after_launch(event.threads)
        self._have_waited[event.threads[after] // self._threads_per_cta] = True
        self._allowed_early |= not after.all()

    def _check_launches(self, event: MemoryAccess, by_word: bool) -> None:
        after = self._order.after_launch(event.threads)
        for footprint, rows in self._launch_order.conflicts(event, after, by_word):
            reads = event.kind in ("read", "async_read")
            lacks = "no griddepcontrol.wait between"
            if not footprint.reached:
                lacks = "no griddepcontrol.wait in the launch between: waiting for it is not enough"
            self.report(
                "race-launch",
                event.site,
                f"{self.actor(event, rows[0])} {'reads' if reads else 'overwrites'} "
                f"{self.place('global', int(event.addresses[rows[0]]))}, "
                f"{'written' if reads else 'used'} by the launch of {footprint.entry} before, "
                f"with {lacks}",
                event.threads[rows],
                int(event.addresses[rows[0]]),
            )

    def proxy_fence(self, event: ProxyFence) -> None:
        """Makes visible to engines all work that the fence's threads are ordered after."""
        self._order.fence(event.threads, event.clock)
        self._barrier_order.fence(event)

    def engine_done(self, event: EngineDone) -> None:
        """Orders threads after the work of an engine."""
        for threads in self._order.by_cta(event.threads):
            self._order.acquire_engine(threads, event.engine, event.issued)

    def engine_access(self, event: EngineAccess) -> None:
        """Checks an engine's access when it is issued, and records it."""
        self._sites[event.site.index] = event.site
        cta = event.cta - self._first_cta
        own = event.cta == int(event.threads[0]) // self._threads_per_cta
        # A copy to another CTA may not have read its source yet when the CTA that owns the source
        # exits.
        if not own or event.engine.cta != event.cta:
            actor = self._order.actor(event.engine)
            self._remote.append(
                _Remote(event.site, int(event.threads[0]), actor, event.cta, event.clock)
            )
        touched = self._shared.locate(cta, event.addresses, event.size)
        cells = np.unique(touched.cells) if event.kind == "read" else touched.cells
        for conflict in self._shared.engine_access(cells, event, self._order):
            self._report_engine(event, conflict)

    def _report_engine(self, event: EngineAccess, conflict: Conflict) -> None:
        address = self._shared.address(conflict.cells[0])
        other = self._party_name(int(conflict.others[0]))
        earlier = self._sites[int(conflict.sites[0])]
        kind, lacks = f"race-{conflict.kind.lower()}", "no barrier"
        does, done = _VERBS.get(conflict.kind, ("", ""))
        if conflict.kind == "PROXY":
            kind, lacks = "proxy-fence", "no proxy fence"
            does, done = f"{event.kind}s", "written by"
        self.report(
            kind,
            event.site,
            f"issued by {self.name(int(event.threads[0]))}, it {does} shared address {address} "
            f"of CTA {event.cta}, {done} {other} ({earlier}) with {lacks} between",
            event.threads[:1],
            address,
        )

    def _party_name(self, actor: int) -> str:
        if actor == NO_ACTOR:
            return "several CTAs"
        return self.name(actor) if actor >= 0 else str(self._order.engine(actor))

    # Other CTAs of the cluster

    def _note_remote(self, site: Site, threads: np.ndarray, ctas: np.ndarray, clock: int) -> None:
        far = np.flatnonzero(threads // self._threads_per_cta != ctas)
        for place in far:
            thread = int(threads[place])
            self._remote.append(_Remote(site, thread, thread, int(ctas[place]), clock))

    def _check_remote(self) -> None:
        """Checks that no CTA can have exited before another CTA's last use of its shared memory.

        At least one thread of the owning CTA must be ordered after this use.
        """
        for use in self._remote:
            own = np.arange(self._threads_per_cta) + use.cta * self._threads_per_cta
            known = self._order.ordered_after(own, np.array([use.actor]), np.array([use.clock]))
            if not known.any():
                self.report(
                    "cluster-exit",
                    use.site,
                    f"{self.name(use.thread)} uses shared memory of CTA {use.cta}, which may have "
                    "exited by then",
                    np.array([use.thread]),
                    0,
                )
        self._remote = []

    def _history(self, index: int) -> AccessHistory:
        if index not in self._global:
            found = self._ranges.ranges[index]
            self._global[index] = AccessHistory(
                1, found.end - found.begin, self._threads_per_cta, shared_by_ctas=True
            )
        return self._global[index]

    def _party(
        self,
        threads: np.ndarray,
        clock: int,
        site: Site,
        shape: str = "wide",
        atomic: bool = False,
        by_word: bool = False,
    ) -> Party:
        self._sites[site.index] = site
        if shape == "matrix":
            lanes = np.full(threads.size, 0xFFFFFFFF, np.uint32)
        else:
            lane = threads % self._threads_per_cta % 32
            lanes = np.uint32(1) << lane.astype(np.uint32)
        return Party(threads, lanes, clock, site.index, atomic, by_word)

    def _access(
        self,
        history: AccessHistory,
        banks: np.ndarray | int,
        event: MemoryAccess,
        base: int,
        by_word: bool = False,
    ) -> None:
        touched = history.locate(banks, event.addresses, event.sizes)
        atomic = event.kind in ("atomic", "async_atomic") or is_strong(event)
        if self._orders_sums and is_sum(event):
            atomic = False
        party = self._party(event.threads, event.clock, event.site, event.shape, atomic, by_word)
        found: Iterable[Conflict]
        if event.kind in ("read", "async_read"):
            found = history.read(touched, party, self._order)
        elif event.engine is not None:
            found = history.write_later(touched, party, event.engine, self._order)
        else:
            found = history.write(touched, party, self._order)
        for conflict in found:
            self._report(history, event, conflict, base)

    def _report(
        self, history: AccessHistory, event: MemoryAccess, conflict: Conflict, base: int
    ) -> None:
        kind, lacks = f"race-{conflict.kind.lower()}", "no barrier"
        does, done = _VERBS.get(conflict.kind, ("overwrites", "written by"))
        if conflict.kind == "PROXY":
            kind, lacks = "proxy-fence", "no proxy fence"
        address = history.address(conflict.cells[0]) + base
        other = int(conflict.others[0])
        party = self._party_name(other)
        if other < NO_ACTOR and party.startswith("the bulk copies"):
            lacks = "no wait_group (without .read) and barrier"
        missing = ""
        if kind != "proxy-fence" and event.space == "global":
            cta = int(event.threads[conflict.rows[0]]) // self._threads_per_cta
            if other < 0 or other // self._threads_per_cta != cta:
                missing = self._memory_order.missing(cta)
        self.report(
            kind,
            event.site,
            f"{self.actor(event, conflict.rows[0])} {does} "
            f"{self.place(event.space, address)}, "
            f"{done} {party} ({self._sites[int(conflict.sites[0])]}) with {lacks} between{missing}",
            event.threads[np.unique(conflict.rows)],
            address,
        )


@dataclass(frozen=True)
class _Remote:
    """A use of another CTA's shared memory by ``actor``, which is a thread or an engine."""

    site: Site
    thread: int
    actor: int
    cta: int
    clock: int


def _part(event: MemoryAccess, chosen: np.ndarray, begin: int) -> MemoryAccess:
    """Returns the part of an event whose addresses lie in one range; addresses are relative to the
    start of the range."""
    sizes = event.sizes[chosen] if isinstance(event.sizes, np.ndarray) else event.sizes
    return MemoryAccess(
        event.site, event.space, event.kind, event.threads[chosen],
        event.addresses[chosen] - begin, sizes, event.shape, event.clock, None, event.engine,
        event.order, event.scope,
    )  # fmt: skip
