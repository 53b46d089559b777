"""Run by test_hub_folder.py in a process of its own: the package kernels loads a folder of the hub
offline, where flashsmith and what only it requires are not installed.

    hub_calls.py FOLDER                 calls of all three functions, in the emulator
    hub_calls.py FOLDER generate        a model of transformers generates with the folder's kernels
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
NAME = "flashsmith/flash-attention"
os.environ |= {"HF_HUB_OFFLINE": "1", "LOCAL_KERNELS": f"{NAME}={FOLDER}"}
# None is what makes an import fail.
ABSENT = ("flashsmith", "flashsmith_kernels", "ptxlab", "ml_dtypes", "platformdirs", "msgspec")
sys.modules.update(dict.fromkeys((*ABSENT, "cuda")))  # type: ignore[arg-type]


def forbid(event: str, arguments: tuple[object, ...]) -> None:
    """Ends the process at a connection or a compiler."""
    if event == "socket.connect" or (event == "subprocess.Popen" and "nvcc" in str(arguments)):
        print("forbidden:", event, arguments, flush=True)
        os._exit(3)


sys.addaudithook(forbid)

import torch  # noqa: E402

# kernels compares it with the folder's variants: a PyTorch for GPUs, whose CUDA is 13.
torch.version.cuda = "13.0"

import kernels  # noqa: E402


def exact(q: Any, k: Any, v: Any, *, causal: bool, sinks: Any = None) -> Any:
    """Attention in float64, aligned to the bottom right."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    if causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.double().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), 3)
    p = scores.softmax(3)[..., : k.shape[2]]
    return (p @ v).transpose(1, 2)


def check(got: Any, expected: Any) -> None:
    error = float((got.detach().double() - expected.detach()).abs().max())
    assert error < 4e-3, error


def calls() -> None:
    kernel = kernels.get_local_kernel(FOLDER)
    assert kernel is kernels.get_kernel(NAME, version=1)
    (loaded,) = kernels.get_loaded_kernels()
    assert loaded.metadata.id == kernel.__name__ != "flashsmith"
    random = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, generator=random).half()

    q, k, v = draw(2, 13, 2, 64), draw(2, 13, 1, 64), draw(2, 13, 1, 64)
    do = draw(2, 13, 2, 64)
    q.requires_grad_()
    sinks = torch.tensor([0.5, -1.0])
    o = kernel.flash_attn_func(q, k, v, causal=True)
    expected = exact(q, k, v, causal=True)
    check(o, expected)
    (dq,) = torch.autograd.grad(o, q, do)
    check(dq, torch.autograd.grad(expected, q, do.double())[0])
    with torch.no_grad():
        o = kernel.flash_attn_func(q, k, v, causal=True, s_aux=sinks)
        check(o, exact(q, k, v, causal=True, sinks=sinks))
        starts = torch.tensor([0, 13, 26], dtype=torch.int32)
        o = kernel.flash_attn_varlen_func(
            *(x.reshape(26, *x.shape[2:]) for x in (q, k, v)), starts, starts, 13, 13, causal=True
        )
        check(o.reshape(q.shape), exact(q, k, v, causal=True))
        o = kernel.flash_attn_with_kvcache(q[:, -1:], k, v, cache_seqlens=13, causal=True)
        check(o, exact(q[:, -1:], k, v, causal=True))
    refusal = None
    try:
        kernel.flash_attn_func(q.bfloat16(), k.bfloat16(), v.bfloat16(), causal=True)
    except kernel.errors.KernelNotBuiltError as error:  # this folder has no kernel of bf16
        refusal = str(error)
    assert refusal is not None
    assert "never compiled" in refusal, refusal
    schemas = torch._C._jit_get_schemas_for_operator
    assert schemas(f"{kernel.__name__}::attention")
    assert not schemas("flashsmith::attention")  # an installed flashsmith's


def generate() -> None:
    import transformers.utils.import_utils as known

    if not known.is_kernels_available():
        # Each release of transformers names the releases of kernels that it takes. The newest
        # one's may not be on the index yet.
        known.is_kernels_available.__wrapped__.__defaults__ = ("0.17", "1")
        known.is_kernels_available.cache_clear()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=128, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(1, 97, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    runs = {}
    for name, dtype in (("sdpa", torch.float64), (NAME, torch.float16)):
        model.to(dtype).set_attn_implementation(name)
        assert model.config._attn_implementation == name
        runs[name] = [
            model.generate(
                ids, attention_mask=it, max_new_tokens=5, do_sample=False,
                output_logits=True, return_dict_in_generate=True,
            )
            for it in (torch.ones_like(ids), mask)
        ]  # fmt: skip
    for exact_run, run in zip(runs["sdpa"], runs[NAME], strict=True):
        assert run.sequences.tolist() == exact_run.sequences.tolist()
        pairs = zip(run.logits, exact_run.logits, strict=True)
        error = max(float((a.double() - b).abs().max()) for a, b in pairs)
        assert error < 0.01, error
    (loaded,) = kernels.get_loaded_kernels()
    count = sys.modules[f"{loaded.module.__name__}.runtime"].count_launches
    with count() as launches, torch.no_grad():
        model(ids)
    assert launches.emulator == config.num_hidden_layers, launches


generate() if sys.argv[2:] == ["generate"] else calls()
assert not [name for name in ABSENT if sys.modules[name] is not None]
print("ok")
