"""Packed sequences, sinks and views on a GPU, where the host does not read offsets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashsmith.errors import ArgumentError
from flashsmith.families import parse_kernel_name_into_config
from flashsmith.runtime import forward, forward_timed, run_forward
from flashsmith.runtime.frameworks.device_array import DeviceArray
from flashsmith.verify import compare, compute_references

pytestmark = pytest.mark.gpu

CFG = parse_kernel_name_into_config(
    "(FP16, 64, 64, 32, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax"
)
LENS = (5, 0, 70, 200, 1), (7, 9, 0, 130, 640)
SINKS = np.array([-1.0, 0.0, 1.0, 4.0], np.float32)
RNG = np.random.default_rng(3)


def drawn() -> list[np.ndarray]:
    shapes = [(sum(LENS[0]), 4, 64), (sum(LENS[1]), 2, 64), (sum(LENS[1]), 2, 64)]
    return [RNG.standard_normal(shape).astype(np.float16) for shape in shapes]


def offsets(lengths: tuple[int, ...]) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(np.int32)


def assert_right(
    o: np.ndarray, lse: np.ndarray, row_max: np.ndarray, qkv: list[np.ndarray]
) -> None:
    options: dict[str, Any] = {"causal": True, "sinks": SINKS}
    references = compute_references(*qkv, 0.125, lens_q=LENS[0], lens_k=LENS[1], **options)
    checked = compare(CFG, o, lse, references, row_max=row_max, lens_q=LENS[0])
    assert checked.ok, (checked.reasons, str(checked.first_mismatch))


ASKED = {"causal": True, "return_lse": True, "return_row_max": True}


@pytest.mark.parametrize("limits", [{}, {"max_seqlen_q": 200, "max_seqlen_k": 1 << 40}], ids=str)
def test_packed_sequences_without_a_framework(limits: dict[str, int]) -> None:
    """A limit that is missing is read from the device."""
    qkv = drawn()
    on_gpu = [DeviceArray.from_host(array) for array in qkv]
    packed = {
        "cu_seqlens_q": DeviceArray.from_host(offsets(LENS[0])),
        "cu_seqlens_k": DeviceArray.from_host(offsets(LENS[1])),
        "sinks": DeviceArray.from_host(SINKS),
    }
    result = run_forward(CFG, *on_gpu, **packed, **limits, **ASKED, poisoned=True)
    assert_right(result.o.to_host(), result.lse.to_host(), result.row_max.to_host(), qkv)


@pytest.mark.torch
class TestTorch:
    @staticmethod
    def packed() -> dict[str, Any]:
        import torch

        names = {"cu_seqlens_q": offsets(LENS[0]), "cu_seqlens_k": offsets(LENS[1])}
        return {name: torch.from_numpy(array).cuda() for name, array in names.items()}

    def test_packed_sequences(self) -> None:
        import torch

        qkv = drawn()
        tensors = [torch.from_numpy(array).cuda() for array in qkv]
        sinks = torch.from_numpy(SINKS).cuda()
        outputs = forward(CFG, *tensors, **self.packed(), **ASKED, sinks=sinks)
        o, lse, row_max = (output.cpu().numpy() for output in outputs)
        assert_right(o, lse, row_max, qkv)
        (again, *_), ms = forward_timed(CFG, *tensors, **self.packed(), **ASKED, sinks=sinks)
        assert torch.equal(again, outputs[0])
        assert ms is not None
        assert ms > 0

    def test_offsets_that_lie_damage_nothing(self) -> None:
        """q, k, v and o lie within larger tensors, whose other rows stay as they are."""
        import torch

        tensors = [torch.from_numpy(array).cuda() for array in drawn()]
        surroundings = torch.zeros(3 * tensors[0].shape[0], 4, 64, dtype=torch.half, device="cuda")
        rows = tensors[0].shape[0]
        o = surroundings[rows : 2 * rows]
        for wrong in ([-(2**31), 2**31 - 1, 5], [2**31 - 1, 0, -1], [300, 200, 10**9]):
            lies = torch.tensor(wrong, dtype=torch.int32, device="cuda")
            limits = {"max_seqlen_q": 10**9, "max_seqlen_k": 10**9}
            forward(CFG, *tensors, o, cu_seqlens_q=lies, cu_seqlens_k=lies, **limits)
        torch.cuda.synchronize()
        assert not surroundings[:rows].any()
        assert not surroundings[2 * rows :].any()

    def test_one_wait_for_both_limits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        tensors = [torch.from_numpy(array).cuda() for array in drawn()]
        packed = self.packed()
        expected = forward(CFG, *tensors, **packed, max_seqlen_q=200, max_seqlen_k=640)
        copies: list[Any] = []
        tolist = torch.Tensor.tolist

        def counted(tensor: Any) -> Any:
            copies.append(tensor)
            return tolist(tensor)

        monkeypatch.setattr(torch.Tensor, "tolist", counted)
        torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(forward(CFG, *tensors, **packed), expected)
        assert len(copies) == 1
        torch.cuda.set_sync_debug_mode("error")  # a call that waits would raise now
        try:
            limits = {"max_seqlen_q": 200, "max_seqlen_k": 640}
            found = forward(CFG, *tensors, **packed, **limits)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(found, expected)

    def test_views_of_other_layouts(self) -> None:
        """(batch, heads, seq, d) memory for q, one head of k and v for all."""
        import torch

        q = torch.randn(2, 4, 100, 64, device="cuda", dtype=torch.half).transpose(1, 2)
        k, v = torch.randn(2, 2, 130, 1, 64, device="cuda", dtype=torch.half)
        wide = [tensor.expand(2, 130, 4, 64) for tensor in (k, v)]
        expected = forward(CFG, q.contiguous(), *(tensor.contiguous() for tensor in wide))
        assert torch.equal(forward(CFG, q, *wide), expected)
        assert torch.equal(forward(CFG, q, k, v), expected)  # as grouped heads

    def test_nothing_to_compute(self) -> None:
        import torch

        empty = torch.empty(2, 0, 4, 64, device="cuda", dtype=torch.half)
        kv = torch.ones(2, 8, 4, 64, device="cuda", dtype=torch.half)
        (o, lse), ms = forward_timed(CFG, empty, kv, kv, return_lse=True)
        assert (o.shape, lse.shape, ms) == (empty.shape, (2, 4, 0), 0.0)
        no_keys = forward(CFG, kv, empty, empty, return_lse=True)
        assert not no_keys[0].any()
        assert (no_keys[1] == -torch.inf).all()

    def test_gradients_are_refused(self) -> None:
        import torch

        q = torch.ones(1, 64, 1, 64, device="cuda", dtype=torch.half, requires_grad=True)
        with pytest.raises(ArgumentError, match="q: requires grad"):
            forward(CFG, q, q, q)
        with torch.no_grad():
            assert torch.equal(forward(CFG, q, q, q), torch.ones_like(q))
