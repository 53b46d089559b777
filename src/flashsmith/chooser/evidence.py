"""Expected times of configs, from a problem, a device and the table of winners.

The nearest measured entry with a config that this device can run is used first. Its times are
usually for another problem, so each time is scaled:

    ms here = ms measured x estimate(config, here) / estimate(config, there)

Errors that both estimates share cancel. The remainder is what the cost model predicts reliably: the
amount of work and its division into waves. A config that won with thousands of CTAs is thus
replaced if its large tiles would leave SMs idle.

The replacement need not be listed in the entry. It is then assumed to be as slow as the slowest
listed config, or slower if the model's estimate relative to the fastest listed config says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from flashsmith.chooser.candidates import by_preference, candidates
from flashsmith.chooser.cost_model import estimate
from flashsmith.chooser.spills import known_spill
from flashsmith.chooser.winners import Entry, NearEntry, RankedConfig, WinnersTable
from flashsmith.chooser.winners.key import sizes_of
from flashsmith.chooser.winners.validation import device_of
from flashsmith.errors import ArgumentError, FlashsmithError, UnservedError
from flashsmith.families import (
    DeviceSpec,
    DType,
    Family,
    KernelConfig,
    Problem,
    broken_rules,
    d_head_for,
    families,
    is_legal,
    parse_kernel_name_into_config,
    serves_gradients,
)
from flashsmith.families.canonical import ORDER, version_of
from flashsmith.families.gpu_names import gpu_name, same_gpu
from flashsmith.operations import DEFAULT
from flashsmith.semantics.mask import CAUSAL

EvidenceKind = Literal["table", "nearest", "related", "cost model", "offered"]

# The predicted gain with which a config replaces a preferred config, or the one that was measured
# fastest. A smaller gain is within the estimate's error, and a new kernel must be built.
GAIN_OVER_MEASURED = 0.02
GAIN_OVER_PREFERRED = 0.03
# The gain required to choose a config that splits keys or packs a group's heads into a tile, if
# this problem itself was not measured. It is a share and a minimum in milliseconds, since a second
# launch takes host time.
GAIN_OF_PARTS, LEAST_GAIN_OF_PARTS = 0.25, 0.005
# The gain required to choose a config that the measured entry does not list.
GAIN_UNMEASURED = 0.10
# How much longer a deterministic config may take and still be preferred to a nondeterministic one.
COST_OF_REPEATING = 0.03


@dataclass(frozen=True)
class ExpectedTime:
    """A config and its expected time, 0 if unknown."""

    config: Any
    ms: float


@dataclass(frozen=True)
class Evidence:
    """The configs, the choice first and the others by time, and the reason for the choice.

    why: one sentence. fallback: the warning to give once if nothing was measured, else ''. notes:
    entries that were ignored. entry: the measured entry, if any.
    """

    kind: EvidenceKind
    expected: tuple[ExpectedTime, ...]
    why: str
    fallback: str = ""
    notes: tuple[str, ...] = ()
    entry: Entry | None = None


class KernelFilter(NamedTuple):
    """Selects kernels that compute a problem's gradients, optionally only kernels of one family or
    only deterministic kernels."""

    problem: Problem
    family: str | None = None
    deterministic: bool = False

    def includes(self, config: Any) -> bool:
        if self.family not in (None, config.FAMILY) or not serves_gradients(config, self.problem):
            return False
        if self.problem.bits and not version_of(config):
            return False
        return not self.deterministic or config.family.is_deterministic(config)


def gather(
    problem: Problem,
    device: DeviceSpec,
    table: WinnersTable,
    family: str | None = None,
    deterministic: bool = False,
) -> Evidence:
    """The evidence for a problem on a device. ``family`` restricts it to one family, and
    ``deterministic`` to kernels that give the same bits in every run. Partial attention uses the
    measurements of whole attention over the same number of keys.

    Raises ArgumentError if no kernel serves the problem's d, or none fits on the device.
    """
    if problem.semantics.program:
        return _of_program(problem, device, table, family, deterministic)
    if problem.bits:
        return _canonical(problem, device, table, family, deterministic)
    itself = problem
    if problem.semantics.partial:
        problem = replace(problem, semantics=replace(problem.semantics, partial=False))
    asked = KernelFilter(problem, family, deterministic)
    notes: list[str] = []
    for found in table.lookup(problem, device):
        usable = [
            (config, one)
            for config, one in _usable(found.entry, problem, device, notes)
            if asked.includes(config)
        ]
        if usable:
            evidence = _measured(found, usable, problem, device, notes, asked)
            break
    else:
        evidence = _estimated(problem, device, table, notes, asked)
    evidence = _of_few_tiles(_without_spills(evidence, itself, device, asked), problem, device)
    return _soundly_built(_repeatable_first(evidence), itself, device, asked)


def _of_program(
    problem: Problem,
    device: DeviceSpec,
    table: WinnersTable,
    family: str | None,
    deterministic: bool,
) -> Evidence:
    """The evidence for a problem with a score or mask function: that for the same problem without
    one. Configs are adapted, for example to tiles that visit lists of K/V blocks."""
    semantics, program = problem.semantics, problem.semantics.caller_program
    hides = program is not None and program.mask is not None
    # Tiles under the mask of a function differ in length, as under a causal one.
    mask = CAUSAL if hides and not semantics.key_mask.hides else semantics.mask
    without = replace(semantics, program="", uneven=semantics.packed, mask=mask)
    plain = gather(replace(problem, semantics=without), device, table, family, deterministic)
    expected: dict[Any, ExpectedTime] = {}
    for one in plain.expected:
        config = one.config.family.adapt_to_program(one.config, semantics)
        if config is not None and is_legal(config, device):
            expected.setdefault(config, ExpectedTime(config, one.ms))
    why = f"{plain.why}; adapted to a score or mask function, which was not measured"
    if expected:
        return Evidence(plain.kind, tuple(expected.values()), why, plain.fallback, plain.notes)
    wanted = problem.dtype, d_head_for(problem), device, without.key_mask.hides, problem.operation
    adapted = (
        config.family.adapt_to_program(config, semantics)
        for config in candidates(*wanted)
        if family in (None, config.FAMILY)
    )
    offered = [it for it in dict.fromkeys(adapted) if it is not None and is_legal(it, device)]
    if not offered:
        raise UnservedError(
            f"program: no kernel of a score or mask function serves '{problem}' on {device.name}; "
            "leave the function out"
        )
    why = "no kernel of a score or mask function was measured"
    return Evidence("offered", tuple(ExpectedTime(it, 0.0) for it in offered), why)


def _canonical(
    problem: Problem,
    device: DeviceSpec,
    table: WinnersTable,
    family: str | None,
    deterministic: bool,
) -> Evidence:
    """The evidence for a problem with canonical bits: measurements of canonical kernels. If there
    are none, canonical counterparts of the configs that are chosen without canonical bits."""
    asked = KernelFilter(problem, family, deterministic)
    notes: list[str] = []
    for found in table.lookup(problem, device):
        if not found.entry.problem.bits:
            continue
        usable = [
            (config, one)
            for config, one in _usable(found.entry, problem, device, notes)
            if asked.includes(config)
        ]
        if usable:
            return _measured(found, usable, problem, device, notes, asked)
    free = gather(replace(problem, bits=""), device, table, family, deterministic)
    masked = problem.semantics.key_mask.hides
    others = (
        candidates(problem.dtype, d_head_for(problem), device, masked, problem.operation)
        if family is None
        else ()
    )
    expected: dict[Any, ExpectedTime] = {}
    for one in (*free.expected, *(ExpectedTime(config, 0.0) for config in others)):
        config = one.config.family.canonical(one.config, device)
        if config is not None and config not in expected:
            ms = one.ms
            if config.family.has_cost_model:
                ms = estimate(config, problem, device).ms
            expected[config] = ExpectedTime(config, ms)
    if not expected:
        raise ArgumentError(
            f"bits={problem.bits!r}: no kernel of {ORDER} serves '{problem}' on "
            f"{device.name}; leave bits out"
        )
    first, *rest = expected.values()
    why = f"takes the place of {free.expected[0].config} in {ORDER}; {free.why}"
    ordered = (first, *sorted(rest, key=lambda one: one.ms))
    return Evidence(free.kind, ordered, why, free.fallback, free.notes)


def _of_few_tiles(evidence: Evidence, problem: Problem, device: DeviceSpec) -> Evidence:
    """The evidence with another choice if the predicted gain is large enough: a config that splits
    keys, or packs a group's heads into one tile, to use idle rows or SMs. Measurements for exactly
    these sizes take precedence."""
    entry, chosen = evidence.entry, evidence.expected[0]
    if evidence.kind == "offered" or (
        entry and evidence.kind != "related" and _same_sizes(entry.problem, problem)
    ):
        return evidence
    best = min(_variants(evidence, problem, device), key=lambda one: one.ms, default=chosen)
    if chosen.ms <= max(best.ms * (1 + GAIN_OF_PARTS), best.ms + LEAST_GAIN_OF_PARTS):
        return evidence
    rest = sorted(evidence.expected, key=lambda one: one.ms)
    why = f"{evidence.why}; its tiles would leave rows or SMs idle, and {chosen.config} is "
    why += f"estimated to take {chosen.ms / best.ms - 1:.0%} longer"
    return replace(evidence, expected=(best, *rest), why=why)


def _variants(evidence: Evidence, problem: Problem, device: DeviceSpec) -> Iterator[ExpectedTime]:
    """The configs in evidence, changed to split keys or pack heads. Packed variants are also made
    of the other candidates of the choice's family, whose tiles have other heights."""
    for one in evidence.expected:
        family = one.config.family
        found = (
            *family.split_variants(one.config, problem, device),
            *family.pack_variants(one.config, problem, device),
        )
        if found:
            yield from _relative(one, found, problem, device)
    chosen = evidence.expected[0]
    family, d_head = chosen.config.family, chosen.config.d_head
    if evidence.entry is None or not family.has_cost_model:
        return
    masked = problem.semantics.key_mask.hides
    known = {one.config for one in evidence.expected}
    found = tuple(
        other
        for config in candidates(problem.dtype, d_head, device, masked, problem.operation)
        if config.family is family and config not in known
        for other in family.pack_variants(config, problem, device)
    )
    if found:
        yield from _relative(chosen, found, problem, device)


