"""The package as an index shows it, and the source distribution, which builds and tests itself."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from built_wheel import install_wheel
from documents import README, ROOT

import flashsmith

SITE = "https://flashsmith.example/docs"
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture
def links(load_tool: Callable[[str], ModuleType]) -> ModuleType:
    return load_tool("docs/links.py")


def test_on_an_index_all_links_are_absolute(links: ModuleType) -> None:
    text = README.read_text(encoding="utf-8")
    shown = links.for_index(text, "README.md", SITE)
    targets = LINK.findall(shown)
    assert len(targets) == len(LINK.findall(text)) > 30
    assert all(target.startswith(f"{SITE}/") for target in targets)
    assert f"]({SITE}/attention/)" in shown
    assert f"]({SITE}/speed.svg)" in shown
    assert f"]({SITE}/changelog/)" in shown
    assert f"]({SITE}/files/examples/attention_numpy.py)" in shown


def test_without_a_site_there_are_no_links(links: ModuleType) -> None:
    shown = links.for_index(README.read_text(encoding="utf-8"), "README.md", "")
    assert not LINK.findall(shown)
    assert "all results" in shown
    assert "```bash\npip install '.[compiler]'\nflashsmith run\n```" in shown


@pytest.mark.parametrize(
    ("document", "text", "site", "index"),
    [
        ("README.md", "[a](docs/x.md#y)", "[a](x.md#y)", "[a](S/x/#y)"),
        ("README.md", "![a](docs/x.svg)", "![a](x.svg)", "![a](S/x.svg)"),
        ("README.md", "[a](#here)", "[a](#here)", "a"),
        ("README.md", "[a](https://b.c/d)", "[a](https://b.c/d)", "[a](https://b.c/d)"),
        ("docs/x.md", "[a](../CHANGELOG.md)", "[a](changelog.md)", "[a](S/changelog/)"),
        ("docs/x.md", "[a](../README.md)", "[a](index.md)", "[a](S/)"),
        ("docs/x.md", "[a](log/y.md)", "[a](log/y.md)", "[a](S/log/y/)"),
        ("docs/log/x.md", "[a](../y.md)", "[a](../y.md)", "[a](S/y/)"),
        ("docs/log/x.md", "[a](../../b/c.csv)", "[a](../files/b/c.csv)", "[a](S/files/b/c.csv)"),
        ("docs/x.md", "```\n[a](../b)\n```", "```\n[a](../b)\n```", "```\n[a](../b)\n```"),
    ],
)
def test_links_are_rewritten(
    links: ModuleType, document: str, text: str, site: str, index: str
) -> None:
    assert links.for_site(text, document)[0] == site
    assert links.for_index(text, document, "S/") == index


def test_where_it_is_published_is_one_setting(
    links: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'site = "' in text
    monkeypatch.setattr(links, "ROOT", tmp_path)
    changed = re.sub(r'^site = ".*"', f'site = "{SITE}/"', text, flags=re.MULTILINE)
    (tmp_path / "pyproject.toml").write_text(changed)
    assert links.published("site") == SITE
    (tmp_path / "pyproject.toml").write_text(text.replace("\nsite = ", "\nplace = "))
    with pytest.raises(LookupError, match="has no site"):
        links.published("site")


def check_addresses(links: ModuleType) -> None:
    """Fails a release (RELEASE=1) without addresses: its page on an index would have no links."""
    if os.environ.get("RELEASE") == "1":
        for name in ("site", "repository"):
            assert links.published(name).startswith("https://"), f"pyproject.toml: {name} is unset"


def test_a_release_says_where_it_is_published(links: ModuleType) -> None:
    check_addresses(links)


def test_a_release_without_addresses_is_refused(
    links: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELEASE", "1")
    monkeypatch.setattr(links, "ROOT", tmp_path)
    place = tmp_path / "pyproject.toml"
    place.write_text(f'[tool.flashsmith]\nsite = "{SITE}"\nrepository = ""\n')
    with pytest.raises(AssertionError, match="repository is unset"):
        check_addresses(links)
    place.write_text(f'[tool.flashsmith]\nsite = "{SITE}"\nrepository = "{SITE}"\n')
    check_addresses(links)


def test_every_document_has_the_version() -> None:
    version = flashsmith.__version__
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text()
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_metadata_has_no_placeholders() -> None:
    text = "".join(
        (ROOT / name).read_text() for name in ("pyproject.toml", "CITATION.cff", "NOTICE")
    )
    assert not re.search(r"(?i)todo|fixme|your[ -]name|example\.(com|org)|username", text)


# Tests that build no kernels: of the documents, the interface and the package's structure.
QUICK = (
    "tests/cli/test_docs_pages.py",
    "tests/test_architecture.py",
    "tests/test_env.py",
    "tests/test_public_api.py",
)
HELD = ("NOTICE", "CITATION.cff", "mkdocs.yml", ".ci/run", "src/flashsmith_demos/recall.npz")


@pytest.mark.full
def test_a_source_distribution_builds_and_tests_itself(tmp_path: Path) -> None:
    """The wheel is built from it, and its tests run in the unpacked folder with that wheel."""
    build = [sys.executable, "-m", "build", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=600)
    (source,) = tmp_path.glob("*.tar.gz")
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"flashsmith-{flashsmith.__version__}-py3-none-linux_x86_64.whl"
    with tarfile.open(source) as packed:
        packed.extractall(tmp_path, filter="data")
    unpacked = tmp_path / source.name.removesuffix(".tar.gz")
    assert [name for name in HELD if not (unpacked / name).is_file()] == []
    python = install_wheel(wheel, tmp_path / "venv") / "python"
    tests = [str(python), "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *QUICK]
    done = subprocess.run(tests, cwd=unpacked, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_a_bill_of_materials_names_every_file_and_what_it_needs(
    load_tool: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    tool = load_tool("ci/bill_of_materials.py")
    name = "flashsmith_kernels_sm80-1.0-py3-none-manylinux_2_28_x86_64.whl"
    metadata = (
        "Metadata-Version: 2.4\nName: flashsmith-kernels-sm80\nVersion: 1.0\n"
        "License-Expression: Apache-2.0\nRequires-Dist: flashsmith==1.0\n"
        "Requires-Dist: rich; extra == 'cli'\n"
    )
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("flashsmith_kernels_sm80-1.0.dist-info/METADATA", metadata)
        facts = json.dumps({"nvcc_version": "13.0.88", "gxx_version": "12.2.0"})
        archive.writestr("flashsmith_kernels/sm80/k/manifest.json", f"{{}}\n{facts}\n")
    bill = tool.bill(tmp_path)
    wheel, needed = bill["components"]
    digest = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    assert wheel["hashes"] == [{"alg": "SHA-256", "content": digest}]
    made_by = {part["name"]: part["version"] for part in wheel["components"]}
    assert made_by == {"nvcc": "13.0.88", "g++": "12.2.0"} | {
        "nvidia-cuda-runtime": made_by["nvidia-cuda-runtime"]
    }
    assert (needed["name"], needed["version"]) == ("flashsmith", "==1.0")
    assert bill["dependencies"] == [{"ref": name, "dependsOn": ["flashsmith==1.0"]}]


def test_a_bill_of_materials_names_a_folder_of_the_hub(
    load_tool: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    tool = load_tool("ci/bill_of_materials.py")
    variant = tmp_path / "build" / "tvm-ffi01-cu130-x86_64-linux"
    facts = {"nvcc_version": "13.0.88", "gxx_version": "12.2.0"}
    for name, text in (
        ("metadata.json", json.dumps({"name": "flashsmith", "license": "Apache-2.0"})),
        (
            "kernels/sm90/kernels.json",
            f"{{}}\n{json.dumps({'version': '1.0', 'tvm_ffi': '0.1'})}\n",
        ),
        ("kernels/sm90/k/manifest.json", f"{{}}\n{json.dumps(facts)}\n"),
    ):
        (variant / name).parent.mkdir(parents=True, exist_ok=True)
        (variant / name).write_text(text)
    with tarfile.open(tmp_path / "hub-sm_90.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "build", "build")
    (hub, *needed) = tool.bill(tmp_path)["components"]
    assert hub["purl"] == "pkg:generic/flashsmith-hub-sm_90@1.0?file_name=hub-sm_90.tar.gz"
    assert [part["name"] for part in hub["components"]] == ["nvidia-cuda-runtime", "g++", "nvcc"]
    assert [(one["name"], one["version"]) for one in needed] == [
        ("apache-tvm-ffi", "==0.1.*"),
        ("numpy", ""),
    ]


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_trial_of_a_release_builds_everything(tmp_path: Path) -> None:
    """With the kernels that merge parts alone; everything else is as in a release."""
    environment = {**os.environ, "RELEASE_ONLY": "bf16 d128 merge"}
    for name in ("KERNELS", "FLASHSMITH_CACHE_DIR", "PYTHONPATH"):
        environment.pop(name, None)
    subprocess.run(
        [str(ROOT / ".ci" / "release"), str(tmp_path), "sm_80"], check=True, env=environment
    )
    version = flashsmith.__version__
    kernels = f"flashsmith_kernels_sm80-{version}-py3-none-manylinux_2_28"
    expected = {
        *(f"flashsmith-{version}-py3-none-linux_{cpu}.whl" for cpu in ("x86_64", "aarch64")),
        *(f"{kernels}_{cpu}.whl" for cpu in ("x86_64", "aarch64")),
        *(f"flashsmith-{version}.tar.gz", "site.tar.gz", "sbom.cdx.json", "SHA256SUMS"),
        "hub-sm_80.tar.gz",
    }
    assert {path.name for path in tmp_path.iterdir()} == expected
    for line in (tmp_path / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest
    bill = json.loads((tmp_path / "sbom.cdx.json").read_text())
    named = {component["bom-ref"] for component in bill["components"]}
    assert {name for name in expected if name.startswith(("flashsmith", "hub"))} <= named
    with tarfile.open(tmp_path / "hub-sm_80.tar.gz") as packed:
        roots = {name.split("/")[1] for name in packed.getnames() if "/" in name}
    assert roots == {f"tvm-ffi01-cu130-{cpu}-linux" for cpu in ("x86_64", "aarch64")}
