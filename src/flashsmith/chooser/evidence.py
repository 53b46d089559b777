"""Evidence: the expected times of configs for a problem on a device, from the table of winners.

The evidence is the nearest entry of the table with a config that the device can run. The times in
the entry were usually measured on another problem, so each time is scaled:

    ms here = ms measured x estimate(config, here) / estimate(config, there)

Errors that both estimates share cancel. What remains is the amount of work and the number of waves,
which the cost model predicts well. So a config that was fastest with thousands of CTAs is replaced
if its large tiles would leave SMs idle on the present problem.

The replacement may be a config that is not in the entry. It is then assumed to be as slow as the
slowest config in the entry. If the model's estimate, scaled by the fastest config in the entry, is
longer, this estimate is used instead.
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
from flashsmith.families.head_dims import HeadDims, fitting_dims
from flashsmith.operations import DEFAULT
from flashsmith.semantics.mask import CAUSAL

EvidenceKind = Literal["table", "nearest", "related", "cost model", "offered"]

# The shares of the time that a config must gain, as predicted, to replace the config that was
# measured as the fastest, or a preferred config. A smaller gain is within the error of the estimate
# and does not justify building another kernel.
GAIN_OVER_MEASURED = 0.02
GAIN_OVER_PREFERRED = 0.03
# The gain that a config must have to be chosen if it splits keys or packs the heads of a group into
# a tile, and the problem itself was not measured. The gain must be both this share of the time and
# this number of milliseconds, because a second launch takes time on the host.
GAIN_OF_PARTS, LEAST_GAIN_OF_PARTS = 0.25, 0.005
# The share of the time that a config must gain to be chosen if it is not in the measured entry.
GAIN_UNMEASURED = 0.10
# A deterministic config is preferred if the nondeterministic config is faster by at most this
# share.
COST_OF_REPEATING = 0.03


@dataclass(frozen=True)
class ExpectedTime:
    """A config and its expected time (0 if unknown)."""

    config: Any
    ms: float


@dataclass(frozen=True)
class Evidence:
    """The configs that were considered, and why one of them was chosen. The chosen config comes
    first; the others follow in order of time.

    why: one sentence.
    fallback: if there are no measurements, a warning to show once; otherwise ''.
    notes: sentences that say which entries were ignored, and why.
    entry: the measured entry that was used, or None.
    """

    kind: EvidenceKind
    expected: tuple[ExpectedTime, ...]
    why: str
    fallback: str = ""
    notes: tuple[str, ...] = ()
    entry: Entry | None = None


class KernelFilter(NamedTuple):
    """Selects the kernels that compute a problem's gradients and can read its cache.

    If ``family`` is given, selects only kernels of this family; if ``deterministic`` is set, only
    deterministic kernels.
    """

    problem: Problem
    family: str | None = None
    deterministic: bool = False

    def includes(self, config: Any) -> bool:
        if self.family not in (None, config.FAMILY) or not serves_gradients(config, self.problem):
            return False
        if self.problem.bits and not version_of(config):
            return False
        # A config for a plain cache stands for the configs of its family for all cache formats.
        if self.problem.cache and "cache" not in config.KNOBS:
            return False
        return not self.deterministic or config.family.is_deterministic(config)


def gather(
    problem: Problem,
    device: DeviceSpec,
    table: WinnersTable,
    family: str | None = None,
    deterministic: bool = False,
) -> Evidence:
    """Returns the evidence for a problem on a device.

    ``family`` restricts the evidence to kernels of one family, and ``deterministic`` restricts it
    to kernels that give the same bits in every run. For partial attention, it uses measurements of
    whole attention over the same number of keys.

    Raises ArgumentError if there are no kernels for the problem's d, or if none of these fits on
    the device.
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
    """Returns the evidence for a problem with a score or mask function. This is the evidence for
    the problem without the function, but its configs are adapted: their tiles visit lists of K/V
    blocks, for example."""
    semantics, program = problem.semantics, problem.semantics.caller_program
    hides = program is not None and program.mask is not None
    # Under a mask function, tiles take different numbers of steps, as they do under a causal mask.
    mask = CAUSAL if hides and not semantics.key_mask.hides else semantics.mask
    uneven = semantics.packed or semantics.partial
    without = replace(semantics, program="", uneven=uneven, mask=mask)
    plain = gather(replace(problem, semantics=without), device, table, family, deterministic)
    expected: dict[Any, ExpectedTime] = {}
    for one in plain.expected:
        config = _with_program(one.config, problem, device)
        if config is not None and is_legal(config, device):
            expected.setdefault(config, ExpectedTime(config, one.ms))
    why = f"{plain.why}; adapted to a score or mask function, which was not measured"
    if expected:
        return Evidence(plain.kind, tuple(expected.values()), why, plain.fallback, plain.notes)
    wanted = problem.dtype, d_head_for(problem), device, without.key_mask.hides, problem.operation
    adapted = (
        _with_program(config, problem, device)
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


def _with_program(config: Any, problem: Problem, device: DeviceSpec) -> Any:
    """Returns the config to use instead of ``config`` for a problem with a program, because
    ``config`` was measured without a program. None if there is no such config."""
    if problem.bits:
        config = config.family.canonical(config, device)
    elif version_of(config):
        config = replace(config, canonical=0)
    if config is None:
        return None
    return config.family.adapt_to_program(config, problem.semantics)


def _canonical(
    problem: Problem,
    device: DeviceSpec,
    table: WinnersTable,
    family: str | None,
    deterministic: bool,
) -> Evidence:
    """Returns the evidence for a problem with canonical bits, from measurements of canonical
    kernels.

    If there are no such measurements, the evidence is that for the problem without canonical bits,
    with canonical counterparts in the place of its configs.
    """
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


def fastest_over_cache(
    config: Any, problem: Problem, device: DeviceSpec, table: WinnersTable
) -> Any:
    """Returns `config`, or a config with the same order of operations, and therefore with the same
    bits. In the nearest entry of the table that has such a config and was measured over a cache of
    the problem's format, this config was the fastest one.

    Tables have no entries for problems with functions, which keep `config`.
    """
    if not problem.cache or problem.semantics.program:
        return config
    family = config.family
    for found in table.lookup(problem, device):
        if found.entry.problem.cache != problem.cache:
            continue
        for other, _ in _usable(found.entry, problem, device, []):
            if other.family is not family or family.cache_of(other) != problem.cache:
                continue
            other = family.adapt_to_queries(other, problem, device)
            if family.have_same_order(other, config, device.arch) and is_legal(other, device):
                return other
    return config


def _of_few_tiles(evidence: Evidence, problem: Problem, device: DeviceSpec) -> Evidence:
    """Returns the evidence, with another choice if enough time is saved by using idle SMs or idle
    rows of tiles. The new choice splits keys, or packs the heads of a group into one tile. If
    exactly these sizes were measured, the choice is not changed."""
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
    """Yields the configs in the evidence, changed so that they split keys or pack heads.

    Also yields other candidates of the chosen family, changed so that they pack heads, because
    their tiles have other heights.
    """
    for one in evidence.expected:
        family = one.config.family
        found = (
            *family.split_variants(one.config, problem, device),
            *family.pack_variants(one.config, problem, device),
        )
        if found:
            yield from _relative(one, found, problem, device)
    chosen = evidence.expected[0]
    family, d_head = chosen.config.family, chosen.config.head_dims
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
    """Yields ``configs`` with estimated times. All estimates are scaled by the factor with which
    the estimate for the ``known`` config equals its known time."""
    per_ms = known.ms / estimate(known.config, problem, device).ms
    for config in configs:
        yield ExpectedTime(config, estimate(config, problem, device).ms * per_ms)


def _without_spills(
    evidence: Evidence, problem: Problem, device: DeviceSpec, asked: KernelFilter
) -> Evidence:
    """Returns the evidence, with another choice if the chosen kernel is known to spill and another
    kernel was at least as fast. The chosen kernel is also replaced if its family says that it would
    have too few registers. A kernel that was measured for a problem of this class is not replaced,
    since its time includes the cost of spills."""
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
    """Whether the measured kernel and the kernel for this problem are compiled for the same
    semantics.

    An entry for whole tiles says nothing about the kernel for uneven lengths. An entry for
    attention over all keys says nothing about the kernel for partial attention.
    """
    entry, config = evidence.entry, evidence.expected[0].config
    if entry is None or evidence.kind == "related":
        return False
    return bool(entry.problem.required_semantics(config) == problem.required_semantics(config))


def _soundly_built(
    evidence: Evidence, problem: Problem, device: DeviceSpec, asked: KernelFilter
) -> Evidence:
    """Returns the evidence, with another choice if the chosen kernel is known to compile to slow
    code.

    The new choice is the best config whose code is not known to be slow. A kernel that was timed
    against others is not replaced. If the wgmma of the slow kernel is serialised, the replacement
    may take any time. If the slow kernel spills, the replacement may be expected to take longer
    than the slow kernel by at most the share GAIN_OVER_MEASURED.
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
    """Returns the candidates of the chosen family that are not in the evidence. Their times are
    estimates that are scaled to the time of the chosen config."""
    family = chosen.config.family
    if not family.has_cost_model or not chosen.ms:
        return []
    masked = problem.semantics.key_mask.hides
    known = {one.config for one in evidence.expected}
    found = candidates(
        problem.dtype, chosen.config.head_dims, device, masked, problem.operation, problem.gradients
    )
    asked_for = [
        config
        for config in found
        if config.family is family and config not in known and asked.includes(config)
    ]
    return list(_relative(chosen, asked_for, problem, device))


def _repeatable_first(evidence: Evidence) -> Evidence:
    """Returns the evidence, in which a deterministic config is chosen if one takes at most the
    share COST_OF_REPEATING longer than the chosen config."""
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
    """Returns the configs of an entry, with the dtype of the problem. Configs that this version
    does not know or the device cannot run are left out."""
    usable: list[tuple[Any, RankedConfig]] = []
    for one in entry.ranked:
        config, reason = _checked(
            one.config, one.family, entry.key.head_dims, problem.dtype, problem.gradients, device
        )
        if reason:
            notes.append(f"{one.config} of the entry {entry.key} is ignored: {reason}")
        elif config not in [other for other, _ in usable]:
            usable.append((config, one))
    return usable


@lru_cache(maxsize=4096)
def _checked(
    text: str, family: str, d_head: HeadDims, dtype: DType, gradients: str, device: DeviceSpec
) -> tuple[Any, str]:
    """Returns the config that a short form names, changed to ``dtype`` and ``gradients``, and the
    reason why the config cannot be used ('' if it can be used)."""
    try:
        config = parse_kernel_name_into_config(text)
    except FlashsmithError as error:
        return None, str(error)
    if family != config.FAMILY:
        return None, f"it is of the family {config.FAMILY}, not {family}"
    if config.head_dims != d_head:
        return None, f"it is for d_head {config.head_dims}"
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
            continue  # This config has its own measurement
        if not stands:
            if entry.problem.gradients != problem.gradients:  # Measured with other gradients
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
    """Returns ``ordered``, preceded by the best config that is not in the entry if its predicted
    gain is sufficient. Only configs of the chosen family are considered for this, since times are
    scaled by the measured times of this family."""
    family = ordered[0].config.FAMILY
    if not ordered[0].config.family.has_cost_model:
        return ordered
    of_family = [(config, one.ms) for config, one in usable if family == config.FAMILY]
    slowest = max(ms for _, ms in of_family)
    fastest, least = min(of_family, key=lambda one: one[1])
    before = _estimated_before(fastest, measured, there)
    if not before:  # A table may contain a problem that computes nothing
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
            ordered[0].config.head_dims,
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
    """Returns the estimated time of the problem divided by the estimated time of the measured
    problem.

    If the family has no cost model, returns the ratio of the FLOP of the two problems.
    ``measured_config``: the config that was measured, if it is not ``config`` itself.
    """
    if config.family.has_cost_model:
        now = estimate(config, problem, here).ms
        then = _estimated_before(measured_config or config, measured, there)
        if 0 < then < float("inf"):
            return now / then
    return problem.attn_flop() / max(1, measured.attn_flop())


@lru_cache(maxsize=4096)
def _estimated_before(config: Any, measured: Problem, there: DeviceSpec) -> float:
    """Returns the estimated time of a config on a measured problem. The results are cached, because
    the same few configs and problems occur again and again."""
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
    """Sorts the configs, with the chosen config first and the others in order of time.

    The chosen config is the first one in ``expected`` that takes at most the share ``gain`` longer
    than the fastest one.

    If the chosen config is not the fastest, the returned string says why it was chosen; otherwise
    the string is ''.
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
    guesses = [(one, estimate(one, problem, device)) for one in _weighed(problem, device)]
    fitting = [ExpectedTime(one, guess.ms) for one, guess in guesses if guess.resident]
    expected = [one for one in fitting if asked.includes(one.config)]
    if not expected and any(
        asked._replace(deterministic=False).includes(it.config) for it in fitting
    ):
        raise ArgumentError(
            f"deterministic=True: no {problem.operation} kernel of d_head {d_head} gives the same "
            f"bits in every run on {device.name}; give False. None means True with canonical bits, "
            "and where PyTorch requires determinism"
        )
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
    """Returns the candidates for the smallest widths that are at least the widths of the problem
    and have a candidate on the device.

    Some d_heads have kernels only on other devices.
    """
    modelled = [one for one in families(problem.operation) if one.has_cost_model]
    known = {dims for one in modelled for dims in one.head_dims}
    kind = problem.semantics.key_mask.hides, problem.operation, problem.gradients
    found = (candidates(problem.dtype, d, device, *kind) for d in fitting_dims(problem, known))
    return next((some for some in found if some), ())


def _why_nothing_fits(
    asked: Sequence[Family], problem: Problem, device: DeviceSpec, d_head: HeadDims
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
    newer = sorted(
        one.oldest_arch
        for one in asked
        if one.has_cost_model and one.oldest_arch > device.arch and d_head in one.head_dims
    )
    where = f"; those for sm_{newer[0]} exist, such as an H200" if newer else ""
    return f"no kernel of d_head {d_head} is offered for {device.name} (families: {names}){where}"


def _offered(
    problem: Problem,
    d_head: HeadDims,
    device: DeviceSpec,
    notes: Sequence[str],
    asked: KernelFilter,
) -> Evidence:
    """Returns evidence from the configs that families without a cost model offer, in the order of
    the families."""
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
        reasons = [
            f"; {one.name}: {why}"
            for one in families(problem.operation)
            if (why := one.unsupported_reason(problem, device))
        ]
        raise ArgumentError(
            f"device: no family offers {device.name} a {kind} for '{problem}'{''.join(reasons)}"
        )
    why = f"the first of {len(offered)} that are offered; nothing was measured or can be estimated"
    return Evidence("offered", tuple(offered), why, notes=tuple(notes))
