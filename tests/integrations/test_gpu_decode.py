"""attention_with_cache() on a GPU: graphs replayed with other lengths and tables, compiled steps,
CuPy's and JAX's arrays, both promises on bits, and what a bad length or table may do."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.torch]

from cuda_graphs import captured  # noqa: E402

import flashsmith  # noqa: E402

# JAX would take three quarters of the GPU's memory, which other tests need, too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

DEVICE = "cuda"
HEADS, HEADS_K, D, PAGE = 8, 2, 64, 16
LENS, CAPACITY = (700, 0, 33, 256), 720
BF16 = torch.bfloat16


def normal(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(BF16).to(DEVICE)


def int32(*numbers: Any) -> Any:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def dense(queries: int = 1, seed: int = 0, lens: tuple[int, ...] = LENS) -> dict[str, Any]:
    """A call whose caches are NaN behind the lengths and one row for each query."""
    caches = {}
    for which, name in enumerate(("k_cache", "v_cache")):
        cache = normal(len(lens), CAPACITY, HEADS_K, D, seed=seed + 1 + which)
        for line, length in zip(cache, lens, strict=True):
            line[length:] = float("nan")
        caches[name] = cache
    new = {name: normal(len(lens), queries, HEADS_K, D, seed=seed + 3 + i)
           for i, name in enumerate("kv")}  # fmt: skip
    q = normal(len(lens), queries, HEADS, D, seed=seed)
    return {"q": q, **caches, "cache_lens": int32(*lens), **new}


def paged(call: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """The same in shuffled pages, with room for what is appended; unused entries are -1."""
    lens = [n + call["k"].shape[1] for n in call["cache_lens"].tolist()]
    used, most = [-(-n // PAGE) for n in lens], CAPACITY // PAGE
    free = np.random.default_rng(seed).permutation(len(lens) * most + 2).tolist()
    table = torch.full((len(lens), most), -1, dtype=torch.int32)
    caches = {}
    for line, count in zip(table, used, strict=True):
        line[:count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
    for name in ("k_cache", "v_cache"):
        pages = torch.full((len(lens) * most + 2, PAGE, HEADS_K, D), float("nan"), dtype=BF16)
        for line, row, count in zip(table, call[name].cpu(), used, strict=True):
            pages[line[:count].long()] = row[: count * PAGE].view(count, PAGE, HEADS_K, D)
        caches[name] = pages.to(DEVICE)
    return {**call, **caches, "page_table": table.to(DEVICE)}


def packed(call: dict[str, Any], queries: tuple[int, ...]) -> dict[str, Any]:
    """Of each sequence the first queries."""
    rows = [(i, slice(0, n)) for i, n in enumerate(queries)]
    cut = {name: torch.cat([call[name][at] for at in rows]) for name in ("q", "k", "v")}
    offsets = int32(*np.cumsum([0, *queries]).tolist())
    return {**call, **cut, "cu_seqlens_q": offsets, "max_seqlen_q": max(queries)}


def copied(call: dict[str, Any]) -> dict[str, Any]:
    return {name: it.clone() if hasattr(it, "clone") else it for name, it in call.items()}


def run(call: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    found: tuple[Any, Any] = flashsmith.attention_with_cache(**call, return_lse=True, **options)
    return found


def assert_same(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu(), other.cpu())


def expected_of(call: dict[str, Any]) -> Any:
    """o of a dense call in float64, after appending."""
    rows = []
    for i, length in enumerate(call["cache_lens"].tolist()):
        q, k, v = (call[name][i].double().cpu() for name in ("q", "k_cache", "v_cache"))
        k, v = (torch.cat([cache[:length], call[name][i].double().cpu()])
                for cache, name in ((k, "k"), (v, "v")))  # fmt: skip
        k, v = (it.repeat_interleave(HEADS // HEADS_K, 1) for it in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * D**-0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + length)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        rows.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.stack(rows)


@pytest.mark.parametrize("queries", [1, 5, 40])
def test_rows_are_right_whatever_lies_behind_the_lengths(queries: int) -> None:
    call = dense(queries, lens=(600, 0, 33, 256))
    o, lse = run(copied(call))
    torch.testing.assert_close(o.double().cpu(), expected_of(call), atol=1.6e-2, rtol=1.6e-2)
    assert torch.isfinite(lse).all()


@pytest.mark.parametrize("queries", [1, 40])
def test_pages_and_neighbours_leave_every_bit(queries: int) -> None:
    """Of chunks of a prompt, too: 40 queries of a group of 4 are more than half a tile."""
    call = dense(queries, lens=(600, 0, 33, 256))
    expected = run(copied(call))
    assert_same(run(paged(call)), expected)
    assert_same(run(paged(call, seed=1)), expected)
    order = [2, 0, 0, 3]
    again = {name: it[order] for name, it in call.items()}
    assert_same(run(again), (it[order] for it in expected))
    for i in range(4):
        alone = run({name: it[i : i + 1].clone() for name, it in call.items()})
        assert_same(alone, (it[i : i + 1] for it in expected))


def test_tokens_beside_chunks_have_the_bits_of_calls_of_their_own() -> None:
    call = dense(40, lens=(600, 0, 33, 256))
    counts = (1, 40, 17, 16)
    o, lse = run(packed(copied(call), counts))
    o_paged, lse_paged = run(packed(paged(call), counts))
    assert_same((o_paged, lse_paged), (o, lse))
    first = 0
    for i, count in enumerate(counts):
        one = {name: it[i : i + 1].clone() for name, it in call.items()}
        one |= {name: one[name][:, :count].contiguous() for name in ("q", "k", "v")}
        rows = slice(first, first + count)
        assert_same(run(one), (o[None, rows], lse[None, :, rows]))
        first = rows.stop


@pytest.mark.parametrize("queries", [1, 40])
def test_nothing_around_the_output_is_written(queries: int) -> None:
    """Rows of a merge, of chunks, and of a sequence without keys."""
    call = dense(queries, lens=(600, 0, 33, 256))
    expected = run(copied(call))
    amid = torch.full((6, queries + 2, HEADS + 2, D + 8), torch.nan, dtype=BF16, device=DEVICE)
    out = amid[1:-1, 1:-1, 1:-1, :D]
    for one in (copied(call), paged(call)):
        out.fill_(torch.nan)
        assert_same(run({**one, "out": out}), expected)
        assert int(torch.isnan(amid).sum()) == amid.numel() - out.numel()


def test_bad_lengths_and_entries_write_nothing_and_read_the_pool() -> None:
    call = paged(dense())
    before = copied(call)
    pool = call["k_cache"].shape[0]
    for lens, entry in (((-1, -(2**31), CAPACITY, 2**31 - 1), 0), ((16, 16, 16, 16), pool),
                        ((16, 16, 16, 16), -1), ((16, 16, 16, 16), -(2**31))):  # fmt: skip
        call["cache_lens"].copy_(int32(*lens))
        call["page_table"][:, 1:] = entry
        run(call)
        torch.cuda.synchronize()
        for name in ("k_cache", "v_cache"):
            kept, found = (it[name].view(torch.int16) for it in (before, call))
            assert torch.equal(kept, found)


class TestGraphs:
    """FI#187: plans that the host makes of the lengths cannot be replayed with others."""

    def replay(self, static: dict[str, Any], others: list[dict[str, Any]]) -> None:
        graph, output = captured(lambda: run(static))
        for other in others:
            for name, value in other.items():
                if hasattr(value, "clone"):
                    static[name].copy_(value)
            graph.replay()
            eager = copied(other)
            assert_same(output, run(eager))
            for name in ("k_cache", "v_cache"):
                kept, found = (it[name].view(torch.int16) for it in (eager, static))
                assert torch.equal(kept, found)

    @pytest.mark.parametrize("queries", [1, 40])
    def test_lengths_and_tables_may_change_between_replays(self, queries: int) -> None:
        calls = [
            paged(dense(queries, seed=10 * i, lens=lens), seed=i)
            for i, lens in enumerate(((600, 0, 33, 256), (1, 680, 64, 0), (0, 0, 0, 0)))
        ]
        self.replay(copied(calls[0]), calls)
        self.replay(copied(calls[2]), calls)

    def test_chunks_and_tokens_may_change_places_between_replays(self) -> None:
        lens = (600, 0, 33, 256)
        counts = ((1, 40, 17, 16), (40, 1, 0, 33), (18, 18, 19, 19))
        calls = [
            packed(paged(dense(40, seed=10 * i, lens=lens), seed=i), each) | {"max_seqlen_q": 40}
            for i, each in enumerate(counts)
        ]
        self.replay(copied(calls[0]), calls)

    def test_dense_lengths_may_change_between_replays(self) -> None:
        calls = [dense(seed=10 * i, lens=lens) for i, lens in enumerate((LENS, (5, 719, 1, 0)))]
        self.replay(copied(calls[0]), calls)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step_appends_and_returns_what_an_eager_one_does(mode: str) -> None:
    """By inductor, in one graph; reduce-overhead replays it as a CUDA graph."""

    def step(call: dict[str, Any]) -> Any:
        o, lse = run({**call, "q": call["q"] * 2})
        return o + 1, lse

    compiled = torch.compile(step, fullgraph=True, mode=mode)
    one, other = paged(dense()), paged(dense())
    with torch.no_grad():
        for _ in range(4):
            found = tuple(it.clone() for it in compiled(one))
            assert_same(found, step(other))
            for call in (one, other):
                call["cache_lens"] += 1
    for name in ("k_cache", "v_cache"):
        assert torch.equal(one[name].view(torch.int16), other[name].view(torch.int16))
    torch.compiler.reset()