def _relative(
    known: ExpectedTime, configs: Sequence[Any], problem: Problem, device: DeviceSpec
) -> Iterator[ExpectedTime]:
    """Configs with the model's times, scaled so that the known config has its known time."""
    per_ms = known.ms / estimate(known.config, problem, device).ms
    for config in configs:
        yield ExpectedTime(config, estimate(config, problem, device).ms * per_ms)


def _without_spills(
    evidence: Evidence, problem: Problem, device: DeviceSpec, asked: KernelFilter
) -> Evidence:
    """The evidence with another choice if the chosen kernel is known to spill and its replacement
    was as fast. The choice also changes if the family replaces the kernel because it has too few
    registers. A kernel that was measured for the problem's own class stays, since its time includes
    any spills."""
    chosen, *others = evidence.expected
    if _was_measured(evidence, problem):
        return evidence
    known = known_spill(chosen.config, problem, device)
    if known is not None and known.timed:
        instead, ratio = known.instead, known.ratio
        why = f"{known}, and took {ratio:.3f} times as long in alternating timings"
    else:
        semantics = problem.required_semantics(chosen.config)
        instead, ratio = chosen.config.family.adapt_to_registers(chosen.config, semantics), 1.0
        why = "has too few registers for these semantics; the other was not timed"
    if instead is None or instead == chosen.config:
        return evidence
    if not asked.includes(instead) or not is_legal(instead, device):
        return evidence
    first = ExpectedTime(instead, chosen.ms / ratio)
    rest = [chosen, *(one for one in others if one.config != instead)]
    why = f"{evidence.why}; {chosen.config} {why}"
    found = replace(evidence, expected=(first, *sorted(rest, key=lambda one: one.ms)), why=why)
    return found if known else _without_spills(found, problem, device, asked)


