"""The benchmark: who takes part, that nobody is timed who is wrong, and what the table says."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import shared_kernels
from stand_ins import HostMemory, PretendedClock

from flashsmith.benchmark import bench as plan_module
from flashsmith.benchmark import implementations, timing
from flashsmith.benchmark.bench import BenchPlan, run_bench, summary
from flashsmith.benchmark.bench_table import print_rows, shares, sort_rows
from flashsmith.benchmark.environment import Environment, Telemetry
from flashsmith.benchmark.kernel_facts import BuiltKernels
from flashsmith.benchmark.measurement import Measurement, problem_columns
from flashsmith.benchmark.peers import PeerImplementation, get_peers
from flashsmith.benchmark.progress import ProgressReporter
from flashsmith.benchmark.table import make_console
from flashsmith.benchmark.timing import CudaEvents, Protocol
from flashsmith.benchmark.workload import Workload, workload_of
from flashsmith.chooser import choose_config
from flashsmith.chooser.decode import CHOOSERS
from flashsmith.errors import ArgumentError, LaunchError
from flashsmith.families import Problem, Semantics, device_spec
from flashsmith.families import parse_kernel_name_into_config as parse
from flashsmith.runtime import query_gpu
from flashsmith.verify import compute_references
from flashsmith.verify.proof_inputs import default_scale

CFG = parse("(FP16, 64, 64, 64, 4): async+swizzled+load_0_0_0_tiles")
TOO_LARGE = parse("(FP16, 64, 512, 512, 4): async+swizzled+load_0_0_0_tiles")
PROBLEM = Problem.parse("b2 s64 h2 d64 fp16")
A100 = device_spec("A100")
HERE = Environment("Pretended", 80, "1.2", "13.0", "", "0.1.0", "abc", "3.11")
QUICK = Protocol(num_warmups=0, runs=3, warmup_ms=0, measure_ms=0, num_estimates=1)


def right_answer(w: Workload) -> np.ndarray:
    scale = default_scale(w.problem.d)
    return compute_references(w.q, w.k, w.v, scale, causal=w.causal).same_precision


@dataclass
class Stage:
    """Runs a plan on pretended hardware; fakes take time on its clock."""

    monkeypatch: pytest.MonkeyPatch
    clock: PretendedClock = field(default_factory=lambda: PretendedClock(tick=1e-7))
    written: list[Measurement] = field(default_factory=list)

    def make_workload(self, problem: Problem, seed: int) -> Workload:
        return Workload(problem, seed, HostMemory())

    def run(self, *problems: Problem, **plan: Any) -> dict[str, Measurement]:
        asked = BenchPlan(problems or (PROBLEM,), protocol=QUICK, **plan)
        rows = run_bench(
            asked,
            A100,
            environment=HERE,
            clock=self.clock,
            telemetry=Telemetry(sensor=lambda: (1500.0, 650.0)),
            reporter=ProgressReporter(quiet=True),
            write=self.written.append,
            make_workload=self.make_workload,
        )
        assert rows == self.written
        return {row.implementation: row for row in rows}

    def attention(self, ms: float = 2.0, spoil: Callable[[Any], None] = lambda o: None) -> bool:
        """Lets attention() take ``ms``; True, which is what a plan's ``ours`` wants."""

        def attention(q: Any, k: Any, v: Any, *, out: Any, causal: bool) -> None:
            self.clock.work("ours", ms)
            found = compute_references(q, k, v, default_scale(64), causal=causal)
            out[:] = found.same_precision
            spoil(out)

        return self.stand_in(attention)

    def stand_in(
        self, attention: Callable[..., None], choose: Callable[..., Any] = lambda *_: CFG
    ) -> bool:
        """Puts these in place of attention() and its chooser; True, as above."""
        self.monkeypatch.setattr(implementations, "attention", attention)
        self.monkeypatch.setattr(plan_module, "choose_config", choose)
        return True

    def peer(self, name: str, ms: float = 1.0, **odd: Any) -> FakePeer:
        return FakePeer(name, self.clock, ms, **odd)