# Lets the launch behind it begin at once, from sm_90 on, and writes lengths and a table at its end.
LATE = r"""
extern "C" __global__ void late(int* lens, const int* new_lens, int n, int* table,
                                const int* new_table, int entries, long long nanoseconds) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - begin < nanoseconds);
    for (int i = threadIdx.x; i < n; i += blockDim.x) lens[i] = new_lens[i];
    for (int i = threadIdx.x; i < entries; i += blockDim.x) table[i] = new_table[i];
}"""


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("lens", [(700,), LENS, (650, 300, 1, 0, 719) * 4])
def test_lengths_that_are_written_after_a_call_has_begun_are_those_that_count(
    lens: tuple[int, ...], pages: bool
) -> None:
    """A launch before that lets the call's begin: what is there by then is other lengths, and the
    numbers of other pages. It lasts long enough for the host to launch the call."""
    cupy = pytest.importorskip("cupy", reason="needs CuPy: it is not installed")
    late = cupy.RawKernel(LATE, "late")
    rng = np.random.default_rng(len(lens))
    for nanoseconds in (0, 20_000, 300_000) * 8:
        call = paged(dense(1, lens=lens)) if pages else dense(1, lens=lens)
        del call["k"], call["v"]
        changed = ["cache_lens"] + ["page_table"] * pages
        right = {name: call[name].clone() for name in changed}
        expected = run(call)
        wrong = rng.integers(0, CAPACITY + 1, len(lens))
        call["cache_lens"].copy_(torch.as_tensor(wrong, dtype=torch.int32))
        if pages:
            call["page_table"].fill_(-1)
        arguments: list[Any] = []
        for name in ("cache_lens", "page_table"):
            to, source = (cupy.from_dlpack(it.get(name, it["cache_lens"])) for it in (call, right))
            arguments += [to, source, to.size if name in changed else 0]
        torch.cuda.synchronize()
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            late((1,), (32,), (*arguments, np.int64(nanoseconds)))
        assert_same(run(call), expected)


