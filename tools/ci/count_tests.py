"""Print how many tests of a JUnit file passed, failed and were skipped, and why they were skipped.

Usage: python tools/ci/count_tests.py junit.xml
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter


def summarize(path: str) -> str:
    """One line of counts, then one line per skip reason; raises ValueError when nothing ran."""
    cases = ElementTree.parse(path).getroot().findall(".//testcase")
    failed = sum(
        case.find("failure") is not None or case.find("error") is not None for case in cases
    )
    reasons = Counter(
        skipped.get("message", "no reason")
        for case in cases
        if (skipped := case.find("skipped")) is not None
    )
    n_skipped = sum(reasons.values())
    passed = len(cases) - failed - n_skipped
    if passed == 0:
        raise ValueError(f"{path}: not one test passed")
    lines = [f"tests: {passed} passed, {failed} failed, {n_skipped} skipped"]
    lines += [f"  skipped {count}: {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(summarize(sys.argv[1]))
