"""Commands given kernels of both families, or of one that the architecture does not run."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import flashsmith.builder as builder
from flashsmith.cli import app
from flashsmith.errors import FlashsmithError, IllegalConfigError
from flashsmith.families import Semantics, get_hopper_configs
from flashsmith.families import parse_kernel_name_into_config as parse

HOPPER = parse(
    "(FP16, 128, 192, 128, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_gemm+dynamic"
    "+rescale_8"
)
MMA_SYNC = parse("(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles")
BOTH = f"{HOPPER}; {MMA_SYNC}"


def run(*words: str, status: int = 0) -> str:
    result: Result = CliRunner().invoke(app, list(words))
    if isinstance(result.exception, FlashsmithError):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.stdout


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was asked of the builder, which makes nothing."""
    asked: list[tuple[Any, ...]] = []

    def build(configs: Any, *, arch: int, semantics: Semantics, progress: Any) -> Any:
        asked.append((list(configs), arch, semantics))
        manifest = SimpleNamespace(arch=arch, semantics=semantics, build_seconds=0.0, kernels=())
        return SimpleNamespace(path=f"/library/{len(asked)}", manifest=manifest)

    monkeypatch.setattr(builder, "build", build)
    return asked


def test_a_build_makes_a_library_for_each_family(built: list[tuple[Any, ...]]) -> None:
    facts = json.loads(run("build", "-k", BOTH, "--arch", "90", "--semantics", "causal", "--json"))
    assert [library["path"] for library in facts] == ["/library/1", "/library/2"]
    causal = Semantics("causal")
    assert built == [([HOPPER], 90, causal), ([MMA_SYNC], 90, causal)]


def test_a_build_of_one_family_is_one_library(built: list[tuple[Any, ...]]) -> None:
    assert json.loads(run("build", "-k", "hopper", "--arch", "H200", "--json"))["arch"] == "sm_90"
    assert built == [(get_hopper_configs(), 90, Semantics())]


def test_nothing_is_built_when_a_config_is_for_another_architecture(
    built: list[tuple[Any, ...]],
) -> None:
    first = get_hopper_configs()[0]
    for key, named in (("hopper", first), (BOTH, HOPPER), (f"{MMA_SYNC}; {HOPPER}", HOPPER)):
        with pytest.raises(IllegalConfigError) as caught:
            run("build", "-k", key, "--arch", "80")
        message = str(caught.value)
        assert f"config {named} is illegal:" in message
        assert "needs a GPU of compute capability 9.0" in message
        assert "(here A100 is sm_80)" in message
        assert "no change of its knobs makes it legal on A100; the mma_sync family has" in message
    assert built == []


@pytest.mark.parametrize("command", ["run", "progression"])
def test_the_same_goes_for_running_them(command: str) -> None:
    with pytest.raises(IllegalConfigError, match=r"needs a GPU of compute capability 9\.0"):
        run(command, "-k", BOTH, "--arch", "80")


def test_a_run_proves_both_side_by_side() -> None:
    words = ("run", "-k", BOTH, "--arch", "90", "--heads", "1", "--json", "--emulate")
    report = json.loads(run(*words))
    assert [kernel["config"] for kernel in report["kernels"]] == [str(HOPPER), str(MMA_SYNC)]
    assert {kernel["verdict"] for kernel in report["kernels"]} == {"pass"}
    assert report["proven"]["seq"] == 256
    assert report["arch"] == "sm_90"


def test_the_set_is_listed_and_its_configs_are_legal_on_hopper_only() -> None:
    assert "hopper" in run("configs")
    assert "the wgmma kernels that the package ships" in run("configs")
    for arch, legal in (("90", True), ("H200", True), ("80", False), ("100", False)):
        facts = json.loads(run("configs", "-k", "hopper", "--arch", arch, "--json"))
        assert [parse(fact["short_form"]) for fact in facts] == get_hopper_configs()
        assert {fact["legal"] for fact in facts} == {legal}
        for fact, cfg in zip(facts, get_hopper_configs(), strict=True):
            assert (fact["threads"], fact["smem_bytes"]) == (cfg.n_threads, cfg.smem_bytes())


def test_the_environment_names_the_set_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELS", "hopper")
    assert len(json.loads(run("configs", "--arch", "90", "--json"))) == len(get_hopper_configs())
