"""The generation demo: a small language model answers questions from a paged KV cache.

Its answers must be the same tokens as with PyTorch's attention. The model was trained for
associative recall (train_recall.py). A sequence lists pairs of a key and a value, and then queries
the values of some keys. The model generates each answer, and then the next question is appended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flashsmith.builder import Progress
from flashsmith.chooser import build_for
from flashsmith.families import DType, Problem, Semantics, device_spec
from flashsmith.runtime import DEFAULT_EMULATED_ARCH, gpu_count, query_gpu
from flashsmith.runtime.launch_counter import count_launches
from flashsmith_demos.recall import (
    Recall,
    check_dependencies,
    lines_of,
    new_model,
    pytorchs_attention,
)

SIZES = Recall(8, 16, 32, layers=2, heads=2, heads_k=1, d=32, rate=4e-3, steps=800)
WEIGHTS = Path(__file__).with_name("recall.npz")
PAGE = 16
# How many pairs each sequence has. The numbers differ, so that the caches have different lengths.
PAIRS = (8, 5, 3, 7)
ANSWERS = 8
LEAST_ACCURACY = 0.9


@dataclass(frozen=True)
class GenerationReport:
    """What the demo has found: for each sequence the prompt, the questions, the answers of both
    runs, and the right answers."""

    device: str
    backend: str  # "gpu" or "emulator"
    parameters: int
    page: int
    pages: int
    launches: int
    prompts: tuple[tuple[int, ...], ...]
    questions: tuple[tuple[int, ...], ...]
    right: tuple[tuple[int, ...], ...]
    pytorch: tuple[tuple[int, ...], ...]
    flashsmith: tuple[tuple[int, ...], ...]

    @property
    def accuracy(self) -> float:
        """The fraction of flashsmith's answers that are right."""
        pairs = [
            one == other
            for ours, right in zip(self.flashsmith, self.right, strict=True)
            for one, other in zip(ours, right, strict=True)
        ]
        return sum(pairs) / len(pairs)

    @property
    def least_launches(self) -> int:
        """How many launches there must be at least: for each prompt and each later step, two
        kernels per layer, which append and compute attention."""
        return 2 * SIZES.layers * (len(self.prompts) + len(self.right[0]) - 1)

    @property
    def ok(self) -> bool:
        """Whether flashsmith's kernels were launched, both runs generated the same tokens, and
        enough answers are right."""
        return (
            self.flashsmith == self.pytorch
            and self.launches >= self.least_launches
            and self.accuracy >= LEAST_ACCURACY
        )

    def to_json(self) -> dict[str, Any]:
        """The results as a JSON object."""
        return {**asdict(self), "accuracy": self.accuracy, "ok": self.ok}


def generate_twice(
    *, answers: int = ANSWERS, emulate: bool = False, progress: Progress | None = None
) -> GenerationReport:
    """Generates the answers twice, and reports both.

    With PyTorch's attention, all tokens are computed again in each step. With
    attention_with_cache(), the keys and values of earlier tokens come from a paged cache. It runs
    on the first GPU. Without a GPU, or with ``emulate``, it runs in the emulator on the host.
    Attention is computed in bf16, and everything else in float32. Kernels are built first;
    ``progress`` is called with each event of the build.

    Raises:
        DependencyError: PyTorch is missing.
    """
    check_dependencies()
    import torch

    on_gpu = gpu_count() > 0 and not emulate
    device = "cuda:0" if on_gpu else "cpu"
    spec = query_gpu(0) if on_gpu else device_spec(DEFAULT_EMULATED_ARCH)
    causal = Semantics("causal", uneven=True)
    problem = Problem(
        len(PAIRS), 2, 4 * SIZES.pairs, SIZES.heads, SIZES.heads_k, SIZES.d, DType.BF16, causal,
        "decode", PAGE,
    )  # fmt: skip
    build_for(problem, device=spec, progress=progress)
    prompts, questions, right = _tasks(answers)
    with torch.no_grad():
        expected = [
            _answer_all(prompt, asked, device)
            for prompt, asked in zip(prompts, questions, strict=True)
        ]
        cache = _PagedCache([len(prompt) + 2 * answers for prompt in prompts], device, not on_gpu)
        with count_launches() as launches:
            found = _answer_from(cache, prompts, questions, device)
    parameters = sum(weight.numel() for weight in _load(pytorchs_attention, device).parameters())
    return GenerationReport(
        device=torch.cuda.get_device_name(device) if on_gpu else "the host",
        backend="gpu" if on_gpu else "emulator",
        parameters=parameters,
        page=PAGE,
        pages=cache.pages,
        launches=launches.total,
        prompts=tuple(map(tuple, prompts)),
        questions=tuple(map(tuple, questions)),
        right=tuple(map(tuple, right)),
        pytorch=tuple(map(tuple, expected)),
        flashsmith=tuple(map(tuple, found)),
    )


