"""Every knob does what its name says, shown in the PTX that ships.

The kernels' inline PTX is volatile, so it stands in the order in which the source issues it: where
a copy, a load or a product stands is the config's doing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

import pytest
import shared_kernels

from flashsmith.builder import KernelLibrary, library_for
from flashsmith.families import (
    FlashForwardKernelConfig,
    Semantics,
    get_kernel_configs,
    parse_kernel_name_into_config,
)
from ptxlab.ptx import parse
from ptxlab.ptx.syntax import Entry, Instruction, Label

BASE = parse_kernel_name_into_config(
    "(FP16, 128, 64, 64, 4): async+eager+swizzled+load_2_2_2_tiles"
)
K_STEPS = BASE.d_head // 16
PV_STEPS = BASE.B_c // 16
KNOBS = {
    "base": BASE,
    "plain_copy": replace(BASE, async_copy=False),
    "plain_lazy_copy": replace(BASE, async_copy=False, eager_load_blocks=False),
    "lazy": replace(BASE, eager_load_blocks=False),
    "whole": replace(BASE, Q_mma_load_K_tiles=0, K_mma_load_K_tiles=0, V_mma_load_K_tiles=0),
    "four": replace(BASE, Q_mma_load_K_tiles=4, K_mma_load_K_tiles=4, V_mma_load_K_tiles=4),
    "q_whole": replace(BASE, Q_mma_load_K_tiles=0),
    "buffer": replace(BASE, mma_double_buffer_loads=True),
    "opt_softmax": replace(BASE, optimized_softmax=True),
    "ring_2": replace(BASE, kv_stages=2),
    "ring_3": replace(BASE, kv_stages=3),
    "lazy_rescale": replace(BASE, lazy_rescale=True),
    "ping_pong": replace(BASE, B_r=128, n_warps=8, kv_stages=3, ping_pong=True),
    "ctas": replace(BASE, min_ctas_per_sm=3),
    "groups": replace(BASE, l2_group_mib=16),
}
MASKED = {"asks": BASE, "trims": replace(BASE, trim_masks=True)}
CAUSAL = Semantics(mask="causal")
shared_kernels.want(KNOBS.values())
shared_kernels.want(MASKED.values(), CAUSAL)


@pytest.fixture(scope="session")
def library() -> KernelLibrary:
    return shared_kernels.load(list(KNOBS.values()))


@dataclass(frozen=True)
class Loop:
    """The K/V loop of a kernel: its instructions in order."""

    instructions: tuple[Instruction, ...]

    def kinds(self) -> str:
        """One letter per instruction of interest, in order."""
        letters = {
            "cp.async.cg": "c", "cp.async.commit": "g", "cp.async.wait": "w", "bar.sync": "b",
            "ldmatrix.sync.aligned.m8n8.x4.shared": "l",
            "ldmatrix.sync.aligned.m8n8.x4.trans": "t",
            "mma.sync": "m", "ex2": "e", "ld.global.v4": "G", "st.shared.v4": "S",
        }  # fmt: skip
        return "".join(
            letter
            for instruction in self.instructions
            for prefix, letter in letters.items()
            if instruction.mnemonic.startswith(prefix)
        )


def entry(library: KernelLibrary, name: str) -> Entry:
    config = KNOBS[name]
    return parse(library.ptx(config)).entry(library.entry(config).ptx_entry)


def kv_loop(entry: Entry) -> Loop:
    """The longest backward branch's body."""
    items = list(entry.body)
    place = {item.name: i for i, item in enumerate(items) if isinstance(item, Label)}
    spans = [
        (i - place[item.operands[0].name], place[item.operands[0].name], i)
        for i, item in enumerate(items)
        if isinstance(item, Instruction)
        and item.opcode == "bra"
        and place.get(item.operands[0].name, i) < i
    ]
    assert spans, "the kernel has no loop"
    _, begin, end = max(spans)
    return Loop(tuple(item for item in items[begin:end] if isinstance(item, Instruction)))


def loop_kinds(library: KernelLibrary, name: str) -> str:
    return kv_loop(entry(library, name)).kinds()


def test_async_copy_decides_between_cp_async_and_ordinary_copies(library: KernelLibrary) -> None:
    chunks = BASE.B_c * BASE.d_head * 2 // 16 // (BASE.n_warps * 32)
    kinds = loop_kinds(library, "base")
    assert kinds.count("c") == 2 * chunks
    assert "G" not in kinds
    assert "S" not in kinds
    kinds = loop_kinds(library, "plain_copy")
    assert kinds.count("G") == kinds.count("S") == 2 * chunks
    assert "c" not in kinds
    assert "w" not in kinds