def _was_measured(evidence: Evidence, problem: Problem) -> bool:
    """Whether the choice was measured as compiled for the problem. An entry for whole tiles does
    not cover the kernel for uneven lengths, and an entry for whole attention does not cover the
    kernel for partial attention."""
    entry, config = evidence.entry, evidence.expected[0].config
    if entry is None or evidence.kind == "related":
        return False
    return bool(entry.problem.required_semantics(config) == problem.required_semantics(config))


def _soundly_built(
    evidence: Evidence, problem: Problem, device: DeviceSpec, asked: KernelFilter
) -> Evidence:
    """The evidence with a replacement for a chosen kernel that is known to compile to slow code.

    The replacement is the best config without this fault. A kernel that was timed against others is
    not replaced. If the slow kernel's wgmma is serialised, the replacement may take any time. If
    the slow kernel spills, the replacement's expected time may be longer only by
    GAIN_OVER_MEASURED.
    """
    chosen = evidence.expected[0]
    known = known_spill(chosen.config, problem, device)
    if known is None or known.timed:
        return evidence
    most = math.inf if known.serialised else chosen.ms * (1 + GAIN_OVER_MEASURED)
    others = [*evidence.expected[1:], *_on_paper(chosen, evidence, problem, device, asked)]
    sound = [one for one in others if known_spill(one.config, problem, device) is None]
    best = min(sound, key=lambda one: one.ms, default=None)
    if best is None or best.ms > most:
        return evidence
    rest = sorted((one for one in evidence.expected if one is not best), key=lambda one: one.ms)
    why = f"{evidence.why}; {chosen.config} {known}"
    return replace(evidence, expected=(best, *rest), why=why)


