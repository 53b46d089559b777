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
from typer.testing import CliRunner

import flashsmith
from flashsmith.cli import app
from flashsmith.families import Problem, device_spec
from flashsmith.families.device import KNOWN_DEVICES
from flashsmith.runtime import arguments
from flashsmith.tuning.space import KNOWN, check_space, space_keys

README = (ROOT / "README.md").read_text()
LIMITS = (ROOT / "docs" / "limits.md").read_text()
DEPLOYMENT = (ROOT / "docs" / "deployment.md").read_text()
TABLES = ROOT / "src" / "flashsmith" / "chooser" / "tables"


def section(text: str, heading: str) -> str:
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_the_site_has_every_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for path in [*PAGES, *LOGS]:
        page = path.relative_to(ROOT / "docs")
        assert re.search(rf"\b{page}$", navigation, re.MULTILINE), page


def test_the_gpus_are_those_that_are_known() -> None:
    """Every known one is named; as measured those, and only those, that a table ships for."""
    rows = [line.lower() for line in section(LIMITS, "GPUs").splitlines() if line.startswith("|")]
    for device in KNOWN_DEVICES:
        (row,) = [
            row for row in rows if re.search(rf"\b{device.name.lower()}\b", row.split("|")[1])
        ]
        shipped = (TABLES / f"{device.name.lower()}.json").exists()
        assert shipped == bool(re.search(r"\ba (measured table|table measured)\b", row)), row
    assert sorted(path.stem for path in TABLES.glob("*.json")) == ["h100", "h200"]
    assert "driver 580" in LIMITS
    assert "driver 580" in README


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
    assert not re.search(r"\| [\d,]+ \|", section(DEPLOYMENT, "Extras"))


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


def test_the_page_on_tuning_and_the_help_name_every_space() -> None:
    table = section((ROOT / "docs" / "tuning.md").read_text(), "The space")
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    on_page = {key.strip("'") for row in rows[1:] for key in re.findall(r"`([^`]+)`", row)}
    keys = {*space_keys(), KNOWN}
    assert keys <= on_page
    for key in on_page:
        check_space(key)
    shown = CliRunner().invoke(app, ["tune", "--help"], env={"COLUMNS": "400"})
    assert shown.exit_code == 0
    words = set(re.findall(r"[\w-]+", shown.stdout.split("--space")[1].split("--problems")[0]))
    assert keys <= words


def test_the_page_on_deployment_names_every_extra() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    table = project.split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    extras = re.findall(r"^([\w-]+) = \[", table, re.MULTILINE)
    assert len(extras) > 6
    for extra in extras:
        assert re.search(rf"`(\.\[{extra}\]|{extra})`", DEPLOYMENT), extra


def words_of(path: str) -> str:
    return " ".join((ROOT / path).read_text().split())


def test_the_readmes_speed_is_that_of_the_results() -> None:
    readme, full = words_of("README.md"), words_of("docs/log/results.md")
    results = words_of("docs/results.md")
    assert "| forward | 1.11 | the best of FlashAttention 4, cuDNN and FlashAttention 2 |" in readme
    assert "| forward in bf16 | 1.06 | these and FlashAttention 3 |" in readme
    assert "| gradients (training) | 1.01 | the same |" in readme
    assert "| gradients, 24 problems | 1.01 | the best of FlashAttention 4, cuDNN and" in results
    assert "| decoding, 64 sequences of 8,192 keys | 1.00 | cuDNN |" in readme
    assert "| 64 x 8192 | 487 | 495 | 500 | 485 |" in results
    assert "in 28 problems 1.11 in the mean, at least 1.017" in full
    assert "With FlashAttention 3, in 16 problems in bf16: 1.06" in full
    assert "| decoding, 1 sequence of 1,024 keys | 2.0 | cuDNN |" in readme
    assert "| 1 x 1024 | 3.8 | 4.1 | 8.6 | 7.6 |" in full
    assert "behind FlashAttention 4 in 8 of 24 problems." in readme
    assert "8 behind FlashAttention 4" in full
    assert "d 192 causal 0.91" in full
    assert "up to 8% slower than cuDNN where 32 query heads share one key head" in readme
    assert '47.6 (`split="free"` 38.4) | 51.7 | 50.4 | 44.1' in full


