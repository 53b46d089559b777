"""Texts that are no config, problem, GPU or semantics: refused at once, whatever their length."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from flashsmith.errors import ArgumentError, ConfigParseError, FlashsmithError
from flashsmith.families import (
    DType,
    Problem,
    Semantics,
    device_spec,
    parse_kernel_name_into_config,
)
from flashsmith.families.names import MOST_CHARACTERS

GOOD = "(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax"
WGMMA = "(FP16, 128, 192, 128, 3wg): tma+stages_2+q_buffers_2+regs_32_160+pingpong_gemm+dynamic"
DEMANGLED = "FlashForwardKernelConfig{(flashsmith::DType)5, 128, 64, 64, 4}"
PROBLEM = "b16 s4096 h16 d128 fp16 causal"
PARSERS: dict[str, tuple[Callable[[str], object], tuple[str, ...]]] = {
    "config": (parse_kernel_name_into_config, (GOOD, WGMMA, DEMANGLED)),
    "problem": (Problem.parse, (PROBLEM, "b2 s7:300 h3:1 d96 bf16 packed+softcap")),
    "device": (device_spec, ("H200", "sm_90", "rtx 4090")),
    "semantics": (Semantics.parse, ("causal+packed+uneven", "plain")),
    "dtype": (DType.parse, ("fp16", "15")),
}
# What is put in the place of a part of a good text.
PIECES = (
    "", " ", "\0",
    "\x1b[31m", "\n", "\r", "\u202e", "\ud800", "١٢", "²", "9" * 19, "9" * 5000, "-1",
    "1e9", "_", "+", ",", ":", "(", ")", "{", "}", "|", "::", "(int)", "nan", "0", "x" * 300, "ſ",
)  # fmt: skip
# Each of them is doubled until it is as long as allowed: what is quadratic in one takes hours.
REPEATED = (
    " ",
    "(",
    ")",
    "a",
    "1",
    "_1",
    "+",
    "(int)",
    "a::",
    "{",
    "FlashForwardKernelConfig{",
    "|",
)


def hostile(good: str, draw: random.Random) -> str:
    """A good text with one to three places damaged."""
    for _ in range(draw.randint(1, 3)):
        begin = draw.randrange(len(good) + 1)
        end = min(len(good), begin + draw.choice((0, 0, 1, 3, 8)))
        good = good[:begin] + draw.choice(PIECES) + good[end:]
    return good


def refused_or_read(kind: str, text: str) -> str | None:
    """What is wrong with how a parser answers; None where nothing is."""
    parse, _ = PARSERS[kind]
    try:
        parse(text)
    except FlashsmithError as error:
        said = str(error)
        if not said.replace("\n", "").isprintable() or len(said) > 3000:
            return f"{kind} {text[:80]!r}: says {said[:200]!r}"
    except Exception as error:
        return f"{kind} {text[:80]!r}: {type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize(
    "rounds", [300, pytest.param(20_000, marks=pytest.mark.full)], ids=["quick", "full"]
)
@pytest.mark.parametrize("kind", PARSERS)
def test_a_damaged_text_is_read_or_refused(kind: str, rounds: int) -> None:
    draw = random.Random(1410)
    _, good = PARSERS[kind]
    texts = [hostile(text, draw) for text in good for _ in range(rounds)]
    wrong = [line for text in texts if (line := refused_or_read(kind, text))]
    assert not wrong, f"{len(wrong)} of {len(texts)}:\n" + "\n".join(wrong[:20])


@pytest.mark.parametrize("kind", PARSERS)
@pytest.mark.parametrize("piece", REPEATED)
def test_a_long_text_is_answered_at_once(kind: str, piece: str) -> None:
    _, (good, *_) = PARSERS[kind]
    for text in (piece * 20_000, piece * (9_000 // len(piece)), good + piece * 100_000):
        assert refused_or_read(kind, text) is None


@pytest.mark.parametrize("form", ["({}): async", "(FP16, 128, 64, 64, 4):{}!", "{}", "(a){}:b"])
def test_spaces_take_no_time_to_parse(form: str) -> None:
    text = form.format(" " * (MOST_CHARACTERS - len(form)))
    for _ in range(50):  # minutes, in all, were a space looked at again for every other
        with pytest.raises(ConfigParseError):
            parse_kernel_name_into_config(text)


def test_a_config_has_a_bounded_length() -> None:
    padded = GOOD.replace(" ", " " * 500)
    assert str(parse_kernel_name_into_config(padded)) == GOOD
    with pytest.raises(ConfigParseError, match="longer than 10,000 characters"):
        parse_kernel_name_into_config(GOOD.replace(" ", " " * 20_000))


@pytest.mark.parametrize("text", ["b1 s1 d8 fp16 h" + "9" * 19, "s1:" + "9" * 5000 + " d8 fp16"])
def test_a_problem_has_no_number_beyond_counting(text: str) -> None:
    with pytest.raises(ArgumentError, match="more than 18 digits"):
        Problem.parse(text)