def _on_paper(
    chosen: ExpectedTime,
    evidence: Evidence,
    problem: Problem,
    device: DeviceSpec,
    asked: KernelFilter,
) -> list[ExpectedTime]:
    """The candidates of the choice's family that are not in evidence, with the model's times scaled
    by the choice's."""
    family = chosen.config.family
    if not family.has_cost_model or not chosen.ms:
        return []
    masked = problem.semantics.key_mask.hides
    known = {one.config for one in evidence.expected}
    found = candidates(
        problem.dtype, chosen.config.d_head, device, masked, problem.operation, problem.gradients
    )
    asked_for = [
        config
        for config in found
        if config.family is family and config not in known and asked.includes(config)
    ]
    return list(_relative(chosen, asked_for, problem, device))


def _repeatable_first(evidence: Evidence) -> Evidence:
    """The evidence with a deterministic config as the choice, if one takes at most
    COST_OF_REPEATING longer than the choice."""
    chosen, *others = evidence.expected
    if not chosen.ms or chosen.config.family.is_deterministic(chosen.config):
        return evidence
    for one in others:
        near = one.ms <= chosen.ms * (1 + COST_OF_REPEATING)
        if near and one.config.family.is_deterministic(one.config):
            rest = sorted((it for it in evidence.expected if it is not one), key=lambda it: it.ms)
            why = f"{evidence.why}; {chosen.config} is {one.ms / chosen.ms - 1:.1%} faster but not"
            return replace(evidence, expected=(one, *rest), why=f"{why} deterministic")
    return evidence


# --- measured ------------------------------------------------------------------------------------


def _usable(
    entry: Entry, problem: Problem, device: DeviceSpec, notes: list[str]
) -> list[tuple[Any, RankedConfig]]:
    """The entry's configs that this version knows and the device runs, with the problem's dtype."""
    usable: list[tuple[Any, RankedConfig]] = []
    for one in entry.ranked:
        config, reason = _checked(
            one.config, one.family, entry.key.d_head, problem.dtype, problem.gradients, device
        )
        if reason:
            notes.append(f"{one.config} of the entry {entry.key} is ignored: {reason}")
        elif config not in [other for other, _ in usable]:
            usable.append((config, one))
    return usable


@lru_cache(maxsize=4096)
def _checked(
    text: str, family: str, d_head: int, dtype: DType, gradients: str, device: DeviceSpec
) -> tuple[Any, str]:
    """The config of a short form with ``dtype`` for ``gradients``, and why it cannot be used ('' if
    it can)."""
    try:
        config = parse_kernel_name_into_config(text)
    except FlashsmithError as error:
        return None, str(error)
    if family != config.FAMILY:
        return None, f"it is of the family {config.FAMILY}, not {family}"
    if config.d_head != d_head:
        return None, f"it is for d_head {config.d_head}"
    config = config.family.for_gradients(config.with_knobs(dtype=dtype), gradients)
    return config, "; ".join(rule.message for rule in broken_rules(config, device))


