"""wgmma: matrix products that run asynchronously from the threads.

From the issue to the wait, accumulator registers hold ``InFlight`` objects. An access to these
registers during this time is reported, and a read returns NaN. Operands in shared memory are read
at the wait, the latest time at which hardware may read them. A random schedule sometimes reads them
at the issue. Consecutive wgmma with the same accumulator registers are computed as one matrix
product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from ptxlab.errors import EmulatorError
from ptxlab.interface import Engine, EngineAccess, EngineDone, Site
from ptxlab.machine.geometry import WARP, WARPGROUP
from ptxlab.machine.group import Group
from ptxlab.machine.layouts import PIECE, Layout, starts_of
from ptxlab.machine.protocols import RunsWgmma
from ptxlab.machine.tensor_cores import OperandType

_DEPTH, _ROWS = 16, 64
_ONE_THREAD = 1 << 18
f4, u2, u4 = np.float32, np.uint16, np.uint32


@dataclass(frozen=True)
class Form:
    """The constant operands of one wgmma instruction: m64 x n x k16 of f16 or bf16."""

    n: int
    kind: OperandType
    negate_a: bool
    negate_b: bool
    #: Whether the operands are K-major. The value for A is meaningless if A is in registers.
    k_major_a: bool
    k_major_b: bool
    #: The registers of A; empty if A is in shared memory.
    fragment: tuple[str, ...]


class InFlight(NDArrayOperatorsMixin):
    """The content of an accumulator register during its wgmma."""

    __slots__ = ("product", "row")

    def __init__(self, product: Wgmma, row: int) -> None:
        self.product, self.row = product, row

    def touched(self, how: str = "is read") -> np.float32:
        """Reports an access to the register and returns the value that the access reads."""
        self.product.touched(self.row, how)
        return f4(np.nan)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.touched(), dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [x.touched() if isinstance(x, InFlight) else x for x in inputs]
        return getattr(ufunc, method)(*plain, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.touched(), name)

    def __getitem__(self, positions: Any) -> Any:
        return self.touched()


class Wgmma:
    """One wgmma of the threads that were in the group when it was issued."""

    def __init__(
        self,
        pipe: WgmmaPipe,
        group: Group,
        site: Site,
        form: Form,
        a: Any,
        b: np.ndarray,
        accumulate: Any,
        addend: Any,
    ) -> None:
        self.pipe, self.site, self.form = pipe, site, form
        self.index, self.base, self.cta = group.index, group.shared_base, group.cta
        self.warpgroups = group.whole_warpgroups
        self.a, self.b, self.accumulate, self.addend = a, b, accumulate, addend
        self.clock = 0
        self.result: np.ndarray | None = None
        self.operands: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def fragment(self) -> tuple[str, ...]:
        """The registers of A; empty if A is in shared memory."""
        return self.form.fragment

    def touched(self, row: int, how: str) -> None:
        """Reports an access to an accumulator register before the wait."""
        wave = self.pipe.wave
        wave.misuse(
            "wgmma-in-flight",
            wave.current_site() or self.site,
            self.index + wave.geometry.first_thread,
            f"accumulator {row} of the wgmma at {self.site} {how} before a wait_group covers it",
        )

    # Units are whole warpgroups if the group consists of whole warpgroups, and single warps
    # otherwise

    @property
    def unit(self) -> int:
        """Threads of a unit."""
        return WARPGROUP if self.warpgroups else WARP

    def descriptors(self, values: np.ndarray) -> np.ndarray:
        """Returns the descriptor of each unit. All threads of a unit must give the same
        descriptor."""
        if values.ndim == 0:
            return np.full(self.index.size // self.unit, values)
        by_unit = values.reshape(-1, self.unit)
        if (by_unit != by_unit[:, :1]).any():
            raise EmulatorError("the threads of a warpgroup give different matrix descriptors")
        return by_unit[:, 0]

    def a_addresses(self) -> np.ndarray:
        """Returns the shared addresses of A's pieces, by unit."""
        return self._addresses(self.descriptors(self.a), _ROWS, self.form.k_major_a, a=True)

    def b_addresses(self) -> np.ndarray:
        """Returns the shared addresses of B's pieces, by unit."""
        return self._addresses(self.descriptors(self.b), self.form.n, self.form.k_major_b)

    def _addresses(
        self, descriptors: np.ndarray, rows: int, k_major: bool, a: bool = False
    ) -> np.ndarray:
        high = descriptors >> np.uint64(16)
        starts = starts_of(descriptors)
        if (high == high[0]).all():
            layout = Layout.of(int(high[0]) << 16)
            found = layout.addresses(starts, rows, k_major=k_major)
        else:
            shape = (rows, 2) if k_major else (_DEPTH, rows // 8)
            found = np.zeros((starts.size, *shape), np.int64)
            for one in np.unique(high):
                chosen = high == one
                layout = Layout.of(int(one) << 16)
                found[chosen] = layout.addresses(starts[chosen], rows, k_major=k_major)
        if not a or self.warpgroups:
            return found
        # A unit of one warp has a quarter of A's rows.
        warps = self.index[::WARP] // WARP % 4
        if k_major:
            quarters = found.reshape(-1, 4, _ROWS // 4, 2)
            return quarters[np.arange(warps.size), warps]
        columns = found.reshape(-1, _DEPTH, 4, _ROWS // 32)
        picked: np.ndarray = columns[np.arange(warps.size), :, warps]
        return picked

    # The matrices

    def a_matrix(self) -> np.ndarray:
        """Returns A as float32, by unit: (units, rows, 16)."""
        rows = self.unit // WARP * 16
        if self.form.fragment:
            words = np.empty((4, self.index.size), u4)
            for row, value in enumerate(self.a):
                words[row] = value
            pairs = words.reshape(2, 2, -1, 8, 4).transpose(2, 1, 3, 0, 4)
            matrix = self.form.kind.floats(np.ascontiguousarray(pairs)).reshape(-1, rows, _DEPTH)
        else:
            matrix = self._gather(self.a_addresses())
            if not self.form.k_major_a:
                matrix = matrix.swapaxes(1, 2)
        return -matrix if self.form.negate_a else matrix

    def b_matrix(self) -> np.ndarray:
        """Returns B as float32, by unit: (units, 16, n)."""
        matrix = self._gather(self.b_addresses())
        if self.form.k_major_b:
            matrix = matrix.swapaxes(1, 2)
        return -matrix if self.form.negate_b else matrix

    def _gather(self, addresses: np.ndarray) -> np.ndarray:
        shared = self.pipe.wave.shared
        shared.check(addresses.reshape(-1), PIECE, PIECE)
        base = self.base[:: self.unit, None, None]
        pieces = shared.views[PIECE].take((addresses + base) >> 4)
        return self.form.kind.floats(pieces.view(u2))

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the values of A and B. The first call reads them, and later calls return the same
        values."""
        if self.operands is None:
            self.operands = self.a_matrix(), self.b_matrix()
        return self.operands

    def evaluate(self) -> np.ndarray:
        """Computes the accumulators in float32 (register, thread). Operands that have not been read
        yet are read now."""
        if self.result is None:
            chain = self._chain()
            pairs = [one.read() for one in chain]
            a = np.concatenate([a for a, _ in pairs], axis=2)
            b = np.concatenate([b for _, b in pairs], axis=1)
            for one in chain:
                one.operands = None
            self.result = self._sums(a, b, chain[0]._before())
        return self.result

    def _sums(self, a: np.ndarray, b: np.ndarray, before: np.ndarray | None) -> np.ndarray:
        """Computes before + a b as (register, thread); if ``before`` is None, it counts as zero."""
        n, core = self.form.n, self.pipe.wave.tensor_core
        if core is None:
            rows = _to_registers(_multiply(a, b), n)
            if before is not None:
                rows += before
            return rows
        shape = (*a.shape[:2], n)
        c = np.zeros(shape, f4) if before is None else _to_tiles(before, shape)
        return _to_registers(core.multiply_add(a, b, c, self.form.kind, _DEPTH), n)

    def _chain(self) -> list[Wgmma]:
        """Returns the chain of unevaluated wgmma, oldest first, that ends with this one and in
        which each adds to the accumulators of the previous one."""
        chain = [self]
        while True:
            before = chain[0].addend
            if not (
                isinstance(before, Wgmma)
                and before.result is None
                and before.index is chain[0].index
                and np.ndim(chain[0].accumulate) == 0
            ):
                return chain
            chain.insert(0, before)

    def _before(self) -> np.ndarray | None:
        """Returns the accumulators to which this wgmma adds, (register, thread); None if they are
        zero."""
        if self.addend is None:
            return None
        if isinstance(self.addend, Wgmma):
            before = self.addend.of(self.index)
        else:
            before = np.empty((len(self.addend), self.index.size), f4)
            for row, value in enumerate(self.addend):
                before[row] = value.view(f4)
        if np.ndim(self.accumulate):
            before = np.where(self.accumulate, before, f4(0))
        return before

    def of(self, index: np.ndarray) -> np.ndarray:
        """Returns the accumulators of the threads ``index`` (numbers within the wave)."""
        rows = self.evaluate()
        if index is self.index or np.array_equal(index, self.index):
            return rows
        return rows[:, np.searchsorted(self.index, index)]


def _multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the product of (units, rows, k) and (units, k, n), in blocks of rows so small that
    OpenBLAS uses one thread.

    From a certain size on, OpenBLAS uses several threads. Products of this size then took 50 times
    longer if other processes used the same cores.
    """
    units, rows, depth = a.shape
    block = rows
    while block > 1 and block * depth * b.shape[2] > _ONE_THREAD:
        block //= 2
    blocks = a.reshape(units, rows // block, block, depth)
    product: np.ndarray = np.matmul(blocks, b[:, None])
    return product


def _to_registers(tiles: np.ndarray, n: int) -> np.ndarray:
    """Converts tiles (..., rows, n) to registers (register, thread).

    In lane (g, t), register 4j + 2h + e holds row g + 8h of the warp's 16 rows, and column 8j + 2t
    + e.
    """
    parts = tiles.reshape(-1, 2, 8, n // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4)
    return np.ascontiguousarray(parts).reshape(n // 2, -1)


def _to_tiles(rows: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """Converts registers (register, thread) to tiles (units, rows, n); the inverse of
    _to_registers."""
    parts = rows.reshape(shape[2] // 8, 2, 2, -1, 8, 4).transpose(3, 1, 4, 0, 5, 2)
    return np.ascontiguousarray(parts).reshape(shape)


class WgmmaPipe:
    """The wgmma instructions that generated code calls.

    The wgmma in flight are stored in the groups.
    """

    def __init__(self, wave: RunsWgmma) -> None:
        self.wave = wave

    def issue(
        self,
        group: Group,
        site: Site,
        form: Form,
        registers: Sequence[Any],
        a: Any,
        b: Any,
        accumulate: Any,
    ) -> tuple[InFlight, ...]:
        """Executes wgmma.mma_async. Returns the new contents of the accumulator registers."""
        group.require_whole("wgmma.mma_async")
        if np.ndim(accumulate) and (accumulate == accumulate[0]).all():
            accumulate = accumulate[0]
        addend = None
        if np.ndim(accumulate) or accumulate:
            addend = self._addend(registers)
        product = Wgmma(self, group, site, form, a, b, accumulate, addend)
        group.pending_wgmma.append(product)
        if self.wave.observers:
            product.clock = self.wave.tick()
            self._notify(group, product)
        random = self.wave.scheduler.random
        if random is not None and random.random() < 0.5:
            # The operands are read now but multiplied later, so that every schedule sums in the
            # same order.
            product.read()
        return tuple([InFlight(product, row) for row in range(len(registers))])

    def _addend(self, registers: Sequence[Any]) -> Any:
        first = registers[0]
        if isinstance(first, InFlight):
            before = first.product
            if len(registers) == before.form.n // 2 and all(
                isinstance(value, InFlight) and value.product is before and value.row == row
                for row, value in enumerate(registers)
            ):
                return before
        plain = []
        for value in registers:
            if isinstance(value, InFlight):
                value = value.touched("is an accumulator of another shape")
            elif not hasattr(value, "dtype"):
                raise EmulatorError("an accumulator register is read before it is written")
            plain.append(value)
        return tuple(plain)

    def commit(self, group: Group) -> None:
        """Executes wgmma.commit_group."""
        group.wgmma_groups.append(group.pending_wgmma)
        group.pending_wgmma = []

    def wait(
        self, group: Group, site: Site, allowed: int, registers: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Executes wgmma.wait_group.

        Returns the new values of the registers that may have been in flight.
        """
        cut = max(0, len(group.wgmma_groups) - allowed)
        done, group.wgmma_groups = group.wgmma_groups[:cut], group.wgmma_groups[cut:]
        pending = {id(p) for p in group.pending_wgmma}
        pending |= {id(p) for products in group.wgmma_groups for p in products}
        found: dict[int, np.ndarray] = {}
        values = []
        for value in registers:
            if isinstance(value, InFlight) and id(value.product) not in pending:
                product = value.product
                if id(product) not in found:
                    found[id(product)] = product.of(group.index)
                value = found[id(product)][value.row]
            values.append(value)
        finished = [product for products in done for product in products]
        if finished and self.wave.observers:
            self._notify_done(group, site, max(product.clock for product in finished))
        return tuple(values)

    # Rules that the generated code checks

    def unfenced(self, group: Group, site: Site, what: str) -> None:
        """Reports a wgmma that uses a register which was accessed after the last wgmma.fence."""
        self.wave.misuse(
            "wgmma-fence", site, group.threads, f"there is no wgmma.fence between {what}"
        )

    def overwritten(self, group: Group, value: Any) -> None:
        """Reports a write to a register that is an accumulator in flight."""
        if isinstance(value, InFlight):
            value.touched("is overwritten")

    def fragment_written(self, group: Group, site: Site, register: str) -> None:
        """Reports a write to a register that belongs to an A fragment in flight."""
        for products in (*group.wgmma_groups, group.pending_wgmma):
            for product in products:
                if register in product.fragment:
                    self.wave.misuse(
                        "wgmma-in-flight", site, group.threads,
                        f"register {register} of A is written before a wait_group covers the wgmma "
                        f"at {product.site}",
                    )  # fmt: skip
                    return

    # Observers

    def _notify(self, group: Group, product: Wgmma) -> None:
        unit, first_cta = product.unit, self.wave.geometry.first_cta
        operands = [product.b_addresses()]
        if not product.form.fragment:
            operands.append(product.a_addresses())
        for position, first in enumerate(product.index[::unit]):
            cta = int(product.cta[position * unit]) + first_cta
            event = EngineAccess(
                product.site,
                self._engine(int(first)),
                "read",
                group.threads[position * unit : (position + 1) * unit],
                cta,
                np.concatenate([operand[position].reshape(-1) for operand in operands]),
                PIECE,
                product.clock,
            )
            for observer in self.wave.observers:
                observer.engine_access(event)

    def _notify_done(self, group: Group, site: Site, issued: int) -> None:
        warpgroups = group.index // WARPGROUP
        for which in np.unique(warpgroups):
            chosen = warpgroups == which
            engine = self._engine(int(group.index[chosen][0]))
            event = EngineDone(site, engine, group.threads[chosen], issued, self.wave.tick())
            for observer in self.wave.observers:
                observer.engine_done(event)

    def _engine(self, thread: int) -> Engine:
        cta, tid = divmod(thread, self.wave.geometry.threads_per_cta)
        return Engine("warpgroup", cta + self.wave.geometry.first_cta, tid // WARPGROUP)
