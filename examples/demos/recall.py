"""The training demo: a small transformer learns associative recall, once with PyTorch's attention
and once with flashsmith's.

A line of the data lists pairs of a key and a value in random order, and then queries the value of
each key. Values are drawn for each line separately, so that they can be found only by attention to
the first half of the line.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from flashsmith.builder import Progress
from flashsmith.chooser import build_for
from flashsmith.errors import ArgumentError, DependencyError, install_extra
from flashsmith.families import DType, Problem, Semantics, device_spec
from flashsmith.runtime import DEFAULT_EMULATED_ARCH, gpu_count, query_gpu
from flashsmith.runtime.launch_counter import count_launches

# attention(q, k, v) -> o, causal; all tensors are (batch, length, heads, d).
Attention = Callable[[Any, Any, Any], Any]

# In these first steps, losses differ only by rounding. Later, training amplifies the difference.
FIRST_STEPS = 10
MOST_DIFFERENCE = 0.01
LAST_STEPS = 10
# Limits at the end of training: how far the loss may be above PyTorch's (in nats), and which share
# of the answers must be right.
MOST_EXCESS = 0.05
LEAST_ACCURACY = 0.99


@dataclass(frozen=True)
class Recall:
    """The sizes of the model and its data. A line of the data has 4 * pairs tokens."""

    pairs: int
    symbols: int  # number of different keys, and of different values
    batch: int
    layers: int
    heads: int
    heads_k: int
    d: int
    rate: float
    steps: int

    @property
    def length(self) -> int:
        """The number of tokens in a line."""
        return 4 * self.pairs

    @property
    def problem(self) -> Problem:
        """The problem that the attention of a layer is."""
        length = self.length
        sizes = self.batch, length, length, self.heads, self.heads_k, self.d
        return Problem(*sizes, DType.BF16, Semantics("causal"))


ON_A_GPU = Recall(128, 128, 32, layers=2, heads=4, heads_k=2, d=64, rate=2e-3, steps=300)
# A few steps only show that the gradients are right: with this rate, a missing gradient would
# change the loss by more than MOST_DIFFERENCE.
EMULATED = Recall(8, 16, 2, layers=2, heads=2, heads_k=1, d=32, rate=3e-2, steps=5)


@dataclass(frozen=True)
class Training:
    """One training: the loss of each step in nats, the accuracy in the last steps, and the median
    seconds of a step (the first steps are left out)."""

    losses: tuple[float, ...]
    accuracy: float
    seconds: float


@dataclass(frozen=True)
class RecallReport:
    """What the demo has found."""

    sizes: Recall
    device: str
    backend: str  # "gpu" or "emulator"
    parameters: int
    launches: int
    pytorch: Training
    flashsmith: Training

    @property
    def first_difference(self) -> float:
        """The largest difference between losses in the first steps; NaN if a loss is NaN."""
        return self._largest_difference(FIRST_STEPS)

    @property
    def largest_difference(self) -> float:
        """The largest difference between losses in all steps."""
        return self._largest_difference(self.sizes.steps)

    @property
    def excess(self) -> float:
        """flashsmith's loss minus PyTorch's, each a mean over the last steps."""
        ours, theirs = (
            statistics.fmean(run.losses[-LAST_STEPS:]) for run in (self.flashsmith, self.pytorch)
        )
        return ours - theirs

    @property
    def is_judged_by_its_end(self) -> bool:
        """Whether the training is long enough to judge it by its loss and accuracy at the end."""
        return self.backend == "gpu" and self.sizes.steps >= ON_A_GPU.steps

    @property
    def least_launches(self) -> int:
        """How many launches there must be at least: one for the forward pass of a layer, two for
        its backward pass."""
        return 3 * self.sizes.layers * self.sizes.steps

    @property
    def ok(self) -> bool:
        """Whether the demo has passed.

        flashsmith must have computed all attention, forward and backward. The first losses must
        agree with PyTorch's; after a full training, so must the last ones.
        """
        ends_well = (
            self.excess <= MOST_EXCESS and self.flashsmith.accuracy >= LEAST_ACCURACY
        ) or not self.is_judged_by_its_end
        return (
            self.launches >= self.least_launches
            and self.first_difference <= MOST_DIFFERENCE
            and ends_well
        )

    def to_json(self) -> dict[str, Any]:
        """The results as a JSON object."""
        differences = "first_difference", "largest_difference", "excess", "ok"
        return {**asdict(self), **{name: getattr(self, name) for name in differences}}

    def _largest_difference(self, steps: int) -> float:
        runs = self.flashsmith.losses[:steps], self.pytorch.losses[:steps]
        found = [abs(ours - theirs) for ours, theirs in zip(*runs, strict=True)]
        # max() would ignore a NaN that is not the first value.
        return math.nan if any(map(math.isnan, found)) else max(found)


def check_dependencies() -> None:
    """Raises DependencyError unless torch is installed."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise DependencyError(
            f"the demo needs torch, not installed here; {install_extra('models')}"
        )


