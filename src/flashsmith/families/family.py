"""Family: the base class whose subclasses define everything in which families of kernels differ;
and the registry of families.

All other code accesses a config's family as `cfg.family`. docs/add-a-family.md builds a family step
by step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from flashsmith import bundle
from flashsmith.errors import ArgumentError
from flashsmith.families.canonical import version_of
from flashsmith.families.cpp import CppNames
from flashsmith.families.device import KNOWN_DEVICES, DeviceSpec
from flashsmith.families.family_checks import check_definition, check_name
from flashsmith.families.head_dims import HeadDims, HeadPair, is_whole
from flashsmith.families.order import Order
from flashsmith.families.rule import LegalSpace, Rule
from flashsmith.families.tile_work import CallWork, TileWork
from flashsmith.operations.problem import Problem
from flashsmith.operations.registry import find_more_with, operation
from flashsmith.printable import quoted
from flashsmith.semantics.compiled import Semantics
from flashsmith.semantics.dtype import DType

ENTRY_POINT_GROUP = "flashsmith.families"


class ConfigSet(NamedTuple):
    """A set of configs that KERNELS can name, with a description of the set."""

    meaning: str
    make: Callable[[], Sequence[Any]]


@dataclass(frozen=True)
class SmemRegion:
    """A part of a CTA's shared memory: what the part contains, and its bytes as a half-open
    range."""

    tile: str
    begin: int
    end: int
    rows: int  # 0 if the region is not a tile
    columns: int


def smem_regions(
    cfg: Any, tiles: Iterable[tuple[Any, ...]], rest: str = ""
) -> tuple[SmemRegion, ...]:
    """Returns the regions of consecutive tiles, followed by one region for everything after the
    last tile.

    Args:
        cfg: a config that has d_head, dtype and smem_bytes().
        tiles: a tuple for each tile: the tile's name, the number of its buffers, the number of rows
            and, unless it is d_head, the number of columns.
        rest: the name of the region after the last tile.
    """
    regions, begin = [], 0
    for tile, count, rows, *width in tiles:
        columns = width[0] if width else cfg.d_head
        for i in range(count):
            name = tile if count == 1 else f"{tile} {i + 1} of {count}"
            end = begin + rows * columns * cfg.dtype.element_size
            regions.append(SmemRegion(name, begin, end, rows, columns))
            begin = end
    if begin < cfg.smem_bytes():
        regions.append(SmemRegion(rest, begin, cfg.smem_bytes(), 0, 0))
    return tuple(regions)


@dataclass(frozen=True)
class Intensity:
    """The FLOP that a kernel computes per byte that it reads, in the limit of long sequences.

    `shared`: FLOP per byte read from shared memory. `global_memory`: FLOP per byte that CTAs read
    from global memory, mostly from L2.
    """

    shared: float
    global_memory: float


class Family:
    """A family of kernels: a config class, C++ sources, and everything else in which families
    differ.

    A subclass must set the attributes that have no value here. It overrides the methods for the
    features that its kernels have; each method's default is for a family without the feature. `cfg`
    is always a config of the family.
    """

    # The class of the family's configs; its attribute FAMILY is the family's name.
    config_class: Any
    # The family in a few words, such as 'mma.sync'.
    title: str
    # The name of the operation that the kernels compute.
    operation: str = "forward"
    # The conditions that a config must fulfil so that its kernel can be built.
    rules: tuple[Rule, ...] = ()
    # The knobs whose values are chosen first when a partial config is completed, because many rules
    # depend on them.
    choose_first: tuple[str, ...] = ()
    # For some knobs, the only values that the search for a legal config tries. Of all other knobs
    # it tries all values.
    repairs: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    # The folder with the C++ sources. It has the family's name, with which include paths begin. The
    # .cc files in the folder are compiled into every library.
    csrc: Path
    # The C++ names that the sources in `csrc` define.
    cpp: CppNames
    # The suffix of the compilation target, such as 'a' for sm_90a, if the kernels use
    # architecture-specific instructions.
    target_suffix: str = ""
    # Whether tensors must be suitable for TMA, which requires strides above 0.
    needs_tma: bool = False
    # Whether a CTA may compute several tiles, one after another.
    persistent: bool = False
    # Whether a kernel of this family that spills is so slow that it is neither measured nor
    # shipped.
    must_not_spill: bool = False
    # The key of the search space in `flashsmith tune`; '' if there is none.
    space_key: str = ""
    # The sets that KERNELS can name, by key.
    sets: ClassVar[Mapping[str, ConfigSet]] = {}

    @property
    def name(self) -> str:
        """The name of the family in manifests, tables and rows."""
        return str(self.config_class.FAMILY)

    @property
    def oldest_arch(self) -> int:
        """The first compute capability on which the kernels run; 90 is 9.0."""
        return int(self.config_class.OLDEST_ARCH)

    @cached_property
    def knob_values(self) -> dict[str, tuple[Any, ...]]:
        """For each knob, in the order of the fields, all values that the knob has in legal
        configs."""
        return {knob.name: knob.metadata["values"] for knob in fields(self.config_class)}

    # The pairs of widths (d_head, d_v) of the kernels whose calls may have a d_v other than d.
    pairs: tuple[HeadPair, ...] = ()

    @property
    def head_dims(self) -> tuple[HeadDims, ...]:
        """All widths, single or paired, for which there are kernels."""
        return (*self.knob_values["d_head"], *self.pairs)

    @property
    def covered_values(self) -> Mapping[str, tuple[Any, ...]]:
        """The knob_values from which a covering array is made. These leave out values of
        `canonical` other than 0, because each is legal only on some GPUs, and values of `d_v` other
        than 0, which exist only for a few d_heads. They also leave out the d_heads 72 and 80,
        because these have the same tiles as another d_head."""
        values = self.knob_values
        widths = tuple(filter(is_whole, values["d_head"]))
        absent: dict[str, tuple[Any, ...]] = {
            name: (0,) for name in ("canonical", "d_v") if name in values
        }
        return values | absent | {"d_head": widths}

    @cached_property
    def legal_space(self) -> LegalSpace:
        """The rules and knob values that define the family's legal configs."""
        return LegalSpace(self.rules, self.knob_values, self.choose_first, self.repairs)

    def target_suffix_for(self, arch: int) -> str:
        """The target_suffix for an architecture; 90 stands for sm_90."""
        return self.target_suffix

    def kernel_templates(self, cfg: Any) -> Mapping[str, str]:
        """The templates of all kernels that the plans of a config launch, the main kernel first.

        Each key is a word for the purpose of the kernel.
        """
        return {"main": self.cpp.kernel}

    def program_templates(self, cfg: Any, semantics: Semantics) -> Mapping[str, str]:
        """The kernel templates, in addition to kernel_templates(), that the plans of a library with
        these semantics launch."""
        return {}

    def templates_for(self, cfg: Any, semantics: Semantics) -> Mapping[str, str]:
        """The kernel templates of a library with these semantics, the main kernel first."""
        return {**self.kernel_templates(cfg), **self.program_templates(cfg, semantics)}

    def runs_on(self, device: DeviceSpec) -> bool:
        """Whether the family can have legal configs on a device."""
        if device.arch < self.oldest_arch:
            return False
        return all(rule.predicate(None, device) for rule in self.rules if not rule.knobs)

    def unsupported_reason(self, problem: Problem, device: DeviceSpec) -> str | None:
        """The reason why the family has no kernel for a problem on a device; None if the family has
        one."""
        return None

    def gradients_of(self, cfg: Any) -> str:
        """The only value of a problem's `gradients` for which a config's kernels can be used; '' if
        they can be used for every value."""
        return ""

    def cache_of(self, cfg: Any) -> str:
        """The format of a KV cache, as in Problem.cache, for which a config's kernels are compiled;
        '' stands for a plain cache."""
        return ""

    def for_gradients(self, cfg: Any, gradients: str) -> Any:
        """The config to use instead of `cfg` for a problem that needs only these gradients.

        `cfg` computes all gradients. The kernels of the returned config leave out the work for
        gradients that are not needed. In most families the returned config is `cfg` itself.
        """
        return cfg

    def canonical(self, cfg: Any, device: DeviceSpec) -> Any:
        """The legal config that computes the same as `cfg`, but in the canonical order. This is
        `cfg` itself if `cfg` is canonical. None if there is no such config."""
        return None

    def order(self, cfg: Any, arch: int) -> Order | None:
        """The order of operations in which a config's kernel computes a row if it is compiled for
        this architecture; None if the family's operation is not attention."""
        return None

    def is_deterministic(self, cfg: Any) -> bool:
        """Whether everything that a kernel writes has the same bits in every run."""
        return True

    def adapt_to_queries(self, cfg: Any, problem: Problem, device: DeviceSpec) -> Any:
        """The config to use instead of `cfg` for a problem.

        `cfg` was chosen without regard to the number of queries. For sequences with few queries,
        the returned config gives the same bits as `cfg`.
        """
        return cfg

    def adapt_to_registers(self, cfg: Any, semantics: Semantics) -> Any:
        """The config to use instead of `cfg` for these semantics, for which there are no
        measurements.

        It differs from `cfg` if `cfg`'s kernel would have too few registers.
        """
        return cfg

    def has_more_arguments(self, cfg: Any) -> bool:
        """Whether a config's kernels take more arguments than the function type `cpp.function`
        declares."""
        return False

    def adapt_to_program(self, cfg: Any, semantics: Semantics) -> Any:
        """The config to use instead of `cfg` for semantics with a program, because `cfg` was
        measured without a program. None if the family has no kernels for programs."""
        return None

    # --- which configs ---------------------------------------------------------------------------

    def kernels_to_build(self) -> Sequence[Any]:
        """The configs that `flashsmith build` compiles if its user selects none."""
        return ()

    def block_size_set(self) -> Sequence[Any]:
        """The configs from which a key 'B_r,B_c' selects the ones with these block sizes."""
        return ()

    def shipped(self) -> Sequence[tuple[Any, Semantics]]:
        """The kernels that are shipped even if no table of winners contains them."""
        return ()

    def candidates(
        self, dtype: DType, d_head: Any, device: DeviceSpec, masked: bool
    ) -> Sequence[Any]:
        """The configs to choose from when there are no measurements, in order of preference.

        d_head: a number, or a HeadPair for calls whose d_v differs from d. A family without kernels
            for pairs returns () for a HeadPair.
        masked: whether some rows see fewer keys than others.
        """
        return ()

    def search_space(self, dtype: DType, d_head: Any, masked: bool) -> Sequence[Any]:
        """The configs with which the search of `flashsmith tune` begins; () if the family has no
        kernels for these arguments."""
        return ()

    def moves(self, cfg: Any) -> Iterable[Any]:
        """All configs that are one search step away from `cfg`, including illegal ones."""
        return ()

    def worth_searching(self, cfg: Any) -> bool:
        """Whether a legal config is worth measuring."""
        return True

    def neighbours(self, cfg: Any) -> list[Any]:
        """The configs one search step away from `cfg` that are worth measuring and are legal on
        `roomiest_device`. Neighbours of a canonical config are canonical. Neighbours of a config
        for a cache with scales compute rows in the same order as `cfg`, because outputs for such a
        cache must have the bits that they have for a plain cache."""
        found = dict.fromkeys(other for other in self.moves(cfg) if self.worth_searching(other))
        device, rules = self.roomiest_device, self.rules
        return [
            other
            for other in found
            if other != cfg
            and version_of(other) == version_of(cfg)
            and all(rule.predicate(other, device) for rule in rules)
            and (not self.cache_of(cfg) or self.have_same_order(other, cfg, device.arch))
        ]

    def have_same_order(self, one: Any, other: Any, arch: int) -> bool:
        """Whether two configs compute a row by the same operations in the same order."""
        return self.order(one, arch) == self.order(other, arch)

    def adapt_to_heads(self, cfg: Any, problem: Problem) -> Any:
        """`cfg`, or a config with other tiles if its tiles do not suit the problem's head ratio.

        The head ratio is the number of query heads per K/V head.
        """
        return cfg

    def pack_variants(self, cfg: Any, problem: Problem, device: DeviceSpec) -> Sequence[Any]:
        """Legal variants of `cfg` in which the rows of a tile are the query heads of a group.
        Variants that also split keys come last. Returns () if packing would not save many tiles."""
        return ()

    def splits_keys(self, cfg: Any) -> bool:
        """Whether the kernel of a config can split a tile's keys into parts, as the kernels of
        split_variants() can."""
        return False

    def split_variants(self, cfg: Any, problem: Problem, device: DeviceSpec) -> Sequence[Any]:
        """Legal variants of `cfg` whose kernels split the keys of a tile into parts; () if the
        problem's tiles already fill the device."""
        return ()

    @cached_property
    def roomiest_device(self) -> DeviceSpec:
        """The GPU with the most shared memory, among the known GPUs on which the family runs."""
        served = [device for device in KNOWN_DEVICES if self.runs_on(device)]
        return max(served, key=lambda device: device.max_smem_per_block)

    def proof_configs(self, dtype: DType, d: Any) -> Sequence[Any]:
        """A few configs for `d` (a head dimension or a HeadPair) that together have every feature
        that proofs should exercise."""
        return ()

    # --- costs -----------------------------------------------------------------------------------

    has_cost_model: bool = False

    # Seconds that the emulator takes to translate a kernel, on one core.
    translation_seconds: float = 0.1

    def plan_costs(self, gpu: str) -> Sequence[float]:
        """The arguments of flashsmith_set_plan_costs() for the GPU with this name: the cost figures
        with which the C++ code then plans calls. Returns () if planning uses no cost model."""
        return ()

    def compile_cost(self, cfg: Any) -> float:
        """The relative compile time of a config; 1,000 is about 1.4 s."""
        return 500.0

    def tile_work(
        self, cfg: Any, device: DeviceSpec, registers: int | None, spill: int | None
    ) -> TileWork:
        """The work of one tile on an SM; only families that have a cost model implement this.

        registers, spill: the kernel's registers and spilled bytes per thread; None means that they
            are estimated.
        """
        raise ArgumentError(f"cfg: no cost model for the family {self.name!r}")

    def loops(
        self,
        cfg: Any,
        problem: Problem,
        device: DeviceSpec,
        registers: int | None = None,
        spill: int | None = None,
    ) -> Sequence[TileWork]:
        """The tile_work of each launch of a call that loops over tiles, the main launch first."""
        return (self.tile_work(cfg, device, registers, spill),)

    def helpers_ms(self, cfg: Any, problem: Problem, device: DeviceSpec) -> float:
        """The time in milliseconds of a call's other launches, which loops() leaves out."""
        return 0.0

    def call_work(self, cfg: Any, problem: Problem, device: DeviceSpec) -> CallWork | None:
        """The work of a whole call, in families whose cost model does not count tiles of queries.
        None in families whose cost model computes times from tile_work."""
        return None

    # --- descriptions ----------------------------------------------------------------------------

    def dividing_tiles(self, cfg: Any) -> dict[str, int]:
        """The tile sizes, keyed by knob. If the numbers of queries and keys are multiples of these
        sizes, all tiles are whole."""
        return {}

    def smem_map(self, cfg: Any) -> Sequence[SmemRegion]:
        """The layout of a CTA's dynamic shared memory."""
        size = cfg.smem_bytes()
        return (SmemRegion("all", 0, size, 0, 0),) if size else ()

    def intensity(self, cfg: Any) -> Intensity | None:
        """The FLOP per byte of the kernels' main loop; None if the kernels have no such loop."""
        return None

    def conflict_kinds(self) -> Mapping[str, tuple[str, ...]]:
        """For each use that the kernels make of shared memory ('ldmatrix', 'copy st', 'O st', 'O
        ld'), the kinds of access that the emulator counts as this use."""
        return {}

    def registers_in_words(self, cfg: Any, registers: int) -> str:
        """The number of registers per thread, as words for a report."""
        return f"{registers} of 255"

    def multiplies_with(self, cfg: Any) -> tuple[str, ...]:
        """The names of the roofline ceilings that apply to the MMA instruction of the kernels."""
        return ()

    def loop_tiles(self, cfg: Any) -> tuple[int, int] | None:
        """The number of rows in a CTA's tile and the number of keys in a step of its loop; None if
        the kernels have no such loop."""
        return None

    def most_rows(self, cfg: Any) -> int | None:
        """The maximum number of rows (queries times query heads) per K/V head in a call; None if
        there is no limit."""
        return None

    # Whether all loop steps of a launch do the same work; if so, performance counters are
    # proportional to the number of steps.
    equal_steps: bool = False


