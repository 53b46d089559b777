#!/usr/bin/env python3
"""Trains the language model of `flashsmith demo generate` on the host, in a few minutes.

    python examples/demos/train_recall.py [--out examples/demos/recall.npz]

The weights are rounded to fp16. On one machine, the same seed gives the same file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from flashsmith_demos.generation import SIZES, WEIGHTS
from flashsmith_demos.recall import pytorchs_attention, train_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    training, model = train_model(SIZES, pytorchs_attention)
    weights = {name: it.half().numpy() for name, it in model.state_dict().items()}
    np.savez_compressed(options.out, **weights)
    print(f"{training.accuracy:.2%} of the last answers are right, loss {training.losses[-1]:.4f}")
    print(f"{options.out}: {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
