"""SGLang finds the backend, takes it by name, and keeps the radix cache in deterministic mode."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from sglang.srt import plugins, server_args
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

from flashsmith.integrations import sglang as plugin

CHOICES = (
    "ATTENTION_BACKEND_CHOICES",
    "DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
    "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND",
)


def parse(folder: Path, *words: str) -> Any:
    """The server's arguments for a tiny model, of which nothing matters here."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    plugins.load_plugins()
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    known = parser.parse_args(["--model-path", str(folder), "--device", "cpu", *words])
    return server_args.ServerArgs.from_cli_args(known)


def test_plugins_register_it_once() -> None:
    plugins._plugins_loaded = False
    plugins.load_plugins()
    plugin.register()
    assert "flashsmith" in ATTENTION_BACKENDS
    for name in CHOICES:
        assert getattr(server_args, name).count("flashsmith") == 1


@pytest.mark.parametrize("phase", ["", "prefill-", "decode-"])
def test_the_server_takes_it_by_name(phase: str, tmp_path: Path) -> None:
    args = parse(tmp_path, f"--{phase}attention-backend", "flashsmith")
    assert getattr(args, f"{phase.replace('-', '_')}attention_backend") == "flashsmith"


@pytest.mark.parametrize(("name", "keeps"), [("flashsmith", True), ("flashinfer", False)])
def test_deterministic_mode_keeps_the_radix_cache(name: str, keeps: bool, tmp_path: Path) -> None:
    args = parse(tmp_path, "--attention-backend", name, "--enable-deterministic-inference")
    if not hasattr(args, "_handle_deterministic_inference"):
        # Releases from 0.5.19 on do not do it when they parse arguments.
        from sglang.srt.arg_groups.attention_hook import handle_deterministic_inference

        handle_deterministic_inference(args)
    settings = resolved_view(args)
    assert settings.attention_backend == name
    assert settings.disable_radix_cache is not keeps