def test_the_results_in_short_are_those_in_full() -> None:
    """The tables that stand in both pages and are not made from rows."""
    short, full = words_of("docs/results.md"), words_of("docs/log/results.md")
    for batch in ("1 x 1024", "1 x 65536", "8 x 8192", "64 x 1024", "128 x 8192", "20 x 4096"):
        (row,) = re.findall(rf"\| {batch} \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \|", short)
        assert row in full
    for figure in (
        "1.097",
        "0.945",
        "1.28 to 1.32",
        "0.99999988",
        "7,871",
        "2,238",
        "1,466",
        "1.152",
    ):
        assert figure in short
        assert figure in full


def test_the_readme_is_short_and_plain() -> None:
    """At most 900 words, and no sentence with more than two figures."""
    assert len(README.split()) <= 900
    text = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    # A name such as H200, FlashAttention 4 or d 128 is no figure.
    names = (
        r"\b(FlashAttention|FA|Gemma|Phi|DeepSeek|Diffusion|d|driver|Apache-|V) ?\d[\d.]*( to \d)?"
    )
    text = re.sub(names, "", text)
    for sentence in re.split(r"(?<=[.!?:])\s|\n\n|\n- |\|", text):
        assert len(re.findall(r"(?<![\w.])\d[\d.,]*", sentence)) <= 2, sentence


def test_the_readmes_models_are_served() -> None:
    page = (ROOT / "docs" / "log" / "architectures.md").read_text()
    served = re.split(r",\s+", page.partition("**Served**: ")[2].partition("\n\n")[0])
    expected = {
        "Llama": ["llama"],
        "Qwen": ["qwen2", "qwen3"],
        "Mistral": ["mistral"],
        "Gemma 1 to 3": ["gemma", "gemma2", "gemma3"],
        "Phi 3": ["phi3"],
        "gpt-oss": ["gpt_oss"],
        "DeepSeek V2 and V3": ["deepseek_v2", "deepseek_v3"],
        "BERT": ["bert"],
        "ViT": ["vit"],
        "CLIP": ["clip"],
        "Whisper": ["whisper"],
    }
    rows = [line for line in README.splitlines() if line.startswith(("| Llama", "| BERT"))]
    cells = [re.split(r" \| | \(\[", row.removeprefix("| "))[0] for row in rows]
    assert ", ".join(cells).split(", ") == [*expected]
    assert {name for names in expected.values() for name in names} <= set(served)


def test_the_picture_of_the_speed_is_made_from_the_rows(
    load_tool: Callable[[str], ModuleType],
) -> None:
    drawn = load_tool("docs/speed_picture.py").picture()
    committed = (ROOT / "docs" / "speed.svg").read_text(encoding="utf-8")
    assert drawn == committed, "run: python tools/docs/speed_picture.py"


def test_the_tables_of_the_results_are_made_from_the_committed_rows(
    load_tool: Callable[[str], ModuleType],
) -> None:
    """`python tools/docs/results_tables.py` writes them; here they are compared."""
    tool = load_tool("docs/results_tables.py")
    short, page = (page.read_text(encoding="utf-8") for page in tool.PAGES)
    assert tool.filled(short) == short
    assert tool.filled(page) == page
    assert set(re.findall(r"<!-- table: ([\w-]+) -->", short + page)) == set(tool.TABLES)
    assert page.count("| 551 | 277 |") == 1
    assert tool.filled(page.replace("| 551 | 277 |", "| 552 | 277 |")) == page


@pytest.mark.parametrize("path", RUNNABLE, ids=name_of)
def test_a_page_that_names_the_implementation_says_how_it_is_registered(path: Path) -> None:
    """transformers knows no "flashsmith" before."""
    text = path.read_text(encoding="utf-8")
    if 'attn_implementation="flashsmith"' in text:
        assert "flashsmith.integrations.transformers.register(" in text
