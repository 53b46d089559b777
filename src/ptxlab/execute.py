"""emulate(): runs an entry's grid in waves of CTAs, and collects counts and findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ptxlab.errors import ArgumentError, EmulatorError
from ptxlab.interface import EmulationResult, Launch, Observer, Site
from ptxlab.machine.geometry import WARP, WARPGROUP, Geometry
from ptxlab.machine.group import Group
from ptxlab.machine.memory import GlobalMemory
from ptxlab.machine.random_schedule import RandomSchedule
from ptxlab.machine.scheduler import Scheduler
from ptxlab.machine.tensor_cores import TENSOR_CORES, TensorCore
from ptxlab.machine.tensor_maps import TensorMap, TensorMapSpec
from ptxlab.machine.wave import Wave
from ptxlab.ptx import ParsedModule
from ptxlab.ptx.syntax import Variable
from ptxlab.translate.translator import Translated, translate

#: The number of backward jumps after which a launch counts as an endless loop. The longest
#: legitimate loop jumps once per KV block, a few thousand times.
LOOP_LIMIT = 1_000_000

#: The number of threads that run together. It is large enough to amortise NumPy's cost per call,
#: and small enough for the caches.
WAVE_THREADS = 4096


def emulate(
    ptx: str,
    entry: str,
    *,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    cluster: tuple[int, int, int] = (1, 1, 1),
    smem_bytes: int,
    argument_bytes: bytes,
    memory: GlobalMemory,
    tensor_maps: Sequence[TensorMapSpec] = (),
    variables: Mapping[str, np.ndarray] | None = None,
    observers: Sequence[Observer] = (),
    fuse: bool = True,
    loop_limit: int = LOOP_LIMIT,
    seed: int | None = None,
    sm_count: int | None = None,
    programmatic: bool = False,
    exact_mma: bool = False,
) -> EmulationResult:
    """Runs one kernel launch on the CPU.

    - ``ptx``: text of a module; ``entry``: mangled name of a kernel in this module.
    - ``smem_bytes``: dynamic shared memory of a CTA. Shared memory starts as 0xFF bytes (NaN).
    - ``argument_bytes``: the packed kernel arguments, holding real host pointers into ``memory``.
    - ``tensor_maps``: the tensor maps that the arguments contain. The argument bytes at the maps'
      offsets are ignored.
    - ``variables``: arrays that replace variables of the module, by name. Other variables begin
      with their initial values.
    - ``observers``: they receive every event; without observers, events cost nothing.
    - ``seed``: None selects the fixed schedule, in which asynchronous work happens as late as
      possible. A number seeds a random schedule. An odd number also makes it hesitant (see
      RandomSchedule).
    - ``sm_count``: the number of SMs of the GPU. The number matters only if CTAs wait for each
      other. Each SM then holds as many CTAs as the kernel's launch bounds promise. None: all CTAs
      are resident together.
    - ``programmatic``: whether the launch may begin before the previous one has finished
      (programmatic dependent launch). The emulator still runs one launch after the other, but the
      checks assume that they overlap.
    - ``exact_mma``: whether mma, wgmma and wmma give the bits of the target's tensor cores
      (machine/tensor_cores.py); otherwise they give float32 sums.

    Raises:
        EmulatorError: the PTX is not supported, the kernel deadlocks, loops forever or traps, or it
            accesses an address outside memory that no observer handles. The message names the PTX
            line. If the PTX has line info, it also names the line of CUDA source.
        ArgumentError: the launch is invalid.
    """
    translated, module = translate(ptx, entry, observed=bool(observers), fuse=fuse)
    memory = memory.extended()
    launch = _check_launch(translated, grid, block, cluster, smem_bytes, argument_bytes, memory)
    run = _Run(
        translated,
        replace(launch, programmatic=programmatic),
        memory,
        observers,
        _tensor_core(module) if exact_mma else None,
        {spec.argument_offset: TensorMap(spec, memory) for spec in tensor_maps},
        _ModuleMemory(module, translated, argument_bytes, memory, variables or {}),
        None if seed is None else RandomSchedule(seed),
        loops_left=loop_limit,
    )
    return run.all_waves(_ctas_per_wave(launch, translated, sm_count))


@dataclass
class _Run:
    """A launch that is being run: the state that its waves share, and the state that passes from
    one wave to the next."""

    translated: Translated
    launch: Launch
    memory: GlobalMemory
    observers: Sequence[Observer]
    tensor_core: TensorCore | None
    maps: dict[int, TensorMap]
    constants: _ModuleMemory
    random: RandomSchedule | None
    loops_left: int
    clock: int = 0

    def __post_init__(self) -> None:
        # For each block of code, how many warps and threads have executed it.
        self.counts = [0] * len(self.translated.block_mnemonics)
        self.thread_counts = [0] * len(self.translated.block_mnemonics)

    def all_waves(self, step: int) -> EmulationResult:
        """Runs all CTAs, in waves of ``step`` CTAs."""
        for observer in self.observers:
            observer.begin(self.launch)
        for first in range(0, self.launch.cta_count, step):
            ctas = min(step, self.launch.cta_count - first)
            for observer in self.observers:
                observer.wave(first, ctas)
            self._wave(first, ctas)
        for observer in self.observers:
            observer.end()
        return self._result()

    def _wave(self, first: int, ctas: int) -> None:
        wave = _make_wave(self.translated, self.launch, first, ctas, self.memory, self.observers)
        wave.tensor_core = self.tensor_core
        wave.ctas_to_come = self.launch.cta_count - first - ctas
        wave.bulk.maps = self.maps
        wave.line_sites = self.translated.line_sites
        wave.counts, wave.thread_counts = self.counts, self.thread_counts
        wave.loops_left, wave.clock = self.loops_left, self.clock
        self.constants.attach(wave)
        _run_wave(self.translated, wave, self.random)
        self.loops_left, self.clock = wave.loops_left, wave.clock

    def _result(self) -> EmulationResult:
        result = EmulationResult()
        for mnemonics, warps, threads in zip(
            self.translated.block_mnemonics, self.counts, self.thread_counts, strict=True
        ):
            for mnemonic, times in mnemonics.items():
                _add(result.instructions, mnemonic, times * warps)
                _add(result.thread_instructions, mnemonic, times * threads)
        result.findings = [finding for it in self.observers for finding in it.findings]
        return result


def _add(counts: dict[str, int], key: str, value: int) -> None:
    if value:
        counts[key] = counts.get(key, 0) + value


def _check_launch(
    translated: Translated,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    cluster: tuple[int, int, int],
    smem_bytes: int,
    argument_bytes: bytes,
    memory: GlobalMemory,
) -> Launch:
    for name, shape in (("grid", grid), ("block", block), ("cluster", cluster)):
        if len(shape) != 3 or any(extent < 1 for extent in shape):
            raise ArgumentError(f"{name}={shape!r}: give three numbers of at least 1")
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise ArgumentError(f"grid={grid!r} is not a multiple of cluster={cluster!r}")
    if block[0] * block[1] * block[2] > 1024:
        raise ArgumentError(f"block={block!r}: at most 1024 threads")
    limits = translated.entry.directives
    wanted = limits.get("reqntid", ())
    padded = (*wanted, 1, 1)[:3]
    if wanted and block != padded:
        raise ArgumentError(f"block={block!r}: the kernel requires {padded!r}")
    most = limits.get("maxntid", ())
    if most and block[0] * block[1] * block[2] > int(np.prod(most)):
        raise ArgumentError(f"block={block!r}: the kernel allows at most {int(np.prod(most))}")
    if len(argument_bytes) < translated.parameter_bytes:
        raise ArgumentError(
            f"argument_bytes has {len(argument_bytes)} bytes; the kernel's parameters take "
            f"{translated.parameter_bytes}"
        )
    if smem_bytes < 0:
        raise ArgumentError(f"smem_bytes={smem_bytes}: give 0 or more")
    shared = translated.static_shared_bytes
    if smem_bytes:
        shared = translated.dynamic_shared_offset + smem_bytes
    name = translated.entry.name
    return Launch(name, grid, block, cluster, translated.static_shared_bytes, shared, memory)


def _tensor_core(module: ParsedModule) -> TensorCore:
    core = TENSOR_CORES.get(module.arch)
    if core is None:
        known = ", ".join(f"sm_{arch}" for arch in TENSOR_CORES)
        raise ArgumentError(
            f"exact_mma: the rounding of {module.target}'s tensor cores is not known; compile for "
            f"one of {known}, or leave exact_mma out"
        )
    return core


def _ctas_per_wave(launch: Launch, translated: Translated, sm_count: int | None) -> int:
    """Returns the number of CTAs that run together; they are consecutive in flat order and form
    whole clusters.

    If CTAs wait for each other, this is the number that a GPU with ``sm_count`` SMs can hold.
    """
    cluster = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
    if cluster > 1 and (launch.cluster[1:] != (1, 1)):
        # Clusters that span several rows of the grid are not contiguous in flat order.
        return launch.cta_count
    wanted = max(1, WAVE_THREADS // launch.threads_per_cta)
    if translated.spins:
        (per_sm,) = translated.entry.directives.get("minnctapersm", (1,))
        wanted = launch.cta_count if sm_count is None else min(launch.cta_count, sm_count * per_sm)
    return max(cluster, wanted // cluster * cluster)


def _make_wave(
    translated: Translated,
    launch: Launch,
    first: int,
    ctas: int,
    memory: GlobalMemory,
    observers: Sequence[Observer],
) -> Wave:
    dynamic = max(0, launch.shared_bytes - translated.dynamic_shared_offset)
    geometry = Geometry(launch.grid, launch.block, launch.cluster, first, ctas, dynamic)
    wave = Wave(geometry, memory, launch.shared_bytes, translated.local_bytes, observers)
    wave.registers.begin(translated.entry.directives)
    return wave


def _run_wave(translated: Translated, wave: Wave, random: RandomSchedule | None) -> None:
    geometry = wave.geometry

    def start(group: Group, node: int, stop: int, values: object) -> object:
        return translated.function(wave, group, node, stop, values)

    wave.random = random
    wave.scheduler = Scheduler(geometry, start, wave.deliver, random)  # type: ignore[arg-type]
    # When one warp has waited for a wgmma, the wgmma is complete for all four warps, so a warpgroup
    # stays in one group.
    unit = WARP if translated.warps_are_free else WARPGROUP
    groups = _groups(geometry, random, unit)
    with np.errstate(all="ignore"):
        try:
            wave.scheduler.run(groups, translated.exit)
            wave.end()
        except Exception as error:
            raise _located(translated, error) from error


def _groups(geometry: Geometry, random: RandomSchedule | None, unit: int) -> list[Group]:
    """Returns all threads as one group.

    With a random schedule: several groups, each of whole warps or warpgroups (``unit`` threads).
    """
    everyone = np.arange(geometry.threads, dtype=np.int64)
    if random is None:
        return [Group(geometry, everyone)]
    groups = []
    for cta in range(geometry.ctas):
        own = everyone[cta * geometry.threads_per_cta :][: geometry.threads_per_cta]
        cuts = [at for at in range(unit, own.size, unit) if random.random() < 0.5]
        groups += [Group(geometry, part) for part in np.split(own, cuts)]
    return groups


def _located(translated: Translated, error: Exception) -> EmulatorError:
    """Returns a copy of the error that also names the PTX line and the source line that caused
    it."""
    site: Site | None = None
    trace = error.__traceback__
    file = f"<emulated {translated.entry.name}>"
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            site = translated.line_sites.get(trace.tb_lineno)
        trace = trace.tb_next
    where = str(site) if site else translated.entry.name
    if isinstance(error, EmulatorError):
        return EmulatorError(f"{where}: {error}")
    if isinstance(error, UnboundLocalError):
        return EmulatorError(f"{where}: a register is read before it is written")
    return EmulatorError(f"{where}: the emulator failed: {type(error).__name__}: {error}")


def _check_variable(name: str, array: np.ndarray, known: Mapping[str, Variable]) -> None:
    if name not in known:
        names = ", ".join(known) or "none"
        raise ArgumentError(f"variables: there is no {name!r}; the module has: {names}")
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
        raise ArgumentError(f"variables: {name}: give a C-contiguous NumPy array")
    size, align = known[name].size, known[name].align
    if array.nbytes != size:
        raise ArgumentError(f"variables: {name}: has {array.nbytes} bytes; the module's has {size}")
    if array.ctypes.data % align:
        raise ArgumentError(f"variables: {name}: must begin at a multiple of {align} bytes")


class _ModuleMemory:
    """Global memory with the arguments and the module variables that a kernel reads."""

    def __init__(
        self,
        module: ParsedModule,
        translated: Translated,
        argument_bytes: bytes,
        memory: GlobalMemory,
        variables: Mapping[str, np.ndarray],
    ) -> None:
        size = -(-max(len(argument_bytes), translated.parameter_bytes, 1) // 16) * 16
        self.parameters = np.zeros(size, np.uint8)
        self.parameters[: len(argument_bytes)] = np.frombuffer(argument_bytes, np.uint8)
        self.address = np.uint64(self.parameters.ctypes.data)
        self.symbols: dict[str, np.uint64] = {}
        self.kept: list[np.ndarray] = []
        memory.register("kernel arguments", self.parameters, writable=False)
        known = {v.name: v for v in module.variables if v.space in ("global", "const")}
        for name, array in variables.items():
            _check_variable(name, array, known)
        for name in translated.module_symbols:
            if name not in known:
                raise EmulatorError(f"entry {translated.entry.name}: symbol {name} is not known")
            if name in variables:
                writable = known[name].space == "global"
                address = memory.register(name, variables[name], writable=writable)
                self.symbols[name] = np.uint64(address)
            else:
                self.symbols[name] = self._place(known[name], memory)

    def _place(self, variable: Variable, memory: GlobalMemory) -> np.uint64:
        data = np.zeros(max(variable.size, 1) + variable.align, np.uint8)
        begin = -data.ctypes.data % variable.align
        part = data[begin : begin + max(variable.size, 1)]
        if variable.initial:
            part[: len(variable.initial)] = np.frombuffer(variable.initial, np.uint8)
        self.kept.append(data)
        memory.register(variable.name, part, writable=variable.space == "global")
        return np.uint64(part.ctypes.data)

    def attach(self, wave: Wave) -> None:
        """Gives a wave access to the arguments and symbols."""
        kinds = ("u1", "i1", "u2", "i2", "u4", "i4", "f4", "u8", "i8", "f8")
        wave.parameters = {kind: self.parameters.view(kind) for kind in kinds}
        wave.parameter_address = self.address
        wave.symbols = self.symbols
