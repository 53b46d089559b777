"""What attention() may choose whatever the batch and lengths, and `flashsmith build` of it."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import typer.testing
from winner_samples import BIG, H200, ranked

from flashsmith.builder import KernelLibrary, library_for
from flashsmith.chooser import any_length, choose, forget_choices
from flashsmith.chooser.any_length import (
    SIZES,
    AnyLength,
    build_for_any_length,
    choose_for_any_length,
    parse_any_length,
)
from flashsmith.chooser.winners import record_winners
from flashsmith.cli import app
from flashsmith.errors import ArgumentError
from flashsmith.families import (
    DType,
    FlashForwardKernelConfig,
    Problem,
    Semantics,
    device_spec,
    parse_kernel_name_into_config,
)

FEW = (0, 1, 3, 127, 128, 129, 4096, 2**17 + 1)
TEXT = "h32:8 d128 bf16 causal"
CAUSAL = Semantics("causal")


def chosen(text: str, device: Any = H200, sizes: tuple[int, ...] = FEW) -> AnyLength:
    return choose_for_any_length(parse_any_length(text), device, sizes=sizes)


def test_sizes_are_powers_of_two_and_their_neighbours() -> None:
    wanted = {2**power + off for power in range(18) for off in (-1, 0, 1)}
    assert set(SIZES) == wanted
    assert len(SIZES) == len(wanted) == 51


def test_every_config_that_choose_gives_is_among_them_and_no_other() -> None:
    found = chosen(TEXT)
    given = {
        choose(f"b{batch} s{seq_q}:{seq_k} {TEXT}", H200).config
        for batch, seq_q, seq_k in itertools.product(FEW, FEW, FEW)
    }
    assert len(given) > 1
    assert given <= set(found.configs[CAUSAL])
    assert found.configs[CAUSAL] == found.configs[Semantics("causal", uneven=True)]
    assert set(found.configs) == {CAUSAL, Semantics("causal", uneven=True)}
    of_the_table = any_length._of_the_table(parse_any_length(TEXT), H200)
    assert found.count == len(FEW) ** 3 + len(of_the_table)
    for batch, seq_q, seq_k in of_the_table:
        given.add(choose(f"b{batch} s{seq_q}:{seq_k} {TEXT}", H200).config)
    assert given == set(found.configs[CAUSAL])


def test_packed_sequences_on_request() -> None:
    packed = Semantics("causal", packed=True, uneven=True)
    found = chosen(f"{TEXT} packed", sizes=(1, 512))
    assert set(found.configs) == {CAUSAL, Semantics("causal", uneven=True), packed}
    given = {choose(f"b{batch} s512 {TEXT} packed", H200).config for batch in (1, 512)}
    assert given <= set(found.configs[packed])


def test_where_d_fills_no_d_head_every_kernel_is_uneven() -> None:
    assert set(chosen("h12 d40 fp16", device_spec("A100")).configs) == {Semantics(uneven=True)}


def test_every_bucket_of_the_table_is_looked_at() -> None:
    """Also one beyond all powers that are tried, of a table of one's own."""
    text = "b1 s524288 h16 d128 fp16"
    before = chosen("h16 d128 fp16", sizes=(64,))
    record_winners(Problem.parse(text), H200, [ranked(BIG, 5000.0, text)])
    forget_choices()
    after = chosen("h16 d128 fp16", sizes=(64,))
    config = parse_kernel_name_into_config(BIG)
    assert config not in before.configs[Semantics()]
    assert config in after.configs[Semantics()]
    assert after.count > before.count


def test_how_many_is_said() -> None:
    found = chosen(TEXT)
    configs = len(found.configs[CAUSAL])
    text = str(found)
    assert text.startswith(f"{TEXT} of any length on H200: {configs} configs (")
    assert f"chosen for {found.count:,} problems" in text
    assert text.endswith(f"as kernels {configs} causal, {configs} causal+uneven")
    one = replace(found, configs={CAUSAL: found.configs[CAUSAL][:1]})
    assert f"on H200: 1 config (1 {one.configs[CAUSAL][0].FAMILY})" in str(one)


@pytest.mark.parametrize("word", ["b16", "s4096", "s1:4096"])
def test_a_batch_or_a_length_is_refused(word: str) -> None:
    with pytest.raises(ArgumentError, match=f"'{word}' is a batch or a length"):
        parse_any_length(f"{TEXT} {word}")


def test_a_library_for_each_family_and_semantics_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[Any] = []

    def library(configs: list[Any], *, arch: int, semantics: Semantics, progress: Any) -> Any:
        built.append((arch, semantics, {config.FAMILY for config in configs}, set(configs)))

    monkeypatch.setattr(any_length, "library_for", library)
    found = chosen(f"{TEXT} packed", sizes=(1, 4096))
    build_for_any_length(found)
    assert all(arch == 90 and len(families) == 1 for arch, _, families, _ in built)
    for semantics, configs in found.configs.items():
        of_them = [group for _, kind, _, group in built if kind == semantics]
        assert set().union(*of_them) == set(configs)


# --- the command ---------------------------------------------------------------------------------

SMALL = FlashForwardKernelConfig(DType.FP16, 64, 64, 32, 4)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `flashsmith build --any-length` builds; few sizes are looked at, nothing is compiled."""
    some: KernelLibrary = library_for([SMALL], semantics=Semantics(uneven=True))
    seen: list[Any] = []

    def library(configs: list[Any], *, arch: int, semantics: Semantics, progress: Any) -> Any:
        seen.append((arch, str(semantics), len(configs)))
        return some

    monkeypatch.setattr(any_length, "library_for", library)
    monkeypatch.setattr(
        any_length, "choose_for_any_length", partial(choose_for_any_length, sizes=(1, 64, 4096))
    )
    return seen


def run(*arguments: str) -> typer.testing.Result:
    return typer.testing.CliRunner().invoke(app, ["build", *arguments])


def test_the_command_says_how_many_and_builds_them(built: list[Any]) -> None:
    done = run("--for", TEXT, "--any-length", "--device", "H200")
    assert done.exit_code == 0, done.output
    found = chosen(TEXT, sizes=(1, 64, 4096))
    assert str(found) in done.stderr
    assert {arch for arch, _, _ in built} == {90}
    for semantics in ("causal", "causal+uneven"):
        counts = [count for _, kind, count in built if kind == semantics]
        assert sum(counts) == len(found.configs[CAUSAL])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--any-length",), "--any-length: goes with --for"),
        (("--for", f"b16 {TEXT}", "--any-length"), "'b16' is a batch or a length"),
        (("--for", TEXT), "s missing"),
        (("--for", "h32:8 bf16", "--any-length"), "d missing"),
    ],
)
def test_bad_arguments_build_nothing(
    arguments: tuple[str, ...], message: str, built: list[Any]
) -> None:
    done = run(*arguments)
    assert message in str(done.exception)
    assert not built


@pytest.mark.full
def test_no_length_asks_for_another_kernel() -> None:
    """Of any batch and length, also between those that were looked at."""
    found = choose_for_any_length(parse_any_length(TEXT), H200)
    draw = random.Random(0)
    missed = []
    for _ in range(3000):
        batch, seq_q, seq_k = (int(2 ** draw.uniform(0, 17)) for _ in range(3))
        config = choose(f"b{batch} s{seq_q}:{seq_k} {TEXT}", H200).config
        if config not in found.configs[CAUSAL]:
            missed.append((batch, seq_q, seq_k, str(config)))
    assert not missed