def test_cupy_arrays_are_read_and_appended_to() -> None:
    cupy = pytest.importorskip("cupy", reason="needs CuPy: it is not installed")
    call = {name: it.half() if it.dtype is BF16 else it for name, it in paged(dense()).items()}
    lent = {name: cupy.from_dlpack(it.clone()) for name, it in call.items()}
    expected = run(call)
    o, lse = run(lent)
    assert isinstance(o, cupy.ndarray)
    assert np.array_equal(o.get(), expected[0].cpu().numpy())
    assert np.array_equal(lse.get(), expected[1].cpu().numpy())
    for name in ("k_cache", "v_cache"):
        assert lent[name].get().tobytes() == call[name].cpu().numpy().tobytes()


def test_jax_arrays_are_read() -> None:
    jax = pytest.importorskip("jax", reason="needs JAX: it is not installed")
    if not any(device.platform == "gpu" for device in jax.devices()):
        return  # JAX's own build for CPUs
    call = {name: it for name, it in paged(dense()).items() if name not in ("k", "v")}
    lent = {name: jax.dlpack.from_dlpack(it) for name, it in call.items()}
    expected = run(call)
    for found, own in zip(run(lent), expected, strict=True):
        assert np.array_equal(np.asarray(found).view(np.uint8), own.cpu().view(torch.uint8).numpy())
