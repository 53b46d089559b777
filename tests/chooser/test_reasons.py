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
        f"the kernel spills registers: {kernel.spill_bytes} bytes a thread are stored to local "
        "memory and loaded from it"
    ]
    assert not any("spills" in note for note in caveats(SPILLING, NOT_BUILT, device))
