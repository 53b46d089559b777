"""A user's own sets: text files, and entry points of installed packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from config_samples import LADDER_TOP

from flashsmith.errors import ConfigParseError, SelectionError
from flashsmith.families import get_cover_configs, get_kernel_configs

OTHER = "(BF16, 64, 128, 32, 8): load_0_0_0_tiles"


def test_a_file_selects_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(f"# my kernels\n\n{OTHER}  # the plain one\n  {LADDER_TOP}\n{OTHER}\n")
    assert [str(cfg) for cfg in get_kernel_configs(str(path))] == [OTHER, str(LADDER_TOP)]


def test_a_file_may_have_parentheses_in_its_name(tmp_path: Path) -> None:
    path = tmp_path / "k (1).txt"
    path.write_text(f"{OTHER}\n")
    assert [str(cfg) for cfg in get_kernel_configs(str(path))] == [OTHER]


def test_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(f"{OTHER}\n\n(FP16, 128, 64, 64, 4): swizled+load_0_0_0_tiles\n")
    with pytest.raises(
        ConfigParseError,
        match=r"mine\.txt, line 3: .*unknown feature 'swizled'; did you mean 'swizzled'",
    ):
        get_kernel_configs(str(path))


def test_an_empty_file_selects_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("# nothing yet\n")
    with pytest.raises(SelectionError, match="selects no config"):
        get_kernel_configs(str(path))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.bin"
    path.write_bytes(b"\xff\xfe\x00kernels")
    with pytest.raises(SelectionError, match=r"mine\.bin', line 1 cannot be read: it is not UTF-8"):
        get_kernel_configs(str(path))


# --- installed packages --------------------------------------------------------------------------

MODULE = f"""
from flashsmith.families import FlashForwardKernelConfig
def both_kinds():
    yield FlashForwardKernelConfig(15, 64, 128, 32, 8)
    yield {str(LADDER_TOP)!r}
def not_iterable():
    return 7
def wrong_things():
    return [7]
def bad_short_form():
    return ["(FP16, 128): x"]
def fails():
    raise RuntimeError("no luck")
NOT_CALLABLE = []
"""
ENTRY_POINTS = """[flashsmith.kernel_sets]
mine = my_kernels:both_kinds
tune = my_kernels:both_kinds
not_iterable = my_kernels:not_iterable
wrong_things = my_kernels:wrong_things
bad_short_form = my_kernels:bad_short_form
fails = my_kernels:fails
not_callable = my_kernels:NOT_CALLABLE
missing = my_kernels:nothing_here
"""


def install(folder: Path, package: str, entry_points: str) -> None:
    """What pip leaves behind for a package, as far as entry points go."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with an installed package that offers sets."""
    install(tmp_path, "my_kernels", ENTRY_POINTS)
    (tmp_path / "my_kernels.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_kernels", raising=False)
    return tmp_path


def test_an_installed_set_is_chosen_by_name(site: Path) -> None:
    assert [str(cfg) for cfg in get_kernel_configs("mine")] == [OTHER, str(LADDER_TOP)]


def test_a_built_in_set_cannot_be_replaced(site: Path) -> None:
    assert len(get_kernel_configs("tune")) == 80


def test_errors_list_installed_sets_with_their_sizes(site: Path) -> None:
    with pytest.raises(SelectionError) as caught:
        get_kernel_configs("nothing")
    assert "mine (2)" in str(caught.value)
    assert "fails (cannot be loaded)" in str(caught.value)
    assert "tune (80)" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("not_iterable", "TypeError"),
        ("wrong_things", "returned 7: allowed are FlashForwardKernelConfig, FlashBackward"),
        ("bad_short_form", "the tuple has 2 entries"),
        ("fails", "RuntimeError: no luck"),
        ("not_callable", "TypeError"),
        ("missing", "AttributeError"),
    ],
)
def test_a_broken_installed_set_names_itself_and_its_package(
    site: Path, name: str, problem: str
) -> None:
    with pytest.raises(SelectionError, match=rf"kernel set '{name}' \(my_kernels:") as caught:
        get_kernel_configs(name)
    assert problem in str(caught.value)


def test_two_packages_with_one_name_are_an_error(site: Path) -> None:
    install(site, "your_kernels", "[flashsmith.kernel_sets]\nmine = your_kernels:theirs\n")
    with pytest.raises(SelectionError, match=r"my_kernels:both_kinds.*your_kernels:theirs"):
        get_kernel_configs("mine")


def test_a_users_set_works_through_the_environment(site: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from flashsmith.families import *; print(*get_kernel_configs())"],
        env={**os.environ, "KERNELS": "mine", "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"{OTHER} {LADDER_TOP}"
    assert len(get_cover_configs()) > 2