@dataclass
class FakePeer:
    name: str
    clock: PretendedClock
    ms: float
    missing: str | None = None
    refusal: Exception | None = None
    factor: float = 1.0

    def absence(self, problem: Problem) -> str | None:
        return self.missing

    def version(self) -> str:
        return f"{self.name} 7"

    def prepare(self, workload: Workload) -> PeerImplementation:
        if self.refusal is not None:
            raise self.refusal
        transposed = (right_answer(workload) * self.factor).transpose(0, 2, 1, 3)

        def call() -> np.ndarray:
            self.clock.work(self.name, self.ms)
            return transposed

        return PeerImplementation(self.name, call, lambda returned: returned.transpose(0, 2, 1, 3))


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def test_a_row_says_what_was_measured_where(stage: Stage) -> None:
    row = stage.run(ours=stage.attention(ms=2.0))["ours"]
    assert (row.verdict, row.kind, row.family, row.config) == ("pass", "ours", "mma_sync", str(CFG))
    assert (row.ms, row.best_ms) == (pytest.approx(2.0), pytest.approx(2.0))
    assert row.spread == pytest.approx(0.0)
    assert row.tflops == pytest.approx(4 * 2 * 2 * 64 * 64 * 64 / 2e-3 / 1e12)
    assert (row.sm_clock_mhz, row.power_w) == (1500.0, 650.0)
    assert row.max_error is not None
    assert row.error_bound is not None
    assert 0 < row.max_error < row.error_bound
    assert row.rel_l2 is not None
    assert (row.gpu, row.arch, row.revision, row.protocol) == (
        "Pretended", 80, "abc", "interleaved",
    )  # fmt: skip
    assert row.problem == PROBLEM
    assert row.registers is not None
    assert row.registers > 32
    assert row.spill_bytes == 0
    assert row.smem_bytes == CFG.smem_bytes()
    assert row.ctas_per_sm is not None
    assert row.ctas_per_sm > 0


def test_kernels_by_config_run_beside_attention(stage: Stage) -> None:
    """In the emulator; a config of another dtype or head size is for other problems."""
    others = (replace(CFG, d_head=128), parse(str(CFG).replace("FP16", "BF16")))
    rows = stage.run(ours=stage.attention(), configs=(CFG, *others))
    assert set(rows) == {"ours", str(CFG)}
    assert rows[str(CFG)].verdict == "pass"


def test_implementations_take_turns(stage: Stage) -> None:
    stage.run(ours=stage.attention(), peers=(stage.peer("fa2"), stage.peer("cudnn")))
    after = len(stage.clock.log) - stage.clock.log[::-1].index("events")
    launched = [w for w in stage.clock.log[after:] if w in ("ours", "fa2", "cudnn")]
    assert sorted(launched[:3]) == ["cudnn", "fa2", "ours"]
    assert launched[3:6] == launched[2::-1]


def test_a_rotated_plan_begins_with_another_implementation(stage: Stage) -> None:
    peers = (stage.peer("fa2"), stage.peer("cudnn"))
    for rotation, first in ((0, "ours"), (1, "fa2"), (2, "cudnn"), (3, "ours")):
        stage.clock.log.clear()
        stage.written.clear()
        rows = stage.run(ours=stage.attention(), peers=peers, rotation=rotation)
        begin = stage.clock.log.index("begin")
        launched = [w for w in stage.clock.log[begin:] if w in ("ours", "fa2", "cudnn")]
        assert launched[0] == first
        assert list(rows) == ["ours", "fa2", "cudnn"]


def test_who_is_wrong_is_not_timed(stage: Stage) -> None:
    def spoil(o: np.ndarray) -> None:
        o[-1, -1, -1, -1] += 1

    rows = stage.run(
        ours=stage.attention(spoil=spoil),
        peers=(stage.peer("fa2"), stage.peer("cudnn", factor=1.1)),
    )
    assert rows["ours"].verdict == "fail"
    assert "largest error" in rows["ours"].note
    assert rows["cudnn"].verdict == "fail"
    assert rows["fa2"].verdict == "pass"
    assert rows["ours"].ms is rows["cudnn"].ms is None
    assert rows["fa2"].ms == pytest.approx(1.0)


class Erring(FakePeer):
    """Its error is ``factor`` times that of the textbook kernel, which is attention()'s here."""

    def prepare(self, workload: Workload) -> PeerImplementation:
        scale = default_scale(workload.problem.d)
        found = compute_references(workload.q, workload.k, workload.v, scale)
        output = found.o + self.factor * (found.same_precision - found.o)

        def call() -> np.ndarray:
            self.clock.work(self.name, self.ms)
            return output

        return PeerImplementation(self.name, call, lambda returned: returned)


