"""`flashsmith run` on other problems than plain ones: --semantics and --problem."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import shared_kernels
from documents import ROOT, RUNNABLE
from typer.testing import CliRunner, Result

from flashsmith.benchmark import run as run_module
from flashsmith.benchmark.kernel_facts import KernelFacts
from flashsmith.cli import app
from flashsmith.errors import EmulatorError, FlashsmithError
from flashsmith.families import Problem, Semantics, parse_kernel_name_into_config
from flashsmith.semantics import MASKS
from flashsmith.verify import prove

DECODE = "(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_2"
# Both are built by other tests for masks and uneven lengths.
MMA_SYNC = "(FP16, 64, 64, 32, 4): async+eager+swizzled+load_2_2_2_tiles+lazy_rescale"
BF16 = MMA_SYNC.replace("FP16", "BF16")
WGMMA = "(FP16, 64, 64, 64, 1wg): tma+stages_2+q_buffers_1+regs_24_240+rescale_8+stale_max"
PROVEN = [Semantics.parse(text) for text in ("plain", "causal+uneven", "window+uneven")]
for _semantics in PROVEN:
    shared_kernels.want([parse_kernel_name_into_config(MMA_SYNC)], _semantics)
OVER_CACHES = Semantics(), Semantics("causal")
for _semantics in OVER_CACHES:
    shared_kernels.want([parse_kernel_name_into_config(DECODE)], _semantics)
# What this page shows runs by default, what others show in the full suite.
COMMAND_PAGE = (ROOT / "docs" / "command.md").read_text()


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """In the cache, where the command finds them."""
    for semantics in PROVEN:
        shared_kernels.load([parse_kernel_name_into_config(MMA_SYNC)], semantics)
    for semantics in OVER_CACHES:
        shared_kernels.load([parse_kernel_name_into_config(DECODE)], semantics)


def run(*words: str, key: str = MMA_SYNC, status: int = 0) -> str:
    result: Result = CliRunner().invoke(app, ["run", "-k", key, "--emulate", *words])
    if isinstance(result.exception, FlashsmithError):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.stdout


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Semantics, dict[str, Any]]]:
    """What was built, and the keywords it was to be proven with; nothing is built or runs."""
    made: list[tuple[Semantics, dict[str, Any]]] = []
    monkeypatch.setattr(run_module.KernelFacts, "of", lambda *_: KernelFacts(1, 0, 0, 0, 1))
    built: list[Semantics] = []

    def libraries_for(configs: Any, *, semantics: Semantics, **_: Any) -> dict[Any, Any]:
        built.append(semantics)
        return dict.fromkeys(configs, SimpleNamespace(entry=lambda cfg: cfg))

    def stopped(cfg: Any, problem: Problem, *, options: dict[str, Any], **call: Any) -> Any:
        sizes = {"batch": problem.batch, "seq": problem.seq_q, "seq_k": problem.seq_k}
        heads = {"heads": problem.heads_q, "heads_k": problem.heads_k, "d": problem.d}
        made.append((built[-1], {**sizes, **heads, **options, **call}))
        raise EmulatorError("not today")

    monkeypatch.setattr(run_module, "libraries_for", libraries_for)
    monkeypatch.setattr(run_module, "prove", stopped)
    return made


def test_a_problem_by_its_text() -> None:
    """A row per kernel that is for it, with what it was compiled for; the others are named."""
    text = run("--problem", "b1 s100 h2:1 d64 fp16 causal", "--check", key=f"{MMA_SYNC};{BF16}")
    lines = text.splitlines()
    assert lines[0] == "problem: b1 s100 h2:1 d64 fp16 causal, random inputs, seed 0"
    assert lines[1] == "proven:  causal"
    assert "the emulator, every check on" in text
    assert re.search(r"^\| kernel +\| semantics +\| verdict ", text, re.MULTILINE)
    assert re.search(r"lazy_rescale \| causal\+uneven \| pass ", text)
    assert f"skipped: {BF16} is for bf16" in lines
    assert lines[-1] == "1 of 1 kernel passed"


def test_pages_that_a_kernel_of_that_operation_reads() -> None:
    out = run("--problem", "b2 s1:70 h2:1 d64 fp16 causal decode page16", key=DECODE)
    assert "1 of 1 kernel passed" in out
    result = CliRunner().invoke(app, ["explain", "--json", DECODE])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["config"] == DECODE


def test_semantics_with_all_that_they_leave_open_in_json() -> None:
    words = ("--semantics", "window+uneven", "--window", "40,9", "--sinks", "--seed", "3")
    facts = json.loads(run(*words, "--seq", "200", "--json"))
    assert facts["proven"] == {"batch": 1, "seq": 200, "heads": 2, "semantics": "window+uneven"}
    assert facts["computes"] == "window (40, 9), sinks"
    assert (facts["sinks"], facts["seed"], facts["skipped"]) == (True, 3, [])
    (row,) = facts["kernels"]
    assert (row["config"], row["verdict"]) == (MMA_SYNC, "pass")
    assert row["proven"] == row["emulated"] == "b1 s200 h2 d64 fp16 window uneven"
    assert row["instructions"] > 1000


def test_a_wrong_kernel_is_wrong_for_its_semantics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the failed verdict says; proven with another mask than it has, a kernel is wrong."""

    def other_mask(cfg: Any, problem: Problem, **call: Any) -> Any:
        module = __import__("importlib").import_module("flashsmith.verify.forward_reference")
        right = module.inputs_and_references

        def unmasked(spec: Any, attention: Any, *rest: Any) -> Any:
            return right(spec, replace(attention, causal=False), *rest)

        with monkeypatch.context() as patch:
            patch.setattr(module, "inputs_and_references", unmasked)
            return prove(cfg, problem, **call)

    monkeypatch.setattr(run_module, "prove", other_mask)
    text = run("--problem", "s300 d64 fp16 causal", status=1)
    assert "| causal+uneven | FAIL " in text
    assert "d64 fp16 causal uneven, causal, random inputs, emulator: WRONG" in text
    assert "0 of 1 kernel passed" in text


