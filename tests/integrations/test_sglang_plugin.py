"""SGLang's plugin, where SGLang is missing, too old, too new, or fails."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from flashsmith.integrations import sglang
from flashsmith.integrations.sglang import releases


def test_the_entry_point_is_there() -> None:
    (found,) = (it for it in entry_points(group="sglang.srt.plugins") if it.name == "flashsmith")
    assert found.load() is sglang.register


@pytest.mark.parametrize(
    "release", ["0.5.16", "0.5.23.post1", "0.5.20rc2", "0.5.19+cu130", "0.0.0.dev1+g12", "dev"]
)
def test_supported_releases(release: str) -> None:
    assert releases.unsupported(release) == ""


@pytest.mark.parametrize("release", ["0.5.15", "0.5.24", "0.6.0", "1.0.0"])
def test_other_releases_are_one_clear_line(
    release: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(releases, "version", lambda _: release)
    with caplog.at_level(logging.WARNING, "flashsmith"):
        sglang.register()
    (record,) = caplog.records
    wanted = f"sglang {release} is installed and 0.5.16 to 0.5.23 are supported"
    assert wanted in record.getMessage()


def test_a_failure_does_not_stop_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> str:
        raise ImportError("no registry")

    monkeypatch.setattr(releases, "register_backend", fail)
    with caplog.at_level(logging.WARNING, "flashsmith"):
        sglang.register()
    assert "ImportError: no registry" in caplog.text


def test_importing_the_plugin_is_light() -> None:
    """The engine imports it in every process."""
    code = (
        "import sys; from flashsmith.integrations.sglang import register; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'sglang', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