def test_a_peer_is_measured_by_our_error(stage: Stage) -> None:
    """Of three times ours it is right, although the rule of proofs allows about twice."""
    peers = [Erring(f"err{it}", stage.clock, 1.0, factor=it) for it in (-2.9, 0.0, 2.9, 3.1)]
    rows = stage.run(ours=stage.attention(), peers=tuple(peers))
    verdicts = {name: row.verdict for name, row in rows.items()}
    assert verdicts == {
        "ours": "pass", "err-2.9": "pass", "err0.0": "pass", "err2.9": "pass", "err3.1": "fail",
    }  # fmt: skip
    wrong, right, ours = rows["err3.1"], rows["err2.9"], rows["ours"]
    assert re.search(r"o: largest error \S+ is above \S+, 3 times ours", wrong.note)
    assert (wrong.ms, right.ms) == (None, pytest.approx(1.0))
    assert right.error_bound == pytest.approx(3 * ours.max_error)
    assert right.max_error > ours.error_bound


def test_without_a_right_kernel_of_ours_a_peer_is_held_to_the_rule_of_proofs(stage: Stage) -> None:
    peers = tuple(Erring(f"err{it}", stage.clock, 1.0, factor=it) for it in (1.0, 2.9))
    wrong = stage.attention(spoil=lambda o: o.fill(0))
    rows = stage.run(ours=wrong, peers=peers)
    assert [row.verdict for row in rows.values()] == ["fail", "pass", "fail"]
    assert "times ours" not in rows["err2.9"].note


def test_what_attention_leaves_unwritten_is_no_leftover_of_another(stage: Stage) -> None:
    idle = stage.stand_in(lambda q, k, v, **options: None)
    assert stage.run(ours=idle)["ours"].verdict == "fail"


def test_an_absent_peer_is_a_named_gap(stage: Stage) -> None:
    rows = stage.run(
        ours=stage.attention(),
        peers=(
            stage.peer("fa2"),
            stage.peer("flex", missing="PyTorch is not installed"),
            stage.peer("cudnn", refusal=RuntimeError("No available kernel.\nAborting")),
            stage.peer("flash_attn_2", refusal=AssertionError()),
        ),
    )
    assert rows["fa2"].note == "fa2 7"
    assert (rows["flex"].verdict, rows["flex"].note) == ("absent", "PyTorch is not installed")
    assert (rows["cudnn"].verdict, rows["cudnn"].note) == (
        "absent", "refuses: No available kernel.",
    )  # fmt: skip
    assert rows["flash_attn_2"].note == "refuses: AssertionError"


def test_a_kernel_that_cannot_run_is_a_row(stage: Stage) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise LaunchError("out of resources\nmore")

    rows = stage.run(ours=stage.stand_in(broken), peers=(stage.peer("fa2"),))
    assert (rows["ours"].verdict, rows["ours"].note) == ("error", "out of resources")
    assert rows["fa2"].verdict == "pass"


def test_a_problem_that_no_kernel_serves_is_a_row(stage: Stage) -> None:
    def choose(problem: Problem, device: Any) -> Any:
        raise ArgumentError("q: d=320 is above every d_head")

    def unused(*_: Any, **__: Any) -> None:
        pytest.fail("nothing was chosen")

    row = stage.run(ours=stage.stand_in(unused, choose))["ours"]
    assert (row.verdict, row.config) == ("error", "")
    assert "d=320" in row.note


def test_an_illegal_config_is_a_row(stage: Stage) -> None:
    rows = stage.run(configs=(CFG, TOO_LARGE))
    assert rows[str(CFG)].verdict == "pass"
    assert rows[str(TOO_LARGE)].verdict == "error"
    assert "shared memory" in rows[str(TOO_LARGE)].note


def test_a_kernel_that_takes_the_gpu_with_it_ends_the_run(stage: Stage, monkeypatch) -> None:
    def crash(*_: Any, **__: Any) -> None:
        def refuse() -> None:
            raise LaunchError("an illegal memory access")

        monkeypatch.setattr(stage.clock, "synchronize", refuse)
        raise RuntimeError("illegal address")

    with pytest.raises(LaunchError, match=r"ours on 'b2 s64.*unusable.*illegal memory access"):
        stage.run(ours=stage.stand_in(crash), peers=(stage.peer("fa2"),))
    # What was known by then is written.
    assert [(row.implementation, row.verdict) for row in stage.written] == [("ours", "error")]


