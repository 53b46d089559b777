"""What the host code plans for a wgmma kernel: the grid, the arguments, the tensor maps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from forward_calls import ForwardCall
from hopper_plans import (
    BF16,
    CLUSTERS,
    DYNAMIC,
    LONGEST_FIRST,
    MMA_SYNC,
    OF_D_HEAD,
    ONE_TILE,
    PERSISTENT,
    K,
    O,
    Q,
    V,
    call,
    problem,
    semantics_of,
)
from pretended_library import H200, PretendedLibrary, replaced

from flashsmith.families import DType, Semantics, WgmmaForwardKernelConfig, device_spec
from flashsmith.runtime.launch_plan import LaunchPlan, TensorMapSpec

MAPS_AT = (0, 128, 256, 384)
# Rows of what is copied at once: Q's of a warpgroup, O's of a warp.
Q_ROWS, O_ROWS = 64, 16


def plan(
    library: PretendedLibrary, cfg: WgmmaForwardKernelConfig, a_call: ForwardCall
) -> LaunchPlan:
    library.compute(semantics_of(a_call, cfg))
    return library.plan(cfg, a_call)


# --- the launch ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cfg", "text", "grid"),
    [
        # 8 x 16 heads of 8 tiles of 192 rows: more tiles than an H200 has SMs.
        (DYNAMIC, "b8 s1536 h16 d128 fp16", 132),
        (PERSISTENT, "b8 s1536 h16 d128 fp16", 132),
        (ONE_TILE, "b8 s1536 h16 d128 fp16", 1024),
        # Up to 44 tiles are split into parts for one of the three warpgroups each.
        (DYNAMIC, "b1 s1536 h2 d128 fp16", 3 * 16),
        (PERSISTENT, "b1 s1537 h2 d128 fp16", 3 * 18),
        (ONE_TILE, "b1 s8448 h1 d128 fp16", 3 * 44),
        (ONE_TILE, "b1 s8640 h1 d128 fp16", 45),
        (ONE_TILE, "b1 s1:1024 h3 d128 fp16", 3),
        (ONE_TILE, "b1 s65:1024 h3 d128 fp16", 6),
        (ONE_TILE, "b8 s1568 h16 d128 fp16", 8 * 16 * 9),
        (DYNAMIC, "b1 s1536 h2 d128 fp16 causal", 16),
        (OF_D_HEAD[256], "b2 s1000 h4 d256 fp16", 2 * 64),
    ],
)
def test_the_grid(
    library: PretendedLibrary, cfg: WgmmaForwardKernelConfig, text: str, grid: int
) -> None:
    planned = library.plan_problem(cfg, problem(text))
    assert planned.grid == (grid, 1, 1)
    assert planned.cluster == (1, 1, 1)
    assert planned.block == (cfg.n_threads, 1, 1)
    assert planned.smem_bytes == cfg.smem_bytes()


def test_a_persistent_grid_is_the_devices(library: PretendedLibrary) -> None:
    small = replace(H200, sm_count=3)
    assert library.plan_problem(DYNAMIC, problem("b8 s1536 h16 d128 fp16"), small).grid[0] == 3


def test_only_a_dynamic_schedule_has_a_counter(library: PretendedLibrary) -> None:
    for cfg in (DYNAMIC, PERSISTENT, ONE_TILE):
        planned = library.plan_problem(cfg, problem("b1 s1536 h2 d128 fp16"))
        assert (planned.workspace_bytes, planned.workspace_zeroed) == (
            (4, True) if cfg is DYNAMIC else (0, False)
        )
        if cfg is DYNAMIC:
            assert planned.workspace_offset % 8 == 0
            address = planned.argument_bytes[planned.workspace_offset :][:8]
            assert address == bytes(8), "the launcher fills it in"


@pytest.mark.parametrize(
    ("cfg", "text", "whole", "parts"),
    [
        (DYNAMIC, "b2 s1000 h16 d128 fp16 causal", 2 * 16 * 6, 0),
        (LONGEST_FIRST, "b2 s1000 h16 d128 fp16 causal", 2 * 16 * 6, 0),
        # 176 tiles are a round of 132 and 44 more; with one head more, 187, they are 55.
        (DYNAMIC, "b1 s2112 h16 d128 fp16", 132, 3 * 44),
        (LONGEST_FIRST, "b1 s2112 h16 d128 fp16", 132, 3 * 44),
        (DYNAMIC, "b1 s2112 h17 d128 fp16", 187, 0),
        (DYNAMIC, "b1 s1584 h16 d128 fp16", 144 - 12, 3 * 12),
        (DYNAMIC, "b1 s192 h44 d128 fp16", 0, 132),
        (DYNAMIC, "b1 s64 h44 d128 fp16", 44, 0),  # one warpgroup's rows as it is
        (CLUSTERS, "b1 s2112 h16 d128 fp16", 96, 0),
    ],
)
def test_the_arguments_say_how_many_tiles_there_are(
    library: PretendedLibrary, cfg: WgmmaForwardKernelConfig, text: str, whole: int, parts: int
) -> None:
    planned = library.plan_problem(cfg, problem(text))
    at = planned.workspace_offset + 8
    n_tiles, n_whole = (
        int.from_bytes(planned.argument_bytes[at + i : at + i + 4], "little") for i in (0, 4)
    )
    assert (n_whole, n_tiles) == (whole, whole + parts)


@pytest.mark.parametrize(
    ("text", "heads"),
    [
        # K and V of one head take 2 x 4,096 x 256 bytes: 16 of them 32 MiB.
        ("b4 s4096 h16 d128 fp16 causal", 16),
        ("b4 s2048 h16 d128 fp16 causal", 32),
        ("b4 s4096 h16:4 d128 fp16 causal", 64),
        ("b1 s512 h16 d128 fp16 causal", 16),
        # As few groups as that takes, all of one size.
        ("b3 s2048 h16 d128 fp16 causal", 24),
        ("b9 s4096 h16:4 d128 fp16 causal", 48),
        ("b7 s4096 h7 d128 fp16 causal", 13),
        # A head that is larger than a group is one by itself.
        ("b1 s1048576 h16 d128 fp16 causal", 1),
        ("b1 s1048576 h16:4 d128 fp16 causal", 4),
    ],
)
def test_head_groups_fit_l2(library: PretendedLibrary, text: str, heads: int) -> None:
    planned = library.plan_problem(LONGEST_FIRST, problem(text))
    at = planned.workspace_offset + 28 + 4 * 12  # behind four other divisors
    assert int.from_bytes(planned.argument_bytes[at : at + 4], "little") == heads


def test_equal_calls_have_equal_plans(library: PretendedLibrary) -> None:
    first, second = (plan(library, DYNAMIC, call()) for _ in range(2))
    assert first == second
    moved = plan(library, DYNAMIC, replaced(call(), k=(K + 4096, *call().tensors[1][1:])))
    assert moved.argument_bytes != first.argument_bytes
    assert moved.tensor_maps[1].address == K + 4096
    assert moved.tensor_maps[0] == first.tensor_maps[0]


def test_the_other_family_has_no_tensor_maps(library: PretendedLibrary) -> None:
    planned = library.plan_problem(MMA_SYNC, problem("b2 s1024 h4 d128 fp16"), device_spec("A100"))
    assert planned.tensor_maps == ()
    assert planned.workspace_bytes == 0
    assert planned.grid == (2 * 4 * 16, 1, 1)


# --- tensor maps ---------------------------------------------------------------------------------


@pytest.mark.parametrize("d_head", sorted(OF_D_HEAD))
@pytest.mark.parametrize("d_short", [0, 8, 40])
def test_dense_tensors(library: PretendedLibrary, d_head: int, d_short: int) -> None:
    """Columns, rows, heads, batch; panels of 64 columns, of 32 where 64 do not divide the head."""
    cfg, d = OF_D_HEAD[d_head], d_head - d_short
    maps = plan(library, cfg, call(f"b3 s1000:700 h6:2 d{d} fp16")).tensor_maps
    columns, swizzle = (32, 64) if d_head == 96 else (64, 128)
    rows, heads, box_rows = (1000, 700, 700, 1000), (6, 2, 2, 6), (Q_ROWS, cfg.B_c, cfg.B_c, O_ROWS)
    for i, found in enumerate(maps):
        assert found == TensorMapSpec(
            argument_offset=MAPS_AT[i],
            address=(Q, K, V, O)[i],
            element_type=DType.FP16,
            sizes=(d, rows[i], heads[i], 3),
            strides_bytes=(heads[i] * d * 2, d * 2, rows[i] * heads[i] * d * 2),
            box=(columns, box_rows[i], 1, 1),
            swizzle_bytes=swizzle,
        )
    assert len(maps) == 4


def test_the_dtype_is_the_configs(library: PretendedLibrary) -> None:
    maps = plan(library, BF16, call("b1 s384 h2 d128 bf16")).tensor_maps
    assert {found.element_type for found in maps} == {DType.BF16}


def test_strides_of_their_own(library: PretendedLibrary) -> None:
    """Heads outside of rows, a batch within, a part of something wider."""
    a_call = replaced(
        call("b2 s1536 h16 d128 fp16"),
        q=(Q, 16 * 1536 * 128, 128, 1536 * 128),
        k=(K, 128, 2 * 16 * 128, 2 * 128),
        v=(V, 1536 * 16 * 136, 16 * 136, 136),
        o=(O, 1536 * 16 * 256, 16 * 256, 256),
    )
    strides = [found.strides_bytes for found in plan(library, DYNAMIC, a_call).tensor_maps]
    assert strides == [
        (256, 1536 * 256, 16 * 1536 * 256),
        (2 * 16 * 256, 2 * 256, 256),
        (16 * 272, 272, 1536 * 16 * 272),
        (16 * 512, 512, 1536 * 16 * 512),
    ]


def test_what_there_is_one_of_may_have_any_stride(library: PretendedLibrary) -> None:
    """Frameworks put any number there, and no step is ever taken."""
    for stride in (0, 1, 7, -8, 2**45):
        a_call = replaced(
            call("b1 s1:128 h1 d128 fp16"),
            q=(Q, stride, stride, stride),
            k=(K, stride, 128, stride),
            v=(V, stride, 128, stride),
            o=(O, stride, stride, stride),
        )
        for found in plan(library, DYNAMIC, a_call).tensor_maps:
            assert all(0 < step < 2**40 and step % 16 == 0 for step in found.strides_bytes)


@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
@pytest.mark.parametrize(("axis", "word"), [(1, "batch"), (2, "row"), (3, "head")])
@pytest.mark.parametrize("stride", [0, -128, 12, 2**39])
def test_strides_that_tma_does_not_take(
    library: PretendedLibrary, name: str, axis: int, word: str, stride: int
) -> None:
    a_call = call()
    ints = list(a_call.tensors["qkvo".index(name)])
    ints[axis] = stride
    message = (
        f"{name}: its {word} stride is {stride} elements; TMA takes positive multiples of 8 "
        r"below 2\^39"
    )
    with pytest.raises(ValueError, match=message):
        plan(library, DYNAMIC, replaced(a_call, **{name: tuple(ints)}))


def test_packed_sequences(library: PretendedLibrary) -> None:
    """Rows twice, and a dimension that takes away what was counted twice, modulo 2^64."""
    a_call = call("b3 s500:700 h8:2 d128 fp16 packed")
    assert a_call.totals == (1500, 2100)
    maps = plan(library, DYNAMIC, a_call).tensor_maps
    totals, heads, box_rows = (1500, 2100, 2100, 1500), (8, 2, 2, 8), (Q_ROWS, 128, 128, O_ROWS)
    for i, found in enumerate(maps):
        row = heads[i] * 256
        assert found.address == (Q, K, V, O)[i]
        assert found.sizes == (128, 2**30, totals[i] + 1, heads[i], 2**30 + 1)
        assert found.strides_bytes == (row, row, 256, 2**34 - row)
        assert found.box == (64, box_rows[i], 1, 1, 1)
        assert found.argument_offset == MAPS_AT[i]


@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
def test_a_packed_row_stride_that_does_not_wrap(library: PretendedLibrary, name: str) -> None:
    """The fifth dimension's stride is what it lacks to 2^34 bytes."""
    a_call = call("b3 s500:700 h8:2 d128 fp16 packed")
    ints = list(a_call.tensors["qkvo".index(name)])
    ints[2] = 2**33 - 8
    longest = plan(library, DYNAMIC, replaced(a_call, **{name: tuple(ints)}))
    assert longest.tensor_maps["qkvo".index(name)].strides_bytes[3] == 16
    ints[2] = 2**33
    with pytest.raises(
        ValueError,
        match=rf"{name}: its row stride is {2**33} elements; packed sequences take less than 2\^33",
    ):
        plan(library, DYNAMIC, replaced(a_call, **{name: tuple(ints)}))


