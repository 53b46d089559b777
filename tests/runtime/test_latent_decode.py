"""attention_with_cache(v_width=): rows of the cache are keys, their first columns values, too."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import flashsmith
from flashsmith.builder import library_for
from flashsmith.errors import ArgumentError
from flashsmith.families import (
    MMA_SYNC_MLA,
    WGMMA_MLA,
    DType,
    Family,
    KernelConfig,
    MmaSyncMlaKernelConfig,
    Problem,
    Semantics,
    WgmmaMlaKernelConfig,
    device_spec,
)
from flashsmith.families.head_dims import HeadPair
from flashsmith.runtime import run_operation
from flashsmith.runtime.emulation import exact_mma
from flashsmith.semantics.cache_format import CacheFormat
from flashsmith.verify import prove
from flashsmith.verify.latent_decode_reference import LatentDecodeReference

SCALE = 192**-0.5
SMALL = WgmmaMlaKernelConfig(DType.BF16, 576, 128, 4, rescale_threshold=8, d_v=512)
FEW_ROWS = MmaSyncMlaKernelConfig(DType.BF16, 576, 32, 2, 128, 4, True, d_v=512)
CONFIGS = pytest.mark.parametrize("config", [SMALL, FEW_ROWS], ids=lambda config: config.FAMILY)
PROOFS: dict[str, tuple[str, dict[str, Any], str]] = {
    "128 heads, split": (
        "b2 s1:600 h128:1 d576:512 bf16 latent_decode causal page64",
        {},
        "random",
    ),
    "tokens and heads across tiles": (
        "b3 s3:260 h24:1 d576:512 bf16 latent_decode causal page16",
        {"append": True, "sinks": True, "lens_k": (260, 3, 129)},
        "random",
    ),
    "dense, of any length": (
        "b3 s2:300 h16:1 d576:512 bf16 latent_decode causal",
        {"capacity": 37, "lens_k": (0, 300, 1)},
        "large_scores",
    ),
    "free split": (
        "b2 s1:650 h16:1 d576:512 bf16 latent_decode causal page64",
        {"split": "free"},
        "nonfinite",
    ),
}


@CONFIGS
@pytest.mark.parametrize("name", PROOFS)
def test_kernels_are_right(name: str, config: KernelConfig) -> None:
    text, options, inputs = PROOFS[name]
    verdict = prove(config, Problem.parse(text), options=options, inputs=inputs, checks=True)
    assert verdict.ok, str(verdict)


@pytest.mark.full
@pytest.mark.parametrize("family", [MMA_SYNC_MLA, WGMMA_MLA], ids=lambda family: family.name)
@pytest.mark.parametrize("d", [320, 576])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("mask", ["", "causal", "window", "causal packed", "window packed"])
def test_every_kind_of_call_is_right(mask: str, dtype: str, d: int, family: Family) -> None:
    for seed, (page, heads, append) in enumerate(((0, 16, False), (64, 96, True), (8, 128, True))):
        text = f"b4 s3:420 h{heads}:1 d{d}:{d - 64} {dtype} latent_decode {mask}"
        problem = Problem.parse(text + (f" page{page}" if page else ""))
        configs = family.proof_configs(problem.dtype, HeadPair(d, d - 64))
        # The third one has another order of work, for which one kind of pages is enough.
        for cfg in configs if page == 64 else configs[:2]:
            verdict = prove(cfg, problem, options={"append": append}, seed=seed, checks=True)
            assert verdict.ok, str(verdict)


def test_inputs_of_measurements_are_judged() -> None:
    problem = Problem.parse("b2 s1:70 h16:1 d576:512 bf16 latent_decode causal page64")
    reference = LatentDecodeReference()
    inputs = reference.draw(problem, "random", 0)
    case = reference.given(problem, inputs, reference.options(problem))
    outputs = dict(run_operation(SMALL, problem, inputs, wanted=["lse"]).outputs)
    assert case.verdict(outputs, SMALL).ok
    outputs["o"] = np.roll(outputs["o"], 1, axis=-1)
    assert not case.verdict(outputs, SMALL).ok


PLAIN = WgmmaMlaKernelConfig(DType.FP16, 320, 128, 4, rescale_threshold=8, d_v=256)
IN_TURN = PLAIN.with_knobs(run_keys=2048)
AHEAD = IN_TURN.with_knobs(panel_waits=True, panels_ahead=3, evict_keys=True)


def bits_of(cfg: KernelConfig, sms: int) -> dict[str, bytes]:
    """The outputs of a call whose tiles have four parts, on a GPU with so many SMs.

    The MMA is exact: otherwise the emulator would sum wgmma between two waits as one product.
    """
    problem = Problem.parse("b1 s1:600 h64:1 d320:256 fp16 latent_decode causal page64")
    inputs = LatentDecodeReference().draw(problem, "random", 0)
    device = replace(device_spec("H200"), sm_count=sms)
    with exact_mma():
        outputs = dict(run_operation(cfg, problem, inputs, wanted=["lse"], arch=device).outputs)
    return {name: outputs[name].tobytes() for name in ("o", "lse")}


def test_parts_in_turn_change_no_bit() -> None:
    """With few SMs a CTA computes all parts of a tile, and with one per part it computes one. Nor
    does the order of the warpgroups' work change a bit."""
    expected = bits_of(PLAIN, 8)
    for cfg, sms in ((IN_TURN, 8), (IN_TURN, 132), (AHEAD, 8), (AHEAD, 132)):
        assert bits_of(cfg, sms) == expected, f"{cfg}, {sms} SMs"