def test_a_problem_too_large_for_the_memory_is_a_row_of_each(stage: Stage) -> None:
    longer = replace(PROBLEM, seq_q=128, seq_k=128)
    make = stage.make_workload

    def make_small(problem: Problem, seed: int) -> Workload:
        if problem == longer:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
        return make(problem, seed)

    stage.make_workload = make_small  # type: ignore[method-assign]
    last = stage.run(longer, PROBLEM, ours=stage.attention(), peers=(stage.peer("fa2"),))
    assert [(row.implementation, row.seq_q, row.verdict) for row in stage.written] == [
        ("ours", 128, "error"),
        ("fa2", 128, "absent"),
        ("ours", 64, "pass"),
        ("fa2", 64, "pass"),
    ]
    first = stage.written[0]
    assert first.note == "the tensors cannot be made: CUDA out of memory. Tried to allocate 2 GiB"
    assert first.config == str(CFG)
    assert last["ours"].ms is not None


def test_what_fails_while_timing_is_an_error_of_all_and_the_run_goes_on(stage: Stage) -> None:
    class Greedy(FakePeer):
        def prepare(self, workload: Workload) -> PeerImplementation:
            made = super().prepare(workload)
            calls = iter(range(1))

            def call() -> Any:
                if workload.problem.seq_q == 128 and next(calls, None) is None:
                    raise RuntimeError("CUDA out of memory\nmore")
                return made.call()

            return PeerImplementation(self.name, call, made.in_q_layout)

    longer = replace(PROBLEM, seq_q=128, seq_k=128)
    peers = (Greedy("fa2", stage.clock, 1.0), stage.peer("cudnn", factor=1.1))
    stage.run(longer, PROBLEM, ours=stage.attention(), peers=peers)
    said = {(row.implementation, row.seq_q): row for row in stage.written}
    assert said["ours", 128].verdict == "error"
    assert said["ours", 128].note == "timed together: CUDA out of memory"
    assert said["fa2", 128].verdict == "absent"
    assert said["cudnn", 128].verdict == "fail"
    assert said["ours", 64].ms == pytest.approx(2.0)


