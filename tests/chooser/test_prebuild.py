"""What attention() may choose whatever the batch and lengths, and `flashsmith build` of it."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.testing
from winner_samples import BIG, H200, ranked

from flashsmith.builder import KernelLibrary, library_for
from flashsmith.chooser import choose, choose_config, forget_choices, prebuild
from flashsmith.chooser.choice import expectation
from flashsmith.chooser.decode import CHOOSERS as DECODE_CHOOSERS
from flashsmith.chooser.prebuild import (
    SIZES,
    TOLERANCE,
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

FEW = tuple(itertools.product((1, 3), (1, 128, 129, 4096), (1, 129, 4096, 2**17)))
SOME = tuple(itertools.product((1,), (1, 64, 4096), (64, 4096)))
TEXT = "h32:8 d128 bf16 causal"
CAUSAL = Semantics("causal")


def chosen(text: str, device: Any = H200, sizes: tuple[Any, ...] = FEW) -> AnyLength:
    return choose_for_any_length(parse_any_length(text), device, sizes=sizes)


def test_sizes_are_powers_of_two_to_the_longest() -> None:
    batches, queries, keys = (set(of) for of in zip(*SIZES, strict=True))
    assert {1, 2, 4, 8, 16, 32, 64} <= batches
    assert {1, 4, 16, 1024, 2**17} <= queries
    assert keys == {2**power for power in range(18)}


def test_one_of_few_configs_serves_each_problem_nearly_as_well_as_its_own() -> None:
    found = chosen(TEXT)
    few = found.configs[CAUSAL]
    assert found.configs == {CAUSAL: few, Semantics("causal", uneven=True): few}
    of_the_table = prebuild._of_the_table(parse_any_length(TEXT), H200)
    assert found.count == len({*FEW, *of_the_table})
    given = set()
    for batch, seq_q, seq_k in {*FEW, *of_the_table}:
        problem = Problem.parse(f"b{batch} s{seq_q}:{seq_k} {TEXT}")
        given.add(choose(problem, H200).config)
        taken = choose_config(problem, H200, among=few)
        times = expectation(problem, H200)
        assert times.ms(taken) <= times.chosen.ms * (1 + TOLERANCE)
    assert found.chosen == len(given)
    assert len(few) < len(given)
    assert set(few) <= given


def test_a_few_are_found_in_seconds() -> None:
    """Of work: so many problems are looked at, which take some milliseconds each."""
    assert len(SIZES) < 1500


def test_over_a_cache_all_that_keep_the_bits() -> None:
    """They depend on how many queries a sequence has; each of dense and packed ones."""
    text = "h32:8 d128 bf16 decode causal packed"
    found = chosen(text)
    packed = Semantics("causal", packed=True, uneven=True)
    assert set(found.configs) == {CAUSAL, packed}
    for batch, seq_q, seq_k in FEW:
        for kind, semantics in (("", CAUSAL), ("packed", packed)):
            words = f"b{batch} s{seq_q}:{seq_k} h32:8 d128 bf16 decode causal {kind}"
            config = DECODE_CHOOSERS["invariant"](Problem.parse(words), H200)
            assert config in found.configs[semantics]
    assert found.kernels < 10


def test_packed_sequences_on_request() -> None:
    packed = Semantics("causal", packed=True, uneven=True)
    found = chosen(f"{TEXT} packed", sizes=((1, 512, 512), (512, 512, 512)))
    assert set(found.configs) == {CAUSAL, Semantics("causal", uneven=True), packed}
    for batch in (1, 512):
        times = expectation(Problem.parse(f"b{batch} s512 {TEXT} packed"), H200)
        fastest = min(map(times.ms, found.configs[packed]))
        assert fastest <= times.chosen.ms * (1 + TOLERANCE)


def test_where_d_fills_no_d_head_every_kernel_is_uneven() -> None:
    assert set(chosen("h12 d40 fp16", device_spec("A100")).configs) == {Semantics(uneven=True)}
    # 72 fills a d_head of the forward pass and of the gradients, but none over caches.
    for words in ("", " backward"):
        assert set(chosen(f"h12 d72 fp16{words}", device_spec("A100"), SOME).configs) == {
            *(Semantics(), Semantics(uneven=True))
        }
    over_cache = chosen("h12 d72 fp16 decode", device_spec("A100"), SOME)
    assert set(over_cache.configs) == {Semantics(uneven=True)}


def test_every_bucket_of_the_table_is_looked_at() -> None:
    """Also one beyond all powers that are tried, of a table of one's own."""
    text = "b1 s524288 h16 d128 fp16"
    before = chosen("h16 d128 fp16", sizes=((64, 64, 64),))
    record_winners(Problem.parse(text), H200, [ranked(BIG, 5000.0, text)])
    forget_choices()
    after = chosen("h16 d128 fp16", sizes=((64, 64, 64),))
    config = parse_kernel_name_into_config(BIG)
    assert config not in before.configs[Semantics()]
    assert config in after.configs[Semantics()]
    assert after.count > before.count