def test_scores_ahead_are_right_without_keys() -> None:
    problem = Problem.parse("b3 s2:300 h40:1 d320:256 fp16 latent_decode causal page64")
    options = {"sinks": True, "lens_k": (0, 300, 1)}
    verdict = prove(AHEAD, problem, options=options, inputs="large_scores", checks=True)
    assert verdict.ok, str(verdict)


@pytest.mark.full
@pytest.mark.parametrize(
    "knobs",
    [{"panel_waits": True}, {"panels_ahead": 1}, {"panels_ahead": 3, "run_keys": 0}],
    ids=str,
)
def test_no_order_of_work_changes_a_bit(knobs: dict[str, Any]) -> None:
    assert bits_of(IN_TURN.with_knobs(**knobs), 8) == bits_of(PLAIN, 8)


def test_the_l2_is_told_to_evict_keys_first() -> None:
    """One copy for each panel of a block, in the only kernel with copies by TMA."""
    for cfg, hints in ((IN_TURN, 0), (AHEAD, 5)):
        library = library_for([cfg], arch=90, semantics=Semantics("causal"))
        text = "".join(path.read_text() for path in (library.path / "ptx").glob("*.ptx"))
        assert text.count(".L2::cache_hint [") == hints


def drawn(batch: int, tokens: int, heads: int, capacity: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, tokens, heads, 576, generator=generator).bfloat16()
    return q, torch.randn(batch, capacity, 1, 576, generator=generator).bfloat16()


def expected(q: Any, rows: Any, scale: float = SCALE) -> tuple[Any, Any]:
    """Causal attention of one sequence's queries over its latent rows, in float64."""
    keys = rows[:, 0].double()
    scores = torch.einsum("shd,kd->shk", q.double(), keys) * scale
    position = torch.arange(len(keys)) - (len(keys) - len(q))
    scores = scores.masked_fill(position > torch.arange(len(q))[:, None, None], -math.inf)
    return scores.softmax(-1) @ keys[:, :512], scores.logsumexp(-1).T


def test_a_call_is_attention_over_the_rows() -> None:
    q, cache = drawn(2, 2, 16, 100)
    lens = torch.tensor([100, 33], dtype=torch.int32)
    out = torch.full((2, 2, 16, 512), math.nan, dtype=torch.bfloat16)
    o, lse = flashsmith.attention_with_cache(
        q, cache, v_width=512, cache_lens=lens, scale=SCALE, out=out, return_lse=True
    )
    assert o.data_ptr() == out.data_ptr()
    for i, length in enumerate(lens.tolist()):
        exact, exact_lse = expected(q[i], cache[i, :length])
        assert (o[i] - exact).abs().max() < 1e-2
        assert (lse[i] - exact_lse).abs().max() < 1e-4


def test_rows_are_appended_and_pages_may_lie_anywhere() -> None:
    """The same bits as from a dense cache that holds the rows already."""
    q, cache = drawn(2, 2, 16, 128)
    new = cache[:, :2].flip(1)
    before = torch.tensor([70, 5], dtype=torch.int32)
    dense = cache.clone()
    for i, length in enumerate(before.tolist()):
        dense[i, length : length + 2] = new[i]
    keywords: dict[str, Any] = {"v_width": 512, "scale": SCALE}
    want = flashsmith.attention_with_cache(q, dense, cache_lens=before + 2, **keywords)
    pages, table = torch.empty(5, 64, 1, 576).bfloat16(), torch.tensor([[3, 0], [4, 1]])
    pages[table] = cache.view(2, 2, 64, 1, 576)
    got = flashsmith.attention_with_cache(
        q, pages, cache_lens=before, page_table=table.int(), k=new, **keywords
    )
    assert torch.equal(got, want)
    assert torch.equal(pages[table].view(2, 128, 1, 576), dense)