def test_an_interrupted_run_keeps_what_it_has(stage: Stage) -> None:
    class Impatient(FakePeer):
        def prepare(self, workload: Workload) -> PeerImplementation:
            if workload.problem.seq_q == 128:
                raise KeyboardInterrupt
            return super().prepare(workload)

    longer = replace(PROBLEM, seq_q=128, seq_k=128)
    with pytest.raises(KeyboardInterrupt):
        stage.run(
            PROBLEM, longer, ours=stage.attention(), peers=(Impatient("fa2", stage.clock, 1.0),)
        )
    assert [(row.implementation, row.seq_q, row.ms is None) for row in stage.written] == [
        ("ours", 64, False),
        ("fa2", 64, False),
        ("ours", 128, True),
    ]


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        (BenchPlan(()), "problems: none"),
        (BenchPlan((PROBLEM,)), "give at least one"),
        (BenchPlan((PROBLEM,), (replace(CFG, d_head=128),)), "none of the 1 serves"),
    ],
)
def test_a_plan_without_implementations_is_refused(plan: BenchPlan, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        plan.check()


def test_kernels_are_built_once_for_each_semantics(monkeypatch) -> None:
    from flashsmith.benchmark import kernel_facts as module

    asked = []

    class Library:
        def __init__(self, configs: Any) -> None:
            self.configs = configs

        def __contains__(self, config: Any) -> bool:
            return config in self.configs

        def entry(self, config: Any) -> str:
            return "entry"

    def library_for(configs: Any, *, arch: int, semantics: Any, progress: Any) -> Library:
        asked.append((set(configs), arch, str(semantics)))
        return Library(configs)

    monkeypatch.setattr(module, "library_for", library_for)
    monkeypatch.setattr(module, "find_library", lambda *_, **__: None)
    other = replace(CFG, swizzled=False)
    uses = [
        (config, Problem.parse(text))
        for config in (CFG, other, TOO_LARGE)
        for text in ("b2 s64 h2 d64 fp16", "b4 s128 h1 d64 fp16", "b2 s65 h2 d64 fp16")
    ]
    kernels = BuiltKernels(A100)
    kernels.build(uses, lambda event: None)
    assert asked == [({CFG, other}, 80, "plain"), ({CFG, other}, 80, "uneven")]
    kernels.build(uses, lambda event: None)
    assert len(asked) == 2


# --- the table ------------------------------------------------------------------------------------


def made_row(implementation: str, tflops: float | None, **columns: Any) -> Measurement:
    known: dict[str, Any] = {
        "implementation": implementation,
        "kind": "peer",
        "family": "",
        "config": "",
        "verdict": "pass" if tflops else "absent",
        "tflops": tflops,
        "ms": 100 / tflops if tflops else None,
        **problem_columns(PROBLEM),
    }
    return Measurement(**{**known, **columns})


ROWS = [
    made_row("flex", None, note="not installed"),
    made_row("fa2", 300.0),
    made_row("ours", 390.0, kind="ours", config=str(CFG), spill_bytes=8),
    made_row("cudnn", 600.0, note="cuDNN 9"),
    made_row("mem_efficient", None, verdict="fail", note="largest error"),
]


def test_the_quickest_first_and_the_absent_last() -> None:
    names = [row.implementation for row in sort_rows(ROWS)]
    assert names == ["cudnn", "ours", "fa2", "mem_efficient", "flex"]


def test_shares_of_fa2_and_of_the_best_peer() -> None:
    found = dict(zip([row.implementation for row in ROWS], shares(ROWS), strict=True))
    assert found["ours"] == (pytest.approx(1.3), pytest.approx(0.65))
    assert found["cudnn"] == (pytest.approx(2.0), pytest.approx(1.0))
    assert found["flex"] == (None, None)
    without = [row for row in ROWS if row.kind == "ours"]
    assert shares(without) == [(None, None)]


def printed(rows: list[Measurement]) -> str:
    out = io.StringIO()
    print_rows(make_console(out), rows)
    return out.getvalue()


def test_the_table_names_everybody() -> None:
    text = printed(ROWS)
    (ours,) = (line for line in text.splitlines() if "| ours" in line)
    assert "130.0%" in ours
    assert "65.0%" in ours
    assert str(CFG) in ours
    assert "cuDNN 9" in text
    assert "not installed" in text
    assert "% of FA2" in text
    # Nobody said anything of clocks.
    assert "MHz" not in text


def test_a_cell_in_one_line() -> None:
    assert (
        summary(PROBLEM, ROWS) == f"  {PROBLEM}: cudnn 600, ours 390, fa2 300, mem_efficient: fail"
    )
    assert summary(PROBLEM, ROWS[:1]).endswith("nothing could be measured")


@pytest.mark.parametrize("word", ["", "only_dq", "no_dq"])
def test_ours_of_a_backward_problem_is_attention_with_the_kernel_that_is_chosen(word: str) -> None:
    problem = Problem.parse(f"b2 s64 h2 d64 fp16 backward {word}")
    (entry,) = BenchPlan((problem,), ours=True).entries(problem, A100)
    assert (entry.name, entry.attention) == ("ours", True)
    assert entry.config == choose_config(problem, A100)
    # Both directions are built before anything is measured.
    forward = replace(problem, operation="forward", gradients="")
    uses = list(BenchPlan((problem,), ours=True).uses(A100))
    assert uses == [(entry.config, problem), (choose_config(forward, A100), forward)]


# --- over a cache --------------------------------------------------------------------------------

# Parts of 64 keys.
DECODE_CFG = parse("(FP16, 64, 16, 64, 4): decode+stages_3+least_64+parts_2")
shared_kernels.want([DECODE_CFG], Semantics("causal"))
CACHE = Problem.parse("b2 s1:130 h4:2 d64 fp16 causal decode page16")


@pytest.fixture
def caches(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """The emulator runs attention_with_cache(), which takes DECODE_CFG. Graphs are small."""
    monkeypatch.setattr(timing, "SETS_BYTES", 1)
    monkeypatch.setattr(timing, "CALLS_IN_GRAPH", 2)
    shared_kernels.load([DECODE_CFG], Semantics("causal"))
    for split in CHOOSERS:
        monkeypatch.setitem(CHOOSERS, split, lambda problem, device, **_: DECODE_CFG)
    stage.make_workload = lambda problem, seed: workload_of(problem, seed, HostMemory())  # type: ignore[assignment]
    return stage


def test_over_a_cache_both_splits_and_kernels_take_part(caches: Stage) -> None:
    rows = caches.run(CACHE, ours=True, configs=(DECODE_CFG, CFG))
    assert list(rows) == ["ours", "ours_free", str(DECODE_CFG)]
    for row in rows.values():
        assert (row.verdict, row.config, row.problem) == ("pass", str(DECODE_CFG), CACHE)
        assert row.family == "mma_sync_decode"
    assert rows[str(DECODE_CFG)].note == "prepared call"


LATENT_CFG = parse("(FP16, 320:256, 32): latent_mma+stages_2+least_128+parts_4+lazy")
shared_kernels.want([LATENT_CFG], Semantics("causal"))


@pytest.mark.parametrize(
    "words", ["", "page16", pytest.param("page16 cache_e4m3", marks=pytest.mark.full)]
)
def test_over_a_latent_cache_both_splits_and_kernels_take_part(
    caches: Stage, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    problem = Problem.parse(f"b2 s2:70 h4:1 d320:256 fp16 latent_decode causal {words}")
    cfg = LATENT_CFG.with_knobs(cache=problem.cache_format)
    shared_kernels.load([cfg], Semantics("causal"))
    for split in CHOOSERS:
        monkeypatch.setitem(CHOOSERS, split, lambda problem, device, **_: cfg)
    rows = caches.run(problem, ours=True, configs=(DECODE_CFG, cfg))
    assert list(rows) == ["ours", "ours_free", str(cfg)]
    for row in rows.values():
        assert (row.verdict, row.family, row.problem) == ("pass", "mma_sync_mla", problem)
        assert row.protocol.endswith("in graphs")


def test_a_small_cache_is_timed_in_graphs_and_a_large_one_in_turns(
    caches: Stage, monkeypatch
) -> None:
    """Every set of tensors is drawn once and read by all; a call's time is a share of a graph's."""
    monkeypatch.setattr(timing, "CALLS_IN_GRAPH", 6)
    drawn: list[int] = []
    make = caches.make_workload

    def made(problem: Problem, seed: int) -> Any:
        drawn.append(seed)
        return make(problem, seed)

    read: list[int] = []

    def attention(q: Any, k_cache: Any, v_cache: Any, *, split: str, out: Any, **_: Any) -> None:
        read.append(id(k_cache))
        caches.clock.work(split, 2.0 if split == "free" else 3.0)
        out[:] = right

    caches.make_workload = made  # type: ignore[method-assign]
    bytes_read = CACHE.computed.bytes(CACHE)
    monkeypatch.setattr(timing, "SETS_BYTES", 3 * bytes_read)
    right = answer_over_cache(make(CACHE, 0))
    monkeypatch.setattr(implementations, "attention_with_cache", attention)
    rows = caches.run(CACHE, ours=True)
    assert drawn == [0, 1, 2]
    assert [row.protocol for row in rows.values()] == 2 * ["interleaved, in graphs"]
    assert rows["ours"].ms == pytest.approx(3.0)
    assert rows["ours_free"].ms == pytest.approx(2.0)
    assert "flush" not in caches.clock.log
    assert len(set(read)) == 3
    replayed = read[-6:]
    assert replayed == 2 * replayed[:3]

    caches.written.clear()
    drawn.clear()
    monkeypatch.setattr(timing, "LARGEST_IN_GRAPHS", bytes_read - 1)
    rows = caches.run(CACHE, ours=True)
    assert drawn == [0]
    assert {row.protocol for row in rows.values()} == {"interleaved"}
    assert "flush" in caches.clock.log
    caches.written.clear()
    monkeypatch.setattr(timing, "LARGEST_IN_GRAPHS", bytes_read)
    caches.clock.can_capture = False
    assert {row.protocol for row in caches.run(CACHE, ours=True).values()} == {"interleaved"}


def answer_over_cache(w: Any) -> np.ndarray:
    caches = [cache[w.pages].reshape(2, -1, 2, 64)[:, :130] for cache in (w.k_cache, w.v_cache)]
    return compute_references(w.q, *caches, default_scale(64), causal=True).same_precision


def test_what_cannot_be_captured_has_no_time(caches: Stage, monkeypatch) -> None:
    right = answer_over_cache(caches.make_workload(CACHE, 0))
    calls = []

    def attention(*_: Any, split: str, out: Any, **__: Any) -> None:
        calls.append(split)
        if split == "free" and calls.count("free") > 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        out[:] = right

    def capture(made: Any) -> Callable[[], None]:
        for call in made:
            call()

        def replay() -> None:
            made[0]()
            caches.clock.work("graph", 4.8)

        return replay

    monkeypatch.setattr(caches.clock, "capture", capture)
    monkeypatch.setattr(implementations, "attention_with_cache", attention)
    rows = caches.run(CACHE, ours=True)
    assert rows["ours"].ms == pytest.approx(2.4)
    assert (rows["ours_free"].verdict, rows["ours_free"].ms) == ("error", None)
    assert rows["ours_free"].note == "in a graph: operation not permitted when stream is capturing"


def test_a_graph_that_computes_something_else_has_no_time(caches: Stage, monkeypatch) -> None:
    """Ours writes where it wrote before; a peer's replay leaves what its capture left."""
    right = answer_over_cache(caches.make_workload(CACHE, 0))

    def attention(*_: Any, out: Any, **__: Any) -> None:
        out[:] = right

    class Peer(FakePeer):
        def prepare(self, workload: Any) -> PeerImplementation:
            return PeerImplementation(self.name, lambda: right.copy(), lambda returned: returned)

    def capture(made: Any) -> Callable[[], None]:
        for call in made:
            call()
        return lambda: None  # as of launches on a stream that is not captured

    monkeypatch.setattr(caches.clock, "capture", capture)
    monkeypatch.setattr(implementations, "attention_with_cache", attention)
    monkeypatch.setattr(plan_module, "peers_of", lambda problem, asked: asked)
    rows = caches.run(CACHE, ours=True, peers=(Peer("fa2", caches.clock, 1.0),))
    for name in ("ours", "ours_free", "fa2"):
        assert (rows[name].verdict, rows[name].ms) == ("fail", None)
        assert rows[name].note.startswith("in a graph: NaN or inf differ in")


def test_over_a_cache_the_table_has_microseconds_and_terabytes() -> None:
    problem = Problem.parse("b8 s1:8192 h32:8 d128 bf16 decode")
    rows = [
        replace(row, **problem_columns(problem), ms=ms, tflops=tflops, protocol=protocol)
        for row, ms, tflops, protocol in (
            (ROWS[2], 0.07, 15.34, "interleaved"),
            (ROWS[3], 0.14, 7.67, "interleaved, in graphs"),
            (ROWS[0], None, None, "interleaved"),
        )
    ]
    text = printed(rows)
    heading = next(line for line in text.splitlines() if "implementation" in line)
    assert [word for word in ("us", "TB/s", "TFLOP/s") if word in heading] == [
        "us", "TB/s", "TFLOP/s",
    ]  # fmt: skip
    assert " ms " not in heading
    ours = next(line for line in text.splitlines() if "| ours " in line)
    assert "70.00" in ours
    assert "3.84" in ours  # 268.4 MB of cache, and 0.1 of the rest
    assert "timed interleaved or interleaved, in graphs;" in text
    assert "cycle through 240 MB of caches" in text
    assert summary(problem, rows) == f"  {problem}: ours 3.84 TB/s, cudnn 1.92 TB/s"
    # Attention's stays as it was.
    assert "TB/s" not in printed(ROWS)


@pytest.mark.gpu
@pytest.mark.torch
def test_on_a_gpu_caches_are_timed_in_graphs_and_in_turns() -> None:
    """4 MB of cache, dense and in pages, and 42 MB."""
    texts = (
        "b1 s1:1024 h32:8 d128 bf16 decode",
        "b1 s1:1024 h32:8 d128 bf16 decode page16",
        "b1 s1:10240 h32:8 d128 bf16 decode",
    )
    rows = run_bench(
        BenchPlan(tuple(map(Problem.parse, texts)), ours=True, peers=get_peers("fa2,cudnn")),
        query_gpu(0),
        clock=CudaEvents(),
        reporter=ProgressReporter(quiet=True),
    )
    assert {row.verdict for row in rows if row.kind == "ours"} == {"pass"}, rows
    for row in rows:
        assert row.ms or row.verdict == "absent", row.note
        assert row.protocol.endswith("in graphs") == (row.seq_k == 1024)


def test_a_wrong_answer_over_a_cache_is_not_timed(caches: Stage, monkeypatch) -> None:
    def attention(q: Any, k: Any, v: Any, *, split: str, out: Any, **_: Any) -> None:
        if split == "free":
            out[:] = 0.0

    monkeypatch.setattr(implementations, "attention_with_cache", attention)
    rows = caches.run(CACHE, ours=True)
    assert [row.verdict for row in rows.values()] == ["fail", "fail"]
    assert all(row.ms is None for row in rows.values())