@pytest.mark.parametrize(
    "text",
    [
        "b2 s0:128 h4 d128 fp16",
        "b0 s128 h4 d128 fp16",
        "b2 s0 h4 d128 fp16 packed",
        "b0 s0 h4 d128 fp16 packed",
    ],
)
def test_without_queries_there_is_nothing_to_launch(library: PretendedLibrary, text: str) -> None:
    assert library.plan_problem(DYNAMIC, problem(text)).grid[0] == 0


@pytest.mark.parametrize("text", ["b2 s200:0 h4 d128 fp16", "b2 s200:0 h4 d128 fp16 packed"])
def test_without_keys_a_map_points_somewhere_all_the_same(
    library: PretendedLibrary, text: str
) -> None:
    """Every row of O is 0 then; nobody reads K or V, and they may be nowhere."""
    a_call = call(text)
    a_call = replaced(a_call, k=(0, *a_call.tensors[1][1:]), v=(0, *a_call.tensors[2][1:]))
    planned = plan(library, DYNAMIC, a_call)
    assert planned.grid[0] > 0
    for found in planned.tensor_maps:
        assert all(size >= 1 for size in found.sizes)
        assert all(0 < step < 2**40 and step % 16 == 0 for step in found.strides_bytes)
        assert found.address > 0


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["A100", "RTX 4090", "B200"])
def test_other_gpus_are_refused(library: PretendedLibrary, name: str) -> None:
    with pytest.raises(ValueError, match=r"wgmma kernels run on compute capability 9\.0 only"):
        library.plan_problem(DYNAMIC, problem("b1 s384 h1 d128 fp16"), device_spec(name))