@CONFIGS
def test_a_sequence_has_the_same_bits_in_any_batch_and_cache(config: KernelConfig) -> None:
    q, cache = drawn(3, 1, 16, 1200)
    lens = torch.tensor([1030, 40, 1200], dtype=torch.int32)
    keywords: dict[str, Any] = {"v_width": 512, "scale": SCALE, "config": config}
    together = flashsmith.attention_with_cache(q, cache, cache_lens=lens, **keywords)
    for i, length in enumerate(lens.tolist()):
        alone = flashsmith.attention_with_cache(
            q[i : i + 1], cache[i : i + 1, :length], cache_lens=lens[i : i + 1], **keywords
        )
        assert torch.equal(alone[0], together[i])


def test_rows_of_8_bit_floats_are_multiplied_by_their_scale() -> None:
    """Appended ones are divided by it first, and the engine's write of the same rows has the same
    codes."""
    q, rows = drawn(2, 1, 4, 40)
    scale = torch.tensor(0.03)
    codes = (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    new = codes[:, 30:31].clone()
    cache = codes.clone()
    cache[0, 30] = cache[1, 5] = 0
    lens = torch.tensor([30, 5], dtype=torch.int32)
    given = torch.stack((rows[0, 30], rows[1, 30]))[:, None]
    o, lse = flashsmith.attention_with_cache(
        q, cache, v_width=512, cache_lens=lens, k=given, k_scale=scale, scale=SCALE, return_lse=True
    )
    for i, length in enumerate(lens.tolist()):
        assert torch.equal(cache[i, length].view(torch.uint8), new[i, 0].view(torch.uint8))
        dequantised = cache[i, : length + 1].float() * scale
        exact, exact_lse = expected(q[i], dequantised)
        assert (o[i] - exact).abs().max() < 1e-2
        assert (lse[i] - exact_lse).abs().max() < 1e-4


def test_the_ops_of_traced_calls_take_the_scale() -> None:
    from flashsmith.integrations.torch_latent_decode import latent_by_op

    q, rows = drawn(2, 1, 4, 40)
    call: dict[str, Any] = {"v_width": 512, "scale": SCALE}
    call["cache_lens"] = torch.tensor([40, 9], dtype=torch.int32)
    codes = rows.to(torch.float8_e4m3fn)
    found = latent_by_op(q, codes, None, **call, k_scale=0.3)
    scaled = flashsmith.attention_with_cache(q, codes, **call, k_scale=torch.tensor([0.3]))
    assert torch.equal(found, scaled)
    assert not torch.equal(found, latent_by_op(q, codes, None, **call))


def test_only_mma_sync_reads_8_bit_floats() -> None:
    text = "b64 s1:4096 h128:1 d576:512 bf16 latent_decode causal page64"
    plain, choice = (flashsmith.choose(it, "H200") for it in (text, f"{text} cache_e4m3"))
    assert (plain.family, choice.family) == ("wgmma_mla", "mma_sync_mla")
    assert choice.config.family.cache_of(choice.config) == "e4m3"
    assert choice.ms > plain.ms
    assert "caches of q's dtype without scales" in choice.passed_over["wgmma_mla"]
    few = text.replace("h128", "h16")
    plain, choice = (flashsmith.choose(it, "H200") for it in (few, f"{few} cache_e4m3"))
    assert choice.config == plain.config.with_knobs(
        cache=CacheFormat.E4M3, stages=choice.config.stages
    )
    assert choice.config.stages > plain.config.stages
    assert choice.ms < plain.ms
    q, cache = drawn(1, 1, 16, 12)
    with pytest.raises(
        ArgumentError, match="is for a cache that is plain, and this call's is e4m3"
    ):
        flashsmith.attention_with_cache(
            *(q, cache.to(torch.float8_e4m3fn)), v_width=512, scale=SCALE, config=SMALL,
            cache_lens=torch.tensor([12], dtype=torch.int32),
        )  # fmt: skip


def test_numpy_arrays_and_no_queries() -> None:
    q, cache = np.ones((1, 0, 16, 576), np.float16), np.ones((1, 8, 1, 576), np.float16)
    keywords: dict[str, Any] = {"v_width": 512, "scale": SCALE}
    o = flashsmith.attention_with_cache(q, cache, cache_lens=np.array([8], np.int32), **keywords)
    assert o.shape == (1, 0, 16, 512)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"v_width": 511}, "v_width=511: kernels .* exist for 320 with v_width=256 and 576 with"),
        ({"scale": None}, "scale: missing; give 1/sqrt of the d of a head before"),
        ({"v_cache": torch.zeros(2, 64, 1, 576).bfloat16()}, "v_cache: given, and v_width, too"),
        ({"softcap": 3.0}, r"softcap=3.0: attention over a latent cache \(v_width\) has no"),
        ({"v_scale": 0.5}, "v_scale: a row of a latent cache is key and value, .* k_scale"),
        ({"k_scale": 0.0}, "k_scale=0.0: give a finite number above 0"),
        ({"k_scale": 1e38}, r"k_scale=1e\+38: times scale it is"),
        ({"k_scale": torch.ones(2)}, r"k_scale: shape \(2,\); must be \(\), \(1,\) or \(1,\)"),
        ({"bias": torch.zeros(3, 1, 64)}, r"bias: shape \(3, 1, 64\); the scores of"),
        ({"bits": "canonical"}, "bits='canonical': attention over a latent cache"),
        ({"cos": torch.zeros(9, 32), "sin": torch.zeros(9, 32)}, "cos: attention over a latent"),
        ({"kv_offset": torch.zeros(2, dtype=torch.int32)}, "kv_offset: attention over a latent"),
        ({"k_cache": torch.zeros(2, 64, 2, 576).bfloat16()}, r"k_cache: shape \(2, 64, 2, 576\)"),
        ({"q": torch.zeros(2, 1, 16, 512).bfloat16()}, "q: d_head 512; kernels over a latent"),
        ({"k": torch.zeros(2, 1, 16, 576).bfloat16()}, r"k: shape .* must be \(2, 1, 1, 576\)"),
        ({"out": torch.zeros(2, 1, 16, 576).bfloat16()}, r"out: shape \(2, 1, 16, 576\); must be"),
        ({"k_cache": torch.zeros(2, 64, 1, 576).half()}, "k_cache: dtype torch.float16"),
        ({"split": "none"}, "split='none': give"),
        ({"v_width": None}, "v_cache: missing"),
    ],
)
def test_unusable_arguments_are_refused(change: dict[str, Any], words: str) -> None:
    q, cache = drawn(2, 1, 16, 64)
    call = {"q": q, "k_cache": cache, "v_width": 512, "scale": SCALE}
    call["cache_lens"] = torch.tensor([64, 1], dtype=torch.int32)
    with pytest.raises(ArgumentError, match=words):
        flashsmith.attention_with_cache(**(call | change))


