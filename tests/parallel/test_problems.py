"""The problems that ranks compute, and `flashsmith build --ranks`."""

from __future__ import annotations

from typing import Any

import pytest
import typer.testing

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

import flashsmith  # noqa: E402
from flashsmith import chooser  # noqa: E402
from flashsmith.cli import app  # noqa: E402
from flashsmith.errors import ArgumentError  # noqa: E402
from flashsmith.families import Problem  # noqa: E402

TEXT = "b1 s4096 h32:8 d128 bf16 causal"


def problems(text: str = TEXT, **how: Any) -> list[str]:
    return list(map(str, flashsmith.parallel.problems(text, **how)))


def test_one_rank_computes_the_whole() -> None:
    assert problems(ranks=1) == [TEXT]
    assert problems(ranks=1, gradients=True) == [TEXT, TEXT.replace("causal", "backward causal")]


def test_chunks_see_prefixes() -> None:
    """Of 2P chunks each of its own length of keys, the longest of which are whole."""
    found = problems(ranks=4)
    assert len(found) == 8
    assert {Problem.parse(text).seq_q for text in found} == {512}
    assert {Problem.parse(text).seq_k for text in found} == {512 * n for n in range(1, 9)}


def test_each_schedule_has_its_own() -> None:
    assert problems(ranks=4, schedule="ulysses") == ["b1 s4096 h8:2 d128 bf16 causal"]
    zigzag = problems(ranks=4, schedule="zigzag")
    partial = [text for text in zigzag if "partial" in text]
    merges = [Problem.parse(text) for text in zigzag if "merge" in text]
    assert len(partial) + len(merges) == len(zigzag)
    # Parts that are merged on the way are fp32 alone.
    assert {one.dtype.name for one in merges} == {"BF16", "FP16"}
    window = problems(TEXT.replace("causal", "window"), ranks=4, window=(64, 0))
    assert all("window" in text or "causal" in text for text in window)


def test_packed_sequences() -> None:
    found = problems("b3 s512 h8 d64 fp16 causal packed", ranks=2, gradients=True)
    assert all("packed uneven" in text for text in found)
    assert any("merge" in text for text in found)


@pytest.mark.parametrize(
    ("text", "how", "message"),
    [
        (TEXT, {"ranks": 0}, "ranks=0"),
        (TEXT, {"ranks": 2, "schedule": "ring"}, "schedule='ring'"),
        (TEXT, {"ranks": 16, "schedule": "ulysses"}, "16 ranks do not divide the 8 heads"),
        ("b1 s100 h8 d64 fp16", {"ranks": 8, "schedule": "zigzag"}, "must be a multiple of 16"),
        (f"{TEXT} backward", {"ranks": 2}, "give one of whole attention"),
    ],
)
def test_what_cannot_be_shared(text: str, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        flashsmith.parallel.problems(text, **how)
    assert message in str(caught.value)


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The problems that are built for; nothing is compiled."""
    seen: list[str] = []

    def build_for(problem: Problem, **_: Any) -> list[Any]:
        seen.append(str(problem))
        return []

    monkeypatch.setattr(chooser, "build_for", build_for)
    return seen


def run(*arguments: str) -> typer.testing.Result:
    return typer.testing.CliRunner().invoke(app, ["build", *arguments])


def test_the_command_builds_for_every_number_of_ranks(built: list[str]) -> None:
    done = run("--for", TEXT, "--ranks", "2,4", "--gradients", "--device", "H200")
    assert done.exit_code == 0, done.output
    wanted = [*problems(ranks=2, gradients=True), *problems(ranks=4, gradients=True)]
    assert built == list(dict.fromkeys(wanted))
    assert f"{TEXT} on 2 ranks: 8 problems" in done.stderr
    built.clear()
    assert run("--for", TEXT, "--ranks", "2", "--schedule", "ulysses").exit_code == 0
    assert built == ["b1 s4096 h16:4 d128 bf16 causal"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "2"), "--ranks: goes with --for"),
        (("--for", "h8 d64 fp16", "--any-length", "--ranks", "2"), "without --any-length"),
        (("--for", TEXT, "--ranks", "two"), "--ranks='two': give numbers"),
        (("--for", TEXT, "--ranks", "2,0"), "--ranks='2,0': give numbers"),
        (("--for", TEXT, "--schedule", "zigzag"), "--schedule: goes with --ranks"),
        (("--for", TEXT, "--gradients"), "--gradients: goes with --model or --ranks"),
    ],
)
def test_mistakes_build_nothing(arguments: tuple[str, ...], message: str, built: list[str]) -> None:
    done = run(*arguments)
    assert message in str(done.exception)
    assert not built