# --- the registry --------------------------------------------------------------------------------

# Families by name, in the order in which they were registered.
FAMILIES: dict[str, Family] = {}
_log = logging.getLogger("flashsmith")
# The errors of installed packages that could not register their families.
_failures: list[str] = []
_installed_are_loaded = False
# Reentrant, because an entry point may itself call families().
_loading = threading.RLock()


def register_family(family: Family, csrc: Path | None = None) -> Family:
    """Registers a family, so that its configs can be parsed, built, run, proven and tuned.

    Args:
        family: an object whose config class has a FAMILY that is not registered yet.
        csrc: the folder with the family's C++ sources, which must have the family's name; None
            means the attribute `csrc` of the family.

    Raises:
        ArgumentError: the argument is not a Family; its name is taken, or is not a C identifier in
            lower case; a class, a folder or the operation is missing; or no known GPU runs its
            kernels. Also raised if its short forms leave out a knob or look like another family's,
            or if the name of its config class, of a set or of its search space is taken.
    """
    if not isinstance(family, Family):
        raise ArgumentError(
            f"family={quoted(family)}: give an object of a class derived from Family, not the class"
        )
    check_name(family, FAMILIES)
    if csrc is not None:
        family.csrc = csrc
    check_definition(family, FAMILIES)
    operation(family.operation)
    config_class = family.config_class
    config_class.family = family
    config_class.KNOBS = tuple(declared.name for declared in fields(config_class))
    FAMILIES[family.name] = family
    return family


