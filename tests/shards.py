"""The shards of what a plain run leaves out: how many there are, and which tests each has.

    python tests/shards.py                          # how many
    python tests/shards.py --record durations...    # records how long tests took

``pytest --shard K/N`` runs one of N shards, K from 0. Neighbours in the order of collection stay
together, since tests of one file share builds. Shards last equally long by the durations that are
recorded; of tests that have none, by a default. What is recorded are runs of all shards: JUnit
files, or the lines that ``--log-durations=FILE`` writes (in one word: pytest's workers take a file
that stands by itself for a place to look for tests).
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

DURATIONS = Path(__file__).parent / "durations.json"
# Of work in one shard. Two workers on two cores need two thirds of it, and compile besides.
SHARD_SECONDS = 900.0
# Of a test whose function has no duration.
UNKNOWN_SECONDS = 5.0


def shard_option(text: str) -> tuple[int, int]:
    """What 'K/N' says: shard K of N. Raises ArgumentTypeError, which names what is wrong."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not int(match[1]) < int(match[2]):
        raise argparse.ArgumentTypeError(
            f"{text!r}: give K/N for shard K of N, K from 0 to N-1, such as 0/{count()}"
        )
    return int(match[1]), int(match[2])


def function_of(node_id: str) -> str:
    """A test's function, as JUnit files name it: 'tests.verify.test_prove.test_x'."""
    return node_id.split("[")[0].replace(".py::", ".").replace("::", ".").replace("/", ".")


def recorded() -> dict[str, tuple[float, int]]:
    """By function: seconds of all its tests that only shards run, and how many those were."""
    return {name: (seconds, tests) for name, (seconds, tests) in read(DURATIONS).items()}


def read(path: Path) -> dict[str, tuple[float, int]]:
    return json.loads(path.read_text()) if path.exists() else {}


def count() -> int:
    """How many shards there are."""
    return max(1, math.ceil(sum(seconds for seconds, _ in recorded().values()) / SHARD_SECONDS))


def shards_of(
    node_ids: Sequence[str], shards: int, known: Mapping[str, tuple[float, int]]
) -> list[int]:
    """The shard of each test."""
    seconds = [
        known[name][0] / known[name][1] if name in known else UNKNOWN_SECONDS
        for name in map(function_of, node_ids)
    ]
    whole, before, found = sum(seconds) or 1.0, 0.0, []
    for each in seconds:
        # By its middle, so that no shard is longer than its share and one test.
        found.append(min(shards - 1, int((before + each / 2) / whole * shards)))
        before += each
    return found


def durations_in(path: Path) -> Iterator[tuple[str, float]]:
    """Functions and seconds of tests, of a JUnit file or of the lines of ``--log-durations``."""
    if path.suffix == ".xml":
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            name = case.get("name", "").split("[")[0]
            yield f"{case.get('classname')}.{name}", float(case.get("time", 0))
        return
    for line in path.read_text().splitlines():
        node_id, seconds = json.loads(line)
        yield function_of(node_id), seconds


def record(paths: Iterable[Path]) -> None:
    """Rewrites the durations. Parts of a test, such as its setup, are one test together."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for path in paths:
        for name, seconds in durations_in(path):
            found[name][0] += seconds
            found[name][1] += 1
    lines = [
        f"{json.dumps(name)}: [{round(seconds, 1)}, {tests}]"
        for name, (seconds, tests) in sorted(found.items())
    ]
    DURATIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", type=Path, nargs="+", help="JUnit files, or lines")
    options = parser.parse_args()
    if options.record:
        record(options.record)
    print(count())
    return 0


if __name__ == "__main__":
    sys.exit(main())
