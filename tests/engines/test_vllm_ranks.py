"""Decode context parallelism: a request's keys are distributed over the caches of two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.envs
from vllm_driver import Layer, prompts
from vllm_ranks import ParallelEngine

from flashsmith.integrations.layer_kernels import merged_sizes
from flashsmith.integrations.vllm import context_parallel
from flashsmith.runtime import libraries

TOLERANCE = 0.02
LAYER = Layer(heads=4, kv_heads=1)


@pytest.mark.parametrize("run", [1, 16], ids=lambda run: f"runs of {run}")
@pytest.mark.parametrize(
    "layer",
    [
        LAYER,
        Layer(heads=4, kv_heads=1, sinks=True, dtype=torch.float16),
        Layer(heads=4, kv_heads=1, d=128, softcap=3.0, layout="HND"),
        Layer(heads=4, kv_heads=1, cache="fp8"),
    ],
    ids=lambda layer: f"d{layer.d} {layer.softcap} {layer.sinks} {layer.cache}",
)
def test_ranks_together_attend_to_all_keys(
    layer: Layer, run: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ParallelEngine(tmp_path, layer, 48, run, monkeypatch)
    built: list[Any] = []
    monkeypatch.setattr(type(libraries.loaded_kernels), "_build", lambda _, key: built.append(key))
    for number, prompt in enumerate(prompts(3, 5, 40, 50)):
        engine.add(f"request {number}", prompt, 5)
    checked = engine.run()
    assert checked.mixed > 2
    assert checked.prefix_hits > 0
    assert checked.largest_error < TOLERANCE
    assert built == []


def test_preempted_requests_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ParallelEngine(tmp_path, LAYER, 8, 1, monkeypatch)
    for number, prompt in enumerate(prompts(3, 6, 0, 50)):
        engine.add(f"request {number}", prompt, 30)
    checked = engine.run()
    assert checked.preempted > 0
    assert checked.largest_error < TOLERANCE


def test_a_row_has_the_same_bits_in_any_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode steps alone and in a batch, after the same chunks of the same prompt."""
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True)
    given = [*prompts(3, 3, 0, 14)]
    outputs = []
    for batches in ([given], [[prompt] for prompt in given]):
        found: list[Any] = []
        for batch in batches:
            engine = ParallelEngine(tmp_path, LAYER, 48, 1, monkeypatch)
            for number, prompt in enumerate(batch):
                engine.add(f"request {number}", prompt, 4)
            found += [it for _, it in sorted(engine.run().outputs.items())]
        outputs.append(found)
    together, apart = outputs
    rows = [(one[at], other[at]) for one, other in zip(together, apart, strict=True) for at in one]
    assert len(rows) > 15
    assert all(torch.equal(one, other) for one, other in rows)


def test_a_wrong_count_of_local_keys_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ParallelEngine(tmp_path, LAYER, 48, 1, monkeypatch)
    count = context_parallel.get_dcp_local_seq_lens
    monkeypatch.setattr(
        context_parallel, "get_dcp_local_seq_lens", lambda *given: (count(*given) - 1).clamp(min=0)
    )
    engine.add("request", [*range(60)], 3)
    assert engine.run().largest_error > TOLERANCE


@pytest.mark.parametrize(("d", "pieces"), [(64, 1), (256, 1), (264, 3), (512, 2)])
def test_heads_wider_than_a_merge_kernel_are_merged_in_pieces(d: int, pieces: int) -> None:
    assert merged_sizes(4, d) == (4 * pieces, d // pieces)
    generator = torch.Generator().manual_seed(d)
    outputs = [torch.randn(9, 4, d, generator=generator).bfloat16() for _ in range(2)]
    lses = [torch.randn(4, 9, generator=generator) for _ in range(2)]
    weights = torch.stack(lses).double().softmax(0).transpose(1, 2)
    expected = (torch.stack(outputs).double() * weights[..., None]).sum(0)
    found = context_parallel._merge(outputs, lses)
    assert (found.double() - expected).abs().max() < 0.02


def test_windows_over_several_ranks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer(heads=4, kv_heads=1, window=20)
    with pytest.raises(NotImplementedError, match=r"a window.* decode_context_parallel_size to 1"):
        ParallelEngine(tmp_path, layer, 48, 1, monkeypatch)