def test_eager_copies_run_under_the_other_product(library: KernelLibrary) -> None:
    # V's copy, QK, then K's next copy, PV: each copy has a product before its wait.
    eager = re.sub(r"[lte]", "", loop_kinds(library, "base"))
    assert re.fullmatch(r"wbc+gm+wbc+gm+", eager), eager
    lazy = re.sub(r"[lte]", "", loop_kinds(library, "lazy"))
    assert re.fullmatch(r"c+gwbm+c+gwbm+", lazy), lazy


def test_eager_without_async_puts_the_ordinary_copy_at_the_early_place(
    library: KernelLibrary,
) -> None:
    eager = re.sub(r"[lte]", "", loop_kinds(library, "plain_copy"))
    assert re.fullmatch(r"b[GS]+m+b[GS]+m+", eager), eager
    lazy = re.sub(r"[lte]", "", loop_kinds(library, "plain_lazy_copy"))
    assert re.fullmatch(r"[GS]+bm+[GS]+bm+", lazy), lazy


@pytest.mark.parametrize(
    ("name", "q_and_k_before_mma", "v_before_mma"),
    [
        # A K step of 16 columns takes B_c / 16 ldmatrix, a Q step one, a V step d_head / 16.
        ("base", 1 + BASE.B_c // 16, BASE.d_head // 16),
        ("four", 2 * (1 + BASE.B_c // 16), 2 * BASE.d_head // 16),
        ("whole", K_STEPS * BASE.B_c // 16, PV_STEPS * BASE.d_head // 16),
        ("q_whole", BASE.B_c // 16, BASE.d_head // 16),
        # Double-buffered, two loads stand before the first product.
        ("buffer", 2 * (1 + BASE.B_c // 16), 2 * BASE.d_head // 16),
    ],
)
def test_load_counts_decide_what_is_in_registers_before_a_product(
    library: KernelLibrary, name: str, q_and_k_before_mma: int, v_before_mma: int
) -> None:
    products = re.findall(r"([lt]+)(m[lmt]*)", re.sub(r"[cgwbeGS]", "", loop_kinds(library, name)))
    stream = "".join(loads + rest for loads, rest in products)
    before_qk = re.match(r"l+", stream)
    before_pv = re.search(r"t+", stream)
    assert before_qk is not None
    assert before_pv is not None
    assert len(before_qk.group()) == q_and_k_before_mma
    assert len(before_pv.group()) == v_before_mma


def test_whole_q_is_loaded_once_before_the_loop(library: KernelLibrary) -> None:
    def loads(name: str) -> tuple[int, int]:
        total = sum(i.opcode == "ldmatrix" for i in entry(library, name).instructions)
        in_loop = sum(i.opcode == "ldmatrix" for i in kv_loop(entry(library, name)).instructions)
        return total - in_loop, in_loop

    outside, inside = loads("q_whole")
    assert outside == K_STEPS
    streamed_outside, streamed_inside = loads("base")
    assert streamed_outside == 0
    assert streamed_inside - inside == K_STEPS


def test_buffered_loads_stand_before_the_product_of_the_step_before(
    library: KernelLibrary,
) -> None:
    def steps(name: str) -> list[str]:
        stream = re.sub(r"[^ltm]", "", loop_kinds(library, name))
        return re.findall(r"[lt]+|m+", stream)

    mma_per_step = BASE.B_c // 8
    # Unbuffered: load, product, load, product. Buffered: load, load, product, ..., product.
    plain, buffered = steps("base"), steps("buffer")
    assert len(plain) == 2 * (K_STEPS + PV_STEPS)
    assert len(plain[1]) == mma_per_step
    assert len(buffered[0]) == 2 * len(plain[0])
    assert len(buffered[1]) == mma_per_step
    # The two last products of QK have no load between them.
    assert len(buffered[2 * (K_STEPS - 1) - 1]) == 2 * mma_per_step


def test_optimized_softmax_peels_the_first_tile_and_folds_the_scale(
    library: KernelLibrary,
) -> None:
    def count(name: str, opcode: str, *, everywhere: bool) -> int:
        where = entry(library, name)
        found = where.instructions if everywhere else kv_loop(where).instructions
        return sum(i.opcode == opcode for i in found)

    in_loop = count("base", "mma", everywhere=False)
    assert count("base", "mma", everywhere=True) == in_loop
    assert count("opt_softmax", "mma", everywhere=False) == in_loop
    assert count("opt_softmax", "mma", everywhere=True) == 2 * in_loop
    scores = BASE.B_c * 16 // 32  # of a lane
    # The base kernel's own: the two rows' sums, rescaled and added to.
    assert count("base", "fma", everywhere=False) <= 2
    assert count("opt_softmax", "fma", everywhere=False) >= scores
    multiplications = [count(name, "mul", everywhere=False) for name in ("base", "opt_softmax")]
    # Two products (max * scale and the correction's) stand in for one per score.
    assert multiplications[0] - multiplications[1] >= scores - 8


def test_a_ring_has_one_barrier_a_block_and_waits_for_older_copies(
    library: KernelLibrary,
) -> None:
    # Wait, barrier, both copies of a later block, QK, PV.
    for name, allowed in (("ring_2", 0), ("ring_3", 1)):
        stream = re.sub(r"[lte]", "", loop_kinds(library, name))
        assert re.fullmatch(r"wbc+gm+", stream), stream
        assert stream.count("c") == loop_kinds(library, "base").count("c")
        waits = [
            i.operands[0].value
            for i in kv_loop(entry(library, name)).instructions
            if i.mnemonic.startswith("cp.async.wait_group")
        ]
        assert waits == [allowed]


def test_lazy_rescale_votes_and_branches_around_the_rescale(library: KernelLibrary) -> None:
    def of_o(name: str) -> tuple[int, int, int]:
        """Votes; multiplications between the vote and the branch's target; all of them."""
        items = list(entry(library, name).body)
        loop = kv_loop(entry(library, name)).instructions
        # Not the vote on rows without a key, after the loop.
        votes = [i for i, x in enumerate(items) if is_op(x, "vote") and x in loop]
        total = sum(is_op(x, "mul") for x in loop)
        if not votes:
            return 0, 0, total
        branch = next(i for i in range(votes[0], len(items)) if is_op(items[i], "bra"))
        target = items[branch].operands[0].name
        end = next(i for i, x in enumerate(items) if isinstance(x, Label) and x.name == target)
        assert branch < end
        return len(votes), sum(is_op(x, "mul") for x in items[branch:end]), total

    of_a_lane = 16 * BASE.d_head // 32
    assert of_o("base")[0] == 0
    votes, skipped, total = of_o("lazy_rescale")
    # One decides for the warp; behind its branch there is one for each of a lane's two rows.
    assert votes == 3
    assert skipped >= of_a_lane
    assert total - skipped <= of_o("base")[2] - of_a_lane


def test_ping_pong_arrives_between_the_gemms(library: KernelLibrary) -> None:
    loop = kv_loop(entry(library, "ping_pong"))
    stream = "".join(
        "W" if x.mnemonic.startswith("bar.sync") else "A" if x.mnemonic == "bar.arrive" else "m"
        for x in loop.instructions
        if x.opcode in ("bar", "mma")
    )
    # Wait (one barrier for each half), P V, arrive for the other half, Q K^T.
    assert re.fullmatch(r"WWm+AAm+", stream), stream
    assert stream.index("A") - 2 == stream.count("m") // 2
    numbers = [x.operands[0].value for x in loop.instructions if x.opcode == "bar"]
    assert numbers[:2] == [1, 2]
    assert sorted(numbers[2:]) == [1, 2]
    assert numbers[2:] == [2, 1]


def test_a_cap_on_registers_stands_in_the_kernels_directives(library: KernelLibrary) -> None:
    for name, minimum in (("base", None), ("ctas", 3)):
        config = KNOBS[name]
        text = library.ptx(config)
        body = text[text.index(library.entry(config).ptx_entry) :].split("{")[0]
        found = re.search(r"\.minnctapersm (\d+)", body)
        assert (found and int(found.group(1))) == minimum


def test_grouped_heads_divide_the_grid_anew(library: KernelLibrary) -> None:
    def divisions(name: str) -> int:
        return sum(i.opcode in ("div", "rem") for i in entry(library, name).instructions)

    assert divisions("groups") > divisions("base")


def is_op(item: object, opcode: str) -> bool:
    return isinstance(item, Instruction) and item.opcode == opcode


def test_trimmed_masks_have_a_loop_body_without_mask() -> None:
    library = shared_kernels.load(list(MASKED.values()), CAUSAL)

    def bodies(name: str) -> tuple[int, int]:
        """Products and selects in the loop."""
        config = MASKED[name]
        loop = kv_loop(parse(library.ptx(config)).entry(library.entry(config).ptx_entry))
        products = sum(i.opcode == "mma" for i in loop.instructions)
        return products, sum(i.opcode == "selp" for i in loop.instructions)

    scores = BASE.B_c * 16 // 32  # of a lane: each has its select where there is a mask
    asks, trims = bodies("asks"), bodies("trims")
    assert trims[0] == 2 * asks[0]
    assert scores <= asks[1] < 2 * scores
    assert scores <= trims[1] < 2 * scores


# ---- neighbours ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class AllowedEqual:
    """Configs that may differ in `knob` alone and still be the same kernel."""

    knob: str
    applies: Callable[[FlashForwardKernelConfig, FlashForwardKernelConfig], bool]
    reason: str


def _all_whole(config: FlashForwardKernelConfig) -> bool:
    return config.K_mma_load_K_tiles == config.V_mma_load_K_tiles == 0


def _before_first_product(config: FlashForwardKernelConfig, count: int, extent: int) -> int:
    """K-tiles of an operand that are loaded before its first product."""
    if count == 0:
        return extent
    return 2 * count if config.mma_double_buffer_loads else count


def _k_tiles(config: FlashForwardKernelConfig) -> int:
    return _before_first_product(config, config.K_mma_load_K_tiles, config.d_head // 8)


def _v_tiles(config: FlashForwardKernelConfig) -> int:
    return _before_first_product(config, config.V_mma_load_K_tiles, config.B_c // 8)


ALLOWED_EQUAL = (
    AllowedEqual(
        "mma_double_buffer_loads",
        lambda a, b: _all_whole(a) and _all_whole(b),
        "no operand is streamed, so there is no next load to bring forward",
    ),
    AllowedEqual(
        "K_mma_load_K_tiles",
        lambda a, b: _k_tiles(a) == _k_tiles(b) == a.d_head // 8,
        "all of K is loaded before its first product, in one load or in two buffered halves",
    ),
    AllowedEqual(
        "V_mma_load_K_tiles",
        lambda a, b: _v_tiles(a) == _v_tiles(b) == a.B_c // 8,
        "all of V is loaded before its first product, in one load or in two buffered halves",
    ),
    AllowedEqual("trim_masks", lambda a, b: True, "these kernels are plain: there is no mask"),
)


def instruction_sequence(entry: Entry) -> tuple[str, ...]:
    """The instructions with names, labels, line info and register numbers erased."""

    def erase(operand: object) -> str:
        text = re.sub(r"%([a-z]+)\d+(@\w+)?", r"%\1", repr(operand))
        return re.sub(r"Symbol\(name='[^']*'\)", "Symbol", text)

    return tuple(
        f"{i.mnemonic} {' '.join(erase(o) for o in i.operands)}" for i in entry.instructions
    )


def differing_knobs(a: FlashForwardKernelConfig, b: FlashForwardKernelConfig) -> list[str]:
    return [name for name in a.__dataclass_fields__ if getattr(a, name) != getattr(b, name)]


def _neighbours_check(library: KernelLibrary, configs: list[FlashForwardKernelConfig]) -> int:
    sequences = {
        c: instruction_sequence(parse(library.ptx(c)).entry(library.entry(c).ptx_entry))
        for c in configs
    }
    pairs = 0
    for a, b in combinations(configs, 2):
        knobs = differing_knobs(a, b)
        if len(knobs) != 1:
            continue
        pairs += 1
        allowed = [e for e in ALLOWED_EQUAL if e.knob == knobs[0] and e.applies(a, b)]
        equal = sequences[a] == sequences[b]
        if allowed:
            assert equal, f"{a} and {b} differ, though {allowed[0].reason}: drop the allowance"
        else:
            assert not equal, f"{a} and {b} are one kernel: {knobs[0]} does nothing"
    return pairs


def test_neighbours_of_a_kernel_are_different_kernels() -> None:
    """One for every knob; the next test takes those of whole sets."""
    configs = list(KNOBS.values())
    assert _neighbours_check(shared_kernels.load(configs), configs) > 10


@pytest.mark.full
@pytest.mark.parametrize("key", ["tune", "prog-all"])
def test_neighbours_of_every_set_are_different_kernels(key: str) -> None:
    configs = get_kernel_configs(key)
    assert _neighbours_check(library_for(configs, arch=80), configs) > 10
