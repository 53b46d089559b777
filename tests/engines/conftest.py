"""Tests with serving engines. `.ci/run` installs an engine and runs them; without it they are left
out, since they test how it calls us."""

from __future__ import annotations

import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE))
sys.path += [str(_HERE.parent / "runtime"), str(_HERE.parents[1] / "tools" / "gpu")]

collect_ignore_glob = [f"*{engine}*" for engine in ("vllm", "sglang") if find_spec(engine) is None]
if find_spec("vllm") is not None and Version(version("vllm")) < Version("0.32"):
    # Earlier releases take no new names of backends.
    collect_ignore_glob.append("*vllm_latent*")

if find_spec("sglang") is not None:
    import torch

    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        # SGLang imports torchvision, whose wheels need a torch for GPUs. With these names known,
        # what SGLang needs of it imports beside a torch for CPUs, too.
        names = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            names.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
