"""A call like the latest one of its group is found without a signature; any other call is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

from flashsmith.parallel import calls  # noqa: E402
from flashsmith.parallel.call_options import CallOptions  # noqa: E402
from flashsmith.parallel.group_call import GroupResults, GroupSchedule  # noqa: E402


class Handle:
    """A process group, as far as it is looked up by."""


def tensors(rows: int = 16, dtype: Any = torch.float16) -> list[Any]:
    return [torch.zeros(1, rows, heads, 64, dtype=dtype) for heads in (4, 2, 2)]


def group() -> Any:
    return SimpleNamespace(handle=Handle())


def test_a_call_like_the_latest_is_found_and_no_other() -> None:
    members, asked, agreed = group(), CallOptions(causal=True, softcap=2.5), object()

    def found(given: list[Any], options: CallOptions = asked, of: Any = members) -> Any:
        return calls._latest_like(of, *given, options)

    assert found(tensors()) is None
    calls._remember_latest(members, *tensors(), asked, agreed)  # type: ignore[arg-type]
    assert found(tensors()) is agreed
    assert found(tensors(), CallOptions(**asked._asdict())) is agreed
    assert found(tensors(), of=group()) is None
    for changed in ({"causal": 1}, {"softcap": 3.5}, {"window": (3, 0)}, {"emulate": True}):
        assert found(tensors(), asked._replace(**changed)) is None
    assert found(tensors(24)) is None
    assert found(tensors(dtype=torch.bfloat16)) is None
    q, k, v = tensors()
    assert found([q.transpose(1, 2).contiguous().transpose(1, 2), k, v]) is None
    assert found([q.numpy(), k, v]) is None
    assert found([q, k, v.requires_grad_()]) is None
    with torch.no_grad():
        assert found(tensors()) is None
    with torch.autocast("cpu"):
        assert found(tensors()) is None
    torch.use_deterministic_algorithms(True)
    try:
        assert found(tensors()) is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert found(tensors()) is agreed


def test_calls_that_depend_on_more_are_not_remembered() -> None:
    members, sinks = group(), CallOptions(sinks=torch.zeros(4))
    calls._remember_latest(members, *tensors(), sinks, object())  # type: ignore[arg-type]
    assert calls._latest_like(members, *tensors(), sinks) is None
    with torch.autocast("cpu"):
        calls._remember_latest(members, *tensors(), CallOptions(), object())  # type: ignore[arg-type]
        assert calls._latest_like(members, *tensors(), CallOptions()) is None


def test_a_schedule_gets_tensors_whose_views_need_no_gradient() -> None:
    """Or else no call of attention() in it is found as one like the latest."""
    seen: list[bool] = []

    def forward(call: Any, q: Any, k: Any, v: Any, sinks: Any) -> Any:
        seen.extend(it.requires_grad for it in (*q.chunk(2, 1), k, v, sinks))
        return GroupResults(2 * q, None, None, (q, k, v))

    def backward(call: Any, saved: Any, do: Any, dlse: Any, needs: Any) -> Any:
        return 2 * do, *(torch.zeros_like(it) for it in saved[1:]), None

    schedule, call = GroupSchedule(forward, backward), SimpleNamespace(return_lse=False)
    q, k, v = (it.requires_grad_() for it in tensors())
    sinks = torch.zeros(4, requires_grad=True)
    for change in (False, True):
        o, _, _ = calls._apply(q, k, v, sinks, schedule, call)
        if not change:
            o.sum().backward()
            continue
        with torch.no_grad():
            k.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()
    assert seen == [False] * 10
    assert q.grad.unique().tolist() == [2]