def test_only_kernels_without_tma_take_pages_of_any_size() -> None:
    q, cache = drawn(1, 1, 16, 12)
    keywords: dict[str, Any] = {"v_width": 512, "scale": SCALE}
    keywords["cache_lens"] = torch.tensor([12], dtype=torch.int32)
    pages, table = cache.view(2, 6, 1, 576).flip(0), torch.tensor([[1, 0]], dtype=torch.int32)
    found = flashsmith.attention_with_cache(q, pages, page_table=table, config=FEW_ROWS, **keywords)
    assert torch.equal(
        found, flashsmith.attention_with_cache(q, cache, config=FEW_ROWS, **keywords)
    )
    with pytest.raises(ArgumentError, match=r"page_table: pages of 6 keys; .* multiples of 8"):
        flashsmith.attention_with_cache(q, pages, page_table=table, config=SMALL, **keywords)


@pytest.mark.parametrize(
    ("heads", "gpu", "family"),
    [
        (8, "H200", "mma_sync_mla"),
        (16, "H200", "mma_sync_mla"),
        (64, "H200", "wgmma_mla"),
        (128, "H200", "wgmma_mla"),
        (128, "A100", "mma_sync_mla"),
        (16, "L40S", "mma_sync_mla"),
        (128, "B200", "mma_sync_mla"),
    ],
)
def test_few_heads_and_other_gpus_have_tiles_of_16_rows(heads: int, gpu: str, family: str) -> None:
    text = f"b64 s1:4096 h{heads}:1 d576:512 bf16 latent_decode causal page64"
    choice = flashsmith.choose(text, gpu)
    assert (choice.family, choice.evidence) == (family, "cost model")
    alone = flashsmith.choose(text.replace("b64", "b1").replace("page64", ""), gpu)
    assert alone.config == choice.config