def _measured(
    found: NearEntry,
    usable: Sequence[tuple[Any, RankedConfig]],
    problem: Problem,
    device: DeviceSpec,
    notes: Sequence[str],
    asked: KernelFilter,
) -> Evidence:
    entry = found.entry
    there = device if same_gpu(entry.key.gpu, device.name) else device_of(entry.key) or device
    very_one = not found.relation and _same_sizes(entry.problem, problem)
    stands = very_one and entry.problem.heads_k == problem.heads_k
    expected, named = [], {config for config, _ in usable}
    for usual, one in usable:
        config, ms = usual.family.adapt_to_heads(usual, problem), one.ms
        if config != usual and config in named:
            continue  # the other config was measured itself
        if not stands:
            if entry.problem.gradients != problem.gradients:  # measured with other gradients
                usual = parse_kernel_name_into_config(one.config).with_knobs(dtype=config.dtype)
            ms *= _growth(config, entry.problem, there, problem, device, usual)
        expected.append(ExpectedTime(config, ms))
    ordered, slower = _by_preference(expected, GAIN_OVER_MEASURED)
    kind: EvidenceKind = "related" if found.relation else "table" if found.exact else "nearest"
    why = _why(found, len(usable), very_one) + slower
    if not very_one:
        ordered = _with_others(ordered, usable, entry.problem, there, problem, device, asked)
    if ordered[0] is not expected[0]:
        gain = expected[0].ms / ordered[0].ms - 1
        why += f"; {expected[0].config} won there, but would take {gain:.0%} longer here"
    return Evidence(kind, tuple(ordered), why, notes=tuple(notes), entry=entry)


def _with_others(
    ordered: list[ExpectedTime],
    usable: Sequence[tuple[Any, RankedConfig]],
    measured: Problem,
    there: DeviceSpec,
    problem: Problem,
    device: DeviceSpec,
    asked: KernelFilter,
) -> list[ExpectedTime]:
    """The configs, preceded by the best config that the entry does not list, if its predicted gain
    is large enough. Only configs of the choice's family are considered, since their times are
    scaled by that family's listed times."""
    family = ordered[0].config.FAMILY
    if not ordered[0].config.family.has_cost_model:
        return ordered
    of_family = [(config, one.ms) for config, one in usable if family == config.FAMILY]
    slowest = max(ms for _, ms in of_family)
    fastest, least = min(of_family, key=lambda one: one[1])
    before = _estimated_before(fastest, measured, there)
    if not before:  # a table may contain a problem that computes nothing
        return ordered
    per_ms = least / before
    named = {config for config, _ in usable}
    masked = problem.semantics.key_mask.hides
    others = [
        ExpectedTime(
            config,
            max(slowest, per_ms * _estimated_before(config, measured, there))
            * _growth(config, measured, there, problem, device),
        )
        for config in candidates(
            problem.dtype,
            ordered[0].config.d_head,
            device,
            masked,
            problem.operation,
            problem.gradients,
        )
        if family == config.FAMILY and config not in named and asked.includes(config)
    ]
    best = min(others, key=lambda one: one.ms, default=ordered[0])
    return [best, *ordered] if best.ms * (1 + GAIN_UNMEASURED) < ordered[0].ms else ordered


def _same_sizes(one: Problem, other: Problem) -> bool:
    return sizes_of(one) == sizes_of(other)


def _growth(
    config: Any,
    measured: Problem,
    there: DeviceSpec,
    problem: Problem,
    here: DeviceSpec,
    measured_config: Any = None,
) -> float:
    """The estimated time of the problem over that of the measured problem; without a cost model,
    the ratio of their FLOP. ``measured_config``: the config that was measured, if it is not
    ``config``."""
    if config.family.has_cost_model:
        now = estimate(config, problem, here).ms
        then = _estimated_before(measured_config or config, measured, there)
        if 0 < then < float("inf"):
            return now / then
    return problem.attn_flop() / max(1, measured.attn_flop())


@lru_cache(maxsize=4096)
def _estimated_before(config: Any, measured: Problem, there: DeviceSpec) -> float:
    """A cached estimate, since the same few configs and measured problems recur."""
    return estimate(config, measured, there).ms


def _why(found: NearEntry, count: int, very_one: bool) -> str:
    entry = found.entry
    day = entry.time.partition("T")[0]
    measured = f"the fastest of {count} measured on {entry.key.gpu}" + (f", {day}" if day else "")
    if very_one:
        return f"{measured}, for these sizes"
    if found.relation:
        return f"{measured}, for {entry.problem}, the nearest relative ({found.relation})"
    if found.exact:
        return f"{measured}, for {entry.problem}, of the same bucket"
    return f"{measured}, for {entry.problem}, {found.distance:.1f} octaves away"