def test_how_many_is_said() -> None:
    found = chosen(TEXT)
    configs = len(found.configs[CAUSAL])
    text = str(found)
    assert text.startswith(f"{TEXT} of any length on H200: {configs} configs (")
    assert f" within 2% of the {found.chosen} chosen for {found.count:,} problems" in text
    assert text.endswith(f"as kernels {configs} causal, {configs} causal+uneven")
    one = replace(found, chosen=1, configs={CAUSAL: found.configs[CAUSAL][:1]})
    assert f"on H200: 1 config (1 {one.configs[CAUSAL][0].FAMILY}) chosen for" in str(one)


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
        return SimpleNamespace(path=len(built))

    monkeypatch.setattr(prebuild, "library_for", library)
    monkeypatch.setattr(prebuild, "find_library", lambda *_, **__: None)
    found = chosen(f"{TEXT} packed", sizes=SOME)
    build_for_any_length(found)
    assert all(arch == 90 and len(families) == 1 for arch, _, families, _ in built)
    for semantics, configs in found.configs.items():
        of_them = [group for _, kind, _, group in built if kind == semantics]
        assert set().union(*of_them) == set(configs)
    # What one cached library or another holds is not built again.
    there = SimpleNamespace(path="there")
    first = found.configs[CAUSAL][0]
    monkeypatch.setattr(
        prebuild, "find_library", lambda config, **_: there if config == first else None
    )
    built.clear()
    assert build_for_any_length(found)[0] is there
    assert all(first not in group for _, _, _, group in built)
    monkeypatch.setattr(prebuild, "find_library", lambda *_, **__: there)
    built.clear()
    assert build_for_any_length(found) == [there]
    assert not built


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

    monkeypatch.setattr(prebuild, "library_for", library)
    monkeypatch.setattr(prebuild, "find_library", lambda *_, **__: None)
    monkeypatch.setattr(
        prebuild, "choose_for_any_length", partial(choose_for_any_length, sizes=SOME)
    )
    return seen


def run(*arguments: str) -> typer.testing.Result:
    return typer.testing.CliRunner().invoke(app, ["build", *arguments])


def test_the_command_says_how_many_and_builds_them(built: list[Any]) -> None:
    done = run("--for", TEXT, "--any-length", "--device", "H200")
    assert done.exit_code == 0, done.output
    found = chosen(TEXT, sizes=SOME)
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
        (("--for", TEXT), "gives no length; add one"),
        (("--for", "h32:8 bf16", "--any-length"), "d missing"),
    ],
)
def test_bad_arguments_build_nothing(
    arguments: tuple[str, ...], message: str, built: list[Any]
) -> None:
    done = run(*arguments)
    assert message in str(done.exception)
    assert not built


def test_a_model_is_built_for(built: list[Any], tmp_path: Path) -> None:
    config = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    config |= {"torch_dtype": "bfloat16", "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run("--model", str(tmp_path), "--device", "H200")
    assert done.exit_code == 0, done.output
    assert "llama: h32:8 d128 bf16 decode causal packed" in done.stderr
    forward = {"causal", "causal+uneven", "causal+packed+uneven"}
    assert {semantics for _, semantics, _ in built} == forward
    # The one library that the stand-in returns was there.
    assert "built already" in done.stdout


def test_layers_of_a_model_without_a_kernel_are_left_out(built: list[Any], tmp_path: Path) -> None:
    config: dict[str, Any] = {"hidden_size": 2048, "num_attention_heads": 8, "head_dim": 64}
    config |= {"torch_dtype": "bfloat16", "model_type": "llama", "global_head_dim": 512}
    config |= {"num_global_key_value_heads": 1, "sliding_window": 256}
    config["layer_types"] = ["sliding_attention", "full_attention"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run("--model", str(tmp_path), "--device", "A100")
    assert done.exit_code == 0, done.output
    said = " ".join(done.stderr.split())
    assert "note: h8:1 d512 bf16 causal packed: left out: device: no kernel of d_head 512" in said
    assert "window+packed+uneven" in {semantics for _, semantics, _ in built}
    done = run("--for", "h8:1 d512 bf16 causal packed", "--any-length", "--device", "A100")
    assert "no kernel of d_head 512" in str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "x", "--for", TEXT), "--model: already selects the kernels"),
        (("--model", "x", "-k", "prog"), "--model: already selects the kernels"),
        (("--gradients",), "--gradients: goes with --model"),
        (("--deterministic",), "--deterministic: goes with"),
        (("--model", "/no/config.json"), "--model='/no/config.json'"),
    ],
)
def test_mistakes_about_a_model(arguments: tuple[str, ...], message: str, built: list[Any]) -> None:
    done = run(*arguments)
    assert message in str(done.exception)
    assert not built


@pytest.mark.full
@pytest.mark.parametrize(
    ("device", "text"), [("H200", TEXT), ("A100", "h12 d64 fp16"), ("H200", f"{TEXT} backward")]
)
def test_lengths_between_those_that_were_looked_at(device: str, text: str) -> None:
    """Nearly all are served within the tolerance, too."""
    gpu = device_spec(device)
    few = next(iter(choose_for_any_length(parse_any_length(text), gpu).configs.values()))
    draw = random.Random(0)
    slower = []
    for _ in range(500):
        batch = int(2 ** draw.uniform(0, 7))
        seq_q = int(2 ** draw.uniform(0, 17))
        seq_k = max(seq_q, int(2 ** draw.uniform(0, 17)))
        times = expectation(Problem.parse(f"b{batch} s{seq_q}:{seq_k} {text}"), gpu)
        slower.append(min(map(times.ms, few)) / times.chosen.ms - 1)
    slower.sort()
    assert slower[int(0.9 * len(slower))] <= TOLERANCE
    assert slower[int(0.98 * len(slower))] <= 0.15