def train_twice(
    *, steps: int | None = None, emulate: bool = False, progress: Progress | None = None
) -> RecallReport:
    """Trains the same model on the same data, with PyTorch's attention and with flashsmith's.

    It runs on the first GPU. Without a GPU, or with ``emulate``, it trains a tiny model on the
    host, with flashsmith's attention in the emulator. Attention is computed in bf16, and everything
    else in float32. Kernels are built first; ``progress`` is called with each event of the build.

    Args:
        steps: how many steps each training has; None: 300 on a GPU, 5 in the emulator.

    Raises:
        ArgumentError: steps is below 1.
        DependencyError: PyTorch is missing.
    """
    if steps is not None and steps < 1:
        raise ArgumentError(f"steps={steps!r}: give a whole number above 0")
    check_dependencies()
    import torch

    import flashsmith

    on_gpu = gpu_count() > 0 and not emulate
    sizes = ON_A_GPU if on_gpu else EMULATED
    if steps is not None:
        sizes = replace(sizes, steps=steps)
    device = "cuda:0" if on_gpu else "cpu"
    spec = query_gpu(0) if on_gpu else device_spec(DEFAULT_EMULATED_ARCH)
    for operation in ("forward", "backward"):
        build_for(replace(sizes.problem, operation=operation), device=spec, progress=progress)
    pytorch, _ = train(sizes, pytorchs_attention, device)
    with count_launches() as launches:
        ours = partial(flashsmith.attention, causal=True, emulate=not on_gpu)
        trained, parameters = train(sizes, ours, device)
    return RecallReport(
        sizes=sizes,
        device=torch.cuda.get_device_name(device) if on_gpu else "the host",
        backend="gpu" if on_gpu else "emulator",
        parameters=parameters,
        launches=launches.total,
        pytorch=pytorch,
        flashsmith=trained,
    )


def pytorchs_attention(q: Any, k: Any, v: Any) -> Any:
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def train(sizes: Recall, attention: Attention, device: str = "cpu") -> tuple[Training, int]:
    """Trains a model. Returns the training and the number of parameters.

    The first weights and the data are the same in every call.
    """
    training, model = train_model(sizes, attention, device)
    return training, sum(weight.numel() for weight in model.parameters())


def train_model(sizes: Recall, attention: Attention, device: str = "cpu") -> tuple[Training, Any]:
    """The same as train(), but returns the training and the model."""
    import torch

    random = torch.Generator().manual_seed(1)
    model = new_model(sizes, attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=sizes.rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_share_of_rate, sizes.steps))
    losses, right, seconds = [], [], []
    for _ in range(sizes.steps):
        tokens, answers = (tensor.to(device) for tensor in lines_of(sizes, random))
        start = time.perf_counter()
        # In the second half, every second token queries a value.
        logits = model(tokens)[:, 2 * sizes.pairs :: 2]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        right.append((logits.argmax(-1) == answers).float().mean().item())
    training = Training(
        tuple(losses),
        statistics.fmean(right[-LAST_STEPS:]),
        statistics.median(seconds[FIRST_STEPS:] or seconds[-1:]),
    )
    return training, model


def _share_of_rate(steps: int, step: int) -> float:
    """A warm-up of 20 steps, then a cosine decay to 0.

    The last steps are small, so that the ends of two trainings can be compared.
    """
    return min(1.0, (step + 1) / 20) * (1 + math.cos(math.pi * step / steps)) / 2


def lines_of(sizes: Recall, random: Any) -> Iterator[Any]:
    """Yields batches of lines, each with the values that its lines query."""
    import torch

    shape = sizes.batch, sizes.pairs
    known = torch.rand(sizes.batch, sizes.symbols, generator=random).argsort(1)
    # A line has at least two different keys and at most as many as pairs; learning with few keys
    # helps with many.
    most = torch.randint(1, sizes.pairs.bit_length(), (sizes.batch, 1), generator=random)
    which = (torch.rand(shape, generator=random) * 2**most).long()
    keys = known.gather(1, which)
    values = sizes.symbols + torch.randint(sizes.symbols, shape, generator=random).gather(1, which)
    order = torch.rand(shape, generator=random).argsort(1)
    asked, answers = keys.gather(1, order), values.gather(1, order)
    halves = [torch.stack(pair, 2).flatten(1) for pair in ((keys, values), (asked, answers))]
    yield torch.cat(halves, 1)
    yield answers


def new_model(sizes: Recall, attention: Attention) -> Any:
    """A decoder with grouped heads.

    Its classes are defined here, because torch is imported only when needed.
    """
    import torch
    from torch import nn

    width, heads = sizes.heads * sizes.d, (sizes.heads, sizes.heads_k, sizes.heads_k)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
            self.qkv = nn.Linear(width, sum(heads) * sizes.d, bias=False)
            self.output = nn.Linear(width, width, bias=False)
            self.mlp = nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )

        def forward(self, x: Any) -> Any:
            qkv = self.qkv(self.norms[0](x)).bfloat16().unflatten(2, (-1, sizes.d))
            x = x + self.output(attention(*qkv.split(heads, 2)).flatten(2).to(x.dtype))
            return x + self.mlp(self.norms[1](x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(2 * sizes.symbols, width)
            # The input for a token includes the token before it, so that a value has its key.
            # Otherwise a layer would have to learn this, which takes about ten times as many steps.
            self.before = nn.Linear(width, width, bias=False)
            self.layers = nn.Sequential(*(Layer() for _ in range(sizes.layers)))
            self.head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 2 * sizes.symbols))

        def forward(self, tokens: Any) -> Any:
            x = self.embedding(tokens)
            before = nn.functional.pad(self.before(x)[:, :-1], (0, 0, 1, 0))
            return self.head(self.layers(x + before))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Model()
        nn.init.normal_(model.embedding.weight, std=0.02)
    return model
