"""What is said about a choice."""

from __future__ import annotations

from flashsmith.builder import library_for
from flashsmith.chooser.reasons import caveats
from flashsmith.families import Problem, device_spec, parse_kernel_name_into_config

# Registers are capped at 128 a thread, of which O alone takes 64 and Q's fragments 32.
SPILLING = parse_kernel_name_into_config(
    "(FP16, 128, 64, 48, 4): async+eager+swizzled+load_0_0_0_tiles+ctas_4"
)
PROBLEM = Problem.parse("b16 s4608 h16 d128 fp16")
NOT_BUILT = Problem.parse("b16 s4608 h16 d128 fp16 causal")


def test_a_kernel_that_spills() -> None:
    device = device_spec(80)
    kernel = library_for([SPILLING]).entry(SPILLING)
    assert kernel.spill_bytes > 0
    said = [note for note in caveats(SPILLING, PROBLEM, device) if "spills" in note]
    assert said == [
        f"the kernel spills registers: {kernel.spill_bytes} bytes per thread are stored to local "
        "memory and loaded from it"
    ]
    assert not any("spills" in note for note in caveats(SPILLING, NOT_BUILT, device))


def over_cache(text: str) -> list[str]:
    cfg = parse_kernel_name_into_config("(BF16, 128, 16, 64, 4): decode+stages_3+least_128+parts_2")
    return list(caveats(cfg, Problem.parse(f"{text} d128 bf16 decode"), device_spec("H200")))


def test_over_a_cache_the_heads_of_a_group_fill_tiles_together() -> None:
    (four,) = over_cache("b8 s1:8192 h32:8")
    assert four.startswith("seq_q = 1 of 4 heads fills 25% of its tiles of 16 rows")
    (alone,) = over_cache("b8 s1:8192 h8")
    assert alone.startswith("seq_q = 1 fills 6% of its tiles of 16 rows")
    assert over_cache("b8 s1:8192 h128:8") == []
    assert over_cache("b8 s4:8192 h32:8") == []


def test_over_a_cache_keys_are_split() -> None:
    few = over_cache("b1 s1:2048 h16:1")
    assert [note for note in few if "of them idle" in note]
    assert not any("do not split" in note for note in few)
