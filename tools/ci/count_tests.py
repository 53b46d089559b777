"""Counts the tests in JUnit files that passed, failed and were skipped, and why they were skipped.

Usage: python tools/ci/count_tests.py junit.xml...

Prints a line for every file, and their sum if there are several. The exit status is 1 if a test
failed, or if in a file no test passed.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Counts:
    """The counts for one or several files; ``seconds`` is the sum over all workers."""

    passed: int = 0
    failed: int = 0
    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, other: Counts) -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.seconds += other.seconds
        self.reasons += other.reasons

    def __str__(self) -> str:
        return (
            f"{self.passed} passed, {self.failed} failed, {sum(self.reasons.values())} skipped"
            f" ({self.seconds:.0f} s of work)"
        )


def read(path: str) -> Counts:
    """The counts of one file."""
    counts = Counts()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        counts.seconds += float(case.get("time", 0))
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            counts.failed += 1
        elif skipped is not None:
            counts.reasons[skipped.get("message", "no reason")] += 1
        else:
            counts.passed += 1
    return counts


def main(paths: Sequence[str]) -> int:
    whole, wrong = Counts(), False
    for path in paths:
        counts = read(path)
        whole.add(counts)
        wrong |= counts.failed > 0 or counts.passed == 0
        if len(paths) > 1:
            print(f"{path}: {counts}")
    print(f"tests: {whole}")
    for reason, count in whole.reasons.most_common():
        print(f"  skipped {count}: {reason}")
    return int(wrong or not paths)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