def _by_preference(expected: Sequence[ExpectedTime], gain: float) -> tuple[list[ExpectedTime], str]:
    """The configs, the choice first and the others by time. The choice is the first in ``expected``
    that takes at most ``gain`` longer than the fastest.

    The returned text explains a choice that is not the fastest; else it is ''.
    """
    fastest = min(expected, key=lambda one: one.ms)
    choice = next(one for one in expected if one.ms <= fastest.ms * (1 + gain))
    others = sorted((one for one in expected if one is not choice), key=lambda one: one.ms)
    if choice.ms == fastest.ms:
        return [choice, *others], ""
    behind = f"{choice.ms / fastest.ms - 1:.1%}"
    return [choice, *others], f"; the estimated gain of {behind} over it is within the error"


# --- estimated -----------------------------------------------------------------------------------


def _estimated(
    problem: Problem,
    device: DeviceSpec,
    table: WinnersTable,
    notes: Sequence[str],
    asked: KernelFilter,
) -> Evidence:
    d_head = d_head_for(problem)
    serving = [one for one in families(problem.operation) if asked.family in (None, one.name)]
    if not any(one.has_cost_model for one in serving):
        return _offered(problem, d_head, device, notes, asked)
    expected = []
    for config in _weighed(problem, device):
        guess = estimate(config, problem, device)
        if guess.resident and asked.includes(config):
            expected.append(ExpectedTime(config, guess.ms))
    if not expected:
        raise ArgumentError(f"device: {_why_nothing_fits(serving, problem, device, d_head)}")
    known = any(entry.key.arch == device.arch for entry in table)
    kernels = "kernels" if problem.operation == DEFAULT else f"{problem.operation} kernels"
    lacking = f"no measured {kernels} of d_head {d_head}" if known else "no table"
    fallback = f"{lacking} for {gpu_name(device.name)}: chosen by the cost model"
    why = f"the best of {len(expected)} by estimate; nothing was measured"
    ordered, slower = _by_preference(expected, GAIN_OVER_PREFERRED)
    return Evidence("cost model", tuple(ordered), why + slower, fallback, tuple(notes))


def _weighed(problem: Problem, device: DeviceSpec) -> tuple[KernelConfig, ...]:
    """The candidates for the smallest d_head that is large enough and has a candidate on the
    device. Some values of d_head have families for other devices only."""
    modelled = [one for one in families(problem.operation) if one.has_cost_model]
    d_heads = {d_head for one in modelled for d_head in one.knob_values["d_head"]}
    masked = problem.semantics.key_mask.hides
    for d_head in sorted(d_heads):
        if problem.d <= d_head:
            said = problem.operation, problem.gradients
            found = candidates(problem.dtype, d_head, device, masked, *said)
            if found:
                return found
    return ()


def _why_nothing_fits(
    asked: Sequence[Family], problem: Problem, device: DeviceSpec, d_head: int
) -> str:
    masked = problem.semantics.key_mask.hides
    elsewhere = (
        one.candidates(problem.dtype, d_head, one.roomiest_device, masked)
        for one in asked
        if one.has_cost_model and one.runs_on(device)
    )
    if any(elsewhere):
        return (
            f"{device.name} allows a CTA {device.max_smem_per_block} bytes of shared memory, too "
            f"few for every kernel of d_head {d_head}"
        )
    names = ", ".join(one.name for one in asked)
    return f"no kernel of d_head {d_head} is offered for {device.name} (families: {names})"


def _offered(
    problem: Problem, d_head: int, device: DeviceSpec, notes: Sequence[str], asked: KernelFilter
) -> Evidence:
    """The configs that families without a cost model offer, in their own order."""
    masked = problem.semantics.key_mask.hides
    offered = [
        ExpectedTime(config, 0.0)
        for one in by_preference(problem.operation)
        for config in (
            one.candidates(problem.dtype, d_head, device, masked)
            or one.search_space(problem.dtype, d_head, masked)
        )
        if asked.includes(config) and is_legal(config, device)
    ]
    if not offered:
        kind = "deterministic kernel" if asked.deterministic else "kernel"
        raise ArgumentError(f"device: no family offers {device.name} a {kind} for '{problem}'")
    why = f"the first of {len(offered)} that are offered; nothing was measured or can be estimated"
    return Evidence("offered", tuple(offered), why, notes=tuple(notes))