def test_a_device_with_too_little_shared_memory(library: PretendedLibrary) -> None:
    small = replace(H200, max_smem_per_block=DYNAMIC.smem_bytes() - 1)
    with pytest.raises(ValueError, match=r"needs 230400 bytes of shared memory.*allows 230399"):
        library.plan_problem(DYNAMIC, problem("b1 s384 h1 d128 fp16"), small)


@pytest.mark.parametrize(
    ("text", "semantics", "message"),
    [
        ("b1 s384:100 h1 d128 fp16", Semantics(), "uneven: this library's kernels want whole K/V"),
        ("b1 s384:0 h1 d128 fp16", Semantics(), "uneven: this library's kernels want whole K/V"),
        ("b1 s384 h1 d120 fp16", Semantics(), "uneven: this library's kernels want whole K/V"),
        ("b1 s384 h1 d136 fp16", Semantics(uneven=True), "d is 136"),
        ("b1 s384 h1 d128 fp16 packed", Semantics(), "packed"),
        ("b1 s384 h1 d128 fp16", Semantics(packed=True, uneven=True), "packed"),
        ("b1 s384 h1 d128 fp16 causal", Semantics(), "mask: this library's kernels have none"),
    ],
)
def test_a_library_for_something_else_is_refused(
    library: PretendedLibrary, text: str, semantics: Semantics, message: str
) -> None:
    library.compute(semantics)
    with pytest.raises(ValueError, match=message):
        library.plan(DYNAMIC, call(text))


def test_more_tiles_than_a_grid_has(library: PretendedLibrary) -> None:
    a_call = call("b32768 s196608 h128 d128 fp16")
    with pytest.raises(ValueError, match="batch x heads x Q blocks must stay within"):
        plan(library, DYNAMIC, a_call)


def test_rows_of_queries_need_no_whole_tiles(library: PretendedLibrary) -> None:
    library.compute(Semantics())
    assert library.plan(DYNAMIC, call("b1 s60:256 h1 d128 fp16")).grid == (1, 1, 1)
    assert library.plan(DYNAMIC, call("b1 s100:256 h1 d128 fp16")).grid == (2, 1, 1)