def test_plain_runs_say_what_they_said() -> None:
    """No column and no line more."""
    text = run("--seq", "64", "--heads", "1")
    assert "proven:" not in text
    assert "| kernel " in text
    assert "semantics" not in text


@pytest.mark.parametrize("softcap", [False, True])
@pytest.mark.parametrize("lengths", ["", "uneven", "packed"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("key", [MMA_SYNC, WGMMA], ids=["mma_sync", "wgmma"])
def test_any_semantics_of_either_family_can_be_asked_for(
    asked: list[tuple[Semantics, dict[str, Any]]], key: str, mask: str, lengths: str, softcap: bool
) -> None:
    semantics = Semantics(mask, softcap, lengths == "packed", lengths != "")
    arch = "90" if key == WGMMA else "80"
    run("--semantics", str(semantics), "--arch", arch, "--check", key=key, status=1)
    ((built, call),) = asked
    assert built == semantics
    assert (call["causal"], call["softcap"]) == (mask == "causal", 30.0 * softcap)
    assert call["window"] == ((128 - (lengths != ""), 0) if mask == "window" else (None, None))
    assert ("lens_q" in call) is (lengths == "packed")
    assert (call["checks"], call["sinks"], call["backend"]) == (True, False, "emulator")


def test_the_problem_that_is_proven_is_the_one_that_was_given(
    asked: list[tuple[Semantics, dict[str, Any]]],
) -> None:
    problem = "b2 s300:130 h6:2 d40 fp16 causal softcap"
    run("--problem", problem, "--softcap", "7.5", "--sinks", "--seed", "4", status=1)
    ((built, call),) = asked
    assert built == Semantics("causal", softcap=True, uneven=True)
    expected = {
        "batch": 2, "seq": 300, "seq_k": 130, "heads": 6, "heads_k": 2, "d": 40, "causal": True,
        "window": (None, None), "softcap": 7.5, "sinks": True, "seed": 4,
    }  # fmt: skip
    assert {name: call[name] for name in expected} == expected


def test_kernels_of_a_problem_are_built_for_what_each_needs(
    asked: list[tuple[Semantics, dict[str, Any]]],
) -> None:
    """320 keys are five tiles of 64 and no whole number of 48."""
    fits, ragged = MMA_SYNC, MMA_SYNC.replace("64, 64, 32", "64, 64, 48")
    run("--problem", "s320 d64 fp16 causal", key=f"{fits};{ragged}", status=1)
    text = run("--problem", "s320 d64 fp16 causal", key=f"{fits};{ragged}", status=1)
    assert "load_2_2_2_tiles+lazy_rescale | causal        | FAIL" in text
    assert "load_2_2_2_tiles+lazy_rescale | causal+uneven | FAIL" in text


PROBLEM = ("--problem", "b1 s300 h4:2 d64 fp16 causal")
CONFLICT = "^--problem: already sets what is computed; leave out "


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--semantics", "causl"), "^semantics='causl': allowed are 'plain', or a mask"),
        (("--semantics", ""), "^semantics='': allowed are 'plain', or a mask"),
        (
            ("--problem", "nonsense"),
            "^problem='nonsense': unknown word 'nonsense'; did you mean 'none'. allowed are sizes ",
        ),
        (("--problem", ""), "^problem='': s, d, dtype missing; write it like"),
        (("--problem", "s300 d64 fp16 h4:3"), "^heads_q=4: must be a multiple of heads_k=3"),
        (
            ("--problem", "s300 d60 fp16"),
            "^problem='b1 s300 h1 d60 fp16': d=60 is not a multiple of 8",
        ),
        (
            ("--problem", "s300 d64 bf16"),
            r"no selected kernel computes it: \(FP16.* is for fp16; n",
        ),
        (("--problem", "s300 d72 fp16"), r"no selected kernel computes it: \(FP16.* has d_head 64"),
        (("--problem", "s320 d64 fp16 uneven"), "fills whole tiles of .* leave 'uneven' out"),
        (("--problem", "b0 s300 d64 fp16"), "has no queries, so that no kernel runs"),
        ((*PROBLEM, "--seq", "64"), f"{CONFLICT}--seq$"),
        ((*PROBLEM, "--batch", "1"), f"{CONFLICT}--batch$"),
        ((*PROBLEM, "--heads", "2", "--semantics", "plain"), f"{CONFLICT}--heads and --semantics$"),
        ((*PROBLEM, "--window", "4,0"), r"^window=\(4, 0\): 'b1 s300.*' has none; add the word"),
        (("--window", "4,0"), r"^window=\(4, 0\): 'b1 s256.*' has none; add the word window"),
        (("--semantics", "window", "--window", "4"), "^window='4': give LEFT,RIGHT, whole numbers"),
        (("--semantics", "window", "--window", "4,x"), "^window='4,x': give LEFT,RIGHT"),
        (("--semantics", "window", "--window", ",0"), r"^window=\(None, 0\): is the mask 'causal'"),
        (("--softcap", "4"), r"^softcap=4\.0: 'b1 s256.*' has none; add the word softcap"),
        (("--semantics", "softcap", "--softcap", "nan"), "^softcap=nan: give a finite number"),
        (("--semantics", "causal", "--seq", "100"), "^seq=100: must be a multiple of B_r=64"),
        (("--semantics", "uneven", "--seq", "128"), "^seq=128: fills whole tiles of"),
    ],
)
def test_nonsense_is_refused_before_anything_is_built(
    asked: list[tuple[Semantics, dict[str, Any]]], words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(FlashsmithError, match=message):
        run(*words)
    assert asked == []


def documented_runs() -> list[str]:
    """The documents' runs of other problems than plain ones."""
    texts = [path.read_text() for path in RUNNABLE]
    lines = [line for text in texts for line in text.splitlines() if "flashsmith run" in line]
    wanted = [line for line in lines if "--semantics" in line or "--problem" in line]
    return sorted({line.strip().strip("`") for line in wanted})


def arguments(line: str) -> list[str]:
    """What follows `flashsmith run`, without --kernels: a whole set would take minutes."""
    words = shlex.split(line, comments=True)[2:]
    if "--kernels" in words:
        place = words.index("--kernels")
        del words[place : place + 2]
    return words


# The fastest schedule of the ablation: documented problems have its d.
LADDER = "(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax"


def test_the_documents_show_both() -> None:
    runs = documented_runs()
    assert any("--semantics" in line for line in runs)
    assert any("--problem" in line for line in runs)


@pytest.mark.parametrize("line", documented_runs())
def test_documented_runs_are_of_semantics_that_there_are(
    asked: list[tuple[Semantics, dict[str, Any]]], line: str
) -> None:
    words = arguments(line)
    run(
        *words, key=WGMMA.replace("64, 64, 64", "128, 64, 64") if "90" in line else LADDER, status=1
    )
    ((built, _),) = asked
    assert built != Semantics()


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=[pytest.mark.full] * (line.split("#")[0] not in COMMAND_PAGE))
        for line in documented_runs()
    ],
)
def test_documented_runs_pass(line: str) -> None:
    key = WGMMA.replace("64, 64, 64", "128, 64, 64") if "90" in line else LADDER
    assert "1 of 1 kernel passed" in run(*arguments(line), key=key)


@pytest.mark.full
@pytest.mark.parametrize(("mask", "softcap"), list(product(MASKS, (False, True))))
@pytest.mark.parametrize("key", [MMA_SYNC, WGMMA], ids=["mma_sync", "wgmma"])
def test_any_semantics_of_either_family_are_proven(key: str, mask: str, softcap: bool) -> None:
    for lengths in ("", "uneven", "packed"):
        semantics = Semantics(mask, softcap, lengths == "packed", lengths != "")
        words = ("--semantics", str(semantics), "--sinks", "--check")
        text = run(*words, "--arch", "90" if key == WGMMA else "80", key=key)
        assert "1 of 1 kernel passed" in text
