"""wgmma: layouts against index formulas, accumulation, hazards of registers and shared memory."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_programs import aligned, map_program, run
from wgmma_programs import (
    COMMIT,
    FENCE,
    PREPARE,
    WAIT,
    operands,
    product,
    shifted_body,
    store,
    tiles_body,
    vector,
    whole_program,
)
from wgmma_tiles import SPANS, Tile, accumulators, floats, fragments, words_of

from ptxlab.checks import all_checks
from ptxlab.errors import EmulatorError
from ptxlab.interface import Finding


def execute(
    body: str, image: np.ndarray, n: int, *, threads: int = 128, seed: int | None = None
) -> tuple[np.ndarray, list[Finding]]:
    """(accumulators by register and thread, findings)."""
    source, out = aligned(image.shape, np.uint8), aligned((n // 2, threads), np.float32)
    source[:] = image
    text = whole_program(body, image.size)
    observers = all_checks()
    run(text, [(source, False), (out, True)], threads=threads, observers=observers, seed=seed)
    return out, [finding for observer in observers for finding in observer.findings]


def check(got: np.ndarray, want: np.ndarray) -> None:
    expected = accumulators(want)
    assert np.linalg.norm(got - expected) <= 1e-6 * np.linalg.norm(expected)


def tiles_product(
    a_tile: Tile, b_tile: Tile, kind: str, *, seed: int | None = None
) -> tuple[np.ndarray, np.ndarray, list[Finding]]:
    """A product of tiles in shared memory, all steps of k: (got, wanted, findings)."""
    body, image, want = tiles_body(a_tile, b_tile, kind)
    got, findings = execute(body, image, b_tile.rows, seed=seed)
    return got, want, findings


@pytest.mark.parametrize("n", [8, 64, 104, 256])
@pytest.mark.parametrize("span", SPANS)
def test_k_major_operands(span: int, n: int) -> None:
    kind = "f16" if n % 16 else "bf16"
    got, want, findings = tiles_product(Tile(64, 64, True, span), Tile(n, 64, True, span), kind)
    check(got, want)
    assert not findings


@pytest.mark.parametrize("n", [8, 40, 128, 256])
@pytest.mark.parametrize("span", SPANS)
def test_mn_major_b(span: int, n: int) -> None:
    got, want, findings = tiles_product(Tile(64, 32, True, 64), Tile(n, 32, False, span), "f16")
    check(got, want)
    assert not findings


@pytest.mark.parametrize("span", SPANS)
def test_mn_major_a(span: int) -> None:
    got, want, findings = tiles_product(Tile(64, 48, False, span), Tile(16, 48, True, 32), "bf16")
    check(got, want)
    assert not findings


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_every_width(n: int) -> None:
    got, want, _ = tiles_product(Tile(64, 16, True, 32), Tile(n, 16, True, 32), "f16")
    check(got, want)


@pytest.mark.parametrize("seed", range(4))
def test_warps_that_come_one_by_one(seed: int) -> None:
    for k_major in (True, False):
        tile = Tile(64, 64, k_major, 128)
        got, want, findings = tiles_product(tile, Tile(64, 64, True, 128), "f16", seed=seed)
        check(got, want)
        assert not findings


def test_a_base_offset_moves_the_pattern() -> None:
    body, image, want = shifted_body()
    check(execute(body, image, 64)[0], want)


# A in registers, scales, addends -------------------------------------------------------------


def fragment_program(
    between: str = "", after: str = "", literals: str = "1, 1, 1", wait: str = WAIT
) -> tuple[str, np.ndarray, np.ndarray]:
    """d = 2 + A B with A in registers %r20 to %r23: (body, image, A B)."""
    a, b, want = operands(32, 16, "f16")
    tile = Tile(32, 16, False, 64)
    image = np.concatenate([tile.image(b), fragments(a).T.copy().view(np.uint8).reshape(-1)])
    body = "shl.b32 %r1, %r60, 4; add.u32 %r1, %r1, %r9;\n"
    body += f"ld.shared.v4.u32 {vector('r', 4, 20)}, [%r1+{tile.size}];\n"
    body += "".join(f"mov.f32 %d{r}, 0f40000000; add.f32 %d{r}, %d{r}, 0f00000000;\n"
                    for r in range(16))  # fmt: skip
    body += FENCE + between
    body += product(32, vector("r", 4, 20), tile.descriptor(0), "f16", "%p2", literals)
    return body + COMMIT + after + wait + store(32), image, want


def test_a_in_registers_and_an_addend() -> None:
    body, image, want = fragment_program()
    got, findings = execute(body, image, 32)
    check(got, want + 2)
    assert not findings


@pytest.mark.parametrize(("scales", "sign"), [("-1, 1", -1), ("1, -1", -1), ("-1, -1", 1)])
def test_negated_operands(scales: str, sign: int) -> None:
    body, image, want = fragment_program(literals=f"{scales}, 1")
    got, _ = execute(body, image, 32)
    check(got, 2 + sign * want)


def test_warpgroups_of_one_instruction_work_on_their_own() -> None:
    """Two warpgroups with descriptors of their own; only the second one accumulates."""
    tile = Tile(64, 16, True, 32)
    a, b, want = operands(64, 16, "bf16")
    image = np.concatenate([tile.image(a), tile.image(words_of(-floats(a, "bf16"), "bf16")),
                            tile.image(b)])  # fmt: skip
    body = "setp.ge.u32 %p4, %r60, 128; cvt.u64.u32 %rd5, %r60; shr.u64 %rd5, %rd5, 7;\n"
    body += f"mul.lo.u64 %rd5, %rd5, {tile.size // 16}; add.s64 %rd9, %rd5, {tile.descriptor(0)};\n"
    body += "".join(f"mov.f32 %d{r}, 0f3F800000;\n" for r in range(32)) + FENCE
    body += product(64, "%rd9", tile.descriptor(2 * tile.size), "bf16", "%p4", "1, 1, 0, 0")
    text = store(64).replace("512", "1024")
    for r in range(32):
        text = text.replace(f"[%rd8+{512 * r}], %d{r};", f"[%rd8+{1024 * r}], %d{r};")
    got, findings = execute(body + COMMIT + WAIT + text, image, 64, threads=256)
    check(got[:, :128], want)
    check(got[:, 128:], 1 - want)
    assert not findings


# Hazards -------------------------------------------------------------------------------------


def kinds(findings: list[Finding]) -> set[str]:
    return {finding.kind for finding in findings}


def changed(old: str, new: str, **parts: str) -> tuple[np.ndarray, set[str]]:
    body, image, _ = fragment_program(**parts)
    assert old in body
    got, findings = execute(body.replace(old, new), image, 32)
    return got, kinds(findings)


def test_a_missing_fence() -> None:
    body, image, _ = fragment_program()
    _, findings = execute(body.replace(FENCE, ""), image, 32)
    assert kinds(findings) == {"wgmma-fence"}
    assert "the kernel's begin" in findings[0].message


def test_registers_written_behind_the_fence() -> None:
    _, findings = changed(FENCE, FENCE + "add.u32 %r21, %r21, 0;\n")
    assert findings == {"wgmma-fence"}
    _, findings = changed(FENCE, FENCE + "add.f32 %d3, %d3, 0f00000000;\n")
    assert findings == {"wgmma-fence"}
    _, findings = changed(FENCE, FENCE + "mov.f32 %d100, %d3; mov.f32 %d3, %d100;\n")
    assert findings == set(), "a copy is a name"


def test_accumulators_read_too_early() -> None:
    got, findings = changed(WAIT, "")
    assert findings == {"wgmma-in-flight"}
    assert np.isnan(got).all()
    _, findings = changed(WAIT, WAIT.replace("0;", "1;"))
    assert findings == {"wgmma-in-flight"}
    _, findings = changed(COMMIT, "")
    assert findings == {"wgmma-in-flight"}
    body, image, _ = fragment_program(after="add.f32 %d5, %d5, %d4;\n")
    _, found = execute(body, image, 32)
    assert "accumulator 5 of the wgmma at" in found[0].message
    assert found[0].ptx_line != 0
    assert "add.f32" in found[0].message


def test_accumulators_overwritten_in_flight() -> None:
    _, findings = changed(COMMIT, COMMIT + "mov.f32 %d5, 0f00000000;\n")
    assert findings == {"wgmma-in-flight"}


def test_fragments_written_in_flight() -> None:
    _, findings = changed(COMMIT, COMMIT + "mov.b32 %r22, 0;\n")
    assert findings == {"wgmma-in-flight"}
    _, findings = changed(WAIT, WAIT + "mov.b32 %r22, 0;\n")
    assert findings == set()


def test_without_checks_a_hazard_is_an_error() -> None:
    body, image, _ = fragment_program(wait="")
    source, out = aligned(image.shape, np.uint8), aligned((16, 128), np.float32)
    source[:] = image
    declarations = f".shared .align 1024 .b8 s[{image.size}];\n.reg .f32 %d<256>;\n"
    text = map_program(PREPARE.format(size=image.size) + body + "ret;", 0, 2, declarations)
    with pytest.raises(EmulatorError, match="wgmma-in-flight: accumulator 0 of the wgmma"):
        run(text, [(source, False), (out, True)], threads=128)


OVERWRITE = "st.shared.u32 [%r9], 0;\n"


def test_operands_overwritten_in_flight() -> None:
    body, image, _ = fragment_program(after="@!%p7 bra NO;\n" + OVERWRITE + "NO:\n")
    body = "setp.eq.u32 %p7, %r60, 0;\n" + body
    _, findings = execute(body, image, 32)
    assert kinds(findings) == {"race-war"}
    assert "the wgmma of CTA 0 warpgroup 0" in findings[0].message
    late = body.replace(OVERWRITE, "").replace(WAIT, WAIT + "bar.sync 0;\n@%p7 " + OVERWRITE)
    assert not execute(late, image, 32)[1]
    lonely = late.replace("bar.sync 0;\n@%p7", "@%p7")
    assert not execute(lonely, image, 32)[1], "a warpgroup's wait is its own thread's too"


def test_operands_that_are_not_there() -> None:
    body, image, _ = fragment_program()
    declarations = f".shared .align 1024 .b8 s[{image.size}];\n.reg .f32 %d<256>;\n"
    source, out = aligned(image.shape, np.uint8), aligned((16, 128), np.float32)
    for drop, kind in (
        ("fence.proxy.async.shared::cta;", "proxy-fence"),
        ("bar.sync 0;", "race-raw"),
        ("st.shared.v4.u32", "uninitialised"),
    ):
        prepare = PREPARE.format(size=image.size)
        new = "@%p3 " + drop if drop.startswith("st.") else ""
        if new:
            prepare = "setp.ne.u32 %p3, %r60, %r60;\n" + prepare
        text = map_program(prepare.replace(drop, new) + body + "ret;", 0, 2, declarations)
        result = run(text, [(source, False), (out, True)], threads=128, observers=all_checks())
        assert kind in kinds(result.findings)


def test_threads_of_a_warpgroup_agree_on_the_descriptor() -> None:
    body, image, _ = fragment_program()
    tile = Tile(32, 16, False, 64)
    body = "cvt.u64.u32 %rd9, %r60; add.s64 %rd9, %rd9, 1;\n" + body
    body = body.replace(f", {tile.descriptor(0)},", ", %rd9,")
    with pytest.raises(EmulatorError, match="different matrix descriptors"):
        execute(body, image, 32)


def test_forms_that_do_not_exist() -> None:
    for bad, message in (
        (("n32", "n36"), "n = 36"),
        (("f32.f16.f16", "f16.f16.f16"), "not supported"),
        (("1, 1, 1;", "1, 1;"), "literals"),
    ):
        body, image, _ = fragment_program()
        assert bad[0] in body
        with pytest.raises(EmulatorError, match=message):
            execute(body.replace(*bad), image, 32)