def load_installed_families() -> bool:
    """Registers the families of installed packages.

    Each entry point in the group flashsmith.families is a callable that registers families. Returns
    whether this call found any entry points.

    If an entry point fails, the failure is logged once as a warning, and all other families can be
    used. Errors about unknown names mention the failures, which `installed_failures` returns.
    """
    global _installed_are_loaded
    with _loading:
        if _installed_are_loaded:
            return False
        # This is set before any entry point is loaded, because an entry point may itself look up
        # families or an operation.
        _installed_are_loaded = True
        if bundle.is_copy():
            return False  # entry points register with the installed package, not this copy
        # importlib.metadata takes longer to import than all of families.
        from importlib.metadata import entry_points

        found = entry_points(group=ENTRY_POINT_GROUP)
        for entry in found:
            try:
                entry.load()()
            except Exception as error:
                failure = (
                    f"family {entry.name!r} ({entry.value}) failed to register: "
                    f"{type(error).__name__}: {error}; repair or uninstall its package"
                )
                _failures.append(failure)
                _log.warning("flashsmith: %s", failure)
        return bool(found)


def installed_failures() -> str:
    """The errors of installed packages that could not register their families; '' if there are
    none."""
    return "; ".join(_failures)


find_more_with(load_installed_families)


def families(operation: str | None = None) -> tuple[Family, ...]:
    """All families, including those of installed packages; if `operation` is given, only the
    families of this operation."""
    load_installed_families()
    return tuple(family for family in FAMILIES.values() if operation in (None, family.operation))


def family_named(name: str) -> Family:
    """Returns the family with this name.

    Raises:
        ArgumentError: no family has this name.
    """
    if name not in FAMILIES:
        load_installed_families()
    if name not in FAMILIES:
        failed = installed_failures()
        raise ArgumentError(
            f"family={quoted(name)}: known are {', '.join(FAMILIES)}{failed and f'; {failed}'}"
        )
    return FAMILIES[name]


def config_class_names(operation: str | None = None) -> list[str]:
    """The names of the config classes, for messages: of all families or, if `operation` is given,
    of the families of this operation."""
    return [family.config_class.__name__ for family in families(operation)]
