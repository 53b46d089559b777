"""The shards of what a plain run leaves out: together all of it, each a fair part."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import shards

KNOWN = {"tests.a.test_slow": (100.0, 10), "tests.a.test_quick": (1.0, 10)}
TESTS = [f"tests/a.py::test_{kind}[{n}]" for kind in ("slow", "quick", "new") for n in range(10)]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_shards_are_fair_and_in_order(count: int) -> None:
    places = shards.shards_of(TESTS, count, KNOWN)
    assert places == sorted(places)
    assert places[0] >= 0
    assert places[-1] <= count - 1
    loads = [0.0] * count
    for test, place in zip(TESTS, places, strict=True):
        seconds, tests = KNOWN.get(shards.function_of(test), (shards.UNKNOWN_SECONDS, 1))
        loads[place] += seconds / tests
    assert max(loads) <= sum(loads) / count + 10


def collected(*options: str) -> list[str]:
    """Of one file's tests those that would run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *options, "tests/test_same_ptx.py"],
        cwd=shards.TREE,
        capture_output=True,
        text=True,
    )
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_shards_are_what_a_plain_run_leaves_out() -> None:
    everything, plain = collected("-m", "full"), collected()
    parts = [collected("--shard", f"{shard}/2") for shard in range(2)]
    assert parts[0]
    assert plain
    assert sorted([*plain, *parts[0], *parts[1]]) == sorted(everything)


@pytest.mark.parametrize("text", ["2", "2/2", "-1/3", "0/0", "a/b", "1/2/3", ""])
def test_a_shard_that_is_none_is_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        shards.shard_option(text)
    assert f"{text!r}: give K/N for shard K of N, K from 0 to N-1" in str(caught.value)


def test_durations_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From what a run logs, and from JUnit files; in both a function has one name."""
    monkeypatch.setattr(shards, "DURATIONS", tmp_path / "durations.json")
    log, junit = tmp_path / "log.jsonl", tmp_path / "junit.xml"
    node_id = "tests/a/test_b.py::TestC::test_d[x::y.py-1]"
    log.write_text(json.dumps([node_id, 1.25, 0.5]) + "\n")
    case = '<testcase classname="tests.a.test_b.TestC" name="test_d[2]" time="2000"/>'
    junit.write_text(f"<testsuites><testsuite>{case}</testsuite></testsuites>")
    assert shards.count() == 1
    shards.record([log, junit])
    assert shards.recorded() == {"tests.a.test_b.TestC.test_d": (2001.2, 2)}
    assert shards.function_of(node_id) in shards.recorded()
    assert shards.count() == 6


def test_functions_that_did_not_run_keep_their_durations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless they are gone; and those of a loaded machine can be the processor's."""
    monkeypatch.setattr(shards, "DURATIONS", tmp_path / "durations.json")
    here, other = ("tests.test_shards.test_shards_are_fair_and_in_order", "tests.a.test_b.test_c")
    shards.DURATIONS.write_text(
        json.dumps({here: (3.0, 1), other: (4.0, 2), f"{here}_now": (5, 1)})
    )
    log = tmp_path / "log.jsonl"
    log.write_text('["tests/a/test_d.py::test_e", 9.0, 2.5]\n')
    shards.record([log], cpu=True)
    assert shards.recorded() == {here: (3.0, 1), "tests.a.test_d.test_e": (2.5, 1)}


def test_recorded_functions_exist() -> None:
    assert [name for name in shards.recorded() if not shards.exists(name)] == []


def test_durations_are_logged_as_tests_end(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    test = "tests/test_shards.py::test_a_shard_that_is_none_is_named"
    command = [sys.executable, "-m", "pytest", "-q", f"--log-durations={log}", test]
    subprocess.run(command, cwd=shards.TREE, capture_output=True, check=True)
    names = [name for name, _ in shards.durations_in(log, cpu=True)]
    assert names == ["tests.test_shards.test_a_shard_that_is_none_is_named"] * 7
