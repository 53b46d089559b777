"""Spaces and problems, and what drops a config before it is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sweep_fakes import CONFIGS, DEVICE, NAMES, PROBLEM, facts_of

from flashsmith.chooser.winners import Entry, WinnersTable
from flashsmith.errors import ArgumentError, SelectionError
from flashsmith.families import (
    DeviceSpec,
    DType,
    Problem,
    Semantics,
    device_spec,
    family_named,
    get_autotuning_kernel_configs,
    get_kernel_progression_configs,
    is_legal,
    parse_kernel_name_into_config,
)
from flashsmith.tuning.race import states_of
from flashsmith.tuning.space import search_space, shipped_choices
from flashsmith.tuning.sweep_problems import default_problems, reference_problem
from flashsmith.tuning.sweep_problems import read_problems as read
from flashsmith.tuning.trial import Build, Trials, cull_compiled, cull_unbuilt
from flashsmith.tuning.tune import make_race

# ---- the space ----


def entry_of_h200(problem: str) -> Entry:
    """What the table that ships for the H200 has on a problem."""
    return next(e for e in WinnersTable.shipped().select("H200") if str(e.problem) == problem)


@pytest.mark.parametrize("problem", [default_problems()[n] for n in (0, 30, 50, 70)], ids=str)
def test_the_space_is_legal_and_for_the_problem(problem: Problem) -> None:
    of_wgmma = 13 if problem.semantics.mask != "none" else 6
    for key, least in (("space", 31), ("hopper", of_wgmma), ("both", of_wgmma + 6)):
        configs = search_space(problem, DEVICE, key)
        assert len(set(configs)) == len(configs) >= least
        assert {(cfg.dtype, cfg.d_head) for cfg in configs} == {(problem.dtype, problem.d)}
        assert all(is_legal(cfg, DEVICE) for cfg in configs)


def test_what_ships_is_what_attention_takes_without_a_table_of_ones_own() -> None:
    winner = entry_of_h200("b16 s4096 h16 d128 fp16")
    problem = winner.problem
    assert [str(cfg) for cfg in shipped_choices(problem, DEVICE)] == [winner.best.config]
    # A GPU without a table of its own has that of its nearest relative.
    assert shipped_choices(problem, device_spec("GH200")) == shipped_choices(problem, DEVICE)
    assert [cfg.FAMILY for cfg in shipped_choices(problem, device_spec("A100"))] == ["mma_sync"]
    # Kernels that repeat their bits are chosen apart.
    backward = replace(problem, operation="backward")
    free, repeatable = shipped_choices(backward, DEVICE)
    assert not free.family.is_deterministic(free)
    assert repeatable.family.is_deterministic(repeatable)
    no_kernel = replace(DEVICE, name="small", max_smem_per_block=1024)
    assert shipped_choices(problem, no_kernel) == []


def test_what_the_tables_know_is_what_is_about_as_fast_as_their_best() -> None:
    """A GPU like one that has a table is asked about its best few alone."""
    device = device_spec("GH200")
    entry = entry_of_h200("b16 s4096 h16 d128 fp16")
    known = search_space(entry.problem, device, "known")
    assert 1 < len(known) <= 4 < len(entry.ranked)
    assert str(known[0]) == entry.best.config
    figures = {one.config: one.ms for one in entry.ranked}
    assert {str(cfg): figures[str(cfg)] <= entry.best.ms * 1.03 for cfg in known} == dict.fromkeys(
        [one.config for one in entry.ranked if one.ms <= entry.best.ms * 1.03][:4], True
    )
    # Of the gradients' kernels those that repeat their bits are asked about apart.
    known = search_space(replace(entry.problem, operation="backward"), device, "known")
    repeat = [cfg.family.is_deterministic(cfg) for cfg in known]
    assert not repeat[0]
    assert any(repeat)
    # No kernel of this d gives the same bits in every run.
    assert search_space(Problem.parse("b2 s512 h8:2 d320 bf16 backward"), device, "known")
    # Without a table of the architecture there is the cost model.
    assert {cfg.FAMILY for cfg in search_space(entry.problem, device_spec("A100"), "known")} == {
        "mma_sync"
    }
    no_kernel = replace(DEVICE, name="small", max_smem_per_block=1024)
    with pytest.raises(ArgumentError, match="too few for every kernel of d_head 128"):
        search_space(PROBLEM, no_kernel, "known")


def test_each_key_searches_its_families() -> None:
    def families(key: str | None, device: DeviceSpec = DEVICE) -> set[str]:
        return {cfg.FAMILY for cfg in search_space(PROBLEM, device, key)}

    assert families("space") == {"mma_sync"}
    assert families("hopper") == {"wgmma"}
    assert families("both") == families(None) == {"mma_sync", "wgmma"}
    assert families(None, device_spec("A100")) == {"mma_sync"}


def test_what_a_family_has_no_kernels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    wgmma = type(family_named("wgmma"))
    monkeypatch.setattr(wgmma, "search_space", lambda *args: ())
    with pytest.raises(SelectionError, match=r"no kernels of d_head 128.*take space='space'"):
        search_space(PROBLEM, DEVICE, "hopper")
    assert {cfg.FAMILY for cfg in search_space(PROBLEM, DEVICE, "both")} == {"mma_sync"}


def test_only_masked_problems_try_the_longest_tiles_first() -> None:
    orders = [
        {cfg.tile_order for cfg in search_space(replace(PROBLEM, semantics=s), DEVICE, "hopper")}
        for s in (Semantics(), Semantics("causal"))
    ]
    assert [len(found) for found in orders] == [1, 2]


def test_a_d_between_two_head_dimensions_takes_the_larger() -> None:
    odd = replace(PROBLEM, d=88, d_v=88)
    assert {cfg.d_head for cfg in search_space(odd, DEVICE)} == {96}


def test_tune_and_prog_are_put_into_the_problems_own_dtype_and_head() -> None:
    problem = replace(PROBLEM, d=64, d_v=64, dtype=DType.BF16)
    tune = search_space(problem, DEVICE, "tune")
    wanted = get_autotuning_kernel_configs([DType.BF16])
    assert tune == [replace(cfg, d_head=64) for cfg in wanted]
    steps = search_space(problem, DEVICE, "prog")
    wanted = get_kernel_progression_configs()
    assert steps == [replace(cfg, dtype=DType.BF16, d_head=64) for cfg in wanted]
    assert len(search_space(PROBLEM, DEVICE, "64,32")) == 8


def test_of_other_sets_those_count_that_fit(tmp_path: Path) -> None:
    listed = [CONFIGS[0], replace(CONFIGS[1], d_head=64), CONFIGS[2], CONFIGS[0]]
    file = tmp_path / "mine.txt"
    file.write_text("\n".join(map(str, listed)))
    assert search_space(PROBLEM, DEVICE, str(file)) == [CONFIGS[0], CONFIGS[2]]
    assert all(cfg.d_head == 128 for cfg in search_space(PROBLEM, DEVICE, "cover"))


def test_a_space_without_a_config_for_the_problem() -> None:
    with pytest.raises(SelectionError, match=r"^space='\(FP16.*BF16 and d_head 128, which b2 s512"):
        search_space(replace(PROBLEM, dtype=DType.BF16), DEVICE, NAMES[0])
    with pytest.raises(SelectionError, match="is not a known key"):
        search_space(PROBLEM, DEVICE, "nonsense")


@pytest.mark.parametrize("key", ["both", None])
def test_a_gpu_that_no_family_runs_on(key: str | None) -> None:
    old = replace(device_spec("A100"), name="V100", arch=70)
    with pytest.raises(
        ArgumentError, match=r"^device: no family has .* V100 \(sm_70\); .*mma_sync \(needs sm_80\)"
    ):
        search_space(PROBLEM, old, key)


# ---- problems ----


def test_the_name_of_a_set_gives_its_problems() -> None:
    assert len(read("main")) == 24
    assert read(f"{PROBLEM}; packed; main")[0] == PROBLEM
    assert len(read(f"{PROBLEM}; packed; main")) == 45


def test_the_default_problems_are_the_points_of_the_benchmarks() -> None:
    problems = default_problems()
    assert len(set(problems)) == len(problems) == 72
    texts = list(map(str, problems))
    assert texts[0] == "b16 s512 h16 d128 fp16"
    assert "b8 s8192 h16 d128 bf16 causal" in texts
    assert "b4 s16384 h8 d256 fp16" in texts
    # Those that share kernels stand together.
    kinds = [(p.d, p.dtype, p.semantics) for p in problems]
    assert len(set(kinds)) == sum(a != b for a, b in zip(kinds, [None, *kinds[:-1]], strict=True))


def test_problems_are_read_from_a_text_and_from_a_file(tmp_path: Path) -> None:
    text = "b2 s512 h4 d128 fp16; b1 s1024 d64 bf16 causal;b2 s512 h4 d128 fp16;"
    expected = [PROBLEM, Problem(1, 1024, 1024, 1, 1, 64, DType.BF16, Semantics("causal"))]
    assert read(text) == expected
    file = tmp_path / "problems.txt"
    file.write_text("# ours\nb2 s512 h4 d128 fp16  # the first\n\nb1 s1024 d64 bf16 causal\n")
    assert read(str(file)) == expected


def test_a_problem_that_is_none_is_named(tmp_path: Path) -> None:
    file = tmp_path / "problems.txt"
    file.write_text("b2 s512 d128 fp16\nb2 s512 fp16\n")
    with pytest.raises(
        ArgumentError, match=r"problems.txt, line 2: problem='b2 s512 fp16': d miss"
    ):
        read(str(file))
    for nothing in ("", " ; "):
        with pytest.raises(ArgumentError, match=r"^problems="):
            read(nothing)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match="cannot be read"):
        read(str(tmp_path / "binary"))
    for missing in ("nofile.txt", "some/where", str(tmp_path / "nothing here.txt")):
        with pytest.raises(ArgumentError, match=f"^problems='{missing}': there is no such file"):
            read(missing)
    with pytest.raises(ArgumentError, match=r"^d='x'|^problem="):
        read("b1 s2")


def test_a_long_problem_follows_a_shorter_one_like_it() -> None:
    h200 = device_spec("H200")
    problems = default_problems()
    of = {str(p): reference_problem(p, h200, problems) for p in problems}
    assert str(of["b4 s16384 h16 d128 fp16"]) == "b16 s2048 h16 d128 fp16"
    assert str(of["b4 s16384 h8 d256 bf16 causal"]) == "b16 s4096 h8 d256 bf16 causal"
    assert of["b16 s2048 h16 d128 fp16"] is None
    long = Problem.parse("b1 s8192 h16 d128 fp16")  # of the first, two waves
    assert (
        reference_problem(long, h200, [Problem.parse("b1 s2048 h16 d128 fp16")]) is None
    )  # 2 waves
    assert reference_problem(long, h200, [Problem.parse("b16 s2048 h16:8 d128 fp16")]) is None
    assert reference_problem(long, h200, [Problem.parse("b16 s2048:4096 h16 d128 fp16")]) is None


# ---- culling ----


def test_the_illegal_is_culled_with_its_rule_before_it_is_compiled() -> None:
    huge = parse_kernel_name_into_config("(FP16, 256, 128, 128, 8): load_2_2_2_tiles")
    reason = cull_unbuilt(huge, device_spec("RTX 4090"))
    assert reason is not None
    assert reason.startswith("illegal: the Q, K and V tiles")
    assert "196608 of 101376 bytes on RTX 4090" in reason
    assert cull_unbuilt(huge, DEVICE) is None


def test_what_no_sm_can_hold_is_culled() -> None:
    narrow = replace(DEVICE, max_threads_per_sm=64)
    reason = cull_unbuilt(CONFIGS[0], narrow)
    assert reason is not None
    assert reason.startswith("cannot reside: 128 threads with")
    assert cull_compiled(CONFIGS[0], facts_of(CONFIGS[0], 168), DEVICE, 0) is None
    eight = replace(CONFIGS[0], B_r=128, n_warps=8)
    reason = cull_compiled(eight, facts_of(eight, 264), DEVICE, 0)
    assert reason is not None
    assert "264 registers each" in reason


def test_wgmma_kernels_may_not_spill_at_all() -> None:
    cfg = search_space(PROBLEM, DEVICE, "hopper")[0]
    assert cull_compiled(cfg, facts_of(cfg, 128), DEVICE, 100) is None
    reason = cull_compiled(cfg, facts_of(cfg, 128, 8), DEVICE, 100)
    assert reason == "spills: 8 bytes per thread, allowed are 0"


def test_spills_are_culled_beyond_the_threshold() -> None:
    compiled = facts_of(CONFIGS[0], 255, 100)
    assert cull_compiled(CONFIGS[0], compiled, DEVICE, 100) is None
    reason = cull_compiled(CONFIGS[0], compiled, DEVICE, 99)
    assert reason == "spills: 100 bytes per thread, allowed are 99"


def test_a_race_lists_what_is_culled() -> None:
    problem = Problem.parse("b1 s1024 h8 d256 fp16")
    device = device_spec("RTX 4090")
    (race,) = states_of([make_race(problem, device)], Trials(device))
    culled = [trial for trial in race.trials.values() if not trial.active]
    assert culled
    assert race.active
    assert all(c.status == "culled" and c.reason.startswith("illegal: ") for c in culled)


def test_one_build_serves_what_has_the_same_semantics() -> None:
    config = CONFIGS[0]
    assert Build.of(PROBLEM, config) == Build.of(replace(PROBLEM, seq_q=1024), config)
    ragged = Build.of(replace(PROBLEM, seq_k=100), config)
    assert ragged.semantics == Semantics(uneven=True)
    assert str(ragged) == f"{config} [uneven]"


def test_few_tiles_are_also_tried_in_parts_of_the_keys() -> None:
    few, many = (Problem.parse(f"{text} h32:8 d128 bf16") for text in ("b1 s128:8192", "b8 s4096"))
    for key, families in (("both", 2), ("space", 1), ("hopper", 1)):
        in_parts = [cfg for cfg in search_space(few, DEVICE, key) if "+split_" in str(cfg)]
        assert len({cfg.FAMILY for cfg in in_parts}) == families
        assert len(in_parts) <= 12 + (families - 1)
        assert not [cfg for cfg in search_space(many, DEVICE, key) if "+split_" in str(cfg)]


@pytest.mark.parametrize(
    "words", ["b1 s512 h4:2 d64 fp16 causal", "b1 s1:512 h4:2 d64 fp16 decode"]
)
@pytest.mark.parametrize("device", [DEVICE, device_spec("A100")], ids=lambda it: it.name)
def test_the_space_of_canonical_bits_has_such_configs_alone(words: str, device: DeviceSpec) -> None:
    problem = Problem.parse(f"{words} canonical")
    found = search_space(problem, device)
    assert found
    assert all(cfg.canonical and is_legal(cfg, device) for cfg in found)
    # A search that goes on from there stays there.
    near = {other for cfg in found[:2] for other in cfg.family.neighbours(cfg)}
    assert all(other.canonical for other in near)
    free = search_space(Problem.parse(words), device)
    assert not any(cfg.canonical for cfg in free)


def test_over_a_latent_cache_the_families_of_the_device_are_searched() -> None:
    problem = Problem.parse("b32 s1:8192 h16:1 d576:512 bf16 latent_decode causal page64")
    for gpu, served in (("H200", {"mma_sync_mla", "wgmma_mla"}), ("A100", {"mma_sync_mla"})):
        device = device_spec(gpu)
        legal = [cfg for cfg in search_space(problem, device) if is_legal(cfg, device)]
        assert {cfg.FAMILY for cfg in legal} == served
        assert {(cfg.dtype, cfg.head_dims) for cfg in legal} == {(DType.BF16, (576, 512))}
        assert len(legal) > 10
    with pytest.raises(SelectionError, match="its kernels compute latent_decode"):
        search_space(Problem.parse("b1 s512 h4 d64 fp16"), DEVICE, "latent-mma")


def test_a_space_without_a_canonical_config() -> None:
    problem = Problem.parse("b1 s512 h4 d128 fp16 causal canonical")
    with pytest.raises(SelectionError, match="no config of canonical-1 on A100 takes the place"):
        search_space(problem, device_spec("A100"), "hopper")
