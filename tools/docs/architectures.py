#!/usr/bin/env python3
"""Writes the table in docs/log/architectures.md of the transformers architectures that are
supported.

Usage: python tools/docs/architectures.py [--record [NAME ...]] [--missing]

The table is made from tests/integrations/architectures/recorded.json. --record first tests all
architectures, or those that are named; --missing tests those without a record. Testing all takes
ten minutes of processor time. A test compares the page with this script's output.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from builders import Architecture

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "log" / "architectures.md"
sys.path[:0] = [
    str(ROOT / "tests" / "integrations" / "architectures"),
    str(ROOT / "tests" / "integrations"),
]

import records  # noqa: E402

BEGIN = "<!-- from here on by tools/docs/architectures.py -->\n"
END = "<!-- up to here -->\n"
KINDS = {
    "served": "served",
    "partly": "in part",
    "PyTorch": "left to PyTorch",
    "refused": "refused",
    "upstream": "wrong on eager or sdpa, too",
    "own attention": "no attention of transformers' interface",
    "not run": "not run",
}
SCENARIOS = {
    "plain": "without a mask",
    "ones": "a mask of ones",
    "left": "padding on the left",
    "right": "padding on the right",
    "decoder-right": "padding of a decoder with an encoder",
    "packed": "sequences packed by position ids",
    "packed-ones": "the same with a mask of ones and a cache",
    "dynamic": "`generate()`, left padding",
    "static": "the same with a static cache",
    "autocast": "float32 weights under autocast",
    "training": "gradients",
}


def rewritten(page: str) -> str:
    """The page with the outcomes in the record."""
    begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    return page[:begin] + "\n" + told(records.read()) + "\n" + page[end:]


def told(found: records.Records) -> str:
    return "\n".join([_counted(found), *_listed(found)])


def _counted(found: records.Records) -> str:
    outcomes = found.outcomes.values()
    kinds = [kind for kind in KINDS if kind not in ("own attention", "not run")]
    lines = [
        "| | " + " | ".join(KINDS[kind] for kind in kinds) + " |",
        "|---|" + "---|" * len(kinds),
    ]
    for scenario, words in SCENARIOS.items():
        counts = Counter(records.kind(it[scenario]) for it in outcomes if scenario in it)
        lines.append(f"| {words} | " + " | ".join(str(counts[kind]) for kind in kinds) + " |")
    return "\n".join(lines) + "\n"


def _listed(found: records.Records) -> Iterable[str]:
    """A paragraph for each outcome and each reason."""
    by_outcome: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(dict)
    for name, outcomes in found.outcomes.items():
        for scenario, outcome in outcomes.items():
            key = records.kind(outcome), records.reason(outcome)
            by_outcome[key].setdefault(name, []).append(scenario)
    for kind, words in KINDS.items():
        for (of_kind, why), names in sorted(by_outcome.items()):
            if of_kind == kind:
                title = words[0].upper() + words[1:] + (f" ({why})" if why else "")
                paragraph = f"**{title}**: {', '.join(_named(names, found, kind))}\n"
                yield textwrap.fill(paragraph, 120, break_on_hyphens=False) + "\n"


def _named(names: dict[str, list[str]], found: records.Records, kind: str) -> Iterable[str]:
    """The architectures, each with its scenarios unless all of them have this outcome.

    An architecture that is partly supported is listed only with its other outcomes.
    """
    for name, scenarios in names.items():
        if len(scenarios) == len(found.outcomes[name]) or kind == "not run":
            yield name
        elif kind != "served":
            yield f"{name} ({', '.join(scenarios)})"


def record(names: Sequence[str], *, missing: bool) -> None:
    """Tests the architectures that are named, all, or those without a record; results are saved as
    they come."""
    import transformers
    from builders import architectures

    version = transformers.__version__
    known = {it.name: it for it in architectures()}
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"{', '.join(unknown)}: no architecture of transformers {version}")
    outcomes = dict(records.read().outcomes) if names or missing else {}
    todo = [known[it] for it in names or known if not (missing and it in outcomes)]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for architecture, found in zip(todo, pool.map(_swept, todo), strict=True):
            print(architecture.name, found, flush=True)
            outcomes[architecture.name] = found
            records.write(records.Records(version, outcomes))


def _swept(architecture: Architecture) -> dict[str, str]:
    from outcomes import sweep, texts

    return texts(sweep(architecture))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", nargs="*", metavar="NAME", help="first sweep all, or these")
    parser.add_argument("--missing", action="store_true", help="sweep those without a record")
    options = parser.parse_args()
    if options.record is not None or options.missing:
        record(options.record or (), missing=options.missing)
    PAGE.write_text(rewritten(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
