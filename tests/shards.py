"""The shards of the tests that a plain run leaves out: their number, and the tests of each.

    python tests/shards.py                                # how many
    python tests/shards.py --record durations... [--cpu]  # records how long tests took

``pytest --shard K/N`` runs one of N shards, K from 0. A shard has consecutive tests in the order of
collection, because the tests of a file share builds. All shards are expected to take the same time,
by the recorded durations, or a default for tests without one. --record takes the results of runs of
shards or of some tests: JUnit files, or files that ``--log-durations=FILE`` wrote. (Write the
option with '=', because the workers of pytest take a separate file name for a folder of tests.)
Functions that did not run keep their recorded durations, unless they no longer exist.
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

TREE = Path(__file__).parents[1]
DURATIONS = TREE / "tests" / "durations.json"
# Of work in one shard. Two workers on two cores need two thirds of it, four minutes, and compile
# besides.
SHARD_SECONDS = 360.0
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


def durations_in(path: Path, cpu: bool = False) -> Iterator[tuple[str, float]]:
    """Functions and seconds of tests, of a JUnit file or of the lines of ``--log-durations``;
    ``cpu``: the processor's, which only lines have."""
    if path.suffix == ".xml":
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            name = case.get("name", "").split("[")[0]
            yield f"{case.get('classname')}.{name}", float(case.get("time", 0))
        return
    for line in path.read_text().splitlines():
        node_id, seconds, *cpu_seconds = json.loads(line)
        yield function_of(node_id), cpu_seconds[0] if cpu else seconds


def record(paths: Iterable[Path], cpu: bool = False) -> None:
    """Rewrites the durations of functions that ran. Parts of a test, such as its setup, are one
    test together. ``cpu``: on a machine that did other work too, where tests that wait for nothing
    take longer than the processor does."""
    ran: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for path in paths:
        for name, seconds in durations_in(path, cpu):
            ran[name][0] += seconds
            ran[name][1] += 1
    found = {name: known for name, known in recorded().items() if exists(name)} | ran
    lines = [
        f"{json.dumps(name)}: [{round(seconds, 1)}, {tests}]"
        for name, (seconds, tests) in sorted(found.items())
    ]
    DURATIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def exists(name: str) -> bool:
    """Whether a module of tests still has the function of this name, its own or an imported one."""
    *parts, function = name.split(".")
    for end in range(len(parts), 0, -1):  # behind the module's name a class's may stand
        file = TREE.joinpath(*parts[:end]).with_suffix(".py")
        if file.is_file():
            has = rf"^ *(def {function}\(|{function},$)"
            return re.search(has, file.read_text(), re.MULTILINE) is not None
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", type=Path, nargs="+", help="JUnit files, or lines")
    parser.add_argument("--cpu", action="store_true", help="record the processor's seconds")
    options = parser.parse_args()
    if options.record:
        record(options.record, options.cpu)
    print(count())
    return 0


if __name__ == "__main__":
    sys.exit(main())
