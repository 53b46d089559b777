"""Finds what is wrong with an entry of a table."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from flashsmith.chooser.winners.entry import Entry, RankedConfig
from flashsmith.chooser.winners.key import WinnerKey
from flashsmith.errors import ArgumentError, FlashsmithError
from flashsmith.families import DeviceSpec, broken_rules, device_spec, parse_kernel_name_into_config
from flashsmith.families.gpu_names import same_gpu

# No GPU has a dense 16-bit peak as high as this, so a time that would mean more TFLOP/s is wrong.
IMPOSSIBLE_TFLOPS = 5000.0
# Rounding in a file may change a figure by at most this share.
TOLERANCE = 0.01


def problems_of(entry: Entry) -> Iterator[str]:
    """One sentence for each reason for which an entry is unusable or doubtful."""
    for text in (*_about_key(entry), *_about_ranking(entry)):
        yield f"{entry.key}: {text}"


def device_of(key: WinnerKey) -> DeviceSpec | None:
    """The known GPU that a key names or, failing that, a known GPU of the key's architecture; None
    if there is neither."""
    for wanted in (key.gpu, key.arch):
        try:
            return device_spec(wanted)
        except ArgumentError:
            continue
    return None


def _about_key(entry: Entry) -> Iterator[str]:
    device = device_of(entry.key)
    if device is None:
        yield f"sm_{entry.key.arch} is not an architecture that this version knows"
    elif same_gpu(device.name, entry.key.gpu) and device.arch != entry.key.arch:
        yield f"{device.name} is sm_{device.arch}"
    else:
        try:
            key = WinnerKey.of(entry.problem, device)
        except ArgumentError as error:
            yield str(error)
            return
        wanted = {**key.to_json(), "gpu": entry.key.gpu, "arch": entry.key.arch}
        if wanted != entry.key.to_json():
            yield f"its problem, {entry.problem}, belongs under {WinnerKey(**wanted)}"


def _about_ranking(entry: Entry) -> Iterator[str]:
    for first, second in pairwise(entry.ranked):
        if first.ms > second.ms:
            yield f"the ranking is not sorted: {first.ms} ms comes before {second.ms} ms"
    names = [(one.family, one.config) for one in entry.ranked]
    for _, config in sorted({name for name in names if names.count(name) > 1}):
        yield f"{config} is ranked twice"
    for one in entry.ranked:
        yield from _about_figures(entry, one)
        yield from _about_config(entry, one)


def _about_figures(entry: Entry, one: RankedConfig) -> Iterator[str]:
    tflops = entry.problem.attn_flop() / one.ms / 1e9
    if tflops > IMPOSSIBLE_TFLOPS:
        yield f"{one.config}: {one.ms} ms would be {tflops:.0f} TFLOP/s, which no GPU reaches"
    elif abs(tflops - one.tflops) > TOLERANCE * tflops:
        yield f"{one.config}: {one.ms} ms are {tflops:.1f} TFLOP/s, not {one.tflops}"


def _about_config(entry: Entry, one: RankedConfig) -> Iterator[str]:
    try:
        config = parse_kernel_name_into_config(one.config)
    except FlashsmithError as error:
        yield str(error)
        return
    if one.family != config.FAMILY:
        yield f"{one.config} is of the family {config.FAMILY}, not {one.family}"
    if (config.dtype, config.head_dims) != (entry.key.element, entry.key.head_dims):
        yield f"{one.config} is for another dtype or d_head"
    if config.family.cache_of(config) != entry.problem.cache:
        yield f"{one.config} is for a cache of another format"
    for rule in broken_rules(config, device_of(entry.key)):
        yield f"{one.config} is illegal: {rule.message}"
