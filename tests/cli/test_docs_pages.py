"""README and the pages for newcomers say what the code does: GPUs, limits, arguments, extras."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from documents import LOGS, PAGES, ROOT, RUNNABLE, name_of

import flashsmith
from flashsmith.families import Problem, device_spec
from flashsmith.families.device import KNOWN_DEVICES
from flashsmith.runtime import arguments

README = (ROOT / "README.md").read_text()
LIMITS = (ROOT / "docs" / "limits.md").read_text()
TABLES = ROOT / "src" / "flashsmith" / "chooser" / "tables"


def section(text: str, heading: str) -> str:
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_the_site_has_every_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for path in [*PAGES, *LOGS]:
        page = path.relative_to(ROOT / "docs")
        assert re.search(rf"\b{page}$", navigation, re.MULTILINE), page


@pytest.mark.parametrize(
    ("text", "heading"),
    [(LIMITS, "GPUs"), (README, "GPUs, drivers, extras")],
    ids=["limits", "readme"],
)
def test_the_gpus_are_those_that_are_known(text: str, heading: str) -> None:
    """Every known one is named; as measured those, and only those, that a table ships for."""
    rows = [line.lower() for line in section(text, heading).splitlines() if line.startswith("|")]
    for device in KNOWN_DEVICES:
        (row,) = [
            row for row in rows if re.search(rf"\b{device.name.lower()}\b", row.split("|")[1])
        ]
        shipped = (TABLES / f"{device.name.lower()}.json").exists()
        assert shipped == bool(re.search(r"\ba (measured table|table measured)\b", row)), row
    assert sorted(path.stem for path in TABLES.glob("*.json")) == ["h100", "h200"]
    assert "driver 580" in text


@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda device: device.name)
def test_kernels_are_chosen_from_the_evidence_that_the_pages_name(device) -> None:
    choice = flashsmith.choose(Problem.parse("b16 s4096 h16 d128 fp16"), device_spec(device.name))
    if device.name in ("H100", "H200"):
        assert choice.evidence == "table"
    elif device.arch == 90:
        assert choice.evidence in ("nearest", "related")
    else:
        assert choice.evidence == "cost model"
        assert choice.config.FAMILY == "mma_sync"


def test_gradients_are_chosen_from_the_tables_that_their_page_names() -> None:
    page = " ".join((ROOT / "docs" / "backward.md").read_text().split())
    for listed, gpu in re.findall(r"d ([\d, and]+) on an (H\d+)", page):
        table = json.loads((TABLES / f"{gpu.lower()}.json").read_text())
        held = {e["d_head"] for e in table["entries"] if "backward" in e["semantics"].split("+")}
        assert {int(d) for d in re.findall(r"\d+", listed)} == held, gpu
    assert len(re.findall(r"d ([\d, and]+) on an (H\d+)", page)) == 2


def test_no_page_has_sizes_that_change_with_every_release() -> None:
    """What a command measures in a second is measured by it, not written down."""
    table = section(README, "GPUs, drivers, extras")
    assert not re.search(r"\| [\d,]+ \|", table)


def test_the_limits_are_those_of_the_code() -> None:
    sizes = section(LIMITS, "Sizes")
    assert arguments.LONGEST == 2**30 - 1
    assert "2^30 - 1" in sizes
    assert arguments.MOST_BLOCKS == 2**31 - 1
    assert "2^31 - 1" in sizes
    assert "multiples of 8;" in sizes
    assert arguments.D_STEP == 8


def test_every_argument_of_flash_attn_is_on_its_page() -> None:
    page = (ROOT / "docs" / "coming-from-flash-attn.md").read_text()
    for function in (flashsmith.flash_attn_func, flashsmith.flash_attn_varlen_func):
        for name in inspect.signature(function).parameters:
            assert name in ("q", "k", "v") or re.search(rf"`{name}\b", page), name


def test_the_readme_names_every_extra() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    table = project.split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    extras = re.findall(r"^(\w+) = \[", table, re.MULTILINE)
    assert len(extras) > 6
    for extra in extras:
        assert re.search(rf"`(\.\[{extra}\]|{extra})`", README), extra


def test_the_readmes_speed_is_that_of_the_results() -> None:
    """One line of speed, with its conditions; the rows behind the chart are kept."""
    readme = " ".join(README.split())
    results = " ".join((ROOT / "docs" / "results.md").read_text().split())
    assert "1.11 times the best of FlashAttention 4, cuDNN and FlashAttention 2" in readme
    assert "1.06 times the best of the four" in readme
    assert "measured on 2026-11-28" in readme
    assert "in 28 problems 1.11 in the mean, at least 1.017" in results
    assert "in 16 problems in bf16: 1.06, at least 1.008" in results
    assert "1.18 times cuDNN and 1.01 times FlashAttention 4" in readme
    assert "over the best in 24 problems 1.01" in results
    assert "best of FA3, FA4 and cuDNN: geometric mean 1.06" in results
    assert "Measured on 2026-11-22" in results
    assert "the bar (mean" not in results


def test_the_tables_of_the_results_are_made_from_the_committed_rows(
    load_tool: Callable[[str], ModuleType],
) -> None:
    """`python tools/docs/results_tables.py` writes them; here they are compared."""
    tool = load_tool("docs/results_tables.py")
    page = tool.PAGE.read_text(encoding="utf-8")
    assert tool.filled(page) == page
    assert set(re.findall(r"<!-- table: ([\w-]+) -->", page)) == set(tool.TABLES)
    assert page.count("| 551 | 277 |") == 1
    assert tool.filled(page.replace("| 551 | 277 |", "| 552 | 277 |")) == page


@pytest.mark.parametrize("path", RUNNABLE, ids=name_of)
def test_a_page_that_names_the_implementation_says_how_it_is_registered(path: Path) -> None:
    """transformers knows no "flashsmith" before."""
    text = path.read_text(encoding="utf-8")
    if 'attn_implementation="flashsmith"' in text:
        assert "flashsmith.integrations.transformers.register(" in text