def _tasks(answers: int) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Prompts, questions and right answers, the same at every call."""
    import torch

    random = torch.Generator().manual_seed(7)
    prompts, questions, right = [], [], []
    for pairs in PAIRS:
        tokens, _ = lines_of(replace(SIZES, batch=1, pairs=pairs), random)
        prompt = tokens[0, : 2 * pairs].tolist()
        values = dict(zip(prompt[::2], prompt[1::2], strict=True))
        keys = list(values)
        asked = [keys[i % len(keys)] for i in range(answers)]
        prompts.append(prompt)
        questions.append(asked)
        right.append([values[key] for key in asked])
    return prompts, questions, right


def _load(attention: Callable[..., Any], device: str) -> Any:
    import numpy as np
    import torch

    model = new_model(SIZES, attention)
    with np.load(WEIGHTS) as weights:
        model.load_state_dict({name: torch.from_numpy(weights[name]).float() for name in weights})
    return model.to(device).eval()


def _answer_all(prompt: list[int], questions: list[int], device: str) -> list[int]:
    """Answers by PyTorch's attention over all tokens, computed again for each answer."""
    import torch

    model, tokens, found = _load(pytorchs_attention, device), list(prompt), []
    for question in questions:
        tokens.append(question)
        logits = model(torch.tensor([tokens], device=device))[0, -1]
        found.append(int(logits.argmax()))
        tokens.append(found[-1])
    return found


def _answer_from(
    cache: _PagedCache, prompts: list[list[int]], questions: list[list[int]], device: str
) -> list[list[int]]:
    """Answers from the cache.

    Prompts are processed one by one. After that, the last answer and the next question of all
    sequences are processed together.
    """
    import torch

    model = _load(cache.attention, device)

    def step(rows: slice, tokens: list[list[int]], known: int) -> list[int]:
        """The next token of each of these sequences.

        The first ``known`` of ``tokens`` are in the cache.
        """
        cache.begin(rows, known)
        logits = model(torch.tensor(tokens, device=device))[:, -1]
        cache.end(len(tokens[0]) - known)
        answers: list[int] = logits.argmax(-1).tolist()
        return answers

    found = [
        step(slice(i, i + 1), [[*prompt, asked[0]]], 0)
        for i, (prompt, asked) in enumerate(zip(prompts, questions, strict=True))
    ]
    every = slice(0, len(prompts))
    for at in range(1, len(questions[0])):
        # The input for a token includes the token before it, so the question is passed again.
        tokens = [
            [asked[at - 1], answers[-1], asked[at]]
            for asked, answers in zip(questions, found, strict=True)
        ]
        for answers, answer in zip(found, step(every, tokens, 1), strict=True):
            answers.append(answer)
    return found


class _PagedCache:
    """The keys and values of all layers, in pages of random order.

    Its attention() appends to them.
    """

    def __init__(self, lengths: list[int], device: str, emulate: bool) -> None:
        import torch

        used = [-(-length // PAGE) for length in lengths]
        self.pages, self._emulate = sum(used), emulate
        free = torch.randperm(self.pages, generator=torch.Generator().manual_seed(3)).tolist()
        table = torch.full((len(lengths), max(used)), -1, dtype=torch.int32)
        for row, count in enumerate(used):
            table[row, :count] = torch.tensor([free.pop() for _ in range(count)])
        self._table, self._lens = (
            it.to(device) for it in (table, torch.zeros(len(lengths), dtype=torch.int32))
        )
        shape = SIZES.layers, 2, self.pages, PAGE, SIZES.heads_k, SIZES.d
        self._caches = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self._rows, self._known, self._layer = slice(0), 0, 0

    def begin(self, rows: slice, known: int) -> None:
        """Prepares a pass over tokens of these sequences, of which the first ``known`` are in the
        cache."""
        self._rows, self._known, self._layer = rows, known, 0

    def end(self, appended: int) -> None:
        """Adds to the lengths the tokens that all layers have appended."""
        self._lens[self._rows] += appended

    def attention(self, q: Any, k: Any, v: Any) -> Any:
        """The attention of the next layer.

        The rows of the output for cached tokens are 0; nothing reads them.
        """
        import torch

        import flashsmith

        new = slice(self._known, None)
        k_cache, v_cache = self._caches[self._layer]
        self._layer += 1
        o = flashsmith.attention_with_cache(
            *(q[:, new], k_cache, v_cache),
            cache_lens=self._lens[self._rows],
            page_table=self._table[self._rows],
            k=k[:, new],
            v=v[:, new],
            emulate=self._emulate,
        )
        return torch.nn.functional.pad(o, (0, 0, 0, 0, self._known, 0))
